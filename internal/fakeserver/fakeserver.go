// Package fakeserver is a MySQL server in memory, for tests of the engine without a
// network. It knows the statements of row locks, without procedures, and one table of the
// application: "SELECT stock FROM p WHERE id = ?" and "UPDATE p SET stock = ? WHERE id = ?".
// What it does not know fails, and Unknown says what that was.
package fakeserver

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/go-sql-driver/mysql"
)

// Server is a server in memory. It is safe for concurrent use.
type Server struct {
	mu      sync.Mutex
	log     []string
	unknown []string
	opened  int64
	rows    map[string]*row  // of the lock table, by their names
	named   map[string]*conn // who has which named lock
	stock   map[int64]int64  // what is committed
	faults  []*fault
	signals []signal
}

// row is a row of the lock table.
type row struct {
	holder *conn
	freed  chan struct{} // closed when the holder ends its transaction
}

type fault struct {
	text   string
	err    error
	after  bool   // the statement is done, and its answer is lost
	steals string // it does not fail, but finds named locks gone
}

type signal struct {
	text string
	c    chan struct{}
}

// New returns a server with a lock table, and with a stock of 10 of the article 1.
func New() *Server {
	return &Server{rows: make(map[string]*row), named: make(map[string]*conn), stock: map[int64]int64{1: 10}}
}

// Fail has the next statement that contains text fail with err.
func (s *Server) Fail(text string, err error) { s.fail(text, err, false) }

// LoseAnswer has the next statement that contains text be done, and its connection lost.
func (s *Server) LoseAnswer(text string) { s.fail(text, mysql.ErrInvalidConn, true) }

func (s *Server) fail(text string, err error, after bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &fault{text: text, err: err, after: after})
}

// StealAt has the next statement that contains text find the named locks that begin so with nobody,
// as if the server had ended their connections.
func (s *Server) StealAt(text, prefix string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &fault{text: text, steals: prefix})
}

// Named returns the named locks that begin so and are held.
func (s *Server) Named(prefix string) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.named {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names
}

// Arrival is closed when a statement that contains text arrives. "waits" is the wait of a
// statement for a row.
func (s *Server) Arrival(text string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{})
	s.signals = append(s.signals, signal{text, c})
	return c
}

// Stock is what is committed.
func (s *Server) Stock() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stock[1]
}

// Held counts the rows of the lock table that are locked.
func (s *Server) Held() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.rows {
		if r.holder != nil {
			n++
		}
	}
	return n
}

// Sent returns the statements that arrived since it was called last.
func (s *Server) Sent() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	s.log = nil
	return log
}

// Unknown returns the statements that the server did not know.
func (s *Server) Unknown() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.unknown)
}

// Connect opens a connection.
func (s *Server) Connect(ctx context.Context) (driver.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened++
	return &conn{s: s, id: s.opened, autocommit: true}, ctx.Err()
}

// Driver is that of go-sql-driver/mysql.
func (s *Server) Driver() driver.Driver { return mysql.MySQLDriver{} }

func (s *Server) announce(text string) {
	s.signals = slices.DeleteFunc(s.signals, func(g signal) bool {
		found := strings.Contains(text, g.text)
		if found {
			close(g.c)
		}
		return found
	})
}

// fault takes the fault that text meets, if any.
func (s *Server) fault(text string) *fault {
	i := slices.IndexFunc(s.faults, func(f *fault) bool { return strings.Contains(text, f.text) })
	if i < 0 {
		return nil
	}
	f := s.faults[i]
	s.faults = slices.Delete(s.faults, i, i+1)
	return f
}

// conn is a connection. The server's mutex guards it.
type conn struct {
	s          *Server
	id         int64
	autocommit bool
	open       bool            // in a transaction
	stock      map[int64]int64 // what the transaction has written
	saved      []savepoint
	gone       bool
}

type savepoint struct {
	name  string
	stock map[int64]int64
}

func (c *conn) Close() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.lose()
	return nil
}

