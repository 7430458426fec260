package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// freeze has a host wait for the row lock on k, which somebody has locked for a moment,
// and stand still as soon as it has begun to wait. After that the row is free.
func (s *scratch) freeze(cfg mysqllock.Config, grant func(context.Context, *sql.DB, func(), ...lockctx.Option) error, opts ...lockctx.Option) {
	s.T.Helper()
	moment, err := s.plain.Begin()
	dbtest.OK(s.T, err)
	defer moment.Rollback()
	_, err = moment.Exec("SELECT 1 FROM mysqllock WHERE namespace = ? AND name = 'k' FOR UPDATE", s.Name)
	dbtest.OK(s.T, err)
	waits := []string{"_wait2`(x'", " */ CONNECTION_ID()", " */ token, owner"}
	v := &vanishing{at: waits, armed: make(chan struct{}), gone: make(chan struct{}), over: make(chan struct{})}
	close(v.armed)
	base := s.Config()
	base.DialFunc = v.dial
	connector, err := mysqllock.NewConnector(base, cfg)
	dbtest.OK(s.T, err)
	db := sql.OpenDB(connector)
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(s.T.Context())
	all.Go(func() { _ = grant(ctx, db, func() {}, opts...) })
	s.T.Cleanup(func() {
		close(v.over)
		cancel()
		all.Wait()
		db.Close()
	})
	v.await(s.T)
	// The server ends the wait by itself after a second or so. A machine that stands still
	// for as long does not see it: this waiter is granted nothing then.
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		var n int
		dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND COMMAND <> 'Sleep' AND INFO LIKE '%/* mysqllock %'", s.Name).Scan(&n))
		if n > 0 {
			break
		}
	}
	dbtest.OK(s.T, moment.Commit())
}

// keeps holds a lease on key beside what is done, until it has been renewed twice after that.
func (s *scratch) keeps(key string, done func()) {
	s.T.Helper()
	err := mysqllock.Do(s.T.Context(), s.open(), key, func(ctx context.Context) error {
		done()
		for range 2 {
			was := s.expires(key)
			dbtest.Soon(s.T, "it is renewed, or lost", func() bool { return ctx.Err() != nil || s.expires(key) != was })
		}
		return context.Cause(ctx)
	}, lockctx.Lease(12*time.Second))
	if err != nil {
		s.T.Errorf("the lease was lost: %v", err)
	}
}

// expires returns when the lease on key does, as the row says.
func (s *scratch) expires(key string) (at string) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT expires FROM mysqllock WHERE namespace = ? AND name = ?", s.Name, key).Scan(&at))
	return at
}

// TestFrozenWaiter: callers that wait for a row lock, in any way, and stand still when the
// server grants it, do not keep the holder of a lease on the key from renewing it.
func TestFrozenWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.lapse(s.open(), "k")
		s.keeps("k", func() {
			for name, grant := range grants {
				if name == "a hint that comes late" {
					continue // it may have written already, so the server cannot end its transaction
				}
				s.freeze(mysqllock.Config{}, grant, lockctx.Wait(time.Minute))
				s.freeze(mysqllock.Config{}, grant, lockctx.Wait(time.Minute), lockctx.Shared())
			}
		})
	})
}

// TestFrozenWaiterWithoutProcedure is the same for an account on MySQL that may not make
// the procedure: the server ends its connection after a second.
func TestFrozenWaiterWithoutProcedure(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("there the same is an anonymous block")
		}
		s.lapse(s.open(), "k")
		cfg := mysqllock.Config{Schema: "manual"}
		s.keeps("k", func() { s.freeze(cfg, grants["BeginTx"], lockctx.Wait(time.Minute)) })
	})
}

// TestWaiterOfSeveralKeys: a caller that wants two keys does not wait for one with the
// row of the other locked, which has a lease.
func TestWaiterOfSeveralKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.lapse(s.open(), "a")
		s.lapse(s.open(), "k")
		held, err := s.open().BeginTx(lockctx.With(s.T.Context(), "k"), nil)
		dbtest.OK(t, err)
		defer held.Rollback()
		waiter := s.open()
		result := make(chan error, 1)
		s.keeps("a", func() {
			go func() {
				result <- begun(lockctx.WithKeys(t.Context(), []string{"a", "k"}, lockctx.Wait(time.Minute)), waiter, func() {}, nil)
			}()
		})
		dbtest.OK(t, held.Rollback())
		dbtest.OK(t, <-result)
	})
}

// TestWaitLeavesSettings: a wait that is over, in whichever way, leaves the connection's
// settings as they were.
func TestWaitLeavesSettings(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.lapse(s.open(), "k")
		for name, db := range map[string]*sql.DB{"by the procedure": s.open(), "without it": s.open("readTimeout=4s")} {
			db.SetMaxOpenConns(1)
			settings := func() (id, row, idle int) {
				dbtest.OK(t, db.QueryRow("SELECT CONNECTION_ID(), @@SESSION.innodb_lock_wait_timeout, @@SESSION.wait_timeout").Scan(&id, &row, &idle))
				return id, row, idle
			}
			id, row, idle := settings()
			same := func(after string) {
				if id2, row2, idle2 := settings(); id2 != id || row2 != row || idle2 != idle {
					t.Errorf("%s, after %s: connection %d with %d and %d, before %d with %d and %d", name, after, id2, row2, idle2, id, row, idle)
				}
			}
			held, err := s.open().BeginTx(lockctx.With(t.Context(), "k"), nil)
			dbtest.OK(t, err)
			wait := func(d time.Duration) error {
				return begun(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(d)), db, func() {}, nil)
			}
			if err := wait(300 * time.Millisecond); !errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("%s: %v", name, err)
			}
			if id2, _, _ := settings(); id2 != id { // a KILL that came late closes it
				id, _, _ = settings()
			}
			same("the wait")
			time.AfterFunc(300*time.Millisecond, func() { _ = held.Rollback() })
			dbtest.OK(t, wait(time.Minute))
			same("a grant")
		}
	})
}
