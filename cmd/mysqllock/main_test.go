package main

import (
	"bufio"
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run this program as users do, as a process, against every server that
// is found on this machine.

// asMain has the test's program be the program that is tested.
const asMain = "MYSQLLOCK_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
	}
	sceneJobs().Run()
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// onServers runs a test on a server of each flavour, in a database of its own, beside others.
// MariaDB shows all it can.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	aloneOnServers(t, test)
}

// onOneServer is onServers for what this program does by itself, whatever the server.
func onOneServer(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	bins := tempserver.EachFlavour(tempserver.Require(t))
	on(t, bins[len(bins)-1:], test)
}

// aloneOnServers runs it while no other test runs.
func aloneOnServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	on(t, tempserver.EachFlavour(tempserver.Require(t)), test)
}

func on(t *testing.T, bins []tempserver.Binary, test func(t *testing.T, s *scratch)) {
	t.Helper()
	for _, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(dbtest.New(t, bin, tempserver.Share(t, bin, showing(bin)...))))
		})
	}
}

func showing(bin tempserver.Binary) []string {
	if bin.Flavour == tempserver.MariaDB {
		return []string{"--performance-schema=ON", "--plugin-load-add=metadata_lock_info.so"}
	}
	return nil
}

// scratch is a database on a server, and a folder.
type scratch struct {
	*dbtest.Database
	root *sql.DB // with the driver "mysql"
	dir  string
}

func newScratch(d *dbtest.Database) *scratch {
	return &scratch{Database: d, root: d.Open("mysql"), dir: d.T.TempDir()}
}

// offline is one without a server.
func offline(t *testing.T) *scratch {
	return &scratch{Database: dbtest.At(t, "tcp(127.0.0.1:1)/"), dir: t.TempDir()}
}

// process opens a handle with locks, as a process of that name has it.
func (s *scratch) process(owner string) *sql.DB {
	s.T.Helper()
	return s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Owner: owner, TTL: 10 * time.Minute}))
}

// file is the path of a file in the test's folder.
func (s *scratch) file(name string) string { return filepath.Join(s.dir, name) }

// command is this program with these arguments.
func (s *scratch) command(args ...string) *command {
	c := &command{t: s.T, Cmd: exec.Command(os.Args[0], args...), done: make(chan struct{})}
	c.Env = append(os.Environ(), asMain+"=1", dsnVariable+"="+s.DSN(), "HOME="+s.dir, "DIR="+s.dir)
	c.Dir, c.WaitDelay = s.dir, patience // whatever still has its output open
	c.Cmd.Stdout, c.Cmd.Stderr = &c.out, &c.errs
	return c
}

// command is a process of this program.
type command struct {
	t testing.TB
	*exec.Cmd
	out, errs bytes.Buffer // to be read when it has ended
	done      chan struct{}
}

// start starts it; at the end of the test it is gone.
func (c *command) start() *command {
	c.t.Helper()
	dbtest.OK(c.t, c.Start())
	go func() {
		_ = c.Wait() // code tells
		close(c.done)
	}()
	c.t.Cleanup(func() {
		_ = c.Process.Kill()
		<-c.done
	})
	return c
}

// code waits for its end and tells its exit status.
func (c *command) code() int {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(patience):
		_ = c.Process.Signal(syscall.SIGABRT)
		<-c.done
		c.t.Fatalf("%v has not ended within %v; it does %s", c.Args[1:], patience, c.errs.String())
	}
	if s, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() { // as shells have it
		return exitSignal + int(s.Signal())
	}
	return c.ProcessState.ExitCode()
}

// must waits for its end, which must be that, and returns what it has written.
func (c *command) must(code int) string {
	c.t.Helper()
	if got := c.code(); got != code {
		c.t.Fatalf("%v ended with %d, want %d; it says: %s%s", c.Args[1:], got, code, c.out.String(), c.errs.String())
	}
	return c.out.String()
}

// fails is must for a failure whose one line holds that text.
func (c *command) fails(code int, text string) {
	c.t.Helper()
	c.must(code)
	line := c.errs.String()
	if !strings.HasPrefix(line, "mysqllock: ") || strings.Count(line, "\n") != 1 || !strings.Contains(line, text) {
		c.t.Errorf("%v says %q, want one line with %q", c.Args[1:], line, text)
	}
}

// refused is fails for a command that finds a lock held. It is run again if a busy server
// did not say in time by whom.
func (s *scratch) refused(code int, text string, args ...string) {
	s.T.Helper()
	var c *command
	for end := time.Now().Add(patience); c == nil || c.code() != 0 && !strings.Contains(c.errs.String(), text) && time.Now().Before(end); {
		c = s.command(args...).start()
	}
	c.fails(code, text)
}

// read reads what the command wrote as JSON.
func (c *command) read(into any) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.start().must(0)), into); err != nil {
		c.t.Fatalf("%v: %v in %s", c.Args[1:], err, c.out.String())
	}
}

// patience is how long a test waits for what should take moments.
const patience = 60 * time.Second

// lines are those of a file, none where it is not there.
func lines(t testing.TB, path string) (out []string) {
	t.Helper()
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	dbtest.OK(t, err)
	defer file.Close()
	for in := bufio.NewScanner(file); in.Scan(); {
		out = append(out, in.Text())
	}
	return out
}

// alive reports whether there is a process of that number, other than a zombie.
func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err == nil {
		_, after, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
		return !strings.HasPrefix(after, "Z")
	}
	if _, err := os.Stat("/proc/self"); err == nil {
		return false
	}
	var n int
	_, _ = fmt.Sscan(pid, &n)
	return n > 0 && syscall.Kill(n, 0) == nil
}
