package handle

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/mysqllock/mysqllock/internal/strategy"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// A lock context can be used with several database handles of a program. What one
// of them holds, the others know by this file.

// where says which lock table strategy uses, or that it uses none; "" where the server does
// not say which one it is.
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

// Shares reports whether a key means the same lock on both handles.
func (k *Handle) Shares(other *Handle, strategy string) bool {
	if k == other {
		return true
	}
	a, b := k.locks.Load(), other.locks.Load()
	if a == nil || b == nil {
		return false
	}
	where := a.where(strategy)
	return where != "" && where == b.where(strategy)
}

// SameServer reports whether both handles lead to one server, or cluster. Before it
// says no it asks both: after a failover one may not have looked yet.
func (k *Handle) SameServer(ctx context.Context, other *Handle) (bool, error) {
	for asked := false; ; asked = true {
		here, err := k.Use(ctx, nil)
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
		k.doubt.Store(true)
		other.doubt.Store(true)
	}
}

// holdings are what the handles hold in a lock context, in units of work.
type holdings struct {
	mu   sync.Mutex
	held []holding
}

type holding struct {
	k     *Handle
	space string
	row   string
	// shared: others can have it, too
	shared bool
}

type holdingsKey struct{}

func holdingsOf(s *hint.LockContext) *holdings {
	return s.State(holdingsKey{}, func() any { return new(holdings) }).(*holdings)
}

// Enter notes that the unit of work holds p. The handle itself remembers locks only: a
// version goes with the lock context, which may never give it back.
func (k *Handle) Enter(p strategy.Resource) {
	if p.Traits.Excludes {
		k.Owned.Add(OwnedIn(p.LockContext, p, nil))
	}
	if p.LockContext != nil {
		all := holdingsOf(p.LockContext)
		all.mu.Lock()
		defer all.mu.Unlock()
		all.held = append(all.held, holding{k, p.Space(), p.Row, p.Shared})
	}
}

// Leave takes back what Enter has noted.
func (k *Handle) Leave(p strategy.Resource) {
	if p.Traits.Excludes {
		k.Owned.Remove(OwnedIn(p.LockContext, p, nil))
	}
	if p.LockContext != nil {
		all := holdingsOf(p.LockContext)
		all.mu.Lock()
		defer all.mu.Unlock()
		if at := slices.Index(all.held, holding{k, p.Space(), p.Row, p.Shared}); at >= 0 {
			all.held = slices.Delete(all.held, at, at+1)
		}
	}
}

// HeldElsewhere reports whether units of work of the lock context hold something through
// other handles.
func (k *Handle) HeldElsewhere(s *hint.LockContext) bool {
	if s == nil {
		return false
	}
	all := holdingsOf(s)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.ContainsFunc(all.held, func(held holding) bool { return held.k != k })
}

// Taken returns an error where another unit of work has one of resources, which the one that asks with
// the lock context s does not hold, because a statement asked for it there with s: through another
// handle or, unless only that is looked for, in a transaction of another lock context of this one.
// To wait for that would be to wait for oneself, or often would be.
func (k *Handle) Taken(s *hint.LockContext, onlyElsewhere bool, resources ...strategy.Resource) error {
	if s == nil || len(resources) == 0 {
		return nil
	}
	all := holdingsOf(s)
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, held := range all.held {
		for _, p := range resources {
			why := ""
			switch {
			case held.row != p.Row || held.space != p.Space():
			case held.k != k && held.k.Shares(k, p.Strategy):
				why = "this lock context of this process already holds the key through another database handle, and this statement would not be part of that transaction; use that handle, or lockctx.Without"
			case held.k == k && !onlyElsewhere && p.Slots == 0 && p.Traits.Excludes && (!held.shared || !p.Shared):
				why = "a transaction of another lock context of this process has taken the key, for a statement with this lock context; use that transaction, or end it first"
			}
			if why != "" {
				return &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(why))}
			}
		}
	}
	return nil
}
