package mysqllockvet

import (
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// checkLock checks what is done with one lock context.
func (c *checker) checkLock(l *lock) {
	if !l.isHeld() {
		if c.checkUnused(l) {
			return
		}
		c.checkLoop(l)
		c.checkEnd(l)
		c.checkStale(l)
		c.checkShared(l)
	}
	c.checkBeside(l)
	c.checkLate(l)
	c.checkLeft(l)
	c.checkGoroutines(l)
	c.checkReplicas(l)
	c.checkLoaded(l)
	c.checkOutside(l)
	c.checkDriver(l)
}

// inside returns the statements that certainly belong to the lock context.
func (c *checker) inside(l *lock) (out []*statement) {
	for _, st := range c.statements {
		if st.ctx != nil && c.under(st.ctx, l) == yes {
			out = append(out, st)
		}
	}
	return out
}

// checkUnused reports that nothing uses what With returns.
func (c *checker) checkUnused(l *lock) bool {
	if len(*l.value.Referrers()) > 0 {
		return false
	}
	c.report(l.pos, "unused", "nothing uses the context that %s returns, so nothing is locked;"+
		" pass it to the statements that are to run under the lock", l.f.name)
	return true
}

// checkLoop reports that With is called on its own result, turn after turn, with other keys.
func (c *checker) checkLoop(l *lock) {
	if !c.fromItself(l) {
		return
	}
	key := c.source(l.f.args[1])
	i, ok := key.(ssa.Instruction)
	if !ok || c.path(key) != "" && !c.isCall(key) || i.Parent() != l.fn || !reaches(l.made, i, nil) {
		return // the same key again joins
	}
	c.report(l.pos, "loop", "%s is called in a loop on the context that it returned before,"+
		" so each turn asks for the keys of all turns before, too; "+
		"derive each context from the one outside of the loop, or name all keys in one WithKeys", l.f.name)
}

// fromItself reports whether the lock context may be made from what it was before.
func (c *checker) fromItself(l *lock) bool {
	seen := make(map[ssa.Value]bool)
	next := c.roots(l.from)
	for len(next) > 0 {
		v := next[0]
		next = next[1:]
		if v == l.value {
			return true
		}
		if other := c.locks[v]; other != nil && !seen[v] {
			seen[v] = true
			next = append(next, c.roots(other.from)...)
		}
	}
	return false
}

func (c *checker) isCall(v ssa.Value) bool {
	_, ok := v.(*ssa.Call)
	return ok
}

// checkEnd reports a lock context that outlives the timeout which was meant for it.
func (c *checker) checkEnd(l *lock) {
	if c.outer(l) != nil || c.endsEarlier(l.from, nil) || c.background(l.from) {
		return
	}
	for _, st := range c.inside(l) {
		if st.kind == reads && st.tx == nil && c.endsEarlier(st.ctx, l.value) {
			c.report(l.pos, "timeout", "the lock that %s on %s takes is kept until the context that %s was given here ends,"+
				" not until the one that is derived later; "+
				"call WithTimeout or WithCancel first, and %s on the context that it returns", st.name, c.line(st.call.Pos()), l.f.name, l.f.name)
			return
		}
	}
}

// checkGoroutines reports a lock context that several goroutines use.
func (c *checker) checkGoroutines(l *lock) {
	uses := func(st *statement) bool { return st.kind != reads }
	switch {
	case l.isHeld() && (c.mayHave(l, "Lease") || c.mayHave(l, "Advisory")):
		return // transactions run side by side
	case l.isHeld():
		oneByOne := slices.ContainsFunc(c.pass.Files, skipsTransaction)
		uses = func(st *statement) bool {
			return st.kind == begins || st.kind == writes && st.style == "gorm" && !oneByOne
		}
	case c.heldAround(l):
		return // they are parts of one thing
	}
	var sites []ssa.Instruction
	for _, call := range c.calls() {
		if c.runsUnder(call, l, uses) && (l.isHeld() ||
			!slices.ContainsFunc(c.inside(l), func(st *statement) bool { return st.kind == begins && c.dominates(st.call, call) })) {
			sites = append(sites, call)
		}
	}
	for i, s := range sites {
		at, _ := c.in(l.fn, s)
		again := reaches(s, s, l.made) || reaches(at, at, l.made) ||
			slices.ContainsFunc(sites[:i], func(other ssa.Instruction) bool { return c.reaches(l, other, s) })
		switch {
		case !again:
			continue
		case l.isHeld():
			c.report(s.Pos(), "goroutines", "several goroutines begin transactions under %s of %s, which is one transaction:"+
				" they fail, since transactions in it must end in the reverse order; "+
				"let one goroutine write, or give it lockctx.Lease, under which transactions run side by side", l.f.name, c.line(l.pos))
		default:
			c.report(s.Pos(), "goroutines", "several goroutines use the lock context of %s, so they share one lock and do not exclude each other; "+
				"call lockctx.With in each goroutine, on the context from before it", c.line(l.pos))
		}
		return
	}
}

// skipsTransaction reports whether a file has GORM begin no transactions of its own.
func skipsTransaction(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		name, ok := n.(*ast.Ident)
		found = found || ok && name.Name == "SkipDefaultTransaction"
		return !found
	})
	return found
}

