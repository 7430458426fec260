// Package inspect shows who holds locks and who waits for them, as far as the server
// tells. It breaks locks whose holders hang. It examines whether locks are safe on a
// server.
//
// # Where it looks
//
//	             holders                            waiters
//	row          data_locks on MySQL,               the same
//	             INNODB_LOCKS on MariaDB
//	             CLUSTER_TIDB_TRX on TiDB: who      CLUSTER_PROCESSLIST
//	             has used the lock table
//	lease        the lock table                     metadata_locks
//	advisory     metadata_locks, or on MariaDB      the same, or on MariaDB
//	             the plugin METADATA_LOCK_INFO      the process list
//
// This needs SELECT on performance_schema on MySQL, PROCESS on MariaDB and TiDB, and SELECT on
// the lock table. If the account lacks a privilege, the rest is shown, as far as the
// process list tells. A [Gap] says what is not shown, and what would show it. A value that
// the server may not tell is a [Known], and what may be only a part is a [Seen] or a [Count]:
// nothing is 0, or nobody, only because it is not known.
//
// # What the server does not show
//
//   - Goroutines that queue inside their process: of each process only the first one
//     waits in the server.
//   - Since when a lease is held. Since when a row or an advisory lock is held, MySQL tells
//     as long as it remembers the statement that took it: Holder.Since. Else the age of the
//     transaction, Within, is no age of the lock: it may have waited first, or locked late.
//   - How long a caller has waited in all whose statement does not say so, as of an older
//     version, or ends while the snapshot is read: then Waiter.Waited is not known, and
//     Waiter.Least counts from the last time that it asked. On MySQL an account that may not
//     read performance_schema is told the bound only, up to a second below.
//   - A waiter that is between two statements. It asks again from every quarter of a second
//     (slots) to once in a TTL, so if none is seen of a key, Snapshot looks a second time a
//     moment later. Of callers without a connection to wait on, which ask again and again, it
//     says only that there may be some: Seen.More.
//   - What the holder of a lease does, and mostly that of an advisory lock: its program works
//     on other connections. For which locks its process waits, is shown: Holder.WaitsFor.
//
// Waiters for a row are in the server's queue, which goes by when they asked the last time: after its
// lockTTL, 30 s by default, each asks anew, and is the last then. The server grants in that order, with
// one exception: MySQL prefers waiters that themselves block many others. Who waits for anything else asks
// again and again, so that there is no order.
//
// Each slot of a key is a Lock of its own. A caller that would accept any slot waits for
// one of them at a time. Each stripe is a Lock, too, and does not tell which of its keys
// is held.
//
// # One node, and no single moment
//
// Row locks, advisory locks and waiters are those of the node to which the connection
// leads, but on TiDB those of all nodes. Leases are those of the whole cluster.
//
// A snapshot is read by a few statements, one after the other, within some milliseconds.
// A caller that is granted a lock meanwhile can show up as its holder and its waiter, and one that asks
// again, on another connection, as two waiters.
// MariaDB shows row locks by a copy, which it renews only when nobody has read it for 100 ms: a
// program that asks more often, or two that ask by turns, see an older state.
//
// # What it costs
//
// Each call opens a connection of its own, changes its settings, and closes it. Snapshot,
// but for [Filter].Try, and Doctor lock nothing and wait for no lock; the server limits each of their
// statements, also while the lock table is being altered. The search for leases reads the
// whole table, a million rows in less than a second, unless the call names keys and nobody waits
// for the lease of another.
package inspect

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Options say which locks to look at. The zero value stands for the same table and
// namespace as the zero value of the driver's Config.
type Options struct {
	Table     string // the lock table, as table or schema.table; "" is "mysqllock"
	Namespace string // "" is the name of the connection's database

	// Silent is called, on a goroutine of its own, when the server has not answered for three seconds. since is
	// [Inspector.LastAnswer]; asked is what was asked. With nil nobody is told. The call fails four seconds later
	// if there is no answer.
	Silent func(since time.Time, asked string)
}

// Inspector looks at the locks of one lock table. It is safe for concurrent use.
type Inspector struct {
	db        *sql.DB
	table     schema.Table
	namespace string
	silent    func(since time.Time, asked string)
	answered  atomic.Pointer[time.Time] // when the server has answered last
	memory    memory
}

