package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestCloseEndsTheWaitInTheQueue: who waits in the queue hears at once that the Locker is closed, also
// where the server does not answer the one in front.
func TestCloseEndsTheWaitInTheQueue(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		name := advisory.Name(s.namespace, "k")
		under, answer := make(chan struct{}), make(chan struct{})
		p := s.process(settings{conns: 1, seen: failing(func(text string) error {
			if strings.Contains(text, "DO RELEASE_LOCK('"+name) {
				close(under)
				<-answer
			}
			return nil
		}), change: func(c *strategy.Config) { c.HandOverTime = 0 }})
		lock := p.acquire("k", 0)
		failed := make(chan error, 2)
		wait := func() {
			lock, err := p.Acquire(context.Background(), request("k", time.Minute))
			for err == nil { // it was granted at the last moment, and is about to be lost
				time.Sleep(time.Millisecond)
				err = lock.Err()
			}
			failed <- err
		}
		go wait() // yields it to others
		p.inQueue("k", 1)
		go wait()
		p.inQueue("k", 2)
		dbtest.OK(t, lock.Release())
		<-under
		var closed sync.WaitGroup
		start := time.Now()
		closed.Go(p.Close)
		// The other one has no answer yet.
		if err := <-failed; !errors.Is(err, lockerr.ErrClosed) || time.Since(start) > 30*time.Second {
			t.Errorf("who waited in the queue got %v after %v", err, time.Since(start))
		}
		close(answer)
		if err := <-failed; !errors.Is(err, lockerr.ErrClosed) && !errors.Is(err, lockerr.ErrNoAnswer) {
			t.Errorf("who was in front got %v", err)
		}
		closed.Wait()
	})
}

// TestShortReadsCostAWaiterOneConnection: a limit on reads that nobody has told of costs a waiter one
// connection, not one after the other.
func TestShortReadsCostAWaiterOneConnection(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		other := s.process(settings{})
		dbtest.AtItsPace(t, 600*time.Millisecond, func(reads time.Duration) error { // on a busy machine others, too, are not answered in time
			cfg := s.config()
			cfg.ReadTimeout = reads
			base := dbtest.Connector(s.T, cfg)
			var opened atomic.Int32
			p := s.process(settings{connect: func(ctx context.Context) (driver.Conn, error) {
				opened.Add(1)
				return base.Connect(ctx)
			}, change: func(c *strategy.Config) { c.ReadTimeout = 0 }})
			lock := other.acquire("k", time.Minute)
			time.AfterFunc(8*reads, func() { _ = lock.Release() })
			own, err := p.Acquire(t.Context(), request("k", 5*time.Minute))
			if err == nil {
				err = own.Release()
			}
			if n := opened.Load(); err == nil && n > 4 {
				err = fmt.Errorf("%d connections were opened", n)
			}
			return err
		})
	})
}

// TestAGrantStaysOnTheConnectionThatWaited: the connection on which somebody has waited carries the
// lock, and goes back when it carries nothing.
func TestAGrantStaysOnTheConnectionThatWaited(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		one, two := p.acquire("1", 0), p.acquire("2", 0)
		var all sync.WaitGroup
		locks := make([]*advisory.Grant, 3)
		for i, key := range []string{"1", "2"} {
			all.Go(func() { locks[i] = other.acquire(key, time.Minute) })
			var ids []string
			for range 3 { // KILL QUERY ends no wait and loses no lock
				dbtest.Soon(t, "it waits", func() bool { ids = s.waiters(plain, key); return len(ids) == 1 })
				s.Exec(plain, "KILL QUERY "+ids[0])
				s.Exec(plain, fmt.Sprintf("KILL QUERY %d", one.ConnectionID()))
				time.Sleep(20 * time.Millisecond)
			}
			dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, key)) == 1 })
		}
		dbtest.OK(t, one.Release())
		dbtest.OK(t, two.Release())
		all.Wait()
		locks[2] = other.acquire("3", 0)
		for _, lock := range locks {
			other.held(plain, lock)
		}
		for _, lock := range locks {
			dbtest.OK(t, lock.Release())
		}
		dbtest.Soon(t, "no connection is in use", func() bool { return other.conns.Stat().InUse == 0 })
	})
}

