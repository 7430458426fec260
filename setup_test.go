package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Setting up: the table, privileges, and what is wrong with a server.

// user makes an account with only the given privileges and returns the scratch
// database as it sees it.
func (s *scratch) user(grants ...string) *scratch {
	s.T.Helper()
	name := "u_" + dbtest.Random()
	dbtest.Exec(s.T, s.plain, "CREATE USER "+name+" IDENTIFIED BY 'secret-of-"+name+"'")
	s.T.Cleanup(func() { dbtest.Exec(s.T, s.plain, "DROP USER "+name) })
	for _, g := range grants {
		dbtest.Exec(s.T, s.plain, "GRANT "+strings.ReplaceAll(g, "$db", s.Name)+" TO "+name)
	}
	return s.at(s.Changed(func(cfg *mysql.Config) { cfg.User, cfg.Passwd = name, "secret-of-"+name }))
}

func TestBadInput(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE isam (namespace VARBINARY(255) NOT NULL, name VARBINARY(255) NOT NULL, PRIMARY KEY (namespace, name)) ENGINE=MyISAM")
		dbtest.Exec(t, s.plain, "CREATE TABLE older (namespace VARBINARY(255) NOT NULL, name VARBINARY(255) NOT NULL, PRIMARY KEY (namespace, name)) ENGINE=InnoDB")
		dbtest.Exec(t, s.plain, "CREATE VIEW seen AS SELECT * FROM p")
		nodb := s.at(s.Changed(dbtest.NoDatabase))
		reader := s.user("SELECT ON $db.p")
		bound := s.user("SELECT, INSERT, UPDATE ON $db.*")
		for _, c := range []struct {
			what string
			db   *sql.DB
			is   error
			want []string
		}{
			{"no table", s.open("lockSchema=manual"), nil, []string{"CREATE TABLE", "`mysqllock`", "does not exist"}},
			{"a MyISAM table", s.open("lockTable=isam"), mysqllock.ErrUnsafe, []string{"MyISAM", "InnoDB"}},
			{"a table of the older form", s.open("lockTable=older", "lockSchema=manual"), nil, []string{"older form", "ALTER TABLE", "INSERT IGNORE"}},
			{"a table of the older form, no right to alter it", bound.open("lockTable=older"), nil, []string{"denied", "ALTER TABLE", "INSERT IGNORE"}},
			{"a view", s.open("lockTable=seen"), mysqllock.ErrUnsafe, []string{"view"}},
			{"no database", nodb.open(), nil, []string{"no database is selected"}},
			{"an unknown schema", s.open("lockTable=nowhere.locks"), nil, []string{"nowhere", "CREATE TABLE"}},
			{"no privileges", reader.open(), nil, []string{"denied", "CREATE TABLE"}},
			{"the server away", away(t), nil, []string{"refused"}},
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			for i, err := range []error{
				func() error { _, err := c.db.BeginTx(ctx, nil); return err }(),
				func() error { _, err := c.db.ExecContext(ctx, "DO 1"); return err }(),
				func() error { _, err := mysqllock.Acquire(dbtest.Limited(t), c.db, "k"); return err }(),
			} {
				if err == nil || c.is != nil && !errors.Is(err, c.is) || strings.Contains(err.Error(), "secret-of") {
					t.Errorf("%s, call %d: %v", c.what, i, err)
					continue
				}
				for _, want := range c.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("%s, call %d: %q does not say %q", c.what, i, err, want)
					}
				}
			}
			// What has no hint is not touched by it.
			if c.what != "the server away" {
				_, err := c.db.Exec("DO 1")
				dbtest.OK(t, err)
			}
		}
	})
}

