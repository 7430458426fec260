package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestLostAnswer: the answer to the statement that has taken the lease comes too
// late, or never. The lease is not left behind.
func TestLostAnswer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			l := s.locker(setup{})
			dbtest.OK(t, l.acquire(request("k")).Release())
			before := s.row("k").token
			arrive := l.tap.Stall("INSERT")
			ctx, cancel := context.WithCancel(context.Background())
			failed := make(chan error, 1)
			go func() {
				_, err := l.Acquire(ctx, waiting("k", 10*time.Minute))
				failed <- err
			}()
			dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
			cancel()
			if err := <-failed; !errors.Is(err, context.Canceled) {
				t.Errorf("it ended with %v", err)
			}
			if r := s.row("k"); !r.live || r.token != before+1 {
				t.Errorf("meanwhile the row is %+v", r)
			}
			sent := l.tap.Texts()
			if _, err := l.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) || count(sent(), "INSERT") != 0 {
				t.Errorf("another goroutine: %v, after %q", err, sent())
			}
			if late {
				arrive()
			} else {
				l.tap.Break()
			}
			dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
			next := l.acquire(waiting("k", 20*time.Second))
			if next.Token() != before+2 {
				t.Errorf("the next token is %d after %d", next.Token(), before)
			}
			dbtest.OK(t, next.Release())
			arrive()
			l.close()
		}
	})
}

// TestLateAnswer: what is answered when it may be over already is not granted.
func TestLateAnswer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		for _, wait := range []time.Duration{0, 25 * time.Second} {
			before := s.row("k").token
			arrive := l.tap.Stall("INSERT")
			r := waiting("k", wait)
			r.TTL = 3 * time.Second
			var late sync.WaitGroup
			late.Go(func() {
				for s.row("k").token == before {
					time.Sleep(10 * time.Millisecond)
				}
				time.Sleep(r.TTL)
				arrive()
			})
			lease, err := l.Acquire(dbtest.Limited(t), r)
			if wait == 0 {
				if !errors.Is(err, lockerr.ErrLocked) {
					t.Errorf("without a wait: %v", err)
				}
				late.Wait()
				continue
			}
			dbtest.OK(t, err)
			if lease.Token() <= before+1 {
				t.Errorf("the token is %d after %d", lease.Token(), before)
			}
			dbtest.OK(t, lease.Release())
			late.Wait()
		}
	})
}

// TestNoAnswerForACallerThatStays: a caller that cannot leave has no answer within the limit of
// its connection. It is told so, and the lease is not left behind.
func TestNoAnswerForACallerThatStays(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.OK(t, s.locker(setup{}).acquire(request("k")).Release()) // the row is there
		dbtest.AtItsPace(t, 500*time.Millisecond, func(reads time.Duration) error {
			l := s.locker(setup{reads: reads})
			defer l.close()
			lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err == nil {
				err = lease.Release()
			}
			if err != nil {
				return err
			}
			before := s.row("k").token
			arrive := l.tap.Stall("INSERT")
			defer arrive()
			failed := make(chan error, 1)
			go func() {
				_, err := l.Acquire(context.WithoutCancel(t.Context()), request("k"))
				failed <- err
			}()
			select {
			case err = <-failed:
			case <-time.After(dbtest.Patience):
				t.Error("it waits for longer than its connection reads")
				l.tap.Break()
				err = <-failed
			}
			if !errors.Is(err, strategy.ErrNoAnswer) {
				return fmt.Errorf("it ended with %w", err)
			}
			if got := s.row("k").token; got != before+1 {
				return fmt.Errorf("the token is %d after %d", got, before)
			}
			dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
			return nil
		})
		dbtest.OK(t, s.locker(setup{}).acquire(waiting("k", 20*time.Second)).Release())
	})
}

