package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// check returns why nothing can run in the lock context any more, or inside the
// holds around it. A unit of work that a read has begun in a hold ends here, if the hold
// has ended.
func (s *scope) check(h *hint.Hint) error {
	if s.unit != nil {
		s.unit.inTime()
	}
	if s.unit != nil {
		s.unit.outlivesHold()
	}
	s.inTime()
	for _, g := range s.guards {
		if err := g.overError("statement"); err != nil {
			s.fail(err)
			return err
		}
	}
	if s.failed != nil {
		return s.failed
	}
	if h == nil {
		return nil
	}
	return checkEnclosing(h)
}

// undecided returns lockerr.ErrStaleRead where st writes and a decision is outstanding. u is
// the unit that it is to run in; nil where that is still to begin.
func (s *scope) undecided(h *hint.Hint, u *unit, st *statement.Statement) error {
	var in *relying
	if u != nil {
		in = &u.relying
	}
	err := s.refuses(h, in, st)
	if on := s.stale.on.Load(); err == nil && on != nil && on != s.k && st.Info.Changes != sqltext.ChangesNothing &&
		(h == nil || !h.AllowStale) && (in == nil || !in.fresh && !in.allowStale) {
		err = errReadElsewhere
	}
	switch {
	case err == nil:
		return nil
	case u != nil:
		return u.error(st.Op(), err)
	}
	return s.k.Error(st.Op(), h, err)
}

// What is read through one database handle, and written through another one, as GORM's
// dbresolver does it, is under two locks, or under none.
var (
	errReadElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the lock context has read through another database handle, under a lock that is another one, or is not kept to the end of this statement; "+
			"read through the handle that writes (with GORM's dbresolver by Clauses(dbresolver.Write)), in a transaction, or with lockctx.Without"))
	errHeldElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the lock context holds a lock through another database handle, and what this query reads is not under that; "+
			"read through the handle that holds it (with GORM's dbresolver by Clauses(dbresolver.Write)), or with lockctx.Without"))
)

// lost is called when a guard of the unit of work may be lost.
func (s *scope) lost(g *guard) {
	s.k.Doubt()
	_ = s.take(context.Background())
	defer s.give()
	if slices.Contains(s.guards, g) {
		g.lost()
		s.fail(g.overError("statement"))
	}
}

// fail ends the unit of work, which has lost a guard.
func (s *scope) fail(cause error) {
	if s.until != nil {
		s.failed = cause // what was decided under it must not be written without it
	}
	if s.unit != nil {
		s.unit.fail(cause, false)
	}
	s.dropSpent()
}
