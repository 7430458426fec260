package sqltext

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

var update = flag.Bool("update", false, "write testdata/answers.txt")

// TestAnswersAreAsCarefulAsBefore: testdata/answers.txt has the texts of all tests, of the fuzz corpora and of the
// examples, the answer that the package gave to each when it was last written anew, and the difference of today's
// answer. Each word of an answer makes it more careful, so that none may be missing now.
func TestAnswersAreAsCarefulAsBefore(t *testing.T) {
	const file = "testdata/answers.txt"
	b, err := os.ReadFile(file)
	dbtest.OK(t, err)
	var now strings.Builder
	for line := range strings.Lines(string(b)) {
		columns := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		text, err := strconv.Unquote(columns[0])
		dbtest.OK(t, err)
		difference, less := compare(strings.Fields(columns[1]), answer(text))
		if _, right := lessCareful[text]; right != (len(less) > 0) {
			t.Errorf("%s is less careful by: %s", columns[0], strings.Join(less, " "))
		}
		fmt.Fprintf(&now, "%s\t%s\t%s\n", columns[0], columns[1], strings.Join(difference, " "))
	}
	if *update {
		dbtest.OK(t, os.WriteFile(file, []byte(now.String()), 0o666))
		return
	}
	was, is := strings.Split(string(b), "\n"), strings.Split(now.String(), "\n")
	for i := range is {
		if was[i] != is[i] {
			t.Errorf("%s has\n%s\nand it is now (-update writes it)\n%s", file, was[i], is[i])
		}
	}
}

// lessCareful are texts whose answer is right, and has lost something, with the reason.
var lessCareful = map[string]string{
	// No statement that a server takes begins so.
	"CREATE TEMPORARY TABLE":                  "names no table",
	"EXPLAIN ANALYZE COMMIT":                  "is refused",
	"WITH x AS (SELECT 1) COMMIT":             "is refused",
	"WITH x AS (SELECT 1) LOCK TABLES t READ": "is refused",
	"SHOW SESSION WARNINGS":                   "is refused",
	"FLUSH … LOCK|EXPORT":                     "is refused",
	"SAVEPOINT .a":                            "is refused",
	"ROLLBACK TO a.":                          "is refused",
	// One statement, whatever the part is that cannot be read: a query, and a Write.
	"SELECT $$a$$ FROM t": "is a query",
	"SELECT $$hunter2$$":  "is a query",
	"SELECT * FROM t WHERE a IN (\xa0SELECT a FROM u) FOR UPDATE": "is a query",
	"SELECT a \xa0 FROM t":                 "is a query",
	"SELECT /*!1*/ '/*!2 /*!3 /*!4'":       "is a query",
	"SELECT /*!1*/ /*!2*/ /*!3*/ /*!4*/ 1": "is a query",
	"SELECT /*!50000 '*/', /* b */ 1 */":   "is a query",
	"SELECT /*!50000 1 /* b */ */":         "is a query",
	"SELECT 1 /*!50000 /* x */ */":         "is a query",
	"SELECT 1 /*!99999 '/*' */":            "is a query",
	"FLUSH x \xa0":                         "begins with FLUSH, and is one statement: it writes no table",
	"SET a = '/*!1 /*!2 /*!3 /*!4'":        "has these in a string",
	// The Kind is Commits, so that what else it does matters to nobody.
	"CREATE /*!99999 TEMPORARY */ TABLE t (a INT)":                                "ends a transaction",
	"SELECT a FROM t /*!80000 */ /*M!100000 */ WHERE b /*!99999 */ ; /*!80000 */": "may end a transaction",
	"SELECT/*!#*/FROM": "may end a transaction",
	"(SELECT VARIABLE_VALUE FROM /*!80000 performance_schema.global_status */ /*M!100000 information_schema.GLOBAL_STATUS */ " +
		"WHERE VARIABLE_NAME = 'UPTIME') > %d": "may end a transaction",
	"/*!1*/ /*!2*/ /*!3*/ /*!4*/ SET NAMES utf8": "leaves one thing more, whose name has a comma",
	// Several statements in gbk, and a SET with a comment that may be code: that they leave something is said, but not what.
	"SET /*!1*/ /*!2*/ /*!3*/ TRANSACTION READ ONLY":                     "leaves something",
	"/*!80000 SET TRANSACTION READ ONLY */; SELECT 1":                    "leaves something",
	"/*!80000 SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED */": "leaves something",
	"/*!99999 BEGIN */ SELECT 1":                                         "leaves something",
	"SELECT 'a\xe5\\'; SET completion_type = 1":                          "leaves something",
	"SELECT 'a\xe5\\'; SET TRANSACTION READ ONLY":                        "leaves something",
	"SELECT 1 AS \xe5\\; LOCK TABLES t READ":                             "leaves something",
}

// compare returns how one answer differs from that of before, and in what it is less careful.
func compare(before, is []string) (difference, less []string) {
	for _, w := range before {
		if !slices.Contains(is, w) {
			difference = append(difference, "-"+w)
			if !covers(is, w) {
				less = append(less, "-"+w)
			}
		}
	}
	for _, w := range is {
		if !slices.Contains(before, w) {
			difference = append(difference, "+"+w)
			key, _, several := strings.Cut(w, "=")
			if several && !has(before, key) && !strings.Contains(w, "same") || strings.HasPrefix(w, "savepoint:") {
				less = append(less, "+"+w)
			}
		}
	}
	return difference, less
}

