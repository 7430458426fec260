package mysqllockvet

import (
	"go/constant"
	"go/types"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/go/ssa"
)

const (
	pkgLock    = "github.com/mysqllock/mysqllock"
	pkgLockctx = "github.com/mysqllock/mysqllock/lockctx"
	pkgSQL     = "database/sql"
	pkgSQLX    = "github.com/jmoiron/sqlx"
	pkgGorm    = "gorm.io/gorm"
	pkgBun     = "github.com/uptrace/bun"
)

// function is what a call calls: a function, or a method of recv.
type function struct {
	pkg, recv, name string
	fn              *ssa.Function
	self            ssa.Value   // what the method is called on
	args            []ssa.Value // without self
}

func (f function) is(pkg, recv string, names ...string) bool {
	return f.pkg == pkg && f.recv == recv && slices.Contains(names, f.name)
}

// callee returns what a call calls, also through a method value; the zero function if
// that is not known, as with methods of interfaces.
func (c *checker) callee(call *ssa.CallCommon) function {
	if call.IsInvoke() {
		return function{}
	}
	args := call.Args
	var fn *ssa.Function
	switch v := c.source(call.Value).(type) {
	case *ssa.Function:
		fn = v
	case *ssa.MakeClosure:
		fn, _ = v.Fn.(*ssa.Function)
		if fn != nil && fn.Parent() == nil { // a method value
			args = append(slices.Clone(v.Bindings), args...)
		}
	}
	if fn == nil {
		return function{}
	}
	f := function{fn: fn, args: args}
	if o := fn.Origin(); o != nil {
		fn = o
	}
	obj, ok := fn.Object().(*types.Func)
	if !ok || obj.Pkg() == nil {
		return f
	}
	f.pkg, f.name = obj.Pkg().Path(), obj.Name()
	if recv := obj.Signature().Recv(); recv != nil && len(args) > 0 {
		_, f.recv = typeName(recv.Type())
		f.self, f.args = args[0], args[1:]
	}
	return f
}

// typeName returns the package and the name of a type, or of what it points to.
func typeName(t types.Type) (pkg, name string) {
	if p, ok := types.Unalias(t).(*types.Pointer); ok {
		t = p.Elem()
	}
	named, ok := types.Unalias(t).(*types.Named)
	if !ok || named.Obj().Pkg() == nil {
		return "", ""
	}
	return named.Obj().Pkg().Path(), named.Obj().Name()
}

func isContext(t types.Type) bool {
	pkg, name := typeName(t)
	return pkg == "context" && name == "Context"
}

// startsGoroutine reports whether a call runs the function that it is given on a
// goroutine of its own.
func (c *checker) startsGoroutine(call *ssa.CallCommon) bool {
	f := c.callee(call)
	return f.is("golang.org/x/sync/errgroup", "Group", "Go", "TryGo") || f.is("sync", "WaitGroup", "Go")
}

// What a statement does.
type kind int

const (
	unknown kind = iota
	reads        // rows of a table
	writes
	begins // a transaction
)

// A shape says where the arguments of a method are: 0 is the first after the receiver,
// -1 is that there is none.
type shape struct {
	ctx, text int
	kind      kind
}

// methods are those of database/sql, sqlx and bun that send statements.
var methods = map[string]shape{
	"Exec": {-1, 0, unknown}, "ExecContext": {0, 1, unknown},
	"Query": {-1, 0, unknown}, "QueryContext": {0, 1, unknown},
	"QueryRow": {-1, 0, unknown}, "QueryRowContext": {0, 1, unknown},
	"Get": {-1, 1, unknown}, "GetContext": {0, 2, unknown},
	"Select": {-1, 1, unknown}, "SelectContext": {0, 2, unknown},
	"Queryx": {-1, 0, unknown}, "QueryxContext": {0, 1, unknown},
	"QueryRowx": {-1, 0, unknown}, "QueryRowxContext": {0, 1, unknown},
	"NamedExec": {-1, 0, unknown}, "NamedExecContext": {0, 1, unknown},
	"NamedQuery": {-1, 0, unknown}, "NamedQueryContext": {0, 1, unknown},
	"MustExec": {-1, 0, unknown}, "MustExecContext": {0, 1, unknown},
	"Begin": {-1, -1, begins}, "Beginx": {-1, -1, begins}, "MustBegin": {-1, -1, begins},
	"BeginTx": {0, -1, begins}, "BeginTxx": {0, -1, begins}, "MustBeginTx": {0, -1, begins}, "RunInTx": {0, -1, begins},
}

