package chaos

import (
	"bufio"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

const (
	ttl   = 2 * time.Second // of all leases, sessions and advisory locks
	limit = 5 * ttl         // of a transfer
)

// orders are what a client process is told, in its environment.
type orders struct {
	Name    string // of the process, and of its history
	DSN     string // without the driver's own parameters
	File    string // its history
	Jobs    []string
	Workers int // for each job
	Conns   int // the most of each job's handle; 0 is no limit
	// MaxConns is the budget of each job's handle; 0 is none.
	MaxConns int
	Params   string // of each job's handle, more of them
	Seed     uint64
	OneByOne bool // the driver's own statements, which go in one text otherwise

	// For load, where zero values are those of chaos.
	Keys   int           // of each job
	TTL    time.Duration // of what is locked
	Wait   time.Duration // for a lock
	Limit  time.Duration // of a transfer
	Pause  time.Duration // at most, between two transfers
	Thinks time.Duration // at most, within a transfer, and never for long
	GiveUp int           // one in so many gives up early
	Shared bool          // one handle is for all jobs
	Grows  bool          // when all rest, it tells what the process needs
	User   int           // has an account of its own, for which the server takes so many connections
}

const ordersVariable = "MYSQLLOCK_CHAOS_ORDERS"

// client is one client process.
type client struct {
	orders
	file *os.File
	ids  atomic.Int64
	stop chan struct{}

	rests sync.RWMutex // read-locked for each transfer; locked while all rest
}

// runClient works until its standard input ends. For each line there all workers rest, or
// go on.
func runClient(text string) error {
	c := &client{stop: make(chan struct{})}
	if err := json.Unmarshal([]byte(text), &c.orders); err != nil {
		return err
	}
	server.SetOneByOne(c.OneByOne)
	c.Limit, c.Pause, c.TTL = cmp.Or(c.Limit, limit), cmp.Or(c.Pause, 40*time.Millisecond), cmp.Or(c.TTL, ttl)
	c.GiveUp, c.Wait = cmp.Or(c.GiveUp, 30), cmp.Or(c.Wait, 2*time.Second)
	jobs := jobsOf(c.TTL)
	var err error
	if c.file, err = os.OpenFile(c.File, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		return err
	}
	defer c.file.Close()
	over := make(chan struct{})
	var watching, all sync.WaitGroup
	watching.Go(func() { c.watchStalls(over) })
	defer watching.Wait()
	defer close(over)
	handles := make(map[string]*sql.DB)
	for i, name := range c.Jobs {
		j := jobs[name]
		if j.breaks != nil {
			j.breaks.Store(true)
		}
		db := handles[""]
		if db == nil {
			if db, err = c.open(j); err != nil {
				return err
			}
			defer db.Close()
			if c.Shared {
				handles[""] = db
			} else {
				handles[name] = db
			}
		}
		for n := range c.Workers {
			w := &worker{client: c, db: db, job: name, keys: j.keysOf(name, c.Keys), thinks: cmp.Or(c.Thinks, j.thinks, 10*time.Millisecond), random: rand.New(rand.NewPCG(c.Seed, uint64(i*c.Workers+n)))}
			all.Go(func() { w.work(j) })
		}
	}
	c.obey(handles)
	all.Wait()
	return nil
}

// open opens a handle for a job.
func (c *client) open(j job) (*sql.DB, error) {
	driver, dsn := "mysqllock", c.DSN+"&lockWait="+c.Wait.String()+"&lockTTL="+c.TTL.String()+"&lockOwner="+c.Name+c.Params
	if c.MaxConns > 0 {
		dsn += fmt.Sprint("&maxConns=", c.MaxConns)
	}
	if j.plain {
		driver, dsn = "mysql", c.DSN
	}
	db, err := sql.Open(driver, dsn)
	if err == nil {
		db.SetMaxOpenConns(c.Conns)
	}
	return db, err
}

// obey has the workers rest, or go on, at each line of standard input, and stop at its end.
func (c *client) obey(handles map[string]*sql.DB) {
	resting := false
	for in := bufio.NewScanner(os.Stdin); in.Scan(); resting = !resting {
		if resting {
			c.rests.Unlock()
			continue
		}
		c.rests.Lock()
		c.note(event{Kind: kindRest, Call: now(), Rest: c.left(handles)})
	}
	close(c.stop)
	if resting {
		c.rests.Unlock()
	}
}

// left tells what a process that rests has not given back yet, after a while.
func (c *client) left(handles map[string]*sql.DB) (r rest) {
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		r.InUse = 0
		for _, db := range handles {
			r.InUse += db.Stats().InUse
			if st, err := mysqllock.Stats(db); err == nil { // else it is not the driver's
				r.InUse += st.InUse + st.Waiters
			}
		}
		if r.InUse == 0 || time.Now().After(end) {
			break
		}
	}
	if !c.Grows {
		return r
	}
	r.Goroutines = runtime.NumGoroutine()
	for since := time.Now(); time.Since(since) < time.Second; time.Sleep(20 * time.Millisecond) {
		if n := runtime.NumGoroutine(); n < r.Goroutines {
			r.Goroutines, since = n, time.Now()
		}
	}
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	r.Heap = int64(memory.HeapAlloc)
	return r
}

