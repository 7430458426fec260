package advisory

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Check verifies that the locks are held, on the connection of a transaction that is
// about to commit. It runs one statement, which waits for no lock. id is the server's id
// of the connection, for [Locker.AwaitEnd]. After an error the transaction must be
// rolled back.
func (l *Locker) Check(ctx context.Context, conn driver.Conn, locks []*Lock) (id uint64, err error) {
	if len(locks) == 0 {
		return 0, nil
	}
	keys, err := held(locks)
	if err != nil {
		return 0, err
	}
	rows, err := server.Query(purpose.Named(ctx, purpose.Fence, hint.StrategyAdvisory, keys...), conn, checkSQL(locks))
	switch {
	case err != nil:
	case len(rows) != 1 || len(rows[0]) != 2 || rows[0][0] != "1":
		err = lockerr.With(lockerr.ErrLost, errors.New("the transaction's server says that another connection holds the lock, or none"))
	default:
		id, err = strconv.ParseUint(rows[0][1], 10, 64)
	}
	if err != nil {
		return 0, terms.Failure("commit", strings.Join(keys, ", "), err)
	}
	return id, nil
}

// Commit is Check and COMMIT in one statement, on the connection c, and the release of the lock
// ends, which c holds, unless that is nil. done is false with a nil error if the server has no
// way for that, or if the check fails: then call Check, which tells why, and commit. If unknown
// is true with an error, the transaction may be committed, as after any COMMIT; else it is not,
// and must be rolled back.
func (l *Locker) Commit(ctx context.Context, c *pool.Conn, locks []*Lock, ends *Lock) (done, unknown bool, err error) {
	keys, err := held(locks)
	if err != nil {
		return false, false, err
	}
	mark := pool.NewMark()
	ctx = purpose.Named(ctx, purpose.Fence, hint.StrategyAdvisory, keys...)
	rows, err := c.QueryBlock(ctx, l.commitBlock(c.KnownID(), locks, ends, mark))
	outcome, err := server.CheckedOutcome(ctx, c.Conn, mark, rows, err)
	switch {
	case outcome == server.NoWay:
		l.cfg.Procedures.Set(l.cfg.Table.CommitIfProcedure(), false)
	case outcome == server.Committed && ends != nil:
		ends.isFree()
	}
	if err != nil {
		err = terms.Failure("commit", strings.Join(keys, ", "), err)
	}
	return outcome.Done(), outcome == server.Unknown, err
}

// commits reports whether Commit has a way on this server. Where the procedures have to be
// looked for, that is done meanwhile, for those who come later. A MySQL Router shares no
// connection that has user variables.
func (l *Locker) commits() bool {
	if l.cfg.Info.Router || !l.cfg.Info.Blocks && l.cfg.Table == (schema.Table{}) {
		return false
	}
	commit, begin := l.cfg.Table.CommitIfProcedure(), l.cfg.Table.NamedProcedure()
	l.cfg.Procedures.LookLater(l.running.Background, commit, begin)
	return l.cfg.Procedures.Has(commit, begin)
}

// held returns the keys of locks that are held, as far as this process knows.
func held(locks []*Lock) (keys []string, err error) {
	for _, lock := range locks {
		if err := lock.Err(); err != nil {
			return nil, terms.Failure("commit", lock.key, err)
		}
		keys = append(keys, lock.key)
	}
	return keys, nil
}

// AwaitEnd is for after a COMMIT whose answer was lost with its connection. The server
// may still be running the COMMIT, and the next holder of the locks would read the state
// before it. AwaitEnd makes the server end the connection with that id. It returns when
// the connection has ended, when the locks are lost, or when ctx ends. If the server does
// not say that the locks are held, it may have been restarted, and the id may be that of
// another connection: AwaitEnd does not end it.
func (l *Locker) AwaitEnd(ctx context.Context, id uint64, locks []*Lock) {
	for {
		over, err := l.cfg.Control.EndConnection(ctx, id, heldSQL(locks))
		lost := slices.ContainsFunc(locks, func(lock *Lock) bool { return lock.Err() != nil })
		if err == nil && over || lost || !strategy.Sleep(ctx, glance) {
			return
		}
	}
}

// glance is how often AwaitEnd checks.
const glance = 20 * time.Millisecond
