package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/pool"
)

// appConn is a real connection of the application's, with what is known of it.
//
// With a budget (maxConns) a Conn has one only while it needs it: from the first call
// that does until database/sql puts the Conn back, at the end of a statement and its rows,
// of a sql.Tx or of a sql.Conn.
// Then the appConn goes into the handle's pool, and with it all that is known of the
// connection. Meanwhile the Conn has an empty appConn: that of a connection on which nothing
// has happened.
type appConn struct {
	link  *pool.Conn   // nil: there is none
	texts texts        // what plain SQL text has done here
	left  sqltext.Left // what statements have left here
	bad   atomic.Bool  // must not be used again
	stmts statements
}

// pristine reports whether the connection is like a new one.
func (ac *appConn) pristine() bool {
	return ac.texts.state == sqltext.Idle && ac.texts.session == 0 && ac.texts.next == 0 &&
		ac.left.String() == "" && !ac.left.UserVariables()
}

// inTransaction reports whether plain SQL text has a transaction open for sure.
func (ac *appConn) inTransaction() bool { return ac.texts.state&sqltext.Idle == 0 }

// knownState makes sure of the connection's state: if the texts leave it possible
// that something is open, the server is asked.
func (ac *appConn) knownState(ctx context.Context) (sqltext.State, error) {
	state := ac.texts.state
	if state == sqltext.Idle {
		return state, nil
	}
	if err := ac.link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer ac.link.EndTurn()
	known, err := askState(ctx, ac.link.Conn)
	if err != nil {
		return 0, err
	}
	ac.texts.state = known
	return known, nil
}

// levels returns the isolation levels of statements outside of transactions: where the texts leave all of them
// possible, the server is asked.
func (ac *appConn) levels(ctx context.Context, l *handle.Locks) (sqltext.Levels, error) {
	if ac.texts.session != sqltext.AnyLevel {
		return ac.texts.session, nil
	}
	if err := ac.link.AwaitTurn(ctx); err != nil {
		return 0, err
	}
	defer ac.link.EndTurn()
	return ac.askLevels(ctx, l)
}

// askLevels asks the server for the isolation level of the connection, whose turn the
// caller has.
func (ac *appConn) askLevels(ctx context.Context, l *handle.Locks) (sqltext.Levels, error) {
	rows, err := server.Query(ctx, ac.link.Conn, server.Ask(l.Info().IsolationVariable()))
	if err != nil {
		return 0, err
	}
	if len(rows) == 1 && len(rows[0]) == 1 {
		ac.texts.session = sqltext.Level(rows[0][0])
	}
	return ac.texts.session, nil
}

// noteLeft notes what a statement has left.
func (ac *appConn) noteLeft(text string, info sqltext.Info, query bool, err error) {
	ac.left.Note(text, info, query, err)
	ac.stmts.stale = ac.stmts.stale || info.Taints
}

// statements are what is prepared on an appConn for light connections, or on a session.
type statements struct {
	kept []*keptStmt // by their texts, the one used last at the end
	// stale: what is kept was prepared before a statement that taints. A text means something else
	// after USE or SET, but what is prepared does not; and the text of CALL does not show what a
	// procedure has set.
	stale bool
	own   []*baseStmt // to be closed with their users
}

// baseStmt is a statement of the base driver's, as a Stmt has it.
type baseStmt struct {
	base driver.Stmt // nil where it is prepared again for each use
	at   *appConn    // where base is prepared
}

// keptStmt is a statement that callers of the same text share, if their arguments are of the
// same types: the server keeps the types of the first arguments with the statement, and
// converts later ones to these.
type keptStmt struct {
	text  string
	types string // of its arguments, as typesOf tells; "" before it has run, or without any
	stmt  driver.Stmt
}

// maxStmts is how many statements stay prepared on a connection.
const maxStmts = 64

