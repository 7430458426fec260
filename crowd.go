package mysqllock

import (
	"context"
	"sync"
)

// crowd counts database/sql's connections and those of them whose caller waits
// for a lock inside the driver.
type crowd struct {
	mu      sync.Mutex
	open    int
	waiting int
}

func (c *crowd) opened(context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open++
}

func (c *crowd) closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// enter is called before a caller waits. The context it returns also ends when
// the handle is closed.
func (c *crowd) enter(ctx context.Context, l *locks) (context.Context, func(), error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(ErrClosed) })
	c.mu.Lock()
	c.waiting++
	c.mu.Unlock()
	return ctx, func() {
		stop()
		cancel(nil)
		c.mu.Lock()
		c.waiting--
		c.mu.Unlock()
	}, nil
}
