package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// asked is a request that is on its way.
type asked struct {
	lease *Grant
	err   error
	done  chan struct{}
}

// together has requests wait for the one lock connection, and be sent on it together.
// before is called when all wait; then the connection is free again.
func (l *locker) together(before func(), ctx context.Context, requests ...Request) []*asked {
	l.s.T.Helper()
	lc, err := l.borrow(ctx)
	dbtest.OK(l.s.T, err)
	all := l.askAll(ctx, requests)
	before()
	l.giveBack(lc)
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

// releaseTogether releases leases whose wake-up locks are on one connection, at the same
// time. ended is told how each of them ended; what is expected to fail it must accept.
func (l *locker) releaseTogether(t *testing.T, held []*asked, ended func(int, error)) (sent func() []string) {
	t.Helper()
	lc := held[0].lease.conn
	l.turnOf(lc)
	sent = l.tap.Texts()
	wait := l.releaseAllOn(lc, held, ended)
	l.giveBack(lc)
	wait()
	return sent
}

// releaseAllOn sends releases off, one after the other, while h is busy, which has their wake-up
// locks. ended is told of one at a time; wait returns when all have ended.
func (l *locker) releaseAllOn(lc *lockConn, held []*asked, ended func(int, error)) (wait func()) {
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
		dbtest.Soon(l.s.T, "it waits with others", func() bool { return lc.releases.Len() == i+1 })
	}
	return all.Wait
}

// turnOf waits for the turn of h.
func (l *locker) turnOf(lc *lockConn) {
	l.s.T.Helper()
	if ours, err := l.awaitTurn(dbtest.Limited(l.s.T), lc); !ours {
		l.s.T.Fatalf("no turn: %v", err)
	}
}

// granted waits for the ends of requests, which must be granted.
func granted(t *testing.T, all []*asked) {
	t.Helper()
	for _, a := range all {
		<-a.done
		dbtest.OK(t, a.err)
	}
}

// refused waits for the ends of requests, which must fail so.
func refused(t *testing.T, all []*asked, want error) {
	t.Helper()
	for _, a := range all {
		<-a.done
		dbtest.Want(t, a.err, want)
	}
}

// release releases what was granted.
func release(t *testing.T, all []*asked) {
	t.Helper()
	for _, a := range all {
		dbtest.OK(t, a.lease.Release())
	}
}

// areBatch reports whether the statements are those of one batch.
func areBatch(texts []string) bool {
	return len(texts) == 4 && count(texts, "START TRANSACTION")+count(texts, "SELECT")+count(texts, "INSERT")+count(texts, "COMMIT") == 4 ||
		len(texts) == 2 && strings.Contains(texts[0], "; SELECT") && strings.Contains(texts[1], "; COMMIT")
}

