package unit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// tenant makes a second database with the table p, of stock 100, and returns its name.
func tenant(s *stock.Shop, t *testing.T) string {
	t.Helper()
	name := s.Name + "_tenant"
	dbtest.Exec(t, s.Plain, "CREATE DATABASE "+name)
	t.Cleanup(func() { s.Plain.Exec("DROP DATABASE " + name) })
	dbtest.Exec(t, s.Plain, "CREATE TABLE "+name+".p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(t, s.Plain, "INSERT INTO "+name+".p VALUES (1, 100), (2, 100)")
	return name
}

// runsIn runs what the helpers run with a context of its own.
type runsIn struct {
	dbtest.Execer
	ctx context.Context
}

func (r runsIn) ExecContext(_ context.Context, text string, args ...any) (sql.Result, error) {
	return r.Execer.ExecContext(r.ctx, text, args...)
}

// TestASQLConnReadsDecidesAndWrites under a lock, as a sql.DB does: both run on a session.
func TestASQLConnReadsDecidesAndWrites(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, params := range []string{"lockNoWait=true", "lockNoWait=true&maxConns=8"} {
			db := s.Handle(params)
			conn, key, before := dbtest.Conn(t, db), dbtest.Random(), s.Stock(1)
			ctx := lockctx.With(dbtest.Limited(t), key)
			left := stock.MustRead(t, ctx, conn, 1)
			s.WantLocked(key, true)
			if left := stock.MustRead(t, ctx, db, 1); left != before { // the pool's statements run there, too
				t.Errorf("read %d, want %d", left, before)
			}
			dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = ? WHERE id = 1", left-1)
			s.WantLocked(key, false)
			s.WantStock(1, before-1)
			_, err := conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
			dbtest.Is(t, "a second write", err, mysqllock.ErrStaleRead)
			dbtest.OK(t, conn.Close())
		}
	})
}

// leftovers are what a sql.Conn leaves on its connection, and what the error calls it.
func leftovers(tenant string) map[string]string {
	return map[string]string{
		"USE " + tenant:                            "USE",
		"/* to " + tenant + " */ use " + tenant:    "USE",
		"SET SESSION time_zone = '+03:00'":         "SET time_zone",
		"set @@session.sql_mode = ''":              "SET sql_mode",
		"SET NAMES latin1":                         "charset=",
		"CREATE TEMPORARY TABLE mine (a INT)":      "CREATE TEMPORARY",
		"PREPARE mine FROM 'SELECT 1'":             "PREPARE",
		"DO GET_LOCK('" + tenant + "', 0)":         "GET_LOCK",
		"SELECT get_lock('" + tenant + "', 0)":     "GET_LOCK",
		"LOCK TABLES p READ":                       "LOCK",
		"BEGIN":                                    "a transaction that plain SQL text has begun",
		"START TRANSACTION":                        "a transaction that plain SQL text has begun",
		"SET autocommit = 0":                       "autocommit",
		"SET @@session.sql_select_limit = 1":       "SET sql_select_limit",
		"SET SESSION innodb_lock_wait_timeout = 7": "SET innodb_lock_wait_timeout",
	}
}

// TestWhatASQLConnHasSetForItsNextTransactionIsNotLost: a transaction under a lock would not have it. One that begins
// there has it, and then locks are good again.
func TestWhatASQLConnHasSetForItsNextTransactionIsNotLost(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, params := range []string{"lockNoWait=true", "lockNoWait=true&maxConns=8"} {
			db := s.Handle(params)
			for _, set := range []string{"SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", "set transaction read only"} {
				conn := dbtest.Conn(t, db)
				begin := func(ctx context.Context) error {
					return stock.InTx(ctx, conn, func(*sql.Tx) error { return nil })
				}
				locked := func() context.Context { return lockctx.With(dbtest.Limited(t), dbtest.Random()) }
				dbtest.Exec(t, conn, set)
				stock.WantError(t, set+", then BeginTx", begin(locked()), mysqllock.ErrUnsafe, "SET TRANSACTION")
				stock.WantError(t, set+", then a write", dbtest.Err(conn.ExecContext(locked(), "UPDATE p SET stock = 0 WHERE id = 1")), mysqllock.ErrUnsafe, "SET TRANSACTION")
				dbtest.OK(t, begin(dbtest.Limited(t)))
				dbtest.OK(t, begin(locked()))
				dbtest.OK(t, conn.Close())
			}
			dbtest.Exec(t, db, "SET TRANSACTION READ ONLY") // its use of the connection is over
			dbtest.Exec(t, runsIn{db, lockctx.With(dbtest.Limited(t), dbtest.Random())}, "UPDATE p SET stock = stock WHERE id = 1")
			dbtest.OK(t, db.Close())
		}
	})
}

