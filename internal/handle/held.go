package handle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Held is a lock that a unit of work, or a hold, has on a resource, or a version that it remembers. It
// answers three questions. An error that names a holder asks whether that is this process. A statement asks
// whether its lock context holds the key through another handle. And a caller that would not wait asks
// whether the key is being given back.
type Held struct {
	strategy.Resource
	k       *Handle
	lockCtx *hint.LockContext // the lock context that has asked for the lock; nil outside of any
	since   time.Time
	apart   bool // the holder needs a connection of database/sql for its next statement
	read    atomic.Bool

	// Guarded by heldLocks.mu.
	until     <-chan struct{} // Done of the context that ends the lock; nil for none
	givenBack chan struct{}   // closed when the lock is given back; nil while nobody waits for that
}

// heldLocks are the locks of a handle that keep others out, by row. Versions are not among them: they go
// with their lock context, which may never give them back.
type heldLocks struct {
	mu    sync.Mutex
	byRow map[string][]*Held
}

// holdings are the locks and versions that units of work have in one lock context, through any handle.
type holdings struct {
	mu   sync.Mutex
	held []*Held
}

type holdingsKey struct{}

func holdingsOf(lockCtx *hint.LockContext) *holdings {
	return lockCtx.State(holdingsKey{}, func() any { return new(holdings) }).(*holdings)
}

// Enter notes that a unit of work has resource until Leave. apart: the lock is held beside the connections of
// database/sql.
func (h *Handle) Enter(resource strategy.Resource, apart bool) *Held {
	held := h.enter(&Held{Resource: resource, k: h, lockCtx: resource.LockContext, apart: apart})
	if resource.LockContext != nil {
		all := holdingsOf(resource.LockContext)
		all.mu.Lock()
		defer all.mu.Unlock()
		all.held = append(all.held, held)
	}
	return held
}

// EnterHold is Enter for a hold that was taken in lockCtx; lockCtx is nil outside of any.
func (h *Handle) EnterHold(resource strategy.Resource, lockCtx *hint.LockContext) *Held {
	return h.enter(&Held{Resource: resource, k: h, lockCtx: lockCtx, apart: true})
}

func (h *Handle) enter(held *Held) *Held {
	if !held.Traits.Excludes {
		return held
	}
	held.since = time.Now()
	if held.apart {
		h.StarvationGuard.hold()
	}
	h.held.mu.Lock()
	defer h.held.mu.Unlock()
	if h.held.byRow == nil {
		h.held.byRow = make(map[string][]*Held)
	}
	h.held.byRow[held.Row] = append(h.held.byRow[held.Row], held)
	return held
}

// Until notes that the lock h ends with the context whose Done is done.
func (h *Held) Until(done <-chan struct{}) {
	h.k.held.mu.Lock()
	defer h.k.held.mu.Unlock()
	h.until = done
}

// Leave notes that the lock h was given back. Calls after the first do nothing.
func (h *Held) Leave() {
	if h.LockContext != nil {
		all := holdingsOf(h.LockContext)
		all.mu.Lock()
		all.held = slices.DeleteFunc(all.held, func(other *Held) bool { return other == h })
		all.mu.Unlock()
	}
	if h.Traits.Excludes && h.k.held.leave(h) && h.apart {
		h.k.StarvationGuard.done()
	}
}

// leave removes h, and reports whether h was there.
func (hl *heldLocks) leave(h *Held) bool {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	i := slices.Index(hl.byRow[h.Row], h)
	if i < 0 {
		return false
	}
	if hl.byRow[h.Row] = slices.Delete(hl.byRow[h.Row], i, i+1); len(hl.byRow[h.Row]) == 0 {
		delete(hl.byRow, h.Row)
	}
	if h.givenBack != nil {
		close(h.givenBack)
	}
	return true
}

// any reports whether a lock is held.
func (hl *heldLocks) any() bool {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	return len(hl.byRow) > 0
}

// oldest returns for how long the oldest lock is held; 0 without any. Leaderships do not count, since they
// are to last.
func (hl *heldLocks) oldest() (age time.Duration) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, locks := range hl.byRow {
		for _, h := range locks {
			if !h.Leadership {
				age = max(age, time.Since(h.since))
			}
		}
	}
	return age
}

// Recognised completes the holder in err, the error of a request for resources in lockCtx, if this handle is
// the holder. An exclusive key that this handle holds has no other holder. Of a shared one, the program
// name of the holder must be that of this process.
func (h *Handle) Recognised(err error, lockCtx *hint.LockContext, resources ...strategy.Resource) error {
	var e *lockerr.Error
	if !errors.As(err, &e) || e.Holder == nil {
		return err
	}
	h.held.mu.Lock()
	defer h.held.mu.Unlock()
	for _, resource := range resources {
		space := resource.Space()
		if resource.Traits.Table && !resource.Traits.Excludes {
			space = strategy.Rows // a version waits for strategies that exclude
		}
		for _, held := range h.held.byRow[resource.Row] {
			if held.Space() != space || held.Shared && e.Holder.Program != h.Settings.Owner {
				continue
			}
			holder := *e.Holder // other errors may point to the same Holder
			holder.ThisProcess = true
			holder.ThisContext = holder.ThisContext || held.lockCtx != nil && held.lockCtx == lockCtx
			e.Holder = &holder
		}
	}
	return err
}

