package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// kinds are the ways to keep a lock, and how to see on the fake that it is kept.
var kinds = map[string]struct {
	option lockctx.Option
	kept   func(*fakeserver.Server) bool
}{
	"row":      {lockctx.Row(), func(s *fakeserver.Server) bool { return s.Held() == 1 }},
	"shared":   {lockctx.Shared(), func(s *fakeserver.Server) bool { return s.Held() == 1 }},
	"slots":    {lockctx.Slots(3), func(s *fakeserver.Server) bool { return s.Held() == 1 }},
	"lease":    {lockctx.Lease(time.Minute), func(s *fakeserver.Server) bool { return s.Leases() == 1 }},
	"advisory": {lockctx.Advisory(), func(s *fakeserver.Server) bool { return s.Named() == 2 }}, // the key, and the connection's identity
}

// ways are the ways of an application to write 9 under a lock. Each calls held while it is.
var ways = map[string]func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()){
	"BeginTx": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(ctx, tx, stock.MustRead(t, ctx, tx, 1)-1))
		held()
		dbtest.OK(t, tx.Commit())
	},
	"a write": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, _ func()) {
		dbtest.OK(t, put(ctx, db, 9))
	},
	"read, decide, write": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		n := stock.MustRead(t, ctx, db, 1)
		held()
		dbtest.OK(t, put(ctx, db, n-1))
	},
	"Do": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		dbtest.OK(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
			n := stock.MustRead(t, ctx, db, 1)
			held()
			return put(ctx, db, n-1)
		}, o))
	},
	"a transaction in Do": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		dbtest.OK(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.OK(t, put(ctx, tx, stock.MustRead(t, ctx, tx, 1)-1))
			held()
			return tx.Commit()
		}, o))
	},
	"Acquire": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k", o)
		dbtest.OK(t, err)
		n := stock.MustRead(t, h.Context(), db, 1)
		held()
		dbtest.OK(t, put(h.Context(), db, n-1))
		dbtest.OK(t, h.Release())
		dbtest.OK(t, h.Release())
	},
	"sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		dbtest.OK(t, err)
		n := stock.MustRead(t, ctx, c, 1)
		held()
		dbtest.OK(t, put(ctx, c, n-1))
		dbtest.OK(t, c.Close())
	},
	"a transaction on a sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		dbtest.OK(t, err)
		tx, err := c.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(ctx, tx, stock.MustRead(t, ctx, tx, 1)-1))
		held()
		dbtest.OK(t, tx.Commit())
		dbtest.OK(t, c.Close())
	},
	"a savepoint": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(ctx, tx, 9))
		_, err = tx.ExecContext(ctx, "SAVEPOINT s")
		dbtest.OK(t, err)
		dbtest.OK(t, put(ctx, tx, 3))
		_, err = tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT s")
		dbtest.OK(t, err)
		held()
		dbtest.OK(t, tx.Commit())
	},
	"an inner transaction that is rolled back": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		nest(t, db, ctx, held)
	},
	"one on a sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		dbtest.OK(t, err)
		defer c.Close()
		nest(t, c, ctx, held)
		dbtest.OK(t, c.PingContext(ctx))
	},
	"a statement that was prepared before its transaction": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		st, err := db.PrepareContext(lockctx.Without(ctx), write)
		dbtest.OK(t, err)
		defer st.Close()
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = tx.StmtContext(ctx, st).ExecContext(ctx, 9, 1)
		dbtest.OK(t, err)
		held()
		dbtest.OK(t, tx.Commit())
	},
	"prepared statements": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		reads, err := db.PrepareContext(lockctx.Without(ctx), read)
		dbtest.OK(t, err)
		defer reads.Close()
		writes, err := db.PrepareContext(ctx, write)
		dbtest.OK(t, err)
		defer writes.Close()
		var n int
		dbtest.OK(t, reads.QueryRowContext(ctx, 1).Scan(&n))
		held()
		_, err = writes.ExecContext(ctx, n-1, 1)
		dbtest.OK(t, err)
	},
}

