package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/go-sql-driver/mysql"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
	"golang.org/x/sync/semaphore"
)

// What users would pick instead, as the tables name it.
const (
	bare         = "two bare round trips"
	getLock      = "GET_LOCK, pinned"
	getLockNoted = "GET_LOCK, noted in a row"
	getLocks     = "GET_LOCK, 32 to a statement"
	noteTwice    = "two notes in a row"
	notesMany    = "notes in rows, 32 to a statement"
	queued       = "a queue in the process"
	forUpdate    = "SELECT … FOR UPDATE"
	insertDelete = "INSERT, DELETE, sleep"
	redsyncAsIs  = "redsync, defaults"
	redsyncTuned = "redsync, tuned"
	redisAsIs    = "redislock, example"
	redisTuned   = "redislock, tuned"
	etcdMutex    = "etcd Mutex"
)

const (
	// recipeSleep is what the recipe with INSERT sleeps between two tries.
	recipeSleep = 10 * time.Millisecond
	// lockTTL is how long locks in Redis live where their default is not tried;
	// nothing here takes that long.
	lockTTL = time.Minute
)

// sqlRivals keep the lock in the same server as ours.
func sqlRivals(on string) []contender {
	plain := func(wrap func(*sql.DB) client) func(context.Context, addresses, size) (client, error) {
		return func(_ context.Context, at addresses, n size) (client, error) {
			db, err := openPlain(at[on], n)
			return wrap(db), err
		}
	}
	return []contender{
		{
			Name: bare, Server: on, Note: "`DO 1` twice: what no lock in this server can be faster than",
			open: plain(func(db *sql.DB) client { return &roundTrips{db} }),
		},
		{
			Name: getLock, Server: on, wide: true, Note: "a `sql.Conn` for each lock: `SELECT GET_LOCK(?, 60)`, `DO RELEASE_LOCK(?)`",
			open: plain(func(db *sql.DB) client { return &pinned{db} }),
		},
		{
			Name: getLockNoted, Server: on, wide: true,
			Note: "the same, with an UPDATE that commits before it is given back and one after it is got: what no lease that outlives its connection can be faster than",
			open: plain(func(db *sql.DB) client { return &noted{db} }),
		},
		{
			Name: getLocks, Server: on,
			Note: "two connections, which take the locks that 32 callers ask for with one statement: what many at a time cost the server; given back one by one",
			open: func(ctx context.Context, at addresses, n size) (client, error) { return openTogether(ctx, at[on], n) },
		},
		{
			Name: noteTwice, Server: on,
			Note: "who has the lock, noted in its row at the beginning and at the end, each with a COMMIT; nothing is looked at, and nobody woken",
			open: plain(func(db *sql.DB) client { return &notes{db} }),
		},
		{
			Name: notesMany, Server: on,
			Note: "the same for 32 callers at a time, on two connections",
			open: func(_ context.Context, at addresses, n size) (client, error) { return openNotesTogether(at[on], n) },
		},
		{
			Name: queued, Server: on,
			Note: "golang.org/x/sync/semaphore and no lock in a server: what the scheduling of goroutines and the machine cost",
			open: func(context.Context, addresses, size) (client, error) { return &queue{semaphore.NewWeighted(1)}, nil },
		},
		{
			Name: forUpdate, Server: on, wide: true, Note: "a row for each key: BEGIN, `SELECT … FOR UPDATE`, COMMIT",
			open: plain(func(db *sql.DB) client { return &lockedRows{db} }),
		},
		{
			Name: insertDelete, Server: on, polls: int(recipeSleep / time.Millisecond),
			Note: fmt.Sprintf("INSERT, where that is a duplicate sleep %v and try again; DELETE", recipeSleep),
			open: plain(func(db *sql.DB) client { return &insertedRows{db} }),
		},
	}
}

