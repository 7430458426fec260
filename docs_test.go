package mysqllock_test

import (
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// pages returns the documentation, by path: the pages in the root and in docs.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, pattern := range []string{"*.md", "docs/*.md"} {
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
	examples, err := os.ReadFile("example_test.go")
	dbtest.OK(t, err)
	blocks := 0
	for _, block := range packageDoc(t).Content {
		code, isCode := block.(*comment.Code)
		if !isCode || !strings.Contains(code.Text, ":=") {
			continue // prose, or the table
		}
		blocks++
		if !strings.Contains(dense(string(examples)), dense(code.Text)) {
			t.Errorf("not in example_test.go:\n%s", code.Text)
		}
	}
	if blocks < 5 {
		t.Errorf("%d blocks of Go code found, want at least 5", blocks)
	}
}

// anchor returns the fragment under which GitHub shows a heading.
func anchor(heading string) string {
	heading = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(heading), "")
	return strings.ReplaceAll(heading, " ", "-")
}

// A link from one page to another, and from the package documentation to a page, leads
// to what is there.
func TestDocLinks(t *testing.T) {
	const site = "https://github.com/mysqllock/mysqllock/blob/main/"
	pages := pages(t)
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
		if fragment == "" {
			return
		}
		for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(pages[path], -1) {
			if anchor(heading[1]) == fragment {
				return
			}
		}
		t.Errorf("%s: %s has no heading for #%s", from, path, fragment)
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
	for _, name := range names {
		if !regexp.MustCompile(`\b` + regexp.QuoteMeta(name) + `\b`).MatchString(all.String()) {
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

// What the architecture page names is there: the files and packages; and the types,
// fields and functions, in one of the files that the same line names, if it names any.
func TestArchitectureNames(t *testing.T) {
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
