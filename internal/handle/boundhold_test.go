package handle

import (
	"context"
	"testing"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

func resourceOf(row string, traits strategy.Traits) strategy.Resource {
	p := strategy.Resource{Row: row, Traits: traits}
	p.Key, p.Strategy = row, traits.Name
	return p
}

// TestBoundHolds: others wait for what is given back because a context has ended, of the same
// row, or of the same advisory lock.
func TestBoundHolds(t *testing.T) {
	var ts boundHolds
	ctx, cancel := context.WithCancel(t.Context())
	boundHold := ts.Begin(ctx.Done())
	ts.Add(boundHold, resourceOf("k", rowlock.Traits))
	ts.Add(boundHold, resourceOf("k", rowlock.Traits))
	leased := []strategy.Resource{resourceOf("k", lease.Traits)}
	if ts.ending(leased) != nil {
		t.Fatal("its context goes on, and it is waited for")
	}
	cancel()
	over := ts.ending(leased)
	if over == nil {
		t.Fatal("its context has ended, and it is not waited for")
	}
	for what, p := range map[string]strategy.Resource{"another row": resourceOf("other", rowlock.Traits), "an advisory lock": resourceOf("k", advisory.Traits)} {
		if ts.ending([]strategy.Resource{p}) != nil {
			t.Errorf("%s is waited for", what)
		}
	}
	select {
	case <-over:
		t.Fatal("it is over before it has ended")
	default:
	}
	ts.End(boundHold)
	<-over
	ts.AwaitEnding(t.Context(), leased)
	if len(ts.of) != 0 {
		t.Errorf("still noted: %v", ts.of)
	}
}

// TestBoundHoldWithoutEnd: what ends with no context is not noted.
func TestBoundHoldWithoutEnd(t *testing.T) {
	var ts boundHolds
	boundHold := ts.Begin(context.Background().Done())
	ts.Add(boundHold, resourceOf("k", rowlock.Traits))
	ts.End(boundHold)
	if boundHold != nil || len(ts.of) != 0 {
		t.Errorf("noted: %v, %v", boundHold, ts.of)
	}
}
