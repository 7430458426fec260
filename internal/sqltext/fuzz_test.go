package sqltext

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
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
			if l := Look(space + q); l != got {
				t.Errorf("%+v with %q in front, %+v without", l, space, got)
			}
		}

		// A call in front is seen, unless that makes it a text which no server takes.
		for _, call := range []string{"SELECT f(1), ", "SELECT db.now(); ", "VALUES ROW(`x`()), "} {
			if l := Look(call + q); l.Kind == Read {
				t.Errorf("%+v with %q in front", l, call)
			}
		}
		if got.Functions && !strings.Contains(q, "(") {
			t.Error("calls a function without a parenthesis")
		}

		quoted(t, q)
		unquoted(t, q, got)
	})
}

// FuzzLock holds Lock to its promises: the clause goes to the end or nowhere.
func FuzzLock(f *testing.F) {
	for _, rows := range [][]look{queries, lockingReads, withs, writes, commits, several, comments, quotes} {
		for _, row := range rows {
			f.Add(row.query)
		}
	}
	for _, marked := range lockables {
		f.Add(strings.Replace(marked, "¦", "", 1))
	}
	for _, query := range unlocking {
		f.Add(query)
	}
	for _, r := range refused {
		for _, query := range r.queries {
			f.Add(query)
		}
	}
	f.Fuzz(func(t *testing.T, q string) {
		const clause = "FOR UPDATE SKIP LOCKED"
		out, err := Lock(q, clause)
		if err != nil {
			if out != "" {
				t.Errorf("%v, and yet %q", err, out)
			}
			return
		}
		locked := out != q
		if w := firstWord(q); !locked && (w == "SELECT" || w == "TABLE" || w == "VALUES" || w == "CALL") {
			t.Errorf("a %s is unchanged", w)
		}

		// What a server skips changes nothing.
		for _, space := range []string{" \t\r\n", "/* ; FOR UPDATE ' */", "-- '\n", "#\"\n"} {
			if got, err := Lock(space+q, clause); got != space+out || err != nil {
				t.Errorf("%q, %v with %q in front", got, err, space)
			}
		}
		if !locked {
			return
		}
		for _, space := range []string{"\n\t", "\n-- ;\n", "\n# x", "\n;"} {
			if space == "\n;" && strings.Contains(q, "!") {
				continue // may end a statement that is inside a comment elsewhere
			}
			if got, err := Lock(q+space, clause); got != out+space || err != nil {
				t.Errorf("%q, %v with %q at the end", got, err, space)
			}
		}

		atEnd(t, q, out, clause)
		if out, err := Lock(q, bothShare); err == nil {
			atEnd(t, q, out, bothShare)
		}
		if _, err := Lock(out, clause); err == nil {
			t.Errorf("%q takes another clause", out)
		}
		info, upper := Look(out), strings.ToUpper(q)
		if info.Kind != Look(q).Kind || info.Kind == Commits {
			t.Errorf("%q is a %v", out, info.Kind)
		}
		if !strings.Contains(upper, "TABLE") && strings.Count(upper, "SELECT") == 1 && strings.Count(q, "(") < 60 && info.Snapshot && !info.Functions {
			t.Errorf("%q reads without locks", out)
		}

		// These must not get through in company.
		for _, not := range []string{
			q + "\n; SELECT 1", "INSERT INTO t VALUES (1);" + q, "(" + q + "\n)", "WITH x AS (SELECT 1) " + q,
			q + "\nFOR UPDATE", q + "\nUNION SELECT 1 FROM x", q + "\nINTO @x",
		} {
			if got, err := Lock(not, clause); err == nil {
				t.Errorf("%q is %q", not, got)
			}
		}
	})
}

// atEnd looks at the tokens: in every reading in which a server may take q, it
// finds those of q with those of the clause behind them in out. What it
// rejects, it goes on rejecting.
func atEnd(t *testing.T, q, out, clause string) {
	t.Helper()
	conds, ok := conditionsIn(out)
	if !ok {
		return // more of them than can be tried
	}
	accepted := false
	for r := range readingsOf(q, conds) {
		want, rejected := tokens(q, r)
		got, still := tokens(out, r)
		if rejected {
			if !still {
				t.Errorf("%q is rejected, %q is not, in %+v", q, out, r)
			}
			continue
		}
		accepted = true
		last := len(want)
		for last > 0 && want[last-1] == ";" {
			last--
		}
		added, _ := tokens(clause, r)
		if want = slices.Insert(want, last, added...); still || !slices.Equal(got, want) {
			t.Errorf("%q has the tokens %q, want %q, in %+v", out, got, want, r)
		}
	}
	if !accepted {
		t.Errorf("%q is rejected in any case", q)
	}
}

func tokens(text string, r reading) (all []string, rejected bool) {
	l := lexer{text: text, reading: r}
	for l.lex() != end {
		all = append(all, l.current())
	}
	return all, l.broken
}

// FuzzLockHides hides the text where nothing of it may count.
func FuzzLockHides(f *testing.F) {
	f.Add("FOR UPDATE UNION (SELECT DISTINCT ; INTO -- ")
	f.Fuzz(func(t *testing.T, q string) {
		if !utf8.ValidString(q) || strings.Contains(q, "/*!") || strings.Contains(q, "/*M!") {
			return
		}
		for _, h := range hiddenIn(q) {
			for _, query := range []string{
				"SELECT " + h + "\nFROM t", "SELECT a FROM t WHERE b IN (" + h + "\n)", "SELECT a FROM t JOIN u ON a = " + h + "\nLIMIT 1",
			} {
				if got, err := Lock(query, "FOR SHARE"); got != query+" FOR SHARE" || err != nil {
					t.Errorf("%q, %v for %q", got, err, query)
				}
			}
		}
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
