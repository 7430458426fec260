package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// lastWrite is what came of the COMMIT of a unit that went out in one text with a write.
type lastWrite struct {
	err    error // why the COMMIT has failed; nil if the unit is committed
	locked bool  // the key is locked for the next caller
}

// joins reports whether a caller's statement may stand beside those of the driver in one text. The text
// must be known to be one statement that does what its first word says, the server must take such
// texts, and nobody may look at each statement by itself.
func joins(st *statement.Statement, info server.Info) bool {
	return st.Joins() && info.Kills && info.Topology == "" && !info.Router && !handle.Listening()
}

// joinsCommit reports whether st can go out in one text with COMMIT: the session takes such texts, the server counts the rows
// that st changes, and nothing is to be asked before COMMIT.
func (u *unit) joinsCommit(st *statement.Statement) bool {
	nothingToAsk := len(u.ctxState.grants.list)+len(u.outer)+len(u.atCommit.doubts) == 0 && !u.rowLocks.raises
	endsByText := u.opts == (driver.TxOptions{}) && !u.ctxState.handle.ByCalls() && !u.inside()
	return st.Last && !st.Query && u.session.Packs() && nothingToAsk && endsByText && joins(st, u.l.Info())
}

// certain limits how long a caller whose context has ended is kept for the answer to a write with COMMIT
// behind it. Without the answer nobody knows what has become of the write.
var certain = strategy.Limits{GiveUp: time.Second, Calmly: time.Second}

// counted is the result of a write that went out with COMMIT. It has no id: an UPDATE or a DELETE without
// a call of a function makes none.
type counted struct {
	rows    int64
	unknown error // why nobody knows how many rows the write has changed, if any
}

func (c counted) RowsAffected() (int64, error) { return c.rows, c.unknown }

func (c counted) LastInsertId() (int64, error) { return 0, nil }

// runLast runs a write with the COMMIT of the unit behind it. If the write changes nothing, and the caller
// has decided on it by what the unit has read, the unit stays open. An error is that of the write:
// nothing is committed then. Else u.atCommit.last is what came of the COMMIT.
func (u *unit) runLast(ctx context.Context, st *statement.Statement) (driver.Result, error) {
	texts := []string{server.Rows, "COMMIT"}
	if u.ctxState.decision.readStands {
		texts[0] = server.Counted
	}
	var handoff *rowlock.Handoff
	if u.mayPassOn() && u.rowLocks.handoff.LocksNext() {
		handoff = u.rowLocks.handoff
		texts = append(texts, handoff.NextSQL())
	}
	lp := newPacket(u.l, u.session, st)
	lp.send(ctx, func(own context.Context) (err error) {
		lp.answers, err = server.SendBehind(own, u.session.Conn, lp.text(), st.Args, texts...)
		return err
	})
	if len(lp.answers) == 0 && server.Unchanged(lp.err) {
		return counted{}, nil
	}
	var res driver.Result
	res, u.atCommit.last, lp.err = lp.outcome(ctx, handoff)
	return res, lp.err
}

// lastPacket is a text with a write and COMMIT behind it, perhaps with the driver's own statements around
// the two.
type lastPacket struct {
	l    *handle.Locks
	conn *pool.Conn
	st   *statement.Statement
	mark string

	answers [][][]string // the answers to what is behind the write
	stopped bool         // the server was told to end the packet, since its caller has gone
	usable  bool         // the connection can be used on
	err     error
}

func newPacket(l *handle.Locks, conn *pool.Conn, st *statement.Statement) *lastPacket {
	return &lastPacket{l: l, conn: conn, st: st, mark: pool.NewMark()}
}

// text returns the text of the write, with its mark.
func (lp *lastPacket) text() string { return pool.Marked(lp.mark) + lp.st.Text }

// send sends the packet by do.
func (lp *lastPacket) send(ctx context.Context, do func(context.Context) error) {
	killable := strategy.Killable{Limits: certain, Conn: lp.conn, Mark: lp.mark, Control: lp.l.Control}
	lp.stopped, lp.usable, lp.err = killable.Run(ctx, do)
	if !lp.usable {
		lp.l.RowLocks.EndQuery(ctx, lp.mark) // else the packet may go on to its COMMIT long after its caller has gone
	}
}

