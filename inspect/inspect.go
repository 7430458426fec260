// Package inspect tells who holds locks and who waits for them, from what the
// server shows, breaks locks whose holders hang, and examines whether a server
// is one on which locks hold.
//
// # Where it looks
//
//	             holders                            waiters
//	row          data_locks on MySQL, where         the same
//	             MariaDB has INNODB_LOCKS
//	lease        the lock table                     metadata_locks
//	advisory     metadata_locks, or on MariaDB      the same, or on MariaDB
//	             the plugin METADATA_LOCK_INFO      the process list
//
// On MySQL that takes SELECT on performance_schema, on MariaDB PROCESS, and
// SELECT on the lock table. Where something is missing the rest is shown, from
// the process list as far as it goes, and a [Gap] says what is not, and what would
// show it.
//
// # What nobody can see
//
// Goroutines that line up inside their process for the one in front of them: of
// each process only that one waits in the server. Since when a lease or an
// advisory lock is held: the server does not note it. How long somebody has waited
// in all: those who wait for leases and advisory locks ask again every few seconds,
// for a row lock when the bound on the server is over, and it counts from then.
//
// Waiters are in the order in which they have asked the last time, which is the
// server's: so they are granted, but that MySQL prefers, for a row, those who
// themselves keep many waiting.
//
// The slots of a key are a Lock each, and who waits for any of them waits for one
// at a time. So are stripes, which do not tell for which of their keys they are
// held.
//
// # How far the picture is one
//
// Row locks, advisory locks and waiters are those of the node that the connection
// leads to; leases are those of the whole cluster.
//
// The server has no common moment for all of that: it is read by a few statements,
// one after the other, in some milliseconds. Somebody who is granted a lock
// meanwhile can be its holder and its waiter. MariaDB answers who has locked a row
// from a copy that it renews only when nobody has read it for 100 ms, so who asks
// more often, or two who do by turns, see how things were.
//
// # What it costs
//
// Each call uses a connection of its own, since it changes the settings, and closes
// it. Snapshot and Doctor take no lock and wait for nobody; every question is
// bounded on the server, also when the lock table is being altered. The search for
// leases reads the whole table, a million rows in less than a second, unless it is
// asked for keys.
package inspect

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Options say whose locks to look at. The zero value is what the zero value of
// the driver's Config means.
type Options struct {
	Table     string // the lock table, as table or schema.table; "" is "mysqllock"
	Namespace string // "" is the name of the connection's database
}

// Inspector looks at the locks of one lock table. It is safe for concurrent use.
type Inspector struct {
	db        *sql.DB
	table     schema.Table
	namespace string
}

// New returns an Inspector that has sent nothing to the server yet. db can have
// any driver that speaks MySQL. Whoever bounds its connections should give the
// Inspector a handle of its own: it would wait for one behind those who wait for
// locks.
func New(db *sql.DB, o Options) (*Inspector, error) {
	if o.Table == "" {
		o.Table = "mysqllock"
	}
	table, err := schema.Parse(o.Table)
	if err != nil {
		return nil, err
	}
	if len(o.Namespace) > schema.MaxNamespace {
		return nil, fmt.Errorf("mysqllock: the namespace is longer than %d bytes", schema.MaxNamespace)
	}
	return &Inspector{db: db, table: table, namespace: o.Namespace}, nil
}

const (
	// callBound is how long a call may take in all, and questionBound one of its
	// questions on the server.
	callBound, questionBound = 30 * time.Second, 5 * time.Second
	// most is how many of a kind are read.
	most = 10_000
)

// setup lets no question wait, and none run for long. Times of MariaDB's
// transactions are in the zone of the system, whatever that of the session.
var setup = fmt.Sprintf("SET SESSION autocommit = 1, sql_mode = '', sql_select_limit = DEFAULT, time_zone = 'SYSTEM', innodb_lock_wait_timeout = 1"+
	" /*!80000 , lock_wait_timeout = 1, max_execution_time = %d */ /*M!100000 , lock_wait_timeout = 0, max_statement_time = %d */",
	questionBound.Milliseconds(), int(questionBound.Seconds()))

// session is a connection for one call.
type session struct {
	conn      *sql.Conn
	mariadb   bool
	schema    bool // there is a performance_schema
	account   string
	database  string
	table     schema.Table
	namespace string
	now       time.Time // the server's
}

// on runs f with a connection that nobody uses afterwards.
func (i *Inspector) on(ctx context.Context, f func(context.Context, *session) error) error {
	// Not the caller's own lock context: these statements are under no lock.
	ctx, cancel := context.WithTimeout(lockctx.Without(ctx), callBound)
	defer cancel()
	conn, err := i.db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("mysqllock: connecting to inspect locks: %w", err)
	}
	defer func() {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn }) // closes it
		_ = conn.Close()
	}()
	s := &session{conn: conn}
	if err := s.begin(ctx, i); err != nil {
		return fmt.Errorf("mysqllock: beginning to inspect locks: %w", err)
	}
	return f(ctx, s)
}

func (s *session) begin(ctx context.Context, i *Inspector) error {
	if _, err := s.conn.ExecContext(ctx, setup); err != nil {
		return err
	}
	rows, err := s.query(ctx, "SELECT VERSION(), @@performance_schema, CURRENT_USER(), COALESCE(DATABASE(), ''), CAST(UTC_TIMESTAMP(6) AS CHAR)")
	if err != nil {
		return err
	}
	s.mariadb, s.schema = strings.Contains(rows[0][0], "MariaDB"), rows[0][1] == "1"
	s.account, s.database, s.now = account(rows[0][2]), rows[0][3], moment(rows[0][4])
	s.table, s.namespace = i.table.In(s.database), i.namespace
	if s.namespace == "" {
		s.namespace = s.database
	}
	if s.namespace == "" {
		return errors.New("no database is selected: name one in the DSN, or give the namespace, and the table as schema.table")
	}
	return nil
}

// account is CURRENT_USER() for a GRANT.
func account(user string) string {
	name, host := user, ""
	if at := strings.LastIndexByte(user, '@'); at >= 0 {
		name, host = user[:at], user[at+1:]
	}
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	return quote(name) + "@" + quote(host)
}

// moment reads the server's UTC; the zero time where there is none.
func moment(s string) time.Time {
	t, _ := time.Parse("2006-01-02 15:04:05.999999", s)
	return t
}

// query runs one statement as text, and reads all of its rows. NULL reads as "".
func (s *session) query(ctx context.Context, text string) (out [][]string, err error) {
	rows, err := s.conn.QueryContext(ctx, text)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		cells, dest := make([]sql.NullString, len(columns)), make([]any, len(columns))
		for i := range cells {
			dest[i] = &cells[i]
		}
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
		line := make([]string, len(columns))
		for i := range cells {
			line[i] = cells[i].String
		}
		out = append(out, line)
	}
	return out, rows.Err()
}

// onDriver runs f with the driver's connection.
func (s *session) onDriver(f func(driver.Conn) error) error {
	return s.conn.Raw(func(c any) error {
		conn, ok := c.(driver.Conn)
		if !ok {
			return fmt.Errorf("mysqllock: the driver's connection is a %T", c)
		}
		err := f(conn)
		if errors.Is(err, driver.ErrBadConn) { // database/sql would close it under us
			err = errors.New(err.Error())
		}
		return err
	})
}

// hidden reports an error that means that the account may not look, or that
// there is nothing to look at: 1109 is a table of information_schema that does not
// exist.
func hidden(err error) bool {
	return server.Denied(err) || server.Missing(err) || server.Number(err) == 1109
}
