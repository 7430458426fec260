package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// openOnly is a driver around this one that knows no more than Open.
type openOnly struct{ d driver.Driver }

func (o openOnly) Open(dsn string) (driver.Conn, error) { return o.d.Open(dsn) }

func init() { sql.Register("mysqllock-open-only", openOnly{&mysqllock.Driver{}}) }

// TestOpenOnly: the connections of one DSN know of each other's locks, and nothing is
// left on the server once they are closed.
func TestOpenOnly(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, err := sql.Open("mysqllock-open-only", s.Config().FormatDSN())
		dbtest.OK(t, err)
		defer db.Close()
		for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(30 * time.Second)} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, "k", option, lockctx.Wait(5*time.Second))
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
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
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		dbtest.Soon(t, "database/sql has none", func() bool { return db.Stats().OpenConnections == 0 })
		time.Sleep(1500 * time.Millisecond) // longer than a connector without connections and locks stays
		s.wantLocked("k", true)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
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
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
	driver.Pinger
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
func (l legacy) Close() error                             { return l.c.Close() }
func (l legacy) Begin() (driver.Tx, error)                { return l.c.Begin() }

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

// TestEveryLockHoldsBeneathAWrapper: 40 callers come through beneath every kind of wrapper,
// with 5 connections and without a limit, in all ways to take a lock.
func TestEveryLockHoldsBeneathAWrapper(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range wrappers {
			t.Run(name, func(t *testing.T) {
				s := newScratch(s.Beside(t))
				s.CheckWrapped(t, s.wrappedAt(kind, s.LimitedDSN(t, 5, "lockWait=1m")))
			})
			t.Run(name+", without maxConns", func(t *testing.T) {
				s := newScratch(s.Beside(t))
				s.CheckWrapped(t, s.wrapped(kind, "lockWait=1m"))
			})
		}
		t.Run("with Open only", func(t *testing.T) {
			s := newScratch(s.Beside(t))
			s.CheckWrapped(t, dbtest.Open(t, "mysqllock-open-only", s.LimitedDSN(t, 5, "lockWait=1m")))
		})
	})
}

// TestDoRefusesAWrapperThatHidesContexts: through a wrapper that drops the contexts of
// transactions or of statements no hint comes, so Do and Acquire are refused.
func TestDoRefusesAWrapperThatHidesContexts(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
			db := s.wrapped(kind, "maxConns=5")
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
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
				t.Errorf("%s: it was sent %q", name, sent)
			}
		}
	})
}

// otherKind is a wrapper of another driver.
type otherKind struct{ driver.Connector }

func (otherKind) Driver() driver.Driver { return aroundDriver{} }

// TestClosedConnEndsItsUnitBeneathAWrapper: a unit of work that lives on a sql.Conn ends, at
// the latest, when database/sql uses the connection for somebody else, though nobody has
// said that the sql.Conn was closed.
func TestClosedConnEndsItsUnitBeneathAWrapper(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"maxConns=5", "lockMaxConns=5"} {
			db := s.wrapped(wrappers["without Pinger"], params)
			db.SetMaxOpenConns(1)
			for range 2 {
				key, ctx := dbtest.Random(), dbtest.Limited(t)
				c, err := db.Conn(ctx)
				dbtest.OK(t, err)
				dbtest.Exec(t, c, "SET @x = 1") // with maxConns, too, the unit lives here
				_, err = read(lockctx.With(ctx, key), c, 1)
				dbtest.OK(t, err)
				s.wantLocked(key, true)
				dbtest.OK(t, c.Close())
				tx, err := db.BeginTx(lockctx.With(ctx, dbtest.Random()), nil)
				dbtest.OK(t, err)
				s.wantLocked(key, false)
				dbtest.OK(t, tx.Rollback())
			}
			if params == "maxConns=5" {
				s.SoonUnused(t, db)
			}
			dbtest.OK(t, db.Close())
		}
	})
}

// TestConnAsksForWhatIsGoneBeneathAWrapper: with maxConns, beneath a wrapper without
// Validator, a sql.Conn gives its connection back after each statement. What the statement has
// left is there for the next one, or that is refused; it never gets what somebody else's has
// left.
func TestConnAsksForWhatIsGoneBeneathAWrapper(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE numbered (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE=InnoDB")
		ctx := dbtest.Limited(t)
		ask := func(c *sql.Conn) (id int, err error) {
			return id, c.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id)
		}
		for name, kind := range wrappers {
			db := s.wrapped(kind, "maxConns=5")
			validates := strings.Contains(name, "Validator only") || strings.Contains(name, "everything")
			if validates {
				dbtest.Exec(t, db, "DO 0") // by now it has shown that it passes Validator on
			}
			var last int
			dbtest.OK(t, s.plain.QueryRow("SELECT COALESCE(MAX(id), 0) FROM numbered").Scan(&last))
			c := conned(t, db)
			dbtest.Exec(t, c, "INSERT INTO numbered VALUES ()")
			if id, err := ask(c); err != nil || id != last+1 {
				t.Errorf("%s: %d, %v; want %d", name, id, err, last+1)
			}
			dbtest.Exec(t, c, "INSERT INTO numbered VALUES ()")
			dbtest.Exec(t, db, "INSERT INTO numbered VALUES ()") // of another user
			id, err := ask(c)
			if validates {
				if err != nil || id != last+2 {
					t.Errorf("%s: beside another user: %d, %v; want %d", name, id, err, last+2)
				}
			} else {
				dbtest.Want(t, err, mysqllock.ErrUnsafe)
				dbtest.Says(t, err, "driver.Validator", "sql.Tx")
			}
			dbtest.Exec(t, c, "INSERT INTO numbered VALUES ()")
			if id, err := ask(c); err != nil || id != last+4 {
				t.Errorf("%s: once more: %d, %v; want %d", name, id, err, last+4)
			}
			dbtest.OK(t, c.Close())
			s.SoonUnused(t, db)
			dbtest.OK(t, db.Close())
		}
	})
}

// TestDoOnABareMock: a handle of sqlmock, without Wrap, is refused as that of any other
// driver. What the test expects of it is still expected afterwards.
func TestDoOnABareMock(t *testing.T) {
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
		if failing.Load() && text == "ROLLBACK" {
			return fakeReply{}, errFake
		}
		return answer(c, text)
	}
	for _, maxConns := range []int{0, 5} {
		k, err := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{MaxConns: maxConns})
		dbtest.OK(t, err)
		db := sql.OpenDB(around{k, wrappers["without Pinger"]})
		db.SetMaxOpenConns(1)
		ctx := dbtest.Limited(t)
		tx, err := db.BeginTx(lockctx.With(ctx, "k"), nil)
		dbtest.OK(t, err)
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
