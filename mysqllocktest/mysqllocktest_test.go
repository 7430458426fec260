package mysqllocktest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/DATA-DOG/go-sqlmock"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

// shop is the service under test. It is written as any other: it does not know of tests.
type shop struct {
	db   *sql.DB
	inDo func() // nil, or called within the locks
}

var errSoldOut = errors.New("sold out")

// sell decides in Do.
func (s *shop) sell(ctx context.Context) error {
	return mysqllock.Do(ctx, s.db, "product:42", func(ctx context.Context) error {
		var stock int
		if err := s.db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil {
			return err
		}
		if s.inDo != nil {
			s.inDo()
		}
		if stock == 0 {
			return errSoldOut
		}
		_, err := s.db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1)
		return err
	})
}

// restock decides in a transaction of its own.
func (s *shop) restock(ctx context.Context, opts ...lockctx.Option) error {
	ctx = lockctx.With(ctx, "product:42", opts...)
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if s.inDo != nil {
		s.inDo()
	}
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock + 10 WHERE id = 42"); err != nil {
		return err
	}
	return tx.Commit()
}

// report takes a lease for long work, and writes at its end.
func (s *shop) report(ctx context.Context, work func(ctx context.Context) error) error {
	return mysqllock.Do(ctx, s.db, "report", func(ctx context.Context) error {
		if err := work(ctx); err != nil {
			return err
		}
		_, err := s.db.ExecContext(ctx, "INSERT INTO reports VALUES (1)")
		return err
	}, lockctx.Lease(time.Minute))
}

type test struct {
	*testing.T
	locks *mysqllocktest.Locks
	mock  sqlmock.Sqlmock
	db    *sql.DB
}

func newTest(t *testing.T, c mysqllock.Config) *test {
	t.Helper()
	x := &test{T: t, locks: mysqllocktest.New()}
	x.db, x.mock = x.open(c)
	return x
}

// open opens a handle of a process of its own, on a mock of its own.
func (t *test) open(c mysqllock.Config) (*sql.DB, sqlmock.Sqlmock) {
	t.Helper()
	base, mock, err := sqlmock.New(sqlmock.QueryMatcherOption(sqlmock.QueryMatcherEqual))
	t.ok(err)
	db, err := t.locks.Open(base, c)
	t.ok(err)
	t.Cleanup(func() {
		t.ok(db.Close())
		if err := mock.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
		_ = base.Close()
	})
	return db, mock
}

func (t *test) ok(err error) {
	t.Helper()
	dbtest.OK(t, err)
}

func (t *test) is(err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}

func (t *test) holders(key string, want ...string) {
	t.Helper()
	if got := t.locks.Holders(key); !slices.Equal(got, want) {
		t.Errorf("%s is held by %q, want %q", key, got, want)
	}
}

// other is another process that holds key until release is called.
func (t *test) other(key string, opts ...lockctx.Option) (release func() error) {
	t.Helper()
	db, err := t.locks.Open(nil, mysqllock.Config{Owner: "billing-7"})
	t.ok(err)
	hold, err := mysqllock.Acquire(context.Background(), db, key, opts...)
	t.ok(err)
	t.Cleanup(func() { _ = db.Close() })
	return hold.Release
}

func stock(n int) *sqlmock.Rows { return sqlmock.NewRows([]string{"stock"}).AddRow(n) }

const (
	readStock  = "SELECT stock FROM products WHERE id = 42"
	writeStock = "UPDATE products SET stock = ? WHERE id = 42"
	addStock   = "UPDATE products SET stock = stock + 10 WHERE id = 42"
)

func TestDoSendsOneTransaction(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	x.mock.ExpectBegin()
	x.mock.ExpectQuery(readStock).WillReturnRows(stock(3))
	x.mock.ExpectExec(writeStock).WithArgs(2).WillReturnResult(sqlmock.NewResult(0, 1))
	x.mock.ExpectCommit()
	s := &shop{db: x.db, inDo: func() { x.holders("product:42", "process-1") }}
	x.ok(s.sell(t.Context()))
	x.holders("product:42")
}

func TestDoRollsBackWhatItsFunctionRefuses(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	x.mock.ExpectBegin()
	x.mock.ExpectQuery(readStock).WillReturnRows(stock(0))
	x.mock.ExpectRollback()
	x.is((&shop{db: x.db}).sell(t.Context()), errSoldOut)
	x.holders("product:42")
}

func TestADatabaseErrorIsTheApplicationsOwn(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	broken := errors.New("the disk is full")
	x.mock.ExpectBegin()
	x.mock.ExpectQuery(readStock).WillReturnError(broken)
	x.mock.ExpectRollback()
	err := (&shop{db: x.db}).sell(t.Context())
	x.is(err, broken)
	if errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("%v is no loss", err)
	}
}

