package statement

import (
	"errors"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Claim makes a SELECT a locking read. Other statements stay as they are.
func (s *Statement) Claim(how hint.Locking) error {
	text, err := sqltext.Lock(s.Text, clause(how))
	if err != nil {
		return &lockerr.Error{Op: s.Op(), Err: lockerr.With(lockerr.ErrUnsafe, err)}
	}
	if s.Claims = text != s.Text; s.Claims {
		plain, _ := sqltext.Lock(s.Text, "FOR UPDATE")
		s.Info = sqltext.Look(plain)
		s.Text, s.Stmt, s.AtOnce = text, nil, how.NoWait
	}
	return nil
}

// clause is in the spelling of both servers. Each of them skips the comment that
// is meant for the other; one that is too old for it finds an error there.
func clause(how hint.Locking) string {
	tail := ""
	switch {
	case how.SkipLocked:
		tail = " SKIP LOCKED"
	case how.NoWait:
		tail = " NOWAIT"
	}
	switch {
	case how.Update:
		return "FOR UPDATE" + tail
	case tail == "":
		return "LOCK IN SHARE MODE"
	}
	return "/*!50700 FOR SHARE" + tail + " */ /*M! LOCK IN SHARE MODE" + tail + " */"
}

// Unclaimed is the answer to a claim that would be over as soon as it is made.
func (s *Statement) Unclaimed() error {
	return &lockerr.Error{Op: s.Op(), Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
		"outside of a transaction the rows that ForUpdate, ForShare or SkipLocked lock would be free again at once; run the SELECT in one"))}
}