// runsUnder reports whether a call starts a goroutine that uses the lock context by what it
// sends outside of transactions.
func (c *checker) runsUnder(call ssa.CallInstruction, l *lock, uses func(*statement) bool) bool {
	var fn *ssa.Function
	f := c.callee(call.Common())
	switch _, isGo := call.(*ssa.Go); {
	case isGo:
		fn = f.fn
	case c.startsGoroutine(call.Common()) && len(f.args) > 0:
		fn = c.function(f.args[0])
	}
	if at, _ := c.at(l, call); at == nil || fn == nil {
		return false
	}
	return slices.ContainsFunc(c.events(l), func(e event) bool {
		return e.st != nil && e.st.tx == nil && uses(e.st) && (e.stack[0] == call || encloses(fn, e.stack[0].Parent()))
	})
}

// checkStale reports the second write after a read outside of a transaction.
func (c *checker) checkStale(l *lock) {
	if c.mayHave(l, "AllowStale") || c.heldAround(l) {
		return
	}
	var read, write, others, begun []event
	for _, e := range c.events(l) {
		switch {
		case e.st == nil:
			others = append(others, e)
		case e.later:
			return
		case e.st.tx == nil && e.st.kind == reads:
			read = append(read, e)
			others = append(others, e)
		case e.st.tx == nil && e.st.kind == writes:
			write = append(write, e)
		case e.st.kind == begins:
			begun = append(begun, e)
			others = append(others, e)
		default:
			others = append(others, e)
		}
	}
	for _, second := range write {
		at := slices.IndexFunc(write, func(first event) bool {
			return (first.st == second.st && c.inRange(l, first) >= 0 || first.st != second.st && c.precedes(first, second)) &&
				c.succeeded(first, second) &&
				slices.ContainsFunc(read, func(r event) bool { return c.precedes(r, first) }) &&
				!slices.ContainsFunc(others, func(o event) bool { return c.between(l, first, o, second) }) &&
				!slices.ContainsFunc(begun, func(b event) bool { return c.follows(l, b, first) })
		})
		if at < 0 {
			continue
		}
		first := write[at]
		k := split(first, second)
		if first.st == second.st {
			k = c.inRange(l, first)
		}
		c.report(second.stack[k].Pos(), "stale-read", "%s writes after the commit of %s on %s has given back the lock"+
			" of the read before, and fails with ErrStaleRead; what was committed stays; "+
			"put the read and its writes into one mysqllock.Do or transaction, or read again before this",
			c.callee(second.stack[k].Common()).name, c.callee(first.stack[k].Common()).name, c.line(first.stack[k].Pos()))
	}
}

// heldAround reports whether the lock is asked for inside of a hold.
func (c *checker) heldAround(l *lock) bool {
	for o := c.outer(l); o != nil; o = c.outer(o) {
		if o.isHeld() {
			return true
		}
	}
	return false
}

// inRange returns which call of an event is repeated by a range over things, in which it
// is not a retry; -1 if none is.
func (c *checker) inRange(l *lock, e event) (at int) {
	return slices.IndexFunc(e.stack, func(call ssa.CallInstruction) bool { return reaches(call, call, l.made) && ranges(call.Block()) })
}

// ranges reports whether a block is in a range over things.
func ranges(b *ssa.BasicBlock) bool {
	for ; b != nil; b = b.Idom() {
		if strings.HasPrefix(b.Comment, "rangeindex") || strings.HasPrefix(b.Comment, "rangeiter") || strings.HasPrefix(b.Comment, "rangechan") {
			return true
		}
		if strings.HasPrefix(b.Comment, "for.") || strings.HasPrefix(b.Comment, "rangeint") {
			return false
		}
	}
	return false
}

func isNil(vs ...ssa.Value) bool {
	return slices.ContainsFunc(vs, func(v ssa.Value) bool { k, ok := v.(*ssa.Const); return ok && k.IsNil() })
}

// leadsTo reports whether b runs only where the error that test compares with nil is nil, or
// is not.
func (c *checker) leadsTo(test *ssa.BinOp, b *ssa.BasicBlock, isNil bool) bool {
	for _, r := range *test.Referrers() {
		branch, ok := r.(*ssa.If)
		if !ok {
			continue
		}
		to := 0
		if isNil == (test.Op == token.NEQ) {
			to = 1
		}
		if branch.Block().Succs[to].Dominates(b) {
			return true
		}
	}
	return false
}

