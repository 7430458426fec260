package mysqllock_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// rightsOf tells what each way to lock needs on the lock table, and how others ask
// for the key that it holds.
var rightsOf = []struct {
	name          string
	holds, wants  lockctx.Option
	onTheTable    string
	waitsForOther bool
}{
	{"row", lockctx.Row(), lockctx.Row(), "SELECT, INSERT, UPDATE", true},
	{"shared", lockctx.Shared(), lockctx.Row(), "SELECT, INSERT, UPDATE", true},
	{"slots", lockctx.Slots(1), lockctx.Slots(1), "SELECT, INSERT, UPDATE", true},
	{"lease", lockctx.Lease(30 * time.Second), lockctx.Lease(30 * time.Second), "SELECT, INSERT, UPDATE", true},
	{"optimistic", lockctx.Optimistic(), lockctx.Optimistic(), "SELECT, INSERT, UPDATE", false},
	{"advisory", lockctx.Advisory(), lockctx.Advisory(), "", true},
}

// waiting counts those who wait for a lock in the server.
func (s *scratch) waiting() (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND COMMAND = 'Query' AND INFO NOT LIKE 'CREATE%' AND ID <> CONNECTION_ID()"+
		" AND INFO NOT LIKE '%NOWAIT%' AND INFO NOT LIKE '%wait_timeout = 0%'"+ // what only looks
		" AND (INFO LIKE '%GET_LOCK(%' OR INFO LIKE '%mysqllock%FOR UPDATE%' OR INFO LIKE '%mysqllock%FOR SHARE%' OR INFO LIKE '%mysqllock%LOCK IN SHARE MODE%')",
		s.Name).Scan(&n))
	return n
}

// TestEachStrategyNeedsOnlyItsRights to take, renew, wait for and release its lock.
func TestEachStrategyNeedsOnlyItsRights(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1") // the table, by somebody else
		dbtest.OK(t, err)
		for _, how := range rightsOf {
			for _, schema := range []string{"auto", "manual"} {
				t.Run(how.name+", "+schema, func(t *testing.T) {
					s := s.at(s.For(t))
					grants := []string{"SELECT, UPDATE ON $db.p"}
					if how.onTheTable != "" {
						grants = append(grants, how.onTheTable+" ON $db.mysqllock")
					}
					u := s.user(grants...)
					db, other := u.open("lockSchema="+schema), u.open("lockSchema="+schema)
					key := how.name + dbtest.Random()
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10 WHERE id = 1")
					sell := func(ctx context.Context) error {
						return stock.InTx(ctx, db, func(tx *sql.Tx) error { return exec(ctx, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1") })
					}
					for range 2 { // a new key, and a known one
						dbtest.OK(t, sell(lockctx.With(dbtest.Limited(t), key, how.holds)))
						dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), key, how.holds), db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
					}
					if how.name == "lease" {
						s.renews(db, key)
					}
					s.wantStock(1, 6)
					if !how.waitsForOther {
						return
					}
					h := stock.Acquire(t, db, key, how.holds)
					s.cancelled(other, key, how.wants)
					granted := make(chan error, 1)
					go func() {
						next, err := mysqllock.Acquire(dbtest.Limited(t), other, key, how.wants, lockctx.Wait(2*time.Minute))
						if err == nil {
							err = next.Release()
						}
						granted <- err
					}()
					dbtest.Soon(t, "it waits", func() bool { return s.waiting() == 1 })
					dbtest.OK(t, h.Release())
					dbtest.OK(t, <-granted)
				})
			}
		}
	})
}

// renews holds a lease until it has been renewed, and writes under it.
func (s *scratch) renews(db *sql.DB, key string) {
	s.T.Helper()
	h := stock.Acquire(s.T, db, key, lockctx.Lease(9*time.Second))
	at := s.expires(key)
	dbtest.Soon(s.T, "it is renewed", func() bool { return s.expires(key) != at })
	dbtest.ExecIn(s.T, h.Context(), db, "UPDATE p SET stock = stock WHERE id = 1")
	dbtest.OK(s.T, h.Release())
}

