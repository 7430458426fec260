//go:build !linux

package main

import "time"

func newAlarm() (wait func(time.Duration), stop func() error, err error) {
	return time.Sleep, func() error { return nil }, nil
}
