package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// lastWrite is a write that went out with the COMMIT of its unit, in one text.
type lastWrite struct {
	err    error // with which the COMMIT has failed; nil if it is committed
	locked bool  // the key is locked for the next caller
}

// joins reports whether a statement of a caller's may stand beside those of the driver in one text, if the server takes that: it
// is known to be one statement that does what its first word says, and nobody looks at each statement by itself.
func joins(st *statement.Statement, info server.Info) bool {
	return st.Joins() && info.Kills && info.Topology == "" && !info.Router && !handle.Listening()
}

// joinsCommit reports whether st can go out with COMMIT: the server is so far that this pays, the server counts the rows
// that it changes, and nothing is to be asked before COMMIT.
func (u *unit) joinsCommit(st *statement.Statement) bool {
	return st.Last && !st.Query && u.link.Packs(2) && u.opts == (driver.TxOptions{}) && !u.ctxState.k.ByCalls() &&
		len(u.ctxState.grants)+len(u.outer)+len(u.doubts) == 0 && !u.raises && !u.inside() && joins(st, u.l.Info())
}

// certain is for how long a caller whose context has ended is kept for the answer to a write that has its COMMIT behind it: else
// nobody knows what became of it.
var certain = strategy.Limits{GiveUp: time.Second, Calmly: time.Second}

// counted is the result of a write that went out with COMMIT. An UPDATE or a DELETE without a call has no id.
type counted struct {
	rows    int64
	unknown error // nobody knows how many rows it has changed, if any
}

func (c counted) RowsAffected() (int64, error) { return c.rows, c.unknown }

func (c counted) LastInsertId() (int64, error) { return 0, nil }

// runLast runs a write with the COMMIT of the unit behind it. If it changes nothing, and was decided on by what the unit has
// read, the unit stays open. An error is that of the write: nothing is committed then. Else u.last is what came of the COMMIT.
func (u *unit) runLast(ctx context.Context, st *statement.Statement) (driver.Result, error) {
	texts := []string{server.Rows, "COMMIT"}
	if u.ctxState.readStands {
		texts[0] = server.Counted
	}
	var handoff *rowlock.Handoff
	if u.passes() && u.handoff.Commits() {
		handoff = u.handoff
		texts = append(texts, handoff.Next())
	}
	w := newPacket(u.l, u.link, st)
	w.send(ctx, func(own context.Context) (err error) {
		w.answers, err = server.SendBehind(own, u.link.Conn, w.text(), st.Args, texts...)
		return err
	})
	if len(w.answers) == 0 && server.Unchanged(w.err) {
		return counted{}, nil
	}
	var res driver.Result
	res, u.last, w.err = w.outcome(ctx, handoff)
	return res, w.err
}

// lastPacket is a text of a write and the COMMIT behind it, perhaps with more around them.
type lastPacket struct {
	l    *handle.Locks
	on   *pool.Conn
	st   *statement.Statement
	mark string

	answers [][][]string // of what is behind the write
	stopped bool         // it was killed, since its caller has gone
	usable  bool         // so is the connection
	err     error
}

func newPacket(l *handle.Locks, on *pool.Conn, st *statement.Statement) *lastPacket {
	return &lastPacket{l: l, on: on, st: st, mark: pool.NewMark()}
}

// text is the write's.
func (w *lastPacket) text() string { return pool.Marked(w.mark) + w.st.Text }

// send has do send the packet.
func (w *lastPacket) send(ctx context.Context, do func(context.Context) error) {
	killable := strategy.Killable{Limits: certain, Conn: w.on, Mark: w.mark, Control: w.l.Control}
	w.stopped, w.usable, w.err = killable.Run(ctx, do)
	if !w.usable {
		w.l.EndQuery(ctx, w.mark) // else it may go on to its COMMIT long after its caller has gone
	}
}

// outcome is what has come of the write: an error with which nothing is committed, or its result, and what has come of the
// COMMIT. handoff locks the key for the next caller behind that; nil is nobody.
func (w *lastPacket) outcome(ctx context.Context, handoff *rowlock.Handoff) (driver.Result, *lastWrite, error) {
	switch {
	case len(w.answers) > 0:
	case w.stopped && server.Uncounted(w.err):
		_ = w.on.Close() // as a statement leaves it whose context ends
		return nil, nil, ctx.Err()
	case server.Uncounted(w.err):
		return nil, nil, lockerr.With(lockerr.ErrLost, fmt.Errorf("the write, or the count of its rows, was ended, "+
			"so the transaction is rolled back: %w", w.err))
	case server.Number(w.err) != 0, errors.Is(w.err, driver.ErrBadConn), errors.Is(w.err, driver.ErrSkip):
		return nil, nil, w.err
	default:
		return counted{unknown: w.err}, &lastWrite{err: w.err}, nil
	}
	last := new(lastWrite)
	switch committed := len(w.answers) > 1; {
	case !committed:
		if last.err = w.err; server.Interrupted(w.err) && !server.Locked(w.err) {
			_, last.err = server.Uncommitted(context.WithoutCancel(ctx), w.on.Conn, w.err)
		}
	case handoff != nil && w.usable:
		last.locked = handoff.Locked(context.WithoutCancel(ctx), w.answers[2:], w.err)
	case w.err != nil:
		w.on.Taint()
	}
	if len(w.answers[0]) != 1 {
		return counted{unknown: server.ErrAnswers}, last, nil
	}
	n, err := strconv.ParseFloat(w.answers[0][0][0], 64)
	return counted{int64(n), err}, last, nil
}

// query has a query go out with the lock in front.
func query(st *statement.Statement) *rowlock.Behind {
	return &rowlock.Behind{Send: func(
		ctx context.Context, on *pool.Conn, limit time.Duration, lock, mark string, granted func([][]string) error,
	) error {
		return server.SendInFront(ctx, on.Conn, limit, lock, mark+st.Text, st.Args, granted, st.Answered)
	}}
}

// alone has the write of a unit that is nothing else go out with the lock in front, and COMMIT behind it.
func (s *session) alone(st *statement.Statement) *rowlock.Behind {
	return &rowlock.Behind{Writes: true, Send: func(
		ctx context.Context, on *pool.Conn, limit time.Duration, lock, _ string, granted func([][]string) error,
	) error {
		w, locked := newPacket(s.p.l, on, st), false
		w.send(ctx, func(own context.Context) (err error) {
			w.answers, err = server.SendBetween(own, on.Conn, limit, pool.Marked(w.mark)+lock, func(answer [][]string) error {
				err := granted(answer)
				locked = err == nil
				return err
			}, w.text(), st.Args, server.Rows, "COMMIT")
			return err
		})
		if refused := server.Number(w.err) != 0 || errors.Is(w.err, driver.ErrBadConn) || errors.Is(w.err, driver.ErrSkip); !locked && refused {
			if w.stopped {
				return context.Cause(ctx)
			}
			return w.err
		}
		st.Sent = new(statement.Answer)
		st.Sent.Result, s.last, st.Sent.Err = w.outcome(ctx, nil)
		return nil
	}}
}
