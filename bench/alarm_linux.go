package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// newAlarm returns a time.Sleep that is exact to some ten microseconds: on Linux
// that of Go rounds up to milliseconds where nothing else is to be done.
func newAlarm() (wait func(time.Duration), stop func() error, err error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, nil, os.NewSyscallError("timerfd_create", err)
	}
	timer := os.NewFile(uintptr(fd), "timer")
	return func(d time.Duration) {
		if d <= 0 {
			return
		}
		spec := unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}
		var expirations [8]byte
		err := unix.TimerfdSettime(fd, 0, &spec, nil)
		if err == nil {
			_, err = timer.Read(expirations[:])
		}
		if err != nil { // cannot be
			time.Sleep(d)
		}
	}, timer.Close, nil
}