func TestACommitThatFailsIsAnError(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	broken := errors.New("the disk is full")
	x.mock.ExpectBegin()
	x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
	x.mock.ExpectCommit().WillReturnError(broken)
	x.is((&shop{db: x.db}).restock(t.Context()), broken)
	x.holders("product:42")
}

func TestABeginThatFailsIsAnError(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	broken := errors.New("too many connections")
	x.mock.ExpectBegin().WillReturnError(broken)
	x.is((&shop{db: x.db}).restock(t.Context()), broken)
	x.holders("product:42")
}

func TestBeginTxHoldsItsLockUntilCommit(t *testing.T) {
	for name, option := range map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute), "advisory": lockctx.Advisory(), "slots": lockctx.Slots(3),
	} {
		t.Run(name, func(t *testing.T) {
			x := newTest(t, mysqllock.Config{})
			x.mock.ExpectBegin()
			x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
			x.mock.ExpectCommit()
			s := &shop{db: x.db, inDo: func() { x.holders("product:42", "process-1") }}
			x.ok(s.restock(t.Context(), option))
			x.holders("product:42")
		})
	}
}

func TestATransactionInsideDoIsASavepoint(t *testing.T) {
	for name, commit := range map[string]bool{"commit": true, "rollback": false} {
		t.Run(name, func(t *testing.T) {
			x := newTest(t, mysqllock.Config{})
			x.mock.ExpectBegin()
			x.mock.ExpectExec("SAVEPOINT mysqllock_1").WillReturnResult(sqlmock.NewResult(0, 0))
			x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
			end := (*sql.Tx).Commit
			if commit {
				x.mock.ExpectExec("RELEASE SAVEPOINT mysqllock_1").WillReturnResult(sqlmock.NewResult(0, 0))
			} else {
				end = (*sql.Tx).Rollback
				x.mock.ExpectExec("ROLLBACK TO SAVEPOINT mysqllock_1").WillReturnResult(sqlmock.NewResult(0, 0))
			}
			x.mock.ExpectCommit()
			x.ok(mysqllock.Do(t.Context(), x.db, "product:42", func(ctx context.Context) error {
				tx, err := x.db.BeginTx(ctx, nil)
				x.ok(err)
				_, err = tx.ExecContext(ctx, addStock)
				x.ok(err)
				return end(tx)
			}))
		})
	}
}

// TestTwoCallersExcludeEachOther: the second one begins when the first one has committed, in the
// same process and in another.
func TestTwoCallersExcludeEachOther(t *testing.T) {
	for _, where := range []string{"one process", "two processes"} {
		t.Run(where, func(t *testing.T) {
			x := newTest(t, mysqllock.Config{})
			expect := func(mock sqlmock.Sqlmock, n int) {
				mock.ExpectBegin()
				mock.ExpectQuery(readStock).WillReturnRows(stock(n))
				mock.ExpectExec(writeStock).WithArgs(n - 1).WillReturnResult(sqlmock.NewResult(0, 1))
				mock.ExpectCommit()
			}
			expect(x.mock, 2)
			db, mock := x.db, x.mock
			if where == "two processes" {
				db, mock = x.open(mysqllock.Config{})
			}
			expect(mock, 1)

			inside, leave := make(chan struct{}), make(chan struct{})
			first, second := make(chan error, 1), make(chan error, 1)
			var order []string
			go func() {
				first <- (&shop{db: x.db, inDo: func() { close(inside); <-leave; order = append(order, "first") }}).sell(t.Context())
			}()
			<-inside
			go func() {
				second <- (&shop{db: db, inDo: func() { order = append(order, "second") }}).sell(t.Context())
			}()
			for stats := (mysqllock.PoolStats{}); stats.Waiters == 0; {
				var err error
				stats, err = mysqllock.Stats(db)
				x.ok(err)
				select {
				case err := <-second:
					t.Fatalf("the second caller did not wait: %v", err)
				case <-time.After(time.Millisecond):
				}
			}
			close(leave)
			x.ok(<-first)
			x.ok(<-second)
			dbtest.Equal(t, "they came in the order %s", fmt.Sprint(order), "[first second]")
		})
	}
}

func TestATimeoutNamesTheHolder(t *testing.T) {
	for name, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute)} {
		for _, waits := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", waits ", waits), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { // a machine that stands still is no server that does not answer
					c := mysqllock.Config{NoWait: !waits}
					want := mysqllock.ErrLocked
					if waits {
						c.Wait, want = 30*time.Millisecond, mysqllock.ErrTimeout
					}
					x := newTest(t, c) // its mock expects nothing
					release := x.other("product:42", option)
					x.holders("product:42", "billing-7")

					err := (&shop{db: x.db}).restock(t.Context())
					x.is(err, want)
					var e *mysqllock.Error
					if !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != "billing-7" || e.Holder.ThisProcess {
						t.Errorf("the error is %v", err)
					}
					if waits && e.Waited < 30*time.Millisecond {
						t.Errorf("it waited for %v", e.Waited)
					}
					x.ok(release())
					x.holders("product:42")
				})
			})
		}
	}
}

