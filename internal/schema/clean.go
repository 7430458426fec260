package schema

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

const (
	cleanMost   = 500                   // rows in one transaction
	cleanLeast  = 10                    // the same, where the server is slow
	cleanHold   = 50 * time.Millisecond // how long a transaction should lock rows at most
	cleanLook   = 5000                  // rows that are read at once
	cleanBound  = 10 * time.Second      // limit for the search of a step, and for the end of its transaction
	cleanBusy   = 5                     // attempts to lock the high-water row, each of up to a second
	noticeLasts = 3 * time.Second       // how long a notice says that a clean-up is running
	noticeEvery = time.Second
)

// CleanSetup is the first statement on a connection for a [Cleaner]. If the client
// vanishes, the server soon ends the connection, and with it the transaction that locks
// rows.
var CleanSetup = "SET SESSION autocommit = 1, " + server.OwnSettings + ", innodb_lock_wait_timeout = 1," +
	" lock_wait_timeout = 5, wait_timeout = 3" + server.InSession(3)

// Cleaner is a clean-up of the table. It removes old rows of all namespaces: rows that were
// made, or had a lease, longer ago than a given time. A row lock leaves no trace in its
// row, so a row that is used by row locks only counts from when it was made; it is made
// again at its next use. The note of how many rows keys share stays.
//
// The Cleaner goes through the table once, in the order of the primary key. Memory and the
// time of one step do not depend on the size of the table. Locked rows stay.
//
// Tokens never go back: before a row with a higher token is removed, the high-water mark is raised
// and committed. A program that makes a row reads the high-water mark with a lock, which it keeps
// until the row exists. So the row either exists before the high-water mark is raised, or it begins
// with the new one. It is locked for one statement only, so new rows can be made during a clean-up.
//
// It needs the privilege DELETE, and SKIP LOCKED, which MariaDB has from 10.6 on, unless Skips is false.
type Cleaner struct {
	Skips bool // use SKIP LOCKED; else lock one row after the other

	table     Table
	old       string    // the condition for rows to remove
	after     []string  // the last row that it is through with; nil at the beginning
	end       []string  // the last of the rows that it has read; nil if these are all the rest
	within    bool      // it is not through with those that it has read
	highWater uint64    // the high-water mark is at least as high
	batch     int       // rows in one transaction
	notified  time.Time // when notify was called last

	Looked  int  // rows that it has read
	Removed int  // rows that it has removed
	Left    int  // rows that it would have removed, if they had not been locked or used
	Done    bool // it has been through the table
}

// Cleaner returns a clean-up of rows that were unused for so long.
func (t Table) Cleaner(unused time.Duration) *Cleaner {
	return &Cleaner{
		Skips: true, table: t, batch: cleanMost / 5,
		old: fmt.Sprintf("expires < UTC_TIMESTAMP(6) - INTERVAL %d MICROSECOND", max(unused, 0).Microseconds()),
	}
}

// Clean goes through the table once, or until it has removed limit rows. conn is as
// in [Cleaner.Step].
func (t Table) Clean(ctx context.Context, conn driver.Conn, unused time.Duration, limit int) (removed int, err error) {
	c := t.Cleaner(unused)
	for err == nil && !c.Done && c.Removed < limit {
		err = c.Step(ctx, conn, limit-c.Removed)
	}
	return c.Removed, err
}

// Step removes old rows, at most limit and at most a few hundred, from the few thousand that it
// has read; once it is through with these, it reads the next. After an error it can be called again, also with another
// connection. An error that matches lockerr.ErrLocked says that other programs make rows
// without a pause.
//
// conn is in autocommit without an open transaction, and [CleanSetup] has run on it.
// After Step that is still so, or conn is closed.
func (c *Cleaner) Step(ctx context.Context, conn driver.Conn, limit int) error {
	if time.Since(c.notified) > noticeEvery {
		if err := c.notify(ctx, conn); err != nil {
			return err
		}
	}
	if !c.within {
		looked, end, err := c.look(ctx, conn)
		if err != nil {
			return err
		}
		c.Looked, c.end, c.within = c.Looked+looked, end, true
	}
	batch := min(limit, c.batch)
	rows, err := c.find(ctx, conn, batch)
	if err != nil {
		return err
	}
	removed, err := c.remove(ctx, conn, rows)
	if err != nil {
		return err
	}
	c.Removed += removed
	c.Left += len(rows) - removed
	if len(rows) == batch {
		c.after = rows[batch-1][:2]
	} else {
		c.after, c.within, c.Done = c.end, false, c.end == nil
	}
	return nil
}