// note writes an event down. It is in the file when note returns, whatever becomes
// of this process then.
func (c *client) note(e event) {
	line, err := json.Marshal(e)
	if err == nil {
		_, err = c.file.Write(append(line, '\n'))
	}
	if err != nil {
		panic(err)
	}
}

// watchStalls notes when this process did not get to run: it cannot have known of
// anything then.
func (c *client) watchStalls(over <-chan struct{}) {
	const beat, late = 10 * time.Millisecond, 100 * time.Millisecond
	for last := now(); ; {
		select {
		case <-over:
			return
		case <-time.After(beat):
		}
		if woke := now(); woke-last > int64(late) {
			c.note(event{Kind: kindStall, Call: last, Return: woke})
		}
		last = now()
	}
}

func (c *client) id() string { return fmt.Sprint(c.Name, ".", c.ids.Add(1)) }

// worker does one job, a transfer after the other.
type worker struct {
	*client
	db     *sql.DB
	job    string
	keys   []string
	thinks time.Duration
	random *rand.Rand
	ctx    context.Context // of what it does just now

	// appends: what it writes is a line of the ledger, without an account. It waits for nobody
	// whose transaction is open, so that it does not take the lock alone to write.
	appends bool
}

func (w *worker) work(j job) {
	for {
		select {
		case <-w.stop:
			return
		case <-time.After(time.Duration(w.random.Int64N(int64(w.Pause)))):
		}
		w.rests.RLock()
		w.once(j)
		w.rests.RUnlock()
	}
}

func (w *worker) once(j job) {
	ctx, cancel := context.WithTimeout(context.Background(), w.Limit)
	defer cancel()
	if w.random.IntN(w.GiveUp) == 0 { // somebody who gives up
		defer time.AfterFunc(time.Duration(w.random.Int64N(int64(50*time.Millisecond))), cancel).Stop()
	}
	began := now()
	w.ctx = ctx
	j.ways[w.random.IntN(len(j.ways))](w, ctx)
	if ended := now(); ended-began > int64(w.Limit+tooLate) {
		w.note(event{Kind: kindLate, Job: w.job, Call: began, Return: ended})
	}
}

// tooLate is how much longer than its context nobody may take, on however slow a machine.
const tooLate = 30 * time.Second

func (w *worker) key() string { return w.keys[w.random.IntN(len(w.keys))] }

// think takes a while between what is read and what is written, now and then
// longer than a lease lasts without renewal.
func (w *worker) think(ctx context.Context) {
	d := w.random.Int64N(int64(w.thinks))
	if w.Thinks == 0 && w.random.IntN(300) == 0 {
		d = w.random.Int64N(int64(3 * ttl / 2))
	}
	select {
	case <-time.After(time.Duration(d)):
	case <-ctx.Done():
	}
}

// hold is a lock that a worker was granted, on one key or several.
type hold struct {
	*worker
	id     string
	keys   []string
	shared bool
}

// granted notes a grant.
func (w *worker) granted(call int64, token uint64, shared bool, keys ...string) *hold {
	h := &hold{worker: w, id: w.id(), keys: keys, shared: shared}
	h.say(kindGrant, call, token)
	return h
}

func (h *hold) say(k kind, call int64, token uint64) {
	if h == nil { // of a version, which nobody holds
		return
	}
	for _, key := range h.keys {
		h.note(event{Kind: k, Job: h.job, Hold: h.id, Key: key, Shared: h.shared, Token: token, Call: call, Return: now()})
	}
}

