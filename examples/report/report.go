// Package report has one of several replicas send a report, once a day. All of them call Send, by
// a timer of their own.
package report

import (
	"context"
	"database/sql"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Send sends the report of a day, unless it has been sent. A lock says only that nobody else is at
// it now; that it was done is in the table reports. So the other replicas wait until it is, and
// if the one that is at it dies, the next of them goes on when its lease has run out. Without a
// wait they would be gone by then, and nobody would send the report of that day.
//
// A replica that dies after send and before its commit has sent a report that nobody knows of: it
// is sent again. So give send the day as its idempotency key, if the receiver knows such a thing.
func Send(ctx context.Context, db *sql.DB, day string, send func(ctx context.Context, day string) error) error {
	return mysqllock.Do(ctx, db, "report:"+day, func(ctx context.Context) error {
		var sent bool
		if err := db.QueryRowContext(ctx, "SELECT COUNT(*) > 0 FROM reports WHERE day = ?", day).Scan(&sent); err != nil || sent {
			return err
		}
		if err := send(ctx, day); err != nil { // may take minutes: the lease is renewed
			return err
		}
		_, err := db.ExecContext(ctx, "INSERT INTO reports (day) VALUES (?)", day) // commits only while the lease is held
		return err
	}, lockctx.Lease(5*time.Second), lockctx.Wait(time.Hour))
}
