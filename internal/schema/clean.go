package schema

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

const (
	cleanMost  = 500              // rows in one transaction
	cleanBound = 10 * time.Second // on the search, which reads the whole table where few rows are unused, and on the end
)

// Clean removes rows, of all namespaces, that have had no live lease and were
// not made for longer than unused: at most limit of them, and at most 500. A row
// lock leaves no trace in its row, so a row that only row locks use goes by when
// it was made, and is made again at its next use. The number of rows that keys
// share stays.
//
// It waits for nobody: rows that somebody has locked stay, and nothing is
// removed while rows are being made or another Clean runs. It needs the
// privilege DELETE, and SKIP LOCKED, which MariaDB has from 10.6 on.
//
// conn must be in autocommit with no transaction open. So it is afterwards, or
// it is closed.
func (t Table) Clean(ctx context.Context, conn driver.Conn, unused time.Duration, limit int) (removed int, err error) {
	old := fmt.Sprintf("expires < UTC_TIMESTAMP(6) - INTERVAL %d MICROSECOND", max(unused, 0).Microseconds())
	rows, err := server.Query(ctx, conn, fmt.Sprintf( // MySQL skips the comment, MariaDB the hint
		"/*M!100000 SET STATEMENT max_statement_time = %d FOR */ SELECT /*+ MAX_EXECUTION_TIME(%d) */ namespace, name FROM %s WHERE %s AND name <> %s AND NOT (%s) LIMIT %d",
		int(cleanBound.Seconds()), cleanBound.Milliseconds(), t, old, Literal(Stripes), Floor, min(limit, cleanMost)))
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	if err := server.Exec(ctx, conn, "START TRANSACTION"); err != nil {
		return 0, err
	}
	removed, err = t.remove(ctx, conn, rows, old)
	end := "COMMIT"
	if removed == 0 {
		end = "ROLLBACK"
	}
	own, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanBound)
	defer cancel()
	if endErr := server.Exec(own, conn, end); endErr != nil {
		_ = conn.Close() // it may carry the transaction
		if err == nil {
			err = endErr
		}
		return 0, err
	}
	return removed, err
}

// remove removes those of rows that are still old, in the open transaction. The
// floor is locked first, as by those who make rows, so that nobody waits for
// each other.
func (t Table) remove(ctx context.Context, conn driver.Conn, rows [][]string, old string) (removed int, err error) {
	floor, err := server.Query(ctx, conn, "SELECT token FROM "+t.String()+" WHERE "+Floor+" FOR UPDATE NOWAIT")
	if server.Locked(err) {
		return 0, nil
	}
	if err == nil && len(floor) == 0 {
		err = fmt.Errorf("the lock table lacks its floor row; make it with:\n%s", t.floorDDL())
	}
	if err != nil {
		return 0, err
	}
	rows, err = server.Query(ctx, conn, "SELECT namespace, name, token FROM "+t.exactly(rows)+" WHERE "+old+" FOR UPDATE SKIP LOCKED")
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	var highest uint64
	for _, row := range rows {
		token, err := strconv.ParseUint(row[2], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("reading a row's token: %w", err)
		}
		highest = max(highest, token)
	}
	if err := server.Exec(ctx, conn, fmt.Sprintf("UPDATE %s SET token = GREATEST(token, %d) WHERE %s", t, highest, Floor)); err != nil {
		return 0, err
	}
	if err := server.Exec(ctx, conn, "DELETE "+t.String()+" FROM "+t.exactly(rows)); err != nil {
		return 0, err
	}
	return len(rows), nil
}

// exactly is the table, joined so that rows are looked up one by one: an IN list
// can lock every row of a small table. It has no alias, which DELETE takes only
// where a database is selected.
func (t Table) exactly(rows [][]string) string {
	lines := make([]string, len(rows))
	for i, row := range rows {
		lines[i] = "SELECT " + Literal(row[0]) + " AS s, " + Literal(row[1]) + " AS k"
	}
	return "(" + strings.Join(lines, " UNION ALL ") + ") d STRAIGHT_JOIN " + t.String() + " ON namespace = s AND name = k"
}
