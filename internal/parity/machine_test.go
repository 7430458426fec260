//go:build unix

package parity

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// machine runs programs on one handle.
type machine struct {
	db        *sql.DB
	name      string            // of the database
	names     *strings.Replacer // of databases and the like, in texts
	hides     *strings.Replacer // the same in what is seen
	locks     bool              // the handle is ours
	caches    bool              // the server leaves out the columns of a prepared statement that its connection knows, as MariaDB does
	hidden    bool              // nobody asks a connection whether it is gone before it goes back to the pool
	stale     bool              // such a one may be there
	cancelled bool              // the program has cancelled a transaction
	short     time.Duration     // for a step that is to be out of time
	actors    [actors]actor
	seen      []string
}

// actor is one who takes steps.
type actor struct {
	table, key string
	name       string // of what is on connections: of this program alone
	lock       lock
	ctx        context.Context // the lock context, or without a lock a plain one
	cancel     context.CancelFunc
	used       bool // ctx, by a statement that was on no connection of the actor's own
	conn       *sql.Conn
	tx         *sql.Tx
	cancelTx   context.CancelFunc
	stmt       *sql.Stmt
	args       []any // of stmt
	reads      bool  // stmt returns rows
	stmtOf     any   // the sql.Conn or sql.Tx for which it was prepared; nil for any
	hold       *mysqllock.Hold
	holds      bool // one was taken, which is hold on a handle of ours
	inHold     bool // tx began in it
	bare       bool // tx began without the lock context, so that no statement in it may have that
	dirty      bool // conn may have been left something, so that a lock over it is refused
	left       left // by statements on the connection that the actor has to itself
}

// left is what statements have left of which the server tells later. What a connection has from the
// actor before is not the same on both handles.
type left struct {
	id    bool // an INSERT has made one
	rows  bool // the last statement was a SELECT of a table, and has not failed: then FOUND_ROWS() is still that of a statement before
	table bool // it had one: others need not take the warnings away of those before
	any   bool
}

// note notes what a statement has left. One that failed before it was sent has left nothing: what
// ROW_COUNT() says of BEGIN is not the same with a lock.
func (l *left) note(text string, err error) {
	if server := new(mysql.MySQLError); err != nil && !errors.As(err, &server) {
		return
	}
	selects := strings.HasPrefix(text, "SELECT") && strings.Contains(text, "FROM")
	*l = left{
		id:    l.id || err == nil && strings.HasPrefix(text, "INSERT INTO $T (v)"),
		rows:  selects && err == nil,
		table: selects || !strings.HasPrefix(text, "CALL") && strings.Contains(text, "$T"),
		any:   true,
	}
}

const (
	limit = 20 * time.Second      // for a step that is not to be out of time
	short = 30 * time.Millisecond // for one that is, at first
)

// errRefused ends a program: the handle has refused a step by an error of its own.
var errRefused = errors.New("refused")

// sentinels are those of them that say why a step is refused.
var sentinels = []error{
	mysqllock.ErrUnsafe, mysqllock.ErrLost, mysqllock.ErrStaleRead, mysqllock.ErrStaleSnapshot, mysqllock.ErrNoEnd, mysqllock.ErrConflict, mysqllock.ErrDeadlock, mysqllock.ErrClosed,
	mysqllock.ErrLocked, mysqllock.ErrTimeout, mysqllock.ErrExhausted, mysqllock.ErrNoAnswer,
}

// begin begins a program.
func (m *machine) begin(p program, number int) {
	m.seen, m.cancelled = nil, false
	m.stale = m.stale || m.hidden // what the program before has left on a connection counts beneath a wrapper that hides its end
	m.purge()
	for i := range m.actors {
		m.actors[i] = actor{table: fmt.Sprintf("t%d", i), key: fmt.Sprintf("k%d", i), name: fmt.Sprintf("s%d_%d", i, number), lock: locks[p.locks[i]]}
		m.actors[i].renew(m)
	}
}