// TestAMissingRightIsNamed, soon, and nothing runs without its lock.
func TestAMissingRightIsNamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "made"), s.open(), "DO 1")
		for _, how := range rightsOf {
			if how.onTheTable == "" {
				continue
			}
			rights := strings.Split(how.onTheTable, ", ")
			for i, missing := range rights {
				left := strings.Join(slices.Delete(slices.Clone(rights), i, i+1), ", ")
				db := s.user("SELECT, UPDATE ON $db.p", left+" ON $db.mysqllock").open()
				for _, key := range []string{"made", "new " + how.name} {
					what := fmt.Sprintf("%s without %s, %s", how.name, missing, key)
					before := s.stock(1)
					ctx, cancel := context.WithTimeout(t.Context(), dbtest.Patience)
					var e *mysqllock.Error
					err := func() error {
						tx, err := db.BeginTx(lockctx.With(ctx, key, how.holds), nil)
						if err != nil {
							return err
						}
						defer tx.Rollback()
						if _, err := tx.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
							return err
						}
						if how.waitsForOther { // where it needs no more, it is locked
							_, err := mysqllock.Acquire(ctx, s.open(), key, how.wants, lockctx.NoWait())
							if !errors.Is(err, mysqllock.ErrLocked) {
								t.Errorf("%s: somebody else gets %v", what, err)
							}
						}
						return tx.Commit()
					}()
					cancel()
					switch {
					case err == nil && s.sparesRight(how.name, missing, key):
						before--
					case !errors.As(err, &e) || e.Key != key || e.Strategy == "" || errors.Is(err, context.DeadlineExceeded) ||
						!strings.Contains(err.Error(), "denied") || !strings.Contains(err.Error(), "SELECT, INSERT, UPDATE"):
						t.Errorf("%s: %v", what, err)
					}
					s.wantStock(1, before)
				}
			}
		}
	})
}

// sparesRight reports whether a right is not needed here: INSERT is for new keys,
// and a server may ask for no more than SELECT to lock a row.
func (s *scratch) sparesRight(how, missing, key string) bool {
	switch how {
	case "row", "shared", "slots":
		return missing == "INSERT" && key == "made" || missing == "UPDATE" && (s.MariaDB() || how == "shared")
	}
	return false
}

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

func TestAWrongSetUpIsRefusedInWords(t *testing.T) {
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
				dbtest.Exec(t, c.db, "DO 1")
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

// TestAnAccountThatMayMakeTheTableTakesEveryLock: it may make the table, use it and clean it up, and nothing else. It
// does so, and makes nothing but the table.
func TestAnAccountThatMayMakeTheTableTakesEveryLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		u := s.user("SELECT, INSERT, UPDATE, DELETE, CREATE ON $db.*")
		db, other := u.open(), u.open()
		for _, how := range rightsOf {
			for range 2 {
				ctx := lockctx.With(dbtest.Limited(t), how.name, how.holds)
				n := stock.MustRead(t, ctx, db, 1)
				dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), how.name, how.holds), db)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				if how.waitsForOther {
					dbtest.Want(t, stock.Told(func() error {
						_, err := mysqllock.Acquire(dbtest.Limited(t), other, how.name, how.wants, lockctx.Wait(50*time.Millisecond))
						return err
					}), mysqllock.ErrTimeout)
				}
				dbtest.OK(t, tx.Commit())
			}
		}
		dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
		s.wantStock(1, 10-4*len(rightsOf))
		i, err := inspect.New(u.Open("mysql"), inspect.Options{})
		dbtest.OK(t, err)
		done, err := i.Clean(dbtest.Limited(t), inspect.CleanUp{Unused: time.Nanosecond})
		if err != nil || done.Removed == 0 {
			t.Errorf("cleaned up are %+v: %v", done, err)
		}
		var made string
		dbtest.OK(t, s.plain.QueryRow(`SELECT GROUP_CONCAT(name ORDER BY name) FROM (
			SELECT CAST(TABLE_NAME AS CHAR) AS name FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()
			UNION ALL SELECT CAST(ROUTINE_NAME AS CHAR) FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = DATABASE()) AS made`).Scan(&made))
		dbtest.Equal(t, "there is %s", made, "mysqllock,p")
	})
}

// TestATableElsewhereIsUsedAndMadeAgain, and so are its rows, where they vanish.
func TestATableElsewhereIsUsedAndMadeAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		elsewhere := "t_" + dbtest.Random()
		dbtest.Exec(t, s.plain, "CREATE DATABASE "+elsewhere)
		defer dbtest.Exec(t, s.plain, "DROP DATABASE "+elsewhere)
		a, b := s.open("lockTable="+elsewhere+".my-locks$"), s.open("lockTable="+elsewhere+".my-locks$", "lockNamespace=other")
		ha := stock.Acquire(t, a, "k")
		hb, err := mysqllock.Acquire(dbtest.Limited(t), b, "k", lockctx.NoWait()) // another namespace: another key
		dbtest.OK(t, err)
		dbtest.OK(t, ha.Release())
		dbtest.OK(t, hb.Release())
		var n int
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM "+elsewhere+".`my-locks$` WHERE name = 'k'").Scan(&n))
		if n != 2 {
			t.Errorf("%d rows, want 2", n)
		}
		// Rows and tables that vanish are made again.
		dbtest.Exec(t, s.plain, "DELETE FROM "+elsewhere+".`my-locks$`")
		ha = stock.Acquire(t, a, "k")
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM "+elsewhere+".`my-locks$` WHERE name = 'k'").Scan(&n))
		if n != 1 {
			t.Errorf("%d rows for a key that was deleted and is held, want 1", n)
		}
		dbtest.Is(t, "a key whose row was deleted and made again is not locked", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), s.open("lockTable="+elsewhere+".my-locks$"), "k", lockctx.NoWait())), mysqllock.ErrLocked)
		dbtest.OK(t, ha.Release())
		dbtest.Exec(t, s.plain, "DROP TABLE "+elsewhere+".`my-locks$`")
		for _, key := range []string{"k", "k2"} { // a known one, too
			dbtest.OK(t, stock.Acquire(t, a, key).Release())
		}
	})
}

