package record

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func after(seconds float64) time.Time { return noon.Add(time.Duration(seconds * float64(time.Second))) }

// recorder writes to a file in a folder of the test.
func recorder(t *testing.T, maxSize int64) (r *Recorder, path string) {
	path = filepath.Join(t.TempDir(), "locks.jsonl")
	r, err := New(nil, path, time.Second, maxSize)
	dbtest.OK(t, err)
	t.Cleanup(r.file.close)
	return r, path
}

// locked is a lock with a holder, and perhaps a waiter, by their connections.
func locked(key, strategy string, holder, waiter uint64) inspect.Lock {
	l := inspect.Lock{Strategy: strategy, Namespace: "shop", Key: key, Name: key, Stripe: -1, Token: inspect.Value(holder)}
	if holder != 0 {
		l.Holders.List = []inspect.Holder{{Client: inspect.Client{ConnectionID: holder, Program: fmt.Sprint("p", holder)}, Since: inspect.Value(time.Second)}}
	}
	if waiter != 0 {
		l.Waiters.List = []inspect.Waiter{{Client: inspect.Client{ConnectionID: waiter, Program: fmt.Sprint("p", waiter)}, Least: time.Second}}
	}
	return l
}

// looks has the recorder see locks at a time.
func (r *Recorder) looks(t *testing.T, seconds float64, locks ...inspect.Lock) {
	t.Helper()
	r.see(t.Context(), &inspect.Snapshot{Time: after(seconds), Locks: locks}, 0)
	dbtest.OK(t, r.write())
}

// was is who held and waited.
func was(t *testing.T, path string, seconds float64, keys ...string) string {
	t.Helper()
	m, err := At(path, after(seconds), 0, "shop", keys...)
	dbtest.OK(t, err)
	if !m.Known {
		return "not known"
	}
	var out []string
	for _, e := range append(m.Holders, m.Waiters...) {
		out = append(out, e.Key+" "+e.Program+" "+e.What)
	}
	return strings.Join(out, ", ")
}

// TestEachTimeIsToldAsItWas: who held and who waited then, and of a time in which nobody looked that
// nothing is known.
func TestEachTimeIsToldAsItWas(t *testing.T) {
	r, path := recorder(t, 1<<20)
	r.last = after(0)
	r.note(Event{What: Began})
	r.looks(t, 0)
	r.looks(t, 10, locked("a", "row", 1, 2), locked("b", "lease", 3, 4))
	r.looks(t, 20, locked("a", "row", 2, 0), locked("b", "lease", 3, 0)) // who waits for a lease asks again
	r.looks(t, 21, locked("a", "row", 2, 0), locked("b", "lease", 3, 4))
	r.looks(t, 30, locked("b", "lease", 3, 0))
	r.looks(t, 31, locked("b", "lease", 3, 0))
	r.note(Event{What: Failed, Time: after(40), Text: "gone"})
	r.forget()
	dbtest.OK(t, r.write())
	r.note(Event{What: Looked, Time: after(50)})
	r.looks(t, 50, locked("b", "lease", 5, 0))
	r.looks(t, 115, locked("b", "lease", 5, 0))
	r.note(Event{What: Ended, Time: after(120)})
	dbtest.OK(t, r.write())
	for seconds, want := range map[float64]string{
		-1: "not known", 0: "", 9: "", 10: "a p1 holds, b p3 holds, a p2 waits, b p4 waits", 19: "a p1 holds, b p3 holds, a p2 waits, b p4 waits",
		20.5: "a p2 holds, b p3 holds, b p4 waits", 29: "a p2 holds, b p3 holds, b p4 waits", 30.5: "b p3 holds", 39: "b p3 holds",
		45: "not known", 50: "b p5 holds", 114: "b p5 holds", 119: "b p5 holds", 121: "not known", 10_000: "not known",
	} {
		dbtest.Equal(t, fmt.Sprintf("after %v s it is %%q", seconds), was(t, path, seconds), want)
	}
	dbtest.Equal(t, "of one key it is %q", was(t, path, 15, "a"), "a p1 holds, a p2 waits")
	m, err := At(path, after(15), time.Minute, "another", "a")
	dbtest.OK(t, err)
	if len(m.Holders) > 0 || slices.ContainsFunc(m.Around, func(e Event) bool { return e.Key != "" }) {
		t.Errorf("of another namespace it tells %+v", m)
	}
	dbtest.Equal(t, "of another namespace it says %q", m.Gaps, `the record has no key of the namespace "another", but of "shop": see whether it is spelt right`)
	m, err = At(path, after(15), time.Minute, "shop", "a", "aa")
	dbtest.OK(t, err)
	dbtest.Equal(t, "of a key that is not there it says %q", m.Gaps, `the record has nothing of "aa" at any time: see whether it is spelt right`)
}

