package mysqllockvet

import (
	"go/token"
	"slices"

	"golang.org/x/tools/go/ssa"
)

// lock is a lock context, as the code makes it.
type lock struct {
	value ssa.Value       // the context of With, the hold of Acquire, the parameter of Do's function
	made  ssa.Instruction // nil for Do: it is there from the beginning of fn
	fn    *ssa.Function   // in which it is there
	from  ssa.Value       // the context that it was made from
	call  ssa.CallInstruction
	f     function
	pos   token.Pos
}

// findLocks finds the lock contexts that the package makes.
func (c *checker) findLocks() {
	for _, call := range c.calls() {
		c.findLock(call)
	}
}

func (c *checker) findLock(call ssa.CallInstruction) {
	f := c.callee(call.Common())
	l := &lock{fn: call.Parent(), call: call, f: f, pos: call.Pos()}
	switch {
	case f.is(pkgLockctx, "", "With", "WithKeys"):
		v, ok := call.(*ssa.Call)
		if !ok {
			return
		}
		l.value, l.made, l.from = v, v, f.args[0]
	case f.is(pkgLock, "", "Acquire", "AcquireKeys"):
		v, ok := call.(*ssa.Call)
		if !ok {
			return
		}
		for _, r := range *v.Referrers() {
			if e, ok := r.(*ssa.Extract); ok && e.Index == 0 {
				l.value, l.made = e, e
			}
		}
		l.from = f.args[0]
	case f.is(pkgLock, "", "Do", "DoKeys") && len(f.args) > 3:
		body := c.function(f.args[3])
		if body == nil || len(body.Params) != 1 || c.site[body] != call {
			return // a function with a name may be called from elsewhere
		}
		l.value, l.fn, l.from = body.Params[0], body, f.args[0]
	}
	if l.value != nil {
		c.locks[l.value] = l
		c.inOrder = append(c.inOrder, l)
	}
}

// function returns the function literal or function that v is.
func (c *checker) function(v ssa.Value) *ssa.Function {
	switch v := c.source(v).(type) {
	case *ssa.Function:
		return v
	case *ssa.MakeClosure:
		fn, _ := v.Fn.(*ssa.Function)
		return fn
	}
	return nil
}

// isHeld reports whether the lock is taken with the lock context, by Do or Acquire; With
// only asks for it.
func (l *lock) isHeld() bool { return l.f.pkg == pkgLock }

// derived returns the context that v is derived from, and whether v ends earlier.
func (c *checker) derived(v ssa.Value) (from ssa.Value, ends bool) {
	switch v := v.(type) {
	case *ssa.Call:
		f := c.callee(v.Common())
		switch {
		case f.is("context", "", "WithValue", "WithoutCancel"):
			return f.args[0], false
		case f.is(pkgLock, "Hold", "Context"):
			return f.self, false
		}
	case *ssa.Extract:
		call, ok := v.Tuple.(*ssa.Call)
		if !ok {
			return nil, false
		}
		f := c.callee(call.Common())
		switch {
		case v.Index == 0 && f.is("context", "", "WithCancel", "WithCancelCause",
			"WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause"),
			v.Index == 0 && f.is("os/signal", "", "NotifyContext"):
			return f.args[0], true
		case v.Index == 1 && f.is("golang.org/x/sync/errgroup", "", "WithContext"):
			return f.args[0], true
		}
	case *ssa.Parameter:
		call, ok := c.site[v.Parent()].(ssa.CallInstruction)
		if !ok || len(v.Parent().Params) == 0 || v.Parent().Params[0] != v {
			return nil, false
		}
		if f := c.callee(call.Common()); f.is(pkgBun, f.recv, "RunInTx") {
			return f.args[0], false
		}
	}
	return nil, false
}

// roots returns the contexts that ctx is derived from: lock contexts, and what is not
// derived here.
func (c *checker) roots(ctx ssa.Value) []ssa.Value {
	var out []ssa.Value
	seen := make(map[ssa.Value]bool)
	var walk func(ssa.Value)
	walk = func(v ssa.Value) {
		for _, s := range c.sources(v) {
			if seen[s] {
				continue
			}
			seen[s] = true
			from, _ := c.derived(s)
			if p, ok := s.(*ssa.Parameter); ok && from == nil {
				from = c.argument(p)
			}
			switch {
			case c.locks[s] != nil || from == nil:
				out = append(out, s)
			default:
				walk(from)
			}
		}
	}
	walk(ctx)
	return out
}

// What is known of a context and a lock.
type answer int

const (
	maybe answer = iota
	yes
	no
)

// under says whether ctx belongs to the lock context.
func (c *checker) under(ctx ssa.Value, l *lock) answer {
	return c.underDepth(ctx, l, 0)
}

func (c *checker) underDepth(ctx ssa.Value, l *lock, depth int) answer {
	all := c.roots(ctx)
	if len(all) == 0 || depth > 10 {
		return maybe
	}
	got := c.rootUnder(all[0], l, depth)
	for _, r := range all[1:] {
		if c.rootUnder(r, l, depth) != got {
			return maybe
		}
	}
	return got
}

