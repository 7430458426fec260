//go:build unix

package dbtest

import (
	"context"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Neighbours keep statements of other programs under way until the end of the test, with texts
// that are hard to list: characters of four bytes, bytes that are no text in any character set, 3
// MB, another character set of the connection, and an argument of a prepared statement.
func (d *Database) Neighbours() {
	d.T.Helper()
	const charset, binary = "SET NAMES %", "_binary'\xff\xfe\xf0\x9f'"
	for _, text := range [][2]string{
		{"utf8mb4", "SELECT SLEEP(3600), '\U0001F512'"},
		{"utf8mb4", "SELECT SLEEP(3600), " + binary + " /* \U0001F512 */"},
		{"utf8mb4", "SELECT SLEEP(3600), '\U0001F512', '" + strings.Repeat("z", 3<<20) + "', " + binary},
		{"latin1", "SELECT SLEEP(3600), 'caf\xe9 \xff'"},
		{"gbk", "SELECT SLEEP(3600), '\xc4\xe3\xba\xc3'"},
		{"utf8mb4", "PREPARED"},
	} {
		c := d.Connect()
		d.Exec(c, strings.Replace(charset, "%", text[0], 1))
		id := d.One(c, "SELECT CONNECTION_ID()")
		over := make(chan struct{})
		go func() {
			defer close(over)
			if text[1] != "PREPARED" {
				_, _ = server.Query(context.Background(), c, text[1])
				return
			}
			stmt, err := basedriver.Prepare(context.Background(), c, "SELECT SLEEP(3600), ?, ?")
			if err == nil {
				_, _ = server.QueryPrepared(context.Background(), c, stmt, "\U0001F512", []byte("\xff\xfe\xf0\x9f"))
				_ = stmt.Close()
			}
		}()
		look := d.Connect()
		d.T.Cleanup(func() {
			d.Exec(look, "KILL "+id)
			<-over
		})
		Soon(d.T, "a neighbour's statement is under way", func() bool {
			return slices.ContainsFunc(d.Query(look, "SHOW PROCESSLIST"), func(row []string) bool { return row[0] == id && row[6] == "User sleep" })
		})
	}
}
