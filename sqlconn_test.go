package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What runs on a sql.Conn stays on it; what is not on the connection that a unit of
// work has is never missed silently.

// tenant makes a second database with the table p, of stock 100, and returns its name.
func (s *scratch) tenant(t *testing.T) string {
	t.Helper()
	name := s.Name + "_tenant"
	dbtest.Exec(t, s.plain, "CREATE DATABASE "+name)
	t.Cleanup(func() { s.plain.Exec("DROP DATABASE " + name) })
	dbtest.Exec(t, s.plain, "CREATE TABLE "+name+".p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(t, s.plain, "INSERT INTO "+name+".p VALUES (1, 100), (2, 100)")
	return name
}

func conned(t *testing.T, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(dbtest.Limited(t))
	dbtest.OK(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// runsIn runs what the helpers run with a context of its own.
type runsIn struct {
	dbtest.Execer
	ctx context.Context
}

func (w runsIn) ExecContext(_ context.Context, text string, args ...any) (sql.Result, error) {
	return w.Execer.ExecContext(w.ctx, text, args...)
}

// TestConnReadDecideWrite reads, decides and writes on a sql.Conn that has another
// default database: both happen there, and the lock is held in between.
func TestConnReadDecideWrite(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := s.tenant(t)
		db := s.open("lockNoWait=true")
		conn := conned(t, db)
		dbtest.Exec(t, conn, "USE "+tenant)
		key := dbtest.Random()
		ctx := lockctx.With(dbtest.Limited(t), key)
		var stock int
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		if stock != 100 {
			t.Errorf("read %d, want that of the tenant, 100", stock)
		}
		s.wantLocked(key, true)
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", 2).Scan(&stock))
		dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = ? WHERE id = 1", stock-1)
		s.wantLocked(key, false)
		s.wantStock(1, 10)
		dbtest.OK(t, s.plain.QueryRow("SELECT stock FROM "+tenant+".p WHERE id = 1").Scan(&stock))
		if stock != 99 {
			t.Errorf("the tenant's stock is %d, want 99", stock)
		}
	})
}

// TestConnState has a sql.Conn's own things in what is read under a lock, in each way
// in which a statement reaches the driver.
func TestConnState(t *testing.T) {
	ways := map[string]func(t *testing.T, ctx context.Context, conn *sql.Conn, text string) string{
		"query": func(t *testing.T, ctx context.Context, conn *sql.Conn, text string) (got string) {
			dbtest.OK(t, conn.QueryRowContext(ctx, text).Scan(&got))
			return got
		},
		"query with an argument": func(t *testing.T, ctx context.Context, conn *sql.Conn, text string) (got string) {
			dbtest.OK(t, conn.QueryRowContext(ctx, text+" HAVING 1 = ?", 1).Scan(&got))
			return got
		},
		"prepared": func(t *testing.T, ctx context.Context, conn *sql.Conn, text string) (got string) {
			stmt, err := conn.PrepareContext(context.Background(), text)
			dbtest.OK(t, err)
			defer stmt.Close()
			dbtest.OK(t, stmt.QueryRowContext(ctx).Scan(&got))
			dbtest.OK(t, stmt.QueryRowContext(ctx).Scan(&got))
			return got
		},
		"raw": func(t *testing.T, ctx context.Context, conn *sql.Conn, text string) (got string) {
			dbtest.OK(t, conn.Raw(func(c any) error {
				rows, err := c.(driver.QueryerContext).QueryContext(ctx, text, nil)
				if err != nil {
					return err
				}
				defer rows.Close()
				dest := make([]driver.Value, 1)
				err = rows.Next(dest)
				if got = fmt.Sprint(dest[0]); err == nil {
					if b, isText := dest[0].([]byte); isText {
						got = string(b)
					}
				}
				return err
			}))
			return got
		},
	}
	things := []struct{ leave, ask, want string }{
		{"SET @who = 'me'", "SELECT @who AS x", "me"},
		{"SET time_zone = '+03:00'", "SELECT @@time_zone AS x", "+03:00"},
		{"CREATE TEMPORARY TABLE mine AS SELECT 'here' AS a", "SELECT a AS x FROM mine", "here"},
		{"INSERT INTO counted () VALUES ()", "SELECT LAST_INSERT_ID() AS x", "1"},
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockNoWait=true")
		for way, ask := range ways {
			conn := conned(t, db)
			dbtest.Exec(t, s.plain, "DROP TABLE IF EXISTS counted")
			dbtest.Exec(t, s.plain, "CREATE TABLE counted (id INT AUTO_INCREMENT PRIMARY KEY)")
			for _, thing := range things {
				dbtest.Exec(t, conn, thing.leave)
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				key := dbtest.Random()
				if got := ask(t, lockctx.With(ctx, key), conn, thing.ask); got != thing.want {
					t.Errorf("%s: %s after %s is %q, want %q", way, thing.ask, thing.leave, got, thing.want)
				}
				s.wantLocked(key, true)
				cancel()
				dbtest.Soon(t, "the end of the context gives the lock back", func() bool { return !s.locked(key) })
			}
		}
	})
}

