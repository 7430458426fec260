package lease

import (
	"cmp"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestHandOver: callers of one process take over from each other, each with a
// new token, in one statement; a waiter of another process has its turn.
func TestHandOver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for round := 1; !s.handedOver(l); round++ { // on a busy machine a successor may be waited for for too long
			if round == 20 {
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
	const callers = 2*handOvers + 3
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
	l.inLine("k", callers)
	since := l.tap.Since()
	dbtest.OK(t, first.Release())
	for want := first.Token() + 1; want <= first.Token()+callers; want++ {
		if got := <-tokens; got != want {
			t.Errorf("the token is %d, want %d", got, want)
		}
	}
	dbtest.Soon(t, "the last gives it back", func() bool { return !s.row("k").live })
	var texts []string
	for _, c := range since() {
		texts = append(texts, cmp.Or(c.Of, c.Text))
	}
	takes, inherits, releases := count(texts, "INSERT INTO"), count(texts, "UPDATE")-count(texts, "UPDATE "+s.table.String()+" SET owner"), count(texts, "UPDATE "+s.table.String()+" SET owner")
	t.Logf("%d took over, %d took it anew, %d released it", inherits, takes, releases)
	return inherits == callers-2 && takes == 2 && releases == 3
}

// TestHandOverOfALostLease: who takes over what is not ours any more asks anew.
func TestHandOverOfALostLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		got := make(chan *Lease, 1)
		go func() {
			lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err != nil {
				t.Error(err)
			}
			got <- lease
		}()
		l.inLine("k", 1)
		s.steal("k")
		if err := first.Release(); !errors.Is(err, lockerr.ErrLost) { // the successor has asked
			t.Errorf("released what was stolen: %v", err)
		}
		select {
		case lease := <-got:
			t.Fatalf("granted beside the thief: %v", lease)
		case <-time.After(200 * time.Millisecond):
		}
		s.set("k", "owner = NULL")
		lease := <-got
		if lease.Token() != 3 {
			t.Errorf("the token is %d", lease.Token())
		}

		// One that gives up in the moment of the hand-over leaves nothing.
		for range 100 {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			gone := make(chan error, 1)
			go func() {
				next, err := l.Acquire(ctx, waiting("k", 20*time.Second))
				if err == nil {
					err = next.Release()
				}
				gone <- err
			}()
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
