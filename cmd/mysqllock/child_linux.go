package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// diesWithUs has the system kill the command when we end, at once and even if
// the guard was killed with us. It does not hold for what gains privileges (sudo).
func diesWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// strays signals the kin that have left the group and not the session, as what
// timeout(1) runs and the jobs of an interactive shell have: by the mark that they
// got from their parent. It reports whether there are any; 0 only looks.
func (k *kin) strays(s syscall.Signal) (found bool) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !k.left(pid) {
			continue
		}
		p, err := os.FindProcess(pid) // a handle: the number may be another's by now
		if err != nil {
			continue
		}
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(append([]byte{0}, environment...), []byte("\x00"+k.mark+"\x00")) {
			found = p.Signal(s) == nil || found
		}
		_ = p.Release()
	}
	return found
}

// left reports a process of the session that is not of the group.
func (k *kin) left(pid int) bool {
	session, err := unix.Getsid(pid)
	if err != nil || session != k.session {
		return false
	}
	group, err := unix.Getpgid(pid)
	return err == nil && group != k.group
}
