package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockerr"
)

// texts is what is known of a connection from the plain SQL texts that have run on
// it: they begin and end transactions that the driver has not begun, and set
// isolation levels.
type texts struct {
	state   sqltext.State  // autocommit, and whether a transaction is open
	sure    bool           // state knows how the connection began
	session sqltext.Levels // that transactions have from now on; 0 for those of a new connection
	next    sqltext.Levels // that the next transaction has in place of them; 0 for none
}

// What BeginTx does to the state of a connection, and Commit and Rollback.
var (
	beginEffect = sqltext.Look("BEGIN").Effect
	endEffect   = sqltext.Look("COMMIT").Effect
)

// look looks at an unhinted statement that is about to run. It sends nothing, but
// where it may begin a transaction and a limit for locked ones is still set. Most
// statements it knows at a glance.
func (c *Conn) look(ctx context.Context, text string) (info sqltext.Info, err error) {
	if err := c.need(ctx); err != nil {
		return info, err
	}
	if sqltext.Quiet(text) && (c.tx == nil || c.tx.read && c.tx.under == nil) {
		if text[0]|0x20 == 's' { // SELECT
			info.Changes = sqltext.ChangesNothing
		}
		return info, nil
	}
	info = sqltext.Look(text)
	if c.tx != nil {
		c.tx.read = c.tx.read || info.Snapshot
		return info, nil
	}
	if c.unlimit != "" && c.texts.state.Within(info.Effect) != sqltext.Idle {
		err = c.liftLimit(ctx)
	}
	return info, err
}

// note remembers what a text has done that has run on the connection. A query may
// have further results, of statements of which nobody knows yet whether they run.
func (t *texts) note(info sqltext.Info, query bool, err error) {
	if errors.Is(err, driver.ErrSkip) { // nothing has run
		return
	}
	whole := err == nil && !query
	if info.Effect != (sqltext.Effect{}) {
		t.ran(info.Effect, whole)
	}
	switch {
	case info.Next != 0:
		t.next = info.Next
	case whole && sqltext.Idle.After(info.Effect) == sqltext.Open:
		t.next = 0 // that was it
	case t.next != 0:
		t.next = sqltext.AnyLevel // that may have been the transaction which it was for
	}
	if info.Session != 0 {
		t.session = info.Session
	}
	if !whole && info.Session|info.Next != 0 {
		t.session, t.next = sqltext.AnyLevel, 0
		if info.Next != 0 {
			t.next = sqltext.AnyLevel
		}
	}
}

// ran notes the effect of what has run, wholly or not.
func (t *texts) ran(e sqltext.Effect, whole bool) {
	if whole {
		t.state = t.state.After(e)
	} else {
		t.state = t.state.Within(e)
	}
}

// begins returns the isolation levels of a transaction that begins now with opts. 0
// stands for those of a new connection.
//
// A statement that reads a table, and comes before the transaction, uses up those that
// are for one transaction only: between says that there is one.
func (t *texts) begins(opts driver.TxOptions, between bool) sqltext.Levels {
	next := t.next
	t.next = 0
	switch opts.Isolation {
	case 0: // sql.LevelDefault
	case 1:
		return sqltext.ReadUncommitted
	case 2:
		return sqltext.ReadCommitted
	default:
		return sqltext.RepeatableRead
	}
	switch {
	case next == 0:
		return t.session
	case between:
		return sqltext.AnyLevel
	}
	return next
}

// settled makes sure of the connection's state: where the texts tell that more may
// be the case than that nothing is open, the server is asked.
func (c *Conn) settled(ctx context.Context) (sqltext.State, error) {
	state := c.texts.state
	if state == sqltext.Idle {
		return state, nil
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer c.link.EndTurn()
	known, err := askState(ctx, c.link.Conn)
	if err != nil {
		return 0, err
	}
	c.texts.state = known
	return known, nil
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
	switch stays, err := savepointStays(ctx, base, "mysqllock_open"); {
	case err == nil && !stays:
		return sqltext.Idle, nil
	case err == nil || server.Number(err) != 0: // as in an XA transaction that has ended and is to be prepared
		return sqltext.Open, nil
	default:
		return 0, err
	}
}

// savepointStays reports whether a savepoint of that name outlives its statement, as it
// does in a transaction only.
func savepointStays(ctx context.Context, base driver.Conn, name string) (bool, error) {
	for _, text := range []string{"SAVEPOINT " + name, "RELEASE SAVEPOINT " + name} {
		if err := server.Exec(ctx, base, text); err != nil {
			if server.NoSavepoint(err) {
				err = nil
			}
			return false, err
		}
	}
	return true, nil
}

// ours returns why a lock is of no use on this connection, if so: a transaction is
// open on it that the driver has not begun, and does not end.
func (c *Conn) ours(ctx context.Context, op string, h *hint.Hint) error {
	manual, known := c.k.Manual()
	if c.link == nil { // the connection that it will have is like a new one
		if !manual {
			return nil
		}
		if err := c.need(ctx); err != nil {
			return err
		}
	}
	if known && !c.texts.sure {
		if c.texts.sure = true; manual {
			c.texts.state = sqltext.Unknown
		}
	}
	if err := c.fit(op, h); err != nil {
		return err
	}
	if c.texts.state == sqltext.Idle {
		return nil
	}
	state, err := c.settled(ctx)
	switch {
	case err != nil:
		return c.k.Error(op, h, noRetry(err))
	case state == sqltext.Idle:
		return nil
	}
	why := "a transaction that plain SQL text has begun is open on this connection, and could show what is older than the lock; begin it with BeginTx"
	if state == sqltext.Manual {
		why = "autocommit is off on this connection, so that any statement leaves a transaction open, which could show what is older than the lock; " +
			"leave autocommit on, or say autocommit=1 in the DSN where it is off by the DSN, the server's default or its init_connect, and begin transactions with BeginTx"
	}
	return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, errors.New(why)))
}

// levels returns the isolation levels at, of a transaction on this connection that
// has begun, or begins now: where the texts leave all of them possible, the server is
// asked.
func (c *Conn) levels(ctx context.Context, l *handle.Locks, at sqltext.Levels) (sqltext.Levels, error) {
	if at != sqltext.AnyLevel || c.texts.session != sqltext.AnyLevel {
		return at, nil
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer c.link.EndTurn()
	return c.askLevels(ctx, l)
}

// askLevels asks the server for the isolation level of the connection, whose turn the
// caller has.
func (c *Conn) askLevels(ctx context.Context, l *handle.Locks) (sqltext.Levels, error) {
	variable := "@@transaction_isolation"
	if l.Info().MariaDB {
		variable = "@@tx_isolation"
	}
	rows, err := server.Query(ctx, c.link.Conn, "SELECT "+variable)
	if err != nil {
		return 0, err
	}
	if len(rows) == 1 && len(rows[0]) == 1 {
		c.texts.session = sqltext.Level(rows[0][0])
	}
	return c.texts.session, nil
}

// clean returns why versions that a unit of work remembers are of no use for what is
// read on this connection at one of the levels at, if so.
func (c *Conn) clean(ctx context.Context, l *handle.Locks, op string, h *hint.Hint, at sqltext.Levels) error {
	levels, err := c.levels(ctx, l, at)
	if err == nil {
		err = l.Dirty(levels)
	}
	if err != nil {
		return c.k.Error(op, h, noRetry(err))
	}
	return nil
}
