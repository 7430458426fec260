package lease

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // connections are killed all the time
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// scratch is a database of one test, with the lock table.
type scratch struct {
	*dbtest.Database
	table schema.Table
	db    *sql.DB // what the server says for itself
	info  server.Info
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	s := &scratch{Database: d, db: d.Open("mysql")}
	var err error
	s.table, err = schema.Parse(d.Name + ".mysqllock")
	dbtest.OK(d.T, err)
	s.onConn(func(conn driver.Conn) {
		s.info, err = server.Probe(context.Background(), conn)
		dbtest.OK(d.T, err)
		err = s.table.Ensure(context.Background(), conn, s.info, true)
		dbtest.OK(d.T, err)
	})
	return s
}

// onConn runs f with a connection of the driver below.
func (s *scratch) onConn(f func(driver.Conn)) {
	s.T.Helper()
	conn, err := s.db.Conn(context.Background())
	dbtest.OK(s.T, err)
	defer conn.Close()
	dbtest.OK(s.T, conn.Raw(func(c any) error {
		f(c.(driver.Conn))
		return nil
	}))
}

// session is a connection of an application's transactions, which takes several statements in a text.
func (s *scratch) session() driver.Conn {
	s.T.Helper()
	return s.Connect(func(cfg *mysql.Config) { cfg.MultiStatements = true })
}

// locker is a Locker with pools of its own, like one of another process.
type locker struct {
	*Locker
	s       *scratch
	conns   *pool.Pool
	control *pool.Pool
	tap     *dbtest.Tap
}

const handoffs = 5

type setup struct {
	ttl    time.Duration // 0 is 30 s
	max    int           // connections; 0 is 16
	params string        // of the DSN
	user   string        // "" is root
	reads  time.Duration // the limit on each read, which the Locker knows of; negative is none
	table  *schema.Table
	info   *server.Info
	packs  bool // its lock connections take several statements in a text
}

func (s *scratch) locker(with setup) *locker {
	s.T.Helper()
	if with.ttl == 0 {
		with.ttl = 30 * time.Second
	}
	if with.max == 0 {
		with.max = 16
	}
	if with.table == nil {
		with.table = &s.table
	}
	if with.info == nil {
		with.info = &s.info
	}
	l := &locker{s: s, tap: new(dbtest.Tap)}
	if with.reads == 0 {
		with.reads = 10 * time.Second
	}
	with.reads = max(0, with.reads)
	connector := s.Connector(dbtest.With(with.params), dbtest.As(with.user), l.tap.On, func(cfg *mysql.Config) { cfg.ReadTimeout, cfg.MultiStatements = with.reads, with.packs })
	several := func(context.Context, *pool.Conn) (bool, error) { return with.packs, nil }
	l.conns = pool.New(pool.Config{Connect: connector.Connect, Several: several, Max: with.max, Idle: with.ttl / 2, Setup: Setup(with.ttl)})
	l.control = pool.New(pool.Config{
		Connect: connector.Connect, Max: 4, Idle: with.ttl,
		Setup: "SET SESSION autocommit = 1, " + server.OwnSettings + ", innodb_lock_wait_timeout = 5, lock_wait_timeout = 5",
	})
	rows := keyrow.Config{Control: l.control, Table: *with.table, Namespace: s.Name, Info: s.info, Auto: true}
	cfg := strategy.Config{
		Config: rows, Rows: keyrow.New(rows), Conns: l.conns, Queue: new(queue.Queue),
		Owner: "host:1:test", TTL: with.ttl, ReadTimeout: with.reads, HandOvers: handoffs, HandOverTime: time.Minute,
	}
	cfg.Info = *with.info
	l.Locker = New(cfg)
	s.T.Cleanup(l.close)
	return l
}

// sender is how several statements go to a connection.
type sender = func(ctx context.Context, conn driver.Conn, texts ...string) ([][][]string, error)

// forms are those of a COMMIT with what goes out with it.
var forms = map[string]sender{"one text": server.SendPacket, "one by one": server.SendSingly}