// nest rolls back a transaction in another one, which commits 9.
func nest(t *testing.T, db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}, ctx context.Context, held func(),
) {
	t.Helper()
	outer, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(ctx, outer, 9))
	inner, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(ctx, inner, 6))
	dbtest.OK(t, inner.Rollback())
	held()
	dbtest.OK(t, outer.Commit())
}

var budgets = map[string]int{"without a budget": 0, "with one": 8}

// With and without a budget of connections the same is committed, and the same is held.
func TestEveryWayCommitsUnderEveryKindOfLockAndReleases(t *testing.T) {
	for kind, k := range kinds {
		for name, way := range ways {
			for budget, most := range budgets {
				t.Run(kind+"/"+name+"/"+budget, func(t *testing.T) {
					s, db, ctx := openWith(t, mysqllock.Config{MaxConns: most})
					way(t, db, lockctx.With(lockctx.Without(ctx), "k", k.option), k.option, func() {
						t.Helper()
						if !k.kept(s) || s.Stock() != 10 {
							t.Errorf("in the midst %d is committed, with %d rows, %d leases and %d names held", s.Stock(), s.Held(), s.Leases(), s.Named())
						}
					})
					dbtest.OK(t, db.Close())
					wantState(t, s, 9, 0)
					if s.Leases()+s.Named() != 0 {
						t.Errorf("%d leases and %d names are held at the end", s.Leases(), s.Named())
					}
				})
			}
		}
	}
}

var errCallback = errors.New("the callback says no")

func TestWhatIsUndoneIsNotCommitted(t *testing.T) {
	for name, undo := range map[string]func(*testing.T, *sql.DB, context.Context) (committed int64){
		"a rollback": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.OK(t, put(ctx, tx, 1))
			dbtest.OK(t, tx.Rollback())
			return 10
		},
		"a Do that fails": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			err := mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error { return errors.Join(put(ctx, db, 1), errCallback) })
			dbtest.Is(t, "the error", err, errCallback)
			return 10
		},
		"a Do that fails in another one": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			dbtest.OK(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
				dbtest.OK(t, put(ctx, db, 6))
				dbtest.Is(t, "the inner Do", mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return errors.Join(put(ctx, db, 5), errCallback) }), errCallback)
				return nil
			}))
			return 6
		},
		"a hold that is rolled back": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k")
			dbtest.OK(t, err)
			dbtest.OK(t, put(h.Context(), db, 3))
			dbtest.OK(t, h.Rollback())
			return 10
		},
		"a transaction begun by text, which is refused": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			free := lockctx.Without(ctx)
			c, err := db.Conn(free)
			dbtest.OK(t, err)
			defer c.Close()
			_, err = c.ExecContext(free, "BEGIN")
			dbtest.OK(t, err)
			dbtest.Is(t, "a hint in it", put(ctx, c, 3), mysqllock.ErrUnsafe)
			_, err = c.ExecContext(free, "ROLLBACK")
			dbtest.OK(t, err)
			return 10
		},
	} {
		for budget, most := range budgets {
			t.Run(name+"/"+budget, func(t *testing.T) {
				s, db, ctx := openWith(t, mysqllock.Config{MaxConns: most})
				wantState(t, s, undo(t, db, ctx), 0)
			})
		}
	}
}

// A version keeps nobody out, and no hold is one.
func TestEveryWayComparesVersions(t *testing.T) {
	for name, way := range ways {
		if name == "Do" || name == "a transaction in Do" || name == "Acquire" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			way(t, db, lockctx.With(lockctx.Without(ctx), "k", lockctx.Optimistic()), lockctx.Optimistic(), func() { wantState(t, s, 10, 0) })
			wantState(t, s, 9, 0)
		})
	}
}

