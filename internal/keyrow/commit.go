package keyrow

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Version is a key whose version a commit is to make new.
type Version struct {
	Key string
	Is  uint64 // the version that the key must have; 0 if the transaction has locked its row
}

// Commit commits the open transaction on c if the keys, of which none is twice, have their
// versions, and makes these new: in one statement, which waits for no row. ctx bounds the wait
// for the answer. [server.CheckFailed] is that a key has another version. A row that is locked is
// an error for which [server.Locked] is true.
func (r *Rows) Commit(ctx context.Context, c *pool.Conn, versions []Version) (server.Outcome, error) {
	block := r.commitBlock
	if !r.cfg.Info.Blocks {
		block = r.commitCall
	}
	if r.cfg.Info.Topology != "" || !r.cfg.Procedures.Has(r.cfg.Table.VersionsProcedure()) {
		return server.NoWay, nil
	}
	mark := "" // a MySQL Router shares no connection that has user variables
	if !r.cfg.Info.Router {
		mark = pool.NewMark()
	}
	rows, err := c.QueryBlock(ctx, block(versions, mark))
	outcome, err := server.CheckedOutcome(ctx, c.Conn, mark, rows, err)
	if outcome == server.NoWay && !r.cfg.Info.Blocks {
		r.cfg.Procedures.Set(r.cfg.Table.VersionsProcedure(), false)
	}
	return outcome, server.HideBadConn(err)
}

// ProvideCommit sees to it that the procedure for Commit is there, and that which reads a version
// and begins, where the server has need of them.
func (r *Rows) ProvideCommit(ctx context.Context) {
	if t := r.cfg.Table; r.cfg.Info.Topology == "" && r.cfg.Procedures.Has(t.LockProcedure()) {
		r.cfg.Procedures.Look(ctx, t.VersionsProcedure(), t.BeginProcedure())
	}
}

// commitCall calls the procedure.
func (r *Rows) commitCall(versions []Version, mark string) pool.Block {
	var which string
	if len(versions) == 1 {
		which = schema.Literal(versions[0].Key) + ", " + strconv.FormatUint(versions[0].Is, 10) + ", NULL"
	} else {
		rows := make([]string, len(versions))
		for i, v := range versions {
			rows[i] = fmt.Sprintf(`["%x", %d]`, v.Key, v.Is)
		}
		which = "NULL, NULL, '[" + strings.Join(rows, ", ") + "]'"
	}
	return pool.Block{Text: fmt.Sprintf("CALL %s(%s, %s, %s) /* versions and COMMIT */",
		r.cfg.Table.VersionsProcedure(), schema.Literal(r.cfg.Namespace), which, schema.Name(mark))}
}

// commitBlock is the same as an anonymous block, on MariaDB. sql_mode ORACLE declares variables
// elsewhere, so the block has one of the session's. It has none for names and versions: to find
// the row by them takes the server a third of the time of the block (measured on MariaDB 11.8).
func (r *Rows) commitBlock(versions []Version, mark string) pool.Block {
	var text strings.Builder
	values := make([]driver.Value, 0, 2*len(versions)+1)
	next := schema.AtOnce + "UPDATE " + r.cfg.Table.String() + " SET " + schema.Next + " WHERE " + schema.Row("", r.cfg.Namespace, schema.Unhex)
	text.WriteString("BEGIN NOT ATOMIC SET @mysqllock_same = 0; ")
	for _, v := range versions {
		text.WriteString(next)
		values = append(values, schema.Hex(v.Key))
		if v.Is != 0 {
			text.WriteString(" AND token = ? AND " + schema.Prepared)
			values = append(values, int64(v.Is)) //nolint:gosec // versions are counted by one
		}
		text.WriteString("; SET @mysqllock_same = @mysqllock_same + ROW_COUNT(); ")
	}
	text.WriteString("IF @mysqllock_same = " + strconv.Itoa(len(versions)) + " THEN COMMIT; SET @mysqllock_done = ?; ELSE SELECT 0; END IF; END")
	block := pool.Block{Text: text.String(), Values: append(values, mark)}
	if len(versions) > 1 { // the text is as long as there are keys, and may not come again
		return pool.Block{Text: block.String()}
	}
	return block
}
