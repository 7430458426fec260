package unit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// tabletEnded is what vtgate says of a transaction that its tablet has ended, as it says it.
var tabletEnded = &mysql.MySQLError{Number: 1317, Message: "target: shop.0.primary: vttablet: rpc error: code = Aborted desc = transaction 1795795160956921976:" +
	" ended at 2026-11-27 16:00:24.620 UTC (exceeded timeout: 30s) (CallerID: userData1)"}

// TestNothingGoesOnAfterTheEndOfATransaction in a deadlock, or by a tablet.
func TestNothingGoesOnAfterTheEndOfATransaction(t *testing.T) {
	for is, ended := range map[error]error{mysqllock.ErrDeadlock: refused(1213), mysqllock.ErrLost: tabletEnded} {
		nothingGoesOn(t, is, ended)
	}
}

// nothingGoesOn has transactions end with ended, of which the caller is told is.
func nothingGoesOn(t *testing.T, is, ended error) {
	onProducts(t, func(t *testing.T, s *fakeserver.Server, db *sql.DB, ctx context.Context) {
		for name, begin := range map[string]func() *sql.Tx{
			"of a transaction": func() *sql.Tx {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				return tx
			},
			"of the outer transaction": func() *sql.Tx {
				c, err := db.Conn(lockctx.Without(ctx))
				dbtest.OK(t, err)
				t.Cleanup(func() { _ = c.Close() })
				outer, err := c.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				inner, err := c.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.OK(t, inner.Commit())
				return outer
			},
		} {
			tx := begin()
			s.Fail(write, ended)
			dbtest.Is(t, name, put(ctx, tx, 1), is)
			over(t, ctx, tx)
			wantState(t, s, 10, 0)
			ctx = lockctx.With(lockctx.Without(ctx), "k")
		}

		// A statement of its own can be run again, but not by database/sql.
		s.Fail(write, ended)
		if err := put(ctx, db, 1); !errors.Is(err, is) || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("a write: %v", err)
		}
		dbtest.OK(t, put(lockctx.With(lockctx.Without(ctx), "k"), db, 4))

		// What was decided on a read is not written.
		ctx = lockctx.With(lockctx.Without(ctx), "k")
		stock.MustRead(t, ctx, db, 1)
		s.Fail(write, ended)
		dbtest.Is(t, "a write after a read", put(ctx, db, 1), is)
		s.Sent()
		_, err := db.BeginTx(ctx, nil)
		for _, err := range []error{err, put(ctx, db, 1)} {
			dbtest.Is(t, "after that", err, mysqllock.ErrLost)
		}
		if sent := s.Sent(); len(sent) != 0 {
			t.Errorf("it sent %q", sent)
		}
		wantState(t, s, 4, 0)
	})
}

// TestNothingRunsWhereATransactionMayBeOpen: if a rollback fails, its session is closed. BEGIN of the next
// transaction there would commit what was refused. The sql.Conn goes on, on its own connection and other sessions.
func TestNothingRunsWhereATransactionMayBeOpen(t *testing.T) {
	onProducts(t, func(t *testing.T, s *fakeserver.Server, db *sql.DB, ctx context.Context) {
		plain := lockctx.Without(ctx)
		dbtest.OK(t, put(ctx, db, 10)) // the key's row is known
		another := func(ctx context.Context, db dbtest.Execer) error {
			_, err := db.ExecContext(ctx, write, 1, 2)
			return err
		}
		for _, at := range []string{"x'6b'", "COMMIT"} { // the statement that locks the row, or commits
			for name, next := range map[string]func(*sql.Conn) error{
				"a write":             func(c *sql.Conn) error { return another(plain, c) },
				"a write with a lock": func(c *sql.Conn) error { return another(ctx, c) },
				"BeginTx": func(c *sql.Conn) error {
					return inTransaction(c, plain, func(tx *sql.Tx) error { return errors.Join(another(plain, tx), tx.Commit()) })
				},
				"BeginTx with a lock": func(c *sql.Conn) error {
					return inTransaction(c, ctx, func(tx *sql.Tx) error { return errors.Join(another(ctx, tx), tx.Commit()) })
				},
			} {
				c, err := db.Conn(plain)
				dbtest.OK(t, err)
				s.Fail(at, refused(1180))
				s.Fail("ROLLBACK", refused(1180))
				tx, err := c.BeginTx(ctx, nil)
				if err == nil {
					dbtest.OK(t, put(ctx, tx, 5))
					err = tx.Commit()
				}
				if err == nil {
					t.Errorf("%s: nothing failed", at)
				} else if says := strings.Contains(err.Error(), "may be committed"); says != (at == "COMMIT") { // 1180 is of a server that cannot tell
					t.Errorf("%s: %v", at, err)
				}
				if err := next(c); err != nil {
					t.Errorf("%s, then %s: %v", at, name, err)
				}
				dbtest.OK(t, c.Close())
				dbtest.Soon(t, "nothing is left", func() bool { return s.Held() == 0 })
				wantState(t, s, 10, 0)
			}
		}
	})
}

