package schema

import (
	"context"
	"database/sql/driver"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Registry knows what one handle can have the server do in one statement: which procedures of
// MySQL it can call, and which of the same blocks of MariaDB it can run. It is safe for
// concurrent use.
type Registry struct {
	auto   bool
	lend   func(context.Context) (conn driver.Conn, giveBack func(), err error)
	mu     sync.Mutex  // held while procedures are looked for
	later  atomic.Bool // somebody does so in the background
	states [procedures]atomic.Int32
}

// The states of a procedure.
const (
	unknown int32 = iota // nobody has looked for it
	callable
	lacking // or not ours to call
)

// NewRegistry returns the registry for a server that is what info says. Procedures are looked
// for, and with auto made, on connections that lend lends: in autocommit.
func NewRegistry(info server.Info, auto bool, lend func(context.Context) (conn driver.Conn, giveBack func(), err error)) *Registry {
	// In a group with several primaries each member repeats the DDL of the others, and one that
	// cannot leaves the group.
	r := &Registry{auto: auto && info.Topology != server.MultiPrimary, lend: lend}
	for i := range r.states {
		switch {
		case info.Blocks:
			r.states[i].Store(callable)
		case !info.Procedures:
			r.states[i].Store(lacking)
		}
	}
	return r
}

// Has reports whether all of them can be called, as far as is known.
func (r *Registry) Has(all ...Procedure) bool {
	return !slices.ContainsFunc(all, func(p Procedure) bool { return r.states[p.number].Load() != callable })
}

// Looked reports whether it is known of each of them whether it can be called.
func (r *Registry) Looked(all ...Procedure) bool {
	return !slices.ContainsFunc(all, func(p Procedure) bool { return r.states[p.number].Load() == unknown })
}

// Set notes whether p can be called. It reports whether that is new.
func (r *Registry) Set(p Procedure, can bool) bool {
	state := lacking
	if can {
		state = callable
	}
	return r.states[p.number].Swap(state) != state
}

// Ensured notes what [Table.Ensure] has said of the procedures. With one alone nothing is gained.
func (r *Registry) Ensured(t Table, procedures bool) {
	if r.Set(t.LockProcedure(), procedures); procedures {
		r.Set(t.CommitIfProcedure(), true)
	}
}

// Look looks for those of which nothing is known, and makes what it may. Do that before a
// transaction calls one: a transaction that has called a procedure which is missing keeps it from
// being made. If the server is not reached, the next caller tries again.
func (r *Registry) Look(ctx context.Context, all ...Procedure) {
	if r.Looked(all...) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Looked(all...) {
		return
	}
	conn, giveBack, err := r.lend(ctx)
	if err != nil {
		return
	}
	defer giveBack()
	for _, p := range all {
		if r.Looked(p) {
			continue
		}
		there, err := p.Provide(ctx, conn, r.auto)
		if err != nil {
			return
		}
		r.Set(p, there)
	}
}

// LookLater is Look in the background, for those who come later.
func (r *Registry) LookLater(background func(func(context.Context)), all ...Procedure) {
	if r.Looked(all...) || !r.later.CompareAndSwap(false, true) {
		return
	}
	wanted := slices.Clone(all) // so that a caller who finds everything known allocates nothing
	background(func(ctx context.Context) {
		defer r.later.Store(false)
		r.Look(ctx, wanted...)
	})
}