func away(t *testing.T) *sql.DB {
	db, err := sql.Open("mysqllock", "u:secret-of-u@tcp(127.0.0.1:1)/d")
	dbtest.OK(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func TestLeastPrivileges(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.open().ExecContext(lockctx.With(dbtest.Limited(t), "old"), "DO 1") // makes the table and the procedure
		for _, grants := range [][]string{
			{"SELECT, INSERT, UPDATE ON $db.mysqllock", "SELECT, UPDATE ON $db.p"},
			{"SELECT, INSERT, UPDATE ON $db.mysqllock", "SELECT, UPDATE ON $db.p", "EXECUTE ON $db.*"},
			{"SELECT, INSERT, UPDATE, CREATE, CREATE ROUTINE ON $db.*"},
		} {
			u := s.user(grants...)
			if len(grants) == 1 {
				dbtest.Exec(t, s.plain, "DROP TABLE mysqllock")
				dbtest.Exec(t, s.plain, "DROP PROCEDURE IF EXISTS mysqllock_lock1")
			}
			db := u.open()
			for _, key := range []string{"old", "new" + dbtest.Random()} {
				ctx := lockctx.With(dbtest.Limited(t), key)
				n, err := read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
				dbtest.OK(t, err)
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				s.wantLocked(key, true)
				// Cancelling needs no more; nor does being refused.
				other := u.open()
				_, err = mysqllock.Acquire(dbtest.Limited(t), other, key, lockctx.Wait(50*time.Millisecond))
				if !errors.Is(err, mysqllock.ErrTimeout) {
					t.Errorf("%v: %v", grants, err)
				}
				dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
				dbtest.OK(t, tx.Rollback())
			}
		}
		s.wantStock(1, 4)
	})
}

func TestTableElsewhereAndDropped(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		elsewhere := "t_" + dbtest.Random()
		dbtest.Exec(t, s.plain, "CREATE DATABASE "+elsewhere)
		defer dbtest.Exec(t, s.plain, "DROP DATABASE "+elsewhere)
		a, b := s.open("lockTable="+elsewhere+".locks"), s.open("lockTable="+elsewhere+".locks", "lockNamespace=other")
		ha, err := mysqllock.Acquire(dbtest.Limited(t), a, "k")
		dbtest.OK(t, err)
		hb, err := mysqllock.Acquire(dbtest.Limited(t), b, "k", lockctx.NoWait()) // another namespace: another key
		dbtest.OK(t, err)
		dbtest.OK(t, ha.Release())
		dbtest.OK(t, hb.Release())
		var n int
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM "+elsewhere+".locks WHERE name = 'k'").Scan(&n))
		if n != 2 {
			t.Errorf("%d rows, want 2", n)
		}
		// Rows and tables that vanish are made again.
		dbtest.Exec(t, s.plain, "DELETE FROM "+elsewhere+".locks")
		ha, err = mysqllock.Acquire(dbtest.Limited(t), a, "k")
		dbtest.OK(t, err)
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM "+elsewhere+".locks WHERE name = 'k'").Scan(&n))
		if n != 1 {
			t.Errorf("%d rows for a key that was deleted and is held, want 1", n)
		}
		if _, err := mysqllock.Acquire(dbtest.Limited(t), s.open("lockTable="+elsewhere+".locks"), "k", lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("a key whose row was deleted and made again is not locked: %v", err)
		}
		dbtest.OK(t, ha.Release())
		dbtest.Exec(t, s.plain, "DROP TABLE "+elsewhere+".locks")
		tx, err := a.BeginTx(lockctx.With(dbtest.Limited(t), "k2"), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
	})
}