func TestAStatementThatFailsLeavesTheTransactionAsItIs(t *testing.T) {
	s, db, ctx := open(t)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	s.Fail(write, refused(1062))
	if err := put(ctx, tx, 1); err == nil || err.Error() != refused(1062).Error() {
		t.Errorf("the error comes back as %v", err)
	}
	dbtest.OK(t, put(ctx, tx, 4))
	dbtest.OK(t, tx.Commit())
	wantState(t, s, 4, 0)
}

// Of several statements in one text, those that were finished stay.
func TestSeveralStatementsThatFailAreCommitted(t *testing.T) {
	s, db, ctx := open(t)
	s.Fail("; UPDATE q", refused(1146))
	if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 1; UPDATE q SET x = 1"); !errors.Is(err, refused(1146)) {
		t.Errorf("got %v", err)
	}
	if sent := s.Sent(); sent[len(sent)-1] != "COMMIT" {
		t.Errorf("it sent %q", sent)
	}
}

// A row may go between the question for it and its lock.
func TestARowThatGoesIsMadeAgain(t *testing.T) {
	for _, keys := range [][]string{{"k"}, {"k", "k1"}} {
		onProducts(t, func(t *testing.T, s *fakeserver.Server, db *sql.DB, ctx context.Context) {
			ctx = lockctx.WithKeys(lockctx.Without(ctx), keys)
			for range 3 {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.OK(t, put(ctx, tx, 4))
				wantState(t, s, s.Stock(), len(keys))
				s.Sent()
				dbtest.OK(t, tx.Commit())
				s.Remove("k")
			}
			wantState(t, s, 4, 0)
		})
	}
}

// oneConn is a server that takes one connection.
type oneConn struct {
	*fakeserver.Server
	opened *atomic.Int32
}

func (o oneConn) Connect(ctx context.Context) (driver.Conn, error) {
	if o.opened.Add(1) > 1 {
		return nil, refused(1040)
	}
	return o.Server.Connect(ctx)
}

// TestTheFirstLockIsRefusedWithoutAConnectionToSetUp: it asks the server what it is, on a connection of the driver's
// own.
func TestTheFirstLockIsRefusedWithoutAConnectionToSetUp(t *testing.T) {
	k, err := mysqllock.Wrap(oneConn{fakeserver.New(), new(atomic.Int32)}, mysqllock.Config{Schema: "manual"})
	dbtest.OK(t, err)
	db := sql.OpenDB(k)
	defer db.Close()
	_, err = db.BeginTx(lockctx.With(context.Background(), "k"), nil)
	dbtest.Is(t, "the error", err, mysqllock.ErrExhausted)
	var e *mysqllock.Error
	if !errors.As(err, &e) || e.Key != "k" {
		t.Error(err)
	}
}

// observed is an observer.
type observed struct {
	all  []string
	last error // of the last event
}

