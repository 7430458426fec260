// Package batch collects requests that wait for the same thing, so that the caller that
// gets it serves them all.
package batch

import (
	"slices"
	"sync"
)

// Group is those who wait. The first one leads: it gets what they wait for, or has it got,
// and calls Depart then. The zero value is empty. It is safe for concurrent use.
type Group[T comparable] struct {
	mu      sync.Mutex
	waiting []T
	led     bool // the leader has not departed
	several bool // those who departed last were several
}

// Join adds one, and reports whether it is to lead.
func (g *Group[T]) Join(one T) (leads bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting = append(g.waiting, one)
	leads = !g.led
	g.led = true
	return leads
}

// ShouldJoin reports whether a caller should join, also if what it wants is free: somebody leads,
// or those who departed last were several, and may come again together.
func (g *Group[T]) ShouldJoin() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.led || g.several
}

// Len is how many wait.
func (g *Group[T]) Len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting)
}

// Quit takes one away, and reports whether it was still there.
func (g *Group[T]) Quit(one T) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.waiting, one)
	if i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
	}
	return i >= 0
}

// Depart returns the first of those who wait, at most so many. There may be none, if all
// have quit, or gone along with others. more: there are others, whom the caller is to lead, too.
func (g *Group[T]) Depart(most int) (some []T, more bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	some = g.first(most)
	g.led = len(g.waiting) > 0
	return some, g.led
}

// Along is Depart for a caller who does not lead. Somebody else may, and goes on doing so.
func (g *Group[T]) Along(most int) []T {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.first(most)
}

func (g *Group[T]) first(most int) []T {
	n := min(len(g.waiting), most)
	some := slices.Clone(g.waiting[:n])
	g.waiting = slices.Delete(g.waiting, 0, n)
	if n > 0 {
		g.several = n > 1
	}
	return some
}