// TestLocksHoldOnAServerWithOtherSettings: a lock wait timeout that is short and rolls back, and read_only.
func TestLocksHoldOnAServerWithOtherSettings(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()

		// A lock wait timeout of the server that is shorter than ours, and
		// that rolls back, does not end the wait, nor let us go on unlocked.
		h := stock.Acquire(t, db, "k")
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
		another, err := s.plain.Begin()
		dbtest.OK(t, err)
		dbtest.Exec(t, another, "UPDATE p SET stock = 5 WHERE id = 2")
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		dbtest.Is(t, "a lock wait timeout that rolls back", dbtest.Err(tx.Exec("UPDATE p SET stock = 6 WHERE id = 2")), mysqllock.ErrLost)
		dbtest.Is(t, "the next statement", dbtest.Err(tx.Exec("UPDATE p SET stock = 6 WHERE id = 3")), mysqllock.ErrLost)
		tx.Rollback()
		dbtest.OK(t, another.Rollback())
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

// TestEachPathCostsItsNumberOfStatements, for a key whose row is there. The golden files of the matrix have the
// others.
func TestEachPathCostsItsNumberOfStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tap.Costs(t, "transaction with an isolation level", 3, func() error {
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 5 WHERE id = 1")
			return tx.Commit()
		})
		tap.Costs(t, "a second key, a nested transaction", 6, func() error {
			conn := dbtest.Conn(t, db)
			defer conn.Close()
			tx := dbtest.Begin(t, ctx, conn)
			in := dbtest.Begin(t, lockctx.With(ctx, "a"), conn)
			dbtest.Exec(t, in, "UPDATE p SET stock = 8 WHERE id = 1")
			dbtest.OK(t, in.Commit())
			return tx.Commit()
		})
	})
}

