// Package lockerr holds the errors of mysqllock. The root package re-exports
// all of them, so application code rarely imports this one.
package lockerr

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
)

// Each sentinel names one state. Test for them with [errors.Is]; the details
// are in the [Error] around them.
var (
	// ErrLocked: someone else holds the key and the caller would not wait.
	// Nothing was run and nothing is locked.
	ErrLocked = errors.New("mysqllock: locked by someone else")

	// ErrTimeout: the caller waited as long as it was ready to. It also
	// matches ErrLocked, and ctx.Err() where the context ended the wait.
	// Nothing was run and nothing is locked.
	ErrTimeout = errors.New("mysqllock: not granted within the wait")

	// ErrLost: the lock was held and is gone, or may be gone: the connection
	// broke, the server ended it, a deadlock rolled its transaction back, or a
	// lease was not renewed in time. What the unit of work had not committed is
	// not committed. Only where Op is "commit", and the connection broke while
	// COMMIT was on its way, is the outcome unknown.
	ErrLost = errors.New("mysqllock: lock lost")

	// ErrDeadlock: the server chose this transaction to break a deadlock and
	// rolled it back. Running the whole unit of work again is safe.
	ErrDeadlock = errors.New("mysqllock: deadlock")

	// ErrConflict: somebody else has committed under the key, or holds it, since
	// its version was remembered, so the unit of work that kept it
	// optimistically was rolled back. Running it again is safe, from
	// lockctx.With on: what was read before must not decide once more.
	ErrConflict = errors.New("mysqllock: changed by someone else")

	// ErrNoEnd: a query that only reads ran outside a transaction in a lock
	// context that can never end, so nothing would ever release its lock.
	ErrNoEnd = errors.New("mysqllock: the lock context can never end")

	// ErrStaleSnapshot: a lock was first asked for in a transaction that has
	// already read, at REPEATABLE READ or above. What it reads under the lock
	// would be older than the lock.
	ErrStaleSnapshot = errors.New("mysqllock: the transaction has read before its lock")

	// ErrUnsafe: the lock could not hold what it promises here: on this
	// server or topology, or because of what the statement does.
	ErrUnsafe = errors.New("mysqllock: not safe here")

	// ErrClosed: the database handle, or the hold, is closed.
	ErrClosed = errors.New("mysqllock: closed")
)

// Error is what every failure of a lock looks like. It unwraps to one or more
// of the sentinels and, where there is one, to the server's own error. It
// never carries a DSN or a password.
type Error struct {
	Op       string        // what was being done: "lock", "begin", "query", "exec", "commit", …
	Key      string        // the key, or the keys joined by ", "
	Strategy string        // "row", "lease", "advisory" or "optimistic"
	Holder   *Holder       // who has the key, where the server let us see it; else nil
	Waited   time.Duration // how long the caller had waited
	Err      error         // the cause; never nil
}

// prefix stands in front of every error of the library, once.
const prefix = "mysqllock: "

// Error says everything, the cause in its own words.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(prefix)
	b.WriteString(e.Op)
	if e.Key != "" {
		fmt.Fprintf(&b, " %q", e.Key)
	}
	if e.Strategy != "" {
		fmt.Fprintf(&b, " (%s)", e.Strategy)
	}
	b.WriteString(": ")
	b.WriteString(strings.TrimPrefix(e.Err.Error(), prefix))
	if e.Waited > 0 {
		fmt.Fprintf(&b, "; waited %v", e.Waited.Round(time.Millisecond))
	}
	if e.Holder != nil {
		b.WriteString("; held by ")
		b.WriteString(e.Holder.String())
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is makes a timeout also match ErrLocked.
func (e *Error) Is(target error) bool {
	return target == ErrLocked && errors.Is(e.Err, ErrTimeout)
}

// Holder says who has a key. A field that the server does not show is zero.
type Holder struct {
	ConnectionID uint64        // the server's id for the connection, as in SHOW PROCESSLIST; 0 for a lease, which has none
	User         string        // the account name
	Host         string        // where the connection comes from
	Program      string        // the holder's lockOwner, else its program name
	Since        time.Duration // age of the transaction that holds the key; 0 for a lease
}

// String says who it is, for a log line: what holders say of themselves cannot
// begin another one.
func (h *Holder) String() string {
	var b strings.Builder
	if h.ConnectionID == 0 { // of a lease
		b.WriteString(h.Program)
	} else {
		fmt.Fprintf(&b, "connection %d", h.ConnectionID)
		if h.User != "" || h.Host != "" {
			fmt.Fprintf(&b, " of %s@%s", h.User, h.Host)
		}
		if h.Program != "" {
			fmt.Fprintf(&b, " (%s)", h.Program)
		}
	}
	if h.Since > 0 {
		fmt.Fprintf(&b, " for %v", h.Since.Round(time.Millisecond))
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, b.String())
}

// With adds a sentinel in front of a cause, and makes sure that the cause
// cannot be taken for driver.ErrBadConn: database/sql would silently run the
// statement again on another connection, without the lock.
func With(sentinel, cause error) error {
	if cause == nil {
		return sentinel
	}
	return &pair{sentinel, cause}
}

type pair struct{ sentinel, cause error }

func (p *pair) Error() string {
	return p.sentinel.Error() + ": " + strings.TrimPrefix(p.cause.Error(), prefix)
}

func (p *pair) Unwrap() []error {
	if errors.Is(p.cause, driver.ErrBadConn) {
		return []error{p.sentinel}
	}
	return []error{p.sentinel, p.cause}
}
