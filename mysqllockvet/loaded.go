package mysqllockvet

import (
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// checkLoaded reports an object that was loaded before the lock, and is saved under it without
// having been read again: the save writes what the object was, over what other holders have made
// of it.
func (c *checker) checkLoaded(l *lock) {
	if c.mayHave(l, "IfVersion") {
		return
	}
	for _, w := range c.inside(l) {
		saved := c.saved(w)
		if saved == nil {
			continue
		}
		model := c.model(saved)
		if at, later := c.at(l, w.call); at == nil || later || model == "" || hasVersion(saved.Type()) || c.mayReload(l, w, model) {
			continue
		}
		objects := c.objects(saved)
		i := slices.IndexFunc(c.statements, func(r *statement) bool { return c.loadsBefore(l, r, objects) })
		if i >= 0 {
			c.report(w.call.Pos(), "loaded-before", "%s writes what %s on %s has read before the lock of %s, over what others have written since; "+
				"read it again here, or compare a version", w.name, c.statements[i].name, c.line(c.statements[i].call.Pos()), c.line(l.pos))
		}
	}
}

// saved returns the object that a statement writes with all of its fields, whatever the row is by
// then; nil if it writes no such object, or has a condition.
func (c *checker) saved(st *statement) ssa.Value {
	switch {
	case st.style == "gorm" && st.name == "Save":
		for v := st.f.self; ; {
			from := c.source(v)
			if from == nil {
				return nil
			}
			call, ok := from.(*ssa.Call)
			if !ok {
				return c.source(st.f.args[0])
			}
			link := c.callee(call.Common())
			switch link.name {
			case "WithContext", "Session", "Debug", "Model", "Omit", "Begin":
			default:
				return nil
			}
			if v = link.self; v == nil {
				return nil
			}
		}
	case st.style == "bun" && st.f.recv == "UpdateQuery":
		model, plain := c.bunModel(st.f.self, "NewUpdate", "WherePK", "Conn", "Column", "ExcludeColumn", "OmitZero")
		if plain {
			return model
		}
	}
	return nil
}

// bunModel returns the model of a query of bun. plain is false if it has other links than these.
func (c *checker) bunModel(query ssa.Value, links ...string) (model ssa.Value, plain bool) {
	plain = true
	for {
		call, ok := c.source(query).(*ssa.Call)
		if !ok {
			return model, false
		}
		link := c.callee(call.Common())
		switch {
		case link.pkg != pkgBun || link.self == nil:
			return model, false
		case link.name == "Model":
			model = c.source(link.args[0])
		case !slices.Contains(links, link.name):
			plain = false
		}
		if strings.HasPrefix(link.name, "New") {
			return model, plain
		}
		query = link.self
	}
}

// hasVersion reports whether a model has a field that may be a version, which a save may compare.
func hasVersion(t types.Type) bool {
	if p, ok := t.Underlying().(*types.Pointer); ok {
		t = p.Elem()
	}
	s, ok := t.Underlying().(*types.Struct)
	if !ok {
		return true // nobody knows
	}
	for f := range s.Fields() {
		name := strings.ToLower(f.Name())
		if strings.Contains(name, "version") || strings.Contains(name, "revision") || f.Embedded() && hasVersion(f.Type()) {
			return true
		}
	}
	return false
}

// read returns where a statement stores the rows that it reads; nil if that is not known.
func (c *checker) read(st *statement) ssa.Value {
	switch {
	case st.kind != reads:
	case st.style == "gorm" && len(st.f.args) > 0:
		return c.source(st.f.args[0])
	case st.style == "bun":
		if isNil(st.f.args[1]) {
			model, _ := c.bunModel(st.f.self)
			return model
		}
	case st.style == "sql" && len(st.f.args) > 1 && (st.name == "GetContext" || st.name == "SelectContext"):
		return c.source(st.f.args[1])
	case st.style == "sql" && len(st.f.args) > 0 && (st.name == "Get" || st.name == "Select"):
		return c.source(st.f.args[0])
	}
	return nil
}

// loadsBefore reports whether a statement has read one of the objects before the lock, with none.
func (c *checker) loadsBefore(l *lock, r *statement, objects []*ssa.Alloc) bool {
	into := c.read(r)
	if into == nil || r.tx != nil || r.clauses || !c.isOutside(r, l) {
		return false
	}
	var begins ssa.Instruction = l.call
	if l.made != nil {
		begins = l.made
	}
	return c.dominates(r.call, begins) && slices.ContainsFunc(c.objects(into), func(a *ssa.Alloc) bool { return slices.Contains(objects, a) })
}

// objects returns the variables that an address is of: that of an object, and that of the slice from
// which it was taken.
func (c *checker) objects(v ssa.Value) (out []*ssa.Alloc) {
	for range 10 {
		switch at := v.(type) {
		case *ssa.FreeVar:
			cell, _ := c.variable(at, nil)
			if cell == nil {
				return out
			}
			v = cell
		case *ssa.Alloc:
			out = append(out, at)
			from := onlyStored(at)
			if from == nil {
				return out
			}
			v = from
		case *ssa.IndexAddr:
			v = at.X
		case *ssa.UnOp:
			v = at.X
		default:
			return out
		}
	}
	return out
}

// onlyStored returns what the variable is assigned as a whole, if that is once.
func onlyStored(a *ssa.Alloc) (val ssa.Value) {
	for _, r := range *a.Referrers() {
		if s, ok := r.(*ssa.Store); ok && s.Addr == a {
			if val != nil {
				return nil
			}
			val = s.Val
		}
	}
	return val
}

// mayReload reports whether something under the lock may read an object of the model before w.
func (c *checker) mayReload(l *lock, w *statement, model string) bool {
	before := func(i ssa.Instruction) bool {
		at, _ := c.at(l, i)
		return at != nil && i != w.call && c.reaches(l, i, w.call)
	}
	for _, st := range c.statements {
		if st.kind == writes || st.kind == begins || !before(st.call) {
			continue
		}
		other := ""
		if into := c.read(st); into != nil {
			other = c.model(into)
		}
		if other == "" || other == model {
			return true
		}
	}
	return slices.ContainsFunc(c.stores(model), before) || slices.ContainsFunc(c.calls(), func(call ssa.CallInstruction) bool {
		return c.sent[call] == nil && before(call) && c.gets(call, model)
	})
}

// gets reports whether a call may change an object of the model by what it reads: it gets the
// address of one, or returns one. A method of the model reads nothing without a context or a handle.
func (c *checker) gets(call ssa.CallInstruction, model string) bool {
	f := c.callee(call.Common())
	if f.name == "Model" && (f.pkg == pkgGorm || f.pkg == pkgBun) {
		return false // only names it
	}
	for _, arg := range call.Common().Args {
		s := c.source(arg)
		if s == nil || !isAddress(s.Type()) || modelOf(s.Type()) != model {
			continue
		}
		if arg != f.self || slices.ContainsFunc(call.Common().Args[1:], func(arg ssa.Value) bool {
			_, name := typeName(arg.Type())
			return types.IsInterface(arg.Type()) || name == "DB" || name == "Tx" || name == "Conn"
		}) {
			return true
		}
	}
	for v := range call.Common().Signature().Results().Variables() {
		if modelOf(v.Type()) == model {
			return true
		}
	}
	return false
}

func isAddress(t types.Type) bool {
	switch t.Underlying().(type) {
	case *types.Pointer, *types.Slice:
		return true
	}
	return false
}

// stores returns the assignments of whole objects of the model.
func (c *checker) stores(model string) (out []ssa.Instruction) {
	for _, fn := range c.fns {
		for _, b := range fn.Blocks {
			for _, i := range b.Instrs {
				if s, ok := i.(*ssa.Store); ok && modelOf(s.Val.Type()) == model {
					out = append(out, s)
				}
			}
		}
	}
	return out
}