// TestConnTextTransaction asks for a lock in a transaction that text has begun on a
// sql.Conn.
func TestConnTextTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockNoWait=true")
		conn := conned(t, db)
		dbtest.Exec(t, conn, "BEGIN")
		dbtest.Exec(t, conn, "UPDATE p SET stock = 5 WHERE id = 1")
		var stock int
		for _, opt := range []lockctx.Option{lockctx.Row(), lockctx.Lease(5 * time.Second), lockctx.Advisory(), lockctx.Optimistic()} {
			ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
			err := conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock)
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("read with %v: got %v, want ErrUnsafe", opt, err)
			}
		}
		dbtest.Exec(t, conn, "ROLLBACK")
		s.wantStock(1, 10)
	})
}

// TestPooledState asks over the pool for a lock, on its one connection, which
// carries something.
func TestPooledState(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := s.tenant(t)
		for _, leave := range []string{
			"USE " + tenant,
			"/* to " + tenant + " */ use " + tenant,
			"SET @who = 'me'",
			"SELECT 5 INTO @who",
			"SELECT @who := 5",
			"SET SESSION time_zone = '+03:00'",
			"set @@session.sql_mode = ''",
			"SET NAMES latin1",
			"CREATE TEMPORARY TABLE mine (a INT)",
			"PREPARE mine FROM 'SELECT 1'",
			"BEGIN",
			"SET autocommit = 0",
			"DO GET_LOCK('" + s.Name + "', 0)",
			"SELECT get_lock('" + s.Name + "', 0)",
			"LOCK TABLES p READ",
		} {
			db, tp := s.tapped(mysqllock.Config{})
			db.SetMaxOpenConns(1)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var stock int
			dbtest.OK(t, db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&stock))
			dbtest.Exec(t, db, leave)
			seen := tp.Since()
			text := "SELECT stock FROM p WHERE id = 1"
			if leave == "SELECT @who := 5" {
				text += " AND @who = 5"
			}
			err := db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), text).Scan(&stock)
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("after %s: got %v (stock %d), want ErrUnsafe", leave, err, stock)
			}
			if strings.HasPrefix(leave, "SET NAMES") {
				wantError(t, leave, err, mysqllock.ErrUnsafe, "charset=")
			}
			for _, c := range seen() { // but whether a transaction is open may be asked
				if c.Text != "[ping]" && c.Text != "SELECT @@autocommit" && !strings.Contains(c.Text, "SAVEPOINT mysqllock_open") {
					t.Errorf("after %s: sent %v, want nothing", leave, c)
				}
			}
			cancel()
			db.Close()
		}
	})
}

