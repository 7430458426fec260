package handle

import (
	"context"
	"testing"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

func placeOf(row string, traits strategy.Traits) strategy.Place {
	p := strategy.Place{Row: row, Traits: traits}
	p.Key, p.Strategy = row, traits.Name
	return p
}

// TestTenures: others wait for what is given back because a context has ended, of the same
// row, or of the same advisory lock.
func TestTenures(t *testing.T) {
	var ts tenures
	ctx, cancel := context.WithCancel(t.Context())
	tenure := ts.Begin(ctx.Done())
	ts.Add(tenure, placeOf("k", rowlock.Traits))
	ts.Add(tenure, placeOf("k", rowlock.Traits))
	leased := []strategy.Place{placeOf("k", lease.Traits)}
	if ts.ending(leased) != nil {
		t.Fatal("its context goes on, and it is waited for")
	}
	cancel()
	over := ts.ending(leased)
	if over == nil {
		t.Fatal("its context has ended, and it is not waited for")
	}
	for what, p := range map[string]strategy.Place{"another row": placeOf("other", rowlock.Traits), "an advisory lock": placeOf("k", advisory.Traits)} {
		if ts.ending([]strategy.Place{p}) != nil {
			t.Errorf("%s is waited for", what)
		}
	}
	select {
	case <-over:
		t.Fatal("it is over before it has ended")
	default:
	}
	ts.End(tenure)
	<-over
	ts.Settle(t.Context(), leased)
	if len(ts.of) != 0 {
		t.Errorf("still noted: %v", ts.of)
	}
}

// TestTenureWithoutEnd: what ends with no context is not noted.
func TestTenureWithoutEnd(t *testing.T) {
	var ts tenures
	tenure := ts.Begin(context.Background().Done())
	ts.Add(tenure, placeOf("k", rowlock.Traits))
	ts.End(tenure)
	if tenure != nil || len(ts.of) != 0 {
		t.Errorf("noted: %v, %v", tenure, ts.of)
	}
}
