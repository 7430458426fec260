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

// Locked reports whether a lock statement failed because the row is locked: NOWAIT on MySQL
// (3572), or a lock wait timeout (1205), which is also the error of NOWAIT on MariaDB.
func Locked(err error) bool {
	n := Number(err)
	const nowait = 3572 // ER_LOCK_NOWAIT
	return n == nowait || n == LockWaitTimeout
}

// Interrupted reports whether a waiting lock statement was ended by its own time limit (3024
// on MySQL, 1969 on MariaDB), by KILL QUERY (1317), or by innodb_lock_wait_timeout (1205).
func Interrupted(err error) bool {
	return slices.Contains([]uint16{3024, 1969, QueryInterrupted, LockWaitTimeout}, Number(err)) && !Ended(err)
}

// closed is what vttablet and vtgate say of a transaction that they have ended, with the number of KILL
// QUERY, or that ends with its connection, with that of a limit.
var closed = []string{
	": ended at ", ": not found (potential transaction timeout)", ": in use: ", "transaction was aborted", "connection was aborted",
	"killing connection ID", "code = Aborted desc", "multi-db transaction attempted",
}

// Ended reports that a tablet has ended the transaction: what follows would commit by itself.
func Ended(err error) bool {
	if n := Number(err); n != QueryInterrupted && n != 3024 {
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
	case ParseError, 1235, 1054, 1146, 1049, 1305: // also vtgate's own
		return strings.Contains(text, rolledBack)
	case 1105:
		return !strings.Contains(text, "syntax error at position")
	case 1021, 1037, 1038, 1040, 1041, 1078, 1080, 1114, 1129, 1135, 1151, 1152, 1153, 1203, 1206, 1226:
		return true
	}
	return !strings.Contains(text, fmt.Sprintf("(errno %d)", n)) || strings.Contains(text, rolledBack)
}

// rolledBack is what vtgate says if it has, because a statement was executed in part.
const rolledBack = "transaction rolled back"

// Deadlock reports whether the server rolled the transaction back to break a
// deadlock or because of a conflict, also with another node: 1213, Group
// Replication's 3101, MariaDB's 1020 (innodb_snapshot_isolation), and TiDB's 9007,
// 8005, 8002 and 8022, and 8028 after DDL, at COMMIT, too. A conflict
// that InnoDB sees at COMMIT is 1180, which others are, too: its text has
// InnoDB's own number, 149.
func Deadlock(err error) bool {
	switch Number(err) {
	case LockDeadlock, 3101, 1020, 9007, 8005, 8002, 8022, 8028:
		return true
	case 1180:
		return strings.Contains(err.Error(), "error 149 ")
	}
	return false
}

// Changed reports that a row was changed since the snapshot of the transaction, and that the
// whole transaction is rolled back (MariaDB's innodb_snapshot_isolation, and TiDB's optimistic
// transactions).
func Changed(err error) bool { n := Number(err); return n == 1020 || n == 9007 || n == 8005 }

// EndsTransaction reports whether the transaction is gone after err although
// its connection may live. What runs next on it would commit by itself. 8229 is TiDB's, for a
// transaction that is older than max-txn-ttl, and so is 8147, of any failed statement if
// tidb_constraint_check_in_place_pessimistic is off.
func (i Info) EndsTransaction(err error) bool {
	n := Number(err)
	return Deadlock(err) || n == 1206 || n == 1180 || n == 8229 || n == 8147 || n == LockWaitTimeout && i.RollbackOnTimeout ||
		Ended(err) || i.Tablets && dropped(err)
}

// NoSavepoint reports that a savepoint does not exist (1305), as after the end of
// its transaction.
func NoSavepoint(err error) bool { return Number(err) == 1305 }

// Refused reports a server that does not take writes: 1290 (read_only), 1836,
// 1036 and 1015 (innodb_read_only), 1792 (READ ONLY transaction), 1047 (a node of
// Galera without the others).
func Refused(err error) bool {
	return slices.Contains([]uint16{1290, 1836, 1036, 1015, 1792, 1047}, Number(err))
}