func (o *observed) Observe(_ context.Context, e mysqllock.Event) {
	o.all, o.last = append(o.all, e.Kind.String()), e.Err
}

// kinds returns those of the events since the last call.
func (o *observed) kinds() string {
	all := strings.Join(o.all, " ")
	o.all = nil
	return all
}

// Only where nothing is held may database/sql try again.
func TestABrokenConnectionIsTriedAgainOnlyWithoutALock(t *testing.T) {
	t.Run("before the lock", func(t *testing.T) {
		s, db, ctx := open(t)
		s.Cut("FOR UPDATE", driver.ErrBadConn)
		dbtest.OK(t, put(ctx, db, 4))
		wantState(t, s, 4, 0)
	})
	for at, text := range map[string]string{"the write": write, "COMMIT": "COMMIT"} {
		for name, read := range map[string]bool{"a write": false, "a write after a read": true} {
			t.Run(name+"/"+at, func(t *testing.T) {
				s, db, ctx := open(t)
				if read {
					stock.MustRead(t, ctx, db, 1)
				}
				s.Cut(text, driver.ErrBadConn)
				err := put(ctx, db, 1)
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLost) || errors.Is(err, driver.ErrBadConn) || !errors.As(err, &e) || at == "COMMIT" && e.Op != "commit" {
					t.Errorf("got %v", err)
				}
				if err := put(ctx, db, 1); read && !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("after that: %v", err)
				}
				dbtest.Soon(t, "what may run there is killed", func() bool { return s.Held() == 0 })
				dbtest.OK(t, put(lockctx.Without(ctx), db, 4)) // on another connection
				wantState(t, s, 4, 0)
			})
		}
	}
}

// TestASQLConnIsNotClosedUnderItsRows: where a session is of no use for a lock, another one is taken, and database/sql
// is not told driver.ErrBadConn. It would try nothing again, and wait for the end of the rows that are
// read over the sql.Conn, whatever contexts end. An observer sees the end of each attempt.
func TestASQLConnIsNotClosedUnderItsRows(t *testing.T) {
	for name, of := range map[string]struct {
		text string // what meets it
		opt  lockctx.Option
	}{
		"row": {"FOR UPDATE", lockctx.Row()}, "lease": {"START TRANSACTION", lockctx.Lease(time.Minute)}, "advisory": {"START TRANSACTION", lockctx.Advisory()},
	} {
		for way, run := range map[string]func(ctx context.Context, c *sql.Conn) error{
			"BeginTx": func(ctx context.Context, c *sql.Conn) error {
				return inTransaction(c, ctx, func(tx *sql.Tx) error { return errors.Join(put(ctx, tx, 1), tx.Commit()) })
			},
			"Exec": func(ctx context.Context, c *sql.Conn) error { return put(ctx, c, 1) },
		} {
			for _, broken := range []error{driver.ErrBadConn, mysql.ErrBusyBuffer} {
				var told observed
				s, db, ctx := openWith(t, mysqllock.Config{Observer: &told})
				plain := lockctx.Without(ctx)
				dbtest.OK(t, mysqllock.Do(plain, db, "k", func(context.Context) error { return nil }, of.opt)) // all is there
				told.kinds()
				c, err := db.Conn(plain)
				dbtest.OK(t, err)
				rows, err := c.QueryContext(plain, read, 1)
				dbtest.OK(t, err)
				s.Cut(of.text, broken)
				done := make(chan error, 1)
				go func() { done <- run(lockctx.With(plain, "k", of.opt), c) }()
				select {
				case err := <-done:
					if err != nil {
						t.Errorf("%s, %s, %v: %v", name, way, broken, err)
					}
					if kinds := told.kinds(); kinds != "acquired released" {
						t.Errorf("%s, %s, %v: the observer is told %q, at last %v", name, way, broken, kinds, told.last)
					}
				case <-time.After(dbtest.Patience):
					t.Fatalf("%s, %s, %v: it hangs", name, way, broken)
				}
				if !rows.Next() {
					t.Errorf("%s, %s, %v: the rows have ended: %v", name, way, broken, rows.Err())
				}
				dbtest.OK(t, rows.Close())
				dbtest.OK(t, c.Close())
				dbtest.Soon(t, "nothing is left", func() bool { return s.Held() == 0 })
				wantState(t, s, 1, 0)
			}
		}
	}
}

