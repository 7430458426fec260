package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/mysqllock/mysqllock/inspect"
)

// breaking is what release was asked for.
type breaking struct {
	key        string
	force, yes bool
	slot       int
	asJSON     bool
}

func newRelease(at *target) *cobra.Command {
	var b breaking
	c := &cobra.Command{
		Use:   "release KEY --force",
		Short: "Break a lock whose holder hangs",
		Long: `release takes a lock away from its holder, which shows who that is and asks first.

A lease is ended, and its token raised: the holder notices at its next renewal or
commit, and nothing that it has not committed will be. Of a row lock or an advisory
lock the holder's connection is killed: its transaction is rolled back, and all
advisory locks on the connection go with it. That needs CONNECTION_ADMIN (MySQL) or
CONNECTION ADMIN (MariaDB) where the holder has another account.

What the holder does outside of the database is not undone and not stopped. Stop
it first if you can.

With --json it is one object: "released", a list of "key", "strategy", "slot", the
new "token" of a lease and the connections "killed".`,
		Example: `  mysqllock show nightly-report
  mysqllock release nightly-report --force`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: at.completeKeys,
		RunE: func(c *cobra.Command, args []string) error {
			if b.key = args[0]; !b.force {
				return errors.New("release takes a lock away from whoever has it: give --force, after a look at \"mysqllock show\"")
			}
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				return b.do(ctx, i, c.InOrStdin(), c.OutOrStdout())
			})
		},
	}
	c.Flags().BoolVar(&b.force, "force", false, "take it away from who has it: without, nothing is done")
	c.Flags().BoolVarP(&b.yes, "yes", "y", false, "do not ask first, for scripts")
	c.Flags().IntVar(&b.slot, "slot", -1, "only this `slot` of the key")
	c.Flags().BoolVar(&b.asJSON, "json", false, "for programs")
	return c
}

type jsonReleased struct {
	Key      string   `json:"key"`
	Strategy string   `json:"strategy"`
	Slot     int      `json:"slot"`
	Token    uint64   `json:"token,omitempty"`
	Killed   []uint64 `json:"killed,omitempty"`
}

func (b *breaking) do(ctx context.Context, i *inspect.Inspector, in io.Reader, out io.Writer) error {
	snap, err := i.Snapshot(ctx, inspect.Filter{Keys: []string{b.key}})
	if err != nil {
		return err
	}
	snap.Locks = slices.DeleteFunc(snap.Locks, func(l inspect.Lock) bool {
		return len(l.Holders) == 0 || b.slot >= 0 && l.Slot != b.slot
	})
	if len(snap.Locks) == 0 {
		return fmt.Errorf("nobody is seen to hold %q; \"mysqllock show\" tells what cannot be seen", b.key)
	}
	if !b.yes {
		if err := b.ask(snap, in); err != nil {
			return err
		}
	}
	done := []jsonReleased{}
	for _, lock := range snap.Locks {
		released, err := i.Release(ctx, lock)
		if err != nil {
			return err
		}
		done = append(done, jsonReleased{b.key, lock.Strategy, lock.Slot, released.Token, released.Killed})
	}
	if b.asJSON {
		return printJSON(out, map[string][]jsonReleased{"released": done})
	}
	for _, r := range done {
		if r.Token != 0 {
			fmt.Fprintf(out, "lease on %s ended; the token is now %d\n", printable(r.Key), r.Token)
			continue
		}
		fmt.Fprintf(out, "%s lock on %s ended with connection %s\n", r.Strategy, printable(r.Key), strings.Trim(fmt.Sprint(r.Killed), "[]"))
	}
	return nil
}

// ask shows who would lose what. It is for a person at a terminal.
func (b *breaking) ask(snap *inspect.Snapshot, in io.Reader) error {
	if file, ok := in.(*os.File); !ok || !term.IsTerminal(int(file.Fd())) {
		return errors.New("nobody is at a terminal to be asked: give --yes, to do it without")
	}
	printLocks(os.Stderr, coloursFor(os.Stderr), snap, false, true)
	fmt.Fprint(os.Stderr, "Take the lock away from who holds it? [y/N] ")
	answer, err := bufio.NewReader(in).ReadString('\n')
	if answer = strings.ToLower(strings.TrimSpace(answer)); err != nil || answer != "y" && answer != "yes" {
		return errors.New("nothing was done")
	}
	return nil
}