// asks are the ways in which a lock is asked for over a sql.Conn.
var asks = map[string]func(ctx context.Context, conn *sql.Conn, text string) error{
	"a read": func(ctx context.Context, conn *sql.Conn, text string) error {
		return conn.QueryRowContext(ctx, text).Scan(new(any))
	},
	"a write": func(ctx context.Context, conn *sql.Conn, _ string) error {
		return dbtest.Err(conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1"))
	},
	"BeginTx": func(ctx context.Context, conn *sql.Conn, _ string) error {
		tx, err := conn.BeginTx(ctx, nil)
		if err == nil {
			err = tx.Rollback()
		}
		return err
	},
	"a prepared read": func(ctx context.Context, conn *sql.Conn, text string) error {
		stmt, err := conn.PrepareContext(context.Background(), text)
		if err != nil {
			return err
		}
		defer stmt.Close()
		return stmt.QueryRowContext(ctx).Scan(new(any))
	},
	"raw": func(ctx context.Context, conn *sql.Conn, text string) error {
		return conn.Raw(func(c any) error {
			rows, err := c.(driver.QueryerContext).QueryContext(ctx, text, nil)
			if err == nil {
				err = rows.Close()
			}
			return err
		})
	},
}

// TestWhatIsLeftOnASQLConnRefusesLocksOverIt: by name, and before anything of the lock is sent. It does so
// for as long as the sql.Conn is open; the next user of its connection gets locks.
func TestWhatIsLeftOnASQLConnRefusesLocksOverIt(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tenant := tenant(s, t)
		for _, most := range []int{0, 8} {
			db, tap := s.Tapped(mysqllock.Config{MaxConns: most})
			db.SetMaxOpenConns(1)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "all is there", func(context.Context) error { return nil }))
			n := 0
			for leave, says := range leftovers(tenant) {
				for kind, option := range everyStrategy {
					if n++; n%4 != len(kind)%4 {
						continue
					}
					conn := dbtest.Conn(t, db)
					dbtest.Exec(t, conn, leave)
					for way, ask := range asks {
						seen := tap.Texts()
						err := ask(lockctx.With(dbtest.Limited(t), dbtest.Random(), option), conn, "SELECT stock FROM p WHERE id = 1")
						stock.WantError(t, way+" of "+kind+" after "+leave, err, mysqllock.ErrUnsafe, says)
						for _, sent := range seen() { // a statement may be prepared, and it may be asked whether a transaction is open
							if !strings.HasPrefix(sent, "[prepare]") && sent != "SELECT @@autocommit" && !strings.Contains(sent, "SAVEPOINT mysqllock_open") {
								t.Errorf("%s of %s after %s: %s was sent", way, kind, leave, sent)
							}
						}
					}
					dbtest.Exec(t, conn, "ROLLBACK")
					dbtest.Exec(t, conn, "SET autocommit = 1")
					dbtest.Exec(t, conn, "UNLOCK TABLES")
					dbtest.OK(t, conn.Close())
					dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error { return nil }, option))
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					key := dbtest.Random()
					stock.MustRead(t, lockctx.With(ctx, key, lockctx.Row()), db, 1)
					cancel()
					dbtest.Soon(t, "it has ended", func() bool { return !s.Locked(key) })
					dbtest.Exec(t, db, "USE "+s.Name)
					dbtest.Exec(t, db, "SET NAMES utf8mb4")
					dbtest.Exec(t, db, "DROP TEMPORARY TABLE IF EXISTS mine")
				}
			}
			dbtest.OK(t, db.Close())
		}
	})
}