// Explained completes err, with which a statement without a lock context has failed, if a row stayed locked:
// perhaps a transaction of this handle has locked it.
func (h *Handle) Explained(err error) error {
	if !server.Locked(err) {
		return err
	}
	keys := h.held.inTransactions()
	if len(keys) == 0 {
		return err
	}
	slices.Sort(keys)
	more := ""
	if keys = slices.Compact(keys); len(keys) > 3 {
		keys, more = keys[:3], ", …"
	}
	return server.Saying(err, fmt.Sprintf("this process has transactions open under locks: %s%s;"+
		" a row that one of them has changed stays locked until its end,"+
		" so a statement in mysqllock.Do, or under lockctx.With, that has another context waits for itself;"+
		" pass it the context of the lock", strings.Join(keys, ", "), more))
}

// inTransactions returns the keys of the locks that are held in transactions.
func (hl *heldLocks) inTransactions() (keys []string) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, locks := range hl.byRow {
		for _, h := range locks {
			if h.Traits.Inside {
				keys = append(keys, strconv.Quote(h.Key))
			}
		}
	}
	return keys
}

// givingBack bounds how long a caller that would not wait does wait for a lock that its own process is
// giving back.
const givingBack = time.Second

// AwaitEnding waits until those locks on resources are given back that are still held although their context
// has ended.
func (h *Handle) AwaitEnding(ctx context.Context, resources []strategy.Resource) {
	var limit <-chan time.Time
	for {
		over := h.held.ending(resources)
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

// ending returns a channel that is closed when such a lock on one of resources is given back; nil if there is
// none.
func (hl *heldLocks) ending(resources []strategy.Resource) <-chan struct{} {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, resource := range resources {
		for _, h := range hl.byRow[resource.Row] {
			if h.Traits.Table != resource.Traits.Table { // in the table, row locks and leases exclude each other
				continue
			}
			select {
			case <-h.until:
			default:
				continue
			}
			if h.givenBack == nil {
				h.givenBack = make(chan struct{})
			}
			return h.givenBack
		}
	}
	return nil
}

// HeldElsewhere reports whether units of work of the lock context lockCtx hold something through other handles.
func (h *Handle) HeldElsewhere(lockCtx *hint.LockContext) bool {
	return h.elsewhere(lockCtx, func(*Held) bool { return true })
}

// Read notes that a query has returned data in a transaction, or hold, that has h.
func (h *Held) Read() { h.read.Store(true) }

// ReadElsewhere reports whether the lock context lockCtx has read under a version of another handle, in a
// transaction or hold that is still open. A version keeps nobody out, and is not compared if the decision is
// written through this handle.
func (h *Handle) ReadElsewhere(lockCtx *hint.LockContext) bool {
	return h.elsewhere(lockCtx, func(held *Held) bool { return !held.Traits.Excludes && held.read.Load() })
}

// elsewhere reports whether matches is true of something that the lock context lockCtx has through another handle.
func (h *Handle) elsewhere(lockCtx *hint.LockContext, matches func(*Held) bool) bool {
	if lockCtx == nil {
		return false
	}
	all := holdingsOf(lockCtx)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.ContainsFunc(all.held, func(held *Held) bool { return held.k != h && matches(held) })
}

// Taken returns an error if another unit of work has one of resources because a statement with the same lock
// context lockCtx has asked for it there: through another handle, or in another transaction of this handle. With
// onlyElsewhere Taken looks for other handles alone.
//
// To wait for such a resource would often be to wait for oneself. And a version that is remembered anew is not
// the version under which the lock context may have read.
func (h *Handle) Taken(lockCtx *hint.LockContext, onlyElsewhere bool, resources ...strategy.Resource) error {
	if lockCtx == nil || len(resources) == 0 {
		return nil
	}
	all := holdingsOf(lockCtx)
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, held := range all.held {
		for _, resource := range resources {
			why := ""
			switch {
			case !held.SameAs(resource):
			case held.k != h && held.k.Shares(h, resource.Strategy):
				why = "this lock context of this process already holds the key through another database handle," +
					" and this statement would not be part of that transaction; use that handle, or lockctx.Without"
			case held.k == h && !onlyElsewhere && resource.Slots == 0 && (!held.Shared || !resource.Shared):
				why = "this lock context has asked for the key in another transaction of this process," +
					" of which this statement would not be part; use that transaction, or end it first"
			}
			if why != "" {
				return &lockerr.Error{Op: "lock", Key: resource.Key, Strategy: resource.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(why))}
			}
		}
	}
	return nil
}

// A lock context can be used with several database handles of a program. The functions below tell which of
// these handles mean the same locks, or the same server.

// where identifies the lock table that strategy uses, or the namespace of a strategy without the table; "" if
// the server does not say which one it is.
func (l *Locks) where(strategy string) string {
	server := l.server.Load().Server
	switch {
	case server == "":
		return ""
	case !traitsOf(strategy).Table:
		return server + "\x00" + l.namespace + "\x00" + strategy
	}
	return server + "\x00" + l.namespace + "\x00" + l.table.String()
}

// Shares reports whether a key of strategy means the same lock on both handles.
func (h *Handle) Shares(other *Handle, strategy string) bool {
	if h == other {
		return true
	}
	a, b := h.locks.Load(), other.locks.Load()
	if a == nil || b == nil {
		return false
	}
	where := a.where(strategy)
	return where != "" && where == b.where(strategy)
}

// SameServer reports whether both handles lead to one server, or cluster. Before it says no, it asks both
// servers: after a failover one handle may not have looked yet.
func (h *Handle) SameServer(ctx context.Context, other *Handle) (bool, error) {
	for asked := false; ; asked = true {
		here, err := h.Use(ctx, nil)
		if err != nil {
			return false, err
		}
		there, err := other.Use(ctx, nil)
		if err != nil {
			return false, err
		}
		server := here.server.Load().Server
		same := server != "" && server == there.server.Load().Server
		if same || asked {
			return same, nil
		}
		h.doubt.Store(true)
		other.doubt.Store(true)
	}
}
