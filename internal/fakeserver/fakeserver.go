// Package fakeserver is a MySQL server in memory, for tests of the engine without a
// network, and for package mysqllocktest. It knows the statements of locks of all kinds,
// one in each text, and one table of the engine's tests:
// "SELECT stock FROM p WHERE id = ?" and "UPDATE p SET stock = ? WHERE id = ?".
// What it does not know fails, and Unknown says what that was.
package fakeserver

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Server is a server in memory. It is safe for concurrent use.
type Server struct {
	Product Product // set it before the first connection is opened

	mu      sync.Mutex
	log     []string
	unknown []string
	opened  int64
	conns   map[int64]*Conn   // that are open
	rows    map[string]*row   // of the lock table, by their names
	named   map[string]*named // named locks that are held
	stock   map[int64]int64   // what is committed
	faults  []*fault
	panics  *panics
	signals []signal
	engine  Engine
}

// Product says which server it is: MariaDB is asked for some locks in other words.
type Product int

// The products.
const (
	MySQL Product = iota
	MariaDB
)

type fault struct {
	text   string
	err    error  // nil if do runs
	after  bool   // the statement is done, and its answer is lost
	silent bool   // the server does not notice that the connection is lost
	do     func() // runs before the statement
}

type signal struct {
	text string
	c    chan struct{}
}

// New returns a server with a lock table, and with a stock of 10 of the article 1.
func New() *Server {
	return &Server{
		rows: make(map[string]*row), named: make(map[string]*named), conns: make(map[int64]*Conn), stock: map[int64]int64{1: 10},
		engine: Engine{Version: "8.4.0", Comment: "MySQL Community Server - GPL"},
	}
}

// Engine is what a server says of itself.
type Engine struct {
	Version  string // VERSION()
	Variable string // @@version; "" is the same
	Comment  string // @@version_comment
	Lacks    error  // the answer to what MySQL and MariaDB are asked for; nil if it answers like them
	Database string // DATABASE(), of Vitess; "" is shop
	Shards   string // of Vitess; "" if it does not say
}

var mariaDB = Engine{Version: "10.11.9-MariaDB", Variable: "10.11.9-MariaDB", Comment: "mariadb.org binary distribution"}

// Be has the server say of itself that it is e. What it does stays the same.
func (s *Server) Be(e Engine) {
	if e.Variable == "" {
		e.Variable = e.Version
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine = e
}

// Fail has the next statement that contains text fail with err.
func (s *Server) Fail(text string, err error) { s.meet(fault{text: text, err: err}) }

// PanicAfter has the driver panic in the call after the next n. A call is Connect, ResetSession, IsValid, or a
// statement, before it is done, or with answer after that, or where its result is asked for a number. It also
// panics in each Close of a connection, which is closed then, and of a statement. over ends all that, and says in
// which call it has panicked; "" is in none.
func (s *Server) PanicAfter(n int, answer bool) (over func() (in string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &panics{left: n, answer: answer}
	s.panics = p
	return func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.panics = nil
		return p.in
	}
}

// panics says in which call the driver panics.
type panics struct {
	left   int // calls before it
	answer bool
	in     string // that call, when it has come
}

// panicIn panics if call is the one in which the driver is to, and not only with the answer to it, which is reported.
// The caller has the mutex.
func (s *Server) panicIn(call string) (withAnswer bool) {
	p := s.panics
	if p == nil {
		return false
	}
	p.left--
	if p.left != -1 {
		return false
	}
	p.in = call
	if !p.answer {
		panic("the driver")
	}
	return true
}

// closed is the end of a Close. The caller has the mutex.
func (s *Server) closed() error {
	if s.panics != nil {
		panic("the driver in Close")
	}
	return nil
}

// calls is for what is no statement.
func (s *Server) calls(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.panicIn(name) {
		panic("the driver")
	}
}

// LoseAnswer has the next statement that contains text be done, and its connection lost.
func (s *Server) LoseAnswer(text string) {
	s.meet(fault{text: text, err: mysql.ErrInvalidConn, after: true})
}

// Cut has the next statement that contains text fail with err, as on a connection that is lost.
// The server does not notice, and keeps the transaction open until somebody kills it.
func (s *Server) Cut(text string, err error) { s.meet(fault{text: text, err: err, silent: true}) }

// Before runs do before the next statement that contains text.
func (s *Server) Before(text string, do func()) { s.meet(fault{text: text, do: do}) }

func (s *Server) meet(f fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &f)
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
		if r.holder != nil || len(r.shared) > 0 {
			n++
		}
	}
	return n
}

