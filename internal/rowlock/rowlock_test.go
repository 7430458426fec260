package rowlock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

type waiting = func(context.Context) (context.Context, func(), error)

// free is a waiting that refuses nothing.
func free(ctx context.Context) (context.Context, func(), error) { return ctx, func() {}, nil }

// begin locks keys in a transaction on a connection of the process's own.
func (p *process) begin(ctx context.Context, wait time.Duration, keys ...string) (*pool.Conn, *pool.Txn, *queue.Ticket, error) {
	return p.beginWaiting(ctx, wait, free, keys...)
}

func (p *process) beginWaiting(ctx context.Context, wait time.Duration, waiting waiting, keys ...string) (*pool.Conn, *pool.Txn, *queue.Ticket, error) {
	c, grant, err := p.request(ctx, rowlock.Request{Keys: exclusive(keys...), Wait: wait, Waiting: waiting})
	if err != nil {
		return c, nil, nil, err
	}
	return c, grant.Txn, grant.Ticket, nil
}

// sessions gives a caller one session after the other, on which it may wait, too.
type sessions struct {
	get      func(context.Context) (*pool.Conn, error)
	tookOver func(*pool.Conn)
	c        *pool.Conn // the last one
}

func (s *sessions) Get(ctx context.Context) (c *pool.Conn, err error) {
	s.c, err = s.get(ctx)
	return s.c, err
}
func (s *sessions) BeforeWait(context.Context) (*pool.Conn, error) { return s.c, nil }
func (s *sessions) TookOver(c *pool.Conn)                          { s.tookOver(c) }
func (s *sessions) Short() error                                   { return nil }

// exclusive are keys that are not shared.
func exclusive(names ...string) (keys []rowlock.Key) {
	for _, name := range names {
		keys = append(keys, rowlock.Key{Name: name})
	}
	return keys
}

// request begins a transaction on a connection of the process's own. Like database/sql it
// tries another one where a connection is bad: where a server is slow, a KILL that may come
// late costs one.
func (p *process) request(ctx context.Context, r rowlock.Request) (*pool.Conn, *rowlock.Begun, error) {
	return p.requestAs(ctx, driver.TxOptions{}, r)
}

func (p *process) requestAs(ctx context.Context, opts driver.TxOptions, r rowlock.Request) (*pool.Conn, *rowlock.Begun, error) {
	from := &sessions{get: p.conns.Acquire}
	r.Sessions = from
	if r.Waiting == nil {
		r.Waiting = free
	}
	for tries := 1; ; tries++ {
		grant, err := p.Begin(ctx, opts, r)
		c := from.c
		if err != nil && c != nil {
			if c.Clean() { // else it was cut off in the middle of a statement
				p.wantNoTransaction(c.Conn)
			}
			c.Release()
		}
		if !errors.Is(err, driver.ErrBadConn) || tries == 3 {
			return c, grant, err
		}
	}
}

// granted makes a request that must be granted.
func (p *process) granted(r rowlock.Request) (*pool.Conn, *rowlock.Begun) {
	p.T.Helper()
	c, grant, err := p.request(dbtest.Limited(p.T), r)
	dbtest.OK(p.T, err)
	return c, grant
}

func (p *process) end(c *pool.Conn, txn *pool.Txn, ticket *queue.Ticket) {
	p.T.Helper()
	if err := txn.Commit(0); err != nil {
		p.T.Error(err)
	}
	ticket.Leave()
	c.Release()
}

// wantNoTransaction checks that none is open on c.
func (p *process) wantNoTransaction(c driver.Conn) {
	p.T.Helper()
	p.Exec(c, "SET TRANSACTION READ WRITE") // error 1568 inside one
}

// lease gives somebody else a lease of key.
func (s *scratch) lease(key string, d time.Duration) {
	s.T.Helper()
	s.Exec(s.Connect(), fmt.Sprintf("INSERT INTO %s (namespace, name, owner, token, expires) VALUES ('app', '%s', 'x#00000000', 1, UTC_TIMESTAMP(6) + INTERVAL %d MICROSECOND)"+
		" ON DUPLICATE KEY UPDATE owner = 'x#00000000', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL %[3]d MICROSECOND",
		s.table, key, d.Microseconds()))
}

func (s *scratch) release(key string) {
	s.T.Helper()
	c, err := s.Connector().Connect(context.Background())
	if err != nil {
		s.T.Error(err)
		return
	}
	defer c.Close()
	s.Exec(c, "UPDATE "+s.table.String()+" SET owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6)) WHERE namespace = 'app' AND name = '"+key+"'")
}

