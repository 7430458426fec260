package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// pages returns the documentation, by path: the pages in the root, in docs and below, and those of integrations and telemetry.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "integrations/*/README.md", "telemetry/*/README.md"} {
		paths, err := filepath.Glob(pattern)
		dbtest.OK(t, err)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			dbtest.OK(t, err)
			found[path] = string(text)
		}
	}
	return found
}

// packageDoc returns the documentation of the package, read as "go doc" reads it.
func packageDoc(t *testing.T) *comment.Doc {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, parser.ParseComments|parser.PackageClauseOnly)
	dbtest.OK(t, err)
	return new(comment.Parser).Parse(file.Doc.Text())
}

// dense returns text without the white space around its lines, and without empty lines.
func dense(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return "\n" + strings.Join(lines, "\n") + "\n"
}

// The Go code in the package documentation is that of the Example functions, which compile.
func TestDocCodeIsTheExamples(t *testing.T) {
	examples, err := os.ReadFile("docs_test.go")
	dbtest.OK(t, err)
	blocks := 0
	for _, block := range packageDoc(t).Content {
		code, isCode := block.(*comment.Code)
		if !isCode || !strings.Contains(code.Text, ":=") {
			continue // prose, or the table
		}
		blocks++
		if !strings.Contains(dense(string(examples)), dense(code.Text)) {
			t.Errorf("not among the examples of docs_test.go:\n%s", code.Text)
		}
	}
	if blocks < 5 {
		t.Errorf("%d blocks of Go code found, want at least 5", blocks)
	}
}

// anchors are the fragments under which GitHub shows the headings of a page.
func anchors(page string) map[string]bool {
	all, lost := make(map[string]bool), regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		all[strings.ReplaceAll(lost.ReplaceAllString(strings.ToLower(heading[1]), ""), " ", "-")] = true
	}
	return all
}

// TestLinksOfThePagesLeadToWhatIsThere: those from one page to another, and from the package
// documentation to a page.
func TestLinksOfThePagesLeadToWhatIsThere(t *testing.T) {
	const site = "https://github.com/mysqllock/mysqllock/blob/main/"
	pages, headings := pages(t), make(map[string]map[string]bool)
	check := func(from, target string) {
		path, fragment, _ := strings.Cut(target, "#")
		if path != "" {
			path = filepath.Join(filepath.Dir(from), path)
		} else {
			path = from
		}
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s: nothing at %s", from, target)
			return
		}
		if headings[path] == nil {
			headings[path] = anchors(pages[path])
		}
		if fragment != "" && !headings[path][fragment] {
			t.Errorf("%s: %s has no heading for #%s", from, path, fragment)
		}
	}
	links := 0
	for path, text := range pages {
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(text, -1) {
			if !strings.Contains(m[1], "://") {
				links++
				check(path, m[1])
			}
		}
	}
	for _, link := range packageDoc(t).Links {
		target, isPage := strings.CutPrefix(link.URL, site)
		if !isPage {
			t.Errorf("doc.go: %s is not below %s", link.URL, site)
		}
		links++
		check("doc.go", target)
	}
	if links < 20 {
		t.Errorf("%d links found, want at least 20", links)
	}
}

