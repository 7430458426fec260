package mysqllock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

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
