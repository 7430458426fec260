package statement

import (
	"database/sql/driver"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// TestNoStatementJoinsThatCanReachIntoTheNext: it joins only if no byte of it can reach into
// what stands beside it.
func TestNoStatementJoinsThatCanReachIntoTheNext(t *testing.T) {
	for text, want := range map[string]bool{
		"UPDATE p SET stock = stock - 1 WHERE id = 1": true,
		"update `p` set `stock` = ? where `id` = ?":   true,
		"DELETE FROM p WHERE id = 1 OR stock <= 0":    true,
		"DELETE FROM p;":                                                  false,
		"UPDATE p SET stock = 1 -- x":                                     false,
		"UPDATE p SET stock = 1 # x":                                      false,
		"UPDATE p SET stock = 1 /* x */":                                  false,
		"UPDATE p SET stock = 1 /*":                                       false,
		"UPDATE p SET stock = 1 WHERE `id = 1":                            false,
		"UPDATE p SET name = 'a'":                                         false,
		`UPDATE p SET name = "a`:                                          false,
		"UPDATE p SET stock = ABS(stock)":                                 false,
		"UPDATE p SET stock = @x":                                         false,
		"UPDATE p SET stock = 1 WHERE id = \xbf":                          false,
		"UPDATE p SET stock = 1 WHERE id = 1\x00":                         false,
		"UPDATE p SET stock = 1 WHERE id = 1\\":                           false,
		"INSERT INTO p VALUES (1, 2)":                                     false,
		"SELECT stock FROM p":                                             false, // without rows
		"UPDATE p SET stock = NEXT VALUE FOR s":                           false,
		"UPDATE p SET stock = 1 WHERE id = " + strings.Repeat("1", 1<<16): false,
	} {
		if got := (&Statement{Text: text}).Joins(); got != want {
			t.Errorf("%.80q joins: %v", text, got)
		}
	}
	for text, want := range map[string]bool{
		"SELECT `p`.`stock` FROM `p` WHERE `p`.`id` = ? ORDER BY `p`.`id` LIMIT 1": true,
		"SELECT * FROM p where id = 1":                                             true,
		"SELECT stock FROM p WHERE a -1":                                           true,
		"SELECT stock FROM p WHERE a --1":                                          false,
		"SELECT * FROM p":                                                          false,
		"SELECT COUNT(*) FROM p":                                                   false,
		"SELECT 'a' FROM p":                                                        false,
		"SELECT 1; SELECT 2":                                                       false,
		"SELECT `a FROM p":                                                         false,
		"SELECT NEXT VALUE FOR s":                                                  false,
		"WITH c AS (SELECT 1) SELECT 1":                                            false,
		"UPDATE p SET stock = 1":                                                   false, // with rows
		"TABLE p":                                                                  false,
	} {
		if got := (&Statement{Text: text, Query: true, Info: sqltext.Look(text)}).Joins(); got != want {
			t.Errorf("%q joins: %v", text, got)
		}
	}
	for arg, want := range map[any]bool{
		"x": true, int64(1): true, "a;b": false, "`": false, strings.Repeat("x", 1<<16): false,
	} {
		st := &Statement{Text: "UPDATE `p` SET `name` = ?", Args: []driver.NamedValue{{Ordinal: 1, Value: arg}}}
		if got := st.Joins(); got != want {
			t.Errorf("with %.20v it joins: %v", arg, got)
		}
	}
	if (&Statement{Text: "UPDATE p SET stock = 1", Prepared: true}).Joins() {
		t.Error("a statement that must be prepared joins")
	}
}