// believe notes for as long as there is no notice of the lock's loss that it is
// held.
func (h *hold) believe(ctx context.Context) (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			call := now()
			if ctx.Err() != nil {
				return
			}
			h.say(kindBelief, call, 0)
			select {
			case <-over:
				return
			case <-time.After(25 * time.Millisecond):
			}
		}
	}()
	return func() { close(over); <-ended }
}

// transfer is one attempt to move money.
type transfer struct {
	*worker
	id  string
	was account // what it has read last
}

func (w *worker) transfer() *transfer {
	t := &transfer{worker: w, id: w.id()}
	w.note(event{Kind: kindTry, Job: w.job, Op: t.id, Call: now()})
	return t
}

// querier is an sql.DB, sql.Tx or sql.Conn.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// read reads the account; since is when the snapshot can have been taken at the
// earliest.
func (t *transfer) read(ctx context.Context, q querier, since int64, key string) (account, error) {
	a, from := account{key: key, a: capital, b: capital}, "account WHERE k = ?"
	if t.appends {
		from = "ledger WHERE k = ? ORDER BY seq DESC, id DESC LIMIT 1"
	}
	err := q.QueryRowContext(ctx, "SELECT seq, a, b FROM "+from, key).Scan(&a.seq, &a.a, &a.b)
	if t.appends && errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	t.was = a
	if err == nil {
		t.note(event{Kind: kindRead, Job: t.job, Op: t.id, Key: key, Seq: a.seq, Call: since, Return: now()})
	}
	return a, err
}

func (t *transfer) write(ctx context.Context, q querier, a account) error {
	if t.appends {
		return changed(q.ExecContext(ctx, "INSERT INTO ledger (op, k, seq, a, b, old_seq, old_a, old_b) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
			t.id, a.key, a.seq, a.a, a.b, t.was.seq, t.was.a, t.was.b))
	}
	return changed(q.ExecContext(ctx, "UPDATE account SET seq = ?, a = ?, b = ?, op = ? WHERE k = ?", a.seq, a.a, a.b, t.id, a.key))
}

// errUnchanged is of a statement that says that all is well and that it has changed nothing,
// as one on MariaDB 11.8 may that was killed.
var errUnchanged = errors.New("no row was changed")

// changed is the error of a statement that was to change one row.
func changed(res sql.Result, err error) error {
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errors.Join(errUnchanged, err)
	}
	return nil
}

// moved is a with some of its money moved.
func (t *transfer) moved(a account) account {
	some := t.random.Int64N(20) - 10
	return account{a.key, a.seq + 1, a.a - some, a.b + some}
}

// attempt notes that a state is about to be committed.
func (t *transfer) attempt(accounts ...account) (call int64) {
	call = now()
	for _, a := range accounts {
		t.note(event{Kind: kindCommit, Job: t.job, Op: t.id, Key: a.key, Seq: a.seq, Call: call})
	}
	return call
}

// end notes how the transfer ended. committing is whether its COMMIT may have been
// on its way.
func (t *transfer) end(err error, committing bool) {
	e := event{Kind: kindEnd, Job: t.job, Op: t.id, Result: resultOf(err, committing), Return: now()}
	if err != nil {
		e.Error, e.Over = err.Error(), t.ctx != nil && t.ctx.Err() != nil
	}
	t.note(e)
}

func resultOf(err error, committing bool) result {
	var e *mysqllock.Error
	switch {
	case err == nil:
		return done
	case errors.Is(err, mysqllock.ErrConflict), errors.Is(err, mysqllock.ErrDeadlock):
		return conflict
	case committing && errors.As(err, &e) && e.Op == "commit" && (broken(err) || undecided(err) || strings.Contains(err.Error(), "may be committed")):
		return unknown
	case errors.Is(err, mysqllock.ErrLost):
		return lost
	case errors.Is(err, mysqllock.ErrLocked):
		return busy
	case errors.Is(err, mysqllock.ErrUnsafe):
		return unsafe
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, sql.ErrTxDone):
		return gaveUp
	}
	return failed
}

// broken reports whether an error is that of a connection, and not an answer.
func broken(err error) bool {
	var network net.Error
	return errors.Is(err, mysql.ErrInvalidConn) || errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF) ||
		strings.Contains(err.Error(), "bad connection") || strings.Contains(err.Error(), "invalid connection")
}

// undecided reports whether a cluster's node cannot tell what became of a COMMIT.
func undecided(err error) bool {
	var said *mysql.MySQLError
	return errors.As(err, &said) && (said.Number == 1180 || said.Number == 3100)
}