// wantFree waits until nobody has locked the rows of keys: a statement that was given up
// may end a moment later.
func (s *scratch) wantFree(keys ...string) {
	s.T.Helper()
	c := s.Connect()
	for _, key := range keys {
		dbtest.Eventually(s.T, key+" is free", func() error {
			return server.Exec(context.Background(), c, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+key+"' FOR UPDATE NOWAIT")
		})
	}
}

func wantHolder(t *testing.T, err error, program string) {
	t.Helper()
	var e *lockerr.Error
	if !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != program {
		t.Errorf("the holder is not %s: %v", program, err)
	}
}

// TestTheHolderOfAMovedLockIsNamed, to a caller that does not wait and to an observer, and the waiter is not. A
// neighbour's inserts move the locks of a row, and MySQL tells its thread of them.
func TestTheHolderOfAMovedLockIsNamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("it tells the transaction")
		}
		for _, shared := range []bool{false, true} {
			key := fmt.Sprintf("s:500, shared: %v", shared)
			p := s.process(nil)
			c, grant := p.granted(rowlock.Request{Keys: []rowlock.Key{{Name: key, Shared: shared}}})
			waiter, look := s.Connect(), s.Connect()
			ctx, cancel := context.WithCancel(t.Context())
			ended := dbtest.Go(func() error {
				return server.Exec(ctx, waiter, "UPDATE "+s.table.String()+" SET token = token WHERE namespace = 'app' AND name = '"+key+"'")
			})
			dbtest.Soon(t, "one waits", func() bool {
				return s.One(look, "SELECT COUNT(*) FROM performance_schema.data_locks WHERE LOCK_STATUS = 'WAITING' AND OBJECT_SCHEMA = '"+s.Name+"'") == "1"
			})
			s.SplitPages(s.table.String(), "app", key)
			want, err := strconv.ParseUint(s.One(c.Conn, "SELECT CONNECTION_ID()"), 10, 64)
			dbtest.OK(t, err)
			if h := p.Holder(dbtest.Limited(t), []string{key}); h == nil || h.ConnectionID != want {
				t.Errorf("%s is held by %d, and an observer is told %v", key, want, h)
			}
			var e *lockerr.Error
			for tries := 0; tries < 10 && (e == nil || e.Holder == nil); tries++ { // a busy server may not say so in time
				err = s.process(nil).refused(rowlock.Request{Keys: exclusive(key)}, lockerr.ErrLocked)
				dbtest.Equal(t, "an error of the driver's: %v, want %v", errors.As(err, &e), true)
			}
			if e.Holder == nil || e.Holder.ConnectionID != want {
				t.Errorf("%s is held by %d, and the caller is told %v", key, want, err)
			}
			cancel()
			<-ended
			p.end(c, grant.Txn, grant.Ticket)
		}
	})
}

// TestWhoHasLockedTheGapBeforeARowDoesNotHoldIt: that is done, for example, by asking for a row that is not there.
func TestWhoHasLockedTheGapBeforeARowDoesNotHoldIt(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		gap := func() {
			c := s.Connect()
			s.Exec(c, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
			s.Exec(c, "BEGIN")
			s.Exec(c, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = 'j' FOR UPDATE")
		}
		gap()
		c, grant := p.granted(rowlock.Request{Keys: exclusive("k")})
		gap()
		want := s.One(c.Conn, "SELECT CONNECTION_ID()")
		var e *lockerr.Error
		err := s.process(nil).refused(rowlock.Request{Keys: exclusive("k")}, lockerr.ErrLocked)
		if !errors.As(err, &e) || e.Holder != nil && strconv.FormatUint(e.Holder.ConnectionID, 10) != want || e.Holder == nil && !s.MariaDB() {
			t.Errorf("k is held by connection %s, and the caller is told %v", want, err)
		}
		p.end(c, grant.Txn, grant.Ticket)
	})
}

