package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestTakeAndRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		began := time.Now()
		first := l.acquire(request("k"))
		if first.Key() != "k" || first.Token() != 1 || first.Err() != nil {
			t.Errorf("the lease on %q has token %d and error %v", first.Key(), first.Token(), first.Err())
		}
		r := s.row("k")
		if !r.live || r.token != 1 || r.owner != l.owner || r.left > 30*time.Second || r.left < 29*time.Second-time.Since(began) {
			t.Errorf("the row is %+v", r)
		}
		dbtest.OK(t, first.Release())
		if r := s.row("k"); r.live || r.token != 1 || r.owner != "" || r.left > 0 {
			t.Errorf("after the release the row is %+v", r)
		}
		if err := first.Err(); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("after the release: %v", err)
		}
		dbtest.OK(t, first.Release()) // again

		// From now on one statement each.
		sent := l.tap.Texts()
		second := l.acquire(request("k"))
		if second.Token() != 2 {
			t.Errorf("the token is %d", second.Token())
		}
		if texts := sent(); len(texts) != 1 {
			t.Errorf("taking costs %q", texts)
		}
		sent = l.tap.Texts()
		dbtest.OK(t, second.Release())
		if texts := sent(); len(texts) != 1 {
			t.Errorf("releasing costs %q", texts)
		}
		sent = l.tap.Texts()
		third := l.acquire(waiting("k", 20*time.Second))
		dbtest.OK(t, third.Release())
		if texts := sent(); len(texts) != 2 {
			t.Errorf("with a wait it costs %q", texts)
		}
		if n := l.conns.Stat().InUse; n != 0 {
			t.Errorf("%d connections are kept for nothing", n)
		}
	})
}

func TestNoWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		held := l.acquire(request("k"))
		for name, who := range map[string]*locker{"the same": l, "another": other} {
			err := who.refused(request("k"))
			var e *lockerr.Error
			if !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) || !errors.As(err, &e) {
				t.Fatalf("%s process: %v", name, err)
			}
			if e.Op != "lock" || e.Key != "k" || e.Strategy != "lease" || e.Holder == nil || e.Holder.Program != "host:1:test" {
				t.Errorf("%s process: %+v, %v", name, e, e.Holder)
			}
		}
		if r := s.row("k"); r.token != 1 {
			t.Errorf("the row is %+v", r)
		}
		dbtest.OK(t, held.Release())
		dbtest.OK(t, other.acquire(request("k")).Release())
	})
}

// TestOneWinner has 32 clients go for a lease that has run out.
func TestOneWinner(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var clients []*locker
		for range 32 {
			l := s.locker(setup{max: 2})
			clients = append(clients, l)
			dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
		}
		first := s.row("k").token
		rounds := uint64(200)
		if testing.Short() {
			rounds = 20
		}
		for round := range rounds {
			s.set("k", "owner = 'dead#12345678', expires = UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND")
			var all sync.WaitGroup
			var winners atomic.Int32
			begin := make(chan struct{})
			for _, l := range clients {
				all.Go(func() {
					<-begin
					lease, err := l.Acquire(context.Background(), request("k"))
					if errors.Is(err, lockerr.ErrLocked) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					winners.Add(1)
					if lease.Token() != first+round+1 {
						t.Errorf("round %d: the token is %d", round, lease.Token())
					}
					lease.lose(errors.New("the round is over"))
				})
			}
			close(begin)
			all.Wait()
			if winners.Load() != 1 {
				t.Fatalf("round %d: %d winners", round, winners.Load())
			}
		}
		if r := s.row("k"); r.token != first+rounds {
			t.Errorf("the last token is %d after %d rounds from %d", r.token, rounds, first)
		}
	})
}

