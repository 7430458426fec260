package mysqllock_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// retired are words for which there is a standard one, with that one.
var retired = map[string]string{
	"crowd": "starvation guard, or callers, load", "crowded": "full", "crowds": "loads",
	"tenure": "context-bound hold", "tenures": "context-bound holds",
	"enclosing": "outer hold", "enclosure": "outer hold",
	"rival": "other process", "rivals": "other processes", "rivalry": "other process",
	"succession": "handoff", "successor": "next caller", "heir": "next caller", "inherit": "take over", "inherits": "takes over", "inherited": "took over",
	"handover": "handoff", "handovers": "handoffs", "hand-over": "handoff", "hand-overs": "handoffs", "hand-off": "handoff", "hand-offs": "handoffs",
	"carrier": "lock connection", "station": "waiting connection", "bell": "wake-up lock", "rung": "wake-up lock", "polite": "yield", "politely": "yield",
	"wish": "announced poller", "announcement": "announced poller", "announcements": "announced pollers",
	"ground": "connection kind", "site": "appConn", "sites": "appConns", "home": "txConn", "homes": "txConns",
	"scope": "context state, or lock context", "scopes": "context states, or lock contexts",
	"floor": "high-water mark, or high-water row", "hunt": "stress test",
	"in line": "in the queue", "line up": "queue up", "lines up": "queues up", "lined up": "queued up",
}

// elsewhere says, by path, where a word is another's, or means something else.
var elsewhere = map[string]*regexp.Regexp{
	"rival":   regexp.MustCompile(`^bench/`), // a product to compare with
	"rivals":  regexp.MustCompile(`^(bench/|docs/performance|Makefile)`),
	"carrier": regexp.MustCompile(`^(advisory/name\.go|docs/architecture\.md)`),  // a name on the server
	"wish":    regexp.MustCompile(`^(internal/lockname/|docs/architecture\.md)`), // a name on the server
	"ground":  regexp.MustCompile(`^inspect/web/`),                               // of a page
	"site":    regexp.MustCompile(`^(inspect/web|mysqllockvet)/|^docs_test\.go`), // of the web; of a call
	"sites":   regexp.MustCompile(`^(inspect/web|mysqllockvet)/`),
	"home":    regexp.MustCompile(`^(cmd/mysqllock|internal/tempserver)/`), // of a user
	"scope":   regexp.MustCompile(`^(mysqllockvet|telemetry)/|^CHANGELOG`), // of go/types; of OpenTelemetry
	"in line": regexp.MustCompile(`^internal/dbtest/child\.go`),            // c.in, line
	"floor":   regexp.MustCompile(`^(bench|internal/sqltext)/`),            // math.Floor; a function of SQL
}

// TestRetiredWords: each thing has one word, in code and in the pages: see "Words" in
// docs/architecture.md.
func TestRetiredWords(t *testing.T) {
	files := 0
	dbtest.OK(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == ".git"):
			return fs.SkipDir
		case path == "words_test.go" || !strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, ".md") && path != "Makefile":
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		n := 0
		for line := range strings.Lines(string(text)) {
			n++
			before := ""
			for _, word := range wordsOf(line) {
				for _, w := range []string{word, before + " " + word} {
					if write, is := retired[w]; is && (elsewhere[w] == nil || !elsewhere[w].MatchString(path)) {
						t.Errorf("%s:%d: %q is retired; write %q", path, n, w, write)
					}
				}
				before = word
			}
		}
		return err
	}))
	if files < 400 {
		t.Errorf("%d files read, want at least 400", files)
	}
}

// wordsOf returns the words of a line in lower case, also those within names.
func wordsOf(line string) []string {
	var spaced strings.Builder
	before := ' '
	for _, r := range line {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			spaced.WriteByte(' ')
		}
		spaced.WriteRune(unicode.ToLower(r))
		before = r
	}
	return strings.FieldsFunc(spaced.String(), func(r rune) bool { return !unicode.IsLetter(r) && r != '-' })
}
