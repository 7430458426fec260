package dbtest_test

import (
	"context"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestOpenTransactionsAreSeenAtOnce, however often one asks.
func TestOpenTransactionsAreSeenAtOnce(t *testing.T) {
	dbtest.OnEveryServer(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		db := d.Open("mysql")
		conn := dbtest.Conn(t, db)
		id := dbtest.Column[uint64](t, conn, "SELECT CONNECTION_ID()")[0]
		count := func() int { return len(dbtest.Transactions(t, db, "SELECT ?", id)) }
		dbtest.Exec(t, conn, "CREATE TABLE t (id INT PRIMARY KEY) ENGINE=InnoDB")
		for range 20 {
			tx, err := conn.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "INSERT INTO t VALUES (1)")
			if n := count(); n != 1 {
				t.Fatalf("%d transactions are seen beside an open one", n)
			}
			dbtest.OK(t, tx.Rollback())
			if n := count(); n != 0 {
				t.Fatalf("%d transactions are seen when it has ended", n)
			}
		}
	})
}