// The pages say something of each option of a hint, of each sentinel, and of each
// DSN parameter.
func TestDocsAreComplete(t *testing.T) {
	var all strings.Builder
	for path, text := range pages(t) {
		if path != "CHANGELOG.md" {
			all.WriteString(text)
		}
	}
	var names []string
	declared := func(path string, visit func(ast.Decl)) {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		dbtest.OK(t, err)
		for _, d := range file.Decls {
			visit(d)
		}
	}
	declared("lockctx/lockctx.go", func(d ast.Decl) {
		if f, isFunc := d.(*ast.FuncDecl); isFunc && f.Name.IsExported() && f.Recv == nil {
			names = append(names, "lockctx."+f.Name.Name)
		}
	})
	declared("errors.go", func(d ast.Decl) {
		g, isGen := d.(*ast.GenDecl)
		if !isGen || g.Tok != token.VAR {
			return
		}
		for _, spec := range g.Specs {
			for _, name := range spec.(*ast.ValueSpec).Names {
				names = append(names, name.Name)
			}
		}
	})
	declared("config.go", func(d ast.Decl) {
		g, isGen := d.(*ast.GenDecl)
		if !isGen || g.Tok != token.TYPE {
			return
		}
		s, isStruct := g.Specs[0].(*ast.TypeSpec).Type.(*ast.StructType)
		if !isStruct || g.Specs[0].(*ast.TypeSpec).Name.Name != "Config" {
			return
		}
		for _, f := range s.Fields.List {
			names = append(names, regexp.MustCompile(`\block[A-Z]\w+`).FindAllString(f.Doc.Text(), -1)...)
		}
	})
	if len(names) < 40 {
		t.Errorf("%d names found, want at least 40: %q", len(names), names)
	}
	words := make(map[string]bool)
	for _, word := range regexp.MustCompile(`\w+(\.\w+)?`).FindAllString(all.String(), -1) {
		_, after, _ := strings.Cut(word, ".")
		words[word], words[after] = true, true
	}
	for _, name := range names {
		if !words[name] {
			t.Errorf("no page speaks of %s", name)
		}
	}
}

// declarations returns what each Go file of the module declares: types, their fields and
// methods (with the name of the type), functions, and the rest, by its path. Under a
// package's name it is all that the package declares, and under "" all there is.
func declarations(t *testing.T) map[string]map[string]bool {
	t.Helper()
	declared := map[string]map[string]bool{"": {}}
	dbtest.OK(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if declared[file.Name.Name] == nil {
			declared[file.Name.Name] = map[string]bool{}
		}
		declared[path] = map[string]bool{}
		note := func(name string) {
			for _, where := range []string{path, file.Name.Name, ""} {
				declared[where][name] = true
			}
		}
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				note(d.Name.Name)
				if d.Recv == nil {
					continue
				}
				of := d.Recv.List[0].Type
				if pointer, is := of.(*ast.StarExpr); is {
					of = pointer.X
				}
				if of, is := of.(*ast.Ident); is {
					note(of.Name + "." + d.Name.Name)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					noteSpec(spec, note)
				}
			}
		}
		return nil
	}))
	return declared
}

func noteSpec(spec ast.Spec, note func(string)) {
	switch spec := spec.(type) {
	case *ast.ValueSpec:
		for _, name := range spec.Names {
			note(name.Name)
		}
	case *ast.TypeSpec:
		note(spec.Name.Name)
		if of, is := spec.Type.(*ast.StructType); is {
			for _, field := range of.Fields.List {
				for _, name := range field.Names {
					note(spec.Name.Name + "." + name.Name)
				}
			}
		}
		if of, is := spec.Type.(*ast.InterfaceType); is {
			for _, method := range of.Methods.List {
				for _, name := range method.Names {
					note(name.Name)
				}
			}
		}
	}
}

