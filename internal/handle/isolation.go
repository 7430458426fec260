package handle

import (
	"errors"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockerr"
)

// StaleSnapshot reports whether a transaction of these levels, which has read or not,
// goes on to show what was there before it has the locks of h. A version that is to be
// remembered says nothing of what was read before.
func (l *Locks) StaleSnapshot(read, versions bool, h *hint.Hint, levels sqltext.Levels) bool {
	switch {
	case !read && !l.Info().EarlySnapshot, h.AllowStale && !versions:
		return false
	case levels == 0:
		return l.Info().RepeatableRead()
	}
	return levels&(sqltext.RepeatableRead|sqltext.Serializable) != 0
}

// LockedLevel is the isolation level of a transaction that begins with a row lock, or on a
// session; 0 for that of a new connection.
func (l *Locks) LockedLevel() sqltext.Levels {
	if l.Info().EarlySnapshot {
		return sqltext.ReadCommitted
	}
	return 0
}

// Dirty returns why a unit of work that compares versions is of no use at one of
// these levels, if so.
func (l *Locks) Dirty(levels sqltext.Levels) error {
	if levels == 0 {
		levels = sqltext.Level(l.Info().Isolation)
	}
	if levels&sqltext.ReadUncommitted == 0 {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, errors.New(
		"at READ UNCOMMITTED what is read may be rolled back, and no version tells; read at READ COMMITTED or above with lockctx.Optimistic"))
}
