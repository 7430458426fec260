package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

// heat is how much the keys of a class are waited for now.
type heat struct {
	class   string
	locks   int // that are held or waited for
	held    int
	waiting int
	longest time.Duration
	holder  string // of the lock with the longest wait; "" if it is not known
}

// heats are those of the locks, the longest wait first.
func heats(snap *inspect.Snapshot, patterns []string) []*heat {
	classOf := inspect.Classes(patterns...)
	byClass := make(map[string]*heat)
	var all []*heat
	for _, lock := range snap.Locks {
		class := label(lock, false)
		if len(patterns) > 0 {
			class = classOf(lock.Key)
		}
		h := byClass[class]
		if h == nil {
			h = &heat{class: class}
			byClass[class], all = h, append(all, h)
		}
		h.add(lock)
	}
	slices.SortStableFunc(all, func(a, b *heat) int {
		return cmp.Or(cmp.Compare(b.longest, a.longest), cmp.Compare(b.waiting, a.waiting), cmp.Compare(b.held, a.held))
	})
	return all
}

func (h *heat) add(lock inspect.Lock) {
	h.locks++
	h.waiting += len(lock.Waiters)
	if len(lock.Holders) > 0 {
		h.held++
	}
	for _, waiter := range lock.Waiters {
		if waiter.Waited < h.longest {
			continue
		}
		h.longest, h.holder = waiter.Waited, ""
		if len(lock.Holders) > 0 {
			h.holder = who(lock.Holders[0].Client)
		}
	}
}

// printTop writes a line for each class of keys.
func printTop(w io.Writer, c colours, snap *inspect.Snapshot, patterns []string) {
	rows := [][]string{{"KEYS", "LOCKS", "HELD", "WAITING", "LONGEST WAIT", "FOR"}}
	for _, h := range heats(snap, patterns) {
		rows = append(rows, []string{h.class, strconv.Itoa(h.locks), strconv.Itoa(h.held), strconv.Itoa(h.waiting), brief(h.longest), h.holder})
	}
	if len(rows) == 1 {
		fmt.Fprintln(w, noLocks(snap))
	} else {
		table(w, c, fitted(rows, widthOf(w)), func(i int, line string) string {
			if rows[i][3] != "0" {
				line = c.yellow(line)
			}
			return line
		})
	}
	printGaps(w, c, snap)
}

// jsonHeat is a heat for programs.
type jsonHeat struct {
	Class   string  `json:"class"`
	Locks   int     `json:"locks"`
	Held    int     `json:"held"`
	Waiting int     `json:"waiting"`
	Longest float64 `json:"longest_wait_ms,omitempty"`
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
		out.Classes = append(out.Classes, jsonHeat{h.class, h.locks, h.held, h.waiting, ms(h.longest)})
	}
	return out
}
