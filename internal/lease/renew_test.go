package lease

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestRenewalOfABusyRow: a lease whose row was locked for long when it was renewed last is
// renewed in one statement the next time.
func TestRenewalOfABusyRow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL = 9 * time.Second
		lease := l.acquire(r)
		skipped := 1
		for round := 0; round < 10 && skipped > 0; round++ { // on a busy machine one takes longer than the server lets a statement wait, and is begun again
			moment, err := s.db.Begin()
			dbtest.OK(t, err)
			defer moment.Rollback()
			_, err = moment.Exec("SELECT 1 FROM " + s.table.String() + " WHERE " + l.row("", "k") + " LOCK IN SHARE MODE")
			dbtest.OK(t, err)
			since := l.tap.Texts()
			l.renewNow(lease)
			dbtest.Soon(t, "the renewal waits", func() bool {
				return len(s.threads("INFO LIKE 'INSERT INTO %' AND INFO NOT LIKE '%SKIP LOCKED%' AND INFO LIKE '%STRAIGHT_JOIN%'")) > 0
			})
			time.Sleep(r.TTL / 10) // long enough to matter
			skipped = 0
			for _, text := range since() {
				if strings.Contains(text, "SKIP LOCKED") {
					skipped++
				}
			}
			before := lease.Expiry()
			dbtest.OK(t, moment.Commit())
			dbtest.Soon(t, "it is renewed", func() bool { return lease.Expiry().After(before) })
		}
		if skipped > 0 {
			t.Errorf("%d statements before the one that waits", skipped)
		}
		dbtest.OK(t, lease.Release())
	})
}

// TestGrantsDoNotLookAtAllLeases: a grant has the leases looked at only where it is to be
// renewed before they are looked at anyway.
func TestGrantsDoNotLookAtAllLeases(t *testing.T) {
	l := &Locker{leases: make(map[*Lease]struct{}), wake: make(chan struct{}, 1), renewing: true}
	grant := func(ttl time.Duration) (woken bool) {
		s := &Lease{l: l, ttl: ttl}
		l.mu.Lock()
		l.leases[s] = struct{}{}
		l.schedule(s, time.Now(), ttl)
		l.mu.Unlock()
		select {
		case <-l.wake:
			return true
		default:
			return false
		}
	}
	if _, _, next := l.due(time.Now()); next != time.Hour {
		t.Errorf("with no lease the next look is in %v", next)
	}
	if !grant(time.Minute) {
		t.Error("the first lease would not be renewed in time")
	}
	_, _, next := l.due(time.Now())
	looks := 0
	for range 1000 {
		if grant(2 * time.Minute) {
			looks++
		}
	}
	if looks > 0 {
		t.Errorf("%d of 1000 grants had all leases looked at", looks)
	}
	clear(l.leases)
	l.due(time.Now()) // a look that finds none, since they were released meanwhile
	if grant(2 * time.Minute) {
		t.Error("another grant has all leases looked at, although the look for the first is yet to come")
	}
	if !grant(time.Second) {
		t.Error("a shorter lease would not be renewed in time")
	}
	if _, _, sooner := l.due(time.Now()); sooner >= next {
		t.Errorf("the next look is in %v, with a shorter lease in %v", next, sooner)
	}
}

// TestRenewalAmongFences: transactions that commit under a lease without a pause, some
// always at the same time, do not keep it from being renewed.
func TestRenewalAmongFences(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		multi := s.info
		multi.Topology = "several writers"
		for _, test := range []struct {
			name  string
			info  server.Info
			max   int // connections for leases
			pause time.Duration
		}{
			{"no pause", s.info, 16, 0},
			{"pauses", s.info, 16, 10 * time.Millisecond},
			{"one connection", s.info, 1, time.Millisecond},
			{"fenced by writes", multi, 16, 0},
		} {
			t.Run(test.name, func(t *testing.T) {
				t.Parallel()
				l := s.locker(setup{info: &test.info, max: test.max})
				r := request(test.name)
				r.TTL = 7 * time.Second
				lease := l.acquire(r)
				other := request(test.name + ", another lease")
				other.TTL = r.TTL
				beside := l.acquire(other)
				var all sync.WaitGroup
				end := time.Now().Add(9 * time.Second)
				for range 8 {
					all.Go(func() {
						s.onConn(func(conn driver.Conn) {
							for time.Now().Before(end) {
								if err := lease.commit(conn, max(test.pause, time.Millisecond)); err != nil {
									t.Error(err)
									return
								}
								time.Sleep(test.pause)
							}
						})
					})
				}
				all.Wait()
				dbtest.OK(t, lease.Err())
				dbtest.OK(t, beside.Err())
				dbtest.OK(t, lease.Release())
				dbtest.OK(t, beside.Release())
			})
		}
	})
}