// TestTheHolderOfAnEarlierWaitIsNotBlamedForALaterOne: MariaDB shows an old copy of its transactions while a program
// reads them all the time. Whoever kept the connection waiting then is not said to keep it waiting now.
func TestTheHolderOfAnEarlierWaitIsNotBlamedForALaterOne(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, look := s.process(nil), s.Connect()
		reading, stop := context.WithCancel(t.Context())
		var readers sync.WaitGroup
		defer func() { stop(); readers.Wait() }()
		for n, key := range []string{"first", "second"} {
			holder := s.Connect()
			dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{key}))
			s.Exec(holder, "BEGIN")
			s.Exec(holder, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+key+"' FOR UPDATE")
			ended := dbtest.Go(func() error {
				return p.refused(rowlock.Request{Keys: exclusive(key), Wait: 4 * time.Second}, lockerr.ErrTimeout)
			})
			if n == 0 {
				dbtest.Soon(t, "one waits", func() bool {
					time.Sleep(110 * time.Millisecond)
					return s.One(look, "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'") == "1"
				})
				for range 3 {
					c := s.Connect()
					readers.Go(func() {
						for ; reading.Err() == nil; time.Sleep(5 * time.Millisecond) {
							s.Exec(c, "DO (SELECT COUNT(*) FROM information_schema.INNODB_TRX)")
						}
					})
				}
			}
			err := <-ended
			var e *lockerr.Error
			if id := s.One(holder, "SELECT CONNECTION_ID()"); errors.As(err, &e) && e.Holder != nil && strconv.FormatUint(e.Holder.ConnectionID, 10) != id {
				t.Errorf("%s is held by connection %s, and the caller is told %v", key, id, err)
			}
			s.Exec(holder, "ROLLBACK")
		}
	})
}

func TestLeaseExcludesRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		s.lease("b", time.Hour)
		for _, keys := range [][]string{{"b"}, {"a", "b", "c"}} {
			_, _, _, err := p.begin(dbtest.Limited(t), 0, keys...)
			if !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("%q without a wait: %v", keys, err)
			}
			wantHolder(t, err, "x")
			s.wantFree(keys...)

			var e *lockerr.Error
			err = p.refused(rowlock.Request{Keys: exclusive(keys...), Wait: 300 * time.Millisecond}, lockerr.ErrTimeout)
			if !errors.As(err, &e) || e.Waited < 300*time.Millisecond || e.Waited > 20*time.Second {
				t.Errorf("%q: %v", keys, err)
			}
			wantHolder(t, err, "x")
			s.wantFree(keys...)
		}
		if !p.rows.Leased("b") || p.rows.Leased("a") {
			t.Errorf("Leased(b) is %v, Leased(a) is %v", p.rows.Leased("b"), p.rows.Leased("a"))
		}

		s.release("b")
		calls := p.wakeUps.calls.Load()
		c, txn, ticket, err := p.begin(dbtest.Limited(t), 0, "a", "b", "c")
		dbtest.OK(t, err)
		p.end(c, txn, ticket)
		if p.wakeUps.calls.Load() != calls {
			t.Error("it waited for a lease that is not live")
		}
	})
}

// TestRowLockWakesOnRelease: the waiter is told, tries again, and gives its turn
// back; nobody else's row lock is in the way meanwhile.
func TestRowLockWakesOnRelease(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		s.lease("k", time.Hour)
		got := dbtest.Go(func() error {
			c, txn, ticket, err := p.begin(dbtest.Limited(t), time.Minute, "k")
			if err == nil {
				p.end(c, txn, ticket)
			}
			return err
		})
		dbtest.Soon(t, "it waits for the lease", func() bool { return p.wakeUps.calls.Load() >= 1 })
		s.wantFree("k")              // so the lease can be renewed
		p.wakeUps.wake <- struct{}{} // for nothing
		dbtest.Soon(t, "it waits for the lease again", func() bool { return p.wakeUps.calls.Load() >= 2 })
		s.release("k")
		began := time.Now()
		p.wakeUps.wake <- struct{}{}
		dbtest.OK(t, <-got)
		t.Logf("granted %v after the release", time.Since(began))
		dbtest.Equal(t, "%d turns were not given back", p.wakeUps.turns.Load(), 0)
	})
}

// TestARowLockIsGrantedWhenALeaseRunsOut, without any wake-up.
func TestARowLockIsGrantedWhenALeaseRunsOut(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(cfg *strategy.Config) { cfg.TTL = time.Hour }) // after a third of that it would look by itself
		began := time.Now()
		s.lease("k", 400*time.Millisecond)
		c, txn, ticket, err := p.begin(dbtest.Limited(t), time.Hour, "k")
		dbtest.OK(t, err)
		if d := time.Since(began); d < 400*time.Millisecond || d > time.Minute {
			t.Errorf("granted after %v", d)
		}
		p.end(c, txn, ticket)
		dbtest.Equal(t, "%d turns were not given back", p.wakeUps.turns.Load(), 0)
	})
}