// commit commits the transaction on conn if the leases are held. ends: they end with it.
func (l *locker) commit(by sender, conn driver.Conn, ends bool, leases ...*Grant) error {
	l.s.T.Helper()
	return l.send(by, conn, ends, []string{"COMMIT"}, leases)
}

// fence is commit without COMMIT.
func (l *locker) fence(conn driver.Conn, leases ...*Grant) error {
	l.s.T.Helper()
	return l.send(server.SendSingly, conn, false, nil, leases)
}

func (l *locker) send(by sender, conn driver.Conn, ends bool, end []string, leases []*Grant) error {
	l.s.T.Helper()
	ctx := dbtest.Limited(l.s.T)
	var held []strategy.Grant
	for _, g := range leases {
		held = append(held, g)
	}
	check, err := l.Check(ctx, nil, held, strategy.Commit{Wrote: true, Ends: ends})
	if err != nil {
		return err
	}
	texts := append(check.Before, end...)
	answers, err := by(ctx, conn, texts...)
	done := len(answers)
	for err != nil && done < len(check.Before) && check.Again(done, err) {
		answers, err = by(ctx, conn, texts[done:]...)
		done += len(answers)
	}
	switch {
	case err == nil:
		check.Ended(strategy.Committed)
	case server.Number(err) == 0:
		check.Ended(strategy.Unknown)
	default:
		check.Ended(strategy.Failed)
		err = check.Failed(ctx, done, err)
	}
	return err
}

// refused is what asking for a lease ends with that somebody has, and who that is:
// it is asked again where a busy server did not say in time.
func (l *locker) refused(r Request) (err error) {
	l.s.T.Helper()
	for began := time.Now(); time.Since(began) < dbtest.Patience; {
		_, err = l.Acquire(dbtest.Limited(l.s.T), r)
		var e *lockerr.Error
		if !errors.As(err, &e) {
			l.s.T.Fatalf("not refused: %v", err)
		}
		if e.Holder != nil {
			break
		}
	}
	return err
}

// told is what asking for a lease with a short wait ends with: it is asked again where a busy
// server has not answered within the wait.
func (l *locker) told(r Request) error {
	l.s.T.Helper()
	return dbtest.Until(func() error {
		_, err := l.Acquire(dbtest.Limited(l.s.T), r)
		return err
	}, func(err error) bool { return !errors.Is(err, lockerr.ErrNoAnswer) })
}

func (l *locker) close() {
	l.Close()
	l.conns.Close()
	l.control.Close()
}

// renewNow has the goroutine that renews do so with these leases, as if they were due.
func (l *locker) renewNow(leases ...*Grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lease := range leases {
		lease.due = time.Now()
	}
	l.changed(time.Time{})
}

// inQueue waits until so many callers of the process are in the queue for the key.
func (l *locker) inQueue(key string, n int) {
	l.s.T.Helper()
	dbtest.Soon(l.s.T, fmt.Sprintf("%d are in the queue", n), func() bool { return l.cfg.Queue.Waiting(key) == n })
}

// request is one for key with a TTL of 30 s that does not wait.
func request(key string) Request { return Request{Key: key, TTL: 30 * time.Second} }

func waiting(key string, wait time.Duration) Request {
	r := request(key)
	r.Wait = wait
	return r
}

func (l *locker) acquire(r Request) *Grant {
	l.s.T.Helper()
	lease, err := l.Acquire(dbtest.Limited(l.s.T), r)
	dbtest.OK(l.s.T, err)
	return lease
}

// pass acquires a lease in the background and releases it at once. It tells how that ended.
func (l *locker) pass(ctx context.Context, r Request) <-chan error {
	ended := make(chan error, 1)
	go func() {
		lease, err := l.Acquire(ctx, r)
		if err == nil {
			if err = lease.Release(); err != nil {
				err = fmt.Errorf("granted, but not released: %v", err) //nolint:errorlint // it is no error of Acquire
			}
		}
		ended <- err
	}()
	return ended
}