// TestLateAnswerBehindRowLock: nor is it where it cannot be given back at once,
// since somebody has locked the row.
func TestLateAnswerBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		before := s.row("k").token
		arrive := l.tap.Stall("INSERT")
		failed := make(chan error, 1)
		go func() {
			r := waiting("k", 20*time.Second)
			r.TTL = time.Second
			lease, err := l.Acquire(dbtest.Limited(t), r)
			if err == nil {
				err = errors.Join(errors.New("it was granted"), lease.Release())
			}
			failed <- err
		}()
		dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'6b' FOR UPDATE")
		dbtest.OK(t, err)
		time.Sleep(1100 * time.Millisecond) // it is over
		arrive()
		if err := <-failed; !errors.Is(err, strategy.ErrNoAnswer) {
			t.Errorf("it ended with %v", err)
		}
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}

// TestLostCommit is the same for a waiter that gets the lease behind a row lock.
func TestLostCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			for try := 1; !s.lostCommit(late); try++ {
				if try == 20 {
					t.Fatal("it never gets the lease behind the row lock")
				}
			}
		}
	})
}

// lostCommit is false where the waiter got the lease in another way, since the
// server had let it wait for as long as it lets anybody.
func (s *scratch) lostCommit(late bool) bool {
	t := s.T
	l := s.locker(setup{})
	defer l.close()
	dbtest.OK(t, l.acquire(request("k")).Release())
	before := s.row("k").token
	tx, err := s.db.Begin()
	dbtest.OK(t, err)
	defer tx.Rollback()
	_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'6b' FOR UPDATE")
	dbtest.OK(t, err)
	arrive := l.tap.Stall("COMMIT")
	defer arrive()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		lease, err := l.Acquire(ctx, waiting("k", time.Minute))
		if err == nil {
			err = lease.Release()
		}
		failed <- err
	}()
	dbtest.Soon(t, "it waits behind the row lock", func() bool { return len(s.behindRow()) == 1 })
	dbtest.OK(t, tx.Commit())
	dbtest.Soon(t, "it has the lease", func() bool { return s.row("k").token == before+1 })
	cancel()
	if err := <-failed; err == nil {
		return false
	} else if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if late {
		arrive()
	} else {
		l.tap.Break()
	}
	dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
	if next := l.acquire(waiting("k", 20*time.Second)); next.Token() != before+2 {
		t.Errorf("the next token is %d after %d", next.Token(), before)
	}
	return true
}

// TestRestart: leases, and their tokens, outlive the server.
func TestRestart(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{ttl: 20 * time.Second}), s.locker(setup{})
		r := request("k")
		r.TTL = 5 * time.Minute
		lease := l.acquire(r)
		dbtest.OK(t, l.acquire(request("j")).Release())
		for _, down := range []func() error{s.Server.Kill, func() error { return nil }} {
			dbtest.OK(t, down())
			dbtest.OK(t, s.Server.Restart(dbtest.Within(t, dbtest.Patience)))
			dbtest.OK(t, lease.Err())
			before := s.expires("k")
			l.renew([]*Lease{lease}, 20*time.Second)
			dbtest.OK(t, lease.Err())
			if s.expires("k") == before {
				t.Error("the lease is not renewed")
			}
			if _, err := other.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) {
				t.Error(err)
			}
		}
		dbtest.OK(t, lease.Release())
		if next := other.acquire(waiting("k", 20*time.Second)); next.Token() != 2 {
			t.Errorf("the next token is %d", next.Token())
		}
		if next := other.acquire(waiting("j", 20*time.Second)); next.Token() != 2 {
			t.Errorf("the next token is %d", next.Token())
		}
	})
}