// TestPooledStateTakenBack has programs that clean up after themselves, or do what
// leaves nothing that anybody needs: the connection serves a lock as before.
func TestPooledStateTakenBack(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE nothing() BEGIN END")
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
			db := s.open("multiStatements=true")
			db.SetMaxOpenConns(1)
			for _, text := range texts {
				dbtest.Exec(t, db, text)
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var stock int
			if err := db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&stock); err != nil {
				t.Errorf("after %s: %v", strings.Join(texts, "; "), err)
			}
			cancel()
			db.Close()
		}
		for _, text := range []string{ // what another connection does not have is there at the end
			"SET FOREIGN_KEY_CHECKS = 0; SELECT 1; SET UNIQUE_CHECKS = 1",
			"SET FOREIGN_KEY_CHECKS = 1; SET FOREIGN_KEY_CHECKS = 0",
			"SET FOREIGN_KEY_CHECKS = 0; SELECT nothing FROM p; SET FOREIGN_KEY_CHECKS = 1",
			"SET FOREIGN_KEY_CHECKS = 0; UPDATE p SET stock = 10; SELECT 'a;SET FOREIGN_KEY_CHECKS = 1; b'",
		} {
			db := s.open("multiStatements=true")
			db.SetMaxOpenConns(1)
			_, _ = db.Exec(text)
			var n int
			err := db.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n)
			wantError(t, "after "+text, err, mysqllock.ErrUnsafe, "has left something")
			db.Close()
		}

		db := s.open() // what fails takes nothing back
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "SET time_zone = '+03:00'")
		if _, err := db.Exec("SET time_zone = DEFAULT, no_such_variable = DEFAULT"); err == nil {
			t.Error("a variable that there is not was set")
		}
		var n int
		if err := db.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("after a SET that failed: %v, want ErrUnsafe", err)
		}
		db.Close()

		db = s.open() // with an argument each goes to the driver twice
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "DO GET_LOCK(?, 0)", s.Name)
		dbtest.Exec(t, db, "DO RELEASE_LOCK("+lock+")")
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var stock int
		dbtest.OK(t, db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&stock))
	})
}

// TestConnUnitEnds ends a unit of work on a sql.Conn in each way but by a write.
func TestConnUnitEnds(t *testing.T) {
	read := func(t *testing.T, ctx context.Context, conn *sql.Conn) {
		t.Helper()
		var stock int
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockNoWait=true")
		db.SetMaxOpenConns(1)

		t.Run("context", func(t *testing.T) {
			conn, key := conned(t, db), dbtest.Random()
			defer conn.Close()
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, key)
			read(t, ctx, conn)
			cancel()
			dbtest.Soon(t, "the lock is given back", func() bool { return !s.locked(key) })
			dbtest.Exec(t, conn, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.wantStock(2, 11) // nothing is left open
			if _, err := conn.ExecContext(lockctx.With(context.WithoutCancel(ctx), key), "UPDATE p SET stock = 0 WHERE id = 2"); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("write after the end of the context: %v, want ErrLost", err)
			}
		})

		t.Run("Conn.Close", func(t *testing.T) {
			conn, key := conned(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			s.wantLocked(key, true)
			dbtest.OK(t, conn.Close())
			s.wantLocked(key, false)
			dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.wantStock(2, 12)
			if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 2"); !errors.Is(err, mysqllock.ErrStaleRead) {
				t.Errorf("write after the end of the sql.Conn: %v, want ErrStaleRead", err)
			}
			var stock int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock)) // a new unit of work
		})

		t.Run("BeginTx", func(t *testing.T) {
			for _, hinted := range []bool{true, false} {
				conn, key := conned(t, db), dbtest.Random()
				ctx := lockctx.With(dbtest.Limited(t), key)
				read(t, ctx, conn)
				begin := ctx
				if !hinted {
					begin = dbtest.Limited(t)
				}
				tx, err := conn.BeginTx(begin, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 77 WHERE id = 3")
				s.wantLocked(key, true)
				dbtest.OK(t, tx.Rollback())
				s.wantLocked(key, false)
				s.wantStock(3, 10)
				dbtest.OK(t, conn.Close())
			}
		})

		t.Run("kill", func(t *testing.T) {
			conn, key := conned(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			var id int
			dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL CONNECTION %d", id))
			dbtest.Soon(t, "the server frees the lock", func() bool { return !s.locked(key) })
			for range 2 {
				if _, err := conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 3"); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("write: %v, want ErrLost", err)
				}
			}
			conn.Close()
			s.wantStock(3, 10)
		})

		t.Run("given up", func(t *testing.T) { // in the middle of a statement
			conn, key := conned(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			short, cancel := context.WithCancel(ctx)
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				var n int
				ended <- conn.QueryRowContext(short, "SELECT SLEEP(100) + BENCHMARK(1000000000, 1)").Scan(&n)
			}()
			dbtest.Soon(t, "it runs", func() (yes bool) {
				dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'SELECT SLEEP(100)%'", s.Name).Scan(&yes))
				return yes
			})
			cancel()
			if <-ended == nil {
				t.Error("a statement of 100 s has ended at once")
			}
			start := time.Now()
			dbtest.Soon(t, "the lock is given back", func() bool { return !s.locked(key) })
			if took := time.Since(start); took > time.Minute {
				t.Errorf("the lock is given back after %v", took)
			}
			if _, err := conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 3"); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("write: %v, want ErrLost", err)
			}
			conn.Close()
		})

		t.Run("unhinted", func(t *testing.T) { // statements of the same sql.Conn
			conn, key := conned(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			read(t, dbtest.Limited(t), conn)
			s.wantLocked(key, true)
			for _, text := range []string{"COMMIT", "CREATE TABLE other (a INT)", "BEGIN"} {
				if _, err := conn.ExecContext(lockctx.Without(ctx), text); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("%s: %v, want ErrUnsafe", text, err)
				}
			}
			s.wantLocked(key, true)
			dbtest.Exec(t, conn, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.wantStock(2, 13)
			s.wantLocked(key, false)
			dbtest.OK(t, conn.Close())
		})

		t.Run("another lock context", func(t *testing.T) {
			conn := conned(t, db)
			ctx, other := lockctx.With(dbtest.Limited(t), dbtest.Random()), lockctx.With(dbtest.Limited(t), dbtest.Random())
			read(t, ctx, conn)
			var stock int
			if err := conn.QueryRowContext(other, "SELECT stock FROM p WHERE id = 1").Scan(&stock); !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("read in another lock context: %v, want ErrUnsafe", err)
			}
			if _, err := conn.BeginTx(other, nil); !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("BeginTx in another lock context: %v, want ErrUnsafe", err)
			}
			dbtest.OK(t, conn.Close())
		})

		t.Run("DB.Close", func(t *testing.T) {
			db := s.open("lockNoWait=true")
			conn, key := conned(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			dbtest.OK(t, db.Close())
			s.wantLocked(key, false)
			if _, err := conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 3"); err == nil {
				t.Error("write after Close succeeded")
			}
			s.wantStock(3, 10)
		})
	})
}

