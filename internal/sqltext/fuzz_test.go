package sqltext

import (
	"slices"
	"strings"
	"testing"
)

// FuzzLook holds Look to properties that need no second implementation.
func FuzzLook(f *testing.F) {
	for _, rows := range [][]look{
		queries, lockingReads, withs, writes, sets, commits, several, comments, quotes,
	} {
		for _, row := range rows {
			f.Add(row.query)
		}
	}
	f.Fuzz(func(t *testing.T, q string) {
		got := Look(q)
		if got.Kind > Commits || got.Opens && got.Kind != Commits {
			t.Errorf("impossible answer %+v", got)
		}
		if w := firstWord(q); slices.Contains(writeVerbs, w) && got.Kind == Read {
			t.Errorf("%s is Read", w)
		}

		// What comes first decides, whatever follows it.
		for _, verb := range writeVerbs {
			if Look(verb+" "+q).Kind == Read {
				t.Errorf("%s is Read with this after it", verb)
			}
		}
		for _, first := range []string{"COMMIT;", "DROP TABLE t; ", "/**/Begin\n;", "SET autocommit=1;"} {
			if k := Look(first + q).Kind; k != Commits {
				t.Errorf("%v with %q in front", k, first)
			}
		}

		// What a server skips changes nothing.
		for _, space := range []string{" \t\r\n", "/* ; COMMIT ' */", "-- '\n", "#\"\n", "/*+ x */\v"} {
			if l := Look(space + q); l != got {
				t.Errorf("%+v with %q in front, %+v without", l, space, got)
			}
		}

		quoted(t, q)
		unquoted(t, q, got)
	})
}

var writeVerbs = []string{
	"INSERT", "REPLACE", "UPDATE", "DELETE", "CALL", "DO", "LOAD", "HANDLER", "SET @x = ",
	"CREATE", "DROP", "ALTER", "TRUNCATE", "RENAME", "GRANT", "LOCK", "COMMIT", "EXECUTE",
}

// firstWord is upper case, and empty unless the text begins with a word.
func firstWord(q string) string {
	q = strings.TrimLeft(q, " \t\n\v\f\r")
	end := strings.IndexFunc(q, func(r rune) bool {
		return r < 0x80 && classes[r] > classDigit
	})
	if end < 0 {
		end = len(q)
	}
	return strings.ToUpper(q[:end])
}

// quoted hides the text in quotes and comments, where nothing of it counts.
func quoted(t *testing.T, q string) {
	t.Helper()
	var hidden []string
	if !strings.Contains(q, `\`) {
		hidden = append(hidden, "'"+strings.ReplaceAll(q, "'", "''")+"'", `"`+strings.ReplaceAll(q, `"`, `""`)+`"`)
	}
	hidden = append(hidden, "`"+strings.ReplaceAll(q, "`", "``")+"`")
	if !strings.Contains(q, "*/") {
		hidden = append(hidden, "/* "+q+"*/ 1")
	}
	if !strings.ContainsAny(q, "\n\x00") {
		hidden = append(hidden, "1 -- "+q+"\n", "1#"+q)
	}
	for _, h := range hidden {
		if got := Look("SELECT " + h); got != (Info{Kind: Read}) {
			t.Errorf("%+v for SELECT %q", got, h)
		}
		if got := Look("SELECT " + h + "\n; COMMIT"); got != (Info{Kind: Commits}) {
			t.Errorf("%+v for SELECT %q; COMMIT", got, h)
		}
	}
}

// unquoted takes texts without quotes and comments, of which it is plain
// where a statement ends.
func unquoted(t *testing.T, q string, got Info) {
	t.Helper()
	if strings.ContainsAny(q, "'\"`\\#*") || strings.Contains(q, "--") {
		return
	}
	if l := Look(q + "\n; COMMIT"); l.Kind != Commits {
		t.Errorf("%+v with COMMIT at the end", l)
	}
	if l := Look(strings.ToUpper(q)); isASCII(q) && l != got {
		t.Errorf("%+v in upper case, %+v as it is", l, got)
	}
	// More parentheses may mean more doubt in VALUES and at great depth only.
	if firstWord(q) == "SELECT" && !strings.Contains(q, ";") && balanced(q) {
		l := Look("( (" + q + "\n))")
		if strings.Contains(strings.ToUpper(q), "VALUES") || strings.Count(q, "(") > 60 {
			l.Snapshot = got.Snapshot
		}
		if l != got {
			t.Errorf("%+v in parentheses, %+v without", l, got)
		}
	}
}

func isASCII(q string) bool {
	return strings.IndexFunc(q, func(r rune) bool { return r >= 0x80 }) < 0
}

func balanced(q string) bool {
	depth := 0
	for _, c := range q {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		}
		if depth < 0 {
			return false
		}
	}
	return depth == 0
}
