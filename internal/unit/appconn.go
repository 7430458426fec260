package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// appConn is a real connection of the application, with all that the driver knows of its state.
//
// With a budget (maxConns) a Conn has a real connection only while it needs one: from the first call
// that needs it until database/sql puts the Conn back, at the end of a statement and its rows, of a
// sql.Tx or of a sql.Conn. Then the appConn goes into the handle's pool together with its connection.
// Until the next such call the Conn has an empty appConn, which is that of a connection on which
// nothing has happened.
type appConn struct {
	link  *pool.Conn   // nil if the appConn is empty
	texts texts        // what plain SQL text has done on the connection
	left  sqltext.Left // what statements have left on the connection
	bad   atomic.Bool  // the connection must not be used again
	stmts statements
}

// pristine reports whether nothing distinguishes the connection from a new one.
func (ac *appConn) pristine() bool {
	return ac.texts.state == sqltext.Idle && ac.texts.session == 0 && ac.texts.next == 0 &&
		ac.left.String() == "" && !ac.left.UserVariables()
}

// inTransaction reports whether plain SQL text has certainly a transaction open.
func (ac *appConn) inTransaction() bool { return ac.texts.state&sqltext.Idle == 0 }

// knownState returns the state of the connection. If the texts leave open whether a transaction is
// open, knownState asks the server.
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

// levels returns the isolation levels that statements outside of transactions may have. If the texts
// leave all levels possible, levels asks the server.
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

// askLevels asks the server for the isolation level of the connection. The caller has the
// connection's turn.
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

// noteLeft notes what a statement has left on the connection.
func (ac *appConn) noteLeft(text string, info sqltext.Info, query bool, err error) {
	ac.left.Note(text, info, query, err)
	ac.stmts.stale = ac.stmts.stale || info.Taints
}

// statements are the statements that are prepared on one connection: on a session, or on that of an
// appConn for light connections.
type statements struct {
	kept []*keptStmt // found by their texts; the one used last is at the end
	// stale: a statement that taints the connection has run since the kept ones were prepared, so they
	// are prepared again. After USE or SET a text means something else, but a prepared statement
	// keeps its old meaning. The text of CALL does not show what its procedure has set.
	stale bool
	own   []*baseStmt // each of one Stmt, which closes it; the others are closed when the connection goes back
}

// baseStmt is a prepared statement of the base driver, as a Stmt has it.
type baseStmt struct {
	base       driver.Stmt // nil if the statement is prepared again for each use
	preparedOn *appConn    // where base is prepared
}

// keptStmt is a prepared statement that callers of the same text share, if their arguments have the
// same types: the server keeps the types of the first arguments with the statement, and converts
// later arguments to them.
type keptStmt struct {
	text  string
	types string // types of its arguments, as typesOf returns them; "" before it has run, or without arguments
	stmt  driver.Stmt
}

// maxStmts is how many statements stay prepared on a connection.
const maxStmts = 64

// find returns the statement that is kept for text and has run with arguments of these types, or has
// not run yet; nil if there is none. types is "" if any will do.
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

// keep adds a statement. If there are too many, keep closes the one that was not used for the longest
// time.
func (s *statements) keep(conn driver.Conn, text, types string, stmt driver.Stmt) {
	if len(s.kept) == maxStmts {
		basedriver.CloseStmt(conn, s.kept[0].stmt)
		s.kept = append(s.kept[:0], s.kept[1:]...)
	}
	s.kept = append(s.kept, &keptStmt{text, types, stmt})
}

// typesOf returns a letter for each argument: what the protocol tells the server of its type.
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

// closeKept closes the kept statements.
func (s *statements) closeKept(conn driver.Conn) {
	for _, k := range s.kept {
		basedriver.CloseStmt(conn, k.stmt)
	}
	s.kept, s.stale = nil, false
}

