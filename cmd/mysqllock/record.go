package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
)

func newRecord(at *target) *cobra.Command {
	var to string
	var every time.Duration
	var megabytes int64
	c := &cobra.Command{
		Use:   "record --to FILE",
		Short: "Keep who holds locks and who waits, for history",
		Long: `record looks at the locks of all namespaces again and again, until interrupted, and writes what
has changed between two looks to a file, for "history" and "ui --record": who holds, who waits,
leases that ran out while they were held, those that were taken away by force, and
deadlocks with both sides (that takes the privilege PROCESS, and is told of rows only).

A line is one JSON object. When the file has half of --max-size, it becomes FILE.1, in place of
the one before. FILE has keys, accounts and statements without their values, and only its
owner can read it.

On the server it costs what "ls --watch" costs: a connection and about ten statements a look,
one of which reads the whole lock table. What begins and ends between two looks is not
in it, nor what ls does not show.`,
		Example: `  mysqllock record --to /var/lib/mysqllock/locks.jsonl
  mysqllock history --from /var/lib/mysqllock/locks.jsonl --at 02:40 nightly-report`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if to == "" {
				return errors.New("--to is missing: it names the file")
			}
			return at.inspecting(c.Context(), func(ctx context.Context, i *inspect.Inspector) error {
				if _, err := i.Snapshot(ctx, inspect.Filter{}); err != nil {
					return err // now, not in the file
				}
				r, err := record.New(i, to, every, megabytes<<20)
				if err != nil {
					return err
				}
				return r.Run(ctx)
			})
		},
	}
	c.Flags().StringVar(&to, "to", "", "the `file`; one that exists is gone on with")
	c.Flags().DurationVar(&every, "every", 2*time.Second, "how often to look, 100ms to 1m")
	c.Flags().Int64Var(&megabytes, "max-size", 64, "`MB` that the file and FILE.1 may have together")
	return c
}

// lookingBack is how history answers.
type lookingBack struct {
	at           *target
	from, when   string
	around       time.Duration
	json         bool
	hex          bool
	allNamespace bool
}

func newHistory(at *target) *cobra.Command {
	l := &lookingBack{at: at}
	c := &cobra.Command{
		Use:   "history --from FILE [--at TIME] [KEY...]",
		Short: "Show who held locks at an earlier time, and who waited",
		Long: `history reads the file that "record" writes, and asks no server: who held some keys at a time, or
without keys all that were held, who waited, and what happened around that time: holders and
waiters that came and went, those that may be there unseen, leases that ran out or were taken away, and deadlocks with both sides.

All times are UTC. --at 02:40 is the last time that it was 02:40. If nobody looked at that time,
it says so: then nothing is known, and not that nobody held. ≥ is a bound: it may have
begun earlier.

With --json it is one object: "time", "known", "gaps" (what the recorder did not see), "holders",
"waiters" and "around", which are events of the file.`,
		Example: `  mysqllock history --from locks.jsonl --at 02:40 nightly-report
  mysqllock history --from locks.jsonl --at 2026-11-28T02:40:13Z --around 1m`,
		RunE: func(c *cobra.Command, keys []string) error { return l.do(c.OutOrStdout(), keys, time.Now()) },
	}
	c.Flags().StringVar(&l.from, "from", "", "the `file` that record writes")
	c.Flags().StringVar(&l.when, "at", "", "the `time`, UTC: 02:40, 02:40:13, \"2026-11-28 02:40\" or in RFC 3339 (default now)")
	c.Flags().DurationVar(&l.around, "around", 10*time.Minute, "what happened so much earlier and later, too")
	c.Flags().BoolVar(&l.json, "json", false, "for programs")
	c.Flags().BoolVar(&l.hex, "hex", false, hexText)
	c.Flags().BoolVarP(&l.allNamespace, "all-namespaces", "A", false, "of all namespaces, also if one is named")
	return c
}

func (l *lookingBack) do(w io.Writer, keys []string, now time.Time) error {
	if l.from == "" {
		return errors.New("--from is missing: it names the file that \"mysqllock record\" writes")
	}
	at, err := timeOf(l.when, now)
	if err != nil {
		return err
	}
	if keys, err = keysOf(keys, l.hex); err != nil {
		return err
	}
	m, err := record.At(l.from, at, l.around, l.namespace(), keys...)
	switch {
	case err != nil:
		return err
	case l.json:
		return printJSON(w, m)
	}
	printMoment(w, m, keys)
	return nil
}