// Waiting counts the connections that wait for a row.
func (s *Server) Waiting() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.awaits != nil {
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
	s.calls("Connect")
	return s.Open(""), ctx.Err()
}

// Open opens a connection of a program that calls itself owner.
func (s *Server) Open(owner string) *Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened++
	c := &Conn{s: s, id: s.opened, owner: owner, autocommit: true, lost: make(chan struct{})}
	s.conns[s.opened] = c
	return c
}

// Driver is that of go-sql-driver/mysql.
func (s *Server) Driver() driver.Driver { return mysql.MySQLDriver{} }

// has reports whether text contains part, and no word of part goes on behind it: READ-COMMITTED is no COMMIT.
func has(text, part string) bool {
	for rest := text; ; {
		_, after, found := strings.Cut(rest, part)
		if !found {
			return false
		}
		if after == "" || !letter(part[len(part)-1]) || !letter(after[0]) {
			return true
		}
		rest = after
	}
}

func letter(c byte) bool { return 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' }

func (s *Server) announce(text string) {
	s.signals = slices.DeleteFunc(s.signals, func(g signal) bool {
		found := has(text, g.text)
		if found {
			close(g.c)
		}
		return found
	})
}

// fault takes the fault that text meets, if any.
func (s *Server) fault(text string) *fault {
	i := slices.IndexFunc(s.faults, func(f *fault) bool { return has(text, f.text) })
	if i < 0 {
		return nil
	}
	f := s.faults[i]
	s.faults = slices.Delete(s.faults, i, i+1)
	return f
}

// Conn is a connection. The server's mutex guards it.
type Conn struct {
	s          *Server
	id         int64
	owner      string
	autocommit bool
	open       bool            // in a transaction
	began      time.Time       // the transaction
	awaits     *row            // that it waits for
	text       string          // of its statement; others see it while that waits
	stop       chan struct{}   // closed to end the wait
	stock      map[int64]int64 // what the transaction has written
	saved      []savepoint
	undo       []func() // takes back what it has changed in the lock table
	rowCount   int64    // of the last statement
	cut        bool     // the client has lost it, and the server does not know
	gone       bool
	lost       chan struct{} // closed when it is gone
}

type savepoint struct {
	name  string
	stock map[int64]int64
	undo  int
}

func (c *Conn) Close() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if !c.cut {
		c.lose()
	}
	return c.s.closed()
}

func (c *Conn) lose() {
	if c.gone {
		return
	}
	c.end(false)
	c.gone = true
	close(c.lost)
	delete(c.s.conns, c.id)
	for name, n := range c.s.named {
		if n.holder == c {
			c.unname(name)
		}
	}
}

// end ends the transaction.
func (c *Conn) end(commit bool) {
	if commit {
		maps.Copy(c.s.stock, c.stock)
	}
	if !commit {
		c.takeBack(0)
	}
	c.open, c.stock, c.saved, c.undo = false, nil, nil, nil
	for _, r := range c.s.rows {
		if r.holder == c || r.shared[c] {
			if r.holder == c {
				r.holder = nil
			}
			delete(r.shared, c)
			close(r.freed)
			r.freed = make(chan struct{})
		}
	}
}

