package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestALeaseWhoseAnswerIsLostIsNotLeftBehind: the answer to the statement that has taken it
// comes too late, or never.
func TestALeaseWhoseAnswerIsLostIsNotLeftBehind(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			l := s.locker(setup{})
			dbtest.OK(t, l.acquire(request("k")).Release())
			before := s.row("k").token
			arrive := l.tap.Stall("INSERT")
			ctx, cancel := context.WithCancel(context.Background())
			failed := l.pass(ctx, waiting("k", 10*time.Minute))
			dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
			cancel()
			dbtest.Is(t, "it ended", <-failed, context.Canceled)
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

// TestALeaseWhoseAnswerIsLateIsNotGranted: what is answered when it may be over already.
func TestALeaseWhoseAnswerIsLateIsNotGranted(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
				dbtest.Is(t, "without a wait", err, lockerr.ErrNoAnswer) // nobody has the key
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

// TestAWaiterWhoseGrantCameTooLateListensAgain: the wake-up lock has gone back with the lease.
func TestAWaiterWhoseGrantCameTooLateListensAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		held, l := s.locker(setup{}).acquire(request("k")), s.locker(setup{})
		r := waiting("k", time.Minute)
		r.TTL = time.Second
		passed := l.pass(dbtest.Limited(t), r)
		dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
		arrive := l.tap.Stall("INSERT")
		defer arrive()
		dbtest.OK(t, held.Release())
		dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == held.Token()+1 })
		dbtest.Soon(t, "that is over", func() bool { return !s.row("k").live })
		sent := l.tap.Texts()
		arrive()
		dbtest.OK(t, <-passed)
		if texts := sent(); !slices.ContainsFunc(texts, func(text string) bool {
			return strings.HasPrefix(text, "SELECT") && strings.Contains(text, "GET_LOCK")
		}) {
			t.Errorf("it sent %q", texts)
		}
	})
}