// TestAWaiterThatIsWokenForNothingRests: a waiter that is woken all the time does not ask the
// server all the time, and the connection is not left idle for a TTL.
func TestAWaiterThatIsWokenForNothingRests(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		attempts := func(p *process) int32 {
			before := p.wakeUps.calls.Load()
			_, _, _, err := p.begin(dbtest.Limited(t), 1100*time.Millisecond, "k")
			if !errors.Is(err, lockerr.ErrTimeout) && !errors.Is(err, lockerr.ErrNoAnswer) { // a busy server has not answered in time
				t.Error(err)
			}
			return p.wakeUps.calls.Load() - before
		}
		p := s.process(nil)
		s.lease("k", time.Hour)
		close(p.wakeUps.wake)
		if n := attempts(p); n > 5 {
			t.Errorf("%d attempts in 1.1 s", n)
		}

		p = s.process(func(cfg *strategy.Config) { cfg.TTL = 900 * time.Millisecond })
		for began := time.Now(); ; { // a busy machine may be late for one
			n := attempts(p)
			if n == 3 || n == 4 {
				break
			}
			if n > 4 || time.Since(began) > dbtest.Patience {
				t.Fatalf("%d attempts with a TTL of 0.9 s", n)
			}
		}
	})
}

// TestWaitForLeaseEnds: however it ends, the next in the queue comes to the front.
func TestWaitForLeaseEnds(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		refusal := errors.New("refused")
		for name, want := range map[string]error{"cancelled": context.Canceled, "refused": refusal, "failing": errAwait} {
			p := s.process(func(cfg *strategy.Config) {
				if name == "failing" {
					cfg.Await = func(context.Context, string, time.Time, time.Duration) (func(), error) { return nil, errAwait }
				}
			})
			s.lease("k", time.Hour)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			var waits sync.WaitGroup
			if name == "cancelled" {
				waits.Go(func() {
					dbtest.Soon(t, "it waits for the lease", func() bool { return p.wakeUps.calls.Load() > 0 })
					cancel()
				})
			}
			waiting := func(ctx context.Context) (context.Context, func(), error) {
				ctx, stop := context.WithCancelCause(ctx)
				if name == "refused" {
					time.AfterFunc(time.Second, func() { stop(refusal) })
				}
				return ctx, func() { stop(nil) }, nil
			}
			began := time.Now()
			_, _, _, err := p.beginWaiting(ctx, time.Hour, waiting, "k")
			waits.Wait()
			dbtest.Is(t, name, err, want)
			wantHolder(t, err, "x")
			if d := time.Since(began); d > time.Minute {
				t.Errorf("%s took %v", name, d)
			}
			if _, _, front := p.queue.TryEnter([]queue.Key{{Name: "k"}}, false); !front {
				t.Errorf("%s: it has not left the queue", name)
			}
			cancel()
		}
	})
}

var errAwait = errors.New("no wake-up")

// TestAWaiterForARowFindsTheLeaseThatWasTakenMeanwhile: it waits in the server, and when the row lock goes, the lease
// has run on since the waiter began.
func TestAWaiterForARowFindsTheLeaseThatWasTakenMeanwhile(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		holder := s.Connect()
		for round := 1; ; round++ { // a busy machine may delay one
			began := time.Now()
			s.Exec(holder, "BEGIN")
			s.Exec(holder, "UPDATE "+s.table.String()+" SET token = token + 1, owner = 'y#00000000', expires = UTC_TIMESTAMP(6) + INTERVAL 4 SECOND WHERE namespace = 'app' AND name = 'k'")
			committed := after(t, 3*time.Second, func() { s.Exec(holder, "COMMIT") })
			c, txn, ticket, err := p.begin(dbtest.Limited(t), time.Minute, "k")
			dbtest.OK(t, err)
			d := time.Since(began)
			p.end(c, txn, ticket)
			committed()
			if d < 3900*time.Millisecond {
				t.Errorf("granted after %v", d)
			}
			if d <= 6500*time.Millisecond { // not 7 s
				break
			}
			if round == 10 {
				t.Fatalf("granted after %v", d)
			}
		}
	})
}

// join locks keys in a transaction of the caller's that has locked "mine".
func (p *process) join(ctx context.Context, wait time.Duration, keys ...string) (alive bool, end func(locks int), err error) {
	p.T.Helper()
	var c *pool.Conn
	var txn *pool.Txn
	var ticket *queue.Ticket
	for began := time.Now(); ; {
		c, txn, ticket, err = p.begin(ctx, time.Minute, "mine")
		dbtest.OK(p.T, err)
		_, alive, err = p.Join(ctx, c, rowlock.Request{Keys: exclusive(keys...), Wait: wait, Waiting: free})
		if !errors.Is(err, lockerr.ErrNoAnswer) || time.Since(began) > dbtest.Patience {
			break
		}
		_ = txn.Rollback(0) // a busy server has not answered within a short wait
		ticket.Leave()
		c.Destroy()
	}
	return alive, func(locks int) {
		p.T.Helper()
		other := p.Connect()
		for _, key := range append([]string{"mine"}, keys[:locks]...) {
			lock := "SELECT 1 FROM " + p.table.String() + " WHERE namespace = 'app' AND name = '" + key + "' FOR UPDATE NOWAIT"
			if err := server.Exec(context.Background(), other, lock); !server.Locked(err) {
				p.T.Errorf("%s is not locked: %v", key, err)
			}
		}
		p.end(c, txn, ticket)
	}, err
}