// otherRivals need a server of their own. Of those that poll there are two
// forms: as they come, and as an expert who has measured would set them up.
func otherRivals() []contender {
	return []contender{
		{
			Name: redsyncAsIs, Server: onRedis, polls: 250,
			Note: "tries again after 50 to 250 ms; who has tried 32 times in vain starts again",
			open: func(_ context.Context, at addresses, _ size) (client, error) {
				c := redis.NewClient(&redis.Options{Addr: at[onRedis]})
				return &redsyncs{Client: c, locks: redsync.New(goredis.NewPool(c))}, nil
			},
		},
		{
			Name: redsyncTuned, Server: onRedis, polls: 2 * tunedPause,
			Note: fmt.Sprintf("tries again after %d to %d ms, a connection for each goroutine", tunedPause/2, tunedPause*3/2),
			open: func(_ context.Context, at addresses, n size) (client, error) {
				c := openRedis(at, n)
				return &redsyncs{c, redsync.New(goredis.NewPool(c)), []redsync.Option{
					redsync.WithExpiry(lockTTL), redsync.WithTries(1 << 30),
					redsync.WithRetryDelayFunc(func(int) time.Duration { return jittered() }),
				}}, nil
			},
		},
		{
			Name: redisAsIs, Server: onRedis, polls: 100,
			Note: "by default it does not wait; as in its documentation's example it tries again after 100 ms",
			open: func(_ context.Context, at addresses, _ size) (client, error) {
				c := redis.NewClient(&redis.Options{Addr: at[onRedis]})
				return &redislocks{c, redislock.New(c), func() time.Duration { return 100 * time.Millisecond }}, nil
			},
		},
		{
			Name: redisTuned, Server: onRedis, polls: 2 * tunedPause,
			Note: fmt.Sprintf("tries again after %d to %d ms, a connection for each goroutine", tunedPause/2, tunedPause*3/2),
			open: func(_ context.Context, at addresses, n size) (client, error) {
				c := openRedis(at, n)
				return &redislocks{c, redislock.New(c), jittered}, nil
			},
		},
		{
			Name: etcdMutex, Server: onEtcd, Note: "`concurrency.Mutex`, a session for each goroutine, since those who share one do not exclude each other",
			open: openEtcd,
		},
	}
}

func openPlain(address string, n size) (*sql.DB, error) { return openBy(dsn(address), n) }

// openBy opens the plain driver.
func openBy(dsn string, n size) (*sql.DB, error) {
	db, err := sql.Open("mysql", dsn)
	if err == nil {
		db.SetMaxIdleConns(max(n.Workers, n.Locks))
	}
	return db, err
}

type roundTrips struct{ *sql.DB }

func (r *roundTrips) Lock(ctx context.Context, _ int, _ string) (func() error, error) {
	once := func() error {
		_, err := r.ExecContext(ctx, "DO 1")
		return err
	}
	return once, once()
}

// queue is one lock, whatever the key.
type queue struct{ *semaphore.Weighted }

func (q *queue) Lock(ctx context.Context, _ int, _ string) (func() error, error) {
	if err := q.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return func() error { q.Release(1); return nil }, nil
}

func (q *queue) Close() error { return nil }

type pinned struct{ *sql.DB }

func (p *pinned) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	conn, err := p.Conn(ctx)
	if err != nil {
		return nil, err
	}
	if err := getLockOn(ctx, conn, key); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return func() error {
		_, err := conn.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK(?)", key)
		return errors.Join(err, conn.Close())
	}, nil
}

// gathering runs what callers at the same time ask for together.
type gathering struct {
	run func(context.Context, *batch) // sets conn or err

	mu   sync.Mutex
	next *batch // fills; nil before the first has come
}

type oneAtATime struct {
	sync.Mutex
	*sql.Conn
}

type batch struct {
	keys []any
	full chan struct{} // closed by the last that fits
	done chan struct{} // closed when it has run
	conn *oneAtATime
	err  error
}

const (
	batchSize = 32
	// batchDelay is how long a batch waits for more callers.
	batchDelay = 5 * time.Millisecond
)

// join returns the batch with key, after it has run.
func (g *gathering) join(ctx context.Context, key string) *batch {
	g.mu.Lock()
	b, first := g.next, g.next == nil
	if first {
		b = &batch{full: make(chan struct{}), done: make(chan struct{})}
		g.next = b
	}
	b.keys = append(b.keys, key)
	if len(b.keys) == batchSize {
		g.next = nil
		close(b.full)
	}
	g.mu.Unlock()
	if first {
		select {
		case <-b.full:
		case <-time.After(batchDelay):
		}
		g.mu.Lock()
		if g.next == b {
			g.next = nil
		}
		g.mu.Unlock()
		g.run(ctx, b)
		close(b.done)
	}
	<-b.done
	return b
}

