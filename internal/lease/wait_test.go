package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestAWaiterThatLosesItsConnectionGoesOnOnAnother one.
func TestAWaiterThatLosesItsConnectionGoesOnOnAnother(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		lease := l.acquire(request("k"))
		passed := other.pass(dbtest.Limited(t), waiting("k", time.Minute))
		for range 3 {
			var killed []int64
			dbtest.Soon(t, "it waits", func() bool { killed = s.inWakeUp(); return len(killed) == 1 })
			s.kill(killed)
			dbtest.Soon(t, "it does not wait there", func() bool { return !slices.Contains(s.inWakeUp(), killed[0]) })
		}
		dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
		dbtest.OK(t, lease.Release())
		dbtest.OK(t, <-passed)
		dbtest.Soon(t, "no connection is kept", func() bool { return other.conns.Stat().InUse == 0 })
	})
}

// TestAFrozenHoldersWakeUpLockKeepsNobodyOut: a wake-up lock that a stopped process still has keeps
// nobody from its lease once that has run out.
func TestAFrozenHoldersWakeUpLockKeepsNobodyOut(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		conn, err := s.db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		l := s.locker(setup{})
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			dbtest.OK(t, l.acquire(request("k")).Release())
			dbtest.Exec(t, conn, "DO GET_LOCK('"+lockname.OfWakeUp(s.Name, "k")+"', 0)")
			s.set("k", "owner = 'frozen#12345678', expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
			begin := time.Now()
			lease := l.acquire(waiting("k", wait))
			t.Logf("with a wait of %v granted after %v", wait, time.Since(begin))
			if took := time.Since(begin); took > 15*time.Second || wait > 0 && took < strategy.Pace { // it waits for longer
				t.Errorf("with a wait of %v granted after %v", wait, took)
			}
			dbtest.OK(t, lease.Release())
		}
		// And one that is still live is waited for no longer than it runs.
		soonest, start := time.Minute, time.Now()
		for soonest > longest*3/4 && time.Since(start) < dbtest.Patience {
			begin := time.Now()
			s.set("k", "owner = 'frozen#12345678', expires = UTC_TIMESTAMP(6) + INTERVAL 1 SECOND")
			lease := l.acquire(waiting("k", 20*time.Second))
			soonest = min(soonest, time.Since(begin))
			dbtest.OK(t, lease.Release())
		}
		if soonest < 900*time.Millisecond || soonest > longest*3/4 {
			t.Errorf("granted after %v", soonest)
		}
	})
}

// TestAWaiterThatCouldNotAskKeepsTheHolderItsConnection: a third party has locked the row for longer than the waiter
// wants the lease, so it does not know whether the silent holder of the wake-up lock still has the lease.
func TestAWaiterThatCouldNotAskKeepsTheHolderItsConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		held, l := s.locker(setup{}).acquire(request("k")), s.locker(setup{})
		holder := func() []int64 { return s.threads("ID = IS_USED_LOCK('" + lockname.OfWakeUp(s.Name, "k") + "')") }
		before := holder()
		dbtest.Soon(t, "the holder is silent", func() bool {
			return len(before) == 1 && len(s.threads(fmt.Sprint("COMMAND = 'Sleep' AND TIME >= 1 AND ID = ", before[0]))) == 1
		})
		tx := s.lockRow("k")
		ctx, leave := context.WithCancel(dbtest.Limited(t))
		defer leave()
		r := waiting("k", time.Minute)
		r.TTL = time.Second
		sent := l.tap.Texts()
		asked := l.asking(ctx, r)
		dbtest.Soon(t, "it has waited for the row three times", func() bool { return count(sent(), "START TRANSACTION") > 3 })
		if after := holder(); !slices.Equal(after, before) {
			t.Errorf("connection %d has the wake-up lock, and %d had it", after, before)
		}
		leave()
		dbtest.Is(t, "the waiter", <-asked, context.Canceled)
		dbtest.OK(t, tx.Rollback())
		s.back(held, held.Release())
	})
}

