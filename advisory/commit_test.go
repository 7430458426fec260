package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// writer is an application's connection, of which the id is known, whose transactions are
// under advisory locks.
type writer struct {
	*pool.Conn
	p *process
	b beginning // the last one
}

// beginning is a transaction that may begin with a lock.
type beginning struct {
	Options driver.TxOptions
	Ends    bool
	Free    func() bool
	Connect func(context.Context) (*pool.Conn, error)
	Done    func()
	Begun   bool
}

// writer makes the table that it writes to, written, if there is none.
func (p *process) writer(conn driver.Conn) *writer {
	p.T.Helper()
	w := &writer{Conn: pool.Adopt(conn), p: p}
	p.Exec(conn, "CREATE TABLE IF NOT EXISTS "+p.written()+" (n INT)")
	dbtest.OK(p.T, w.SetID(p.One(conn, "SELECT CONNECTION_ID()")))
	return w
}

func (s *scratch) written() string { return "`" + s.Name + "`.written" }

// inDatabase has the procedure made in the test's database.
func (s *scratch) inDatabase(cfg *strategy.Config) {
	var err error
	cfg.Table, err = schema.Parse(s.Name + ".mysqllock")
	dbtest.OK(s.T, err)
}

// commits is what the statement has in it that checks and commits.
func (s *scratch) commits() string {
	if s.MariaDB() {
		return "BEGIN NOT ATOMIC SET @mysqllock_held = COALESCE("
	}
	return "mysqllock_held3"
}

// write begins a transaction that writes a row.
func (w *writer) write() {
	w.p.T.Helper()
	w.p.Exec(w.Conn.Conn, "START TRANSACTION")
	w.p.Exec(w.Conn.Conn, "INSERT INTO "+w.p.written()+" VALUES (1)")
}

// check returns what is left to be done at COMMIT under the locks.
func (w *writer) check(locks ...*advisory.Lock) strategy.Check {
	w.p.T.Helper()
	held := make([]strategy.Grant, len(locks))
	for i, lock := range locks {
		held[i] = lock
	}
	check, err := w.p.Strategy().Check(dbtest.Limited(w.p.T), w.Conn, held, true)
	dbtest.OK(w.p.T, err)
	return check
}

// knows waits until it is known how to commit under the lock.
func (w *writer) knows(lock *advisory.Lock) {
	w.p.T.Helper()
	dbtest.Soon(w.p.T, "it is known how to commit", func() bool { return w.check(lock).Commit != nil })
}

// wantWritten says how many rows are committed.
func (s *scratch) wantWritten(what string, want int) {
	s.T.Helper()
	if n := s.One(s.open(), "SELECT COUNT(*) FROM "+s.written()); n != fmt.Sprint(want) {
		s.T.Errorf("%s: %s rows are written, want %d", what, n, want)
	}
}

// TestOneStatementChecksAndCommits: one statement checks the locks and commits. Where it finds them
// lost, or runs elsewhere, nothing is committed; where the server has no way for it, it says so.
func TestOneStatementChecksAndCommits(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: s.inDatabase})
		var tap dbtest.Tap
		w := p.writer(s.Connect(tap.On))
		one, two := p.acquire("1", 0), p.acquire("2", 0)
		w.knows(one)

		w.write()
		check := w.check(one, two)
		sent := tap.Texts()
		done, unknown, err := check.Commit(dbtest.Limited(t))
		if texts := sent(); !done || unknown || err != nil || len(texts) != 1 || !strings.Contains(texts[0], s.commits()) {
			t.Errorf("done %v, unknown %v, %v: %q", done, unknown, err, texts)
		}
		s.wantWritten("commit", 1)

		refused := func(what string, want error, check strategy.Check) {
			t.Helper()
			if done, unknown, err := check.Commit(dbtest.Limited(t)); done || unknown || err != nil {
				t.Errorf("%s: done %v, unknown %v, %v", what, done, unknown, err)
			}
			dbtest.Is(t, what, check.Fence(dbtest.Limited(t)), want)
			s.wantWritten(what, 1)
			s.Exec(w.Conn.Conn, "ROLLBACK")
		}
		is := w.KnownID()
		dbtest.OK(t, w.SetID("1"))
		w.write()
		refused("on another connection", nil, w.check(one))
		if w.KnownID() != is {
			t.Errorf("it is %d, and still taken for %d", is, w.KnownID())
		}
		w.write()
		check = w.check(one, two)
		s.Exec(w.Conn.Conn, fmt.Sprintf("KILL %d", one.ConnectionID()))
		s.free(w.Conn.Conn, "1") // before anybody has noticed
		refused("lost", lockerr.ErrLost, check)

		three := p.acquire("3", time.Minute)
		if !s.MariaDB() {
			s.Exec(w.Conn.Conn, "DROP PROCEDURE `"+s.Name+"`.mysqllock_held3")
			w.write()
			refused("dropped", nil, w.check(three))
			if w.check(three).Commit != nil {
				t.Error("it calls again what was missing")
			}
		}
		w.write()
		check = w.check(three)
		dbtest.OK(t, three.Release())
		if check.Commit != nil {
			if done, _, err := check.Commit(dbtest.Limited(t)); done || !errors.Is(err, lockerr.ErrClosed) {
				t.Errorf("released: %v, %v", done, err)
			}
		}
		s.Exec(w.Conn.Conn, "ROLLBACK")
	})
}

