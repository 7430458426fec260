package lease

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// refuse has the server answer each UPDATE of a row of the lock table with an error of that number,
// until the function is called that it returns.
func (s *scratch) refuse(number int) (mend func()) {
	s.T.Helper()
	dbtest.Exec(s.T, s.db, fmt.Sprintf("CREATE TRIGGER refuses BEFORE UPDATE ON %s FOR EACH ROW"+
		" SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = %d, MESSAGE_TEXT = 'refused by the test'", s.table, number))
	return func() {
		s.T.Helper()
		dbtest.Exec(s.T, s.db, "DROP TRIGGER refuses")
	}
}

// becomesFree fails unless another process gets the key long before its lease would expire, and
// nothing is left of its wake-up lock.
func (s *scratch) becomesFree(what, key string) {
	s.T.Helper()
	other := s.locker(setup{})
	defer other.close()
	lease, err := other.Acquire(dbtest.Limited(s.T), waiting(key, 15*time.Second))
	if err != nil {
		s.T.Errorf("%s: %v", what, err)
		return
	}
	dbtest.OK(s.T, lease.Release())
	dbtest.Soon(s.T, what+": no wake-up lock is left", func() bool { return s.wakeUps(key) == 0 })
}

// givenBack are the ways in which a lease is given back. Each returns a function that does it, and
// returns what the giver is told.
var givenBack = map[string]func(l *locker, key string) (give func() error){
	"alone": func(l *locker, key string) func() error { return l.acquire(hourly(key)).Release },
	"with a least time": func(l *locker, key string) func() error {
		r := hourly(key)
		r.MinHold = time.Millisecond
		return l.acquire(r).Release
	},
	"with others": func(l *locker, key string) func() error {
		all := requests(2, func(name string) Request { return hourly(key + name[1:]) })
		all[0].Key = key
		l.rowsOf(all)
		held := l.together(func() {}, dbtest.Limited(l.s.T), all...)
		for _, a := range held {
			<-a.done
			dbtest.OK(l.s.T, a.err)
		}
		return func() error {
			lc := held[0].lease.conn
			l.turnOf(lc)
			var told []error
			wait := l.releaseAllOn(lc, held, func(_ int, err error) { told = append(told, err) })
			l.giveBack(lc)
			wait()
			return errors.Join(told...)
		}
	},
	"a slot": func(l *locker, key string) func() error {
		slot, err := l.acquireSlot(dbtest.Limited(l.s.T), strategy.Request{
			Resources: []strategy.Resource{{Lock: hint.Lock{Key: key, Kind: hint.Kind{Slots: 1, TTL: time.Hour}}, Row: key}},
			Lost:      func() {},
		})
		dbtest.OK(l.s.T, err)
		return slot.Release
	},
	"by Close": func(l *locker, key string) func() error {
		l.acquire(hourly(key))
		return func() error {
			l.close()
			return nil
		}
	},
}

// hourly is a request for a lease that nobody waits out.
func hourly(key string) Request {
	r := request(key)
	r.TTL = time.Hour
	return r
}

// TestReleaseIsRepeatedAfterAnyError: whatever the server answers to a release for a moment, and
// in whichever way the lease is given back, the key is free long before the lease would expire.
func TestReleaseIsRepeatedAfterAnyError(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for way, take := range givenBack {
			numbers := []int{1290}
			if way == "alone" {
				numbers = []int{1317, 1290, 3854, 1205}
			}
			for _, number := range numbers {
				what := fmt.Sprintf("%s, error %d", way, number)
				key := fmt.Sprintf("%s%d", way[:1], number)
				l := s.locker(setup{max: 2})
				give := take(l, key)
				mend := s.refuse(number)
				told, tried, began := make(chan error, 1), l.tap.Since(), time.Now()
				go func() { told <- give() }()
				dbtest.Soon(t, what+": it is tried", func() bool { return len(tried()) > 0 || len(told) > 0 })
				time.Sleep(100 * time.Millisecond) // a server is read-only for longer
				mend()
				if err := <-told; err != nil && time.Since(began) < handoffWait { // it waits no longer, and goes on in the background
					t.Errorf("%s: the giver is told %v", what, err)
				}
				s.becomesFree(what, key)
				l.close()
			}
		}
	})
}

// TestReleaseTellsThatTheKeyMayStayTaken: if the server refuses a release for longer than its
// caller waits, the caller hears of it, and the key is free soon after the server has come round,
// also where the Locker is closed meanwhile.
func TestReleaseTellsThatTheKeyMayStayTaken(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, closes := range []bool{false, true} {
			l, key := s.locker(setup{}), fmt.Sprint("k", closes)
			lease := l.acquire(hourly(key))
			mend := s.refuse(1290)
			err := lease.Release()
			dbtest.Says(t, err, "release", "may stay taken for up to", "refused by the test")
			if errors.Is(err, lockerr.ErrLost) || errors.Is(err, lockerr.ErrLocked) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("it is told %v", err)
			}
			if !closes {
				mend()
				s.becomesFree(key, key)
				continue
			}
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				l.Close()
			}()
			<-l.running.Ctx.Done()
			mend()
			<-closed
			s.becomesFree(key, key)
		}
	})
}

// TestReleaseOutlivesClose: a release that its caller has waited for in vain is still sent if the
// Locker is closed meanwhile, for as long as a caller would wait.
func TestReleaseOutlivesClose(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		lease := l.acquire(request("k"))
		lc := lease.conn
		l.turnOf(lc)
		err := lease.Release()
		dbtest.Says(t, err, "may stay taken for up to", "has not answered")
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("as if a context of the caller's had ended: %v", err)
		}
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			l.Close()
		}()
		<-l.running.Ctx.Done()
		time.Sleep(100 * time.Millisecond) // so that who ends with it has ended
		l.giveBack(lc)
		<-closed
		if r := s.row("k"); r.live {
			t.Errorf("it is left: %+v", r)
		}
	})
}
