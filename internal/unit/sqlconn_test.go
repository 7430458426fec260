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

func (w runsIn) ExecContext(_ context.Context, text string, args ...any) (sql.Result, error) {
	return w.Execer.ExecContext(w.ctx, text, args...)
}

// TestConnReadDecideWrite reads, decides and writes on a sql.Conn that has another
// default database: both happen there, and the lock is held in between.
func TestConnReadDecideWrite(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tenant := tenant(s, t)
		db := s.Handle("lockNoWait=true")
		conn := dbtest.Conn(t, db)
		dbtest.Exec(t, conn, "USE "+tenant)
		key := dbtest.Random()
		ctx := lockctx.With(dbtest.Limited(t), key)
		var left int
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		if left != 100 {
			t.Errorf("read %d, want that of the tenant, 100", left)
		}
		s.WantLocked(key, true)
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", 2).Scan(&left))
		dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = ? WHERE id = 1", left-1)
		s.WantLocked(key, false)
		s.WantStock(1, 10)
		dbtest.OK(t, s.Plain.QueryRow("SELECT stock FROM "+tenant+".p WHERE id = 1").Scan(&left))
		if left != 99 {
			t.Errorf("the tenant's stock is %d, want 99", left)
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
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockNoWait=true")
		for way, ask := range ways {
			conn := dbtest.Conn(t, db)
			dbtest.Exec(t, s.Plain, "DROP TABLE IF EXISTS counted")
			dbtest.Exec(t, s.Plain, "CREATE TABLE counted (id INT AUTO_INCREMENT PRIMARY KEY)")
			for _, thing := range things {
				dbtest.Exec(t, conn, thing.leave)
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				key := dbtest.Random()
				if got := ask(t, lockctx.With(ctx, key), conn, thing.ask); got != thing.want {
					t.Errorf("%s: %s after %s is %q, want %q", way, thing.ask, thing.leave, got, thing.want)
				}
				s.WantLocked(key, true)
				cancel()
				dbtest.Soon(t, "the end of the context gives the lock back", func() bool { return !s.Locked(key) })
			}
		}
	})
}

// TestPooledState asks over the pool for a lock, on its one connection, which
// carries something.
func TestPooledState(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tenant := tenant(s, t)
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
			db, tp := s.Tapped(mysqllock.Config{})
			db.SetMaxOpenConns(1)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var left int
			dbtest.OK(t, db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&left))
			dbtest.Exec(t, db, leave)
			seen := tp.Since()
			text := "SELECT stock FROM p WHERE id = 1"
			if leave == "SELECT @who := 5" {
				text += " AND @who = 5"
			}
			err := db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), text).Scan(&left)
			dbtest.Is(t, "after "+leave, err, mysqllock.ErrUnsafe)
			if strings.HasPrefix(leave, "SET NAMES") {
				stock.WantError(t, leave, err, mysqllock.ErrUnsafe, "charset=")
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
			db.SetMaxOpenConns(1)
			for _, text := range texts {
				dbtest.Exec(t, db, text)
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var left int
			if err := db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&left); err != nil {
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
			db := s.Handle("multiStatements=true")
			db.SetMaxOpenConns(1)
			_, _ = db.Exec(text)
			var n int
			err := db.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n)
			stock.WantError(t, "after "+text, err, mysqllock.ErrUnsafe, "has left something")
			db.Close()
		}

		db := s.Handle() // what fails takes nothing back
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "SET time_zone = '+03:00'")
		if _, err := db.Exec("SET time_zone = DEFAULT, no_such_variable = DEFAULT"); err == nil {
			t.Error("a variable that there is not was set")
		}
		var n int
		dbtest.Is(t, "after a SET that failed", db.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT COUNT(*) FROM p").Scan(&n), mysqllock.ErrUnsafe)
		db.Close()

		db = s.Handle() // with an argument each goes to the driver twice
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "DO GET_LOCK(?, 0)", s.Name)
		dbtest.Exec(t, db, "DO RELEASE_LOCK("+lock+")")
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var left int
		dbtest.OK(t, db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 1").Scan(&left))
	})
}

