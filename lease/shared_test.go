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
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/lockerr"
)

// asked is a request that is on its way.
type asked struct {
	lease *Lease
	err   error
	done  chan struct{}
}

// together has requests wait for the one lock connection, and be sent on it together.
// before is called when all wait; then the connection is free again.
func (l *locker) together(before func(), ctx context.Context, requests ...Request) []*asked {
	l.s.T.Helper()
	h, err := l.borrow(ctx)
	dbtest.OK(l.s.T, err)
	all := l.askAll(ctx, requests)
	before()
	l.giveBack(h)
	return all
}

// askAll sends requests off, one after the other, while all lock connections are busy.
func (l *locker) askAll(ctx context.Context, requests []Request) (all []*asked) {
	l.s.T.Helper()
	for i, r := range requests {
		a := &asked{done: make(chan struct{})}
		all = append(all, a)
		go func() {
			defer close(a.done)
			a.lease, a.err = l.Acquire(ctx, r)
		}()
		dbtest.Soon(l.s.T, "it waits with others", func() bool { return l.takes.Len() == i+1 })
	}
	return all
}

func requests(n int, ask func(key string) Request) (all []Request) {
	for i := range n {
		all = append(all, ask(fmt.Sprintf("k%d", i)))
	}
	return all
}

// rowsOf makes the rows of requests, by a lease on each.
func (l *locker) rowsOf(requests []Request) {
	l.s.T.Helper()
	for _, r := range requests {
		dbtest.OK(l.s.T, l.acquire(request(r.Key)).Release())
	}
}

// TestShared: requests that wait for a connection take one transaction, and so do releases.
func TestShared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		const n = 30
		all := requests(n, request)
		all[1].TTL = 2 * time.Minute
		l.rowsOf(all)
		var sent func() []string
		held := l.together(func() { sent = l.tap.Texts() }, dbtest.Limited(t), all...)
		for i, a := range held {
			<-a.done
			dbtest.OK(t, a.err)
			if r := s.row(all[i].Key); !r.live || r.token != 2 || a.lease.Token() != 2 || s.wakeUps(all[i].Key) != 1 || r.left.Round(time.Minute) > all[i].TTL.Round(time.Minute) {
				t.Errorf("%s has token %d; the row is %+v", all[i].Key, a.lease.Token(), r)
			}
		}
		if left := s.row(all[1].Key).left; left < time.Minute {
			t.Errorf("a lease of %v lasts for %v", all[1].TTL, left)
		}
		texts := sent()
		if !areExchange(texts) {
			t.Errorf("%d requests are sent as %q", n, heads(texts))
		}
		sent = l.tap.Texts()
		l.renewNow(held[0].lease, held[n-1].lease) // as others are
		dbtest.Soon(t, "they are renewed", func() bool { return count(sent(), "INSERT") == 1 })
		for _, a := range held {
			dbtest.OK(t, a.lease.Err())
		}

		sent = l.releaseTogether(t, held, func(int, error) {})
		if texts := sent(); !areExchange(texts) {
			t.Errorf("%d releases are sent as %q", n, heads(texts))
		}
		for _, r := range all {
			if row := s.row(r.Key); row.live || row.owner != "" || row.token != 2 || s.wakeUps(r.Key) != 0 {
				t.Errorf("after the release of %s: %+v", r.Key, row)
			}
		}
		dbtest.Soon(t, "no connection is kept", func() bool { return l.conns.Stat().InUse == 0 })
	})
}

// releaseTogether releases leases whose wake-up locks are on one connection, at the same
// time. ended is told how each of them ended; what is expected to fail it must accept.
func (l *locker) releaseTogether(t *testing.T, held []*asked, ended func(int, error)) (sent func() []string) {
	t.Helper()
	h := held[0].lease.conn
	l.turnOf(h)
	sent = l.tap.Texts()
	wait := l.releaseAllOn(h, held, ended)
	l.giveBack(h)
	wait()
	return sent
}

// releaseAllOn sends releases off, one after the other, while h is busy, which has their wake-up
// locks. ended is told of one at a time; wait returns when all have ended.
func (l *locker) releaseAllOn(h *lockConn, held []*asked, ended func(int, error)) (wait func()) {
	l.s.T.Helper()
	var all sync.WaitGroup
	var mu sync.Mutex
	for i, a := range held {
		all.Go(func() {
			err := a.lease.Release()
			mu.Lock()
			defer mu.Unlock()
			ended(i, err)
		})
		dbtest.Soon(l.s.T, "it waits with others", func() bool { return h.releases.Len() == i+1 })
	}
	return all.Wait
}

