package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
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
	code   bool          // the exit code says whether somebody holds
	byWait bool          // the longest wait first
	wide   bool          // lines may be wider than the terminal

	top     bool     // tell it by classes of keys
	classes []string // patterns of them; without any, each key is one
}

const jsonText = `
With --json it is one object: "time" (of the server), "locks", "namespaces", which
are those that share the lock table ("name"; "database" where a database has that
name), and "gaps", which are things that it could not see ("what", "why",
"remedy"). A lock has "key",
"namespace", "strategy" (row, lease, advisory, or "" where no holder or waiter is
seen), "held" (true or false), "slot", "slotted" (the key has several), "stripe" (-1
where keys do not share rows), "name_hex" (that of its row, or of the server's named
lock), "token", "versioned", "used" (false: the lock table has no row of the key),
"expires" and "remaining_ms" of a lease, "holders" and "waiters" ("in_order": as the server
queues them for a row; else the longest wait first), and "lapsed", which is who
had a lease that has run out. "forced" is who has last taken a lease away ("token", "time",
"account", "process", "reason"). All holders and waiters have "connection_id", "user",
"host", "program", "pid" and "shared"; holders "since_ms", or "least_ms" where only that is known, "transaction_ms",
"left" (given back, and kept for its --min-hold), of a lease "renewed_ms" (since its
last renewal) and "ttl_ms", or before its first "unrenewed_ms" and "expected_ttl_ms" (since
the grant, if its TTL is that, as of the lease before), "locks_on_connection",
"locks_incomplete" and "activity" ("running", "for_ms", "least", "statement",
"elsewhere"); waiters "least_ms", for how long they have waited at least. "waits" has
once each connection or process that holds a lock and waits itself, with the keys that it
"waits_for", and "circles" the keys of locks whose holders wait for each other in a circle.
"holders_incomplete" and "waiters_incomplete", of a lock or of all, say that
more may hold or wait than is shown, and
"transactions_unseen" how many may hold row locks that are not shown. What is unknown is
absent. With --watch there is one object a line, with only "error" while the server
does not answer. With --top it has "classes" instead of
locks: each has "class", "locks", "held", "waiting", "waiters_incomplete" and
"longest_wait_least_ms".`

