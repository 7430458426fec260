package main

import (
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestSchemaMakesAndMendsTheLockTable(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "check").start().fails(1, `make it with "mysqllock schema apply"`)
		s.command("schema", "apply").start().must(0)
		s.command("schema", "check").start().must(0)
		s.command("schema", "apply").start().must(0)
		for _, drop := range []string{"ALTER TABLE mysqllock DROP COLUMN versioned", "DELETE FROM mysqllock"} {
			dbtest.Exec(t, s.root, drop)
			s.command("schema", "check").start().must(1)
			s.command("schema", "apply").start().must(0)
			s.command("schema", "check").start().must(0)
		}

		const whole = "the lock table is as it should be\n"
		for _, command := range []string{"apply", "check"} {
			if out := s.command("schema", command).start().must(0); out != whole {
				t.Errorf("%s says %s", command, out)
			}
		}

		// What is printed makes the same, in another table.
		printed := s.command("schema", "print", "--table", "other")
		printed.Env = append(printed.Env, dsnVariable+"=") // it needs no server
		for text := range strings.SplitSeq(strings.TrimSpace(printed.start().must(0)), ";\n") {
			dbtest.Exec(t, s.root, text)
		}
		s.command("schema", "check", "--table", "other").start().must(0)
		s.command("ls", "--table", s.Name+".other").start().must(0)
		cfg := s.Config()
		cfg.DBName = ""
		for _, do := range [][]string{{"ls"}, {"run", "--key", "k", "--ttl", "9s", "--", "true"}, {"doctor"}} { // what the error suggests works
			nowhere := append([]string{do[0], "--dsn", cfg.FormatDSN(), "--table", s.Name + ".other"}, do[1:]...)
			s.command(nowhere...).start().fails(map[bool]int{true: exitCannotLock, false: 1}[do[0] == "run"], "give --database; or --table as schema.table, and --namespace")
			s.command(append([]string{do[0], "--namespace", "n"}, nowhere[1:]...)...).start().must(0)
			s.command(append([]string{do[0], "--database", s.Name}, nowhere[1:]...)...).start().must(0)
		}
		s.command("schema", "print", "--table", "a b").start().fails(1, "bad lock table")
	})
}

// TestSchemaDropsProceduresWhenAsked: a lock table with procedures of an earlier version is as it should be. They stay until
// they are dropped when asked to, and only ours.
func TestSchemaDropsProceduresWhenAsked(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_lock2() COMMENT 'mysqllock' DO 0")
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_held3() COMMENT 'mysqllock' DO 0")
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_done3() COMMENT 'of someone else' DO 0")
		const whole = "the lock table is as it should be\n"
		before := s.made()
		dbtest.Equal(t, "check says %s", s.command("schema", "check").start().must(0), whole)
		dbtest.Equal(t, "apply says %s", s.command("schema", "apply").start().must(0), whole)
		dbtest.Equal(t, "there is %s", s.made(), before)
		dropped := func() string { return s.command("schema", "apply", "--drop-procedures").start().must(0) }
		dbtest.Equal(t, "it says %s", dropped(),
			whole+"dropped procedure `"+s.Name+"`.`mysqllock_held3`\ndropped procedure `"+s.Name+"`.`mysqllock_lock2`\n")
		dbtest.Equal(t, "it says %s", dropped(), whole+"no procedures of earlier versions are visible\n")
		dbtest.Equal(t, "there is %s", s.made(), "mysqllock,mysqllock_done3")
	})
}

func TestGCRemovesUnusedRowsUpToItsLimit(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.process("holder")
		for range 3 {
			dbtest.OK(t, mysqllock.Do(t.Context(), db, "used", func(context.Context) error { return nil }, lockctx.Lease(patience)))
		}
		dbtest.Exec(t, s.root, "INSERT INTO mysqllock (namespace, name) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 700) SELECT 'old', UUID() FROM n")
		var done struct {
			Removed int
			Done    bool
		}
		s.command("gc", "--limit", "600", "--json").read(&done)
		if done.Removed != 600 || done.Done {
			t.Errorf("removed: %+v", done)
		}
		dbtest.Equal(t, "it says %s", s.command("gc").start().must(0), "100 rows removed\n")
		// MariaDB does not show whose the row locks are of the tests beside this one.
		if out := s.command("show", "used").start().must(0); !regexp.MustCompile(`(?m)^used +- +3 +(nobody|not known)$`).MatchString(out) {
			t.Errorf("the key is\n%s", out)
		}
		s.command("gc", "--unused", "-1s").start().fails(1, "negative")
	})
}

func TestDoctorSaysWhichStrategiesAreSafe(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		out := s.command("doctor").start().must(0)
		for _, want := range []string{"STRATEGY", "row ", "lease ", "advisory ", "optimistic ", "yes", "topology", "clock", "proxy", "privileges", "several statements", "in one text"} {
			if !strings.Contains(out, want) {
				t.Errorf("it has no %q:\n%s", want, out)
			}
		}
		var d jsonDiagnosis
		s.command("doctor", "--json", "--need", "row,lease").read(&d)
		if d.MariaDB != strings.Contains(s.Server.Version(), "MariaDB") || len(d.Strategies) != 4 || len(d.Checks) < 5 {
			t.Errorf("it is %+v", d)
		}
		s.command("doctor", "--need", "hope").start().fails(1, "no strategy")

		// An account without INSERT can have advisory locks alone.
		user := "u_" + s.Name
		dbtest.Exec(t, s.root, "CREATE USER "+user)
		t.Cleanup(func() { dbtest.Exec(t, s.root, "DROP USER "+user) })
		dbtest.Exec(t, s.root, "GRANT SELECT ON "+s.Name+".* TO "+user)
		cfg := s.Config()
		cfg.User = user
		dsn := cfg.FormatDSN()
		s.command("doctor", "--dsn", dsn).start().fails(1, "privileges")
		s.command("doctor", "--dsn", dsn, "--need", "advisory,row").start().fails(1, "not safe here: row")
		s.command("doctor", "--dsn", dsn, "--need", "advisory").start().must(0)
	})
}
