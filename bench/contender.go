package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// contender is one way to lock, ours or a rival's, or one way to do something
// under a lock. The same name on several servers is one contender each.
type contender struct {
	Name   string
	Server string // where the lock is kept
	Ours   bool
	Note   string // how it is set up

	polls int  // the longest pause between two tries of a waiter, in milliseconds; 0 where it is woken
	wide  bool // each lock that is held occupies a connection
	needs []string
	open  func(ctx context.Context, at addresses, n size) (client, error)
}

func (c contender) String() string { return c.Name + ", " + c.Server }

// size is what a client must be prepared for, to have its pools warm.
type size struct {
	Workers int           // goroutines that call Lock at a time
	Locks   int           // locks held at a time
	Rush    time.Duration // for how long each caller is ready to wait; 0 is as long as it takes
}

// errGaveUp is of a caller that was not ready to wait for longer.
var errGaveUp = errors.New("gave up")

// client is a contender at work in one process.
type client interface {
	// Lock takes the lock on key and returns what gives it back. Callers at the
	// same time give different numbers for worker.
	Lock(ctx context.Context, worker int, key string) (release func() error, err error)
	Close() error
}

// contenders are all that there are.
func contenders() (all []contender) {
	for _, on := range []string{onMySQL, onMariaDB} {
		all = append(all, ours(on)...)
		all = append(all, sqlRivals(on)...)
		all = append(all, transactions(on)...)
		all = append(all, plainWork(on)...)
		all = append(all, fewConnections(on)...)
		all = append(all, hotRows(on)...)
	}
	return append(all, otherRivals()...)
}

func find(name string) (contender, error) {
	for _, c := range contenders() {
		if c.String() == name {
			return c, nil
		}
	}
	return contender{}, fmt.Errorf("no contender %q", name)
}

// available are those of the contenders whose servers run.
func available(all []contender, at addresses) (there []contender) {
next:
	for _, c := range all {
		for _, server := range append(c.needs, c.Server) {
			if at[server] == "" {
				continue next
			}
		}
		there = append(there, c)
	}
	return there
}