// TestTheArchitecturePageNamesWhatIsThere: the files and packages; and the types, fields and
// functions, in one of the files that the same line names, if it names any.
func TestTheArchitecturePageNamesWhatIsThere(t *testing.T) {
	text := pages(t)["docs/architecture.md"]
	words, _, found := strings.Cut(text, "\n## Rooms\n") // which explain words of users, too
	if !found {
		t.Fatal("there is no section Rooms")
	}
	declared := declarations(t)
	isPath := regexp.MustCompile(`^([\w.-]+/)+[\w.-]+$|^[\w.-]+\.(go|md|yml)$`)
	isName := regexp.MustCompile(`^[A-Za-z]\w*(\.[A-Za-z]\w*){0,2}$`)
	checked := 0
	at := 0
	for line := range strings.Lines(text) {
		at += len(line)
		var files, names []string
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(line, -1) {
			switch word := m[1]; {
			case word == "database/sql":
			case isPath.MatchString(word):
				if _, err := os.Stat(word); err != nil {
					t.Errorf("there is no %s: %s", word, line)
				}
				if strings.HasSuffix(word, ".go") {
					files = append(files, word)
				}
			case at > len(words) && isName.MatchString(word):
				names = append(names, word)
			}
		}
		for _, name := range names {
			checked++
			of, rest, qualified := strings.Cut(name, ".")
			switch {
			case declared[name] != nil: // a package
			case qualified && declared[of] != nil:
				if !declared[of][rest] {
					t.Errorf("package %s has no %s: %s", of, rest, line)
				}
			case !declared[""][name]:
				t.Errorf("there is no %s: %s", name, line)
			case qualified && len(files) > 0 && !slices.ContainsFunc(files, func(file string) bool { return declared[file][name] }):
				t.Errorf("%s is not in %s: %s", name, strings.Join(files, ", "), line)
			}
		}
	}
	if checked < 100 {
		t.Errorf("%d names checked, want at least 100", checked)
	}
}

// The README stays short enough to be read at once: what it has to say beyond that is in
// the pages.
func TestReadmeIsShort(t *testing.T) {
	const most = 900
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
	least := map[string]int{"README.md": 2, "docs/guide.md": 4}
	for _, group := range []string{"integrations", "telemetry"} {
		modules, err := filepath.Glob(group + "/*/go.mod")
		dbtest.OK(t, err)
		for _, module := range modules {
			files = append(files, filepath.Join(filepath.Dir(module), "example_test.go"))
			least[filepath.Join(filepath.Dir(module), "README.md")] = 1
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		dbtest.OK(t, err)
		sources = append(sources, string(b))
	}
	pages := pages(t)
	for path := range least {
		if pages[path] == "" {
			t.Errorf("there is no %s", path)
		}
	}
	for path, text := range pages {
		blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(text, -1)
		if len(blocks) < least[path] {
			t.Errorf("%s: %d blocks of Go code found, want at least %d", path, len(blocks), least[path])
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

// What the table of servers in docs/servers.md claims is what is tested: the tests that it
// names are there, and the versions in the matrix are those of the workflow.
func TestPageOfServersNamesTheTestedOnes(t *testing.T) {
	page, err := os.ReadFile("docs/servers.md")
	dbtest.OK(t, err)
	workflow, err := os.ReadFile(".github/workflows/servers.yml")
	dbtest.OK(t, err)
	tests := make(map[string]bool)
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	dbtest.OK(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(source, -1) {
			tests[string(m[1])] = true
		}
		return err
	}))

	var claimed []string
	states := map[string]int{}
	_, table, _ := strings.Cut(string(page), "| server or proxy | version | state | tests |\n")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		if len(cells) != 4 {
			break
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		state := regexp.MustCompile(`^(tested here|in the matrix|expected|refused|unknown|---)`).FindString(cells[2])
		if state == "" {
			t.Errorf("%s has the state %q", cells[0], cells[2])
		}
		states[state]++
		names := regexp.MustCompile("`(Test\\w+)").FindAllStringSubmatch(cells[3], -1)
		if (state == "tested here" || state == "refused") && len(names) == 0 {
			t.Errorf("%s is %s by no test", cells[0], state)
		}
		for _, name := range names {
			if !tests[name[1]] {
				t.Errorf("%s: there is no %s", cells[0], name[1])
			}
		}
		if state == "in the matrix" {
			for version := range strings.SplitSeq(cells[1], ", ") {
				claimed = append(claimed, strings.ToLower(cells[0])+":"+version)
			}
		}
	}
	for _, state := range []string{"tested here", "in the matrix", "expected", "refused"} {
		if states[state] == 0 {
			t.Errorf("nothing is %s", state)
		}
	}

	var matrix []string
	for _, m := range regexp.MustCompile(`(?m)^ +- ((?:mysql|mariadb):\S+)`).FindAllSubmatch(workflow, -1) {
		matrix = append(matrix, string(m[1]))
	}
	for _, version := range claimed {
		if !slices.Contains(matrix, version) {
			t.Errorf("%s is not in the matrix of the workflow", version)
		}
	}
}

// TestALimitOnSelectedRowsIsNoneOnOurs: those of the lock table, of which several keys have one
// each.
func TestALimitOnSelectedRowsIsNoneOnOurs(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		other, db := s.open(), s.open("sql_select_limit=1")
		keys := []string{"a", "b", "c"}
		tx := dbtest.Begin(t, lockctx.WithKeys(dbtest.Limited(t), keys), other)
		_, err := db.ExecContext(lockctx.WithKeys(dbtest.Limited(t), keys, lockctx.NoWait()), "UPDATE p SET stock = 9")
		if !errors.Is(err, mysqllock.ErrLocked) { // rows that are there are not made again, which would wait for who has locked them
			t.Errorf("keys that are held: %v", err)
		}
		dbtest.OK(t, tx.Rollback())
		for _, how := range rightsOf {
			t.Run(how.name, func(t *testing.T) {
				hint := func() context.Context { return lockctx.WithKeys(dbtest.Limited(t), keys, how.holds) }
				dbtest.ExecIn(t, hint(), db, "UPDATE p SET stock = 9")
				ctx := hint()
				stock.MustRead(t, ctx, db, 1)
				tx := dbtest.Begin(t, ctx, db)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 8")
				dbtest.OK(t, tx.Commit())
				s.wantStock(4, 8)
			})
		}
	})
}