// TestACallerThatStaysIsToldThatItHasNoAnswer within the limit of its connection, and the lease is not left behind.
// It cannot leave.
func TestACallerThatStaysIsToldThatItHasNoAnswer(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.OK(t, s.locker(setup{}).acquire(request("k")).Release()) // the row is there
		dbtest.AtItsPace(t, 500*time.Millisecond, func(reads time.Duration) error {
			l := s.locker(setup{reads: reads})
			defer l.close()
			err := <-l.pass(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err != nil {
				return err
			}
			before := s.row("k").token
			arrive := l.tap.Stall("INSERT")
			defer arrive()
			failed := l.pass(context.WithoutCancel(t.Context()), request("k"))
			select {
			case err = <-failed:
			case <-time.After(dbtest.Patience):
				t.Error("it waits for longer than its connection reads")
				l.tap.Break()
				err = <-failed
			}
			if !errors.Is(err, lockerr.ErrNoAnswer) {
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

// TestALateLeaseBehindARowLockIsNotGranted, although it cannot be given back at once, since somebody has locked the
// row.
func TestALateLeaseBehindARowLockIsNotGranted(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		before := s.row("k").token
		arrive := l.tap.Stall("INSERT")
		r := waiting("k", 20*time.Second)
		r.TTL = time.Second
		failed := l.asking(dbtest.Limited(t), r)
		dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
		tx := s.lockRow("k")
		dbtest.Soon(t, "it is over", func() bool { return !s.row("k").live })
		arrive()
		dbtest.Is(t, "it ended", <-failed, lockerr.ErrNoAnswer)
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}

// TestALostCommitBehindARowLockLeavesNoLease: its answer comes too late, or never.
func TestALostCommitBehindARowLockLeavesNoLease(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
	tx := s.lockRow("k")
	arrive := l.tap.Stall("COMMIT")
	defer arrive()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := l.pass(ctx, waiting("k", time.Minute))
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

// TestALeaseWhoseHandoffFailsIsGivenBack: the statement by which somebody takes it over has no
// answer. It is given back even where it lasts for longer than the next caller wanted it.
func TestALeaseWhoseHandoffFailsIsGivenBack(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		r := waiting("k", 20*time.Second)
		r.TTL = time.Second
		failed := l.asking(dbtest.Limited(t), r)
		l.inQueue("k", 1)
		tx := s.lockRow("k")
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

// TestARequestWhoseConnectionBreaksIsSentAgain if it breaks before the answer, and what it may have been granted the
// first time is given back.
func TestARequestWhoseConnectionBreaksIsSentAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			dbtest.Soon(t, "the server answers in time for it to be sent again", func() bool {
				l := s.locker(setup{})
				defer l.close()
				first := l.acquire(waiting("k", time.Minute))
				s.back(first, first.Release())
				before := s.row("k").token
				lease, slow := s.broken(l, "INSERT", waiting("k", wait), func() bool { return s.row("k").token == before+1 })
				if lease == nil {
					return !slow
				}
				if got := lease.Token(); got != before+2 {
					t.Errorf("with a wait of %v the token is %d after %d", wait, got, before)
				}
				dbtest.OK(t, lease.Err())
				s.back(lease, lease.Release())
				if s.row("k").live {
					t.Error("it is left behind")
				}
				return true
			})
		}
	})
}

// TestARequestWhoseConnectionBreaksAtAHandoffIsSentAgain: it takes over from another caller of its process.
func TestARequestWhoseConnectionBreaksAtAHandoffIsSentAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Soon(t, "the server answers in time for it to be sent again", func() bool {
			l := s.locker(setup{})
			first := l.acquire(waiting("k", time.Minute))
			before := first.Token()
			go func() {
				l.inQueue("k", 1)
				if err := first.Release(); err != nil && !stalled(err) { // which is stalled
					t.Error(err)
				}
			}()
			lease, slow := s.broken(l, "UPDATE", waiting("k", 20*time.Second), func() bool { return s.row("k").token > before })
			if lease == nil {
				return !slow
			}
			dbtest.OK(t, lease.Err())
			s.back(lease, lease.Release())
			if s.row("k").live {
				t.Error("it is left behind")
			}
			return true
		})
	})
}

// broken acquires a lease while the connections break whose statement has done its work. It is sent
// again if that can be given back within a fifth of background; slow tells that it could not.
func (s *scratch) broken(l *locker, statement string, r Request, done func() bool) (_ *Grant, slow bool) {
	s.T.Helper()
	arrive := l.tap.Stall(statement)
	defer arrive()
	type result struct {
		lease *Grant
		err   error
	}
	got := make(chan result, 1)
	go func() {
		lease, err := l.Acquire(dbtest.Limited(s.T), r)
		got <- result{lease, err}
	}()
	dbtest.Soon(s.T, "the server has granted it", done)
	l.tap.Break()
	at := time.Now()
	g := <-got
	if slow = errors.Is(g.err, lockerr.ErrNoAnswer) && time.Since(at) >= background/5; g.err != nil && !slow {
		s.T.Errorf("%v: %v", r.Wait, g.err)
	}
	return g.lease, slow
}

// TestARequestEndsWhereConnectionsBreakForEver, with a sentinel, and what may have been granted is given back once
// the server can be reached.
func TestARequestEndsWhereConnectionsBreakForEver(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		before := s.row("k").token
		arrive := l.tap.Stall("INSERT")
		defer arrive()
		failed := l.asking(dbtest.Limited(t), request("k"))
		dbtest.Soon(t, "the server has granted it", func() bool { return s.row("k").token == before+1 })
		l.tap.Cut()
		var e *lockerr.Error
		if err := <-failed; !errors.Is(err, lockerr.ErrNoAnswer) || !errors.As(err, &e) || e.Key != "k" {
			t.Errorf("it ended with %v", err)
		}
		l.tap.Mend()
		dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live })
	})
}