func TestRequestsSentTogetherHaveEachTheirOwnEnd(t *testing.T) {
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
		dbtest.Exec(t, s.db, "DELETE FROM "+s.table.String()+" WHERE namespace = "+schema.Literal(s.Name)+" AND name = "+schema.Literal("missing"))
		conn, err := s.db.Conn(t.Context())
		dbtest.OK(t, err)
		defer conn.Close()
		for _, key := range []string{"signalled", "signalled in turn"} {
			dbtest.Exec(t, conn, "DO GET_LOCK(?, 0)", lockname.OfWakeUp(s.Name, key))
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
		free := []*asked{end["free"], end["missing"], end["signalled"]}
		granted(t, free)
		release(t, free)
		refused(t, []*asked{end["held"], end["locked"]}, lockerr.ErrLocked)
		var e *lockerr.Error
		if !errors.As(end["held"].err, &e) || e.Holder == nil {
			t.Errorf("nobody has it: %v", end["held"].err)
		}
		cancel() // those that wait by now
		refused(t, []*asked{end["wait"]}, context.Canceled)
		// Its row is free: on a busy machine it may have asked again by now.
		a := end["signalled in turn"]
		if <-a.done; !errors.Is(a.err, context.Canceled) {
			dbtest.OK(t, a.err)
			dbtest.OK(t, a.lease.Release())
		}
		granted(t, []*asked{end["also free"]})
		release(t, []*asked{end["also free"]})
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

// TestUnknownGrantsAreGivenBackAndAskedForAgain: where the answer to a COMMIT of several
// requests is lost, or their connection breaks before it, each is given back what it may have
// been granted, and asks again; and a caller that has gone keeps nothing.
func TestUnknownGrantsAreGivenBackAndAskedForAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, statement := range []string{"COMMIT", "INSERT", "SELECT", "START", "INSERT and COMMIT"} {
			with := setup{max: 2, packs: statement == "INSERT and COMMIT"}
			committed := statement == "COMMIT" || with.packs
			begins, _, _ := strings.Cut(statement, " ")
			l := s.locker(with)
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
			begin := func() { arrive, sent = l.tap.Stall(begins), l.tap.Texts() }
			got := l.together(begin, ctx, append(all, taken)...)
			last := all[len(all)-1].Key
			dbtest.Soon(t, "it is sent", func() bool { return count(sent(), begins) > 0 })
			if committed {
				dbtest.Soon(t, "they are granted", func() bool { return s.row(last).token == 2 })
			}
			l.tap.Break()
			<-got[len(all)].done
			dbtest.Want(t, got[len(all)].err, lockerr.ErrLocked)
			dbtest.OK(t, tx.Rollback())
			got = got[:len(all)]
			granted(t, got)
			for i, a := range got {
				want := uint64(2)
				if committed {
					want = 3
				}
				if a.lease.Token() != want || !s.row(all[i].Key).live {
					t.Errorf("%s: token %d, want %d; the row is %+v", statement, a.lease.Token(), want, s.row(all[i].Key))
				}
			}
			release(t, got)
			arrive()

			// The same with callers that have gone when the answer comes, or does not.
			for _, lost := range []bool{false, true} {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				got = l.together(begin, ctx, all...)
				dbtest.Soon(t, "it is sent", func() bool { return count(sent(), begins) > 0 })
				cancel()
				refused(t, got, context.Canceled)
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

// TestALateAnswerToSeveralRequestsGrantsNone: what is answered when it may be over already.
func TestALateAnswerToSeveralRequestsGrantsNone(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
		dbtest.Soon(t, "they are over", func() bool {
			return !slices.ContainsFunc(all, func(r Request) bool { return s.row(r.Key).live })
		})
		arrive()
		refused(t, got, lockerr.ErrNoAnswer)
		for _, r := range all {
			dbtest.OK(t, l.acquire(waiting(r.Key, 20*time.Second)).Release())
		}
	})
}

// TestReleasesSentTogetherHaveEachTheirOwnEnd, also where their connection breaks.
func TestReleasesSentTogetherHaveEachTheirOwnEnd(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		all := requests(5, request)
		l.rowsOf(all)
		take := func() []*asked {
			held := l.together(func() {}, dbtest.Limited(t), all...)
			granted(t, held)
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
		next := make(chan *Grant, 1)
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
		l.releaseTogether(t, held, func(i int, err error) {
			if !stalled(err) { // it is stalled for a part of the time for that
				dbtest.OK(t, err)
			}
		})
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

// TestRequestsDoNotWaitLongBehindSlowConnections: they share two, and both are slow.
func TestRequestsDoNotWaitLongBehindSlowConnections(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 16})
		all := requests(20, request)
		l.rowsOf(all)
		var slow []*lockConn
		for range sharedConns {
			lc, err := l.borrow(dbtest.Limited(t))
			dbtest.OK(t, err)
			slow = append(slow, lc)
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
				if err := lease.Release(); err != nil {
					t.Error(err)
				}
			})
		}
		waits.Wait() // although both are still in use
		for _, lc := range slow {
			l.giveBack(lc)
		}
		const most = sharedConns + 2 // one that is opened behind them, and one that renews
		if n := l.conns.Stat().InUse; n > most {
			t.Errorf("%d connections are in use", n)
		}
	})
}

// TestRoomInThePoolIsFoundBehindSlowConnections: a request that the pool had no room for is not left
// behind what is slow on the lock connections once there is some.
func TestRoomInThePoolIsFoundBehindSlowConnections(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2 * (sharedConns + 1)})
		l.rowsOf(requests(1, request))
		ctx := dbtest.Limited(t)
		for range sharedConns {
			lc, err := l.borrow(ctx)
			dbtest.OK(t, err)
			defer l.giveBack(lc)
		}
		var others []*pool.Conn
		for l.conns.Ready() {
			c, err := l.conns.Acquire(ctx)
			dbtest.OK(t, err)
			others = append(others, c)
		}
		granted := dbtest.Go(func() error {
			lease, err := l.Acquire(ctx, request("k0"))
			if err == nil {
				err = lease.Release()
			}
			return err
		})
		dbtest.Soon(t, "the request waits for a lock connection", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, lc := range l.lockConns {
				if lc.queued > 0 {
					return true
				}
			}
			return false
		})
		time.Sleep(2 * sharedFor) // no less than it asks the shared ones alone
		for _, c := range others {
			c.Release()
		}
		dbtest.OK(t, <-granted)
	})
}

