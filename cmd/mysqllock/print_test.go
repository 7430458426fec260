package main

import (
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
)

// TestNoLineIsWiderThanTheTerminal: what tells keys apart stays.
func TestNoLineIsWiderThanTheTerminal(t *testing.T) {
	key := "tenant:" + strings.Repeat("a", 80) + ":invoice:42"
	rows := [][]string{
		{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"},
		{key, "row", "1234567", "holds, in a transaction for 6.5s", "510ms", "web-17.example.com:31337:shopd", "123456", "app@10.20.30.40:51234"},
		{"short", "row", "7", "waits, 1.", "1h2m", "web-1", "7", "app@localhost"},
	}
	for _, width := range []int{60, 80, 100, 200, 300} {
		var b strings.Builder
		fitting, leftOut := fitted(rows, width)
		table(&b, false, fitting, nil)
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
		for i, name := range rows[0] { // what is not there is said
			whole := true
			for j, row := range rows[1:] {
				whole = whole && slices.Contains(fitting[j+1], row[i])
			}
			if whole == strings.Contains(leftOut, name) || (leftOut == "") != (width == 300) {
				t.Errorf("%d columns: %s is whole: %v, and it says %q", width, name, whole, leftOut)
			}
		}
		for line := range strings.Lines(wrapped("    "+strings.Repeat("words and ", 40), width, "    ")) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width || !strings.HasPrefix(line, "    ") {
				t.Errorf("%d columns: a line of %d: %q", width, n, line)
			}
		}
	}
}

func held(by ...inspect.Holder) inspect.Seen[inspect.Holder] {
	return inspect.Seen[inspect.Holder]{List: by}
}

func waiting(list ...inspect.Waiter) inspect.Seen[inspect.Waiter] {
	return inspect.Seen[inspect.Waiter]{List: list}
}

// TestPodAndKeyAreWholeOnEightyColumns: they are if the other columns leave room.
func TestPodAndKeyAreWholeOnEightyColumns(t *testing.T) {
	rows := [][]string{
		{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"},
		{"order:4711", "row", "1234567", "holds", "510ms", "shop-api-7d9f8b6c5-x2x4q:1:shopd", "123456", "app@10.20.30.40:51234"},
		{"order:4711", "row", "", "waits, 1.", "1h2m", "shop-api-7d9f8b6c5-k8s7w:1:shopd", "7", "app@10.20.30.40:51234"},
	}
	fitting, leftOut := fitted(rows, 80)
	dbtest.Equal(t, "it says %s", leftOut, "left out: FROM, TOKEN, STRATEGY (the terminal is too narrow; --wide has all)")
	for i, want := range []string{"KEY STATE FOR WHO CONNECTION", "order:4711 holds 510ms shop-api-7d9f8b6c5-x2x4q:1:shopd 123456"} {
		dbtest.Equal(t, "the line is %s", strings.Join(fitting[i], " "), want)
	}
}

// TestAWaiterWithoutANameIsItsConnection: MariaDB tells no programs.
func TestAWaiterWithoutANameIsItsConnection(t *testing.T) {
	fitting, leftOut := fitted([][]string{
		{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"},
		{"nightly-report", "lease", "1", "holds, not renewed for 1m6s (TTL 2m)", "1m46s", "vm:16739:reports", "", ""},
		{"nightly-report", "lease", "", "waits", "1m41s", "", "66", "app@127.0.0.1:51156"},
	}, 80)
	dbtest.Equal(t, "the line is %s", strings.Join(fitting[2], " "), "nightly-report waits 1m41s connection 66")
	dbtest.Equal(t, "it says %s", leftOut, "left out: FROM, TOKEN, STRATEGY, CONNECTION (the terminal is too narrow; --wide has all)")
	var b strings.Builder
	printGaps(&b, false, 80, &inspect.Snapshot{Gaps: []inspect.Gap{{What: strings.Repeat("what ", 20), Why: strings.Repeat("why ", 20), Remedy: strings.Repeat("remedy ", 20)}}})
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
			t.Errorf("a line of %d: %s", n, line)
		}
	}
}