// TestConnUnitEnds ends a unit of work on a sql.Conn in each way but by a write.
func TestConnUnitEnds(t *testing.T) {
	read := func(t *testing.T, ctx context.Context, conn *sql.Conn) {
		t.Helper()
		var left int
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
	}
	refused := func(t *testing.T, ctx context.Context, db dbtest.Execer, want error) {
		t.Helper()
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 3")
		dbtest.Is(t, "a write after the end", err, want)
	}
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockNoWait=true")
		db.SetMaxOpenConns(1)
		begin := func(t *testing.T) (ctx context.Context, conn *sql.Conn, key string) {
			t.Helper()
			conn, key = dbtest.Conn(t, db), dbtest.Random()
			ctx = lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			return ctx, conn, key
		}

		t.Run("context", func(t *testing.T) {
			conn, key := dbtest.Conn(t, db), dbtest.Random()
			defer conn.Close()
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, key)
			read(t, ctx, conn)
			cancel()
			dbtest.Soon(t, "the lock is given back", func() bool { return !s.Locked(key) })
			dbtest.Exec(t, conn, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.WantStock(2, 11) // nothing is left open
			refused(t, lockctx.With(context.WithoutCancel(ctx), key), conn, mysqllock.ErrLost)
		})

		t.Run("Conn.Close", func(t *testing.T) {
			ctx, conn, key := begin(t)
			s.WantLocked(key, true)
			dbtest.OK(t, conn.Close())
			s.WantLocked(key, false)
			dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.WantStock(2, 12)
			refused(t, ctx, db, mysqllock.ErrStaleRead)
			var left int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left)) // a new unit of work
		})

		t.Run("BeginTx", func(t *testing.T) {
			for _, hinted := range []bool{true, false} {
				ctx, conn, key := begin(t)
				begin := ctx
				if !hinted {
					begin = dbtest.Limited(t)
				}
				tx := dbtest.Begin(t, begin, conn)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 77 WHERE id = 3")
				s.WantLocked(key, true)
				dbtest.OK(t, tx.Rollback())
				s.WantLocked(key, false)
				s.WantStock(3, 10)
				dbtest.OK(t, conn.Close())
			}
		})

		t.Run("kill", func(t *testing.T) {
			ctx, conn, key := begin(t)
			var id int
			dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
			dbtest.Exec(t, s.Plain, fmt.Sprintf("KILL CONNECTION %d", id))
			dbtest.Soon(t, "the server frees the lock", func() bool { return !s.Locked(key) })
			for range 2 {
				refused(t, ctx, conn, mysqllock.ErrLost)
			}
			conn.Close()
			s.WantStock(3, 10)
		})

		t.Run("given up", func(t *testing.T) { // in the middle of a statement
			ctx, conn, key := begin(t)
			short, cancel := context.WithCancel(ctx)
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				var n int
				ended <- conn.QueryRowContext(short, "SELECT SLEEP(100) + BENCHMARK(1000000000, 1)").Scan(&n)
			}()
			dbtest.Soon(t, "it runs", func() bool {
				return dbtest.Column[bool](t, s.Plain, "SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'SELECT SLEEP(100)%'", s.Name)[0]
			})
			cancel()
			if <-ended == nil {
				t.Error("a statement of 100 s has ended at once")
			}
			start := time.Now()
			dbtest.Soon(t, "the lock is given back", func() bool { return !s.Locked(key) })
			if took := time.Since(start); took > time.Minute {
				t.Errorf("the lock is given back after %v", took)
			}
			refused(t, ctx, conn, mysqllock.ErrLost)
			conn.Close()
		})

		t.Run("unhinted", func(t *testing.T) { // statements of the same sql.Conn
			ctx, conn, key := begin(t)
			read(t, dbtest.Limited(t), conn)
			s.WantLocked(key, true)
			for _, text := range []string{"COMMIT", "CREATE TABLE other (a INT)", "BEGIN"} {
				dbtest.Is(t, text, dbtest.Err(conn.ExecContext(lockctx.Without(ctx), text)), mysqllock.ErrUnsafe)
			}
			s.WantLocked(key, true)
			dbtest.Exec(t, conn, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			s.WantStock(2, 13)
			s.WantLocked(key, false)
			dbtest.OK(t, conn.Close())
		})

		t.Run("another lock context", func(t *testing.T) {
			conn := dbtest.Conn(t, db)
			ctx, other := lockctx.With(dbtest.Limited(t), dbtest.Random()), lockctx.With(dbtest.Limited(t), dbtest.Random())
			read(t, ctx, conn)
			var left int
			dbtest.Is(t, "read in another lock context", conn.QueryRowContext(other, "SELECT stock FROM p WHERE id = 1").Scan(&left), mysqllock.ErrUnsafe)
			dbtest.Is(t, "BeginTx in another lock context", dbtest.Err(conn.BeginTx(other, nil)), mysqllock.ErrUnsafe)
			dbtest.OK(t, conn.Close())
		})

		t.Run("DB.Close", func(t *testing.T) {
			db := s.Handle("lockNoWait=true")
			conn, key := dbtest.Conn(t, db), dbtest.Random()
			ctx := lockctx.With(dbtest.Limited(t), key)
			read(t, ctx, conn)
			dbtest.OK(t, db.Close())
			s.WantLocked(key, false)
			if _, err := conn.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 3"); err == nil {
				t.Error("write after Close succeeded")
			}
			s.WantStock(3, 10)
		})
	})
}