// TestABurstOfRequestsOpensFewConnections: many requests that come at once, while there is no
// lock connection, do not open one each.
func TestABurstOfRequestsOpensFewConnections(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 40
		all := requests(n, request)
		l := s.locker(setup{max: n})
		l.rowsOf(all)
		opened := l.tap.Opened()
		begin := make(chan struct{})
		held := make([]*Grant, n)
		var waits sync.WaitGroup
		for i, r := range all {
			waits.Go(func() {
				<-begin
				var err error
				held[i], err = l.Acquire(dbtest.Limited(t), r)
				if err != nil {
					t.Error(err)
					return
				}
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

// batched are requests and releases that were sent together.
type batched struct {
	asked    []*asked
	released []error
	sent     func() []string
}

// batchAll has the requests, and the releases of leases whose wake-up locks are on one
// connection, wait for that, and be sent on it together. before is called when all wait; then
// the connection is free again. Who came first is the first to get it.
func (l *locker) batchAll(t *testing.T, before func(), requests []Request, held []*asked, releasesFirst bool) batched {
	t.Helper()
	lc := held[0].lease.conn
	l.turnOf(lc)
	e := batched{released: make([]error, len(held)), sent: l.tap.Texts()}
	var wait func()
	release := func() { wait = l.releaseAllOn(lc, held, func(i int, err error) { e.released[i] = err }) }
	if releasesFirst {
		release()
	}
	e.asked = l.askAll(dbtest.Limited(t), requests)
	if !releasesFirst {
		release()
	}
	before()
	l.giveBack(lc)
	wait()
	for _, a := range e.asked {
		<-a.done
	}
	return e
}

// taken are leases on keys of that name, which were taken together.
func (l *locker) taken(t *testing.T, name string, n int) []*asked {
	t.Helper()
	all := requests(n, func(key string) Request { return request(name + key) })
	l.rowsOf(all)
	held := l.together(func() {}, dbtest.Limited(t), all...)
	granted(t, held)
	return held
}

// TestRequestsAndReleasesShareATransaction: requests and releases that wait for the same connection
// share a transaction, whoever came first.
func TestRequestsAndReleasesShareATransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, releasesFirst := range []bool{false, true} {
			l := s.locker(setup{max: 2})
			all := requests(10, func(key string) Request { return request(fmt.Sprint(releasesFirst, key)) })
			all[1].TTL = 2 * time.Minute
			l.rowsOf(all)
			held := l.taken(t, fmt.Sprint("before ", releasesFirst), 10)
			e := l.batchAll(t, func() {}, all, held, releasesFirst)
			if texts := e.sent(); !areBatch(texts) {
				t.Errorf("10 requests and 10 releases are sent as %q", heads(texts))
			}
			for i, a := range e.asked {
				dbtest.OK(t, a.err)
				if r := s.row(all[i].Key); !r.live || r.token != 2 || a.lease.Token() != 2 || s.wakeUps(all[i].Key) != 1 || r.left.Round(time.Minute) > all[i].TTL.Round(time.Minute) {
					t.Errorf("%s has token %d; the row is %+v", all[i].Key, a.lease.Token(), r)
				}
			}
			if left := s.row(all[1].Key).left; left < time.Minute {
				t.Errorf("a lease of %v lasts for %v", all[1].TTL, left)
			}
			for i, a := range held {
				s.back(a.lease, e.released[i])
				if r := s.row(a.lease.key); r.live || r.owner != "" || r.token != 2 || r.left > 0 || s.wakeUps(a.lease.key) != 0 {
					t.Errorf("after the release of %s: %+v", a.lease.key, r)
				}
			}
			release(t, e.asked)
		}
	})
}

// inBothForms runs a test with lock connections that take several statements in a text, and with others.
func inBothForms(t *testing.T, test func(t *testing.T, s *scratch, packs bool)) {
	for _, packs := range []bool{false, true} {
		t.Run(fmt.Sprint("packs ", packs), func(t *testing.T) {
			dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) { test(t, s, packs) })
		})
	}
}

