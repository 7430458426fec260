package advisory_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestAHeldLockIsRefusedWithItsHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		lock := p.acquire("Key", 0)
		if lock.Key() != "Key" || lock.Name() != advisory.Name(s.namespace, "Key") || lock.Err() != nil {
			t.Errorf("the lock says %q, %q, %v", lock.Key(), lock.Name(), lock.Err())
		}
		if id := s.holder(plain, "Key"); id != fmt.Sprint(lock.ConnectionID()) {
			t.Errorf("connection %s has it, not %d", id, lock.ConnectionID())
		}

		for i, q := range []*process{p, other} {
			var e *lockerr.Error
			for began := time.Now(); e == nil || e.Holder == nil && time.Since(began) < dbtest.Patience; { // a busy server does not say in time
				err := q.told("Key", 0)
				if !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) || !errors.As(err, &e) {
					t.Fatalf("without a wait: %v", err)
				}
			}
			if e.Op != "lock" || e.Key != "Key" || e.Strategy != "advisory" || e.Holder == nil || e.Holder.ConnectionID != lock.ConnectionID() {
				t.Errorf("the error is %+v, with holder %v", e, e.Holder)
			}
			if i == 1 && e.Holder != nil && (e.Holder.User != "root" || !strings.HasPrefix(e.Holder.Host, "localhost") && !strings.HasPrefix(e.Holder.Host, "127.0.0.1")) {
				t.Errorf("the holder is %v", e.Holder)
			}
			err := q.told("Key", 300*time.Millisecond)
			if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &e) || e.Waited < 300*time.Millisecond || e.Waited > 20*time.Second {
				t.Error(err)
			}
		}

		dbtest.OK(t, lock.Release())
		dbtest.OK(t, lock.Release())
		dbtest.Is(t, "after the release", lock.Err(), lockerr.ErrClosed)
		// On a busy machine a statement that was given up may still get it for a moment.
		dbtest.Soon(t, "nobody has it", func() bool { return s.holder(plain, "Key") == "" })
		dbtest.OK(t, other.acquire("Key", 0).Release())
	})
}

// TestManyHoldsShareTwoConnections: many locks share two connections, and those that are asked for
// at the same time share statements. No lock is taken twice on its connection, nor given back
// twice.
func TestManyHoldsShareTwoConnections(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 1_000
		p, plain := s.process(settings{}), s.open()
		locks := make([]*advisory.Grant, n)
		var all sync.WaitGroup
		each := func(do func(i int)) {
			for w := range 200 {
				all.Go(func() {
					for i := w; i < n; i += 200 {
						do(i)
					}
				})
			}
			all.Wait()
		}
		key := func(i int) string { return fmt.Sprint("product:", i) }
		each(func(i int) { locks[i] = p.acquire(key(i), time.Minute) })
		if sent := p.sent.Load(); sent > n/2 {
			t.Errorf("%d statements for %d locks", sent, n)
		}
		ids := make(map[uint64]int)
		for i, lock := range locks {
			ids[lock.ConnectionID()]++
			if id := s.holder(plain, key(i)); id != fmt.Sprint(lock.ConnectionID()) {
				t.Errorf("connection %q has %d", id, i)
			}
		}
		if in := p.conns.Stat().InUse; len(ids) > 2 || in > 2 {
			t.Errorf("%d connections carry %d locks; %d are in use", len(ids), n, in)
		}
		release := func(rest int) {
			each(func(i int) {
				if i%2 == rest {
					dbtest.OK(t, locks[i].Release())
				}
			})
		}
		release(0)
		for i := range locks {
			if id := s.holder(plain, key(i)); (id == "") != (i%2 == 0) {
				t.Errorf("connection %q has %d", id, i)
			}
		}
		release(1)
		dbtest.Soon(t, "no connection is in use", func() bool { return p.conns.Stat().InUse == 0 })
	})
}

func TestCloseReleasesAndTellsHolders(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		var lost told
		lock, err := p.Acquire(t.Context(), lost.request("k"))
		dbtest.OK(t, err)
		theirs := other.acquire("theirs", 0)
		failed := make(chan error, 2)
		for _, key := range []string{"k", "theirs"} {
			go func() {
				_, err := p.Acquire(context.Background(), request(key, time.Minute))
				failed <- err
			}()
		}
		dbtest.Soon(t, "one waits on the server", func() bool { return len(s.waiters(plain, "theirs")) == 1 })
		start := time.Now()
		p.Close()
		if took := time.Since(start); took > 15*time.Second { // they wait for longer
			t.Errorf("it took %v", took)
		}
		for range 2 {
			dbtest.Is(t, "who waited", <-failed, lockerr.ErrClosed)
		}
		s.free(plain, "k") // which the server may notice a moment later
		dbtest.Soon(t, "the holder is told", func() bool { return lost.count() == 1 })
		if !errors.Is(lost.err, lockerr.ErrClosed) || !errors.Is(lock.Err(), lockerr.ErrClosed) {
			t.Errorf("the holder was told %v, and %v", lost.err, lock.Err())
		}
		dbtest.OK(t, lock.Release())
		dbtest.Is(t, "after Close", dbtest.Err(p.Acquire(t.Context(), request("k", 0))), lockerr.ErrClosed)
		dbtest.Soon(t, "nobody waits on the server", func() bool { return len(s.waiters(plain, "theirs")) == 0 })
		dbtest.OK(t, theirs.Release())
		p.Close()
	})
}

// TestAHolderHasAConnection: the server asks for the holder of a lock more than once while it makes
// the answer. One that was released between is nobody's, and no holder without a connection.
func TestAHolderHasAConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(settings{}), s.open()
		var took sync.WaitGroup
		defer took.Wait()
		stop := make(chan struct{})
		defer close(stop)
		name := advisory.Name(s.namespace, "k")
		took.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, err := server.Query(t.Context(), c, "SELECT GET_LOCK('"+name+"', 0)")
					_, err2 := server.Query(t.Context(), c, "SELECT RELEASE_LOCK('"+name+"')")
					if err := errors.Join(err, err2); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
		for began := time.Now(); time.Since(began) < 500*time.Millisecond; {
			if h := p.Holder(t.Context(), "k"); h != nil && h.ConnectionID == 0 {
				t.Fatalf("%+v has it", *h)
			}
		}
	})
}
