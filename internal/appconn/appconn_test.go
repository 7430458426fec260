package appconn

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// TestTextsLeaveAConnectionAsTheServerHasIt: after texts that have run one after the other; "!" in front says that the text
// has failed.
func TestTextsLeaveAConnectionAsTheServerHasIt(t *testing.T) {
	for texts, want := range map[string]struct {
		state    sqltext.State
		session  sqltext.Levels
		setsNext bool
	}{
		"SELECT 1":                        {state: sqltext.Idle},
		"BEGIN":                           {state: sqltext.Open},
		"BEGIN|UPDATE t SET n = 1|COMMIT": {state: sqltext.Idle},
		"SET autocommit = 0":              {state: sqltext.Manual},
		"!BEGIN":                          {state: sqltext.Idle | sqltext.Open},
		"SET TRANSACTION ISOLATION LEVEL READ COMMITTED":                {state: sqltext.Idle, setsNext: true},
		"SET TRANSACTION ISOLATION LEVEL READ COMMITTED|SELECT 1":       {state: sqltext.Idle, setsNext: true},
		"SET TRANSACTION ISOLATION LEVEL READ COMMITTED|BEGIN|ROLLBACK": {state: sqltext.Idle},
		"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED":        {state: sqltext.Idle, session: sqltext.AnyLevel},
		"!SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED":       {state: sqltext.Idle, session: sqltext.AnyLevel},
		"!SET TRANSACTION ISOLATION LEVEL READ COMMITTED":               {state: sqltext.Idle, session: sqltext.AnyLevel, setsNext: true},
	} {
		c := New(nil)
		for text := range strings.SplitSeq(texts, "|") {
			text, failed := strings.CutPrefix(text, "!")
			var err error
			if failed {
				err = errors.New("the server has refused it")
			}
			c.Texts.Note(sqltext.Look(text), false, err)
		}
		got, said := c.Texts, fmt.Sprintf("%+v", want)
		if got.State != want.state || got.session != want.session || got.SetsNext() != want.setsNext {
			t.Errorf("after %q it is %+v, want %s", texts, got, said)
		}
		if pristine := want.state == sqltext.Idle && want.session == 0 && !want.setsNext; c.Pristine() != pristine {
			t.Errorf("after %q it is like new: %v", texts, !pristine)
		}
	}
}

// TestABeginTxUsesUpTheLevelOfTheNextTransaction, if the base driver says that it has begun.
func TestABeginTxUsesUpTheLevelOfTheNextTransaction(t *testing.T) {
	for _, well := range []bool{true, false} {
		c := New(nil)
		c.Texts.Note(sqltext.Look("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"), false, nil)
		c.Texts.NoteBegin(well)
		if c.Texts.SetsNext() == well {
			t.Errorf("begun %v: the next transaction has a level of its own: %v", well, !well)
		}
		if c.Texts.NoteEnd(true); c.Texts.State != sqltext.Idle {
			t.Errorf("begun %v: after its end it is %v", well, c.Texts.State)
		}
	}
}

// kept is a prepared statement that notes when it is closed.
type kept struct {
	driver.Stmt
	closed *int
}

func (k kept) Close() error {
	*k.closed++
	return nil
}

type noConn struct{ driver.Conn }

// TestTheStatementUsedLongestAgoIsClosedForANewOne: a connection keeps 64 of them.
func TestTheStatementUsedLongestAgoIsClosedForANewOne(t *testing.T) {
	var s Statements
	closed := make([]int, maxStmts+1)
	for n := range maxStmts {
		s.keep(noConn{}, fmt.Sprint(n), "", kept{closed: &closed[n]})
	}
	if s.find("0", "i") == nil { // has run with a number
		t.Fatal("it has not kept the first one")
	}
	s.keep(noConn{}, fmt.Sprint(maxStmts), "", kept{closed: &closed[maxStmts]})
	for n, times := range closed {
		if want := map[bool]int{true: 1}[n == 1]; times != want {
			t.Errorf("statement %d was closed %d times, want %d", n, times, want)
		}
	}
	if s.find("0", "s") != nil {
		t.Error("a statement that has run with a number is taken for a text")
	}
	if s.Forget(); s.find("0", "i") == nil || closed[0] != 0 {
		t.Error("forgotten statements are closed before the next is prepared")
	}
	if s.closeKept(noConn{}); closed[0] != 1 || closed[maxStmts] != 1 || s.find("0", "i") != nil {
		t.Errorf("not all are closed: %v", closed)
	}
}