func TestAChangedVersionIsAConflictAndCommitsNothing(t *testing.T) {
	for name, change := range map[string]struct {
		run func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error
	}{
		"a transaction": {func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error {
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.OK(t, put(ctx, tx, 1))
			between()
			return tx.Commit()
		}},
		"a write after a read": {func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error {
			n := stock.MustRead(t, ctx, db, 1)
			between()
			return put(ctx, db, n-1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			ctx = lockctx.With(lockctx.Without(ctx), "k", lockctx.Optimistic())
			dbtest.Is(t, "the error", change.run(t, db, ctx, s.Change), mysqllock.ErrConflict)
			wantState(t, s, 10, 0)
		})
	}
}

// The holder has not been told of the loss: the check before COMMIT has to find out.
func TestALockThatWasLostBeforeCommitCommitsNothing(t *testing.T) {
	for name, c := range map[string]struct {
		option lockctx.Option
		lose   func(*fakeserver.Server)
	}{
		"another has the lease":     {lockctx.Lease(time.Minute), (*fakeserver.Server).Steal},
		"the named lock is dropped": {lockctx.Advisory(), (*fakeserver.Server).Drop},
	} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			ctx = lockctx.With(lockctx.Without(ctx), "k", c.option)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.OK(t, put(ctx, tx, 1))
			c.lose(s)
			dbtest.Is(t, "the error", tx.Commit(), mysqllock.ErrLost)
			wantState(t, s, 10, 0)
		})
		t.Run(name+" in a hold", func(t *testing.T) {
			s, db, ctx := open(t)
			err := mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
				n := stock.MustRead(t, ctx, db, 1)
				c.lose(s)
				return put(ctx, db, n-1)
			}, c.option)
			dbtest.Is(t, "the error", err, mysqllock.ErrLost)
			wantState(t, s, 10, 0)
		})
	}
}

func TestAPanicReleases(t *testing.T) {
	for kind, k := range kinds {
		for name, leave := range map[any]func(){"panic": func() { panic("panic") }, nil: runtime.Goexit} {
			t.Run(fmt.Sprint(kind, "/", name), func(t *testing.T) {
				s, db, ctx := open(t)
				over := make(chan any)
				go func() {
					defer close(over)
					defer func() { over <- recover() }()
					_ = mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
						tx, err := db.BeginTx(ctx, nil)
						if err == nil {
							err = put(ctx, tx, 1)
						}
						if err == nil && s.Leases()+s.Named() == 0 { // a part of what Do has to roll back
							err = tx.Commit()
						}
						if err != nil {
							t.Error(err)
						}
						leave()
						return nil
					}, k.option)
				}()
				dbtest.Equal(t, "recovered %v", <-over, name)
				dbtest.OK(t, db.Close())
				wantState(t, s, 10, 0)
				if s.Leases()+s.Named() != 0 {
					t.Errorf("%d leases and %d names are held", s.Leases(), s.Named())
				}
			})
		}
	}
}

// A process that is frozen while it sets a connection up finds it ended by the server.
func TestAConnectionThatEndsAsItIsSetUpIsOpenedAgain(t *testing.T) {
	for kind, k := range kinds {
		for name, way := range ways {
			t.Run(kind+"/"+name, func(t *testing.T) {
				s, db, ctx := open(t)
				for range 2 {
					s.Fail("wait_timeout = ", refused(4031))
				}
				way(t, db, lockctx.With(lockctx.Without(ctx), "k", k.option), k.option, func() {})
				wantState(t, s, 9, 0)
			})
		}
		for connections, setUp := range map[string]string{"all": "wait_timeout = ", "those of sessions": "autocommit = 0, wait_timeout"} {
			t.Run(kind+"/again and again/"+connections, func(t *testing.T) {
				s, db, _ := open(t)
				for range 1000 {
					s.Fail(setUp, refused(4031))
				}
				if lock, err := mysqllock.Acquire(context.Background(), db, "k", k.option); err == nil {
					dbtest.OK(t, lock.Release()) // it needs no session
				}
				wantState(t, s, 10, 0)
			})
		}
	}
}

