package handle

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// owned are the locks that a handle holds now, so that an error which names the holder
// can say that it is this very process.
type owned struct {
	mu   sync.Mutex
	held map[OwnedLock]int // how often each is held
}

// OwnedLock is one of these.
type OwnedLock struct {
	row     string
	space   string
	key     string // as the caller names it
	shared  bool
	inside  bool              // it is held in a transaction
	by      any               // the hold that has it; nil for a unit of work
	lockCtx *hint.LockContext // the lock context that holds it, or that the hold was taken in; nil outside of any
}

// OwnedIn is p as the handle notes it, held in lockCtx; by is the hold that has it, nil for a
// unit of work.
func OwnedIn(lockCtx *hint.LockContext, p strategy.Resource, by any) OwnedLock {
	return OwnedLock{row: p.Row, space: p.Space(), key: p.Key, shared: p.Shared, inside: p.Traits.Inside, by: by, lockCtx: lockCtx}
}

// Add notes that l is held.
func (o *owned) Add(l OwnedLock) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.held == nil {
		o.held = make(map[OwnedLock]int)
	}
	o.held[l]++
}

// Remove takes back what Add has noted.
func (o *owned) Remove(l OwnedLock) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.held[l]--; o.held[l] <= 0 {
		delete(o.held, l)
	}
}

// Recognised completes the holder in err, of a request for resources in lockCtx, where it is
// this handle. A key that is held exclusively has no other holder; of a shared one the
// name that it goes by has to be ours.
func (k *Handle) Recognised(err error, lockCtx *hint.LockContext, resources ...strategy.Resource) error {
	var e *lockerr.Error
	if !errors.As(err, &e) || e.Holder == nil {
		return err
	}
	k.Owned.mu.Lock()
	defer k.Owned.mu.Unlock()
	for l := range k.Owned.held {
		wants := func(p strategy.Resource) bool {
			space := p.Space()
			if p.Traits.Table && !p.Traits.Excludes {
				space = strategy.Rows // it waits for those who exclude
			}
			return p.Row == l.row && space == l.space
		}
		if !slices.ContainsFunc(resources, wants) || l.shared && e.Holder.Program != k.Settings.Owner {
			continue
		}
		holder := *e.Holder // others may have it, too
		holder.ThisProcess = true
		holder.ThisContext = holder.ThisContext || l.lockCtx != nil && l.lockCtx == lockCtx
		e.Holder = &holder
	}
	return err
}

// Explained completes err, with which a statement without a lock context has failed, where
// that is the error of a row that stayed locked: by a transaction of this handle, perhaps.
func (k *Handle) Explained(err error) error {
	if !server.Locked(err) {
		return err
	}
	keys := k.Owned.inTransactions()
	if len(keys) == 0 {
		return err
	}
	slices.Sort(keys)
	more := ""
	if keys = slices.Compact(keys); len(keys) > 3 {
		keys, more = keys[:3], ", …"
	}
	return server.Saying(err, fmt.Sprintf("this process has transactions open under locks: %s%s; a row that one of them has changed stays locked until its end, "+
		"so a statement in mysqllock.Do, or under lockctx.With, that has another context waits for itself; pass it the context of the lock", strings.Join(keys, ", "), more))
}

// inTransactions returns the keys that are held in transactions.
func (o *owned) inTransactions() (keys []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for l := range o.held {
		if l.inside {
			keys = append(keys, strconv.Quote(l.key))
		}
	}
	return keys
}
