package lockotel

import "testing"

// TestATextOfSeveralStatementsIsNamedByItsCommit, or else by its first statement.
func TestATextOfSeveralStatementsIsNamedByItsCommit(t *testing.T) {
	for text, want := range map[string]string{
		"SELECT IF(ROW_COUNT() = 2, 1, (SELECT 1 UNION ALL SELECT 2)) LIMIT 1; COMMIT":               "COMMIT",
		"UPDATE t SET owner = NULL; SELECT 1; COMMIT; SELECT 1; SELECT RELEASE_LOCK('x')":            "COMMIT",
		"COMMIT; SELECT 1; SELECT owner FROM t LIMIT 1 FOR UPDATE NOWAIT":                            "COMMIT",
		"SET TRANSACTION READ ONLY; SELECT token FROM t LIMIT 1 FOR UPDATE NOWAIT":                   "SET",
		"UPDATE t SET committed = 1 WHERE name = x'636f6d6d69743b20434f4d4d49543b' AND n = 'COMMIT'": "UPDATE",
		"START TRANSACTION": "START",
		"COMMIT":            "COMMIT",
	} {
		if got := verb(text); got != want {
			t.Errorf("%s is named %s, want %s", text, got, want)
		}
	}
}
