package strategy_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// takers take a lock under a key, and give it back.
var takers = map[string]func(ctx context.Context, db *sql.DB, key string, opts []lockctx.Option) error{
	"BeginTx": func(ctx context.Context, db *sql.DB, key string, opts []lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(ctx, key, opts...), nil)
		if err != nil {
			return err
		}
		return tx.Rollback()
	},
	"Do": func(ctx context.Context, db *sql.DB, key string, opts []lockctx.Option) error {
		return mysqllock.Do(ctx, db, key, func(context.Context) error { return nil }, opts...)
	},
}

var kinds = map[string][]lockctx.Option{
	"row":         {lockctx.Row()},
	"lease":       {lockctx.Lease(15 * time.Second)},
	"advisory":    {lockctx.Advisory()},
	"optimistic":  {lockctx.Optimistic()},
	"shared":      {lockctx.Shared()},
	"row slots":   {lockctx.Slots(2)},
	"lease slots": {lockctx.Lease(15 * time.Second), lockctx.Slots(2)},
}

// TestSilenceIsNoLock: a server that does not answer has not said that somebody has the key. A
// caller whose context ends then is told that; one whose wait ends, within the driver's limits
// for an answer. Where somebody has the key, that is said also while the server is silent.
func TestSilenceIsNoLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var cells dbtest.Together
		defer cells.Wait()
		for name, opts := range kinds {
			for way, take := range takers {
				for _, c := range []struct {
					name     string
					maxConns int
					used     bool   // the handle has been used before
					deadline bool   // of the caller's
					at       string // the word that is not answered any more
				}{
					{"its context ends", 0, true, true, "mysqllock"},
					{"its context ends, maxConns", 8, true, true, "mysqllock"},
					{"its context ends, a new handle", 8, false, true, "mysqllock"},
					{"its context ends once the key was found", 0, true, true, " FOR UPDATE NOWAIT ON DUPLICATE"},
					{"its wait ends", 0, true, false, "mysqllock"},
				} {
					if c.at != "mysqllock" && !strings.HasPrefix(name, "lease") { // its strategy does not say that
						continue
					}
					cells.Run(t, name+", "+way+", "+c.name, func(t *testing.T) {
						s := &stock.Shop{Database: s.Database, Plain: s.Plain}
						db, proxy := s.Proxied(mysqllock.Config{MaxConns: c.maxConns})
						key := dbtest.Random()
						dbtest.OK(t, db.Ping())
						if c.used {
							dbtest.OK(t, stock.Told(func() error { return take(t.Context(), db, "another "+key, opts) })) // which many open together
						}
						dbtest.OK(t, db.Ping()) // a connection is ready: the base driver opens one to a silent server for ever
						ctx, wait := dbtest.Limited(t), 300*time.Millisecond
						if c.deadline {
							var cancel func()
							ctx, cancel = context.WithTimeout(ctx, wait)
							defer cancel()
							wait = time.Minute
						}
						proxy.BlockAt(c.at)
						defer proxy.Mend()
						start := time.Now()
						err := take(ctx, db, key, append(opts, lockctx.Wait(wait)))
						took := time.Since(start)
						if !errors.Is(err, mysqllock.ErrNoAnswer) || errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrExhausted) || errors.Is(err, context.DeadlineExceeded) != c.deadline {
							t.Errorf("after %v: %v", took, err)
						}
						if took > time.Minute {
							t.Errorf("it took %v", took)
						}
					})
				}
			}
		}
	})
}

// TestLateAnswerIsNoLock: a caller whose context ends right before the server grants the lock, or
// while it does, is not told that somebody has the key.
func TestLateAnswerIsNoLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var cells dbtest.Together
		defer cells.Wait()
		for name, opts := range kinds {
			for way, take := range takers {
				for _, late := range []time.Duration{-time.Millisecond, 2 * time.Millisecond, 20 * time.Millisecond} {
					cells.Run(t, fmt.Sprintf("%s, %s, %v late", name, way, late), func(t *testing.T) {
						s := &stock.Shop{Database: s.Database, Plain: s.Plain}
						db, proxy := s.Proxied(mysqllock.Config{})
						key := dbtest.Random()
						for range 2 {
							dbtest.OK(t, stock.Told(func() error { return take(t.Context(), db, key, opts) }))
						}
						const wait = 300 * time.Millisecond
						ctx, cancel := context.WithTimeout(t.Context(), wait)
						defer cancel()
						proxy.ArriveLate("mysqllock", wait+late, wait+late+time.Millisecond)
						defer proxy.Mend()
						err := take(ctx, db, key, opts)
						// database/sql rolls back a transaction whose context has ended, and then says that it is done.
						if errors.Is(err, mysqllock.ErrLocked) || err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, sql.ErrTxDone) {
							t.Error(err)
						}
					})
				}
			}
		}
	})
}

