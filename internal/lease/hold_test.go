package lease

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// told is a Request.Lost that remembers.
type losses struct {
	times atomic.Int32
	err   chan error
	at    time.Time
}

func (r *Request) tell() *losses {
	n := &losses{err: make(chan error, 10)}
	r.Lost = func(err error) {
		n.times.Add(1)
		n.at = time.Now()
		n.err <- err
	}
	return n
}

func (l *losses) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-l.err:
		if !errors.Is(err, lockerr.ErrLost) && !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("the holder is told %v", err)
		}
		return err
	case <-time.After(dbtest.Patience):
		t.Fatal("the holder is not told")
		return nil
	}
}

// TestCloseGivesBackWhatARenewalHasLocked that is under way, and leaves alone what stays locked.
func TestCloseGivesBackWhatARenewalHasLocked(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, key := range []string{"free", "renewed", "locked"} {
			l.acquire(request(key))
		}
		renewal := s.lockRow("renewed")
		s.lockRow("locked")
		l.running.Add(1)
		sent, closed := l.tap.Texts(), make(chan struct{})
		go func() {
			l.Close()
			close(closed)
		}()
		dbtest.Soon(t, "what is free is given back", func() bool { return !s.row("free").live })
		dbtest.OK(t, renewal.Rollback())
		l.running.Done()
		<-closed
		if s.row("renewed").live || !s.row("locked").live || count(sent(), "INSERT") < 2 {
			t.Errorf("renewed %+v, locked %+v, by %q", s.row("renewed"), s.row("locked"), heads(sent()))
		}
	})
}

func TestALeaseIsKeptForItsMinHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		r := request("k")
		r.MinHold = 20 * time.Second
		lease := l.acquire(r)
		renewal := l.changeSQL([]*Grant{lease}, func(g *Grant) time.Duration { return g.ttl }, lasted, extend, "")
		dbtest.OK(t, lease.Release())
		_, err := s.db.Exec(renewal) // one that comes late
		dbtest.OK(t, err)
		row := s.row("k")
		if !row.live || row.left > r.MinHold {
			t.Errorf("after the release the row is %+v", row)
		}
		if s.wakeUps("k") != 0 {
			t.Error("the wake-up lock was kept")
		}
		err = other.refused(request("k"))
		var e *lockerr.Error
		if !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != "host:1:test" {
			t.Error(err)
		}

		r.Key, r.MinHold = "j", 2*time.Second
		begin := time.Now()
		dbtest.OK(t, l.acquire(r).Release())
		next := other.acquire(waiting("j", 25*time.Second))
		if took := time.Since(begin); took < r.MinHold*9/10 || next.Token() != 2 {
			t.Errorf("the next has token %d after %v", next.Token(), took)
		}
	})
}

func TestALeaseEndsAfterItsMaxHold(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, ttl := range []time.Duration{2 * time.Second, 30 * time.Second} {
			r := waiting(ttl.String(), 20*time.Second)
			r.TTL, r.MaxHold = ttl, 2500*time.Millisecond
			var n *losses
			var lease *Grant
			var err error
			var early, over time.Duration
			stoodStill := func() bool { return strings.Contains(err.Error(), "not renewed in time") || over > time.Second }
			for try := 0; try < 20 && (err == nil || stoodStill()); try++ {
				n = r.tell()
				lease = l.acquire(r)
				if left := s.row(r.Key).left; left > min(ttl, r.MaxHold) {
					t.Errorf("TTL %v: the row runs for %v", ttl, left)
				}
				err = n.wait(t)
				before := time.Now()
				left := s.row(r.Key).left
				early, over = lease.until.Sub(lease.deadline), before.Add(left).Sub(lease.until)
			}
			t.Logf("TTL %v: over %v before its end, on the server it ends %v after that", ttl, early, over)
			if n.at.Before(lease.deadline) || early < 20*time.Millisecond || early > 500*time.Millisecond || over > time.Second {
				t.Errorf("TTL %v: over %v before its end, on the server it ends %v after that", ttl, early, over)
			}
			if !strings.Contains(err.Error(), "MaxHold") || !errors.Is(lease.Err(), lockerr.ErrLost) {
				t.Errorf("TTL %v: told %v", ttl, err)
			}
		}
	})
}

func TestALapsedLeaseIsNotRenewed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := waiting("k", 20*time.Second)
		r.TTL = 4 * time.Second
		n := r.tell()
		lease := l.acquire(r)
		lease.Lapse()
		if err := lease.Err(); err != nil {
			t.Error(err)
		}
		if err := n.wait(t); !strings.Contains(err.Error(), "renewals were ended") {
			t.Error(err)
		}
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())

		r.TTL = 30 * time.Second
		lease = l.acquire(r)
		lease.Lapse()
		dbtest.OK(t, lease.Release())
		if s.row("k").live {
			t.Error("Release does not give back what has lapsed")
		}
	})
}

func TestCloseGivesBackAndTellsHolders(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		r := request("mine")
		n := r.tell()
		mine := l.acquire(r)
		r = request("left")
		r.MinHold = time.Hour
		l.acquire(r)
		lapsed := l.acquire(request("lapsed"))
		lapsed.Lapse()
		theirs := other.acquire(request("theirs"))
		waiters := []<-chan error{l.pass(dbtest.Limited(t), waiting("theirs", time.Minute)), l.pass(dbtest.Limited(t), waiting("theirs", time.Minute))}
		dbtest.Soon(t, "one waits on the server", func() bool { return len(s.inWakeUp()) == 1 })
		begin := time.Now()
		l.Close()
		l.Close()
		if took := time.Since(begin); took > 15*time.Second { // they wait for longer
			t.Errorf("Close takes %v", took)
		}
		for _, ended := range waiters {
			dbtest.Want(t, <-ended, lockerr.ErrClosed)
		}
		if err := n.wait(t); !errors.Is(err, lockerr.ErrClosed) || !errors.Is(mine.Err(), lockerr.ErrClosed) {
			t.Errorf("the holder is told %v, Err is %v", err, mine.Err())
		}
		dbtest.OK(t, mine.Release())
		if s.row("mine").live || s.row("lapsed").live || !s.row("left").live || !s.row("theirs").live {
			t.Errorf("the rows are %+v, %+v, %+v, %+v", s.row("mine"), s.row("lapsed"), s.row("left"), s.row("theirs"))
		}
		dbtest.Is(t, "after Close", dbtest.Err(l.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrClosed)
		dbtest.Is(t, "after Close", dbtest.Err(l.Await(dbtest.Limited(t), "k", time.Now(), time.Second)), lockerr.ErrClosed)
		dbtest.Soon(t, "nothing is left on the server", func() bool { return len(s.inWakeUp()) == 0 && s.wakeUps("mine") == 0 })
		dbtest.OK(t, theirs.Release())
	})
}