// errors returns the values that are the error of a helper, or of a statement that writes.
// plain is false if the code looks at more of the statement's result than that.
func (c *checker) errors(call ssa.CallInstruction) (errs []ssa.Value, plain bool) {
	v, ok := call.(ssa.Value)
	if !ok {
		return nil, false
	}
	helper := c.helper(call) != nil
	if isError(v.Type()) {
		return []ssa.Value{v}, true
	}
	for _, r := range *v.Referrers() {
		switch r := r.(type) {
		case *ssa.Extract:
			if r.Index == v.Type().(*types.Tuple).Len()-1 {
				errs = append(errs, r)
			} else if !helper && len(*r.Referrers()) > 0 && !onlyLastID(r) {
				return nil, false
			}
		case *ssa.FieldAddr: // GORM's Error
			if r.X.Type().Underlying().(*types.Pointer).Elem().Underlying().(*types.Struct).Field(r.Field).Name() != "Error" {
				return nil, false
			}
			for _, load := range *r.Referrers() {
				if load, ok := load.(*ssa.UnOp); ok {
					errs = append(errs, load)
				}
			}
		case *ssa.DebugRef:
		default:
			return nil, helper
		}
	}
	return errs, true
}

// onlyLastID reports whether a result is asked for nothing but the last id.
func onlyLastID(v ssa.Value) bool {
	return !slices.ContainsFunc(*v.Referrers(), func(r ssa.Instruction) bool {
		call, ok := r.(*ssa.Call)
		return !ok || !call.Common().IsInvoke() || call.Common().Method.Name() != "LastInsertId"
	})
}

// passed returns the calls that the lock context is passed on to, which may do anything.
func (c *checker) passed(l *lock) (out []ssa.Instruction) {
	for _, call := range c.calls() {
		if encloses(l.fn, call.Parent()) && c.passes(call, l) {
			out = append(out, call)
		}
	}
	return out
}

func (c *checker) passes(call ssa.CallInstruction, l *lock) bool {
	if c.sent[call] != nil {
		return false
	}
	f := c.callee(call.Common())
	switch f.pkg {
	case "context", "log/slog", "log", "fmt", "golang.org/x/sync/errgroup", pkgLockctx, pkgSQL, pkgSQLX, pkgBun, pkgGorm:
		return false
	}
	return slices.ContainsFunc(call.Common().Args, func(arg ssa.Value) bool {
		if pkg, name := typeName(arg.Type()); pkg == pkgGorm && name == "DB" {
			ch := c.gormChain(arg, make(map[ssa.Value]bool))
			return !ch.ok || ch.ctx != nil && c.under(ch.ctx, l) == yes
		}
		return isContext(arg.Type()) && c.under(arg, l) == yes
	})
}

// checkShared reports what is written under a Shared lock to a table that was read under it.
func (c *checker) checkShared(l *lock) {
	if !c.onlyHas(l, "Shared") {
		return
	}
	var all []*statement
	for _, st := range c.statements {
		if st.table != "" && (st.ctx != nil && c.directly(st.ctx, l) || c.begunUnder(st, l)) {
			all = append(all, st)
		}
	}
	for _, w := range all {
		readFirst := func(r *statement) bool { return r.kind == reads && r.table == w.table && c.reaches(l, r.call, w.call) }
		if w.kind == writes && slices.ContainsFunc(all, readFirst) {
			c.report(w.call.Pos(), "shared", "%s writes what was read under the Shared lock of %s,"+
				" which others may hold and do the same meanwhile; ask for the lock without Shared", w.name, c.line(l.pos))
		}
	}
}

// begunUnder reports whether a statement is in a transaction that was begun in the lock context.
func (c *checker) begunUnder(st *statement, l *lock) bool {
	if st.tx == nil || st.tx.by == nil {
		return false
	}
	begin := c.sent[st.tx.by]
	return begin != nil && begin.ctx != nil && c.directly(begin.ctx, l)
}

// directly reports whether ctx belongs to the lock context, and to none in it.
func (c *checker) directly(ctx ssa.Value, l *lock) bool {
	all := c.roots(ctx)
	return len(all) == 1 && all[0] == l.value
}

// checkDriver reports statements of a lock context on a handle of a driver that knows no locks.
func (c *checker) checkDriver(l *lock) {
	for _, st := range c.inside(l) {
		if driver := c.openedBy(st.on); driver != "" {
			c.report(st.call.Pos(), "driver", "%s runs without the lock of %s: its handle was opened with the driver %q,"+
				" which ignores lock contexts; open it with \"mysqllock\"", st.name, c.line(l.pos), driver)
		}
	}
}

// openedBy returns the other driver that a handle was certainly opened with.
func (c *checker) openedBy(on ssa.Value) string {
	if on == nil {
		return ""
	}
	v := c.source(on)
	if e, ok := v.(*ssa.Extract); ok {
		v = e.Tuple
	}
	call, ok := v.(*ssa.Call)
	if !ok {
		return ""
	}
	f := c.callee(call.Common())
	switch {
	case f.is(pkgSQL, "", "Open"), f.is(pkgSQLX, "", "Open", "MustOpen", "Connect", "MustConnect"):
		if name, ok := c.text1(f.args[0]); ok && slices.Contains([]string{"mysql", "postgres", "pgx", "sqlite", "sqlite3", "sqlserver"}, name) {
			return name
		}
	case f.is(pkgBun, "", "NewDB"):
		return c.openedBy(f.args[0])
	case f.is(pkgGorm, "", "Open"):
		if by, ok := c.source(f.args[0]).(*ssa.Call); ok && c.callee(by.Common()).is("gorm.io/driver/mysql", "", "Open") {
			return "mysql"
		}
	}
	return ""
}
