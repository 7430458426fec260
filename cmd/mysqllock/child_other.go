//go:build unix && !linux

package main

import "syscall"

// diesWithUs has nothing to set here: the guard kills the command when we end.
func diesWithUs(*syscall.SysProcAttr) {}

// strays finds nobody here: what leaves the group is spared.
func (*kin) strays(syscall.Signal) bool { return false }