// Many callers make their rows, in any order, and never wait for somebody else's key.
func TestNewKeysAreMadeAtOnceWithoutADeadlock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbs := []*sql.DB{s.open("lockWait=2m"), s.open("lockWait=2m")}
		held := stock.Acquire(t, dbs[0], "n05")
		defer held.Rollback()
		var wg sync.WaitGroup
		for g := range 32 {
			wg.Go(func() {
				for i := range 20 {
					a, b := mathrand.IntN(20), mathrand.IntN(20)
					if a == 5 || b == 5 {
						continue
					}
					keys := []string{fmt.Sprintf("n%02d", a), fmt.Sprintf("n%02d", b)}
					tx, err := dbs[(g+i)%2].BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys), nil)
					if err != nil {
						t.Error(err)
						return
					}
					if err := tx.Rollback(); err != nil {
						t.Error(err)
					}
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

// TestANameThatLooksLikeSQLIsAName on real servers, in their strictest and their laxest reading
// of SQL: its row is made, no two are the same lock, and nothing else is touched.
func TestANameThatLooksLikeSQLIsAName(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE canary (name VARCHAR(20) PRIMARY KEY) ENGINE=InnoDB")
		dbtest.Exec(t, s.plain, "INSERT INTO canary VALUES ('sings')")
		modes := []string{"", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"}
		if s.MariaDB() {
			modes = append(modes, "ORACLE")
		}
		for _, mode := range modes {
			params := "sql_mode=" + url.QueryEscape("'"+mode+"'")
			for _, how := range rightsOf {
				holder, other := s.open(params), s.open(params)
				holds := make([]*mysqllock.Hold, len(hostileNames))
				for i, key := range hostileNames {
					if how.name != "row" && how.name != "lease" && how.name != "advisory" && i%3 > 0 && !dbtest.Long(false, true) {
						continue // they name rows as row locks do
					}
					ctx := lockctx.With(dbtest.Limited(t), key, how.holds)
					if _, err := holder.ExecContext(ctx, "UPDATE p SET stock = 10"); err != nil {
						t.Fatalf("%s, %q: %v", how.name, key, err)
					}
					if !how.waitsForOther || how.name != "lease" && how.name != "advisory" { // which need no connection each
						continue
					}
					var err error
					if holds[i], err = mysqllock.Acquire(dbtest.Limited(t), holder, key, how.holds, lockctx.Wait(ttl)); err != nil {
						t.Fatalf("%s, %q, with the names before it held: %v", how.name, key, err)
					}
				}
				for i, hold := range holds {
					if hold == nil {
						continue
					}
					if _, err := mysqllock.Acquire(dbtest.Limited(t), other, hostileNames[i], how.wants, lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s, %q: somebody else gets %v", how.name, hostileNames[i], err)
					}
					dbtest.OK(t, hold.Release())
				}
				dbtest.OK(t, holder.Close())
				dbtest.OK(t, other.Close())
			}
		}
		want := []string{}
		for _, key := range hostileNames {
			want = append(want, keyrow.Name(key))
		}
		slices.Sort(want)
		if got := s.names("SELECT name FROM mysqllock WHERE namespace = DATABASE() ORDER BY name"); !slices.Equal(got, want) {
			t.Errorf("the rows are %q, want %q", got, want)
		}
		if got := s.names("SELECT name FROM canary"); !slices.Equal(got, []string{"sings"}) {
			t.Errorf("the canary is %q", got)
		}
		if got := s.names("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() ORDER BY 1"); !slices.Equal(got, []string{"canary", "mysqllock", "p"}) {
			t.Errorf("the tables are %q", got)
		}
	})
}

func (s *scratch) names(query string) []string {
	s.T.Helper()
	return dbtest.Column[string](s.T, s.plain, query)
}

// TestASettingThatLooksLikeSQLIsAName: what a handle calls its namespace and itself, and the
// database that it is in.
func TestASettingThatLooksLikeSQLIsAName(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		before := s.names("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
		for n, database := range []string{"t_`; DROP TABLE p; -- " + dbtest.Random()[:6], "t_' \" \\ " + dbtest.Random()[:6]} {
			quoted := "`" + strings.ReplaceAll(database, "`", "``") + "`"
			dbtest.Exec(t, s.plain, "CREATE DATABASE "+quoted)
			defer dbtest.Exec(t, s.plain, "DROP DATABASE "+quoted)
			dbtest.Exec(t, s.plain, "CREATE TABLE "+quoted+".p SELECT * FROM p")
			in := s.Changed(func(cfg *mysql.Config) { cfg.DBName = database })
			dbtest.Exec(t, in.Open("mysql"), "DELETE FROM p WHERE id = 4") // it is that one
			for i, name := range hostileNames {
				if i%3 > 0 && !strings.ContainsAny(name, "'`\";") || i%2 != n && !dbtest.Long(false, true) {
					continue
				}
				connector, err := mysqllock.NewConnector(in.Config(), mysqllock.Config{Namespace: name, Owner: name})
				dbtest.OK(t, err)
				db := sql.OpenDB(connector)
				for _, how := range rightsOf {
					_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k", how.holds), "UPDATE p SET stock = 10")
					if err != nil {
						t.Fatalf("database %q, namespace and owner %q, %s: %v", database, name, how.name, err)
					}
				}
				h := stock.Acquire(t, db, "k", lockctx.Lease(ttl))
				err = naming(func() error {
					other, err := mysqllock.NewConnector(in.Config(), mysqllock.Config{Namespace: name})
					dbtest.OK(t, err)
					db := sql.OpenDB(other)
					defer db.Close()
					_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl), lockctx.NoWait())
					return err
				})
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil || !strings.HasPrefix(name, e.Holder.Program) || strings.ContainsAny(err.Error(), "\n\r\x00") {
					t.Errorf("the lease of owner %q: %q", name, err)
				}
				dbtest.OK(t, h.Release())
				dbtest.OK(t, db.Close())
			}
		}
		after := s.names("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
		if len(after) < len(before) { // other tests make and drop theirs
			t.Logf("the databases were %q and are %q", before, after)
		}
		s.wantStock(1, 10)
		s.wantStock(4, 10)
	})
}

