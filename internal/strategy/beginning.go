package strategy

import (
	"context"
	"database/sql/driver"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/pool"
)

// Beginning is a transaction on a connection of the application's that is to begin right
// after Take. A strategy that can begins it in the statement that takes the lock, or beside
// it, inside of Use; there is no other way to the connection.
type Beginning struct {
	Options driver.TxOptions

	// Ends: what is taken ends with the transaction, whatever becomes of that.
	Ends bool

	// Free reports whether Use need not wait for somebody else's connection, as a caller
	// that has taken the lock already should not.
	Free func() bool

	// Limited is set by the strategy if the server ends the connection of the transaction
	// that has begun when it was silent for the TTL.
	Limited bool

	connect func(ctx context.Context) (*pool.Conn, error)
	done    func(begun bool)

	mu    sync.Mutex
	lent  *pool.Conn // while it is in use
	begun bool
}

// State is how a strategy leaves the connection of a [Beginning].
type State int

// The zero value is what nobody has said anything of.
const (
	Unsure State = iota // a transaction may be open, and a lock held: the connection is closed
	Vacant              // no transaction is open
	Begun               // the transaction has begun, and is the caller's if Take returns the lock
)

// Abandoned rolls back what may have begun on c for nothing, within limit, although ctx may
// have ended.
func Abandoned(ctx context.Context, c *pool.Conn, limit time.Duration) State {
	if c.Abandon(ctx, limit); !c.Clean() {
		return Unsure
	}
	return Vacant
}

// NewBeginning returns a Beginning on what connect returns: a connection that has no
// transaction open, with its turn. done gives both back, once for each time that connect has
// come off, and hears whether the transaction has begun. If the connection is not clean then,
// it may not be used any more.
func NewBeginning(connect func(ctx context.Context) (*pool.Conn, error), done func(begun bool)) *Beginning {
	return &Beginning{Free: func() bool { return true }, connect: connect, done: done}
}

// Use has do use the connection, which is lent until do returns. do says how it
// leaves the connection. Use fails if there was no connection, and then has not called do.
func (b *Beginning) Use(ctx context.Context, do func(*pool.Conn) State) error {
	c, err := b.connect(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.lent = c
	b.mu.Unlock()
	b.giveBack(do(c))
	return nil
}

// giveBack ends the use of the connection. It reports whether that was still to be done.
func (b *Beginning) giveBack(left State) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.lent
	if c == nil {
		return false
	}
	b.lent = nil
	if left == Unsure {
		c.Taint()
		_ = c.Close()
	}
	b.begun = left == Begun
	b.done(b.begun)
	return true
}

// Conclude is for who has called Take, once it has returned. It reports whether the
// transaction has begun. whole is false if the strategy has kept the connection in use: then
// it is closed, and what Take has returned is of no use.
func (b *Beginning) Conclude() (begun, whole bool) {
	if b == nil {
		return false, true
	}
	whole = !b.giveBack(Unsure)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun, whole
}
