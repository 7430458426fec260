package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
)

func newSchema(at *target) *cobra.Command {
	c := &cobra.Command{
		Use:   "schema",
		Short: "Print, make or check the lock table",
		Long: `The driver makes the lock table at its first use. These are for applications
whose account may not, or that set lockSchema=manual.`,
		Example: `  mysqllock schema print >mysqllock.sql`,
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newSchemaPrint(at), newSchemaApply(at), newSchemaCheck(at))
	return c
}

func newSchemaPrint(at *target) *cobra.Command {
	return &cobra.Command{
		Use:   "print",
		Short: "Print the SQL that makes the lock table",
		Long: `print writes the SQL that makes the lock table, for the mysql client. It asks no
server, and needs to know none.`,
		Example: `  mysqllock schema print --table locks.mysqllock | mysql`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			i, err := inspect.New(nil, inspect.Options{Table: at.table})
			if err != nil {
				return err
			}
			for _, statement := range i.Setup() {
				fmt.Fprintf(c.OutOrStdout(), "%s;\n", statement)
			}
			return nil
		},
	}
}

func newSchemaApply(at *target) *cobra.Command {
	var drop bool
	c := &cobra.Command{
		Use:   "apply",
		Short: "Make the lock table, or bring it up to date",
		Long: `apply makes the lock table, or brings it up to date. It may run at any time and again.
It needs CREATE, INSERT and SELECT, and for a table of an earlier version ALTER. The
driver works without the columns that say since when leases are held: apply tells if
they are missing, and why.

Earlier versions made procedures on MySQL, which this one does not call. With
--drop-procedures apply drops those of the lock table, and says which; procedures of
others it leaves alone. Programs of an earlier version that still run go their way
without them, by more statements. One that starts later makes them again, if its
account may: so drop them when the last such program is gone. It needs ALTER ROUTINE,
and SYSTEM_USER if the account that made them has it.`,
		Example: `  mysqllock schema apply
  mysqllock schema apply --drop-procedures`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				lack, err := i.MakeTable(ctx)
				if err != nil {
					return err
				}
				printTable(c.OutOrStdout(), lack)
				if !drop {
					return nil
				}
				dropped, err := i.DropProcedures(ctx)
				for _, name := range dropped {
					fmt.Fprintf(c.OutOrStdout(), "dropped procedure %s\n", name)
				}
				if err == nil && len(dropped) == 0 {
					fmt.Fprintln(c.OutOrStdout(), "no procedures of earlier versions are visible")
				}
				return err
			})
		},
	}
	c.Flags().BoolVar(&drop, "drop-procedures", false, "also drop the procedures of earlier versions")
	return c
}

func newSchemaCheck(at *target) *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Say whether the lock table is as it should be",
		Long: `check changes nothing. The exit status is 1 where the lock table is not as the driver
needs it. Columns that only tell more are named if they are missing: the driver works
without them.`,
		Example: `  mysqllock schema check`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				lack, err := i.CheckTable(ctx)
				if err == nil {
					printTable(c.OutOrStdout(), lack)
				}
				return naming("mysqllock schema apply", err)
			})
		},
	}
}

// printTable tells of a lock table that is as it should be, and of columns that it lacks.
func printTable(w io.Writer, lack inspect.Lack) {
	fmt.Fprintln(w, "the lock table is as it should be")
	if lack.Columns != "" {
		fmt.Fprintln(w, "since when leases are held, and who has taken one away, is not told without the columns of this version: "+lack.Why)
		fmt.Fprintln(w, `run "mysqllock schema apply" with an account that has ALTER, when the table is little used`)
	}
}

// naming puts a command in the place of the SQL at the end of an error.
func naming(command string, err error) error {
	if err == nil {
		return nil
	}
	line, sql, _ := strings.Cut(err.Error(), "\n")
	if sql == "" {
		return err
	}
	return fmt.Errorf("%s %q", strings.TrimSuffix(line, ":"), command)
}