// TestConnAndPool mixes a sql.Conn and the pool in one lock context.
func TestConnAndPool(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tenant := tenant(s, t)
		db := s.Handle("lockNoWait=true")
		unsafe := func(what string, err error) {
			t.Helper()
			dbtest.Is(t, what, err, mysqllock.ErrUnsafe)
		}
		var left, id, wanted int
		dbtest.OK(t, db.QueryRow("SELECT 1").Scan(&id))

		// A unit of work on a sql.Conn serves the pool as long as nothing is on it.
		conn := dbtest.Conn(t, db)
		ctx := lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&wanted))
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
		if id != wanted {
			t.Errorf("the pool's statement ran on connection %d, want %d", id, wanted)
		}
		_, err := db.ExecContext(ctx, "USE "+tenant)
		unsafe("USE over the pool", err)
		dbtest.OK(t, conn.Close())

		conn = dbtest.Conn(t, db)
		dbtest.Exec(t, conn, "USE "+tenant)
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		unsafe("read over the pool", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		_, err = db.BeginTx(ctx, nil)
		unsafe("BeginTx over the pool", err)
		other := dbtest.Conn(t, db)
		unsafe("read over another sql.Conn", other.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		dbtest.Exec(t, runsIn{conn, ctx}, "UPDATE p SET stock = 1 WHERE id = 1")
		s.WantStock(1, 10) // the pool does not get this connection

		// So it is with a transaction that begins on such a connection, but not with what
		// it leaves itself.
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		tx := dbtest.Begin(t, ctx, conn)
		unsafe("read over the pool, in a transaction", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		dbtest.OK(t, tx.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 2").Scan(&left))
		if left != 100 {
			t.Errorf("the transaction read %d, want 100", left)
		}
		dbtest.OK(t, tx.Rollback())
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		tx = dbtest.Begin(t, ctx, db)
		dbtest.Exec(t, tx, "CREATE TEMPORARY TABLE mine AS SELECT 7 AS a")
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT a FROM mine").Scan(&left))
		dbtest.Exec(t, tx, "DROP TEMPORARY TABLE mine")
		dbtest.OK(t, tx.Rollback())

		// A unit of work on a session serves a sql.Conn that carries nothing.
		conn = other
		ctx = lockctx.With(dbtest.Limited(t), dbtest.Random())
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&wanted))
		dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT @@pseudo_thread_id").Scan(&id))
		if id != wanted {
			t.Errorf("the sql.Conn's statement ran on connection %d, want %d", id, wanted)
		}
		_, err = conn.ExecContext(ctx, "SET @x = 1")
		unsafe("SET over the sql.Conn", err)
		dbtest.Exec(t, conn, "USE "+tenant)
		unsafe("read over the sql.Conn", conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
		_, err = conn.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
		unsafe("write over the sql.Conn", err)
		_, err = conn.BeginTx(ctx, nil)
		unsafe("BeginTx over the sql.Conn", err)
		unsafe("in Do", mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(ctx context.Context) error {
			return conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left)
		}))
		s.WantStock(1, 10)
	})
}

// TestConnLastInsertID asks for the id of an INSERT that ran elsewhere.
func TestConnLastInsertID(t *testing.T) {
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
		dbtest.OK(t, conn.QueryRowContext(lockctx.With(dbtest.Limited(t), dbtest.Random()), "SELECT LAST_INSERT_ID()").Scan(&id))
		if id != 2 {
			t.Errorf("LAST_INSERT_ID() is %d, want 2", id)
		}
	})
}