// TestEachOfABatchHasItsOwnEnd: each request, and each release.
func TestEachOfABatchHasItsOwnEnd(t *testing.T) {
	inBothForms(t, func(t *testing.T, s *scratch, packs bool) {
		l, other := s.locker(setup{packs: packs, max: 2}), s.locker(setup{})
		const stolen, locked, over, off, next = 1, 2, 3, 4, 5
		held := l.taken(t, "held", 6)
		others := other.acquire(request("others"))
		all := []Request{request("others"), request("locked"), request("free"), waiting("waits", 20*time.Second)}
		l.rowsOf(all[1:])
		tx := s.lockRow("locked")
		defer tx.Rollback()
		busy := s.lockRow(held[locked].lease.key)
		time.AfterFunc(300*time.Millisecond, func() {
			if s.wakeUps(held[locked].lease.key) != 1 {
				t.Error("waiters are woken before the release")
			}
			_ = busy.Rollback()
		})
		s.steal(held[stolen].lease.key)
		s.set(held[over].lease.key, "expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND") // and nobody has taken it
		s.set(held[off].lease.key, "owner = NULL")
		s.set(held[next].lease.key, "token = token + 1")
		e := l.batchAll(t, func() {}, all, held, false)
		refused(t, e.asked[:2], lockerr.ErrLocked)
		granted(t, e.asked[2:])
		for i, err := range e.released {
			lost := i == stolen || i == off || i == next
			if lost {
				dbtest.Want(t, err, lockerr.ErrLost)
			} else {
				dbtest.OK(t, err)
			}
			key := held[i].lease.key
			if r := s.row(key); r.live != (i == stolen || i == next) || s.wakeUps(key) != 0 {
				t.Errorf("after the release of %s: %+v", key, r)
			}
		}
		release(t, e.asked[2:])
		dbtest.OK(t, others.Release())
	})
}

// TestARefusedWriteOfABatchLeavesTheOthersGranted: where the server refuses the write for one
// of them, the others are granted, and released, alone, and nothing stays in a transaction.
func TestARefusedWriteOfABatchLeavesTheOthersGranted(t *testing.T) {
	inBothForms(t, func(t *testing.T, s *scratch, packs bool) {
		l := s.locker(setup{packs: packs, max: 2, ttl: time.Hour}) // so that no connection is closed, with what it has
		all := requests(3, request)
		l.rowsOf(all)
		held := l.taken(t, "held", 3)
		dbtest.Exec(t, s.db, "ALTER TABLE "+s.table.String()+" ADD CONSTRAINT not_this_one CHECK (name <> 'k1' OR owner IS NULL)")
		opened := l.tap.Opened()
		e := l.batchAll(t, func() {}, all, held, false)
		if l.tap.Opened() != opened {
			t.Error("the connection was given up")
		}
		for i, a := range e.asked {
			if i == 1 {
				if a.err == nil || !strings.Contains(a.err.Error(), "not_this_one") {
					t.Errorf("what is refused ends with %v", a.err)
				}
			} else {
				dbtest.OK(t, a.err)
				if !s.row(all[i].Key).live {
					t.Errorf("%s is not granted", all[i].Key)
				}
				dbtest.OK(t, a.lease.Release())
			}
			if s.wakeUps(all[i].Key) != 0 {
				t.Errorf("the wake-up lock of %s is left", all[i].Key)
			}
		}
		for i, err := range e.released {
			dbtest.OK(t, err)
			if key := held[i].lease.key; s.row(key).live || s.wakeUps(key) != 0 {
				t.Errorf("%s is not released", key)
			}
		}

		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var arrive func()
		var sent func() []string
		got := l.together(func() { arrive, sent = l.tap.Stall("INSERT"), l.tap.Texts() }, ctx, all...)
		dbtest.Soon(t, "it is sent", func() bool { return count(sent(), "INSERT") > 0 })
		cancel()
		refused(t, got, context.Canceled)
		arrive()
		for _, r := range all {
			dbtest.Soon(t, "nothing is left of "+r.Key, func() bool { return s.wakeUps(r.Key) == 0 })
		}
	})
}

// TestAFullConnectionTakesNoRequestsAlong: one that may carry no more wake-up locks.
func TestAFullConnectionTakesNoRequestsAlong(t *testing.T) {
	l, lc := new(Locker), &lockConn{wakeUps: make(map[string]*Grant)}
	for i := range maxWakeUps {
		l.takes.Join(new(take))
		if got := len(l.takesFor(lc)); got != 1 {
			t.Fatalf("with %d wake-up locks it takes %d along", i, got)
		}
		lc.wakeUps[fmt.Sprint(i)] = new(Grant)
	}
	l.takes.Join(new(take))
	dbtest.Equal(t, "it takes %d along", len(l.takesFor(lc)), 0)
}

