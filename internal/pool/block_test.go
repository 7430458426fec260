package pool_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
)

func TestABlockSaysTheSameAsTextAndPrepared(t *testing.T) {
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

// unpreparing prepares nothing.
type unpreparing struct {
	driver.Conn
	number uint16
}

func (u unpreparing) PrepareContext(context.Context, string) (driver.Stmt, error) {
	return nil, &mysql.MySQLError{Number: u.number}
}

func (u unpreparing) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return u.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

// TestABlockThatCannotBePreparedRunsAsText, unless the transaction in which it was to run may be
// over.
func TestABlockThatCannotBePreparedRunsAsText(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		for number, runs := range map[uint16]bool{1295: true, 1461: true, 1064: true, 1213: false, 1205: false, 1317: false} {
			c := pool.Adopt(unpreparing{d.Connect(), number})
			var failed error
			for range 20 {
				if _, err := c.QueryBlock(t.Context(), pool.Block{Text: "SELECT ?", Values: []driver.Value{int64(1)}}); err != nil {
					failed = errors.Join(failed, err)
				}
			}
			if runs != (failed == nil) {
				t.Errorf("%d: %v", number, failed)
			}
		}
	})
}
