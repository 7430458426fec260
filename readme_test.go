package mysqllock_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The README's Go code is the examples' code, which is compiled and run.
func TestReadmeCodeIsTheExamples(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	ok(t, err)
	var sources []string
	files, err := filepath.Glob("examples/*/*.go")
	ok(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		ok(t, err)
		sources = append(sources, string(b))
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	if len(blocks) < 6 {
		t.Fatalf("%d blocks of Go code found, want at least 6", len(blocks))
	}
	for _, b := range blocks {
		for _, fn := range regexp.MustCompile(`(?m)^}\n*`).Split(b[1], -1) {
			if fn = strings.TrimSpace(fn); fn == "" {
				continue
			}
			found := false
			for _, src := range sources {
				found = found || strings.Contains(src, fn+"\n}")
			}
			if !found {
				t.Errorf("not in the examples:\n%s", fn)
			}
		}
	}
}
