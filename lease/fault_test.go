package lease

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestLostAnswer: the answer to the statement that has taken the lease comes too
// late, or never. The lease is not left behind.
func TestLostAnswer(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			l := s.locker(setup{})
			ok(t, l.acquire(request("k")).Release())
			before := s.row("k").token
			arrive := l.tap.stall("INSERT")
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			begin := time.Now()
			_, err := l.Acquire(ctx, waiting("k", time.Minute))
			cancel()
			if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
				t.Errorf("after %v: %v", took, err)
			}
			if r := s.row("k"); !r.live || r.token != before+1 {
				t.Errorf("meanwhile the row is %+v", r)
			}
			sent := l.tap.since()
			if _, err := l.Acquire(limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) || count(sent(), "INSERT") != 0 {
				t.Errorf("another goroutine: %v, after %q", err, sent())
			}
			if late {
				arrive()
			} else {
				l.tap.cutOpen()
			}
			soon(t, "it is given back", func() bool { return !s.row("k").live && s.bells("k") == 0 })
			next := l.acquire(waiting("k", 20*time.Second))
			if next.Token() != before+2 {
				t.Errorf("the next token is %d after %d", next.Token(), before)
			}
			ok(t, next.Release())
			arrive()
			l.close()
		}
	})
}

// TestLateAnswer: what is answered when it may be over already is not granted.
func TestLateAnswer(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		ok(t, l.acquire(request("k")).Release())
		for _, wait := range []time.Duration{0, 10 * time.Second} {
			before := s.row("k").token
			arrive := l.tap.stall("INSERT")
			time.AfterFunc(1100*time.Millisecond, arrive)
			r := waiting("k", wait)
			r.TTL = time.Second
			lease, err := l.Acquire(limited(t), r)
			if wait == 0 {
				if !errors.Is(err, lockerr.ErrLocked) {
					t.Errorf("without a wait: %v", err)
				}
				continue
			}
			ok(t, err)
			if lease.Token() != before+2 {
				t.Errorf("the token is %d after %d", lease.Token(), before)
			}
			ok(t, lease.Release())
		}
	})
}

// TestLateAnswerBehindRowLock: nor is it where it cannot be given back at once,
// since somebody has locked the row.
func TestLateAnswerBehindRowLock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		ok(t, l.acquire(request("k")).Release())
		before := s.row("k").token
		arrive := l.tap.stall("INSERT")
		failed := make(chan error, 1)
		go func() {
			r := waiting("k", 20*time.Second)
			r.TTL = time.Second
			lease, err := l.Acquire(limited(t), r)
			if err == nil {
				err = errors.Join(errors.New("it was granted"), lease.Release())
			}
			failed <- err
		}()
		soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
		tx, err := s.db.Begin()
		ok(t, err)
		defer tx.Rollback()
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.database) + " AND name = x'6b' FOR UPDATE")
		ok(t, err)
		time.Sleep(1100 * time.Millisecond) // it is over
		arrive()
		if err := <-failed; !errors.Is(err, errNoAnswer) {
			t.Errorf("it ended with %v", err)
		}
		ok(t, tx.Rollback())
		ok(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}

// TestLostCommit is the same for a waiter that gets the lease behind a row lock.
func TestLostCommit(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			for try := 1; !s.lostCommit(late); try++ {
				if try == 5 {
					t.Fatal("it never gets the lease behind the row lock")
				}
			}
		}
	})
}

// lostCommit is false where the waiter got the lease in another way, since the
// server had let it wait for as long as it lets anybody.
func (s *scratch) lostCommit(late bool) bool {
	t := s.t
	l := s.locker(setup{})
	defer l.close()
	ok(t, l.acquire(request("k")).Release())
	before := s.row("k").token
	tx, err := s.db.Begin()
	ok(t, err)
	defer tx.Rollback()
	_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.database) + " AND name = x'6b' FOR UPDATE")
	ok(t, err)
	arrive := l.tap.stall("COMMIT")
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
	soon(t, "it waits behind the row lock", func() bool { return len(s.behindRow()) == 1 })
	ok(t, tx.Commit())
	soon(t, "it has the lease", func() bool { return s.row("k").token == before+1 })
	cancel()
	if err := <-failed; err == nil {
		return false
	} else if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if late {
		arrive()
	} else {
		l.tap.cutOpen()
	}
	soon(t, "it is given back", func() bool { return !s.row("k").live && s.bells("k") == 0 })
	if next := l.acquire(waiting("k", 20*time.Second)); next.Token() != before+2 {
		t.Errorf("the next token is %d after %d", next.Token(), before)
	}
	return true
}