func (c *checker) rootUnder(r ssa.Value, l *lock, depth int) answer {
	if r == l.value {
		return yes
	}
	if other := c.locks[r]; other != nil {
		return c.underDepth(other.from, l, depth+1)
	}
	switch r := r.(type) {
	case *ssa.Parameter:
		if encloses(r.Parent(), l.fn) {
			return no
		}
	case *ssa.Call:
		f := c.callee(r.Common())
		switch {
		case f.is("context", "", "Background", "TODO"):
			return no
		case f.is(pkgLockctx, "", "Without"):
			return maybe // the author says so
		case f.is("net/http", "Request", "Context"):
			if p, ok := c.source(f.self).(*ssa.Parameter); ok && encloses(p.Parent(), l.fn) {
				return no
			}
		}
		return c.olderThan(r, l)
	case *ssa.Extract:
		return c.olderThan(r, l)
	}
	return maybe
}

// olderThan says no to a value that was there before the lock context, so it cannot
// belong to it.
func (c *checker) olderThan(i ssa.Instruction, l *lock) answer {
	made := l.made
	if made == nil {
		made = c.site[l.fn]
	}
	if !encloses(i.Parent(), made.Parent()) {
		return maybe
	}
	if at, _ := c.in(i.Parent(), made); at != nil && at != i && dominates(i, at) {
		return no
	}
	return maybe
}

// background reports whether ctx can never end.
func (c *checker) background(ctx ssa.Value) bool {
	for _, r := range c.roots(ctx) {
		call, ok := r.(*ssa.Call)
		if !ok || !c.callee(call.Common()).is("context", "", "Background", "TODO") {
			return false
		}
	}
	return true
}

// endsEarlier reports whether ctx, on the way from stop, was given an end of its own;
// stop may be nil.
func (c *checker) endsEarlier(ctx, stop ssa.Value) bool {
	for range 20 {
		v := c.source(ctx)
		if v == nil || v == stop {
			return false
		}
		from, ends := c.derived(v)
		if ends {
			return true
		}
		if other := c.locks[v]; other != nil {
			from = other.from
		}
		if from == nil {
			return false
		}
		ctx = from
	}
	return false
}

// at returns where in the lock context's function a statement runs, if the lock context
// is there by then. later reports that it runs on another goroutine, or at the end.
func (c *checker) at(l *lock, i ssa.Instruction) (at ssa.Instruction, later bool) {
	at, later = c.in(l.fn, i)
	if at == nil || at == l.made || l.made != nil && !dominates(l.made, at) {
		return nil, later
	}
	return at, later
}

// together returns where two instructions run in the innermost function that has both.
func (c *checker) together(a, b ssa.Instruction) (x, y ssa.Instruction) {
	for fn := a.Parent(); fn != nil; fn = fn.Parent() {
		x, _ = c.in(fn, a)
		y, _ = c.in(fn, b)
		if x != nil && y != nil {
			return x, y
		}
	}
	return nil, nil
}

// reaches reports whether b can run after a while the lock context is the same.
func (c *checker) reaches(l *lock, a, b ssa.Instruction) bool {
	x, y := c.together(a, b)
	return x != nil && reaches(x, y, l.made)
}

// dominates reports whether a has run whenever b runs.
func (c *checker) dominates(a, b ssa.Instruction) bool {
	x, y := c.together(a, b)
	return x != nil && x != y && dominates(x, y)
}

// options returns the calls of lockctx that make the options of a call. ok is false if
// there may be others.
func (c *checker) options(f function) (opts []function, ok bool) {
	last := f.args[len(f.args)-1]
	spread, isSlice := c.source(last).(*ssa.Slice)
	if !isSlice {
		k, isConst := last.(*ssa.Const)
		return nil, isConst && k.IsNil()
	}
	array, isAlloc := spread.X.(*ssa.Alloc)
	if !isAlloc || array.Comment != "varargs" {
		return nil, false
	}
	ok = true
	for _, r := range *array.Referrers() {
		element, isElement := r.(*ssa.IndexAddr)
		if !isElement {
			continue
		}
		opt, known := c.option(element)
		if known {
			opts = append(opts, opt)
		}
		ok = ok && known
	}
	return opts, ok
}

// option returns the call that makes one option.
func (c *checker) option(element *ssa.IndexAddr) (function, bool) {
	for _, r := range *element.Referrers() {
		if s, ok := r.(*ssa.Store); ok {
			if call, ok := c.source(s.Val).(*ssa.Call); ok {
				f := c.callee(call.Common())
				return f, f.pkg == pkgLockctx
			}
		}
	}
	return function{}, false
}

// mayHave reports whether the lock, or one around it, may have the option.
func (c *checker) mayHave(l *lock, option string) bool {
	for ; l != nil; l = c.outer(l) {
		if opts, ok := c.options(l.f); !ok || named(opts, option) {
			return true
		}
	}
	return false
}

// onlyHas reports whether the lock, and all around it, certainly have the option.
func (c *checker) onlyHas(l *lock, option string) bool {
	for ; l != nil; l = c.outer(l) {
		if opts, _ := c.options(l.f); !named(opts, option) {
			return false
		}
	}
	return true
}

func named(opts []function, name string) bool {
	return slices.ContainsFunc(opts, func(f function) bool { return f.name == name })
}

// outer returns the lock context that a lock was asked for in, if it is known.
func (c *checker) outer(l *lock) *lock {
	all := c.roots(l.from)
	if len(all) != 1 || c.locks[all[0]] == l {
		return nil
	}
	return c.locks[all[0]]
}
