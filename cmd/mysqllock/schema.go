package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
)

func newSchema(at *target) *cobra.Command {
	c := &cobra.Command{
		Use:   "schema",
		Short: "Print, make, check or drop the lock table",
		Long: `The driver makes the lock table at its first use. These are for applications
whose account may not, or that set lockSchema=manual; drop is for those that stop
using it.`,
		Example: `  mysqllock schema print >mysqllock.sql`,
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newSchemaPrint(at), newSchemaApply(at), newSchemaCheck(at), newSchemaDrop(at))
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

func newSchemaDrop(at *target) *cobra.Command {
	var yes, asJSON bool
	c := &cobra.Command{
		Use:   "drop",
		Short: "Drop the lock table, if no lock is held or waited for",
		Long: `drop drops the lock table, with the tokens and versions of all keys. It asks first.

It does nothing, and ends with 124, while a row lock or a lease in the table is held or
waited for, in any namespace, or an advisory lock of one of its namespaces. Stop the
programs first: with lockSchema=auto they make the table again at their next lock.

It needs SELECT, LOCK TABLES and DROP, and MySQL or MariaDB. Procedures of earlier
versions and other lock tables of the database stay: it names those that are visible.

With --json it is one object: the table "dropped", the "procedures" and "tables" that
stay, and in "unseen" why advisory locks may be held that were not seen.`,
		Example: `  mysqllock ls --all-namespaces
  mysqllock schema drop`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, locks, err := at.configs()
			if err != nil {
				return err
			}
			if !yes {
				table := cmp.Or(locks.Table, "mysqllock")
				if !strings.Contains(table, ".") {
					table = cfg.DBName + "." + table
				}
				if err := confirm(c.InOrStdin(), "", printable(fmt.Sprintf("Drop the lock table %s at %s?", table, cfg.Addr))); err != nil {
					return err
				}
			}
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				done, err := i.DropTable(ctx)
				switch {
				case errors.Is(err, mysqllock.ErrLocked):
					return &status{exitNotAcquired, err}
				case err != nil:
					return err
				case asJSON:
					return printJSON(c.OutOrStdout(), jsonDropped{done.Table, done.Procedures, done.Tables, done.Unseen})
				}
				printDropped(c.OutOrStdout(), done)
				return nil
			})
		},
	}
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask first, for scripts")
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	return c
}

type jsonDropped struct {
	Dropped    string   `json:"dropped"`
	Procedures []string `json:"procedures,omitempty"`
	Tables     []string `json:"tables,omitempty"`
	Unseen     string   `json:"unseen,omitempty"`
}

func printDropped(w io.Writer, done inspect.Dropped) {
	fmt.Fprintf(w, "dropped lock table %s\n", printable(done.Table))
	for _, name := range done.Procedures {
		fmt.Fprintf(w, "procedure %s of an earlier version stays; to drop it: DROP PROCEDURE %[1]s\n", printable(name))
	}
	for _, name := range done.Tables {
		fmt.Fprintf(w, "lock table %s stays\n", printable(name))
	}
	if done.Unseen != "" {
		fmt.Fprintf(w, "advisory locks, which need no table, may still be held: %s\n", printable(done.Unseen))
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
