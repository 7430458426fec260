//go:build unix

package matrix

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

var update = flag.Bool("update", false, "write the golden files, and the table in docs/architecture.md")

// TestCommandsAreTheGoldenOnes runs the cells without a fault, and compares what each sends with
// the golden file of its server.
func TestCommandsAreTheGoldenOnes(t *testing.T) {
	t.Parallel()
	all := places(t, tempserver.EachFlavour(tempserver.Require(t)))
	cells := slices.DeleteFunc(possible(all), func(c cell) bool { return c.fault != 0 || !c.shows(all) })
	var mu sync.Mutex
	sent := make(map[string]commands) // by file
	each(t, cells, all, func(t *testing.T, c cell) {
		p := all[c.place]
		r := c.begin(t, p)
		want, got := readGolden(t, p.file)[c.use()], ""
		for n := range 25 { // what keeps a connection alive may come in between
			since := r.tap.Since()
			dbtest.OK(t, r.finish(r.work))
			r.idle()
			if got = r.fold(since()); got == want || *update && n == 2 {
				break
			}
		}
		switch {
		case !*update:
			if got != want {
				t.Errorf("it sends\n%s\nand by %s\n%s", got, p.file, want)
			}
		case c.conns == 0:
			mu.Lock()
			if sent[p.file] == nil {
				sent[p.file] = make(commands)
			}
			sent[p.file][c.use()] = got
			mu.Unlock()
		}
	})
	if *update {
		for file, commands := range sent {
			text := head
			for _, use := range slices.Sorted(maps.Keys(commands)) {
				text += "\n# " + use + "\n" + commands[use]
			}
			dbtest.OK(t, os.WriteFile(file, []byte(text), 0o644))
		}
	}
}

// shows reports whether the commands of a cell are compared. What is sent with maxConns, beneath a wrapper, or in
// other character sets, is what is sent without: unless all cells run, each use shows that at some place.
func (c cell) shows(all []*place) bool {
	usual := c.conns == 0 && all[c.place].form.mine == nil
	return usual || os.Getenv("MATRIX") == "all" || (c.strategy+c.way+c.conns)%len(all) == c.place
}

// TestThePageShowsTheGoldenCommands compares the table of docs/architecture.md with the golden
// files.
func TestThePageShowsTheGoldenCommands(t *testing.T) {
	const page, from, to = "../../docs/architecture.md", "<!-- written by go test ./internal/matrix -update -->\n", "<!-- end -->\n"
	text, err := os.ReadFile(page)
	dbtest.OK(t, err)
	before, rest, begins := strings.Cut(string(text), from)
	shown, after, ends := strings.Cut(rest, to)
	if !begins || !ends {
		t.Fatalf("%s has no table between %q and %q", page, from, to)
	}
	switch want := table(t); {
	case shown == want:
	case *update:
		dbtest.OK(t, os.WriteFile(page, []byte(before+from+want+to+after), 0o644))
	default:
		t.Errorf("%s shows\n%s\nand the golden files say\n%s", page, shown, want)
	}
}

// table shows how many commands each way sends beside those of the application.
func table(t *testing.T) string {
	t.Helper()
	shows := []struct{ file, name string }{
		{golden("MySQL"), "MySQL"},
		{golden("MariaDB"), "MariaDB"},
	}
	var b strings.Builder
	b.WriteString("| |")
	for _, w := range ways {
		b.WriteString(" " + w.name + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(ways)) + "\n")
	for s := range strategies {
		b.WriteString("| " + strategies[s].name + " |")
		for w := range ways {
			usual := 0
			for i, show := range shows {
				switch n := own(readGolden(t, show.file)[cell{strategy: s, way: w}.use()]); {
				case i == 0:
					usual = n
					fmt.Fprintf(&b, " %d", n)
				case n != usual:
					fmt.Fprintf(&b, ", %s %d", show.name, n)
				}
			}
			b.WriteString(" |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// own counts the commands that are not the application's.
func own(sent string) (n int) {
	for line := range strings.Lines(sent) {
		if line != elsewhere && !ofApplication(line) {
			n++
		}
	}
	return n
}

const (
	head      = "The commands that a unit of work sends, for a known key. Written by go test ./internal/matrix -update.\n"
	elsewhere = "and on another connection\n"
)

// golden is the file with what is sent to servers of that name.
func golden(name string) string {
	return filepath.Join("testdata", strings.ReplaceAll(name, " ", "_")+".txt")
}

// use names what a golden file has commands of.
func (c cell) use() string { return strategies[c.strategy].name + ", " + ways[c.way].name }

// commands are what is sent, by use.
type commands map[string]string

// readGolden reads a golden file.
func readGolden(t *testing.T, file string) commands {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	all := make(commands)
	for _, part := range strings.Split(string(text), "\n# ")[1:] {
		use, lines, _ := strings.Cut(part, "\n")
		all[use] = strings.TrimSuffix(lines, "\n") + "\n"
	}
	return all
}

var (
	literals = regexp.MustCompile(`x?'[^']*'`)
	numbers  = regexp.MustCompile(`\b\d+(\.\d+)?\b`)
)

// fold is what was sent, one command a line, without its literals. Commands of one connection
// stay in their order. What the application prepares for one use is one command. What keeps a
// connection alive comes with the time that a cell takes.
func (r *run) fold(sent []dbtest.Command) string {
	on := make(map[int]string)
	for _, c := range sent {
		text := c.Text
		if c.Of != "" {
			text = c.Of
		}
		prepared, prepares := strings.CutPrefix(text, "[prepare] ")
		keepsAlive := text == "[ping]" || strings.HasPrefix(text, "SELECT IF(CONNECTION_ID() = ") && !strings.Contains(text, "_LOCK(") // of package advisory
		if text == "[close]" || keepsAlive || prepares && ofApplication(prepared) {
			continue
		}
		if !ofApplication(text) {
			text = strings.ReplaceAll(text, r.place.Name, "db")
			text = numbers.ReplaceAllString(literals.ReplaceAllString(text, "'…'"), "N")
		}
		on[c.Conn] += text + "\n"
	}
	return strings.Join(slices.Sorted(maps.Values(on)), elsewhere)
}

func ofApplication(text string) bool { return strings.Contains(text, " counters ") }