// TestTurns has several processes with several goroutines each queue for a key.
func TestTurns(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var holding atomic.Int32
		var last atomic.Uint64
		var all sync.WaitGroup
		const clients, goroutines, turns = 4, 3, 10
		for range clients {
			l := s.locker(setup{max: 4})
			for range goroutines {
				all.Go(func() {
					for range turns {
						lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
						if err != nil {
							t.Error(err)
							return
						}
						if holding.Add(1) != 1 {
							t.Error("two hold it")
						}
						if was := last.Swap(lease.Token()); lease.Token() != was+1 {
							t.Errorf("token %d comes after %d", lease.Token(), was)
						}
						holding.Add(-1)
						if err := lease.Release(); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		all.Wait()
		dbtest.Soon(t, "no wake-up lock is left", func() bool { return s.wakeUps("k") == 0 })
	})
}

func TestWakeUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		a, b := s.locker(setup{}), s.locker(setup{})
		var waits []time.Duration
		for range 21 {
			held := a.acquire(waiting("k", 20*time.Second))
			granted := make(chan time.Time, 1)
			go func() {
				lease, err := b.Acquire(dbtest.Limited(t), waiting("k", 10*time.Second))
				at := time.Now()
				if err != nil {
					t.Error(err)
				} else if err := lease.Release(); err != nil {
					t.Error(err)
				}
				granted <- at
			}()
			dbtest.Soon(t, "the other waits", func() bool { return len(s.inWakeUp()) == 1 })
			released := time.Now()
			dbtest.OK(t, held.Release())
			waits = append(waits, (<-granted).Sub(released))
		}
		slices.Sort(waits)
		t.Logf("woken after %v in the median, %v at most", waits[len(waits)/2], waits[len(waits)-1])
		if waits[0] > pollEvery/2 { // a busy machine may delay the others, and who only looks does so when it has waited for so long
			t.Errorf("woken after %v at the least", waits[0])
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

func TestTimeout(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		held := l.acquire(request("k"))
		for _, who := range []*locker{l, other} {
			start := time.Now()
			err := who.refused(waiting("k", 300*time.Millisecond))
			var e *lockerr.Error
			if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &e) {
				t.Fatal(err)
			}
			if e.Holder == nil || e.Holder.Program != "host:1:test" || e.Waited < 300*time.Millisecond {
				t.Errorf("%v", err)
			}
			if took := time.Since(start); took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err := other.Acquire(ctx, waiting("k", time.Minute))
		if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		refused := errors.New("too many")
		r := waiting("k", time.Minute)
		r.Waiting = func(context.Context) (context.Context, func(), error) { return nil, nil, refused }
		if _, err := other.Acquire(dbtest.Limited(t), r); !errors.Is(err, refused) {
			t.Error(err)
		}
		if err := held.Err(); err != nil {
			t.Error(err)
		}
		if r := s.row("k"); r.token != 1 || !r.live {
			t.Errorf("the row is %+v", r)
		}
	})
}

// TestCancel has waiters come and go; none of them may be left behind.
func TestCancel(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder := s.locker(setup{})
		held := holder.acquire(request("k"))
		const waiters = 64
		var all sync.WaitGroup
		cancels := make([]context.CancelFunc, waiters)
		errs := make([]error, waiters)
		for i := range waiters {
			l := s.locker(setup{max: 3})
			var ctx context.Context
			ctx, cancels[i] = context.WithCancel(context.Background())
			all.Go(func() {
				var lease *Lease
				if lease, errs[i] = l.Acquire(ctx, waiting("k", 5*time.Minute)); errs[i] == nil {
					errs[i] = lease.Release()
				}
			})
		}
		dbtest.Soon(t, "all wait", func() bool { return len(s.inWakeUp()) == waiters })
		for i := range waiters {
			if i%4 != 0 {
				cancels[i]()
			}
		}
		dbtest.Soon(t, "the cancelled ones are gone from the server", func() bool { return len(s.inWakeUp()) == waiters/4 })
		dbtest.OK(t, held.Release())
		all.Wait()
		for i, err := range errs {
			if i%4 == 0 && err != nil || i%4 != 0 && !errors.Is(err, context.Canceled) {
				t.Errorf("%d: %v", i, err)
			}
			cancels[i]()
		}
		if r := s.row("k"); r.live || r.token != 1+waiters/4 {
			t.Errorf("the row is %+v", r)
		}
		dbtest.Soon(t, "nobody waits any more", func() bool { return len(s.inWakeUp()) == 0 && s.wakeUps("k") == 0 })
	})
}

