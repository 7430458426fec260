// Command mysqllock runs programs under locks that MySQL or MariaDB keeps, on any
// number of machines; shows who has which lock and who waits for it; and says
// which locks are safe on a server. "mysqllock help" lists what there is.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes, beside those of the command that "run" runs.
const (
	exitFailure = 1
	exitUsage   = 2

	exitNobody   = 3 // of ls and show with --exit-code: nobody holds
	exitNotKnown = 4 // of the same: no holder is seen, and not all can be seen

	exitLost        = 123 // the lock was lost, and the command stopped
	exitNotAcquired = 124 // somebody else has the lock
	exitCannotLock  = 125 // of run and hold, in place of 1 and 2
	exitCannotRun   = 126 // the command was found and cannot be run
	exitNotFound    = 127
	exitSignal      = 128 // and the signal's number
)

func main() {
	ctx, stop := context.WithCancel(context.Background())
	// Ignored are those of a script's background.
	if ends := slices.DeleteFunc([]os.Signal{os.Interrupt, syscall.SIGTERM}, signal.Ignored); len(ends) > 0 {
		ctx, stop = signal.NotifyContext(ctx, ends...)
	}
	code := execute(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// status is an error that sets the exit code.
type status struct {
	code int
	err  error // nil to say nothing
}

func (s *status) Error() string {
	if s.err == nil {
		return fmt.Sprintf("exit status %d", s.code)
	}
	return s.err.Error()
}

func (s *status) Unwrap() error { return s.err }

// execute does what the arguments say and returns the exit code.
func execute(ctx context.Context, args []string) int {
	root := newRoot()
	understood := false
	for _, c := range everyCommand(root) {
		if do := c.RunE; do != nil {
			c.RunE = func(c *cobra.Command, args []string) error {
				understood = true
				return do(c, args)
			}
		}
	}
	root.SetArgs(args)
	out := &output{File: os.Stdout}
	root.SetOut(out)
	c, err := root.ExecuteContextC(ctx)
	if err == nil && out.failed != nil {
		err = &status{exitFailure, fmt.Errorf("the output is not complete: %w", out.failed)}
	}
	failure, usage := exitFailure, exitUsage
	if c.Name() == "run" || c.Name() == "hold" {
		failure, usage = exitCannotLock, exitCannotLock
	}
	var s *status
	switch {
	case err == nil:
		return 0
	case errors.As(err, &s):
	case !understood:
		s = &status{usage, fmt.Errorf("%w; see %s --help", err, c.CommandPath())}
	case ctx.Err() != nil:
		s = &status{exitSignal + int(syscall.SIGINT), nil}
	default:
		s = &status{failure, err}
	}
	if s.err != nil {
		complain(s.err)
	}
	return s.code
}

// output is standard output. It remembers that something could not be written, as printing does not ask.
type output struct {
	*os.File
	failed error // the first error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.File.Write(b)
	if o.failed == nil {
		o.failed = err
	}
	return n, err
}

// WriteString hides that of the file.
func (o *output) WriteString(s string) (int, error) { return o.Write([]byte(s)) }

// complain writes one line for the person who has to do something about it. Errors of several packages
// begin with the same word, which is said once.
func complain(err error) {
	const name = "mysqllock: "
	line := strings.Join(strings.Fields(err.Error()), " ")
	for strings.HasPrefix(line, name) {
		line = line[len(name):]
	}
	fmt.Fprintln(os.Stderr, name+printable(strings.ReplaceAll(line, ": "+name, ": ")))
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "mysqllock",
		Short: "Locks in MySQL or MariaDB: run a command under one, see who has them",
		Long: `mysqllock runs commands under locks that MySQL or MariaDB keeps, shows who has
them and who waits, and says which of them are safe on a server.

Where the server is, is said by the first of these that there is:

  1. --dsn, in the form user:password@tcp(host:3306)/database. Everybody on the
     machine can see it in the list of processes: leave a password to the others.
  2. --defaults-file, an option file of the mysql client.
  3. MYSQLLOCK_DSN in the environment, in the same form as --dsn, with the
     parameters of the driver: lockTable, lockNamespace, lockWait, ...
  4. The usual option files: /etc/my.cnf, /etc/mysql/my.cnf and ~/.my.cnf, later
     ones before earlier ones.

Of option files it reads the groups [client], [client-server], [client-mariadb],
[mysql], [mariadb-client] and [mysqllock].

--database, --table and --namespace go before what these say.`,
		Example: `  mysqllock run --key nightly-report --no-wait -- /usr/local/bin/report
  mysqllock ls
  mysqllock doctor`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version(),
	}
	at := new(target)
	at.flags(root.PersistentFlags())
	root.AddCommand(
		newLs(at), newShow(at), newRelease(at), newGC(at), newSchema(at), newDoctor(at), newBench(at), newUI(at), newMan(),
		newRecord(at), newHistory(at),
	)
	root.AddCommand(unixCommands(at)...)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	return root
}

// everyCommand is c and all below it.
func everyCommand(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		all = append(all, everyCommand(sub)...)
	}
	return all
}