// TestAVariableOfASQLConnThatIsClosedRefusesNoLock, nor does anything else that a program leaves there.
func TestAVariableOfASQLConnThatIsClosedRefusesNoLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, most := range []int{0, 10} {
			for _, set := range []string{"SET @x = 1", "SET SESSION sort_buffer_size = 300000", "CREATE TEMPORARY TABLE tt (id INT)", "SELECT GET_LOCK('" + s.Name + "', 0)"} {
				db, _ := s.Tapped(mysqllock.Config{MaxConns: most})
				conn := dbtest.Conn(t, db)
				dbtest.Exec(t, conn, set)
				dbtest.OK(t, conn.Close())
				for i := range 20 {
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					for way, ask := range map[string]func(ctx context.Context) error{
						"read": func(ctx context.Context) error { _, err := stock.Read(ctx, db, 1); return err },
						"write": func(ctx context.Context) error {
							return dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1"))
						},
						"BeginTx": func(ctx context.Context) error {
							tx, err := db.BeginTx(ctx, nil)
							if err == nil {
								err = tx.Rollback()
							}
							return err
						},
					} {
						if err := ask(lockctx.With(ctx, dbtest.Random())); err != nil {
							t.Fatalf("%s: %s %d after its sql.Conn was closed: %v", set, way, i, err)
						}
					}
					cancel()
				}
				dbtest.OK(t, db.Close())
			}
		}
	})
}

// TestAnEndedLockContextCountsNoMoreOnItsSQLConn: what comes next there, without a lock, is not refused, and
// does what it says.
func TestAnEndedLockContextCountsNoMoreOnItsSQLConn(t *testing.T) {
	const times = 12
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		conn := dbtest.Conn(t, db)
		const add = "UPDATE p SET stock = stock + 1 WHERE id = 2"
		plain := dbtest.Limited(t)
		for name, does := range map[string]func() error{
			"a write": func() error { return dbtest.Err(conn.ExecContext(plain, add)) },
			"a transaction": func() error {
				tx, err := conn.BeginTx(plain, nil)
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(plain, add)
				return errors.Join(err, tx.Commit())
			},
			"a transaction as text": func() (err error) {
				for _, text := range []string{"BEGIN", add, "COMMIT"} {
					err = errors.Join(err, dbtest.Err(conn.ExecContext(plain, text)))
				}
				return err
			},
			"DDL and a write": func() error {
				return errors.Join(dbtest.Err(conn.ExecContext(plain, "CREATE OR REPLACE VIEW v AS SELECT 1")), dbtest.Err(conn.ExecContext(plain, add)))
			},
			"a read and a write": func() error {
				_, err := stock.Read(plain, conn, 1)
				return errors.Join(err, dbtest.Err(conn.ExecContext(plain, add)))
			},
		} {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 0 WHERE id = 2")
			for range times {
				ctx, cancel := context.WithCancel(plain)
				stock.MustRead(t, lockctx.With(ctx, "k"), conn, 1)
				cancel()
				if err := does(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			s.WantStock(2, times)
		}
	})
}

// TestNothingRunsElsewhereThanWhereASQLConnHasLeftSomething: what a statement under a lock leaves is on the lock's
// connection.
func TestNothingRunsElsewhereThanWhereASQLConnHasLeftSomething(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tenant := tenant(s, t)
		db, tap := s.Tapped(mysqllock.Config{})
		for leave, ask := range map[string]string{
			"SET @x = 7": "SELECT @x", "USE " + tenant: "SELECT stock FROM p WHERE id = 1", "CREATE TEMPORARY TABLE mine AS SELECT 7 AS x": "SELECT x FROM mine",
		} {
			conn := dbtest.Conn(t, db)
			var x int
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
				dbtest.Exec(t, runsIn{conn, ctx}, leave)
				dbtest.OK(t, conn.QueryRowContext(ctx, ask).Scan(&x))
				tx := dbtest.Begin(t, ctx, conn)
				dbtest.OK(t, tx.QueryRowContext(ctx, ask).Scan(&x))
				return tx.Rollback()
			}))
			if x != 7 && x != 100 {
				t.Errorf("after %s it reads %d", leave, x)
			}
			seen := tap.Texts()
			for name, ctx := range map[string]context.Context{"without a lock": dbtest.Limited(t), "under another one": lockctx.With(dbtest.Limited(t), dbtest.Random())} {
				stock.WantError(t, leave+", then "+name, conn.QueryRowContext(ctx, ask).Scan(&x), mysqllock.ErrUnsafe, "one mysqllock.Do")
			}
			stock.WantError(t, leave+", then in another Do", mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
				return conn.QueryRowContext(ctx, ask).Scan(&x)
			}), mysqllock.ErrUnsafe, "one mysqllock.Do")
			for _, sent := range seen() {
				if sent == ask {
					t.Errorf("%s was sent", ask)
				}
			}
			dbtest.OK(t, conn.Close())
		}
	})
}