// in runs one transfer in a transaction that was begun under h, from its read to
// its COMMIT. since is when it began.
func (t *transfer) in(ctx context.Context, h *hold, tx *sql.Tx, since int64, keys ...string) error {
	defer tx.Rollback()
	var accounts []account
	for _, key := range keys {
		a, err := t.read(ctx, tx, since, key)
		if err != nil {
			t.end(err, false)
			return err
		}
		accounts = append(accounts, t.moved(a))
	}
	if len(accounts) == 2 { // from one to the other
		accounts[0].a--
		accounts[1].b++
	}
	t.think(ctx)
	for _, a := range accounts {
		if err := t.write(ctx, tx, a); err != nil {
			t.end(err, false)
			return err
		}
	}
	call := t.attempt(accounts...)
	err := tx.Commit()
	if err == nil {
		h.say(kindUse, call, 0)
	}
	t.end(err, true)
	return err
}

// way is how application code does a transfer.
type way func(w *worker, ctx context.Context)

// inTx is a transaction with the hint. exclusive is whether the strategy's lock is
// one that somebody has, and not a version.
func inTx(exclusive bool, opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		w.beginTx(ctx, exclusive, []string{w.key()}, opts)
	}
}

// inTxOfTwo is the same with two keys.
func inTxOfTwo(exclusive bool, opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		keys := slices.Clone(w.keys)
		w.random.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		w.beginTx(ctx, exclusive, keys[:2], opts)
	}
}

func (w *worker) beginTx(ctx context.Context, exclusive bool, keys []string, opts []lockctx.Option) {
	t := w.transfer()
	ctx = lockctx.WithKeys(ctx, keys, opts...)
	call := now()
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		t.end(err, false)
		return
	}
	var h *hold
	if exclusive {
		token := uint64(0)
		if len(keys) == 1 {
			token, _ = mysqllock.Token(ctx)
			keys[0] = accountOf(ctx, keys[0])
		}
		h = w.granted(call, token, false, keys...)
	}
	_ = t.in(ctx, h, tx, call, keys...) // its commit is the last that is seen of the lock
}

// inSession is a read and a write without any transaction in sight.
func inSession(exclusive bool, opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		t := w.transfer()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		key := w.key()
		ctx = lockctx.With(ctx, key, opts...)
		call := now()
		if w.job == "slots" { // which account it is shows with the lock
			if err := w.db.QueryRowContext(ctx, "SELECT 1").Scan(new(int)); err != nil {
				t.end(err, false)
				return
			}
			key = accountOf(ctx, key)
		}
		a, err := t.read(ctx, w.db, call, key)
		if err != nil {
			t.end(err, false)
			return
		}
		var h *hold
		if exclusive {
			token, _ := mysqllock.Token(ctx)
			h = w.granted(call, token, false, key)
		}
		w.think(ctx)
		a = t.moved(a)
		call = t.attempt(a)
		err = t.write(ctx, w.db, a)
		if err == nil {
			h.say(kindUse, call, 0)
		}
		t.end(err, true)
	}
}

// inStatement is one statement, which does not know which state it makes: of the account that
// has no lock where there are no options.
func inStatement(opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		t, key := w.transfer(), unlocked
		if len(opts) > 0 {
			key = w.key()
			ctx = lockctx.With(ctx, key, opts...)
		}
		t.attempt(account{key: key})
		err := changed(w.db.ExecContext(ctx, "UPDATE account SET seq = seq + 1, a = a - 1, b = b + 1, op = ? WHERE k = ?", t.id, key))
		if err != nil && len(opts) == 0 { // the server may have done it all the same
			t.note(event{Kind: kindEnd, Job: t.job, Op: t.id, Result: unknown, Return: now(), Error: err.Error()})
			return
		}
		t.end(err, true)
	}
}

// inDo is mysqllock.Do where all of it is one transaction.
func inDo(exclusive bool, opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		key := w.key()
		var t *transfer
		call, committing := int64(0), false
		var h *hold
		begun := now()
		err := mysqllock.Do(ctx, w.db, key, func(ctx context.Context) error {
			if t != nil { // it is run again
				t.end(mysqllock.ErrConflict, true)
			}
			t, committing = w.transfer(), false
			if exclusive {
				h = w.granted(begun, 0, false, key)
			}
			a, err := t.read(ctx, w.db, begun, key)
			if err != nil {
				return err
			}
			w.think(ctx)
			a = t.moved(a)
			if err := t.write(ctx, w.db, a); err != nil {
				return err
			}
			call, committing = t.attempt(a), true
			return nil
		}, opts...)
		if t == nil {
			t = w.transfer()
		}
		if err == nil {
			h.say(kindUse, call, 0)
		}
		t.end(err, committing)
	}
}