func newLs(at *target) *cobra.Command {
	l := &looking{at: at}
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "Show who holds locks, and who waits for them",
		Long: `ls shows who holds locks, since when, and who waits for them, and for how long; with
numbers, where the server queues them: for a row. One that has waited for its lockTTL
(30s) asks anew, and is the last in the server's queue then. Without --try it takes no lock; it waits for nobody.

FOR is how long a lock is held, or how long a waiter has waited: at least (≥), since
that counts from when it asked the last time. It is empty where that cannot be known:
then STATE says how old the transaction is that holds the row, which is no age of the
lock, since it may have waited first. For a lease STATE says how long it still lasts
unless it is renewed, or that it was not renewed when that was due: then its holder
has ended, is frozen, cut off or too slow. STATE is "nobody" only where that is known. Below a holder
for whom others wait, or with show below each, stands what its connection does, and
for whom it waits itself. On a terminal lines are as wide as it is, unless --wide is given:
columns are left out first, and keys and names shortened last, and a line says which. A key is
written as show takes it in a shell: 'order 7', or --hex 6100 if no argument has its bytes. WHO is what
the program calls itself: its lockOwner, or host, process and name. Of the callers
in one process only the first is seen, and none if the process has the lock itself:
they wait there, and its Stats and metrics count them.
` + jsonText,
		Example: `  mysqllock ls --watch
  mysqllock ls --top --class 'order:*' --class 'product:*'
  mysqllock ls --json | jq -r '.locks[] | select(.waiters) | .key'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return l.do(c.Context(), c.OutOrStdout()) },
	}
	l.flags(c)
	c.Flags().BoolVarP(&l.filter.AllNamespaces, "all-namespaces", "A", false, "of all that share the lock table")
	c.Flags().BoolVar(&l.top, "top", false, "which keys are waited for most, one line each: the longest wait first")
	c.Flags().StringSliceVar(&l.classes, "class", nil, "with --top: one line for all keys that match the `pattern`,"+
		"\nin which * is any text; for several, the first counts")
	return c
}

func newShow(at *target) *cobra.Command {
	l := &looking{at: at}
	var hexadecimal bool
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
			var err error
			if l.filter.Keys, err = keysOf(keys, hexadecimal); err != nil {
				return err
			}
			return l.do(c.Context(), c.OutOrStdout())
		},
	}
	l.flags(c)
	c.Flags().BoolVar(&hexadecimal, "hex", false, hexText)
	return c
}

const hexText = "the key is in hexadecimal, for one of any bytes"

// keysOf are the keys that arguments name.
func keysOf(args []string, hexadecimal bool) (keys []string, err error) {
	if !hexadecimal {
		return args, nil
	}
	for _, arg := range args {
		key, err := hex.DecodeString(strings.TrimPrefix(arg, "0x"))
		if err != nil {
			return nil, fmt.Errorf("%q is not in hexadecimal", arg)
		}
		keys = append(keys, string(key))
	}
	return keys, nil
}

func (l *looking) flags(c *cobra.Command) {
	c.Flags().BoolVar(&l.json, "json", false, "for programs")
	c.Flags().DurationVar(&l.watch, "watch", 0, "look again and again, until interrupted, also when the server was gone;"+
		"\n--watch=500ms says how often")
	c.Flags().BoolVar(&l.byWait, "by-wait", false, "the lock with the longest wait first")
	c.Flags().BoolVar(&l.wide, "wide", false, "whole lines, also on a terminal that is narrower")
	c.Flags().Lookup("watch").NoOptDefVal = "2s"
	c.Flags().BoolVar(&l.code, "exit-code", false, "end with 0 if a holder is shown, 3 if nobody holds,"+
		"\nor 4 if that cannot be known: not all is shown")
	c.Flags().BoolVar(&l.filter.Try, "try", false, "also find row locks that the server does not show, by trying to lock"+
		"\neach row for a moment, in which NoWait fails at it")
	c.MarkFlagsMutuallyExclusive("watch", "exit-code")
	c.MarkFlagsMutuallyExclusive("watch", "try")
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
	if len(l.classes) > 0 && !l.top {
		return errors.New("--class is for --top")
	}
	return l.at.inspecting(ctx, func(ctx context.Context, i *inspect.Inspector) error {
		for seen := false; ; {
			snap, err := l.look(ctx, i, w)
			switch {
			case err == nil && l.code:
				err = byHolders(snap)
			case err == nil:
				seen = true
			case l.watch > 0 && seen && ctx.Err() == nil: // it may come back
				err = l.silent(w, i.LastAnswer(), err)
			}
			if err != nil || l.watch == 0 {
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

// silent says that the server has not answered since last.
func (l *looking) silent(w io.Writer, last time.Time, why error) error {
	if l.json {
		return json.NewEncoder(w).Encode(map[string]string{"error": why.Error()})
	}
	s := &screen{of: w}
	text := fmt.Sprintf("No answer since %s UTC, for %s: %v", last.UTC().Format(time.TimeOnly), brief(time.Since(last)), why)
	fmt.Fprintf(s, "%s\n", coloursFor(s).red(printable(text)))
	s.show()
	return nil
}

// longestWait is that for a lock, as far as is known.
func longestWait(l inspect.Lock) (d time.Duration) {
	for _, w := range l.Waiters.List {
		d = max(d, w.Least, 1)
	}
	return d
}

// byHolders returns the exit status for --exit-code.
func byHolders(snap *inspect.Snapshot) error {
	switch n, known := snap.Held().Known().Get(); {
	case !known:
		return &status{exitNotKnown, nil}
	case n == 0:
		return &status{exitNobody, nil}
	}
	return nil
}

func (l *looking) look(ctx context.Context, i *inspect.Inspector, w io.Writer) (*inspect.Snapshot, error) {
	snap, err := i.Snapshot(ctx, l.filter)
	if err != nil {
		return nil, err
	}
	if l.byWait {
		slices.SortStableFunc(snap.Locks, func(a, b inspect.Lock) int { return cmp.Compare(longestWait(b), longestWait(a)) })
	}
	switch {
	case l.json && l.watch != 0:
		return snap, json.NewEncoder(w).Encode(l.shown(snap))
	case l.json:
		return snap, printJSON(w, l.shown(snap))
	}
	if l.watch != 0 {
		s := &screen{of: w}
		defer s.show()
		fmt.Fprintf(s, "%s UTC\n\n", snap.Time.Format(time.DateTime))
		w = s
	}
	c, width := coloursFor(w), widthOf(w)
	if l.wide {
		width = 0
	}
	if l.top {
		printTop(w, c, width, snap, l.classes)
		return snap, nil
	}
	printLocks(w, c, width, snap, l.filter.AllNamespaces, len(l.filter.Keys) > 0)
	return snap, nil
}

// listing is what is written of locks, a row for each holder and waiter.
type listing struct {
	snap       *inspect.Snapshot
	circles    []inspect.Circle // of waits
	namespaces bool             // before the keys
	why        bool             // below all holders stands what they do, not only where others wait

	rows    [][]string
	waiting []bool           // the row is of a waiter
	notes   map[int][]string // what stands below a row
}

func (l *listing) add(waits bool, cells ...string) {
	l.rows, l.waiting = append(l.rows, cells), append(l.waiting, waits)
}

const overtaken = "in the server's order, which is not that of the longest wait:" +
	" a waiter for a row asks anew after its lockTTL (30s), and is the last then"

const neverUsed = "never used here: the lock table has no row for it, so no program has held it by a row, a lease" +
	" or a version, or gc has removed it; see whether it is spelt right"

// lock adds the rows of one.
func (l *listing) lock(lock *inspect.Lock) {
	name, at := label(*lock, l.namespaces), len(l.rows)
	if len(lock.Holders.List) == 0 {
		holder := "not known"
		if _, known := lock.Holders.Any().Get(); known {
			holder = "nobody"
		}
		l.add(false, name, cmp.Or(lock.Strategy, "-"), token(*lock), holder, "", "", "", "")
		if used, known := lock.Used.Get(); known && !used {
			l.notes[at] = append(l.notes[at], neverUsed)
		}
		if h := lock.Lapsed; h != nil {
			note := "the lease of " + who(h.Client) + " has run out"
			if !h.Renewed.IsZero() {
				note += ": " + notRenewed(*h)
			}
			l.notes[at] = append(l.notes[at], note)
		}
	}
	for _, h := range lock.Holders.List {
		program := h.Program
		if h.Client == (inspect.Client{}) {
			program = "not known"
		}
		since, _ := h.Since.Get()
		l.add(false, name, lock.Strategy, token(*lock), l.role(*lock, h), brief(since), program, connection(h.Client), from(h.Client))
		if l.why || len(lock.Waiters.List) > 0 || h.Silent() || h.Overdue() {
			l.notes[len(l.rows)-1] = reasons(l.snap, l.circles, lock, h)
		}
	}
	for n, waiter := range lock.Waiters.List {
		who := "waits"
		if lock.InOrder {
			who = fmt.Sprintf("waits, %d.", n+1)
		}
		if waiter.Shared {
			who += " (shared)"
		}
		l.add(true, awaited(*lock, l.namespaces), lock.Strategy, "", who, waited(waiter), waiter.Program,
			connection(waiter.Client), from(waiter.Client))
	}
	if lock.Overtaken() {
		l.notes[len(l.rows)-1] = []string{overtaken}
	}
	if held, _ := lock.Holders.Any().Get(); held && l.why && !lock.Holders.List[0].Left {
		l.notes[at] = append(l.notes[at], "who waits in the holder's own process is not seen in the server: its Stats and metrics count them")
	}
	l.forced(*lock, at)
}

// forced adds a note, for show, of who has last taken a lease on the key away.
func (l *listing) forced(lock inspect.Lock, at int) {
	if f := lock.Forced; f != nil && l.why {
		note := fmt.Sprintf("the lease with token %d was taken away on %s UTC by %s in process %s",
			f.Token, f.Time.Format(time.DateTime), f.Account, f.Process)
		if f.Reason != "" {
			note += ": " + f.Reason
		}
		l.notes[at] = append(l.notes[at], note)
	}
}

// printLocks writes a line for each holder and waiter, of at most so many characters; 0 is any. Below
// holders for whom others wait, or with why below all, it writes what they do.
func printLocks(w io.Writer, c colours, width int, snap *inspect.Snapshot, namespaces, why bool) {
	l := &listing{snap: snap, circles: snap.Circles(), namespaces: namespaces, why: why, notes: make(map[int][]string)}
	l.add(false, "KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM")
	for i := range snap.Locks {
		l.lock(&snap.Locks[i])
	}
	if len(snap.Locks) == 0 {
		fmt.Fprintln(w, noLocks(snap))
	} else {
		rows, leftOut := fitted(l.rows, width)
		table(w, c, rows, func(i int, line string) string {
			if l.waiting[i] {
				line = c.yellow(line)
			}
			for _, note := range l.notes[i] {
				line += "\n" + c.dim(wrapped("    "+printable(note), width, "    "))
			}
			return line
		})
		printNote(w, c, width, leftOut)
		if slices.ContainsFunc(snap.Locks, mayPoll) {
			printNote(w, c, width, polling)
		}
	}
	printNamespaces(w, c, snap)
	printGaps(w, c, width, snap)
}

// polling is what no look shows, or a record.
const polling = "more may wait for leases, advisory locks and slots than are shown: who asks again and again waits for nothing in the" +
	" server, as the first waiter behind a lease whose holder has crashed, or all where maxConns (for a lease: below 12) leaves no" +
	" connection to wait on"

// mayPoll reports a lock whose waiters may ask again and again.
func mayPoll(l inspect.Lock) bool {
	return l.Waiters.More && (l.Strategy == "lease" || l.Strategy == "advisory" || l.Slotted)
}

// printNote writes a line below a table, if there is one to write.
func printNote(w io.Writer, c colours, width int, note string) {
	if note != "" {
		fmt.Fprintln(w, c.dim(wrapped(note, width, "  ")))
	}
}

// printGaps says what is not shown, and how to see it.
func printGaps(w io.Writer, c colours, width int, snap *inspect.Snapshot) {
	for _, gap := range snap.Gaps {
		printNote(w, c, width, "not shown: "+printable(gap.What+": "+gap.Why))
		if gap.Remedy != "" {
			fmt.Fprintln(w, c.dim(wrapped("  to see it: "+printable(gap.Remedy), width, "    ")))
		}
	}
}

// printNamespaces says which namespaces share the lock table, where there are several,
// and which of them may differ by accident.
func printNamespaces(w io.Writer, c colours, snap *inspect.Snapshot) {
	if len(snap.Namespaces) < 2 {
		return
	}
	names := make([]string, len(snap.Namespaces))
	for i, n := range snap.Namespaces {
		names[i] = n.Name
	}
	line := "namespaces in the lock table: " + strings.Join(names, ", ")
	if snap.Namespace != "" {
		line += " (shown: " + snap.Namespace + ")"
	}
	fmt.Fprintln(w, c.dim(printable(line)))
	if by := inspect.ByDatabase(snap.Namespaces); len(by) > 0 {
		fmt.Fprintln(w, c.yellow(printable("a key is another lock in each of them; "+strings.Join(by, ", ")+
			": of programs that set no lockNamespace, and whose DSN names that database")))
	}
}

// label is what a person calls the lock, in a form in which show takes the key.
func label(lock inspect.Lock, namespace bool) string {
	var name string
	switch {
	case lock.Stripe >= 0:
		name = fmt.Sprintf("stripe %d", lock.Stripe)
	case lock.Key == "":
		name = fmt.Sprintf("(%q)", lock.Name)
	default:
		name = pasteable(lock.Key)
	}
	if lock.Slotted {
		name += fmt.Sprintf(" [slot %d]", lock.Slot)
	}
	if namespace && lock.Namespace != "" {
		name = lock.Namespace + "/" + name
	}
	return name
}

// awaited is label for a waiter: who waits for a slot has any of them.
func awaited(lock inspect.Lock, namespace bool) string {
	if !lock.Slotted {
		return label(lock, namespace)
	}
	lock.Slotted = false
	return label(lock, namespace) + " [any slot]"
}

func token(lock inspect.Lock) string {
	n, known := lock.Token.Get()
	if !known {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// atLeast is how long something has lasted that may have begun earlier; "" if nothing is
// known of it.
func atLeast(d time.Duration) string {
	if d <= 0 {
		return ""
	}
	return "≥ " + brief(d)
}

// waited is for how long somebody has waited, at least if that is not known.
func waited(w inspect.Waiter) string {
	if d, ok := w.Waited.Get(); ok {
		return brief(d)
	}
	return atLeast(w.Least)
}

func (l *listing) role(lock inspect.Lock, h inspect.Holder) string {
	if h.Left {
		return keptUntil(l.snap, lock)
	}
	text := "holds"
	if h.Shared {
		text = "holds (shared)"
	}
	within, inTransaction := h.Within.Get()
	switch {
	case h.Silent():
		text += ", " + notRenewed(h)
	case h.Overdue():
		text += ", " + notRenewedYet(h)
	case lock.Remaining > 0:
		text += ", " + brief(lock.Remaining) + " left"
	case h.Since.IsZero() && inTransaction:
		text += ", in a transaction"
		if within >= time.Millisecond { // MariaDB tells whole seconds
			text += " for " + brief(within)
		}
	}
	return text
}

// notRenewed says of the holder of a lease for how long it has been silent.
func notRenewed(h inspect.Holder) string {
	renewed, _ := h.Renewed.Get()
	ttl, _ := h.TTL.Get()
	return fmt.Sprintf("not renewed for %s (TTL %s)", brief(renewed), brief(ttl))
}

// notRenewedYet says of the holder of a lease how old it is without a renewal, by what its TTL is expected to be.
func notRenewedYet(h inspect.Holder) string {
	unrenewed, _ := h.Unrenewed.Get()
	expected, _ := h.ExpectedTTL.Get()
	return fmt.Sprintf("not renewed yet, ~%s of %s", brief(unrenewed), brief(expected))
}

// keptUntil says of a lease that was given back until when it stays, by the server's clock.
func keptUntil(snap *inspect.Snapshot, lock inspect.Lock) string {
	return "given back, kept until " + snap.Time.Add(lock.Remaining).Format(time.TimeOnly) + " UTC"
}

// noLocks says that none is seen, and not that there is none if that is not known.
func noLocks(snap *inspect.Snapshot) string {
	holders, waiters := snap.Incomplete()
	unseen, _ := snap.Unseen.Get()
	switch {
	case holders && unseen > 0:
		return fmt.Sprintf("No lock seen; %d transactions may hold row locks, of this table or others, that the server does not show.", unseen)
	case holders:
		return "No lock seen. There may be some: not all is shown."
	case waiters:
		return "Nobody holds a lock. Whether somebody waits is not shown."
	}
	return "Nobody holds a lock, or waits for one."
}

// reasons are why others wait for h: since when it holds, what it does, and for whom it
// waits itself.
func reasons(snap *inspect.Snapshot, circles []inspect.Circle, lock *inspect.Lock, h inspect.Holder) (out []string) {
	switch {
	case h.Left: // nobody does anything
		return nil
	case !h.Since.IsZero():
	case h.Least > 0:
		out = append(out, "it has the lock for "+brief(h.Least)+" at least; since when is not known")
	case lock.Strategy == "lease":
		out = append(out, "since when it has the lock is not known: its first renewal tells, a third of its TTL after the grant;"+
			" an older program, a table without the columns (doctor) or a MaxHold does not")
	default:
		out = append(out, "since when it has the lock is not known")
	}
	if late := h.Unrenewing(lock.Remaining); late != "" {
		out = append(out, late)
	}
	if len(h.WaitsFor) == 0 {
		return append(out, doing(h))
	}
	for _, circle := range circles {
		if circle.Has(lock) {
			return append(out, circle.String())
		}
	}
	for i, link := range snap.Chain(lock) {
		if i == 0 {
			continue // h, or another holder of the same lock
		}
		waits := "it waits itself for"
		if link.ByProcess { // another goroutine may
			waits = "its process waits, perhaps elsewhere in it, for"
		}
		by := party(link.Holder.Client)
		out = append(out, fmt.Sprintf("%s %s, which %s holds", waits, label(*link.Lock, false), by))
		if len(link.Holder.WaitsFor) == 0 {
			out = append(out, fmt.Sprintf("all of them wait for %s: %s", by, doing(*link.Holder)))
		}
	}
	return out
}

// party is who a client is, in a sentence.
func party(c inspect.Client) string {
	if c.ConnectionID == 0 {
		return who(c)
	}
	return fmt.Sprintf("connection %d (%s)", c.ConnectionID, who(c))
}

func who(c inspect.Client) string { return cmp.Or(c.Program, from(c), "not known") }

// doing is what the holder does, and what can be done about it.
func doing(h inspect.Holder) string {
	text := h.Activity.String()
	if advice := h.Advice(); advice != "" {
		text += "; " + advice
	}
	return text
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

		HoldersIncomplete bool `json:"holders_incomplete,omitempty"`
		WaitersIncomplete bool `json:"waiters_incomplete,omitempty"`

		Unseen inspect.Known[int] `json:"transactions_unseen,omitzero"`

		Waits      []jsonWait      `json:"waits,omitempty"`
		Circles    [][]string      `json:"circles,omitempty"`
		Namespaces []jsonNamespace `json:"namespaces,omitempty"`
		Gaps       []jsonGap       `json:"gaps,omitempty"`
	}
	jsonNamespace struct {
		Name     string `json:"name"`
		Database bool   `json:"database,omitempty"`
	}
	jsonLock struct {
		Key       string                `json:"key,omitempty"`
		Namespace string                `json:"namespace,omitempty"`
		Strategy  string                `json:"strategy"`
		Held      inspect.Known[bool]   `json:"held,omitzero"`
		Slot      int                   `json:"slot"`
		Slotted   bool                  `json:"slotted,omitempty"`
		Stripe    int                   `json:"stripe"`
		Name      string                `json:"name_hex"`
		Token     inspect.Known[uint64] `json:"token,omitzero"`
		Versioned inspect.Known[bool]   `json:"versioned,omitzero"`
		Used      inspect.Known[bool]   `json:"used,omitzero"`
		Expires   *time.Time            `json:"expires,omitempty"`
		Remaining float64               `json:"remaining_ms,omitempty"`
		Holders   []jsonHolder          `json:"holders,omitempty"`
		Waiters   []jsonWaiter          `json:"waiters,omitempty"`
		InOrder   bool                  `json:"in_order,omitempty"`
		Lapsed    *jsonHolder           `json:"lapsed,omitempty"`
		Forced    *jsonForced           `json:"forced,omitempty"`

		HoldersIncomplete bool `json:"holders_incomplete,omitempty"`
		WaitersIncomplete bool `json:"waiters_incomplete,omitempty"`
	}
	jsonForced struct {
		Token   uint64    `json:"token"`
		Time    time.Time `json:"time"`
		Account string    `json:"account"`
		Process string    `json:"process"`
		Reason  string    `json:"reason,omitempty"`
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
		Since     float64       `json:"since_ms,omitempty"`
		Least     float64       `json:"least_ms,omitempty"`
		Within    float64       `json:"transaction_ms,omitempty"`
		Left      bool          `json:"left,omitempty"`
		Renewed   float64       `json:"renewed_ms,omitempty"`
		TTL       float64       `json:"ttl_ms,omitempty"`
		Unrenewed float64       `json:"unrenewed_ms,omitempty"`
		Expected  float64       `json:"expected_ttl_ms,omitempty"`
		Locks     int           `json:"locks_on_connection,omitempty"`
		More      bool          `json:"locks_incomplete,omitempty"`
		Activity  *jsonActivity `json:"activity,omitempty"`
	}
	jsonWait struct {
		jsonClient
		WaitsFor []string `json:"waits_for"`
	}
	jsonActivity struct {
		Running   bool    `json:"running"`
		For       float64 `json:"for_ms,omitempty"`
		Least     bool    `json:"least,omitempty"`
		Statement string  `json:"statement,omitempty"`
		Elsewhere bool    `json:"elsewhere,omitempty"`
	}
	jsonWaiter struct {
		jsonClient
		Waited inspect.Known[float64] `json:"waited_ms,omitzero"`
		Least  float64                `json:"least_ms,omitempty"`
	}
	jsonGap struct {
		What   string `json:"what"`
		Why    string `json:"why"`
		Remedy string `json:"remedy,omitempty"`
	}
)

// jsonWaits has, of each connection that runs a statement, and of each process of others, the keys that it
// waits for. All locks that a process holds would tell the same keys.
type jsonWaits map[jsonClient]map[string]bool

func (j jsonWaits) add(h inspect.Holder) {
	if len(h.WaitsFor) == 0 {
		return
	}
	c := jsonClient{ConnectionID: h.ConnectionID, User: h.User, Host: h.Host, Program: h.Program, PID: h.PID}
	if running := h.Activity != nil && h.Activity.Running; !running && c.Program != "" {
		c.ConnectionID, c.User = 0, ""
		c.Host, _, _ = strings.Cut(c.Host, ":") // the port is the connection's
	}
	if j[c] == nil {
		j[c] = make(map[string]bool)
	}
	for _, key := range h.WaitsFor {
		j[c][key] = true
	}
}

func (j jsonWaits) list() (out []jsonWait) {
	for c, keys := range j {
		out = append(out, jsonWait{c, slices.Sorted(maps.Keys(keys))})
	}
	slices.SortFunc(out, func(a, b jsonWait) int {
		return cmp.Or(cmp.Compare(a.ConnectionID, b.ConnectionID), cmp.Compare(a.Program, b.Program),
			cmp.Compare(a.PID, b.PID), cmp.Compare(a.Host, b.Host))
	})
	return out
}

func shown(snap *inspect.Snapshot) jsonSnapshot {
	out, waits := jsonSnapshot{Time: snap.Time, Locks: []jsonLock{}}, make(jsonWaits)
	client := func(c inspect.Client, shared bool) jsonClient {
		return jsonClient{c.ConnectionID, c.User, c.Host, c.Program, c.PID, shared}
	}
	for _, l := range snap.Locks {
		j := jsonLock{
			Key: l.Key, Namespace: l.Namespace, Strategy: l.Strategy, Held: l.Holders.Any(), Slot: l.Slot, Slotted: l.Slotted, Stripe: l.Stripe,
			Name: hex.EncodeToString([]byte(l.Name)), Token: l.Token, Versioned: l.Versioned, Used: l.Used,
			Remaining: ms(l.Remaining), InOrder: l.InOrder && len(l.Waiters.List) > 0,
			HoldersIncomplete: l.Holders.More, WaitersIncomplete: l.Waiters.More,
		}
		if !l.Expires.IsZero() {
			j.Expires = &l.Expires
		}
		holder := func(h inspect.Holder) jsonHolder {
			since, _ := h.Since.Get()
			within, _ := h.Within.Get()
			renewed, _ := h.Renewed.Get()
			ttl, _ := h.TTL.Get()
			unrenewed, _ := h.Unrenewed.Get()
			expected, _ := h.ExpectedTTL.Get()
			one := jsonHolder{
				client(h.Client, h.Shared), ms(since), ms(h.Least), ms(within), h.Left, ms(renewed), ms(ttl),
				ms(unrenewed), ms(expected), h.Locks.Seen, h.Locks.More, nil,
			}
			if a := h.Activity; a != nil {
				one.Activity = &jsonActivity{a.Running, ms(a.For), a.Least, a.Statement, a.Elsewhere}
			}
			return one
		}
		for _, h := range l.Holders.List {
			j.Holders = append(j.Holders, holder(h))
			waits.add(h)
		}
		if l.Lapsed != nil {
			lapsed := holder(*l.Lapsed)
			j.Lapsed = &lapsed
		}
		if l.Forced != nil {
			j.Forced = (*jsonForced)(l.Forced)
		}
		for _, w := range l.Waiters.List {
			one := jsonWaiter{jsonClient: client(w.Client, w.Shared), Least: ms(w.Least)}
			if d, ok := w.Waited.Get(); ok {
				one.Waited = inspect.Value(ms(d))
			}
			j.Waiters = append(j.Waiters, one)
		}
		out.Locks = append(out.Locks, j)
	}
	out.Waits = waits.list()
	for _, circle := range snap.Circles() {
		var keys []string
		for _, link := range circle {
			keys = append(keys, cmp.Or(link.Lock.Key, label(*link.Lock, false)))
		}
		out.Circles = append(out.Circles, keys)
	}
	out.HoldersIncomplete, out.WaitersIncomplete = snap.Incomplete()
	out.WaitersIncomplete = out.WaitersIncomplete || slices.ContainsFunc(snap.Locks, func(l inspect.Lock) bool { return l.Waiters.More })
	out.Unseen = snap.Unseen
	for _, n := range snap.Namespaces {
		out.Namespaces = append(out.Namespaces, jsonNamespace(n))
	}
	for _, g := range snap.Gaps {
		out.Gaps = append(out.Gaps, jsonGap{g.What, g.Why, g.Remedy})
	}
	return out
}
