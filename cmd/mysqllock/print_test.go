package main

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/mysqllock/mysqllock/inspect"
)

// TestFitted: no line is wider than the terminal, and what tells keys apart stays.
func TestFitted(t *testing.T) {
	key := "tenant:" + strings.Repeat("a", 80) + ":invoice:42"
	rows := [][]string{
		{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"},
		{key, "row", "1234567", "holds, in a transaction since 6.5s", "510ms", "web-17.example.com:31337:shopd", "123456", "app@10.20.30.40:51234"},
		{"short", "row", "7", "waits, 1.", "1h2m", "web-1", "7", "app@localhost"},
	}
	for _, width := range []int{60, 80, 100, 200, 300} {
		var b strings.Builder
		table(&b, false, fitted(rows, width), nil)
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("%d columns: a line of %d: %s", width, n, line)
			}
		}
		for _, want := range []string{"KEY", "STATE", "FOR", "WHO", "tena", "short"} {
			if !strings.Contains(b.String(), want) {
				t.Errorf("%d columns: no %q in\n%s", width, want, b.String())
			}
		}
		if width == 300 && !strings.Contains(b.String(), key) || width >= 60 && !strings.Contains(b.String(), ":42") && !strings.Contains(b.String(), "42  ") {
			t.Errorf("%d columns: the key is\n%s", width, b.String())
		}
		for line := range strings.Lines(wrapped("    "+strings.Repeat("words and ", 40), width, "    ")) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width || !strings.HasPrefix(line, "    ") {
				t.Errorf("%d columns: a line of %d: %q", width, n, line)
			}
		}
	}
}

// TestPrintLocks: what is not known has no number, and what is not seen is not none.
func TestPrintLocks(t *testing.T) {
	print := func(snap *inspect.Snapshot) string {
		var b strings.Builder
		printLocks(&b, false, snap, false, false)
		return b.String()
	}
	client := func(n uint64) inspect.Client { return inspect.Client{ConnectionID: n, Program: "shopd"} }
	idle := &inspect.Activity{For: time.Minute, Statement: "SELECT stock FROM products WHERE id = ?"}
	out := print(&inspect.Snapshot{Locks: []inspect.Lock{
		{Strategy: "row", Key: "a", Stripe: -1, Holders: []inspect.Holder{{
			Client: client(2), Within: 6500 * time.Millisecond, Least: 500 * time.Millisecond,
			WaitsFor: []string{"b"},
		}}, Waiters: []inspect.Waiter{{Client: client(1), Waited: time.Second}}},
		{
			Strategy: "row", Key: "b", Stripe: -1, Holders: []inspect.Holder{{Client: client(3), Since: 3 * time.Second, Within: 9 * time.Second, Activity: idle}},
			Waiters: []inspect.Waiter{{Client: client(2), Waited: time.Second}},
		},
	}})
	for _, want := range []string{
		"holds, in a transaction since 6.5s       shopd", // nothing under FOR
		"it has the lock for 500ms at least; since when is not known",
		"it waits itself for b, which connection 3 holds (shopd)",
		"all of them wait for connection 3: idle for 1m0s, after: SELECT stock FROM products WHERE id = ?",
		"; its transaction is open, and no statement runs: see why its program does not go on, or end it: KILL 3 rolls all of it back",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	for want, snap := range map[string]*inspect.Snapshot{
		"Nobody holds a lock, or waits for one.": {},
		"0 locks seen; 3 transactions hold":      {Unseen: 3, Gaps: []inspect.Gap{{What: "rows", Why: "MariaDB", Holders: true}}},
		"0 locks seen. There may be some":        {Unseen: -1, Gaps: []inspect.Gap{{What: "rows", Why: "rights", Holders: true, Waiters: true}}},
	} {
		if out := print(snap); !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}
