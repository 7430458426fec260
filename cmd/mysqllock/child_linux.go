package main

import "syscall"

// diesWithUs has the system kill the command when we end, at once and even if
// the guard was killed with us. It does not hold for what gains privileges (sudo).
func diesWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