func TestALeaseThatIsKnownLeavesTheJoiningTransactionAlive(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		s.lease("k", time.Hour)

		// Known to have had a lease: seen before the transaction locks it.
		alive, end, err := p.join(dbtest.Limited(t), 0, "k")
		if !alive || !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
			t.Errorf("alive %v, %v", alive, err)
		}
		wantHolder(t, err, "x")
		s.wantFree("k")
		end(0)

		alive, end, err = p.join(dbtest.Limited(t), 200*time.Millisecond, "a", "k")
		if !alive || !errors.Is(err, lockerr.ErrTimeout) {
			t.Errorf("with a wait: alive %v, %v", alive, err)
		}
		wantHolder(t, err, "x")
		s.wantFree("a", "k")
		end(0)

		// Woken.
		calls := p.wakeUps.calls.Load()
		after(t, 0, func() {
			dbtest.Soon(t, "it waits for the lease", func() bool { return p.wakeUps.calls.Load() > calls })
			s.release("k")
			p.wakeUps.wake <- struct{}{}
		})
		alive, end, err = p.join(dbtest.Limited(t), time.Minute, "a", "k")
		if !alive || err != nil {
			t.Errorf("woken: alive %v, %v", alive, err)
		}
		end(2)
		dbtest.Equal(t, "%d turns were not given back", p.wakeUps.turns.Load(), 0)

		// Not known: the lock statement finds it, and the transaction has to go.
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"new"}))
		s.lease("new", time.Hour)
		for range 2 {
			alive, end, err = p.join(dbtest.Limited(t), 0, "new")
			if !errors.Is(err, lockerr.ErrLocked) {
				t.Error(err)
			}
			wantHolder(t, err, "x")
			if known := p.rows.Leased("new"); !known {
				t.Error("the lease was not noted")
			}
			end(0)
			if alive {
				break
			}
		}
		if !alive {
			t.Error("the second time, too, the transaction has to go")
		}

		// A waiting lock statement finds one.
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"later"}))
		holder := s.Connect()
		s.Exec(holder, "BEGIN")
		s.Exec(holder, "UPDATE "+s.table.String()+" SET token = 1, owner = 'y#00000000', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE namespace = 'app' AND name = 'later'")
		s.onceOneWaits(func() { s.Exec(holder, "COMMIT") })
		alive, end, err = p.join(dbtest.Limited(t), time.Minute, "later")
		if alive || !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
			t.Errorf("found while waiting: alive %v, %v", alive, err)
		}
		wantHolder(t, err, "y")
		end(0)
	})
}

// TestJoinKeepsItsTransactionAlive while it waits for a lease longer than the
// server lets its connection be idle.
func TestJoinKeepsItsTransactionAlive(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.AtItsPace(t, time.Second, func(ttl time.Duration) error {
			p := s.process(func(cfg *strategy.Config) { cfg.TTL = ttl })
			s.lease("k", ttl*5/2)
			c, txn, ticket, err := p.begin(dbtest.Limited(t), time.Minute, "mine")
			dbtest.OK(t, err)
			s.Exec(c.Conn, fmt.Sprintf("SET SESSION wait_timeout = %d", ttl/time.Second))
			_, alive, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Keys: exclusive("k"), Wait: time.Minute, Waiting: free})
			if alive && err == nil {
				p.end(c, txn, ticket)
				return nil
			}
			_ = txn.Rollback(0)
			ticket.Leave()
			c.Destroy()
			return fmt.Errorf("alive %v, %w", alive, err)
		})
	})
}

func TestAnUnsafeTopologyIsRefusedUnlessAllowed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, unsafe := range []bool{false, true} {
			p := s.process(func(cfg *strategy.Config) {
				cfg.Info.Topology = server.MultiPrimary
				cfg.Unsafe = unsafe
			})
			c, txn, ticket, err := p.begin(dbtest.Limited(t), 0, "k")
			if errors.Is(err, lockerr.ErrUnsafe) == unsafe {
				t.Errorf("unsafe %v: %v", unsafe, err)
			}
			if err == nil {
				p.end(c, txn, ticket)
			}
			conn := pool.Adopt(s.Connect())
			_, alive, err := p.Join(dbtest.Limited(t), conn, rowlock.Request{Keys: exclusive("k"), Waiting: free})
			if errors.Is(err, lockerr.ErrUnsafe) == unsafe || !alive {
				t.Errorf("unsafe %v: alive %v, %v", unsafe, alive, err)
			}
		}
	})
}

