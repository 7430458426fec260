package inspect

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
)

const (
	whoAny    = whoRows + ", and who waits for any lock as another account"
	calmRows  = "row locks that nobody waits for"
	calmNames = "who holds advisory locks that nobody waits for"
)

var onMariaDB = view{
	rowLocks: (*picture).mariadbRowLocks, namedLocks: (*picture).mariadbNamedLocks, refresh: (*session).newCopy,
	deadlocks: (*picture).mariadbDeadlocks, activity: (*picture).mariadbActivity,
	times: "QUERY_ID, CAST(TIME_MS * 1000 AS SIGNED)", mayKill: "CONNECTION ADMIN",
}

// transaction is one that MariaDB's InnoDB lists. Those that have written
// nothing, and have locked rows to share them only, all have the id 0.
type transaction struct {
	id    string
	conn  uint64
	wants string        // the id of the lock that it waits for
	age   time.Duration // at least: MariaDB tells whole seconds
	locks int           // how many rows it has locked
}

// record is a lock of a row that somebody waits for.
type record struct {
	id     string
	owner  string // a transaction's id
	shared bool
	lock   id
}

// mariadbRowLocks reads the locks of the table's rows, which MariaDB lists while
// somebody waits for them.
func (p *picture) mariadbRowLocks(ctx context.Context) error {
	trx, locks, err := p.trxAndLocks(ctx)
	switch {
	case hidden(err):
		p.gap(whoAny, "the account has no PROCESS", p.grant("PROCESS", "*.*"))
		return p.waitersByText(ctx)
	case errors.Is(err, errNewCopies):
		p.gap(whoRows, err.Error(), "")
		return nil
	case err != nil:
		return p.tolerate(err, whoRows, "")
	}
	var transactions []transaction
	var records []record
	untold := 0
	for _, r := range trx {
		conn, _ := strconv.ParseUint(r[2], 10, 64)
		rows, _ := strconv.Atoi(r[5])
		transactions = append(transactions, transaction{r[1], conn, r[3], max(p.age(r[4]).Truncate(time.Second), time.Microsecond), rows})
	}
	for _, r := range locks {
		namespace, name, ok := readPrimaryKey(r[4])
		if r[5] == "1" {
			untold++
		}
		if ok && !strings.Contains(r[3], "GAP") && !strings.Contains(r[3], "INSERT_INTENTION") {
			records = append(records, record{r[2], r[1], strings.HasPrefix(r[3], "S"), id{row, namespace, name}})
		}
	}
	if untold > 0 {
		p.blind(untold)
	}
	if err := p.mariadbRows(ctx, transactions, records); err != nil {
		return err
	}
	p.countUnseen(transactions)
	return nil
}

// trxAndLocks reads MariaDB's rows of transactions, and of locks, from one copy. On a slow machine MariaDB makes a
// new copy between the one and the other, in which a transaction waits that did not before: its lock would
// look like one that it holds. So the text reads the transactions before the locks and behind them.
func (p *picture) trxAndLocks(ctx context.Context) (trx, locks [][]string, err error) {
	const trxRows = "SELECT '%s', trx_id, trx_mysql_thread_id, COALESCE(trx_requested_lock_id, '')," +
		" GREATEST(TIMESTAMPDIFF(SECOND, trx_started, NOW(6)) - 1, 0) * 1000000, trx_rows_locked FROM information_schema.INNODB_TRX"
	text := fmt.Sprintf(trxRows+" UNION ALL SELECT 'locks', lock_trx_id, lock_id, lock_mode, lock_data, lock_data IS NULL"+
		" FROM information_schema.INNODB_LOCKS WHERE lock_type = 'RECORD' AND lock_table = %s UNION ALL "+trxRows+" LIMIT %d",
		"before", schema.Literal(p.table.String()), "behind", most)
	for began := time.Now(); ; {
		rows, err := p.query(ctx, text)
		if err != nil {
			return nil, nil, err
		}
		before, locks, same := oneCopy(rows)
		if same || len(rows) >= most { // then those behind the locks may be cut off
			p.full(rows, whoRows)
			return before, locks, nil
		}
		if time.Since(began) > copyWait {
			return nil, nil, errNewCopies
		}
	}
}

