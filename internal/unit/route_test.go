package unit

import (
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// TestEachStatementHasOneRoute has a line for each line of the table of routeOf, and those beside their borders.
func TestEachStatementHasOneRoute(t *testing.T) {
	open := new(unit)
	locked, unlocked := &Tx{inner: inner{shape: txUnit, u: open}}, new(Tx)
	asks, inHold := &hint.Hint{LockContext: new(hint.LockContext)}, new(hint.Hint)
	const read, write, ddl, ends = "SELECT stock FROM products", "UPDATE products SET stock = 1", "CREATE TABLE t (n INT)", "COMMIT"
	for _, c := range []struct {
		name  string
		tx    *Tx
		h     *hint.Hint
		u     *unit
		text  string
		exec  bool
		route route
		err   error
	}{
		{"a read in a locked transaction", locked, asks, open, read, false, routeTransaction, nil},
		{"a write in it, without a hint", locked, nil, open, write, true, routeTransaction, nil},
		{"a COMMIT in it is refused where it runs", locked, asks, open, ends, true, routeTransaction, nil},
		{"a read in a transaction without the lock", unlocked, asks, nil, read, false, routeNone, errBeganWithout},
		{"in a hold", unlocked, inHold, open, write, true, routeNone, errBeganWithout},
		{"a COMMIT that asks for a lock", nil, asks, nil, ends, true, routeNone, errCommits},
		{"DDL that asks for a lock", nil, asks, open, ddl, true, routeNone, errCommits},
		{"a COMMIT in a hold", nil, inHold, nil, ends, true, routeNone, errUnchecked},
		{"DDL in a hold", nil, inHold, nil, ddl, true, routeDefinition, nil},
		{"a read while a unit is open", nil, asks, open, read, false, routeJoin, nil},
		{"a write while a unit is open", nil, inHold, open, write, true, routeJoin, nil},
		{"a read", nil, asks, nil, read, false, routeRead, nil},
		{"a read by Exec", nil, asks, nil, read, true, routeAlone, nil},
		{"a read that locks rows", nil, asks, nil, read + " FOR UPDATE", false, routeRead, nil},
		{"a write", nil, asks, nil, write, true, routeAlone, nil},
		{"a write by Query", nil, inHold, nil, write, false, routeAlone, nil},
	} {
		st := &statement.Statement{Text: c.text, Query: !c.exec, Info: sqltext.Look(c.text)}
		if got, err := routeOf(c.tx, c.h, c.u, st); got != c.route || !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
			t.Errorf("%s: the route is %d, %v; want %d, %v", c.name, got, err, c.route, c.err)
		}
	}
}
