package handle

import (
	"context"
	"fmt"
	"sync"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
)

// packets knows which servers take several statements in a text, of those that the handle has met.
type packets struct {
	mu    sync.Mutex
	taken map[string]bool // by node
}

// takes reports whether the server of c, a new session, takes several statements in a text. The first session
// that leads to a server asks the server, through whatever Config.Base has wrapped around the connection. f is
// what the server can do.
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
