package rowlock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockctx"
)

// gone is a context that has ended without a sign of it.
type gone struct {
	context.Context
	is atomic.Bool
}

func (g *gone) Err() error {
	if g.is.Load() {
		return context.Canceled
	}
	return g.Context.Err()
}

// TestALockPassesACallerThatGoesAtItsHandoff: at that moment the caller behind it has the lock, or nobody has, and
// the session is free.
func TestALockPassesACallerThatGoesAtItsHandoff(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 30, time.Minute })
		begin := func(ctx context.Context, tookOver func(*pool.Conn)) (*rowlock.Begun, error) {
			return p.Begin(ctx, driver.TxOptions{}, rowlock.Request{
				Keys: []rowlock.Key{{Name: "k"}}, Wait: time.Minute, Sessions: &sessions{get: p.conns.Acquire, tookOver: tookOver},
			})
		}
		for _, behind := range []bool{true, false} {
			first, err := begin(dbtest.Limited(t), func(*pool.Conn) { t.Error("the first takes over") })
			dbtest.OK(t, err)
			ctx, over, got := &gone{Context: dbtest.Limited(t)}, make(chan error, 1), make(chan *rowlock.Begun, 1)
			go func() {
				_, err := begin(ctx, func(*pool.Conn) { t.Error("one that has gone takes over") })
				over <- err
			}()
			dbtest.Soon(t, "it waits", func() bool { return p.queue.Waiting("k") == 1 })
			var session *pool.Conn
			if behind {
				go func() {
					grant, err := begin(dbtest.Limited(t), func(c *pool.Conn) { session = c })
					if err != nil {
						t.Error(err)
					}
					got <- grant
				}()
				dbtest.Soon(t, "the next one waits", func() bool { return p.queue.Waiting("k") == 2 })
			}
			ctx.is.Store(true)
			if !first.Handoff.PassesAsItIs(dbtest.Limited(t)) {
				t.Fatal("the lock cannot be handed over")
			}
			first.Handoff.Give(func() { t.Error("the session is broken") })
			dbtest.Want(t, <-over, context.Canceled)
			if behind {
				last := <-got
				if session == nil {
					t.Error("the one behind has a session of its own")
				}
				last.Handoff.Give(func() { t.Error("the session is broken") }) // to nobody
			}
			if n := p.conns.Stat().InUse; n != 0 {
				t.Errorf("behind %v: %d sessions are in use", behind, n)
			}
			again, err := begin(dbtest.Limited(t), func(*pool.Conn) {})
			dbtest.OK(t, err)
			again.Handoff.Give(func() {})
		}
	})
}

// handsOver has a handle hand locks over on MariaDB, too: nobody waits ahead on a budget of connections.
var handsOver = mysqllock.Config{MaxConns: 40}

// enqueue has so many callers run fn under the key, each with its place in the order in which
// they are served. They wait behind whoever has it. done returns their errors.
func enqueue(t *testing.T, db *sql.DB, key string, n int, fn func(ctx context.Context, i int) error) (done func() []error) {
	t.Helper()
	stats, err := mysqllock.Stats(db)
	dbtest.OK(t, err)
	errs := make([]error, n)
	var all sync.WaitGroup
	var served atomic.Int32
	for i := range n {
		all.Go(func() {
			errs[i] = mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error { return fn(ctx, int(served.Add(1))-1) })
		})
	}
	awaitQueue(t, db, stats.Waiters+n)
	return func() []error { all.Wait(); return errs }
}

// awaitQueue returns when so many callers are in the queue.
func awaitQueue(t *testing.T, db *sql.DB, n int) {
	t.Helper()
	dbtest.Soon(t, "they wait", func() bool {
		now, err := mysqllock.Stats(db)
		return err == nil && now.Waiters == n
	})
	// They count a moment before they are in the queue, and who is in there nobody outside of the handle can ask. One
	// that is late locks the key for itself, so that a test sees a statement more, or another connection.
	time.Sleep(100 * time.Millisecond)
}

// passes reports whether a packet commits and locks the key for the next caller.
func passes(text string) bool {
	return strings.HasPrefix(text, "COMMIT; SELECT "+server.Untimed+"1; SELECT /*+")
}