// turnOf waits for the turn of h.
func (l *locker) turnOf(h *lockConn) {
	l.s.T.Helper()
	if ours, err := l.awaitTurn(dbtest.Limited(l.s.T), h); !ours {
		l.s.T.Fatalf("no turn: %v", err)
	}
}

// areExchange reports whether the statements are those of one exchange.
func areExchange(texts []string) bool {
	return len(texts) == 4 && count(texts, "START TRANSACTION")+count(texts, "SELECT")+count(texts, "INSERT")+count(texts, "COMMIT") == 4
}

// TestSharedOutcomes: requests that are sent together have each its own end.
func TestSharedOutcomes(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{max: 2}), s.locker(setup{})
		all := []Request{
			request("free"), request("held"), request("locked"), request("missing"), request("signalled"),
			waiting("wait", 20*time.Second), waiting("also free", 20*time.Second), waiting("signalled in turn", 20*time.Second),
		}
		for _, r := range all {
			l.rowsOf([]Request{r})
		}
		held, wait := other.acquire(request("held")), other.acquire(request("wait"))
		tx := s.lockRow("locked")
		defer tx.Rollback()
		_, err := s.db.Exec("DELETE FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = " + schema.Literal("missing"))
		dbtest.OK(t, err)
		conn, err := s.db.Conn(t.Context())
		dbtest.OK(t, err)
		defer conn.Close()
		for _, key := range []string{"signalled", "signalled in turn"} {
			_, err = conn.ExecContext(t.Context(), "DO GET_LOCK(?, 0)", lockname.OfWakeUp(s.Name, key))
			dbtest.OK(t, err)
		}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		quit, stop := context.WithCancel(dbtest.Limited(t))
		var quits *asked
		got := l.together(func() {
			quits = &asked{done: make(chan struct{})}
			before := l.takes.Len()
			go func() {
				defer close(quits.done)
				quits.lease, quits.err = l.Acquire(quit, request("quits"))
			}()
			dbtest.Soon(t, "it waits with others", func() bool { return l.takes.Len() == before+1 })
			stop()
			<-quits.done
		}, ctx, all...)
		end := make(map[string]*asked)
		for i, r := range all {
			end[r.Key] = got[i]
		}
		dbtest.Want(t, quits.err, context.Canceled)
		for _, key := range []string{"free", "missing", "signalled"} {
			a := end[key]
			<-a.done
			if a.err != nil {
				t.Errorf("%s: %v", key, a.err)
				continue
			}
			dbtest.OK(t, a.lease.Release())
		}
		for _, key := range []string{"held", "locked"} {
			<-end[key].done
			dbtest.Want(t, end[key].err, lockerr.ErrLocked)
		}
		var e *lockerr.Error
		if !errors.As(end["held"].err, &e) || e.Holder == nil {
			t.Errorf("nobody has it: %v", end["held"].err)
		}
		cancel() // those that wait by now
		for _, key := range []string{"wait", "signalled in turn"} {
			<-end[key].done
			dbtest.Want(t, end[key].err, context.Canceled)
		}
		a := end["also free"]
		<-a.done
		dbtest.OK(t, a.err)
		dbtest.OK(t, a.lease.Release())
		dbtest.OK(t, held.Release())
		dbtest.OK(t, wait.Release())
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, conn.Close())
		for _, r := range all {
			if row := s.row(r.Key); row.live {
				t.Errorf("%s is left: %+v", r.Key, row)
			}
		}
	})
}