func TestALostLeaseEndsItsWorkAndCommitsNothing(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	err := (&shop{db: x.db}).report(t.Context(), func(ctx context.Context) error {
		x.holders("report", "process-1")
		x.locks.Lose("report")
		select {
		case <-ctx.Done(): // without waiting for a third of the minute
		case <-time.After(10 * time.Second):
			t.Error("the work goes on")
		}
		x.is(context.Cause(ctx), mysqllock.ErrLost)
		x.holders("report")
		return nil
	})
	x.is(err, mysqllock.ErrLost)
	x.ok(x.other("report", lockctx.NoWait())())
}

// TestALeaseIsRenewed for an hour of the time of a synctest bubble.
func TestALeaseIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTest(t, mysqllock.Config{})
		x.ok(mysqllock.Do(t.Context(), x.db, "k", func(ctx context.Context) error {
			time.Sleep(time.Hour)
			x.holders("k", "process-1")
			return ctx.Err()
		}, lockctx.Lease(30*time.Second)))
		x.holders("k")
	})
}

func TestALostRowLockCommitsNothing(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	x.mock.ExpectBegin()
	x.mock.ExpectRollback()
	s := &shop{db: x.db, inDo: func() { x.locks.Lose("product:42") }}
	x.is(s.restock(t.Context()), mysqllock.ErrLost)
	x.holders("product:42")
	x.ok(x.other("product:42", lockctx.NoWait())())
}

// TestALockLostBeforeCommitCommitsNothing: it is lost after the last statement.
func TestALockLostBeforeCommitCommitsNothing(t *testing.T) {
	for name, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute), "advisory": lockctx.Advisory()} {
		t.Run(name, func(t *testing.T) {
			x := newTest(t, mysqllock.Config{})
			x.mock.ExpectBegin()
			x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
			x.mock.ExpectRollback()
			ctx := lockctx.With(t.Context(), "product:42", option)
			tx, err := x.db.BeginTx(ctx, nil)
			x.ok(err)
			_, err = tx.ExecContext(ctx, addStock)
			x.ok(err)
			x.locks.Lose("product:42")
			x.is(tx.Commit(), mysqllock.ErrLost)
			x.holders("product:42")
		})
	}
}

func TestALostAdvisoryLockEndsItsWork(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	err := mysqllock.Do(t.Context(), x.db, "k", func(ctx context.Context) error {
		x.locks.Lose("k")
		<-ctx.Done()
		return context.Cause(ctx)
	}, lockctx.Advisory())
	x.is(err, mysqllock.ErrLost)
}

func TestAWriteOnAnOlderDecisionIsStale(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	x.mock.ExpectBegin()
	x.mock.ExpectQuery(readStock).WillReturnRows(stock(3))
	x.mock.ExpectExec(writeStock).WithArgs(2).WillReturnResult(sqlmock.NewResult(0, 1))
	x.mock.ExpectCommit()
	ctx := lockctx.With(t.Context(), "product:42")
	var n int
	x.ok(x.db.QueryRowContext(ctx, readStock).Scan(&n))
	x.holders("product:42", "process-1")
	_, err := x.db.ExecContext(ctx, writeStock, n-1)
	x.ok(err)
	x.holders("product:42")
	_, err = x.db.ExecContext(ctx, writeStock, n-2)
	x.is(err, mysqllock.ErrStaleRead)
}

func TestSharedLocksAndSlotsHaveRoomForMore(t *testing.T) {
	for name, option := range map[string]lockctx.Option{"shared": lockctx.Shared(), "slots": lockctx.Slots(2)} {
		t.Run(name, func(t *testing.T) {
			x := newTest(t, mysqllock.Config{})
			release := x.other("k", option)
			x.ok(mysqllock.Do(t.Context(), x.db, "k", func(context.Context) error {
				x.holders("k", "billing-7", "process-1")
				err := mysqllock.Do(t.Context(), x.db, "k", func(context.Context) error { return nil }, lockctx.NoWait())
				x.is(err, mysqllock.ErrLocked)
				return nil
			}, option))
			x.ok(release())
		})
	}
}

func TestAKeyIsReentrant(t *testing.T) {
	x := newTest(t, mysqllock.Config{NoWait: true})
	x.mock.ExpectBegin() // the inner Do can be rolled back by itself
	x.mock.ExpectExec("SAVEPOINT mysqllock_1").WillReturnResult(sqlmock.NewResult(0, 0))
	x.mock.ExpectExec("RELEASE SAVEPOINT mysqllock_1").WillReturnResult(sqlmock.NewResult(0, 0))
	x.mock.ExpectCommit()
	x.ok(mysqllock.Do(t.Context(), x.db, "k", func(ctx context.Context) error {
		return mysqllock.Do(ctx, x.db, "k", func(context.Context) error {
			x.holders("k", "process-1")
			return nil
		})
	}))
	x.holders("k")
}