// TestWhatThePoolHasLeftRefusesNoLock: the use of its connection is over, and another one of the pool has nothing of it
// either. A transaction that is open there is refused, since the lock would be outside of it, and so are tables that are
// locked there, for which the lock's session would wait.
func TestWhatThePoolHasLeftRefusesNoLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for leave, says := range leftovers(tenant(s, t)) {
			open := leave == "BEGIN" || leave == "START TRANSACTION" || leave == "SET autocommit = 0" || strings.HasPrefix(leave, "LOCK TABLES")
			db, tap := s.Tapped(mysqllock.Config{})
			db.SetMaxOpenConns(1)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			stock.MustRead(t, lockctx.With(ctx, dbtest.Random()), db, 1)
			dbtest.Exec(t, db, leave)
			seen := tap.Since()
			_, err := stock.Read(lockctx.With(ctx, dbtest.Random()), db, 1)
			switch {
			case !open:
				if err != nil {
					t.Errorf("after %s: %v", leave, err)
				}
			default:
				stock.WantError(t, "after "+leave, err, mysqllock.ErrUnsafe, says)
				for _, c := range seen() { // but whether a transaction is open may be asked
					if c.Text != "[ping]" && c.Text != "SELECT @@autocommit" && !strings.Contains(c.Text, "SAVEPOINT mysqllock_open") {
						t.Errorf("after %s: sent %v, want nothing", leave, c)
					}
				}
			}
			cancel()
			dbtest.OK(t, db.Close())
		}
	})
}

// TestWhatIsTakenBackRefusesNoLock has programs that clean up after themselves, or do what
// leaves nothing that anybody needs: the sql.Conn serves a lock as before.
func TestWhatIsTakenBackRefusesNoLock(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE nothing() BEGIN END")
		lock := "'" + s.Name + "'"
		for _, texts := range [][]string{
			{"SET FOREIGN_KEY_CHECKS = 0;", "SET FOREIGN_KEY_CHECKS = 1;"},
			{"SET time_zone = '+03:00'", "SET time_zone = DEFAULT"},
			{"DO GET_LOCK(" + lock + ", 0)", "SELECT RELEASE_LOCK(" + lock + ")"},
			{"LOCK TABLES p READ", "UNLOCK TABLES"},
			{"CREATE TEMPORARY TABLE `mine` (a INT)", "DROP TABLE mine"},
			{"CREATE TEMPORARY TABLE mine (a INT)", "DROP TEMPORARY TABLE IF EXISTS mine"},
			{"PREPARE mine FROM 'SELECT 1'", "DEALLOCATE PREPARE mine"},
			{"CALL nothing()"},
			{"SELECT @n := @n + 1, p.id FROM p, (SELECT @n := 0) init"},
			{"SELECT 'a@b.c' FROM p"},
			{"SELECT @@version"},
			{"FLUSH PRIVILEGES"},
			{"SET GLOBAL max_connections = @@GLOBAL.max_connections"},
			{"SET FOREIGN_KEY_CHECKS = 0; UPDATE p SET stock = 10; SET FOREIGN_KEY_CHECKS = 1;\n"},
			{"SET FOREIGN_KEY_CHECKS = 0; SET UNIQUE_CHECKS = 0", "SET UNIQUE_CHECKS = 1; SET FOREIGN_KEY_CHECKS = 1"},
		} {
			db := s.Handle("multiStatements=true")
			conn := dbtest.Conn(t, db)
			for _, text := range texts {
				dbtest.Exec(t, conn, text)
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var left int
			if err := conn.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&left); err != nil {
				t.Errorf("after %s: %v", strings.Join(texts, "; "), err)
			}
			cancel()
			dbtest.OK(t, errors.Join(conn.Close(), db.Close()))
		}
		for _, text := range []string{ // what another connection does not have is there at the end
			"SET FOREIGN_KEY_CHECKS = 0; SELECT 1; SET UNIQUE_CHECKS = 1",
			"SET FOREIGN_KEY_CHECKS = 1; SET FOREIGN_KEY_CHECKS = 0",
			"SET FOREIGN_KEY_CHECKS = 0; SELECT nothing FROM p; SET FOREIGN_KEY_CHECKS = 1",
			"SET FOREIGN_KEY_CHECKS = 0; UPDATE p SET stock = 10; SELECT 'a;SET FOREIGN_KEY_CHECKS = 1; b'",
		} {
			db := s.Handle("multiStatements=true")
			conn := dbtest.Conn(t, db)
			_, _ = conn.ExecContext(dbtest.Limited(t), text)
			var n int
			err := conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n)
			stock.WantError(t, "after "+text, err, mysqllock.ErrUnsafe, "has left something")
			dbtest.OK(t, errors.Join(conn.Close(), db.Close()))
		}

		db := s.Handle() // what fails takes nothing back
		conn := dbtest.Conn(t, db)
		dbtest.Exec(t, conn, "SET time_zone = '+03:00'")
		if _, err := conn.ExecContext(dbtest.Limited(t), "SET time_zone = DEFAULT, no_such_variable = DEFAULT"); err == nil {
			t.Error("a variable that there is not was set")
		}
		var n int
		dbtest.Is(t, "after a SET that failed", conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n), mysqllock.ErrUnsafe)

		conn = dbtest.Conn(t, db) // with an argument each goes to the driver twice
		dbtest.Exec(t, conn, "DO GET_LOCK(?, 0)", s.Name)
		dbtest.Exec(t, conn, "DO RELEASE_LOCK("+lock+")")
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		stock.MustRead(t, lockctx.With(ctx, dbtest.Random()), conn, 1)
	})
}

