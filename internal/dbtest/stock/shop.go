package stock

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Shop is a database of one test, with a table p (id, stock) that has a few products of
// stock 10.
type Shop struct {
	*dbtest.Database
	Plain *sql.DB // with the driver "mysql": what the server says for itself
}

// NewShop fills a database.
func NewShop(d *dbtest.Database) *Shop {
	d.T.Helper()
	s := &Shop{Database: d, Plain: d.Open("mysql")}
	dbtest.Exec(d.T, s.Plain, "CREATE TABLE p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(d.T, s.Plain, "INSERT INTO p VALUES (1, 10), (2, 10), (3, 10), (4, 10)")
	return s
}

// Handle opens a handle of the driver under test. params are added to the DSN, such as
// "lockWait=1s".
func (s *Shop) Handle(params ...string) *sql.DB {
	s.T.Helper()
	return s.Open("mysqllock", params...)
}

// Limited opens a handle with at most n connections, of an account for which the server
// itself takes no more.
func (s *Shop) Limited(t *testing.T, n int, params ...string) *sql.DB {
	t.Helper()
	return dbtest.Open(t, "mysqllock", s.LimitedDSN(t, n, params...))
}

// LimitedDSN is the DSN of such a handle.
func (s *Shop) LimitedDSN(t *testing.T, n int, params ...string) string {
	t.Helper()
	user := "u_" + dbtest.Random()
	dbtest.Exec(t, s.Plain, fmt.Sprintf("CREATE USER %s WITH MAX_USER_CONNECTIONS %d", user, n))
	t.Cleanup(func() { s.Plain.Exec("DROP USER " + user) })
	dbtest.Exec(t, s.Plain, "GRANT ALL ON "+s.Name+".* TO "+user)
	return s.Changed(dbtest.As(user)).DSN(append(params, fmt.Sprintf("maxConns=%d", n))...)
}

// Tapped opens it through a tap on its connections.
func (s *Shop) Tapped(c mysqllock.Config) (*sql.DB, *dbtest.Tap) {
	s.T.Helper()
	tap, cfg := new(dbtest.Tap), s.Config()
	tap.On(cfg)
	return s.OpenDB(mysqllock.NewConnector(cfg, c)), tap
}

// Proxied opens it through a proxy.
func (s *Shop) Proxied(c mysqllock.Config) (*sql.DB, *dbtest.Proxy) {
	s.T.Helper()
	cfg := s.Config()
	p := dbtest.StartProxy(s.T, cfg.Addr)
	cfg.Net, cfg.Addr = "tcp", p.Addr()
	db := s.OpenDB(mysqllock.NewConnector(cfg, c))
	s.T.Cleanup(p.Close) // first, so that nothing waits for what is held up
	return db, p
}

// Stock returns the stock of a product.
func (s *Shop) Stock(id int) (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT stock FROM p WHERE id = ?", id).Scan(&n))
	return n
}

// WantStock fails the test unless the product has that stock.
func (s *Shop) WantStock(id, want int) {
	s.T.Helper()
	if got := s.Stock(id); got != want {
		s.T.Errorf("stock of %d is %d, want %d", id, got, want)
	}
}

// Locked asks the server whether the key's row is locked, by trying.
func (s *Shop) Locked(key string) bool {
	s.T.Helper()
	tx, err := s.Plain.Begin()
	dbtest.OK(s.T, err)
	defer tx.Rollback()
	var n int
	row := tx.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND name = ?", s.Name, key)
	dbtest.OK(s.T, row.Scan(&n))
	if n == 0 {
		return false
	}
	err = tx.QueryRow("SELECT 1 FROM mysqllock WHERE namespace = x'" + hex.EncodeToString([]byte(s.Name)) +
		"' AND name = x'" + hex.EncodeToString([]byte(key)) + "' FOR UPDATE SKIP LOCKED").Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return true
	}
	dbtest.OK(s.T, err)
	return false
}

// Leased asks the server whether a lease on key is live.
func (s *Shop) Leased(key string) bool {
	s.T.Helper()
	var n int
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND name = ? AND owner IS NOT NULL"+
		" AND expires > UTC_TIMESTAMP(6)", s.Name, key).Scan(&n))
	return n == 1
}

