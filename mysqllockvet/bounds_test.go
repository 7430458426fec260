package mysqllockvet

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"strconv"
	"strings"
	"testing"
)

// TestBoundsAreThoseOfTheDriver: the analyzer has copies of them, since it does not import the driver.
func TestBoundsAreThoseOfTheDriver(t *testing.T) {
	copies := map[string]int{"MaxKey": maxKey, "MaxSlots": maxSlots}
	atRunTime := map[string]bool{"MaxNested": true} // depends on how often a loop turns
	file, err := parser.ParseFile(token.NewFileSet(), "../internal/hint/hint.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, constant := range file.Scope.Objects {
		spec, ok := constant.Decl.(*ast.ValueSpec)
		if !ok || constant.Kind != ast.Con || !strings.HasPrefix(name, "Max") || atRunTime[name] {
			continue
		}
		ours, ok := copies[name]
		if value := types.ExprString(spec.Values[0]); !ok || value != strconv.Itoa(ours) {
			t.Errorf("%s is %s, and the analyzer's copy %d, if it has one", name, value, ours)
		}
		delete(copies, name)
	}
	for name := range copies {
		t.Errorf("the driver has no %s any more", name)
	}
}
