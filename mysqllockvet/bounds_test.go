package mysqllockvet

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
)

// TestBoundsAreThoseOfTheDriver: the analyzer has copies of them, since it does not import the driver.
func TestBoundsAreThoseOfTheDriver(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../internal/hint/hint.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, ours := range map[string]int{"MaxKey": maxKey, "MaxSlots": maxSlots} {
		constant := file.Scope.Lookup(name)
		if constant == nil {
			t.Errorf("the driver has no %s", name)
			continue
		}
		spec := constant.Decl.(*ast.ValueSpec)
		value := spec.Values[0].(*ast.BasicLit).Value
		if value != strconv.Itoa(ours) {
			t.Errorf("%s is %s, the analyzer's %d", name, value, ours)
		}
	}
}
