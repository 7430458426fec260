package mysqllockvet

import (
	"go/ast"
	"regexp"
	"slices"

	"golang.org/x/tools/go/ssa"
)

const pkgResolver = "gorm.io/plugin/dbresolver"

// checkHandles checks how the package sets up its database handles.
func (c *checker) checkHandles() {
	bounded := slices.ContainsFunc(c.pass.Files, c.setsMaxConns)
	for _, call := range c.calls() {
		f := c.callee(call.Common())
		switch {
		case f.is(pkgResolver, "", "Register"), f.is(pkgResolver, "DBResolver", "Register"):
			if c.inTest(call.Pos()) {
				continue // of a handle that is the test's own
			}
			c.resolves = true
			if c.knowsSource() {
				continue
			}
			c.report(call.Pos(), "dbresolver", "dbresolver sends reads to other handles, where they are not under the lock: the stock that is read there may be old; "+
				"read with Clauses(dbresolver.Write) or in a transaction wherever a lock is used, or leave the plugin out")
		case f.is(pkgSQL, "DB", "SetConnMaxLifetime", "SetConnMaxIdleTime"):
			if c.hasMaxConns(f.self, bounded) {
				c.report(call.Pos(), "max-conns", "with maxConns, %s ends only the light connections of database/sql, not those to the server; use %s in the DSN, or in mysqllock.Config",
					f.name, inPlaceOf[f.name])
			}
		}
	}
}

// knowsSource reports whether the package chooses the source of dbresolver somewhere.
func (c *checker) knowsSource() bool {
	for _, obj := range c.pass.TypesInfo.Uses {
		if obj.Pkg() != nil && obj.Pkg().Path() == pkgResolver && obj.Name() == "Write" {
			return true
		}
	}
	return false
}

// checkReplicas reports reads in the lock context that dbresolver sends elsewhere.
func (c *checker) checkReplicas(l *lock) {
	if !c.resolves {
		return
	}
	for _, e := range c.events(l) {
		if st := e.st; st != nil && st.style == "gorm" && st.kind == reads && st.tx == nil && !st.clauses {
			c.report(st.call.Pos(), "dbresolver", "%s may read from another handle of dbresolver, without the lock of %s; use Clauses(dbresolver.Write), or read in a transaction", st.name, c.line(l.pos))
		}
	}
}

// inPlaceOf has the parameters that do with maxConns what methods of sql.DB do without.
var inPlaceOf = map[string]string{
	"SetConnMaxLifetime": "connMaxLifetime (ConnMaxLifetime)",
	"SetConnMaxIdleTime": "connMaxIdleTime (ConnMaxIdleTime)",
}

var maxConns = regexp.MustCompile(`\bmaxConns=(%|[1-9])`)

// hasMaxConns reports whether a handle was opened with maxConns. Where the function does not
// show how it was opened, others is the answer: what else the package says.
func (c *checker) hasMaxConns(db ssa.Value, others bool) bool {
	v := c.source(db)
	if e, ok := v.(*ssa.Extract); ok {
		v = e.Tuple
	}
	call, ok := v.(*ssa.Call)
	if !ok {
		return others
	}
	f := c.callee(call.Common())
	if !f.is(pkgSQL, "", "Open") {
		return others
	}
	if driver, ok := c.text1(f.args[0]); ok && driver != "mysqllock" {
		return false
	}
	if dsn, ok := c.text1(f.args[1]); ok {
		return maxConns.MatchString(dsn)
	}
	return others
}

// setsMaxConns reports whether a file has a DSN with maxConns, or sets Config.MaxConns.
func (c *checker) setsMaxConns(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			found = found || maxConns.MatchString(n.Value)
		case *ast.CompositeLit:
			for _, e := range n.Elts {
				if field, ok := e.(*ast.KeyValueExpr); ok && c.isConfig(n) {
					name, ok := field.Key.(*ast.Ident)
					found = found || ok && name.Name == "MaxConns"
				}
			}
		case *ast.AssignStmt:
			for _, to := range n.Lhs {
				field, ok := to.(*ast.SelectorExpr)
				found = found || ok && field.Sel.Name == "MaxConns" && c.isConfig(field.X)
			}
		}
		return !found
	})
	return found
}

// isConfig reports whether an expression is a mysqllock.Config.
func (c *checker) isConfig(e ast.Expr) bool {
	t := c.pass.TypesInfo.TypeOf(e)
	if t == nil {
		return false
	}
	pkg, name := typeName(t)
	return pkg == pkgLock && name == "Config"
}