// commit is a transaction under the lease, which takes so long to commit.
func (s *Lease) commit(conn driver.Conn, takes time.Duration) error {
	err := server.Exec(context.Background(), conn, "START TRANSACTION")
	if err == nil {
		err = s.l.Fence(context.Background(), conn, []*Lease{s})
	}
	time.Sleep(takes)
	end := "COMMIT"
	if err != nil {
		end = "ROLLBACK"
	}
	if failed := server.Exec(context.Background(), conn, end); err == nil {
		err = failed
	}
	return err
}

// TestSilentHolder: a lease of a holder that stands still, or was cut off, goes to a waiter
// with its wake-up lock, so that the next one is woken; and without it if the connection
// that has it is another account's.
func TestSilentHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		user := "other_" + dbtest.Random()
		dbtest.Exec(t, s.db, "CREATE USER "+user)
		defer dbtest.Exec(t, s.db, "DROP USER "+user)
		dbtest.Exec(t, s.db, "GRANT ALL ON "+s.Name+".* TO "+user)
		l, other := s.locker(setup{}), s.locker(setup{user: user})
		dbtest.OK(t, l.acquire(request("k")).Release()) // makes the row
		dbtest.OK(t, other.acquire(request("j")).Release())
		if !s.followsSilent(l, "k", 10) {
			t.Error("the lease has not its wake-up lock")
		}
		if s.followsSilent(other, "j", 1) {
			t.Error("another account's connection was closed")
		}
	})
}

// followsSilent has l take the lease on key of a holder that stands still, and reports
// whether it has its wake-up lock then. A server that is slow has several tries.
func (s *scratch) followsSilent(l *locker, key string, tries int) (has bool) {
	s.T.Helper()
	wakeUp := lockname.OfWakeUp(s.Name, key)
	for ; tries > 0 && !has; tries-- {
		silent, err := s.db.Conn(dbtest.Limited(s.T))
		dbtest.OK(s.T, err)
		_, err = silent.ExecContext(dbtest.Limited(s.T), "DO GET_LOCK('"+wakeUp+"', 0)")
		dbtest.OK(s.T, err)
		s.set(key, "owner = 'silent#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 2 SECOND")
		lease := l.acquire(waiting(key, 25*time.Second))
		h := lease.conn
		dbtest.OK(s.T, h.c.AwaitTurn(dbtest.Limited(s.T)))
		rows, err := h.query(dbtest.Limited(s.T), "SELECT COALESCE(IS_USED_LOCK('"+wakeUp+"') = CONNECTION_ID(), 0)")
		h.c.EndTurn()
		dbtest.OK(s.T, err)
		has = rows[0][0] == "1"
		dbtest.OK(s.T, lease.Release())
		_, _ = silent.ExecContext(dbtest.Limited(s.T), "DO RELEASE_LOCK('"+wakeUp+"')") // it may be closed
		dbtest.OK(s.T, silent.Close())
	}
	return has
}

