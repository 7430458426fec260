package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// claim has st lock the rows that it returns, if it is a SELECT, and returns why that
// would not keep others out, if so.
func (c *Conn) claim(ctx context.Context, h *hint.Hint, st *statement.Statement) error {
	allowed := c.k.Settings.Unsafe
	if err := st.Claim(h.Claim); err != nil || !st.Claims || allowed && !h.Claim.SkipLocked {
		return err
	}
	l, err := c.k.Use(ctx, nil)
	if err != nil {
		return c.k.SetupError(h, err)
	}
	if h.Claim.SkipLocked {
		if err := l.Info().Skips("claims with SkipLocked", "claim with ForUpdate, or take a key, with lockctx.With"); err != nil {
			return &lockerr.Error{Op: st.Op(), Err: err}
		}
	}
	if h.Claim.Share && !allowed {
		if err := l.Info().Shares("claims with ForShare", "claim with ForUpdate"); err != nil {
			return &lockerr.Error{Op: st.Op(), Err: err}
		}
	}
	if err := cmp.Or(l.Info().Claims(), l.Info().Pessimists("claims")); err != nil && !allowed {
		return &lockerr.Error{Op: st.Op(), Err: err}
	}
	if topology := l.Info().Topology; topology != "" && !allowed {
		return &lockerr.Error{Op: st.Op(), Err: lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
			"on %s another node claims the same rows; take a key in place of them, with lockctx.With, or say lockUnsafe=allow, for an application that uses one node only", topology))}
	}
	return nil
}

// runClaim runs a statement whose hint has no key, on this connection as it is.
func (c *Conn) runClaim(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if st.Claims && c.tx == nil {
		switch state, err := c.knownState(ctx); {
		case err != nil:
			return nil, nil, err
		case state == sqltext.Idle:
			return nil, nil, st.Unclaimed()
		}
	}
	if !st.Claims {
		if _, err := c.look(ctx, st.Text, st.OfConn); err != nil {
			return nil, nil, err
		}
	} else if c.tx != nil {
		c.tx.read = c.tx.read || st.Info.Snapshot
	}
	return c.runHere(ctx, st)
}

// claimError is what the caller gets of an error of a statement whose hint claims.
func claimError(h *hint.Hint, st *statement.Statement, err error) error {
	switch {
	case !st.Claims || errors.Is(err, lockerr.ErrLost) || errors.Is(err, lockerr.ErrDeadlock):
	case h.Claim.NoWait && server.Locked(err):
		return &lockerr.Error{Op: st.Op(), Err: lockerr.With(lockerr.ErrLocked, err)}
	case server.Deadlock(err):
		return &lockerr.Error{Op: st.Op(), Err: lockerr.With(lockerr.ErrDeadlock, err)}
	}
	return err
}
