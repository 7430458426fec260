package basedriver

import (
	"context"
	"database/sql/driver"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"strings"
)

// Panic is the error of a statement of the driver's own at which a base driver, or an interceptor, has
// panicked. It is as if the connection had been lost in that statement. So whatever the caller has
// in its hands it gives back as ever, where a panic would leave that to a deferred call for each.
type Panic struct {
	Value any    // what it has panicked with
	At    string // the function, file and line
}

func (p *Panic) Error() string {
	return fmt.Sprintf("the driver below has panicked in %s, so that its connection was closed: %v", p.At, p.Value)
}

// Catch is deferred around a statement of the driver's own. On a panic it closes the connection, which
// may be in the midst of an answer, and has the statement fail with a [Panic]. [log/slog.Default] gets a
// line with the stack: the error may be of no interest to anybody, as that of a rollback.
func Catch(conn driver.Conn, err *error) {
	if v := recover(); v != nil {
		*err = &Panic{Value: v, At: panicked()}
		if conn != nil {
			Close(conn)
		}
		slog.Error("mysqllock: the driver below has panicked", "panic", v, "stack", string(debug.Stack()))
	}
}

// Close closes a connection. Nobody hears whether that went well.
func Close(conn driver.Conn) {
	var failed error
	defer Catch(nil, &failed)
	_ = conn.Close()
}

// CloseStmt is [Close] for a statement that is prepared on conn.
func CloseStmt(conn driver.Conn, stmt driver.Stmt) {
	var failed error
	defer Catch(conn, &failed)
	_ = stmt.Close()
}

// Valid reports whether the connection can still be used, as far as its driver knows.
func Valid(conn driver.Conn) (valid bool) {
	v, ok := conn.(driver.Validator)
	if !ok {
		return true
	}
	var failed error
	defer Catch(conn, &failed)
	return v.IsValid()
}

// Reset asks the driver to make the connection ready for another user.
func Reset(ctx context.Context, conn driver.Conn) (err error) {
	r, ok := conn.(driver.SessionResetter)
	if !ok {
		return nil
	}
	defer Catch(conn, &err)
	return r.ResetSession(ctx)
}

// panicked tells where the panic was that a deferred function has just recovered.
func panicked() string {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])])
	for within := false; ; {
		f, more := frames.Next()
		switch inRuntime := strings.HasPrefix(f.Function, "runtime."); {
		case within && !inRuntime:
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		case !more:
			return "a function that is not known"
		default:
			within = within || inRuntime
		}
	}
}