// inHold is mysqllock.Acquire where all of it is one transaction.
func inHold(opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		t, key := w.transfer(), w.key()
		begun := now()
		locked, err := mysqllock.Acquire(ctx, w.db, key, opts...)
		if err != nil {
			t.end(err, false)
			return
		}
		defer locked.Rollback()
		key = accountOf(locked.Context(), key)
		h := w.granted(begun, locked.Token(), false, key)
		a, err := t.read(locked.Context(), w.db, begun, key)
		if err != nil {
			t.end(err, false)
			return
		}
		w.think(ctx)
		a = t.moved(a)
		if err := t.write(locked.Context(), w.db, a); err != nil {
			t.end(err, false)
			return
		}
		call := t.attempt(a)
		err = locked.Release()
		if err == nil {
			h.say(kindUse, call, 0)
		}
		t.end(err, true)
	}
}

func slotKey(key string, slot int) string { return fmt.Sprint(key, "#", slot) }

// accountOf is the account of the key, or of the slot of it that ctx has.
func accountOf(ctx context.Context, key string) string {
	if slot, ok := mysqllock.Slot(ctx); ok {
		return slotKey(key, slot)
	}
	return key
}

// underHold is mysqllock.Acquire where transactions are what they are without it,
// and the holder is told of the loss.
func underHold(opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		key, begun := w.key(), now()
		locked, err := mysqllock.Acquire(ctx, w.db, key, opts...)
		if err != nil {
			w.transfer().end(err, false)
			return
		}
		key = accountOf(locked.Context(), key)
		h := w.granted(begun, locked.Token(), false, key)
		stop := h.believe(locked.Context())
		for range 1 + w.random.IntN(3) {
			if h.write(locked.Context(), key) != nil {
				break
			}
		}
		stop()
		call := now()
		if locked.Release() == nil {
			h.say(kindRelease, call, 0)
		}
	}
}

// underDo is mysqllock.Do in the same way.
func underDo(opts ...lockctx.Option) way {
	return func(w *worker, ctx context.Context) {
		key, begun, call := w.key(), now(), int64(0)
		var h *hold
		err := mysqllock.Do(ctx, w.db, key, func(ctx context.Context) error {
			token, _ := mysqllock.Token(ctx)
			h = w.granted(begun, token, false, key)
			err := h.write(ctx, key)
			call = now()
			return err
		}, opts...)
		switch {
		case h == nil:
			w.transfer().end(err, false)
		case err == nil:
			h.say(kindRelease, call, 0)
		}
	}
}

// write does one transfer under the hold: in a transaction, or with a read and a
// single statement. Half of them have no context that tells that the lock is lost;
// they shall find out.
func (h *hold) write(ctx context.Context, key string) error {
	t := h.transfer()
	statements := ctx
	if h.random.IntN(2) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		statements = context.Background()
	}
	begun := now()
	if h.random.IntN(3) == 0 {
		a, err := t.read(ctx, h.db, begun, key)
		if err != nil {
			t.end(err, false)
			return err
		}
		h.think(ctx)
		a = t.moved(a)
		call := t.attempt(a)
		if err = t.write(ctx, h.db, a); err == nil {
			h.say(kindUse, call, 0)
		}
		t.end(err, true)
		return err
	}
	tx, err := h.db.BeginTx(ctx, nil)
	if err != nil {
		t.end(err, false)
		return err
	}
	return t.in(statements, h, tx, begun, key)
}

// sharing reads under a shared lock, twice, in statements of their own: nobody
// writes in between.
func sharing(w *worker, ctx context.Context) {
	t, key := w.transfer(), w.key()
	ctx = lockctx.With(ctx, key, lockctx.Shared())
	call := now()
	tx, err := w.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.end(err, false)
		return
	}
	defer tx.Rollback()
	h := w.granted(call, 0, true, key)
	for range 2 {
		call = now()
		if _, err = t.read(ctx, tx, call, key); err != nil {
			break
		}
		h.say(kindUse, call, 0)
		w.think(ctx)
	}
	t.end(err, false)
}
