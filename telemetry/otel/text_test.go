package lockotel

import (
	"strings"
	"testing"
)

func TestSanitizedTextHasNoLiterals(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "COMMIT": "COMMIT",
		"SELECT a, `b c`, t1.x FROM t1 WHERE id = 42 AND f > 1.5e-3": "SELECT a, `b c`, t1.x FROM t1 WHERE id = ? AND f > ?-?",
		"SELECT 'hunter2', \"hunter2\", x'41', 0x41, N'hunter2', .5": "SELECT ?, ?, x?, ?, N?, ?",
		"SELECT 'it''s hunter2' -- hunter2\n, 1 # hunter2":           "SELECT ?? , ?",
		"SELECT /* hunter2 */ 1 /*+ hunter2 */ + 2--3":               "SELECT ? + ?--?",
		"SELECT /*!80000 'hunter2', */ a\n\t FROM\n t":               "SELECT ?, a FROM t",
		"CREATE USER u IDENTIFIED BY 'hunter2' REQUIRE SSL":          "CREATE USER u IDENTIFIED BY ? REQUIRE SSL",
		"UPDATE t SET a = ? WHERE path = 'C:\\' AND pw = 'hunter2'":  "UPDATE t SET a = ? WHERE path = …",
		"SELECT 'hunter2":                "SELECT …",
		"SELECT $$hunter2$$":             "SELECT …",
		"SELECT a$b FROM t":              "SELECT a$b FROM t",
		"/*! SELECT '*/', 'hunter2' */":  "SELECT …",
		"SELECT 1 /* hunter2":            "SELECT ? …",
		"SELECT \xbf'hunter2'":           "…",
		"SELECT \\N, 'hunter2'":          "SELECT …",
		"SELECT `a":                      "SELECT …",
		"SELECT größe FROM tür":          "SELECT größe FROM tür",
		"SELECT @x, @'hunter2', :a, %s;": "SELECT @x, @?, :a, %s;",
	} {
		if got := sanitized(text); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
	}
	if got := sanitized(strings.Repeat("SELECT ", 10_000)); len(got) > longest+len(" "+cut) || !strings.HasSuffix(got, cut) {
		t.Errorf("a long text is shown with %d bytes", len(got))
	}
}

// FuzzSanitized: a value in quotes is not shown, whatever is around it.
func FuzzSanitized(f *testing.F) {
	for _, s := range []string{"", "SELECT ", "-- ", "/* ", "`a` ", "'x' ", "\\", "$$ ", "*/"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		if strings.Contains(before+after, "hunter2") {
			return
		}
		if strings.ContainsAny(before, "'\"`") { // the value may lie outside of quotes
			return
		}
		if got := sanitized(before + "'hunter2'" + after); strings.Contains(got, "hunter2") {
			t.Errorf("%q is shown as %q", before+"'hunter2'"+after, got)
		}
	})
}
