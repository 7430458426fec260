package plain

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Webhook does what an event says once, however often it is delivered, at the same time
// too. The work and the note that it is done are one transaction. It goes on if the sender hangs up: what it has done
// elsewhere by then would be rolled back here, and done again.
func Webhook(db *sql.DB, work func(ctx context.Context, event []byte) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("Event-Id")
		event, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if id == "" || len(id) > 200 || err != nil {
			http.Error(w, "bad event", http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
		defer cancel()
		err = mysqllock.Do(ctx, db, "event:"+id, func(ctx context.Context) error {
			var seen int
			if err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM events WHERE id = ?", id).Scan(&seen); err != nil || seen > 0 {
				return err
			}
			if err := work(ctx, event); err != nil { // its statements on db, with this ctx, are in the transaction
				return err
			}
			_, err := db.ExecContext(ctx, "INSERT INTO events (id) VALUES (?)", id)
			return err
		}, lockctx.NoWait())
		switch {
		case errors.Is(err, mysqllock.ErrLocked): // it is being worked on: the sender is to ask again
			w.Header().Set("Retry-After", "5")
			http.Error(w, "in work", http.StatusConflict)
		case err != nil:
			http.Error(w, "failed", http.StatusInternalServerError)
		}
	}
}