// sell takes one of the stock of product 1, and knows what there was before.
func sell(ctx context.Context, db *sql.DB, before int) error {
	n, err := stock.Read(ctx, db, 1)
	if err == nil && n != before {
		err = fmt.Errorf("there are %d, not %d", n, before)
	}
	if err == nil {
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
	}
	return err
}

// TestAnIdleTransactionGoesToTheNextCallerAsItIs: a transaction in which nothing has run goes from caller to caller, on
// one session, without a statement; and the key is locked all the time.
func TestAnIdleTransactionGoesToTheNextCallerAsItIs(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{HandOverTime: time.Minute})
		hold := stock.Acquire(t, db, "k")
		done := enqueue(t, db, "k", 5, func(context.Context, int) error { s.WantLocked("k", true); return nil })
		sent := tap.Since()
		dbtest.OK(t, hold.Release())
		for _, err := range done() {
			dbtest.OK(t, err)
		}
		if all := sent(); len(all) != 1 || all[0].Text != "COMMIT" { // of the last one
			t.Errorf("sent %v", all)
		}
		s.WantLocked("k", false)
	})
}

// firstOnly opens connections whose rows know of no further result set.
type firstOnly struct{ driver.Connector }

func (f firstOnly) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := f.Connector.Connect(ctx)
	return &firstOnlyConn{conn}, err
}

type firstOnlyConn struct{ driver.Conn }

func (foc *firstOnlyConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := foc.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
	return struct{ driver.Rows }{rows}, err
}

func (foc *firstOnlyConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return foc.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

// TestTheNextCallerWaitsInTheServerOnMariaDB while a caller of its process uses the key, if sessions are to spare. It has the key at
// the COMMIT of that, or at the end of its connection. It is refused, and leaves nothing behind, if its wait is over or its context
// ends, and waits on after a KILL. On MySQL, and while nothing has run under the lock, it waits in the process.
func TestTheNextCallerWaitsInTheServerOnMariaDB(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{LockMaxConns: 3}))
		waiting := func() (id int) {
			t.Helper()
			err := s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE '%FOR UPDATE%'"+
				" AND INFO NOT LIKE '%NOWAIT%' AND ID <> CONNECTION_ID()", s.Name).Scan(&id)
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				t.Fatal(err)
			}
			return id
		}
		want := func(ahead bool, what string) {
			t.Helper()
			if ahead {
				dbtest.Soon(t, what+": it waits in the server", func() bool { return waiting() != 0 })
				return
			}
			awaitQueue(t, db, 1)
			dbtest.Equal(t, what+": connection %d waits in the server", waiting(), 0)
		}
		// next sells one when it has the key, and says how many there were.
		type sold struct {
			saw int
			err error
		}
		next := func(ctx context.Context, opts ...lockctx.Option) <-chan sold {
			got := make(chan sold, 1)
			go func() {
				var r sold
				r.err = mysqllock.Do(ctx, db, "k", func(ctx context.Context) (err error) {
					if r.saw, err = stock.Read(ctx, db, 1); err == nil {
						err = sell(ctx, db, r.saw)
					}
					return err
				}, opts...)
				got <- r
			}()
			return got
		}
		<-next(dbtest.Limited(t)) // the row is there, and the connections are known

		for name, c := range map[string]struct {
			idle, other bool // nothing runs under the first lock; another session is in use
			opts        []lockctx.Option
			meanwhile   func(cancel func(), hold *mysqllock.Hold)
			err         error
			lost        bool // the first has lost its lock
		}{
			"the first commits":         {},
			"the first has run nothing": {idle: true},
			"few sessions are left":     {other: true},
			"its wait is over":          {opts: []lockctx.Option{lockctx.Wait(300 * time.Millisecond)}, err: mysqllock.ErrTimeout},
			"its context ended":         {meanwhile: func(cancel func(), _ *mysqllock.Hold) { cancel() }, err: context.Canceled},
			"its statement is killed": {meanwhile: func(func(), *mysqllock.Hold) {
				if id := waiting(); id != 0 {
					dbtest.Exec(t, s.Plain, fmt.Sprint("KILL QUERY ", id))
				}
			}},
			"the first is killed": {lost: true, meanwhile: func(_ func(), hold *mysqllock.Hold) {
				var id int
				dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
				dbtest.Exec(t, s.Plain, fmt.Sprint("KILL CONNECTION ", id))
			}},
		} {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
			hold := stock.Acquire(t, db, "k")
			if !c.idle {
				dbtest.OK(t, sell(hold.Context(), db, 10))
			}
			free := func() error { return nil }
			if c.other {
				free = stock.Acquire(t, db, "other").Release
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			got := next(ctx, c.opts...)
			if c.opts == nil {
				want(s.MariaDB() && !c.idle && !c.other, name)
			}
			if c.meanwhile != nil {
				c.meanwhile(cancel, hold)
			}
			if c.err != nil {
				err := (<-got).err
				dbtest.Is(t, name, err, c.err)
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil || !e.Holder.ThisProcess {
					t.Errorf("%s: it does not name the first, which its process knows: %v", name, err)
				}
			}
			if err := hold.Release(); errors.Is(err, mysqllock.ErrLost) != c.lost || !c.lost && err != nil {
				t.Errorf("%s: the first: %v", name, err)
			}
			left := 9
			if c.idle || c.lost {
				left = 10
			}
			if c.err == nil {
				r := <-got
				if dbtest.OK(t, r.err); r.saw != left {
					t.Errorf("%s: it has seen %d, want %d", name, r.saw, left)
				}
				left--
			}
			cancel()
			dbtest.OK(t, free())
			s.WantStock(1, left)
			dbtest.Soon(t, name+": the key is free", func() bool { return !s.Locked("k") })
		}
	})
}

