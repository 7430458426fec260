package server

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
)

// Uncommitted is for err with which a COMMIT, or a text of several statements with one, has failed. unknown reports that
// the transaction may be committed all the same, as after any COMMIT that was not answered; else it is not. One that was
// interrupted, by a KILL or by a limit of the server's, may have been so behind its COMMIT: the connection is asked. (A
// COMMIT that is killed while FLUSH TABLES WITH READ LOCK holds it up rolls back.)
func Uncommitted(ctx context.Context, conn driver.Conn, err error) (unknown bool, _ error) {
	if !Interrupted(err) || Locked(err) {
		return Unknown(err, conn), err
	}
	open, askErr := inTransaction(ctx, conn)
	switch {
	case open:
		return false, err
	case askErr != nil: // as a text: a number would say that nothing was committed
		return true, fmt.Errorf("%w: %s", errAtCommit, askErr.Error())
	}
	return true, errAtCommit
}

// Unknown reports whether a COMMIT that has failed with err, and was not interrupted, may be committed all the same: the server has
// not answered it, or cannot tell.
func Unknown(err error, conn driver.Conn) bool {
	sent := !errors.Is(err, driver.ErrBadConn)
	return sent && (Number(err) == 0 || Gone(err, conn) || Undecided(err))
}

// inTransaction reports whether a transaction is open: in one no variable of the next one can be set.
func inTransaction(ctx context.Context, conn driver.Conn) (bool, error) {
	err := Exec(ctx, conn, "SET /*!80000 @@transaction_read_only = @@transaction_read_only */ /*M!100000 @@tx_read_only = @@tx_read_only */")
	if Number(err) == openTransaction {
		return true, nil
	}
	return false, err
}

// errAtCommit has no number of the server's: the outcome is unknown.
var errAtCommit = errors.New("the statement that commits was interrupted")
