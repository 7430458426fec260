//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock"
)

func newHold(at *target) *cobra.Command {
	r := &run{at: at}
	c := &cobra.Command{
		Use:   "hold [flags] KEY",
		Short: "Hold a lock until interrupted",
		Long: `hold takes a lease on the key, writes one line when it has it, and keeps it until
INT, TERM or HUP comes: then it gives the lease back. It is for work by hand, and for
scripts that cannot be run by "run", which is safer: it stops the command when the
lock is lost, and hold can only end.

The line has the token, a number that grows with each grant of the key; 0 with
--shared, which has none (see run). With --slots, the slot follows.

The DSN's lockTTL and lockWait count where --ttl and --wait are not given.

Exit status:

  0    a signal came, and the lock was given back
  123  the lock was lost
  124  the lock was not granted; --conflict-exit-code says another
  125  mysqllock has failed, for instance because it cannot reach the server
  128+n  signal n came while it waited for the lock`,
		Example: `  # nobody deploys while this is there; end it with Ctrl-C
  mysqllock hold deploy`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			r.key = args[0]
			r.hasTTL, r.hasWait = c.Flags().Changed("ttl"), c.Flags().Changed("wait")
			return r.hold(c.Context(), c.OutOrStdout())
		},
	}
	r.flags(c)
	return c
}

// hold keeps the lock until a signal comes.
func (r *run) hold(ctx context.Context, w io.Writer) error {
	if err := r.check(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // signals end the wait, and the hold, in order
	signals := make(chan os.Signal, 1)
	listen(signals, []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP})
	defer signal.Stop(signals)

	db, err := r.open("hold")
	if err != nil {
		return err
	}
	defer db.Close()
	hold, err := r.acquire(ctx, db, signals)
	if err != nil {
		return err
	}
	line := []any{hold.Token()}
	if slot, ok := mysqllock.Slot(hold.Context()); ok {
		line = append(line, slot)
	}
	if _, err := fmt.Fprintln(w, line...); err != nil {
		_ = hold.Rollback()
		return err
	}
	var lost error
	select {
	case <-signals:
	case <-hold.Context().Done():
		lost = context.Cause(hold.Context())
	}
	err = hold.Release()
	switch {
	case errors.Is(err, mysqllock.ErrLost):
		return &status{exitLost, ofLock(err)}
	case lost != nil:
		return &status{exitLost, lost}
	}
	return err
}