// TestAWaiterHearsThatItsKeyIsHeldDespiteSilence: somebody has the key, and the server says nothing any more.
func TestAWaiterHearsThatItsKeyIsHeldDespiteSilence(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var cells []func() // run together, when all keys are taken
		holders := s.Handle("lockMaxConns=100")
		for name, opts := range kinds {
			if name == "optimistic" {
				continue // nobody has a version
			}
			for way, take := range takers {
				key, n := dbtest.Random(), 1
				switch name {
				case "row slots", "lease slots":
					n = 2
				}
				taken := opts
				if name == "shared" {
					taken = []lockctx.Option{lockctx.Row()}
				}
				for range n {
					hold := stock.Acquire(t, holders, key, taken...)
					t.Cleanup(func() { _ = hold.Release() })
				}
				asks := func() error {
					s := &stock.Shop{Database: s.Database, Plain: s.Plain}
					db, proxy := s.Proxied(mysqllock.Config{})
					dbtest.OK(t, stock.Told(func() error { return take(t.Context(), db, "another "+key, opts) })) // which many open together
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					defer cancel()
					told := make(chan error, 1)
					go func() { told <- take(ctx, db, key, append(opts[:len(opts):len(opts)], lockctx.Wait(time.Minute))) }()
					var since time.Time // a caller that takes a connection waits, too
					dbtest.Soon(t, "it waits for the key", func() bool {
						stats, err := mysqllock.Stats(db)
						if err != nil || stats.Waiters != 1 || stats.Opening > 0 {
							since = time.Time{}
						} else if since.IsZero() {
							since = time.Now()
						}
						return !since.IsZero() && time.Since(since) > 200*time.Millisecond
					})
					proxy.Block()
					defer proxy.Mend()
					time.Sleep(time.Second) // it looks again, in vain
					cancel()
					return <-told
				}
				cells = append(cells, func() {
					err := asks()
					for try := 1; try < 5 && errors.Is(err, context.Canceled) && !errors.Is(err, mysqllock.ErrTimeout); try++ {
						err = asks() // a busy server had not answered yet
					}
					if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, context.Canceled) || errors.Is(err, mysqllock.ErrExhausted) {
						t.Errorf("%s, %s: %v", name, way, err)
					}
				})
			}
		}
		var all sync.WaitGroup
		for _, cell := range cells {
			all.Go(cell)
		}
		all.Wait()
	})
}

// TestNoConnectionIsNoSilence: a caller whose context ends while all connections are in use is
// told so, with the key, whatever it asks for.
func TestNoConnectionIsNoSilence(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} { // leases and advisory locks have a connection
			db := s.Handle("maxConns=6")
			ctx, end := context.WithCancel(dbtest.Limited(t))
			defer end()
			dbtest.OK(t, stock.Told(func() error {
				return mysqllock.Do(ctx, db, "another", func(context.Context) error { return nil }, lockctx.Row())
			}))
			for id := range 3 { // and one is the driver's own
				tx := dbtest.Begin(t, ctx, db)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock WHERE id = ?", 100+id)
			}
			for way, take := range takers {
				var err error
				for began := time.Now(); !errors.Is(err, mysqllock.ErrExhausted) && time.Since(began) < dbtest.Patience/4; { // what is asked before may take a busy machine as long
					brief, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
					err = take(brief, db, "k", []lockctx.Option{opt})
					cancel()
				}
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrExhausted) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Key != "k" {
					t.Errorf("%s, %s: %v", name, way, err)
				}
			}
		}
	})
}

// hole accepts connections, and says nothing: not even a greeting, or nothing after that.
func hole(t *testing.T, server string, greets bool) (addr string, entered <-chan struct{}) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	dbtest.OK(t, err)
	in := make(chan struct{}, 100)
	var open []net.Conn
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			open = append(open, conn)
			if greets {
				if to, err := net.Dial("tcp", server); err == nil {
					greeting := make([]byte, 4<<10)
					n, _ := to.Read(greeting)
					_, _ = conn.Write(greeting[:n])
					to.Close()
				}
			}
			in <- struct{}{}
		}
	})
	t.Cleanup(func() {
		listener.Close()
		accepting.Wait()
		for _, conn := range open {
			conn.Close()
		}
	})
	return listener.Addr().String(), in
}

// TestHungOpeningsAreGivenUp: connections whose server has accepted them, and never says who it
// is or whether the client may come in, keep no key from being locked once the address is healthy
// again, although neither the callers nor the DSN have a time limit.
func TestHungOpeningsAreGivenUp(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var cells dbtest.Together
		var used sync.WaitGroup
		defer cells.Wait()
		killed := make(chan struct{})
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(15 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic()} {
			for _, maxConns := range []int{0, 8} {
				addr, entered := hole(t, s.Config().Addr, maxConns > 0)
				used.Add(1)
				cells.Run(t, fmt.Sprintf("%s, maxConns=%d", name, maxConns), func(t *testing.T) {
					var hangs atomic.Bool
					cfg := s.Config()
					cfg.DialFunc = func(ctx context.Context, network, to string) (net.Conn, error) {
						if hangs.Load() {
							to = addr
						}
						return new(net.Dialer).DialContext(ctx, network, to)
					}
					db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: maxConns}))
					lock := func() error {
						return mysqllock.Do(context.Background(), db, name, func(context.Context) error { return nil }, opt, lockctx.Wait(5*time.Minute))
					}
					err := stock.Told(lock)
					hangs.Store(true)
					used.Done()
					dbtest.OK(t, err)
					<-killed
					begun := time.Now()
					first := make(chan error, 1)
					go func() { first <- lock() }()
					<-entered
					hangs.Store(false)
					if err := <-first; errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("while it hangs: %v", err)
					}
					if err := lock(); err != nil {
						t.Errorf("once it is healthy: %v", err)
					}
					if took := time.Since(begun); took > time.Minute {
						t.Errorf("it took %v", took)
					}
				})
			}
		}
		used.Wait()
		s.KillAllBut(0)
		close(killed)
	})
}
