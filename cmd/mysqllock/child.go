//go:build unix

package main

import (
	"bufio"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// kin is the command's process group, and what has left that with the command's
// mark in its environment.
type kin struct {
	group   int
	session int    // ours, too
	mark    string // name=value
}

// signal signals all of them, and reports whether there was anybody, other than
// processes of other users.
func (k *kin) signal(s syscall.Signal) (found bool) {
	found = syscall.Kill(-k.group, s) == nil
	return k.strays(s) || found
}

// kill kills all of them: again and again, since one that is forking gets away.
func (k *kin) kill() {
	for end := time.Now().Add(time.Second); k.signal(syscall.SIGKILL) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

// child is the command that runs under the lock, in a process group of its own.
type child struct {
	kin      kin                     // the group's number is the command's
	ended    chan syscall.WaitStatus // how it has ended
	stopped  chan syscall.Signal     // by which it was stopped, to be continued
	terminal *terminal               // nil where there is none
	lent     bool                    // the command began with the terminal
	asked    bool                    // a signal that ends was passed on
	guard    *guard
	killed   time.Time   // when stop has it killed; zero where it was not called
	killer   *time.Timer // does that
}

// markVariable has another value in the environment of each command.
const markVariable = "MYSQLLOCK_RUN"

// start starts the command.
func start(path string, args, env []string) (*child, error) {
	g, err := startGuard()
	if err != nil {
		return nil, fmt.Errorf("starting its guard: %w", err)
	}
	c := &child{ended: make(chan syscall.WaitStatus, 1), stopped: make(chan syscall.Signal), terminal: openTerminal(), guard: g}
	c.kin.mark = markVariable + "=" + rand.Text()
	if c.kin.session, err = unix.Getsid(0); err != nil {
		g.dismiss()
		return nil, err
	}
	cmd := &exec.Cmd{Path: path, Args: args, Env: append(env, c.kin.mark), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	diesWithUs(cmd.SysProcAttr)
	c.terminal.lend(cmd.SysProcAttr)
	c.lent = cmd.SysProcAttr.Foreground
	started := make(chan error)
	go func() {
		// What the system counts as the parent is the thread, so it stays until the end.
		runtime.LockOSThread()
		err := cmd.Start()
		if err == nil {
			c.kin.group = cmd.Process.Pid
			_ = cmd.Process.Release() // watch waits for it
		}
		started <- err
		if err == nil {
			c.watch()
		}
	}()
	err = <-started
	if c.terminal != nil {
		signal.Ignore(syscall.SIGTTOU) // or we could not take the terminal back
	}
	if err != nil {
		if c.lent {
			c.terminal.give(c.terminal.group)
		}
		g.dismiss()
		return nil, err
	}
	g.mind(&c.kin)
	return c, nil
}

// watch waits for the command's end.
func (c *child) watch() {
	for {
		var s syscall.WaitStatus
		_, err := syscall.Wait4(c.kin.group, &s, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // cannot be: it is ours, and nobody else waits for it
			c.ended <- syscall.WaitStatus(exitCannotLock << 8)
			return
		case s.Stopped():
			c.stopped <- s.StopSignal()
		default:
			c.ended <- s
			return
		}
	}
}

// pass passes on a signal that was sent to us.
func (c *child) pass(s syscall.Signal) {
	switch s {
	case syscall.SIGUSR1, syscall.SIGUSR2: // would end most of those who do not expect them
		_ = syscall.Kill(c.kin.group, s)
		return
	case syscall.SIGTSTP, syscall.SIGCONT:
		// The CONT that has continued us may come when the lock is known to be lost.
		if !c.killed.IsZero() {
			return
		}
	default:
		c.asked = true
	}
	_ = syscall.Kill(-c.kin.group, s)
}

// stop ends the command: at the latest, by force, after grace.
func (c *child) stop(grace time.Duration) {
	if grace == 0 {
		c.kill()
		return
	}
	c.killed = time.Now().Add(grace)
	c.kin.signal(syscall.SIGTERM)
	c.kin.signal(syscall.SIGCONT)
	c.killer = time.AfterFunc(grace, c.kin.kill)
}

// kill ends the command at once.
func (c *child) kill() {
	if c.killer != nil {
		c.killer.Stop()
	}
	c.killed = time.Now()
	c.killer = time.AfterFunc(0, c.kin.kill)
}

// suspend deals with a command that was stopped by s. It reports whether we were
// stopped as well, so that the shell sees it, and have been continued.
func (c *child) suspend(s syscall.Signal, signals <-chan os.Signal) bool {
	if c.terminal == nil { // the process that has stopped the command will continue it
		return false
	}
	if (s == syscall.SIGTTIN || s == syscall.SIGTTOU) && c.terminal.ours() { // it wants the terminal
		c.terminal.give(c.kin.group)
		c.kin.signal(syscall.SIGCONT)
		return false
	}
	c.terminal.takeBack(c.kin.group)
	c.kin.signal(syscall.SIGSTOP)          // nobody goes on without the lock, whatever TSTP is to him
	if c.terminal.group == c.kin.session { // no shell is there that would continue us, so the key does not stop anybody
		return true
	}
	_ = syscall.Kill(0, syscall.SIGSTOP)      // with the script that we are in, as the key does
	for again := time.After(time.Second); ; { // the time is for where CONT is ignored
		select {
		case s := <-signals:
			if s != syscall.SIGCONT {
				c.pass(s.(syscall.Signal))
				continue
			}
		case <-again:
		}
		return true
	}
}

// resume continues the command after suspend.
func (c *child) resume() {
	if c.terminal.ours() {
		c.terminal.give(c.kin.group)
	}
	c.kin.signal(syscall.SIGCONT)
}

// bury does what is left when the command has ended: where it was stopped, the
// others have the same time as it had.
func (c *child) bury() {
	if c.killer != nil {
		for time.Now().Before(c.killed) && c.kin.signal(0) {
			time.Sleep(10 * time.Millisecond)
		}
		c.killer.Stop()
		c.kin.kill()
	}
	c.terminal.takeBack(c.kin.group)
	c.guard.dismiss()
}

// echo lets a script around us know of a key that has ended the command: its
// shell has not seen it where the command had the terminal.
func (c *child) echo(s syscall.Signal) {
	switch {
	case c.asked: // the key was for our group, too
		c.terminal.echo(os.Getpid(), s)
	case c.lent:
		c.terminal.echo(0, s)
	}
}

// guard is a process of ours that kills the command with its kin when we have ended
// without having dismissed it, that is, when we were killed: it has the other end
// of a pipe that the system then closes. Linux can tell a child of its parent's
// death, but not a child's children.
type guard struct {
	cmd  *exec.Cmd
	pipe io.WriteCloser
}

const asGuard = "guard"

func startGuard() (*guard, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	g := &guard{cmd: exec.Command(self, asGuard)}
	g.cmd.Dir = "/"
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what is sent to our group, or from the terminal, spares it
	if g.pipe, err = g.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return g, g.cmd.Start()
}

// mind tells the guard whom it is about.
func (g *guard) mind(k *kin) { _, _ = fmt.Fprintln(g.pipe, k.group, k.session, k.mark) }

func (g *guard) dismiss() {
	_ = g.cmd.Process.Kill()
	_ = g.cmd.Wait() // before the pipe is closed, which it would take for our end
	_ = g.pipe.Close()
}

func newGuard() *cobra.Command {
	return &cobra.Command{
		Use:    asGuard,
		Short:  "Kill the processes that are named by the line that is read, at the end of what is read",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			in := bufio.NewReader(os.Stdin)
			line, err := in.ReadString('\n')
			if err != nil {
				return nil // it was never started
			}
			var k kin
			if _, err := fmt.Sscan(line, &k.group, &k.session, &k.mark); err != nil || k.group < 2 || !strings.HasPrefix(k.mark, markVariable+"=") {
				return fmt.Errorf("%q names no processes", line)
			}
			_, _ = io.Copy(io.Discard, in)
			k.kill()
			return nil
		},
	}
}

func unixCommands(at *target) []*cobra.Command {
	return []*cobra.Command{newRun(at), newHold(at), newDemo(at), newGuard()}
}