// TestLastInsertIDIsRefusedWhereTheINSERTRanElsewhere, and answered where it ran on the connection that is asked.
func TestLastInsertIDIsRefusedWhereTheINSERTRanElsewhere(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE TABLE counted (id INT AUTO_INCREMENT PRIMARY KEY)")
		db := s.Handle("lockNoWait=true")
		conn := dbtest.Conn(t, db)
		var id int
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			if _, err := conn.ExecContext(ctx, "INSERT INTO counted () VALUES ()"); err != nil {
				return err
			}
			return conn.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id)
		}))
		if id != 1 {
			t.Errorf("LAST_INSERT_ID() is %d, want 1", id)
		}
		err := conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT LAST_INSERT_ID()").Scan(&id)
		dbtest.Is(t, "after Do", err, mysqllock.ErrUnsafe)
		for name, ask := range lastID {
			dbtest.Is(t, name+" after Do", dbtest.Err(ask(dbtest.Limited(t), conn, "SELECT LAST_INSERT_ID()")), mysqllock.ErrUnsafe)
		}
		dbtest.Exec(t, conn, "INSERT INTO counted () VALUES ()")
		err = mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			return conn.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id)
		})
		dbtest.Is(t, "in another Do", err, mysqllock.ErrUnsafe)
		dbtest.Is(t, "in a transaction in another Do", mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			_, err := lastID["a transaction"](ctx, conn, "SELECT LAST_INSERT_ID()")
			return err
		}), mysqllock.ErrUnsafe)
		err = conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT LAST_INSERT_ID()").Scan(&id)
		dbtest.Is(t, "under another lock", err, mysqllock.ErrUnsafe)
		dbtest.OK(t, conn.QueryRowContext(dbtest.Limited(t), "SELECT LAST_INSERT_ID()").Scan(&id))
		if id != 2 {
			t.Errorf("LAST_INSERT_ID() is %d, want 2", id)
		}
	})
}

// TestASQLConnSendsNoMoreWithoutAHint than the application does.
func TestASQLConnSendsNoMoreWithoutAHint(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tp := s.Tapped(mysqllock.Config{})
		conn := dbtest.Conn(t, db)
		var left int
		tp.Costs(t, "a read", 1, func() error {
			return conn.QueryRowContext(dbtest.Limited(t), "SELECT stock FROM p WHERE id = 1").Scan(&left)
		})
		tp.Costs(t, "USE", 1, func() error {
			_, err := conn.ExecContext(dbtest.Limited(t), "USE "+s.Name)
			return err
		})
	})
}