// together takes locks for several callers at a time.
type together struct {
	*sql.DB
	idle chan *oneAtATime
	gathering
}

func openTogether(ctx context.Context, address string, n size) (client, error) {
	db, err := openPlain(address, n)
	if err != nil {
		return nil, err
	}
	t := &together{DB: db, idle: make(chan *oneAtATime, 2)}
	t.run = t.take
	for range cap(t.idle) {
		conn, err := db.Conn(ctx)
		if err != nil {
			return nil, errors.Join(err, db.Close())
		}
		t.idle <- &oneAtATime{Conn: conn}
	}
	return t, nil
}

func (t *together) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	b := t.join(ctx, key)
	return func() error {
		b.conn.Lock()
		defer b.conn.Unlock()
		_, err := b.conn.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK(?)", key)
		return err
	}, b.err
}

func (t *together) take(ctx context.Context, b *batch) {
	b.conn = <-t.idle
	defer func() { t.idle <- b.conn }()
	b.conn.Lock()
	defer b.conn.Unlock()
	var granted int
	b.err = b.conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 0)"+strings.Repeat(" + GET_LOCK(?, 0)", len(b.keys)-1), b.keys...).Scan(&granted)
	if b.err == nil && granted < len(b.keys) {
		b.err = errors.New("GET_LOCK: somebody else has one of the locks")
	}
}

// notes keep in a row who has a lock, and look at nothing.
type notes struct{ *sql.DB }

func (n *notes) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	return func() error { return n.note(context.WithoutCancel(ctx), nil, key) }, n.note(ctx, 1, key)
}

// note notes for each of the keys who has it. A row that is not there is made.
func (n *notes) note(ctx context.Context, owner any, keys ...any) error {
	var values []any
	for _, key := range keys {
		values = append(values, key, owner)
	}
	for {
		_, err := n.ExecContext(ctx, "INSERT INTO rows_of_notes (name, owner, token) VALUES (?, ?, 1)"+strings.Repeat(", (?, ?, 1)", len(keys)-1)+
			" ON DUPLICATE KEY UPDATE owner = VALUES(owner), token = token + 1", values...)
		if !refused(err, deadlock) { // as two that make rows may
			return err
		}
	}
}

// notesTogether are notes for several callers at a time.
type notesTogether struct {
	notes
	takes, frees gathering
}

func openNotesTogether(address string, n size) (client, error) {
	db, err := openPlain(address, n)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(2) // while one commits, the other batch fills
	t := &notesTogether{notes: notes{db}}
	t.takes.run = func(ctx context.Context, b *batch) { b.err = t.note(ctx, 1, b.keys...) }
	t.frees.run = func(ctx context.Context, b *batch) { b.err = t.note(ctx, nil, b.keys...) }
	return t, nil
}

func (t *notesTogether) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	return func() error { return t.frees.join(context.WithoutCancel(ctx), key).err }, t.takes.join(ctx, key).err
}

// noted is pinned for those who also keep in a row who has the lock.
type noted struct{ *sql.DB }

func (n *noted) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	conn, err := n.Conn(ctx)
	if err != nil {
		return nil, err
	}
	note := func(ctx context.Context, owner sql.NullInt64) error {
		_, err := conn.ExecContext(ctx, "UPDATE rows_of_notes SET owner = ?, token = token + 1 WHERE name = ?", owner, key)
		return err
	}
	if err := errors.Join(getLockOn(ctx, conn, key), note(ctx, sql.NullInt64{Int64: 1, Valid: true})); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return func() error {
		ctx := context.WithoutCancel(ctx)
		err := note(ctx, sql.NullInt64{})
		_, free := conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", key)
		return errors.Join(err, free, conn.Close())
	}, nil
}

func getLockOn(ctx context.Context, conn *sql.Conn, key string) error {
	var granted sql.NullBool
	err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 60)", key).Scan(&granted)
	if err == nil && !granted.Bool {
		err = errors.New("GET_LOCK: not granted within a minute")
	}
	return err
}

type lockedRows struct{ *sql.DB }

func (l *lockedRows) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	tx, err := l.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := lockRow(ctx, tx, key); err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	return tx.Commit, nil
}