// takeBack undoes the changes of the lock table but for the first n.
func (c *Conn) takeBack(n int) {
	for ; len(c.undo) > n; c.undo = c.undo[:len(c.undo)-1] {
		c.undo[len(c.undo)-1]()
	}
}

// InTransaction reports whether a transaction is open, or begun by the next statement. After
// the loss of the connection it returns driver.ErrBadConn.
func (c *Conn) InTransaction() (bool, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.gone {
		return false, driver.ErrBadConn
	}
	return c.open || !c.autocommit, nil
}

// HasLock reports whether the transaction has locked a row of the lock table on which nobody
// has a lease.
func (c *Conn) HasLock() bool {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	for _, r := range c.s.rows {
		if (r.holder == c || r.shared[c]) && !r.live() {
			return true
		}
	}
	return false
}

func (c *Conn) Ping(context.Context) error { return nil }

func (c *Conn) ResetSession(context.Context) error {
	c.s.calls("ResetSession")
	return c.bad()
}

func (c *Conn) IsValid() bool {
	c.s.calls("IsValid")
	return c.bad() == nil
}

func (c *Conn) bad() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.gone && !c.cut { // the client does not see that it is cut
		return driver.ErrBadConn
	}
	return nil
}

func (c *Conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

func (c *Conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if opts.ReadOnly {
		return nil, c.refuse("START TRANSACTION READ ONLY")
	}
	if opts.Isolation != 0 {
		level := strings.ToUpper(sql.IsolationLevel(opts.Isolation).String())
		if _, err := c.run(ctx, "SET TRANSACTION ISOLATION LEVEL "+level, nil); err != nil {
			return nil, err
		}
	}
	_, err := c.run(ctx, "START TRANSACTION", nil)
	return tx{c}, err
}

type tx struct{ c *Conn }

func (t tx) Commit() error   { _, err := t.c.run(context.Background(), "COMMIT", nil); return err }
func (t tx) Rollback() error { _, err := t.c.run(context.Background(), "ROLLBACK", nil); return err }

func (c *Conn) Prepare(text string) (driver.Stmt, error) {
	return &stmt{c, text}, nil
}

func (c *Conn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	r, err := c.run(ctx, text, args)
	r.s = c.s
	return r, err
}

func (c *Conn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	r, err := c.run(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return &r, nil
}

type stmt struct {
	c    *Conn
	text string
}

func (s *stmt) Close() error {
	s.c.s.mu.Lock()
	defer s.c.s.mu.Unlock()
	return s.c.s.closed()
}

func (s *stmt) NumInput() int { return strings.Count(s.text, "?") }

func (s *stmt) Exec([]driver.Value) (driver.Result, error) { return nil, driver.ErrSkip }
func (s *stmt) Query([]driver.Value) (driver.Rows, error)  { return nil, driver.ErrSkip }

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.c.ExecContext(ctx, s.text, args)
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.c.QueryContext(ctx, s.text, args)
}

// reply is a statement's answer, and its rows.
type reply struct {
	values   [][]driver.Value
	width    int
	affected int64
	id       int64
	s        *Server // to panic where it is asked for a number
}

func (r reply) LastInsertId() (int64, error) { return r.number("LastInsertId", r.id) }
func (r reply) RowsAffected() (int64, error) { return r.number("RowsAffected", r.affected) }

func (r reply) number(call string, n int64) (int64, error) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if p := r.s.panics; p != nil && p.answer && r.s.panicIn(call) {
		panic("the driver")
	}
	return n, nil
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

func (c *Conn) run(ctx context.Context, text string, args []driver.NamedValue) (reply, error) {
	if err := ctx.Err(); err != nil {
		return reply{}, err
	}
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c.cut:
		return reply{}, mysql.ErrInvalidConn
	case c.gone:
		return reply{}, driver.ErrBadConn
	}
	s.log = append(s.log, text)
	panics := s.panicIn(text)
	s.announce(text)
	f := s.fault(text)
	switch {
	case f == nil, f.after:
	case f.do != nil:
		s.mu.Unlock()
		f.do()
		s.mu.Lock()
		f = nil
	default:
		c.fails(f)
		return reply{}, f.err
	}
	c.text = text
	r, err := c.do(ctx, text, args)
	c.text = ""
	if c.rowCount = r.affected; err != nil || r.width > 0 {
		c.rowCount = -1
	}
	if panics {
		panic("the driver")
	}
	if f != nil {
		c.lose()
		return reply{}, f.err
	}
	return r, err
}