// find returns the statement that is prepared for text, and has run with no other types of
// arguments, or not yet; nil if none is.
func (s *statements) find(text, types string) driver.Stmt {
	for i := len(s.kept) - 1; i >= 0; i-- {
		if k := s.kept[i]; k.text == text && (k.types == types || k.types == "" || types == "") {
			copy(s.kept[i:], s.kept[i+1:])
			s.kept[len(s.kept)-1] = k
			k.types = cmp.Or(k.types, types)
			return k.stmt
		}
	}
	return nil
}

// keep notes a statement. The one that was not used for the longest time is closed when
// there are too many.
func (s *statements) keep(on driver.Conn, text, types string, stmt driver.Stmt) {
	if len(s.kept) == maxStmts {
		basedriver.CloseStmt(on, s.kept[0].stmt)
		s.kept = append(s.kept[:0], s.kept[1:]...)
	}
	s.kept = append(s.kept, &keptStmt{text, types, stmt})
}

// typesOf has a letter for each argument: for what the protocol tells the server of its type.
func typesOf(args []driver.NamedValue) string {
	types := make([]byte, len(args))
	for i, arg := range args {
		switch arg.Value.(type) {
		case nil:
			types[i] = 'n'
		case int64:
			types[i] = 'i'
		case uint64:
			types[i] = 'u'
		case float64:
			types[i] = 'f'
		case bool:
			types[i] = 'b'
		default: // text, also of a time
			types[i] = 's'
		}
	}
	return string(types)
}

// closeKept closes what is kept.
func (s *statements) closeKept(on driver.Conn) {
	for _, k := range s.kept {
		basedriver.CloseStmt(on, k.stmt)
	}
	s.kept, s.stale = nil, false
}

// closeOwn closes the statements of users that have not.
func (s *statements) closeOwn(on driver.Conn) {
	for _, own := range s.own {
		basedriver.CloseStmt(on, own.base)
		own.at = nil // the same Conn may be here again
	}
	s.own = nil
}

// prepared returns a statement that stays prepared on the connection, for arguments of these
// types: "" if they are not known yet.
func (ac *appConn) prepared(ctx context.Context, text, types string) (driver.Stmt, error) {
	return ac.stmts.prepared(ctx, ac.link.Conn, text, types)
}

// prepared returns a statement that stays prepared on the connection on, as [appConn.prepared] does. If the server
// has too many of all connections, those of this one are closed.
func (s *statements) prepared(ctx context.Context, on driver.Conn, text, types string) (driver.Stmt, error) {
	if s.stale {
		s.closeKept(on)
	}
	if stmt := s.find(text, types); stmt != nil {
		return stmt, nil
	}
	stmt, err := basedriver.Prepare(ctx, on, text)
	if server.TooManyPrepared(err) && len(s.kept) > 0 {
		s.closeKept(on)
		stmt, err = basedriver.Prepare(ctx, on, text)
	}
	if err == nil {
		s.keep(on, text, types, stmt)
	}
	return stmt, err
}

// statementsOf are those that stay prepared on a session.
func statementsOf(link *pool.Conn) *statements {
	s, ok := link.State.(*statements)
	if !ok {
		s = new(statements)
		link.State = s
	}
	return s
}

// again has a statement that was prepared for any connection run as it is prepared on s.
func (ac *appConn) again(ctx context.Context, st *statement.Statement) (err error) {
	st.On = ac.link.Conn
	st.Stmt, err = ac.prepared(ctx, st.Text, typesOf(st.Args))
	return err
}

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

// note remembers what a text that has run on the connection has done. A query may
// have further results, and nobody knows yet whether their statements run.
func (t *texts) note(info sqltext.Info, query bool, err error) {
	if errors.Is(err, driver.ErrSkip) { // nothing has run
		return
	}
	whole := err == nil && !query
	does := info.Effect != (sqltext.Effect{})
	if does {
		t.ran(info.Effect, whole)
	}
	switch {
	case info.Next != 0:
		t.next = info.Next
	case does && whole && sqltext.Idle.After(info.Effect) == sqltext.Open:
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
	case err == nil || server.Number(err) != 0: // as in an XA transaction that has ended and is to be prepared
		return sqltext.Open, nil
	default:
		return 0, err
	}
}

// savepointStays reports whether a savepoint outlives its statement, as it does in a
// transaction only.
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