// TestAWaiterForASlotCountsOnce: it waits for one at a time.
func TestAWaiterForASlotCountsOnce(t *testing.T) {
	r, path := recorder(t, 1<<20)
	r.last = after(0)
	r.note(Event{What: Began})
	slot := func(n int, waiter uint64) inspect.Lock {
		l := locked("k", "lease", uint64(n+1), waiter)
		l.Name, l.Slot, l.Slotted = fmt.Sprint("k", n), n, true
		return l
	}
	r.looks(t, 1, slot(0, 9), slot(1, 0))
	r.looks(t, 2, slot(0, 0), slot(1, 9))
	for _, seconds := range []float64{1, 2} {
		dbtest.Equal(t, fmt.Sprintf("after %v s it is %%q", seconds), was(t, path, seconds), "k p1 holds, k p2 holds, k p9 waits")
	}
	m, err := At(path, after(2), time.Minute, "")
	dbtest.OK(t, err)
	dbtest.Equal(t, "it tells %q", m.Waiters[0].String(), "p9 (connection 9) waits: lease, any slot")
	dbtest.Equal(t, "it tells %q", m.Holders[1].String(), "p2 (connection 2) holds: lease, slot 1, token 2")
}

// TestAWaiterThatAsksAgainElsewhere: who asks again on another connection is no second waiter; who waits beside
// another one is.
func TestAWaiterThatAsksAgainElsewhere(t *testing.T) {
	for _, strategy := range []string{"lease", "advisory", "row"} {
		r, path := recorder(t, 1<<20)
		r.last = after(0)
		r.note(Event{What: Began})
		by := func(waiters ...uint64) inspect.Lock {
			l := locked("k", strategy, 1, 0)
			for _, w := range waiters {
				waiter := locked("k", strategy, 1, w).Waiters.List[0]
				waiter.Program = "p"
				l.Waiters.List = append(l.Waiters.List, waiter)
			}
			return l
		}
		for seconds, look := range []struct {
			by   []uint64
			want string
		}{
			{[]uint64{8}, "k p1 holds, k p waits"},
			{[]uint64{9}, "k p1 holds, k p waits"},
			{[]uint64{9, 10}, "k p1 holds, k p waits, k p waits"},
		} {
			r.looks(t, float64(seconds), by(look.by...))
			dbtest.Equal(t, strategy+": it is %q", was(t, path, float64(seconds)), look.want) // before the next look tells more
		}
	}
}

