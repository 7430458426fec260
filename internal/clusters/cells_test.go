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
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// leaseTTL is longer than a failover takes, 5 to 7 s, with what a busy machine may
// add before a renewal that was held up by it is too late.
const leaseTTL = 15 * time.Second

// form is a way to raise the stock of a product by one under a lock: to read it,
// to think, and to write what was decided.
type form struct {
	name string
	run  func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error
}

var forms = []form{
	{"BeginTx", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(ctx, "p", opts...), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := raise(ctx, tx, think); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"session", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return raise(lockctx.With(ctx, "p", opts...), db, think)
	}},
	{"Do", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		return mysqllock.Do(ctx, db, "p", func(ctx context.Context) error { return raise(ctx, db, think) }, opts...)
	}},
}

// runner is a *sql.DB or a *sql.Tx.
type runner interface {
	QueryRowContext(ctx context.Context, text string, args ...any) *sql.Row
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

func raise(ctx context.Context, db runner, think func()) error {
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock); err != nil {
		return err
	}
	think()
	_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", stock+1)
	return err
}

// everywhere has callers on all nodes that take writes raise a stock, each so
// many times; again reports whether to try again after an error.
func everywhere(s *scratch, f form, rounds int, think func(), again func(error) bool, opts ...lockctx.Option) {
	s.Helper()
	var dbs []*sql.DB
	for _, node := range s.writers() {
		dbs = append(dbs, s.open(node, "lockWait=1m"))
	}
	s.with(dbs, f, rounds, think, again, opts...)
}

// with is everywhere for given handles.
func (s *scratch) with(dbs []*sql.DB, f form, rounds int, think func(), again func(error) bool, opts ...lockctx.Option) {
	s.Helper()
	const callers = 2 // on each handle
	var wg sync.WaitGroup
	var errs atomic.Int64
	for i, db := range dbs {
		for range callers {
			wg.Go(func() {
				for done := 0; done < rounds; {
					err := f.run(s.limited(), db, think, opts...)
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
	for _, f := range forms {
		t.Run(name+"/"+f.name, func(t *testing.T) {
			t.Parallel()
			var r room
			everywhere(c.scratch(t), f, 10, r.think, deadlock, opts...)
			r.check(t)
		})
	}
}

// balanced: so it is on handles whose connections lead to different nodes.
func balanced(t *testing.T, c *cluster, name, param string, opts ...lockctx.Option) {
	for _, f := range forms {
		t.Run(name+"/balanced/"+f.name, func(t *testing.T) {
			t.Parallel()
			var r room
			s := c.scratch(t)
			s.with([]*sql.DB{s.balanced(param), s.balanced(param)}, f, 10, r.think, deadlock, opts...)
			r.check(t)
		})
	}
}

// deadlock reports that the nodes have refused a transaction, which is to be run
// again.
func deadlock(err error) bool { return errors.Is(err, mysqllock.ErrDeadlock) }

// room is where two are never to be at the same time.
type room struct{ inside, overlaps atomic.Int32 }

func (r *room) think() {
	if r.inside.Add(1) != 1 {
		r.overlaps.Add(1)
	}
	time.Sleep(time.Millisecond) // for others to come in, if they can
	r.inside.Add(-1)
}

func (r *room) check(t *testing.T) {
	t.Helper()
	if n := r.overlaps.Load(); n > 0 {
		t.Errorf("%d times two were inside", n)
	}
}

// conflicts: many are inside, and nothing is lost.
func conflicts(t *testing.T, c *cluster) {
	for _, f := range forms {
		t.Run("optimistic/"+f.name, func(t *testing.T) {
			t.Parallel()
			conflict := func(err error) bool {
				return errors.Is(err, mysqllock.ErrConflict) || deadlock(err)
			}
			everywhere(c.scratch(t), f, 5, func() {}, conflict, lockctx.Optimistic())
		})
	}
}

// refused: the error says what it is about and what to do; an application that
// uses one node only can have it all the same.
func refused(t *testing.T, c *cluster, name string, opts ...lockctx.Option) {
	for _, f := range forms {
		t.Run(name+"/"+f.name, func(t *testing.T) {
			t.Parallel()
			s := c.scratch(t)
			err := f.run(s.limited(), s.open(0), func() {}, opts...)
			topology := string(c.topology)
			if c.topology == tempserver.GroupSinglePrimary {
				topology = "Group Replication"
			}
			wantUnsafe(t, err, topology, "use a lease", "lockUnsafe=allow")
			s.wantStock(0, 1, 0)
			ok(t, f.run(s.limited(), s.open(0, "lockUnsafe=allow"), func() {}, opts...))
			s.wantStock(0, 1, 1)
		})
	}
}

func wantUnsafe(t *testing.T, err error, texts ...string) {
	t.Helper()
	if !errors.Is(err, mysqllock.ErrUnsafe) {
		t.Fatalf("error %v, want %v", err, mysqllock.ErrUnsafe)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error does not say %q: %v", text, err)
		}
	}
}

// claims are refused where another node takes the same rows.
func claims(t *testing.T, c *cluster) {
	t.Run("claim", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		claim := func(db *sql.DB) error {
			tx, err := db.BeginTx(s.limited(), nil)
			ok(t, err)
			defer tx.Rollback()
			var id int
			return tx.QueryRowContext(lockctx.Claim(s.limited(), lockctx.SkipLocked()), "SELECT id FROM p ORDER BY id LIMIT 1").Scan(&id)
		}
		wantUnsafe(t, claim(s.open(0)), string(c.topology), "lockctx.With", "lockUnsafe=allow")
		ok(t, claim(s.open(0, "lockUnsafe=allow")))
	})
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
			for _, f := range forms {
				err := f.run(s.limited(), s.open(1), func() {}, opt)
				wantUnsafe(t, err, "takes no writes", "secondary of a Group Replication group", "connect to the one")
				if name != "advisory" {
					err := f.run(s.limited(), s.open(1, "lockUnsafe=allow"), func() {}, opt)
					wantUnsafe(t, err, "takes no writes")
				}
			}
		})
	}
}

