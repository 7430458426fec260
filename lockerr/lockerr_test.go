package lockerr_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

var sentinels = []error{
	lockerr.ErrLocked, lockerr.ErrTimeout, lockerr.ErrLost, lockerr.ErrDeadlock,
	lockerr.ErrNoEnd, lockerr.ErrStaleSnapshot, lockerr.ErrStaleRead, lockerr.ErrConflict, lockerr.ErrUnsafe, lockerr.ErrClosed, lockerr.ErrExhausted, lockerr.ErrNoAnswer,
}

const locked, timeout = 0, 1 // in sentinels

// serverError stands for the error of a driver.
type serverError struct{ number int }

func (se *serverError) Error() string { return fmt.Sprint("server error ", se.number) }

func TestEachSentinelIsItselfAlone(t *testing.T) {
	for i, one := range sentinels {
		if !strings.HasPrefix(one.Error(), "mysqllock: ") {
			t.Errorf("%q does not say where it comes from", one)
		}
		for j, other := range sentinels {
			if errors.Is(one, other) != (i == j) {
				t.Errorf("is %q %q? %v", one, other, i != j)
			}
		}
	}
}

func TestAnErrorIsItsSentinelAndItsCause(t *testing.T) {
	cause := &serverError{3572}
	for i, sentinel := range sentinels {
		err := error(&lockerr.Error{Op: "lock", Key: "k", Err: lockerr.With(sentinel, cause)})
		err = fmt.Errorf("selling: %w", err)
		for j, other := range sentinels {
			want := i == j || i == timeout && j == locked
			if errors.Is(err, other) != want {
				t.Errorf("is %q %q? %v", err, other, !want)
			}
		}
		var e *lockerr.Error
		if !errors.As(err, &e) || e.Op != "lock" || e.Key != "k" {
			t.Errorf("no *Error is found in %q", err)
		}
		var s *serverError
		if !errors.As(err, &s) || s != cause {
			t.Errorf("the server's error is not found in %q", err)
		}
	}
}

func TestATimeoutOfAContextIsItsCauseToo(t *testing.T) {
	for _, cause := range []error{context.Canceled, context.DeadlineExceeded} {
		err := error(&lockerr.Error{Op: "lock", Err: lockerr.With(lockerr.ErrTimeout, cause)})
		for _, want := range []error{lockerr.ErrTimeout, lockerr.ErrLocked, cause} {
			if !errors.Is(err, want) {
				t.Errorf("%q is not %q", err, want)
			}
		}
		if errors.Is(err, lockerr.ErrLost) {
			t.Errorf("%q is ErrLost", err)
		}
	}
	if errors.Is(&lockerr.Error{Op: "lock", Err: lockerr.ErrLocked}, lockerr.ErrTimeout) {
		t.Error("ErrLocked is ErrTimeout")
	}
}

func TestWithIsBothOfItsParts(t *testing.T) {
	if err := lockerr.With(lockerr.ErrLost, nil); err != lockerr.ErrLost { //nolint:errorlint // nothing around it
		t.Errorf("without a cause it is %v", err)
	}
	err := lockerr.With(lockerr.ErrLost, io.ErrUnexpectedEOF)
	if want := "mysqllock: lock lost: unexpected EOF"; err.Error() != want {
		t.Errorf("the text is %q, want %q", err, want)
	}
	if !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v is not both of its parts", err)
	}
	twice := lockerr.With(lockerr.ErrLost, lockerr.With(lockerr.ErrDeadlock, &serverError{1213}))
	var s *serverError
	if !errors.Is(twice, lockerr.ErrLost) || !errors.Is(twice, lockerr.ErrDeadlock) || !errors.As(twice, &s) {
		t.Errorf("%v is not all of its parts", twice)
	}
}

// TestBadConnNeverLeaks: database/sql runs what failed with ErrBadConn again on
// another connection.
func TestBadConnNeverLeaks(t *testing.T) {
	for _, cause := range []error{
		driver.ErrBadConn,
		fmt.Errorf("write: %w", driver.ErrBadConn),
		errors.Join(io.EOF, driver.ErrBadConn),
		lockerr.With(lockerr.ErrDeadlock, driver.ErrBadConn),
		&lockerr.Error{Op: "commit", Err: driver.ErrBadConn},
	} {
		err := lockerr.With(lockerr.ErrLost, cause)
		for _, err := range []error{err, &lockerr.Error{Op: "exec", Err: err}, lockerr.With(lockerr.ErrClosed, err)} {
			if errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%v is driver.ErrBadConn", err)
			}
			if !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%v is not ErrLost", err)
			}
			if !strings.Contains(err.Error(), "bad connection") {
				t.Errorf("%v does not say what happened", err)
			}
		}
	}
}

