package intercept

import (
	"context"
	"database/sql/driver"
	"fmt"
	"io"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/purpose"
)

// With returns a function for [mysqllock.Config.Base] that shows an interceptor all that the
// handle sends to the server. Of several interceptors the first is the outermost, and the
// last is next to the server. With none, nothing is shown.
//
// An interceptor is called by several goroutines at a time. Its ConnectorConnect opens each
// connection.
func With(interceptors ...sqlmw.Interceptor) func(driver.Connector) (driver.Connector, error) {
	return func(k driver.Connector) (driver.Connector, error) {
		purpose.Listen()
		for i := len(interceptors) - 1; i >= 0; i-- {
			c := connector{k, calm{interceptors[i]}}
			if closer, ok := k.(io.Closer); ok {
				k = closing{c, closer}
			} else {
				k = c
			}
		}
		return k, nil
	}
}

// Step is a step in the life of a lock, for which the driver sends a statement of its own, or
// several in one text, with "; " between them. A text of the application's has none of these
// beside it.
type Step string

const (
	// Take: a lock is taken or waited for, and the transaction begun that it lies in, or
	// that begins with it; or the caller that does not get it asks who holds it.
	Take = Step(purpose.Take)
	// Fence: right before a COMMIT, the server is asked whether the locks are still held,
	// or versions are compared. The COMMIT may be in the same text, and what gives back a
	// lease or an advisory lock behind it.
	Fence = Step(purpose.Fence)
	// End: the COMMIT or ROLLBACK of a transaction that the driver has begun for a lock.
	// Behind a COMMIT the same text may lock the key for the next caller of the process.
	End = Step(purpose.End)
	// Release: a lock outside of transactions is given back.
	Release = Step(purpose.Release)
	// Renew: a lease is renewed, or a connection that holds locks kept alive.
	Renew = Step(purpose.Renew)
	// Kill: a waiter is taken off the server, or a connection ended that may hold a lock.
	Kill = Step(purpose.Kill)
	// Other: all else that the driver adds, such as the settings of a connection, the lock
	// table, and savepoints.
	Other = Step(purpose.Other)
)

// Lock says what a statement is for that the driver has added.
type Lock struct {
	Step     Step
	Strategy string // row, lease, advisory or optimistic; "" if the statement is for none of them

	// Keys are the keys that it is for; none if it is for no key. One statement may be for
	// several callers: it is a Take if any of them takes a lock. With lockStripes a row is
	// all that the statement knows: it is called "stripe 7". A key that is longer than a
	// row's name can be is called "(hashed)".
	Keys []string

	// Contexts are the contexts that a [mysqllock.Tracer] has returned when the locks were
	// asked for that the statement is for; none without such an Observer. One statement may
	// be for several locks.
	Contexts []context.Context
}

// Of says what the statement is for that an interceptor was called for with ctx. ok is
// false for the application's own.
func Of(ctx context.Context) (l Lock, ok bool) {
	of, ok := purpose.From(ctx)
	if !ok {
		return Lock{}, false
	}
	l = Lock{Step: Step(of.Purpose), Strategy: of.Strategy, Contexts: of.Asked}
	for _, name := range of.Keys {
		l.Keys = append(l.Keys, keyOf(name))
	}
	return l, true
}

// keyOf is the key of a row of the lock table.
func keyOf(row string) string {
	switch m, ok := keyrow.Read(row); {
	case !ok:
		return row
	case m.Stripe >= 0:
		return fmt.Sprintf("stripe %d", m.Stripe)
	case m.Hashed:
		return "(hashed)"
	default:
		return m.Key
	}
}
