package server

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/go-sql-driver/mysql"

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
	return n == 3572 || n == 1205
}

// Interrupted reports whether a waiting lock statement was ended by its own time limit (3024
// on MySQL, 1969 on MariaDB), by KILL QUERY (1317), or by innodb_lock_wait_timeout (1205).
func Interrupted(err error) bool {
	switch Number(err) {
	case 3024, 1969, 1317, 1205:
		return true
	}
	return false
}

// Deadlock reports whether the server rolled the transaction back to break a
// deadlock or because of a conflict, also with another node: 1213, Group
// Replication's 3101, and MariaDB's 1020 (innodb_snapshot_isolation). A conflict
// that InnoDB sees at COMMIT is 1180, which others are, too: its text has
// InnoDB's own number, 149.
func Deadlock(err error) bool {
	switch Number(err) {
	case 1213, 3101, 1020:
		return true
	case 1180:
		return strings.Contains(err.Error(), "error 149 ")
	}
	return false
}

// Changed reports that a row was changed since the snapshot of the transaction, and that the
// whole transaction is rolled back (MariaDB's innodb_snapshot_isolation).
func Changed(err error) bool { return Number(err) == 1020 }

// EndsTransaction reports whether the transaction is gone after err although
// its connection may live. What runs next on it would commit by itself.
func (i Info) EndsTransaction(err error) bool {
	n := Number(err)
	return Deadlock(err) || n == 1206 || n == 1180 || n == 1205 && i.RollbackOnTimeout
}

// NoSavepoint reports that a savepoint does not exist (1305), as after the end of
// its transaction.
func NoSavepoint(err error) bool { return Number(err) == 1305 }

// Refused reports a server that does not take writes: 1290 (read_only), 1836,
// 1036 and 1015 (innodb_read_only), 1792 (READ ONLY transaction), 1047 (a node of
// Galera without the others).
func Refused(err error) bool {
	switch Number(err) {
	case 1290, 1836, 1036, 1015, 1792, 1047:
		return true
	}
	return false
}

// Undecided reports that a node of a cluster cannot tell whether the others have
// agreed to a change: 1180, unless it was a conflict, and 3100.
func Undecided(err error) bool {
	n := Number(err)
	return n == 3100 || n == 1180 && !Deadlock(err)
}

// Denied reports a missing privilege: for a database, a table, a column, a
// routine, or a global one.
func Denied(err error) bool {
	switch Number(err) {
	case 1044, 1142, 1143, 1227, 1370, 1419:
		return true
	}
	return false
}

// Shared reports that MySQL Router refuses what depends on the statement before it, since
// the next one may run on another connection.
func Shared(err error) bool { return Number(err) == 3566 }

// Unprepared reports that the server does not know a prepared statement (1243), because the
// session was reset, or is on another server behind a proxy; or that the statement must be
// prepared again (1615), for example because its table is altered again and again.
func Unprepared(err error) bool { n := Number(err); return n == 1243 || n == 1615 }

// Unparsed reports that the server has not understood a statement, and run none of it.
func Unparsed(err error) bool { return Number(err) == 1064 }

// lacks reports that the server does not know something of a statement: its syntax (1064), a
// variable (1193), a column or a function (1054, 1305), a table or a database (1146, 1109,
// 1049), a feature (1235); or that it says no more than that it failed (1105), as engines
// other than MySQL do.
func lacks(err error) bool {
	switch Number(err) {
	case 1064, 1193, 1054, 1305, 1146, 1109, 1049, 1235, 1105:
		return true
	}
	return false
}

// Full reports that the server takes no more connections, at all (1040) or of the
// account (1203, 1226).
func Full(err error) bool {
	switch Number(err) {
	case 1040, 1203, 1226:
		return true
	}
	return false
}

// Missing reports that a table (1146), a routine (1305) or a database (1049)
// does not exist, that a routine takes other arguments (1318), or that its
// definer is gone (1449).
func Missing(err error) bool {
	switch Number(err) {
	case 1146, 1305, 1049, 1318, 1449:
		return true
	}
	return false
}

// Idle reports that the server has ended a connection on which nothing was sent for too long.
func Idle(err error) bool { return Number(err) == 4031 }

// Broken reports that a connection is lost, so that the caller may try another.
func Broken(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn)
}

// Gone reports whether err means that conn, and what it held, is lost: the server ended it
// (1053, 1927, 3169, 4031), the network failed, or the end of a context closed it.
func Gone(err error, conn driver.Conn) bool {
	if err == nil {
		return false
	}
	switch Number(err) {
	case 0:
	case 1053, 1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 3169, 4031:
		return true
	default:
		return false
	}
	var netErr net.Error
	if Broken(err) || errors.Is(err, mysql.ErrBusyBuffer) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.As(err, &netErr) && !errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	v, ok := conn.(driver.Validator)
	return ok && !v.IsValid()
}

// Explain adds the matching sentinel to an error with which the server has refused a lock.
// It returns other errors as they are.
func Explain(err error) error {
	const namedLocks = 3058 // a deadlock among named locks
	switch {
	case errors.Is(err, lockerr.ErrDeadlock), errors.Is(err, lockerr.ErrTimeout), errors.Is(err, lockerr.ErrLocked):
		return err
	case Deadlock(err), Number(err) == namedLocks:
		return lockerr.With(lockerr.ErrDeadlock, err)
	case Locked(err), Interrupted(err):
		return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the server ended the statement before the wait was over, by its own limit or a KILL: %w", err))
	}
	return err
}