// TestAConnectionThatIsLostWhileALockJoinsIsALoss, whatever the driver says of it: the transaction
// that was to have the lock is gone.
func TestAConnectionThatIsLostWhileALockJoinsIsALoss(t *testing.T) {
	for _, lost := range []error{driver.ErrBadConn, mysql.ErrInvalidConn, io.ErrUnexpectedEOF} {
		s, db, ctx := open(t)
		plain, asks := lockctx.Without(ctx), lockctx.With(ctx, "k1")
		dbtest.OK(t, mysqllock.Do(plain, db, "k1", func(context.Context) error { return nil })) // makes the row
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(plain, tx, 1))
		s.Cut("FOR UPDATE", lost)
		err = put(asks, tx, 2)
		var e *mysqllock.Error
		if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLost) || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("%v: %v, want ErrLost", lost, err)
		}
		over(t, asks, tx)
		dbtest.Soon(t, "what may run there is killed", func() bool { return s.Held() == 0 })
		wantState(t, s, 10, 0)
	}
}

// TestWhatIsLostIsHeldNoMore: a transaction whose lock is gone still has an end to come, but a handle
// that counts it as a hold would have somebody look for what nobody waits for.
func TestWhatIsLostIsHeldNoMore(t *testing.T) {
	s, db, ctx := open(t)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	s.Cut(write, driver.ErrBadConn)
	dbtest.Is(t, "the write", put(ctx, tx, 4), mysqllock.ErrLost)
	st, err := mysqllock.Stats(db)
	dbtest.OK(t, err)
	if st.OldestHold != 0 {
		t.Errorf("held for %v", st.OldestHold)
	}
	dbtest.OK(t, tx.Rollback())
}

// TestABrokenBeginGivesItsLockBack that was granted beside the transaction, and its caller is told which it was.
func TestABrokenBeginGivesItsLockBack(t *testing.T) {
	for strategy, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(time.Minute), "advisory": lockctx.Advisory()} {
		for text, opts := range map[string]*sql.TxOptions{"START TRANSACTION": nil, "SET TRANSACTION": {Isolation: sql.LevelReadCommitted}} {
			s, db, _ := open(t)
			ctx := lockctx.With(context.Background(), "k", opt, lockctx.Wait(time.Second))
			dbtest.OK(t, put(ctx, db, 4)) // all is there
			c, err := db.Conn(context.Background())
			dbtest.OK(t, err)
			s.LoseAnswer(text)
			_, err = c.BeginTx(ctx, opts)
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrExhausted) && !errors.Is(err, mysqllock.ErrNoAnswer) || !errors.As(err, &e) || e.Key != "k" || e.Strategy != strategy {
				t.Errorf("%s, %s: %v", strategy, text, err)
			}
			_ = c.Close()
			dbtest.OK(t, put(ctx, db, 4))
			wantState(t, s, 4, 0)
		}
	}
}

// TestALossOfAnotherConnectionWhileALockJoinsIsNone: the transaction goes on without the second lock.
func TestALossOfAnotherConnectionWhileALockJoinsIsNone(t *testing.T) {
	s, db, ctx := open(t)
	plain := lockctx.Without(ctx)
	dbtest.OK(t, mysqllock.Do(plain, db, "k1", func(context.Context) error { return nil })) // opens the handle's own
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.OK(t, put(plain, tx, 4))
	for range 3 { // it is tried again
		s.Cut("INSERT IGNORE", mysql.ErrInvalidConn)
	}
	if err := put(lockctx.With(ctx, "new"), tx, 2); !errors.Is(err, mysqllock.ErrNoAnswer) || errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("got %v, want ErrNoAnswer", err)
	}
	dbtest.OK(t, tx.Commit())
	wantState(t, s, 4, 0)
}

func TestAWaitThatIsOverIsKilledOnTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the limits on time depend on no machine
		s, db, ctx := open(t)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		var e *mysqllock.Error
		_, err = another(t, s).BeginTx(lockctx.With(context.Background(), "k", lockctx.Wait(50*time.Millisecond)), nil)
		if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Waited < 50*time.Millisecond {
			t.Errorf("got %v", err)
		}
		if e.Holder == nil || e.Holder.ConnectionID == 0 {
			t.Errorf("the holder is %+v", e.Holder)
		}
		sent := strings.Join(s.Sent(), "\n")
		if n := s.Waiting(); n != 0 || !strings.Contains(sent, "KILL QUERY ") {
			t.Errorf("%d statements wait", n)
		}
		if !strings.Contains(sent, "MAX_EXECUTION_TIME(1050)") { // a second more than the wait
			t.Errorf("the server does not end the wait: %s", sent)
		}
		dbtest.OK(t, tx.Rollback())
	})
}

func TestAHolderIsAskedForOnlyWhereTheServerKnowsAndTells(t *testing.T) {
	s, db, ctx := openWith(t, mysqllock.Config{Owner: "me"})
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	asked := func(db *sql.DB) (*mysqllock.Holder, int) {
		t.Helper()
		s.Sent()
		var e *mysqllock.Error
		if err := put(noWait(context.Background(), "k"), db, 1); !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) {
			t.Fatalf("got %v", err)
		}
		return e.Holder, strings.Count(strings.Join(s.Sent(), "\n"), "performance_schema.data_locks l")
	}
	if h, n := asked(db); n != 0 || h == nil || h.Program != "me" || h.ConnectionID == 0 {
		t.Errorf("of this process: it asked %d times, and names %+v", n, h)
	}
	other := another(t, s)
	if h, n := asked(other); n != 1 || h == nil || h.ConnectionID == 0 {
		t.Errorf("of another process: it asked %d times, and names %+v", n, h)
	}
	s.Fail("performance_schema.data_locks", refused(1142))
	for _, want := range []int{1, 0} {
		if h, n := asked(other); n != want || h != nil {
			t.Errorf("where it may not look: it asked %d times, and names %+v", n, h)
		}
	}
	dbtest.OK(t, tx.Rollback())
}

// Nobody waits for the key of a connection that was closed with a savepoint open on it.
func TestAConnectionThatIsClosedHoldsNothing(t *testing.T) {
	s, db, ctx := open(t)
	c, err := db.Conn(lockctx.Without(ctx))
	dbtest.OK(t, err)
	_ = c.Raw(func(c any) error {
		for range 2 {
			_, err := c.(driver.ConnBeginTx).BeginTx(ctx, driver.TxOptions{})
			dbtest.OK(t, err)
		}
		dbtest.OK(t, c.(driver.Conn).Close())
		return driver.ErrBadConn
	})
	wantState(t, s, 10, 0)
	dbtest.OK(t, put(noWait(context.Background(), "k"), db, 4))
}

