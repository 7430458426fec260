package handle

import (
	"errors"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Error is err of what was asked for with h.
func (k *Handle) Error(op string, h *hint.Hint, err error) error {
	return &lockerr.Error{Op: op, Key: h.Names(), Strategy: k.Strategy(h), Err: err}
}

// SetupError is a failure to get the lock table ready, or to reach the server
// for it.
func (k *Handle) SetupError(h *hint.Hint, err error) error {
	return k.Error("lock", h, strategy.Unreached(err))
}

// ErrUnusable is of a caller whose connection, that of a sql.Conn or a transaction, is of no use for a lock.
// It is none on which database/sql closes the connection: it would wait for the end of the rows.
var ErrUnusable = lockerr.With(lockerr.ErrExhausted, errors.New(
	"rows are still being read from this connection (close them first), or it is broken; the lock is not held"))
