package lease

import (
	"cmp"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestCallersOfOneProcessTakeOverFromEachOther, each with a new token, in one statement; a
// waiter of another process has its turn.
func TestCallersOfOneProcessTakeOverFromEachOther(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for began := time.Now(); !s.handedOver(l); { // on a busy machine the wait for a next caller may be too long
			if time.Since(began) > dbtest.Patience {
				t.Fatal("not handed over as it should be")
			}
		}

		// Another process is not kept waiting for ever.
		other := s.locker(setup{})
		stop, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var turns [2]int
		done := make(chan struct{}, 8)
		for i := range 8 {
			go func() {
				defer func() { done <- struct{}{} }()
				who := [...]*locker{l, other}[i%2]
				for stop.Err() == nil {
					lease, err := who.Acquire(stop, waiting("k", 20*time.Second))
					if err != nil {
						continue
					}
					turns[i%2]++ // under the lock
					if min(turns[0], turns[1]) == 20 {
						cancel()
					}
					if err := lease.Release(); err != nil {
						t.Error(err)
					}
				}
			}()
		}
		for range 8 {
			<-done
		}
		if min(turns[0], turns[1]) < 20 {
			t.Errorf("the turns were %d", turns)
		}
		t.Logf("the turns were %d", turns)
	})
}

// handedOver has callers of one process take over from each other, and reports whether
// they did so in as many statements as it takes.
func (s *scratch) handedOver(l *locker) bool {
	t := s.T
	const callers = 2*handoffs + 3
	first := l.acquire(waiting("k", 20*time.Second))
	tokens := make(chan uint64, callers)
	for range callers {
		go func() {
			lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err != nil {
				t.Error(err)
				tokens <- 0
				return
			}
			if r := s.row("k"); !r.live || r.token != lease.Token() {
				t.Errorf("the row of token %d is %+v", lease.Token(), r)
			}
			tokens <- lease.Token()
			if err := lease.Release(); err != nil {
				t.Error(err)
			}
		}()
	}
	l.inQueue("k", callers)
	since := l.tap.Since()
	dbtest.OK(t, first.Release())
	for want := first.Token() + 1; want <= first.Token()+callers; want++ {
		dbtest.Equal(t, "the token is %d", <-tokens, want)
	}
	dbtest.Soon(t, "the last gives it back", func() bool { return !s.row("k").live })
	var texts []string
	for _, c := range since() {
		texts = append(texts, cmp.Or(c.Of, c.Text))
	}
	takes, handoffs, releases := count(texts, "INSERT INTO"), count(texts, "UPDATE")-count(texts, "UPDATE "+s.table.String()+" SET owner"), count(texts, "UPDATE "+s.table.String()+" SET owner")
	t.Logf("%d took over, %d took it anew, %d released it", handoffs, takes, releases)
	return handoffs == callers-2 && takes == 2 && releases == 3
}

// TestWhoTakesOverALostLeaseAsksAnew: it is not ours any more.
func TestWhoTakesOverALostLeaseAsksAnew(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		got := make(chan *Grant, 1)
		go func() {
			lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err != nil {
				t.Error(err)
			}
			got <- lease
		}()
		l.inQueue("k", 1)
		s.steal("k")
		if err := first.Release(); !errors.Is(err, lockerr.ErrLost) { // the next caller has asked
			t.Errorf("released what was stolen: %v", err)
		}
		select {
		case lease := <-got:
			t.Fatalf("granted beside the thief: %v", lease)
		case <-time.After(200 * time.Millisecond):
		}
		s.set("k", "owner = NULL")
		lease := <-got
		dbtest.Equal(t, "the token is %d", lease.Token(), 3)

		// One that gives up in the moment of the handoff leaves nothing.
		for range dbtest.Long(20, 100) {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			gone := l.pass(ctx, waiting("k", 20*time.Second))
			time.Sleep(time.Millisecond)
			go cancel()
			dbtest.OK(t, lease.Release())
			if err := <-gone; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			lease = l.acquire(waiting("k", 20*time.Second))
			cancel()
		}
		dbtest.OK(t, lease.Release())
		dbtest.Soon(t, "it is free", func() bool { return !s.row("k").live })
	})
}

// TestAHandoffBehindARowLockEndsWithTheCallersWait: a caller to whom a lease is handed over while somebody has locked
// its row waits no longer than it wants to, and hears that its wait is over.
func TestAHandoffBehindARowLockEndsWithTheCallersWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, wait := range []time.Duration{
			500 * time.Millisecond, // less than the server waits for the row
			1500 * time.Millisecond,
		} {
			l := s.locker(setup{})
			first := l.acquire(request("k"))
			began := time.Now()
			next := l.pass(dbtest.Limited(t), waiting("k", wait))
			dbtest.Soon(t, "it is in the queue, or has been", func() bool { return l.cfg.Queue.Waiting("k") == 1 || len(next) > 0 })
			tx := s.lockRow("k")
			given := dbtest.Go(first.Release)
			if err := <-next; !errors.Is(err, lockerr.ErrTimeout) || server.Number(err) != 0 {
				t.Errorf("a next caller that waits for %v got %v", wait, err)
			}
			if took := time.Since(began); took > 15*time.Second { // the lease would have lasted for longer
				t.Errorf("it waited %v", took)
			}
			dbtest.Soon(t, "the server has given up, too", func() bool {
				return dbtest.Column[int](t, s.db, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND <> 'Sleep' AND INFO LIKE ?", "%"+s.Name+"%")[0] == 1
			})
			dbtest.OK(t, tx.Rollback())
			<-given
			dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
		}
	})
}

// TestALateFreeDoesNotFreeALaterGrant of the same process: it frees what an unanswered
// statement was granted.
func TestALateFreeDoesNotFreeALaterGrant(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		l.tap.Stall("INSERT")
		arrive := l.tap.Delay("UPDATE " + s.table.String() + " SET owner = ")
		failed := l.asking(dbtest.Limited(t), request("k"))
		dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == 2 })
		l.tap.Break() // the answer is lost
		if err := <-failed; err == nil {
			t.Fatal("an unanswered statement has granted the lease")
		}
		later := l.acquire(waiting("k", 25*time.Second)) // once the lease was freed, at the second try
		if later.Token() != 3 {
			t.Fatalf("the token is %d", later.Token())
		}
		arrive()
		if r := s.row("k"); !r.live || r.token != 3 {
			t.Errorf("the later grant is freed: the row is %+v", r)
		}
		dbtest.Is(t, "another process beside the holder", dbtest.Err(other.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrLocked)
		dbtest.OK(t, later.Release())
	})
}

// TestHandoffTellsOfALoss: a holder whose lease was taken by force is told by
// Release, whether somebody of its process waits or not.
func TestHandoffTellsOfALoss(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, steal := range map[string]func(){
			"by another":  func() { s.steal("k") },
			"and is free": func() { s.set("k", "owner = NULL, token = token + 1") },
			"the expiry":  func() { s.set("k", "expires = UTC_TIMESTAMP(6)") },
			"row removed": func() { s.set("k", "name = x'6b6b'") },
			"not lost":    func() {},
		} {
			l := s.locker(setup{})
			first := l.acquire(request("k"))
			next := l.pass(dbtest.Limited(t), waiting("k", 20*time.Second))
			l.inQueue("k", 1)
			steal()
			if err := first.Release(); (err != nil) != (name != "not lost") || err != nil && !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%s: released with %v", name, err)
			}
			if name == "by another" { // else it is free, and the next caller may have it by now
				s.set("k", "owner = NULL")
			}
			dbtest.OK(t, <-next)
		}
	})
}
