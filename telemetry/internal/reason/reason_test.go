package reason

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/lockerr"
)

func TestEachErrorHasItsReason(t *testing.T) {
	lost := func(err error) error {
		return &lockerr.Error{Op: "commit", Key: "k", Err: lockerr.With(lockerr.ErrLost, err)}
	}
	for _, test := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{lockerr.ErrLocked, "locked"},
		{&lockerr.Error{Err: lockerr.ErrTimeout}, "waited"},
		{&lockerr.Error{Err: lockerr.With(lockerr.ErrTimeout, context.DeadlineExceeded)}, "waited"},
		{&lockerr.Error{Err: lockerr.With(lockerr.ErrTimeout, context.Canceled)}, "canceled"},
		{context.DeadlineExceeded, "waited"},
		{fmt.Errorf("wrapped: %w", lockerr.ErrDeadlock), "deadlock"},
		{lost(lockerr.ErrDeadlock), "deadlock"},
		{lost(mysql.ErrInvalidConn), "connection"},
		{driver.ErrBadConn, "connection"},
		{lost(context.Canceled), "lost"},
		{lost(errors.New("it was not ours any more")), "lost"},
		{&net.OpError{Op: "dial", Err: errors.New("refused")}, "connection"},
		{lockerr.ErrConflict, "conflict"},
		{lockerr.ErrStaleSnapshot, "stale_snapshot"},
		{lockerr.ErrUnsafe, "unsafe"},
		{lockerr.ErrNoEnd, "no_end"},
		{lockerr.ErrClosed, "closed"},
		{lockerr.ErrExhausted, "exhausted"},
		{lockerr.ErrNoAnswer, "connection"},
		{&lockerr.Error{Err: lockerr.With(lockerr.ErrNoAnswer, context.DeadlineExceeded)}, "connection"},
		{&lockerr.Error{Err: lockerr.With(lockerr.ErrNoAnswer, context.Canceled)}, "canceled"},
		{&mysql.MySQLError{Number: 1146}, "other"},
	} {
		if got := Of(test.err); got != test.want {
			t.Errorf("%v is %q, want %q", test.err, got, test.want)
		}
	}
}
