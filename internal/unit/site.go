package unit

import (
	"context"
	"database/sql/driver"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/pool"
)

// site is a real connection of the application's, with what is known of it.
//
// With a budget (maxConns) a Conn has one only while it needs it: from the first call
// that does until database/sql puts the Conn back, at the end of a statement and its rows,
// of a sql.Tx or of a sql.Conn. Then the site goes into the handle's pool, and with it
// all that is known of the connection. Meanwhile the Conn has an empty site: that of a
// connection on which nothing has happened.
type site struct {
	link    *pool.Conn   // nil: there is none
	texts   texts        // what plain SQL text has done here
	unlimit string       // takes the limit on idleness off again that was set for a locked transaction; "" without one
	left    sqltext.Left // what statements have left here
	bad     atomic.Bool  // must not be used again
	stmts   statements
}

// NewLight returns a connection that has a real one only while it needs it. The handle
// has a budget.
func NewLight(k *handle.Handle) *Conn {
	c := &Conn{k: k}
	c.vacate()
	return c
}

// vacate leaves c with an empty site.
func (c *Conn) vacate() {
	if c.none == nil || !c.none.pristine() || c.none.bad.Load() {
		c.none = &site{texts: texts{state: sqltext.Idle}}
	}
	c.site = c.none
}

// need has c have a real connection.
func (c *Conn) need(ctx context.Context) error {
	c.unused = false
	if c.link != nil {
		return nil
	}
	link, err := c.k.Apps().Acquire(ctx)
	if err == nil {
		c.move(link)
	}
	return err
}

// move has c be at link, whose turn the caller has.
func (c *Conn) move(link *pool.Conn) {
	link.EndTurn()
	if c.site, _ = link.State.(*site); c.site == nil {
		c.site = &site{link: link, texts: texts{state: sqltext.Idle}}
		link.State = c.site
	}
}

// needClean is need for a statement or a transaction under the lock of h. Nothing that
// another user has left may be on the connection: such a connection is closed, and another
// one taken. The wait for one ends after about wait. blocks: the caller may wait in the
// server on it.
func (c *Conn) needClean(ctx context.Context, s *scope, h *hint.Hint, wait time.Duration, blocks bool) error {
	for c.unused = false; c.link == nil; {
		by := s.caller(true)
		by.Holds, by.Blocks = s.holds(h), blocks
		link, err := c.k.App(ctx, by, wait)
		if err != nil {
			return err
		}
		if c.move(link); !c.pristine() {
			c.discard()
		}
	}
	return nil
}

// holds reports whether a caller with h in s holds something.
func (s *scope) holds(h *hint.Hint) bool {
	return s.unit != nil || len(s.guards) > 0 || len(enclosing(h)) > 0
}

// pristine reports whether the connection is like a new one.
func (s *site) pristine() bool {
	return s.texts.state == sqltext.Idle && s.texts.session == 0 && s.texts.next == 0 &&
		s.left.String() == "" && !s.left.UserVariables()
}

// releaseUnused is release before a wait, for a connection that was only looked at.
func (c *Conn) releaseUnused() {
	if c.unused {
		c.release()
	}
}

// release gives the real connection back, if c has one, to be used by others or closed.
func (c *Conn) release() {
	s := c.site
	if s.link == nil {
		return
	}
	c.vacate()
	c.lastIn, c.skipped, c.unused = nil, "", false
	_ = s.link.AwaitTurn(context.Background()) // a ping may be under way
	s.stmts.closeOwn()
	if s.bad.Load() {
		s.link.Destroy()
		return
	}
	s.link.Release()
}

// discard closes the real connection, if c has one.
func (c *Conn) discard() {
	if c.link != nil {
		c.bad.Store(true)
		c.release()
	}
}

// Base returns the base driver's connection. With a budget it has c have one, until it is
// put back; nil if there is none to be had.
func (c *Conn) Base() driver.Conn {
	if c.unused = false; c.link != nil {
		return c.link.Conn
	}
	ctx, cancel := context.WithTimeout(context.Background(), max(c.k.Settings.Wait, time.Second))
	defer cancel()
	if c.need(ctx) != nil {
		return nil
	}
	return c.link.Conn
}

// Sample returns a connection of the base driver, which need not be that of c, and may be
// closed or in use: for what all of them have in common. That is which interfaces they
// have, and how they convert arguments, so that neither takes up a connection.
func (c *Conn) Sample(ctx context.Context) (driver.Conn, error) {
	if c.link != nil {
		return c.link.Conn, nil
	}
	return c.k.Sample(ctx, func() (driver.Conn, error) {
		if err := c.need(ctx); err != nil {
			return nil, err
		}
		c.unused = true
		return c.link.Conn, nil
	})
}

// statements are what is prepared on a site for light connections.
type statements struct {
	kept  []*keptStmt // by their texts, the one used last at the end
	stale bool        // what is kept was prepared before a statement that may give its text another meaning
	own   []*Stmt     // to be closed with their users
}

type keptStmt struct {
	text string
	stmt driver.Stmt
}

// maxStmts is how many statements stay prepared on a connection.
const maxStmts = 64

// find returns the statement that is prepared for text; nil if none is.
func (s *statements) find(text string) driver.Stmt {
	for i := len(s.kept) - 1; i >= 0; i-- {
		if k := s.kept[i]; k.text == text {
			copy(s.kept[i:], s.kept[i+1:])
			s.kept[len(s.kept)-1] = k
			return k.stmt
		}
	}
	return nil
}

// keep notes a statement. The one that was not used for the longest time is closed when
// there are too many.
func (s *statements) keep(text string, stmt driver.Stmt) {
	if len(s.kept) == maxStmts {
		_ = s.kept[0].stmt.Close()
		s.kept = append(s.kept[:0], s.kept[1:]...)
	}
	s.kept = append(s.kept, &keptStmt{text, stmt})
}

// note notes what has run: a text means something else after USE or SET, but what is
// prepared does not.
func (s *statements) note(info sqltext.Info) {
	s.stale = s.stale || info.Taints && !info.Calls
}

// refresh closes what is kept if it is stale.
func (s *statements) refresh() {
	if s.stale {
		for _, k := range s.kept {
			_ = k.stmt.Close()
		}
		s.kept, s.stale = nil, false
	}
}

// closeOwn closes the statements of users that have not.
func (s *statements) closeOwn() {
	for _, own := range s.own {
		_ = own.base.Close()
		own.at = nil // the same Conn may be here again
	}
	s.own = nil
}
