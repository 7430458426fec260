package pool

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Send runs statements of the driver's own, one after the other, until one fails. If the connection takes several statements in a text,
// that is one round trip. Both ways mean the same: see [server.SendPacket] for answers, err, and which texts may be sent. After an
// error without a number of the server's, nobody knows which statements behind the answered ones have run, and the connection is of
// no more use. The caller has the turn.
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

// Packs reports whether Send now sends so many statements as one text. Near the server it does so only from three statements on: see
// [server.Near].
func (c *Conn) Packs(statements int) bool {
	return statements > 1 && c.several && (c.pool.Far() || statements > 2 && server.FixedForm() != server.Single)
}

// Far reports whether the server is so far away that two statements are sent as one text: see [server.Near].
func (p *Pool) Far() bool {
	if form := server.FixedForm(); form != server.Auto {
		return form == server.Packet
	}
	return time.Duration(p.trip.Load()) > server.Near
}

// noteTrip notes how long a statement took. A slow statement may have been slow for other reasons than the distance, so it counts for at
// most twice the known time. The caller has the budget's mutex.
func (p *Pool) noteTrip(trip time.Duration) {
	if known := time.Duration(p.trip.Load()); known > 0 {
		trip = min(trip, 2*known)
	}
	p.trip.Store(int64(trip))
}

// Splits reports whether the server runs a caller's text with a semicolon as several statements, although the DSN does not ask for that.
func (c *Conn) Splits() bool { return c.pool != nil && c.pool.cfg.Splits }