// TestUnitOnASQLConnOutlivesItsTTL leaves a unit of work on a sql.Conn alone for longer than the TTL.
func TestUnitOnASQLConnOutlivesItsTTL(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.AtItsPace(t, 2*time.Second, func(ttl time.Duration) error {
			db := s.Handle("lockTTL=" + ttl.String())
			conn, key := dbtest.Conn(t, db), dbtest.Random()
			ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), key))
			defer cancel()
			var left int
			dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&left))
			time.Sleep(ttl * 5 / 4)
			if !s.Locked(key) {
				return errors.New("the key is free")
			}
			_, err := conn.ExecContext(ctx, "UPDATE p SET stock = 3 WHERE id = 1")
			return err
		})
		s.WantStock(1, 3)
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

// TestNoLockWhileRowsOfASQLConnAreRead: it is refused at once, again and again, and the rows can be
// read on; then the connection is good for locks.
func TestNoLockWhileRowsOfASQLConnAreRead(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for mode, params := range map[string][]string{"": nil, "maxConns": {"maxConns=6"}} {
			for kind, option := range map[string]lockctx.Option{
				"row": lockctx.Row(), "lease": lockctx.Lease(10 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
			} {
				t.Run(kind+" "+mode, func(t *testing.T) {
					const text = "UPDATE p SET stock = stock + 1 WHERE id = 1"
					conn, before := dbtest.Conn(t, s.Handle(params...)), s.Stock(1)
					st, err := conn.PrepareContext(dbtest.Limited(t), text)
					dbtest.OK(t, err)
					rows, err := conn.QueryContext(dbtest.Limited(t), "SELECT id FROM p")
					dbtest.OK(t, err)
					defer rows.Close()
					rows.Next()
					for name, call := range map[string]func(context.Context) error{
						"BeginTx":     func(ctx context.Context) error { _, err := conn.BeginTx(ctx, nil); return err },
						"ExecContext": func(ctx context.Context) error { _, err := conn.ExecContext(ctx, text); return err },
						"a statement": func(ctx context.Context) error { _, err := st.ExecContext(ctx); return err },
					} {
						for range 2 {
							over := make(chan error, 1)
							go func() { over <- call(lockctx.With(dbtest.Limited(t), dbtest.Random(), option)) }()
							select {
							case err := <-over:
								dbtest.Is(t, name, err, mysqllock.ErrExhausted)
							case <-time.After(dbtest.Patience):
								t.Fatal(name + " hangs")
							}
						}
					}
					for rows.Next() {
					}
					dbtest.OK(t, errors.Join(rows.Err(), rows.Close()))
					ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), option)
					tx := dbtest.Begin(t, ctx, conn)
					dbtest.Exec(t, tx, text)
					dbtest.OK(t, tx.Commit())
					s.WantStock(1, before+1)
				})
			}
		}
	})
}

// TestTextTransactions: after texts that leave nothing open a hint is good on the
// connection, and after others it is refused, until what they left open has ended.
func TestTextTransactions(t *testing.T) {
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
				conn := dbtest.Conn(t, db)
				for _, text := range c.texts {
					if !prepared || strings.Contains(text, ";") {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					} else if st, err := conn.PrepareContext(dbtest.Limited(t), text); err != nil {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					} else {
						_, _ = st.ExecContext(dbtest.Limited(t))
						dbtest.OK(t, st.Close())
					}
				}
				wantHints(s, t, conn, name, c.open)
				if c.open {
					for _, text := range []string{"XA END 'x'", "XA ROLLBACK 'x'", "ROLLBACK", "SET autocommit = 1"} {
						_, _ = conn.ExecContext(dbtest.Limited(t), text)
					}
					wantHints(s, t, conn, name+", ended", false)
				}
				dbtest.OK(t, conn.Close())
				dbtest.Exec(t, s.Plain, "DROP TABLE IF EXISTS made")
			}
		}
	})
}

// wantHints tries hints on a connection, of two kinds that the length of the name picks, or of each.
func wantHints(s *stock.Shop, t *testing.T, conn *sql.Conn, name string, refused bool) {
	t.Helper()
	for i, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory(), lockctx.Optimistic()} {
		if !some(i, len(name), 2) {
			continue
		}
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		_, err := conn.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: UPDATE: %v", name, err)
		}
		cancel()
		if refused {
			err := conn.QueryRowContext(lockctx.With(dbtest.Limited(t), "k", option), "SELECT stock FROM p WHERE id = 1").Scan(new(int))
			dbtest.Is(t, name+": SELECT", err, mysqllock.ErrUnsafe)
		}
		ctx, cancel = context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
		tx, err := conn.BeginTx(ctx, nil)
		if errors.Is(err, mysqllock.ErrUnsafe) != refused || !refused && err != nil {
			t.Errorf("%s: BeginTx: %v", name, err)
		}
		if err == nil {
			dbtest.OK(t, tx.Rollback())
		}
		cancel()
	}
}

