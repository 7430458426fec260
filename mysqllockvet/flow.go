package mysqllockvet

import (
	"fmt"
	"go/token"
	"go/types"
	"slices"

	"golang.org/x/tools/go/ssa"
)

// dominates reports whether a has run whenever b runs. Both are in one function.
func dominates(a, b ssa.Instruction) bool {
	if a.Block() != b.Block() {
		return a.Block().Dominates(b.Block())
	}
	return slices.Index(a.Block().Instrs, a) < slices.Index(b.Block().Instrs, b)
}

// reaches reports whether to can run after from without barrier, which may be nil,
// in between. All are in one function.
func reaches(from, to, barrier ssa.Instruction) bool {
	const found, stopped, passed = 0, 1, 2
	scan := func(instrs []ssa.Instruction) int {
		for _, i := range instrs {
			switch i {
			case to:
				return found
			case barrier:
				return stopped
			}
		}
		return passed
	}
	first := from.Block()
	seen := make(map[*ssa.BasicBlock]bool)
	next := []*ssa.BasicBlock{}
	switch scan(first.Instrs[slices.Index(first.Instrs, from)+1:]) {
	case found:
		return true
	case passed:
		next = append(next, first.Succs...)
	}
	for len(next) > 0 {
		b := next[0]
		next = next[1:]
		if seen[b] {
			continue
		}
		seen[b] = true
		switch scan(b.Instrs) {
		case found:
			return true
		case passed:
			next = append(next, b.Succs...)
		}
	}
	return false
}

// sources returns the values that v may be: what lies behind variables, conversions
// and branches. nil is none.
func (c *checker) sources(v ssa.Value) []ssa.Value {
	var out []ssa.Value
	seen := make(map[ssa.Value]bool)
	var walk func(ssa.Value)
	walk = func(v ssa.Value) {
		if v == nil || seen[v] {
			return
		}
		seen[v] = true
		switch v := v.(type) {
		case *ssa.Phi:
			for _, e := range v.Edges {
				walk(e)
			}
			return
		case *ssa.ChangeInterface:
			walk(v.X)
			return
		case *ssa.MakeInterface:
			walk(v.X)
			return
		case *ssa.ChangeType:
			walk(v.X)
			return
		case *ssa.Const:
			if v.IsNil() {
				return
			}
		case *ssa.UnOp:
			if stored, ok := c.stored(v); ok {
				for _, s := range stored {
					walk(s)
				}
				return
			}
		}
		out = append(out, v)
	}
	walk(v)
	return out
}

// source returns the one value that v is, and nil if it may be several.
func (c *checker) source(v ssa.Value) ssa.Value {
	if all := c.sources(v); len(all) == 1 {
		return all[0]
	}
	return nil
}

// stored returns what the variable may contain that load reads, if it is a local one
// whose assignments are all known.
func (c *checker) stored(load *ssa.UnOp) ([]ssa.Value, bool) {
	if load.Op != token.MUL {
		return nil, false
	}
	cell, at := c.variable(load.X, load)
	if cell == nil {
		return nil, false
	}
	stores, ok := assignments(cell)
	switch {
	case !ok || len(stores) == 0:
		return nil, false
	case len(stores) == 1:
		return []ssa.Value{stores[0].Val}, true
	case at != load && slices.ContainsFunc(stores, func(s *ssa.Store) bool { return reaches(at, s, cell) }):
		return nil, false // a closure, and the variable changes after it was made
	}
	return lastAssigned(cell, at), true
}

// variable returns the variable at addr, and the instruction in its function at which
// it is read: where a closure was made that reads it.
func (c *checker) variable(addr ssa.Value, at ssa.Instruction) (*ssa.Alloc, ssa.Instruction) {
	for {
		switch v := addr.(type) {
		case *ssa.Alloc:
			return v, at
		case *ssa.FreeVar:
			made := c.made[v.Parent()]
			if made == nil {
				return nil, nil
			}
			addr, at = made.Bindings[slices.Index(v.Parent().FreeVars, v)], made
		default:
			return nil, nil
		}
	}
}

// assignments returns the assignments to the variable in its own function. ok is false
// if there may be others.
func assignments(cell *ssa.Alloc) (stores []*ssa.Store, ok bool) {
	for _, r := range *cell.Referrers() {
		switch r := r.(type) {
		case *ssa.Store:
			if r.Val == cell {
				return nil, false
			}
			stores = append(stores, r)
		case *ssa.UnOp, *ssa.DebugRef:
		case *ssa.MakeClosure:
			if !onlyRead(r, cell) {
				return nil, false
			}
		default:
			return nil, false
		}
	}
	return stores, true
}

// onlyRead reports whether the closure, and those in it, only read the variable at addr.
func onlyRead(made *ssa.MakeClosure, addr ssa.Value) bool {
	fn, ok := made.Fn.(*ssa.Function)
	if !ok {
		return false
	}
	for i, b := range made.Bindings {
		if b != addr || i >= len(fn.FreeVars) {
			continue
		}
		for _, r := range *fn.FreeVars[i].Referrers() {
			switch r := r.(type) {
			case *ssa.UnOp, *ssa.DebugRef:
			case *ssa.MakeClosure:
				if !onlyRead(r, fn.FreeVars[i]) {
					return false
				}
			default:
				return false
			}
		}
	}
	return true
}