// TestBehindFrozenWaiter: a waiter that is woken and does nothing, as one whose host
// stands still, does not keep those behind it from a free lease for long.
func TestBehindFrozenWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		first := l.acquire(request("k"))
		frozen, err := s.db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer frozen.Close()
		wakeUp := lockname.OfWakeUp(s.Name, "k")
		var id, woken int
		dbtest.OK(t, frozen.QueryRowContext(dbtest.Limited(t), "SELECT CONNECTION_ID()").Scan(&id))
		rang := make(chan error, 1)
		go func() {
			rang <- frozen.QueryRowContext(dbtest.Limited(t), "SELECT GET_LOCK('"+wakeUp+"', 60)").Scan(&woken)
		}()
		waits := func(what string, n int) {
			dbtest.Soon(t, what, func() bool {
				var in int
				dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE 'User lock%' AND INFO LIKE '%"+wakeUp+"%'").Scan(&in))
				return in == n
			})
		}
		waits("the frozen one waits", 1)
		granted := make(chan time.Time, 1)
		go func() {
			lease, err := other.Acquire(dbtest.Limited(t), waiting("k", 25*time.Second))
			granted <- time.Now()
			if err != nil {
				t.Error(err)
				return
			}
			dbtest.OK(t, lease.Release())
		}()
		waits("the other waits behind it", 2)
		began := time.Now()
		dbtest.OK(t, first.Release())
		dbtest.OK(t, <-rang)
		if took := (<-granted).Sub(began); took > 15*time.Second { // it would wait for longer
			t.Errorf("the lease was free for %v", took)
		}
	})
}

// TestRenewalTells: a renewal writes since when the lease is held, and its TTL, into a table
// that has columns for that. In one that has none, as an older version has made it, it asks
// once.
func TestRenewalTells(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		told := func() (token, age, ttl, sinceRenewal sql.NullInt64) {
			t.Helper()
			dbtest.OK(t, s.db.QueryRow("SELECT renewed_token, TIMESTAMPDIFF(MICROSECOND, granted_at, UTC_TIMESTAMP(6)), ttl,"+
				" TIMESTAMPDIFF(MICROSECOND, expires, UTC_TIMESTAMP(6)) + ttl FROM "+s.table.String()+" WHERE name = 'k'").Scan(&token, &age, &ttl, &sinceRenewal))
			return token, age, ttl, sinceRenewal
		}
		renewed := func(l *locker, lease *Lease) {
			t.Helper()
			before := lease.Expiry()
			l.renewNow(lease)
			dbtest.Soon(t, "it is renewed", func() bool { return lease.Expiry() != before })
		}
		l := s.locker(setup{})
		asked := time.Now()
		lease := l.acquire(request("k"))
		granted := time.Now()
		time.Sleep(100 * time.Millisecond)
		from := time.Now()
		renewed(l, lease)
		token, age, ttl, sinceRenewal := told()
		atLeast, atMost := from.Sub(granted), time.Since(asked) // it says what it was when it was sent
		switch got := time.Duration(age.Int64) * time.Microsecond; {
		case token.Int64 != int64(lease.token) || ttl.Int64 != (30*time.Second).Microseconds():
			t.Errorf("the token is %v, the TTL %v", token, ttl)
		case got > atMost || got < atLeast:
			t.Errorf("it is held for %v, want %v to %v", got, atLeast, atMost)
		case sinceRenewal.Int64 < 0 || sinceRenewal.Int64 > time.Since(from).Microseconds():
			t.Errorf("%v since the renewal", sinceRenewal)
		}
		dbtest.OK(t, lease.Release())

		r := request("k")
		r.MaxHold = 20 * time.Second // renewed for less than its TTL, and then never again
		lease = l.acquire(r)
		l.renewNow(lease)
		dbtest.Soon(t, "it is renewed", func() bool { token, _, _, _ = told(); return token.Int64 == int64(lease.token) })
		if _, age, ttl, _ = told(); !age.Valid || ttl.Valid {
			t.Errorf("before its end: the age is %v, the TTL %v", age, ttl)
		}
		dbtest.OK(t, lease.Release())

		_, err := s.db.Exec("ALTER TABLE " + s.table.String() + " DROP COLUMN granted_at, DROP COLUMN ttl, DROP COLUMN renewed_token")
		dbtest.OK(t, err)
		l = s.locker(setup{})
		lease = l.acquire(request("k"))
		since := l.tap.Texts()
		renewed(l, lease)
		renewed(l, lease)
		if n := count(since(), "INSERT"); n != 3 {
			t.Errorf("two renewals were %d statements", n)
		}
		dbtest.OK(t, lease.Release())
	})
}
