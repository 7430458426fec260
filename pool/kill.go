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
// someone else after a restart or a failover, and against hitting a later
// statement. KILL of one's own threads needs no privilege. mark is one of NewMark.
func (p *Pool) KillQuery(ctx context.Context, id uint64, mark string) error {
	return p.kill(ctx, "KILL QUERY", id, "INFO LIKE '%"+mark+"%'")
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
	return p.kill(ctx, "KILL CONNECTION", c.id, "HOST = "+schema.Literal(c.host))
}

func (p *Pool) kill(ctx context.Context, verb string, id uint64, guard string) error {
	c, err := p.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, fmt.Sprintf(
		"SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %d AND %s AND ID <> CONNECTION_ID()", id, guard))
	if err != nil || len(rows) == 0 {
		return err
	}
	err = server.Exec(ctx, c.Conn, fmt.Sprintf("%s %d", verb, id))
	const noSuchThread = 1094
	if server.Number(err) == noSuchThread {
		return nil
	}
	return err
}