// TestALockThatCameEarlyIsHandedToNobody: the next caller has waited in the server, and has the key while the one before is still in the
// queue, whose session was killed. The third caller gives up in that moment. Nothing stays locked, and no session is in use.
func TestALockThatCameEarlyIsHandedToNobody(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{LockMaxConns: 3}))
		hold := stock.Acquire(t, db, "k")
		var first, second int
		dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&first))
		dbtest.OK(t, sell(hold.Context(), db, 10))
		inside, goOn := make(chan bool, 1), make(chan bool)
		sold := dbtest.Go(func() error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				n, err := stock.Read(ctx, db, 1)
				if err == nil {
					err = db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&second)
				}
				inside <- true
				<-goOn
				if err != nil {
					return err
				}
				return sell(ctx, db, n)
			})
		})
		if awaitQueue(t, db, 1); s.MariaDB() {
			dbtest.Soon(t, "the second waits in the server", func() bool { return s.Waiters() == 1 })
		}
		leaving, leave := context.WithCancel(dbtest.Limited(t))
		third := dbtest.Go(func() error {
			return mysqllock.Do(leaving, db, "k", func(ctx context.Context) error {
				n, err := stock.Read(ctx, db, 1)
				return errors.Join(err, sell(ctx, db, n))
			}, lockctx.Wait(time.Minute))
		})
		awaitQueue(t, db, 2)
		dbtest.Exec(t, s.Plain, fmt.Sprint("KILL CONNECTION ", first))
		<-inside
		var refused *mysqllock.Error
		err := mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.NoWait())
		if !errors.As(err, &refused) || refused.Holder == nil || refused.Holder.ConnectionID != uint64(second) {
			t.Errorf("connection %d has the key: %v", second, err)
		}
		close(goOn)
		dbtest.OK(t, <-sold)
		leave()
		if err := <-third; !errors.Is(err, context.Canceled) && err != nil {
			t.Errorf("the third: %v", err)
		}
		dbtest.Is(t, "the first", hold.Release(), mysqllock.ErrLost)
		dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })
		dbtest.Soon(t, "no session is in use", func() bool {
			st, err := mysqllock.Stats(db)
			return err == nil && st.InUse == 0
		})
	})
}

