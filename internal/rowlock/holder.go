package rowlock

import (
	"context"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Holder asks the server who has locked one of the rows, for which another connection
// waits. It returns nil if the server does not tell before ctx ends.
func (l *Locker) Holder(ctx context.Context, names []string) *lockerr.Holder {
	if l.blind.Load() {
		return nil
	}
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	return l.holderBy(ctx, c, l.awaitedSQL(names, terms.Calmly/2))
}

// holderBy asks text on c, which is of the form of holderSQL.
func (l *Locker) holderBy(ctx context.Context, c *pool.Conn, text string) *lockerr.Holder {
	rows, err := server.Query(ctx, c.Conn, text)
	if server.Denied(err) {
		l.blind.Store(true)
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	h := &lockerr.Holder{User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
	h.ConnectionID, _ = strconv.ParseUint(rows[0][0], 10, 64)
	if l.streams && h.Host == "" { // the thread that applies the changes of another node
		h = &lockerr.Holder{Program: "another node of the cluster"}
	}
	micros, _ := strconv.ParseInt(rows[0][4], 10, 64)
	h.Since = time.Duration(micros) * time.Microsecond
	return h
}

// askHolder asks the server who holds one of the keys, in one statement. It returns nil if
// the server does not tell. waiter is the id of a connection that waits for them, or 0.
func (a *attempt) askHolder(ctx context.Context, waiter uint64) *lockerr.Holder {
	if a.blind.Load() || !a.cfg.Info.AllHolders && waiter == 0 {
		return nil
	}
	bound := terms.Calmly / 2
	if deadline, ok := ctx.Deadline(); ok { // the other half is for the kill
		bound = min(bound, time.Until(deadline)/2)
	}
	c, err := a.control(ctx, terms.Calmly)
	if err != nil {
		return nil
	}
	defer c.Release()
	return a.holderBy(ctx, c, a.holderSQL(a.names, waiter, max(bound, time.Millisecond)))
}
