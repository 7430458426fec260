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

func TestSchema(t *testing.T) {
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

		mariadb := []string{"--mariadb"}
		if !strings.Contains(s.Server.Version(), "MariaDB") {
			mariadb = nil
			dbtest.Exec(t, s.root, "DROP PROCEDURE mysqllock_pass1")
			if out := s.command("schema", "check").start().must(0); !strings.Contains(out, "mysqllock_pass1`: not there") || !strings.Contains(out, "schema apply") {
				t.Errorf("without a procedure: %s", out)
			}
		}
		const whole = "the lock table is as it should be\n"
		for _, command := range []string{"apply", "check"} {
			if out := s.command("schema", command).start().must(0); out != whole {
				t.Errorf("%s says %s", command, out)
			}
		}

		// What is printed makes the same, in another table.
		printed := s.command(append([]string{"schema", "print", "--table", "other"}, mariadb...)...)
		printed.Env = append(printed.Env, dsnVariable+"=") // it needs no server
		for _, text := range clientStatements(printed.start().must(0)) {
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

// clientStatements takes a script apart as the mysql client does.
func clientStatements(text string) (out []string) {
	end := ";"
	var b strings.Builder
	for line := range strings.Lines(text) {
		if d, ok := strings.CutPrefix(line, "DELIMITER "); ok {
			end = strings.TrimSpace(d)
			continue
		}
		b.WriteString(line)
		if one, ok := strings.CutSuffix(strings.TrimSpace(b.String()), end); ok {
			out = append(out, one)
			b.Reset()
		}
	}
	return out
}

func TestGC(t *testing.T) {
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

func TestDoctor(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		out := s.command("doctor").start().must(0)
		for _, want := range []string{"STRATEGY", "row ", "lease ", "advisory ", "optimistic ", "yes", "topology", "clock", "proxy", "privileges"} {
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
		if !d.MariaDB {
			out := s.command("schema", "check", "--dsn", dsn).start().must(0)
			if strings.Count(out, "\nGRANT EXECUTE ON PROCEDURE ") != 10 || strings.Contains(out, "schema apply") {
				t.Errorf("without EXECUTE: %s", out)
			}
		}
	})
}
