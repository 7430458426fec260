//go:build unix

package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// child is the command that runs under the lock, in a process group of its own.
type child struct {
	pid      int                 // and that of the group
	ended    chan int            // its exit status
	stopped  chan syscall.Signal // by which it was stopped, to be continued
	terminal *terminal           // nil where there is none
	guard    *guard
	killed   time.Time   // when stop has it killed; zero where it was not called
	killer   *time.Timer // does that
}

// start starts the command.
func start(path string, args, env []string) (*child, error) {
	g, err := startGuard()
	if err != nil {
		return nil, fmt.Errorf("starting its guard: %w", err)
	}
	c := &child{ended: make(chan int, 1), stopped: make(chan syscall.Signal), terminal: openTerminal(), guard: g}
	cmd := &exec.Cmd{Path: path, Args: args, Env: env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	diesWithUs(cmd.SysProcAttr)
	c.terminal.lend(cmd.SysProcAttr)
	started := make(chan error)
	go func() {
		// What the system counts as the parent is the thread, so it stays until the end.
		runtime.LockOSThread()
		err := cmd.Start()
		if err == nil {
			c.pid = cmd.Process.Pid
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
		if cmd.SysProcAttr.Foreground {
			c.terminal.give(c.terminal.group)
		}
		g.dismiss()
		return nil, err
	}
	g.mind(c.pid)
	return c, nil
}

// watch waits for the command's end.
func (c *child) watch() {
	for {
		var s syscall.WaitStatus
		_, err := syscall.Wait4(c.pid, &s, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // cannot be: it is ours, and nobody else waits for it
			c.ended <- exitCannotLock
			return
		case s.Stopped():
			c.stopped <- s.StopSignal()
		case s.Signaled():
			c.ended <- exitSignal + int(s.Signal())
			return
		case s.Exited():
			c.ended <- s.ExitStatus()
			return
		}
	}
}

// signal signals the group. An error means that there is nobody left, or only
// processes of other users.
func (c *child) signal(s syscall.Signal) { _ = syscall.Kill(-c.pid, s) }

// pass passes on a signal that was sent to us.
func (c *child) pass(s syscall.Signal) {
	if s == syscall.SIGUSR1 || s == syscall.SIGUSR2 { // would end most of those who do not expect them
		_ = syscall.Kill(c.pid, s)
		return
	}
	c.signal(s)
}

// stop ends the command: at the latest, by force, after grace.
func (c *child) stop(grace time.Duration) {
	c.killed = time.Now().Add(grace)
	c.signal(syscall.SIGTERM)
	c.signal(syscall.SIGCONT)
	c.killer = time.AfterFunc(grace, func() { c.signal(syscall.SIGKILL) })
}

// suspend deals with a command that was stopped by s. It reports whether we were
// stopped as well, so that the shell sees it, and have been continued.
func (c *child) suspend(s syscall.Signal, signals <-chan os.Signal) bool {
	if c.terminal == nil { // whoever has stopped it will continue it
		return false
	}
	if (s == syscall.SIGTTIN || s == syscall.SIGTTOU) && c.terminal.ours() { // it wants the terminal
		c.terminal.give(c.pid)
		c.signal(syscall.SIGCONT)
		return false
	}
	c.terminal.takeBack(c.pid)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	for s := range signals {
		if s == syscall.SIGCONT {
			break
		}
		c.pass(s.(syscall.Signal))
	}
	return true
}

// resume continues the command after suspend.
func (c *child) resume() {
	if c.terminal.ours() {
		c.terminal.give(c.pid)
	}
	c.signal(syscall.SIGCONT)
}

// bury does what is left when the command has ended: where it was stopped, the
// others of its group have the same time as it had.
func (c *child) bury() {
	if c.killer != nil {
		for time.Now().Before(c.killed) && syscall.Kill(-c.pid, 0) == nil {
			time.Sleep(10 * time.Millisecond)
		}
		c.killer.Stop()
		c.signal(syscall.SIGKILL)
	}
	c.terminal.takeBack(c.pid)
	c.guard.dismiss()
}

// guard is a process of ours that kills the command's group when we have ended
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

// mind tells the guard which group it is about.
func (g *guard) mind(group int) { _, _ = fmt.Fprintln(g.pipe, group) }

func (g *guard) dismiss() {
	_ = g.cmd.Process.Kill()
	_ = g.cmd.Wait() // before the pipe is closed, which it would take for our end
	_ = g.pipe.Close()
}

func newGuard() *cobra.Command {
	return &cobra.Command{
		Use:    asGuard,
		Short:  "Kill the process group whose number is read, at the end of what is read",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			in := bufio.NewReader(os.Stdin)
			line, err := in.ReadString('\n')
			if err != nil {
				return nil // it was never started
			}
			group, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil || group < 2 {
				return fmt.Errorf("%q is no process group", line)
			}
			_, _ = io.Copy(io.Discard, in)
			return syscall.Kill(-group, syscall.SIGKILL)
		},
	}
}

func unixCommands(at *target) []*cobra.Command {
	return []*cobra.Command{newRun(at), newDemo(at), newGuard()}
}