// TestAPasswordIsToldNowhere, whatever is in it: in no error, no log line, and nothing that is
// printed.
func TestAPasswordIsToldNowhere(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const word = "Sw0rdf1sh"
		dbtest.OK(t, func() error { _, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1"); return err }())
		for i, special := range strings.Split("!|\"|#|$|%|&|'|(|)|*|+|,|-|.|/|:|;|<|=|>|?|@|[|\\|]|^|_|`|{|}|~| |\t|\n|é|%41|?lockWait=|/x?lockX=1&", "|") {
			password := word + special + "a" + special + word
			user := fmt.Sprintf("u%d_%s", i, dbtest.Random())
			dbtest.Exec(t, s.plain, "CREATE USER "+user+" IDENTIFIED BY '"+strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password)+"'")
			defer dbtest.Exec(t, s.plain, "DROP USER "+user)
			dbtest.Exec(t, s.plain, "GRANT SELECT, UPDATE ON "+s.Name+".p TO "+user)
			cfg := s.Config()
			cfg.User, cfg.Passwd = user, password
			told := func(what string, x any) {
				t.Helper()
				logged := &bytes.Buffer{}
				slog.New(slog.NewJSONHandler(logged, nil)).Info("x", "x", x)
				slog.New(slog.NewTextHandler(logged, nil)).Info("x", "x", x)
				text, _ := json.Marshal(x)
				all := fmt.Sprintf("%v %+v %#v %s %s %s", x, x, x, x, text, logged)
				if strings.Contains(all, word) {
					t.Errorf("%s with %q in the password tells it: %s", what, special, all)
				}
			}
			way := func(what string, cfg *mysql.Config) {
				t.Helper()
				for _, how := range []string{"NewConnector", "DSN"} {
					var db *sql.DB
					var err error
					if how == "DSN" {
						db, err = sql.Open("mysqllock", cfg.FormatDSN()+"?lockOwner=me")
					} else if connector, cerr := mysqllock.NewConnector(cfg, mysqllock.Config{}); cerr == nil {
						told("the connector", connector)
						told("the driver", connector.Driver())
						db = sql.OpenDB(connector)
					} else {
						err = cerr
					}
					if err != nil {
						told(what+" by "+how, err)
						continue
					}
					stats, err := mysqllock.Stats(db)
					dbtest.OK(t, err)
					told("the stats", stats)
					told("the handle", db)
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					if err := db.PingContext(ctx); (err == nil) != (what == "no privileges") {
						t.Errorf("%s by %s, with %q in the password: %v", what, how, special, err)
					} else {
						told(what+" by "+how, err)
					}
					for _, err := range []error{
						func() error { _, err := mysqllock.Acquire(ctx, db, "k"); return err }(),
						func() error { _, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(ttl)); return err }(),
						func() error { _, err := db.BeginTx(lockctx.With(ctx, "k", lockctx.Optimistic()), nil); return err }(),
						func() error { _, err := db.ExecContext(lockctx.With(ctx, "k"), "DO 1"); return err }(),
					} {
						if err == nil {
							t.Errorf("%s by %s, with %q in the password: no error", what, how, special)
						}
						told(what+" by "+how, err)
					}
					cancel()
					dbtest.OK(t, db.Close())
				}
			}
			if i%4 == 0 || dbtest.Long(false, true) { // the server is never told the password as a text
				way("no privileges", cfg)
				wrong := cfg.Clone()
				wrong.User = user + "x"
				way("a wrong user", wrong)
			}
			away := cfg.Clone()
			away.Addr = "127.0.0.1:1"
			way("the server away", away)
			told("no handle", func() error {
				_, err := sql.Open("mysqllock", cfg.FormatDSN()+"?lockNothing=1")
				return err
			}())
			told("a bad table", func() error {
				_, err := mysqllock.NewConnector(cfg, mysqllock.Config{Table: "a.b.c"})
				return err
			}())
		}
	})
}

// TestAllConnectionsUseTLSWhereTheServerTakesNothingElse: those of database/sql, sessions,
// those of leases and of advisory locks, and those that make rows and kill waiters.
func TestAllConnectionsUseTLSWhereTheServerTakesNothingElse(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			trusted := certificate(t, dir)
			srv, err := tempserver.Start(dbtest.Limited(t), bin,
				"--ssl-ca="+filepath.Join(dir, "ca.pem"), "--ssl-cert="+filepath.Join(dir, "server.pem"), "--ssl-key="+filepath.Join(dir, "server.key"))
			dbtest.OK(t, err)
			t.Cleanup(func() { srv.Stop() })
			s := newScratch(dbtest.New(t, bin, srv))
			dbtest.Exec(t, s.plain, "SELECT 1") // a connection from before
			s.plain.SetMaxOpenConns(1)
			s.plain.SetMaxIdleConns(1)
			dbtest.Exec(t, s.plain, "SET GLOBAL require_secure_transport = ON")
			t.Cleanup(func() { dbtest.Exec(t, s.plain, "SET GLOBAL require_secure_transport = OFF") })

			for _, way := range []string{"NewConnector", "DSN"} {
				t.Run(way, func(t *testing.T) {
					s := s.at(s.For(t))
					w := &wire{}
					secure := &tls.Config{RootCAs: trusted, ServerName: "localhost"}
					s.liveOn(func(owner string) *sql.DB { return s.overTLS(way, w, secure, owner) })
					opened, plain := w.seen()
					if opened < 6 {
						t.Errorf("only %d connections were opened", opened)
					}
					if len(plain) > 0 {
						t.Errorf("not encrypted: %q", plain)
					}
				})
				t.Run(way+", another CA", func(t *testing.T) {
					s := s.at(s.For(t))
					other := &tls.Config{RootCAs: certificate(t, t.TempDir()), ServerName: "localhost"}
					s.untrusted(s.overTLS(way, &wire{}, other, "me"))
				})
			}
			t.Run("without TLS", func(t *testing.T) {
				_, err := mysqllock.Acquire(dbtest.Limited(t), s.open(), "k")
				if err == nil || !s.MariaDB() && !strings.Contains(err.Error(), "require_secure_transport") { // MariaDB says that access is denied
					t.Errorf("it is let in, or told nothing: %v", err)
				}
			})
		})
	}
}

