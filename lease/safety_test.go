package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestLateFree: a statement arrives late that frees what an unanswered statement was
// granted. It does not free a later grant of the same process.
func TestLateFree(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		l.tap.Stall("INSERT")
		arrive := l.tap.Delay("UPDATE " + s.table.String() + " SET owner = ")
		failed := make(chan error, 1)
		go func() {
			_, err := l.Acquire(dbtest.Limited(t), request("k"))
			failed <- err
		}()
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
		if _, err := other.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("another process beside the holder: %v", err)
		}
		dbtest.OK(t, later.Release())
	})
}

// TestHandOverTellsOfALoss: a holder whose lease was taken by force is told by
// Release, whether somebody of its process waits or not.
func TestHandOverTellsOfALoss(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, steal := range map[string]func(){
			"by another":  func() { s.steal("k") },
			"and is free": func() { s.set("k", "owner = NULL, token = token + 1") },
			"the expiry":  func() { s.set("k", "expires = UTC_TIMESTAMP(6)") },
			"row removed": func() { s.set("k", "name = x'6b6b'") },
		} {
			l := s.locker(setup{})
			first := l.acquire(request("k"))
			successor := make(chan error, 1)
			go func() {
				lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
				if err == nil {
					err = lease.Release()
				}
				successor <- err
			}()
			l.inLine("k", 1)
			steal()
			if err := first.Release(); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%s: released with %v", name, err)
			}
			if name == "by another" { // else it is free, and the successor may have it by now
				s.set("k", "owner = NULL")
			}
			dbtest.OK(t, <-successor)

			// One that was not lost is handed over without an error.
			first = l.acquire(request("k"))
			go func() {
				lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
				if err == nil {
					err = lease.Release()
				}
				successor <- err
			}()
			l.inLine("k", 1)
			dbtest.OK(t, first.Release())
			dbtest.OK(t, <-successor)
		}
	})
}