func TestServerWithOtherSettings(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()

		// A lock wait timeout of the server that is shorter than ours, and
		// that rolls back, does not end the wait, nor let us go on unlocked.
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		granted := make(chan error, 1)
		go func() {
			tx, err := other.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			if err == nil {
				s.wantLocked("k", true)
				_, err = tx.Exec("UPDATE p SET stock = 9 WHERE id = 1")
				s.wantLocked("k", true)
				s.wantStock(1, 10)
				tx.Commit()
			}
			granted <- err
		}()
		time.Sleep(2500 * time.Millisecond)
		dbtest.OK(t, h.Release())
		dbtest.OK(t, <-granted)
		s.wantStock(1, 9)

		// The user's own statement runs into it: the transaction is gone.
		rival, err := s.plain.Begin()
		dbtest.OK(t, err)
		dbtest.Exec(t, rival, "UPDATE p SET stock = 5 WHERE id = 2")
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		if _, err := tx.Exec("UPDATE p SET stock = 6 WHERE id = 2"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a lock wait timeout that rolls back: %v", err)
		}
		if _, err := tx.Exec("UPDATE p SET stock = 6 WHERE id = 3"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("the next statement: %v", err)
		}
		tx.Rollback()
		dbtest.OK(t, rival.Rollback())
		s.wantStock(3, 10)

		// A server that takes no writes, also where it becomes one while the
		// connection is open, and the account could write all the same.
		u := s.user("SELECT, INSERT, UPDATE ON $db.*")
		open := s.open()
		open.SetMaxOpenConns(1)
		begin := func() error {
			tx, err := open.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}
		dbtest.OK(t, begin())
		dbtest.OK(t, begin())
		dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 1")
		defer dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 0")
		if err := begin(); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
			t.Errorf("a server that has become read-only: %v", err)
		}
		for _, key := range []string{"k", "new"} {
			if _, err := u.open().BeginTx(lockctx.With(dbtest.Limited(t), key), nil); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
				t.Errorf("a read-only server, key %s: %v", key, err)
			}
		}
	}, "--innodb-rollback-on-timeout=ON", "--innodb-lock-wait-timeout=1")
}

// Each path's statements, as they reach the server. New keys and new
// connections cost more; these are the costs of every further use.
func TestStatementsPerPath(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, fast := range []bool{true, false} {
			c := mysqllock.Config{}
			if !fast {
				if s.MariaDB() {
					continue // MariaDB needs no procedure: BEGIN and the lock always go together
				}
				c.Schema, c.Table = "manual", "slow"
				dbtest.Exec(t, s.plain, "CREATE TABLE slow (namespace VARBINARY(255) NOT NULL, name VARBINARY(255) NOT NULL, owner VARBINARY(255) NULL,"+
					" token BIGINT UNSIGNED NOT NULL DEFAULT 0, expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00', versioned TINYINT UNSIGNED NOT NULL DEFAULT 0,"+
					" PRIMARY KEY (namespace, name)) ENGINE=InnoDB")
			}
			db, tap := s.tapped(c)
			db.SetMaxOpenConns(1)
			both := []string{"a", "b"}
			ctx := func() context.Context { return lockctx.With(dbtest.Limited(t), "k") }
			begin := 1
			if !fast {
				begin = 2
			}
			isolated := 5
			if s.MariaDB() {
				isolated = 6
			}
			two := begin
			if !s.MariaDB() {
				two = 2 // the procedure takes one key
			}
			for _, p := range []struct {
				what string
				want int
				run  func() error
			}{
				{"Exec without a hint", 1, func() error { _, err := db.Exec("UPDATE p SET stock = 1 WHERE id = 1"); return err }},
				{"Query without a hint", 1, func() error { var n int; return db.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(&n) }},
				{"transaction without a hint", 3, func() error {
					tx, err := db.Begin()
					if err == nil {
						dbtest.Exec(t, tx, "UPDATE p SET stock = 2 WHERE id = 1")
						err = tx.Commit()
					}
					return err
				}},
				{"transaction: BEGIN with lock, UPDATE, COMMIT", begin + 2, func() error {
					tx, err := db.BeginTx(ctx(), nil)
					if err == nil {
						dbtest.Exec(t, tx, "UPDATE p SET stock = 3 WHERE id = 1")
						err = tx.Commit()
					}
					return err
				}},
				{"transaction with two keys", two + 2, func() error {
					tx, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), both), nil)
					if err == nil {
						dbtest.Exec(t, tx, "UPDATE p SET stock = 4 WHERE id = 1")
						err = tx.Commit()
					}
					return err
				}},
				{"transaction with an isolation level: one more, and its limit on MariaDB", isolated, func() error {
					tx, err := db.BeginTx(ctx(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
					if err == nil {
						dbtest.Exec(t, tx, "UPDATE p SET stock = 5 WHERE id = 1")
						err = tx.Commit()
					}
					return err
				}},
				{"Exec: BEGIN with lock, UPDATE, COMMIT", begin + 2, func() error {
					_, err := db.ExecContext(ctx(), "UPDATE p SET stock = 6 WHERE id = 1")
					return err
				}},
				{"read, write: lock, SELECT, UPDATE, COMMIT", 4, func() error {
					ctx := ctx()
					var n int
					if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n); err != nil {
						return err
					}
					_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					return err
				}},
				{"Acquire and Release", 2, func() error {
					h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
					if err == nil {
						err = h.Release()
					}
					return err
				}},
				{"a second key, a nested transaction", begin + 1 + 1 + 1 + 1 + 1, func() error {
					ctx := ctx()
					conn, err := db.Conn(ctx)
					dbtest.OK(t, err)
					defer conn.Close()
					tx, err := conn.BeginTx(ctx, nil)
					dbtest.OK(t, err)
					in, err := conn.BeginTx(lockctx.With(ctx, "a"), nil)
					dbtest.OK(t, err)
					dbtest.Exec(t, in, "UPDATE p SET stock = 8 WHERE id = 1")
					dbtest.OK(t, in.Commit())
					return tx.Commit()
				}},
			} {
				tap.Costs(t, fmt.Sprintf("fast=%v, %s", fast, p.what), p.want, p.run)
			}
		}
	})
}

