package lease

import (
	"context"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Holder asks the server who has the lease on key, without waiting for anybody. It returns
// nil if nobody has it or this Locker has, or if the server does not answer before ctx ends.
func (l *Locker) Holder(ctx context.Context, key string) *lockerr.Holder {
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, l.holderSQL(key))
	if err != nil || len(rows) == 0 || rows[0][0] == l.owner {
		return nil
	}
	return keyrow.HolderOf(rows[0][0])
}
