package advisory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Check has a guard, which stops the COMMIT if the server does not say that the locks are held. If the lock that c
// itself holds ends with the transaction, a statement behind COMMIT releases it. The guard on the session that holds the
// lock itself:
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ IF(CONNECTION_ID() = 12 AND IS_USED_LOCK(_utf8mb4'mysqllock-carrier-…') = 12
//	  AND IS_USED_LOCK(_utf8mb4'mysqllock:app/k') = 12, 1, (SELECT 1 UNION ALL SELECT 2)) LIMIT 1
func (as asStrategy) Check(
	ctx context.Context, c *pool.Conn, held []strategy.Grant, how strategy.Commit,
) (check strategy.Check, err error) {
	locks, keys := make([]*Grant, len(held)), make([]string, len(held))
	var own *Grant // the lock that c itself holds
	for i, h := range held {
		lock := h.(*Grant)
		if err := lock.Err(); err != nil {
			return check, terms.Failure("commit", lock.key, err)
		}
		if locks[i], keys[i] = lock, lock.key; lock.session == c {
			own = lock
		}
	}
	failure := func(err error) error { return terms.Failure("commit", strings.Join(keys, ", "), err) }
	id, err := c.ID(ctx)
	if err != nil {
		return check, failure(err)
	}
	end, err := beginCommits(locks)
	if err != nil {
		return check, err
	}
	check.Ended = func(strategy.Outcome) { end() }
	check.Before = []string{as.cfg.Info.Guard(fmt.Sprintf("CONNECTION_ID() = %d AND %s", id, heldSQL(locks)))}
	check.Failed = func(_ context.Context, _ int, err error) error {
		if server.Stopped(err) {
			err = lockerr.With(lockerr.ErrLost, errors.New("the transaction's server says that another connection holds the lock, or none"))
		}
		return failure(err)
	}
	if own != nil && how.Ends {
		check.After = []string{own.releaseSQL()}
		check.Ended = func(o strategy.Outcome) {
			if end(); o == strategy.Committed {
				own.isFree()
			}
		}
	}
	check.Unsure = func(ctx context.Context) {
		if own != nil && len(locks) == 1 { // c holds the lock until its COMMIT is over
			var cancel context.CancelFunc
			ctx, cancel = server.Within(ctx, slack)
			defer cancel()
		}
		as.awaitEnd(ctx, id, locks)
	}
	return check, nil
}

// beginCommits notes that a COMMIT is about to check locks, until end. It fails if one of them is over. A session's own lock
// is not noted: it ends with its COMMIT, whatever Release does.
func beginCommits(locks []*Grant) (end func(), err error) {
	var noted []*Grant
	end = func() {
		for _, lock := range noted {
			lock.endCommit()
		}
	}
	for _, lock := range locks {
		if lock.session != nil {
			continue
		}
		l := lock.locker
		l.mu.Lock()
		if err = lock.err; err == nil {
			lock.commits++
		}
		l.mu.Unlock()
		if err != nil {
			end()
			return nil, terms.Failure("commit", lock.key, err)
		}
		noted = append(noted, lock)
	}
	return end, nil
}

// endCommit is the end of a COMMIT that beginCommits has noted.
func (g *Grant) endCommit() {
	g.locker.mu.Lock()
	defer g.locker.mu.Unlock()
	if g.commits--; g.commits == 0 && g.quiet != nil {
		close(g.quiet)
		g.quiet = nil
	}
}

// commitLimit is how long Release waits for COMMITs.
const commitLimit = 30 * time.Second

// awaitCommits waits until no COMMIT is under way that has checked the lock, for up to commitLimit.
func (g *Grant) awaitCommits() {
	g.locker.mu.Lock()
	if g.commits > 0 && g.quiet == nil {
		g.quiet = make(chan struct{})
	}
	quiet := g.quiet
	g.locker.mu.Unlock()
	if quiet == nil {
		return
	}
	select {
	case <-quiet:
	case <-time.After(commitLimit):
	}
}

// awaitEnd is called after a COMMIT whose answer was lost with its session. The server may still be running the COMMIT, and
// the next holder of the locks would read the state before it. So awaitEnd makes the server end the session with that id.
// It returns when the session has ended, when the locks are lost, or when ctx ends. If the server does not say that the
// locks are held, the server may have been restarted, and the id may be that of another connection: then awaitEnd does
// not end it.
func (l *Locker) awaitEnd(ctx context.Context, id uint64, locks []*Grant) {
	for {
		over, err := l.cfg.Control.EndConnection(ctx, id, heldSQL(locks))
		lost := slices.ContainsFunc(locks, func(lock *Grant) bool { return lock.Err() != nil })
		if err == nil && over || lost || !strategy.Sleep(ctx, glance) {
			return
		}
	}
}

// glance is how often awaitEnd checks.
const glance = 20 * time.Millisecond
