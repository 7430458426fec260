package inspect_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestWhatIsNotKnownIsNoZero: in text and for programs.
func TestWhatIsNotKnownIsNoZero(t *testing.T) {
	type form struct {
		N    inspect.Known[int] `json:"n"`
		Left inspect.Known[int] `json:"left,omitzero"`
	}
	for _, c := range []struct {
		k          inspect.Known[int]
		text, json string
	}{
		{inspect.Known[int]{}, "not known", `{"n":null}`},
		{inspect.Value(0), "0", `{"n":0,"left":0}`},
		{inspect.Value(7), "7", `{"n":7,"left":7}`},
	} {
		b, err := json.Marshal(form{c.k, c.k})
		dbtest.OK(t, err)
		if c.k.String() != c.text || string(b) != c.json {
			t.Errorf("it is %q and %s, want %q and %s", c.k, b, c.text, c.json)
		}
		var back form
		if dbtest.OK(t, json.Unmarshal(b, &back)); back != (form{c.k, c.k}) {
			t.Errorf("%s reads as %+v", b, back)
		}
	}
	for _, c := range []struct {
		n    inspect.Count
		want string
	}{{inspect.Count{}, "0"}, {inspect.Count{Seen: 2}, "2"}, {inspect.Count{More: true}, "not known"}, {inspect.Count{Seen: 2, More: true}, "≥ 2"}} {
		if c.n.String() != c.want {
			t.Errorf("%+v is %q, want %q", c.n, c.n, c.want)
		}
	}
	if any := (inspect.Seen[int]{More: true}).Any(); !any.IsZero() {
		t.Errorf("whether there is one that nobody sees is %v", any)
	}
}

// account is what an account may do.
type account struct {
	name   string
	grants []string // with the database's name for %s
}

var accounts = []account{
	{"nothing", nil},
	{"the lock table", []string{"SELECT ON %s.*"}},
	{"to write the lock table", []string{"SELECT, INSERT, UPDATE ON %s.*"}},
	{"PROCESS", []string{"PROCESS ON *.*"}},
	{"performance_schema", []string{"SELECT ON performance_schema.*"}},
	{"the lock table, PROCESS", []string{"SELECT ON %s.*", "PROCESS ON *.*"}},
	{"the lock table, performance_schema", []string{"SELECT ON %s.*", "SELECT ON performance_schema.*"}},
	{"all", []string{"ALL ON *.*"}},
}

// as makes the account.
func (s *scratch) as(a account) string {
	s.T.Helper()
	user := s.user("EXECUTE ON " + s.Name + ".*") // to be let in
	dbtest.Exec(s.T, s.root, "REVOKE SELECT, INSERT, UPDATE ON "+s.Name+".* FROM '"+user+"'@'%'")
	for _, g := range a.grants {
		dbtest.Exec(s.T, s.root, "GRANT "+strings.ReplaceAll(g, "%s", s.Name)+" TO '"+user+"'@'%'")
	}
	return user
}

// TestNoCellSaysZeroForWhatIsUnknown: of each account on each server, none says that nobody holds a key that is held,
// or that nobody waits in the server where somebody does. It says how many, or at least how many, or that it is not
// known. Of a key with slots all are held.
func TestNoCellSaysZeroForWhatIsUnknown(t *testing.T) {
	const slots = 2
	onServers(t, func(t *testing.T, s *scratch) {
		all := s.inspector(s.root)
		kinds := map[string][]lockctx.Option{"row slots": {lockctx.Slots(slots)}, "lease slots": {strategies["lease"], lockctx.Slots(slots)}}
		for strategy, option := range strategies {
			kinds[strategy] = []lockctx.Option{option}
		}
		var keys []string
		for kind, options := range kinds {
			key, times := "busy-"+kind, 1
			keys = append(keys, "calm-"+kind, key)
			if strings.HasSuffix(kind, "slots") {
				times = slots
			}
			for range times {
				s.acquire(s.process("root", "holder"), "calm-"+kind, options...) // of another account
				s.acquire(s.process("root", "holder"), key, options...)
			}
			s.queue(func() int { return look(t, all, key).Waiting().Seen }, "root", key, 1, options...)
		}
		for _, a := range accounts {
			i := s.inspector(s.open(s.as(a)))
			for _, try := range []bool{false, true} {
				var snap *inspect.Snapshot
				if err := dbtest.Until(func() error {
					snap = s.lookFor(i, inspect.Filter{Keys: keys, Try: try})
					return renewing(snap)
				}, func(err error) bool { return err == nil }); err != nil {
					t.Errorf("%s, try %v: %v", a.name, try, err)
				}
				var cells []string
				for _, key := range keys {
					of, kind, _ := strings.Cut(key, "-")
					strategy := strings.TrimSuffix(kind, " slots")
					var held, waiting inspect.Count
					for _, l := range snap.Locks {
						if l.Key != key {
							continue
						}
						if l.Strategy != "" && l.Strategy != strategy { // the key of another row, which is free
							t.Errorf("%s, try %v: %s is shown as %s", a.name, try, key, l.Strategy)
						}
						s.checkCell(a, key, l)
						held, waiting = held.Plus(l.Holders.Count()), waiting.Plus(l.Waiters.Count())
					}
					if held.Known() == inspect.Value(0) {
						t.Errorf("%s, try %v: of %s it says that nobody holds it", a.name, try, key)
					}
					if of == "busy" && waiting.Known() == inspect.Value(0) && !between(snap, strategy) {
						t.Errorf("%s, try %v: of %s it says that nobody waits", a.name, try, key)
					}
					cells = append(cells, fmt.Sprintf("%s held %s waiting %s", key, held, waiting))
				}
				s.checkTotals(a, s.lookFor(i, inspect.Filter{Try: try, Deadlocks: true}))
				t.Logf("%-36s try %-5v %s", a.name, try, strings.Join(cells, "; "))
			}
		}
	})
}

