package mysqllockvet

import (
	"slices"

	"golang.org/x/tools/go/ssa"
)

// checkOutside reports statements that run beside the lock while it is in use: without a
// context, or with one from outside of the lock context.
func (c *checker) checkOutside(l *lock) {
	inside := c.inside(l)
	for _, st := range c.statements {
		at, later := c.at(l, st.call)
		if at == nil || later || st.tx != nil || !c.isOutside(st, l) || !c.sameHandle(l, st, inside) {
			continue
		}
		if st.kind == begins && c.asksLater(st, l) {
			continue
		}
		if c.open(l, st, inside) {
			c.reportOutside(l, st)
		}
	}
}

func (c *checker) reportOutside(l *lock, st *statement) {
	where := c.line(l.pos)
	const meant = ", or lockctx.Without(ctx) if that is meant"
	switch {
	case st.ctx != nil:
		c.report(st.call.Pos(), "outer-context", "%s runs without the lock of %s:"+
			" its context is from outside of the lock context; pass the lock context%s", st.name, where, meant)
	case st.style == "gorm":
		c.report(st.call.Pos(), "no-context", "%s runs without the lock of %s: there is no WithContext before it;"+
			" call WithContext with the lock context%s", st.name, where, meant)
	case st.kind == begins:
		c.report(st.call.Pos(), "begin", "the transaction of %s runs without the lock of %s: it has no context;"+
			" use BeginTx with the lock context%s", st.name, where, meant)
	default:
		c.report(st.call.Pos(), "no-context", "%s runs without the lock of %s: it has no context;"+
			" use the method that takes one, with the lock context%s", st.name, where, meant)
	}
}

// isOutside reports whether a statement certainly belongs to no lock context.
func (c *checker) isOutside(st *statement, l *lock) bool {
	if st.ctx == nil {
		return true
	}
	if slices.ContainsFunc(c.roots(st.ctx), func(r ssa.Value) bool { return c.locks[r] != nil }) {
		return false
	}
	return c.under(st.ctx, l) == no
}

// asksLater reports whether something in the transaction that begin begins may ask for a
// lock.
func (c *checker) asksLater(begin *statement, l *lock) bool {
	if slices.ContainsFunc(c.statements, func(st *statement) bool { return st.tx.mayBe(begin.call) && st.ctx != nil && !c.isOutside(st, l) }) {
		return true
	}
	for _, call := range c.calls() {
		inTx, asks := false, false
		for _, arg := range call.Common().Args {
			if isContext(arg.Type()) {
				asks = asks || c.under(arg, l) != no
			}
			for _, v := range c.sources(arg) {
				inTx = inTx || c.begunBy(v) == begin.call
			}
		}
		if inTx && asks && c.sent[call] == nil {
			return true
		}
	}
	return false
}

// sameHandle reports whether a statement runs on the handle that the lock is used on, as
// far as that can be told: a program may have a second database.
func (c *checker) sameHandle(l *lock, st *statement, inside []*statement) bool {
	if st.path == "" {
		return false
	}
	var other bool
	add := func(path, style string) bool {
		other = other || (style == "gorm") == (st.style == "gorm")
		return path == st.path
	}
	if l.isHeld() && add(c.path(l.f.args[1]), "sql") {
		return true
	}
	for _, t := range inside {
		if add(t.path, t.style) {
			return true
		}
	}
	return !other
}

// open reports whether the code is certainly in the middle of what it does under the
// lock when the statement runs.
func (c *checker) open(l *lock, st *statement, inside []*statement) bool {
	switch {
	case l.made == nil:
		return true // in the function of Do
	case l.isHeld():
		return c.holds(l, st)
	}
	for _, t := range inside {
		if t != st && (c.before(l, st, t) || c.undecided(l, st, t, inside) || t.kind == begins && c.inTx(l, st, t)) {
			return true
		}
	}
	return st.ctx == nil && len(inside) == 0 && len(c.passed(l)) == 0
}

// holds reports whether a hold of Acquire is in use when the statement runs.
func (c *checker) holds(l *lock, st *statement) bool {
	used := false
	for _, r := range *l.value.Referrers() {
		call, ok := r.(ssa.CallInstruction)
		if !ok {
			continue
		}
		_, deferred := r.(*ssa.Defer)
		if !deferred && c.callee(call.Common()).is(pkgLock, "Hold", "Release", "Rollback") {
			if c.reaches(l, r, st.call) {
				return false
			}
			continue
		}
		used = used || c.dominates(r, st.call) // after a failed Acquire nobody does
	}
	return used
}

// before reports whether t comes after the statement, under the lock: what st reads was
// read before the lock was taken.
func (c *checker) before(l *lock, st, t *statement) bool {
	_, later := c.at(l, t.call)
	return !later && !c.dominates(t.call, st.call) && c.reaches(l, st.call, t.call)
}

// undecided reports whether t has read, and nothing has been written since.
func (c *checker) undecided(l *lock, st, t *statement, inside []*statement) bool {
	if t.kind != reads || t.tx != nil || !c.dominates(t.call, st.call) {
		return false
	}
	return !slices.ContainsFunc(inside, func(w *statement) bool {
		return w != t && w.kind != reads && c.reaches(l, t.call, w.call) && c.reaches(l, w.call, st.call)
	})
}

// inTx reports whether the transaction that t begins is open when the statement runs.
func (c *checker) inTx(l *lock, st, t *statement) bool {
	if body := c.body(t); body != nil {
		return encloses(body, st.call.Parent())
	}
	if !c.dominates(t.call, st.call) {
		return false
	}
	used := slices.ContainsFunc(c.statements, func(u *statement) bool {
		return u.tx != nil && u.tx.by == t.call && (c.dominates(u.call, st.call) || c.reaches(l, st.call, u.call))
	})
	for _, e := range c.ends(t) {
		if _, deferred := e.(*ssa.Defer); !deferred && c.reaches(l, e, st.call) {
			return false
		}
		used = used || c.dominates(e, st.call) || c.reaches(l, st.call, e)
	}
	return used
}

// body returns the function that a statement runs in a transaction.
func (c *checker) body(t *statement) *ssa.Function {
	for _, arg := range t.f.args {
		if fn := c.function(arg); fn != nil {
			return fn
		}
	}
	return nil
}

// ends returns the calls that commit or roll back the transaction that t begins.
func (c *checker) ends(t *statement) (out []ssa.Instruction) {
	for _, call := range c.calls() {
		f := c.callee(call.Common())
		if f.self == nil || f.name != "Commit" && f.name != "Rollback" {
			continue
		}
		st := &statement{}
		if f.is(pkgGorm, "DB", f.name) {
			st.tx = c.gormChain(f.self, make(map[ssa.Value]bool)).tx
		} else {
			c.runsOn(st, f.self)
		}
		if st.tx.mayBe(t.call) {
			out = append(out, call)
		}
	}
	return out
}
