package sqltext

import "testing"

func TestOnlyPlainSavepointsAreRead(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"SAVEPOINT a", "set a"},
		{" savepoint `A b` ; ", "set a b"},
		{"/* c */ SAVEPOINT # c\n a -- d", "set a"},
		{`SAVEPOINT "a"`, "set a"},
		{"ROLLBACK TO a", "back a"},
		{"Rollback Work To Savepoint A", "back a"},
		{"ROLLBACK TO SAVEPOINT `savepoint`", "back savepoint"},
		{"SAVEPOINT `a``b`", ""}, // rare, so it need not be read
		{"SAVEPOINT é", ""},      // is e
		{"SAVEPOINT a; ROLLBACK TO b", ""},
		{"SAVEPOINT", ""},
		{"SAVEPOINT a b", ""},
		{"SAVEPOINT 'a'", ""},
		{"ROLLBACK", ""},
		{"ROLLBACK WORK", ""},
		{"ROLLBACK TO /*!99999 a */ b", ""},
		{"SAVEPOINT a /* open", ""},
		{"RELEASE SAVEPOINT a", ""},
		{"INSERT INTO savepoint VALUES (1)", ""},
		{"", ""},
	} {
		name, back, ok := Savepoint(c.text)
		got := ""
		if ok {
			got = map[bool]string{false: "set ", true: "back "}[back] + name
		}
		if got != c.want {
			t.Errorf("%q: %q, want %q", c.text, got, c.want)
		}
		if ok && back != Look(c.text).GoesBack {
			t.Errorf("%q: Look does not say the same", c.text)
		}
	}
	for _, text := range []string{"ROLLBACK TO /*!99999 a */ b", "DO 1; ROLLBACK WORK TO a", "/*!80000 ROLLBACK TO a */", "ROLLBACK TO é"} {
		if !Look(text).GoesBack {
			t.Errorf("%q: Look does not see that it goes back", text)
		}
	}
	for _, text := range []string{"ROLLBACK AND CHAIN", "SAVEPOINT a", "RELEASE SAVEPOINT a", "SELECT 'ROLLBACK TO a'"} {
		if Look(text).GoesBack {
			t.Errorf("%q: goes back", text)
		}
	}
}