// TestSharedUnknown: where the answer to a COMMIT of several requests is lost, or their
// connection breaks before it, each is given back what it may have been granted, and asks
// again; and a caller that has gone keeps nothing.
func TestSharedUnknown(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, statement := range []string{"COMMIT", "INSERT", "SELECT", "START"} {
			l := s.locker(setup{max: 2})
			all := requests(5, func(key string) Request {
				r := waiting(statement+key, 20*time.Second)
				r.TTL = 5 * time.Minute
				return r
			})
			taken := request(statement + "taken")
			l.rowsOf(append(all, taken))
			tx := s.lockRow(taken.Key)
			ctx := dbtest.Limited(t)
			var arrive func()
			var sent func() []string
			begin := func() { arrive, sent = l.tap.Stall(statement), l.tap.Texts() }
			got := l.together(begin, ctx, append(all, taken)...)
			last := all[len(all)-1].Key
			dbtest.Soon(t, "it is sent", func() bool { return count(sent(), statement) > 0 })
			if statement == "COMMIT" {
				dbtest.Soon(t, "they are granted", func() bool { return s.row(last).token == 2 })
			}
			l.tap.Break()
			<-got[len(all)].done
			dbtest.Want(t, got[len(all)].err, lockerr.ErrLocked)
			dbtest.OK(t, tx.Rollback())
			got = got[:len(all)]
			for i, a := range got {
				<-a.done
				dbtest.OK(t, a.err)
				want := uint64(2)
				if statement == "COMMIT" {
					want = 3
				}
				if a.lease.Token() != want || !s.row(all[i].Key).live {
					t.Errorf("%s: token %d, want %d; the row is %+v", statement, a.lease.Token(), want, s.row(all[i].Key))
				}
			}
			for _, a := range got {
				dbtest.OK(t, a.lease.Release())
			}
			arrive()

			// The same with callers that have gone when the answer comes, or does not.
			for _, lost := range []bool{false, true} {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				got = l.together(begin, ctx, all...)
				dbtest.Soon(t, "it is sent", func() bool { return count(sent(), statement) > 0 })
				cancel()
				for _, a := range got {
					<-a.done
					dbtest.Want(t, a.err, context.Canceled)
				}
				_, err := l.Acquire(dbtest.Limited(t), request(last))
				dbtest.Want(t, err, lockerr.ErrLocked) // it is not known yet that it is not held
				if lost {
					l.tap.Break()
				}
				arrive()
				for _, r := range all {
					dbtest.Soon(t, r.Key+" is given back", func() bool { return !s.row(r.Key).live && s.wakeUps(r.Key) == 0 })
					dbtest.OK(t, l.acquire(waiting(r.Key, 20*time.Second)).Release())
				}
			}
			l.close()
		}
	})
}

// TestSharedLate: what is answered when it may be over already is not granted.
func TestSharedLate(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		all := requests(3, func(key string) Request {
			r := waiting(key, 20*time.Second)
			r.TTL = time.Second
			return r
		})
		l.rowsOf(all)
		var arrive func()
		got := l.together(func() { arrive = l.tap.Stall("COMMIT") }, dbtest.Limited(t), all...)
		dbtest.Soon(t, "they are granted", func() bool { return s.row(all[2].Key).token == 2 })
		time.Sleep(1100 * time.Millisecond)
		arrive()
		for _, a := range got {
			<-a.done
			dbtest.Want(t, a.err, errNoAnswer)
		}
		for _, r := range all {
			dbtest.OK(t, l.acquire(waiting(r.Key, 20*time.Second)).Release())
		}
	})
}

// TestSharedReleases: releases that are sent together have each its own end, also where
// their connection breaks.
func TestSharedReleases(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		all := requests(5, request)
		l.rowsOf(all)
		take := func() []*asked {
			held := l.together(func() {}, dbtest.Limited(t), all...)
			for _, a := range held {
				<-a.done
				dbtest.OK(t, a.err)
			}
			return held
		}
		held := take()
		s.steal("k1")
		tx := s.lockRow("k2")
		defer tx.Rollback()
		others := make(chan struct{}, len(all))
		time.AfterFunc(300*time.Millisecond, func() {
			for range 4 {
				<-others
			}
			_ = tx.Rollback()
		})
		l.releaseTogether(t, held, func(i int, err error) {
			switch i {
			case 1:
				dbtest.Want(t, err, lockerr.ErrLost)
			default:
				dbtest.OK(t, err)
			}
			others <- struct{}{}
		})
		for i, r := range all {
			if row := s.row(r.Key); row.live != (i == 1) || s.wakeUps(r.Key) != 0 {
				t.Errorf("after the release of %s: %+v", r.Key, row)
			}
		}
		s.set("k1", "owner = NULL")

		// Where another process has a key as soon as it is released, it was not lost.
		held = take()
		tx = s.lockRow("k2")
		defer tx.Rollback()
		next := make(chan *Lease, 1)
		other := s.locker(setup{})
		go func() { next <- other.acquire(waiting("k3", 30*time.Second)) }()
		dbtest.Soon(t, "another process waits for k3", func() bool { return len(s.inWakeUp()) > 0 })
		answer := l.tap.Stall("INSERT")
		go func() {
			defer tx.Rollback()
			for range 50 {
				if len(next) > 0 {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
			answer()
		}()
		l.releaseTogether(t, held, func(i int, err error) { dbtest.OK(t, err) })
		dbtest.OK(t, (<-next).Release())

		held = take()
		arrive := l.tap.Stall("COMMIT")
		defer arrive()
		go func() {
			for s.row("k4").live {
				time.Sleep(10 * time.Millisecond)
			}
			l.tap.Break()
		}()
		l.releaseTogether(t, held, func(_ int, err error) { dbtest.OK(t, err) })
		for _, r := range all {
			if row := s.row(r.Key); row.live {
				t.Errorf("after the release of %s: %+v", r.Key, row)
			}
			dbtest.OK(t, l.acquire(waiting(r.Key, 20*time.Second)).Release())
		}
	})
}