func (c *conn) lose() {
	c.end(false)
	c.gone = true
	c.releaseAll()
}

func (c *conn) releaseAll() {
	maps.DeleteFunc(c.s.named, func(_ string, by *conn) bool { return by == c })
}

// end ends the transaction.
func (c *conn) end(commit bool) {
	if commit {
		maps.Copy(c.s.stock, c.stock)
	}
	c.open, c.stock, c.saved = false, nil, nil
	for _, r := range c.s.rows {
		if r.holder == c {
			r.holder = nil
			close(r.freed)
		}
	}
}

func (c *conn) Ping(context.Context) error         { return nil }
func (c *conn) ResetSession(context.Context) error { return c.bad() }
func (c *conn) IsValid() bool                      { return c.bad() == nil }

func (c *conn) bad() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.gone {
		return driver.ErrBadConn
	}
	return nil
}

func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	text := "START TRANSACTION"
	if opts != (driver.TxOptions{}) {
		text = fmt.Sprintf("%s with %+v", text, opts) // which it does not know
	}
	_, err := c.run(ctx, text, nil)
	return tx{c}, err
}

type tx struct{ c *conn }

func (t tx) Commit() error   { _, err := t.c.run(context.Background(), "COMMIT", nil); return err }
func (t tx) Rollback() error { _, err := t.c.run(context.Background(), "ROLLBACK", nil); return err }

func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return &stmt{c, text}, nil
}

func (c *conn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	r, err := c.run(ctx, text, args)
	return driver.RowsAffected(r.affected), err
}