// gormFinishers are the methods of GORM that send statements; what else returns a
// *gorm.DB only says how.
var gormFinishers = map[string]kind{
	"First": reads, "Take": reads, "Last": reads, "Find": reads, "Count": reads, "Pluck": reads, "FindInBatches": unknown,
	"Scan": unknown, "Row": unknown, "Rows": unknown, "Exec": unknown,
	"Create": writes, "CreateInBatches": writes, "Save": writes, "Update": writes, "Updates": writes,
	"UpdateColumn": writes, "UpdateColumns": writes, "Delete": writes, "FirstOrCreate": unknown,
	"Begin": begins, "Transaction": begins,
}

// bunQueries are the queries of bun that send a statement with Exec, Scan and so on.
var bunQueries = map[string]kind{
	"SelectQuery": reads, "InsertQuery": writes, "UpdateQuery": writes, "DeleteQuery": writes, "RawQuery": unknown,
}

// statement is a call that sends something to a database.
type statement struct {
	call  ssa.CallInstruction
	name  string // of the method
	f     function
	kind  kind
	table string    // that it reads or writes; "" if that is not sure
	ctx   ssa.Value // nil if it has none
	on    ssa.Value // the handle, or what began the transaction
	path  string    // of the handle
	style string    // sql, gorm or bun: handles of different styles have no name in common
	tx    *began    // the transaction that it is in; nil without one

	clauses bool // GORM's Clauses may have chosen the handle
}

// began is the transaction that a statement is in.
type began struct {
	by    ssa.CallInstruction   // nil if it is not sure which one
	maybe []ssa.CallInstruction // which ones it may be
}

// mayBe reports whether the transaction may be the one that by has begun.
func (b *began) mayBe(by ssa.CallInstruction) bool {
	return b != nil && (b.by == by || slices.Contains(b.maybe, by))
}

// statement returns the statement that a call sends, if it sends one.
func (c *checker) statement(call ssa.CallInstruction) *statement {
	f := c.callee(call.Common())
	switch {
	case f.pkg == pkgSQLX && f.recv == "" && f.name != "MustConnect":
		return c.sqlxFunction(call, f)
	case f.self == nil:
		return nil
	case f.pkg == pkgGorm && f.recv == "DB":
		return c.gormStatement(call, f)
	case f.pkg == pkgBun && strings.HasSuffix(f.recv, "Query"):
		return c.bunStatement(call, f)
	case f.pkg == pkgSQL && f.recv == "Stmt":
		return c.prepared(call, f)
	case f.pkg == pkgSQL || f.pkg == pkgSQLX || f.pkg == pkgBun:
		switch f.recv {
		case "DB", "Conn", "Tx":
			return c.plain(call, f, f.self)
		}
	}
	return nil
}

// plain is a statement of database/sql, or one with a text of sqlx or bun.
func (c *checker) plain(call ssa.CallInstruction, f function, on ssa.Value) *statement {
	s, ok := methods[f.name]
	if !ok || s.ctx >= len(f.args) || s.text >= len(f.args) {
		return nil
	}
	st := &statement{call: call, name: f.name, f: f, kind: s.kind, style: "sql"}
	if f.pkg == pkgBun {
		st.style = "bun"
	}
	if s.ctx >= 0 {
		st.ctx = f.args[s.ctx]
	}
	if s.text >= 0 {
		st.kind, st.table = c.text(f.args[s.text])
	}
	c.runsOn(st, on)
	return st
}

// sqlxFunction is a statement of a function of sqlx, such as sqlx.GetContext(ctx, db, …).
func (c *checker) sqlxFunction(call ssa.CallInstruction, f function) *statement {
	at := 0
	if strings.HasSuffix(f.name, "Context") {
		at = 1
	}
	if _, ok := methods[f.name]; !ok || len(f.args) <= at {
		return nil
	}
	on := f.args[at]
	f.args = slices.Delete(slices.Clone(f.args), at, at+1)
	return c.plain(call, f, on)
}

