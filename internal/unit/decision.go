package unit

import (
	"cmp"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// A decision is what a caller makes of what it has read in a lock context outside a
// transaction, and writes later. It stands as long as the unit of work that the read
// began, since nobody else can change what was read:
//
//	        read outside a transaction
//	none ───────────────────────────────► standing (decided)
//	                                       │    ▲
//	the unit of work ends: by a commit     │    │ read outside a transaction
//	that may have changed something,       ▼    │
//	or by a rollback                     outstanding (staleRead)
//
// While one is outstanding, what writes fails with lockerr.ErrStaleRead, before anything is
// sent. A read inside a transaction, or a hold, is under a lock that is kept to its
// end, so it is enough for that transaction, and for nothing after it.

// staleRead is what a lock context remembers of an outstanding decision, on all
// handles that it is used with.
type staleRead struct {
	by     atomic.Pointer[string] // what gave the lock back; nil where no decision is outstanding
	inHold atomic.Bool            // it was read under a hold that has ended: what else is standing does not keep it

	on atomic.Pointer[handle.Handle] // through which the lock context has read a table last, outside a transaction; nil for none
}

// What gives a lock back, as errors say it.
const (
	endOfHold = "the end of a hold"
	byCommit  = "the commit of "
)

// holdEnded notes that a hold has ended in which the lock context had read.
func (sr *staleRead) holdEnded() {
	by := endOfHold
	sr.inHold.Store(true)
	sr.by.CompareAndSwap(nil, &by)
}

// renewed notes that the lock context has read again.
func (sr *staleRead) renewed() {
	sr.by.Store(nil)
	sr.inHold.Store(false)
}

// staleReads is the key under which a lock context has its staleRead.
type staleReads struct{}

// staleReadOf returns that of a lock context.
func staleReadOf(lockCtx *hint.LockContext) *staleRead {
	return lockCtx.State(staleReads{}, func() any { return &staleRead{} }).(*staleRead)
}

// decision is what a context state remembers of the decisions in its lock context.
type decision struct {
	readStands bool       // the unit of work, or one of its grants, keeps what was read outside a transaction from being changed
	stale      *staleRead // what was decided on a read whose lock has gone; of all handles
}

// relying is what a unit of work remembers of its transaction.
type relying struct {
	changed    string // the first thing in it that may have changed data; "" while nothing has
	fresh      bool   // a query in the caller's transaction, or hold, has returned data
	relied     bool   // a query outside of one has returned data that its row locks keep from being changed
	allowStale bool   // it was begun by AllowStale
	ending     string // what ends it
}

// hasRead notes that a query, st, has returned data outside a transaction, through k, and
// reports whether a decision may be based on it. kept: locks keep it from being changed.
func (d *decision) hasRead(k *handle.Handle, st *statement.Statement, kept bool) bool {
	if d.stale.by.Load() != nil && !st.Info.Tables {
		return false // it has shown nothing that could be new
	}
	d.stale.renewed()
	if st.Info.Tables {
		d.stale.on.Store(k)
	}
	d.readStands = d.readStands || kept
	return true
}

// outlived notes that the locks under which a decision stood went with by.
func (d *decision) outlived(by string) {
	if d.readStands {
		d.readStands = false
		d.stale.by.CompareAndSwap(nil, &by)
	}
}

// refuses returns lockerr.ErrStaleRead where st writes and a decision is outstanding. own is the
// lock context that d is of. in is of the unit that it is to run in; nil where that is still to begin.
func (d *decision) refuses(h *hint.Hint, own *hint.LockContext, in *relying, st *statement.Statement) error {
	by, inHold := d.stale.by.Load(), d.stale.inHold.Load()
	if h != nil && h.LockContext != nil && h.LockContext != own { // of another lock context, where st adds keys to a transaction
		other := staleReadOf(h.LockContext)
		by, inHold = cmp.Or(by, other.by.Load()), inHold || other.inHold.Load()
	}
	switch {
	case by == nil, st.Info.Changes == sqltext.ChangesNothing, d.readStands && !inHold,
		h != nil && h.AllowStale,
		in != nil && (in.fresh || in.allowStale):
		return nil
	}
	committed := ""
	if strings.HasPrefix(*by, byCommit) {
		committed = "its changes are committed, and this statement was not sent: look at what is there already, and finish it; "
	}
	return lockerr.With(lockerr.ErrStaleRead, fmt.Errorf("the lock under which this was decided was given back by %s; %s"+
		"put what belongs together into one mysqllock.Do or transaction (without one, "+
		"an ORM begins and commits a transaction of its own around each call), "+
		"or read again before each write", *by, committed))
}