// liveOn has locks of all kinds, over handles that open gives.
func (s *scratch) liveOn(open func(owner string) *sql.DB) {
	s.T.Helper()
	t := s.T
	dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
	db, other := open("one"), open("two")
	for _, how := range rightsOf {
		ctx := lockctx.With(dbtest.Limited(t), how.name, how.holds)
		n := stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), how.name, how.holds), db)
		dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		if how.waitsForOther {
			h := stock.Acquire(t, db, how.name, how.holds)
			s.cancelled(other, how.name, how.wants)
			dbtest.OK(t, h.Release())
		}
	}
	s.wantStock(1, 10-2*len(rightsOf))
}

// cancelled waits for a key, gives up, and leaves nobody waiting in the server.
func (s *scratch) cancelled(db *sql.DB, key string, opt lockctx.Option) {
	s.T.Helper()
	for began := time.Now(); ; {
		ctx, cancel := context.WithCancel(dbtest.Limited(s.T))
		result := make(chan error, 1)
		go func() {
			_, err := mysqllock.Acquire(ctx, db, key, opt, lockctx.Wait(2*time.Minute))
			result <- err
		}()
		dbtest.Soon(s.T, "it waits", func() bool {
			stats, err := mysqllock.Stats(db) // what runs in the server may be another statement
			return err == nil && stats.Waiters == 1 && s.waiting() == 1
		})
		cancel()
		err := <-result
		dbtest.Soon(s.T, "nobody waits any more", func() bool { return s.waiting() == 0 })
		if errors.Is(err, context.Canceled) && errors.Is(err, mysqllock.ErrTimeout) {
			return
		}
		if !errors.Is(err, context.Canceled) || time.Since(began) > dbtest.Patience { // a busy server may not have answered at all
			s.T.Errorf("%s: who gives up gets %v", key, err)
			return
		}
	}
}

// untrusted checks that nothing is sent to a server that cannot show who it is.
func (s *scratch) untrusted(db *sql.DB) {
	s.T.Helper()
	for what, err := range map[string]error{
		"Ping":    db.Ping(),
		"Acquire": func() error { _, err := mysqllock.Acquire(dbtest.Limited(s.T), db, "k"); return err }(),
		"Lease": func() error {
			_, err := mysqllock.Acquire(dbtest.Limited(s.T), db, "k", lockctx.Lease(ttl))
			return err
		}(),
		"BeginTx": func() error { _, err := db.BeginTx(lockctx.With(dbtest.Limited(s.T), "k"), nil); return err }(),
	} {
		var unknown x509.UnknownAuthorityError
		if !errors.As(err, &unknown) {
			s.T.Errorf("%s: %v", what, err)
		}
	}
}

// overTLS opens the scratch database by NewConnector or by a DSN.
func (s *scratch) overTLS(way string, w *wire, config *tls.Config, owner string) *sql.DB {
	s.T.Helper()
	cfg := s.Config()
	if way == "NewConnector" {
		cfg.TLS, cfg.DialFunc = config, w.dial
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Owner: owner})
		dbtest.OK(s.T, err)
		db := sql.OpenDB(connector)
		s.T.Cleanup(func() { db.Close() })
		return db
	}
	name := "wire-" + dbtest.Random()
	dbtest.OK(s.T, mysql.RegisterTLSConfig(name, config))
	mysql.RegisterDialContext(name, func(ctx context.Context, addr string) (net.Conn, error) { return w.dial(ctx, "tcp", addr) })
	s.T.Cleanup(func() {
		mysql.DeregisterTLSConfig(name)
		mysql.DeregisterDialContext(name)
	})
	cfg.Net, cfg.TLSConfig = name, name
	db, err := sql.Open("mysqllock", cfg.FormatDSN()+"&lockOwner="+owner)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { db.Close() })
	return db
}

// wire sees what clients send as it goes over the network.
type wire struct {
	mu     sync.Mutex
	opened int
	plain  []string // writes that are neither TLS nor the request for it
}

func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened++
	return &wireConn{Conn: c, wire: w}, nil
}

func (w *wire) seen() (opened int, plain []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.opened, w.plain
}

type wireConn struct {
	net.Conn
	wire *wire
	sent int // bytes
}

const sslRequest = 4 + 32 // bytes, that come before the first of TLS

func (wc *wireConn) Write(b []byte) (int, error) {
	tlsRecord := len(b) > 3 && b[0] >= 20 && b[0] <= 23 && b[1] == 3
	if wc.sent == 0 && len(b) == sslRequest || tlsRecord {
		wc.sent += len(b)
		return wc.Conn.Write(b)
	}
	wc.wire.mu.Lock()
	wc.wire.plain = append(wc.wire.plain, string(bytes.ToValidUTF8(b, []byte("?"))))
	wc.wire.mu.Unlock()
	return wc.Conn.Write(b)
}

