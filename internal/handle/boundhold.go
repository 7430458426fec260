package handle

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

// boundHolds are the units of work of one handle that end with a context. A caller that
// would not wait for somebody else waits for those whose context has ended: they are
// giving back what they hold, or are about to.
type boundHolds struct {
	mu sync.Mutex
	of map[boundLock][]*BoundHold
}

// boundLock is what a context-bound hold has: a row of the lock table, or an advisory lock.
type boundLock struct {
	row   string
	space string // what excludes each other is one
}

func boundBy(p strategy.Resource) boundLock {
	if p.Traits.Table {
		return boundLock{row: p.Row}
	}
	return boundLock{p.Row, p.Strategy}
}

// BoundHold is what one unit of work holds until a context has ended. It is guarded by boundHolds.mu.
type BoundHold struct {
	until <-chan struct{} // of the context that ends it
	of    []boundLock
	over  chan struct{} // closed at its end; nil while nobody waits for it
}

// Begin notes a unit of work that holds resources until a context has ended. It returns
// nil where that never ends.
func (ts *boundHolds) Begin(until <-chan struct{}) *BoundHold {
	if until == nil {
		return nil
	}
	return &BoundHold{until: until}
}

// Add notes what else the unit of work holds.
func (ts *boundHolds) Add(t *BoundHold, p strategy.Resource) {
	if t == nil {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	of := boundBy(p)
	if ts.of == nil {
		ts.of = make(map[boundLock][]*BoundHold)
	}
	if !slices.Contains(t.of, of) {
		t.of = append(t.of, of)
		ts.of[of] = append(ts.of[of], t)
	}
}

// End notes that the unit of work has given everything back.
func (ts *boundHolds) End(t *BoundHold) {
	if t == nil {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, of := range t.of {
		left := slices.DeleteFunc(ts.of[of], func(other *BoundHold) bool { return other == t })
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

// AwaitEnding waits until those have ended that hold any of resources though their context is
// over.
func (ts *boundHolds) AwaitEnding(ctx context.Context, resources []strategy.Resource) {
	var limit <-chan time.Time
	for {
		over := ts.ending(resources)
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
// one of resources, and whose context is over; nil where there is none.
func (ts *boundHolds) ending(resources []strategy.Resource) <-chan struct{} {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, p := range resources {
		for _, t := range ts.of[boundBy(p)] {
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
