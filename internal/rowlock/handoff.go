package rowlock

import (
	"context"
	"database/sql/driver"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Handoff hands over a key, and the session whose transaction has locked it, to the next caller in the queue of this
// process. Callers of its methods have the session's turn.
type Handoff struct {
	l      *Locker
	c      *pool.Conn
	key    string
	ticket *queue.Ticket
	// since is when the server granted the key to this process, and kept how often since then the transaction went to
	// the next caller as it was: other processes have waited for so long.
	since time.Time
	kept  int
	// commitsInARow is how often in a row a COMMIT has locked the key for the next caller. To callers of other processes that
	// poll, the key was locked all the time.
	commitsInARow int
	byCommit      bool   // a COMMIT has locked the key for the next caller
	broken        func() // the argument of Give, for a next caller that has to hand the lock on at once
}

// Used notes that something has run in the transaction, so that the next caller may go ahead: see [Request.GoesAhead].
func (h *Handoff) Used() { h.ticket.Used() }

// makeHandoff returns the Handoff of the lock of a; nil if the lock cannot be handed over.
func (a *attempt) makeHandoff() *Handoff {
	if !a.takesHandoff() || len(a.locked.Versioned) > 0 || a.c.ByCalls() {
		return nil
	}
	handoff := &Handoff{l: a.l, c: a.c, key: a.r.Keys[0].Name, ticket: a.Ticket, since: time.Now()}
	switch before := a.before; {
	case before == nil:
	case before.byCommit:
		handoff.commitsInARow = before.commitsInARow + 1
	default:
		handoff.since, handoff.kept, handoff.commitsInARow = before.since, before.kept+1, before.commitsInARow
	}
	return handoff
}

// takesHandoff reports whether a can take over the lock from the previous holder.
func (a *attempt) takesHandoff() bool {
	oneKey := len(a.r.Keys) == 1 && !a.r.Keys[0].Shared
	sessionsMove := a.l.cfg.HandOvers > 0 && a.l.cfg.Info.Topology == "" && !a.l.cfg.Info.Router
	return a.r.Sessions != nil && a.opts == (driver.TxOptions{}) && oneKey && sessionsMove
}

// takeOver makes a the holder of a lock that was handed over. If its caller has gone meanwhile, the lock goes on to the
// next caller.
func (a *attempt) takeOver(ctx context.Context, before *Handoff) (*pool.Txn, error) {
	a.before, a.c = before, before.c
	if ctx.Err() != nil {
		a.makeHandoff().Give(before.broken)
		return nil, context.Cause(ctx)
	}
	a.r.Sessions.TookOver(before.c)
	return before.c.Begun(ctx), nil
}

// PassesAsItIs reports whether a transaction in which nothing has run can go to the next caller as it is. For that other
// processes must not have waited for long, and the session must be alive, as far as it can tell without a round trip.
func (h *Handoff) PassesAsItIs(ctx context.Context) bool {
	othersHaveTime := h.kept < h.l.cfg.HandOvers && time.Since(h.since) < h.l.cfg.HandOverTime
	return othersHaveTime && h.hasTaker() && h.c.Own() && h.c.Fresh(ctx)
}

// hasTaker reports whether a next caller is there that can take over the session, and nobody waits for any session.
func (h *Handoff) hasTaker() bool {
	return h.ticket.HasNext(h.l) && !h.c.Wanted() && h.c.Clean()
}

// LocksNext reports whether the COMMIT of the transaction is to lock the key for the next caller. COMMIT goes alone if the
// lock would be a round trip of its own, for which the caller that commits would wait. COMMIT goes alone, too, while other
// processes wait for the key: one of them gets the key at the COMMIT, and the lock would fail.
func (h *Handoff) LocksNext() bool {
	return h.commitsInARow < h.l.cfg.HandOvers && h.c.Packs() && h.hasTaker() && !h.ticket.SeenOtherProcess()
}

// CommitAndLock commits, and locks the key for the next caller. If locked is false without an error, the transaction is
// committed, and the next caller has to ask for the lock. If the session is not clean then, the key may still be locked
// on it. An error with a number of the server's says that nothing was committed.
func (h *Handoff) CommitAndLock(ctx context.Context) (locked bool, err error) {
	answers, err := h.c.Send(ctx, "COMMIT", h.NextSQL())
	if len(answers) == 0 {
		if server.Interrupted(err) && !server.Locked(err) {
			_, err = server.Uncommitted(ctx, h.c.Conn, err)
		}
		return false, err
	}
	return h.Locked(ctx, answers[1:], err), nil
}

// NextSQL returns the statement behind COMMIT that locks the key for the next caller.
func (h *Handoff) NextSQL() string { return h.l.nextSQL(h.key) }

// Locked reports whether the statement NextSQL has locked the key. answers has its answer, and err is its error. If the
// session is not clean afterwards, the key may still be locked on it.
func (h *Handoff) Locked(ctx context.Context, answers [][][]string, err error) bool {
	switch {
	case server.Locked(err):
		h.ticket.SawOtherProcess()
	case err == nil && quiet(answers[0]):
		h.byCommit = true
		return true
	}
	h.c.RollBackUnknown(ctx, rollbackLimit) // NextSQL may have locked the key
	return false
}

// quiet reports whether an answer to NextSQL says that the row is locked, and that nothing about it is to be told.
func quiet(rows [][]string) bool { return len(rows) == 1 && rows[0][0] == "" && rows[0][1] == "0" }

// rollbackLimit bounds the ROLLBACK of a lock that no caller takes over.
const rollbackLimit = time.Second

// Give gives the session, its turn, and the lock to the next caller. If that has gone meanwhile, Give gives the lock
// back; if that fails, it calls broken, which tells the server to end the session.
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
