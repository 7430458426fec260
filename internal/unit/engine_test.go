package unit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

const (
	read  = "SELECT stock FROM p WHERE id = ?"
	write = "UPDATE p SET stock = ? WHERE id = ?"
)

// open opens a handle on a fake server, and a lock context that ends with the test.
// A statement that the fake does not know fails the test, and so does a lock that stays.
func open(t *testing.T) (*fakeserver.Server, *sql.DB, context.Context) {
	t.Helper()
	return openWith(t, mysqllock.Config{})
}

func openWith(t *testing.T, cfg mysqllock.Config) (*fakeserver.Server, *sql.DB, context.Context) {
	t.Helper()
	s := fakeserver.New()
	db, ctx := openOn(t, s, cfg)
	return s, db, ctx
}

// onProducts runs a test on each server that is asked in other words.
func onProducts(t *testing.T, test func(*testing.T, *fakeserver.Server, *sql.DB, context.Context)) {
	t.Helper()
	for name, product := range map[string]fakeserver.Product{
		"MySQL": fakeserver.MySQL, "MariaDB": fakeserver.MariaDB,
	} {
		t.Run(name, func(t *testing.T) {
			s := fakeserver.New()
			s.Product = product
			db, ctx := openOn(t, s, mysqllock.Config{})
			test(t, s, db, ctx)
		})
	}
}

func openOn(t *testing.T, s *fakeserver.Server, cfg mysqllock.Config) (*sql.DB, context.Context) {
	t.Helper()
	cfg.Schema = "manual"
	k, err := mysqllock.Wrap(s, cfg)
	dbtest.OK(t, err)
	db := sql.OpenDB(k)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		_ = db.Close()
		for _, text := range s.Unknown() {
			t.Errorf("the fake server does not know %s", text)
		}
		dbtest.Equal(t, "%d locks are held after the handle was closed", s.Held(), 0)
	})
	return db, lockctx.With(ctx, "k")
}

func wantState(t *testing.T, s *fakeserver.Server, stock int64, held int) {
	t.Helper()
	if s.Stock() != stock || s.Held() != held {
		t.Errorf("committed %d with %d locks held, want %d with %d", s.Stock(), s.Held(), stock, held)
	}
}

func put(ctx context.Context, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, n int,
) error {
	_, err := db.ExecContext(ctx, write, n, 1)
	return err
}

func TestAReadWithoutAnEndIsRefused(t *testing.T) {
	s, db, _ := open(t)
	var n int
	dbtest.Is(t, "the error", db.QueryRowContext(lockctx.With(context.Background(), "k"), read, 1).Scan(&n), mysqllock.ErrNoEnd)
	wantState(t, s, 10, 0)
}

func TestAHoldIsReleasedOnce(t *testing.T) {
	s, db, ctx := open(t)
	h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k")
	dbtest.OK(t, err)
	dbtest.OK(t, h.Release())
	s.Sent()
	dbtest.OK(t, h.Release())
	if sent := s.Sent(); len(sent) != 0 {
		t.Errorf("the second release sent %q", sent)
	}
}

func TestAKeyIsLockedOnceInItsContext(t *testing.T) {
	s, db, ctx := open(t)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(lockctx.With(ctx, "k"), tx, 4))
	taken := 0
	for _, text := range s.Sent() {
		if strings.Contains(text, "FOR UPDATE") {
			taken++
		}
	}
	if taken != 1 {
		t.Errorf("the key was locked %d times", taken)
	}
	dbtest.OK(t, put(lockctx.With(ctx, "other"), tx, 5))
	wantState(t, s, 10, 2)
	dbtest.OK(t, tx.Commit())
	wantState(t, s, 5, 0)
}

func TestTheEndOfTheContextReleases(t *testing.T) {
	s, db, ctx := open(t)
	ctx, cancel := context.WithCancel(lockctx.Without(ctx))
	ctx = lockctx.With(ctx, "k")
	stock.MustRead(t, ctx, db, 1)
	committed := s.Arrival("COMMIT")
	cancel()
	select {
	case <-committed:
	case <-time.After(time.Minute):
		t.Fatal("the end of the context commits nothing")
	}
	dbtest.OK(t, db.Close())
	wantState(t, s, 10, 0)
}

func TestTheEndOfTheContextRollsBackAnOpenTransaction(t *testing.T) {
	s, db, ctx := open(t)
	ctx, cancel := context.WithCancel(lockctx.Without(ctx))
	ctx = lockctx.With(ctx, "k")
	stock.MustRead(t, ctx, db, 1)
	tx, err := db.BeginTx(context.WithoutCancel(ctx), nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(ctx, tx, 1))
	cancel()
	dbtest.Is(t, "a commit after the end of the context of the read that began it", tx.Commit(), mysqllock.ErrLost)
	wantState(t, s, 10, 0)
}

func TestAHeldLockIsWaitedFor(t *testing.T) {
	s, db, ctx := open(t)
	other := another(t, s)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	waits, done := s.Arrival("waits"), make(chan error, 1)
	go func() { done <- put(lockctx.With(context.Background(), "k"), other, 2) }()
	arrives(t, s, waits, done)
	dbtest.OK(t, put(ctx, tx, 1))
	dbtest.OK(t, tx.Commit())
	dbtest.OK(t, <-done)
	wantState(t, s, 2, 0)
}