// rowLocks: row locks of a Galera cluster are what they are on one server.
func rowLocks(t *testing.T, c *cluster) {
	begin := func(s *scratch, node int, params string, opts ...lockctx.Option) (*sql.Tx, error) {
		return s.open(node, params).BeginTx(lockctx.With(s.limited(), "p", opts...), nil)
	}
	t.Run("row/NoWait", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		tx, err := begin(s, 0, "")
		ok(t, err)
		_, err = begin(s, 1, "", lockctx.NoWait())
		want(t, err, mysqllock.ErrLocked)
		ok(t, tx.Rollback())
		s.eventually("it is free", func() error {
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
		ok(t, err)
		_, err = begin(s, 1, "", lockctx.Wait(300*time.Millisecond))
		want(t, err, mysqllock.ErrTimeout)
		if !strings.Contains(err.Error(), "another node of the cluster") {
			t.Errorf("the error does not say where the holder is: %v", err)
		}
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
		ok(t, tx.Commit())
		ok(t, <-granted)
	})
	t.Run("row/several keys", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		keys := func(node int, keys []string, opts ...lockctx.Option) (*sql.Tx, error) {
			return s.open(node).BeginTx(lockctx.WithKeys(s.limited(), keys, opts...), nil)
		}
		tx, err := keys(0, []string{"a", "b", "c"})
		ok(t, err)
		for _, key := range []string{"a", "b", "c"} {
			_, err := keys(1, []string{"x", key}, lockctx.NoWait())
			want(t, err, mysqllock.ErrLocked)
		}
		ok(t, tx.Rollback())
	})
	t.Run("row/late", func(t *testing.T) { // in a transaction that is open already
		t.Parallel()
		s := c.scratch(t)
		tx, err := s.open(0).BeginTx(s.limited(), nil)
		ok(t, err)
		_, err = tx.ExecContext(lockctx.With(s.limited(), "p"), "UPDATE p SET stock = 7 WHERE id = 1")
		ok(t, err)
		_, err = begin(s, 1, "", lockctx.NoWait())
		want(t, err, mysqllock.ErrLocked)
		ok(t, tx.Commit())
		s.wantStock(1, 1, 7)
	})
	for what, opts := range map[string][]lockctx.Option{"key": nil, "slots": {lockctx.Slots(1)}} {
		t.Run("row/in vain/"+what, func(t *testing.T) {
			t.Parallel()
			s := c.scratch(t)
			held, err := begin(s, 0, "", opts...)
			ok(t, err)
			db := s.open(1)
			db.SetMaxOpenConns(1)
			_, err = db.BeginTx(lockctx.With(s.limited(), "p", append(opts, lockctx.Wait(300*time.Millisecond))...), nil)
			want(t, err, mysqllock.ErrTimeout)

			// In a transaction that is open already, the end of the wait may have ended
			// that: then nothing of it is committed, and else all of it.
			late := func(wait time.Duration) (*sql.Tx, error) {
				tx, err := db.BeginTx(s.limited(), nil)
				ok(t, err)
				_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
				ok(t, err)
				_, err = tx.ExecContext(lockctx.With(s.limited(), "p", append(opts, lockctx.Wait(wait))...), "UPDATE p SET stock = 7 WHERE id = 2")
				return tx, err
			}
			for _, wait := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond} { // less, and more, than one look at a slot
				tx, err := late(wait)
				want(t, err, mysqllock.ErrTimeout)
				if _, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 3"); err == nil {
					ok(t, tx.Commit())
					s.wantStock(1, 1, 7)
				} else {
					want(t, err, mysqllock.ErrLost)
					want(t, tx.Commit(), mysqllock.ErrLost)
					s.wantStock(1, 1, 0)
				}
				s.wantStock(1, 2, 0)
				_, err = db.Exec("UPDATE p SET stock = 0")
				ok(t, err)
			}

			released := make(chan error, 1)
			time.AfterFunc(time.Second, func() { released <- held.Rollback() })
			tx, err := late(time.Minute)
			ok(t, err)
			ok(t, tx.Commit())
			ok(t, <-released)
			s.wantStock(1, 1, 7)
			s.wantStock(1, 2, 7)
			s.eventually("it is free", func() error {
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
		tx, err := db.BeginTx(lockctx.With(s.limited(), "p"), nil)
		ok(t, err)
		var id int
		ok(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
		ok(t, err)
		_, err = s.plain[0].Exec("KILL ?", id)
		ok(t, err)
		next, err := begin(s, 1, "lockWait=1m")
		ok(t, err)
		ok(t, next.Rollback())
		want(t, tx.Commit(), mysqllock.ErrLost)
		s.wantStock(2, 1, 0)
	})
	t.Run("row/savepoint", func(t *testing.T) { // a part that is rolled back takes nothing with it
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		ctx := lockctx.With(s.limited(), "p")
		tx, err := db.BeginTx(ctx, nil)
		ok(t, err)
		_, err = tx.Exec("UPDATE p SET stock = 7 WHERE id = 1")
		ok(t, err)
		inner, err := db.BeginTx(ctx, nil)
		ok(t, err)
		_, err = inner.Exec("UPDATE p SET stock = 8 WHERE id = 2")
		ok(t, err)
		ok(t, inner.Rollback())
		if _, err = tx.Exec("INSERT INTO p VALUES (9, 9), (1, 1)"); err == nil {
			t.Error("a duplicate was inserted")
		}
		_, err = begin(s, 1, "", lockctx.NoWait())
		want(t, err, mysqllock.ErrLocked)
		ok(t, tx.Commit())
		s.wantStock(1, 1, 7)
		s.wantStock(1, 2, 0)
	})
	t.Run("row/without a hint", func(t *testing.T) { // the session is as it was
		t.Parallel()
		s := c.scratch(t)
		db := s.open(0)
		db.SetMaxOpenConns(1)
		tx, err := db.BeginTx(lockctx.With(s.limited(), "p"), nil)
		ok(t, err)
		ok(t, tx.Commit())
		var size int
		ok(t, db.QueryRow("SELECT @@wsrep_trx_fragment_size").Scan(&size))
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
		var r room
		f := form{"mixed", func(ctx context.Context, db *sql.DB, _ func(), _ ...lockctx.Option) error {
			switch turn.Add(1) % 3 {
			case 0:
				return forms[0].run(ctx, db, r.think, lockctx.Lease(leaseTTL))
			case 1:
				return forms[0].run(ctx, db, func() {}, lockctx.Optimistic())
			}
			return forms[0].run(ctx, db, r.think, lockctx.Row())
		}}
		everywhere(s, f, 8, nil, func(err error) bool {
			return errors.Is(err, mysqllock.ErrConflict) || deadlock(err)
		})
		r.check(t)
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
		for range 40 {
			ctx := lockctx.With(s.limited(), "p", lockctx.Lease(leaseTTL))
			tx, err := db.BeginTx(ctx, nil)
			ok(t, err)
			_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
			ok(t, err)
			token, _ := mysqllock.Token(ctx)
			s.eventually("the lease has arrived at the other node", func() error {
				var n int
				return s.plain[1].QueryRow("SELECT 1 FROM "+table+" WHERE token = ? AND owner IS NOT NULL", token).Scan(&n)
			})
			_, err = s.plain[1].Exec("UPDATE "+table+" SET owner = 'somebody', token = token + 1 WHERE token = ? AND owner IS NOT NULL", token)
			ok(t, err)
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Fatalf("the old holder's commit: %v, want %v", err, mysqllock.ErrLost)
			}
			s.exec(s.plain[1], "UPDATE "+table+" SET owner = NULL WHERE owner = 'somebody'")
			s.eventually("the other lease is over", func() error {
				var n int
				return s.plain[0].QueryRow("SELECT 1 FROM "+table+" WHERE token = ? AND owner IS NULL", token+1).Scan(&n)
			})
		}
		s.wantStock(0, 1, 0)
	})
}
