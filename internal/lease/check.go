package lease

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Check has a guard for each lease. A guard locks the row until the transaction ends, so that no other caller can be
// granted the lease before that. If the row is locked, the guard waits for it, but not longer than the lease lasts.
//
// The holder cannot look at its own clock between a guard and COMMIT. But the server's clock after the wait for the row,
// the owner and the token say whether anybody else can have been granted the key.
//
// A lease that ends with the transaction is also released by it, unless another caller of the process waits for the
// lease: then Release hands the lease over.
func (l *Locker) Check(_ context.Context, c *pool.Conn, held []strategy.Grant, how strategy.Commit) (check strategy.Check, err error) {
	leases := leasesOf(held)
	left, err := timeLeft(leases)
	if err != nil {
		return check, err
	}
	var checked, released []*Grant // checked: the lease of each statement
	for _, g := range leases {
		release := how.Ends && g.endsWithCommit()
		texts := l.guard(g, release, left)
		check.Before = append(check.Before, texts...)
		checked = append(checked, slices.Repeat([]*Grant{g}, len(texts))...)
		if release {
			released = append(released, g)
			g.commits(strategy.Unknown)
			if g.session == c {
				check.After = append(check.After, g.wakesSQL())
			}
		}
	}
	check.Failed = func(_ context.Context, i int, err error) error { return checked[i].refused(err) }
	check.Again = func(i int, err error) bool { return checked[i].waitsOn(err) }
	check.Ended = func(o strategy.Outcome) {
		for _, g := range released {
			g.commits(o)
			if o == strategy.Committed && g.session == c {
				g.session = nil
			}
		}
	}
	return check, nil
}

// leasesOf returns the leases of grants, in the order of their keys, each once.
func leasesOf(held []strategy.Grant) (leases []*Grant) {
	for _, h := range held {
		switch h := h.(type) {
		case *Grant:
			leases = append(leases, h)
		case *Slot:
			leases = append(leases, h.Grant)
		}
	}
	sortByKey(leases)
	return slices.Compact(leases)
}

// timeLeft returns for how long all leases still last for their holder.
func timeLeft(leases []*Grant) (left time.Duration, err error) {
	left = time.Hour // more is too long to wait, and for MAX_EXECUTION_TIME
	for _, g := range leases {
		if err := g.Err(); err != nil {
			return 0, terms.Failure("commit", g.key, err)
		}
		left = min(left, g.timeLeft())
	}
	return max(left, time.Millisecond), nil
}

// endsWithCommit reports whether the COMMIT of the transaction with which the lease ends may release it. vtgate commits
// on one shard after the other, so the lease could be free before the data is written. With statement-based logs the
// transaction may be unable to write.
func (g *Grant) endsWithCommit() bool {
	info := g.locker.cfg.Info
	if g.mayBeHandedOver() && g.ticket.HasNext(g.locker) {
		return false
	}
	return g.minHold == 0 && !info.Tablets && !info.StatementLog
}

// commits notes how the COMMIT that releases the lease has ended; it is Unknown while the COMMIT is under way.
func (g *Grant) commits(o strategy.Outcome) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.given = o == strategy.Committed || o == strategy.OnlyCommitted
	g.maybe = o == strategy.Unknown
}

// guard returns the statements in front of COMMIT for one lease. The server ends the wait for the row after bound. What
// releases the lease, on MySQL:
//
//	UPDATE mysqllock SET owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6))
//	WHERE namespace = 'app' AND name = 'k' AND token = 7 AND owner = 'me'
//
// If several nodes take writes, a change by which the lease stays:
//
//	SET STATEMENT max_statement_time = 20.000, innodb_lock_wait_timeout = 21, innodb_snapshot_isolation = OFF FOR
//	INSERT INTO mysqllock (namespace, name, owner, token, expires)
//	SELECT r.namespace, r.name, r.owner, r.token, r.expires FROM (SELECT 'k' AS n, 7 AS k, 0 AS ttl) d
//	STRAIGHT_JOIN mysqllock r ON r.namespace = 'app' AND r.name = d.n AND r.token = d.k AND r.owner = 'me'
//	WHERE (TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) NOT BETWEEN 0 AND 3600
//	  OR r.expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND) FOR UPDATE
//	ON DUPLICATE KEY UPDATE expires = r.expires + INTERVAL 1 MICROSECOND
func (l *Locker) guard(g *Grant, release bool, bound time.Duration) []string {
	lasts := schema.Lasts("r.")
	if l.cfg.Info.Topology != "" { // only a write is seen by all nodes
		set := touch
		if release {
			set = l.leave()
		}
		write := l.changeSQL([]*Grant{g}, func(*Grant) time.Duration { return 0 }, lasts, set, "")
		return []string{l.bounded(write, bound), l.cfg.Info.Guard("ROW_COUNT() > 0")}
	}
	lock := l.cfg.Info.Share
	if release || lock == "" {
		lock = " FOR UPDATE"
	}
	texts := []string{l.guardSQL(g, lasts, lock, bound)}
	if release {
		texts = append(texts, l.bounded(fmt.Sprintf("UPDATE %s SET %s WHERE %s AND token = %d AND owner = %s",
			l.cfg.Table, schema.Released, l.row("", g.key), g.token, schema.Literal(l.owner)), bound))
	}
	return texts
}