// TestNothingStaysWhereAnswersAreLate: COMMIT is answered late, so that those who wait in the server have the key before the ones in front
// of them have left, and waits and contexts end all the time. What was told to be sold is, and nothing stays locked or in use.
func TestNothingStaysWhereAnswersAreLate(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 1000000 WHERE id = 1")
		db, proxy := s.Proxied(mysqllock.Config{LockMaxConns: 3})
		dbtest.OK(t, stock.Told(func() error {
			return mysqllock.Do(dbtest.Limited(t), db, "hot", func(context.Context) error { return nil })
		}))
		proxy.HoldUp("COMMIT", 60*time.Millisecond)
		var told, unknown, inside atomic.Int64
		var all sync.WaitGroup
		for over, i := time.Now().Add(4*time.Second), 0; i < 8; i++ {
			all.Go(func() {
				for n := 0; time.Now().Before(over); n++ {
					ctx, cancel, stays := dbtest.Limited(t), func() {}, rand.N(3) > 0
					if !stays { // its lock is given back when its context ends, whatever the function does then
						ctx, cancel = context.WithTimeout(ctx, rand.N(150*time.Millisecond))
					}
					key := "hot"
					if n%8 == 7 {
						key = fmt.Sprint("cold", i%3)
					}
					wrote := false
					err := mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
						if key != "hot" {
							return dbtest.Err(stock.Read(ctx, db, 2))
						}
						if stays {
							if inside.Add(1) != 1 {
								t.Error("two have the key")
							}
							defer inside.Add(-1)
						}
						n, err := stock.Read(ctx, db, 1)
						if err == nil {
							wrote, err = true, sell(ctx, db, n)
						}
						return err
					}, lockctx.Wait(20*time.Millisecond+rand.N(200*time.Millisecond)))
					cancel()
					switch {
					case wrote && err == nil:
						told.Add(1)
					case wrote:
						unknown.Add(1)
					}
				}
			})
		}
		all.Wait()
		proxy.Mend()
		dbtest.Soon(t, "no key is locked", func() bool { return !s.Locked("hot") && !s.Locked("cold0") })
		dbtest.Soon(t, "no session is in use", func() bool {
			st, err := mysqllock.Stats(db)
			return err == nil && st.InUse == 0
		})
		if sold := int64(1000000 - s.Stock(1)); sold < told.Load() || sold > told.Load()+unknown.Load() || sold == 0 {
			t.Errorf("%d were sold, %d told so, and of %d it is not known", sold, told.Load(), unknown.Load())
		}
	})
}

// TestACommitLocksTheKeyForTheNextCaller: a unit of work that has written is committed and the key locked for the next caller, by one
// text of several statements where that can be; else each caller locks for itself. The next caller sees what was committed. The
// server is asked once whether it takes such a text, through what Config.Base has put around its connections.
func TestACommitLocksTheKeyForTheNextCaller(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		base := func(wrap func(driver.Connector) (driver.Connector, error)) func(*mysql.Config) (driver.Connector, error) {
			return func(cfg *mysql.Config) (driver.Connector, error) {
				return mysqllock.NewConnector(cfg, mysqllock.Config{Base: wrap, MaxConns: handsOver.MaxConns})
			}
		}
		for name, test := range map[string]struct {
			open   func(*mysql.Config) (driver.Connector, error)
			packet bool
			probes int
		}{
			"as ever":             {base(nil), true, 2},
			"interceptors":        {base(intercept.With(sqlmw.NullInterceptor{})), true, 2},
			"rows without a next": {base(func(k driver.Connector) (driver.Connector, error) { return firstOnly{k}, nil }), false, 2},
			"Wrap": {func(cfg *mysql.Config) (driver.Connector, error) {
				return mysqllock.Wrap(dbtest.Connector(t, cfg), mysqllock.Config{})
			}, false, 0},
		} {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
			tap, cfg := new(dbtest.Tap), s.Config()
			tap.On(cfg)
			db := s.OpenDB(test.open(cfg))
			all := tap.Texts()
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return sell(ctx, db, 10) }))
			other := stock.Acquire(t, db, "other") // has a session of its own
			hold := stock.Acquire(t, db, "k")
			done := enqueue(t, db, "k", 5, func(ctx context.Context, i int) error {
				s.WantLocked("k", true)
				s.WantStock(1, 8-i) // committed before the next has the key
				return sell(ctx, db, 8-i)
			})
			dbtest.OK(t, sell(hold.Context(), db, 9))
			sent := tap.Texts()
			dbtest.OK(t, hold.Release())
			for _, err := range done() {
				dbtest.OK(t, err)
			}
			s.WantStock(1, 3)
			s.WantLocked("k", false)
			var locks []string
			for _, text := range sent() {
				if !strings.Contains(text, "stock") && !strings.HasPrefix(text, "[prepare]") {
					locks = append(locks, text)
				}
			}
			good := len(locks) == 6 && passes(locks[0]) && passes(locks[4]) && locks[5] == "COMMIT"
			if !test.packet {
				good = !slices.ContainsFunc(locks, passes)
			}
			if !good {
				t.Errorf("%s: sent %q", name, locks)
			}
			probes := 0
			for _, text := range all() {
				if strings.HasPrefix(text, "SELECT "+server.Untimed+"IF(") && strings.Contains(text, "; SELECT 2") {
					probes++
				}
			}
			if probes != test.probes {
				t.Errorf("%s: the server was asked by %d texts, want %d", name, probes, test.probes)
			}
			dbtest.OK(t, other.Release())
		}
	})
}