// TestTheFilesStayWithinTheirBound: but for one look; what is still held after a file was replaced is told.
func TestTheFilesStayWithinTheirBound(t *testing.T) {
	const most = 1 << 16
	r, path := recorder(t, most)
	r.last = after(0)
	r.note(Event{What: Began, Text: "not seen: something"})
	seconds := 0.0
	for n := range uint64(2000) {
		seconds++
		r.looks(t, seconds, locked("long", "row", 1, 0), locked("short", "row", 10+n, 0))
		size := int64(0)
		for _, name := range []string{path, older(path)} {
			if info, err := os.Stat(name); err == nil {
				size += info.Size()
			}
		}
		if size > most+4096 {
			t.Fatalf("after %d looks the files have %d bytes, of at most %d", n, size, most)
		}
	}
	dbtest.Equal(t, "in the end it is %q", was(t, path, seconds), "long p1 holds, short p2009 holds")
	dbtest.Equal(t, "at the beginning it is %q", was(t, path, 1), "not known")
	dbtest.OK(t, os.Truncate(path, r.file.size-10)) // as by a full disk
	if got := was(t, path, seconds-1); !strings.HasPrefix(got, "long p1 holds, short p2008") {
		t.Errorf("of a line that was cut off: %q", got)
	}
	if _, err := New(nil, path, time.Second, 1000); err == nil {
		t.Error("a record may have 1000 bytes")
	}
}

// TestNothingIsKnownAfterARecorderCrashed: from its last event until another one begins.
func TestNothingIsKnownAfterARecorderCrashed(t *testing.T) {
	r, path := recorder(t, 1<<20)
	r.last = after(0)
	r.note(Event{What: Began})
	r.looks(t, 1, locked("a", "row", 1, 0))
	r, err := New(nil, path, time.Second, 1<<20)
	dbtest.OK(t, err)
	defer r.file.close()
	r.last = after(100)
	r.note(Event{What: Began})
	r.looks(t, 100, locked("a", "row", 2, 0))
	for seconds, want := range map[float64]string{50: "not known", 100: "a p2 holds"} {
		dbtest.Equal(t, fmt.Sprintf("after %v s it is %%q", seconds), was(t, path, seconds), want)
	}
}

// TestGapsAreThoseOfTheTime: one that has closed since is not told, nor one that came later; a number that changes
// is no event. They outlive the file in which they were written.
func TestGapsAreThoseOfTheTime(t *testing.T) {
	r, path := recorder(t, 1<<20)
	looks := func(seconds float64, gaps ...inspect.Gap) {
		t.Helper()
		r.see(t.Context(), &inspect.Snapshot{Time: after(seconds), Gaps: gaps, Locks: []inspect.Lock{locked("k", "row", 1, 0)}}, 0)
		dbtest.OK(t, r.write())
	}
	r.last = after(0)
	r.note(Event{What: Began})
	looks(0, inspect.Gap{What: "leases", Why: "no table"})
	looks(10)
	looks(20, inspect.Gap{What: "rows", Why: "2 transactions"})
	looks(30, inspect.Gap{What: "rows", Why: "3 transactions"})
	for seconds, want := range map[float64]string{5: "not seen: leases: no table", 15: "", 25: "not seen: rows: 2 transactions", 35: "not seen: rows: 2 transactions"} {
		m, err := At(path, after(seconds), time.Minute, "")
		dbtest.OK(t, err)
		dbtest.Equal(t, fmt.Sprintf("after %v s: %%q", seconds), m.Gaps, want)
	}
	r.file.most = r.file.size + 1 // so that a new file is begun after the next look
	looks(100, inspect.Gap{What: "rows", Why: "4 transactions"})
	dbtest.OK(t, os.Remove(older(path)))
	m, err := At(path, after(100), 0, "")
	dbtest.OK(t, err)
	dbtest.Equal(t, "in a new file: %q", m.Gaps, "not seen: rows: 2 transactions")
	r.last, r.gaps = after(110), ""
	r.note(Event{What: Began})
	looks(110)
	m, err = At(path, after(110), 0, "")
	dbtest.OK(t, err)
	dbtest.Equal(t, "of a recorder that sees all: %q", m.Gaps, "")
}