// renewing is an error while a lease's row is locked: for a moment, by who renews it.
func renewing(snap *inspect.Snapshot) error {
	for _, l := range snap.Locks {
		if l.Strategy == "row" && strings.Contains(l.Key, "-lease") {
			return fmt.Errorf("the row of %s is locked: %+v", l.Key, l.Holders)
		}
	}
	return nil
}

// between says that a waiter for the strategy may be between two questions, while it is not
// seen, although all who ask are.
func between(snap *inspect.Snapshot, strategy string) bool {
	_, hidden := snap.Incomplete(strategy)
	return !hidden
}

func (s *scratch) lookFor(i *inspect.Inspector, f inspect.Filter) *inspect.Snapshot {
	s.T.Helper()
	var snap *inspect.Snapshot
	s.copy.fresh(func() {
		var err error
		snap, err = i.Snapshot(dbtest.Limited(s.T), f)
		dbtest.OK(s.T, err)
	})
	return snap
}

// checkCell checks what is said of a lock that is held.
func (s *scratch) checkCell(a account, key string, l inspect.Lock) {
	s.T.Helper()
	if held, ok := l.Holders.Any().Get(); ok && !held {
		s.T.Errorf("%s: nobody holds %s: %+v", a.name, key, l)
	}
	if token, ok := l.Token.Get(); ok && token == 0 && l.Strategy == "lease" {
		s.T.Errorf("%s: the lease on %s has token 0", a.name, key)
	}
	for _, h := range l.Holders.List {
		if within, ok := h.Within.Get(); ok && within == 0 {
			s.T.Errorf("%s: the transaction of %s is of 0s", a.name, key)
		}
		if l.Strategy == "advisory" && h.Locks.Seen < 1 && !h.Locks.More {
			s.T.Errorf("%s: the connection that holds %s has no lock", a.name, key)
		}
		if text := h.Activity.String(); strings.Contains(text, "for 0s") {
			s.T.Errorf("%s: the holder of %s is %s", a.name, key, text)
		}
	}
}

// checkTotals checks the numbers over all fourteen locks and five waiters.
func (s *scratch) checkTotals(a account, snap *inspect.Snapshot) {
	s.T.Helper()
	if held := snap.Held(); !held.More && held.Seen < 14 {
		s.T.Errorf("%s: of 14 locks are held %v", a.name, held)
	}
	if unseen, ok := snap.Unseen.Get(); ok && unseen == 0 {
		if hidden, _ := snap.Incomplete("row"); hidden {
			s.T.Errorf("%s: no row lock is hidden, and some may be: %+v", a.name, snap.Gaps)
		}
	}
	if n, ok := snap.Deadlocks.Get(); ok && gap(snap, "how many deadlocks") != nil {
		s.T.Errorf("%s: the deadlocks are %d, and not told", a.name, n)
	}
}

// TestNamedLocksThatAreNotWatchedAreAGap: on MariaDB performance_schema does not watch them unless it is told to.
// That is no list without any.
func TestNamedLocksThatAreNotWatchedAreAGap(t *testing.T) {
	dbtest.OnOwnServers(t, func(d *dbtest.Database) *scratch { return newScratch(plainMariaDB, d) }, func(t *testing.T, s *scratch) {
		if !s.MariaDB() {
			t.Skip("MySQL watches them by itself")
		}
		s.acquire(s.process("root", "holder"), "k", lockctx.Advisory())
		i := s.inspector(s.root)
		if snap := look(t, i); snap.Held().Known() == inspect.Value(0) {
			t.Errorf("nobody holds an advisory lock: %+v", snap)
		}
		if l := find(look(t, i, "k"), "advisory", "k"); l == nil || len(l.Holders.List) != 1 || !l.Holders.List[0].Locks.More {
			t.Errorf("asked for the key it is %+v", l)
		}
	}, "--performance-schema=ON")
}

// TestATokenThatIsNotKnownIsNotZero: that of a row lock, without SELECT on the lock table.
func TestATokenThatIsNotKnownIsNotZero(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		if !s.mysql() {
			t.Skip("MariaDB shows no row lock to such an account")
		}
		s.acquire(s.process("root", "holder"), "k")
		i := s.inspector(s.open(s.as(account{"performance_schema", []string{"SELECT ON performance_schema.*"}})))
		for _, keys := range [][]string{nil, {"k"}} {
			if l := find(look(t, i, keys...), "row", "k"); l == nil || !l.Token.IsZero() || !l.Versioned.IsZero() {
				t.Errorf("it is %+v", l)
			}
		}
	})
}
