package handle

import (
	"errors"
	"strconv"
	"testing"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestRecognised: a holder in an error is completed where it is this handle, for the time
// that it holds the key.
func TestRecognised(t *testing.T) {
	k := New(Connectors{}, Settings{Owner: "us"})
	defer k.Close()
	resource := func(traits strategy.Traits, shared bool, lockCtx *hint.LockContext) strategy.Resource {
		p := resourceOf("k", traits)
		p.LockContext, p.Shared = lockCtx, shared
		return p
	}
	asking, another := new(hint.LockContext), new(hint.LockContext)
	check := func(what, program string, lockCtx *hint.LockContext, process, context bool) {
		t.Helper()
		holder := &lockerr.Holder{Program: program}
		err := k.Recognised(&lockerr.Error{Key: "k", Err: lockerr.ErrLocked, Holder: holder}, lockCtx, resource(rowlock.Traits, false, lockCtx))
		var e *lockerr.Error
		if !errors.As(err, &e) || e.Holder.ThisProcess != process || e.Holder.ThisContext != context {
			t.Errorf("%s: %+v, want this process %v, this context %v", what, e.Holder, process, context)
		}
		if holder.ThisProcess || holder.ThisContext {
			t.Errorf("%s: what others may have, too, was changed", what)
		}
	}
	check("nothing is held", "us", asking, false, false)

	row := resource(rowlock.Traits, false, asking)
	k.Enter(row)
	check("a row", "", asking, true, true)
	check("a row, of another lock context", "", another, true, false)
	k.Leave(row)
	check("given back", "us", asking, false, false)

	shared := resource(rowlock.Traits, true, another)
	k.Enter(shared)
	check("a shared row", "us", asking, true, false)
	check("a shared row, which somebody else has, too", "them", asking, false, false)
	k.Leave(shared)

	leased := resource(lease.Traits, false, nil)
	one, two := OwnedIn(nil, leased, 1), OwnedIn(nil, leased, 2)
	k.Owned.Add(one)
	k.Owned.Add(two)
	k.Owned.Remove(one)
	if len(k.Owned.held) != 1 || k.Owned.held[two] != 1 || !k.Holds() {
		t.Errorf("of two holds, the first of which has ended: %v", k.Owned.held)
	}
	k.Owned.Add(two)
	k.Owned.Remove(two)
	if !k.Holds() {
		t.Error("it was held twice")
	}
	k.Owned.Remove(two)
	k.Owned.Remove(two) // nothing to take back
	if k.Holds() {
		t.Error("nothing is held any more")
	}
}

// BenchmarkOwned takes and gives back one more lock while many are held.
func BenchmarkOwned(b *testing.B) {
	var o owned
	lock := func(n int) OwnedLock { return OwnedLock{row: strconv.Itoa(n), by: new(int)} }
	for n := range 10_000 {
		o.Add(lock(n))
	}
	last := lock(10_000)
	for b.Loop() {
		o.Add(last)
		o.Remove(last)
	}
}