// guardSQL locks the row, whatever is in it, and fails if the lease is not held, or has no row. LIMIT is in place of
// sql_select_limit. With subquery_to_derived, MySQL would evaluate the subquery that makes the statement fail in any
// case: in a SELECT with a table it turns the subquery into a derived table. On MySQL:
//
//	SELECT /*+ MAX_EXECUTION_TIME(20000) SET_VAR(optimizer_switch='subquery_to_derived=off') */ IF(
//	  MAX(r.token = 7 AND r.owner = 'me' AND (TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) NOT BETWEEN 0 AND 3600
//	    OR r.expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND)),
//	  1, (SELECT 1 UNION ALL SELECT 2))
//	FROM mysqllock r WHERE r.namespace = 'app' AND r.name = 'k' LIMIT 1 FOR SHARE
func (l *Locker) guardSQL(g *Grant, lasts, lock string, bound time.Duration) string {
	held := fmt.Sprintf("MAX(r.token = %d AND r.owner = %s AND %s)", g.token, schema.Literal(l.owner), lasts)
	hint, tail := "", ""
	if !l.cfg.Info.Settings {
		hint, tail = l.cfg.Info.Within(bound)
	}
	if l.cfg.Info.Hints {
		hint = strings.Replace(hint, " */", " SET_VAR(optimizer_switch='subquery_to_derived=off') */", 1)
	}
	return l.bounded("SELECT "+hint+l.cfg.Info.Require(held)+
		" FROM "+l.cfg.Table.String()+" r WHERE "+l.row("r.", g.key)+" LIMIT 1"+lock+tail, bound)
}

// bounded makes MariaDB end a statement after bound; MySQL ends a guard by a hint. It also lets MariaDB lock rows that
// have changed since the transaction's snapshot, such as the row of a renewed lease. The application's
// innodb_lock_wait_timeout may be shorter than bound.
//
//	SET STATEMENT max_statement_time = 20.000, innodb_lock_wait_timeout = 21, innodb_snapshot_isolation = OFF FOR …
func (l *Locker) bounded(text string, bound time.Duration) string {
	if !l.cfg.Info.Settings {
		return text
	}
	settings := fmt.Sprintf("max_statement_time = %.3f, innodb_lock_wait_timeout = %d",
		math.Ceil(bound.Seconds()*1000)/1000, int64(bound/time.Second)+1)
	if l.cfg.Info.SnapshotIsolation {
		settings += ", innodb_snapshot_isolation = OFF"
	}
	return "SET STATEMENT " + settings + " FOR " + text
}

// waitsOn reports whether only the application's innodb_lock_wait_timeout has ended a guard, on MySQL, while the lease
// lasts: then the guard goes on to wait.
func (g *Grant) waitsOn(err error) bool {
	info := g.locker.cfg.Info
	return server.Locked(err) && info.Topology == "" && !info.EndsTransaction(err) && g.Err() == nil
}

// refused explains the error of a statement before COMMIT.
func (g *Grant) refused(err error) error {
	switch {
	case server.Stopped(err):
		why := g.whyNotOurs()
		g.lose(why)
		err = g.Err() // the holder's context ends with the same error
		if !errors.Is(err, lockerr.ErrLost) {
			err = lockerr.With(lockerr.ErrLost, why)
		}
	case server.Number(err) == server.QueryInterrupted: // the server's own limits have other numbers
		err = lockerr.With(lockerr.ErrLost, fmt.Errorf("the check of the lease was ended by a KILL: %w", err))
	case server.Interrupted(err), server.Locked(err):
		err = lockerr.With(lockerr.ErrLost, fmt.Errorf("somebody has locked the row for as long as the lease lasts: %w", err))
	}
	return terms.Failure("commit", g.key, err)
}
