package mysqllock_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// The README stays short enough to be read at once: what it has to say beyond that is in
// the pages.
func TestReadmeIsShort(t *testing.T) {
	const most = 1300
	if n := len(strings.Fields(pages(t)["README.md"])); n > most {
		t.Errorf("the README has %d words, want at most %d", n, most)
	}
}

// The Go code in the README, and in the other pages, is the examples' code, which is
// compiled and run.
func TestReadmeCodeIsTheExamples(t *testing.T) {
	var sources []string
	files, err := filepath.Glob("examples/*/*.go")
	dbtest.OK(t, err)
	integrations, err := filepath.Glob("integrations/*/example_test.go")
	dbtest.OK(t, err)
	for _, f := range append(files, integrations...) {
		b, err := os.ReadFile(f)
		dbtest.OK(t, err)
		sources = append(sources, string(b))
	}
	for path, text := range pages(t) {
		blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(text, -1)
		if least := map[string]int{"README.md": 3, "docs/guide.md": 8}[path]; len(blocks) < least {
			t.Errorf("%s: %d blocks of Go code found, want at least %d", path, len(blocks), least)
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
					t.Errorf("%s: not in the examples:\n%s", path, fn)
				}
			}
		}
	}
}