// Token returns the token of the key's row.
func (s *Shop) Token(key string) (token uint64) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT token FROM mysqllock WHERE namespace = ? AND name = ?", s.Name, key).Scan(&token))
	return token
}

// Querier is a *sql.DB, *sql.Conn or *sql.Tx.
type Querier interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// Read reads the stock of a product.
func Read(ctx context.Context, db Querier, id int) (n int, err error) {
	return n, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", id).Scan(&n)
}

// Decide reads the stock of a product and writes it, less one, under a key.
func Decide(ctx context.Context, db *sql.DB, key string, id int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = lockctx.With(ctx, key)
	stock, err := Read(ctx, db, id)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	time.Sleep(time.Millisecond)
	if _, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", stock-1, id); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// Sell takes one from the stock of a product under a key, in one of three ways.
func Sell(ctx context.Context, db *sql.DB, how int, key string, id int) error {
	const less = "UPDATE p SET stock = stock - 1 WHERE id = ?"
	switch how % 3 {
	case 0:
		return Decide(ctx, db, key, id)
	case 1:
		return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, less, id)
			return err
		})
	}
	tx, err := db.BeginTx(lockctx.With(ctx, key), nil)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, less, id)
	return errors.Join(err, tx.Commit())
}

// Hold is a job of a child that holds the key "product:1" until its input ends. It says
// that it holds it, and how that ended.
func Hold(db *sql.DB, in *bufio.Scanner) {
	err := mysqllock.Do(context.Background(), db, "product:1", func(context.Context) error {
		fmt.Println("holds")
		in.Scan()
		return nil
	})
	fmt.Println("ended", err)
}

// TTL is that of leases which a test needs to its end, also on a machine that stands still
// for some seconds.
const TTL = 15 * time.Second

// becomes asks whether something is so that is wanted to be so. If it is not wanted, it asks for
// some seconds, which are fewer than TTL: a busy server may not have let it go in time, and then
// does so in the background.
func becomes(ask func() bool, want bool) (got bool) {
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if got = ask(); got == want || want || time.Since(began) > TTL*2/3 {
			return got
		}
	}
}

// WantLocked fails the test unless the key's row is locked, or is not.
func (s *Shop) WantLocked(key string, want bool) {
	s.T.Helper()
	if got := becomes(func() bool { return s.Locked(key) }, want); got != want {
		s.T.Errorf("locked(%s) = %v, want %v", key, got, want)
	}
}

// WantLeased fails the test unless a lease on key is live, or is not.
func (s *Shop) WantLeased(key string, want bool) {
	s.T.Helper()
	if got := becomes(func() bool { return s.Leased(key) }, want); got != want {
		s.T.Errorf("leased(%s) = %v, want %v", key, got, want)
	}
}

// Steal gives the lease on key to somebody else, as after its end.
func (s *Shop) Steal(key string) {
	s.T.Helper()
	dbtest.Exec(s.T, s.Plain, "UPDATE mysqllock SET owner = 'thief#00000000', token = token + 1,"+
		" expires = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND WHERE namespace = ? AND name = ?", s.Name, key)
}

// Lapse makes key's row that of a lease which has run out and was never given back.
func (s *Shop) Lapse(db *sql.DB, key string) {
	s.T.Helper()
	_, err := db.ExecContext(lockctx.With(dbtest.Limited(s.T), key), "UPDATE p SET stock = stock WHERE id = 3") // the row is there
	dbtest.OK(s.T, err)
	dbtest.Exec(s.T, s.Plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1,"+
		" expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ? AND name = ?", s.Name, key)
}

// Expires returns when the lease on key does, as the row says.
func (s *Shop) Expires(key string) (at string) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT expires FROM mysqllock WHERE namespace = ? AND name = ?", s.Name, key).Scan(&at))
	return at
}

// Named is the id of the connection that has the advisory lock on key; 0 is none. Keys and
// databases of tests are such that names are readable.
func (s *Shop) Named(key string) int64 {
	s.T.Helper()
	var id sql.NullInt64
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT IS_USED_LOCK(?)", "mysqllock:"+s.Name+"/"+key).Scan(&id))
	return id.Int64
}

