package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
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
		must(t, err)
		must(t, put(ctx, tx, seen(t, tx, ctx)-1))
		held()
		must(t, tx.Commit())
	},
	"a write": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, _ func()) {
		must(t, put(ctx, db, 9))
	},
	"read, decide, write": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		n := seen(t, db, ctx)
		held()
		must(t, put(ctx, db, n-1))
	},
	"Do": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		must(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
			n := seen(t, db, ctx)
			held()
			return put(ctx, db, n-1)
		}, o))
	},
	"a transaction in Do": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		must(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			must(t, err)
			must(t, put(ctx, tx, seen(t, tx, ctx)-1))
			held()
			return tx.Commit()
		}, o))
	},
	"Acquire": func(t *testing.T, db *sql.DB, ctx context.Context, o lockctx.Option, held func()) {
		h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k", o)
		must(t, err)
		n := seen(t, db, h.Context())
		held()
		must(t, put(h.Context(), db, n-1))
		must(t, h.Release())
		must(t, h.Release())
	},
	"a late hint": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		tx, err := db.BeginTx(lockctx.Without(ctx), nil)
		must(t, err)
		must(t, put(ctx, tx, 9))
		held()
		must(t, tx.Commit())
	},
	"sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		must(t, err)
		n := seen(t, c, ctx)
		held()
		must(t, put(ctx, c, n-1))
		must(t, c.Close())
	},
	"a transaction on a sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		must(t, err)
		tx, err := c.BeginTx(ctx, nil)
		must(t, err)
		must(t, put(ctx, tx, seen(t, tx, ctx)-1))
		held()
		must(t, tx.Commit())
		must(t, c.Close())
	},
	"a savepoint": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		tx, err := db.BeginTx(ctx, nil)
		must(t, err)
		must(t, put(ctx, tx, 9))
		_, err = tx.ExecContext(ctx, "SAVEPOINT s")
		must(t, err)
		must(t, put(ctx, tx, 3))
		_, err = tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT s")
		must(t, err)
		held()
		must(t, tx.Commit())
	},
	"an inner transaction that is rolled back": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		nest(t, db, ctx, held)
	},
	"one on a sql.Conn": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		c, err := db.Conn(lockctx.Without(ctx))
		must(t, err)
		defer c.Close()
		nest(t, c, ctx, held)
		must(t, c.PingContext(ctx))
	},
	"a statement that was prepared before its transaction": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		st, err := db.PrepareContext(lockctx.Without(ctx), write)
		must(t, err)
		defer st.Close()
		tx, err := db.BeginTx(ctx, nil)
		must(t, err)
		_, err = tx.StmtContext(ctx, st).ExecContext(ctx, 9, 1)
		must(t, err)
		held()
		must(t, tx.Commit())
	},
	"prepared statements": func(t *testing.T, db *sql.DB, ctx context.Context, _ lockctx.Option, held func()) {
		reads, err := db.PrepareContext(lockctx.Without(ctx), read)
		must(t, err)
		defer reads.Close()
		writes, err := db.PrepareContext(ctx, write)
		must(t, err)
		defer writes.Close()
		var n int
		must(t, reads.QueryRowContext(ctx, 1).Scan(&n))
		held()
		_, err = writes.ExecContext(ctx, n-1, 1)
		must(t, err)
	},
}