// Undecided reports that a node of a cluster cannot tell whether the others have
// agreed to a change: 1180, unless it was a conflict, and 3100.
func Undecided(err error) bool {
	n := Number(err)
	return n == 3100 || n == 1180 && !Deadlock(err)
}

// ReadOnlyTransactions reports that the server does not write in a READ ONLY transaction (1792).
func ReadOnlyTransactions(err error) bool { return Number(err) == 1792 }

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
	return slices.Contains([]uint16{1044, 1142, 1143, 1227, 1370, 1419}, Number(err))
}

// Shared reports that MySQL Router refuses what depends on the statement before it, since
// the next one may run on another connection.
func Shared(err error) bool { return Number(err) == 3566 }

// Unprepared reports that the server does not know a prepared statement (1243), because the
// session was reset, or is on another server behind a proxy; or that the statement must be
// prepared again (1615), for example because its table is altered again and again.
func Unprepared(err error) bool { n := Number(err); return n == 1243 || n == 1615 }

// Unparsed reports that the server has not understood a statement, and run none of it.
func Unparsed(err error) bool { return Number(err) == ParseError }

// lacks reports that the server does not know something of a statement: its syntax (1064), a
// variable (1193), a column or a function (1054, 1305), a table or a database (1146, 1109,
// 1049), a feature (1235); or that it says no more than that it failed (1105), as engines
// other than MySQL do.
func lacks(err error) bool {
	return slices.Contains([]uint16{ParseError, 1193, 1054, 1305, 1146, UnknownTable, 1049, 1235, 1105}, Number(err))
}

// Unsupported reports that a connection was refused because of what it asked for: 1043, 1105, 1235, 1251.
func Unsupported(err error) bool {
	return slices.Contains([]uint16{1043, 1105, 1235, 1251}, Number(err))
}

// Unpreparable reports that the server cannot prepare a statement (1295), which it could run as text.
func Unpreparable(err error) bool { return Number(err) == 1295 }

// Full reports that the server takes no more connections, at all (1040) or of the
// account (1203, 1226).
func Full(err error) bool { return slices.Contains([]uint16{1040, 1203, 1226}, Number(err)) }

// TooManyPrepared reports that the server has as many prepared statements as it may have.
func TooManyPrepared(err error) bool {
	const maxPreparedStmtCount = 1461 // ER_MAX_PREPARED_STMT_COUNT_REACHED
	return Number(err) == maxPreparedStmtCount
}

// Missing reports that a table (1146), a routine (1305) or a database (1049)
// does not exist, that a routine takes other arguments (1318), or that its
// definer is gone (1449).
func Missing(err error) bool {
	return slices.Contains([]uint16{1146, 1305, 1049, 1318, 1449}, Number(err))
}

// NoColumn reports that a table does not have a column (1054), or that the account may not use it
// (1143).
func NoColumn(err error) bool { n := Number(err); return n == 1054 || n == 1143 }

// Idle reports that the server has ended a connection on which nothing was sent for too long. If its
// word for that came together with an answer, the base driver has it in its buffer, and sends nothing.
func Idle(err error) bool { return Number(err) == 4031 || errors.Is(err, mysql.ErrBusyBuffer) }

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

// Gone reports whether err means that conn, and what it held, is lost: the server ended it
// (1053, 1927, 3169, 4031, and 1105 on TiDB: by a KILL, or at a COMMIT whose outcome it does not
// know), the network failed, or the end of a context closed it.
func Gone(err error, conn driver.Conn) bool {
	if err == nil {
		return false
	}
	if Idle(err) {
		return true
	}
	switch Number(err) {
	case 0:
	case 1053, 1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 3169:
		return true
	case 1105:
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
	case Locked(err), Interrupted(err):
		return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the server ended the statement before the wait was over,"+
			" by its own limit or a KILL: %w", err))
	}
	return err
}