// WantNamed fails the test unless the advisory lock on key is held, or is not.
func (s *Shop) WantNamed(key string, want bool) {
	s.T.Helper()
	if got := becomes(func() bool { return s.Named(key) != 0 }, want); got != want {
		s.T.Errorf("the advisory lock on %s is held: %v, want %v", key, got, want)
	}
}

// Waiters are how many statements wait for rows of the lock table.
func (s *Shop) Waiters() (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ?"+
		" AND INFO LIKE '%FOR UPDATE%' AND INFO LIKE '%mysqllock %' AND ID <> CONNECTION_ID()",
		s.Name).Scan(&n))
	return n
}

// Connections are the ids of the database's connections but that which asks.
func (s *Shop) Connections() []int {
	s.T.Helper()
	return dbtest.Column[int](s.T, s.Plain, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.Name)
}

// WantLost fails the test unless what has returned err says that the lock was lost.
func WantLost(t testing.TB, what string, err error) {
	t.Helper()
	if !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("%s returned %v, want ErrLost", what, err)
	}
}

// Naming runs what is refused, again where a busy server did not say in time who
// has the lock.
func Naming(refused func() error) error {
	return dbtest.Until(refused, func(err error) bool {
		var e *mysqllock.Error
		return !errors.As(err, &e) || e.Holder != nil
	})
}

// Told runs what is refused, again if a busy server has not answered within a short wait.
func Told(refused func() error) error {
	return dbtest.Until(refused, func(err error) bool {
		return !errors.Is(err, mysqllock.ErrExhausted) && !errors.Is(err, mysqllock.ErrNoAnswer)
	})
}

// WantToken fails the test unless the lock context has a lease with that token; 0 is none.
func WantToken(t testing.TB, ctx context.Context, want uint64) {
	t.Helper()
	if token, ok := mysqllock.Token(ctx); token != want || ok != (want != 0) {
		t.Errorf("the token is %d, %v, want %d", token, ok, want)
	}
}

// KeptAs are the ways to keep a lock, each with its options.
func KeptAs() map[string][]lockctx.Option {
	return map[string][]lockctx.Option{
		"row":        {lockctx.Row()},
		"shared":     {lockctx.Shared()},
		"slots":      {lockctx.Slots(1)},
		"lease":      {lockctx.Lease(TTL)},
		"advisory":   {lockctx.Advisory()},
		"optimistic": {lockctx.Optimistic()},
	}
}

// SetStock writes what a caller has decided.
const SetStock = "UPDATE p SET stock = ? WHERE id = 1"

// WantError fails the test unless err is an *Error around sentinel that says so.
func WantError(t testing.TB, what string, err, sentinel error, says string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || !errors.Is(err, sentinel) || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want %v: %s", what, err, sentinel, says)
	}
}

// KillAllBut ends all connections to the database but one.
func (s *Shop) KillAllBut(id uint64) {
	s.T.Helper()
	ids := dbtest.Column[uint64](s.T, s.Plain, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ?"+
		" AND ID NOT IN (?, CONNECTION_ID())", s.Name, id)
	for _, id := range ids {
		_, _ = s.Plain.Exec("KILL CONNECTION " + strconv.FormatUint(id, 10))
	}
	dbtest.Soon(s.T, "they are gone", func() bool {
		n := 0
		for _, id := range ids {
			var there int
			dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID = ?", id).Scan(&there))
			n += there
		}
		return n == 0
	})
}

// Acquire takes a hold, which must not fail.
func Acquire(t testing.TB, db *sql.DB, key string, opts ...lockctx.Option) *mysqllock.Hold {
	t.Helper()
	var h *mysqllock.Hold
	dbtest.OK(t, Told(func() (err error) {
		h, err = mysqllock.Acquire(dbtest.Limited(t), db, key, opts...)
		return err
	}))
	return h
}

// MustRead is Read, which must not fail.
func MustRead(t testing.TB, ctx context.Context, db Querier, id int) int {
	t.Helper()
	n, err := Read(ctx, db, id)
	dbtest.OK(t, err)
	return n
}

// InTx runs fn in a transaction, which is committed unless fn fails.
func InTx(ctx context.Context, db dbtest.Beginner, fn func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}
