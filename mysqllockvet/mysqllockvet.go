// Package mysqllockvet is an analyzer that finds code which gets no lock, or less of one
// than it looks like, with github.com/mysqllock/mysqllock. Run it with go vet:
//
//	go install github.com/mysqllock/mysqllock/mysqllockvet/cmd/mysqllockvet@latest
//	go vet -vettool=$(which mysqllockvet) ./...
//
// It looks at functions that make a lock context, with lockctx.With, mysqllock.Do or
// mysqllock.Acquire, and at what these functions send with database/sql, sqlx, GORM and
// bun. It reports only what the code shows for sure; docs/vet.md lists what it finds
// and what it cannot.
package mysqllockvet

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"

	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/ssa"
)

const page = "https://github.com/mysqllock/mysqllock/blob/main/docs/vet.md"

// Analyzer finds code that gets no lock, or less of one than it looks like.
var Analyzer = &analysis.Analyzer{
	Name: "mysqllock",
	Doc:  "find code that gets no lock, or less of one than it looks like, with github.com/mysqllock/mysqllock",
	URL:  page,
	Run:  run,
}

// checker looks at one package.
type checker struct {
	pass       *analysis.Pass
	fns        []*ssa.Function
	made       map[*ssa.Function]*ssa.MakeClosure
	called     []ssa.CallInstruction
	site       map[*ssa.Function]ssa.Instruction // where a function literal runs, as far as that is known
	locks      map[ssa.Value]*lock
	inOrder    []*lock
	statements []*statement
	sent       map[ssa.CallInstruction]*statement
	seen       map[*lock][]event
	resolves   bool                          // it sets up dbresolver
	entered    int                           // how often helpers were entered, of the lock context that is being looked at
	bound      map[*ssa.Function][]ssa.Value // the arguments of helpers that are being looked at
	reported   map[token.Pos]bool
}

func run(pass *analysis.Pass) (any, error) {
	if !imports(pass) {
		return nil, nil
	}
	c := &checker{
		pass:     pass,
		fns:      build(pass),
		made:     make(map[*ssa.Function]*ssa.MakeClosure),
		site:     make(map[*ssa.Function]ssa.Instruction),
		locks:    make(map[ssa.Value]*lock),
		sent:     make(map[ssa.CallInstruction]*statement),
		seen:     make(map[*lock][]event),
		bound:    make(map[*ssa.Function][]ssa.Value),
		reported: make(map[token.Pos]bool),
	}
	c.noteClosures()
	c.findLocks()
	for _, call := range c.calls() {
		if st := c.statement(call); st != nil {
			c.statements = append(c.statements, st)
			c.sent[call] = st
		}
	}
	c.checkClaims()
	c.checkOptions()
	c.checkKeys()
	c.checkHandles()
	for _, l := range c.inOrder {
		c.checkLock(l)
	}
	return nil, nil
}

// calls returns all calls, in the order of the source's functions.
func (c *checker) calls() []ssa.CallInstruction {
	if c.called != nil {
		return c.called
	}
	for _, fn := range c.fns {
		for _, b := range fn.Blocks {
			for _, i := range b.Instrs {
				if call, ok := i.(ssa.CallInstruction); ok {
					c.called = append(c.called, call)
				}
			}
		}
	}
	return c.called
}

// build returns the functions of the package in SSA form. The pass buildssa does this,
// too, but with it go vet would look at all packages that the program depends on, and few
// of the packages that it is to look at use locks.
func build(pass *analysis.Pass) (fns []*ssa.Function) {
	prog := ssa.NewProgram(pass.Fset, 0)
	prog.SetNoReturn(noReturn)
	for _, p := range pass.Pkg.Imports() {
		prog.CreatePackage(p, nil, nil, true)
	}
	prog.CreatePackage(pass.Pkg, pass.Files, pass.TypesInfo, false).Build()
	var add func(*ssa.Function)
	add = func(fn *ssa.Function) {
		fns = append(fns, fn)
		for _, literal := range fn.AnonFuncs {
			add(literal)
		}
	}
	for _, file := range pass.Files {
		for _, decl := range file.Decls {
			if decl, ok := decl.(*ast.FuncDecl); ok {
				add(prog.FuncValue(pass.TypesInfo.Defs[decl.Name].(*types.Func)))
			}
		}
	}
	return fns
}

// noReturn reports whether a function of the standard library never returns.
func noReturn(fn *types.Func) bool {
	switch fn.FullName() {
	case "os.Exit", "runtime.Goexit", "log.Fatal", "log.Fatalf", "log.Fatalln", "(*testing.common).Fatal", "(*testing.common).Fatalf",
		"(*testing.common).FailNow", "(*testing.common).Skip", "(*testing.common).Skipf", "(*testing.common).SkipNow":
		return true
	}
	return false
}

func imports(pass *analysis.Pass) bool {
	for _, p := range pass.Pkg.Imports() {
		if slices.Contains([]string{pkgLock, pkgLockctx}, p.Path()) {
			return true
		}
	}
	return false
}

// report reports what is wrong at pos, once. The rule is a heading of docs/vet.md.
func (c *checker) report(pos token.Pos, rule, format string, args ...any) {
	if c.reported[pos] {
		return
	}
	c.reported[pos] = true
	url := page + "#" + rule
	c.pass.Report(analysis.Diagnostic{Pos: pos, Category: rule, URL: url, Message: fmt.Sprintf(format, args...) + " (" + url + ")"})
}

// inTest reports whether pos is in a test.
func (c *checker) inTest(pos token.Pos) bool {
	return strings.HasSuffix(c.pass.Fset.Position(pos).Filename, "_test.go")
}

// line says where pos is.
func (c *checker) line(pos token.Pos) string {
	return fmt.Sprintf("line %d", c.pass.Fset.Position(pos).Line)
}
