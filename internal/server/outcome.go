package server

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
)

// Outcome is how a statement that checks and commits has ended.
type Outcome int

const (
	// NoWay: the server has no way for it here. The transaction is as it was.
	NoWay Outcome = iota
	// Committed: the check has passed, and the transaction is committed.
	Committed
	// OnlyCommitted is Committed for a statement that was interrupted. What it does after its
	// COMMIT may not be done.
	OnlyCommitted
	// CheckFailed: the check has failed. Nothing was committed; the transaction is open.
	CheckFailed
	// Failed comes with an error. Nothing was committed; the transaction must be rolled back.
	Failed
	// Unknown comes with an error. The transaction may be committed, as after any COMMIT
	// that was not answered.
	Unknown
)

// Done reports that the transaction is committed.
func (o Outcome) Done() bool { return o == Committed || o == OnlyCommitted }

// CheckedOutcome is OutcomeOf for a statement that checks, and commits or answers with rows: an
// answer that costs nothing where all is well.
func CheckedOutcome(ctx context.Context, conn driver.Conn, mark string, rows [][]string, err error) (Outcome, error) {
	outcome, err := OutcomeOf(ctx, conn, mark, err)
	if outcome == Committed && rows != nil {
		return CheckFailed, nil
	}
	return outcome, err
}

// OutcomeOf says how a statement that commits has ended, which has returned err: Committed is
// without an error. The statement is of the form that HasCommitted describes.
func OutcomeOf(ctx context.Context, conn driver.Conn, mark string, err error) (Outcome, error) {
	switch n := Number(err); {
	case err == nil:
		return Committed, nil
	case Missing(err) || Denied(err): // dropped, or not ours to execute
		return NoWay, nil
	case Interrupted(err) && !Locked(err):
		done, askErr := HasCommitted(ctx, conn, mark)
		switch {
		case done:
			return OnlyCommitted, nil
		case Number(askErr) != 0: // a number would say that nothing was committed
			return Unknown, fmt.Errorf("the statement that commits was interrupted, and it is not known whether before its COMMIT: %s", askErr.Error())
		case askErr != nil:
			return Unknown, askErr
		}
		return Failed, err
	case errors.Is(err, driver.ErrBadConn): // nothing was sent
		return Failed, err
	case n == 0 || Gone(err, conn) || Undecided(err):
		return Unknown, err
	}
	return Failed, err
}

// HasCommitted is for a statement that commits, and was interrupted: by a KILL, or by a limit
// of the server's. It reports whether the statement had committed before that. The statement
// sets @mysqllock_done to its mark after its COMMIT, not before: a COMMIT that is killed
// while FLUSH TABLES WITH READ LOCK holds it up rolls back. After an error it is not known; nor
// is it if no transaction is open and there is no mark.
func HasCommitted(ctx context.Context, conn driver.Conn, mark string) (bool, error) {
	if mark != "" {
		rows, err := Query(ctx, conn, "SELECT @mysqllock_done = '"+mark+"'")
		if err != nil || len(rows) == 1 && rows[0][0] == "1" {
			return err == nil, err
		}
	}
	// In a transaction no variable of the next one can be set.
	err := Exec(ctx, conn, "SET /*!80000 @@transaction_read_only = @@transaction_read_only */ /*M!100000 @@tx_read_only = @@tx_read_only */")
	const inTransaction = 1568
	if Number(err) == inTransaction {
		return false, nil
	}
	if err == nil {
		err = errAtCommit
	}
	return false, err
}

// errAtCommit has no number of the server's: the outcome is unknown.
var errAtCommit = errors.New("the statement that checks and commits was interrupted; the transaction may be committed")