// Nor is one used on which the server's last word is in the driver's buffer: nothing is sent there.
func TestAConnectionThatTheServerHasEndedIsNotUsedForALock(t *testing.T) {
	for kind, take := range map[string]string{"row": "x'6b'", "shared": "FOR SHARE", "slots": "FOR UPDATE"} {
		t.Run(kind, func(t *testing.T) {
			s, db, _ := open(t)
			ctx, option := context.Background(), kinds[kind].option
			for name, write := range map[string]func(stock int) error{
				"Do": func(stock int) error {
					return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return put(ctx, db, stock) }, option)
				},
				"BeginTx": func(stock int) error {
					tx, err := db.BeginTx(lockctx.With(ctx, "k", option), nil)
					if err != nil {
						return err
					}
					return errors.Join(put(ctx, tx, stock), tx.Commit())
				},
			} {
				dbtest.OK(t, write(5)) // the rows are made
				s.Fail(take, mysql.ErrBusyBuffer)
				if err := write(6); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				wantState(t, s, 6, 0)
			}
		})
	}
}

// trades write 4 under a lock, and say what has become of it.
var trades = map[string]func(ctx context.Context, db *sql.DB, o lockctx.Option) error{
	"BeginTx": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return trade(lockctx.With(ctx, "k", o), db, (*sql.Tx).Commit)
	},
	"a rollback": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return trade(lockctx.With(ctx, "k", o), db, func(tx *sql.Tx) error { return errors.Join(tx.Rollback(), errCallback) })
	},
	"a statement": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return put(lockctx.With(context.WithoutCancel(ctx), "k", o), db, 4)
	},
	"a decision": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		ctx, cancel := context.WithCancel(lockctx.With(ctx, "k", o))
		defer cancel()
		var n int
		if err := db.QueryRowContext(ctx, read, 1).Scan(&n); err != nil {
			return err
		}
		return put(ctx, db, 4)
	},
	"Do": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return put(ctx, db, 4) }, o)
	},
	"Do that fails": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return errors.Join(put(ctx, db, 4), errCallback) }, o)
	},
	"a transaction in Do": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return trade(ctx, db, (*sql.Tx).Commit) }, o)
	},
	"Acquire": func(ctx context.Context, db *sql.DB, o lockctx.Option) error {
		h, err := mysqllock.Acquire(ctx, db, "k", o)
		if err != nil {
			return err
		}
		defer h.Release()
		if err := put(h.Context(), db, 4); err != nil {
			return err
		}
		return h.Release()
	},
}

// trade writes 4 in a transaction that begins with ctx.
func trade(ctx context.Context, db *sql.DB, end func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := put(ctx, tx, 4); err != nil {
		return err
	}
	return end(tx)
}

// TestAPanicOfTheDriverInAnyCallLeavesNothing: the driver below panics in each call in turn, and in each Close. At a statement of
// the application's that panic is the application's, at one of our own it is an error. Whoever recovers it meets a
// handle that has nothing locked, nothing in use, and that closes.
func TestAPanicOfTheDriverInAnyCallLeavesNothing(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	options := map[string]lockctx.Option{"optimistic": lockctx.Optimistic()}
	for kind, k := range kinds {
		options[kind] = k.option
	}
	for kind, option := range options {
		for name, trade := range trades {
			for budget, most := range budgets {
				t.Run(kind+"/"+name+"/"+budget, func(t *testing.T) {
					t.Parallel()
					of := func(p fakeserver.Product, answer bool) {
						for n := 0; panicAfter(t, p, most, n, answer, func(ctx context.Context, db *sql.DB) error { return trade(ctx, db, option) }); n++ {
						}
					}
					of(fakeserver.MySQL, false)
					if most == 0 {
						of(fakeserver.MySQL, true)
					}
					if kind == "row" { // the others the fake knows for MySQL alone
						of(fakeserver.MariaDB, false)
					}
				})
			}
		}
	}
}