// TestConnAndPool mixes a sql.Conn and the pool in one lock context.
func TestConnAndPool(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := s.tenant(t)
		db := s.open("lockNoWait=true")
		unsafe := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("%s: got %v, want ErrUnsafe", what, err)
			}
		}
		var stock, id, home int
		dbtest.OK(t, db.QueryRow("SELECT 1").Scan(&id))

		// A unit of work on a sql.Conn serves the pool as long as nothing is on it.
		conn := conned(t, db)
		ctx := lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&home))
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
		if id != home {
			t.Errorf("the pool's statement ran on connection %d, want %d", id, home)
		}
		_, err := db.ExecContext(ctx, "USE "+tenant)
		unsafe("USE over the pool", err)
		dbtest.OK(t, conn.Close())

		conn = conned(t, db)
		dbtest.Exec(t, conn, "USE "+tenant)
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		unsafe("read over the pool", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		_, err = db.BeginTx(ctx, nil)
		unsafe("BeginTx over the pool", err)
		other := conned(t, db)
		unsafe("read over another sql.Conn", other.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = 1 WHERE id = 1")
		s.wantStock(1, 10) // the pool does not get this connection

		// So it is with a transaction that begins on such a connection, but not with what
		// it leaves itself.
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		tx, err := conn.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		unsafe("read over the pool, in a transaction", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		dbtest.OK(t, tx.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 2").Scan(&stock))
		if stock != 100 {
			t.Errorf("the transaction read %d, want 100", stock)
		}
		dbtest.OK(t, tx.Rollback())
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		tx, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "CREATE TEMPORARY TABLE mine AS SELECT 7 AS a")
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT a FROM mine").Scan(&stock))
		dbtest.Exec(t, tx, "DROP TEMPORARY TABLE mine")
		dbtest.OK(t, tx.Rollback())

		// A unit of work on a session serves a sql.Conn that carries nothing.
		conn = other
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&home))
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
		if id != home {
			t.Errorf("the sql.Conn's statement ran on connection %d, want %d", id, home)
		}
		_, err = conn.ExecContext(ctx, "SET @x = 1")
		unsafe("SET over the sql.Conn", err)
		dbtest.Exec(t, conn, "USE "+tenant)
		unsafe("read over the sql.Conn", conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		_, err = conn.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
		unsafe("write over the sql.Conn", err)
		_, err = conn.BeginTx(ctx, nil)
		unsafe("BeginTx over the sql.Conn", err)
		unsafe("in Do", mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			return conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock)
		}))
		s.wantStock(1, 10)
	})
}

