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
	class   string
	locks   inspect.Count // that are held or waited for
	held    inspect.Count
	waiting inspect.Count
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
		class := label(key, false)
		if len(patterns) > 0 {
			class = classOf(lock.Key)
		}
		h := byClass[class]
		if h == nil {
			h = &heat{class: class}
			h.locks.More, h.held.More, h.waiting.More = holders || waiters, holders, waiters
			byClass[class], all = h, append(all, h)
		}
		h.add(lock)
	}
	slices.SortStableFunc(all, func(a, b *heat) int {
		return cmp.Or(cmp.Compare(b.longest.Least, a.longest.Least), cmp.Compare(b.waiting.Seen, a.waiting.Seen), cmp.Compare(b.held.Seen, a.held.Seen))
	})
	return all
}

func (h *heat) add(lock inspect.Lock) {
	h.locks.Seen++
	h.waiting.Seen += len(lock.Waiters.List)
	h.held.Seen += min(len(lock.Holders.List), 1)
	for _, waiter := range lock.Waiters.List {
		if waiter.Least < h.longest.Least {
			continue
		}
		h.longest, h.holder = waiter, "not known"
		if len(lock.Holders.List) > 0 {
			h.holder = who(lock.Holders.List[0].Client)
		}
	}
}

// longestWait is "" only if nobody waits.
func (h *heat) longestWait() string {
	if n, known := h.waiting.Known().Get(); known && n == 0 {
		return ""
	}
	return cmp.Or(waited(h.longest), "not known")
}

// ownLines is what no look at the server counts.
const ownLines = "WAITING is who waits in the server: not who waits in the holder's own process, in its queue for the key or for a connection (maxConns), which its Stats and metrics count"

// printTop writes a line for each class of keys.
func printTop(w io.Writer, c colours, snap *inspect.Snapshot, patterns []string) {
	rows := [][]string{{"KEYS", "LOCKS", "HELD", "WAITING", "LONGEST WAIT", "FOR"}}
	for _, h := range heats(snap, patterns) {
		rows = append(rows, []string{h.class, h.locks.String(), h.held.String(), h.waiting.String(), h.longestWait(), h.holder})
	}
	if len(rows) == 1 {
		fmt.Fprintln(w, noLocks(snap))
	} else {
		table(w, c, fitted(rows, widthOf(w)), func(i int, line string) string {
			if rows[i][5] != "" { // somebody waits
				line = c.yellow(line)
			}
			return line
		})
		fmt.Fprintln(w, c.dim(wrapped(ownLines, widthOf(w), "  ")))
	}
	printGaps(w, c, snap)
}

// jsonHeat is a heat for programs.
type jsonHeat struct {
	Class   string             `json:"class"`
	Locks   inspect.Known[int] `json:"locks,omitzero"`
	Held    inspect.Known[int] `json:"held,omitzero"`
	Waiting inspect.Known[int] `json:"waiting,omitzero"`
	Longest float64            `json:"longest_wait_least_ms,omitempty"`
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
		out.Classes = append(out.Classes, jsonHeat{h.class, h.locks.Known(), h.held.Known(), h.waiting.Known(), ms(h.longest.Least)})
	}
	return out
}
