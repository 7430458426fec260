package mysqllock

import "github.com/mysqllock/mysqllock/lockerr"

// The states in which a lock fails. Test for them with errors.Is; what
// [lockerr] says of each holds here.
var (
	ErrLocked        = lockerr.ErrLocked
	ErrTimeout       = lockerr.ErrTimeout
	ErrExhausted     = lockerr.ErrExhausted
	ErrLost          = lockerr.ErrLost
	ErrDeadlock      = lockerr.ErrDeadlock
	ErrConflict      = lockerr.ErrConflict
	ErrNoEnd         = lockerr.ErrNoEnd
	ErrStaleSnapshot = lockerr.ErrStaleSnapshot
	ErrStaleRead     = lockerr.ErrStaleRead
	ErrUnsafe        = lockerr.ErrUnsafe
	ErrClosed        = lockerr.ErrClosed
)

// Error is what every failure of a lock looks like.
type Error = lockerr.Error

// Holder says who has a key.
type Holder = lockerr.Holder
