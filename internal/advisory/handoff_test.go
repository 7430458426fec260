package advisory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// TestALockGoesToTheNextOfItsProcessButNotForEver: a lock goes to the next of its process, but not
// for ever.
func TestALockGoesToTheNextOfItsProcessButNotForEver(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 3, time.Minute }})
		other, plain := s.process(settings{}), s.open()
		first := p.acquire("k", 0)
		turns := make(chan string, 100)
		var all sync.WaitGroup
		take := func(p *process, who string) {
			all.Go(func() {
				lock := p.acquire("k", time.Minute)
				turns <- who
				if err := lock.Release(); err != nil {
					t.Error(err)
				}
			})
		}
		take(other, "other")
		dbtest.Soon(t, "another process waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		for range 8 {
			take(p, "own")
		}
		p.inQueue("k", 8)
		dbtest.OK(t, first.Release())
		all.Wait()
		close(turns)
		var order []string
		for who := range turns {
			order = append(order, who)
		}
		if slices.Index(order, "other") != 3 {
			t.Errorf("the order was %v", order)
		}
		s.free(plain, "k")
	})
}

// handoff has the process hand lock over n times. It returns the last one, and how many
// statements that took.
func (p *process) handoff(lock *advisory.Grant, n int) (last *advisory.Grant, sent int64) {
	p.T.Helper()
	got := make(chan *advisory.Grant)
	for range n {
		go func() { got <- p.acquire("k", time.Minute) }()
	}
	p.inQueue("k", n)
	sent = p.sent.Load()
	for range n {
		dbtest.OK(p.T, lock.Release())
		lock = <-got
	}
	return lock, p.sent.Load() - sent
}

// TestOnlyTimeEndsATurnThatNobodyElseWants: once nobody has taken it to whom it was yielded, only
// the time counts.
func TestOnlyTimeEndsATurnThatNobodyElseWants(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 3, time.Minute }})
		const n = 20
		lock, fewest := p.acquire("k", 0), int64(100)
		for range 5 { // pings come on top
			var sent int64
			lock, sent = p.handoff(lock, n)
			fewest = min(fewest, sent)
		}
		dbtest.OK(t, lock.Release())
		if fewest != 0 {
			t.Errorf("%d statements at the least for %d grants", fewest, n)
		}
	})
}

func TestATurnEndsAfterItsTime(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 1000, time.Millisecond }})
		fewest := int64(100)
		for range 5 { // pings come on top
			first := p.acquire("k", 0)
			got := p.acquiring("k", time.Minute)
			p.inQueue("k", 1)
			time.Sleep(2 * time.Millisecond) // it has been held for longer than that
			sent := p.sent.Load()
			dbtest.OK(t, first.Release())
			next := <-got
			fewest = min(fewest, p.sent.Load()-sent)
			dbtest.OK(t, next.Release())
		}
		if fewest != 2 { // between the two, the lock is free for pollers
			t.Errorf("%d statements to yield the lock to other processes and to take it again, want 2", fewest)
		}
	})
}

// TestACallerThatGivesUpAYieldLeavesTheLockFree: who gives up when it is about to yield a lock to
// others, and to take it again, has it given back all the same.
func TestACallerThatGivesUpAYieldLeavesTheLockFree(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		slow := advisory.Name(s.namespace, "slow")
		under, answer := make(chan struct{}), make(chan struct{})
		p := s.process(settings{conns: 1, seen: failing(func(text string) error {
			if strings.Contains(text, "'"+slow) && strings.Contains(text, " GET_LOCK(") {
				close(under)
				<-answer
			}
			return nil
		}), change: func(c *strategy.Config) { c.HandOverTime = 0 }})
		lock := p.acquire("k", 0)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := p.asking(ctx, request("k", time.Minute))
		p.inQueue("k", 1)
		got := p.acquiring("slow", 0)
		<-under // so the yield has to wait
		dbtest.OK(t, lock.Release())
		time.Sleep(50 * time.Millisecond)
		cancel()
		dbtest.Is(t, "who gave up", <-gaveUp, context.Canceled)
		close(answer)
		s.free(s.open(), "k")
		dbtest.OK(t, (<-got).Release())
		dbtest.OK(t, p.acquire("k", time.Minute).Release()) // who gave up leaves the queue after the server's answer
	})
}