// namespace is that which was named; "" is any: nothing is asked of a server that would tell the default.
func (l *lookingBack) namespace() string {
	if l.allNamespace {
		return ""
	}
	return l.at.namespace
}

// timeOf reads a time in UTC. A time of the day is the last such.
func timeOf(text string, now time.Time) (time.Time, error) {
	now = now.UTC()
	if text == "" {
		return now, nil
	}
	for _, layout := range []string{time.TimeOnly, "15:04"} {
		if t, err := time.Parse(layout, text); err == nil {
			at := time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.UTC)
			if at.After(now) {
				at = at.AddDate(0, 0, -1)
			}
			return at, nil
		}
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, "2006-01-02 15:04"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UTC(), nil
		}
	}
	return now, fmt.Errorf("--at is %q, want a time such as 02:40, 02:40:13, \"2026-11-28 02:40\" or 2026-11-28T02:40:00Z", text)
}

// printMoment writes what a record tells of a time.
func printMoment(w io.Writer, m *record.Moment, keys []string) {
	c, width := coloursFor(w), widthOf(w)
	fmt.Fprintf(w, "%s UTC\n\n", m.Time.Format(time.DateTime))
	rows := [][]string{{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"}}
	waits := []bool{false}
	for _, e := range append(m.Holders, m.Waiters...) {
		lasted := m.Time.Sub(*e.Since)
		age := brief(lasted)
		if e.Earlier {
			age = atLeast(lasted)
		}
		number := ""
		if e.Token != nil {
			number = fmt.Sprint(*e.Token)
		}
		client := inspect.Client{ConnectionID: e.Connection, User: e.User, Host: e.Host}
		rows = append(rows, []string{nameOf(e), e.Strategy, number, e.What, age, e.Who(), connection(client), from(client)})
		waits = append(waits, e.What == record.Waits)
	}
	switch {
	case !m.Known:
		fmt.Fprintln(w, "Not known: the recorder did not look at that time.")
	case len(rows) == 1 && len(keys) > 0:
		fmt.Fprintln(w, "Nobody was seen to hold it, or to wait.")
	case len(rows) == 1:
		fmt.Fprintln(w, "Nobody was seen to hold a lock, or to wait.")
	default:
		fitting, leftOut := fitted(rows, width)
		table(w, c, fitting, func(i int, line string) string {
			if waits[i] {
				return c.yellow(line)
			}
			return line
		})
		printNote(w, c, width, leftOut)
		if slices.ContainsFunc(append(m.Holders, m.Waiters...), func(e record.Event) bool { return e.Strategy != "row" || e.Slot != nil }) {
			printNote(w, c, width, polling)
		}
	}
	printAround(w, c, width, m)
}

// printAround writes the gaps of the record, and the events around the time.
func printAround(w io.Writer, c colours, width int, m *record.Moment) {
	if m.Known && m.Gaps != "" {
		printNote(w, c, width, printable(m.Gaps))
	}
	if len(m.Around) > 0 {
		fmt.Fprintln(w)
	}
	for _, e := range m.Around {
		line := e.Time.Format(time.DateTime) + " "
		if e.Key != "" || len(e.Name) > 0 {
			line += nameOf(e) + ": "
		}
		line = wrapped(line+printable(e.String()), width, "    ")
		if e.What == record.Lost || e.What == record.Forced || e.What == record.Deadlocks || e.What == record.Failed {
			line = c.red(line)
		}
		fmt.Fprintln(w, line)
	}
}

// nameOf is what a person calls the lock of an event.
func nameOf(e record.Event) string {
	l := inspect.Lock{Key: e.Key, Name: string(e.Name), Stripe: -1, Slotted: e.Slot != nil}
	if e.Slot != nil {
		l.Slot = *e.Slot
	}
	if strings.HasPrefix(e.Key, "stripe ") {
		return e.Key
	}
	switch e.What {
	case record.Waits, record.WaitsNot, record.WaitsUnseen:
		return cmp.Or(awaited(l, false), "-")
	}
	return cmp.Or(label(l, false), "-")
}