// notify says in the table that a clean-up is running, for requests without a wait that are
// refused: see CleaningSQL. It also raises the high-water mark as far as the Cleaner needs. It waits
// for programs that are making rows just now.
//
//	UPDATE mysqllock SET token = GREATEST(token, 7), expires = UTC_TIMESTAMP(6) + INTERVAL 3000000 MICROSECOND
//	WHERE namespace = '' AND name = ''
func (c *Cleaner) notify(ctx context.Context, conn driver.Conn) error {
	began := time.Now()
	text := fmt.Sprintf("UPDATE %s SET token = GREATEST(token, %d), expires = UTC_TIMESTAMP(6) + INTERVAL %d MICROSECOND WHERE %s",
		c.table, c.highWater, noticeLasts.Microseconds(), HighWater)
	for tries := 1; ; tries++ {
		changed, err := server.Affected(ctx, conn, text)
		if err == nil && changed == 0 { // another clean-up may have set the same just now
			var there bool
			if there, err = c.table.hasHighWater(ctx, conn); err == nil && !there {
				return fmt.Errorf("the lock table lacks its high-water row; make it with:\n%s", c.table.Anew().highWaterDDL())
			}
		}
		switch {
		case err == nil:
			c.notified = began
			return nil
		case !server.Locked(err) && !server.Deadlock(err):
			return err
		case tries == cleanBusy:
			return lockerr.With(lockerr.ErrLocked, fmt.Errorf("the high-water row of the lock table was locked for %v,"+
				" for example by programs that make rows: %w", time.Since(began).Round(time.Second), err))
		}
	}
}

// look returns the last of the next few thousand rows, and how many these are. If these are all
// the rest, end is nil.
//
//	/*M!100000 SET STATEMENT max_statement_time = 10.000 FOR */ SELECT /*+ MAX_EXECUTION_TIME(10000) */ namespace, name
//	FROM mysqllock WHERE (namespace > 'app' OR namespace = 'app' AND name > 'k') ORDER BY namespace, name LIMIT 1 OFFSET 4999
//
// If there are fewer:
//
//	/*M!100000 SET STATEMENT max_statement_time = 10.000 FOR */ SELECT /*+ MAX_EXECUTION_TIME(10000) */ COUNT(*)
//	FROM mysqllock WHERE (namespace > 'app' OR namespace = 'app' AND name > 'k')
func (c *Cleaner) look(ctx context.Context, conn driver.Conn) (looked int, end []string, err error) {
	rows, err := server.Query(ctx, conn, server.Bounded(cleanBound)+"namespace, name FROM "+c.table.String()+" WHERE "+c.behind()+
		fmt.Sprintf(" ORDER BY namespace, name LIMIT 1 OFFSET %d", cleanLook-1))
	if err != nil {
		return 0, nil, err
	}
	if len(rows) > 0 {
		return cleanLook, rows[0], nil
	}
	rows, err = server.Query(ctx, conn, server.Bounded(cleanBound)+"COUNT(*) FROM "+c.table.String()+" WHERE "+c.behind())
	if err == nil {
		looked, err = strconv.Atoi(rows[0][0])
	}
	return looked, nil, err
}

// find returns the first old rows of those that were read: namespace, name, token.
// For those behind k, up to m, that were unused for a day:
//
//	/*M!100000 SET STATEMENT max_statement_time = 10.000 FOR */ SELECT /*+ MAX_EXECUTION_TIME(10000) */ namespace, name, token
//	FROM mysqllock
//	WHERE (namespace > 'app' OR namespace = 'app' AND name > 'k') AND (namespace < 'app' OR namespace = 'app' AND name <= 'm')
//	  AND expires < UTC_TIMESTAMP(6) - INTERVAL 86400000000 MICROSECOND AND name <> '\0stripes'
//	  AND NOT (namespace = '' AND name = '') ORDER BY namespace, name LIMIT 100
func (c *Cleaner) find(ctx context.Context, conn driver.Conn, limit int) ([][]string, error) {
	upTo := "TRUE"
	if c.end != nil {
		upTo = fmt.Sprintf("(namespace < %[1]s OR namespace = %[1]s AND name <= %[2]s)", Literal(c.end[0]), Literal(c.end[1]))
	}
	return server.Query(ctx, conn, server.Bounded(cleanBound)+"namespace, name, token FROM "+c.table.String()+
		" WHERE "+c.behind()+" AND "+upTo+" AND "+c.old+" AND name <> "+Literal(Stripes)+" AND NOT ("+HighWater+")"+
		" ORDER BY namespace, name LIMIT "+strconv.Itoa(limit))
}

