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
	c.Flags().BoolVar(&mariadb, "mariadb", false, "without the procedure, which MariaDB does not need")
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
		Long: `apply makes the lock table and, on MySQL, its procedure, or brings them up to date.
It may run at any time and again. It needs CREATE, INSERT and SELECT, for the
procedure CREATE ROUTINE, and for a table of an older form ALTER.`,
		Example: `  mysqllock schema apply`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				_, err := i.MakeTable(ctx)
				if err == nil {
					fmt.Fprintln(c.OutOrStdout(), "the lock table is as it should be")
				}
				return err
			})
		},
	}
}

func newSchemaCheck(at *target) *cobra.Command {
	return &cobra.Command{
		Use:     "check",
		Short:   "Say whether the lock table is as it should be",
		Long:    `check changes nothing. The exit status is 1 where the lock table is not as the driver needs it.`,
		Example: `  mysqllock schema check`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				_, err := i.CheckTable(ctx)
				if err == nil {
					fmt.Fprintln(c.OutOrStdout(), "the lock table is as it should be")
				}
				return naming("mysqllock schema apply", err)
			})
		},
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
