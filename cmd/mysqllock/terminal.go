//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// terminal is the one that we were started from. Its keys, such as Ctrl-C, and
// the right to read it, are for one process group: ours, or the command's while we
// have lent it. The methods do nothing where it is nil.
type terminal struct {
	file  *os.File
	group int // ours
}

func openTerminal() *terminal {
	file, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return &terminal{file, syscall.Getpgrp()}
}

func (t *terminal) fd() int { return int(t.file.Fd()) }

// has reports whether the group has the terminal.
func (t *terminal) has(group int) bool {
	if t == nil {
		return false
	}
	now, err := unix.IoctlGetInt(t.fd(), unix.TIOCGPGRP)
	return err == nil && now == group
}

func (t *terminal) ours() bool { return t != nil && t.has(t.group) }

// lend has the command begin with the terminal. In a pipeline it waits until the
// command asks, being stopped as it reads: others of our group may need it, a
// pager behind us for one.
func (t *terminal) lend(attr *syscall.SysProcAttr) {
	if t.ours() && term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd())) {
		attr.Foreground, attr.Ctty = true, t.fd()
	}
}

// give passes the terminal on. An error means that it is gone.
func (t *terminal) give(group int) {
	if t != nil {
		_ = unix.IoctlSetPointerInt(t.fd(), unix.TIOCSPGRP, group)
	}
}

// takeBack takes the terminal from the group, if that has it.
func (t *terminal) takeBack(group int) {
	if t.has(group) {
		t.give(t.group)
	}
}

// echo does to a process, or to our group if that is 0, what a key has done. Of
// Ctrl-C we die, too: bash does not end a loop for one that exits.
func (t *terminal) echo(to int, s syscall.Signal) {
	switch {
	case t == nil:
	case s == syscall.SIGINT:
		signal.Reset(s)
		_ = syscall.Kill(to, s)
		time.Sleep(time.Second) // goes by only where it is ignored
	case s == syscall.SIGQUIT:
		signal.Ignore(s) // else Go's runtime would tell of it at length
		_ = syscall.Kill(to, s)
	}
}