// renew gives an actor a new lock context.
func (a *actor) renew(m *machine) {
	if a.cancel != nil {
		a.cancel()
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	if a.used = false; m.locks && a.lock.opts != nil {
		a.ctx = lockctx.With(a.ctx, a.key, a.lock.opts...)
	}
}

// runs is what statements of an actor run on.
type runs interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

func (m *machine) on(a *actor) (on runs, isOwn bool) {
	switch {
	case a.tx != nil:
		return a.tx, true
	case a.conn != nil:
		return a.conn, true
	}
	return m.db, false
}

// text is a text of a program as the server gets it.
func (m *machine) text(a *actor, text string) string {
	return m.names.Replace(strings.NewReplacer("$T", a.table, "$S", a.name+"$tag").Replace(text))
}

// may is whether a step may be taken now.
func (a *actor) may(s step, isOwn bool) bool {
	switch s.needs {
	case own:
		return isOwn
	case asks:
		switch {
		case !isOwn:
			return false
		case strings.Contains(s.text, "LAST_INSERT_ID"):
			return a.left.id
		case strings.Contains(s.text, "FOUND_ROWS"):
			return a.left.rows
		case strings.Contains(s.text, "ROW_COUNT"):
			return a.left.any
		}
		return a.left.table
	case whole: // a hold may be in a transaction
		return a.conn != nil && (!a.holds || !strings.HasPrefix(s.text, "SET TRANSACTION"))
	}
	return true
}

// step takes a step, and notes what is seen of it. It returns errRefused where there is an error that
// only a handle of ours has.
func (m *machine) step(s step) error {
	a := &m.actors[s.actor]
	on, isOwn := m.on(a)
	if !a.may(s, isOwn) {
		return nil
	}
	ctx := a.ctx
	if isOwn && !a.holds && (s.bare || a.tx != nil && a.bare || a.tx == nil && a.dirty && s.how > 0) {
		ctx = context.Background()
	} else if a.used = a.used || !isOwn; a.hold != nil {
		if ctx = a.hold.Context(); ctx.Err() != nil { // with its lock
			m.see("refused: %v", context.Cause(ctx))
			return errRefused
		}
	}
	short, done := context.WithTimeout(ctx, limit)
	defer done()
	a.dirty = a.dirty || s.needs == own || s.needs == whole
	text := m.text(a, s.text)
	m.stale = m.stale || s.do == "kill" || s.do == "cancel the transaction" || strings.HasSuffix(s.do, "out of time")
	see := func(err error, format string, args ...any) error {
		if err == nil {
			m.see(format, args...)
		}
		return m.fails(err)
	}
	switch s.do {
	case "exec", "exec with arguments":
		res, err := on.ExecContext(short, text, s.args...)
		a.left.note(s.text, err)
		return m.result(res, err)
	case "query", "query with arguments":
		rows, err := on.QueryContext(short, text, s.args...)
		a.left.note(s.text, err)
		return m.rows(rows, err, -1)
	case "read one row":
		rows, err := on.QueryContext(short, text, s.args...)
		a.left.note(s.text, err)
		return m.rows(rows, err, 1)
	case "open a sql.Conn":
		if isOwn || a.stmtOf != nil {
			return nil
		}
		if a.used && !a.holds {
			a.renew(m)
		}
		m.purge()
		conn, err := m.db.Conn(short)
		a.conn, a.left, a.dirty = conn, left{}, false
		return see(err, "open")
	case "close the sql.Conn":
		if a.conn == nil || a.tx != nil || a.holds {
			return nil
		}
		return m.closeConn(a)
	case "begin":
		if a.tx != nil {
			return nil
		}
		if a.used && !isOwn && !a.holds {
			a.renew(m)
			ctx = a.ctx
		}
		opts := []*sql.TxOptions{nil, nil, nil, nil, nil, nil, {Isolation: sql.LevelReadCommitted}, {ReadOnly: true}}[s.how]
		own, cancel := context.WithCancel(ctx)
		var err error
		if a.conn != nil {
			a.tx, err = a.conn.BeginTx(own, opts)
		} else {
			m.purge()
			a.tx, err = m.db.BeginTx(own, opts)
			a.left = left{}
		}
		if a.cancelTx, a.inHold, a.bare = cancel, a.holds, ctx == context.Background(); err != nil {
			cancel()
		}
		return see(err, "begin")
	case "commit", "roll back", "cancel the transaction":
		if a.tx == nil || s.do == "cancel the transaction" && a.holds {
			return nil
		}
		return m.endTx(a, s.do)
	case "prepare":
		if a.stmt != nil {
			return nil
		}
		stmt, err := on.PrepareContext(short, text)
		a.reads = slices.ContainsFunc([]string{"SELECT", "WITH", "SHOW", "EXPLAIN", "CALL", "EXECUTE"}, func(verb string) bool { return strings.HasPrefix(s.text, verb) })
		if a.stmt, a.stmtOf, a.args = stmt, nil, s.args; isOwn && err == nil {
			a.stmtOf = on
		}
		return see(err, "prepare")
	case "exec prepared", "query prepared":
		if a.stmt == nil || a.stmtOf == nil && a.conn != nil && a.tx == nil {
			return nil
		}
		if s.do == "exec prepared" && a.reads && m.caches { // go-sql-driver 1.10.1 waits for the columns
			return nil
		}
		stmt := a.stmt
		a.left = left{}
		if a.tx != nil && a.stmtOf != any(a.tx) {
			stmt = a.tx.StmtContext(short, stmt)
		}
		if s.do == "exec prepared" {
			res, err := stmt.ExecContext(short, a.args...)
			return m.result(res, err)
		}
		rows, err := stmt.QueryContext(short, a.args...)
		return m.rows(rows, err, -1)
	case "close the statement":
		return m.closeStmt(a)
	case "ping":
		if a.tx != nil || a.conn == nil { // the plain handle beneath a wrapper pings connections that are gone
			return nil
		}
		return see(a.conn.PingContext(short), "ping")
	case "raw":
		if a.conn == nil || a.tx != nil {
			return nil
		}
		return see(a.conn.Raw(func(any) error { return nil }), "raw")
	case "exec out of time", "query out of time":
		late, done := context.WithTimeout(ctx, m.short)
		defer done()
		if s.do == "exec out of time" {
			res, err := on.ExecContext(late, m.sleep("DO"))
			return cmp.Or(m.apart(a, ctx, err), m.result(res, err))
		}
		rows, err := on.QueryContext(late, m.sleep("SELECT"))
		return cmp.Or(m.apart(a, ctx, err), m.rows(rows, err, -1))
	case "kill":
		if !isOwn {
			return nil
		}
		res, err := on.ExecContext(short, "KILL "+[]string{"", "QUERY "}[s.how%2]+"CONNECTION_ID()")
		return m.result(res, err)
	case "new lock context":
		if a.tx == nil && !a.holds {
			a.renew(m)
		}
		return nil
	case "acquire":
		if a.holds || a.lock.opts == nil {
			return nil
		}
		if a.holds = true; a.tx != nil {
			a.left = left{} // a savepoint
		}
		if !m.locks {
			return nil
		}
		var err error
		a.hold, err = mysqllock.Acquire(a.ctx, m.db, a.key, append([]lockctx.Option{lockctx.Wait(5 * time.Second)}, a.lock.opts...)...)
		return m.fails(err)
	case "release":
		if !a.holds || a.tx != nil {
			return nil
		}
		return m.release(a)
	}
	panic("no such step: " + s.do)
}

// apart ends a program in which a statement under a lock was out of time: it was on a session, or had none yet, where the plain
// handle's statement was on the actor's connection, which is gone.
func (m *machine) apart(a *actor, ctx context.Context, err error) error {
	locked := a.holds || a.tx == nil && a.conn != nil && a.lock.opts != nil && ctx == a.ctx
	if !m.locks || !locked || !errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	m.see("refused: out of time under a lock")
	return errRefused
}

// sleep is a statement that is out of time while it runs.
func (m *machine) sleep(verb string) string {
	return fmt.Sprintf("%s SLEEP(%.2f)", verb, 0.3+2*m.short.Seconds())
}

// purge takes connections out of the pool that are gone.
func (m *machine) purge() {
	if m.hidden && m.stale {
		m.stale = false
		m.db.SetMaxIdleConns(-1)
		m.db.SetMaxIdleConns(2)
	}
}

func (m *machine) release(a *actor) error {
	a.holds = false
	if a.hold == nil {
		return nil
	}
	err := a.hold.Release()
	a.hold = nil
	return m.fails(err)
}

func (m *machine) closeStmt(a *actor) error {
	if a.stmt == nil {
		return nil
	}
	err := a.stmt.Close()
	a.stmt, a.stmtOf = nil, nil
	if err == nil {
		m.see("statement closed")
	}
	return m.fails(err)
}

func (m *machine) endTx(a *actor, how string) (err error) {
	switch tx := a.tx; how {
	case "commit":
		err = tx.Commit()
	case "roll back":
		if err = tx.Rollback(); gone(err) || errors.Is(err, context.DeadlineExceeded) { // and so rolled back
			err = nil
		}
	default:
		m.cancelled = true
		a.cancelTx()
		_ = tx.Rollback() // after database/sql's own, which it waits for
		a.renew(m)
	}
	a.cancelTx()
	if a.tx = nil; err == nil {
		m.see("%s", how)
	}
	return m.fails(err)
}

// closeConn closes an actor's sql.Conn, without what it has set.
func (m *machine) closeConn(a *actor) error {
	a.renew(m)
	for _, text := range undoConn {
		_, err := a.conn.ExecContext(context.Background(), m.text(a, text))
		if err := m.fails(err); err != nil {
			return err
		}
	}
	err := a.conn.Close()
	if a.conn = nil; a.stmtOf != nil {
		a.stmt, a.stmtOf = nil, nil
	}
	return m.fails(err)
}

// end ends what a program has left open.
func (m *machine) end() error {
	for i := range m.actors {
		a := &m.actors[i]
		if a.tx != nil && (!a.holds || a.inHold) {
			if err := m.endTx(a, "commit"); err != nil {
				return err
			}
		}
		if a.holds {
			if err := m.release(a); err != nil {
				return err
			}
		}
		if a.tx != nil {
			if err := m.endTx(a, "commit"); err != nil {
				return err
			}
		}
		if a.stmt != nil {
			if err := m.closeStmt(a); err != nil {
				return err
			}
		}
		if a.conn != nil {
			if err := m.closeConn(a); err != nil {
				return err
			}
		}
	}
	return nil
}

// drop ends what a program has left, as where it was refused, or differs.
func (m *machine) drop() {
	for i := range m.actors {
		a := &m.actors[i]
		if a.tx != nil {
			_ = a.tx.Rollback()
		}
		if a.hold != nil {
			_ = a.hold.Rollback()
		}
		if a.stmt != nil {
			_ = a.stmt.Close()
		}
		if a.conn != nil { // its connection must not go to another program
			_ = a.conn.Raw(func(any) error { return driver.ErrBadConn })
			_ = a.conn.Close()
		}
		a.cancel()
		if a.cancelTx != nil {
			a.cancelTx()
		}
	}
}

func (m *machine) see(format string, args ...any) {
	m.seen = append(m.seen, m.hides.Replace(fmt.Sprintf(format, args...)))
}

// gone reports whether err is that of a connection which is gone. Which one it is differs from run to
// run, on a plain handle, too.
func gone(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn) || errors.Is(err, context.Canceled)
}

