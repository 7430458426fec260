package mysqllockvet

const pkgResolver = "gorm.io/plugin/dbresolver"

// checkHandles checks how the package sets up its database handles.
func (c *checker) checkHandles() {
	for _, call := range c.calls() {
		f := c.callee(call.Common())
		registers := f.is(pkgResolver, "", "Register") || f.is(pkgResolver, "DBResolver", "Register")
		if !registers || c.inTest(call.Pos()) { // of a handle that is the test's own
			continue
		}
		if c.resolves = true; !c.knowsSource() {
			c.report(call.Pos(), "dbresolver", "dbresolver sends reads to other handles, where they are not under the lock:"+
				" the stock that is read there may be old; "+
				"read with Clauses(dbresolver.Write) or in a transaction wherever a lock is used, or leave the plugin out")
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
			c.report(st.call.Pos(), "dbresolver", "%s may read from another handle of dbresolver, without the lock of %s;"+
				" use Clauses(dbresolver.Write), or read in a transaction", st.name, c.line(l.pos))
		}
	}
}