func (c *conn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	r, err := c.run(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return &r, nil
}

type stmt struct {
	c    *conn
	text string
}

func (t *stmt) Close() error  { return nil }
func (t *stmt) NumInput() int { return strings.Count(t.text, "?") }

func (t *stmt) Exec([]driver.Value) (driver.Result, error) { return nil, driver.ErrSkip }
func (t *stmt) Query([]driver.Value) (driver.Rows, error)  { return nil, driver.ErrSkip }

func (t *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return t.c.ExecContext(ctx, t.text, args)
}

func (t *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return t.c.QueryContext(ctx, t.text, args)
}

// reply is a statement's answer, and its rows.
type reply struct {
	values   [][]driver.Value
	width    int
	affected int64
}

func (r *reply) Columns() []string { return slices.Repeat([]string{"c"}, r.width) }
func (r *reply) Close() error      { return nil }

func (r *reply) Next(dest []driver.Value) error {
	if len(r.values) == 0 {
		return io.EOF
	}
	copy(dest, r.values[0])
	r.values = r.values[1:]
	return nil
}

func one(values ...driver.Value) (reply, error) {
	return reply{values: [][]driver.Value{values}, width: len(values)}, nil
}

func (c *conn) run(ctx context.Context, text string, args []driver.NamedValue) (reply, error) {
	if err := ctx.Err(); err != nil {
		return reply{}, err
	}
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.gone {
		return reply{}, driver.ErrBadConn
	}
	s.log = append(s.log, text)
	s.announce(text)
	f := s.fault(text)
	if f != nil && f.steals != "" {
		maps.DeleteFunc(s.named, func(name string, _ *conn) bool { return strings.HasPrefix(name, f.steals) })
		f = nil
	}
	if f != nil && !f.after {
		var refused *mysql.MySQLError
		if !errors.As(f.err, &refused) {
			c.lose()
		} else if refused.Number == 1213 {
			c.end(false)
		}
		return reply{}, f.err
	}
	r, err := c.do(ctx, text, args)
	if f != nil {
		c.lose()
		return reply{}, f.err
	}
	return r, err
}

var lockedNames = regexp.MustCompile(`name = x'([0-9a-f]*)' LIMIT 1 FOR UPDATE`)

// do does a statement.
func (c *conn) do(ctx context.Context, text string, args []driver.NamedValue) (reply, error) {
	verb, rest, _ := strings.Cut(text, " ")
	switch {
	case verb == "SET" && strings.HasPrefix(rest, "@mysqllock = "):
		c.autocommit = strings.Contains(rest, "SESSION autocommit = 1")
		return reply{}, nil
	case verb == "SET" && strings.HasPrefix(strings.ToUpper(rest), "@MYSQLLOCK_WAIT"), strings.HasPrefix(text, "SET SESSION wait_timeout"):
		return reply{}, nil // it does not end idle connections
	case strings.HasPrefix(text, "SELECT ROUTINE_COMMENT"):
		return reply{width: 1}, nil // no procedures
	case strings.HasPrefix(text, "SELECT ID FROM (SELECT ID, USER, HOST"):
		return reply{width: 1}, nil // a connection that is to be killed has ended already
	case text == "START TRANSACTION", text == "BEGIN":
		c.end(true)
		c.open = true
		return reply{}, nil
	case text == "COMMIT", text == "ROLLBACK":
		c.end(text == "COMMIT")
		return reply{}, nil
	case text == "DO 1", text == "DO 0":
		return reply{}, nil
	case verb == "SAVEPOINT":
		c.saved = append(c.saved, savepoint{rest, maps.Clone(c.stock)})
		return reply{}, nil
	case strings.HasPrefix(text, "ROLLBACK TO "), strings.HasPrefix(text, "RELEASE SAVEPOINT "):
		return reply{}, c.back(verb == "ROLLBACK", text[strings.LastIndex(text, " ")+1:])
	case strings.HasPrefix(text, "SELECT VERSION()"):
		return one("8.4.0", "shop", "0", "0", "REPEATABLE-READ", "0", "OFF,", int64(0))
	case strings.Contains(text, "@@completion_type"):
		return one(c.id, "db 3306", int64(1), "NO_CHAIN")
	case strings.HasPrefix(text, "SELECT ENGINE"):
		return one("InnoDB", "namespace,name,owner,token,expires,versioned", nil)
	case strings.HasPrefix(text, "SELECT 1 FROM `shop`.`mysqllock`"):
		return one(int64(1))
	case strings.HasPrefix(text, "SELECT token FROM `shop`.`mysqllock`"):
		return reply{width: 1}, nil // no stripes
	case strings.HasPrefix(text, "SELECT name, token FROM `shop`.`mysqllock`"):
		return one("", int64(0)) // the floor alone
	case strings.HasPrefix(text, "INSERT IGNORE INTO `shop`.`mysqllock`"):
		return reply{affected: 1}, nil
	case getLock.MatchString(text):
		return c.getLock(text, args)
	case text == "DO RELEASE_ALL_LOCKS()":
		c.releaseAll()
		return reply{}, nil
	case strings.HasSuffix(text, " <> CONNECTION_ID()") || strings.Contains(text, " <> CONNECTION_ID() AND CONCAT_WS("):
		return reply{width: 1}, nil // a connection that is to be killed has ended already
	case releaseLock.MatchString(text):
		for _, name := range names(releaseLock, text, args) {
			if c.s.named[name] == c {
				delete(c.s.named, name)
			}
		}
		return reply{}, nil
	case isUsedLock.MatchString(text):
		return c.isUsedLock(text)
	case strings.Contains(text, "performance_schema.data_locks"):
		return reply{width: 5}, nil // it does not say who holds a lock
	case lockedNames.MatchString(text) && !strings.Contains(text, "SKIP LOCKED"):
		return c.lock(ctx, text)
	case text == "SELECT @@autocommit":
		if c.autocommit {
			return one(int64(1))
		}
		return one(int64(0))
	case strings.Contains(text, "CONNECTION_ID() LIMIT 1"):
		return one(c.id)
	case text == "SELECT stock FROM p WHERE id = ?", text == "SELECT stock FROM p WHERE id = ? FOR UPDATE NOWAIT":
		c.implicit()
		id := args[0].Value.(int64)
		if v, ok := c.stock[id]; ok {
			return one(v)
		}
		return one(c.s.stock[id])
	case text == "UPDATE p SET stock = ? WHERE id = ?":
		return c.update(args), nil
	}
	c.s.unknown = append(c.s.unknown, text)
	return reply{}, errors.New("fakeserver: what is this? " + text)
}

// implicit begins the transaction that a statement begins without autocommit.
func (c *conn) implicit() { c.open = c.open || !c.autocommit }

func (c *conn) update(args []driver.NamedValue) reply {
	c.implicit()
	if c.stock == nil {
		c.stock = make(map[int64]int64)
	}
	c.stock[args[1].Value.(int64)] = args[0].Value.(int64)
	if !c.open {
		c.end(true)
	}
	return reply{affected: 1}
}

// back goes back to a savepoint, or forgets it.
func (c *conn) back(undo bool, name string) error {
	i := slices.IndexFunc(c.saved, func(p savepoint) bool { return p.name == name })
	if i < 0 {
		return &mysql.MySQLError{Number: 1305, Message: "SAVEPOINT " + name + " does not exist"}
	}
	if undo {
		c.stock, c.saved = maps.Clone(c.saved[i].stock), c.saved[:i+1]
		return nil
	}
	c.saved = c.saved[:i]
	return nil
}

// Statements of advisory locks, which take, release and check several named locks at a time.
var (
	getLock     = regexp.MustCompile(`^SELECT .*GET_LOCK\((?:'([^']*)'|\?), 0\)`)
	releaseLock = regexp.MustCompile(`RELEASE_LOCK\((?:'([^']*)'|\?)\)`)
	isUsedLock  = regexp.MustCompile(`IS_USED_LOCK\(_utf8mb4'([^']*)'\) = (\d+)`)
)

// names are those in text, or the values of its question marks.
func names(in *regexp.Regexp, text string, args []driver.NamedValue) (all []string) {
	for _, m := range in.FindAllStringSubmatch(text, -1) {
		if m[1] == "" {
			m[1], args = fmt.Sprint(args[0].Value), args[1:]
		}
		all = append(all, m[1])
	}
	return all
}

func (c *conn) getLock(text string, args []driver.NamedValue) (reply, error) {
	name := names(getLock, text, args)[0]
	if by := c.s.named[name]; by != nil && by != c {
		return one("0")
	}
	c.s.named[name] = c
	return one("1")
}

func (c *conn) isUsedLock(text string) (reply, error) {
	for _, m := range isUsedLock.FindAllStringSubmatch(text, -1) {
		if by := c.s.named[m[1]]; by == nil || fmt.Sprint(by.id) != m[2] {
			return one("0", c.id)
		}
	}
	return one("1", c.id)
}

// lock locks the rows that text names. It lets go of the mutex while it waits.
func (c *conn) lock(ctx context.Context, text string) (reply, error) {
	c.implicit()
	r := reply{width: 6}
	for _, m := range lockedNames.FindAllStringSubmatch(text, -1) {
		k := c.s.rows[m[1]]
		if k == nil {
			k = new(row)
			c.s.rows[m[1]] = k
		}
		for k.holder != nil && k.holder != c {
			if strings.Contains(text, "NOWAIT") {
				return reply{}, &mysql.MySQLError{Number: 3572, Message: "Statement aborted because lock(s) could not be acquired immediately and NOWAIT is set."}
			}
			if err := c.await(ctx, k.freed); err != nil {
				return reply{}, err
			}
		}
		if k.holder == nil && c.open {
			k.holder, k.freed = c, make(chan struct{})
		}
		r.values = append(r.values, []driver.Value{c.id, int64(0), nil, int64(0), "0", "0"})
	}
	return r, nil
}

// await waits until a row is free. A context that ends takes the connection with it.
func (c *conn) await(ctx context.Context, freed <-chan struct{}) error {
	c.s.announce("waits")
	c.s.mu.Unlock()
	defer c.s.mu.Lock()
	select {
	case <-freed:
		return nil
	case <-ctx.Done():
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		c.lose()
		return ctx.Err()
	}
}
