package sqltext

import (
	"slices"
	"strings"
	"testing"
)

// FuzzLook holds Look to properties that need no second implementation.
func FuzzLook(f *testing.F) {
	for _, rows := range [][]look{
		queries, lockingReads, withs, writes, sets, commits, calling, several, comments, quotes,
	} {
		for _, row := range rows {
			f.Add(row.query)
		}
	}
	f.Fuzz(func(t *testing.T, q string) {
		got := Look(q)
		if got.Kind > Commits || got.Effect != (Effect{}) && got.Kind != Commits && !got.Calls {
			t.Errorf("impossible answer %+v", got)
		}
		if w := firstWord(q); slices.Contains(writeVerbs, w) && got.Kind == Read {
			t.Errorf("%s is Read", w)
		}
		if i := analyze(q); PlainWrite(q) && strings.Count(q, "`")%2 == 0 { // else no server takes it
			i.Snapshot = false // a table that is called mysql is none of a system schema
			if i != got {
				t.Errorf("%+v at a glance, %+v where it is read", got, i)
			}
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

		// What a server skips changes nothing. (Look would find a condition in */*!1.)
		for _, space := range []string{" \t\r\n", "/* ; COMMIT ' */ ", "-- '\n", "#\"\n", "/*+ x */\v"} {
			if l := Look(space + q); l != got && !guessed(q) {
				t.Errorf("%+v with %q in front, %+v without", l, space, got)
			}
		}

		// A call in front is seen, unless that makes it a text which no server takes.
		for _, call := range []string{"SELECT f(1), ", "SELECT db.now(); ", "VALUES ROW(`x`()), "} {
			if l := Look(call + q); l.Kind == Read {
				t.Errorf("%+v with %q in front", l, call)
			}
		}
		if upper := strings.ToUpper(q); got.Functions && !guessed(q) && !strings.Contains(upper, "(") && !strings.Contains(upper, "NEXT") && !strings.Contains(upper, "SETVAL") {
			t.Error("calls a function without a parenthesis, or a sequence")
		}

		quoted(t, q)
		unquoted(t, q, got)
	})
}

// guessed reports whether nothing can be said of the text, so that at most its first word counts.
func guessed(q string) bool {
	a := analyzer{lexer: lexer{text: q}}
	for a.another() {
		a.scan()
	}
	return a.hopeless
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

// quoted hides the text, so that nothing of it may count.
func quoted(t *testing.T, q string) {
	t.Helper()
	for _, h := range hiddenIn(q) {
		if got := Look("SELECT " + h); got != (Info{Kind: Read, Changes: ChangesNothing}) {
			t.Errorf("%+v for SELECT %q", got, h)
		}
		if got := Look("SELECT " + h + "\n; COMMIT"); got != (Info{Kind: Commits, Effect: ends}) {
			t.Errorf("%+v for SELECT %q; COMMIT", got, h)
		}
	}
}

// hiddenIn puts the text in quotes and comments of an expression.
func hiddenIn(q string) (hidden []string) {
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
	return hidden
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
	// A parenthesis may mean doubt of the snapshot.
	if firstWord(q) == "SELECT" && !strings.Contains(q, ";") && balanced(q) && !guessed(q) {
		l := Look("( (" + q + "\n))")
		if !l.Snapshot && got.Snapshot {
			t.Errorf("%+v in parentheses, %+v without", l, got)
		}
		if l.Snapshot = got.Snapshot; l != got {
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
