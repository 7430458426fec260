package mysqllockvet

import (
	"go/types"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// chain is what calls of an ORM's methods one on another say, as far as it matters.
type chain struct {
	root  ssa.Value // the handle that it begins with
	ctx   ssa.Value
	tx    *began
	text  ssa.Value
	table string
	any   bool // it has clauses, which may choose the handle
	ok    bool
}

// same reports whether two chains lead to the same.
func (a chain) same(b chain, path func(ssa.Value) string) bool {
	return a.ok && b.ok && a.ctx == b.ctx && (a.tx == nil) == (b.tx == nil) &&
		(a.root == b.root || path(a.root) != "" && path(a.root) == path(b.root))
}

// gormStatement is a statement of GORM.
func (c *checker) gormStatement(call ssa.CallInstruction, f function) *statement {
	k, ok := gormFinishers[f.name]
	if !ok {
		return nil
	}
	ch := c.gormChain(f.self, make(map[ssa.Value]bool))
	st := &statement{
		call: call, name: f.name, f: f, kind: k, style: "gorm",
		ctx: ch.ctx, on: ch.root, tx: ch.tx, table: ch.table, clauses: ch.any,
	}
	if !ch.ok {
		st.tx = &began{} // nobody knows
		return st
	}
	st.path = c.path(ch.root)
	text := ch.text
	if f.name == "Exec" {
		text = f.args[0]
	}
	switch {
	case text != nil:
		st.kind, st.table = c.text(text)
	case f.name == "Scan" || f.name == "Row" || f.name == "Rows":
		st.kind = reads
	}
	if st.table == "" && k != begins && text == nil && len(f.args) > 0 {
		st.table = c.model(f.args[0])
	}
	return st
}

// gormChain follows the calls that made a *gorm.DB to where they begin.
func (c *checker) gormChain(v ssa.Value, seen map[ssa.Value]bool) chain {
	all := c.sources(v)
	if len(all) != 1 {
		return c.gormBranches(all, seen)
	}
	v = all[0]
	if seen[v] {
		return chain{}
	}
	seen[v] = true
	switch v := v.(type) {
	case *ssa.Call:
		f := c.callee(v.Common())
		if helper := c.helper(v); helper != nil {
			return c.gormHelper(v, helper, seen)
		}
		if f.pkg != pkgGorm || f.recv != "DB" {
			return chain{}
		}
		return c.gormLink(v, f, c.gormChain(f.self, seen))
	case *ssa.Parameter:
		if arg := c.argument(v); arg != nil {
			return c.gormChain(arg, seen)
		}
		if call, ok := c.site[v.Parent()].(ssa.CallInstruction); ok {
			f := c.callee(call.Common())
			if !f.is(pkgGorm, "DB", "Transaction", "Connection") {
				return chain{}
			}
			ch := c.gormChain(f.self, seen)
			if f.name == "Transaction" {
				ch.tx = &began{by: call}
			}
			return ch
		}
		return chain{root: v, ok: v.Parent().Parent() == nil && !strings.Contains(strings.ToLower(v.Name()), "tx")}
	case *ssa.UnOp:
		if a, ok := v.X.(*ssa.FieldAddr); ok && (c.assigned(a) || strings.Contains(strings.ToLower(c.path(v)), "tx")) {
			return chain{}
		}
		return chain{root: v, ok: c.path(v) != ""}
	case *ssa.Extract:
		return chain{root: v, ok: true}
	}
	return chain{}
}

// gormHelper is the chain that a function of the package returns.
func (c *checker) gormHelper(call *ssa.Call, helper *ssa.Function, seen map[ssa.Value]bool) (ch chain) {
	if c.bound[helper] != nil {
		return chain{}
	}
	c.bound[helper] = call.Call.Args
	defer delete(c.bound, helper)
	last := helper.Blocks[len(helper.Blocks)-1]
	r, ok := last.Instrs[len(last.Instrs)-1].(*ssa.Return)
	if !ok || len(helper.Blocks) > 1 || len(r.Results) != 1 {
		return chain{}
	}
	ch = c.gormChain(r.Results[0], seen)
	if ch.ctx != nil { // it must be told now
		p, ok := c.source(ch.ctx).(*ssa.Parameter)
		if !ok {
			return chain{}
		}
		ch.ctx = c.argument(p)
	}
	return ch
}

// gormBranches is the chain of a variable that has several values, if these agree.
func (c *checker) gormBranches(all []ssa.Value, seen map[ssa.Value]bool) (ch chain) {
	for i, v := range all {
		next := c.gormChain(v, seen)
		switch {
		case seen[v] && !next.ok && i > 0:
			continue // a loop that adds to the chain
		case i == 0:
			ch = next
		case !ch.same(next, c.path):
			return chain{}
		}
	}
	return ch
}

// gormLink adds what one call says.
func (c *checker) gormLink(v *ssa.Call, f function, ch chain) chain {
	switch f.name {
	case "WithContext":
		ch.ctx = f.args[0]
	case "Session":
		ctx, ok := c.sessionContext(f.args[0])
		ch.ok = ch.ok && ok
		if ctx != nil {
			ch.ctx = ctx
		}
	case "Begin":
		ch.tx = &began{by: v}
	case "Clauses":
		ch.any = true
	case "Raw":
		ch.text = f.args[0]
	case "Model":
		ch.table = c.model(f.args[0])
	}
	return ch
}

// sessionContext returns the Context of the &gorm.Session{…} that v is.
func (c *checker) sessionContext(v ssa.Value) (ctx ssa.Value, ok bool) {
	a, ok := c.source(v).(*ssa.Alloc)
	if !ok {
		return nil, false
	}
	for _, r := range *a.Referrers() {
		field, ok := r.(*ssa.FieldAddr)
		if !ok || a.Type().Underlying().(*types.Pointer).Elem().Underlying().(*types.Struct).Field(field.Field).Name() != "Context" {
			continue
		}
		for _, r := range *field.Referrers() {
			if s, ok := r.(*ssa.Store); ok {
				ctx = s.Val
			}
		}
	}
	return ctx, true
}

// assigned reports whether the function, or one in or around it, assigns to the field.
func (c *checker) assigned(a *ssa.FieldAddr) bool {
	outer := a.Parent()
	for outer.Parent() != nil {
		outer = outer.Parent()
	}
	for _, fn := range c.fns {
		if !encloses(outer, fn) {
			continue
		}
		for _, b := range fn.Blocks {
			for _, i := range b.Instrs {
				if s, ok := i.(*ssa.Store); ok {
					if to, ok := s.Addr.(*ssa.FieldAddr); ok && to.Field == a.Field && types.Identical(to.X.Type(), a.X.Type()) {
						return true
					}
				}
			}
		}
	}
	return false
}

// bunStatement is a query of bun that is sent.
func (c *checker) bunStatement(call ssa.CallInstruction, f function) *statement {
	k, ok := bunQueries[f.recv]
	if !ok || len(f.args) == 0 || !isContext(f.args[0].Type()) {
		return nil
	}
	st := &statement{call: call, name: f.name, f: f, kind: k, style: "bun", ctx: f.args[0], tx: &began{}}
	for v := f.self; ; {
		made, ok := c.source(v).(*ssa.Call)
		if !ok {
			return st
		}
		link := c.callee(made.Common())
		switch {
		case link.pkg != pkgBun || link.self == nil:
			return st
		case link.name == "Conn":
			c.runsOn(st, link.args[0])
			return st
		case link.name == "Model":
			st.table = c.model(link.args[0])
		case strings.HasPrefix(link.name, "New"):
			if link.name == "NewRaw" {
				st.kind, st.table = c.text(link.args[0])
			}
			c.runsOn(st, link.self)
			return st
		}
		v = link.self
	}
}