// TestAnEndIsOnlyToldWhereItIsKnown: MariaDB shows a row lock only while somebody waits for it, so one that is not
// seen any more may be held, unless another one has the row alone.
func TestAnEndIsOnlyToldWhereItIsKnown(t *testing.T) {
	hides := inspect.Gap{What: "row locks that nobody waits for", Holders: true}
	shared := locked("k", "row", 2, 0)
	shared.Holders.More = true
	for _, test := range []struct {
		name string
		then []inspect.Lock
		gaps []inspect.Gap
		want string
	}{
		{"all is seen", nil, nil, "p1 (connection 1) holds no more: row"},
		{"not all is seen", nil, []inspect.Gap{hides}, "p1 (connection 1) is not seen to hold any more: row; perhaps it does"},
		{"another one has it", []inspect.Lock{locked("k", "row", 2, 0)}, []inspect.Gap{hides}, "p1 (connection 1) holds no more: row"},
		{"another one shares it", []inspect.Lock{shared}, []inspect.Gap{hides}, "p1 (connection 1) is not seen to hold any more: row; perhaps it does"},
	} {
		r, path := recorder(t, 1<<20)
		r.last = after(0)
		r.note(Event{What: Began})
		r.looks(t, 1, locked("k", "row", 1, 0))
		r.see(t.Context(), &inspect.Snapshot{Time: after(2), Locks: test.then, Gaps: test.gaps}, 0)
		dbtest.OK(t, r.write())
		wantTold(t, test.name, path, 2, test.want, "p1")
	}
}

// TestWhoMayAskAgainIsNotSaidToHaveEnded: who waits for a lease is not seen in between, and may ask on another
// connection. That it has the lock is an end.
func TestWhoMayAskAgainIsNotSaidToHaveEnded(t *testing.T) {
	granted := locked("k", "lease", 2, 0)
	granted.Holders.List[0].Client = inspect.Client{Program: "p2", PID: 7} // a lease has no connection
	unseen := inspect.Gap{What: "who has locked rows", Waiters: true}
	for _, test := range []struct {
		name, strategy string
		then           inspect.Lock
		gaps           []inspect.Gap
		want           string
	}{
		{"not seen twice", "lease", locked("k", "lease", 1, 0), nil, "p2 (connection 2) is not seen to wait any more: lease; perhaps it does"},
		{"another asks", "lease", locked("k", "lease", 1, 3), nil, "p2 (connection 2) is not seen to wait any more: lease; perhaps it does"},
		{"it has it", "lease", granted, nil, "p2 (connection 2) waits no more: lease"},
		{"an advisory lock", "advisory", locked("k", "advisory", 2, 0), nil, "p2 (connection 2) waits no more: advisory"},
		{"a row", "row", locked("k", "row", 1, 0), nil, "p2 (connection 2) waits no more: row"},
		{"a row, and not all is seen", "row", locked("k", "row", 1, 0), []inspect.Gap{unseen}, "p2 (connection 2) is not seen to wait any more: row; perhaps it does"},
	} {
		r, path := recorder(t, 1<<20)
		r.last = after(0)
		r.note(Event{What: Began})
		r.looks(t, 1, locked("k", test.strategy, 1, 2))
		for seconds := range 2 {
			r.see(t.Context(), &inspect.Snapshot{Time: after(2 + float64(seconds)), Locks: []inspect.Lock{test.then}, Gaps: test.gaps}, 0)
		}
		dbtest.OK(t, r.write())
		wantTold(t, test.name, path, 3, test.want, "p2 waits")
	}
}

// wantTold checks that the record tells the event want around that time, and of key k nothing with over in it at that time.
func wantTold(t *testing.T, name, path string, seconds float64, want, over string) {
	t.Helper()
	m, err := At(path, after(seconds), time.Minute, "")
	dbtest.OK(t, err)
	if !slices.ContainsFunc(m.Around, func(e Event) bool { return e.String() == want }) {
		t.Errorf("%s: it tells %v", name, m.Around)
	}
	if got := was(t, path, seconds, "k"); strings.Contains(got, over) {
		t.Errorf("%s: then %s", name, got)
	}
}