// nest rolls back a transaction in another one, which commits 9.
func nest(t *testing.T, db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}, ctx context.Context, held func(),
) {
	t.Helper()
	outer, err := db.BeginTx(ctx, nil)
	must(t, err)
	must(t, put(ctx, outer, 9))
	inner, err := db.BeginTx(ctx, nil)
	must(t, err)
	must(t, put(ctx, inner, 6))
	must(t, inner.Rollback())
	held()
	must(t, outer.Commit())
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
					must(t, db.Close())
					state(t, s, 9, 0)
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
			must(t, err)
			must(t, put(ctx, tx, 1))
			must(t, tx.Rollback())
			return 10
		},
		"a Do that fails": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			err := mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error { return errors.Join(put(ctx, db, 1), errCallback) })
			dbtest.Is(t, "the error", err, errCallback)
			return 10
		},
		"a Do that fails in another one": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			must(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
				must(t, put(ctx, db, 6))
				dbtest.Is(t, "the inner Do", mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return errors.Join(put(ctx, db, 5), errCallback) }), errCallback)
				return nil
			}))
			return 6
		},
		"a hold that is rolled back": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k")
			must(t, err)
			must(t, put(h.Context(), db, 3))
			must(t, h.Rollback())
			return 10
		},
		"a transaction begun by text, which is refused": func(t *testing.T, db *sql.DB, ctx context.Context) int64 {
			free := lockctx.Without(ctx)
			c, err := db.Conn(free)
			must(t, err)
			defer c.Close()
			_, err = c.ExecContext(free, "BEGIN")
			must(t, err)
			dbtest.Is(t, "a hint in it", put(ctx, c, 3), mysqllock.ErrUnsafe)
			_, err = c.ExecContext(free, "ROLLBACK")
			must(t, err)
			return 10
		},
	} {
		for budget, most := range budgets {
			t.Run(name+"/"+budget, func(t *testing.T) {
				s, db, ctx := openWith(t, mysqllock.Config{MaxConns: most})
				state(t, s, undo(t, db, ctx), 0)
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
			way(t, db, lockctx.With(lockctx.Without(ctx), "k", lockctx.Optimistic()), lockctx.Optimistic(), func() { state(t, s, 10, 0) })
			state(t, s, 9, 0)
		})
	}
}

func TestAChangedVersionIsAConflictAndCommitsNothing(t *testing.T) {
	for name, change := range map[string]struct {
		run func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error
	}{
		"a transaction": {func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error {
			tx, err := db.BeginTx(ctx, nil)
			must(t, err)
			must(t, put(ctx, tx, 1))
			between()
			return tx.Commit()
		}},
		"a write after a read": {func(t *testing.T, db *sql.DB, ctx context.Context, between func()) error {
			n := seen(t, db, ctx)
			between()
			return put(ctx, db, n-1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			ctx = lockctx.With(lockctx.Without(ctx), "k", lockctx.Optimistic())
			dbtest.Is(t, "the error", change.run(t, db, ctx, s.Change), mysqllock.ErrConflict)
			state(t, s, 10, 0)
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
			must(t, err)
			must(t, put(ctx, tx, 1))
			c.lose(s)
			dbtest.Is(t, "the error", tx.Commit(), mysqllock.ErrLost)
			state(t, s, 10, 0)
		})
		t.Run(name+" in a hold", func(t *testing.T) {
			s, db, ctx := open(t)
			err := mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
				n := seen(t, db, ctx)
				c.lose(s)
				return put(ctx, db, n-1)
			}, c.option)
			dbtest.Is(t, "the error", err, mysqllock.ErrLost)
			state(t, s, 10, 0)
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
						must(t, err)
						must(t, put(ctx, tx, 1))
						if s.Leases()+s.Named() == 0 { // a part of what Do has to roll back
							must(t, tx.Commit())
						}
						leave()
						return nil
					}, k.option)
				}()
				dbtest.Equal(t, "recovered %v", <-over, name)
				must(t, db.Close())
				state(t, s, 10, 0)
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
				state(t, s, 9, 0)
			})
		}
		for connections, setUp := range map[string]string{"all": "wait_timeout = ", "those of sessions": "autocommit = 0, wait_timeout"} {
			t.Run(kind+"/again and again/"+connections, func(t *testing.T) {
				s, db, _ := open(t)
				for range 1000 {
					s.Fail(setUp, refused(4031))
				}
				if lock, err := mysqllock.Acquire(context.Background(), db, "k", k.option); err == nil {
					must(t, lock.Release()) // it needs no session
				}
				state(t, s, 10, 0)
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
				must(t, write(5)) // the rows are made
				s.Fail(take, mysql.ErrBusyBuffer)
				if err := write(6); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				state(t, s, 6, 0)
			}
		})
	}
}

