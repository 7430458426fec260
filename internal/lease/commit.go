package lease

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Commit is Fence and COMMIT in one statement, so that a lock connection which vanishes between
// the two leaves no row locked: see [strategy.Check]. ctx bounds the wait for the server's answer.
//
// The holder cannot look at its own clock between the two. The server's clock after the
// wait for the row, the owner and the token say whether anybody else can have been
// granted the key.
func (l *Locker) Commit(ctx context.Context, c *pool.Conn, leases []*Lease) (done, unknown bool, err error) {
	ctx = about(ctx, purpose.Fence, leases...)
	leases = slices.Clone(leases)
	sortByKey(leases)
	leases = slices.Compact(leases)
	if len(leases) == 0 || l.cfg.Info.Topology != "" || sabotage.SlowFence.Load() {
		return false, false, nil // only a write is seen by all nodes
	}
	text := l.commitBlock
	if !l.cfg.Info.Blocks {
		text = l.commitCall
	}
	outcome, err := l.commit(ctx, c, leases, l.cfg.Table.CommitProcedure(), func(left time.Duration, mark string) pool.Block { return pool.Block{Text: text(leases, left, mark)} })
	return outcome.Done(), outcome == server.Unknown, err
}

// commit is Commit by the statement of block, which calls that procedure.
func (l *Locker) commit(ctx context.Context, c *pool.Conn, leases []*Lease, by schema.Procedure, block func(left time.Duration, mark string) pool.Block) (server.Outcome, error) {
	if !l.cfg.Procedures.Has(by) {
		return server.NoWay, nil
	}
	for {
		left, err := timeLeft(leases)
		if err != nil {
			return server.Failed, err
		}
		mark := "" // a MySQL Router shares no connection that has user variables
		if !l.cfg.Info.Router {
			mark = pool.NewMark()
		}
		rows, err := c.QueryBlock(ctx, block(left, mark))
		outcome, err := server.CheckedOutcome(ctx, c.Conn, mark, rows, err)
		switch {
		case outcome == server.NoWay:
			l.cfg.Procedures.Set(by, l.cfg.Info.Blocks)
			return outcome, nil
		case outcome == server.CheckFailed:
			return outcome, l.Fence(ctx, c.Conn, leases) // which tells which of them it is
		case outcome.Done():
			return outcome, nil
		}
		// No wait in a procedure is bounded.
		if outcome == server.Failed && server.Locked(err) && !l.cfg.Info.Settings && !l.cfg.Info.EndsTransaction(err) &&
			strategy.Sleep(ctx, min(left, time.Millisecond+rand.N(4*time.Millisecond))) {
			continue
		}
		return outcome, fenceError(leases, err)
	}
}

// timeLeft is how long the first of leases to run out still lasts for its holder.
func timeLeft(leases []*Lease) (left time.Duration, err error) {
	left = time.Hour // more is too long to wait, and for MAX_EXECUTION_TIME
	for _, s := range leases {
		if err := s.Err(); err != nil {
			return 0, terms.Failure("commit", s.key, err)
		}
		if !sabotage.SlowFence.Load() {
			left = min(left, s.left())
		}
	}
	return max(left, time.Millisecond), nil
}

// fenceError is the error of a fence on leases that was not answered, or refused.
func fenceError(leases []*Lease, err error) error {
	if server.Interrupted(err) || server.Locked(err) {
		err = lockerr.With(lockerr.ErrLost, fmt.Errorf("somebody has locked the row for as long as the lease lasts: %w", err))
	}
	keys := make([]string, len(leases))
	for i, s := range leases {
		keys[i] = s.key
	}
	return terms.Failure("commit", strings.Join(keys, ", "), err)
}

// commitCall calls the procedure, which answers where it has not committed.
func (l *Locker) commitCall(leases []*Lease, _ time.Duration, mark string) string {
	rows := make([]string, len(leases))
	for i, s := range leases {
		rows[i] = fmt.Sprintf(`["%x", %d, "%x"]`, s.key, s.token, s.l.owner)
	}
	return fmt.Sprintf("CALL %s(%s, '[%s]', %s) /* fence and COMMIT */", l.cfg.Table.CommitProcedure(), schema.Literal(l.cfg.Namespace), strings.Join(rows, ", "), schema.Name(mark))
}

// commitBlock is the same as an anonymous block, on MariaDB. sql_mode ORACLE declares
// variables elsewhere, so it has one of the session's.
func (l *Locker) commitBlock(leases []*Lease, bound time.Duration, mark string) string {
	var b strings.Builder
	b.WriteString("BEGIN NOT ATOMIC SET @mysqllock_held = 0; ")
	for _, s := range leases {
		b.WriteString(l.bounded(fmt.Sprintf("SELECT @mysqllock_held + COUNT(*) INTO @mysqllock_held FROM %s r WHERE %s AND r.token = %d AND r.owner = %s AND %s LOCK IN SHARE MODE; ",
			l.cfg.Table, l.row("r.", s.key), s.token, schema.Literal(s.l.owner), schema.Lasts("r.")), bound))
	}
	fmt.Fprintf(&b, "IF @mysqllock_held = %d THEN COMMIT; SET @mysqllock_done = '%s'; ELSE SELECT 0; END IF; END", len(leases), mark)
	return b.String()
}
