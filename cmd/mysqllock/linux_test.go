//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// shell is an interactive bash at a terminal of its own, as users have it.
type shell struct {
	t        *testing.T
	s        *scratch
	terminal *os.File // the end at which the user is
	cmd      *exec.Cmd

	mu   sync.Mutex
	seen bytes.Buffer // since the last expect
}

func newShell(t *testing.T, s *scratch) *shell {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	dbtest.OK(t, err)
	terminal := os.NewFile(uintptr(fd), "terminal")
	dbtest.OK(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	dbtest.OK(t, err)
	inner, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	dbtest.OK(t, err)
	defer inner.Close()
	sh := &shell{t: t, s: s, terminal: terminal, cmd: exec.Command("bash", "--norc", "--noprofile", "--noediting", "-i")}
	sh.cmd.Env = append(s.command().Env, "PS1=$ ", "TERM=dumb", "M="+os.Args[0])
	sh.cmd.Dir = s.dir
	sh.cmd.Stdin, sh.cmd.Stdout, sh.cmd.Stderr = inner, inner, inner
	sh.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	dbtest.OK(t, sh.cmd.Start())
	var reading sync.WaitGroup
	reading.Go(func() {
		b := make([]byte, 4096)
		for {
			n, err := terminal.Read(b)
			sh.mu.Lock()
			sh.seen.Write(b[:n])
			sh.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_ = sh.cmd.Process.Kill()
		_ = sh.cmd.Wait()
		terminal.Close()
		reading.Wait()
		if t.Failed() {
			t.Logf("last the terminal shows %q", sh.seen.String())
		}
	})
	return sh
}

// keys presses keys.
func (sh *shell) keys(s string) {
	sh.t.Helper()
	_, err := sh.terminal.WriteString(s)
	dbtest.OK(sh.t, err)
}

const ctrlC, ctrlD, ctrlZ = "\x03", "\x04", "\x1a"

// expect waits until the terminal shows text, and returns what it has shown before.
func (sh *shell) expect(text string) (before string) {
	sh.t.Helper()
	dbtest.Soon(sh.t, fmt.Sprintf("the terminal shows %q", text), func() bool {
		sh.mu.Lock()
		defer sh.mu.Unlock()
		at := bytes.Index(sh.seen.Bytes(), []byte(text))
		if at >= 0 {
			before = string(sh.seen.Next(at))
			sh.seen.Next(len(text))
		}
		return at >= 0
	})
	return before
}

// TestACommandHasTheTerminalAsWithoutALock: Ctrl-C ends it, Ctrl-Z and fg stop and continue it, it
// can read and set up the terminal, in a pipeline as well, and the terminal is the shell's
// afterwards.
func TestACommandHasTheTerminalAsWithoutALock(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		sh := newShell(t, s)
		sh.expect("$ ")

		// It reads and writes.
		sh.keys("$M run -k k -- sh -c 'read x; echo got:$x'; echo st:$?\n")
		dbtest.Soon(t, "it holds the lock", func() bool { return s.holds("k") })
		sh.keys("this\n")
		sh.expect("got:this")
		sh.expect("st:0")
		sh.expect("$ ") // keys that come before it are shown before it

		// It has the terminal from the beginning, and a script has it back afterwards.
		sh.keys("sh -c '$M run -k k -- sh -c \"set -- \\$(cat /proc/\\$\\$/stat); echo group \\$5 of \\$8.\"; read x; echo got:$x'\n")
		sh.expect("\r\ngroup ")
		if group, front, _ := strings.Cut(sh.expect("."), " of "); group != front {
			t.Errorf("group %s has the terminal, not the command's, %s", front, group)
		}
		sh.keys("mine\n")
		sh.expect("got:mine")

		// Ctrl-C is for the command alone.
		sh.keys("$M run -k k -- sh -c 'trap \"echo tr\"apped INT; echo rea\"\"dy; read x; echo got:$x'; echo st:$?\n")
		sh.expect("ready")
		sh.keys(ctrlC)
		sh.expect("trapped")
		sh.keys("\n") // where the signal came before the read
		sh.expect("st:")

		// Ctrl-Z stops it, with the lock, and fg goes on.
		sh.keys("$M run -k k --lease 10m -- cat; echo st:$?\n")
		dbtest.Soon(t, "it holds the lock", func() bool { return s.holds("k") })
		sh.keys("one\n")
		sh.expect("one\r\none")
		sh.keys(ctrlZ)
		sh.expect("Stopped")
		sh.keys("echo sh\"\"ell\n")
		sh.expect("shell")
		if !s.holds("k") {
			t.Error("the lock is not held any more")
		}
		sh.keys("fg\n")
		sh.expect("-- cat")
		sh.keys("two\n")
		sh.expect("two\r\ntwo")
		sh.keys(ctrlD)

		// Whoever has lost the lock while it was stopped does not go on.
		sh.keys("$M run -k k --lease 10m -- sh -c 'trap \"echo went o\"n CONT TERM; echo rea\"\"dy; while :; do read x; done'\n")
		sh.expect("ready")
		sh.keys(ctrlZ)
		sh.expect("Stopped")
		s.command("release", "k", "--force", "--yes").start().must(0)
		sh.keys("fg; echo st:$?\n")
		if between := sh.expect("lost"); strings.Contains(between, "went on") {
			t.Errorf("it went on: %q", between)
		}
		sh.expect("st:123")

		// Nor does what does not listen to Ctrl-Z, or has left the group, go on while it
		// is stopped; with fg it does.
		for _, who := range []string{"trap \"\" TSTP; exec sleep 1001", "exec timeout 1001 sleep 1001"} {
			sh.keys("$M run -k k --lease 10m -- sh -c 'sh -c \"" + strings.ReplaceAll(who, `"`, `\"`) + "\" & echo $! >deaf; echo rea\"\"dy; read x'\n")
			sh.expect("ready")
			pid := lines(t, s.file("deaf"))[0]
			dbtest.Soon(t, "it runs", func() bool {
				return strings.Contains(commandLine(pid), "1001") && !strings.HasPrefix(commandLine(pid), "sh")
			})
			sh.keys(ctrlZ)
			sh.expect("Stopped")
			dbtest.Soon(t, who+" is stopped", func() bool { return state(pid) == "T" })
			sh.keys("fg\n")
			dbtest.Soon(t, "it goes on", func() bool { return state(pid) == "S" })
			sh.keys(ctrlC) // which also drops what was typed before
			dbtest.Soon(t, "the lock is free", func() bool { return !s.holds("k") })
			n, err := strconv.Atoi(pid)
			dbtest.OK(t, err)
			dbtest.OK(t, syscall.Kill(n, syscall.SIGTERM)) // in the background it is spared by Ctrl-C
		}

		// The keys are for a script around it, too.
		dbtest.OK(t, os.WriteFile(s.file("script"), []byte("for n in 1 2 3; do echo once; $M run -k k -- sh -c 'echo $$ >front; exec sleep 1000'; done\n"), 0o600))
		sh.keys("bash script\n")
		sh.expect("once")
		dbtest.Soon(t, "the command runs", func() bool { return len(lines(t, s.file("front"))) == 1 })
		front := lines(t, s.file("front"))[0]
		sh.keys(ctrlZ)
		sh.expect("Stopped")
		sh.keys("fg\n")
		dbtest.Soon(t, "it goes on", func() bool { return state(front) == "S" })
		sh.keys(ctrlC)
		dbtest.Soon(t, "the lock is free", func() bool { return !s.holds("k") })
		sh.keys("echo a\"\"fter\n")
		if between := sh.expect("after"); strings.Contains(between, "once") {
			t.Errorf("Ctrl-C has not ended the script: %q", between)
		}

		// In a pipeline the pager keeps the terminal, and who asks for it gets it.
		sh.keys("$M run -k k -- sh -c 'read x; echo got:$x' | cat; echo st:$?\n")
		dbtest.Soon(t, "it holds the lock", func() bool { return s.holds("k") })
		sh.keys("that\n")
		sh.expect("got:that")
		sh.expect("st:0")

		// Who waits learns for whom.
		hold, err := mysqllock.Acquire(t.Context(), s.process("the holder"), "k", lockctx.Lease(10*time.Minute))
		dbtest.OK(t, err)
		sh.keys("$M run -k k -w 10m true; echo st:$?\n")
		sh.expect(`waiting for "k", held by the holder`)
		sh.keys(ctrlC)
		dbtest.Soon(t, "nobody waits", func() bool { return s.waiters("k") == 0 })

		// Before a lock is broken somebody is asked.
		for _, answer := range [][2]string{{"n", "nothing was done"}, {"", "nothing was done"}, {"y", "lease on k ended"}} {
			sh.keys("$M release k --force\n")
			if before := sh.expect("[y/N] "); !strings.Contains(before, "the holder") {
				t.Errorf("it asks without saying who has it: %q", before)
			}
			sh.keys(answer[0] + "\n")
			sh.expect(answer[1])
		}
		if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("the holder gives it back with %v", err)
		}

		// The terminal is the shell's.
		sh.keys("echo en\"\"d\n")
		sh.expect("end")
	})
}

