package advisory

import (
	"context"
	"slices"
	"strconv"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Holder asks the server who has the lock on key. It returns nil if nobody has it or
// this Locker has, or if the server does not answer before ctx ends.
func (l *Locker) Holder(ctx context.Context, key string) *lockerr.Holder {
	h := l.holderOf(ctx, Name(l.cfg.Namespace, key))
	l.mu.Lock()
	defer l.mu.Unlock()
	if h != nil && slices.ContainsFunc(l.lockConns, func(k *lockConn) bool { return k.id == h.ConnectionID }) {
		return nil
	}
	return h
}

// holderOf is Holder for the lock of that name.
func (l *Locker) holderOf(ctx context.Context, name string) *lockerr.Holder {
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	programs := l.cfg.Info.Attributes && !l.blind.Load()
	rows, err := server.QueryConnections(ctx, c.Conn, holderSQL(name, programs))
	if programs && server.Denied(err) {
		l.blind.Store(true)
		rows, err = server.QueryConnections(ctx, c.Conn, holderSQL(name, false))
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	id, err := strconv.ParseUint(rows[0][0], 10, 64)
	if err != nil { // NULL: it was released while the server made the row, which it asks for more than once
		return nil
	}
	return &lockerr.Holder{ConnectionID: id, User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
}
