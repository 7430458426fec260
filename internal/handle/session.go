package handle

import (
	"context"
	"time"

	"github.com/mysqllock/mysqllock/pool"
)

// Dedicated takes a connection from the pool of sessions.
func (k *Handle) Dedicated(ctx context.Context, l *Locks, by Caller, wait time.Duration) (*pool.Conn, error) {
	by.Pooled = by.Pooled && !l.sessions.Ready()
	ctx, done, err := k.waiting(ctx, by, Sought{})
	if err != nil {
		return nil, err
	}
	defer done()
	return k.acquire(ctx, l.sessions, by, wait)
}
