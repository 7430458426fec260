package keyrow

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Version is a key whose version a commit is to make new.
type Version struct {
	Key string
	Is  uint64 // the version that the key must have; 0 if the transaction has locked its row
}

// commits knows whether the procedure for Commit can be called.
type commits struct {
	looked  schema.Once
	lacking atomic.Bool
	begins  atomic.Bool // the procedure that reads a version and begins can be called
}

// Begins reports whether the procedure that reads a version and begins can be called.
func (r *Rows) Begins() bool { return r.commits.begins.Load() }

// NoBegin notes that the procedure that reads a version and begins is missing, or may not be
// executed.
func (r *Rows) NoBegin() { r.commits.begins.Store(false) }

// Commit commits the open transaction on c if the keys, of which none is twice, have their
// versions, and makes these new: in one statement, which waits for no row. ctx bounds the wait
// for the answer. [server.CheckFailed] is that a key has another version. A row that is locked is
// an error for which [server.Locked] is true.
func (r *Rows) Commit(ctx context.Context, c *pool.Conn, versions []Version) (server.Outcome, error) {
	block := r.commitBlock
	if !r.cfg.Info.MariaDB {
		block = r.commitCall
	}
	if r.cfg.Info.Topology != "" || !r.commits.looked.Done() && !r.cfg.Info.MariaDB || r.commits.lacking.Load() {
		return server.NoWay, nil
	}
	mark := "" // a MySQL Router shares no connection that has user variables
	if !r.cfg.Info.Router {
		mark = pool.NewMark()
	}
	outcome, err := server.CheckAndCommit(ctx, c.Conn, mark, func() ([][]string, error) { return c.QueryBlock(ctx, block(versions, mark)) })
	if outcome == server.NoWay && !r.cfg.Info.MariaDB {
		r.commits.lacking.Store(true)
	}
	return outcome, noBadConn(err)
}

// ProvideCommit sees to it that the procedure for Commit is there, and that of Begins, where
// the server has need of them. Call it before the transaction asks for Commit: a transaction
// that has called a procedure which is missing keeps it from being made.
func (r *Rows) ProvideCommit(ctx context.Context) {
	c := &r.commits
	if r.cfg.Info.MariaDB || r.cfg.Info.Topology != "" || !r.Procedure() {
		return
	}
	c.looked.Do(func() error {
		conn, err := r.cfg.Control.Acquire(ctx)
		if err != nil {
			return err // the next one tries again
		}
		defer conn.Release()
		there, err := schema.ProvideAll(ctx, conn.Conn, r.cfg.Auto, r.cfg.Table.VersionsProcedure(), r.cfg.Table.BeginProcedure())
		if err == nil {
			c.lacking.Store(!there[0])
			c.begins.Store(there[1])
		}
		return err
	})
}

// commitCall calls the procedure. The comment is for those who look for a COMMIT in what the
// server is doing.
func (r *Rows) commitCall(versions []Version, mark string) pool.Block {
	rows := make([]string, len(versions))
	for i, v := range versions {
		rows[i] = fmt.Sprintf(`["%x", %d]`, v.Key, v.Is)
	}
	return pool.Block{Text: fmt.Sprintf("CALL %s(%s, '[%s]', %s) /* versions and COMMIT */", r.cfg.Table.VersionsProcedure(),
		schema.Literal(r.cfg.Namespace), strings.Join(rows, ", "), schema.Name(mark))}
}

// commitBlock is the same as an anonymous block, on MariaDB. NOWAIT is not allowed there, but a
// limit of 0 means the same. sql_mode ORACLE declares variables elsewhere, so the block has
// those of the session.
func (r *Rows) commitBlock(versions []Version, mark string) pool.Block {
	block := pool.Block{Text: "BEGIN NOT ATOMIC SAVEPOINT mysqllock_done; SET @mysqllock_same = 0; "}
	for _, v := range versions {
		block.Text += "SET @mysqllock_name = " + schema.Unhex + ", @mysqllock_version = ?; "
		block.Values = append(block.Values, schema.Hex(v.Key), int64(v.Is)) //nolint:gosec // versions are counted by one
		same := ""
		if v.Is != 0 {
			same = " AND token = @mysqllock_version AND versioned = 1 AND owner IS NULL"
		}
		block.Text += fmt.Sprintf("SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR UPDATE %s SET token = token + 1, expires = UTC_TIMESTAMP(6)"+
			" WHERE namespace = %s AND name = @mysqllock_name%s; SET @mysqllock_same = @mysqllock_same + ROW_COUNT(); ",
			r.cfg.Table, schema.Literal(r.cfg.Namespace), same)
	}
	block.Text += fmt.Sprintf("IF @mysqllock_same = %[1]d THEN SET @mysqllock_done = ?; COMMIT; END IF; SELECT @mysqllock_same = %[1]d; END", len(versions))
	block.Values = append(block.Values, mark)
	if len(versions) > 1 { // the text is as long as there are keys, and may not come again
		return pool.Block{Text: block.String()}
	}
	return block
}