// TestSharedStorm: among many goroutines of two processes, with few connections that break
// all the time, nobody has a key that another one has, tokens grow, and nothing is left.
func TestSharedStorm(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const keys, workers, lasting = 24, 48, 4 * time.Second
		processes := []*locker{s.locker(setup{max: 4}), s.locker(setup{max: 4})}
		var inside [keys]atomic.Int32
		var highest [keys]atomic.Uint64
		var granted, shared atomic.Int64
		end := time.Now().Add(lasting)
		var all sync.WaitGroup
		var sent []func() []string
		for p, l := range processes {
			sent = append(sent, l.tap.Texts())
			for range workers / 2 {
				all.Go(func() {
					for time.Now().Before(end) {
						n := rand.IntN(keys)
						ctx, cancel := context.WithTimeout(dbtest.Limited(t), rand.N(2*time.Second)+time.Millisecond)
						r := waiting(fmt.Sprintf("k%d", n), rand.N(2*time.Second))
						if rand.IntN(3) == 0 {
							r.Wait = 0
						}
						lease, err := l.Acquire(ctx, r)
						if err != nil {
							cancel()
							continue
						}
						granted.Add(1)
						if others := inside[n].Add(1); others != 1 && lease.Err() == nil {
							t.Errorf("%d have key %d", others, n)
						}
						if before := highest[n].Swap(lease.Token()); before >= lease.Token() {
							t.Errorf("key %d had token %d before %d", n, before, lease.Token())
						}
						time.Sleep(rand.N(2 * time.Millisecond))
						inside[n].Add(-1)
						_ = lease.Release() // it may be lost by then, or its connection broken
						cancel()
					}
				})
			}
			if p == 0 {
				continue
			}
			all.Go(func() {
				for time.Now().Before(end) {
					time.Sleep(rand.N(300 * time.Millisecond))
					processes[rand.IntN(2)].tap.Break()
				}
			})
		}
		all.Wait()
		for _, texts := range sent {
			shared.Add(int64(count(texts(), "START TRANSACTION")))
		}
		t.Logf("%d leases, %d transactions for several", granted.Load(), shared.Load())
		if granted.Load() < 50 || shared.Load() == 0 {
			t.Error("that is no storm")
		}
		for _, l := range processes {
			l.close()
		}
		var left int
		dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM "+s.table.String()+" WHERE "+schema.Live("")).Scan(&left))
		if left > 0 {
			t.Errorf("%d leases are left", left)
		}
	})
}

// TestSharedBehindSlow: requests share two connections, but do not wait for long behind what
// is slow on both of them.
func TestSharedBehindSlow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 16})
		all := requests(20, request)
		l.rowsOf(all)
		var slow []*lockConn
		for range sharedConns {
			h, err := l.borrow(dbtest.Limited(t))
			dbtest.OK(t, err)
			slow = append(slow, h)
		}
		if slow[0] == slow[1] {
			t.Fatal("two have the turn of one connection")
		}
		var waits sync.WaitGroup
		for _, r := range all {
			waits.Go(func() {
				lease, err := l.Acquire(dbtest.Limited(t), r)
				if err != nil {
					t.Error(err)
					return
				}
				dbtest.OK(t, lease.Release())
			})
		}
		waits.Wait() // although both are still in use
		for _, h := range slow {
			l.giveBack(h)
		}
		const most = sharedConns + 2 // one that is opened behind them, and one that renews
		if n := l.conns.Stat().InUse; n > most {
			t.Errorf("%d connections are in use", n)
		}
	})
}

// TestSharedBurst: many requests that come at once, while there is no lock connection, do not
// open one each.
func TestSharedBurst(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 40
		all := requests(n, request)
		l := s.locker(setup{max: n})
		l.rowsOf(all)
		opened := l.tap.Opened()
		begin := make(chan struct{})
		held := make([]*Lease, n)
		var waits sync.WaitGroup
		for i, r := range all {
			waits.Go(func() {
				<-begin
				var err error
				held[i], err = l.Acquire(dbtest.Limited(t), r)
				dbtest.OK(t, err)
			})
		}
		close(begin)
		waits.Wait()
		const most = sharedConns + 2 // as above
		if n := l.tap.Opened() - opened; n > most {
			t.Errorf("%d connections were opened", n)
		}
		for _, lease := range held {
			dbtest.OK(t, lease.Release())
		}
	})
}