func refused(number uint16) error { return &mysql.MySQLError{Number: number, Message: "refused"} }

func TestAFailureOfAStatementIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		at    string
		err   error
		is    error // what the caller is told
		stock int64
	}{
		"the lock is lost in a deadlock": {write, refused(1213), mysqllock.ErrDeadlock, 10},
		"the connection breaks":          {write, mysql.ErrInvalidConn, mysqllock.ErrLost, 10},
		"a duplicate":                    {write, refused(1062), nil, 10},
		"COMMIT is refused":              {"COMMIT", refused(1180), nil, 10},
		"COMMIT meets a deadlock":        {"COMMIT", refused(1213), mysqllock.ErrDeadlock, 10},
		"another node was quicker":       {"COMMIT", refused(1020), mysqllock.ErrConflict, 10},
		"Group Replication refuses":      {"COMMIT", refused(3101), mysqllock.ErrDeadlock, 10},
	} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			s.Fail(c.at, c.err)
			err = put(ctx, tx, 1)
			if err == nil {
				err = tx.Commit()
			} else {
				_ = tx.Rollback()
			}
			if is := c.is; err == nil || is != nil && !errors.Is(err, is) || is == nil && !errors.Is(err, c.err) {
				t.Errorf("got %v, want %v", err, c.is)
			}
			wantState(t, s, c.stock, 0)
		})
	}
}

func TestALockThatCannotBeTakenRunsNothing(t *testing.T) {
	s, db, ctx := open(t)
	s.Fail("FOR UPDATE", refused(1142))
	if err := put(ctx, db, 1); !errors.Is(err, refused(1142)) {
		t.Errorf("got %v", err)
	}
	if slices.Contains(s.Sent(), write) {
		t.Error("the statement was sent without its lock")
	}
	wantState(t, s, 10, 0)
}

func TestALostAnswerOfCommitIsAnError(t *testing.T) {
	s, db, ctx := open(t)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(ctx, tx, 1))
	s.LoseAnswer("COMMIT")
	var e *mysqllock.Error
	if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) || !errors.As(err, &e) || e.Op != "commit" || e.Key != "k" {
		t.Errorf("a commit whose answer was lost: %v", err)
	}
	wantState(t, s, 1, 0)
}

func TestAClosedHandleGivesNoLock(t *testing.T) {
	s, db, ctx := open(t)
	stock.MustRead(t, ctx, db, 1)
	dbtest.OK(t, db.Close())
	wantState(t, s, 10, 0)
	if err := put(ctx, db, 1); err == nil {
		t.Error("it wrote")
	}
	wantState(t, s, 10, 0)
}

func TestTransactionsEndInTheReverseOrder(t *testing.T) {
	s, db, ctx := open(t)
	outer, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(ctx, outer, 5))
	_, err = db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	if err := outer.Commit(); err == nil {
		t.Error("the outer transaction was committed before the inner one")
	}
	wantState(t, s, 10, 0)
}

// endsFirst has the caller's context end, and close the connection, right before a write is sent,
// or right after it. The driver below calls that a bad connection.
type endsFirst struct {
	*fakeserver.Server
	end   context.CancelFunc
	after bool
}

type endsFirstConn struct {
	fakeConn
	endsFirst
}

type fakeConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
}

func (e endsFirst) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := e.Server.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return endsFirstConn{c.(fakeConn), e}, nil
}

func (efc endsFirstConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if !strings.HasPrefix(text, "UPDATE p") {
		return efc.fakeConn.ExecContext(ctx, text, args)
	}
	res, err := driver.Result(nil), driver.ErrBadConn
	if efc.after {
		res, err = efc.fakeConn.ExecContext(ctx, text, args)
	}
	efc.end()
	_ = efc.Close()
	return res, err
}

// TestAContextThatEndsBesideAStatementIsNoLoss: right before it, or right after it, so that the
// COMMIT cannot be sent.
func TestAContextThatEndsBesideAStatementIsNoLoss(t *testing.T) {
	for name, work := range map[string]func(context.Context, *sql.DB) error{
		"Exec": func(ctx context.Context, db *sql.DB) error { return put(ctx, db, 7) },
		"BeginTx": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			return errors.Join(put(ctx, tx, 7), tx.Rollback())
		},
		"Do": func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return put(ctx, db, 7) })
		},
	} {
		for _, after := range []bool{false, true} {
			ctx, end := context.WithCancel(context.Background())
			defer end()
			s := fakeserver.New()
			k, err := mysqllock.Wrap(endsFirst{s, end, after}, mysqllock.Config{Schema: "manual"})
			dbtest.OK(t, err)
			db := sql.OpenDB(k)
			defer db.Close()
			if name != "Do" {
				ctx = lockctx.With(ctx, "k")
			}
			if after && name == "BeginTx" {
				continue // database/sql answers its Commit
			}
			if err := work(ctx, db); !errors.Is(err, context.Canceled) || errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s, after it: %v: it ended with %v", name, after, err)
			}
			wantState(t, s, 10, 0)
		}
	}
}
