package dbtest

import (
	"bufio"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
)

// Child is another process of the test's own program, which reads and says lines.
type Child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out chan string

	ended chan struct{}
	err   error // of its end, once ended is closed
}

// What a child does, and where.
const (
	jobVariable = "MYSQLLOCK_TEST_CHILD"
	dsnVariable = "MYSQLLOCK_TEST_CHILD_DSN"
)

// Jobs are what the children of a test program do, by name: with a handle of the driver
// under test, and with what their parent says.
type Jobs map[string]func(db *sql.DB, in *bufio.Scanner)

// StartJob starts a child for one of the Jobs that TestMain runs, on the database that dsn
// leads to.
func StartJob(t testing.TB, job, dsn string) *Child {
	t.Helper()
	return StartChild(t, jobVariable+"="+job, dsnVariable+"="+dsn)
}

// Run does the job for which StartJob started this process, and ends the process. In any
// other process it returns.
func (j Jobs) Run() {
	name := os.Getenv(jobVariable)
	if name == "" {
		return
	}
	job, known := j[name]
	if !known {
		os.Exit(2)
	}
	db, err := sql.Open("mysqllock", os.Getenv(dsnVariable))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	job(db, bufio.NewScanner(os.Stdin))
	db.Close()
	os.Exit(0)
}

// StartChild starts the program of the test once more, with env added to the environment:
// its TestMain has to see it there, and to run something other than tests.
func StartChild(t testing.TB, env ...string) *Child {
	t.Helper()
	exe, err := os.Executable()
	OK(t, err)
	c := &Child{t: t, cmd: exec.Command(exe), out: make(chan string, 1000), ended: make(chan struct{})}
	c.cmd.Env, c.cmd.Stderr = append(os.Environ(), env...), os.Stderr
	c.in, err = c.cmd.StdinPipe()
	OK(t, err)
	out, err := c.cmd.StdoutPipe()
	OK(t, err)
	OK(t, c.cmd.Start())
	go func() {
		defer close(c.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			c.out <- lines.Text()
		}
		close(c.out)
		c.err = c.cmd.Wait()
	}()
	t.Cleanup(func() {
		c.Kill()
		_ = c.End()
	})
	return c
}

// Tell says a line to the child.
func (c *Child) Tell(line string) {
	c.t.Helper()
	_, err := io.WriteString(c.in, line+"\n")
	OK(c.t, err)
}

// Said is what the child says, line by line. It is closed when the child has ended.
func (c *Child) Said() <-chan string { return c.out }

// Line is the next line that the child says. The test fails if the child ends instead.
func (c *Child) Line() string {
	c.t.Helper()
	line, ok := <-c.out
	if !ok {
		c.t.Fatal("the child process ended")
	}
	return line
}

// Signal sends it a signal.
func (c *Child) Signal(s os.Signal) error { return c.cmd.Process.Signal(s) }

// End says nothing more to the child, waits until it has ended, and returns how.
func (c *Child) End() error {
	_ = c.in.Close()
	for range c.out { // what nobody has read
	}
	<-c.ended
	return c.err
}

// Kill ends the child at once, as SIGKILL does.
func (c *Child) Kill() { _ = c.cmd.Process.Kill() }