// fails has a statement fail.
func (c *Conn) fails(f *fault) {
	var refused *mysql.MySQLError
	switch {
	case f.silent:
		c.cut = true
	case !errors.As(f.err, &refused):
		c.lose()
	case refused.Number == deadlock, strings.Contains(refused.Message, "ended at"): // which a tablet says
		c.end(false)
	}
}

// refuse notes what the server does not know.
func (c *Conn) refuse(what string) error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.unknown = append(c.s.unknown, what)
	return errors.New("fakeserver: what is this? " + what)
}

// implicit begins the transaction that a statement begins without autocommit.
func (c *Conn) implicit() {
	if !c.open && !c.autocommit {
		c.open, c.began = true, time.Now()
	}
}

const read = "SELECT stock FROM p WHERE id = ?"

// read reads the stock of an article, and locks it as the clause says.
func (c *Conn) read(ctx context.Context, clause string, id int64) (reply, error) {
	c.implicit()
	name := fmt.Sprintf("p%d", id) // no name in hexadecimal
	switch clause {
	case "":
	case " FOR UPDATE SKIP LOCKED":
		if c.s.row(name).blocked(c, false) {
			return reply{width: 1}, nil
		}
		fallthrough
	case " FOR UPDATE", " FOR UPDATE NOWAIT", " FOR SHARE", " FOR SHARE NOWAIT":
		shared, nowait := strings.HasPrefix(clause, " FOR SHARE"), strings.HasSuffix(clause, "NOWAIT")
		if err := c.hold(ctx, c.s.row(name), shared, nowait); err != nil {
			return reply{}, err
		}
	default:
		c.s.unknown = append(c.s.unknown, read+clause)
		return reply{}, errors.New("fakeserver: what is this? " + clause)
	}
	if v, ok := c.stock[id]; ok {
		return one(v)
	}
	return one(c.s.stock[id])
}

func (c *Conn) update(args []driver.NamedValue) reply {
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

// begin begins a transaction.
func (c *Conn) begin(string) reply {
	c.end(true)
	c.open, c.began = true, time.Now()
	return reply{}
}

// endBy ends the transaction by a COMMIT, or by a ROLLBACK.
func (c *Conn) endBy(text string) reply {
	c.end(text == "COMMIT")
	return reply{}
}

// save sets a savepoint.
func (c *Conn) save(text string) reply {
	_, name, _ := strings.Cut(text, " ")
	c.saved = slices.DeleteFunc(c.saved, func(p savepoint) bool { return p.name == name })
	c.saved = append(c.saved, savepoint{name, maps.Clone(c.stock), len(c.undo)})
	return reply{}
}

// back goes back to a savepoint, or forgets it.
func (c *Conn) back(_ context.Context, text string) (reply, error) {
	name := text[strings.LastIndex(text, " ")+1:]
	i := slices.IndexFunc(c.saved, func(p savepoint) bool { return p.name == name })
	switch {
	case i < 0:
		return reply{}, noSavepoint(name)
	case strings.HasPrefix(text, "ROLLBACK "):
		c.takeBack(c.saved[i].undo)
		c.stock, c.saved = maps.Clone(c.saved[i].stock), c.saved[:i+1]
	default:
		c.saved = c.saved[:i]
	}
	return reply{}, nil
}
