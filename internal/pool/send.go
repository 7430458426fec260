package pool

import (
	"context"
	"errors"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Send runs statements of the driver's own, one after the other, until one fails. If the connection takes several statements in a text,
// that is one round trip. Both ways mean the same: see [server.SendPacket] for answers, err, and which texts may be sent. After an
// error without a number of the server's, nobody knows which statements behind the answered ones have run, and the connection is of
// no more use. The caller has the turn.
func (c *Conn) Send(ctx context.Context, texts ...string) (answers [][][]string, err error) {
	if len(texts) < 2 || !c.Packs() {
		return server.SendSingly(ctx, c.Conn, texts...)
	}
	answers, err = server.SendPacket(ctx, c.Conn, texts...)
	if errors.Is(err, server.ErrAnswers) {
		_ = c.Close()
	}
	return answers, err
}

// Packs reports whether Send sends several statements as one text.
func (c *Conn) Packs() bool { return c.several && !server.OneByOne() }

// Splits reports whether the server runs a caller's text with a semicolon as several statements, although the DSN does not ask for that.
func (c *Conn) Splits() bool { return c.pool != nil && c.pool.cfg.Splits }
