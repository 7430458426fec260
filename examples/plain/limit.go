package plain

import (
	"context"
	"database/sql"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// partnerCalls is how many calls the partner answers at a time, from all of our processes together.
const partnerCalls = 3

// CallPartner has call run when fewer than three others do, in all processes. No connection is held by a transaction
// meanwhile. If a process dies its place is free again after the TTL.
func CallPartner(ctx context.Context, db *sql.DB, call func(context.Context) error) error {
	return mysqllock.Do(ctx, db, "partner", call, lockctx.Slots(partnerCalls), lockctx.Lease(10*time.Second))
}