// TestHandoffGivesOthersTheirTurn: another process that waits gets the key after so many
// handoffs; and at each COMMIT, however many of this process wait.
func TestHandoffGivesOthersTheirTurn(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		write := func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1")
			return err
		}
		for name, test := range map[string]struct {
			work func(context.Context, *sql.DB) error
			most int // of the first process, before the other one
		}{
			"as it is":     {func(context.Context, *sql.DB) error { return nil }, 2},
			"with commits": {write, 0},
			"leases":       {write, 0},
		} {
			db, _ := s.Tapped(mysqllock.Config{HandOvers: 2, HandOverTime: time.Minute})
			other := s.Handle()
			var opts []lockctx.Option
			if name == "leases" {
				opts = append(opts, lockctx.Lease(time.Minute))
			}
			hold := stock.Acquire(t, db, "k")
			var mu sync.Mutex
			var order []string
			note := func(who string) { mu.Lock(); defer mu.Unlock(); order = append(order, who) }
			done := enqueue(t, db, "k", 5, func(ctx context.Context, _ int) error { note("own"); return test.work(ctx, db) })
			got := dbtest.Go(func() error {
				return mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { note("other"); return nil }, opts...)
			})
			dbtest.Soon(t, "the other one waits in the server", func() bool {
				return dbtest.Column[int](t, s.Plain, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE '%FOR UPDATE%' AND INFO NOT LIKE '%NOWAIT%' AND INFO NOT LIKE 'CREATE%' AND ID <> CONNECTION_ID()", s.Name)[0] == 1
			})
			dbtest.OK(t, test.work(hold.Context(), db))
			dbtest.OK(t, hold.Release())
			dbtest.OK(t, <-got)
			for _, err := range done() {
				dbtest.OK(t, err)
			}
			if at := slices.Index(order, "other"); at > test.most {
				t.Errorf("%s: the order is %v", name, order)
			}
		}
	})
}

// disturbing has something happen to the next packet that commits and locks for the next caller.
type disturbing struct {
	with  dbtest.Disturbed
	armed atomic.Bool
}

// handle opens a handle on whose connections that happens.
func (d *disturbing) handle(s *stock.Shop, cfg *mysql.Config, c mysqllock.Config) *sql.DB {
	s.T.Helper()
	c.Base = func(base driver.Connector) (driver.Connector, error) { return disturbed{base, d}, nil }
	return s.OpenDB(mysqllock.NewConnector(cfg, c))
}

type disturbed struct {
	driver.Connector
	by *disturbing
}

func (d disturbed) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := d.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	own := d.by.with
	own.Conn = conn
	own.At = func(text string) bool { return passes(text) && d.by.armed.CompareAndSwap(true, false) }
	return &own, nil
}

