package inspect

import (
	"testing"
	"time"
)

// TestNoLockSeemsOlderThanItIs: while a lock is seen in the same hands, its age has a bound from
// earlier looks: a lease with one token, and a row lock in one transaction.
func TestNoLockSeemsOlderThanItIs(t *testing.T) {
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	leased := func(token uint64) Lock {
		return Lock{Strategy: lease, Name: "k", Token: Value(token), Holders: Seen[Holder]{List: []Holder{{}}}}
	}
	locked := func(conn uint64, least, within float64) Lock {
		h := Holder{Client: Client{ConnectionID: conn}, Least: seconds(least)}
		if within > 0 {
			h.Within = Value(seconds(within))
		}
		return Lock{Strategy: row, Name: "r", Holders: Seen[Holder]{List: []Holder{h}}}
	}
	dated := locked(1, 0, 30)
	dated.Holders.List[0].Since = Value(4 * time.Second)
	type step struct {
		at    float64
		locks []Lock
		want  float64
	}
	on := func(at float64, want float64, locks ...Lock) step { return step{at, locks, want} }
	for name, steps := range map[string][]step{
		"a lease":               {on(0, 0, leased(1)), on(9, 9, leased(1)), on(11, 11, leased(1)), on(12, 0, leased(2))},
		"a lease, not seen":     {on(0, 0, leased(1)), on(5, 0), on(9, 0, leased(1))},
		"a transaction, pinged": {on(10, 10, locked(1, 10, 12)), on(20, 20, locked(1, 3.3, 22)), on(21, 21, locked(1, 0, 23))},
		"another transaction":   {on(10, 10, locked(1, 10, 12)), on(20, 3, locked(1, 3, 8))},
		"perhaps another one":   {on(10, 10, locked(1, 10, 12)), on(20, 3, locked(1, 3, 9.5))},
		"another connection":    {on(10, 10, locked(1, 10, 12)), on(20, 3, locked(2, 3, 22))},
		"no transaction known":  {on(10, 10, locked(1, 10, 0)), on(20, 3, locked(1, 3, 0))},
		"a known time":          {on(10, 10, locked(1, 10, 12)), on(20, 0, dated)},
	} {
		for _, keys := range [][]string{nil, {"k"}} {
			var m memory
			for i, step := range steps {
				now := noon.Add(seconds(step.at))
				m.follow(Filter{Keys: keys}, step.locks, now, now)
				for _, l := range step.locks {
					if got := l.Holders.List[0].Least.Seconds(); got != step.want {
						t.Errorf("%s, step %d: it is held for %v s at least, want %v", name, i, got, step.want)
					}
					l.Holders.List[0].Least = steps[i].locks[0].Holders.List[0].Least
				}
			}
		}
	}
	var m memory
	m.follow(Filter{}, []Lock{leased(1)}, noon, noon)
	other := []Lock{leased(1)}
	m.follow(Filter{Keys: []string{"k"}}, other, noon.Add(time.Second), noon.Add(time.Second)) // which may not have looked at it in between
	if got := other[0].Holders.List[0].Least; got != 0 {
		t.Errorf("from a look at other keys it is held for %v at least", got)
	}
	again := []Lock{leased(1)}
	m.follow(Filter{}, again, noon.Add(2*time.Second), noon.Add(2*time.Second)) // others ask in between
	if got := again[0].Holders.List[0].Least; got != 2*time.Second {
		t.Errorf("after a look at other keys it is held for %v at least", got)
	}
}
