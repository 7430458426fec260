package rolling

import (
	"bufio"
	"database/sql"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// oldVariable names the program of an earlier version.
const oldVariable = "MYSQLLOCK_ROLLING_OLD"

//go:embed testdata/procedures.sql
var oldProcedures string

// rounds are the strategies of the two programs that sell side by side: those that exclude each other on a key.
var rounds = [][2]string{
	{"row", "row"},
	{"slots", "slots"},
	{"lease", "lease"},
	{"advisory", "advisory"},
	{"optimistic", "optimistic"},
	{"row", "lease"},
	{"lease", "row"},
	{"row", "optimistic"},
	{"optimistic", "row"},
	{"lease", "optimistic"},
	{"optimistic", "lease"},
}

// TestVersionsExcludeEachOther: in whatever order programs of two versions come, and whoever makes the lock table, they sell
// each piece once: also while the procedures of the earlier version are dropped, and afterwards.
func TestVersionsExcludeEachOther(t *testing.T) {
	for _, first := range []string{"old", "new"} {
		t.Run(first+" first", func(t *testing.T) {
			dbtest.OnServers(t, newShop, func(t *testing.T, s *shop) {
				programs := make(map[string]*seller)
				come := func(version string) {
					programs[version] = s.start(t, version)
					programs[version].must("row 1")
				}
				come(first)
				if os.Getenv(oldVariable) == "" && first == "old" {
					s.makeProcedures()
				}
				come(map[string]string{"old": "new", "new": "old"}[first])
				s.wantProcedures(!s.MariaDB() && (first == "old" || os.Getenv(oldVariable) != ""))
				s.sellSideBySide(programs)

				dropped := make(chan error, 1)
				go func() { dropped <- s.dropProcedures() }()
				s.sellSideBySide(programs)
				dbtest.OK(t, <-dropped)
				s.wantProcedures(false)
				s.sellSideBySide(programs)

				programs["old"].end()
				come("old") // which may make them again
				s.sellSideBySide(programs)
			})
		})
	}
}

// shop is the database of one test, with a stock.
type shop struct {
	*dbtest.Database
	plain *sql.DB
}

func newShop(d *dbtest.Database) *shop {
	d.T.Helper()
	s := &shop{d, d.Open("mysql")}
	dbtest.Exec(d.T, s.plain, "CREATE TABLE stock (n INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(d.T, s.plain, "INSERT INTO stock VALUES (0)")
	return s
}

// sellSideBySide has both programs sell, one round after the other, and counts.
func (s *shop) sellSideBySide(programs map[string]*seller) {
	s.T.Helper()
	each := dbtest.Long(12, 120)
	for _, round := range rounds {
		dbtest.Exec(s.T, s.plain, "UPDATE stock SET n = ?", 2*each)
		programs["old"].tell(fmt.Sprint(round[0], " ", each))
		programs["new"].tell(fmt.Sprint(round[1], " ", each))
		for version, p := range programs {
			if answer := p.answer(); answer != "" {
				s.T.Errorf("old %s beside new %s: the %s one says %s", round[0], round[1], version, answer)
			}
		}
		var left int
		dbtest.OK(s.T, s.plain.QueryRow("SELECT n FROM stock").Scan(&left))
		if left != 0 {
			s.T.Errorf("old %s beside new %s: left are %d pieces of %d", round[0], round[1], left, 2*each)
		}
	}
}

// makeProcedures makes the procedures of an earlier version as that does. MariaDB had none.
func (s *shop) makeProcedures() {
	s.T.Helper()
	if s.MariaDB() {
		return
	}
	for text := range strings.SplitSeq(oldProcedures, "\nDELIMITER //\n") {
		text, _, _ = strings.Cut(text, "//\nDELIMITER ;")
		if strings.HasPrefix(text, "CREATE PROCEDURE ") {
			dbtest.Exec(s.T, s.plain, text)
		}
	}
}

func (s *shop) wantProcedures(some bool) {
	s.T.Helper()
	var n int
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = DATABASE()").Scan(&n))
	if n > 0 != some {
		s.T.Errorf("there are %d procedures", n)
	}
}

// dropProcedures drops those of earlier versions, as "mysqllock schema apply --drop-procedures" does. While programs
// use them that may be refused.
func (s *shop) dropProcedures() error {
	i, err := inspect.New(s.plain, inspect.Options{})
	if err != nil {
		return err
	}
	for range 100 {
		if _, err = i.DropProcedures(s.T.Context()); err == nil || !strings.Contains(err.Error(), "try again") {
			return err
		}
	}
	return err
}

// seller is a program that sells.
type seller struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
	over bool
}

// start starts a program of a version: "old" or "new".
func (s *shop) start(t testing.TB, version string) *seller {
	t.Helper()
	path := os.Getenv(oldVariable)
	if version == "new" || path == "" {
		var err error
		path, err = os.Executable()
		dbtest.OK(t, err)
	}
	p := &seller{t: t, cmd: exec.Command(path)}
	p.cmd.Env = append(os.Environ(), sellerVariable+"="+s.DSN("lockWait=2m", "lockOwner="+version))
	p.cmd.Stderr = os.Stderr
	in, err := p.cmd.StdinPipe()
	dbtest.OK(t, err)
	out, err := p.cmd.StdoutPipe()
	dbtest.OK(t, err)
	p.in, p.out = in, bufio.NewScanner(out)
	dbtest.OK(t, p.cmd.Start())
	t.Cleanup(p.end)
	return p
}

// tell has it sell, as runSeller says.
func (s *seller) tell(what string) {
	s.t.Helper()
	_, err := fmt.Fprintln(s.in, what)
	dbtest.OK(s.t, err)
}

func (s *seller) answer() string {
	s.t.Helper()
	if !s.out.Scan() {
		s.t.Fatalf("the program has ended: %v", s.out.Err())
	}
	return s.out.Text()
}

func (s *seller) must(what string) {
	s.t.Helper()
	if s.tell(what); s.answer() != "" {
		s.t.Fatalf("%s: %s", what, s.out.Text())
	}
}

// end has it end.
func (s *seller) end() {
	if s.over {
		return
	}
	s.over = true
	_ = s.in.Close()
	if err := s.cmd.Wait(); err != nil {
		s.t.Errorf("a program has ended with %v", err)
	}
}
