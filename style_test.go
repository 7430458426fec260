package mysqllock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// eachFile calls f with each file of this repository that take accepts, but those of testdata. There must be at least
// so many.
func eachFile(t *testing.T, least int, take func(path string) bool, f func(path string, text []byte)) {
	t.Helper()
	n := 0
	dbtest.OK(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == ".git"):
			return fs.SkipDir
		case !take(path):
			return nil
		}
		n++
		text, err := os.ReadFile(path)
		if err == nil {
			f(path, text)
		}
		return err
	}))
	if n < least {
		t.Errorf("%d files read, want at least %d", n, least)
	}
}

// eachSource is eachFile for the files of Go but those of tests, parsed with their comments.
func eachSource(t *testing.T, f func(path string, file *ast.File, at func(token.Pos) token.Position)) {
	t.Helper()
	files := token.NewFileSet()
	isSource := func(path string) bool { return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") }
	eachFile(t, 200, isSource, func(path string, text []byte) {
		file, err := parser.ParseFile(files, path, text, parser.ParseComments|parser.SkipObjectResolution)
		dbtest.OK(t, err)
		f(path, file, files.Position)
	})
}

// riddles are relative clauses without a noun: they do not say which thing they are about.
var riddles = regexp.MustCompile(`(?i)\b(what was|what were|whoever)\b|, of which\b`)

// TestCommentsNameTheirSubject: no comment has a riddle, except the documentation of exported names, whose words stay.
func TestCommentsNameTheirSubject(t *testing.T) {
	eachSource(t, func(path string, file *ast.File, at func(token.Pos) token.Position) {
		forUsers := map[*ast.CommentGroup]bool{}
		if !strings.Contains(filepath.ToSlash(path), "internal/") {
			forUsers[file.Doc] = true
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncDecl:
					forUsers[n.Doc] = n.Name.IsExported()
				case *ast.GenDecl:
					forUsers[n.Doc] = slices.ContainsFunc(n.Specs, exports)
				case *ast.ValueSpec:
					forUsers[n.Doc], forUsers[n.Comment] = n.Names[0].IsExported(), n.Names[0].IsExported()
				case *ast.Field:
					exported := len(n.Names) > 0 && n.Names[0].IsExported()
					forUsers[n.Doc], forUsers[n.Comment] = exported, exported
				}
				return true
			})
		}
		for _, group := range file.Comments {
			if riddle := riddles.FindString(group.Text()); riddle != "" && !forUsers[group] {
				t.Errorf("%v: a comment has %q; name the thing: \"the statement that …\"", at(group.Pos()), riddle)
			}
		}
	})
}

// exports reports whether a declaration has an exported name.
func exports(spec ast.Spec) bool {
	switch s := spec.(type) {
	case *ast.TypeSpec:
		return s.Name.IsExported()
	case *ast.ValueSpec:
		return slices.ContainsFunc(s.Names, (*ast.Ident).IsExported)
	}
	return false
}

// TestErrorNumbersHaveNames: the number of an error is compared with a name, which is in
// internal/server/numbers.go beside the name that the server has for it.
func TestErrorNumbersHaveNames(t *testing.T) {
	constants := 0
	eachSource(t, func(path string, file *ast.File, at func(token.Pos) token.Position) {
		ours := strings.HasPrefix(filepath.ToSlash(path), "internal/server/")
		bare := func(e ast.Expr) bool {
			literal, ok := e.(*ast.BasicLit)
			if !ok || literal.Kind != token.INT {
				return false
			}
			n, err := strconv.Atoi(literal.Value)
			return err == nil && n > 1000 && n < 10_000
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GenDecl:
				if ours && n.Tok == token.CONST {
					constants += len(n.Specs)
				}
				return n.Tok != token.CONST
			case *ast.BasicLit:
				if ours && bare(n) {
					t.Errorf("%v: %s has no name; give it one in internal/server/numbers.go", at(n.Pos()), n.Value)
				}
			case *ast.BinaryExpr:
				for _, sides := range [][2]ast.Expr{{n.X, n.Y}, {n.Y, n.X}} {
					if bare(sides[1]) && ofNumber(sides[0]) {
						t.Errorf("%v: the number of an error has no name; see internal/server/numbers.go", at(n.Pos()))
					}
				}
			}
			return true
		})
	})
	if constants < 90 {
		t.Errorf("%d constants found in internal/server, want at least 90", constants)
	}
}

// ofNumber reports whether e is server.Number(err), or the field Number of an error.
func ofNumber(e ast.Expr) bool {
	if call, ok := e.(*ast.CallExpr); ok {
		e = call.Fun
	}
	switch e := e.(type) {
	case *ast.SelectorExpr:
		return e.Sel.Name == "Number"
	case *ast.Ident:
		return e.Name == "Number"
	}
	return false
}

// TestReceiversAreInitialsAndLinesAreShort: in this module all methods of a type have the same name for the
// receiver, which is the type's first letter or the first letters of its words: c or lc for lockConn. No line but
// those of tests has more than 140 characters.
func TestReceiversAreInitialsAndLinesAreShort(t *testing.T) {
	files, receivers := token.NewFileSet(), make(map[string]map[string]string) // by type, the names, with a place of each
	dbtest.OK(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != ".":
			_, module := os.Stat(filepath.Join(path, "go.mod"))
			if module == nil || entry.Name() == "testdata" || entry.Name() == ".git" {
				return fs.SkipDir
			}
			return nil
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := 0; !strings.HasSuffix(path, "_test.go") {
			for line := range strings.Lines(string(text)) {
				if n++; utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 140 {
					t.Errorf("%s:%d: the line has more than 140 characters", path, n)
				}
			}
		}
		file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil || len(f.Recv.List[0].Names) == 0 {
				continue
			}
			name, of := f.Recv.List[0].Names[0].Name, filepath.Dir(path)+"."+typeName(f.Recv.List[0].Type)
			if receivers[of] == nil {
				receivers[of] = make(map[string]string)
			}
			receivers[of][name] = files.Position(f.Pos()).String()
		}
		return nil
	}))
	if len(receivers) < 200 {
		t.Errorf("%d types with methods, want at least 200", len(receivers))
	}
	for of, names := range receivers {
		name := of[strings.LastIndexByte(of, '.')+1:]
		for receiver, place := range names {
			if initials := initialsOf(name); receiver != initials && receiver != initials[:1] {
				t.Errorf("%s: the receiver of type %s is %s; write %s or %s", place, name, receiver, initials[:1], initials)
			}
		}
		if len(names) > 1 {
			t.Errorf("the receiver of type %s is one of %q; write the same everywhere: %v", name, slices.Sorted(maps.Keys(names)), names)
		}
	}
}

// typeName is the name of a receiver's type.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.IndexExpr:
		return typeName(e.X)
	case *ast.IndexListExpr:
		return typeName(e.X)
	case *ast.Ident:
		return e.Name
	}
	return "?"
}

// initialsOf returns the first letters of the words of a name, in lower case.
func initialsOf(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i == 0 || unicode.IsUpper(r) {
			b.WriteRune(unicode.ToLower(r))
		}
	}
	return b.String()
}