// TestALockWorksAtOnceWhileRowsOfASQLConnAreRead, as it has a session, and the rows can be read on. A read that runs
// beside its lock, on the connection of the rows, is refused, and closes nothing.
func TestALockWorksAtOnceWhileRowsOfASQLConnAreRead(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for mode, params := range map[string][]string{"": nil, "maxConns": {"maxConns=6"}} {
			for kind, option := range everyStrategy {
				t.Run(kind+" "+mode, func(t *testing.T) {
					const text = "UPDATE p SET stock = stock + 1 WHERE id = 1"
					conn, before := dbtest.Conn(t, s.Handle(params...)), s.Stock(1)
					st, err := conn.PrepareContext(dbtest.Limited(t), text)
					dbtest.OK(t, err)
					rows, err := conn.QueryContext(dbtest.Limited(t), "SELECT id FROM p")
					dbtest.OK(t, err)
					defer rows.Close()
					rows.Next()
					writes := 0
					for name, call := range map[string]func(context.Context) error{
						"BeginTx": func(ctx context.Context) error {
							return stock.InTx(ctx, conn, func(tx *sql.Tx) error { return dbtest.Err(tx.ExecContext(ctx, text)) })
						},
						"ExecContext": func(ctx context.Context) error { return dbtest.Err(conn.ExecContext(ctx, text)) },
						"a statement": func(ctx context.Context) error { return dbtest.Err(st.ExecContext(ctx)) },
						"a read": func(ctx context.Context) error {
							left, err := stock.Read(ctx, conn, 1)
							if kind == "row" {
								if err == nil && left != before+writes {
									err = fmt.Errorf("read %d, want %d", left, before+writes)
								}
								return err
							}
							dbtest.Is(t, "a read of "+kind, err, mysqllock.ErrExhausted)
							return nil
						},
					} {
						for range 2 {
							over := make(chan error, 1)
							ctx, cancel := context.WithCancel(dbtest.Limited(t))
							go func() { over <- call(lockctx.With(ctx, dbtest.Random(), option)) }()
							select {
							case err := <-over:
								if err != nil {
									t.Errorf("%s: %v", name, err)
								}
								cancel()
							case <-time.After(dbtest.Patience):
								t.Fatal(name + " hangs")
							}
							if name != "a read" {
								writes++
							}
						}
					}
					read := 1
					for rows.Next() {
						read++
					}
					dbtest.OK(t, errors.Join(rows.Err(), rows.Close()))
					dbtest.Equal(t, "%d rows were read", read, len(dbtest.Column[int](t, s.Plain, "SELECT id FROM p")))
					s.WantStock(1, before+writes)
				})
			}
		}
	})
}

