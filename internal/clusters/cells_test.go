//go:build unix

package clusters

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// leaseTTL is longer than a failover takes, 5 to 7 s, with what a busy machine may
// add before a renewal that was held up by it is too late.
const leaseTTL = 15 * time.Second

// everywhere has callers on all nodes that take writes raise a stock, each so
// many times; again reports whether to try again after an error.
func everywhere(s *scratch, f stock.Form, rounds int, think func(), again func(error) bool, opts ...lockctx.Option) {
	s.Helper()
	var dbs []*sql.DB
	for _, node := range s.writers() {
		dbs = append(dbs, s.open(node, "lockWait=1m"))
	}
	s.with(dbs, f, rounds, think, again, opts...)
}

// with is everywhere for given handles.
func (s *scratch) with(dbs []*sql.DB, f stock.Form, rounds int, think func(), again func(error) bool, opts ...lockctx.Option) {
	s.Helper()
	const callers = 2 // on each handle
	var wg sync.WaitGroup
	var errs atomic.Int64
	for i, db := range dbs {
		for range callers {
			wg.Go(func() {
				for done := 0; done < rounds; {
					err := f.Run(dbtest.Within(s, dbtest.Patience), db, think, opts...)
					if err == nil {
						done++
						continue
					}
					if errs.Add(1) <= 2 {
						s.Logf("%s: %v", s.Name(), err)
					}
					if !again(err) || s.Context().Err() != nil {
						s.Errorf("handle %d: %v", i, err)
						return
					}
				}
			})
		}
	}
	began := time.Now()
	wg.Wait()
	if s.Failed() {
		return
	}
	total := len(dbs) * callers * rounds
	s.Logf("%s: %d times in %v, with %d errors", s.Name(), total, time.Since(began).Round(time.Millisecond), errs.Load())
	s.wantStock(0, 1, total)
}

// exclusive: two are never inside, and nothing is lost.
func exclusive(t *testing.T, c *cluster, name string, opts ...lockctx.Option) {
	for _, f := range stock.Forms {
		t.Run(name+"/"+f.Name, func(t *testing.T) {
			t.Parallel()
			var r stock.Room
			everywhere(c.scratch(t), f, often(4, 10), r.Think, deadlock, opts...)
			r.Check(t)
		})
	}
}

// balanced: so it is on handles whose connections lead to different nodes.
func balanced(t *testing.T, c *cluster, name, param string, opts ...lockctx.Option) {
	for _, f := range stock.Forms {
		t.Run(name+"/balanced/"+f.Name, func(t *testing.T) {
			t.Parallel()
			var r stock.Room
			s := c.scratch(t)
			s.with([]*sql.DB{s.balanced(param), s.balanced(param)}, f, often(4, 10), r.Think, deadlock, opts...)
			r.Check(t)
		})
	}
}

// deadlock reports that the nodes have refused a transaction, which is to be run
// again.
func deadlock(err error) bool { return errors.Is(err, mysqllock.ErrDeadlock) }

// conflicts: many are inside, and nothing is lost.
func conflicts(t *testing.T, c *cluster) {
	for _, f := range stock.Forms {
		t.Run("optimistic/"+f.Name, func(t *testing.T) {
			t.Parallel()
			conflict := func(err error) bool {
				return errors.Is(err, mysqllock.ErrConflict) || deadlock(err)
			}
			everywhere(c.scratch(t), f, often(3, 5), func() {}, conflict, lockctx.Optimistic())
		})
	}
}

// refused: the error says what it is about and what to do; an application that
// uses one node only can have it all the same.
func refused(t *testing.T, c *cluster, name string, opts ...lockctx.Option) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		topology := string(c.topology)
		if c.topology == tempserver.GroupSinglePrimary {
			topology = "Group Replication"
		}
		for i, f := range stock.Forms {
			err := f.Run(dbtest.Within(s, dbtest.Patience), s.open(0), func() {}, opts...)
			wantUnsafe(t, err, topology, "use a lease", "lockUnsafe=allow")
			s.wantStock(0, 1, i)
			dbtest.OK(t, f.Run(dbtest.Within(s, dbtest.Patience), s.open(0, "lockUnsafe=allow"), func() {}, opts...))
			s.wantStock(0, 1, i+1)
		}
	})
}

func wantUnsafe(t *testing.T, err error, texts ...string) {
	t.Helper()
	dbtest.Want(t, err, mysqllock.ErrUnsafe)
	dbtest.Says(t, err, texts...)
}