func TestAShellReadsTheShownKeyBack(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash")
	}
	for key, want := range map[string]string{
		"order:42": "order:42", `a\ab`: `'a\ab'`, "a\ab": `$'a\ab'`, "order 7": "'order 7'", "it's": `$'it\'s'`, `"`: `'"'`, "-k": "-- -k", "-- x": "-- '-- x'",
		"$HOME;*": "'$HOME;*'", "\xff\n": `$'\xff\n'`, "löck": "'löck'", "a\u202eb": `$'a\u202eb'`, "\\'\a": `$'\\\'\a'`,
	} {
		got := pasteable(key)
		dbtest.Equal(t, "it is shown as %s", got, want)
		dbtest.Equal(t, "in the table it is %s", printable(got), got)
		shell := exec.Command(bash, "-c", `show() { [ "$1" = -- ] && shift; printf %s "$1"; }; show `+got)
		shell.Env = []string{"LC_ALL=C.UTF-8"}
		out, err := shell.Output()
		dbtest.OK(t, err)
		dbtest.Equal(t, "the shell makes %q", string(out), key)
	}
	dbtest.Equal(t, "with a NUL it is %s", pasteable("a\x00"), "--hex 6100")
}

// TestTheTimeOfALeaseIsNotLeftOut: the only one that there is, on 80 columns.
func TestTheTimeOfALeaseIsNotLeftOut(t *testing.T) {
	rows := [][]string{
		{"KEY", "STRATEGY", "TOKEN", "STATE", "FOR", "WHO", "CONNECTION", "FROM"},
		{"tenant:4711:invoices", "lease", "1234567", "holds (shared), 28.8s left", "", "web-17.example.com:31337:shopd", "123456", "app@10.20.30.40"},
		{"nightly-report", "lease", "7", "given back, kept until 12:00:03 UTC", "", "web-17.example.com:31337:report", "", ""},
		{"tenant:4711:invoices", "row", "", "waits, 1.", "≥ 2m3s", "web-18.example.com:31337:shopd", "123457", "app@10.20.30.41"},
	}
	var b strings.Builder
	fitting, _ := fitted(rows, 80)
	table(&b, false, fitting, nil)
	for _, want := range []string{"28.8s left", "given back, kept until 12:00:03 UTC", "≥ 2m3s"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// TestAWaiterIsToldForWhomItWaits: or that it is not known.
func TestAWaiterIsToldForWhomItWaits(t *testing.T) {
	at := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	lease := func(h inspect.Holder) inspect.Lock {
		return inspect.Lock{Strategy: "lease", Key: "k", Stripe: -1, Holders: held(h), Remaining: 3 * time.Second}
	}
	for want, snap := range map[string]*inspect.Snapshot{
		", held by web-1:7:shopd":               {Locks: []inspect.Lock{lease(inspect.Holder{Client: inspect.Client{Program: "web-1:7:shopd"}})}},
		", held by connection 5 (app@web-1)":    {Locks: []inspect.Lock{lease(inspect.Holder{Client: inspect.Client{ConnectionID: 5, User: "app", Host: "web-1"}})}},
		"; who holds it is not known":           {Locks: []inspect.Lock{lease(inspect.Holder{})}},
		", given back, kept until 12:00:03 UTC": {Time: at, Locks: []inspect.Lock{lease(inspect.Holder{Left: true, Client: inspect.Client{Program: "web-1:7:gone"}})}},
		"":                                      {},
	} {
		dbtest.Equal(t, "it says %q", heldBy(snap), want)
	}
}

// TestWhatIsNotKnownIsPrintedWithoutANumber: and what is not seen is not none.
func TestWhatIsNotKnownIsPrintedWithoutANumber(t *testing.T) {
	print := func(snap *inspect.Snapshot) string {
		var b strings.Builder
		printLocks(&b, false, 0, snap, false, false)
		return b.String()
	}
	client := func(n uint64) inspect.Client {
		return inspect.Client{ConnectionID: n, Program: "shopd", Host: "web-1", PID: int(n)}
	}
	idle := &inspect.Activity{For: time.Minute, Statement: "SELECT stock FROM products WHERE id = ?"}
	out := print(&inspect.Snapshot{Locks: []inspect.Lock{
		{Strategy: "row", Key: "a", Stripe: -1, Holders: held(inspect.Holder{
			Client: client(2), Within: inspect.Value(6500 * time.Millisecond), Least: 500 * time.Millisecond,
			WaitsFor: []string{"b"},
		}), Waiters: waiting(inspect.Waiter{Client: client(1), Least: time.Second})},
		{
			Strategy: "row", Key: "b", Stripe: -1, Holders: held(inspect.Holder{Client: client(3), Since: inspect.Value(3 * time.Second), Within: inspect.Value(9 * time.Second), Activity: idle}),
			Waiters: waiting(inspect.Waiter{Client: client(2), Least: time.Second}),
		},
	}})
	for _, want := range []string{
		"holds, in a transaction for 6.5s        shopd", // nothing under FOR
		"it has the lock for 500ms at least; since when is not known",
		"it waits itself for b, which connection 3 (shopd) holds",
		"all of them wait for connection 3 (shopd): idle for 1m, after: SELECT stock FROM products WHERE id = ?",
		"; its transaction is open, and no statement runs: see why its program does not go on, or end it: KILL 3 rolls all of it back",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out = print(&inspect.Snapshot{Locks: []inspect.Lock{{
		Strategy: "lease", Key: "k", Stripe: -1, Remaining: 4 * time.Second, Waiters: inspect.Seen[inspect.Waiter]{More: true},
		Holders: held(inspect.Holder{Client: client(2), Unrenewed: inspect.Value(26 * time.Second), ExpectedTTL: inspect.Value(30 * time.Second)}),
	}}})
	for _, want := range []string{"holds, not renewed yet, ~26s of 30s", "if its TTL is 30s, as far as", "was due after 10s", "the program has ended, is frozen, ", "the lease ends in 4s", polling} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	seen := inspect.Seen[inspect.Holder]{More: true}
	for want, snap := range map[string]*inspect.Snapshot{
		"k    -                not known":        {Locks: []inspect.Lock{{Key: "k", Stripe: -1, Holders: seen}}},
		"k    -                nobody":           {Locks: []inspect.Lock{{Key: "k", Stripe: -1}}},
		"k [slot 0]  lease":                      {Locks: []inspect.Lock{{Strategy: "lease", Key: "k", Slotted: true, Stripe: -1, Holders: seen}}},
		"Nobody holds a lock, or waits for one.": {},
		"No lock seen; 3 transactions may hold":  {Unseen: inspect.Value(3), Gaps: []inspect.Gap{{What: "rows", Why: "MariaDB", Holders: true}}},
		"No lock seen. There may be some":        {Gaps: []inspect.Gap{{What: "rows", Why: "rights", Holders: true, Waiters: true}}},
	} {
		if out := print(snap); !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	var shown strings.Builder
	printLocks(&shown, false, 0, &inspect.Snapshot{Locks: []inspect.Lock{{Strategy: "row", Key: "k", Stripe: -1, Holders: held(inspect.Holder{Client: client(2)})}}}, false, true)
	if want, of := "who waits in the holder's own process is not seen", "again and again"; !strings.Contains(shown.String(), want) || strings.Contains(shown.String(), of) {
		t.Errorf("no %q, or %q, in\n%s", want, of, shown.String())
	}
	shown.Reset()
	printLocks(&shown, false, 0, &inspect.Snapshot{Locks: []inspect.Lock{{
		Strategy: "lease", Key: "k", Stripe: -1, Waiters: inspect.Seen[inspect.Waiter]{More: true}, Holders: held(inspect.Holder{Client: client(2)}),
	}}}, false, true)
	if !strings.Contains(shown.String(), polling) {
		t.Errorf("no %q in\n%s", polling, shown.String())
	}
	shown.Reset()
	printLocks(&shown, false, 0, &inspect.Snapshot{Locks: []inspect.Lock{{
		Strategy: "lease", Key: "k", Stripe: -1, Waiters: inspect.Seen[inspect.Waiter]{List: []inspect.Waiter{{Client: client(3)}}, More: true}, Holders: held(inspect.Holder{Client: client(2)}),
	}}}, false, false)
	if !strings.Contains(shown.String(), polling) {
		t.Errorf("beside a waiter that is seen there is no %q in\n%s", polling, shown.String())
	}
	for strategy, want := range map[string]bool{"lease": true, "advisory": true, "row": false} {
		shown.Reset()
		printMoment(&shown, &record.Moment{Known: true, Holders: []record.Event{{What: record.Holds, Key: "k", Strategy: strategy, Since: new(time.Time)}}}, nil)
		if strings.Contains(shown.String(), polling) != want {
			t.Errorf("history of a %s: %s", strategy, shown.String())
		}
	}
}

func TestAShortenedTimeLosesNoDigit(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "", 250 * time.Millisecond: "250ms", 110 * time.Second: "1m50s", 2 * time.Minute: "2m", 610 * time.Second: "10m10s",
		90 * time.Minute: "1h30m", 20 * time.Hour: "20h0m", 49 * time.Hour: "2d1h",
	} {
		if got := brief(d); got != want {
			t.Errorf("%v is %q, want %q", d, got, want)
		}
	}
}

// TestTheWaitsOfAProcessAreToldOnce: it holds many locks, and waits for many.
func TestTheWaitsOfAProcessAreToldOnce(t *testing.T) {
	const locks = 2100
	var snap inspect.Snapshot
	var keys []string
	for i := range locks {
		keys = append(keys, fmt.Sprintf("tenant:4711:invoice:%06d", i))
	}
	for i, key := range keys {
		c := inspect.Client{ConnectionID: uint64(i + 1), User: "app", Host: fmt.Sprintf("10.0.0.1:%d", i), Program: "web-1:7:shopd", PID: 7}
		snap.Locks = append(snap.Locks, inspect.Lock{Strategy: "row", Key: key, Stripe: -1, Holders: held(inspect.Holder{Client: c, WaitsFor: slices.Delete(slices.Clone(keys), i, i+1)})})
	}
	snap.Locks = append(snap.Locks, inspect.Lock{Strategy: "row", Key: "z", Stripe: -1, Holders: held(inspect.Holder{
		Client: inspect.Client{ConnectionID: 5, Program: "web-1:7:shopd", PID: 7}, Activity: &inspect.Activity{Running: true}, WaitsFor: []string{"y"},
	})})
	var b strings.Builder
	dbtest.OK(t, printJSON(&b, shown(&snap)))
	if b.Len() > locks*600 {
		t.Errorf("%d locks are %d bytes", locks, b.Len())
	}
	waits := shown(&snap).Waits
	if len(waits) != 2 || waits[0].Program != "web-1:7:shopd" || waits[0].Host != "10.0.0.1" || !slices.Equal(waits[0].WaitsFor, keys) || waits[1].ConnectionID != 5 || !slices.Equal(waits[1].WaitsFor, []string{"y"}) {
		t.Errorf("the waits are %d: %.300v", len(waits), waits)
	}
}

// TestWhatIsWatchedFitsIntoTheTerminal: it says how much of it does not.
func TestWhatIsWatchedFitsIntoTheTerminal(t *testing.T) {
	for _, c := range []struct {
		text          string
		width, height int
		want          string
	}{
		{"a\nb\nc\n", 10, 4, "a\nb\nc\n"},
		{"a\nb\nc\nd\n", 10, 4, "a\nb\n… and 2 lines more"},
		{"a\nb\n" + strings.Repeat("c", 21) + "\nd\ne\n", 10, 6, "a\nb\n… and 3 lines more"},
		{"\x1b[1m" + strings.Repeat("c", 10) + "\x1b[0m\nb\nc\n", 10, 4, "\x1b[1mcccccccccc\x1b[0m\nb\nc\n"},
	} {
		if got := cut(c.text, c.width, c.height); !strings.HasPrefix(got, c.want) || strings.Count(got, "\n") >= c.height {
			t.Errorf("%q in %d times %d is %q, want %q", c.text, c.width, c.height, got, c.want)
		}
	}
}

// TestALineIsLoggedForEachRelease: it says when, from where, what, and of whom; no key begins
// another.
func TestALineIsLoggedForEachRelease(t *testing.T) {
	var b strings.Builder
	lock := inspect.Lock{Strategy: "lease", Key: "a\nb", Stripe: -1, Holders: held(inspect.Holder{Client: inspect.Client{Program: "web-1:7:shopd"}})}
	logRelease(&b, &http.Request{RemoteAddr: "10.0.0.7:5123"}, lock, "a\nticket", nil)
	when, rest, _ := strings.Cut(b.String(), " ")
	if _, err := time.Parse(time.RFC3339, when); err != nil || rest != `10.0.0.7:5123 asked to take the lease lock on $'a\nb' from web-1:7:shopd: released; reason: "a\nticket"`+"\n" {
		t.Errorf("the line is %q", b.String())
	}
	b.Reset()
	if logRelease(&b, &http.Request{}, inspect.Lock{Strategy: "row", Key: "k", Stripe: -1}, "", inspect.ErrNotKnown); !strings.Contains(b.String(), "not released: ") || !strings.Contains(b.String(), "nobody that is shown") {
		t.Errorf("of a failure the line is %q", b.String())
	}
}
