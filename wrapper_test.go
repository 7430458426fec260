package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// openOnly is a driver around this one that knows no more than Open.
type openOnly struct{ d driver.Driver }

func (o openOnly) Open(dsn string) (driver.Conn, error) { return o.d.Open(dsn) }

func init() { sql.Register("mysqllock-open-only", openOnly{&mysqllock.Driver{}}) }

// TestConnectionsOfOneDSNKnowOfEachOthersLocks, and nothing is left on the server once they are
// closed.
func TestConnectionsOfOneDSNKnowOfEachOthersLocks(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, err := sql.Open("mysqllock-open-only", s.Config().FormatDSN())
		dbtest.OK(t, err)
		defer db.Close()
		for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(30 * time.Second)} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, "k", option, lockctx.Wait(5*time.Second))
			n := stock.MustRead(t, ctx, db, 1)
			idle, err := db.Conn(dbtest.Limited(t)) // the one that has read
			dbtest.OK(t, err)
			if _, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1); err != nil {
				t.Errorf("on another connection: %v", err)
			}
			dbtest.OK(t, idle.Close())
			cancel()
			s.soonFree("k")
		}

		// A lock is kept while database/sql has no connection.
		db.SetMaxIdleConns(-1)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		n := stock.MustRead(t, ctx, db, 1)
		dbtest.Soon(t, "database/sql has none", func() bool { return db.Stats().OpenConnections == 0 })
		time.Sleep(1500 * time.Millisecond) // longer than a connector without connections and locks stays
		s.wantLocked("k", true)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		cancel()
		dbtest.OK(t, db.Close())
		s.SoonAlone(t)
	})
}

// around is a connector of a wrapper of drivers, whose connections have what kind gives
// them.
type around struct {
	driver.Connector
	kind func(whole) driver.Conn
}

// whole is what the driver's connections have.
type whole interface {
	dbtest.Statements
	driver.SessionResetter
	driver.Validator
}

func (a around) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := a.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return a.kind(c.(whole)), nil
}

func (a around) Driver() driver.Driver { return aroundDriver{} }

func (a around) Close() error { return a.Connector.(io.Closer).Close() }

type aroundDriver struct{}

func (aroundDriver) Open(string) (driver.Conn, error) { return nil, errors.New("not by Open") }

// legacy hides the methods with a context.
type legacy struct{ c whole }

func (l legacy) Prepare(text string) (driver.Stmt, error) { return l.c.Prepare(text) }

func (l legacy) Close() error { return l.c.Close() }

func (l legacy) Begin() (driver.Tx, error) { return l.c.Begin() }

func (l legacy) Exec(text string, args []driver.Value) (driver.Result, error) {
	return l.c.(driver.Execer).Exec(text, args) //nolint:staticcheck // an old wrapper
}

func (l legacy) Query(text string, args []driver.Value) (driver.Rows, error) {
	return l.c.(driver.Queryer).Query(text, args) //nolint:staticcheck // as above
}

type contexts interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
}

// wrappers are kinds of wrappers through which hints come.
var wrappers = map[string]func(whole) driver.Conn{
	"without Validator": func(c whole) driver.Conn {
		return struct {
			contexts
			driver.Pinger
			driver.NamedValueChecker
		}{c, c, c}
	},
	"with SessionResetter only": func(c whole) driver.Conn {
		return struct {
			contexts
			driver.SessionResetter
		}{c, c}
	},
	"with Validator only": func(c whole) driver.Conn {
		return struct {
			contexts
			driver.Validator
		}{c, c}
	},
	"without Pinger":  func(c whole) driver.Conn { return struct{ contexts }{c} },
	"with everything": func(c whole) driver.Conn { return struct{ whole }{c} },
	"only preparing": func(c whole) driver.Conn {
		return struct {
			driver.Conn
			driver.ConnBeginTx
			driver.ConnPrepareContext
		}{c, c, c}
	},
}

// tells are those of them that pass driver.Validator on, so that maxConns works.
var tells = map[string]bool{"with Validator only": true, "with everything": true}

// wrapped opens a handle with a wrapper of drivers.
func (s *scratch) wrapped(kind func(whole) driver.Conn, params ...string) *sql.DB {
	s.T.Helper()
	return s.wrappedAt(kind, s.DSN(params...))
}

func (s *scratch) wrappedAt(kind func(whole) driver.Conn, dsn string) *sql.DB {
	s.T.Helper()
	k, err := new(mysqllock.Driver).OpenConnector(dsn)
	return s.OpenDB(around{k, kind}, err)
}