// TestWaitersWithoutAConnectionLook: where a pool has none to wait on, its waiters look.
func TestWaitersWithoutAConnectionLook(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for most := 1; most <= 3; most++ {
			a, b := s.locker(setup{max: most}), s.locker(setup{max: most})
			lease := a.acquire(request("k"))
			var passed []<-chan error
			sent := b.tap.Texts()
			for range 3 {
				passed = append(passed, b.pass(dbtest.Limited(t), waiting("k", 25*time.Second)))
			}
			b.inQueue("k", 2)
			dbtest.Soon(t, "the first looks", func() bool { return count(sent(), "INSERT") > 0 })
			// Others are not held up.
			begin := time.Now()
			dbtest.OK(t, b.acquire(request("j")).Release())
			if took := time.Since(begin); took > 15*time.Second { // the others wait for longer
				t.Errorf("with %d connections another key took %v", most, took)
			}
			dbtest.OK(t, lease.Release())
			for _, ended := range passed {
				dbtest.OK(t, <-ended)
			}
		}
	})
}

func TestAwaitEndsWithTheRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		dbtest.OK(t, other.acquire(request("j")).Release()) // there is a connection to wait on
		soonest := time.Minute
		for try := 0; try < 20 && soonest > longest/2; try++ { // a busy machine may delay some
			lease := l.acquire(waiting("k", 20*time.Second))
			woken := make(chan time.Time, 1)
			go func() {
				done, err := other.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
				woken <- time.Now()
				if err != nil {
					t.Error(err)
					return
				}
				done()
				done()
			}()
			dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
			released := time.Now()
			dbtest.OK(t, lease.Release())
			soonest = min(soonest, (<-woken).Sub(released))
		}
		if soonest > longest/2 { // not only since it looks by itself
			t.Errorf("woken after %v", soonest)
		}

		// No longer than asked.
		lease := l.acquire(waiting("k", 20*time.Second))
		for _, most := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond} {
			soonest := time.Minute
			for try := 0; try < 20 && soonest > most+longest/2; try++ {
				begin := time.Now()
				done, err := other.Await(dbtest.Limited(t), "k", time.Now(), most)
				dbtest.OK(t, err)
				soonest = min(soonest, time.Since(begin))
				done()
			}
			if soonest < min(most, strategy.Pace)*9/10 || soonest > most+longest/2 {
				t.Errorf("for at most %v it waits %v", most, soonest)
			}
		}

		// Without a wake-up lock it does not spin, and with a cancelled context it ends.
		dbtest.Soon(t, "the wake-up locks are given back", func() bool { return other.conns.Stat().InUse == 0 })
		dbtest.OK(t, s.db.QueryRow("SELECT RELEASE_ALL_LOCKS()").Scan(new(int)))
		s.kill([]int64{int64(s.lockConnOf(lease))})
		dbtest.Soon(t, "the wake-up lock is gone", func() bool { return s.wakeUps("k") == 0 })
		begin := time.Now()
		for range 3 {
			done, err := other.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
			dbtest.OK(t, err)
			done()
		}
		if took := time.Since(begin); took < 600*time.Millisecond || took > 15*time.Second {
			t.Errorf("three times it waits %v", took)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if _, err := other.Await(ctx, "k", time.Now(), 20*time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		few := s.locker(setup{max: 1})
		begin = time.Now()
		done, err := few.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
		dbtest.OK(t, err)
		done()
		if took := time.Since(begin); took < strategy.Pace || took > 15*time.Second {
			t.Errorf("without a connection it waits %v", took)
		}
		dbtest.Soon(t, "all is given back", func() bool { return other.conns.Stat().InUse == 0 && s.wakeUps("k") == 0 })
	})
}

// lockConnOf is the id of the connection that has the lease's wake-up lock.
func (s *scratch) lockConnOf(lease *Grant) uint64 {
	lease.locker.mu.Lock()
	defer lease.locker.mu.Unlock()
	return lease.conn.c.KnownID()
}

func TestAReleaseWakesAWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		a, b := s.locker(setup{}), s.locker(setup{})
		soonest := time.Minute
		for try := 0; try < 20 && soonest > strategy.Pace/2; try++ { // a busy machine may delay some
			held := a.acquire(waiting("k", 20*time.Second))
			passed := b.pass(dbtest.Limited(t), waiting("k", time.Minute))
			dbtest.Soon(t, "the other waits", func() bool { return len(s.inWakeUp()) == 1 })
			released := time.Now()
			dbtest.OK(t, held.Release())
			dbtest.OK(t, <-passed)
			soonest = min(soonest, time.Since(released))
		}
		if soonest > strategy.Pace/2 { // a caller that only looks does so after so long
			t.Errorf("woken after %v at the least", soonest)
		}
		dbtest.Soon(t, "the connections are given back", func() bool { return a.conns.Stat().InUse+b.conns.Stat().InUse == 0 })
	})
}

// wakeUps is how many connections have the wake-up lock of key.
func (s *scratch) wakeUps(key string) (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.db.QueryRow("SELECT IS_USED_LOCK('"+lockname.OfWakeUp(s.Name, key)+"') IS NOT NULL").Scan(&n))
	return n
}

// TestCancelledWaitersLeaveNothing has waiters come and go; none of them may be left behind.
func TestCancelledWaitersLeaveNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		held := s.locker(setup{}).acquire(request("k"))
		const stay, leave = 4, 8
		staying, leaving := make([]<-chan error, stay), make([]<-chan error, leave)
		for i := range staying {
			staying[i] = s.locker(setup{max: 3}).pass(dbtest.Limited(t), waiting("k", 5*time.Minute))
		}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		for i := range leaving {
			leaving[i] = s.locker(setup{max: 3}).pass(ctx, waiting("k", 5*time.Minute))
		}
		seen := make(map[int64]bool) // on a busy server some are always between two waits
		dbtest.Soon(t, "all wait", func() bool {
			for _, id := range s.inWakeUp() {
				seen[id] = true
			}
			return len(seen) >= stay+leave
		})
		cancel()
		dbtest.Soon(t, "those that were cancelled are gone from the server", func() bool { return len(s.inWakeUp()) <= stay })
		dbtest.OK(t, held.Release())
		for _, ended := range staying {
			dbtest.OK(t, <-ended)
		}
		for _, ended := range leaving {
			dbtest.Want(t, <-ended, context.Canceled)
		}
		if r := s.row("k"); r.live || r.token != 1+stay {
			t.Errorf("the row is %+v", r)
		}
		dbtest.Soon(t, "nobody waits any more", func() bool { return len(s.inWakeUp()) == 0 && s.wakeUps("k") == 0 })
	})
}

// TestCancelledWaiterIsKilled: by itself the server would look at it once a second.
func TestCancelledWaiterIsKilled(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder, l := s.locker(setup{}), s.locker(setup{})
		held := holder.acquire(request("k"))
		defer held.Release()
		sent := l.tap.Texts()
		for try := 0; count(sent(), "KILL") == 0; try++ { // a server that looks at that very moment is quicker
			if try == 10 {
				t.Fatal("nobody was killed")
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			failed := l.pass(ctx, waiting("k", time.Minute))
			dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
			cancel()
			if err := <-failed; !errors.Is(err, context.Canceled) || !errors.Is(err, lockerr.ErrTimeout) || errors.Is(err, driver.ErrBadConn) {
				t.Fatal(err)
			}
			dbtest.Soon(t, "it is gone from the server", func() bool { return len(s.inWakeUp()) == 0 })
		}
	})
}

// TestALeaseWaitsForARowLock: who has locked the row by a transaction keeps the lease from
// being taken, and a waiter gets it as soon as the transaction ends.
func TestALeaseWaitsForARowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{ttl: time.Second})
		dbtest.OK(t, l.acquire(request("k")).Release())
		for _, hold := range []time.Duration{300 * time.Millisecond, 2500 * time.Millisecond} {
			soonest := time.Minute
			for began := time.Now(); soonest > longest/2 && time.Since(began) < dbtest.Patience; {
				soonest = min(soonest, s.behindRowLock(l, hold))
			}
			if soonest > longest/2 {
				t.Errorf("granted %v after the transaction's end at the soonest", soonest)
			}
		}
		dbtest.Soon(t, "nothing is left", func() bool {
			return len(s.inWakeUp()) == 0 && s.wakeUps("k") == 0 && l.conns.Stat().InUse == 0
		})
		// The settings of a connection that has waited are as before.
		for range 4 {
			c, err := l.conns.Acquire(dbtest.Limited(t))
			dbtest.OK(t, err)
			defer c.Release()
			rows, err := server.Query(dbtest.Limited(t), c.Conn, "SELECT @@innodb_lock_wait_timeout, @@autocommit")
			dbtest.OK(t, err)
			if rows[0][0] != "1" || rows[0][1] != "1" {
				t.Errorf("a connection is left with %v", rows)
			}
		}
	})
}