// release sets the stock to 5 under a key for which two callers wait, releases it while d is armed, and returns what
// Release has said, and the stock that the next caller has seen.
func (d *disturbing) release(t *testing.T, s *stock.Shop, db *sql.DB, name string) (saw int, released error) {
	t.Helper()
	dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
	hold := stock.Acquire(t, db, "k")
	dbtest.ExecIn(t, hold.Context(), db, "UPDATE p SET stock = 5 WHERE id = 1")
	done := enqueue(t, db, "k", 2, func(ctx context.Context, i int) (err error) {
		if i == 0 {
			saw, err = stock.Read(ctx, db, 1)
		}
		return err
	})
	d.armed.Store(true)
	err := hold.Release()
	if d.armed.Load() {
		t.Fatalf("%s: nothing was disturbed", name)
	}
	for _, err := range done() {
		if err != nil {
			t.Errorf("%s: the next: %v", name, err)
		}
	}
	dbtest.Soon(t, name+": the key is free", func() bool { return !s.Locked("k") })
	return saw, err
}

// TestADisturbedHandoffTellsWhatBecameOfTheCommit, whatever happens to the packet; the next caller gets the
// key, and nothing stays locked.
func TestADisturbedHandoffTellsWhatBecameOfTheCommit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, test := range dbtest.DisturbedCommits() {
			if strings.HasPrefix(name, "killed after") { // an error ends a packet: see TestAPacketStoppedAnywhereTellsTheTruth
				continue
			}
			d := &disturbing{with: test.Disturbed}
			db := d.handle(s, s.Config(), handsOver)
			saw, err := d.release(t, s, db, name)
			if (err == nil) != test.Done || err != nil && !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: Release: %v", name, err)
			}
			if number := (*mysql.MySQLError)(nil); test.Unknown && errors.As(err, &number) {
				t.Errorf("%s: %v is taken for a refusal", name, err)
			}
			want := 10
			if test.Committed {
				want = 5
			}
			if s.WantStock(1, want); saw != want {
				t.Errorf("%s: the next has seen %d, want %d", name, saw, want)
			}
			dbtest.OK(t, db.Close())
		}
	})
}

// TestAPacketStoppedAnywhereTellsTheTruth: the packet is killed, its connection is, or that is cut, at each of its
// statements. Either all before the COMMIT is committed or nothing; who is told that it came through, or did not, is
// told the truth, and else that nobody knows; and the next caller gets the key.
func TestAPacketStoppedAnywhereTellsTheTruth(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for at, where := range []string{"before COMMIT", "before SELECT 1", "before the lock", "after the lock"} {
			for _, how := range []string{"KILL QUERY", "KILL CONNECTION", "cut"} {
				name, tap, cfg := how+" "+where, new(dbtest.Tap), s.Config()
				tap.On(cfg)
				d := &disturbing{with: dbtest.Disturbed{Text: func(packet string) string {
					texts := strings.SplitN(packet, "; ", 3)
					return strings.Join(slices.Insert(texts, at, dbtest.Waits), "; ")
				}}}
				db := d.handle(s, cfg, handsOver)
				done := dbtest.StopWaiting(t, s.Plain, s.Name, how, tap.Break)
				saw, err := d.release(t, s, db, name)
				done()
				number := (*mysql.MySQLError)(nil)
				known := errors.As(err, &number) && number.Number == 1317
				switch {
				case err != nil && !errors.Is(err, mysqllock.ErrLost),
					how == "KILL QUERY" && (err == nil) != (at > 1),
					how == "KILL QUERY" && known != (at == 0),
					err == nil && at < 2, known && at > 0:
					t.Errorf("%s: Release: %v", name, err)
				}
				want := 10
				if at > 0 {
					want = 5
				}
				if s.WantStock(1, want); saw != want {
					t.Errorf("%s: the next has seen %d, want %d", name, saw, want)
				}
				_ = db.Close()
			}
		}
	})
}