// TestALockIsRefusedOverWhatTextsHaveLeftOpen: after texts that leave nothing open a hint is
// good on the connection, and after others it is refused, until what they left open has ended.
func TestALockIsRefusedOverWhatTextsHaveLeftOpen(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE opens() BEGIN START TRANSACTION; UPDATE p SET stock = stock WHERE id = 4; END")
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE switches() SET autocommit = 0")
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE commits() BEGIN START TRANSACTION; UPDATE p SET stock = stock WHERE id = 4; COMMIT; END")
		cfg := s.Config()
		cfg.MultiStatements = true
		cfg.InterpolateParams = true
		k, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
		dbtest.OK(t, err)
		db := sql.OpenDB(k)
		t.Cleanup(func() { db.Close() })
		db.SetMaxOpenConns(1) // so that a lock meets what texts before it have left open
		for _, c := range []struct {
			texts []string // separate ones; what the server refuses is part of the test
			open  bool     // something is open in the end
		}{
			{texts: []string{"BEGIN; UPDATE p SET stock = stock WHERE id = 4; COMMIT"}},
			{texts: []string{"START TRANSACTION; SELECT 1; ROLLBACK"}},
			{texts: []string{"BEGIN", "/* c */ COMMIT"}},
			{texts: []string{"BEGIN", "-- c\nROLLBACK"}},
			{texts: []string{"/*!50000 BEGIN */", "/*!50000 COMMIT */"}},
			{texts: []string{"BEGIN", "COMMIT;"}},
			{texts: []string{"BEGIN", "CREATE TABLE IF NOT EXISTS made (id INT)"}},
			{texts: []string{"BEGIN", "LOCK TABLES p WRITE", "UNLOCK TABLES"}},
			{texts: []string{"XA START 'x'", "XA END 'x'", "XA COMMIT 'x' ONE PHASE"}},
			{texts: []string{"XA START 'x'; XA END 'x'; XA ROLLBACK 'x'"}},
			{texts: []string{"SET autocommit = 0", "UPDATE p SET stock = stock WHERE id = 4", "/* c */ SET autocommit = 1"}},
			{texts: []string{"SET @@session.autocommit = 0; SET @@session.autocommit = 1"}},
			{texts: []string{"SET GLOBAL max_connections = @@max_connections"}},
			{texts: []string{"BEGIN; SELECT frob", "ROLLBACK"}},
			{texts: []string{"SELECT frob; BEGIN"}},
			{texts: []string{"BEGIN", "KILL QUERY CONNECTION_ID()", "COMMIT AND CHAIN", "COMMIT"}},
			{texts: []string{"CALL commits()"}},
			{texts: []string{"CALL opens()", "COMMIT"}},
			{texts: []string{"PREPARE b FROM 'UPDATE p SET stock = stock WHERE id = 4'", "EXECUTE b"}},

			{texts: []string{"/* c */ BEGIN"}, open: true},
			{texts: []string{"SELECT 1; BEGIN"}, open: true},
			{texts: []string{"BEGIN; COMMIT; BEGIN"}, open: true},
			{texts: []string{"BEGIN; SELECT frob"}, open: true},
			{texts: []string{"BEGIN", "COMMIT AND CHAIN"}, open: true},
			{texts: []string{"ROLLBACK AND CHAIN"}, open: true},
			{texts: []string{"START TRANSACTION WITH CONSISTENT SNAPSHOT"}, open: true},
			{texts: []string{"/*!50000 START TRANSACTION */"}, open: true},
			{texts: []string{"XA START 'x'"}, open: true},
			{texts: []string{"XA START 'x'", "XA END 'x'"}, open: true},
			{texts: []string{"/* c */ SET autocommit = 0"}, open: true},
			{texts: []string{"SET @@session.autocommit = OFF"}, open: true},
			{texts: []string{"SET @@session . `autocommit` := 0"}, open: true},
			{texts: []string{"SET @x = 1, autocommit = 0"}, open: true},
			{texts: []string{"SET @x = 1, autocommit = 0, @y = 2", "COMMIT"}, open: true},
			{texts: []string{"SET autocommit = 'OFF'"}, open: true},
			{texts: []string{"SET autocommit = 1 - 1"}, open: true},
			{texts: []string{"/*!40101 SET autocommit = 0 */"}, open: true},
			{texts: []string{"SET GLOBAL max_connections = @@max_connections, @@autocommit = 0"}, open: true},
			{texts: []string{"BEGIN", "ROLLBACK TO SAVEPOINT nothing"}, open: true},
			{texts: []string{"CALL opens()"}, open: true},
			{texts: []string{"CALL switches()"}, open: true},
			{texts: []string{"PREPARE b FROM 'SET autocommit = 0'", "EXECUTE b"}, open: true},
		} {
			name := strings.Join(c.texts, " | ")
			for _, prepared := range []bool{false, true} {
				for _, text := range c.texts {
					if !prepared || strings.Contains(text, ";") {
						_, _ = db.ExecContext(dbtest.Limited(t), text)
					} else if st, err := db.PrepareContext(dbtest.Limited(t), text); err != nil {
						_, _ = db.ExecContext(dbtest.Limited(t), text)
					} else {
						_, _ = st.ExecContext(dbtest.Limited(t))
						dbtest.OK(t, st.Close())
					}
				}
				wantHints(t, db, name, c.open)
				if c.open {
					for _, text := range []string{"XA END 'x'", "XA ROLLBACK 'x'", "ROLLBACK", "SET autocommit = 1"} {
						_, _ = db.ExecContext(dbtest.Limited(t), text)
					}
					wantHints(t, db, name+", ended", false)
				}
				dbtest.Exec(t, s.Plain, "DROP TABLE IF EXISTS made")
			}
		}
	})
}

// wantHints tries hints on the one connection of db, of two kinds that the length of the name picks, or of each.
func wantHints(t *testing.T, db *sql.DB, name string, refused bool) {
	t.Helper()
	for i, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory(), lockctx.Optimistic()} {
		if !some(i, len(name), 2) {
			continue
		}
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: UPDATE: %v", name, err)
		}
		cancel()
		if refused {
			err := db.QueryRowContext(lockctx.With(dbtest.Limited(t), "k", option), "SELECT stock FROM p WHERE id = 1").Scan(new(int))
			dbtest.Is(t, name+": SELECT", err, mysqllock.ErrUnsafe)
		}
		ctx, cancel = context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		tx, err := db.BeginTx(ctx, nil)
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: BeginTx: %v", name, err)
		}
		if err == nil {
			dbtest.OK(t, tx.Rollback())
		}
		cancel()
	}
}

// TestOnlyAutocommitOffOutlivesItsTransaction: no other text in a transaction of BeginTx's leaves one open.
func TestOnlyAutocommitOffOutlivesItsTransaction(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		db.SetMaxOpenConns(1)
		for texts, open := range map[string]bool{
			"SET autocommit = 0":                           true,
			"COMMIT|BEGIN":                                 false, // which the end of the sql.Tx ends
			"COMMIT":                                       false,
			"COMMIT AND CHAIN":                             false,
			"SET autocommit = 0|SET autocommit = 1":        false,
			"CREATE TABLE IF NOT EXISTS made (a INT)":      false,
			"UPDATE p SET stock = stock|/* */ COMMIT|DO 1": false,
		} {
			tx := dbtest.Begin(t, dbtest.Limited(t), db)
			for text := range strings.SplitSeq(texts, "|") {
				dbtest.Exec(t, tx, text)
			}
			dbtest.OK(t, tx.Commit())
			wantHints(t, db, texts, open)
			dbtest.Exec(t, db, "SET autocommit = 1")
			wantHints(t, db, texts+", ended", false)
		}
	})
}