func TestOppositeOrdersDeadlock(t *testing.T) {
	x := &test{T: t, locks: mysqllocktest.New()}
	one, err := x.locks.Open(nil, mysqllock.Config{})
	x.ok(err)
	defer one.Close()
	other, err := x.locks.Open(nil, mysqllock.Config{})
	x.ok(err)
	defer other.Close()
	both := make(chan struct{}, 2)
	meet := func(db *sql.DB, one, two string) error {
		return mysqllock.Do(t.Context(), db, one, func(ctx context.Context) error {
			both <- struct{}{}
			for len(both) < 2 {
				time.Sleep(time.Millisecond)
			}
			return mysqllock.Do(ctx, db, two, func(context.Context) error { return nil })
		})
	}
	done := make(chan error, 1)
	go func() { done <- meet(other, "b", "a") }()
	errs := []error{meet(one, "a", "b"), <-done}
	if errors.Is(errs[0], mysqllock.ErrDeadlock) == errors.Is(errs[1], mysqllock.ErrDeadlock) || errs[0] != nil && errs[1] != nil {
		t.Errorf("got %v", errs)
	}
}

func TestNamespacesAreApart(t *testing.T) {
	x := newTest(t, mysqllock.Config{Namespace: "orders", NoWait: true})
	x.other("k") // in the default namespace
	x.ok(mysqllock.Do(t.Context(), x.db, "k", func(context.Context) error {
		x.holders("k", "billing-7", "process-1")
		return nil
	}))
}

func TestAHandleWithoutADatabaseSaysSo(t *testing.T) {
	x := newTest(t, mysqllock.Config{})
	db, err := x.locks.Open(nil, mysqllock.Config{})
	x.ok(err)
	defer db.Close()
	if err := db.PingContext(t.Context()); err != nil {
		t.Error(err)
	}
	_, err = db.ExecContext(t.Context(), "UPDATE p SET n = 1", 1)
	if err == nil || !strings.Contains(err.Error(), "no database") {
		t.Errorf("got %v", err)
	}
}

func TestABadConfigIsRefused(t *testing.T) {
	if _, err := mysqllocktest.New().Open(nil, mysqllock.Config{Wait: -1}); err == nil {
		t.Error("a negative wait is accepted")
	}
}

// TestEveryWayOfDatabaseSQLWorks uses what database/sql has.
func TestEveryWayOfDatabaseSQLWorks(t *testing.T) {
	for name, c := range map[string]mysqllock.Config{"": {}, "with maxConns": {MaxConns: 8}} {
		t.Run(name, func(t *testing.T) {
			x := newTest(t, c)

			x.mock.ExpectExec("DELETE FROM old").WillReturnResult(sqlmock.NewResult(0, 0)) // without a lock, no transaction
			_, err := x.db.ExecContext(t.Context(), "DELETE FROM old")
			x.ok(err)

			x.mock.ExpectPrepare(writeStock) // database/sql prepares at once
			x.mock.ExpectBegin()
			x.mock.ExpectPrepare(writeStock).ExpectExec().WithArgs(7).WillReturnResult(sqlmock.NewResult(0, 1))
			x.mock.ExpectCommit()
			x.ok(mysqllock.Do(t.Context(), x.db, "k", func(ctx context.Context) error {
				s, err := x.db.PrepareContext(ctx, writeStock)
				x.ok(err)
				defer s.Close()
				_, err = s.ExecContext(ctx, 7)
				return err
			}))

			x.mock.ExpectBegin() // a second lock in a transaction
			x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
			x.mock.ExpectRollback()
			first := lockctx.With(t.Context(), "first")
			tx, err := x.db.BeginTx(first, nil)
			x.ok(err)
			_, err = tx.ExecContext(lockctx.With(first, "k"), addStock)
			x.ok(err)
			x.holders("k", "process-1")
			x.ok(tx.Rollback())
			x.holders("k")

			x.mock.ExpectExec("BEGIN").WillReturnResult(sqlmock.NewResult(0, 0)) // a transaction by text
			x.mock.ExpectExec(addStock).WillReturnResult(sqlmock.NewResult(0, 1))
			x.mock.ExpectExec("COMMIT").WillReturnResult(sqlmock.NewResult(0, 0))
			conn, err := x.db.Conn(t.Context())
			x.ok(err)
			for _, text := range []string{"BEGIN", addStock, "COMMIT"} {
				_, err = conn.ExecContext(t.Context(), text)
				x.ok(err)
			}
			x.ok(conn.Close())
		})
	}
}
