package lockotel

import "testing"

// TestADriversStatementIsNamedByItsEffect: by what it does to the transaction.
func TestADriversStatementIsNamedByItsEffect(t *testing.T) {
	for text, want := range map[string]string{
		"BEGIN NOT ATOMIC SET @mysqllock_held = 0; IF @mysqllock_held = 1 THEN COMMIT; SET @mysqllock_done = 'a'; ELSE SELECT 0; END IF; END": "COMMIT",
		"CALL shop.mysqllock_commit1('shop', '[]', 'a') /* fence and COMMIT */":                                                               "COMMIT",
		"CALL shop.mysqllock_take1('shop', x'00')":                                                                                            "CALL",
		"BEGIN NOT ATOMIC START TRANSACTION READ WRITE; SELECT 1 FROM t FOR UPDATE; END":                                                      "BEGIN",
		"BEGIN NOT ATOMIC SET @a = 1; UPDATE t SET owner = NULL; END":                                                                         "UPDATE",
		"START TRANSACTION": "START",
		"COMMIT":            "COMMIT",
	} {
		if got := verb(text); got != want {
			t.Errorf("%s is named %s, want %s", text, got, want)
		}
	}
}