// TestTextTransactionInside: texts in a transaction of BeginTx's outlive it as far as
// they do.
func TestTextTransactionInside(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for texts, open := range map[string]bool{
			"SET autocommit = 0":                           true,
			"COMMIT|BEGIN":                                 false, // which the end of the sql.Tx ends
			"COMMIT":                                       false,
			"COMMIT AND CHAIN":                             false,
			"SET autocommit = 0|SET autocommit = 1":        false,
			"CREATE TABLE IF NOT EXISTS made (a INT)":      false,
			"UPDATE p SET stock = stock|/* */ COMMIT|DO 1": false,
		} {
			conn := dbtest.Conn(t, db)
			tx := dbtest.Begin(t, dbtest.Limited(t), conn)
			for text := range strings.SplitSeq(texts, "|") {
				dbtest.Exec(t, tx, text)
			}
			dbtest.OK(t, tx.Commit())
			wantHints(s, t, conn, texts, open)
			dbtest.Exec(t, conn, "SET autocommit = 1")
			wantHints(s, t, conn, texts+", ended", false)
			dbtest.OK(t, conn.Close())
		}
	})
}

// TestBeginTxEndsATransactionOfText: a hint is good on the connection after that.
func TestBeginTxEndsATransactionOfText(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		conn := dbtest.Conn(t, s.Handle())
		for _, text := range []string{"START TRANSACTION", "BEGIN WORK"} { // an odd and an even length: each kind
			dbtest.Exec(t, conn, text)
			dbtest.OK(t, dbtest.Begin(t, dbtest.Limited(t), conn).Rollback()) // BEGIN commits it
			wantHints(s, t, conn, "BeginTx after "+text, false)
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
	"a transaction with a late hint": func(ctx context.Context, c *sql.Conn, ask string) (id int, err error) {
		tx, err := c.BeginTx(ctx, nil)
		if err != nil {
			return 0, err
		}
		defer tx.Rollback()
		return id, tx.QueryRowContext(lockctx.With(ctx, dbtest.Random()), ask).Scan(&id)
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

// TestConnLastInsertIDBeneathAWrapper: a sql.Conn that asks for what its statement before has
// left gets that, or ErrUnsafe if somebody else has used the connection since.
func TestConnLastInsertIDBeneathAWrapper(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE TABLE counted (id INT AUTO_INCREMENT PRIMARY KEY)")
		ctx := dbtest.Limited(t)
		k, err := new(mysqllock.Driver).OpenConnector(s.LimitedDSN(t, 4, "lockNoWait=true"))
		dbtest.OK(t, err)
		db := sql.OpenDB(dbtest.Wrapper{Connector: k})
		defer db.Close()
		dbtest.OK(t, mysqllock.Do(ctx, db, dbtest.Random(), func(context.Context) error { return nil })) // the table is there
		for name, ask := range lastID {
			for _, used := range []bool{false, true} {
				others := []*sql.Tx{dbtest.Begin(t, ctx, db), dbtest.Begin(t, ctx, db)}
				c := dbtest.Conn(t, db)
				inserted, err := c.ExecContext(ctx, "INSERT INTO counted () VALUES ()")
				dbtest.OK(t, err)
				want, _ := inserted.LastInsertId()
				if used {
					tx := dbtest.Begin(t, ctx, db) // on the connection of the INSERT, which is the only one left
					dbtest.Exec(t, tx, "INSERT INTO counted () VALUES ()")
					others = append(others, tx)
				}
				for _, tx := range others[:2] {
					dbtest.OK(t, tx.Rollback())
				}
				id, err := ask(ctx, c, "SELECT LAST_INSERT_ID()")
				switch {
				case used:
					dbtest.Is(t, name+", after somebody else", err, mysqllock.ErrUnsafe)
				case err != nil || int64(id) != want:
					t.Errorf("%s: the id is %d, %v, want %d", name, id, err, want)
				}
				dbtest.Exec(t, c, "SET @x = 1") // it asks for nothing
				for _, tx := range others[2:] {
					dbtest.OK(t, tx.Rollback())
				}
				_, err = c.PrepareContext(ctx, "DO 0") // which nobody closes
				dbtest.OK(t, err)
				dbtest.OK(t, c.Close())
				dbtest.Exec(t, db, "DO 0") // on the same light connection
			}
		}
		s.SoonUnused(t, db)
	})
}