// TestStorm has some processes go for some keys while callers give up at random
// and connections are killed at random.
func TestStorm(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const ttl = 15 * time.Second // nobody stands still for so long
		length := 4 * time.Second
		if testing.Short() {
			length = time.Second
		}
		ctx, cancel := context.WithTimeout(context.Background(), dbtest.Patience)
		defer cancel()
		began := time.Now()
		keys := []string{"a", "b", "c"}
		var holding, granted [3]atomic.Int32
		var failed atomic.Int32
		var last [3]atomic.Uint64
		var all sync.WaitGroup
		var lockers []*locker
		for range 5 {
			l := s.locker(setup{ttl: ttl, max: 4})
			lockers = append(lockers, l)
			for range 4 {
				all.Go(func() {
					for ctx.Err() == nil {
						i := rand.N(len(keys))
						r := waiting(keys[i], rand.N(time.Duration(2))*rand.N(time.Second))
						r.TTL = ttl
						own, stop := context.WithTimeout(ctx, rand.N(500*time.Millisecond))
						lease, err := l.Acquire(own, r)
						stop()
						if err != nil {
							failed.Add(1)
							continue
						}
						granted[i].Add(1)
						if holding[i].Add(1) != 1 {
							t.Error("two hold it")
						}
						if was := last[i].Swap(lease.Token()); lease.Token() <= was {
							t.Errorf("token %d comes after %d", lease.Token(), was)
						}
						time.Sleep(rand.N(5 * time.Millisecond))
						if err := lease.Err(); err != nil {
							t.Error(err)
						}
						holding[i].Add(-1)
						asked := time.Now()
						if err := lease.Release(); err != nil && time.Since(asked) < handoffWait {
							t.Error(err)
						}
					}
				})
			}
		}
		all.Go(func() {
			for ctx.Err() == nil {
				time.Sleep(50 * time.Millisecond)
				if ids := s.threads("TRUE"); len(ids) > 0 {
					s.kill(ids[rand.N(len(ids)):][:1])
				}
				if time.Since(began) > length && min(granted[0].Load(), granted[1].Load(), granted[2].Load()) >= 10 {
					cancel()
				}
			}
		})
		all.Wait()
		t.Logf("granted %d, %d and %d times, not granted %d times", granted[0].Load(), granted[1].Load(), granted[2].Load(), failed.Load())
		for i, key := range keys {
			if granted[i].Load() < 10 {
				t.Errorf("%s was granted %d times", key, granted[i].Load())
			}
			dbtest.Soon(t, key+" is free", func() bool { return !s.row(key).live && s.wakeUps(key) == 0 })
		}
		dbtest.Soon(t, "no connection is kept", func() bool {
			kept := 0
			for _, l := range lockers {
				kept += l.conns.Stat().InUse
			}
			return kept == 0
		})
	})
}

// TestLostHandoff: the statement by which somebody takes over a lease fails
// without an answer. The lease is given back even where it lasts for longer than
// the next caller wanted it.
func TestLostHandoff(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		failed := make(chan error)
		go func() {
			r := waiting("k", 20*time.Second)
			r.TTL = time.Second
			_, err := l.Acquire(dbtest.Limited(t), r)
			failed <- err
		}()
		l.inQueue("k", 1)
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'6b' FOR UPDATE")
		dbtest.OK(t, err)
		dbtest.OK(t, first.Release())
		dbtest.Soon(t, "the next caller waits behind the row lock", func() bool { return len(s.threads("INFO LIKE 'UPDATE%'")) == 1 })
		l.tap.Cut()
		if err := <-failed; err == nil {
			t.Error("the next caller was granted the lease")
		}
		time.Sleep(1500 * time.Millisecond)
		dbtest.OK(t, tx.Rollback())
		switch r := s.row("k"); {
		case r.token == 2:
			t.Log("the server has carried the statement out after all")
		case !r.live || r.token != 1 || r.left < 5*time.Second:
			t.Fatalf("nothing is shown: the row is %+v", r)
		}
		l.tap.Mend()
		dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live })
	})
}

// TestPlainRequest: a request needs no more than a key and a TTL to wait.
func TestPlainRequest(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		first := l.acquire(Request{Key: "k", TTL: 30 * time.Second})
		var all sync.WaitGroup
		for _, l := range []*locker{l, other} { // in the queue, and in the server
			all.Go(func() {
				lease, err := l.Acquire(dbtest.Limited(t), Request{Key: "k", TTL: 30 * time.Second, Wait: 20 * time.Second})
				if err == nil {
					err = lease.Release()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		l.inQueue("k", 1)
		dbtest.Soon(t, "the other waits", func() bool { return len(s.inWakeUp()) == 1 })
		dbtest.OK(t, first.Release())
		all.Wait()
	})
}