// TestABatchChangesARowOnce, also where a caller that has gone has left its release behind.
func TestABatchChangesARowOnce(t *testing.T) {
	ask := func(key string) *take { return &take{attempt: &attempt{r: Request{Key: key}}} }
	leave := func(key string, token uint64) *leaving { return &leaving{g: &Grant{key: key, token: token}} }
	takes := []*take{ask("over"), ask("live")}
	leaves := []*leaving{leave("over", 7), leave("live", 3), leave("live", 3)}
	granted, held, err := decide(takes, leaves, [][]string{{"over", "7", "1", "0", rowOurs}, {"live", "3", "1", "1000", "0"}})
	dbtest.OK(t, err)
	if len(granted) != 1 || granted[0] != takes[0] || len(held) != 1 || held[0] != leaves[1] {
		t.Errorf("%d are granted, and %d released", len(granted), len(held))
	}
	if !leaves[0].alone || leaves[1].alone || !leaves[2].alone || takes[0].alone || takes[1].alone {
		t.Errorf("alone are %v, %v, %v", leaves[0].alone, leaves[1].alone, leaves[2].alone)
	}
}

// TestACallerThatWaitsNoLongerTakesItsReleaseOutOfTheBatch: the next one goes without it.
func TestACallerThatWaitsNoLongerTakesItsReleaseOutOfTheBatch(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		lease := l.taken(t, "held", 2)[0].lease
		lc := lease.conn
		l.turnOf(lc)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			if _, asked, err := l.releaseOnce(ctx, lease, false); asked || err == nil {
				t.Errorf("asked: %v; %v", asked, err)
			}
		}()
		dbtest.Soon(t, "it waits", func() bool { return lc.releases.Len() == 1 })
		cancel()
		<-done
		if lc.releases.Len() > 0 {
			t.Error("it is left behind")
		}
		l.giveBack(lc)
		dbtest.OK(t, lease.Err())
		dbtest.OK(t, lease.Release())
	})
}

func TestWhatIsGrantedDuringACloseIsGivenBack(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, late := range []bool{false, true} {
			l := s.locker(setup{max: 2})
			all := requests(3, func(key string) Request { return request(fmt.Sprint(late, key)) })
			l.rowsOf(all)
			closed := make(chan struct{})
			var got []*asked
			var arrive func()
			got = l.together(func() { arrive = l.tap.Stall("COMMIT") }, dbtest.Limited(t), all...)
			dbtest.Soon(t, "they are granted", func() bool { return s.row(all[2].Key).token == 2 })
			go func() {
				defer close(closed)
				l.Close()
			}()
			<-l.running.Ctx.Done()
			if !late {
				arrive()
			}
			refused(t, got, lockerr.ErrClosed)
			arrive()
			<-closed
			for _, r := range all {
				if row := s.row(r.Key); row.live || s.wakeUps(r.Key) != 0 {
					t.Errorf("it is left: %+v", row)
				}
			}
		}
	})
}

// TestABatchLocksOnlyTheRowsItNeeds, also where there are few in the table, and the server
// makes the same names of named locks.
func TestABatchLocksOnlyTheRowsItNeeds(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		const odd = "Ä\x00'\\"
		count := "SELECT COUNT(*) FROM " + s.table.String()
		for _, rows := range []int{4, 40, 400} {
			all := requests(rows, func(key string) Request { return request(odd + key) })
			for _, r := range all {
				dbtest.Exec(t, s.db, "INSERT IGNORE INTO "+s.table.String()+" (namespace, name) VALUES (?, ?)", s.Name, r.Key)
			}
			var takes []*take
			for _, r := range all[:2] {
				takes = append(takes, &take{attempt: &attempt{r: r}})
			}
			leaves := []*leaving{{g: &Grant{key: all[3].Key}}}
			s.onConn(func(conn driver.Conn) {
				ctx := dbtest.Limited(t)
				_, err := server.Change(ctx, conn, "START TRANSACTION")
				dbtest.OK(t, err)
				looked, err := server.Query(ctx, conn, l.lookSQL(takes, leaves))
				dbtest.OK(t, err)
				there := dbtest.Column[int](t, s.db, count)[0]
				free := len(dbtest.Column[string](t, s.db, "SELECT name FROM "+s.table.String()+" FOR UPDATE SKIP LOCKED"))
				if len(looked) != 3 || there-free != 3 {
					t.Errorf("of %d rows it looks at %d, and locks %d", there, len(looked), there-free)
				}
				_, err = server.Change(ctx, conn, "ROLLBACK")
				dbtest.OK(t, err)
			})
		}
		name := "CAST(" + schema.Literal(odd) + " AS BINARY)"
		dbtest.Equal(t, "the wake-up lock is %s", dbtest.Column[string](t, s.db, "SELECT "+lockname.SQLOfWakeUp(s.Name, name))[0], lockname.OfWakeUp(s.Name, odd))
	})
}
