package appconn

import (
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// Texts is what the driver knows of a connection from the plain SQL texts that have run on it. Such
// texts begin and end transactions that the driver has not begun, and set isolation levels.
type Texts struct {
	State   sqltext.State  // autocommit, and whether a transaction is open
	sure    bool           // State takes into account whether the connection began in autocommit
	session sqltext.Levels // isolation levels of transactions from now on; 0 for those of a new connection
	next    bool           // a text may have set something for the next transaction alone
}

// Note remembers what a text has done that has run on the connection. After a query that is not
// certain: it may have further results, and nobody knows yet whether their statements run.
func (t *Texts) Note(info sqltext.Info, query bool, err error) {
	if errors.Is(err, driver.ErrSkip) { // nothing has run
		return
	}
	whole := err == nil && !query
	does := info.Effect != (sqltext.Effect{})
	if does {
		t.noteEffect(info.Effect, whole)
	}
	switch {
	case info.SetsNextLevel:
		t.next = true
	case does && whole && sqltext.Idle.After(info.Effect) == sqltext.Open: // the transaction that it was for has begun
		t.next = false
	}
	if info.SetsLevel || info.SetsNextLevel && !whole {
		t.session = sqltext.AnyLevel
	}
}

// noteEffect notes the effect of a text. whole: all of the text has run; else perhaps only a part.
func (t *Texts) noteEffect(e sqltext.Effect, whole bool) {
	if whole {
		t.State = t.State.After(e)
	} else {
		t.State = t.State.Within(e)
	}
}

// beginEffect and endEffect are what BeginTx, and Commit and Rollback, do to the state of a connection.
var (
	beginEffect = sqltext.Look("BEGIN").Effect
	endEffect   = sqltext.Look("COMMIT").Effect
)

// NoteBegin notes that BeginTx has begun a transaction. well: the base driver says so; else it may have.
func (t *Texts) NoteBegin(well bool) {
	if well {
		t.next = false
	}
	t.noteEffect(beginEffect, well)
}

// NoteEnd notes that Commit or Rollback has ended a transaction. well is as for NoteBegin.
func (t *Texts) NoteEnd(well bool) {
	if t.State != sqltext.Idle {
		t.noteEffect(endEffect, well)
	}
}

// Began notes whether connections begin in autocommit, once that is known. manual: they do not.
func (t *Texts) Began(manual bool) {
	if !t.sure && manual {
		t.State = sqltext.Unknown
	}
	t.sure = true
}

// SetsNext reports whether a text may have said which level the next transaction has, or that it only reads, and that has
// not begun yet.
func (t *Texts) SetsNext() bool { return t.next }