// closeOwn closes the statements that their Stmts have not closed.
func (s *statements) closeOwn(conn driver.Conn) {
	for _, own := range s.own {
		basedriver.CloseStmt(conn, own.base)
		own.preparedOn = nil // the same Conn may get this connection again
	}
	s.own = nil
}

// prepared returns a statement that stays prepared on the connection, for arguments of these types.
// types is "" if they are not known yet.
func (ac *appConn) prepared(ctx context.Context, text, types string) (driver.Stmt, error) {
	return ac.stmts.prepared(ctx, ac.link.Conn, text, types)
}

// prepared is [appConn.prepared] for the connection conn. If the server says that all connections
// together have too many prepared statements, prepared closes those of this connection and tries again.
func (s *statements) prepared(ctx context.Context, conn driver.Conn, text, types string) (driver.Stmt, error) {
	if s.stale {
		s.closeKept(conn)
	}
	if stmt := s.find(text, types); stmt != nil {
		return stmt, nil
	}
	stmt, err := basedriver.Prepare(ctx, conn, text)
	if server.TooManyPrepared(err) && len(s.kept) > 0 {
		s.closeKept(conn)
		stmt, err = basedriver.Prepare(ctx, conn, text)
	}
	if err == nil {
		s.keep(conn, text, types, stmt)
	}
	return stmt, err
}

// statementsOf returns the statements that stay prepared on a session.
func statementsOf(link *pool.Conn) *statements {
	s, ok := link.State.(*statements)
	if !ok {
		s = new(statements)
		link.State = s
	}
	return s
}

// reprepare prepares st on this connection: st was prepared for any connection, and is about to run here.
func (ac *appConn) reprepare(ctx context.Context, st *statement.Statement) (err error) {
	st.On = ac.link.Conn
	st.Stmt, err = ac.prepared(ctx, st.Text, typesOf(st.Args))
	return err
}

// texts is what the driver knows of a connection from the plain SQL texts that have run on it. Such
// texts begin and end transactions that the driver has not begun, and set isolation levels.
type texts struct {
	state   sqltext.State  // autocommit, and whether a transaction is open
	sure    bool           // state takes into account whether the connection began in autocommit
	session sqltext.Levels // isolation levels of transactions from now on; 0 for those of a new connection
	next    sqltext.Levels // levels of the next transaction, in place of session; 0 for none
}

// beginEffect and endEffect are what BeginTx, and Commit and Rollback, do to the state of a connection.
var (
	beginEffect = sqltext.Look("BEGIN").Effect
	endEffect   = sqltext.Look("COMMIT").Effect
)

// note remembers what a text has done that has run on the connection. After a query that is not
// certain: it may have further results, and nobody knows yet whether their statements run.
func (t *texts) note(info sqltext.Info, query bool, err error) {
	if errors.Is(err, driver.ErrSkip) { // nothing has run
		return
	}
	whole := err == nil && !query
	does := info.Effect != (sqltext.Effect{})
	if does {
		t.noteEffect(info.Effect, whole)
	}
	switch {
	case info.Next != 0:
		t.next = info.Next
	case does && whole && sqltext.Idle.After(info.Effect) == sqltext.Open:
		t.next = 0 // the transaction that it was for has begun
	case t.next != 0:
		t.next = sqltext.AnyLevel // the transaction that it was for may have begun
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

// noteEffect notes the effect of a text. whole: all of the text has run; else perhaps only a part.
func (t *texts) noteEffect(e sqltext.Effect, whole bool) {
	if whole {
		t.state = t.state.After(e)
	} else {
		t.state = t.state.Within(e)
	}
}

// beginLevels returns the isolation levels of a transaction that begins now with opts; 0 stands for those
// of a new connection.
//
// Levels may be set for the next transaction only. A statement that reads a table uses them up if it
// comes before the transaction: between says that there is such a statement.
func (t *texts) beginLevels(opts driver.TxOptions, between bool) sqltext.Levels {
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
