package pool

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// KillQuery ends the statement that runs on the server's connection id, if its
// text contains mark. The check guards against the id having been given to
// someone else after a restart or a failover. KILL of one's own threads needs no
// privilege. mark is one of NewMark.
//
// It does its best. late reports that ctx has ended before the server said that it
// has carried the KILL out: it may still come, and hit a later statement of that
// connection, so there must be none. One that finds the connection idle does
// nothing.
func (p *Pool) KillQuery(ctx context.Context, id uint64, mark string) (late bool) {
	sent, err := p.kill(ctx, "KILL QUERY", id, "INFO LIKE '%"+mark+"%'")
	return sent && err != nil && server.Number(err) == 0
}

// NewMark returns letters and digits that no other statement has in its text.
func NewMark() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// KillConnection ends a connection that is still as the server saw it when c
// was opened: the same id, from the same client address.
func (p *Pool) KillConnection(ctx context.Context, c *Conn) error {
	_, err := p.kill(ctx, "KILL CONNECTION", c.id, "HOST = "+schema.Literal(c.host))
	return err
}

// EndConnection ends the connection of that id, if guard holds, an expression of
// the server's. over reports that it has ended: a server takes its time, since it
// ends what runs on it first.
func (p *Pool) EndConnection(ctx context.Context, id uint64, guard string) (over bool, err error) {
	sent, err := p.kill(ctx, "KILL CONNECTION", id, guard)
	return !sent && err == nil, err
}

// kill sends a KILL, unless there is nothing to kill.
func (p *Pool) kill(ctx context.Context, verb string, id uint64, guard string) (sent bool, err error) {
	c, err := p.Acquire(ctx)
	if err != nil {
		return false, err
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, fmt.Sprintf(
		"SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %d AND %s AND ID <> CONNECTION_ID()", id, guard))
	if err != nil || len(rows) == 0 {
		return false, err
	}
	err = server.Exec(ctx, c.Conn, fmt.Sprintf("%s %d", verb, id))
	const noSuchThread = 1094
	if server.Number(err) == noSuchThread {
		return false, nil
	}
	return true, err
}