var errNewCopies = errors.New("each time while they were read MariaDB made a new copy of them")

// oneCopy returns the transactions before the locks, and the locks, and reports whether the transactions
// behind the locks are the same.
func oneCopy(rows [][]string) (before, locks [][]string, same bool) {
	of := make(map[string][][]string)
	for _, r := range rows {
		of[r[0]] = append(of[r[0]], r)
	}
	return of["before"], of["locks"], slices.EqualFunc(of["before"], of["behind"],
		func(a, b []string) bool { return slices.Equal(a[1:], b[1:]) })
}

const (
	// copyIdle is for how long nobody must have read MariaDB's copy of its transactions and row
	// locks before it makes a new one, and copyWait how long to wait for a new one.
	copyIdle, copyWait = 110 * time.Millisecond, 3 * time.Second
)

// newCopy waits until MariaDB shows its transactions and row locks by a copy that it has made since the
// call: one that has the transaction which the call begins. What the copy tells of that transaction's
// unique_checks is not what an earlier call has set.
func (s *session) newCopy(ctx context.Context) error {
	for _, text := range []string{"SET SESSION unique_checks = NOT @@unique_checks", "START TRANSACTION WITH CONSISTENT SNAPSHOT"} {
		if _, err := s.exec(ctx, text); err != nil {
			return err
		}
	}
	made, err := s.seesItself(ctx)
	for began := time.Now(); err == nil && !made && time.Since(began) < copyWait; {
		select {
		case <-time.After(copyIdle + rand.N(copyIdle)):
			made, err = s.seesItself(ctx)
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if _, failed := s.exec(ctx, "ROLLBACK"); err == nil {
		err = failed
	}
	switch {
	case hidden(err): // it shows none to this account
		return nil
	case err == nil && !made:
		return fmt.Errorf("%w; MariaDB shows an old copy, since another program reads information_schema.INNODB_TRX more often"+
			" than every 100 ms: stop that program", ErrNotKnown)
	}
	return err
}

// seesItself reports whether MariaDB's copy has the session's own transaction.
func (s *session) seesItself(ctx context.Context) (bool, error) {
	rows, err := s.query(ctx, "SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id = CONNECTION_ID()"+
		" AND trx_unique_checks = @@unique_checks")
	return len(rows) > 0, err
}

// countUnseen counts the transactions with locked rows that nobody waits for. The row that
// a transaction waits for counts among those that it has locked.
func (p *picture) countUnseen(transactions []transaction) {
	shown := make(map[uint64]int)
	for lock, list := range p.claims {
		for _, c := range list {
			if lock.strategy == row && !c.waiting {
				shown[c.conn]++
			}
		}
	}
	for _, t := range transactions {
		known := shown[t.conn]
		if t.wants != "" {
			known++
		}
		if t.locks > known {
			p.hiding = append(p.hiding, t)
		}
	}
	p.unseen = Value(len(p.hiding))
	if len(p.hiding) > 0 {
		p.gap(calmRows, fmt.Sprintf("MariaDB shows a row lock only while somebody waits for it; %d transactions hold row locks"+
			" that it does not show, of this table or others", len(p.hiding)), "Filter.Try, or mysqllock ls --try")
	}
}

// mariadbRows notes who has locked the records, and who waits.
func (p *picture) mariadbRows(ctx context.Context, transactions []transaction, records []record) error {
	running, err := p.statements(ctx)
	if err != nil {
		return err
	}
	statements := make(map[uint64]statement)
	for _, s := range running {
		statements[s.conn] = s
	}
	waited := make(map[string]bool) // ids of locks
	for _, t := range transactions {
		waited[t.wants] = true
		p.ages[t.conn] = t.age
	}
	exclusive := make(map[id]bool)
	for _, r := range records {
		for _, t := range transactions {
			if s := statements[t.conn]; t.wants == r.id {
				p.claims.add(r.lock, claim{conn: t.conn, waiting: true, shared: r.shared, order: s.order, age: s.age}.saying(s.text))
			} else if t.id == r.owner && t.id != "0" {
				p.claims.add(r.lock, claim{conn: t.conn, shared: r.shared, age: t.age})
				exclusive[r.lock] = exclusive[r.lock] || !r.shared
			}
		}
	}
	for _, r := range records {
		held := slices.ContainsFunc(p.claims[r.lock], func(c claim) bool { return !c.waiting })
		// The record of one who waits to share it is also that of one who does.
		if r.owner == "0" && !exclusive[r.lock] && (!held || !waited[r.id]) {
			p.sharing(r.lock, r.id, transactions)
		}
	}
	return nil
}

// sharing notes who shares a row, of the transactions without an id: where there
// is only one that it can be.
func (p *picture) sharing(lock id, record string, transactions []transaction) {
	var candidates []transaction
	for _, t := range transactions {
		if t.id == "0" && t.locks > 0 && t.wants != record {
			candidates = append(candidates, t)
		}
	}
	if len(candidates) == 1 {
		p.claims.add(lock, claim{conn: candidates[0].conn, shared: true, age: candidates[0].age})
		return
	}
	p.claims.add(lock, claim{shared: true})
	var conns []uint64
	for _, t := range candidates {
		conns = append(conns, t.conn)
	}
	p.sharers[lock] = conns
	why := fmt.Sprintf("MariaDB does not tell one from another of the %d transactions that have written nothing", len(candidates))
	if len(conns) > 0 {
		why += ", of the connections " + list(conns)
	}
	p.addGap(Gap{What: fmt.Sprintf("who shares the row of %q", lock.name), Why: why, holdersOf: []string{row}})
}

// mariadbNamedLocks reads who has named locks from a plugin, or from
// performance_schema; and who waits for them from the process list.
func (p *picture) mariadbNamedLocks(ctx context.Context) error {
	if err := p.namedWaitersByText(ctx); err != nil {
		return err
	}
	rows, err := p.query(ctx, fmt.Sprintf("SELECT TABLE_SCHEMA, THREAD_ID FROM information_schema.METADATA_LOCK_INFO"+
		" WHERE LOCK_TYPE = 'User lock' AND TABLE_SCHEMA LIKE '%s%%' LIMIT %d", lockname.Any, most))
	if hidden(err) && p.schema {
		rows, err = p.mariadbMetadataLocks(ctx)
	}
	if hidden(err) || errors.Is(err, errUnwatched) {
		p.unlisted = true
		if len(p.asked.keys) == 0 { // of single keys it is asked below
			p.gap(calmNames, "the plugin METADATA_LOCK_INFO is not installed", "INSTALL SONAME 'metadata_lock_info'")
		}
		return p.askForNames(ctx)
	}
	p.full(rows, whoNames)
	for _, r := range rows {
		conn, _ := strconv.ParseUint(r[1], 10, 64)
		p.named(r[0], claim{conn: conn, age: p.ages[conn]})
	}
	return p.tolerate(err, whoNames, "")
}

// mariadbMetadataLocks reads who has named locks from performance_schema. It fails as if that
// were hidden if performance_schema does not watch them, which is the default.
func (p *picture) mariadbMetadataLocks(ctx context.Context) ([][]string, error) {
	watched, err := p.query(ctx, "SELECT 1 FROM performance_schema.setup_instruments WHERE NAME = 'wait/lock/metadata/sql/mdl'"+
		" AND ENABLED = 'YES'")
	if err != nil {
		return nil, err
	}
	if len(watched) == 0 {
		return nil, errUnwatched
	}
	return p.query(ctx, fmt.Sprintf("SELECT m.OBJECT_NAME, t.PROCESSLIST_ID"+
		" FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.THREAD_ID = m.OWNER_THREAD_ID"+
		" WHERE m.OBJECT_TYPE = 'USER LEVEL LOCK' AND m.LOCK_STATUS = 'GRANTED' AND m.OBJECT_NAME LIKE '%s%%' LIMIT %d", lockname.Any, most))
}

var errUnwatched = errors.New("performance_schema does not watch metadata locks")

// mariadbDeadlocks reads the counter of InnoDB.
func (p *picture) mariadbDeadlocks(ctx context.Context) ([][]string, error) {
	rows, err := p.query(ctx, "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'INNODB_DEADLOCKS'")
	if err == nil && len(rows) == 0 {
		p.gap(deadlocks, "MariaDB counts them from 10.5 on", "")
	}
	return rows, p.tolerate(err, deadlocks, "")
}