// TestAKilledHandoffLeavesNothingLocked: the packet is killed right after its COMMIT has been answered, and the
// next caller gives up.
func TestAKilledHandoffLeavesNothingLocked(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		gone := make(chan error, 1)
		d := &disturbing{with: dbtest.Disturbed{
			Text: func(packet string) string { return packet + "; SELECT (SELECT 1 UNION SELECT 2)" }, // which fails, with another number
			Then: func() {
				cancel()
				dbtest.Want(t, <-gone, context.Canceled)
			},
		}}
		db := d.handle(s, s.Config(), handsOver)
		hold := stock.Acquire(t, db, "k")
		dbtest.OK(t, sell(hold.Context(), db, 10))
		go func() { gone <- mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }) }()
		awaitQueue(t, db, 1)
		d.armed.Store(true)
		dbtest.OK(t, hold.Release())
		s.WantStock(1, 9)
		s.WantLocked("k", false)
	})
}

// TestAKeyLockedForACallerThatHasLeftIsFree: the caller gives up while the statement is on its way that locks the key
// for it.
func TestAKeyLockedForACallerThatHasLeftIsFree(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(handsOver)
		hold := stock.Acquire(t, db, "k")
		dbtest.OK(t, sell(hold.Context(), db, 10))
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		gone := dbtest.Go(func() error { return mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }) })
		awaitQueue(t, db, 1)
		arrive := tap.Stall("COMMIT; SELECT " + server.Untimed + "1; ")
		released := dbtest.Go(hold.Release)
		dbtest.Soon(t, "it is committed", func() bool { return s.Stock(1) == 9 })
		cancel()
		dbtest.Want(t, <-gone, context.Canceled)
		arrive()
		dbtest.OK(t, <-released)
		s.WantLocked("k", false)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return sell(ctx, db, 9) }))
	})
}

// TestALostSessionIsNotHandedOver: it was killed, its holder is told, and the next caller locks the key anew.
func TestALostSessionIsNotHandedOver(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, writes := range []bool{false, true} {
			db, _ := s.Tapped(mysqllock.Config{HandOverTime: time.Minute})
			hold := stock.Acquire(t, db, "k")
			var id int
			if writes {
				dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
				dbtest.ExecIn(t, hold.Context(), db, "UPDATE p SET stock = 0")
			}
			var next atomic.Int64 // which may have the key before the first one knows
			done := enqueue(t, db, "k", 1, func(ctx context.Context, _ int) error {
				s.WantLocked("k", true)
				var own int64
				err := db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&own)
				next.Store(own)
				return err
			})
			if !writes { // nothing has run in it
				_, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.NoWait())
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil {
					t.Fatal(err)
				}
				id = int(e.Holder.ConnectionID)
			}
			dbtest.Exec(t, s.Plain, fmt.Sprintf("KILL %d", id))
			dbtest.Soon(t, "it is gone", func() bool { return !s.Locked("k") || next.Load() != 0 })
			stock.WantLost(t, "Release", hold.Release())
			dbtest.OK(t, done()[0])
			if next.Load() == int64(id) {
				t.Error("the next caller has the session that was killed")
			}
			s.WantStock(1, 10)
		}
	})
}

// TestASessionWithSomethingLeftOnItIsNotHandedOver by a statement, nor is a unit of work that holds or checks more
// than its one key.
func TestASessionWithSomethingLeftOnItIsNotHandedOver(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{HandOverTime: time.Minute})
		connection := func(ctx context.Context) (id int) {
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
			return id
		}
		for name, test := range map[string]struct {
			in    func(ctx context.Context) error
			moves bool
		}{
			"a setting": {func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "SET SESSION sql_mode = 'ANSI_QUOTES'")
				return err
			}, true},
			"a second key": {func(ctx context.Context) error {
				hold, err := mysqllock.Acquire(ctx, db, "other")
				if err == nil {
					err = hold.Release()
				}
				return err
			}, false},
			"a versioned key": {func(ctx context.Context) error { return nil }, false},
		} {
			key := dbtest.Random()
			if name == "a versioned key" {
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), key, lockctx.Optimistic()), db)
				dbtest.OK(t, tx.Commit())
			}
			hold := stock.Acquire(t, db, key)
			dbtest.OK(t, test.in(hold.Context()))
			was := connection(hold.Context())
			var now int
			var mode string
			done := enqueue(t, db, key, 1, func(ctx context.Context, _ int) error {
				now = connection(ctx)
				return db.QueryRowContext(ctx, "SELECT @@sql_mode").Scan(&mode)
			})
			sent := tap.Texts()
			dbtest.OK(t, hold.Release())
			dbtest.OK(t, done()[0])
			if test.moves && now == was || strings.Contains(mode, "ANSI_QUOTES") {
				t.Errorf("%s: the next has session %d after %d, with sql_mode %s", name, now, was, mode)
			}
			if slices.ContainsFunc(sent(), passes) {
				t.Errorf("%s: sent %q", name, sent())
			}
		}
	})
}

