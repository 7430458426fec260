package handle

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

// tenures are the units of work of one handle that end with a context. A caller that
// would not wait for somebody else waits for those whose context has ended: they are
// giving back what they hold, or are about to.
type tenures struct {
	mu sync.Mutex
	of map[tenureOf][]*Tenure
}

// tenureOf is what a tenure is of: a row of the lock table, or an advisory lock.
type tenureOf struct {
	row   string
	space string // what excludes each other is one
}

func ofPlace(p strategy.Place) tenureOf {
	if p.Traits.Table {
		return tenureOf{row: p.Row}
	}
	return tenureOf{p.Row, p.Strategy}
}

// Tenure is that of one unit of work. It is guarded by tenures.mu.
type Tenure struct {
	until <-chan struct{} // of the context that ends it
	of    []tenureOf
	over  chan struct{} // closed at its end; nil while nobody waits for it
}

// Begin notes a unit of work that holds places until a context has ended. It returns
// nil where that never ends.
func (ts *tenures) Begin(until <-chan struct{}) *Tenure {
	if until == nil {
		return nil
	}
	return &Tenure{until: until}
}

// Add notes what else the unit of work holds.
func (ts *tenures) Add(t *Tenure, p strategy.Place) {
	if t == nil {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	of := ofPlace(p)
	if ts.of == nil {
		ts.of = make(map[tenureOf][]*Tenure)
	}
	if !slices.Contains(t.of, of) {
		t.of = append(t.of, of)
		ts.of[of] = append(ts.of[of], t)
	}
}

// End notes that the unit of work has given everything back.
func (ts *tenures) End(t *Tenure) {
	if t == nil {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, of := range t.of {
		left := slices.DeleteFunc(ts.of[of], func(other *Tenure) bool { return other == t })
		if len(left) > 0 {
			ts.of[of] = left
		} else {
			delete(ts.of, of)
		}
	}
	t.of = nil
	if t.over != nil {
		close(t.over)
	}
}

// givingBack bounds how long a caller that would not wait does so for what its own
// process is giving back.
const givingBack = time.Second

// Settle waits until those have ended that hold any of places though their context is
// over.
func (ts *tenures) Settle(ctx context.Context, places []strategy.Place) {
	var limit <-chan time.Time
	for {
		over := ts.ending(places)
		if over == nil {
			return
		}
		if limit == nil {
			timer := time.NewTimer(givingBack)
			defer timer.Stop()
			limit = timer.C
		}
		select {
		case <-over:
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}

// ending returns a channel that is closed when a unit of work has ended which holds
// one of places, and whose context is over; nil where there is none.
func (ts *tenures) ending(places []strategy.Place) <-chan struct{} {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, p := range places {
		for _, t := range ts.of[ofPlace(p)] {
			select {
			case <-t.until:
			default:
				continue
			}
			if t.over == nil {
				t.over = make(chan struct{})
			}
			return t.over
		}
	}
	return nil
}