// TestConnLastInsertID asks for the id of an INSERT that ran elsewhere.
func TestConnLastInsertID(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE counted (id INT AUTO_INCREMENT PRIMARY KEY)")
		db := s.open("lockNoWait=true")
		conn := conned(t, db)
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
		if !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("after Do: got %v, %d, want ErrUnsafe", err, id)
		}
		dbtest.Exec(t, conn, "INSERT INTO counted () VALUES ()")
		err = mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			return conn.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id)
		})
		if !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("in another Do: got %v, %d, want ErrUnsafe", err, id)
		}
		dbtest.OK(t, conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT LAST_INSERT_ID()").Scan(&id))
		if id != 2 {
			t.Errorf("LAST_INSERT_ID() is %d, want 2", id)
		}
	})
}

// TestConnIdle leaves a unit of work on a sql.Conn alone for longer than the TTL.
func TestConnIdle(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=6s")
		conn, key := conned(t, db), dbtest.Random()
		ctx := lockctx.With(dbtest.Limited(t), key)
		var stock int
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
		time.Sleep(8 * time.Second)
		s.wantLocked(key, true)
		dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = 3 WHERE id = 1")
		s.wantStock(1, 3)
	})
}

// TestConnStatements counts what is sent: without a hint nothing more than before.
func TestConnStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tp := s.tapped(mysqllock.Config{})
		conn := conned(t, db)
		var stock int
		tp.Costs(t, "a read without a hint", 1, func() error {
			return conn.QueryRowContext(dbtest.Limited(t), "SELECT stock FROM p WHERE id = 1").Scan(&stock)
		})
		tp.Costs(t, "USE without a hint", 1, func() error {
			_, err := conn.ExecContext(dbtest.Limited(t), "USE "+s.Name)
			return err
		})
		ctx := dbtest.Limited(t)
		tp.Costs(t, "read, write", 4, func() error { // BEGIN with the lock, the read, the write, COMMIT
			ctx := lockctx.With(ctx, "k")
			if err := conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock); err != nil {
				return err
			}
			_, err := conn.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		})
	})
}

// TestConnCounter has programs count on sql.Conns of their own, whose lock contexts
// end at any moment: no success is lost, and nothing is left locked or open.
func TestConnCounter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := s.tenant(t)
		db := s.open()
		key := dbtest.Random()
		var done, unsure atomic.Int64
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 40 {
					conn, err := db.Conn(dbtest.Limited(t))
					if err != nil {
						t.Error(err)
						return
					}
					dbtest.Exec(t, conn, "USE "+tenant)
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					ctx = lockctx.With(ctx, key)
					if rand.IntN(2) == 0 {
						time.AfterFunc(time.Duration(rand.IntN(5000))*time.Microsecond, cancel)
					}
					var n int
					if err := conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n); err == nil {
						switch _, err := conn.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n+1); {
						case err == nil:
							done.Add(1)
						case ctx.Err() == nil:
							t.Error(err)
						default:
							unsure.Add(1)
						}
					} else if ctx.Err() == nil {
						t.Error(err)
					}
					if rand.IntN(2) == 0 {
						cancel()
					}
					conn.Close()
					cancel()
				}
			})
		}
		all.Wait()
		var stock int64
		dbtest.OK(t, s.plain.QueryRow("SELECT stock FROM "+tenant+".p WHERE id = 1").Scan(&stock))
		if n := stock - 100; n < done.Load() || n > done.Load()+unsure.Load() {
			t.Errorf("%d are counted, want %d to %d", n, done.Load(), done.Load()+unsure.Load())
		}
		dbtest.Soon(t, "the key is free", func() bool { return !s.locked(key) })
		dbtest.Exec(t, db, "UPDATE "+s.Name+".p SET stock = 7 WHERE id = 2")
		s.wantStock(2, 7)
	})
}