// TestACommitDoesNotWaitForDDL: somebody is about to alter the lock table, and waits.
func TestACommitDoesNotWaitForDDL(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, _ := s.Tapped(mysqllock.Config{Wait: time.Minute})
		hold := stock.Acquire(t, db, "k")
		dbtest.OK(t, sell(hold.Context(), db, 10))
		done := enqueue(t, db, "k", 1, func(ctx context.Context, _ int) error { return sell(ctx, db, 9) })
		reads := dbtest.Begin(t, context.Background(), s.Plain)
		dbtest.Exec(t, reads, "SELECT COUNT(*) FROM mysqllock")
		altered := dbtest.Go(func() error { return dbtest.Err(s.Plain.Exec("ALTER TABLE mysqllock ENGINE = InnoDB")) })
		dbtest.Soon(t, "the ALTER waits", func() bool {
			return dbtest.Column[int](t, s.Plain, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND STATE LIKE 'Waiting for table metadata lock'", s.Name)[0] == 1
		})
		dbtest.OK(t, hold.Release())
		if n := s.Stock(1); n > 9 { // the next one has sold, too, if it waits in the server
			t.Errorf("the stock is %d after the COMMIT", n)
		}
		dbtest.OK(t, reads.Rollback())
		dbtest.OK(t, <-altered)
		dbtest.OK(t, done()[0])
		s.WantStock(1, 8)
	})
}

// TestASessionGoesBackToThePoolIfSomebodyWaitsForOne, also for another key.
func TestASessionGoesBackToThePoolIfSomebodyWaitsForOne(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, writes := range []bool{false, true} {
			db, _ := s.Tapped(mysqllock.Config{HandOverTime: time.Minute, LockMaxConns: 1})
			hold := stock.Acquire(t, db, "k")
			var served atomic.Int32
			done := enqueue(t, db, "k", 5, func(context.Context, int) error { served.Add(1); return nil })
			before := make(chan int32, 1)
			go func() {
				_ = mysqllock.Do(dbtest.Limited(t), db, "other", func(context.Context) error { before <- served.Load(); return nil })
			}()
			dbtest.Soon(t, "it waits for a session", func() bool { st, _ := mysqllock.Stats(db); return st.Waiting == 1 })
			if writes {
				dbtest.OK(t, sell(hold.Context(), db, 10))
			}
			dbtest.OK(t, hold.Release())
			if n := <-before; n > 0 {
				t.Errorf("writes %v: %d callers had the session before the one that waited for it", writes, n)
			}
			for _, err := range done() {
				dbtest.OK(t, err)
			}
		}
	})
}

// TestACallerThatWouldNotWaitWaitsForACleanUp, with the session on which it was refused. It is not given a second
// one, which it would not give back.
func TestACallerThatWouldNotWaitWaitsForACleanUp(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle("lockHandOverTime=1m"), s.Handle()
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }))
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND WHERE namespace = '' AND name = ''")
		hold := stock.Acquire(t, other, "k")
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				_ = mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { time.Sleep(time.Millisecond); return nil }, lockctx.NoWait())
			})
			all.Go(func() {
				_ = mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { time.Sleep(time.Millisecond); return nil })
			})
		}
		time.Sleep(50 * time.Millisecond) // so that some are refused, and wait again: which of the two they wait for nobody tells
		dbtest.OK(t, hold.Release())
		all.Wait()
		dbtest.Soon(t, "no session is in use", func() bool { st, err := mysqllock.Stats(db); return err == nil && st.InUse == 0 })
	})
}
