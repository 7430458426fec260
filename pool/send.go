package pool

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Send runs statements of the driver's own, one after the other, until one fails: in one round trip if the
// connection takes several statements in a text. Both mean the same: see [server.SendPacket] for answers, err, and
// what texts may be. An error without a number of the server's leaves it unknown which statements behind those
// answered have run, and the connection is of no more use. The caller has the turn.
func (c *Conn) Send(ctx context.Context, texts ...string) (answers [][][]string, err error) {
	return c.sendAs(ctx, c.Packs(len(texts)), texts)
}

// sendAs is Send as one text, or one by one.
func (c *Conn) sendAs(ctx context.Context, packet bool, texts []string) (answers [][][]string, err error) {
	if !packet {
		return server.SendSingly(ctx, c.Conn, texts...)
	}
	answers, err = server.SendPacket(ctx, c.Conn, texts...)
	if errors.Is(err, server.ErrAnswers) {
		_ = c.Close()
	}
	return answers, err
}

// Packs reports whether Send now sends so many statements as one text: near the server only from three on, see [server.Near].
func (c *Conn) Packs(statements int) bool {
	return statements > 1 && c.several && (c.pool.Far() || statements > 2 && server.FixedForm() != server.Single)
}

// Far reports whether the server is so far that two statements go out as one text: see [server.Near].
func (p *Pool) Far() bool {
	if form := server.FixedForm(); form != server.Auto {
		return form == server.Packet
	}
	return time.Duration(p.trip.Load()) > server.Near
}

// noteTrip notes how long a statement took. A slow one may have been slow for other reasons than the way to the
// server, so it counts for twice what is known, at most. The caller has the budget's mutex.
func (p *Pool) noteTrip(trip time.Duration) {
	if known := time.Duration(p.trip.Load()); known > 0 {
		trip = min(trip, 2*known)
	}
	p.trip.Store(int64(trip))
}

// Splits reports whether the server runs a caller's text with a semicolon as several statements, which the DSN does
// not ask for.
func (c *Conn) Splits() bool { return c.pool != nil && c.pool.cfg.Splits }
