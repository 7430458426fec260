//go:build unix && !linux

package main

import "syscall"

// diesWithUs has nothing to set here: the guard kills the command when we end.
func diesWithUs(*syscall.SysProcAttr) {}