// lastAssigned returns what may have been assigned last to the variable before at.
func lastAssigned(cell *ssa.Alloc, at ssa.Instruction) (out []ssa.Value) {
	last := func(instrs []ssa.Instruction) bool {
		for _, i := range slices.Backward(instrs) {
			if s, ok := i.(*ssa.Store); ok && s.Addr == cell {
				out = append(out, s.Val)
				return true
			}
			if i == cell {
				return true
			}
		}
		return false
	}
	b := at.Block()
	if last(b.Instrs[:slices.Index(b.Instrs, at)]) {
		return out
	}
	seen := make(map[*ssa.BasicBlock]bool)
	next := slices.Clone(b.Preds)
	for len(next) > 0 {
		b := next[0]
		next = next[1:]
		if !seen[b] {
			seen[b] = true
			if !last(b.Instrs) {
				next = append(next, b.Preds...)
			}
		}
	}
	return out
}

// noteClosures remembers where function literals are made and run.
func (c *checker) noteClosures() {
	for _, fn := range c.fns {
		for _, b := range fn.Blocks {
			for _, i := range b.Instrs {
				c.noteClosure(i)
			}
		}
	}
}

func (c *checker) noteClosure(i ssa.Instruction) {
	for _, op := range i.Operands(nil) {
		if fn, ok := (*op).(*ssa.Function); ok && fn.Parent() == i.Parent() {
			c.site[fn] = c.usedAt(i)
			if made, ok := i.(*ssa.MakeClosure); ok {
				c.made[fn] = made
			}
		}
	}
}

// usedAt returns the call that a function literal is given to, or run by, if it is only
// used there, and else where it is made.
func (c *checker) usedAt(i ssa.Instruction) ssa.Instruction {
	for {
		v, ok := i.(ssa.Value)
		if _, call := i.(ssa.CallInstruction); call || !ok {
			return i
		}
		refs := v.Referrers()
		if refs == nil || len(*refs) != 1 {
			return i
		}
		switch next := (*refs)[0].(type) {
		case ssa.CallInstruction, *ssa.ChangeType, *ssa.MakeInterface:
			i = next
		default:
			return i
		}
	}
}

// in returns where in fn the instruction runs: itself, or the place of the function
// literal that it is in. It is nil if it does not run in fn, and later reports whether
// it runs on another goroutine or when the function returns.
func (c *checker) in(fn *ssa.Function, i ssa.Instruction) (at ssa.Instruction, later bool) {
	for i != nil {
		switch i.(type) {
		case *ssa.Go, *ssa.Defer:
			later = true
		}
		if call, ok := i.(ssa.CallInstruction); ok && c.startsGoroutine(call.Common()) {
			later = true
		}
		if i.Parent() == fn {
			return i, later
		}
		i = c.site[i.Parent()]
	}
	return nil, later
}

// encloses reports whether inner is outer, or a function literal in it.
func encloses(outer, inner *ssa.Function) bool {
	for ; inner != nil; inner = inner.Parent() {
		if inner == outer {
			return true
		}
	}
	return false
}

// path names a value so that two that are the same have the same name: s.db is the
// same in all of a function. It is "" if that is not sure.
func (c *checker) path(v ssa.Value) string {
	switch v := c.source(v).(type) {
	case nil:
		return ""
	case *ssa.Parameter:
		if arg := c.argument(v); arg != nil {
			return c.path(arg)
		}
		return fmt.Sprintf("%p", v)
	case *ssa.Alloc, *ssa.FreeVar:
		return fmt.Sprintf("%p", v)
	case *ssa.Global:
		return v.String()
	case *ssa.FieldAddr:
		return c.field(v.X, v.Field)
	case *ssa.Field:
		return c.field(v.X, v.Field)
	case *ssa.UnOp:
		switch v.X.(type) {
		case *ssa.FieldAddr, *ssa.Global:
			return c.path(v.X)
		}
		return ""
	case *ssa.Extract:
		if call, ok := v.Tuple.(*ssa.Call); ok && v.Index == 0 {
			return c.pathOfCall(v, call)
		}
		return fmt.Sprintf("%p", v)
	case *ssa.Call:
		return c.pathOfCall(v, v)
	}
	return ""
}

// pathOfCall names what a call returns.
func (c *checker) pathOfCall(v ssa.Value, call *ssa.Call) string {
	f := c.callee(call.Common())
	switch {
	case f.is(pkgGorm, "DB", "DB"), f.is(pkgSQL, "DB", "Conn"), f.is(pkgSQLX, "DB", "Connx"), f.is(pkgBun, "DB", "Conn"):
		return c.path(f.self)
	case f.is(pkgSQLX, "", "NewDb"), f.is(pkgBun, "", "NewDB"):
		return c.path(f.args[0])
	case f.self == nil && len(f.args) == 0 && f.pkg == c.pass.Pkg.Path():
		return f.name + "()"
	case f.self != nil && len(f.args) == 0 && f.pkg == c.pass.Pkg.Path():
		if base := c.path(f.self); base != "" { // an accessor
			return base + "." + f.name + "()"
		}
		return ""
	}
	return fmt.Sprintf("%p", v)
}

// field names a field of base. The sql.DB in an sqlx.DB or bun.DB has the name of that.
func (c *checker) field(base ssa.Value, index int) string {
	path := c.path(base)
	t := base.Type()
	if p, ok := t.Underlying().(*types.Pointer); ok {
		t = p.Elem()
	}
	pkg, _ := typeName(t)
	s, ok := t.Underlying().(*types.Struct)
	if !ok || path == "" {
		return ""
	}
	if f := s.Field(index); !f.Embedded() || pkg != pkgSQLX && pkg != pkgBun {
		return path + "." + f.Name()
	}
	return path
}