// TestATransactionWithTheLockHasItsOptions, however it came to have the lock, and the session's
// next transaction has none of them.
func TestATransactionWithTheLockHasItsOptions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		s.Exec(s.Connect(), "CREATE TABLE "+s.Name+".t (v INT)")
		key := func(opts driver.TxOptions) []rowlock.Key { return []rowlock.Key{{Name: "k", Shared: opts.ReadOnly}} }
		begin := func(opts driver.TxOptions, wait time.Duration) {
			t.Helper()
			c, grant, err := p.requestAs(dbtest.Limited(t), opts, rowlock.Request{Keys: key(opts), Wait: wait})
			dbtest.OK(t, err)
			defer p.end(c, grant.Txn, grant.Ticket)
			count := func() string { return s.Query(c.Conn, "SELECT COUNT(*) FROM "+s.Name+".t")[0][0] }
			before := count()
			s.Exec(s.Connect(), "INSERT INTO "+s.Name+".t VALUES (1)")
			if sees, want := count() != before, opts.Isolation == driver.IsolationLevel(sql.LevelReadCommitted); sees != want {
				t.Errorf("%+v: it sees what others commit: %v", opts, sees)
			}
			err = server.Exec(dbtest.Limited(t), c.Conn, "INSERT INTO "+s.Name+".t VALUES (2)")
			if server.ReadOnlyTransactions(err) != opts.ReadOnly || err != nil && !opts.ReadOnly {
				t.Errorf("%+v: a write: %v", opts, err)
			}
		}
		for _, opts := range []driver.TxOptions{
			{Isolation: driver.IsolationLevel(sql.LevelReadCommitted)},
			{ReadOnly: true},
			{Isolation: driver.IsolationLevel(sql.LevelReadCommitted), ReadOnly: true},
		} {
			for range many {
				begin(opts, 0)
				begin(driver.TxOptions{}, 0)
			}
			release := other.hold(rowlock.Request{Keys: exclusive("k")})
			_, _, err := p.requestAs(dbtest.Limited(t), opts, rowlock.Request{Keys: key(opts)})
			dbtest.Is(t, "refused", err, lockerr.ErrLocked)
			released := s.onceOneWaits(release)
			begin(opts, time.Minute)
			released()
			begin(driver.TxOptions{}, 0)
		}
		none := driver.TxOptions{Isolation: driver.IsolationLevel(sql.LevelSnapshot)}
		_, _, err := p.requestAs(dbtest.Limited(t), none, rowlock.Request{Keys: exclusive("k")})
		if err == nil || !strings.Contains(err.Error(), "isolation level") {
			t.Errorf("a level that there is not: %v", err)
		}
		s.wantFree("k")
	})
}

// called counts the transactions that the base driver has begun, and ended.
type called struct {
	plainConn
	begun, ended *atomic.Int32
}

func (c called) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	c.begun.Add(1)
	tx, err := c.plainConn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	return calledTx{tx, c}, err
}

type calledTx struct {
	driver.Tx
	c called
}

func (c calledTx) Commit() error   { c.c.ended.Add(1); return c.Tx.Commit() }
func (c calledTx) Rollback() error { c.c.ended.Add(1); return c.Tx.Rollback() }