// behind is the condition for the rows that it is not through with.
func (c *Cleaner) behind() string {
	if c.after == nil {
		return "TRUE"
	}
	return fmt.Sprintf("(namespace > %[1]s OR namespace = %[1]s AND name > %[2]s)", Literal(c.after[0]), Literal(c.after[1]))
}

// remove removes those of rows that are still old and not locked.
func (c *Cleaner) remove(ctx context.Context, conn driver.Conn, rows [][]string) (removed int, err error) {
	if len(rows) == 0 {
		return 0, nil
	}
	highest := c.highWater
	for _, row := range rows {
		token, err := strconv.ParseUint(row[2], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("reading a row's token: %w", err)
		}
		highest = max(highest, token)
	}
	if highest > c.highWater || time.Since(c.notified) > noticeEvery {
		before := c.highWater
		c.highWater = highest
		if err := c.notify(ctx, conn); err != nil {
			c.highWater = before
			return 0, err
		}
	}
	began := time.Now()
	if err := server.Exec(ctx, conn, "START TRANSACTION"); err != nil {
		return 0, err
	}
	removed, err = c.removeIn(ctx, conn, rows)
	end := "COMMIT"
	if removed == 0 {
		end = "ROLLBACK"
	}
	own, cancel := server.Within(context.WithoutCancel(ctx), cleanBound)
	defer cancel()
	endErr := server.Exec(own, conn, end)
	if endErr != nil && !server.Deadlock(endErr) { // of a cluster, which has rolled back
		_ = conn.Close() // the transaction may still be open
	}
	if err == nil {
		err = endErr
	}
	if server.Deadlock(err) { // another node uses the rows
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if took := time.Since(began); took > cleanHold {
		c.batch = max(cleanLeast, c.batch/2)
	} else {
		c.batch = min(cleanMost, 2*c.batch)
	}
	return removed, nil
}

// removeIn is remove in the open transaction. For two rows:
//
//	DELETE mysqllock FROM (SELECT 'app' AS s, 'k' AS k UNION ALL SELECT 'app', 'l') d
//	STRAIGHT_JOIN mysqllock ON namespace = s AND name = k
func (c *Cleaner) removeIn(ctx context.Context, conn driver.Conn, rows [][]string) (removed int, err error) {
	t := c.table
	if c.Skips {
		rows, err = server.Query(ctx, conn, c.lock(rows, " SKIP LOCKED"))
	} else {
		rows, err = c.lockEach(ctx, conn, rows)
	}
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	if err := server.Exec(ctx, conn, "DELETE "+t.String()+" FROM "+t.exactly(rows)); err != nil {
		return 0, err
	}
	return len(rows), nil
}

// lock locks those of rows that are still old. For two rows:
//
//	SELECT namespace, name FROM (SELECT 'app' AS s, 'k' AS k UNION ALL SELECT 'app', 'l') d
//	STRAIGHT_JOIN mysqllock ON namespace = s AND name = k
//	WHERE expires < UTC_TIMESTAMP(6) - INTERVAL 86400000000 MICROSECOND AND token <= 7 FOR UPDATE SKIP LOCKED
func (c *Cleaner) lock(rows [][]string, unless string) string {
	return fmt.Sprintf("SELECT namespace, name FROM %s WHERE %s AND token <= %d FOR UPDATE%s",
		c.table.exactly(rows), c.old, c.highWater, unless)
}

// lockEach returns those of rows that it has locked.
func (c *Cleaner) lockEach(ctx context.Context, conn driver.Conn, rows [][]string) (locked [][]string, err error) {
	for _, row := range rows {
		found, err := server.Query(ctx, conn, c.lock([][]string{row}, " NOWAIT"))
		if err != nil && !server.Locked(err) {
			return nil, err
		}
		locked = append(locked, found...)
	}
	return locked, nil
}

// exactly is the table, joined with the rows. It has no alias: DELETE accepts one only if a database
// is selected.
func (t Table) exactly(rows [][]string) string {
	lines := make([][]string, len(rows))
	for i, row := range rows {
		lines[i] = []string{Literal(row[0]), Literal(row[1])}
	}
	return List(lines, "s", "k") + " STRAIGHT_JOIN " + t.String() + " ON namespace = s AND name = k"
}

// CleaningSQL asks whether a [Cleaner] is at work: it locks rows for moments. It
// returns a row where one is. A notice that lasts for much longer than any does is from
// before the server's clock was set back.
//
//	SELECT 1 FROM mysqllock WHERE namespace = '' AND name = ''
//	  AND expires BETWEEN UTC_TIMESTAMP(6) AND UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE
func (t Table) CleaningSQL() string {
	return "SELECT 1 FROM " + t.String() + " WHERE " + HighWater + " AND expires BETWEEN UTC_TIMESTAMP(6)" +
		" AND UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE"
}
