package handle

import (
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Error is err of what was asked for with h.
func (k *Handle) Error(op string, h *hint.Hint, err error) error {
	return &lockerr.Error{Op: op, Key: h.Names(), Strategy: k.Strategy(h), Err: err}
}

// SetupError is a failure to get the lock table ready, or to reach the server
// for it.
func (k *Handle) SetupError(h *hint.Hint, err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		err = errors.New(err.Error()) // no reason for database/sql to try another connection
	}
	return k.Error("lock", h, err)
}