// TestTransactionsOfTheApplicationsConnectorBeginAndEndByCalls, also where the lock is refused, or has
// to be waited for, and none is handed over.
func TestTransactionsOfTheApplicationsConnectorBeginAndEndByCalls(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 30, time.Minute }), s.process(nil)
		var begun, ended atomic.Int32
		p.conns = pool.New(pool.Config{
			Connect: func(ctx context.Context) (driver.Conn, error) {
				c, err := s.Connector().Connect(ctx)
				if err != nil {
					return nil, err
				}
				return called{c.(plainConn), &begun, &ended}, nil
			},
			Max: 2, Idle: time.Minute, Setup: "SET SESSION autocommit = 0", ByCalls: true,
		})
		t.Cleanup(p.conns.Close)
		n := int32(0)
		want := func(more int32) {
			t.Helper()
			if n += more; begun.Load() != n || ended.Load() != n {
				t.Errorf("%d were begun and %d ended of %d", begun.Load(), ended.Load(), n)
			}
		}
		for _, opts := range []driver.TxOptions{{}, {Isolation: driver.IsolationLevel(sql.LevelReadCommitted)}} {
			for range many {
				c, grant, err := p.requestAs(dbtest.Limited(t), opts, rowlock.Request{Keys: exclusive("k")})
				dbtest.OK(t, err)
				if grant.Handoff != nil {
					t.Error("it would be handed over")
				}
				p.end(c, grant.Txn, grant.Ticket)
			}
			want(many)
			release := other.hold(rowlock.Request{Keys: exclusive("k")})
			_, _, err := p.requestAs(dbtest.Limited(t), opts, rowlock.Request{Keys: exclusive("k")})
			dbtest.Is(t, "refused", err, lockerr.ErrLocked)
			want(1)
			released := s.onceOneWaits(release)
			c, grant, err := p.requestAs(dbtest.Limited(t), opts, rowlock.Request{Keys: exclusive("k"), Wait: time.Minute})
			dbtest.OK(t, err)
			p.end(c, grant.Txn, grant.Ticket)
			released()
			want(2)
		}
	})
}

// TestALockTellsWhatElseItsRowSays: as text, and prepared.
func TestALockTellsWhatElseItsRowSays(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, before := range []int{1, many} {
			s.testLockTells(t, before)
			s.Exec(s.Connect(), "DELETE FROM "+s.table.String()+" WHERE name = 'k'")
		}
	})
}

// testLockTells has the key locked so often before.
func (s *scratch) testLockTells(t *testing.T, before int) {
	p, c := s.process(nil), s.Connect()
	locked := func(key string) []string {
		t.Helper()
		conn, grant := p.granted(rowlock.Request{Keys: exclusive(key)})
		if err := server.Exec(dbtest.Limited(t), c, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+key+"' FOR UPDATE NOWAIT"); !server.Locked(err) {
			t.Errorf("%s is not locked: %v", key, err)
		}
		p.end(conn, grant.Txn, grant.Ticket)
		return grant.Versioned
	}
	for range before {
		locked("k")
	}
	for range 2 {
		s.Exec(c, "DELETE FROM "+s.table.String()+" WHERE name = 'k'") // it is made again
		locked("k")
	}
	if p.rows.Leased("k") {
		t.Error("k is taken for one that has had a lease")
	}
	change := func(what string) {
		s.Exec(c, "UPDATE "+s.table.String()+" SET "+what+" WHERE name = 'k'")
	}
	change("token = 7, expires = UTC_TIMESTAMP(6)")
	locked("k")
	if !p.rows.Leased("k") {
		t.Error("that k has had a lease is not noticed")
	}
	change("owner = 'x', expires = UTC_TIMESTAMP(6)")
	locked("k")
	change("owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
	conn, grant, err := p.request(dbtest.Limited(t), rowlock.Request{Keys: exclusive("k")})
	if err == nil {
		p.end(conn, grant.Txn, grant.Ticket)
	}
	var said *lockerr.Error
	if !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &said) || said.Holder == nil || said.Holder.Program != "x" {
		t.Errorf("of a live lease: %v", err)
	}
	change("owner = NULL, versioned = 1")
	if versioned := locked("k"); !slices.Equal(versioned, []string{"k"}) {
		t.Errorf("versioned are %q", versioned)
	}
	change("versioned = 0")
	if versioned := locked("k"); len(versioned) > 0 {
		t.Errorf("versioned are %q", versioned)
	}
}

// after runs f later. wait returns when f has.
func after(t testing.TB, d time.Duration, f func()) (wait func()) {
	var done sync.WaitGroup
	done.Go(func() {
		time.Sleep(d)
		f()
	})
	t.Cleanup(done.Wait)
	return done.Wait
}

// lateKill is a connection whose KILL the server carries out later than the
// caller waits.
type lateKill struct {
	plainConn
	sent func()
}

// plainConn is what the tests wrap.
type plainConn interface {
	driver.Conn
	driver.ExecerContext
	driver.QueryerContext
	driver.Validator
	driver.SessionResetter
}

func (l lateKill) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if strings.HasPrefix(text, "KILL QUERY") {
		l.sent()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return l.plainConn.ExecContext(ctx, text, args)
}

// pool has one connection, which is wrapped.
func (s *scratch) pool(wrap func(plainConn) driver.Conn) *pool.Pool {
	s.T.Helper()
	p := pool.New(pool.Config{
		Connect: func(ctx context.Context) (driver.Conn, error) {
			c, err := s.Connector().Connect(ctx)
			if err != nil {
				return nil, err
			}
			return wrap(c.(plainConn)), nil
		},
		Max: 1, Idle: time.Minute, Setup: "SET SESSION autocommit = 1",
	})
	s.T.Cleanup(p.Close)
	return p
}