// asking asks for a lease in the background, and tells how that ended.
func (l *locker) asking(ctx context.Context, r Request) <-chan error {
	return dbtest.Go(func() error { return dbtest.Err(l.Acquire(ctx, r)) })
}

// back wants a lease to be given back, if not when Release returned err then later: that waits
// for the server for handoffWait only.
func (s *scratch) back(lease *Grant, err error) {
	s.T.Helper()
	if !stalled(err) {
		dbtest.OK(s.T, err)
		return
	}
	dbtest.Soon(s.T, lease.key+" is given back", func() bool { return !s.row(lease.key).live && s.wakeUps(lease.key) == 0 })
}

// stalled reports whether what has failed with err was not answered in time.
func stalled(err error) bool {
	return errors.Is(err, lockerr.ErrNoAnswer) || errors.As(err, new(server.Silence))
}

// row is what the server has on a key.
type row struct {
	owner string
	token uint64
	live  bool
	left  time.Duration
}

func (s *scratch) row(key string) (r row) {
	s.T.Helper()
	var micros int64
	dbtest.OK(s.T, s.db.QueryRow("SELECT COALESCE(owner, ''), token, owner IS NOT NULL AND expires > UTC_TIMESTAMP(6),"+
		" TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) FROM "+s.table.String()+
		" WHERE namespace = "+schema.Literal(s.Name)+" AND name = "+schema.Literal(key)).
		Scan(&r.owner, &r.token, &r.live, &micros))
	r.left = time.Duration(micros) * time.Microsecond
	return r
}

// set changes the row of a key by hand.
func (s *scratch) set(key, assignments string) {
	s.T.Helper()
	_, err := s.db.Exec("UPDATE " + s.table.String() + " SET " + assignments +
		" WHERE namespace = " + schema.Literal(s.Name) + " AND name = " + schema.Literal(key))
	dbtest.OK(s.T, err)
}

// steal gives the lease to somebody else.
func (s *scratch) steal(key string) {
	s.set(key, "owner = 'thief#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
}

// lockRow has the row of key locked until the transaction ends.
func (s *scratch) lockRow(key string) *sql.Tx { return s.lockedRow(key, "FOR UPDATE") }

// shareRow is the same with a lock that others can share.
func (s *scratch) shareRow(key string) *sql.Tx { return s.lockedRow(key, "LOCK IN SHARE MODE") }

func (s *scratch) lockedRow(key, how string) *sql.Tx {
	s.T.Helper()
	tx := dbtest.Begin(s.T, context.Background(), s.db) // else a test that has failed cannot drop its database
	dbtest.Exec(s.T, tx, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = ? AND name = ? "+how, s.Name, key)
	return tx
}

// threads are the ids of the database's connections but our own for which cond holds.
func (s *scratch) threads(cond string) []int64 {
	s.T.Helper()
	return dbtest.Column[int64](s.T, s.db, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND ("+cond+")", s.Name)
}

// inWakeUp are those that wait for a wake-up lock.
func (s *scratch) inWakeUp() []int64 { return s.threads("STATE = 'User lock'") }

func (s *scratch) kill(ids []int64) {
	for _, id := range ids {
		_, _ = s.db.Exec(fmt.Sprintf("KILL CONNECTION %d", id)) // it may have gone
	}
}

func count(texts []string, begin string) (n int) {
	for _, text := range texts {
		if strings.HasPrefix(text, begin) {
			n++
		}
	}
	return n
}

// TestOwnErrorsHaveSentinels: what a caller is told without a word of the server's says
// what it means.
func TestOwnErrorsHaveSentinels(t *testing.T) {
	for err, want := range map[error]error{lockerr.ErrNoAnswer: lockerr.ErrNoAnswer, keyrow.ErrNoRow: lockerr.ErrUnsafe} {
		if !errors.Is(terms.Failure("lock", "k", err), want) {
			t.Errorf("%v is not %v", err, want)
		}
	}
}