// TestEveryLockHoldsBeneathAWrapper: 8 callers come through beneath every kind of wrapper,
// with 7 connections and without a limit, in all ways to take a lock.
func TestEveryLockHoldsBeneathAWrapper(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range wrappers {
			t.Run(name, func(t *testing.T) {
				s := newScratch(s.Beside(t))
				db := s.wrappedAt(kind, s.LimitedDSN(t, 7, "lockWait=1m"))
				if tells[name] {
					s.CheckWrapped(t, db)
				} else {
					stock.CheckHidden(t, db, "github.com/mysqllock/mysqllock_test")
				}
			})
			t.Run(name+", without maxConns", func(t *testing.T) {
				s := newScratch(s.Beside(t))
				s.CheckWrapped(t, s.wrapped(kind, "lockWait=1m"))
			})
		}
		t.Run("with Open only", func(t *testing.T) {
			s := newScratch(s.Beside(t))
			s.CheckWrapped(t, dbtest.Open(t, "mysqllock-open-only", s.LimitedDSN(t, 7, "lockWait=1m")))
		})
	})
}

// withDriver is a connector of a wrapper that shows the driver it was given, as that of
// sqldb-logger does.
type withDriver struct {
	driver  driver.Driver
	connect func(ctx context.Context) (driver.Conn, error)
}

func (w withDriver) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := w.connect(ctx)
	if err != nil {
		return nil, err
	}
	return wrappers["with everything"](c.(whole)), nil
}

func (w withDriver) Driver() driver.Driver { return w.driver }

// TestAWrapperMayHaveTheDriverOfAnotherHandle: a wrapper that gets its driver from DB.Driver, as
// the documentation of many has it, works as one that gets new(mysqllock.Driver), whether that
// other handle is open, closed, or in use.
func TestAWrapperMayHaveTheDriverOfAnotherHandle(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, bounded := range []bool{true, false} {
			for _, byConnector := range []bool{true, false} {
				for _, state := range []string{"open", "closed", "used"} {
					t.Run(fmt.Sprintf("with maxConns: %v, by OpenConnector: %v, the other handle is %s", bounded, byConnector, state), func(t *testing.T) {
						s := newScratch(s.Beside(t))
						dsn := s.DSN("lockWait=1m")
						if bounded {
							dsn = s.DSN("lockWait=1m", "maxConns=5")
						}
						first := dbtest.Open(t, "mysqllock", dsn)
						k := withDriver{driver: first.Driver()}
						k.connect = func(context.Context) (driver.Conn, error) { return k.driver.Open(dsn) }
						if byConnector {
							within, err := k.driver.(driver.DriverContext).OpenConnector(dsn)
							dbtest.OK(t, err)
							defer within.(io.Closer).Close()
							k.connect = within.Connect
						}
						switch state {
						case "closed":
							dbtest.OK(t, first.Close())
						case "used":
							dbtest.OK(t, mysqllock.Do(t.Context(), first, dbtest.Random(), func(context.Context) error { return nil }))
						}
						db := s.OpenDB(k, nil)
						for name, opt := range strategies {
							dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, name+dbtest.Random(), func(ctx context.Context) error {
								dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock + 1 WHERE id = 2")
								return nil
							}, opt))
						}
						s.wantStock(2, 10+len(strategies))
						dbtest.OK(t, db.Close())
						dbtest.OK(t, first.Close())
						if !byConnector {
							s.SoonAlone(t) // what Open has opened is closed a second later
						}
					})
				}
			}
		}
	})
}

// TestDoRefusesAWrapperThatHidesContexts: through a wrapper that drops the contexts of
// transactions or of statements no hint comes, so Do and Acquire are refused.
func TestDoRefusesAWrapperThatHidesContexts(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range map[string]func(whole) driver.Conn{
			"all":          func(c whole) driver.Conn { return legacy{c} },
			"transactions": func(c whole) driver.Conn { return struct{ legacyTx }{legacyTx{legacy{c}, c, c, c, c}} },
			"statements": func(c whole) driver.Conn {
				return struct {
					legacy
					driver.ConnBeginTx
					driver.Pinger
				}{legacy{c}, c, c}
			},
		} {
			db := s.wrapped(kind)
			ctx := dbtest.Limited(t)
			for range 2 {
				err := mysqllock.Do(ctx, db, dbtest.Random(), func(context.Context) error { t.Error("runs"); return nil })
				dbtest.Want(t, err, errors.ErrUnsupported)
				dbtest.Says(t, err, "mysqllock_test.aroundDriver", "contexts of "+map[string]string{"all": "transactions", "transactions": "transactions", "statements": "statements"}[name])
				_, err = mysqllock.Acquire(ctx, db, dbtest.Random())
				dbtest.Want(t, err, errors.ErrUnsupported)
			}
			dbtest.Exec(t, db, "UPDATE p SET stock = 1 WHERE id = ?", 1) // what needs no hint goes on
			dbtest.OK(t, db.Close())
		}
	})
}