// certificate makes a CA, and with it the certificate of a server, in dir.
func certificate(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	valid := x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		BasicConstraintsValid: true,
	}
	ca, server := valid, valid
	ca.Subject, ca.IsCA, ca.KeyUsage = pkix.Name{CommonName: "CA of the tests"}, true, x509.KeyUsageCertSign
	server.Subject, server.DNSNames, server.SerialNumber = pkix.Name{CommonName: "server"}, []string{"localhost"}, big.NewInt(2)
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	dbtest.OK(t, err)
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	dbtest.OK(t, err)
	caDER, err := x509.CreateCertificate(rand.Reader, &ca, &ca, &caKey.PublicKey, caKey)
	dbtest.OK(t, err)
	serverDER, err := x509.CreateCertificate(rand.Reader, &server, &ca, &serverKey.PublicKey, caKey)
	dbtest.OK(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(serverKey)
	dbtest.OK(t, err)
	for name, block := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: caDER}, "server.pem": {Type: "CERTIFICATE", Bytes: serverDER}, "server.key": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		dbtest.OK(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	trusted := x509.NewCertPool()
	made, err := x509.ParseCertificate(caDER)
	dbtest.OK(t, err)
	trusted.AddCert(made)
	return trusted
}

// hostileNames are names that would do something else than name a key if any
// statement took them for text.
var hostileNames = []string{
	`'`, `"`, "`", `\`, `\'`, `''`, `' OR '1'='1`, `k'; DROP TABLE canary; -- `, `k'); DROP TABLE canary; -- `, "k`; DROP TABLE canary; -- ",
	`k" OR 1=1 #`, `/* k`, `*/ k`, `/*!50000 k */`, `/*M! k */`, `-- k`, `#k`, `?`, `%s%d%n`, `%`, `_`, `@@version`, `x'6b'`, `0x6b`, `NULL`, `:name`,
	"k\x00", "\x00k", "\x00", "\x00\x00k", "\x00slot 1:k", "\x00stripes", "\x00stripe 1", "\x00zero", "k\nk", "k\r\n", "k\tk", "k ", " k", "K", "k",
	"\x1a", "\xff\xfe", "\xbf\x27", "\xc0\xa7", "ключ", "鍵", "é", "e\u0301", "👍", "\u202ek", strings.Repeat("k", 255), strings.Repeat("'", 255), strings.Repeat("\x00", 255),
}

var (
	versionOf = regexp.MustCompile(`^SELECT .*@@transaction_isolation, name, token, .* name IN \(x'([0-9a-f]*)'\)`)

	literal = regexp.MustCompile(`x'[0-9a-f]*'|CONVERT\('[0-9a-f]*' USING ascii\)`)
	quoted  = regexp.MustCompile(`'[A-Za-z0-9_.:%/#\-]{0,64}'`) // of named locks, marks, and the driver's own words
	marks   = regexp.MustCompile(`[0-9a-f]{24,64}|\b[0-9]+\b`)  // and times
)

// FuzzNames: whatever keys, namespaces and owners are called, the statements
// differ in nothing but their hexadecimal literals and the safe names of named
// locks.
func FuzzNames(f *testing.F) {
	for i := 0; i < len(hostileNames); i += dbtest.Long(3, 1) {
		f.Add(hostileNames[(i+1)%len(hostileNames)], hostileNames[(i+2)%len(hostileNames)], hostileNames[i])
	}
	usual := make(map[string]bool)
	for range 10 { // what is done in the background is not always the same
		for _, key := range []string{"k", "1"} { // which the fake server answers
			sent, err := sentFor("shop", "me", key)
			dbtest.OK(f, err)
			for _, statement := range sent {
				usual[statement] = true
			}
		}
	}
	f.Fuzz(func(t *testing.T, namespace, owner, key string) {
		if namespace == "" || len(namespace) > 255 || owner == "" || key == "" || len(key) > 255 {
			return
		}
		sent, err := sentFor(namespace, owner, key)
		dbtest.OK(t, err)
		if len(sent) < len(usual)/2 {
			t.Errorf("namespace %q, owner %q, key %q: no more is sent than %q", namespace, owner, key, sent)
		}
		for _, statement := range sent {
			if !usual[statement] {
				t.Errorf("namespace %q, owner %q, key %q: %q", namespace, owner, key, statement)
			}
		}
	})
}

