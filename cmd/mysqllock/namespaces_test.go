package main

import (
	"database/sql"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLsAndDoctorTellOfSeveralNamespaces: two programs share a lock table, and their DSNs name
// different databases.
func TestLsAndDoctorTellOfSeveralNamespaces(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		other := s.Name + "_other"
		for _, database := range []string{s.Name, other} {
			if database == other {
				db := s.process("admin")
				dbtest.Exec(t, db, "CREATE DATABASE "+other)
				t.Cleanup(func() { db.Exec("DROP DATABASE " + other) })
			}
			cfg := s.Config()
			cfg.DBName = database
			connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Table: s.Name + ".mysqllock"})
			dbtest.OK(t, err)
			db := sql.OpenDB(connector)
			t.Cleanup(func() { db.Close() })
			hold, err := mysqllock.Acquire(t.Context(), db, "k", lockctx.Lease(time.Minute))
			dbtest.OK(t, err)
			t.Cleanup(func() { hold.Release() })
			if out := s.command("ls").start().must(0); database != other && strings.Contains(out, "namespaces") {
				t.Errorf("ls tells of namespaces where there is one:\n%s", out)
			}
		}
		for _, command := range []string{"ls", "doctor"} {
			out := s.command(command).start().must(0)
			for _, want := range []string{s.Name, other, "lockNamespace"} {
				if !strings.Contains(out, want) {
					t.Errorf("%s has no %q:\n%s", command, want, out)
				}
			}
		}
		var snap jsonSnapshot
		s.command("ls", "--json").read(&snap)
		if want := []jsonNamespace{{s.Name, true}, {other, true}}; !slices.Equal(snap.Namespaces, want) {
			t.Errorf("the namespaces are %v, want %v", snap.Namespaces, want)
		}
	})
}
