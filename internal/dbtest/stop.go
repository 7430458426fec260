package dbtest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Waits is a statement that waits until it is stopped, and then fails.
const Waits = "SELECT SLEEP(60) /* here */ FROM (SELECT 1 UNION SELECT 2) t"

// StopWaiting stops, as soon as a connection to the database runs it, a text that has [Waits] in it: by how,
// "KILL QUERY" or "KILL CONNECTION", or else by cut. It goes on with that until the test calls done: after a KILL MariaDB may
// sleep on, or sleep for the next row.
func StopWaiting(t testing.TB, admin *sql.DB, database, how string, cut func()) (done func()) {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	there := func() (id uint64, err error) {
		err = admin.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'"+
			" AND INFO LIKE '%/* here */%' AND DB = ? AND ID <> CONNECTION_ID()", database).Scan(&id)
		return id, err
	}
	stopped := Go(func() error {
		found := false
		for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
			id, err := there()
			switch {
			case errors.Is(err, sql.ErrNoRows):
				continue
			case err != nil:
				return err
			case !strings.HasPrefix(how, "KILL"):
				cut()
				return nil
			}
			found = true
			if _, err := admin.Exec(fmt.Sprintf("%s %d", how, id)); err != nil && server.Number(err) != server.NoSuchThread {
				return err
			}
		}
		if !found {
			return errors.New("no statement has waited to be stopped")
		}
		return nil
	})
	return func() {
		t.Helper()
		end()
		OK(t, <-stopped)
	}
}
