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

// A decision is what a caller concludes from what it has read in a lock context outside a transaction,
// and writes later. The decision stands as long as the unit of work that the read began, since until
// then nobody else can change the data:
//
//	        read outside a transaction
//	none ───────────────────────────────► standing (decided)
//	                                       │    ▲
//	the unit of work ends: by a commit     │    │ read outside a transaction
//	that may have changed something,       ▼    │
//	or by a rollback                     outstanding (staleRead)
//
// While a decision is outstanding, a statement that writes fails with lockerr.ErrStaleRead, before
// anything is sent. A read inside a transaction, or a hold, is under a lock that is kept to the end of
// that. So a decision on it stands for that transaction or hold, and for nothing after it.

// staleRead is what a lock context remembers of an outstanding decision, for all handles with which it is
// used.
type staleRead struct {
	giver  atomic.Pointer[string] // what gave the lock back; nil where no decision is outstanding
	inHold atomic.Bool            // the read was in a hold that has ended, for whose lock no other of the lock context makes up

	reader atomic.Pointer[handle.Handle] // the handle through which the lock context has last read a table outside a transaction; nil for none
}

// endOfHold and byCommit say in errors what gave a lock back.
const (
	endOfHold = "the end of a hold"
	byCommit  = "the commit of "
)

// holdEnded notes the end of a hold in which the lock context had read.
func (sr *staleRead) holdEnded() {
	giver := endOfHold
	sr.inHold.Store(true)
	sr.giver.CompareAndSwap(nil, &giver)
}

// renewed notes that the lock context has read again.
func (sr *staleRead) renewed() {
	sr.giver.Store(nil)
	sr.inHold.Store(false)
}

// staleReads is the key under which a lock context has its staleRead.
type staleReads struct{}

// staleReadOf returns the staleRead of a lock context.
func staleReadOf(lockCtx *hint.LockContext) *staleRead {
	return lockCtx.State(staleReads{}, func() any { return &staleRead{} }).(*staleRead)
}

// decision is what a context state remembers of the decisions in its lock context.
type decision struct {
	readStands bool       // a decision stands: the unit of work, or one of its grants, keeps others from changing the data
	stale      *staleRead // the outstanding decision; all handles share it
}

// relying is what a unit of work remembers of its transaction, for decisions.
type relying struct {
	changed    string // names the first statement that may have changed data; "" while none has: see unit.noteChange
	fresh      bool   // a query in a transaction or hold of the caller has returned data: see unit.noteAnswer
	relied     bool   // a query outside of any has returned data that the unit's row locks keep others from changing: there, too
	allowStale bool   // the hint that began the unit has AllowStale
	ending     string // what ends the unit, as errors say it: see unit.finish
}

// hasRead notes that the query st has returned data outside a transaction, through k, and reports whether
// a decision may be based on the data. kept: locks keep others from changing the data.
func (d *decision) hasRead(k *handle.Handle, st *statement.Statement, kept bool) bool {
	if d.stale.giver.Load() != nil && !st.Info.Tables {
		return false // the query has shown nothing that could be newer than the decision
	}
	d.stale.renewed()
	if st.Info.Tables {
		d.stale.reader.Store(k)
	}
	d.readStands = d.readStands || kept
	return true
}

// outlived notes that the locks under which a decision stood are given back. giver says by what, for errors.
func (d *decision) outlived(giver string) {
	if d.readStands {
		d.readStands = false
		d.stale.giver.CompareAndSwap(nil, &giver)
	}
}

// checkWrite returns lockerr.ErrStaleRead if st writes and a decision is outstanding. own is the lock context
// of d. relies is of the unit in which st is to run; nil if that is still to begin.
func (d *decision) checkWrite(h *hint.Hint, own *hint.LockContext, relies *relying, st *statement.Statement) error {
	giver, inHold := d.stale.giver.Load(), d.stale.inHold.Load()
	if h != nil && h.LockContext != nil && h.LockContext != own { // st adds the keys of another lock context to a transaction
		other := staleReadOf(h.LockContext)
		giver, inHold = cmp.Or(giver, other.giver.Load()), inHold || other.inHold.Load()
	}
	switch {
	case giver == nil, st.Info.Changes == sqltext.ChangesNothing, d.readStands && !inHold,
		h != nil && h.AllowStale,
		relies != nil && (relies.fresh || relies.allowStale):
		return nil
	}
	committed := ""
	if strings.HasPrefix(*giver, byCommit) {
		committed = "its changes are committed, and this statement was not sent: look at what is there already, and finish it; "
	}
	return lockerr.With(lockerr.ErrStaleRead, fmt.Errorf("the lock under which this was decided was given back by %s; %s"+
		"put what belongs together into one mysqllock.Do or transaction (without one, "+
		"an ORM begins and commits a transaction of its own around each call), "+
		"or read again before each write", *giver, committed))
}