// New returns an Inspector. It sends nothing to the server. db can use any driver that
// speaks MySQL. If db has a limit on its connections, use another handle here: else the
// Inspector waits for a connection behind the callers that wait for locks.
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
	return &Inspector{db: db, table: table, namespace: o.Namespace, silent: o.Silent}, nil
}

// LastAnswer is when the server answered last, by the clock of this process; the zero time if it never has.
func (i *Inspector) LastAnswer() time.Time { return last(&i.answered) }

func last(answer *atomic.Pointer[time.Time]) time.Time {
	if at := answer.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

const (
	// callBound is how long a call may take in all, and questionBound how long the
	// server may take for one of its statements.
	callBound, questionBound = 30 * time.Second, 5 * time.Second
	// tellAfter is when Options.Silent is called, and answerBound how long an answer is waited for:
	// longer than the server may take.
	tellAfter, answerBound = 3 * time.Second, questionBound + 2*time.Second
	// most is how many rows of a kind are read.
	most = 10_000
)

// setup lets no statement wait for a lock or run for long. MariaDB tells the times of
// transactions in the zone of the system, whatever the zone of the session. A look that is cut off
// leaves no row locked.
var setup = fmt.Sprintf("SET SESSION autocommit = 1, sql_mode = '', sql_select_limit = DEFAULT,"+
	" time_zone = 'SYSTEM', innodb_lock_wait_timeout = 1"+
	" /*!80000 , lock_wait_timeout = 1, max_execution_time = %d */ /*M!100000 , lock_wait_timeout = 0, max_statement_time = %d */",
	questionBound.Milliseconds(), int(questionBound.Seconds())) + server.InSession(int(questionBound.Seconds()))

// session is a connection for one call.
type session struct {
	conn      *sql.Conn
	info      server.Info
	view      view
	schema    bool // there is a performance_schema
	account   string
	database  string
	table     schema.Table
	namespace string
	now       time.Time     // the server's
	asked     time.Time     // when that was asked for: the process's
	late      time.Duration // how long after that the last answer has come
	silent    func(since time.Time, asked string)
	answers   *atomic.Pointer[time.Time] // when the last answer has come, to any session
	hangs     error                      // why nothing more is asked
}

// view is how the server shows its locks. It is chosen once, by what the server can do.
type view struct {
	rowLocks, namedLocks func(*picture, context.Context) error // of holders, and of waiters
	refresh              func(*session, context.Context) error // has rowLocks read what is so now; nil if they always do
	deadlocks            func(*picture, context.Context) ([][]string, error)
	activity             func(*picture, context.Context, []uint64) error
	connections          string // the table of connections, if it is another than server.Connections
	mayKill              string // the privilege to end other accounts' connections

	// times are the columns of that table with the number of the statement that runs, and for how long it
	// does; "" where only whole seconds are told.
	times string
}

// on runs f with a new connection, which is set up, and closes it.
func (i *Inspector) on(ctx context.Context, f func(context.Context, *session) error) error {
	return i.open(ctx, func(ctx context.Context, s *session) error {
		if err := s.recognise(ctx); err != nil {
			return err
		}
		if err := s.begin(ctx, i); err != nil {
			return err
		}
		return f(ctx, s)
	})
}

// open runs f with a new connection, on which nothing was sent, and closes it.
func (i *Inspector) open(ctx context.Context, f func(context.Context, *session) error) error {
	// Without the caller's lock context: these statements need no lock.
	ctx, cancel := context.WithTimeout(lockctx.Without(ctx), callBound)
	defer cancel()
	s := &session{silent: i.silent, answers: &i.answered}
	err := s.answered(ctx, "connecting", func(ctx context.Context) (err error) {
		s.conn, err = i.db.Conn(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("mysqllock: connecting to inspect locks: %w", err)
	}
	defer func() {
		_ = s.conn.Raw(func(any) error { return driver.ErrBadConn }) // closes it
		_ = s.conn.Close()
	}()
	return f(ctx, s)
}

// answered runs f, which waits for one answer of the server. asked says what that is about.
func (s *session) answered(ctx context.Context, asked string, f func(context.Context) error) error {
	if s.hangs != nil {
		return s.hangs
	}
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	if s.silent != nil {
		tell := time.AfterFunc(tellAfter, func() { s.silent(last(s.answers), asked) })
		defer tell.Stop()
	}
	err := f(limited)
	if now := time.Now(); err == nil || server.Number(err) != 0 {
		s.answers.Store(&now)
	}
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		since := "for " + rounded(time.Since(began).Round(time.Second))
		if known := last(s.answers); !known.IsZero() {
			since = "since " + known.UTC().Format(time.TimeOnly) + " UTC"
		}
		s.hangs = fmt.Errorf("the server has not answered %s (%s): it hangs, or the network does", since, asked)
		err = s.hangs
	}
	return err
}

// exec runs one statement as text.
func (s *session) exec(ctx context.Context, text string) (result sql.Result, err error) {
	err = s.answered(ctx, "running a statement", func(ctx context.Context) error {
		result, err = s.conn.ExecContext(ctx, text)
		return err
	})
	return result, err
}

// recognise asks what the server is, before anything else is sent to it. It is an error if
// locks do not hold there: what is to be seen is not there, either.
func (s *session) recognise(ctx context.Context) error {
	ask := func() error {
		return s.answered(ctx, "asking what it is", func(ctx context.Context) error {
			return s.onDriver(func(conn driver.Conn) (err error) {
				s.info, err = server.Probe(ctx, conn)
				return err
			})
		})
	}
	err := ask()
	if server.Number(err) != 0 { // by a limit of the account's, perhaps, which setup lifts
		if _, err := s.exec(ctx, setup); err != nil {
			return err
		}
		err = ask()
	}
	switch {
	case err != nil && s.info.Version == "":
		return fmt.Errorf("mysqllock: inspecting locks: %w", err)
	case err != nil: // too old
		return err
	}
	return cmp.Or(s.info.Reliable(), s.info.Shows())
}

// begin sets the connection up.
func (s *session) begin(ctx context.Context, i *Inspector) error {
	if err := s.setUp(ctx, i); err != nil {
		return fmt.Errorf("mysqllock: beginning to inspect locks: %w", err)
	}
	return nil
}

func (s *session) setUp(ctx context.Context, i *Inspector) error {
	if _, err := s.exec(ctx, setup); err != nil {
		return err
	}
	s.asked = time.Now()
	rows, err := s.query(ctx, "SELECT @@performance_schema, CURRENT_USER(), CAST(UTC_TIMESTAMP(6) AS CHAR)")
	if err != nil {
		return err
	}
	switch s.schema = rows[0][0] == "1"; {
	case s.info.UsedTables:
		s.view = usedTables
	case s.info.AllHolders:
		s.view = onMySQL
	default:
		s.view = onMariaDB
	}
	s.account, s.database, s.now = account(rows[0][1]), s.info.Database, moment(rows[0][2])
	s.table, s.namespace = i.table.In(s.database), i.namespace
	if s.namespace == "" {
		s.namespace = s.database
	}
	if s.namespace == "" {
		return errors.New("no database is selected: name one in the DSN, or set Namespace, and Table as schema.table")
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

// moment reads a time of the server in UTC; the zero time if there is none.
func moment(s string) time.Time {
	t, _ := time.Parse("2006-01-02 15:04:05.999999", s)
	return t
}

// query runs one statement as text, and reads all of its rows. NULL reads as "".
func (s *session) query(ctx context.Context, text string) (out [][]string, err error) {
	err = s.answered(ctx, "looking", func(ctx context.Context) error {
		out, err = s.read(ctx, text)
		return err
	})
	s.late = time.Since(s.asked)
	return out, err
}

// age reads how many microseconds old something was when the last answer was made, and returns how old it was at s.now, at
// least: of a snapshot all ages are of one moment. What has begun since is as good as new.
func (s *session) age(text string) time.Duration {
	age := micros(text)
	return max(age-s.late, min(age, time.Microsecond))
}

func (s *session) read(ctx context.Context, text string) (out [][]string, err error) {
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
		if errors.Is(err, driver.ErrBadConn) { // else database/sql closes the connection
			err = errors.New(err.Error())
		}
		return err
	})
}

// hidden reports that the account may not read a table, or that the table does not exist.
func hidden(err error) bool {
	return server.Denied(err) || server.Missing(err) || server.Number(err) == server.UnknownTable
}