// legacyTx hides the context of transactions only.
type legacyTx struct {
	legacy
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
}

// TestDoSendsNothingToAnotherDriver: a handle of another driver, wrapped or not, is refused
// as before, and its database is asked for nothing.
func TestDoSendsNothingToAnotherDriver(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		tap, cfg := new(dbtest.Tap), s.Config()
		tap.On(cfg)
		plain := dbtest.Connector(t, cfg)
		dbs := map[string]*sql.DB{
			"*mysql.MySQLDriver": s.OpenDB(plain, nil),
			"aroundDriver":       s.OpenDB(otherKind{plain}, nil),
		}
		for name, db := range dbs {
			dbtest.OK(t, db.PingContext(t.Context()))
			sent := tap.Since()
			err := mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { t.Error("runs"); return nil })
			dbtest.Says(t, err, "opened with driver", name)
			_, err = mysqllock.Stats(db)
			dbtest.Says(t, err, "opened with driver", name)
			if sent := sent(); len(sent) > 0 {
				t.Errorf("%s: it was sent %v", name, sent)
			}
		}
	})
}

// otherKind is a wrapper of another driver.
type otherKind struct{ driver.Connector }

func (otherKind) Driver() driver.Driver { return aroundDriver{} }

// TestATransactionRunsOnOneConnectionBeneathAWrapper: if that is gone, what follows in the transaction
// fails, too. On another connection it would commit by itself.
func TestATransactionRunsOnOneConnectionBeneathAWrapper(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE written (id INT)")
		db := s.wrapped(wrappers["with Validator only"], "maxConns=7")
		tx := dbtest.Begin(t, dbtest.Limited(t), db)
		_, _ = tx.Exec("KILL CONNECTION_ID()")
		for range 3 {
			if _, err := tx.Exec("INSERT INTO written VALUES (1)"); err == nil {
				t.Error("a statement ran in a transaction whose connection is gone")
			}
		}
		if tx.Commit() == nil {
			t.Error("it is committed")
		}
		if n := dbtest.Column[int](t, s.plain, "SELECT COUNT(*) FROM written"); n[0] != 0 {
			t.Errorf("%d rows", n[0])
		}
		s.SoonUnused(t, db)
	})
}

// TestDoRefusesABareMock as it does a handle of any other driver: one of sqlmock, without Wrap. What the test expects
// of it is still expected afterwards.
func TestDoRefusesABareMock(t *testing.T) {
	db, mock, err := sqlmock.New()
	dbtest.OK(t, err)
	mock.ExpectExec("UPDATE p").WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectClose()
	err = mysqllock.Do(t.Context(), db, "k", func(context.Context) error { t.Error("runs"); return nil })
	dbtest.Says(t, err, "opened with driver *sqlmock.mockDriver")
	dbtest.Exec(t, db, "UPDATE p SET stock = 1")
	dbtest.OK(t, db.Close())
	dbtest.OK(t, mock.ExpectationsWereMet())
}

// TestBadConnectionIsNotUsedAgainBeneathAWrapper: a transaction that could not be rolled back
// after its lock was lost may still be open. Its connection is closed before it meets another
// user, though nobody asks it whether it is valid.
func TestBadConnectionIsNotUsedAgainBeneathAWrapper(t *testing.T) {
	fake := newFake().mysqlAnswers()
	var failing atomic.Bool
	answer := fake.answer
	fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
		switch text {
		case "UPDATE p SET stock = 1":
			return fakeReply{}, &mysql.MySQLError{Number: 1213}
		case "UPDATE p SET stock = 2":
			return fakeReply{columns: []string{"c"}, rows: [][]driver.Value{{int64(c.id)}}}, nil
		}
		if failing.Load() && strings.Contains(text, "ROLLBACK") {
			return fakeReply{}, errFake
		}
		return answer(c, text)
	}
	for _, maxConns := range []int{0, 5} {
		k, err := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{MaxConns: maxConns})
		dbtest.OK(t, err)
		db := sql.OpenDB(around{k, wrappers["with Validator only"]})
		db.SetMaxOpenConns(1)
		ctx := dbtest.Limited(t)
		tx := dbtest.Begin(t, lockctx.With(ctx, "k"), db)
		var lost, next int
		dbtest.OK(t, tx.QueryRowContext(ctx, "UPDATE p SET stock = 2").Scan(&lost))
		failing.Store(true)
		_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 1")
		dbtest.Want(t, err, mysqllock.ErrDeadlock)
		_ = tx.Rollback()
		failing.Store(false)
		dbtest.OK(t, db.QueryRowContext(ctx, "UPDATE p SET stock = 2").Scan(&next))
		if next == lost {
			t.Errorf("maxConns %d: connection %d is used again", maxConns, next)
		}
		dbtest.OK(t, db.Close())
	}
}
