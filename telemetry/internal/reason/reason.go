// Package reason tells in a word why a lock was refused or lost, for the labels of
// metrics: few words, and none of the application's making.
package reason

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Of returns one of these; "" for nil.
//
//	locked          someone else has the key, and the caller would not wait
//	waited          not granted within the wait, or before the context's deadline
//	exhausted       no connection to ask on, because of a bound
//	canceled        the caller's context was canceled
//	deadlock        the server has broken a deadlock
//	conflict        somebody else has committed under the key
//	stale_snapshot  the transaction had read before
//	unsafe          the lock could not hold
//	no_end          the lock context can never end
//	closed          the handle, or the hold, is closed
//	connection      the server has not answered, or the connection to it is gone, or was not to be had
//	lost            the lock was lost otherwise
//	other           whatever else
func Of(err error) string {
	if err == nil {
		return ""
	}
	known := []struct {
		is   error
		word string
	}{
		{lockerr.ErrDeadlock, "deadlock"},
		{lockerr.ErrConflict, "conflict"},
		{lockerr.ErrLost, "lost"},
		{context.Canceled, "canceled"},
		{lockerr.ErrExhausted, "exhausted"},
		{lockerr.ErrNoAnswer, "connection"},
		{lockerr.ErrTimeout, "waited"},
		{lockerr.ErrLocked, "locked"},
		{lockerr.ErrStaleSnapshot, "stale_snapshot"},
		{lockerr.ErrUnsafe, "unsafe"},
		{lockerr.ErrNoEnd, "no_end"},
		{lockerr.ErrClosed, "closed"},
		{context.DeadlineExceeded, "waited"},
	}
	word := "other"
	for _, k := range known {
		if errors.Is(err, k.is) {
			word = k.word
			break
		}
	}
	if (word == "lost" || word == "other") && connection(err) {
		return "connection"
	}
	return word
}

func connection(err error) bool {
	var network net.Error
	return errors.Is(err, mysql.ErrInvalidConn) || errors.Is(err, driver.ErrBadConn) || errors.As(err, &network)
}