func TestAReadTimeoutDoesNotLimitWaitsForLocks(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const readTimeout = 6 * time.Second
		cfg, log := s.Config(), new(failures)
		cfg.ReadTimeout, cfg.Logger = readTimeout, log
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Wait: 5 * time.Minute})
		dbtest.OK(t, err)
		holder, db := s.open(), sql.OpenDB(connector)
		t.Cleanup(func() { db.Close() })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		write := func(ctx context.Context) error { return exec(ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1") }
		ways := map[string]func(key string, how lockctx.Option) error{
			"Exec": func(key string, how lockctx.Option) error { return write(lockctx.With(ctx, key, how)) },
			"Do":   func(key string, how lockctx.Option) error { return mysqllock.Do(ctx, db, key, write, how) },
		}
		var held []*mysqllock.Hold
		var waiting sync.WaitGroup
		for what, how := range map[string]lockctx.Option{
			"row": lockctx.Row(), "slots": lockctx.Slots(1), "lease": lockctx.Lease(5 * time.Minute), "advisory": lockctx.Advisory(),
		} {
			for name, way := range ways {
				key := what + ", " + name
				h, err := mysqllock.Acquire(ctx, holder, key, how)
				dbtest.OK(t, err)
				held = append(held, h)
				waiting.Go(func() {
					if err := way(key, how); err != nil {
						t.Errorf("%s: %v", key, err)
					}
				})
			}
		}
		dbtest.Soon(t, "all wait", func() bool {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return st.Waiters >= len(held)
		})
		time.Sleep(readTimeout * 4 / 3) // so long they wait, for nothing
		for _, h := range held {
			dbtest.OK(t, h.Release())
		}
		waiting.Wait()
		s.wantStock(1, 10-len(held))
		if n := log.timeouts.Load(); n > 0 {
			t.Errorf("%d connections were given up", n)
		}
	})
}

// failures counts what go-sql-driver has to say of answers that took too long.
type failures struct{ timeouts atomic.Int64 }

func (f *failures) Print(v ...any) {
	if strings.Contains(fmt.Sprint(v...), "i/o timeout") {
		f.timeouts.Add(1)
	}
}

// These compile in every test run; the programs in examples/ are run, too.

func Example() {
	dsn := "app:pw@tcp(127.0.0.1:3306)/shop?lockWait=5s"
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, "product:42")
	tx, err := db.BeginTx(ctx, nil) // takes the lock
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 42 AND stock > 0"); err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil { // gives it back
		log.Fatal(err)
	}
}