func TestAPollerAsksNowAndThen(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(settings{}), s.process(settings{conns: 1})
		lock := p.acquire("k", 0)
		time.AfterFunc(100*time.Millisecond, func() { _ = lock.Release() })
		sent, start := other.sent.Load(), time.Now()
		dbtest.OK(t, other.acquire("k", time.Minute).Release())
		most := 8 + 3*int64(time.Since(start)/(100*time.Millisecond)) // it looks so often, and pings come on top
		if n := other.sent.Load() - sent; n > most {
			t.Errorf("%d statements while it polled, more than %d", n, most)
		}
	})
}

// TestAGrantOfAnEndedConnectionIsNone: a grant that is read when the server has ended the connection,
// as by a process that was stopped, is none.
func TestAGrantOfAnEndedConnectionIsNone(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var once sync.Once
		plain := s.open()
		p, killer := s.process(settings{}), s.open()
		const ttl = 6 * time.Second
		other := s.process(settings{ttl: ttl, seen: failing(func(text string) error {
			if strings.Contains(text, "IS_FREE_LOCK('"+advisory.Name(s.namespace, "k")) {
				once.Do(func() {
					s.Exec(killer, "KILL "+s.holder(killer, "k"))
					time.Sleep(ttl / 2)
				})
			}
			return nil
		})})
		lock := p.acquire("k", 0)
		got := other.acquiring("k", time.Minute)
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		dbtest.OK(t, lock.Release())
		lock = <-got
		once.Do(func() { t.Error("the connection was not ended") })
		other.held(plain, lock)
		dbtest.OK(t, lock.Release())
	})
}

// lateClose is a connection on which something happens when the answer of a
// statement was read.
type lateClose struct {
	mysqlConn
	read func(text string)
}

func (lc *lateClose) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := lc.mysqlConn.QueryContext(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return &lateRows{rows, func() { lc.read(text) }}, nil
}

type lateRows struct {
	driver.Rows
	read func()
}

func (lr *lateRows) Close() error {
	lr.read()
	return lr.Rows.Close()
}

// TestAGrantThatComesAfterItsCallerIsNotHandedOver: the driver closes a connection whose context
// ends, also when the statement was answered already. Such a grant is not handed over.
func TestAGrantThatComesAfterItsCallerIsNotHandedOver(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		first, giveUp := context.WithCancel(t.Context())
		base, plain := s.Connector(dbtest.NoDatabase), s.open()
		var waiting atomic.Bool
		p := s.process(settings{})
		other := s.process(settings{connect: func(ctx context.Context) (driver.Conn, error) {
			opened, err := base.Connect(ctx)
			if err != nil {
				return nil, err
			}
			c := opened.(mysqlConn)
			return &lateClose{c, func(text string) {
				if strings.Contains(text, "IS_FREE_LOCK('"+advisory.Name(s.namespace, "k")) && waiting.CompareAndSwap(true, false) {
					giveUp()
					for first := time.Now(); c.IsValid() && time.Since(first) < 10*time.Second; {
						time.Sleep(time.Millisecond) // the driver is about to close it
					}
				}
			}}, nil
		}})
		lock := p.acquire("k", 0)
		failed := other.asking(first, request("k", time.Minute))
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		got := other.acquiring("k", time.Minute)
		other.inQueue("k", 1)
		waiting.Store(true)
		dbtest.OK(t, lock.Release())
		dbtest.Is(t, "the first", <-failed, context.Canceled)
		lock = <-got
		other.held(plain, lock)
		dbtest.OK(t, lock.Release())
	})
}

// TestANameThatTwoCallersShowIsShownUntilBothHaveLeft.
func TestANameThatTwoCallersShowIsShownUntilBothHaveLeft(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, c, name := s.process(settings{}), s.open(), "shown-"+dbtest.Random()
		show := func() func() {
			release, ok := p.Show(dbtest.Limited(t), name)
			if !ok {
				t.Fatal("it is not shown")
			}
			return release
		}
		used := func() bool { return s.One(c, "SELECT IS_USED_LOCK('"+name+"') IS NOT NULL") == "1" }
		one, two := show(), show()
		one()
		for began := time.Now(); time.Since(began) < 3*time.Second; time.Sleep(50 * time.Millisecond) { // an idle connection is closed after 2 s
			if !used() {
				t.Fatal("the other caller's is gone")
			}
		}
		two()
		dbtest.Soon(t, "it is gone", func() bool { return !used() })
		show()()
		dbtest.Soon(t, "it is gone again", func() bool { return !used() })
	})
}
