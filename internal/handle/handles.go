package handle

import (
	"context"
	"errors"
	"slices"
	"sync"

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

// shares reports whether a key means the same lock on both handles.
func (k *Handle) shares(other *Handle, strategy string) bool {
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

// Shares reports whether the key of other means the same lock as that of p.
func (p Place) Shares(other Place) bool { return p.k.shares(other.k, p.Strategy) }

// SameServer reports whether both handles lead to one server, or cluster. Before it
// says no it asks both: after a failover one may not have looked yet.
func (k *Handle) SameServer(ctx context.Context, other *Handle) (bool, error) {
	for asked := false; ; asked = true {
		here, err := k.ready(ctx, nil)
		if err != nil {
			return false, err
		}
		there, err := other.ready(ctx, nil)
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

func holdingsOf(s *hint.Scope) *holdings {
	return s.State(holdingsKey{}, func() any { return new(holdings) }).(*holdings)
}

func (p Place) holding() holding { return holding{p.k, p.Space(), p.Row, p.Shared} }

// Enter notes that the unit of work holds p. The handle itself remembers locks only: a
// version goes with the lock context, which may never give it back.
func (p Place) Enter() {
	if p.Traits.Excludes {
		p.k.Owned.Add(p.Owned(p.hints, nil))
	}
	if p.hints != nil {
		all := holdingsOf(p.hints)
		all.mu.Lock()
		defer all.mu.Unlock()
		all.held = append(all.held, p.holding())
	}
}

// Leave takes back what enter has noted.
func (p Place) Leave() {
	if p.Traits.Excludes {
		p.k.Owned.Remove(p.Owned(p.hints, nil))
	}
	if p.hints != nil {
		all := holdingsOf(p.hints)
		all.mu.Lock()
		defer all.mu.Unlock()
		if at := slices.Index(all.held, p.holding()); at >= 0 {
			all.held = slices.Delete(all.held, at, at+1)
		}
	}
}

// beside returns an error where the unit of work of another lock context of this handle
// has p because a statement asked for it there with this one: one that waits for that
// would often wait for itself. p is not held by the unit of work that asks.
func (k *Handle) beside(p Place) error {
	if p.hints == nil || p.Slots > 0 || !p.Traits.Excludes {
		return nil
	}
	all := holdingsOf(p.hints)
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, held := range all.held {
		if held.k == k && held.row == p.Row && held.space == p.Space() && (!held.shared || !p.Shared) {
			return &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"a transaction of another lock context of this process has taken the key, for a statement with this lock context; use that transaction, or end it first"))}
		}
	}
	return nil
}

// HeldElsewhere reports whether units of work of the lock context hold something through
// other handles.
func (k *Handle) HeldElsewhere(s *hint.Scope) bool {
	if s == nil {
		return false
	}
	all := holdingsOf(s)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.ContainsFunc(all.held, func(held holding) bool { return held.k != k })
}

// elsewhere returns an error where the lock context holds one of the keys of h
// through another handle: to wait for it would be to wait for oneself.
func (k *Handle) elsewhere(h *hint.Hint) error {
	if h.Scope == nil {
		return nil
	}
	all := holdingsOf(h.Scope)
	all.mu.Lock()
	others := slices.DeleteFunc(slices.Clone(all.held), func(held holding) bool { return held.k == k })
	all.mu.Unlock()
	if len(others) == 0 {
		return nil
	}
	places, err := k.places(h)
	if err != nil {
		return err
	}
	for _, p := range places {
		for _, held := range others {
			if held.row == p.Row && held.space == p.Space() && held.k.shares(k, p.Strategy) {
				return lockerr.With(lockerr.ErrUnsafe, errors.New(
					"this lock context of this process already holds the key through another database handle, and this statement would not be part of that transaction; use that handle, or lockctx.Without"))
			}
		}
	}
	return nil
}