// secondary: nothing can be locked there, whatever the handle allows, but for
// what is no write.
func secondary(t *testing.T, c *cluster) {
	for name, opt := range map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(leaseTTL), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
	} {
		t.Run("secondary/"+name, func(t *testing.T) {
			t.Parallel()
			s := c.scratch(t)
			for _, f := range stock.Forms {
				err := f.Run(dbtest.Within(s, dbtest.Patience), s.open(1), func() {}, opt)
				wantUnsafe(t, err, "takes no writes", "secondary of a Group Replication group", "connect to the one")
				if name != "advisory" {
					err := f.Run(dbtest.Within(s, dbtest.Patience), s.open(1, "lockUnsafe=allow"), func() {}, opt)
					wantUnsafe(t, err, "takes no writes")
				}
			}
		})
	}
}

// rowLocks: row locks of a Galera cluster are what they are on one server.
func rowLocks(t *testing.T, c *cluster) {
	begin := func(s *scratch, node int, params string, opts ...lockctx.Option) (*sql.Tx, error) {
		return s.open(node, params).BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p", opts...), nil)
	}
	t.Run("row/NoWait", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		tx, err := begin(s, 0, "")
		dbtest.OK(t, err)
		_, err = begin(s, 1, "", lockctx.NoWait())
		dbtest.Want(t, err, mysqllock.ErrLocked)
		dbtest.OK(t, tx.Rollback())
		dbtest.Eventually(s, "it is free", func() error {
			tx, err := begin(s, 1, "", lockctx.NoWait())
			if err == nil {
				err = tx.Rollback()
			}
			return err
		})
	})
	t.Run("row/wait", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		tx, err := begin(s, 0, "")
		dbtest.OK(t, err)
		const where = "another node of the cluster"
		err = dbtest.Until(func() error { // a busy server does not answer in time
			_, err := begin(s, 1, "", lockctx.Wait(300*time.Millisecond))
			return err
		}, func(err error) bool { return err == nil || strings.Contains(err.Error(), where) })
		dbtest.Want(t, err, mysqllock.ErrTimeout)
		dbtest.Says(t, err, where)
		granted := make(chan error, 1)
		go func() {
			tx, err := begin(s, 2, "lockWait=1m")
			if err == nil {
				err = tx.Rollback()
			}
			granted <- err
		}()
		select {
		case err := <-granted:
			t.Errorf("granted beside the holder; error %v", err)
		case <-time.After(300 * time.Millisecond):
		}
		dbtest.OK(t, tx.Commit())
		dbtest.OK(t, <-granted)
	})
	t.Run("row/several keys", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		keys := func(node int, keys []string, opts ...lockctx.Option) (*sql.Tx, error) {
			return s.open(node).BeginTx(lockctx.WithKeys(dbtest.Within(s, dbtest.Patience), keys, opts...), nil)
		}
		tx, err := keys(0, []string{"a", "b", "c"})
		dbtest.OK(t, err)
		for _, key := range []string{"a", "b", "c"} {
			_, err := keys(1, []string{"x", key}, lockctx.NoWait())
			dbtest.Want(t, err, mysqllock.ErrLocked)
		}
		dbtest.OK(t, tx.Rollback())
	})
	for what, opts := range map[string][]lockctx.Option{"key": nil, "slots": {lockctx.Slots(1)}} {
		t.Run("row/in vain/"+what, func(t *testing.T) {
			t.Parallel()
			s := c.scratch(t)
			held, err := begin(s, 0, "", opts...)
			dbtest.OK(t, err)
			db := s.open(1)
			db.SetMaxOpenConns(1)
			_, err = db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p", append(opts, lockctx.Wait(300*time.Millisecond))...), nil)
			dbtest.Want(t, err, mysqllock.ErrTimeout)

			// In a transaction of another key, the end of the wait may have ended
			// that: then nothing of it is committed, and else all of it.
			second := func(wait time.Duration) (*sql.Tx, error) {
				tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "first"), nil)
				dbtest.OK(t, err)
				_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
				dbtest.OK(t, err)
				_, err = tx.ExecContext(lockctx.With(dbtest.Within(s, dbtest.Patience), "p", append(opts, lockctx.Wait(wait))...), "UPDATE p SET stock = 7 WHERE id = 2")
				return tx, err
			}
			for _, wait := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond} { // less, and more, than one look at a slot
				tx, err := second(wait)
				dbtest.Want(t, err, mysqllock.ErrTimeout)
				if _, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 3"); err == nil {
					dbtest.OK(t, tx.Commit())
					s.wantStock(1, 1, 7)
				} else {
					dbtest.Want(t, err, mysqllock.ErrLost)
					dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
					s.wantStock(1, 1, 0)
				}
				s.wantStock(1, 2, 0)
				_, err = db.Exec("UPDATE p SET stock = 0")
				dbtest.OK(t, err)
			}

			released := make(chan error, 1)
			time.AfterFunc(time.Second, func() { released <- held.Rollback() })
			tx, err := second(time.Minute)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
			dbtest.OK(t, <-released)
			s.wantStock(1, 1, 7)
			s.wantStock(1, 2, 7)
			dbtest.Eventually(s, "it is free", func() error {
				tx, err := begin(s, 2, "", append(opts, lockctx.NoWait())...)
				if err == nil {
					err = tx.Rollback()
				}
				return err
			})
		})
	}
	t.Run("row/connection lost", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p"), nil)
		dbtest.OK(t, err)
		var id int
		dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
		dbtest.OK(t, err)
		_, err = s.plain[0].Exec("KILL ?", id)
		dbtest.OK(t, err)
		next, err := begin(s, 1, "lockWait=1m")
		dbtest.OK(t, err)
		dbtest.OK(t, next.Rollback())
		dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
		s.wantStock(2, 1, 0)
	})
	t.Run("row/savepoint", func(t *testing.T) { // a part that is rolled back takes nothing with it
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		ctx := lockctx.With(dbtest.Within(s, dbtest.Patience), "p")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
		dbtest.OK(t, err)
		inner, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = inner.Exec("UPDATE p SET stock = 8 WHERE id = 2")
		dbtest.OK(t, err)
		dbtest.OK(t, inner.Rollback())
		if _, err = tx.Exec("INSERT INTO p VALUES (9, 9), (1, 1)"); err == nil {
			t.Error("a duplicate was inserted")
		}
		_, err = begin(s, 1, "", lockctx.NoWait())
		dbtest.Want(t, err, mysqllock.ErrLocked)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, 1, 7)
		s.wantStock(1, 2, 0)
	})
	t.Run("row/without a hint", func(t *testing.T) { // the session is as it was
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		db.SetMaxOpenConns(1)
		tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p"), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Commit())
		var size int
		dbtest.OK(t, db.QueryRow("SELECT @@wsrep_trx_fragment_size").Scan(&size))
		if size != 0 {
			t.Errorf("wsrep_trx_fragment_size is %d", size)
		}
	})
}

