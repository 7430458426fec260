package mysqllock_test

import (
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestLimitsOfDatabaseSQLLimitConnectionsAsOnThePlainDriver: SetMaxIdleConns, SetConnMaxLifetime and
// SetConnMaxIdleTime, with maxConns too, and beneath a wrapper of drivers.
func TestLimitsOfDatabaseSQLLimitConnectionsAsOnThePlainDriver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, open := range map[string]func() *sql.DB{
			"mysql":             func() *sql.DB { return s.Open("mysql") },
			"mysqllock":         func() *sql.DB { return s.open() },
			"maxConns":          func() *sql.DB { return s.open("maxConns=25") },
			"maxConns, wrapped": func() *sql.DB { return s.wrapped(wrappers["with everything"], "maxConns=25") },
		} {
			t.Run(name, func(t *testing.T) {
				db := open()
				defer db.Close()
				db.SetMaxIdleConns(2)
				left := func(ids map[int]bool) (n int) {
					for _, id := range s.connections() {
						if ids[id] {
							n++
						}
					}
					return n
				}
				wantLeft := func(what string, ids map[int]bool, want int) {
					t.Helper()
					dbtest.Eventually(t, what, func() error {
						if n := left(ids); n != want {
							return fmt.Errorf("%d of %d are open, want %d", n, len(ids), want)
						}
						return nil
					})
				}
				burst := func(n int) map[int]bool {
					t.Helper()
					ids := make(map[int]bool)
					var txs []*sql.Tx
					for range n {
						tx := dbtest.Begin(t, dbtest.Limited(t), db)
						var id int
						dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
						txs, ids[id] = append(txs, tx), true
					}
					dbtest.Equal(t, "%d connections at once", len(ids), n)
					for _, tx := range txs {
						dbtest.OK(t, tx.Commit())
					}
					return ids
				}
				wantLeft("two stay idle after a burst of 20", burst(20), 2)

				db.SetMaxIdleConns(20)
				before := burst(20)
				wantLeft("20 stay idle", before, 20)
				db.SetConnMaxLifetime(300 * time.Millisecond)
				dbtest.Soon(t, "all are renewed while they are used", func() bool {
					dbtest.Exec(t, db, "DO 1")
					return left(before) == 0
				})
				db.SetConnMaxLifetime(0)
				before = burst(20)
				wantLeft("20 stay idle", before, 20)
				db.SetConnMaxIdleTime(200 * time.Millisecond)
				wantLeft("what is idle is closed", before, 0)
				dbtest.Equal(t, "%d", db.Stats().OpenConnections, 0)
			})
		}
	})
}
