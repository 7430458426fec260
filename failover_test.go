package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestBecomesReadOnly: a server that does not take writes any more, as after a
// switchover, grants no row lock, also where nothing has failed meanwhile.
func TestBecomesReadOnly(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "lockUnsafe=allow"} {
			db := s.open(params)
			ways := map[string]func(opts ...lockctx.Option) error{
				"BeginTx": func(opts ...lockctx.Option) error {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", opts...), nil)
					if err == nil {
						err = tx.Rollback()
					}
					return err
				},
				"Acquire": func(opts ...lockctx.Option) error {
					h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", opts...)
					if err == nil {
						err = h.Rollback()
					}
					return err
				},
				"session": func(opts ...lockctx.Option) error {
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					defer cancel()
					_, err := read(lockctx.With(ctx, "k", opts...), db, 1)
					return err
				},
				"late": func(opts ...lockctx.Option) error {
					tx, err := db.BeginTx(dbtest.Limited(t), nil)
					dbtest.OK(t, err)
					defer tx.Rollback()
					_, err = tx.ExecContext(lockctx.With(dbtest.Limited(t), "k", opts...), "DO 1")
					return err
				},
			}
			for _, way := range ways {
				dbtest.OK(t, way())
			}
			dbtest.Soon(t, "the key is free", func() bool { return ways["BeginTx"](lockctx.NoWait()) == nil })
			dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 1")
			for name, way := range ways {
				for what, opts := range map[string][]lockctx.Option{
					"exclusive": nil, "no wait": {lockctx.NoWait()}, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)},
				} {
					if err := way(opts...); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
						t.Errorf("%s, %s, %s: %v", params, name, what, err)
					}
				}
			}
			// What has no hint is not touched by it.
			db.SetMaxOpenConns(1)
			tx, err := db.BeginTx(dbtest.Limited(t), &sql.TxOptions{ReadOnly: true})
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
			dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 0")
			for name, way := range ways {
				dbtest.Soon(t, name+" works again", func() bool { return way() == nil })
			}
		}
	})
}

// TestLeaseOutlivesAChange: a lease goes on where the server was found to be another
// one than it was, as after a failover, and so do its commits.
func TestLeaseOutlivesAChange(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		job, err := mysqllock.Acquire(dbtest.Limited(t), db, "job", lockctx.Lease(ttl))
		dbtest.OK(t, err)
		levels := []string{"READ-COMMITTED", "REPEATABLE-READ"}
		for i := range 6 {
			setting := "transaction_isolation"
			if s.MariaDB() {
				setting = "tx_isolation"
			}
			dbtest.Exec(t, s.plain, fmt.Sprintf("SET GLOBAL %s = '%s'", setting, levels[i%2]))
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			dbtest.OK(t, err)
			var id int
			dbtest.OK(t, db.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id))
			wantLost(t, "a hold whose connection was killed", h.Release())
			_, err = db.ExecContext(job.Context(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, err)
		}
		dbtest.OK(t, job.Release())
		s.wantStock(1, 4)
	})
}

// changeable is a handle on a fake server that a test can change.
type changeable struct {
	*fakeServer
	t  *testing.T
	db *sql.DB

	guards  sync.Mutex     // what follows
	probe   []driver.Value // what it says of itself; nil where it does not answer
	noTable bool           // it has no lock table
	refusal error          // of the next row lock
}

// What a fake server says of itself.
var (
	anyPrimary   = []driver.Value{"8.4.0", "shop", "0", "0", "REPEATABLE-READ", "0", "OFF,", int64(0)}
	anySecondary = []driver.Value{"8.4.0", "shop", "0", "1", "REPEATABLE-READ", "0", "OFF,", int64(0)}
	newerPrimary = []driver.Value{"8.4.1", "shop", "0", "0", "REPEATABLE-READ", "0", "OFF,", int64(0)}
	manyPrimary  = []driver.Value{"8.4.0", "shop", "0", "0", "REPEATABLE-READ", "0", "OFF,name,OFF", int64(0)}
)

func newChangeable(t *testing.T) *changeable {
	s := &changeable{t: t, fakeServer: newFake().mysqlAnswers(), probe: anyPrimary}
	answer := s.answer
	s.answer = func(c *fakeConn, text string) (fakeReply, error) {
		s.guards.Lock()
		defer s.guards.Unlock()
		switch {
		case strings.HasPrefix(text, "SELECT VERSION()") && s.probe == nil:
			return fakeReply{}, errFake
		case strings.HasPrefix(text, "SELECT VERSION()"):
			return fakeReply{columns: slices.Repeat([]string{"c"}, len(s.probe)), rows: [][]driver.Value{s.probe}}, nil
		case strings.HasPrefix(text, "SELECT ENGINE") && s.noTable:
			return fakeReply{columns: []string{"c"}}, nil
		case strings.Contains(text, "`mysqllock`") && strings.HasSuffix(text, "FOR UPDATE NOWAIT") && s.refusal != nil:
			defer func() { s.refusal = nil }()
			return fakeReply{}, s.refusal
		}
		return answer(c, text)
	}
	k, err := mysqllock.Wrap(fakeConnector{s.fakeServer}, mysqllock.Config{Schema: "manual"})
	dbtest.OK(t, err)
	s.db = sql.OpenDB(k)
	t.Cleanup(func() { s.db.Close() })
	return s
}