// TestProcessesTakeTurns: a process whose turn is over gives the lock to the next, but keeps
// a place of its own, with one statement and a look at the grant. Somebody who
// gives up meanwhile takes nobody's place.
func TestProcessesTakeTurns(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		once := func(c *strategy.Config) { c.HandOverTime = 0 }
		p, q, plain := s.process(settings{change: once}), s.process(settings{change: once}), s.open()
		first := p.acquire("k", 0)
		got := make(chan *advisory.Grant)
		take := func(p *process, ctx context.Context) {
			go func() {
				lock, err := p.Acquire(ctx, request("k", time.Minute))
				if err != nil {
					lock = nil
				}
				got <- lock
			}()
		}
		take(q, t.Context())
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		take(p, t.Context())
		p.inQueue("k", 1)
		dbtest.OK(t, first.Release())
		lock := <-got // q's
		dbtest.Soon(t, "p waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		fewest := int64(100)
		for i := range 6 { // in turn
			from := q
			if i%2 == 1 {
				from = p
			}
			ctx, cancel := context.WithCancel(t.Context())
			if i == 4 { // two wait; the first gives up when it waits in the server
				take(from, ctx)
				from.inQueue("k", 1)
			}
			before := from.locks.Queue.Waiting("k")
			take(from, t.Context())
			from.inQueue("k", 1+before)
			sent := from.sent.Load()
			dbtest.OK(t, lock.Release())
			lock = <-got
			if id := s.holder(plain, "k"); id != fmt.Sprint(lock.ConnectionID()) {
				t.Errorf("connection %q has it, not %d", id, lock.ConnectionID())
			}
			dbtest.Soon(t, "the other waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			if i > 1 {
				fewest = min(fewest, from.sent.Load()-sent) // pings come on top
			}
			if i == 4 {
				cancel()
				if left := <-got; left != nil {
					t.Error("who gave up has the lock")
				}
				dbtest.Soon(t, "the next waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			}
			cancel()
		}
		dbtest.Equal(t, "%d statements at the least to keep a place", fewest, 1)
		dbtest.OK(t, lock.Release())
		dbtest.OK(t, (<-got).Release())
		s.free(plain, "k")
		dbtest.Soon(t, "no connection is kept", func() bool { return p.conns.Stat().InUse+q.conns.Stat().InUse == 0 })
	})
}

// TestACallerThatMayWaitNoMoreLeavesNothing: who may not wait, or no longer, when it has given the
// lock back leaves nothing behind.
func TestACallerThatMayWaitNoMoreLeavesNothing(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		refused := errors.New("refused")
		for _, end := range []func(context.Context) (context.Context, error){
			func(ctx context.Context) (context.Context, error) { return ctx, refused },
			func(ctx context.Context) (context.Context, error) {
				ctx, cancel := context.WithCancelCause(ctx)
				cancel(refused)
				return ctx, nil
			},
		} {
			s := s.other(s.T)
			p := s.process(settings{change: func(c *strategy.Config) { c.HandOverTime = 0 }})
			q, plain := s.process(settings{}), s.open()
			first := q.acquire("k", 0)
			got := p.acquiring("k", time.Minute) // with another process
			dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			dbtest.OK(t, first.Release())
			lock := <-got
			r, waits := request("k", time.Minute), 0
			r.Waiting = func(ctx context.Context) (context.Context, func(), error) {
				if waits++; waits == 1 {
					return ctx, func() {}, nil
				}
				ctx, err := end(ctx)
				return ctx, func() {}, err
			}
			failed := p.asking(t.Context(), r)
			p.inQueue("k", 1)
			dbtest.OK(t, lock.Release())
			if err := <-failed; !errors.Is(err, refused) || waits != 2 {
				t.Errorf("after %d waits: %v", waits, err)
			}
			s.free(plain, "k")
			dbtest.OK(t, p.acquire("k", time.Minute).Release())
			dbtest.Soon(t, "no connection is kept", func() bool { return p.conns.Stat().InUse == 0 })
		}
	})
}

// TestPollerHasAChance: who has no connection to wait on in the server, and so asks
// now and then, is not shut out by those who hand the lock over and over.
func TestPollerHasAChance(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, c := range []struct {
			what                   string
			processes, conns, held int // held are keys that the poller's process waits for as well, in vain
			section                time.Duration
		}{
			{"against one process, without a connection to spare", 1, 1, 0, 0},
			{"against one process with long sections", 1, 1, 0, 20 * time.Millisecond},
			{"against two, with others of its own process that wait", 2, 5, 3, time.Millisecond},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			var all sync.WaitGroup
			for range c.processes {
				p := s.process(settings{})
				for range 4 {
					all.Go(func() {
						for ctx.Err() == nil {
							lock, err := p.Acquire(ctx, request("k", time.Minute))
							if err != nil {
								continue
							}
							time.Sleep(c.section)
							_ = lock.Release()
						}
					})
				}
			}
			plain := s.open()
			poller := s.process(settings{conns: c.conns, ttl: 5 * time.Second})
			for i := range c.held {
				key := fmt.Sprint("held", i)
				s.Exec(plain, "DO GET_LOCK('"+advisory.Name(s.namespace, key)+"', 0)")
				all.Go(func() { _, _ = poller.Acquire(ctx, request(key, time.Minute)) })
				dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, key)) == 1 })
			}
			began := time.Now()
			const n = 2
			for range n {
				if lock := poller.acquire("k", 4*time.Minute); lock != nil {
					dbtest.OK(t, lock.Release())
				}
			}
			if d := time.Since(began); d > 200*time.Second { // a few seconds on a calm machine
				t.Errorf("%s it had the lock %d times within %v", c.what, n, d)
			}
			t.Log(c.what, time.Since(began))
			cancel()
			all.Wait()
			s.Exec(plain, "DO RELEASE_ALL_LOCKS()")
			s.free(plain, "k")
		}
	})
}