// TestBeginTxEndsATransactionOfText: a hint is good on the connection after that.
func TestBeginTxEndsATransactionOfText(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		db.SetMaxOpenConns(1)
		for _, text := range []string{"START TRANSACTION", "BEGIN WORK"} { // an odd and an even length: each kind
			dbtest.Exec(t, db, text)
			dbtest.OK(t, dbtest.Begin(t, dbtest.Limited(t), db).Rollback()) // BEGIN commits it
			wantHints(t, db, "BeginTx after "+text, false)
		}
	})
}

// TestTextsSendNothing: what is noted of unhinted texts sends nothing, and where
// nothing is in doubt a hint costs what it costs.
func TestTextsSendNothing(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tp := s.Tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		ctx := lockctx.With(dbtest.Limited(t), "k")
		hinted := func() error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
			return err
		}
		dbtest.OK(t, hinted())
		texts := []string{
			"BEGIN", "SELECT 1", "COMMIT", "SET autocommit = 0", "SET autocommit = 1", "CREATE TABLE made (a INT)", "BEGIN", "ROLLBACK",
			"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "LOCK TABLES p WRITE", "UNLOCK TABLES", "DROP TABLE made",
		}
		seen := tp.Since()
		for _, text := range texts {
			dbtest.Exec(t, db, text)
		}
		var sent []string
		for _, c := range seen() {
			if c.Text != "[ping]" && !slices.Contains([]string{"SET SESSION idle_transaction_timeout = 0"}, c.Text) {
				sent = append(sent, c.Text)
			}
		}
		if len(sent) > len(texts)+1 { // MariaDB: the limit for locked transactions is taken off
			t.Errorf("sent %q", sent)
		}
		seen = tp.Since()
		dbtest.OK(t, hinted())
		for _, c := range seen() {
			if strings.Contains(c.Text, "@@autocommit") || strings.Contains(c.Text, "mysqllock_open") {
				t.Errorf("asked: %q", c.Text)
			}
		}
	})
}

// lastID are ways to ask a sql.Conn for the id of an INSERT.
var lastID = map[string]func(ctx context.Context, c *sql.Conn, ask string) (id int, err error){
	"a query": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		return id, c.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a second query": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		_ = c.QueryRowContext(ctx, ask).Scan(&id)
		return id, c.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a query with an argument": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		return id, c.QueryRowContext(ctx, ask+" + ?", 0).Scan(&id)
	},
	"a prepared statement": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		st, err := c.PrepareContext(ctx, ask)
		if err != nil {
			return 0, err
		}
		defer st.Close()
		return id, st.QueryRowContext(ctx).Scan(&id)
	},
	"a transaction": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		tx, err := c.BeginTx(ctx, nil)
		if err != nil {
			return 0, err
		}
		defer tx.Rollback()
		return id, tx.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a transaction under a lock": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		tx, err := c.BeginTx(lockctx.With(ctx, dbtest.Random()), nil)
		if err != nil {
			return 0, err
		}
		defer tx.Rollback()
		return id, tx.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a write under a lock": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		if _, err = c.ExecContext(lockctx.With(ctx, dbtest.Random()), "UPDATE p SET stock = "+strings.TrimPrefix(ask, "SELECT ")+" WHERE id = 4"); err != nil {
			return 0, err
		}
		return id, c.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 4").Scan(&id)
	},
	"a query after a ping": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		if err := c.PingContext(ctx); err != nil {
			return 0, err
		}
		return id, c.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a query after an empty transaction": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		tx, err := c.BeginTx(ctx, nil)
		if err == nil {
			err = tx.Rollback()
		}
		if err != nil {
			return 0, err
		}
		return id, c.QueryRowContext(ctx, ask).Scan(&id)
	},
	"a query after a statement that was only prepared": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		st, err := c.PrepareContext(ctx, "DO 0")
		if err == nil {
			err = st.Close()
		}
		if err != nil {
			return 0, err
		}
		return id, c.QueryRowContext(ctx, ask).Scan(&id)
	},
}