// mixed: on a key the strategies that have a row for it exclude each other, also
// on different nodes.
func mixed(t *testing.T, c *cluster) {
	t.Run("mixed", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		var turn atomic.Int32
		var r stock.Room
		f := stock.Form{Name: "mixed", Run: func(ctx context.Context, db *sql.DB, _ func(), _ ...lockctx.Option) error {
			switch turn.Add(1) % 3 {
			case 0:
				return stock.Forms[0].Run(ctx, db, r.Think, lockctx.Lease(leaseTTL))
			case 1:
				return stock.Forms[0].Run(ctx, db, func() {}, lockctx.Optimistic())
			}
			return stock.Forms[0].Run(ctx, db, r.Think, lockctx.Row())
		}}
		everywhere(s, f, often(4, 8), nil, func(err error) bool {
			return errors.Is(err, mysqllock.ErrConflict) || deadlock(err)
		})
		r.Check(t)
	})
}

// fence: once another node has given the lease to somebody else, its old holder
// commits nothing, whether its own node has heard of that or not.
func fence(t *testing.T, c *cluster) {
	t.Run("lease/fence", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		table := s.database + ".mysqllock"
		for range often(10, 40) {
			ctx := lockctx.With(dbtest.Within(s, dbtest.Patience), "p", lockctx.Lease(leaseTTL))
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
			dbtest.OK(t, err)
			token, _ := mysqllock.Token(ctx)
			dbtest.Eventually(s, "the lease has arrived at the other node", func() error {
				var n int
				return s.plain[1].QueryRow("SELECT 1 FROM "+table+" WHERE token = ? AND owner IS NOT NULL", token).Scan(&n)
			})
			dbtest.Eventually(s, "somebody takes it", func() error { // a renewal may arrive at the same moment, and goes first
				_, err := s.plain[1].Exec("UPDATE "+table+" SET owner = 'somebody', token = token + 1 WHERE token = ? AND owner IS NOT NULL", token)
				return err
			})
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Fatalf("the old holder's commit: %v, want %v", err, mysqllock.ErrLost)
			}
			dbtest.Exec(s, s.plain[1], "UPDATE "+table+" SET owner = NULL WHERE owner = 'somebody'")
			dbtest.Eventually(s, "the other lease is over", func() error {
				var n int
				return s.plain[0].QueryRow("SELECT 1 FROM "+table+" WHERE token = ? AND owner IS NULL", token+1).Scan(&n)
			})
		}
		s.wantStock(0, 1, 0)
	})
}