func ExampleDo() {
	var db *sql.DB // opened with "mysqllock"
	ctx := context.Background()

	err := mysqllock.Do(ctx, db, "nightly-report", func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "INSERT INTO reports (day) VALUES (CURRENT_DATE)")
		return err
	}, lockctx.NoWait())

	var e *mysqllock.Error
	if errors.Is(err, mysqllock.ErrLocked) && errors.As(err, &e) && e.Holder != nil {
		fmt.Println("already running:", e.Holder)
	}
}

func ExampleDo_lease() {
	var db *sql.DB // opened with "mysqllock"
	var order func(ctx context.Context, token uint64) error
	ctx := context.Background()

	err := mysqllock.Do(ctx, db, "restock", func(ctx context.Context) error {
		token, _ := mysqllock.Token(ctx) // for systems outside of the database
		return order(ctx, token)         // may take minutes
	}, lockctx.Lease(30*time.Second))
	if errors.Is(err, mysqllock.ErrLost) {
		log.Print("another process may have restocked since")
	}
}

func Example_readDecideWrite() {
	var db *sql.DB // opened with "mysqllock"

	sell := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		ctx = lockctx.With(ctx, "product:42")
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil { // takes the lock
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1) // commits, and gives the lock back
		return err
	}
	if err := sell(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func ExampleAcquire() {
	var db *sql.DB // opened with "mysqllock"

	hold, err := mysqllock.Acquire(context.Background(), db, "import", lockctx.Wait(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	defer hold.Rollback() // does nothing after Release
	if _, err := db.ExecContext(hold.Context(), "DELETE FROM staging"); err != nil {
		log.Fatal(err)
	}
	if err := hold.Release(); err != nil { // commits
		log.Fatal(err)
	}
}

// retired are words for which there is a standard one, with that one.
var retired = map[string]string{
	"crowd": "starvation guard, or callers, load", "crowded": "full", "crowds": "loads",
	"tenure": "context-bound hold", "tenures": "context-bound holds",
	"enclosing": "outer hold", "enclosure": "outer hold",
	"rival": "other process", "rivals": "other processes", "rivalry": "other process",
	"succession": "handoff", "successor": "next caller", "heir": "next caller", "inherit": "take over", "inherits": "takes over", "inherited": "took over",
	"handover": "handoff", "handovers": "handoffs", "hand-over": "handoff", "hand-overs": "handoffs", "hand-off": "handoff", "hand-offs": "handoffs",
	"carrier": "lock connection", "station": "waiting connection", "bell": "wake-up lock", "rung": "wake-up lock", "polite": "yield", "politely": "yield",
	"wish": "poller", "announcement": "poller", "announcements": "pollers",
	"ground": "connection kind", "site": "appConn", "sites": "appConns", "home": "txConn", "homes": "txConns",
	"scope": "context state, or lock context", "scopes": "context states, or lock contexts",
	"floor": "high-water mark, or high-water row", "hunt": "stress test",
	"in line": "in the queue", "line up": "queue up", "lines up": "queues up", "lined up": "queued up",
}

// elsewhere says, by path, where a word is another's, or means something else.
var elsewhere = map[string]*regexp.Regexp{
	"hunt":    regexp.MustCompile(`^CHANGELOG`), // what 0.1.0 had
	"crowd":   regexp.MustCompile(`^CHANGELOG`),
	"rival":   regexp.MustCompile(`^bench/`), // a product to compare with
	"rivals":  regexp.MustCompile(`^(bench/|docs/performance|Makefile)`),
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
	hasWords := func(path string) bool {
		return path != "docs_test.go" && (strings.HasSuffix(path, ".go") || strings.HasSuffix(path, ".md") || path == "Makefile")
	}
	eachFile(t, 400, hasWords, func(path string, text []byte) {
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
	})
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