func lockRow(ctx context.Context, tx *sql.Tx, key string) error {
	var name string
	return tx.QueryRowContext(ctx, "SELECT name FROM rows_to_lock WHERE name = ? FOR UPDATE", key).Scan(&name)
}

type insertedRows struct{ *sql.DB }

// Lock gives up between two tries only: an INSERT that is cancelled may be
// carried out all the same.
func (i *insertedRows) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	for ctx.Err() == nil {
		err := i.change(ctx, "INSERT INTO rows_as_locks VALUES (?)", key)
		if err == nil {
			return func() error { return i.delete(ctx, key) }, nil
		}
		if !refused(err, duplicate) && !refused(err, deadlock) {
			return nil, err
		}
		time.Sleep(recipeSleep)
	}
	return nil, ctx.Err()
}

func (i *insertedRows) delete(ctx context.Context, key string) error {
	for {
		err := i.change(ctx, "DELETE FROM rows_as_locks WHERE name = ?", key)
		if !refused(err, deadlock) {
			return err
		}
	}
}

func (i *insertedRows) change(ctx context.Context, text, key string) error {
	_, err := i.ExecContext(context.WithoutCancel(ctx), text, key)
	return err
}

// The server's error numbers.
const (
	duplicate = 1062
	deadlock  = 1213
)

func refused(err error, number uint16) bool {
	var e *mysql.MySQLError
	return errors.As(err, &e) && e.Number == number
}

// tunedPause is the mean pause between two tries of the tuned forms, in
// milliseconds. Shorter ones keep Redis busy with vain tries (with 1 or 2 and 64
// goroutines the grants fell to a half and less), longer ones make those wait
// longer who could have the lock.
const tunedPause = 8

func jittered() time.Duration {
	const mean = tunedPause * time.Millisecond
	return mean/2 + rand.N(mean)
}

func openRedis(at addresses, n size) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: at[onRedis], PoolSize: max(20, n.Workers)})
}

type redsyncs struct {
	*redis.Client
	locks   *redsync.Redsync
	options []redsync.Option
}

// Lock gives up between two rounds of tries only: who is cancelled while it asks
// may leave the lock behind.
func (r *redsyncs) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	whole := context.WithoutCancel(ctx)
	mutex := r.locks.NewMutex(key, r.options...)
	for ctx.Err() == nil {
		err := mutex.LockContext(whole)
		var taken *redsync.ErrTaken
		if err == nil {
			return func() error {
				_, err := mutex.UnlockContext(whole)
				return err
			}, nil
		}
		if !errors.As(err, &taken) && !errors.Is(err, redsync.ErrFailed) {
			return nil, err
		}
	}
	return nil, ctx.Err()
}

type redislocks struct {
	*redis.Client
	locks *redislock.Client
	pause func() time.Duration
}

// Lock gives up between two tries only, as that of redsync.
func (r *redislocks) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	whole := context.WithoutCancel(ctx)
	lock, err := r.locks.Obtain(whole, key, lockTTL, &redislock.Options{RetryStrategy: &untilDone{ctx, r.pause}})
	if err != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	return func() error { return lock.Release(whole) }, nil
}

// untilDone is how redislock tries again, until the context ends.
type untilDone struct {
	ctx   context.Context
	pause func() time.Duration
}

func (u *untilDone) NextBackoff() time.Duration {
	if u.ctx.Err() != nil {
		return 0
	}
	return u.pause()
}

type mutexes struct {
	*clientv3.Client
	sessions []*concurrency.Session
}

func openEtcd(ctx context.Context, at addresses, n size) (client, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{at[onEtcd]}, DialTimeout: startLimit, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	m := &mutexes{Client: c}
	for range n.Workers {
		s, err := concurrency.NewSession(c, concurrency.WithContext(ctx))
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.sessions = append(m.sessions, s)
	}
	return m, nil
}

func (m *mutexes) Lock(ctx context.Context, worker int, key string) (func() error, error) {
	mutex := concurrency.NewMutex(m.sessions[worker], "/bench/"+key)
	if err := mutex.Lock(ctx); err != nil {
		return nil, err
	}
	return func() error { return mutex.Unlock(context.WithoutCancel(ctx)) }, nil
}

func (m *mutexes) Close() (err error) {
	for _, s := range m.sessions {
		err = errors.Join(err, s.Close())
	}
	return errors.Join(err, m.Client.Close())
}
