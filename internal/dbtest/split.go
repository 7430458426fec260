package dbtest

import (
	"context"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/server"
)

// SplitPages has a neighbour's connection insert 999 rows around that of key into the lock table, as a
// program does whose keys are new. The server splits the index page of key's row, and moves the locks of the row. On MySQL
// performance_schema.data_locks then tells the neighbour's thread of them. It returns the neighbour's
// connection id. The neighbour stays connected, and alive reports whether its connection was not ended.
func (d *Database) SplitPages(table, namespace, key string) (id string, alive func() bool) {
	d.T.Helper()
	c := d.Connect()
	last := len(key) - 1
	for n := range 1000 {
		name := fmt.Sprintf("%s%c~%03d", key[:last], key[last]-1, n) // before it
		if n >= 500 {
			name = fmt.Sprintf("%s!%03d", key, n) // behind it
		}
		if n != 500 {
			d.Exec(c, fmt.Sprintf("INSERT INTO %s (namespace, name) VALUES (x'%x', x'%x')", table, namespace, name))
		}
	}
	d.MustHaveMoved(key)
	return d.One(c, "SELECT CONNECTION_ID()"), func() bool {
		_, err := server.Query(context.Background(), c, "SELECT 1")
		return err == nil
	}
}

// MustHaveMoved fails the test if MySQL does not tell another thread of a lock of key's row than of its
// transaction.
func (d *Database) MustHaveMoved(key string) {
	d.T.Helper()
	if !d.MariaDB() && d.One(d.Connect(), "SELECT COUNT(*) FROM performance_schema.data_locks l"+
		" JOIN performance_schema.data_locks o ON o.ENGINE_TRANSACTION_ID = l.ENGINE_TRANSACTION_ID AND o.LOCK_TYPE = 'TABLE'"+
		fmt.Sprintf(" WHERE l.OBJECT_SCHEMA = '%s' AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_DATA LIKE '%%, 0x%X'"+
			" AND l.THREAD_ID <> o.THREAD_ID", d.Name, key)) == "0" {
		d.T.Fatalf("the server has moved no lock of the row of %s to another page", key)
	}
}