// TestRestart: leases, and their tokens, outlive the server.
func TestRestart(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			temp, err := tempserver.Start(t.Context(), bin)
			ok(t, err)
			t.Cleanup(func() { _ = temp.Stop() })
			srv := newTestServer(bin, temp)
			s := srv.scratch(t)
			l, other := s.locker(setup{ttl: 20 * time.Second}), s.locker(setup{})
			r := request("k")
			lease := l.acquire(r)
			ok(t, l.acquire(request("j")).Release())
			for _, down := range []func() error{srv.temp.Kill, func() error { return nil }} {
				ok(t, down())
				ok(t, srv.temp.Restart(limited(t)))
				ok(t, lease.Err())
				l.renew([]*Lease{lease}, time.Second)
				ok(t, lease.Err())
				if left := s.row("k").left; left < 25*time.Second {
					t.Errorf("the lease is not renewed: %v", left)
				}
				if _, err := other.Acquire(limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) {
					t.Error(err)
				}
			}
			ok(t, lease.Release())
			if next := other.acquire(waiting("k", 20*time.Second)); next.Token() != 2 {
				t.Errorf("the next token is %d", next.Token())
			}
			if next := other.acquire(waiting("j", 20*time.Second)); next.Token() != 2 {
				t.Errorf("the next token is %d", next.Token())
			}
		})
	}
}

// TestStorm has some processes go for some keys while callers give up at random
// and connections are killed at random.
func TestStorm(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		length := 4 * time.Second
		if testing.Short() {
			length = time.Second
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		began := time.Now()
		keys := []string{"a", "b", "c"}
		var holding, granted [3]atomic.Int32
		var failed atomic.Int32
		var last [3]atomic.Uint64
		var all sync.WaitGroup
		var lockers []*locker
		for range 5 {
			l := s.locker(setup{ttl: 5 * time.Second, max: 4})
			lockers = append(lockers, l)
			for range 4 {
				all.Go(func() {
					for ctx.Err() == nil {
						i := rand.N(len(keys))
						r := waiting(keys[i], rand.N(time.Duration(2))*rand.N(time.Second))
						r.TTL = 5 * time.Second
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
						if err := lease.Release(); err != nil {
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
			soon(t, key+" is free", func() bool { return !s.row(key).live && s.bells(key) == 0 })
		}
		soon(t, "no connection is kept", func() bool {
			kept := 0
			for _, l := range lockers {
				kept += l.conns.Stat().InUse
			}
			return kept == 0
		})
	})
}

// TestLostInheritance: the statement by which somebody takes over a lease fails
// without an answer. The lease is given back even where it lasts for longer than
// the heir wanted it.
func TestLostInheritance(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		failed := make(chan error)
		go func() {
			r := waiting("k", 20*time.Second)
			r.TTL = time.Second
			_, err := l.Acquire(limited(t), r)
			failed <- err
		}()
		l.inLine("k", 1)
		tx, err := s.db.Begin()
		ok(t, err)
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.database) + " AND name = x'6b' FOR UPDATE")
		ok(t, err)
		ok(t, first.Release())
		soon(t, "the heir waits behind the row lock", func() bool { return len(s.threads("INFO LIKE 'UPDATE%'")) == 1 })
		l.tap.cut()
		if err := <-failed; err == nil {
			t.Error("the heir was granted the lease")
		}
		time.Sleep(1500 * time.Millisecond)
		ok(t, tx.Rollback())
		switch r := s.row("k"); {
		case r.token == 2:
			t.Log("the server has carried the statement out after all")
		case !r.live || r.token != 1 || r.left < 20*time.Second:
			t.Fatalf("nothing is shown: the row is %+v", r)
		}
		l.tap.mu.Lock()
		l.tap.refused = false
		l.tap.mu.Unlock()
		soon(t, "it is given back", func() bool { return !s.row("k").live })
	})
}

// TestPlainRequest: a request needs no more than a key and a TTL to wait.
func TestPlainRequest(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		first := l.acquire(Request{Key: "k", TTL: time.Second})
		var all sync.WaitGroup
		for _, l := range []*locker{l, other} { // in the line, and in the server
			all.Go(func() {
				lease, err := l.Acquire(limited(t), Request{Key: "k", TTL: time.Second, Wait: 20 * time.Second})
				if err == nil {
					err = lease.Release()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		l.inLine("k", 1)
		soon(t, "the other waits", func() bool { return len(s.inBell()) == 1 })
		ok(t, first.Release())
		all.Wait()
	})
}