func TestAPanicOfTheDriverWhileARowIsLockedLeavesNothing(t *testing.T) {
	for kind, take := range map[string]string{"row": "FOR UPDATE", "shared": "FOR SHARE", "slots": "FOR UPDATE"} {
		t.Run(kind, func(t *testing.T) {
			s, db, _ := open(t)
			acquire := func() error {
				lock, err := mysqllock.Acquire(context.Background(), db, "k", kinds[kind].option, lockctx.Wait(time.Minute))
				if err == nil {
					err = lock.Release()
				}
				return err
			}
			must(t, acquire()) // its row is made
			s.Panic(take)
			func() {
				defer func() {
					dbtest.Equal(t, "recovered %v", recover(), "the driver")
				}()
				t.Error("it did not panic: ", acquire())
			}()
			must(t, acquire())
			dbtest.Soon(t, "no connection is in use", func() bool {
				st, err := mysqllock.Stats(db)
				return err == nil && st.InUse == 0
			})
			state(t, s, 10, 0)
		})
	}
}

// TestAPanicOfTheDriverUnderALockLeavesNothing: whatever the driver below panics at, the connection is closed,
// and the key is free for another process.
func TestAPanicOfTheDriverUnderALockLeavesNothing(t *testing.T) {
	do := func(opt lockctx.Option, end error) func(context.Context, *sql.DB) error {
		return func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				must(t, put(ctx, db, 4))
				return end
			}, opt)
		}
	}
	begin := func(opt lockctx.Option, end func(*sql.Tx) error) func(context.Context, *sql.DB) error {
		return func(ctx context.Context, db *sql.DB) error {
			ctx = lockctx.With(ctx, "k", opt)
			tx, err := db.BeginTx(ctx, nil)
			must(t, err)
			must(t, put(ctx, tx, 4))
			return end(tx)
		}
	}
	for name, of := range map[string]struct {
		at string
		do func(context.Context, *sql.DB) error
	}{
		"COMMIT of a transaction":              {"COMMIT", begin(lockctx.Row(), (*sql.Tx).Commit)},
		"ROLLBACK of a transaction":            {"ROLLBACK", begin(lockctx.Row(), (*sql.Tx).Rollback)},
		"COMMIT of a transaction with a lease": {"COMMIT", begin(lockctx.Lease(time.Minute), (*sql.Tx).Commit)},
		"COMMIT of Do":                         {"COMMIT", do(lockctx.Row(), nil)},
		"ROLLBACK of Do":                       {"ROLLBACK", do(lockctx.Row(), errCallback)},
		"COMMIT of a statement": {"COMMIT", func(ctx context.Context, db *sql.DB) error {
			return put(lockctx.With(ctx, "k"), db, 4)
		}},
		"COMMIT of a decision": {"COMMIT", func(ctx context.Context, db *sql.DB) error {
			ctx = lockctx.With(ctx, "k")
			seen(t, db, ctx)
			return put(ctx, db, 4)
		}},
		"a savepoint": {"SAVEPOINT", func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				_, err := db.BeginTx(ctx, nil)
				return err
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s, db, _ := open(t)
			ctx, cancel := context.WithCancel(context.Background())
			_ = of.do(ctx, db) // opens the connections of the handle's own, which nobody could recover
			cancel()
			ctx, cancel = context.WithCancel(context.Background())
			s.Panic(of.at)
			func() {
				defer func() {
					dbtest.Equal(t, "recovered %v", recover(), "the driver")
				}()
				t.Error("it did not panic: ", of.do(ctx, db))
			}()
			cancel()
			other := another(t, s)
			must(t, put(lockctx.With(context.Background(), "k", lockctx.Wait(10*time.Second)), other, 5))
			state(t, s, 5, 0)
			dbtest.Soon(t, "nothing is held", func() bool {
				st, err := mysqllock.Stats(db)
				return err == nil && st.OldestHold == 0
			})
			select {
			case <-dbtest.Go(db.Close):
			case <-time.After(10 * time.Second):
				t.Error("Close hangs")
			}
		})
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
			must(t, err)
			must(t, put(ctx, tx, 1))
			lose(s)
			dbtest.Is(t, "the error", tx.Commit(), mysqllock.ErrLost)
			state(t, s, 10, 0)
		})
	}
}
