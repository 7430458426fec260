package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
)

// looking is how ls and show look.
type looking struct {
	at     *target
	filter inspect.Filter
	json   bool
	watch  time.Duration // 0 is once
}

const jsonText = `
With --json it is one object: "time" (of the server), "locks", and "gaps", which
are things that it could not see ("what", "why", "remedy"). A lock has "key",
"namespace", "strategy" (row, lease, advisory, or "" where nobody holds or wants
the key), "slot", "stripe" (-1 where keys do not share rows), "name_hex" (that of
its row, or of the server's named lock), "token", "versioned", "expires" and
"remaining_ms" of a lease, "holders" and "waiters", these in the order in which
they have asked. Both have "connection_id", "user", "host", "program", "pid" and
"shared"; holders "since_ms", "left" and "locks_on_connection", waiters "waited_ms".
What is unknown is absent. With --watch there is one object a line.`

func newLs(at *target) *cobra.Command {
	l := &looking{at: at}
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "Show who holds locks, and who waits for them",
		Long: `ls shows who holds locks, since when, and who waits for them, in order and for how
long. It takes no lock, and waits for nobody.

FOR is since when a row is locked, how long a lease still lasts unless it is
renewed, and how long a waiter has waited since it asked the last time. WHO is what
the program calls itself: its lockOwner, or host, process and name. Of the callers
in one process only the first is seen: the others wait for it, there.
` + jsonText,
		Example: `  mysqllock ls --watch
  mysqllock ls --json | jq -r '.locks[] | select(.waiters) | .key'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return l.do(c.Context(), c.OutOrStdout()) },
	}
	l.flags(c)
	c.Flags().BoolVarP(&l.filter.AllNamespaces, "all-namespaces", "A", false, "of all that share the lock table")
	return c
}

func newShow(at *target) *cobra.Command {
	l := &looking{at: at}
	c := &cobra.Command{
		Use:   "show KEY...",
		Short: "Show who holds some keys, and who waits for them",
		Long: `show is ls for some keys: it also shows those that nobody holds, with the token of
the last grant, and finds keys whose lock has only a hash as its name.
` + jsonText,
		Example:           `  mysqllock show nightly-report`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: at.completeKeys,
		RunE: func(c *cobra.Command, keys []string) error {
			l.filter.Keys = keys
			return l.do(c.Context(), c.OutOrStdout())
		},
	}
	l.flags(c)
	return c
}

func (l *looking) flags(c *cobra.Command) {
	c.Flags().BoolVar(&l.json, "json", false, "for programs")
	c.Flags().DurationVar(&l.watch, "watch", 0, "look again and again, until interrupted; --watch=500ms says how often")
	c.Flags().Lookup("watch").NoOptDefVal = "2s"
}

// completeKeys are the keys that are held or wanted.
func (t *target) completeKeys(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var keys []cobra.Completion
	ctx, cancel := context.WithTimeout(c.Context(), 3*time.Second)
	defer cancel()
	err := t.inspecting(ctx, func(ctx context.Context, i *inspect.Inspector) error {
		snap, err := i.Snapshot(ctx, inspect.Filter{})
		if err != nil {
			return err
		}
		for _, lock := range snap.Locks {
			keys = append(keys, lock.Key)
		}
		return nil
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return keys, cobra.ShellCompDirectiveNoFileComp
}

func (l *looking) do(ctx context.Context, w io.Writer) error {
	if l.watch != 0 && l.watch < 100*time.Millisecond {
		return fmt.Errorf("--watch is %v, want 100ms or more", l.watch)
	}
	return l.at.inspecting(ctx, func(ctx context.Context, i *inspect.Inspector) error {
		for {
			if err := l.look(ctx, i, w); err != nil || l.watch == 0 {
				return err
			}
			select {
			case <-time.After(l.watch):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
}

func (l *looking) look(ctx context.Context, i *inspect.Inspector, w io.Writer) error {
	snap, err := i.Snapshot(ctx, l.filter)
	switch {
	case err != nil:
		return err
	case l.json && l.watch != 0:
		return json.NewEncoder(w).Encode(shown(snap))
	case l.json:
		return printJSON(w, shown(snap))
	}
	c := coloursFor(w)
	if l.watch != 0 {
		clear := ""
		if c {
			clear = "\x1b[H\x1b[2J"
		}
		fmt.Fprintf(w, "%s%s UTC\n\n", clear, snap.Time.Format(time.DateTime))
	}
	printLocks(w, c, snap, l.filter.AllNamespaces)
	return nil
}

// printLocks writes a line for each holder and waiter.
func printLocks(w io.Writer, c colours, snap *inspect.Snapshot, namespaces bool) {
	rows := [][]string{{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"}}
	waiting := []bool{false}
	add := func(wait bool, cells ...string) {
		rows, waiting = append(rows, cells), append(waiting, wait)
	}
	for _, lock := range snap.Locks {
		name := label(lock, namespaces)
		if lock.Strategy == "" {
			add(false, name, "-", token(lock), "nobody", "", "", "", "")
		}
		if lock.Strategy != "" && len(lock.Holders) == 0 {
			add(false, name, lock.Strategy, token(lock), "not known", "", "", "", "")
		}
		for _, h := range lock.Holders {
			add(false, name, lock.Strategy, token(lock), role(h), since(lock, h), h.Program, connection(h.Client), from(h.Client))
		}
		for n, waiter := range lock.Waiters {
			who := fmt.Sprintf("waits, %d.", n+1)
			if waiter.Shared {
				who += " (shared)"
			}
			add(true, name, lock.Strategy, "", who, brief(waiter.Waited), waiter.Program, connection(waiter.Client), from(waiter.Client))
		}
	}
	if len(snap.Locks) == 0 {
		fmt.Fprintln(w, "Nobody holds a lock, or waits for one.")
	} else {
		table(w, c, rows, func(i int, line string) string {
			if waiting[i] {
				return c.yellow(line)
			}
			return line
		})
	}
	for _, gap := range snap.Gaps {
		fmt.Fprintln(w, c.dim("not shown: "+printable(gap.What+": "+gap.Why)))
		if gap.Remedy != "" {
			fmt.Fprintln(w, c.dim("  to see it: "+printable(gap.Remedy)))
		}
	}
}

// label is what a person calls the lock.
func label(lock inspect.Lock, namespace bool) string {
	name := lock.Key
	switch {
	case lock.Stripe >= 0:
		name = fmt.Sprintf("stripe %d", lock.Stripe)
	case name == "":
		name = fmt.Sprintf("(%q)", lock.Name)
	}
	if lock.Slot > 0 {
		name += fmt.Sprintf(" [slot %d]", lock.Slot)
	}
	if namespace && lock.Namespace != "" {
		name = lock.Namespace + "/" + name
	}
	return name
}

func token(lock inspect.Lock) string {
	if lock.Token == 0 {
		return ""
	}
	return strconv.FormatUint(lock.Token, 10)
}

func role(h inspect.Holder) string {
	switch {
	case h.Left:
		return "kept back" // for its MinHold
	case h.Shared:
		return "holds (shared)"
	}
	return "holds"
}

func since(lock inspect.Lock, h inspect.Holder) string {
	if lock.Remaining > 0 {
		return brief(lock.Remaining) + " left"
	}
	return brief(h.Since)
}

func connection(c inspect.Client) string {
	if c.ConnectionID == 0 {
		return ""
	}
	return strconv.FormatUint(c.ConnectionID, 10)
}

func from(c inspect.Client) string {
	if c.User == "" {
		return c.Host
	}
	return c.User + "@" + c.Host
}

// The forms for programs. Fields may be added, and never change.
type (
	jsonSnapshot struct {
		Time  time.Time  `json:"time"`
		Locks []jsonLock `json:"locks"`
		Gaps  []jsonGap  `json:"gaps,omitempty"`
	}
	jsonLock struct {
		Key       string       `json:"key,omitempty"`
		Namespace string       `json:"namespace,omitempty"`
		Strategy  string       `json:"strategy"`
		Slot      int          `json:"slot"`
		Stripe    int          `json:"stripe"`
		Name      string       `json:"name_hex"`
		Token     uint64       `json:"token,omitempty"`
		Versioned bool         `json:"versioned,omitempty"`
		Expires   *time.Time   `json:"expires,omitempty"`
		Remaining float64      `json:"remaining_ms,omitempty"`
		Holders   []jsonHolder `json:"holders,omitempty"`
		Waiters   []jsonWaiter `json:"waiters,omitempty"`
	}
	jsonClient struct {
		ConnectionID uint64 `json:"connection_id,omitempty"`
		User         string `json:"user,omitempty"`
		Host         string `json:"host,omitempty"`
		Program      string `json:"program,omitempty"`
		PID          int    `json:"pid,omitempty"`
		Shared       bool   `json:"shared,omitempty"`
	}
	jsonHolder struct {
		jsonClient
		Since float64 `json:"since_ms,omitempty"`
		Left  bool    `json:"left,omitempty"`
		Locks int     `json:"locks_on_connection,omitempty"`
	}
	jsonWaiter struct {
		jsonClient
		Waited float64 `json:"waited_ms"`
	}
	jsonGap struct {
		What   string `json:"what"`
		Why    string `json:"why"`
		Remedy string `json:"remedy,omitempty"`
	}
)

func shown(snap *inspect.Snapshot) jsonSnapshot {
	out := jsonSnapshot{Time: snap.Time, Locks: []jsonLock{}}
	client := func(c inspect.Client, shared bool) jsonClient {
		return jsonClient{c.ConnectionID, c.User, c.Host, c.Program, c.PID, shared}
	}
	for _, l := range snap.Locks {
		j := jsonLock{
			Key: l.Key, Namespace: l.Namespace, Strategy: l.Strategy, Slot: l.Slot, Stripe: l.Stripe,
			Name: hex.EncodeToString([]byte(l.Name)), Token: l.Token, Versioned: l.Versioned, Remaining: ms(l.Remaining),
		}
		if !l.Expires.IsZero() {
			j.Expires = &l.Expires
		}
		for _, h := range l.Holders {
			j.Holders = append(j.Holders, jsonHolder{client(h.Client, h.Shared), ms(h.Since), h.Left, h.Locks})
		}
		for _, w := range l.Waiters {
			j.Waiters = append(j.Waiters, jsonWaiter{client(w.Client, w.Shared), ms(w.Waited)})
		}
		out.Locks = append(out.Locks, j)
	}
	for _, g := range snap.Gaps {
		out.Gaps = append(out.Gaps, jsonGap(g))
	}
	return out
}