const isGone = "error: the connection is gone"

// fails notes an error.
func (m *machine) fails(err error) error {
	var server *mysql.MySQLError
	switch {
	case err == nil:
	case slices.ContainsFunc(sentinels, func(sentinel error) bool { return errors.Is(err, sentinel) }):
		m.see("refused: %v", err)
		return errRefused
	case errors.As(err, &server):
		m.see("error %d: %s", server.Number, server.Message)
	case gone(err):
		m.see(isGone)
	case errors.Is(err, context.DeadlineExceeded):
		m.see("error: out of time")
	case m.cancelled && (errors.Is(err, sql.ErrTxDone) || err.Error() == "sql: statement is closed"):
		m.see("error: it has ended") // database/sql closes the statements of a cancelled transaction a moment after it has said so
	default:
		m.see("error: %v", err)
	}
	return nil
}

func (m *machine) result(res sql.Result, err error) error {
	if err != nil {
		return m.fails(err)
	}
	n, nErr := res.RowsAffected()
	id, idErr := res.LastInsertId()
	m.see("%d rows affected %v, id %d %v", n, nErr, id, idErr)
	return nil
}

// rows reads what a query returns: all of it, or at most max rows.
func (m *machine) rows(rows *sql.Rows, err error, most int) error {
	if err != nil {
		return m.fails(err)
	}
	for more := true; more; more = most < 0 && rows.NextResultSet() {
		types, err := rows.ColumnTypes()
		if err != nil {
			m.see("no types: %v", err)
		}
		var values, into []any
		for range types {
			values = append(values, nil)
		}
		for i := range types {
			into = append(into, &values[i])
			nullable, ok := types[i].Nullable()
			length, hasLength := types[i].Length()
			m.see("column %s %s %v nullable %v %v length %v %v", types[i].Name(), types[i].DatabaseTypeName(), types[i].ScanType(), nullable, ok, length, hasLength)
		}
		for n := 0; n != most && rows.Next(); n++ {
			if err := rows.Scan(into...); err != nil {
				m.see("scan: %v", err)
			}
			row := ""
			for _, v := range values {
				if b, ok := v.([]byte); ok {
					v = string(b)
					row += " bytes"
				}
				row += fmt.Sprintf(" %T %v", v, v)
			}
			m.see("row%s", row)
		}
	}
	if err := m.fails(rows.Err()); err != nil {
		_ = rows.Close()
		return err
	}
	return m.fails(rows.Close())
}