func TestTheTextOfAnErrorTellsWhatIsKnown(t *testing.T) {
	holder := &lockerr.Holder{ConnectionID: 55, User: "app", Host: "10.0.0.7:5123", Program: "web-1:7:shopd", Since: 1500400 * time.Microsecond}
	for _, c := range []struct {
		err  lockerr.Error
		want string
	}{
		{
			lockerr.Error{Op: "lock", Key: "product:42", Strategy: "row", Holder: holder, Waited: 2*time.Second + 300*time.Microsecond, Err: lockerr.ErrTimeout},
			`mysqllock: lock "product:42" (row): not granted within the wait; waited 2s; held by connection 55 of app@10.0.0.7:5123 (web-1:7:shopd) in a transaction for 1.5s`,
		},
		{
			lockerr.Error{Op: "lock", Key: "a, b", Strategy: "row", Holder: &lockerr.Holder{ConnectionID: 55}, Err: lockerr.ErrLocked},
			`mysqllock: lock "a, b" (row): locked by someone else; held by connection 55`,
		},
		{
			lockerr.Error{Op: "query", Err: lockerr.With(lockerr.ErrNoEnd, errors.New("derive the context"))},
			`mysqllock: query: the lock context can never end: derive the context`,
		},
		{
			lockerr.Error{Op: "exec", Key: "k", Strategy: "row", Held: 3 * time.Second, ConnectionID: 55, Err: lockerr.ErrLost},
			`mysqllock: exec "k" (row): lock lost; it was held for 3s on connection 55`,
		},
		{
			lockerr.Error{Op: "exec", Key: "k", Err: &serverError{1213}},
			`mysqllock: exec "k": server error 1213`,
		},
		{
			lockerr.Error{Op: "begin", Key: "line\nbreak \x00\xff", Err: lockerr.ErrUnsafe},
			`mysqllock: begin "line\nbreak \x00\xff": not safe here`,
		},
		{
			lockerr.Error{Op: "commit", Err: lockerr.With(lockerr.ErrLost, &lockerr.Error{Op: "lock", Err: lockerr.ErrDeadlock})},
			`mysqllock: commit: lock lost: lock: deadlock`,
		},
		{ // only the prefix goes: not what a statement or a message says
			lockerr.Error{Op: "lock", Err: errors.New("run: CREATE TABLE t (a INT) COMMENT='locks of mysqllock: one row a key'")},
			`mysqllock: lock: run: CREATE TABLE t (a INT) COMMENT='locks of mysqllock: one row a key'`,
		},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("the text is\n%s\nwant\n%s", got, c.want)
		}
	}
}

// TestErrorIsOneLine: a holder calls itself what it likes.
func TestErrorIsOneLine(t *testing.T) {
	for _, err := range []*lockerr.Error{
		{Op: "lock", Key: "a\nb\r\n", Err: lockerr.ErrLocked},
		{Op: "lock", Err: lockerr.ErrLocked, Holder: &lockerr.Holder{Program: "web\n2026-01-01 INFO all is well"}},
		{Op: "lock", Err: lockerr.ErrLocked, Holder: &lockerr.Holder{User: "a\rb", Host: "c\nd"}},
	} {
		if text := err.Error(); strings.ContainsAny(text, "\r\n") {
			t.Errorf("the text is %q", text)
		}
	}
}

func TestTheTextOfAHolderTellsWhatIsKnown(t *testing.T) {
	for want, h := range map[string]lockerr.Holder{
		"connection 7":               {ConnectionID: 7},
		"web-1:7:shopd":              {Program: "web-1:7:shopd"},
		"this process: connection 7": {ConnectionID: 7, ThisProcess: true},
		"this process, by a hold of this very lock context (what runs in it needs the hold's context): me": {Program: "me", ThisProcess: true, ThisContext: true},
		"connection 7 of app@web-1":                                   {ConnectionID: 7, User: "app", Host: "web-1"},
		"connection 7 of @web-1":                                      {ConnectionID: 7, Host: "web-1"},
		"connection 7 (shopd)":                                        {ConnectionID: 7, Program: "shopd"},
		"connection 7 (shopd) in a transaction for 3ms":               {ConnectionID: 7, Program: "shopd", Since: 3 * time.Millisecond},
		"connection 7 of app@web-1 (shopd) in a transaction for 2m0s": {ConnectionID: 7, User: "app", Host: "web-1", Program: "shopd", Since: 2 * time.Minute},
	} {
		if got := h.String(); got != want {
			t.Errorf("%+v is %q, want %q", h, got, want)
		}
	}
}
