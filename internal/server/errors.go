package server

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Number returns the server's error number. It is 0 if err did not come from the server.
func Number(err error) uint16 {
	if err == nil { // e would be allocated
		return 0
	}
	var e *mysql.MySQLError
	if errors.As(err, &e) {
		return e.Number
	}
	return 0
}

// Locked reports whether a lock statement failed because the row is locked: by NOWAIT, or by a lock wait
// timeout.
func Locked(err error) bool {
	n := Number(err)
	return n == lockedNowait || n == LockWaitTimeout
}

// Interrupted reports whether a waiting lock statement was ended by its own time limit, by KILL QUERY, or by
// innodb_lock_wait_timeout.
func Interrupted(err error) bool {
	return slices.Contains([]uint16{queryTimeout, statementTimeout, QueryInterrupted, LockWaitTimeout}, Number(err)) && !Ended(err)
}

// closed is what vttablet and vtgate say of a transaction that they have ended, with the number of KILL
// QUERY, or that ends with its connection, with that of a limit.
var closed = []string{
	": ended at ", ": not found (potential transaction timeout)", ": in use: ", "transaction was aborted", "connection was aborted",
	"killing connection ID", "code = Aborted desc", "multi-db transaction attempted",
}

// Ended reports that a tablet has ended the transaction: what follows would commit by itself.
func Ended(err error) bool {
	if n := Number(err); n != QueryInterrupted && n != queryTimeout {
		return false
	}
	text := tabletText(err)
	return slices.ContainsFunc(closed, func(says string) bool { return strings.Contains(text, says) })
}

// tabletText is the error without the statement and its values, in which there may be anything.
func tabletText(err error) string {
	text, _, _ := strings.Cut(err.Error(), ": Sql: ")
	return text
}

// dropped reports whether vtgate may have rolled the transaction back with err, so that what
// follows would commit by itself. It does so after errors of its classes Aborted and
// ResourceExhausted, such as one of too many rows, or of no place in the tablet's pool. It keeps a
// transaction after an error of MySQL's own, whose number is in the text, if that is in no such class;
// and after one that it has found in the statement before it has sent anything. All others count as
// dropped.
func dropped(err error) bool {
	n := Number(err)
	if n == 0 {
		return false // the connection tells
	}
	text := tabletText(err)
	switch n {
	case ParseError, notSupported, noColumn, noTable, noDatabase, doesNotExist: // also vtgate's own
		return strings.Contains(text, rolledBack)
	case unknownError:
		return !strings.Contains(text, "syntax error at position")
	case diskFull, outOfMemory, outOfSortMemory, outOfResources, tableFull, lockTableFull, noThread, tooManyDelayed,
		tooManyConnections, tooManyOfAccount, accountLimit, hostBlocked,
		gotSignal, forcingClose, abortingConnection, packetTooLarge:
		return true
	}
	return !strings.Contains(text, fmt.Sprintf("(errno %d)", n)) || strings.Contains(text, rolledBack)
}

// rolledBack is what vtgate says if it has, because a statement was executed in part.
const rolledBack = "transaction rolled back"

// Deadlock reports whether the server rolled the transaction back to break a deadlock or because of a
// conflict, also with another node. A conflict that InnoDB sees at COMMIT has a number which other failures
// of COMMIT have, too: its text has InnoDB's own number, 149.
func Deadlock(err error) bool {
	switch Number(err) {
	case LockDeadlock, commitConflict, rowChanged, tidbWriteConflict, tidbConflict, tidbNoRetry, tidbRetryable, tidbTableChanged:
		return true
	case failedCommit:
		return strings.Contains(err.Error(), "error 149 ")
	}
	return false
}

// Changed reports that a row was changed since the snapshot of the transaction, and that the
// whole transaction is rolled back (MariaDB's innodb_snapshot_isolation, and TiDB's optimistic
// transactions).
func Changed(err error) bool {
	n := Number(err)
	return n == rowChanged || n == tidbWriteConflict || n == tidbConflict
}

// EndsTransaction reports whether the transaction is gone after err although its connection may live. The
// next statement on the connection would commit by itself.
func (i Info) EndsTransaction(err error) bool {
	n := Number(err)
	switch {
	case Deadlock(err), n == lockTableFull, n == failedCommit, n == tidbTooOld, n == tidbLateDuplicate:
		return true
	}
	return n == LockWaitTimeout && i.RollbackOnTimeout || Ended(err) || i.Tablets && dropped(err)
}

// NoSavepoint reports that a savepoint does not exist, as after the end of its transaction.
func NoSavepoint(err error) bool { return Number(err) == doesNotExist }

// Refused reports that a server does not take writes, or not in this transaction.
func Refused(err error) bool {
	return slices.Contains([]uint16{optionPrevents, readOnlyMode, openReadOnly, cannotLock, readOnlyTransaction, nodeNotReady}, Number(err))
}

// Undecided reports that a node of a cluster cannot tell whether the others have agreed to a change: its
// COMMIT has failed, and not by a conflict.
func Undecided(err error) bool {
	n := Number(err)
	return n == hookFailed || n == failedCommit && !Deadlock(err)
}

// ReadOnlyTransactions reports that the server does not write in a READ ONLY transaction.
func ReadOnlyTransactions(err error) bool { return Number(err) == readOnlyTransaction }