func TestCancelIsQuick(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder, l := s.locker(setup{}), s.locker(setup{})
		held := holder.acquire(request("k"))
		defer held.Release()
		var took, gone []time.Duration
		sent := l.tap.Texts()
		for range 20 {
			ctx, cancel := context.WithCancel(context.Background())
			failed := make(chan error, 3)
			go func() {
				_, err := l.Acquire(ctx, waiting("k", time.Minute))
				failed <- err
			}()
			dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
			begin := time.Now()
			cancel()
			err := <-failed
			took = append(took, time.Since(begin))
			if !errors.Is(err, context.Canceled) || !errors.Is(err, lockerr.ErrTimeout) || errors.Is(err, driver.ErrBadConn) {
				t.Error(err)
			}
			dbtest.Soon(t, "it is gone from the server", func() bool { return len(s.inWakeUp()) == 0 })
			gone = append(gone, time.Since(begin))
		}
		slices.Sort(took)
		slices.Sort(gone)
		t.Logf("the caller has its error after %v in the median, %v at most; the server has forgotten it after %v and %v", took[10], took[19], gone[10], gone[19])
		if took[0] > 100*time.Millisecond { // a busy machine may delay the others
			t.Errorf("the error came after %v at the least", took[0])
		}
		if count(sent(), "KILL") == 0 { // by itself the server looks once a second, and may be quicker
			t.Errorf("nobody was killed: %q", heads(sent()))
		}
	})
}

// TestRowLock: who has locked the row by a transaction keeps the lease from
// being taken, and a waiter gets it as soon as the transaction ends.
func TestRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{ttl: time.Second})
		dbtest.OK(t, l.acquire(request("k")).Release())
		for _, hold := range []time.Duration{300 * time.Millisecond, 2500 * time.Millisecond} {
			soonest := time.Minute
			for try := 0; try < 5 && soonest > longest/2; try++ {
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
	if _, err := l.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) {
		t.Errorf("without a wait: %v", err)
	}
	if _, err := l.Acquire(dbtest.Limited(t), waiting("k", 50*time.Millisecond)); !errors.Is(err, lockerr.ErrTimeout) {
		t.Errorf("with a short wait: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), hold/2)
	if _, err := l.Acquire(ctx, waiting("k", time.Minute)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with a context that ends: %v", err)
	}
	cancel()
	granted := make(chan time.Time, 1)
	var released error
	go func() {
		r := waiting("k", time.Minute)
		r.TTL = time.Second // shorter than the row is locked
		lease, err := l.Acquire(dbtest.Within(t, dbtest.Patience), r)
		at := time.Now()
		if err != nil {
			t.Error(err)
		} else {
			time.Sleep(1200 * time.Millisecond) // it is renewed
			released = lease.Release()
		}
		granted <- at
	}()
	time.Sleep(hold)
	ended := time.Now()
	dbtest.OK(t, tx.Commit())
	wait := (<-granted).Sub(ended)
	t.Logf("granted %v after the transaction's end, released with %v", wait, released)
	if wait < 0 {
		t.Errorf("granted %v before the transaction's end", -wait)
	}
	if errors.Is(released, lockerr.ErrLost) {
		return time.Minute
	}
	dbtest.OK(t, released)
	return wait
}

// TestBellIsTakenOnce: what is taken twice would have to be given back twice.
func TestBellIsTakenOnce(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		h, err := l.borrow(dbtest.Limited(t))
		dbtest.OK(t, err)
		for range 2 {
			got, err := l.listen(dbtest.Limited(t), h, "k", time.Second)
			if err != nil || !got {
				t.Errorf("%v, %v", got, err)
			}
		}
		_, err = h.ask(dbtest.Limited(t), l.takeBlock("k", time.Second, true, true, false))
		dbtest.OK(t, err)
		if s.wakeUps("k") != 1 {
			t.Error("the wake-up lock was not taken")
		}
		_, err = h.exec(dbtest.Limited(t), l.releaseWakeUpsSQL("k"))
		dbtest.OK(t, err)
		if s.wakeUps("k") != 0 {
			t.Error("the wake-up lock is still there")
		}
		l.giveBack(h)
	})
}

// TestCancelBehindRowLock: nor does a waiter stay that waits for a row.
func TestCancelBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE " + l.row("", "k") + " FOR UPDATE")
		dbtest.OK(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		failed := make(chan error, 3)
		go func() {
			_, err := l.Acquire(ctx, waiting("k", time.Minute))
			failed <- err
		}()
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

// TestHostsAreKept: the server would end a connection that is silent for so long,
// and with it the wake-up locks.
func TestHostsAreKept(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{ttl: time.Second})
		for try := 1; ; try++ { // a machine that stands still for a second ends it, too
			lease := l.acquire(waiting("k", 20*time.Second))
			time.Sleep(2500 * time.Millisecond)
			kept := s.wakeUps("k") == 1
			dbtest.OK(t, lease.Release())
			if kept {
				break
			}
			if try == 5 {
				t.Fatal("the wake-up lock is lost")
			}
		}
	})
}
