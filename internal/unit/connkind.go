package unit

import (
	"context"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/pool"
)

// connKind is the kind of connection that a unit of work runs on: a session, or one of the
// application's own.
type connKind interface {
	// overdue returns why the server may have ended the connection, if so.
	overdue() error
	// spends reports whether a unit that is lost spends the lock context: outside of
	// a transaction of the application's nothing else would tell it.
	spends() bool
	// untilClosed returns a context that also ends when the handle is closed, if
	// nobody else would end a statement that is under way then.
	untilClosed(ctx context.Context) (context.Context, func())
	// ran notes what a statement, which has run, leaves on the connection.
	ran(st *statement.Statement, err error)
	// broken gives up the connection, which may still carry the lock. The server may be
	// busy with a statement whose caller has gone, and would keep the lock until it is
	// done, so it is told to end the connection.
	broken()
	// give ends a turn to use the connection; over: the unit has ended in it.
	give(over bool)
}

// onSession is a connection of the handle's own.
type onSession struct {
	l    *handle.Locks
	link *pool.Conn
	next func() // gives the session to the next caller that wants what is locked on it; nil if it goes back to the pool
}

func (s *onSession) overdue() error { return s.l.KeepAlive.Overdue(s.link) }

func (s *onSession) spends() bool { return true }

func (s *onSession) untilClosed(ctx context.Context) (context.Context, func()) {
	return s.l.UntilClosed(ctx)
}

func (s *onSession) ran(st *statement.Statement, _ error) {
	if st.Info.Taints {
		s.link.Taint()
	}
}

func (s *onSession) broken() {
	if s.l.Info().Kills {
		s.l.Background(func(ctx context.Context) { _ = s.l.Control.KillConnection(ctx, s.link) })
	}
}

func (s *onSession) give(over bool) {
	switch {
	case !over:
		s.link.EndTurn()
	case s.next != nil:
		s.next()
	default:
		s.link.Release()
	}
}

// onConn is a connection of the application's, which goes on after the unit.
type onConn struct {
	*appConn
	l      *handle.Locks
	node   string // which server it leads to, as far as anybody has looked
	found  string // what earlier statements had left on it when the unit began
	pinned bool   // a read of a sql.Conn has opened the unit
}

func (c *onConn) overdue() error { return nil }

func (c *onConn) spends() bool { return c.pinned }

func (c *onConn) untilClosed(ctx context.Context) (context.Context, func()) {
	if c.pinned {
		return c.l.UntilClosed(ctx)
	}
	return ctx, func() {}
}

func (c *onConn) ran(st *statement.Statement, err error) {
	c.texts.note(st.Info, st.Query, err)
	c.left.Note(st.Text, st.Info, st.Query, err)
	c.stmts.stale = c.stmts.stale || st.Info.Taints
}

func (c *onConn) broken() {
	c.bad.Store(true)
	if c.pinned { // nobody may be about to close it
		_ = c.link.Close()
	}
	if info := c.l.Info(); info.Router || info.Topology != "" {
		// Somebody else may have been led to that connection, and which node it is on
		// nobody knows.
		return
	}
	c.l.Background(func(ctx context.Context) { _ = c.l.Control.KillAdopted(ctx, c.link, c.node) })
}

func (c *onConn) give(bool) { c.link.EndTurn() }
