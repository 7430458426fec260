package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
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
