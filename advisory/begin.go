package advisory

import (
	"context"
	"database/sql/driver"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/step"
)

// A transaction under an advisory lock begins on its own connection while the lock is asked
// for on a lock connection: BEGIN takes no snapshot, so all that the transaction reads is
// read under the lock. This is tried once, and only if a connection is free. A caller that
// has to wait for the lock keeps no connection meanwhile: its transaction is rolled back, and
// begins after the wait.

// tryBegin is try, with the transaction that is to begin meanwhile.
func (a *attempt) tryBegin(ctx context.Context, over *Lock) (*Lock, error) {
	b := a.r.Begin
	lock, err := a.try(ctx, over)
	if c := a.begun; c != nil {
		if b.Begun = err == nil && lock != nil; !b.Begun {
			c.Abandon(ctx, slack)
		}
		b.Done()
	}
	return lock, err
}

// begin begins the transaction, if there is one to begin. What does not come off is tried
// again after the lock was granted, and tells why then.
func (a *attempt) begin(ctx context.Context) {
	b := a.r.Begin
	a.r.Begin = nil // it is tried once
	if b == nil || b.Options != (driver.TxOptions{}) || !b.Free() {
		return
	}
	c, err := b.Connect(ctx)
	if err != nil {
		return
	}
	if server.Exec(step.For(ctx, step.Other), c.Conn, "START TRANSACTION") != nil {
		b.Done()
		return
	}
	a.begun = c
}
