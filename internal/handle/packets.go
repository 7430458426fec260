package handle

import (
	"context"
	"fmt"
	"sync"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// packets says which servers that a handle has met take several statements in a text, by their nodes.
type packets struct {
	mu    sync.Mutex
	taken map[string]bool
}

// takes reports whether the server of c, a new session, does. The first session that leads to a server asks it, through
// whatever Config.Base has wrapped around the connection. f is what the server can do.
func (p *packets) takes(ctx context.Context, c *pool.Conn, f server.Flavour) (bool, error) {
	p.mu.Lock()
	taken, known := p.taken[c.Node()]
	p.mu.Unlock()
	if known {
		return taken, nil
	}
	why, err := f.TakesPackets(ctx, c.Conn)
	if err != nil {
		return false, fmt.Errorf("asking for several statements in a text: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken == nil {
		p.taken = make(map[string]bool)
	}
	p.taken[c.Node()] = why == ""
	return why == "", nil
}
