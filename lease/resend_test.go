package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestConnectionBreaksAtAcquire: a request whose connection breaks before the answer is
// sent again, and what it may have been granted the first time is given back.
func TestConnectionBreaksAtAcquire(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			l := s.locker(setup{})
			dbtest.OK(t, l.acquire(request("k")).Release())
			before := s.row("k").token
			lease := s.broken(l, "INSERT", waiting("k", wait), func() bool { return s.row("k").token == before+1 })
			if lease == nil {
				return
			}
			if got := lease.Token(); got != before+2 {
				t.Errorf("with a wait of %v the token is %d after %d", wait, got, before)
			}
			dbtest.OK(t, lease.Err())
			dbtest.OK(t, lease.Release())
			if s.row("k").live {
				t.Error("it is left behind")
			}
			l.close()
		}
	})
}

// TestConnectionBreaksAtHandOver is the same for one that takes over from another caller
// of its process.
func TestConnectionBreaksAtHandOver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		before := first.Token()
		go func() {
			l.inLine("k", 1)
			if err := first.Release(); err != nil {
				t.Error(err)
			}
		}()
		if lease := s.broken(l, "UPDATE", waiting("k", 20*time.Second), func() bool { return s.row("k").token > before }); lease != nil {
			dbtest.OK(t, lease.Err())
			dbtest.OK(t, lease.Release())
			if s.row("k").live {
				t.Error("it is left behind")
			}
		}
	})
}

// broken acquires a lease while the connections break whose statement has done its work.
func (s *scratch) broken(l *locker, statement string, r Request, done func() bool) *Lease {
	s.T.Helper()
	arrive := l.tap.Stall(statement)
	defer arrive()
	type result struct {
		lease *Lease
		err   error
	}
	got := make(chan result, 1)
	go func() {
		lease, err := l.Acquire(dbtest.Limited(s.T), r)
		got <- result{lease, err}
	}()
	dbtest.Soon(s.T, "the server has granted it", func() bool {
		select {
		case g := <-got:
			s.T.Fatalf("with a wait of %v it ended before: %v", r.Wait, g.err)
		default:
		}
		return done()
	})
	l.tap.Break()
	g := <-got
	if g.err != nil {
		s.T.Errorf("%v: %v", r.Wait, g.err)
	}
	return g.lease
}

// TestConnectionsBreakForEver: it ends with a sentinel, and what may have been granted is
// given back once the server can be reached.
func TestConnectionsBreakForEver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		before := s.row("k").token
		arrive := l.tap.Stall("INSERT")
		defer arrive()
		failed := make(chan error, 1)
		go func() {
			_, err := l.Acquire(dbtest.Limited(t), request("k"))
			failed <- err
		}()
		dbtest.Soon(t, "the server has granted it", func() bool { return s.row("k").token == before+1 })
		l.tap.Cut()
		var e *lockerr.Error
		if err := <-failed; !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Key != "k" {
			t.Errorf("it ended with %v", err)
		}
		l.tap.Mend()
		dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live })
	})
}
