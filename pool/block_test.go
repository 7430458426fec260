package pool_test

import (
	"database/sql/driver"
	"fmt"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/pool"
)

// TestBlock: a block says the same whether it runs as text or, after some times, prepared.
func TestBlock(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		tap := new(dbtest.Tap)
		c := pool.Adopt(d.Connect(tap.On))
		sent := tap.Since()
		for i := range 20 {
			b := pool.Block{Text: "SELECT CONCAT(`a?`.b, ?, '/', ? + 1, '/', UNHEX(?), '/', ?) FROM (SELECT '' AS b) `a?`", Values: []driver.Value{"a-1:b", int64(i), "6b27", 0.5}}
			rows, err := c.QueryBlock(t.Context(), b)
			if want := fmt.Sprintf("a-1:b/%d/k'/0.5", i+1); err != nil || len(rows) != 1 || rows[0][0] != want {
				t.Fatalf("%d: %q, %v, want %s", i, rows, err, want)
			}
		}
		texts, prepared := 0, 0
		for _, s := range sent() {
			switch s.Text {
			case "SELECT CONCAT(`a?`.b, 'a-1:b', '/', 0 + 1, '/', UNHEX('6b27'), '/', 0.5) FROM (SELECT '' AS b) `a?`":
				texts++
			case "[execute]":
				prepared++
			}
		}
		if texts != 1 || prepared < 10 {
			t.Errorf("sent %v", sent())
		}
		if _, err := c.QueryBlock(t.Context(), pool.Block{Text: "SELECT nothing"}); err == nil {
			t.Error("no error for what has no values and fails")
		}
	})
}