// covers reports whether the answer has all the values of one that it lacks.
func covers(answer []string, lacks string) bool {
	switch {
	case strings.HasPrefix(lacks, "table:"):
		return slices.Contains(answer, "table:?")
	case strings.HasPrefix(lacks, "left:"), strings.HasPrefix(lacks, "left-failed:"):
		return slices.Contains(answer, "left:SQL_text")
	case strings.Contains(lacks, "-keeps=") && !has(answer, lacks[:strings.Index(lacks, "=")]):
		return true // it keeps all
	}
	key, values, several := strings.Cut(lacks, "=")
	i := slices.IndexFunc(answer, func(w string) bool { return strings.HasPrefix(w, key+"=") })
	if !several || i < 0 {
		return false
	}
	is := strings.Split(answer[i][len(key)+1:], ",")
	return !slices.ContainsFunc(strings.Split(values, ","), func(v string) bool { return !slices.Contains(is, v) })
}

// has reports whether one of the words is key=….
func has(words []string, key string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.HasPrefix(w, key+"=") })
}

// answer is all that the package says of a text, in words: of which each makes it more careful, or has one after = for
// each thing that may be.
func answer(text string) (words []string) {
	i := Look(text)
	for _, w := range []struct {
		word string
		is   bool
	}{
		{"writes", i.Kind != Read},
		{"ends", i.Kind == Commits},
		{"not-only-defines", i.Kind == Commits && !i.Defines},
		{"counted", i.Changes != ChangesNothing},
		{"may-change", i.Changes == MayChange},
		{"snapshot", i.Snapshot},
		{"taints", i.Taints},
		{"tables", i.Tables},
		{"functions", i.Functions},
		{"calls", i.Calls},
		{"recalls", i.Recalls},
		{"here", i.Recalls && !i.Anywhere},
		{"client", i.FromClient},
		{"back", i.GoesBack},
		{"not-quiet", !Quiet(text)},
		{"not-plain", !PlainRead(text) && !PlainWrite(text)},
	} {
		if w.is {
			words = append(words, w.word)
		}
	}
	several := func(key string, values []string) {
		if v := strings.Join(values, ","); v != "same" {
			words = append(words, key+"="+v)
		}
	}
	several("session", levelWords(i.SetsLevel))
	several("next", levelWords(i.SetsNextLevel))
	for _, s := range []State{Idle, Open, Manual} {
		several(s.String(), stateWords(s, s.After(i.Effect)))
		several(s.String()+"-part", stateWords(s, s.Within(i.Effect)))
	}

	_, sure := Writes(text, func(schema, table string) bool {
		words = append(words, "table:"+strings.ReplaceAll(schema+"."+table, " ", "_"))
		return false
	})
	if !sure {
		words = append(words, "table:?")
	}
	if name, back, ok := Savepoint(text); ok {
		words = append(words, fmt.Sprintf("savepoint:%s:%v", strings.ReplaceAll(name, " ", "_"), back))
	}

	words = append(words, leftBy(text, i, "left", nil)...)
	words = append(words, leftBy(text, i, "left-failed", errors.New("it has failed"))...)
	slices.Sort(words)
	return slices.Compact(words)
}

// leftBy is what the text leaves on a new connection, and what it keeps of the things that earlier texts have left: all,
// where there is no such word.
func leftBy(text string, i Info, key string, err error) (words []string) {
	var alone, behind Left
	alone.Note(text, i, false, err)
	for by := range strings.SplitSeq(alone.String(), ", ") {
		if by != "" {
			words = append(words, key+":"+strings.ReplaceAll(by, " ", "_"))
		}
	}
	if alone.UserVariables() {
		words = append(words, key+":variables")
	}
	if alone.Locks() != "" {
		words = append(words, key+"-locks")
	}
	for _, name := range []string{"completion_type", "timestamp"} {
		if alone.Variable(name) {
			words = append(words, key+"-sets:"+name)
		}
	}
	const first = "SET unique_checks = 0; DO GET_LOCK('x', 0), GET_LOCK('y', 0); CREATE TEMPORARY TABLE t (a INT); PREPARE s FROM 'x'; LOCK TABLES a READ"
	behind.Note(first, Look(first), false, nil)
	behind.Note(text, i, false, err)
	var keeps []string
	for _, by := range []string{"SET unique_checks", "CREATE TEMPORARY TABLE", "PREPARE", "LOCK TABLES"} {
		if strings.Contains(behind.String(), by) {
			keeps = append(keeps, strings.ReplaceAll(by, " ", "_"))
		}
	}
	if keeps = append(keeps, fmt.Sprint(min(behind.named, 2))); len(keeps) < 5 || behind.named < 2 {
		words = append(words, key+"-keeps="+strings.Join(keeps, ","))
	}
	return words
}

// levelWords are the isolation levels that may be in force after a text, by their numbers.
func levelWords(sets bool) []string {
	if sets {
		return []string{"0", "1", "2", "3", "same"}
	}
	return []string{"same"}
}

// stateWords are the states that may come after one.
func stateWords(before, after State) (words []string) {
	for _, s := range []State{Idle, Open, Manual} {
		switch {
		case after&s == 0:
		case s == before:
			words = append(words, "same")
		default:
			words = append(words, s.String())
		}
	}
	return words
}
