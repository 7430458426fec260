package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Diagnosis says which strategies are safe on a server, and what Doctor found there.
type Diagnosis struct {
	Version  string // as the server calls it
	MariaDB  bool
	Verdicts []Verdict // one for each strategy
	Checks   []Check
}

// Verdict says whether a strategy is safe.
type Verdict struct {
	Strategy string
	Safe     bool
	Why      []string // what makes it unsafe; or, if it is safe, up to which point
}

// State is the result of a check.
type State string

// The results of a check.
const (
	OK      State = "ok"
	Note    State = "note"    // worth knowing
	Warning State = "warning" // something is slower or less safe than it could be
	Failure State = "failure" // a strategy is not safe, or cannot be used
)

// Check is one thing that was examined.
type Check struct {
	Name   string
	State  State
	Detail string
	Remedy string // what to do; "" if there is nothing to do
}

// Doctor examines the server, and the privileges of the account. It changes nothing: it
// finds out the privileges on the lock table by EXPLAIN, which needs those of the
// statement that it explains, and whether the account may make the table by a CREATE TABLE
// that names a column twice: the server refuses it, after it has looked at the privileges.
func (i *Inspector) Doctor(ctx context.Context) (*Diagnosis, error) {
	e := &examination{Diagnosis: new(Diagnosis), against: make(map[string][]string)}
	err := i.open(ctx, func(ctx context.Context, s *session) error {
		e.session = s
		if usable, err := e.recognised(ctx); err != nil || !usable {
			return err
		}
		if err := s.begin(ctx, i); err != nil {
			return err
		}
		checks := []func(context.Context) error{
			e.server, e.packets, e.lockTable, e.namespaceCheck, e.privileges, e.clock, e.encryption, e.visibility,
		}
		if !e.info.UsedTables { // else nothing depends on these settings
			checks = slices.Insert(checks, 5, e.proxy, e.connections, e.budgets, e.settings)
		}
		for _, check := range checks {
			if err := check(ctx); err != nil {
				return fmt.Errorf("mysqllock: examining the server: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	e.conclude()
	return e.Diagnosis, nil
}

// examination is a Diagnosis in the making.
type examination struct {
	*Diagnosis
	*session
	against map[string][]string // what makes a strategy unsafe
}

const optimistic = hint.StrategyOptimistic

var (
	all     = []string{row, lease, advisory, optimistic}
	onTable = []string{row, lease, optimistic}
)

func (e *examination) add(name string, state State, detail, remedy string) {
	e.Checks = append(e.Checks, Check{name, state, detail, remedy})
}

// ruleOut notes why strategies are not safe.
func (e *examination) ruleOut(why string, strategies ...string) {
	for _, s := range strategies {
		e.against[s] = append(e.against[s], why)
	}
}

// recognised reports whether the server is one on which locks hold at all. Where it is none,
// nothing else is asked.
func (e *examination) recognised(ctx context.Context) (bool, error) {
	err := e.recognise(ctx)
	e.Version, e.MariaDB = e.info.Version, e.info.MariaDB
	switch {
	case err == nil:
		return true, nil
	case e.info.Version == "":
		return false, err
	}
	why := err.Error() // too old, or it shows nothing
	if e.info.Shows() != nil && e.info.Reliable() == nil {
		e.add("server", OK, e.info.Engine, "")
		e.add("visibility", Note, why, "")
		e.add("lock table", Note, "neither it nor the account's privileges are looked at here", "")
		e.ruleOutByFlavour()
		if e.info.ReadOnly {
			e.ruleOut("the server is read-only", all...)
		}
		return false, nil
	}
	if errors.Is(err, lockerr.ErrUnsafe) {
		why = e.info.Why()
	}
	e.add("server", Failure, why, "MySQL from 8.0 or MariaDB from 10.3")
	e.ruleOut(why, all...)
	return false, nil
}

// ruleOutByFlavour rules out what does not work on such a server.
func (e *examination) ruleOutByFlavour() {
	for strategy, err := range map[string]error{
		lease:    errors.Join(e.info.Leases(), e.info.Pessimists("fences of leases")),
		advisory: e.info.AdvisoryLocks(),
	} {
		if err != nil {
			e.ruleOut(err.Error(), strategy)
		}
	}
}

func (e *examination) server(context.Context) error {
	e.add("server", OK, e.info.Version, "")
	e.ruleOutByFlavour()
	switch {
	case e.info.SkipLocked:
	case e.info.Slots() == nil:
		e.add("SKIP LOCKED", Note, "it locks nothing here, so slots are tried one after the other", "")
	default:
		e.add("SKIP LOCKED", Failure, "the server does not know it, so leases and slots are refused", "MariaDB 10.6 or later")
	}
	if e.info.StatementLog {
		e.add("binary log", Failure, "binlog_format is STATEMENT: when a replica is promoted, the tokens of leases go back",
			"SET GLOBAL binlog_format = 'ROW', or MIXED")
		e.ruleOut("binlog_format is STATEMENT", lease)
	}
	switch topology := e.info.Topology; {
	case e.info.Streams():
		e.add("topology", Note, topology+": all nodes agree to a row lock;"+
			" shared ones are refused, and leases should have a TTL of more than the 7 s that a failover takes", "")
		e.ruleOut("each node grants them for itself on "+topology, advisory)
	case topology != "":
		e.add("topology", Failure, topology+": several nodes take writes,"+
			" and leases should have a TTL of more than the 25 s that a failover can take",
			"leases, or lockUnsafe=allow, for an application that uses one node only")
		e.ruleOut("two nodes grant the same lock on "+topology, row, advisory)
	case e.info.SinglePrimary:
		e.add("topology", Warning, "Group Replication with a single primary:"+
			" leases should have a TTL of more than the 25 s that a failover takes", "")
		e.ruleOut("a failover frees them, and a member that is cut off grants them again", advisory)
	case e.info.UsedTables:
		e.add("topology", OK, "several servers may take writes, and agree to each lock; leases go by the clock of the one that is asked", "")
	default:
		e.add("topology", OK, "one server takes writes, as far as it tells", "")
	}
	if e.info.ReadOnly {
		e.add("writes", Failure, "the server is read-only", "name the one that takes writes")
		e.ruleOut("the server is read-only", all...)
	}
	return nil
}

// packets tells in which form several statements of the driver's own go to a session, and why.
func (e *examination) packets(ctx context.Context) error {
	const name = "several statements"
	var why string
	var trip time.Duration
	err := e.answered(ctx, "trying several statements in one text", func(ctx context.Context) error {
		return e.onDriver(func(conn driver.Conn) (err error) {
			if why, err = e.info.TakesPackets(ctx, conn); err != nil || why != "" {
				return err
			}
			for range 5 { // the quickest tells how far away the server is
				began := time.Now()
				if err := server.Exec(ctx, conn, "DO 1"); err != nil {
					return err
				}
				if took := time.Since(began); trip == 0 || took < trip {
					trip = took
				}
			}
			return nil
		})
	})
	switch {
	case err != nil:
		return err
	case why != "":
		e.add(name, Note, "those of the driver go one by one to a session that is answered like this connection;"+
			" sessions ask for multiStatements=true: "+why, "")
	default:
		e.add(name, OK, fmt.Sprintf("those of the driver go to sessions in one text; a statement takes %v", trip.Round(time.Microsecond)), "")
	}
	return nil
}

// lookOnly is a connection that writes nothing.
type lookOnly struct{ driver.Conn }

var errWouldWrite = errors.New("it would be written")

func (lo lookOnly) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, errWouldWrite
}

func (lo lookOnly) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	if q, ok := lo.Conn.(driver.QueryerContext); ok {
		return q.QueryContext(ctx, text, args)
	}
	return nil, driver.ErrSkip
}

func (e *examination) lockTable(ctx context.Context) error {
	const name = "lock table"
	var lack Lack
	err := e.answered(ctx, "looking at the lock table", func(ctx context.Context) error {
		return e.onDriver(func(conn driver.Conn) (err error) {
			lack, err = e.examine(ctx, lookOnly{conn}, false)
			return err
		})
	})
	setup := strings.Join(e.table.Setup(), ";\n")
	switch {
	case err == nil:
		e.add(name, OK, e.table.String()+" is as it should be", "")
		if lack.Columns != "" {
			e.add(name, Note, "since when leases are held, and who has taken one away, is not told without the columns of this version: "+lack.Why,
				"mysqllock schema apply, with an account that has ALTER")
		}
	case errors.Is(err, errWouldWrite):
		e.add(name, Warning, "it lacks its high-water row, which is made at the next use where lockSchema is auto", setup)
	case errors.Is(err, lockerr.ErrUnsafe):
		e.add(name, Failure, err.Error(), "ALTER TABLE "+e.table.String()+" ENGINE=InnoDB")
		e.ruleOut("the lock table has no row locks", onTable...)
	default:
		switch _, err := e.query(ctx, "SELECT 1 FROM "+e.table.String()+" WHERE FALSE"); {
		case server.Missing(err):
			return e.missingTable(ctx, name, setup)
		case server.Denied(err):
			e.add(name, Failure, "the account may not read "+e.table.String()+", if it exists", e.grant("SELECT, INSERT, UPDATE", e.table.String()))
			return nil // privileges rules the strategies out
		case server.Interrupted(err):
			e.add(name, Warning, "not looked at: the server did not answer in time, or a program alters or has locked the table: "+err.Error(), "")
			return nil
		}
		what, _, _ := strings.Cut(err.Error(), "\n") // without the SQL, which is the remedy
		e.add(name, Warning, strings.TrimSuffix(what, ":")+" what is below, which the first use does where lockSchema is auto"+
			" and the account may", setup)
	}
	return nil
}

// missingTable tells of a lock table that does not exist.
func (e *examination) missingTable(ctx context.Context, name, setup string) error {
	_, err := e.query(ctx, "CREATE TABLE "+e.table.String()+" (namespace INT, namespace INT)")
	switch {
	case server.Number(err) == server.DuplicateColumn: // a column twice, so the account may
		e.add(name, Warning, e.table.String()+" does not exist yet; the account may make it, and does at the first use"+
			" where lockSchema is auto", setup)
		return nil
	case server.Number(err) == 0:
		return err
	}
	e.add(name, Failure, e.table.String()+" does not exist, and the account may not make it: "+err.Error(),
		setup+";\n"+e.grant("CREATE", e.table.String())+" -- or let another account run what is above")
	e.ruleOut("the lock table does not exist, and the account may not make it", onTable...)
	return nil
}

func (e *examination) privileges(ctx context.Context) error {
	t := e.table.String()
	var lacking []string
	for _, try := range [][2]string{
		{"SELECT", "SELECT namespace, name, owner, token, expires FROM " + t + " WHERE FALSE"},
		{"INSERT", "INSERT INTO " + t + " (namespace, name, owner, token, expires) SELECT x'', x'', NULL, 0, UTC_TIMESTAMP(6)" +
			" FROM (SELECT 1) d WHERE FALSE"},
		{"UPDATE", "UPDATE " + t + " SET owner = NULL, token = 0, expires = UTC_TIMESTAMP(6) WHERE FALSE"},
		{"DELETE", "DELETE FROM " + t + " WHERE FALSE"},
	} {
		_, err := e.query(ctx, "EXPLAIN "+try[1])
		switch {
		case server.Denied(err):
			lacking = append(lacking, try[0])
		case server.Number(err) == 0 && err != nil:
			return err
		case err != nil: // what it is about lockTable has told
			return nil
		}
	}
	const name = "privileges"
	forClean := slices.Contains(lacking, "DELETE")
	lacking = slices.DeleteFunc(lacking, func(s string) bool { return s == "DELETE" })
	switch {
	case len(lacking) > 0:
		e.add(name, Failure, "the account has not all of SELECT, INSERT and UPDATE on the lock table", e.grant(strings.Join(lacking, ", "), t))
		e.ruleOut("the account lacks "+strings.Join(lacking, ", ")+" on the lock table", onTable...)
	case forClean:
		e.add(name, Note, "SELECT, INSERT and UPDATE on the lock table; to clean it up, DELETE is needed, too", e.grant("DELETE", t))
	default:
		e.add(name, OK, "SELECT, INSERT, UPDATE and DELETE on the lock table", "")
	}
	return nil
}

// proxy looks whether something sends the statements of one connection to
// several, as reads go elsewhere behind a splitter of reads and writes.
func (e *examination) proxy(ctx context.Context) error {
	conns, servers := make(map[string]bool), make(map[string]bool)
	const read = "SELECT CONNECTION_ID(), CONCAT_WS(':', @@hostname, @@port, @@server_id)"
	for _, text := range []string{read, "START TRANSACTION", read, "ROLLBACK", read, read + " FROM DUAL FOR UPDATE", read} {
		rows, err := e.query(ctx, text)
		if err != nil {
			return err
		}
		for _, r := range rows {
			conns[r[0]], servers[r[1]] = true, true
		}
	}
	split := len(servers) > 1
	if e.info.Router {
		err := e.answered(ctx, "looking for a proxy", func(ctx context.Context) error {
			return e.onDriver(func(conn driver.Conn) error { return server.NotSplit(ctx, conn) })
		})
		if err != nil && !errors.Is(err, lockerr.ErrUnsafe) {
			return err
		}
		split = split || err != nil
	}
	switch {
	case split:
		e.add("proxy", Failure, "the statements of one connection reach several servers", "a port of the proxy that leads to one server")
		e.ruleOut("the statements of one connection reach several servers", all...)
	case e.info.Router:
		e.add("proxy", OK, "MySQL Router, which leads all statements to one server", "")
	case len(conns) > 1:
		e.add("proxy", Failure, "the statements of one connection reach several connections of one server",
			"a port of the proxy that does not multiplex")
		e.ruleOut("the statements of one connection reach several", row, advisory)
	default:
		e.add("proxy", OK, "none was noticed that sends the statements of one connection to several", "")
	}
	return nil
}

// oneProcess is how many connections a process without maxConns may have for locks,
// beside those of database/sql, where lockMaxConns is the default: for sessions, leases
// and advisory locks, and to make rows and kill waiters.
const oneProcess = 3*pool.DefaultMax + pool.ControlMax

func (e *examination) connections(ctx context.Context) error {
	rows, err := e.query(ctx, "SELECT @@max_user_connections")
	if err != nil {
		return err
	}
	most, used, err := e.room(ctx)
	if err != nil {
		return err
	}
	detail := fmt.Sprintf("%d of %d are in use", used, most)
	if ours := rows[0][0]; ours != "0" {
		detail += ", and an account may have " + ours
	}
	detail += fmt.Sprintf("; a process without maxConns may use %d for locks, beside its own", oneProcess)
	if most-used < oneProcess {
		e.add("connections", Warning, detail, "a larger max_connections, or a smaller lockMaxConns")
	} else {
		e.add("connections", OK, detail, "")
	}
	return nil
}

// room returns how many connections the server takes, and how many there are.
func (e *examination) room(ctx context.Context) (most, used int, err error) {
	rows, err := e.query(ctx, "SELECT @@max_connections")
	if err != nil {
		return 0, 0, err
	}
	status, err := e.query(ctx, "SHOW GLOBAL STATUS LIKE 'Threads_connected'")
	if err != nil {
		return 0, 0, err
	}
	if len(status) == 0 {
		return 0, 0, errors.New("the server does not tell how many connections it has")
	}
	most, err = strconv.Atoi(rows[0][0])
	if err == nil {
		used, err = strconv.Atoi(status[0][1])
	}
	return most, used, err
}

func (e *examination) settings(ctx context.Context) error {
	rows, err := e.query(ctx, "SELECT @@innodb_flush_log_at_trx_commit")
	if err != nil {
		return err
	}
	if rows[0][0] == "1" {
		e.add("durability", OK, "innodb_flush_log_at_trx_commit is 1", "")
	} else {
		e.add("durability", Warning, "innodb_flush_log_at_trx_commit is "+rows[0][0]+": after a crash a token can go back,"+
			" and be granted again", "innodb_flush_log_at_trx_commit = 1")
	}
	detail := "lock waits that end roll back the statement"
	if e.info.RollbackOnTimeout {
		detail = "innodb_rollback_on_timeout is ON: a lock wait that ends rolls back the transaction, also one that asks for a second lock"
	}
	e.add("lock waits", OK, detail, "")
	if e.info.SnapshotIsolation {
		rows, err := e.query(ctx, "SELECT @@innodb_snapshot_isolation")
		if err != nil {
			return err
		}
		if rows[0][0] == "1" {
			e.add("snapshots", Note, "innodb_snapshot_isolation is ON: a lock asked for in a transaction that has read fails"+
				" where the row has changed since", "")
		}
	}
	return nil
}

func (e *examination) clock(ctx context.Context) error {
	sent := time.Now()
	rows, err := e.query(ctx, "SELECT CAST(UTC_TIMESTAMP(6) AS CHAR)")
	if err != nil {
		return err
	}
	unsure := time.Since(sent) / 2
	ahead := moment(rows[0][0]).Sub(sent.Add(unsure).UTC())
	about := unsure.Round(time.Microsecond)
	detail := fmt.Sprintf("the server's and this machine's agree within %v", about)
	switch {
	case ahead > unsure:
		detail = fmt.Sprintf("the server's is %v ahead of this machine's, give or take %v", ahead.Round(time.Microsecond), about)
	case ahead < -unsure:
		detail = fmt.Sprintf("the server's is %v behind this machine's, give or take %v", -ahead.Round(time.Microsecond), about)
	}
	e.add("clock", OK, detail+"; locks do not depend on that", "")
	return nil
}

// encryption tells whether the connection is encrypted.
func (e *examination) encryption(ctx context.Context) error {
	rows, err := e.query(ctx, "SHOW SESSION STATUS WHERE Variable_name IN ('Ssl_version', 'Ssl_cipher')")
	if err != nil || len(rows) < 2 { // a proxy may not answer
		return nil //nolint:nilerr // nothing depends on it
	}
	if rows[0][1] == "" || rows[1][1] == "" {
		e.add("encryption", Note, "the connection is not encrypted: who can read the network reads keys and data",
			"tls=true in the DSN, or tls=preferred, unless the connection stays on this machine")
		return nil
	}
	e.add("encryption", OK, rows[1][1]+", "+rows[0][1], "")
	return nil
}

// visibility tells what a Snapshot would not show.
func (e *examination) visibility(ctx context.Context) error {
	p, err := e.look(ctx, Filter{})
	if err != nil {
		return err
	}
	p.locks()
	gaps := slices.DeleteFunc(p.gaps, func(g Gap) bool { return g.Why == noTable }) // lockTable has told
	if len(gaps) == 0 {
		e.add("visibility", OK, "who holds and who waits is shown", "")
	}
	for _, g := range gaps {
		e.add("visibility", Note, "not shown: "+g.What+": "+g.Why, g.Remedy)
	}
	return nil
}

// limits are how far a strategy is safe.
var limits = map[string]string{
	row:        "the lock is in the transaction that does the work, and is lost only together with it",
	lease:      "whoever has lost the lease cannot commit under it",
	advisory:   "as long as its connection lives, which is looked at right before COMMIT, but not during it",
	optimistic: "a commit fails if another was there first",
}

func (e *examination) conclude() {
	for _, s := range all {
		v := Verdict{Strategy: s, Safe: len(e.against[s]) == 0, Why: e.against[s]}
		if v.Safe {
			v.Why = []string{limits[s]}
		}
		e.Verdicts = append(e.Verdicts, v)
	}
}