// state is that of a process, as a letter; T is stopped.
func state(pid string) string {
	stat, _ := os.ReadFile("/proc/" + pid + "/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) == 0 {
		return ""
	}
	return fields[0]
}

func commandLine(pid string) string {
	line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
	return string(line)
}

// holds reports whether somebody holds key.
func (s *scratch) holds(key string) bool {
	var snap jsonSnapshot
	s.command("show", key, "--json").read(&snap)
	return len(snap.Locks) == 1 && len(snap.Locks[0].Holders) == 1
}

// TestTheSystemKillsTheCommandWithoutItsGuard: where the guard was killed, too, the command itself
// still ends.
func TestTheSystemKillsTheCommandWithoutItsGuard(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		c := s.run("k", family, "--lease", "1m").start()
		pids := s.family()
		for _, child := range children(t, c.Process.Pid) {
			if strconv.Itoa(child) != pids[0] {
				dbtest.OK(t, syscall.Kill(child, syscall.SIGKILL))
			}
		}
		dbtest.OK(t, c.Process.Kill())
		dbtest.Soon(t, "the command is gone", func() bool { return !alive(pids[0]) })
		n, err := strconv.Atoi(pids[1])
		dbtest.OK(t, err)
		_ = syscall.Kill(n, syscall.SIGKILL) // what only the guard would have found
	})
}