// prepared is a statement that was prepared before.
func (c *checker) prepared(call ssa.CallInstruction, f function) *statement {
	s, ok := methods[f.name]
	if !ok {
		return nil
	}
	st := &statement{call: call, name: f.name, f: f, style: "sql", tx: &began{}}
	if s.ctx == 0 {
		st.ctx = f.args[0]
	}
	from, ok := c.source(f.self).(*ssa.Extract)
	if !ok || from.Index != 0 {
		return st
	}
	by, ok := from.Tuple.(*ssa.Call)
	if !ok {
		return st
	}
	prepare := c.callee(by.Common())
	if prepare.self != nil && strings.HasPrefix(prepare.name, "Prepare") && (prepare.pkg == pkgSQL || prepare.pkg == pkgSQLX) {
		st.kind, st.table = c.text(prepare.args[len(prepare.args)-1])
		c.runsOn(st, prepare.self)
	}
	return st
}

// runsOn notes on which handle, or in which transaction, a statement runs.
func (c *checker) runsOn(st *statement, on ssa.Value) {
	st.on, st.path, st.tx = on, c.path(on), nil
	v := c.source(on)
	if a, ok := v.(*ssa.Alloc); ok { // the bun.Tx in a variable
		if stores, ok := assignments(a); ok && len(stores) == 1 {
			v = c.source(stores[0].Val)
		}
	}
	switch {
	case v != nil:
		c.runsIn(st, v)
	case mayBeTx(on):
		st.tx = &began{}
		for _, v := range c.sources(on) {
			if by := c.begunBy(v); by != nil {
				st.tx.maybe = append(st.tx.maybe, by)
			}
		}
	}
}

// runsIn notes the transaction of a statement if it runs on tx, and tx is one.
func (c *checker) runsIn(st *statement, tx ssa.Value) {
	if !mayBeTx(tx) {
		return
	}
	st.tx = &began{by: c.begunBy(tx)}
	if st.tx.by == nil {
		return
	}
	if f := c.callee(st.tx.by.Common()); f.self != nil {
		st.path = c.path(f.self)
	}
}

// mayBeTx reports whether a value may be a transaction, by its type.
func mayBeTx(v ssa.Value) bool {
	_, name := typeName(v.Type())
	return name == "Tx" || types.IsInterface(v.Type())
}

// begunBy returns the call that has begun the transaction tx, and nil if that is not known.
func (c *checker) begunBy(tx ssa.Value) ssa.CallInstruction {
	switch v := tx.(type) {
	case *ssa.Extract:
		if call, ok := v.Tuple.(*ssa.Call); ok && v.Index == 0 && methods[c.callee(call.Common()).name].kind == begins {
			return call
		}
	case *ssa.Call:
		if methods[c.callee(v.Common()).name].kind == begins {
			return v
		}
	case *ssa.Parameter:
		if arg := c.argument(v); arg != nil {
			return c.begunBy(c.source(arg))
		}
		call, ok := c.site[v.Parent()].(ssa.CallInstruction)
		if ok && c.callee(call.Common()).name == "RunInTx" {
			return call
		}
	}
	return nil
}

var (
	readText  = regexp.MustCompile("(?is)^\\s*SELECT\\s.*?\\sFROM\\s+`?([\\w.]+)`?")
	writeText = regexp.MustCompile("(?is)^\\s*(?:INSERT(?:\\s+IGNORE)?\\s+INTO|INSERT|REPLACE(?:\\s+INTO)?" +
		"|UPDATE(?:\\s+IGNORE)?|DELETE\\s+FROM)\\s+`?([\\w.]+)`?")
)

// text says what a constant text of a statement does, and with which table.
func (c *checker) text(v ssa.Value) (kind, string) {
	k, ok := c.source(v).(*ssa.Const)
	if !ok || k.Value == nil || k.Value.Kind() != constant.String {
		return unknown, ""
	}
	text := constant.StringVal(k.Value)
	if m := writeText.FindStringSubmatch(text); m != nil {
		return writes, strings.ToLower(m[1])
	}
	if m := readText.FindStringSubmatch(text); m != nil {
		return reads, strings.ToLower(m[1])
	}
	return unknown, ""
}

// model names the table of a model by its type.
func (c *checker) model(v ssa.Value) string {
	if s := c.source(v); s != nil {
		return modelOf(s.Type())
	}
	return ""
}

func modelOf(t types.Type) string {
	for {
		switch u := types.Unalias(t).(type) {
		case *types.Pointer:
			t = u.Elem()
		case *types.Slice:
			t = u.Elem()
		case *types.Named:
			return u.String()
		default:
			return ""
		}
	}
}
