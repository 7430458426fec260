package mysqllockvet

import (
	"go/types"
	"slices"

	"golang.org/x/tools/go/ssa"
)

// event is something that is sent in a lock context: by its function, or by functions of the
// package that this passes the lock context on to.
type event struct {
	st    *statement            // nil for what may be anything
	stack []ssa.CallInstruction // the calls that lead to it, and its own
	later bool                  // it runs on another goroutine, or at the end of its function
}

// Limits on what is looked at: how many calls lead to an event, and how often the helpers of
// one lock context are entered. Beyond them a helper may do anything.
const (
	maxDepth   = 5
	maxHelpers = 200
)

// events returns what is sent in the lock context, as far as that is known.
func (c *checker) events(l *lock) []event {
	if _, ok := c.seen[l]; !ok {
		c.entered = 0
		c.seen[l] = c.expand(l, l.fn, event{})
	}
	return c.seen[l]
}

// expand returns the events of fn, to which the calls of up lead.
func (c *checker) expand(l *lock, fn *ssa.Function, up event) (out []event) {
	for _, call := range c.calls() {
		if !encloses(fn, call.Parent()) {
			continue
		}
		_, later := c.in(fn, call)
		e := event{st: c.statement(call), stack: append(slices.Clip(up.stack), call), later: up.later || later}
		helper := c.helper(call)
		switch {
		case e.st != nil:
			switch c.belongs(e.st, l) {
			case maybe:
				e.st = nil
				out = append(out, e)
			case yes:
				out = append(out, e)
			}
		case !c.passes(call, l):
		case helper == nil || len(e.stack) >= maxDepth || c.entered >= maxHelpers || c.bound[helper] != nil:
			out = append(out, e)
		default:
			c.entered++
			c.bound[helper] = call.Common().Args
			out = append(out, c.expand(l, helper, e)...)
			delete(c.bound, helper)
		}
	}
	return out
}

// belongs says whether a statement runs in the lock context, by no lock in it for which other
// rules hold.
func (c *checker) belongs(st *statement, l *lock) answer {
	if st.ctx == nil {
		if st.style == "gorm" && st.path == "" {
			return maybe
		}
		return no
	}
	for _, r := range c.roots(st.ctx) {
		if inner := c.locks[r]; inner != nil && inner != l && (inner.isHeld() || c.mayHave(inner, "AllowStale")) {
			return maybe
		}
	}
	return c.under(st.ctx, l)
}

// helper returns the function of the package that a call runs; nil for another one.
func (c *checker) helper(call ssa.CallInstruction) *ssa.Function {
	fn := call.Common().StaticCallee()
	if fn == nil || fn.Parent() != nil || len(fn.Blocks) == 0 || fn.Pkg == nil || fn.Pkg.Pkg != c.pass.Pkg {
		return nil
	}
	return fn
}

// argument returns what a helper that is being looked at was called with for p; nil if that is
// not known.
func (c *checker) argument(p *ssa.Parameter) ssa.Value {
	args := c.bound[p.Parent()]
	if at := slices.Index(p.Parent().Params, p); at >= 0 && at < len(args) {
		return args[at]
	}
	return nil
}

// split returns at which call two events differ.
func split(a, b event) (at int) {
	for at < len(a.stack)-1 && at < len(b.stack)-1 && a.stack[at] == b.stack[at] {
		at++
	}
	return at
}

// precedes reports whether a has run whenever b runs.
func (c *checker) precedes(a, b event) bool {
	at := split(a, b)
	return c.dominates(a.stack[at], b.stack[at]) &&
		!slices.ContainsFunc(a.stack[at+1:], func(i ssa.CallInstruction) bool { return !c.always(i) })
}

// follows reports whether b can run after a while the lock context is the same.
func (c *checker) follows(l *lock, a, b event) bool {
	at := split(a, b)
	return c.reaches(l, a.stack[at], b.stack[at]) ||
		slices.ContainsFunc(a.stack[:at], func(i ssa.CallInstruction) bool { return reaches(i, i, l.made) })
}

// between reports whether o can run after a and before b, with no other a in between.
func (c *checker) between(l *lock, a, o, b event) bool {
	at := split(o, b)
	if split(a, b) < at || a.stack[at] == o.stack[at] || a.stack[at] == b.stack[at] {
		return c.follows(l, a, o) && c.follows(l, o, b)
	}
	x, y := c.together(o.stack[at], b.stack[at])
	z, _ := c.together(a.stack[at], b.stack[at])
	return c.follows(l, a, o) && x != nil && reaches(x, y, z)
}

// always reports whether a call has run whenever its function returns without an error.
func (c *checker) always(call ssa.CallInstruction) bool {
	return c.returnsWell(call.Parent(), func(r *ssa.Return) bool { return dominates(call, r) })
}

// returnsWell reports whether ok holds for each return of fn that may be without an error.
func (c *checker) returnsWell(fn *ssa.Function, ok func(*ssa.Return) bool) bool {
	for _, b := range fn.Blocks {
		if r, is := b.Instrs[len(b.Instrs)-1].(*ssa.Return); is && !c.fails(r) && !ok(r) {
			return false
		}
	}
	return fn.Parent() == nil
}

// fails reports whether a return is one with an error.
func (c *checker) fails(r *ssa.Return) bool {
	if len(r.Results) == 0 {
		return false
	}
	last := r.Results[len(r.Results)-1]
	if !isError(last.Type()) {
		return false
	}
	switch v := c.source(last).(type) {
	case *ssa.Call:
		f := c.callee(v.Common())
		if f.is("errors", "", "New") || f.is("fmt", "", "Errorf") {
			return true
		}
	case *ssa.UnOp:
		if _, global := v.X.(*ssa.Global); global {
			return true
		}
	}
	return last.Referrers() != nil && slices.ContainsFunc(*last.Referrers(), func(i ssa.Instruction) bool {
		test, ok := i.(*ssa.BinOp)
		return ok && isNil(test.X, test.Y) && c.leadsTo(test, r.Block(), false)
	})
}

func isError(t types.Type) bool { return types.Identical(t, types.Universe.Lookup("error").Type()) }

// succeeded reports whether second only runs where first has ended well, and first's result is
// not asked whether it changed anything.
func (c *checker) succeeded(first, second event) bool {
	at := split(first, second)
	for i, call := range first.stack {
		errs, plain := c.errors(call)
		switch {
		case !plain:
			return false
		case i < at, len(errs) == 0, i == at && first.st == second.st: // nobody looks; or it is repeated
		case i == at:
			then, _ := c.in(call.Parent(), second.stack[at])
			if then == nil || !c.wellBefore(errs, then.Block()) {
				return false
			}
		case !c.returnsWell(call.Parent(), func(r *ssa.Return) bool {
			return len(r.Results) > 0 && slices.Contains(errs, c.source(r.Results[len(r.Results)-1])) || c.wellBefore(errs, r.Block())
		}):
			return false
		}
	}
	return true
}

// wellBefore reports whether b runs only where one of errs was nil.
func (c *checker) wellBefore(errs []ssa.Value, b *ssa.BasicBlock) bool {
	return slices.ContainsFunc(errs, func(err ssa.Value) bool {
		return slices.ContainsFunc(*err.Referrers(), func(i ssa.Instruction) bool {
			test, ok := i.(*ssa.BinOp)
			return ok && isNil(test.X, test.Y) && c.leadsTo(test, b, true)
		})
	})
}