// truant is family with a child that leaves the group.
const truant = "exec 2>/dev/null; timeout 1000 sh -c 'trap \"\" TERM; echo $$ >truant; while :; do sleep 0.05; done' & until [ -s truant ]; do sleep 0.05; done; echo $$ $(cat truant) >pids; wait"

// TestWhatLeftTheProcessGroupEndsWithIt: when the lock is lost and when run is killed.
func TestWhatLeftTheProcessGroupEndsWithIt(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		for _, end := range []string{"taken", "killed"} {
			c := s.run("k", truant, "--lease", "18s", "--wait", "5m").start()
			pids := s.family()
			t.Cleanup(func() {
				if n, err := strconv.Atoi(pids[1]); err == nil && alive(pids[1]) {
					_ = syscall.Kill(n, syscall.SIGKILL)
				}
			})
			if end == "taken" {
				s.command("release", "k", "--force", "--yes").start().must(0)
				c.fails(exitLost, "lost")
			} else {
				dbtest.OK(t, c.Process.Kill())
				dbtest.Soon(t, "they are gone", func() bool { return !alive(pids[0]) && !alive(pids[1]) })
			}
			for _, pid := range pids {
				if alive(pid) {
					t.Errorf("%s: process %s goes on", end, pid)
				}
			}
			dbtest.OK(t, os.Remove(s.file("truant")))
			dbtest.OK(t, os.Remove(s.file("pids")))
		}
	})
}

func children(t *testing.T, pid int) (out []int) {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	dbtest.OK(t, err)
	for _, task := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		dbtest.OK(t, err)
		for _, field := range strings.Fields(string(b)) {
			n, err := strconv.Atoi(field)
			dbtest.OK(t, err)
			out = append(out, n)
		}
	}
	return out
}
