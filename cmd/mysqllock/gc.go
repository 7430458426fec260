package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
)

func newGC(at *target) *cobra.Command {
	var (
		unused time.Duration
		limit  int
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "gc",
		Short: "Remove rows of keys that are not used any more",
		Long: `gc removes rows of the lock table, of all namespaces, that have had no lease and
were not made for the time of --unused. Tokens stay as high as they are. It waits
for nobody and leaves rows that somebody has locked, so it can run at any time. It
needs DELETE on the table, and MySQL or MariaDB 10.6.

With --json it is one object: "removed", a number.`,
		Example: `  # crontab: once a week
  0 4 * * 0  mysqllock gc --unused 2160h`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if unused < 0 || limit < 1 {
				return errors.New("--unused must not be negative, and --limit at least 1")
			}
			removed := 0
			err := at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				for removed < limit {
					n, err := i.Clean(ctx, unused, limit-removed)
					if removed += n; err != nil || n == 0 {
						return err
					}
				}
				return nil
			})
			switch {
			case err != nil && removed > 0:
				return fmt.Errorf("%d rows were removed, then: %w", removed, err)
			case err != nil:
				return err
			case asJSON:
				return printJSON(c.OutOrStdout(), map[string]int{"removed": removed})
			}
			fmt.Fprintf(c.OutOrStdout(), "%d rows removed\n", removed)
			return nil
		},
	}
	c.Flags().DurationVar(&unused, "unused", 30*24*time.Hour, "for how long a key must have been unused")
	c.Flags().IntVar(&limit, "limit", 100_000, "most `rows` to remove")
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	return c
}