// TestTheCheckIsAStatementOfItsOwnElsewhere: without a known id, without the procedure, and behind
// a Router the check is a statement of its own.
func TestTheCheckIsAStatementOfItsOwnElsewhere(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for what, c := range map[string]struct {
			change func(*strategy.Config)
			moved  bool
		}{
			"id not known": {change: s.inDatabase, moved: true},
			"no procedure": {change: func(cfg *strategy.Config) {
				s.inDatabase(cfg)
				cfg.Procedures = schema.NewRegistry(cfg.Info, false, cfg.Control.Lend)
			}},
			"no table": {},
			"Router":   {change: func(cfg *strategy.Config) { s.inDatabase(cfg); cfg.Info.Router = true }},
		} {
			if s.MariaDB() && (what == "no procedure" || what == "no table") {
				continue
			}
			s := s.other(t)
			s.Exec(s.open(), "DROP PROCEDURE IF EXISTS `"+s.Name+"`.mysqllock_held3")
			p := s.process(settings{change: c.change})
			var tap dbtest.Tap
			w := p.writer(s.Connect(tap.On))
			if c.moved {
				w.Moved()
			}
			lock := p.acquire("k", 0)
			sent := tap.Texts()
			if check := w.check(lock); check.Commit != nil || check.Unsure == nil {
				t.Errorf("%s: it is left to the COMMIT", what)
			}
			if texts := sent(); len(texts) != 1 || !strings.HasPrefix(texts[0], "SELECT ") {
				t.Errorf("%s: %q", what, texts)
			}
			if c.moved {
				w.knows(lock)
			}
			s.Exec(w.Conn.Conn, fmt.Sprintf("KILL %d", lock.ConnectionID()))
			s.free(w.Conn.Conn, "k")
			w.Moved()
			dbtest.Is(t, what+": lost", dbtest.Err(p.Strategy().Check(dbtest.Limited(t), w.Conn, []strategy.Grant{lock}, true)), lockerr.ErrLost)
		}
	})
}

// TestDisturbedCommit: a KILL QUERY between COMMIT and the answer makes no failure of a
// transaction that was committed, one before it commits nothing, and without an answer nobody
// says which it was.
func TestDisturbedCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: s.inDatabase})
		for name, c := range dbtest.DisturbedCommits() {
			s := s.other(t)
			d := c.Disturbed
			d.Conn, d.At = s.Connect(), func(text string) bool { return strings.Contains(text, s.commits()) }
			w := p.writer(&d)
			s.Exec(w.Conn.Conn, "DELETE FROM "+s.written())
			lock := p.acquire("k", time.Minute)
			w.knows(lock)
			w.write()
			done, unknown, err := w.check(lock).Commit(dbtest.Limited(t))
			if done != c.Done || unknown != c.Unknown || (err == nil) != c.Done || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: done %v, unknown %v, %v", name, done, unknown, err)
			}
			var e *lockerr.Error
			if err != nil && (!errors.As(err, &e) || e.Op != "commit" || e.Strategy != "advisory") {
				t.Errorf("%s: %v", name, err)
			}
			d.Next = nil
			s.Exec(d.Conn, "ROLLBACK")
			s.wantWritten(name, map[bool]int{true: 1}[c.Committed])
			dbtest.OK(t, lock.Release())
		}
	})
}

func TestTheCheckSeesALossThatNobodyHasNoticed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{}), s.open()
		fine := func(conn driver.Conn, locks []*advisory.Lock) {
			t.Helper()
			_, err := p.Check(t.Context(), conn, locks)
			dbtest.OK(t, err)
		}
		fine(plain, nil)
		one, two := p.acquire("1", 0), p.acquire("2", 0)
		both := []*advisory.Lock{one, two}
		fine(plain, both)
		count := new(counting)
		counted, err := intercept.With(count)(s.Connector(dbtest.NoDatabase))
		dbtest.OK(t, err)
		conn, err := counted.Connect(t.Context())
		dbtest.OK(t, err)
		fine(conn, both)
		dbtest.OK(t, conn.Close())
		dbtest.Equal(t, "%d statements", count.sent.Load(), 1)
		check := func(want error, locks ...*advisory.Lock) {
			t.Helper()
			_, err := p.Check(t.Context(), plain, locks)
			var e *lockerr.Error
			if !errors.Is(err, want) || !errors.As(err, &e) || e.Op != "commit" || e.Strategy != "advisory" {
				t.Errorf("%v", err)
			}
		}
		dbtest.OK(t, two.Release())
		check(lockerr.ErrClosed, one, two)
		s.Exec(plain, fmt.Sprintf("KILL %d", one.ConnectionID()))
		s.free(plain, "1") // before anybody has noticed
		check(lockerr.ErrLost, one)
	})
}

// TestAnotherConnectionOfTheSameIDIsALoss: the check is not taken in by a connection of the same id
// that has the lock, as there may be after a restart of the server.
func TestAnotherConnectionOfTheSameIDIsALoss(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		base := s.Connector(dbtest.NoDatabase)
		var lockConn driver.Conn
		p := s.process(settings{connect: func(ctx context.Context) (c driver.Conn, err error) {
			lockConn, err = base.Connect(ctx)
			return lockConn, err
		}})
		lock := p.acquire("k", 0)
		s.Exec(lockConn, "DO RELEASE_ALL_LOCKS()")
		s.Exec(lockConn, "DO GET_LOCK('"+lock.Name()+"', 0)")
		dbtest.Is(t, "the check", dbtest.Err(p.Check(t.Context(), s.open(), []*advisory.Lock{lock})), lockerr.ErrLost)
		dbtest.OK(t, lock.Release())
	})
}
