package handle

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

func resourceOf(row string, traits strategy.Traits) strategy.Resource {
	p := strategy.Resource{Row: row, Traits: traits}
	p.Key, p.Strategy = row, traits.Name
	return p
}

// TestAHolderInAnErrorIsRecognisedAsThisHandle: a holder in an error is completed where it is
// this handle, for the time that it holds the key.
func TestAHolderInAnErrorIsRecognisedAsThisHandle(t *testing.T) {
	k := New(Connectors{}, Settings{Config: strategy.Config{Owner: "us"}})
	defer k.Close()
	resource := func(traits strategy.Traits, shared bool, lockCtx *hint.LockContext) strategy.Resource {
		p := resourceOf("k", traits)
		p.LockContext, p.Shared = lockCtx, shared
		return p
	}
	asking, another := new(hint.LockContext), new(hint.LockContext)
	check := func(what, program string, lockCtx *hint.LockContext, process, context bool) {
		t.Helper()
		for _, traits := range []strategy.Traits{rowlock.Traits, optimistic.Traits} { // a version waits for those who exclude
			holder := &lockerr.Holder{Program: program}
			err := k.Recognised(&lockerr.Error{Key: "k", Err: lockerr.ErrLocked, Holder: holder}, lockCtx, resource(traits, false, lockCtx))
			var e *lockerr.Error
			if !errors.As(err, &e) || e.Holder.ThisProcess != process || e.Holder.ThisContext != context {
				t.Errorf("%s: %+v, want this process %v, this context %v", what, e.Holder, process, context)
			}
			if holder.ThisProcess || holder.ThisContext {
				t.Errorf("%s: what others may have, too, was changed", what)
			}
		}
	}
	check("nothing is held", "us", asking, false, false)

	row := k.Enter(resource(rowlock.Traits, false, asking), true)
	check("a row", "", asking, true, true)
	check("a row, of another lock context", "", another, true, false)
	row.Leave()
	check("given back", "us", asking, false, false)

	shared := k.Enter(resource(rowlock.Traits, true, another), true)
	check("a shared row", "us", asking, true, false)
	check("a shared row, which somebody else has, too", "them", asking, false, false)
	shared.Leave()

	other := k.Enter(resource(advisory.Traits, false, asking), true)
	check("a lock of the same name that is no row", "us", asking, false, false)
	other.Leave()

	leased := resource(lease.Traits, false, nil)
	one, two := k.EnterHold(leased, another), k.EnterHold(leased, asking)
	check("two holds", "us", asking, true, true)
	two.Leave()
	two.Leave() // nothing to take back
	check("of two holds, the second of which has ended", "us", asking, true, false)
	if !k.Holds() || k.HeldElsewhere(another) {
		t.Error("a hold is not held, or is of a unit of work")
	}
	one.Leave()
	if k.Holds() || k.held.oldest() != 0 {
		t.Error("nothing is held any more")
	}
}

// TestOthersWaitForWhatAnEndedContextGivesBack, of the same row, or of the same advisory lock.
func TestOthersWaitForWhatAnEndedContextGivesBack(t *testing.T) {
	k := New(Connectors{}, Settings{})
	defer k.Close()
	ctx, cancel := context.WithCancel(t.Context())
	row := k.Enter(resourceOf("k", rowlock.Traits), true)
	leased := []strategy.Resource{resourceOf("k", lease.Traits)}
	row.Until(context.Background().Done())
	if k.held.ending(leased) != nil {
		t.Fatal("its context never ends, and it is waited for")
	}
	row.Until(ctx.Done())
	if k.held.ending(leased) != nil {
		t.Fatal("its context goes on, and it is waited for")
	}
	cancel()
	over := k.held.ending(leased)
	if over == nil {
		t.Fatal("its context has ended, and it is not waited for")
	}
	for what, p := range map[string]strategy.Resource{"another row": resourceOf("other", rowlock.Traits), "an advisory lock": resourceOf("k", advisory.Traits)} {
		if k.held.ending([]strategy.Resource{p}) != nil {
			t.Errorf("%s is waited for", what)
		}
	}
	select {
	case <-over:
		t.Fatal("it is over before it has ended")
	default:
	}
	row.Leave()
	<-over
	k.AwaitEnding(t.Context(), leased)
	version := k.Enter(resourceOf("k", optimistic.Traits), true)
	version.Until(ctx.Done())
	if k.held.ending(leased) != nil || k.held.any() {
		t.Error("a version keeps others out")
	}
	version.Leave()
}

// BenchmarkHeld takes and gives back one more lock while many are held.
func BenchmarkHeld(b *testing.B) {
	k := New(Connectors{}, Settings{})
	defer k.Close()
	for n := range 10_000 {
		k.Enter(resourceOf(strconv.Itoa(n), rowlock.Traits), true)
	}
	last := resourceOf("last", rowlock.Traits)
	for b.Loop() {
		k.Enter(last, true).Leave()
	}
}
