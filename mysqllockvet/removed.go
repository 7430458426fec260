package mysqllockvet

import (
	"cmp"
	"go/ast"
	"maps"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

// checkLate reports statements that ask for the lock in a transaction that was begun without it.
func (c *checker) checkLate(l *lock) {
	for _, e := range c.events(l) {
		if e.st == nil || e.st.tx == nil {
			continue
		}
		begin := c.sent[e.st.tx.by]
		if begin == nil || !c.isOutside(begin, l) || c.calledUnderLock(begin) {
			continue
		}
		elsewhere := slices.DeleteFunc(c.inside(l), func(t *statement) bool { return t.tx.mayBe(begin.call) })
		if c.sameHandle(l, begin, elsewhere) {
			c.report(e.stack[0].Pos(), "late", "%s asks for the lock of %s in a transaction that began without it, on %s,"+
				" and fails with ErrUnsafe; begin the transaction with the lock context, or put mysqllock.Do around it",
				c.callee(e.stack[0].Common()).name, c.line(l.pos), c.line(begin.call.Pos()))
		}
	}
}

// calledUnderLock reports whether the context of a statement is a parameter for which a call in
// the package gives a lock context.
func (c *checker) calledUnderLock(st *statement) bool {
	if st.ctx == nil {
		return false
	}
	return slices.ContainsFunc(c.roots(st.ctx), func(r ssa.Value) bool {
		p, ok := r.(*ssa.Parameter)
		return ok && slices.ContainsFunc(c.calls(), func(call ssa.CallInstruction) bool {
			at, args := slices.Index(p.Parent().Params, p), call.Common().Args
			return c.function(call.Common().Value) == p.Parent() && at < len(args) &&
				slices.ContainsFunc(c.roots(args[at]), func(r ssa.Value) bool { return c.locks[r] != nil })
		})
	})
}

// onConn matches texts that leave something on a connection, or take it away. Its groups tell what.
var onConn = regexp.MustCompile(`(?is)^\s*(?:(USE)|(?:CREATE|DROP)\s+(TEMPORARY)|(?:LOCK|UNLOCK)\s+(TABLES?)|` +
	`SET\s+(?:(?:SESSION|LOCAL)\s+|@@(?:SESSION\.|LOCAL\.)?)?(\w+)\s*:?=)`)

// checkLeft reports statements that ask for the lock on a sql.Conn on which something was left.
func (c *checker) checkLeft(l *lock) {
	for _, st := range c.inside(l) {
		if !isConn(st) {
			continue
		}
		left := make(map[string]*statement) // by the object that is left
		for _, s := range c.statements {
			if s == st || !isConn(s) || c.source(s.on) != c.source(st.on) {
				continue
			}
			switch what, leaves := c.leaves(s); {
			case what == "":
			case leaves && left[what] == nil && c.dominates(s.call, st.call):
				left[what] = s
			default:
				delete(left, what) // it may have been taken away
			}
		}
		for _, what := range slices.Sorted(maps.Keys(left)) {
			by := left[what]
			c.report(st.call.Pos(), "left", "%s asks for the lock of %s on a sql.Conn on which %s on %s has left something (%s),"+
				" and fails with ErrUnsafe, as it would run without that on another connection; "+
				"set it in the DSN, or name the database in the statement", st.name, c.line(l.pos), by.name, c.line(by.call.Pos()), what)
		}
	}
}

// leaves says what a statement leaves on its connection, or takes away from there.
func (c *checker) leaves(st *statement) (what string, leaves bool) {
	s, ok := methods[st.f.name]
	if !ok || s.text < 0 || s.text >= len(st.f.args) {
		return "", false
	}
	text, _ := c.text1(st.f.args[s.text])
	m := onConn.FindStringSubmatch(text)
	if m == nil {
		return "", false
	}
	first := strings.ToUpper(strings.Fields(text)[0])
	switch what = strings.ToLower(cmp.Or(m[1], m[2], m[4], "tables")); what {
	case "autocommit", "password":
		return "", false
	}
	if m[4] == "" {
		return what, first != "DROP" && first != "UNLOCK"
	}
	return "SET " + what, !strings.Contains(strings.ToUpper(text), "DEFAULT")
}

func isConn(st *statement) bool {
	if st.on == nil || st.tx != nil {
		return false
	}
	_, name := typeName(st.on.Type())
	return name == "Conn"
}

// checkBeside reports an optimistic version beside a lock in one lock context.
func (c *checker) checkBeside(l *lock) {
	for o := c.outer(l); o != nil; o = c.outer(o) {
		inner, around := c.keeps(l), c.keeps(o)
		if inner != "" && around != "" && (inner == "Optimistic") != (around == "Optimistic") {
			c.report(l.pos, "optimistic", "%s asks for %s in a lock context that has %s, by %s on %s, and fails with ErrUnsafe:"+
				" a version is compared where nothing is locked;"+
				" keep all keys of a lock context in one way", l.f.name, inner, around, o.f.name, c.line(o.pos))
			return
		}
	}
}

// keeps returns the option that says how the keys of a lock are kept; "" if none does, and the
// handle's lockStrategy decides.
func (c *checker) keeps(l *lock) string {
	opts, ok := c.options(l.f)
	if !ok {
		return ""
	}
	for _, o := range opts {
		if s := strategies[o.name]; s != "" {
			return s
		}
	}
	for _, o := range opts {
		if slices.Contains([]string{"Shared", "Slots", "MinHold", "MaxHold"}, o.name) {
			return o.name
		}
	}
	return ""
}

// claims are the names of package lockctx that made a SELECT lock the rows that it returned.
var claims = []string{"Claim", "ForUpdate", "ForShare", "SkipLocked"}

// checkClaims reports lines that use claims, which are gone.
func (c *checker) checkClaims() {
	line := 0
	for _, file := range c.pass.Files {
		ast.Inspect(file, func(n ast.Node) bool {
			name, ok := n.(*ast.Ident)
			if !ok || !slices.Contains(claims, name.Name) {
				return true
			}
			of, at := c.pass.TypesInfo.Uses[name], c.pass.Fset.Position(name.Pos()).Line
			if of != nil && of.Pkg() != nil && of.Pkg().Path() == pkgLockctx && at != line {
				line = at
				c.report(name.Pos(), "claims", "lockctx.%s is gone: the driver changes no SELECT;"+
					" write FOR UPDATE, FOR SHARE and SKIP LOCKED into the statement: "+
					"in GORM with clause.Locking, in bun with For, in ent with ForUpdate", name.Name)
			}
			return true
		})
	}
}