// TestAConnectionThatAKillMayHitIsNotReused, even where the lock was granted before the KILL
// came.
func TestAConnectionThatAKillMayHitIsNotReused(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder := s.process(nil)
		var kill atomic.Pointer[func()] // what the KILL of a round does
		control := s.pool(func(c plainConn) driver.Conn { return lateKill{c, func() { (*kill.Load())() }} })
		p := s.process(func(cfg *strategy.Config) { cfg.Control = control })
		for range 20 { // a KILL may come too late to be sent at all
			release := sync.OnceFunc(holder.hold(rowlock.Request{Keys: exclusive("k"), Wait: time.Minute}))
			defer release()
			var released atomic.Int64 // how long after the round has begun
			began := time.Now()
			send := sync.OnceFunc(func() {
				released.Store(int64(time.Since(began)))
				release()
			})
			kill.Store(&send)
			c, grant, err := p.request(dbtest.Limited(t), rowlock.Request{Keys: exclusive("k"), Wait: time.Second})
			if err == nil {
				p.end(c, grant.Txn, grant.Ticket)
			}
			// One that comes before the wait is over is that of the round before.
			// And a busy server may not have answered within the wait.
			if after := time.Duration(released.Load()); after < 900*time.Millisecond || errors.Is(err, lockerr.ErrNoAnswer) {
				release()
				continue
			}
			dbtest.Is(t, "granted with a KILL on its way", err, lockerr.ErrTimeout)
			if c == nil || c.Clean() {
				t.Error("the connection is used on")
			}
			holder.hold(rowlock.Request{Keys: exclusive("k"), Wait: time.Minute})()
			return
		}
		t.Error("no KILL was sent")
	})
}

// failingKill is a connection on which a KILL fails until a time, as when the server has no
// answer for it, or another KILL hits it.
type failingKill struct {
	plainConn
	until *atomic.Pointer[time.Time]
}

func (f failingKill) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if until := f.until.Load(); strings.HasPrefix(text, "KILL QUERY") && time.Now().Before(*until) {
		return nil, &mysql.MySQLError{Number: 1317, Message: "Query execution was interrupted"}
	}
	return f.plainConn.ExecContext(ctx, text, args)
}

// TestGivingUpLeavesNoWaiterAlthoughKillsFail at first.
func TestGivingUpLeavesNoWaiterAlthoughKillsFail(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var until atomic.Pointer[time.Time]
		control := s.pool(func(c plainConn) driver.Conn { return failingKill{c, &until} })
		p := s.process(func(cfg *strategy.Config) { cfg.Control, cfg.TTL = control, time.Hour })
		defer s.process(nil).hold(rowlock.Request{Keys: exclusive("k"), Wait: time.Minute})()
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		failed := dbtest.Go(func() error {
			_, _, err := p.request(ctx, rowlock.Request{Keys: exclusive("k"), Wait: time.Hour})
			return err
		})
		s.waitsInServer(1)
		end := time.Now().Add(time.Second)
		until.Store(&end)
		cancel()
		began := time.Now()
		dbtest.Want(t, <-failed, context.Canceled)
		watch := s.Connect()
		dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters(watch) == 0 })
		if took := time.Since(began); took > 20*time.Second { // its holder's idle limit is 30 s
			t.Errorf("a waiter was left for %v", took)
		}
	})
}

// cutOff is a connection that is found closed when the caller has given up: the
// driver closes one whose context ends, even though it was answered.
type cutOff struct {
	plainConn
	giveUp *context.CancelFunc
}

func (c cutOff) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	if giveUp := *c.giveUp; giveUp != nil {
		giveUp()
		return nil, driver.ErrBadConn
	}
	return c.plainConn.QueryContext(ctx, text, args)
}

// TestWhoGivesUpIsToldSoAndNotOfABadConnection, for which database/sql would try another.
func TestWhoGivesUpIsToldSoAndNotOfABadConnection(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		p.hold(rowlock.Request{Keys: exclusive("k")})() // makes the row
		var giveUp context.CancelFunc
		conns := s.pool(func(c plainConn) driver.Conn { return cutOff{c, &giveUp} })
		p.conns = conns
		p.hold(rowlock.Request{Keys: exclusive("k")})() // opens it
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		giveUp = cancel
		if _, _, err := p.request(ctx, rowlock.Request{Keys: exclusive("k"), Wait: time.Minute}); !errors.Is(err, context.Canceled) || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("it ended with %v", err)
		}
	})
}
