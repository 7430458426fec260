package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/mysqllock/mysqllock/inspect"
)

// heat is how much the keys of a class are waited for now.
type heat struct {
	class   string        // of the keys, or the key itself
	shown   string        // the same for people
	locks   inspect.Count // that are held or waited for
	held    inspect.Count
	waiting inspect.Count

	seesWaiters bool // the server shows who waits by a statement

	longest inspect.Waiter // the one with the longest wait, as far as is known
	holder  string         // of the lock with the longest wait
}

// heats are those of the locks, the longest wait first.
func heats(snap *inspect.Snapshot, patterns []string) []*heat {
	classOf := inspect.Classes(patterns...)
	holders, waiters := snap.Incomplete()
	byClass := make(map[string]*heat)
	var all []*heat
	for _, lock := range snap.Locks {
		key := lock
		key.Slotted = false // its slots are one line
		class, shown := cmp.Or(lock.Key, label(key, false)), label(key, false)
		if len(patterns) > 0 {
			class = classOf(lock.Key)
			shown = class
		}
		h := byClass[class]
		if h == nil {
			h = &heat{class: class, shown: shown, seesWaiters: !waiters}
			h.locks.More, h.held.More, h.waiting.More = holders || waiters, holders, waiters
			byClass[class], all = h, append(all, h)
		}
		h.add(lock)
	}
	slices.SortStableFunc(all, func(a, b *heat) int {
		return cmp.Or(cmp.Compare(b.longest.Least, a.longest.Least), cmp.Compare(b.waiting.Seen, a.waiting.Seen),
			cmp.Compare(b.held.Seen, a.held.Seen))
	})
	return all
}

func (h *heat) add(lock inspect.Lock) {
	h.locks.Seen++
	h.waiting = h.waiting.Plus(lock.Waiters.Count())
	h.held.Seen += min(len(lock.Holders.List), 1)
	for _, waiter := range lock.Waiters.List {
		if waiter.Least < h.longest.Least {
			continue
		}
		h.longest, h.holder = waiter, "not known"
		if len(lock.Holders.List) > 0 {
			h.holder = who(lock.Holders.List[0].Client)
			if lock.Slotted { // it waits for any
				h.holder += ", and the other slots"
			}
		}
	}
}

// longestWait is "" if nobody is seen to wait, though somebody may. One that is not seen may have waited for longer.
func (h *heat) longestWait() string {
	if h.waiting.Seen == 0 && h.seesWaiters {
		return ""
	}
	text := cmp.Or(waited(h.longest), "not known")
	if h.waiting.More && !h.longest.Waited.IsZero() {
		text = "≥ " + text
	}
	return text
}

// waits is how many wait. "≥ 0" is of a key that nobody is seen to wait for, where the server shows most
// waiters: one that asks again and again, as the first behind a lease whose holder has crashed, is not seen.
func (h *heat) waits() string {
	if h.waiting.Seen == 0 && h.waiting.More && h.seesWaiters {
		return "≥ 0"
	}
	return h.waiting.String()
}

// ownLines is what no look at the server counts.
const ownLines = "WAITING is who waits in the server, and ≥ where callers may ask again and again, which it does not show:" +
	" not who waits in the holder's own process, in its queue for the key or for a connection (maxConns), which its Stats" +
	" and metrics count"

// printTop writes a line for each class of keys.
func printTop(w io.Writer, c colours, width int, snap *inspect.Snapshot, patterns []string) {
	rows := [][]string{{"KEYS", "LOCKS", "HELD", "WAITING", "LONGEST WAIT", "FOR"}}
	for _, h := range heats(snap, patterns) {
		rows = append(rows, []string{h.shown, h.locks.String(), h.held.String(), h.waits(), h.longestWait(), h.holder})
	}
	if len(rows) == 1 {
		fmt.Fprintln(w, noLocks(snap))
	} else {
		fitting, leftOut := fitted(rows, width)
		table(w, c, fitting, func(i int, line string) string {
			if rows[i][5] != "" { // somebody waits
				line = c.yellow(line)
			}
			return line
		})
		printNote(w, c, width, leftOut)
		printNote(w, c, width, ownLines)
	}
	printGaps(w, c, width, snap)
}

// jsonHeat is a heat for programs.
type jsonHeat struct {
	Class   string             `json:"class"`
	Locks   inspect.Known[int] `json:"locks,omitzero"`
	Held    inspect.Known[int] `json:"held,omitzero"`
	Waiting inspect.Known[int] `json:"waiting,omitzero"`
	Longest float64            `json:"longest_wait_least_ms,omitempty"`

	WaitersIncomplete bool `json:"waiters_incomplete,omitempty"`
}

// shown is snap for programs.
func (l *looking) shown(snap *inspect.Snapshot) any {
	all := shown(snap)
	if !l.top {
		return all
	}
	out := struct {
		jsonSnapshot
		Locks   []jsonLock `json:"locks,omitempty"` // in place of those
		Classes []jsonHeat `json:"classes"`
	}{jsonSnapshot: all, Classes: []jsonHeat{}}
	for _, h := range heats(snap, l.classes) {
		out.Classes = append(out.Classes, jsonHeat{
			h.class, h.locks.Known(), h.held.Known(), h.waiting.Known(),
			ms(h.longest.Least), h.waiting.More,
		})
	}
	return out
}
