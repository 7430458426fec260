package mysqllock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// runClaiming runs a statement whose hint has SELECTs lock the rows that they
// return.
func (c *conn) runClaiming(ctx context.Context, h *lockctx.Hint, st *statement) (driver.Rows, driver.Result, error) {
	if err := st.claim(h.Claim); err != nil {
		return nil, nil, err
	}
	if st.claims {
		if err := c.k.claimable(ctx, h, st); err != nil {
			return nil, nil, err
		}
	}
	var r driver.Rows
	var res driver.Result
	var err error
	switch {
	case !c.unlocked() || !c.nothing(h):
		r, res, err = c.runLocked(ctx, h, true, st)
	case st.claims && c.tx == nil && !c.raw && !c.manual:
		return nil, nil, st.unclaimed()
	default: // there is nothing else to lock
		if !st.claims {
			err = c.note(ctx, st.text)
		} else if c.tx != nil {
			c.tx.read = c.tx.read || st.info.Snapshot
		}
		if err == nil {
			r, res, err = c.runHere(ctx, st)
		}
	}
	switch {
	case err == nil:
		return r, res, nil
	case !st.claims || errors.Is(err, ErrLost) || errors.Is(err, ErrDeadlock):
	case h.Claim.NoWait && server.Locked(err):
		err = &Error{Op: st.op(), Err: lockerr.With(ErrLocked, err)}
	case server.Deadlock(err):
		err = &Error{Op: st.op(), Err: lockerr.With(ErrDeadlock, err)}
	}
	return nil, nil, err
}

// claimable returns why a claim does not keep others out, if so.
func (k *connector) claimable(ctx context.Context, h *lockctx.Hint, st *statement) error {
	if k.settings.unsafe {
		return nil
	}
	l, err := k.use(ctx, nil)
	if err != nil {
		return k.setupError(h, err)
	}
	if topology := l.Info().Topology; topology != "" {
		return &Error{Op: st.op(), Err: lockerr.With(ErrUnsafe, fmt.Errorf(
			"on %s another node claims the same rows; take a key in place of them, with lockctx.With, or say lockUnsafe=allow, for an application that uses one node only", topology))}
	}
	return nil
}

// runHereClaiming runs a claim on this connection as it is.
func (c *conn) runHereClaiming(ctx context.Context, st *statement) (driver.Rows, driver.Result, error) {
	base, res, err := st.run(ctx, c.link.Conn)
	if err != nil || base == nil {
		return nil, res, err
	}
	limit := bufferBytes
	if st.atOnce {
		limit = 0 // the server may find the locked one last
	}
	r, err := readAhead(base, limit) // it may come with a statement to be closed
	if err != nil {
		return nil, nil, err
	}
	return r, nil, nil
}

// claim makes a SELECT a locking read. Other statements stay as they are.
func (s *statement) claim(how lockctx.Locking) error {
	text, err := sqltext.Lock(s.text, clause(how))
	if err != nil {
		return &Error{Op: s.op(), Err: lockerr.With(ErrUnsafe, err)}
	}
	if s.claims = text != s.text; s.claims {
		plain, _ := sqltext.Lock(s.text, "FOR UPDATE")
		s.info = sqltext.Look(plain)
		s.text, s.stmt, s.atOnce = text, nil, how.NoWait
	}
	return nil
}

// clause is in the spelling of both servers. Each of them skips the comment that
// is meant for the other; one that is too old for it finds an error there.
func clause(how lockctx.Locking) string {
	tail := ""
	switch {
	case how.SkipLocked:
		tail = " SKIP LOCKED"
	case how.NoWait:
		tail = " NOWAIT"
	}
	switch {
	case how.Update:
		return "FOR UPDATE" + tail
	case tail == "":
		return "LOCK IN SHARE MODE"
	}
	return "/*!50700 FOR SHARE" + tail + " */ /*M! LOCK IN SHARE MODE" + tail + " */"
}

// unclaimed is the answer to a claim that would be over as soon as it is made.
func (s *statement) unclaimed() error {
	return &Error{Op: s.op(), Err: lockerr.With(ErrUnsafe, errors.New(
		"outside of a transaction the rows that ForUpdate, ForShare or SkipLocked lock would be free again at once; run the SELECT in one"))}
}
