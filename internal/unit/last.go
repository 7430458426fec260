package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
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
	mark := pool.NewMark()
	texts := []string{server.Rows, "COMMIT"}
	if u.ctxState.readStands {
		texts[0] = server.Counted
	}
	handsOver := u.passes() && u.handoff.Commits()
	if handsOver {
		texts = append(texts, u.handoff.Next())
	}
	var answers [][][]string
	w := strategy.Killable{Limits: certain, Conn: u.link, Mark: mark, Control: u.l.Control}
	stopped, usable, err := w.Run(ctx, func(own context.Context) (err error) {
		answers, err = server.SendBehind(own, u.link.Conn, "/* mysqllock "+mark+" */ "+st.Text, st.Args, texts...)
		return err
	})
	if !usable {
		u.l.EndQuery(ctx, mark) // else it may go on to its COMMIT long after its caller has gone
	}
	switch {
	case len(answers) > 0:
	case server.Unchanged(err):
		return counted{}, nil
	case stopped && server.Uncounted(err):
		_ = u.link.Close() // as a statement leaves it whose context ends
		return nil, ctx.Err()
	case server.Uncounted(err):
		return nil, lockerr.With(lockerr.ErrLost, fmt.Errorf("the write, or the count of its rows, was ended, "+
			"so the transaction is rolled back: %w", err))
	case server.Number(err) != 0, errors.Is(err, driver.ErrBadConn), errors.Is(err, driver.ErrSkip):
		return nil, err
	default:
		u.last = &lastWrite{err: err}
		return counted{unknown: err}, nil
	}
	last := new(lastWrite)
	u.last = last
	switch committed := len(answers) > 1; {
	case !committed:
		if last.err = err; server.Interrupted(err) && !server.Locked(err) {
			_, last.err = server.Uncommitted(context.WithoutCancel(ctx), u.link.Conn, err)
		}
	case handsOver && usable:
		last.locked = u.handoff.Locked(context.WithoutCancel(ctx), answers[2:], err)
	case err != nil:
		u.link.Taint()
	}
	if len(answers[0]) != 1 {
		return counted{unknown: server.ErrAnswers}, nil
	}
	n, err := strconv.ParseFloat(answers[0][0][0], 64)
	return counted{int64(n), err}, nil
}
