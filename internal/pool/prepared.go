package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
)

// prepared is a statement that runs often on a connection, and ends with it.
type prepared struct {
	asked int         // how often the statement was asked for while it was not prepared
	stmt  driver.Stmt // nil while the statement is not prepared
}

// prepareAt is how often a statement runs on a connection before it is prepared. Preparing costs a round trip, which does not pay
// on a connection that is closed after a few transactions.
const prepareAt = 8

// ErrUnprepared says that the statement is not prepared and has not run: run it as text.
var ErrUnprepared = errors.New("the statement is not prepared")

// QueryPrepared is [server.Query] for a statement that the server parses only once, with values for its question marks. It returns
// ErrUnprepared if the statement has not run often enough on this connection, or if the server or the driver does not prepare it.
// The caller has the turn.
func (c *Conn) QueryPrepared(ctx context.Context, text string, args ...driver.Value) ([][]string, error) {
	p, err := c.prepare(ctx, text)
	if err != nil {
		return nil, err
	}
	rows, err := server.QueryPrepared(ctx, c.Conn, p.stmt, args...)
	return rows, p.checkKnown(c, err)
}

// prepare returns the prepared statement for QueryPrepared.
func (c *Conn) prepare(ctx context.Context, text string) (p *prepared, err error) {
	defer basedriver.Catch(c.Conn, &err)
	p = c.prepared[text]
	if p == nil {
		if c.prepared == nil {
			c.prepared = make(map[string]*prepared)
		}
		p = new(prepared)
		c.prepared[text] = p
	}
	if p.stmt != nil {
		return p, nil
	}
	if p.asked++; p.asked != prepareAt { // the connection tries once to prepare it
		return nil, ErrUnprepared
	}
	stmt, err := basedriver.Prepare(purpose.Ours(ctx), c.Conn, text)
	err = server.Unanswered(ctx, err)
	switch {
	case server.Gone(err, c.Conn), server.Deadlock(err), server.Interrupted(err), server.Ended(err): // the transaction may be over
		return nil, err
	case err != nil:
		return nil, ErrUnprepared
	}
	p.stmt = stmt
	return p, nil
}

// checkKnown returns the error of the statement. If the server does not know the statement any more, that is ErrUnprepared.
func (p *prepared) checkKnown(conn *Conn, err error) error {
	if !server.Unprepared(err) {
		return err
	}
	basedriver.CloseStmt(conn.Conn, p.stmt)
	p.stmt = nil
	return ErrUnprepared
}

// Block is a statement with a question mark for each of its values. A value is a number, or a string of letters, digits and the other
// characters that names of locks and hexadecimal text have. A question mark in a quoted name is a part of the name.
type Block struct {
	Text   string
	Values []driver.Value
}

// String returns the statement with its values.
func (b Block) String() string {
	var text strings.Builder
	values, quoted := b.Values, false
	for rest := b.Text; rest != ""; {
		end := strings.IndexAny(rest, "?`") + 1
		if end == 0 {
			end = len(rest)
		}
		part := rest[:end]
		rest = rest[end:]
		mark := strings.HasSuffix(part, "?")
		if strings.HasSuffix(part, "`") {
			quoted = !quoted
		}
		if !mark || quoted || len(values) == 0 {
			text.WriteString(part)
			continue
		}
		text.WriteString(part[:end-1])
		if s, ok := values[0].(string); ok {
			text.WriteString("'" + s + "'")
		} else {
			fmt.Fprint(&text, values[0])
		}
		values = values[1:]
	}
	return text.String()
}

// QueryBlock is [server.Query] for a block. A block that runs often on this connection is prepared. The caller has the turn.
func (c *Conn) QueryBlock(ctx context.Context, b Block) ([][]string, error) {
	if len(b.Values) > 0 {
		if rows, err := c.QueryPrepared(ctx, b.Text, b.Values...); !errors.Is(err, ErrUnprepared) {
			return rows, err
		}
	}
	return server.Query(ctx, c.Conn, b.String())
}

// ChangeBlock is QueryBlock for a statement that returns no rows, and whose result matters.
func (c *Conn) ChangeBlock(ctx context.Context, b Block) (result driver.Result, err error) {
	if len(b.Values) > 0 {
		p, err := c.prepare(ctx, b.Text)
		if err == nil {
			result, err = server.ChangePrepared(ctx, c.Conn, p.stmt, b.Values...)
			err = p.checkKnown(c, err)
		}
		if !errors.Is(err, ErrUnprepared) {
			return result, err
		}
	}
	return server.Change(ctx, c.Conn, b.String())
}