// Many callers make the rows of new keys at once, in any order, without a
// deadlock, and never wait for somebody else's key.
func TestNewKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbs := []*sql.DB{s.open("lockWait=2m"), s.open("lockWait=2m")}
		held, err := mysqllock.Acquire(dbtest.Limited(t), dbs[0], "n05")
		dbtest.OK(t, err)
		defer held.Rollback()
		var wg sync.WaitGroup
		for g := range 32 {
			wg.Go(func() {
				for i := range 20 {
					a, b := rand.IntN(20), rand.IntN(20)
					if a == 5 || b == 5 {
						continue
					}
					keys := []string{fmt.Sprintf("n%02d", a), fmt.Sprintf("n%02d", b)}
					tx, err := dbs[(g+i)%2].BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys), nil)
					if err != nil {
						t.Error(err)
						return
					}
					dbtest.OK(t, tx.Rollback())
				}
			})
		}
		wg.Wait()
	})
}

// soonFree waits until a key is: where the server was slow to answer, what was asked
// of it is taken back in the background.
func (s *scratch) soonFree(key string) {
	s.T.Helper()
	dbtest.Soon(s.T, key+" is free", func() bool { return !s.locked(key) })
}

func TestSeveralKeysAreAllOrNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		keys := []string{"a", "b", "c"}
		tx, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
		held, err := mysqllock.Acquire(dbtest.Limited(t), other, "b")
		dbtest.OK(t, err)
		for _, opt := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(100 * time.Millisecond)} {
			_, err = db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys, opt), nil)
			if !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("one of the keys is held: %v", err)
			}
			s.soonFree("a")
			s.soonFree("c")
			// As keys that join a unit: it is rolled back, since some may be locked.
			tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
			_, err = tx.ExecContext(lockctx.WithKeys(dbtest.Limited(t), keys, opt), "UPDATE p SET stock = 2 WHERE id = 1")
			if !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("one of the keys that join is held: %v", err)
			}
			s.soonFree("a")
			s.soonFree("k")
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("Commit of the unit: %v", err)
			}
			s.wantStock(1, 10)
		}
		dbtest.OK(t, held.Release())
	})
}