// behindRowLock is how long after the end of a transaction that locks the row for so long
// a waiter has the lease: a minute where a busy machine loses it before its release.
func (s *scratch) behindRowLock(l *locker, hold time.Duration) time.Duration {
	t := s.T
	tx := s.lockRow("k")
	dbtest.Is(t, "without a wait", dbtest.Err(l.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrLocked)
	dbtest.Is(t, "with a short wait", l.told(waiting("k", 50*time.Millisecond)), lockerr.ErrTimeout)
	dbtest.Is(t, "with a context that ends", dbtest.Err(l.Acquire(dbtest.Within(t, hold/2), waiting("k", time.Minute))), context.DeadlineExceeded)
	ended := make(chan time.Time, 1)
	time.AfterFunc(hold, func() {
		ended <- time.Now()
		_ = tx.Commit()
	})
	r := waiting("k", time.Minute)
	r.TTL = time.Second // shorter than the row is locked
	lease := l.acquire(r)
	granted := time.Now()
	wait := granted.Sub(<-ended)
	if wait < 0 {
		t.Errorf("granted %v before the transaction's end", -wait)
	}
	time.Sleep(1200 * time.Millisecond) // it is renewed
	err := lease.Release()
	if errors.Is(err, lockerr.ErrLost) {
		return time.Minute
	}
	dbtest.OK(t, err)
	return wait
}

// TestACancelledWaiterDoesNotStayBehindARowLock on the server.
func TestACancelledWaiterDoesNotStayBehindARowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		s.lockRow("k")
		ctx, cancel := context.WithCancel(context.Background())
		failed := l.pass(ctx, waiting("k", time.Minute))
		dbtest.Soon(t, "it waits behind the row lock", func() bool { return len(s.behindRow()) == 1 })
		begin := time.Now()
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) || time.Since(begin) > 20*time.Second { // the server lets it wait for 30 s
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
		dbtest.Soon(t, "it is gone from the server", func() bool { return len(s.behindRow()) == 0 && s.wakeUps("k") == 0 })
		if took := time.Since(begin); took > 20*time.Second {
			t.Errorf("it was on the server for %v", took)
		}
	})
}

// behindRow are the connections that wait for a row.
func (s *scratch) behindRow() []int64 { return s.threads("INFO LIKE '%1 FROM %FOR UPDATE'") }

// TestAShortWaitBehindARowLockEndsWhenItIsOver, and what was given up is not granted when the row is free.
func TestAShortWaitBehindARowLockEndsWhenItIsOver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		const wait = 300 * time.Millisecond
		fastest, start := time.Minute, time.Now()
		for try := 0; try < 3 || fastest > wait+terms.Calmly/2 && time.Since(start) < dbtest.Patience; try++ {
			before := s.row("k").token
			tx := s.lockRow("k")
			began := time.Now()
			_, err := l.Acquire(dbtest.Limited(t), waiting("k", wait))
			took := time.Since(began)
			dbtest.OK(t, tx.Rollback())
			switch {
			case errors.Is(err, lockerr.ErrTimeout):
				fastest = min(fastest, took)
			case !errors.Is(err, lockerr.ErrNoAnswer): // a busy server has not answered in time
				t.Errorf("it ended with %v", err)
			}
			next := l.acquire(waiting("k", 20*time.Second))           // behind what may be left of it
			if next.Token() != before+1 && took < wait+terms.Calmly { // after that the server may not have heard of it
				t.Errorf("it was granted after all: the next token is %d after %d", next.Token(), before)
			}
			dbtest.OK(t, next.Release())
		}
		if fastest > wait+terms.Calmly/2 {
			t.Errorf("it took %v at least", fastest)
		}
	})
}

