// Package statement runs statements on a base driver's connection as database/sql
// would, and reads their rows ahead.
package statement

import (
	"bytes"
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// Statement is a statement of the application, to run on whatever connection its unit
// of work is on.
type Statement struct {
	Text     string
	Args     []driver.NamedValue
	Query    bool        // has rows
	Prepared bool        // must go through Prepare, as the caller's own statement would
	Stmt     driver.Stmt // already prepared on the connection On; nil without one
	On       driver.Conn
	Kept     bool  // prepared on each connection where it runs, and stays so
	Holds    []any // that it runs in, of leases and advisory locks
	Info     sqltext.Info
	Alone    bool    // the connection runs a text with a semicolon as several statements, and this must stay one
	Last     bool    // its unit of work ends with it, if it changes something
	Sent     *Answer // nil if it did not go out yet
}

// Answer is that of a statement which went out with the lock that it takes.
type Answer struct {
	Rows   *Rows // read ahead, and to the end
	Result driver.Result
	Err    error
}

// Turn is the context in which the statement waits for its turn on the connection: one that has run waits for it in any case.
func (s *Statement) Turn(ctx context.Context) context.Context {
	if s.Sent != nil {
		return context.WithoutCancel(ctx)
	}
	return ctx
}

// MayWrite is in doubt true.
func (s *Statement) MayWrite() bool { return s.Info.Kind != sqltext.Read }

// Run runs the statement on a bare connection.
func (s *Statement) Run(ctx context.Context, base driver.Conn) (driver.Rows, driver.Result, error) {
	if s.Stmt != nil && s.On == base {
		return s.viaStmt(ctx, s.Stmt)
	}
	if !s.Prepared && (!s.Alone || !s.mayBeSeveral()) {
		r, res, err := s.Direct(ctx, base)
		if !errors.Is(err, driver.ErrSkip) {
			return r, res, err
		}
	}
	stmt, err := basedriver.Prepare(ctx, base, s.Text)
	if err != nil {
		return nil, nil, err
	}
	r, res, err := s.viaStmt(ctx, stmt)
	if err != nil || r == nil {
		_ = stmt.Close()
		return nil, res, err
	}
	return stmtRows{r, stmt}, nil, nil
}

// Joins reports whether the statement, with its arguments in its text, may stand beside others in one text. It may if
// package sqltext takes it for a plain one, nothing in it ends a statement, and it is much shorter than the longest text
// that the server takes.
func (s *Statement) Joins() bool {
	const most = 1 << 16
	size, names := len(s.Text), strings.Contains(s.Text, "`")
	for _, arg := range s.Args {
		var text string
		switch v := arg.Value.(type) {
		case string:
			text = v
		case []byte:
			text = string(v)
		}
		if size += len(text); names && strings.Contains(text, "`") { // the driver would put it into a name, too, for a question mark there
			return false
		}
	}
	plain := sqltext.PlainWrite
	if s.Query {
		plain = sqltext.PlainRead
	}
	return s.Stmt == nil && !s.Prepared && size < most && !s.mayBeSeveral() && plain(s.Text)
}

// Answered notes what the statement, which went out with its lock, has returned. Of rows that are too many to be read
// ahead nothing is noted: it runs again, by itself.
func (s *Statement) Answered(rows driver.Rows, err error) {
	var r *Rows
	if err == nil {
		if r, err = ReadAhead(rows, BufferBytes); err == nil && r.Streaming() {
			_ = r.Close()
			return
		}
	}
	s.Sent = &Answer{Rows: r, Err: err}
}

// mayBeSeveral reports whether the text, with its arguments in it, has a semicolon before its end. Only that byte can
// end a statement, whatever the quotes, the comments, sql_mode and the character set are: in no character set of a
// client's is it part of another character. No server prepares a text of several statements.
func (s *Statement) mayBeSeveral() bool {
	text := strings.TrimSuffix(strings.TrimRight(s.Text, " \t\r\n"), ";")
	return strings.Contains(text, ";") || slices.ContainsFunc(s.Args, func(arg driver.NamedValue) bool {
		switch v := arg.Value.(type) {
		case nil, bool, int64, uint64, float64, time.Time:
			return false
		case string:
			return strings.Contains(v, ";")
		case []byte:
			return bytes.IndexByte(v, ';') >= 0
		}
		return true
	})
}

// Direct runs it without preparing, or returns driver.ErrSkip.
func (s *Statement) Direct(ctx context.Context, base driver.Conn) (driver.Rows, driver.Result, error) {
	if s.Query {
		r, err := basedriver.Query(ctx, base, s.Text, s.Args)
		return r, nil, err
	}
	res, err := basedriver.Exec(ctx, base, s.Text, s.Args)
	return nil, res, err
}

func (s *Statement) viaStmt(ctx context.Context, stmt driver.Stmt) (driver.Rows, driver.Result, error) {
	if s.Query {
		r, err := basedriver.StmtQuery(ctx, stmt, s.Args)
		return r, nil, err
	}
	res, err := basedriver.StmtExec(ctx, stmt, s.Args)
	return nil, res, err
}

// stmtRows closes the statement with its rows. It need not keep optional
// interfaces hidden or shown: readAhead looks at the rows inside.
type stmtRows struct {
	driver.Rows
	stmt driver.Stmt
}

// Op names the statement in errors.
func (s *Statement) Op() string {
	if s.Query {
		return "query"
	}
	return "exec"
}

// Reads reports whether the statement, which has returned r or no rows, has given its
// caller data to decide on: by rows, or by what it has left on the connection, variables
// or a temporary table. The rows of INSERT … RETURNING are what it has written.
func (s *Statement) Reads(r *Rows) bool {
	switch {
	case !s.Query:
		return s.Info.Taints && (s.Info.Tables || s.Info.Calls && s.Info.Recalls)
	case s.Info.Kind == sqltext.Read || s.Info.Functions:
		return true
	}
	return r.Shows() && sqltext.Verb(s.Text) != "INSERT"
}

// LooksBack reports whether the statement asks for what the statement before it has left, and
// changes nothing.
func (s *Statement) LooksBack() bool {
	return s.Info.Recalls && s.Info.Kind != sqltext.Commits && s.Info.Changes == sqltext.ChangesNothing
}

// Recalls reports whether the statement asks for what earlier statements of its
// connection have left. One that sets variables sets those that it reads; and where
// it runs anybody may ask.
func (s *Statement) Recalls() bool {
	return s.Info.Recalls && !s.Info.Anywhere
}
