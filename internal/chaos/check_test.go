package chaos

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestEachCheckFindsWhatItIsForAndNothingElse(t *testing.T) {
	grant := func(hold string, token uint64, call, ret int64) event {
		return event{Kind: kindGrant, Job: "lease", Key: "k", Hold: hold, Token: token, Call: call, Return: ret}
	}
	share := func(hold string, call, ret int64) event {
		return event{Kind: kindGrant, Job: "row", Key: "k", Hold: hold, Shared: true, Call: call, Return: ret}
	}
	use := func(hold string, call, ret int64) event {
		return event{Kind: kindUse, Job: "lease", Key: "k", Hold: hold, Call: call, Return: ret}
	}
	shares := func(hold string, call, ret int64) event {
		return event{Kind: kindUse, Job: "row", Key: "k", Hold: hold, Shared: true, Call: call, Return: ret}
	}
	believe := func(hold string, call int64) event { // call is when the holder ought to know at the latest
		call += int64(noticeOfLease)
		return event{Kind: kindBelief, Job: "lease", Key: "k", Hold: hold, Call: call, Return: call + 1, client: "c"}
	}
	stall := func(call, ret int64) event { return event{Kind: kindStall, Call: call, Return: ret, client: "c"} }
	release := func(hold string, call, ret int64) event {
		return event{Kind: kindRelease, Job: "lease", Key: "k", Hold: hold, Call: call, Return: ret}
	}
	advisory := func(e event) event { e.Job = "advisory"; return e }
	for name, test := range map[string]struct {
		events []event
		right  bool
	}{
		"one after the other":                     {[]event{grant("a", 1, 1, 2), use("a", 3, 4), release("a", 5, 6), grant("b", 2, 4, 8), release("b", 9, 10)}, true},
		"two at a time":                           {[]event{grant("a", 1, 1, 2), grant("b", 2, 3, 4), release("a", 5, 6), release("b", 7, 8)}, false},
		"two row locks at a time":                 {[]event{grant("a", 0, 1, 2), grant("b", 0, 3, 4), use("a", 5, 6)}, false},
		"a token goes back":                       {[]event{grant("a", 2, 1, 2), release("a", 3, 4), grant("b", 1, 5, 6)}, false},
		"a token comes twice":                     {[]event{grant("a", 1, 1, 2), release("a", 3, 4), grant("b", 1, 5, 6)}, false},
		"a row lock between two leases":           {[]event{grant("a", 1, 1, 2), release("a", 3, 4), grant("b", 0, 5, 6), release("b", 7, 8), grant("c", 2, 9, 10)}, true},
		"another's release":                       {[]event{grant("a", 1, 1, 2), grant("b", 2, 3, 4), release("a", 5, 6)}, false},
		"a use that overlaps the next grant":      {[]event{grant("a", 1, 1, 2), use("a", 3, 6), grant("b", 2, 4, 7)}, true},
		"a loss that nobody saw":                  {[]event{grant("a", 1, 1, 2), use("a", 3, 4), grant("b", 2, 5, 6)}, true},
		"a use after the loss":                    {[]event{grant("a", 1, 1, 2), grant("b", 2, 3, 4), use("a", 5, 6)}, false},
		"a belief after the loss":                 {[]event{grant("a", 1, 1, 2), grant("b", 2, 3, 4), believe("a", 5)}, false},
		"the same of a process that stood still":  {[]event{grant("a", 1, 1, 2), grant("b", 2, 3, 4), believe("a", 6), stall(2, int64(noticeOfLease))}, true},
		"a belief when the next grant is sent":    {[]event{grant("a", 1, 1, 2), believe("a", 5), grant("b", 2, 3, 6)}, true},
		"many readers":                            {[]event{share("a", 1, 2), share("b", 3, 4), shares("a", 5, 6), shares("b", 7, 8)}, true},
		"a reader beside a writer":                {[]event{share("a", 1, 2), grant("b", 1, 3, 4), shares("a", 5, 6)}, false},
		"a writer beside a reader":                {[]event{grant("b", 1, 1, 2), share("a", 3, 4), use("b", 5, 6)}, false},
		"an advisory lock that was not confirmed": {[]event{advisory(grant("a", 0, 1, 2)), advisory(grant("b", 0, 3, 4)), advisory(use("b", 5, 6)), advisory(release("a", 7, 8))}, true},
		"two of which both are":                   {[]event{advisory(grant("a", 0, 1, 2)), advisory(use("a", 3, 4)), advisory(use("b", 5, 6)), advisory(use("a", 7, 8))}, false},
		"a commit that comes after another's": {
			[]event{
				grant("a", 1, 1, 2),
				{Kind: kindCommit, Job: "lease", Key: "k", Op: "x", Seq: 1, Call: 3},
				grant("b", 2, 4, 5),
				{Kind: kindUse, Job: "lease", Key: "k", Hold: "b", Call: 6, Return: 7, client: "b"},
				{Kind: kindRead, Job: "lease", Key: "k", Op: "y", Seq: 0, Call: 8, Return: 9},
				use("a", 3, 10),
			},
			false,
		},
	} {
		a := &arena{history: &history{events: test.events}}
		if wrong := a.history.checkLocks(a.unsure, a.doubtful); (len(wrong) == 0) != test.right {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}

// TestChecksOfSections is the same for what a crew has written down.
func TestChecksOfSections(t *testing.T) {
	for _, test := range []struct {
		name  string
		wrong int
		all   []section
	}{
		{"one after the other", 0, []section{{key: "k", began: 1, ended: 2}, {key: "k", began: 2, ended: 3}}},
		{"two at a time", 1, []section{{key: "k", began: 1, ended: 3}, {key: "k", began: 2, ended: 4}}},
		{"two keys", 0, []section{{key: "k", began: 1, ended: 3}, {key: "l", began: 2, ended: 4}}},
		{"two who share", 0, []section{{key: "k", shared: true, began: 1, ended: 3}, {key: "k", shared: true, began: 2, ended: 4}}},
		{"one who shares", 1, []section{{key: "k", shared: true, began: 1, ended: 3}, {key: "k", began: 2, ended: 4}}},
		{"a long one", 1, []section{{key: "k", began: 1, ended: 9}, {key: "k", shared: true, began: 2, ended: 3}, {key: "k", shared: true, began: 4, ended: 5}}},
	} {
		if wrong := wrongOf(test.all); len(wrong) != test.wrong {
			t.Errorf("%s: %v", test.name, wrong)
		}
	}
}

// TestChecksOfTheBooks is the same for what is in the database.
func TestChecksOfTheBooks(t *testing.T) {
	state := func(seq uint64) account { return account{"k", seq, capital - int64(seq), capital + int64(seq)} }
	step := func(op string, seq uint64) entry { return entry{op, state(seq), state(seq - 1)} }
	try := func(op string) event { return event{Kind: kindTry, Job: "row", Op: op, Call: 1} }
	read := func(seq uint64, call, ret int64) event {
		return event{Kind: kindRead, Job: "row", Op: fmt.Sprint("read at ", call), Key: "k", Seq: seq, Call: call, Return: ret}
	}
	commit := func(op string, seq uint64, call int64) event {
		return event{Kind: kindCommit, Job: "row", Op: op, Key: "k", Seq: seq, Call: call}
	}
	end := func(op string, r result, ret int64) event {
		return event{Kind: kindEnd, Job: "row", Op: op, Result: r, Return: ret}
	}
	for name, test := range map[string]struct {
		entries []entry
		events  []event
		is      account
		right   bool
	}{
		"acknowledged": {
			[]entry{step("x", 1), step("y", 2)},
			[]event{try("x"), commit("x", 1, 2), end("x", done, 3), read(1, 4, 5), try("y"), commit("y", 2, 6), end("y", done, 7)},
			state(2),
			true,
		},
		"unknown, and it is there":     {[]entry{step("x", 1)}, []event{try("x"), commit("x", 1, 2), end("x", unknown, 3), read(0, 4, 5), read(1, 6, 7)}, state(1), true},
		"unknown, and it is not there": {nil, []event{try("x"), commit("x", 1, 2), end("x", unknown, 3), read(0, 4, 5)}, state(0), true},
		"of a client that was killed":  {[]entry{step("x", 1)}, []event{try("x"), commit("x", 1, 2)}, state(1), true},
		"acknowledged, and not there":  {nil, []event{try("x"), commit("x", 1, 2), end("x", done, 3)}, state(0), false},
		"refused, and there":           {[]entry{step("x", 1)}, []event{try("x"), commit("x", 1, 2), end("x", lost, 3)}, state(1), false},
		"there, and never committed":   {[]entry{step("x", 1)}, []event{try("x"), end("x", busy, 3)}, state(1), false},
		"there twice":                  {[]entry{step("x", 1), step("x", 1)}, []event{try("x"), commit("x", 1, 2), end("x", done, 3)}, state(1), false},
		"a lost update":                {[]entry{step("x", 1), {"y", state(1), state(1)}}, []event{commit("x", 1, 2), end("x", done, 3), commit("y", 1, 2), end("y", done, 3)}, state(1), false},
		"the account is another":       {[]entry{step("x", 1)}, []event{try("x"), commit("x", 1, 2), end("x", done, 3)}, account{"k", 1, capital, capital}, false},
		"money is made":                {nil, nil, account{"k", 0, capital, capital + 1}, false},
		"a stale read":                 {[]entry{step("x", 1)}, []event{try("x"), commit("x", 1, 2), end("x", done, 3), read(0, 4, 5)}, state(1), false},
		"a read of what is not there":  {nil, []event{try("x"), commit("x", 1, 2), end("x", lost, 3), read(1, 4, 5)}, state(0), false},
		"a reader sees a write": {
			[]entry{step("x", 1)},
			[]event{
				try("x"), commit("x", 1, 2), end("x", done, 5),
				{Kind: kindRead, Job: "row", Op: "r", Key: "k", Seq: 0, Call: 1, Return: 3},
				{Kind: kindRead, Job: "row", Op: "r", Key: "k", Seq: 1, Call: 4, Return: 6},
			},
			state(1),
			false,
		},
	} {
		b := &books{accounts: []account{test.is}, written: make(map[string]uint64)}
		for _, e := range test.entries {
			b.add(e)
		}
		a := &arena{history: &history{events: test.events}}
		if wrong, _ := a.judge(b); (len(wrong) == 0) != test.right {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}

// TestChecksBeforeACrash: a read may have seen what the crash has undone, if that can have
// been on its way to the disk.
func TestChecksBeforeACrash(t *testing.T) {
	const crash = int64(time.Minute)
	for name, test := range map[string]struct {
		read  int64
		right bool
	}{
		"right before it":  {crash - int64(time.Millisecond), true},
		"while it is down": {crash + 1, true},
		"long before it":   {crash - int64(10*time.Second), false},
	} {
		say := func(k kind, op string, seq uint64, at int64) event {
			return event{Kind: k, Job: "row", Op: op, Key: "k", Seq: seq, Call: at, Return: at + 1}
		}
		a := &arena{
			windows: []*window{{fault: serverKilled, from: crash, back: crash + int64(3*time.Second)}},
			history: &history{events: []event{
				{Kind: kindTry, Job: "row", Op: "x", Call: 1},
				{Kind: kindCommit, Job: "row", Op: "x", Key: "k", Seq: 1, Call: 2},
				say(kindRead, "y", 1, test.read), say(kindRead, "z", 0, crash+int64(10*time.Second)),
				{Kind: kindEnd, Job: "row", Op: "x", Result: unknown, Return: crash + 2},
			}},
		}
		b := &books{accounts: []account{{"k", 0, capital, capital}}, written: make(map[string]uint64)}
		if wrong, _ := a.judge(b); (len(wrong) == 0) != test.right {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}

// TestChecksWhileTheClockIsSet: that the holder of a lease believes in it is right for
// moments after the server's clock was set, and that it commits is not.
func TestChecksWhileTheClockIsSet(t *testing.T) {
	const set, later = int64(10), int64(10 * ttl)
	say := func(k kind, hold string, at int64) event {
		return event{Kind: k, Job: "lease", Key: "k", Hold: hold, Call: at, Return: at + 1}
	}
	grants := []event{say(kindGrant, "a", 1), say(kindGrant, "b", set+5)}
	for name, test := range map[string]struct {
		last  event
		right bool
	}{
		"a belief, soon":  {say(kindBelief, "a", set+int64(ttl)), true},
		"a belief, later": {say(kindBelief, "a", later), false},
		"a commit, soon":  {say(kindUse, "a", set+int64(ttl)), false},
	} {
		a := &arena{history: &history{events: slices.Concat(grants, []event{test.last})}}
		a.clockWasSet(set)
		if wrong, _ := a.judge(&books{}); (len(wrong) == 0) != test.right {
			t.Errorf("%s: %v", name, wrong)
		}
	}
}