// refused reports whether nothing was sent, or the server has refused the first statement without an
// answer.
func (lp *lastPacket) refused() bool {
	return server.Number(lp.err) != 0 || errors.Is(lp.err, driver.ErrBadConn) || errors.Is(lp.err, driver.ErrSkip)
}

// outcome returns what has come of the write: an error if nothing is committed, or the write's result and
// what has come of the COMMIT. handoff locks the key for the next caller behind COMMIT; nil for nobody.
func (lp *lastPacket) outcome(ctx context.Context, handoff *rowlock.Handoff) (driver.Result, *lastWrite, error) {
	switch {
	case len(lp.answers) > 0:
	case lp.stopped && server.Uncounted(lp.err):
		_ = lp.conn.Close() // as after any statement whose context ends
		return nil, nil, ctx.Err()
	case server.Uncounted(lp.err):
		return nil, nil, lockerr.With(lockerr.ErrLost, fmt.Errorf("the write, or the count of its rows, was ended, "+
			"so the transaction is rolled back: %w", lp.err))
	case lp.refused():
		return nil, nil, lp.err
	default:
		return counted{unknown: lp.err}, &lastWrite{err: lp.err}, nil
	}
	last := new(lastWrite)
	switch committed := len(lp.answers) > 1; {
	case !committed:
		if last.err = lp.err; server.Interrupted(lp.err) && !server.Locked(lp.err) {
			_, last.err = server.Uncommitted(context.WithoutCancel(ctx), lp.conn.Conn, lp.err)
		}
	case handoff != nil && lp.usable:
		last.locked = handoff.Locked(context.WithoutCancel(ctx), lp.answers[2:], lp.err)
	case lp.err != nil:
		lp.conn.Taint()
	}
	if len(lp.answers[0]) != 1 {
		return counted{unknown: server.ErrAnswers}, last, nil
	}
	n, err := strconv.ParseFloat(lp.answers[0][0][0], 64)
	return counted{int64(n), err}, last, nil
}

// query sends a caller's query in one text with the lock statement, behind it. A query that the driver's own KILL has ended
// runs again.
func query(st *statement.Statement) *rowlock.Behind {
	return &rowlock.Behind{
		Send: func(
			ctx context.Context, conn *pool.Conn, limit time.Duration, lock, mark string, granted func([][]string) error,
		) error {
			return server.SendInFront(ctx, conn.Conn, limit, lock, mark+st.Text, st.Args, granted, st.Answered)
		},
		Stopped: func() {
			if st.Sent != nil && server.Number(st.Sent.Err) == server.QueryInterrupted {
				st.Sent = nil
			}
		},
	}
}

// alone sends the write of a unit that does nothing else, behind the lock statement and in front of COMMIT.
// The lock statement is aloneSQL of package rowlock:
//
//	/* mysqllock 6f1c */ SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), MAX(token), … FOR UPDATE NOWAIT;
//	/* mysqllock 6f1c */ UPDATE products SET stock = 1 WHERE id = 42
//	; SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ ROW_COUNT() LIMIT 1; COMMIT
func (o *opener) alone(st *statement.Statement) *rowlock.Behind {
	return &rowlock.Behind{Writes: true, Send: func(
		ctx context.Context, conn *pool.Conn, limit time.Duration, lock, _ string, granted func([][]string) error,
	) error {
		lp, locked := newPacket(o.p.l, conn, st), false
		lp.send(ctx, func(own context.Context) (err error) {
			lp.answers, err = server.SendBetween(own, conn.Conn, limit, pool.Marked(lp.mark)+lock, func(answer [][]string) error {
				err := granted(answer)
				locked = err == nil
				return err
			}, lp.text(), st.Args, server.Rows, "COMMIT")
			return err
		})
		switch unlocked := !locked && lp.refused(); { // else the write may have run
		case unlocked && lp.stopped:
			return context.Cause(ctx)
		case unlocked:
			return lp.err
		}
		st.Sent = new(statement.Answer)
		st.Sent.Result, o.last, st.Sent.Err = lp.outcome(ctx, nil)
		return nil
	}}
}