// becomes has the server be another one from now on.
func (s *changeable) becomes(probe []driver.Value) {
	s.guards.Lock()
	defer s.guards.Unlock()
	s.probe = probe
}

// refuse has the next row lock fail.
func (s *changeable) refuse(n uint16) {
	s.t.Helper()
	s.guards.Lock()
	s.refusal = number(n)
	s.guards.Unlock()
	if s.lock() == nil {
		s.t.Errorf("a lock that is refused with %d is granted", n)
	}
	s.since()
}

// lock takes a row lock and gives it back.
func (s *changeable) lock() error {
	_, err := s.db.ExecContext(lockctx.With(dbtest.Limited(s.t), "k"), "UPDATE p SET stock = 1")
	return err
}

// want checks how often the server has been asked what it is, and for its table.
func (s *changeable) want(what string, probes, tables int) {
	s.t.Helper()
	log := strings.Join(s.sent(), "\n")
	if p, e := strings.Count(log, "SELECT VERSION()"), strings.Count(log, "SELECT ENGINE"); p != probes || e != tables {
		s.t.Errorf("%s: it was asked %d times what it is and %d times for its table, want %d and %d", what, p, e, probes, tables)
	}
}

// granted checks that locks are granted, by a handle that asks so much for the first
// and nothing for the next.
func (s *changeable) granted(what string, probes, tables int) {
	s.t.Helper()
	if err := s.lock(); err != nil {
		s.t.Errorf("%s: %v", what, err)
	}
	s.want(what, probes, tables)
	if err := s.lock(); err != nil {
		s.t.Errorf("%s, again: %v", what, err)
	}
	s.want(what+", again", 0, 0)
}

// unsafe checks that locks are refused.
func (s *changeable) unsafe(what string, probes, tables int) {
	s.t.Helper()
	if err := s.lock(); !errors.Is(err, mysqllock.ErrUnsafe) {
		s.t.Errorf("%s: %v", what, err)
	}
	s.want(what, probes, tables)
}

// TestServerIsAskedAgain: after a failure that a failover explains the server is
// asked what it is. What was made for a server is used again when it is that.
func TestServerIsAskedAgain(t *testing.T) {
	s := newChangeable(t)
	s.granted("the first hint", 1, 1)
	for _, n := range []uint16{1290, 1836, 1047, 3100} {
		s.refuse(n)
		s.granted(fmt.Sprintf("after %d", n), 1, 0)
	}
	for _, n := range []uint16{1064, 1213} {
		s.refuse(n)
		s.granted(fmt.Sprintf("after %d, which says nothing of the server", n), 0, 0)
	}

	s.becomes(newerPrimary)
	s.granted("nobody has noticed", 0, 0)
	s.refuse(1290)
	s.granted("another server", 2, 1)
	for range 3 {
		s.becomes(anyPrimary)
		s.refuse(1290)
		s.granted("the first server", 1, 0)
		s.becomes(newerPrimary)
		s.refuse(1290)
		s.granted("the other server", 1, 0)
	}

	s.becomes(manyPrimary)
	s.refuse(1290)
	s.unsafe("several primaries", 2, 1)
	s.unsafe("several primaries, again", 0, 0)
}

// TestServerDoesNotAnswer: while the server does not say what it is, what was made
// for it is used, and where it takes no writes, nothing is.
func TestServerDoesNotAnswer(t *testing.T) {
	s := newChangeable(t)
	s.granted("the first hint", 1, 1)
	s.becomes(nil)
	s.refuse(1290)
	for range 3 {
		dbtest.OK(t, s.lock())
		s.want("it does not say what it is", 1, 0)
	}
	s.becomes(anySecondary)
	for range 3 {
		s.unsafe("it takes no writes", 1, 0)
	}
	s.becomes(anyPrimary)
	s.granted("it takes writes", 1, 0)
}

// TestNoTableYet: what needs the lock table is tried with each hint, and what does
// not need it goes on.
func TestNoTableYet(t *testing.T) {
	claim := func(s *changeable) error {
		tx, err := s.db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		defer tx.Rollback()
		rows, err := tx.QueryContext(lockctx.Claim(dbtest.Limited(t), lockctx.ForUpdate()), "SELECT id FROM p")
		if err == nil {
			err = rows.Close()
		}
		return err
	}
	for _, claimed := range []bool{false, true} {
		s := newChangeable(t)
		s.noTable = true
		probes := 1 // nothing is kept of what has failed
		if claimed {
			dbtest.OK(t, claim(s))
			s.want("a claim", 1, 0)
			probes = 0
		}
		for range 2 {
			if err := s.lock(); err == nil || !strings.Contains(err.Error(), "CREATE TABLE") {
				t.Errorf("without a table: %v", err)
			}
			s.want("without a table", probes, 1)
		}
		if claimed {
			dbtest.OK(t, claim(s))
			s.want("another claim", 0, 0)
		}
		s.guards.Lock()
		s.noTable = false
		s.guards.Unlock()
		s.granted("with a table", probes, 1)
	}
}