// sentFor returns what is sent for locks of each strategy on key, without what may
// differ.
func sentFor(namespace, owner, key string) (sent []string, err error) {
	for _, how := range rightsOf {
		fake := newFake().mysqlAnswers()
		answer := fake.answer
		fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if literal.ReplaceAllString(text, "") == literal.ReplaceAllString(sqlStripes, "") {
				text = sqlStripes // of any namespace
			}
			reply, err := answer(c, text)
			if len(reply.rows) == 3 && !strings.HasPrefix(text, "UPDATE p") { // it is none that the fake knows
				row := slices.Repeat([]driver.Value{int64(1)}, 8)
				if m := versionOf.FindStringSubmatch(text); m != nil { // of a key that nobody has leased
					name, _ := hex.DecodeString(m[1])
					row = []driver.Value{"REPEATABLE-READ", string(name), int64(1), int64(1), int64(0), nil}
				}
				reply = fakeReply{columns: make([]string, len(row)), rows: [][]driver.Value{row}}
			}
			return reply, err
		}
		connector, wrapErr := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{Namespace: namespace, Owner: owner, NoWait: true})
		if wrapErr != nil {
			return nil, wrapErr
		}
		db := sql.OpenDB(connector)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		for range 2 { // the second time the row is known
			_, execErr := db.ExecContext(lockctx.With(ctx, key, how.holds), "UPDATE p SET stock = 1")
			err = errors.Join(err, execErr)
		}
		cancel()
		_ = db.Close()
		for _, line := range fake.sent() {
			if strings.Contains(line, " connector ") || strings.Contains(line, "Ping") {
				continue
			}
			line = literal.ReplaceAllString(strings.TrimSuffix(line, " (context canceled)"), "x''")
			line = quoted.ReplaceAllString(line, "''")
			sent = append(sent, how.name+": "+marks.ReplaceAllString(line, "…"))
		}
	}
	return sent, err
}

// TestCleanUpCostsNobodyALock: callers that would not wait for anybody get their
// locks beside a clean-up, which finds rows unused that only row locks use.
func TestCleanUpCostsNobodyALock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const callers, rounds = 4, 2
		keys := dbtest.Long(50, 150)
		db := s.open()
		look, err := inspect.New(s.plain, inspect.Options{})
		dbtest.OK(t, err)
		name := func(caller, key int) string { return fmt.Sprintf("%d %d", caller, key) }
		kinds := []lockctx.Option{lockctx.Row(), lockctx.Lease(30 * time.Second), lockctx.Shared(), lockctx.Slots(2)}
		var removed, granted atomic.Int64
		for range rounds {
			for caller := range callers { // each has keys of its own
				var all []string
				for key := range keys {
					all = append(all, name(caller, key))
				}
				dbtest.OK(t, mysqllock.DoKeys(dbtest.Limited(t), db, all, func(context.Context) error { return nil }))
			}
			dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = '2001-01-01' WHERE namespace <> ''")
			var all sync.WaitGroup
			for caller, kind := range kinds {
				all.Go(func() {
					for key := range keys {
						take := func() error {
							return mysqllock.Do(dbtest.Limited(t), db, name(caller, key), func(context.Context) error { return nil }, lockctx.NoWait(), kind)
						}
						err := take()
						// A clean-up is waited for, but not forever: a server that stands still is not the point.
						for try := 0; try < 20 && waitedFor(err, time.Second); try++ {
							err = take()
						}
						if err != nil {
							t.Errorf("key %s: %v", name(caller, key), err)
						}
						granted.Add(1)
					}
				})
			}
			for range 3 {
				done, err := look.Clean(dbtest.Limited(t), inspect.CleanUp{Unused: time.Hour})
				if err != nil {
					t.Error(err)
				}
				removed.Add(int64(done.Removed))
			}
			all.Wait()
		}
		t.Logf("%d rows were removed beside %d locks", removed.Load(), granted.Load())
	})
}

// waitedFor reports that err is that of a caller that has waited for so long.
func waitedFor(err error, least time.Duration) bool {
	var e *mysqllock.Error
	return errors.As(err, &e) && errors.Is(err, mysqllock.ErrLocked) && e.Waited >= least
}

// TestNoWaitWaitsForACleanUp, and for nobody else.
func TestNoWaitWaitsForACleanUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		nothing := func(context.Context) error { return nil }
		for _, kind := range []lockctx.Option{lockctx.Row(), lockctx.Shared(), lockctx.Lease(30 * time.Second)} {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind))
			lock := func() (unlock func()) {
				tx, err := s.plain.Begin()
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock WHERE namespace = DATABASE() AND name = 'k' FOR UPDATE")
				return func() { dbtest.OK(t, tx.Rollback()) }
			}
			noWait := func() error { return mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind, lockctx.NoWait()) }
			unlock := lock()
			dbtest.Is(t, "without a clean-up", noWait(), mysqllock.ErrLocked)
			unlock()
			for began := time.Now(); ; {
				unlock = lock()
				dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE WHERE namespace = ''") // as a clean-up does
				var all sync.WaitGroup
				all.Go(func() {
					time.Sleep(50 * time.Millisecond)
					unlock()
				})
				err := noWait()
				all.Wait()
				if err == nil {
					break
				}
				if time.Since(began) > dbtest.Patience { // a machine that stands still may keep it locked for longer than is waited
					t.Errorf("where a clean-up has it: %v", err)
					break
				}
			}
			unlock = lock()
			if err := noWait(); !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("where somebody else has it: %v", err)
			}
			unlock()
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind))
			dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = '2001-01-01' WHERE namespace = ''")
		}
	})
}
