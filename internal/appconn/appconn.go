// Package appconn has what the driver knows of a connection of the application: what plain SQL texts have done to its
// transaction, what statements have left on it, and which statements stay prepared there.
//
// With a budget (maxConns) a connection of database/sql has a real one only while it needs it: from the first call that
// needs it until database/sql puts the connection back, at the end of a statement and its rows, of a sql.Tx or of a
// sql.Conn. Then the [Conn] goes into the handle's pool together with the real connection. Until the next such call the
// connection of database/sql has an empty Conn, which is that of a connection on which nothing has happened.
package appconn

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// Conn is a real connection of the application, with all that the driver knows of its state.
type Conn struct {
	Link  *pool.Conn   // nil if the Conn is empty
	Texts Texts        // what plain SQL text has done on the connection
	Left  sqltext.Left // what statements have left on the connection
	Bad   atomic.Bool  // the connection must not be used again

	locked     atomic.Bool // of Left, for callers that do not have the connection
	statements Statements
	own        []*Stmt // each of one caller, who closes it; the others are closed when the connection goes back
}

// New returns the Conn of link, on which nothing has happened yet. If link is nil, the Conn is empty.
func New(link *pool.Conn) *Conn { return &Conn{Link: link, Texts: Texts{State: sqltext.Idle}} }

// Of returns the Conn that goes with link in the handle's pool. It makes one for a new connection.
func Of(link *pool.Conn) *Conn {
	c, ok := link.State.(*Conn)
	if !ok {
		c = New(link)
		link.State = c
	}
	return c
}

// Pristine reports whether nothing distinguishes the connection from a new one.
func (c *Conn) Pristine() bool {
	return c.Texts.State == sqltext.Idle && c.Texts.session == 0 && !c.Texts.next &&
		c.Left.String() == "" && !c.Left.UserVariables()
}

// InTransaction reports whether plain SQL text has certainly a transaction open.
func (c *Conn) InTransaction() bool { return c.Texts.State&sqltext.Idle == 0 }

// KnownState returns the state of the connection. If the texts leave open whether a transaction is
// open, KnownState asks the server.
func (c *Conn) KnownState(ctx context.Context) (sqltext.State, error) {
	state := c.Texts.State
	if state == sqltext.Idle {
		return state, nil
	}
	if err := c.Link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer c.Link.EndTurn()
	known, err := askState(ctx, c.Link.Conn)
	if err != nil {
		return 0, err
	}
	c.Texts.State = known
	return known, nil
}

// Levels returns the isolation levels that statements outside of transactions may have. If the texts
// leave all levels possible, Levels asks the server for variable, which has the level of the session.
func (c *Conn) Levels(ctx context.Context, variable string) (sqltext.Levels, error) {
	if c.Texts.session != sqltext.AnyLevel {
		return c.Texts.session, nil
	}
	if err := c.Link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer c.Link.EndTurn()
	rows, err := server.Query(ctx, c.Link.Conn, server.Ask(variable))
	if err != nil {
		return 0, err
	}
	if len(rows) == 1 && len(rows[0]) == 1 {
		c.Texts.session = sqltext.Level(rows[0][0])
	}
	return c.Texts.session, nil
}

// PassNext has a transaction in which nothing happens be the next one, if a text has said of the next one how it reads. No
// transaction may be open. The caller has the connection's turn.
func (c *Conn) PassNext(ctx context.Context) error {
	if !c.Texts.next {
		return nil
	}
	err := server.Exec(ctx, c.Link.Conn, "START TRANSACTION")
	if err == nil {
		err = server.Exec(ctx, c.Link.Conn, "COMMIT")
	}
	if err == nil {
		c.Texts.next = false
	}
	return err
}

// NoteLeft notes what a statement has left on the connection.
func (c *Conn) NoteLeft(text string, info sqltext.Info, query bool, err error) {
	c.Left.Note(text, info, query, err)
	c.locked.Store(c.Left.Locks() != "")
	c.statements.stale = c.statements.stale || info.Taints
}

// TablesLocked reports whether a statement has locked tables on the connection, and none has unlocked them. Callers need
// not have the connection.
func (c *Conn) TablesLocked() bool { return c.locked.Load() }

// Prepared returns a statement that stays prepared on the connection, for arguments of these types.
// types is "" if they are not known yet.
func (c *Conn) Prepared(ctx context.Context, text, types string) (driver.Stmt, error) {
	return c.statements.Prepared(ctx, c.Link.Conn, text, types)
}

// ForgetPrepared has the statements prepared again that stay prepared on the connection: the server does not know one of
// them any more.
func (c *Conn) ForgetPrepared() { c.statements.Forget() }

// Reprepare prepares st on this connection: st was prepared for any connection, and is about to run here.
func (c *Conn) Reprepare(ctx context.Context, st *statement.Statement) (err error) {
	st.On = c.Link.Conn
	st.Stmt, err = c.Prepared(ctx, st.Text, TypesOf(st.Args))
	return err
}

// askState asks the server for the state of a connection.
func askState(ctx context.Context, base driver.Conn) (sqltext.State, error) {
	rows, err := server.Query(ctx, base, "SELECT @@autocommit")
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return 0, errors.New("the server answers the question for @@autocommit in an unexpected shape")
	}
	if rows[0][0] != "1" {
		return sqltext.Manual, nil
	}
	switch stays, err := savepointStays(ctx, base); {
	case err == nil && !stays:
		return sqltext.Idle, nil
	case err == nil || server.Number(err) != 0: // it refuses a savepoint in an XA transaction that has ended and is to be prepared
		return sqltext.Open, nil
	default:
		return 0, err
	}
}

// savepointStays reports whether a savepoint outlives its statement. In a transaction it does, outside
// of one it does not.
func savepointStays(ctx context.Context, base driver.Conn) (bool, error) {
	for _, text := range []string{"SAVEPOINT mysqllock_open", "RELEASE SAVEPOINT mysqllock_open"} {
		if err := server.Exec(ctx, base, text); err != nil {
			if server.NoSavepoint(err) {
				err = nil
			}
			return false, err
		}
	}
	return true, nil
}
