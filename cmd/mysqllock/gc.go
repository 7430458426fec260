package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
)

func newGC(at *target) *cobra.Command {
	var (
		unused   time.Duration
		limit    int
		asJSON   bool
		progress bool
	)
	c := &cobra.Command{
		Use:   "gc",
		Short: "Remove rows of keys that are not used any more",
		Long: `gc removes rows of the lock table, of all namespaces, that have had no lease and
were not made for the time of --unused. Tokens stay as high as they are. It goes
through the table once and can run at any time: it leaves rows that somebody has
locked, and costs no caller its lock. It needs DELETE on the table, and MySQL,
MariaDB 10.6 or TiDB.

It ends with 0 when it has looked at all rows, or has removed those of --limit, and
with 124 when it could not go on because the table was busy.

With --json it is one object: the numbers "looked", "removed" and "left", which is
how many rows it left because somebody was using them, and "done", whether it has
looked at all rows.`,
		Example: `  # crontab: once a week
  0 4 * * 0  mysqllock gc --unused 2160h`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if unused < 0 || limit < 0 {
				return errors.New("--unused and --limit must not be negative")
			}
			o := inspect.CleanUp{Unused: unused, Limit: limit}
			if progress || term.IsTerminal(int(os.Stderr.Fd())) {
				o.Progress = func(so inspect.Cleaned) {
					fmt.Fprintf(c.ErrOrStderr(), "%d rows removed of %d so far\n", so.Removed, so.Looked)
				}
			}
			var done inspect.Cleaned
			err := at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) (err error) {
				done, err = i.Clean(ctx, o)
				return err
			})
			if err != nil && done.Removed > 0 {
				err = fmt.Errorf("%d rows were removed, then: %w", done.Removed, err)
			}
			switch {
			case errors.Is(err, mysqllock.ErrLocked):
				return &status{exitNotAcquired, err}
			case err != nil:
				return err
			case asJSON:
				return printJSON(c.OutOrStdout(), map[string]any{
					"looked": done.Looked, "removed": done.Removed, "left": done.Left, "done": done.Done,
				})
			}
			printCleaned(c.OutOrStdout(), done)
			return nil
		},
	}
	c.Flags().DurationVar(&unused, "unused", 30*24*time.Hour, "for how long a key must have been unused")
	c.Flags().IntVar(&limit, "limit", 0, "most `rows` to remove; 0 is no limit")
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	c.Flags().BoolVar(&progress, "progress", false, "say every second how far it is, as on a terminal")
	return c
}

func printCleaned(w io.Writer, done inspect.Cleaned) {
	fmt.Fprintf(w, "%d rows removed", done.Removed)
	if done.Left > 0 {
		fmt.Fprintf(w, ", %d left that are in use", done.Left)
	}
	if !done.Done {
		fmt.Fprint(w, "; there may be more, since the limit was reached")
	}
	fmt.Fprintln(w)
}
