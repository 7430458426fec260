package rowlock

import (
	"context"
	"database/sql/driver"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Handoff hands over a key, and the session whose transaction has locked it,
// to the next caller in the queue of this process. The caller of its methods has the session's
// turn.
type Handoff struct {
	l      *Locker
	c      *pool.Conn
	key    string
	ticket *queue.Ticket
	// since is when the server has granted the key to this process, and kept how often
	// since then it was handed over as it was: other processes have waited for so long.
	since time.Time
	kept  int
	// commits is how often a COMMIT has locked the key for the next caller. A caller that
	// polls finds the key locked meanwhile.
	commits   int
	committed bool   // the next caller gets it so
	broken    func() // of Give, for a next caller who has to hand it on at once
}

// handoff returns how the lock of a can be handed over; nil if it cannot be.
func (a *attempt) handoff() *Handoff {
	if !a.takesHandoff() || len(a.locked.Versioned) > 0 || a.c.ByCalls() {
		return nil
	}
	s := &Handoff{l: a.Locker, c: a.c, key: a.r.Keys[0].Name, ticket: a.Ticket, since: time.Now()}
	switch from := a.from; {
	case from == nil:
	case from.committed:
		s.commits = from.commits + 1
	default:
		s.since, s.kept, s.commits = from.since, from.kept+1, from.commits
	}
	return s
}

// takesHandoff reports whether the lock that a wants can be handed over to it.
func (a *attempt) takesHandoff() bool {
	return a.r.Sessions != nil && a.opts == (driver.TxOptions{}) && len(a.r.Keys) == 1 && !a.r.Keys[0].Shared && a.cfg.HandOvers > 0 &&
		a.cfg.Info.Topology == "" && !a.cfg.Info.Router
}

// takeOver makes a the holder of a lock that was handed over. If its caller has gone at that
// moment, the lock goes on to the next.
func (a *attempt) takeOver(ctx context.Context, from *Handoff) (*pool.Txn, error) {
	a.from, a.c = from, from.c
	if ctx.Err() != nil {
		a.handoff().Give(from.broken)
		return nil, context.Cause(ctx)
	}
	a.r.Sessions.TookOver(from.c)
	return from.c.Begun(ctx), nil
}

// Keeps reports whether a transaction in which nothing has run can go to the next caller as
// it is: other processes have not waited for long, and the session is alive, as far as can be
// told without a round trip.
func (h *Handoff) Keeps(ctx context.Context) bool {
	return h.kept < h.l.cfg.HandOvers && time.Since(h.since) < h.l.cfg.HandOverTime && h.passes() && h.c.Own() && h.c.Fresh(ctx)
}

// passes reports whether somebody is there to whom the session can go, and nobody who waits
// for any session.
func (h *Handoff) passes() bool {
	return h.ticket.HasNext(h.l) && !h.c.Wanted() && h.c.Clean()
}

// Commits reports whether the COMMIT of the transaction is to lock the key for the next caller. It is not if the lock
// would be a round trip of its own: the caller who commits would wait for it. Nor is it while other processes wait for
// the key: one of them gets it at the COMMIT, and the lock fails.
func (h *Handoff) Commits() bool {
	return h.commits < h.l.cfg.HandOvers && h.c.Packs(2) && h.passes() && !h.ticket.SeenOtherProcess()
}

// Commit commits, and locks the key for the next caller. If locked is false without an error, the transaction is
// committed, and the next caller has to ask; if the session is not clean then, the key may still be locked on it. An
// error with a number of the server's says that nothing was committed.
func (h *Handoff) Commit(ctx context.Context) (locked bool, err error) {
	answers, err := h.c.Send(ctx, "COMMIT", h.Next())
	if len(answers) == 0 {
		if server.Interrupted(err) && !server.Locked(err) {
			_, err = server.Uncommitted(ctx, h.c.Conn, err)
		}
		return false, err
	}
	return h.Locked(ctx, answers[1:], err), nil
}

// Next is the statement behind COMMIT that locks the key for the next caller.
func (h *Handoff) Next() string { return h.l.nextSQL(h.key) }

// Locked reports whether Next has locked the key. answers has its answer, and err is its error. If the session is not
// clean afterwards, the key may still be locked on it.
func (h *Handoff) Locked(ctx context.Context, answers [][][]string, err error) bool {
	switch {
	case server.Locked(err):
		h.ticket.SawOtherProcess()
	case err == nil && quiet(answers[0]):
		h.committed = true
		return true
	}
	h.c.RollBackUnknown(ctx, rollbackLimit) // it may have locked the key
	return false
}

// quiet reports whether an answer to Next says that the row is locked, and has nothing to tell.
func quiet(rows [][]string) bool { return len(rows) == 1 && rows[0][0] == "" && rows[0][1] == "0" }

// rollbackLimit bounds the ROLLBACK of a lock for which there is no caller.
const rollbackLimit = time.Second

// Give gives the session, its turn, and the lock to the next caller. If that has gone
// meanwhile, the lock is given back; if that fails, broken has the server end the session.
func (h *Handoff) Give(broken func()) {
	if h.broken = broken; h.ticket.Handoff(h.l, h) {
		return
	}
	if h.c.RollBackUnknown(context.Background(), rollbackLimit); !h.c.Clean() {
		broken()
	}
	h.ticket.Leave()
	h.c.Release()
}