func TestWhatIsRefusedSendsNothing(t *testing.T) {
	exec := func(ctx context.Context, db *sql.DB, text string) error {
		_, err := db.ExecContext(ctx, text)
		return err
	}
	begin := func(ctx context.Context, db *sql.DB, opts *sql.TxOptions) error {
		_, err := db.BeginTx(ctx, opts)
		return err
	}
	for _, c := range []struct {
		name string
		call func(db *sql.DB, ctx context.Context) error
		is   error
		says string
	}{
		{"COMMIT", func(db *sql.DB, ctx context.Context) error { return exec(ctx, db, "COMMIT") }, mysqllock.ErrUnsafe, "sql.Tx"},
		{"DDL", func(db *sql.DB, ctx context.Context) error { return exec(ctx, db, "ALTER TABLE p ADD c INT") }, mysqllock.ErrUnsafe, "lockctx.Without"},
		{"several", func(db *sql.DB, ctx context.Context) error { return exec(ctx, db, "UPDATE p SET a = 1; COMMIT") }, mysqllock.ErrUnsafe, "sql.Tx"},
		{"read only", func(db *sql.DB, ctx context.Context) error { return begin(ctx, db, &sql.TxOptions{ReadOnly: true}) }, mysqllock.ErrUnsafe, "READ ONLY"},
		{"no key", func(db *sql.DB, ctx context.Context) error {
			return exec(lockctx.WithKeys(ctx, nil), db, "UPDATE p")
		}, nil, "bad hint: no key"},
		{"long key", func(db *sql.DB, ctx context.Context) error {
			_, err := db.PrepareContext(lockctx.With(ctx, strings.Repeat("x", 256)), read)
			return err
		}, nil, "bad hint: key of 256 bytes"},
		{"negative wait", func(db *sql.DB, ctx context.Context) error {
			return begin(lockctx.With(ctx, "k", lockctx.Wait(-1)), db, nil)
		}, nil, "bad hint: negative wait"},
		{"Do with a bad key", func(db *sql.DB, ctx context.Context) error {
			return mysqllock.Do(ctx, db, "", func(context.Context) error { return nil })
		}, nil, "bad hint: empty key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, db, ctx := open(t)
			err := c.call(db, ctx)
			var e *mysqllock.Error
			if !errors.As(err, &e) || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %v that says %q", err, c.is, c.says)
			}
			if sent := s.Sent(); len(sent) != 0 {
				t.Errorf("it sent %q", sent)
			}
		})
	}
	t.Run("in a transaction", func(t *testing.T) {
		s, db, ctx := open(t)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		s.Sent()
		for _, text := range []string{"COMMIT", "CREATE TABLE q (id INT)", "SET autocommit = 1", "BEGIN"} {
			for _, ctx := range []context.Context{ctx, lockctx.Without(ctx)} {
				dbtest.Is(t, text, dbtest.Err(tx.ExecContext(ctx, text)), mysqllock.ErrUnsafe)
			}
		}
		if sent := s.Sent(); len(sent) != 0 {
			t.Errorf("it sent %q", sent)
		}
		dbtest.OK(t, tx.Commit())
	})
}

// The snapshot of a read is older than the second lock.
func TestASecondKeyAfterAReadIsStale(t *testing.T) {
	s, db, ctx := open(t)
	stock.MustRead(t, ctx, db, 1)
	s.Sent()
	dbtest.Is(t, "the error", db.QueryRowContext(lockctx.With(ctx, "k1"), read, 1).Err(), mysqllock.ErrStaleSnapshot)
	if sent := s.Sent(); len(sent) != 0 {
		t.Errorf("it sent %q", sent)
	}
	stock.MustRead(t, lockctx.With(ctx, "k1", lockctx.AllowStale()), db, 1)
	wantState(t, s, 10, 2)
	dbtest.OK(t, put(lockctx.With(ctx, "k1"), db, 4))
	wantState(t, s, 4, 0)
}

func TestASessionWithSomethingLeftOnItIsNotUsedAgain(t *testing.T) {
	s, db, ctx := open(t)
	session := func(text string) (id int64) {
		dbtest.OK(t, mysqllock.Do(lockctx.Without(ctx), db, "k", func(ctx context.Context) error {
			if _, err := db.ExecContext(ctx, text); err != nil {
				return err
			}
			return db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id)
		}))
		return id
	}
	first := session("DO 0")
	if second := session("SET @a = 1"); second != first {
		t.Errorf("session %d, and then %d", first, second)
	}
	if third := session("DO 0"); third == first {
		t.Error("a session that has a variable is used again")
	}
	wantState(t, s, 10, 0)
}
