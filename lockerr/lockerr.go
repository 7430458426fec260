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

	// ErrTimeout: the caller waited as long as it was ready to, for a key that somebody is
	// known to have: the server has said so, or another caller of the process holds the key, or
	// has been told so. Or its turn would come too late: by how long the last holders had the
	// key, for the callers of its process in front of it, which the error says. It also matches
	// ErrLocked, and ctx.Err() if the context ended the wait. Nothing was run and nothing is
	// locked.
	ErrTimeout = errors.New("mysqllock: not granted within the wait")

	// ErrExhausted: the caller got no connection, or none to ask on, because of a bound that
	// the text names: maxConns, lockMaxConns, SetMaxOpenConns, or the server's own (1040, 1203,
	// 1226). Nobody is known to have the key. The caller waited until its context ended,
	// which the error matches then, or while no caller in front of it got a connection for as
	// long as it was ready to wait for the lock, and at least a second. Or rows are still
	// being read from the connection of the caller's sql.Conn or transaction. It matches
	// neither ErrLocked nor ErrTimeout. Nothing was run and nothing is locked.
	ErrExhausted = errors.New("mysqllock: no connection left for locks")

	// ErrNoAnswer: nobody has said whether somebody has the key. The server refused the
	// connection, or did not open it, or did not answer on it, in time; or went away while the
	// caller waited, who never had the lock; or ended a statement for the lock, by a KILL, or by its own limit
	// where the statement does not wait; or granted a lease so late that it was given back. It
	// matches ctx.Err() if the context ended the wait, and neither ErrLocked, ErrTimeout nor
	// ErrExhausted. Nothing was run and nothing is locked.
	ErrNoAnswer = errors.New("mysqllock: the server has not answered")

	// ErrLost: the lock was held and is gone, or may be gone: the connection
	// broke, the server ended it, a deadlock rolled its transaction back, or a
	// lease was not renewed in time. What the unit of work had not committed is
	// not committed. Only where Op is "commit", and the connection broke while
	// COMMIT was on its way, or its statement was killed, is the outcome unknown;
	// the error says so. Where Op is "release", a
	// lease or an advisory lock was gone at its end: what was committed under it,
	// each commit checked, stays committed.
	ErrLost = errors.New("mysqllock: lock lost")

	// ErrDeadlock: this caller was chosen to break a deadlock. The server rolled
	// its transaction back; or the lock that it asked for was refused, since the
	// holders of that wait for what the caller holds. Running the whole unit of
	// work again is safe.
	ErrDeadlock = errors.New("mysqllock: deadlock")

	// ErrConflict: somebody else has committed under the key, or holds it, since its
	// version was remembered, so the unit of work that kept it optimistically was
	// rolled back. Running it again is safe, from lockctx.With on: what was read
	// before must not decide once more. If a statement failed because of that, as by a
	// duplicate key, the error wraps the server's, too.
	//
	// With any strategy: a statement has met a row that somebody has changed since
	// the transaction read, and MariaDB has rolled the transaction back (error 1020,
	// innodb_snapshot_isolation, which is on by default from 11.6 on).
	ErrConflict = errors.New("mysqllock: changed by someone else")

	// ErrNoEnd: a query that only reads ran outside a transaction in a lock
	// context that can never end, so nothing would ever release its lock.
	ErrNoEnd = errors.New("mysqllock: the lock context can never end")

	// ErrStaleSnapshot: a lock was first asked for in a transaction that has
	// already read, itself or in a stored function, at REPEATABLE READ or above. What
	// it reads under the lock would be older than the lock. A read in a trigger cannot
	// be seen.
	ErrStaleSnapshot = errors.New("mysqllock: the transaction has read before its lock")

	// ErrStaleRead: the lock context has read outside a transaction, and the lock
	// under which it did has been given back since, by the first commit or rollback.
	// A statement that writes without a new read would write what was decided on data
	// that others may have changed meanwhile. It was not sent. What that commit wrote
	// stays: look at what is there already, and finish it. To have all or nothing, use
	// mysqllock.Do, or a transaction.
	ErrStaleRead = errors.New("mysqllock: stale read")

	// ErrNoLock: the statement writes a table that Config.Require names, and runs outside
	// of any lock: without a lock context, outside a hold, or with lockctx.Without; or under
	// locks alone that others may hold, too; or Config.RequireKey does not accept the keys that
	// nobody else holds. It was not sent.
	ErrNoLock = errors.New("mysqllock: no lock")

	// ErrUnsafe: the lock could not hold what it promises here: on this
	// engine, server or topology, or because of what the statement does.
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

	// Held, with ErrLost: for how long the caller had had the lock when it was told, or when the lease
	// was taken away by force; 0 if it had none any more. ConnectionID is the server's id of the connection that had a row lock; 0 if
	// that is not known.
	Held         time.Duration
	ConnectionID uint64
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
	if e.Held > 0 {
		fmt.Fprintf(&b, "; it was held for %v", e.Held.Round(time.Millisecond))
		if e.ConnectionID != 0 {
			fmt.Fprintf(&b, " on connection %d", e.ConnectionID)
		}
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
	Held         time.Duration // for how long it has held the key; 0 if that is not known: it is where the holder is this database handle

	// Since is the age of the transaction that holds the key, which may have waited first: the lock is no
	// older. It is 0 for a lease, and if Held is known. MariaDB tells whole seconds: there the transaction is at least so
	// old, and up to two seconds older.
	Since time.Duration

	// Left: it has given the lease back, which stays for its MinHold. Its process may have ended.
	Left bool

	// ThisProcess: it is the database handle that has asked, elsewhere in this program.
	// ThisContext: it is a hold that was taken in the very lock context that has asked.
	// What is to run in the hold needs the context of the hold.
	ThisProcess, ThisContext bool
}

// String says who it is, for a log line: what holders say of themselves cannot
// begin another one.
func (h *Holder) String() string {
	var b strings.Builder
	switch {
	case h.ThisContext:
		b.WriteString("this process, by a hold of this very lock context (what runs in it needs the hold's context): ")
	case h.ThisProcess:
		b.WriteString("this process: ")
	}
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
	if h.Held > 0 {
		fmt.Fprintf(&b, " for %v", h.Held.Round(time.Millisecond))
	}
	if h.Since > 0 {
		fmt.Fprintf(&b, " in a transaction for %v", h.Since.Round(time.Millisecond))
	}
	if h.Left {
		b.WriteString(", which has given it back: it is kept for its MinHold")
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