// panicAfter reports whether a trade makes more than n calls of the driver, and checks what a panic leaves in the one
// after these, before it is done or with its answer.
func panicAfter(t *testing.T, p fakeserver.Product, maxConns, n int, answer bool, trade func(context.Context, *sql.DB) error) bool {
	t.Helper()
	s := fakeserver.New()
	s.Product = p
	db, _ := openOn(t, s, mysqllock.Config{MaxConns: maxConns})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_ = trade(ctx, db) // what a new handle asks for is sent
	dbtest.OK(t, put(ctx, db, 10))
	over := s.PanicAfter(n, answer)
	recovered, err := false, error(nil)
	func() {
		defer func() {
			if v := recover(); v != nil {
				recovered = true
				err = fmt.Errorf("recovered: %v", v)
			}
		}()
		err = trade(ctx, db)
	}()
	in := over()
	cancel()
	what := fmt.Sprintf("panic after %d calls, in %.60q", n, in)
	told := (*mysqllock.Error)(nil)
	committed := errors.As(err, &told) && told.Op == "release" || errors.Is(err, errCallback) || // of a grant: the statement has committed
		recovered && strings.Contains(err.Error(), "Close") // that of database/sql, which comes after the COMMIT
	if stock := s.Stock(); err == nil && stock != 4 || err != nil && stock != 10 && !answer && !committed {
		t.Errorf("%s: %d is committed, and the caller was told: %v", what, stock, err)
	}
	dbtest.Eventually(t, "nothing is held, nobody waits, and nothing is in use", func() error {
		st, err := mysqllock.Stats(db)
		inUse := db.Stats().InUse
		if recovered { // of a query or a BEGIN that panics, database/sql leaves the connection in use
			inUse = 0
		}
		if err == nil && (st.OldestHold != 0 || st.OldestWait != 0 || st.InUse+inUse != 0) {
			err = fmt.Errorf("%s: %+v, %d of database/sql", what, st, db.Stats().InUse)
		}
		return err
	})
	other := another(t, s)
	if err := put(lockctx.With(context.Background(), "k", lockctx.Wait(10*time.Second)), other, 5); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	select {
	case <-dbtest.Go(db.Close):
	case <-time.After(10 * time.Second):
		t.Fatalf("%s: Close hangs", what)
	}
	return in != "" && !t.Failed()
}

// panics is a Tracer that panics in each of its calls.
type panics struct{ calls atomic.Int32 }

func (p *panics) Observe(context.Context, mysqllock.Event) {
	p.calls.Add(1)
	panic("the observer")
}

func (p *panics) Asking(context.Context, mysqllock.Event) context.Context {
	p.calls.Add(1)
	panic("the observer")
}

func (p *panics) Releasing(context.Context, mysqllock.Event) {}

func TestAPanicOfAnObserverDisturbsNothing(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	for kind, k := range kinds {
		for name, trade := range trades {
			t.Run(kind+"/"+name, func(t *testing.T) {
				calm, quiet, _ := open(t)
				watched, o := fakeserver.New(), &panics{}
				db, _ := openOn(t, watched, mysqllock.Config{Observer: mysqllock.Observers{o}})
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				want, got := trade(ctx, quiet, k.option), trade(ctx, db, k.option)
				if (got == nil) != (want == nil) || watched.Stock() != calm.Stock() {
					t.Errorf("%v, with %d committed; without an observer %v, with %d", got, watched.Stock(), want, calm.Stock())
				}
				dbtest.Soon(t, "as much is held as without an observer", func() bool { // no committer waits until a wake-up lock is given back
					return watched.Held()+watched.Leases()+watched.Named() == calm.Held()+calm.Leases()+calm.Named()
				})
				if n := o.calls.Load(); n != 3 { // asked for, granted, given back
					t.Errorf("the observer was called %d times", n)
				}
			})
		}
	}
}

// One lock that is lost is enough, whatever else is held.
func TestEachOfTwoLocksIsCheckedBeforeCommit(t *testing.T) {
	for name, lose := range map[string]func(*fakeserver.Server){
		"the lease": (*fakeserver.Server).Steal,
		"the name":  (*fakeserver.Server).Drop,
	} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			ctx = lockctx.With(lockctx.Without(ctx), "a", lockctx.Lease(time.Minute))
			ctx = lockctx.With(ctx, "b", lockctx.Advisory())
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.OK(t, put(ctx, tx, 1))
			lose(s)
			dbtest.Is(t, "the error", tx.Commit(), mysqllock.ErrLost)
			wantState(t, s, 10, 0)
		})
	}
}
