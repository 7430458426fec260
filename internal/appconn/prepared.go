package appconn

import (
	"cmp"
	"context"
	"database/sql/driver"
	"slices"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Statements are the statements that stay prepared on one connection: on a session, or on a [Conn] of a handle with a budget.
type Statements struct {
	kept []*keptStmt // found by their texts; the one used last is at the end
	// stale: a statement that taints the connection has run since the kept ones were prepared, so they
	// are prepared again. After USE or SET a text means something else, but a prepared statement
	// keeps its old meaning. The text of CALL does not show what its procedure has set.
	stale bool
}

// keptStmt is a prepared statement that callers of the same text share, if their arguments have the
// same types: the server keeps the types of the first arguments with the statement, and converts
// later arguments to them.
type keptStmt struct {
	text  string
	types string // types of its arguments, as TypesOf returns them; "" before it has run, or without arguments
	stmt  driver.Stmt
}

// maxStmts is how many statements stay prepared on a connection.
const maxStmts = 64

// find returns the statement that is kept for text and has run with arguments of these types, or has
// not run yet; nil if there is none. types is "" if any will do.
func (s *Statements) find(text, types string) driver.Stmt {
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
func (s *Statements) keep(conn driver.Conn, text, types string, stmt driver.Stmt) {
	if len(s.kept) == maxStmts {
		basedriver.CloseStmt(conn, s.kept[0].stmt)
		s.kept = append(s.kept[:0], s.kept[1:]...)
	}
	s.kept = append(s.kept, &keptStmt{text, types, stmt})
}

// TypesOf returns a letter for each argument: what the protocol tells the server of its type.
func TypesOf(args []driver.NamedValue) string {
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

// Forget has the kept statements closed, and prepared again for the next callers.
func (s *Statements) Forget() { s.stale = true }

// closeKept closes the kept statements.
func (s *Statements) closeKept(conn driver.Conn) {
	for _, k := range s.kept {
		basedriver.CloseStmt(conn, k.stmt)
	}
	s.kept, s.stale = nil, false
}

// Prepared is [Conn.Prepared] for the connection conn. If the server says that all connections
// together have too many prepared statements, Prepared closes those of this connection and tries again.
func (s *Statements) Prepared(ctx context.Context, conn driver.Conn, text, types string) (driver.Stmt, error) {
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

// StatementsOf returns the statements that stay prepared on a session.
func StatementsOf(link *pool.Conn) *Statements {
	s, ok := link.State.(*Statements)
	if !ok {
		s = new(Statements)
		link.State = s
	}
	return s
}

// Stmt is a statement that is prepared on one connection, for one caller.
type Stmt struct {
	Base driver.Stmt // nil if the statement is prepared again for each use
	On   *Conn       // where Base is prepared
}

// Own has CloseOwn close s, unless Disown is called before.
func (c *Conn) Own(s *Stmt) { c.own = append(c.own, s) }

// Disown takes back what Own has done: the caller closes s itself.
func (c *Conn) Disown(s *Stmt) {
	c.own = slices.DeleteFunc(c.own, func(o *Stmt) bool { return o == s })
}

// Owns reports whether callers have statements on the connection.
func (c *Conn) Owns() bool { return len(c.own) > 0 }

// CloseOwn closes the statements that their callers have not closed.
func (c *Conn) CloseOwn() {
	for _, s := range c.own {
		basedriver.CloseStmt(c.Link.Conn, s.Base)
		s.On = nil // the same caller may get this connection again
	}
	c.own = nil
}
