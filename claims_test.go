package mysqllock_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// What the table of servers in docs/servers.md claims is what is tested: the tests that it
// names are there, and the versions in the matrix are those of the workflow.
func TestServersPage(t *testing.T) {
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
		state := regexp.MustCompile(`^(tested here|in the matrix|expected|refused|---)`).FindString(cells[2])
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
