package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/mysqllock/mysqllock/inspect"
)

// breaking is what release was asked for.
type breaking struct {
	key        string
	force, yes bool
	slot       int // negative if none was given
	allSlots   bool
	try        bool
	reason     string
	asJSON     bool
}

func newRelease(at *target) *cobra.Command {
	var b breaking
	var hexadecimal bool
	c := &cobra.Command{
		Use:   "release KEY --force",
		Short: "Break a lock whose holder hangs",
		Long: `release takes a lock away from its holder, which shows who that is and asks first.

A lease is ended, and its token raised: the holder notices at its next renewal or
commit, and nothing that it has not committed will be. Of a row lock or an advisory
lock the holder's connection is killed: its transaction is rolled back, and all
advisory locks on the connection go with it. That needs CONNECTION_ADMIN (MySQL) or
CONNECTION ADMIN (MariaDB) where the holder has another account. On TiDB, which a
KILL can crash, only leases are taken away.

The holder of a lease is told your account, this process, the time and the --reason in
the text of its ErrLost, if the lock table has the columns for it (see schema check);
show tells them, too. The holder of another lock sees only that its connection has
ended.

What the holder does outside of the database is not undone and not stopped. Stop
it first if you can.

If several slots of the key are held, say which by --slot, or --all-slots. If the
server shows no holder, as MariaDB does of a row lock that nobody waits for, --try
finds it (see ls). If it can be one of several connections, release does nothing and
names them.

With --json it is one object: "released", a list of "key", "strategy", "slot", the
new "token" of a lease and the connections "killed".`,
		Example: `  mysqllock show nightly-report
  mysqllock release nightly-report --force --reason "hangs since noon, ticket 4711"`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: at.completeKeys,
		RunE: func(c *cobra.Command, args []string) error {
			keys, err := keysOf(args, hexadecimal)
			if err != nil {
				return err
			}
			if b.key = keys[0]; !b.force {
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
	c.Flags().BoolVar(&b.allSlots, "all-slots", false, "all slots of the key")
	c.Flags().BoolVar(&b.try, "try", false, "also find row locks that the server does not show, by trying to lock"+
		"\neach row for a moment, in which NoWait fails at it")
	c.MarkFlagsMutuallyExclusive("slot", "all-slots")
	c.Flags().StringVar(&b.reason, "reason", "", "`why`, for the holder of a lease, of up to 500 bytes")
	c.Flags().BoolVar(&b.asJSON, "json", false, "for programs")
	c.Flags().BoolVar(&hexadecimal, "hex", false, hexText)
	return c
}

type jsonReleased struct {
	label string

	Key      string   `json:"key"`
	Strategy string   `json:"strategy"`
	Slot     int      `json:"slot"`
	Token    uint64   `json:"token,omitempty"`
	Killed   []uint64 `json:"killed,omitempty"`
}

func (b *breaking) do(ctx context.Context, i *inspect.Inspector, in io.Reader, out io.Writer) error {
	snap, err := i.Snapshot(ctx, inspect.Filter{Keys: []string{b.key}, Try: b.try})
	if err != nil {
		return err
	}
	all, unused := snap.Held(), slices.ContainsFunc(snap.Locks, func(l inspect.Lock) bool { return l.Used == inspect.Value(false) })
	snap.Locks = slices.DeleteFunc(snap.Locks, func(l inspect.Lock) bool {
		// An advisory lock has no slots, and is none of those in the table.
		return len(l.Holders.List) == 0 || b.slot >= 0 && (l.Slot != b.slot || l.Strategy == "advisory")
	})
	if len(snap.Locks) == 0 {
		return b.nothing(all, unused)
	}
	if err := b.whichSlot(snap); err != nil {
		return err
	}
	if !b.yes {
		if err := b.ask(snap, in); err != nil {
			return err
		}
	}
	done := []jsonReleased{}
	for _, lock := range snap.Locks {
		released, err := i.Release(ctx, lock, b.reason)
		if err != nil {
			return b.after(done, err)
		}
		done = append(done, jsonReleased{label(lock, false), b.key, lock.Strategy, lock.Slot, released.Token, released.Killed})
	}
	if b.asJSON {
		return printJSON(out, map[string][]jsonReleased{"released": done})
	}
	for _, r := range done {
		if r.Token != 0 {
			fmt.Fprintf(out, "lease on %s ended; the token is now %d\n", printable(r.label), r.Token)
			continue
		}
		fmt.Fprintf(out, "%s lock on %s ended with connection %s\n", r.Strategy, printable(r.label), strings.Trim(fmt.Sprint(r.Killed), "[]"))
	}
	return nil
}

// nothing is the error if there is nothing to release, of as many locks as are held. unused: the key has no row.
func (b *breaking) nothing(held inspect.Count, unused bool) error {
	what := strconv.Quote(b.key)
	if b.slot >= 0 {
		what = fmt.Sprintf("slot %d of %q", b.slot, b.key)
	}
	switch {
	case !held.More && unused:
		return fmt.Errorf("nobody holds %s, which was %s", what, neverUsed)
	case !held.More:
		return fmt.Errorf("nobody holds %s", what)
	case unused:
		return fmt.Errorf("nobody is seen to hold %s, which was %s; \"mysqllock show\" tells what cannot be seen", what, neverUsed)
	case b.try:
		return fmt.Errorf("nobody is seen to hold %s; \"mysqllock show\" tells what cannot be seen", what)
	}
	return fmt.Errorf("nobody is seen to hold %s; \"mysqllock show\" tells what cannot be seen, and --try may find it", what)
}

// whichSlot is an error if several slots of the key are held, and it was not said which.
func (b *breaking) whichSlot(snap *inspect.Snapshot) error {
	var slots []string
	for _, l := range snap.Locks {
		if l.Slotted {
			slots = append(slots, strconv.Itoa(l.Slot))
		}
	}
	if b.slot >= 0 || b.allSlots || len(slots) < 2 {
		return nil
	}
	return fmt.Errorf("%q has slots, of which these are held: %s; say which by --slot, or --all-slots", b.key, strings.Join(slots, ", "))
}

// after is err, with the locks that were released before.
func (b *breaking) after(done []jsonReleased, err error) error {
	for _, r := range done {
		err = fmt.Errorf("%w; the %s lock on %s was released before", err, r.Strategy, r.label)
	}
	return err
}

// ask shows who would lose what.
func (b *breaking) ask(snap *inspect.Snapshot, in io.Reader) error {
	var shown strings.Builder
	printLocks(&shown, coloursFor(os.Stderr), widthOf(os.Stderr), snap, false, true)
	return confirm(in, shown.String(), "Take the lock away from who holds it?")
}

// confirm shows a person at a terminal what it is about, and asks.
func confirm(in io.Reader, shown, question string) error {
	if file, ok := in.(*os.File); !ok || !term.IsTerminal(int(file.Fd())) {
		return errors.New("nobody is at a terminal to be asked: give --yes, to do it without")
	}
	fmt.Fprint(os.Stderr, shown+question+" [y/N] ")
	answer, err := bufio.NewReader(in).ReadString('\n')
	if answer = strings.ToLower(strings.TrimSpace(answer)); err != nil || answer != "y" && answer != "yes" {
		return errors.New("nothing was done")
	}
	return nil
}