// RefusedReadOnly is the error of a statement for locks that the server refuses with err, since all
// transactions of the connection are READ ONLY.
func RefusedReadOnly(err error) error {
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"transactions are READ ONLY on this connection, so nothing can be locked;"+
			" leave transaction_read_only (tx_read_only) out of the DSN, or set it to 0 where the server's default"+
			" or its init_connect has it: %w", err))
}

// Denied reports a missing privilege: for a database, a table, a column, a
// routine, or a global one.
func Denied(err error) bool {
	return slices.Contains([]uint16{databaseDenied, tableDenied, columnDenied, privilegeDenied, routineDenied, needsSuper}, Number(err))
}

// Shared reports that MySQL Router refuses what depends on the statement before it, since
// the next one may run on another connection.
func Shared(err error) bool { return Number(err) == nativeDenied }

// Unprepared reports that the server does not know a prepared statement, because the session was reset, or
// is on another server behind a proxy; or that the statement must be prepared again, for example because
// its table is altered again and again.
func Unprepared(err error) bool { n := Number(err); return n == noStatement || n == prepareAgain }

// Unparsed reports that the server has not understood a statement, and run none of it.
func Unparsed(err error) bool { return Number(err) == ParseError }

// lacks reports that the server does not know something of a statement: its syntax, a variable, a column, a
// function, a table, a database or a feature; or that the server says no more than that the statement failed.
func lacks(err error) bool {
	switch Number(err) {
	case ParseError, noVariable, noColumn, doesNotExist, noTable, UnknownTable, noDatabase, notSupported, unknownError:
		return true
	}
	return false
}

// Unsupported reports that a connection was refused because of what it asked for.
func Unsupported(err error) bool {
	return slices.Contains([]uint16{handshakeFailed, unknownError, notSupported, noAuthMode}, Number(err))
}

// Unpreparable reports that the server cannot prepare a statement, which it could run as text.
func Unpreparable(err error) bool { return Number(err) == unpreparable }

// Full reports that the server takes no more connections, at all or of the account.
func Full(err error) bool {
	return slices.Contains([]uint16{tooManyConnections, tooManyOfAccount, accountLimit}, Number(err))
}

// TooManyPrepared reports that the server has as many prepared statements as it may have.
func TooManyPrepared(err error) bool {
	return Number(err) == tooManyPrepared
}

// Missing reports that a table, a routine or a database does not exist, that a routine takes other
// arguments, or that its definer is gone.
func Missing(err error) bool {
	return slices.Contains([]uint16{noTable, doesNotExist, noDatabase, otherArguments, noDefiner}, Number(err))
}

// NoColumn reports that a table does not have a column, or that the account may not use it.
func NoColumn(err error) bool { n := Number(err); return n == noColumn || n == columnDenied }

// Idle reports that the server has ended a connection on which nothing was sent for too long. If its
// word for that came together with an answer, the base driver has it in its buffer, and sends nothing.
func Idle(err error) bool { return Number(err) == idleTooLong || errors.Is(err, mysql.ErrBusyBuffer) }

// Broken reports that a connection is lost, so that the caller may try another.
func Broken(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn)
}

// HideBadConn returns err so that it does not match driver.ErrBadConn, which database/sql would
// relate to a connection of its own.
func HideBadConn(err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return errors.New(err.Error())
	}
	return err
}

// OfControl is err of a connection of the driver's own beside the caller's. It never matches
// driver.ErrBadConn, which is about the caller's; a lost connection is lockerr.ErrNoAnswer.
func OfControl(err error) error {
	if Gone(err, nil) {
		return lockerr.With(lockerr.ErrNoAnswer, errors.New(err.Error()))
	}
	return err
}

// Gone reports whether err means that conn is lost, with the locks on it: the server ended it, the network
// failed, or the end of a context closed it. TiDB does so by a KILL, or at a COMMIT whose outcome it does not
// know, which its text tells.
func Gone(err error, conn driver.Conn) bool {
	if err == nil {
		return false
	}
	if Idle(err) {
		return true
	}
	switch Number(err) {
	case 0:
	case shutdown, abortingConnection, connectionKilled, sessionKilled, clientGone, clientLost,
		netReadError, netReadInterrupted, netWriteError, netWriteInterrupted:
		return true
	case unknownError:
		return strings.Contains(err.Error(), "[executor:1317]") || strings.Contains(err.Error(), "execution result undetermined")
	default:
		return false
	}
	var netErr net.Error
	var panicked *basedriver.Panic
	if Broken(err) || errors.As(err, &panicked) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.As(err, &netErr) && !errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	return !basedriver.Valid(conn)
}

// Saying returns an error of the server with more in its text. It keeps the type by which
// callers know it; an error of another type stays as it is.
func Saying(err error, more string) error {
	e, ok := err.(*mysql.MySQLError) //nolint:errorlint // one that is wrapped cannot be replaced
	if !ok {
		return err
	}
	told := *e
	told.Message += "; " + more
	return &told
}

// Explain adds the matching sentinel to an error with which the server has refused a lock.
// It returns other errors as they are.
func Explain(err error) error {
	switch {
	case errors.Is(err, lockerr.ErrDeadlock), errors.Is(err, lockerr.ErrTimeout), errors.Is(err, lockerr.ErrLocked):
		return err
	case Deadlock(err), Number(err) == NamedLockDeadlock:
		return lockerr.With(lockerr.ErrDeadlock, err)
	case Locked(err):
		return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the server ended the wait by its own limit: %w", err))
	}
	return err
}
