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
	var mariadb bool
	c := &cobra.Command{
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
			printSetup(c.OutOrStdout(), i.Setup(mariadb))
			return nil
		},
	}
	c.Flags().BoolVar(&mariadb, "mariadb", false, "without the procedures, which MariaDB does not need")
	return c
}

// printSetup writes statements for the mysql client, which has to be told where a
// procedure ends.
func printSetup(w io.Writer, statements []string) {
	for _, s := range statements {
		if strings.Contains(s, ";") {
			fmt.Fprintf(w, "DELIMITER //\n%s//\nDELIMITER ;\n", s)
			continue
		}
		fmt.Fprintf(w, "%s;\n", s)
	}
}

func newSchemaApply(at *target) *cobra.Command {
	return &cobra.Command{
		Use:   "apply",
		Short: "Make the lock table, or bring it up to date",
		Long: `apply makes the lock table and, on MySQL, its procedures, or brings them up to date.
It may run at any time and again. It needs CREATE, INSERT and SELECT, for the
procedures CREATE ROUTINE, and for a table of an older version ALTER. The driver
works without the procedures, by more round trips, and without the columns that say
since when leases are held: apply lists what is missing, and why.`,
		Example: `  mysqllock schema apply`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				lacks, err := i.MakeTable(ctx)
				if err == nil {
					printTable(c.OutOrStdout(), lacks)
				}
				return err
			})
		},
	}
}

func newSchemaCheck(at *target) *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Say whether the lock table is as it should be",
		Long: `check changes nothing. The exit status is 1 where the lock table is not as the driver
needs it. Procedures that the account cannot call, and columns that only tell more,
are listed: the driver works without them.`,
		Example: `  mysqllock schema check`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				lacks, err := i.CheckTable(ctx)
				if err == nil {
					printTable(c.OutOrStdout(), lacks)
				}
				return naming("mysqllock schema apply", err)
			})
		},
	}
}

// printTable tells of a lock table that is as it should be, and of procedures that it lacks.
func printTable(w io.Writer, lacks []inspect.Lack) {
	fmt.Fprintln(w, "the lock table is as it should be")
	for _, l := range lacks {
		if l.Columns != "" {
			fmt.Fprintf(w, "since when leases are held, and who has taken one away, is not told without %s\n", l)
			fmt.Fprintln(w, `run "mysqllock schema apply" with an account that has ALTER, when the table is little used`)
			continue
		}
		fmt.Fprintf(w, "locks take more round trips without %s\n", l)
		if len(l.Grants) == 0 {
			fmt.Fprintln(w, `run "mysqllock schema apply" with an account that has CREATE ROUTINE`)
		}
		for _, grant := range l.Grants {
			fmt.Fprintf(w, "%s;\n", grant)
		}
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
