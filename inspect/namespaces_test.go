package inspect_test

import (
	"database/sql"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTwoNamespacesOfATableAreToldApart: two programs share a lock table and mean the same key. Their DSNs name
// different databases, so that both hold it.
func TestTwoNamespacesOfATableAreToldApart(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		other := s.Name + "_other"
		dbtest.Exec(t, s.root, "CREATE DATABASE "+other)
		t.Cleanup(func() { s.root.Exec("DROP DATABASE " + other) })
		program := func(database, params string) *sql.DB {
			cfg := s.Config()
			cfg.DBName = database
			dsn := cfg.FormatDSN()
			sep := "?"
			if strings.Contains(dsn, "?") {
				sep = "&"
			}
			db, err := sql.Open("mysqllock", dsn+sep+"lockTable="+s.Name+".mysqllock"+params)
			dbtest.OK(t, err)
			t.Cleanup(func() { db.Close() })
			return db
		}
		take := func(db *sql.DB) {
			t.Helper()
			hold, err := mysqllock.Acquire(t.Context(), db, "k", lockctx.Lease(30*time.Second), lockctx.NoWait())
			dbtest.OK(t, err)
			t.Cleanup(func() { hold.Release() })
		}
		see := func(want []inspect.Namespace, state inspect.State, words ...string) {
			t.Helper()
			snap, err := s.inspector(s.root).Snapshot(t.Context(), inspect.Filter{})
			dbtest.OK(t, err)
			if !slices.Equal(snap.Namespaces, want) {
				t.Errorf("the namespaces are %v, want %v", snap.Namespaces, want)
			}
			c := check(diagnose(t, s, s.root), "namespaces")
			if c.State != state {
				t.Errorf("the check is %+v, want %s", c, state)
			}
			for _, word := range words {
				if !strings.Contains(c.Detail+c.Remedy, word) {
					t.Errorf("the check does not tell of %s: %+v", word, c)
				}
			}
		}

		take(program(s.Name, ""))
		first := inspect.Namespace{Name: s.Name, Database: true}
		see([]inspect.Namespace{first}, inspect.OK, s.Name)

		take(program(other, ""))
		second := inspect.Namespace{Name: other, Database: true}
		see([]inspect.Namespace{first, second}, inspect.Warning, s.Name, other, "lockNamespace")

		dbtest.Exec(t, s.root, "DELETE FROM mysqllock WHERE namespace <> ''")
		take(program(s.Name, "&lockNamespace=a+one"))
		take(program(other, "&lockNamespace=b+two"))
		see([]inspect.Namespace{{Name: "a one"}, {Name: "b two"}}, inspect.Note, "a one", "b two")
	})
}
