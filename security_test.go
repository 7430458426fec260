package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestHostileNames: on real servers, in their strictest and their laxest reading of
// SQL, a name that looks like SQL is a name: its row is made, no two are the same
// lock, and nothing else is touched.
func TestHostileNames(t *testing.T) {
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
					ctx := lockctx.With(dbtest.Limited(t), key, how.holds)
					if _, err := holder.ExecContext(ctx, "UPDATE p SET stock = 10"); err != nil {
						t.Fatalf("%s, %q: %v", how.name, key, err)
					}
					if !how.waitsForOther || how.name != "lease" && how.name != "advisory" { // which need no connection each
						continue
					}
					var err error
					if holds[i], err = mysqllock.Acquire(dbtest.Limited(t), holder, key, how.holds, lockctx.NoWait()); err != nil {
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

// TestHostileSettings: so is what a handle calls its namespace and itself, and the
// database that it is in.
func TestHostileSettings(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		before := s.names("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
		for _, database := range []string{"t_`; DROP TABLE p; -- " + dbtest.Random()[:6], "t_' \" \\ " + dbtest.Random()[:6]} {
			quoted := "`" + strings.ReplaceAll(database, "`", "``") + "`"
			dbtest.Exec(t, s.plain, "CREATE DATABASE "+quoted)
			defer dbtest.Exec(t, s.plain, "DROP DATABASE "+quoted)
			dbtest.Exec(t, s.plain, "CREATE TABLE "+quoted+".p SELECT * FROM p")
			in := s.Changed(func(cfg *mysql.Config) { cfg.DBName = database })
			dbtest.Exec(t, in.Open("mysql"), "DELETE FROM p WHERE id = 4") // it is that one
			for i, name := range hostileNames {
				if i%3 > 0 && !strings.ContainsAny(name, "'`\";") {
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
				h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl))
				dbtest.OK(t, err)
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

// TestNoSecrets: a password, whatever is in it, is in no error, no log line, and
// nothing that is printed.
func TestNoSecrets(t *testing.T) {
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
			way("no privileges", cfg)
			wrong := cfg.Clone()
			wrong.User = user + "x"
			way("a wrong user", wrong)
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