// TestAStatementGivenUpBehindARowLockIsEndedOnTheServer: the context of its caller has ended.
func TestAStatementGivenUpBehindARowLockIsEndedOnTheServer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		const soonEnough = 600 * time.Millisecond // the server's own limit is a second
		fastest := time.Minute
		for try := 0; try < 2 || try < 40 && fastest > soonEnough; try++ {
			before := s.row("k").token
			tx := s.lockRow("k")
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			failed := l.pass(ctx, waiting("k", 20*time.Second))
			waits := func() bool { return len(s.threads("INFO LIKE 'INSERT % FOR UPDATE ON %'")) > 0 }
			dbtest.Soon(t, "it waits behind the row lock", waits)
			cancel()
			ended := time.Now()
			dbtest.Is(t, "it ended", <-failed, context.Canceled)
			dbtest.Soon(t, "nothing of it is on the server", func() bool { return !waits() })
			fastest = min(fastest, time.Since(ended))
			dbtest.OK(t, tx.Rollback())
			next := l.acquire(waiting("k", 20*time.Second))
			if next.Token() != before+1 {
				t.Errorf("it was granted after all: the next token is %d after %d", next.Token(), before)
			}
			dbtest.OK(t, next.Release())
		}
		if fastest > soonEnough {
			t.Errorf("it was on the server for %v at least", fastest)
		}
	})
}

// TestAPollerGetsALeaseThatOthersHandOver among themselves, goroutines of other processes: it has no connection to
// wait on in the server.
func TestAPollerGetsALeaseThatOthersHandOver(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, test := range []struct{ conns, processes int }{{2, 1}, {1, 1}, {2, 2}} {
			const tries = 3
			passed := s.passPoller(fmt.Sprint(test), test.conns, test.processes, tries)
			t.Logf("%d connections, %d processes: passed by %d grants in %d tries", test.conns, test.processes, passed, tries)
		}
	})
}

// passPoller has a poller try to get a lease that the goroutines of so many processes hand over among
// themselves, and returns how many grants it was passed by.
func (s *scratch) passPoller(key string, conns, processes, tries int) (passed int64) {
	t := s.T
	t.Helper()
	poller := s.locker(setup{max: conns})
	dbtest.OK(t, poller.acquire(request(key)).Release())
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var grants atomic.Int64
	for range processes {
		others := s.locker(setup{})
		for range 8 / processes {
			all.Go(func() {
				for ctx.Err() == nil {
					lease, err := others.Acquire(ctx, waiting(key, time.Minute))
					if err != nil {
						continue
					}
					grants.Add(1)
					time.Sleep(time.Millisecond)
					if err := lease.Release(); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	for range tries {
		first := grants.Load()
		dbtest.Soon(t, "the others have it", func() bool { return grants.Load() > first+2*handoffs })
		before := grants.Load()
		lease := poller.acquire(waiting(key, 5*time.Minute)) // mostly a few seconds
		passed += grants.Load() - before
		dbtest.OK(t, lease.Release())
	}
	cancel()
	all.Wait()
	return passed
}

// TestALongWaitBehindARowLockKeepsItsConnection: it is longer than the connection reads.
func TestALongWaitBehindARowLockKeepsItsConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.AtItsPace(t, 2400*time.Millisecond, func(reads time.Duration) error {
			l := s.locker(setup{reads: reads})
			if err := <-l.pass(dbtest.Limited(t), waiting("k", time.Minute)); err != nil { // the row is there, and a connection
				return err
			}
			tx := s.lockRow("k")
			got := l.pass(dbtest.Limited(t), waiting("k", time.Minute))
			dbtest.Soon(t, "it waits behind the row lock, or was not answered in time", func() bool { return len(got) == 1 || len(s.behindRow()) == 1 })
			opened := l.tap.Opened()
			time.Sleep(reads * 5 / 4)
			dbtest.OK(t, tx.Rollback())
			if err := <-got; err != nil {
				return err
			}
			if now := l.tap.Opened(); now != opened {
				return fmt.Errorf("%d connections were opened meanwhile", now-opened)
			}
			return nil
		})
	})
}
