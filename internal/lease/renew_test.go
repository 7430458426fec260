package lease

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestABusyRowIsRenewedInOneStatementTheNextTime, if it was locked for long when its lease was renewed last.
func TestABusyRowIsRenewedInOneStatementTheNextTime(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL = 9 * time.Second
		lease := l.acquire(r)
		skipped := 1
		for round := 0; round < 10 && skipped > 0; round++ { // on a busy machine one takes longer than the server lets a statement wait, and is begun again
			moment := s.shareRow("k")
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
	l := &Locker{leases: make(map[*Grant]struct{}), wake: make(chan struct{}, 1), renewing: true}
	grant := func(ttl time.Duration) (woken bool) {
		g := &Grant{locker: l, ttl: ttl}
		l.mu.Lock()
		l.leases[g] = struct{}{}
		l.schedule(g, time.Now(), ttl)
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

// TestCommitsWithoutAPauseKeepNoLeaseFromBeingRenewed: transactions commit under it, some always at the same time,
// and another lease beside it is renewed, too.
func TestCommitsWithoutAPauseKeepNoLeaseFromBeingRenewed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, test := range []struct {
			name  string
			info  server.Info
			max   int // connections for leases
			pause time.Duration
		}{
			{"no pause", s.info, 16, 0},
			{"pauses", s.info, 16, 10 * time.Millisecond},
			{"one connection", s.info, 1, time.Millisecond},
			{"fenced by writes", *s.severalWriters(), 16, 0},
		} {
			t.Run(test.name, func(t *testing.T) {
				l := s.locker(setup{info: &test.info, max: test.max})
				var leases []*Grant
				for _, key := range []string{test.name, test.name + ", another lease"} {
					r := request(key)
					r.TTL = 7 * time.Second
					leases = append(leases, l.acquire(r))
				}
				stop, cancel := context.WithCancel(t.Context())
				var all sync.WaitGroup
				var commits [4]atomic.Int32
				for i := range commits {
					all.Go(func() {
						s.onConn(func(conn driver.Conn) {
							for stop.Err() == nil {
								if err := l.commitSlowly(conn, leases[0], max(test.pause, time.Millisecond)); err != nil {
									t.Error(err)
									return
								}
								commits[i].Add(1)
								time.Sleep(test.pause)
							}
						})
					})
				}
				for range 3 {
					for i := range commits {
						was := commits[i].Load()
						dbtest.Soon(t, "each goes on committing", func() bool { return commits[i].Load() > was })
					}
					before := time.Now().Add(leases[0].ttl)
					l.renewNow(leases...)
					for _, lease := range leases {
						dbtest.Soon(t, "it is renewed, or lost", func() bool { return lease.Expiry().After(before) || lease.Err() != nil })
					}
				}
				cancel()
				all.Wait()
				for _, lease := range leases {
					dbtest.OK(t, errors.Join(lease.Err(), lease.Release()))
				}
			})
		}
	})
}

// commitSlowly is a transaction under the lease, which takes so long to commit.
func (l *locker) commitSlowly(conn driver.Conn, g *Grant, takes time.Duration) error {
	err := server.Exec(context.Background(), conn, "START TRANSACTION")
	if err == nil {
		err = l.fence(conn, g)
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

// TestASilentHoldersLeaseGoesToAWaiter: a lease of a holder that stands still, or was cut off,
// goes to a waiter with its wake-up lock, so that the next one is woken; and without it if the
// connection that has it is another account's.
func TestASilentHoldersLeaseGoesToAWaiter(t *testing.T) {
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
		dbtest.Exec(s.T, silent, "DO GET_LOCK('"+wakeUp+"', 0)")
		s.set(key, "owner = 'silent#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 2 SECOND")
		lease := l.acquire(waiting(key, 25*time.Second))
		lc := lease.conn
		dbtest.OK(s.T, lc.c.AwaitTurn(dbtest.Limited(s.T)))
		rows, err := lc.query(dbtest.Limited(s.T), "SELECT COALESCE(IS_USED_LOCK('"+wakeUp+"') = CONNECTION_ID(), 0)")
		lc.c.EndTurn()
		dbtest.OK(s.T, err)
		has = rows[0][0] == "1"
		dbtest.OK(s.T, lease.Release())
		_, _ = silent.ExecContext(dbtest.Limited(s.T), "DO RELEASE_LOCK('"+wakeUp+"')") // it may be closed
		dbtest.OK(s.T, silent.Close())
	}
	return has
}

// TestAFrozenWaiterKeepsThoseBehindItWaitingOnlyBriefly for a free lease: it is woken and does nothing, as one whose
// host stands still.
func TestAFrozenWaiterKeepsThoseBehindItWaitingOnlyBriefly(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		first := l.acquire(request("k"))
		frozen, err := s.db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer frozen.Close()
		wakeUp := lockname.OfWakeUp(s.Name, "k")
		var id, woken int
		dbtest.OK(t, frozen.QueryRowContext(dbtest.Limited(t), "SELECT CONNECTION_ID()").Scan(&id))
		rang := dbtest.Go(func() error {
			return frozen.QueryRowContext(dbtest.Limited(t), "SELECT GET_LOCK('"+wakeUp+"', 60)").Scan(&woken)
		})
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
			if err := lease.Release(); err != nil {
				t.Error(err)
			}
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

// TestARenewalWritesSinceWhenTheLeaseIsHeld, and its TTL, into a table that has columns for
// that. In one that has none, as an older version has made it, it asks once.
func TestARenewalWritesSinceWhenTheLeaseIsHeld(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		told := func() (token, age, ttl, sinceRenewal sql.NullInt64) {
			t.Helper()
			dbtest.OK(t, s.db.QueryRow("SELECT renewed_token, TIMESTAMPDIFF(MICROSECOND, granted_at, UTC_TIMESTAMP(6)), ttl,"+
				" TIMESTAMPDIFF(MICROSECOND, expires, UTC_TIMESTAMP(6)) + ttl FROM "+s.table.String()+" WHERE name = 'k'").Scan(&token, &age, &ttl, &sinceRenewal))
			return token, age, ttl, sinceRenewal
		}
		renewed := func(l *locker, lease *Grant) {
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

		dbtest.Exec(t, s.db, "ALTER TABLE "+s.table.String()+" DROP COLUMN granted_at, DROP COLUMN ttl, DROP COLUMN renewed_token")
		l = s.locker(setup{})
		lease = l.acquire(request("k"))
		since := l.tap.Texts()
		renewed(l, lease)
		renewed(l, lease)
		dbtest.Equal(t, "two renewals were %d statements", count(since(), "INSERT"), 3)
		dbtest.OK(t, lease.Release())
	})
}

// TestManyLeasesNeedFewConnectionsAndStatements: more leases than one connection carries need few
// connections and goroutines, are renewed 500 in a statement, and are given back by Close.
func TestManyLeasesNeedFewConnectionsAndStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const many, ttl = maxWakeUps + 100, 2 * time.Minute
		l := s.locker(setup{ttl: ttl})
		held, before := make([]*Grant, many), runtime.NumGoroutine()
		rows := make([]string, many)
		for i := range rows {
			rows[i] = fmt.Sprintf("('%s', 'key%04d')", s.Name, i)
		}
		dbtest.Exec(t, s.db, "INSERT INTO "+s.table.String()+" (namespace, name) VALUES "+strings.Join(rows, ", "))
		for i := range held { // one after the other, which needs few connections
			r := request(fmt.Sprintf("key%04d", i))
			r.TTL = ttl
			held[i] = l.acquire(r)
		}
		// Other tests run beside, and what renews them may have connections of its own for a moment.
		dbtest.Soon(t, fmt.Sprintf("few more goroutines than %d", before), func() bool { return runtime.NumGoroutine() <= before+many/4 })
		const most = many/maxWakeUps + sharedConns // those that are full, and two with room, since one may be renewing
		dbtest.Soon(t, fmt.Sprintf("they are on %d connections", most), func() bool { return l.conns.Stat().InUse <= most })

		dbtest.Exec(t, s.db, "UPDATE "+s.table.String()+" SET expires = expires - INTERVAL 60 SECOND")
		began := dbtest.Column[string](t, s.db, "SELECT UTC_TIMESTAMP(6)")[0]
		var texts []string
		for start := time.Now(); len(texts) != (many+499)/500 && time.Since(start) < dbtest.Patience; { // what took long to acquire is renewed beside that
			sent := l.tap.Texts()
			l.mu.Lock()
			for _, lease := range held {
				lease.due = time.Now().Add(3*time.Second + rand.N(2*time.Second))
			}
			held[7].due = time.Now()
			l.changed(time.Time{})
			l.mu.Unlock()
			dbtest.Soon(t, "all are renewed", func() bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				return !slices.ContainsFunc(held, func(lease *Grant) bool { return time.Until(lease.due) < 8*time.Second })
			})
			texts = sent()
		}
		if len(texts) != (many+499)/500 {
			t.Errorf("%d statements: %q", len(texts), heads(texts))
		}
		count := func(where string) int {
			return dbtest.Column[int](t, s.db, "SELECT COUNT(*) FROM "+s.table.String()+" WHERE "+where)[0]
		}
		dbtest.Equal(t, "%d are not renewed", count("owner IS NOT NULL AND expires < '"+began+"' + INTERVAL 61 SECOND"), 0)
		for _, lease := range held {
			dbtest.OK(t, lease.Err())
		}
		dbtest.Equal(t, "%d are live on the server", count(schema.Live("")), many)
		l.Close()
		dbtest.Equal(t, "%d are live after Close", count(schema.Live("")), 0)
	})
}

func heads(texts []string) (out []string) {
	for _, text := range texts {
		out = append(out, text[:min(len(text), 120)])
	}
	return out
}

// TestALockedRowHoldsUpNoOtherRenewal: a lease whose row somebody has locked does not hold up the
// renewal of the others, and is renewed soon after.
func TestALockedRowHoldsUpNoOtherRenewal(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		a, b := l.acquire(request("a")), l.acquire(request("b"))
		tx := s.shareRow("a")
		wasA, wasB := s.expires("a"), s.expires("b")
		l.renewNow(a, b)
		dbtest.Soon(t, "the other is renewed", func() bool { return s.expires("b") != wasB })
		if s.expires("a") != wasA {
			t.Error("the locked one is renewed, too")
		}
		dbtest.OK(t, tx.Commit())
		dbtest.Soon(t, "it is renewed", func() bool { return s.expires("a") != wasA })
		dbtest.OK(t, errors.Join(a.Err(), b.Err()))
	})
}

// expires is when the lease of a key runs out on the server.
func (s *scratch) expires(key string) (at string) {
	s.T.Helper()
	dbtest.OK(s.T, s.db.QueryRow("SELECT expires FROM "+s.table.String()+
		" WHERE namespace = "+schema.Literal(s.Name)+" AND name = "+schema.Literal(key)).Scan(&at))
	return at
}

func TestARenewalFindsOutThatTheLeaseIsLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, gone := range []string{"token", "owner", "expiry"} {
			r := request(gone)
			n := r.tell()
			lease := l.acquire(r)
			r.Key += "'s neighbour"
			r.Lost = nil
			other := l.acquire(r)
			switch gone {
			case "token":
				s.set(gone, "token = token + 1")
			case "owner":
				s.set(gone, "owner = 'thief#12345678'")
			case "expiry":
				s.set(gone, "expires = UTC_TIMESTAMP(6)")
			}
			was := s.row(gone)
			l.renewNow(lease, other)
			err := n.wait(t)
			if strings.Contains(err.Error(), "not renewed in time") {
				t.Errorf("%s: the renewal did not find out: %v", gone, err)
			}
			if !errors.Is(lease.Err(), lockerr.ErrLost) || err.Error() != lease.Err().Error() {
				t.Errorf("%s: told %v, Err is %v", gone, err, lease.Err())
			}
			err = lease.Release()
			var e *lockerr.Error
			if !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Op != "release" || e.Key != gone {
				t.Errorf("%s: released with %v", gone, err)
			}
			if is := s.row(gone); is.owner != was.owner || is.token != was.token || is.left > was.left {
				t.Errorf("%s: the row was %+v and is %+v", gone, was, is)
			}
			if err := other.Err(); err != nil {
				t.Errorf("%s: the other is lost, too: %v", gone, err)
			}
			dbtest.OK(t, other.Release())
			dbtest.Soon(t, "the wake-up lock is given back", func() bool { return s.wakeUps(gone) == 0 })
			dbtest.Equal(t, "told %d times", n.times.Load(), 1)
		}
		// Found out by the release.
		lease := l.acquire(request("k"))
		s.steal("k")
		dbtest.Is(t, "released what is someone else's", lease.Release(), lockerr.ErrLost)
		if r := s.row("k"); !strings.HasPrefix(r.owner, "thief") || !r.live || s.wakeUps("k") != 0 {
			t.Errorf("the row is %+v", r)
		}
		dbtest.Soon(t, "no connection is kept", func() bool { return l.conns.Stat().InUse == 0 })
	})
}

// TestAHolderThatCannotRenewIsToldInTime: who cannot renew is told before the server gives the
// lease to another.
func TestAHolderThatCannotRenewIsToldInTime(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL = 8 * time.Second
		n := r.tell()
		lease := l.acquire(r)
		taken := lease.Expiry()
		l.renewNow(lease)
		dbtest.Soon(t, "it is renewed", func() bool { return lease.Expiry().After(taken) })
		l.tap.Cut()
		l.renewNow(lease)
		for lease.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		row := s.row("k")
		if early := time.Now().Add(row.left).Sub(lease.deadline); early < 50*time.Millisecond {
			t.Errorf("the holder finds out %v before the server, the row is %+v", early, row)
		}
		if err := n.wait(t); !errors.Is(err, lockerr.ErrLost) {
			t.Error(err)
		}
		if !strings.Contains(lease.Err().Error(), "not renewed in time: ") {
			t.Errorf("it does not say why: %v", lease.Err())
		}
		other := s.locker(setup{})
		if next := other.acquire(waiting("k", 20*time.Second)); next.Token() != 2 {
			t.Errorf("the next token is %d", next.Token())
		}
		dbtest.Equal(t, "told %d times", n.times.Load(), 1)
	})
}

// TestAHolderThatStoodStillKnowsAtOnce: a process that was stopped knows at once, before any of its
// timers has run.
func TestAHolderThatStoodStillKnowsAtOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		n := r.tell()
		lease := l.acquire(r)
		lease.mu.Lock()
		lease.deadline = time.Now().Add(-time.Minute)
		lease.mu.Unlock()
		dbtest.Is(t, "past the deadline", lease.Err(), lockerr.ErrLost)
		n.wait(t)
		again := l.acquire(waiting("j", 0)) // the Locker goes on
		dbtest.OK(t, again.Release())
	})
}

// TestLeasesOutliveTheirConnections: leases outlive the connections on which they were taken.
func TestLeasesOutliveTheirConnections(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		lease := l.acquire(request("k"))
		for range 3 {
			before := lease.Expiry()
			s.kill(s.threads("TRUE"))
			l.renewNow(lease)
			dbtest.Soon(t, "it is renewed", func() bool { return lease.Expiry().After(before) })
			dbtest.OK(t, lease.Err())
		}
		if row := s.row("k"); !row.live || row.token != 1 {
			t.Errorf("the row is %+v", row)
		}
		// The wake-up lock is lost. Who waits falls back to looking.
		dbtest.Soon(t, "the wake-up lock is gone", func() bool { return s.wakeUps("k") == 0 })
		passed := other.pass(dbtest.Limited(t), waiting("k", 25*time.Second))
		dbtest.Soon(t, "the other has the wake-up lock", func() bool { return s.wakeUps("k") == 1 })
		sent, begin := other.tap.Texts(), time.Now()
		dbtest.Soon(t, "it looks", func() bool { return count(sent(), "INSERT") > 0 })
		time.Sleep(time.Second)
		if n, most := count(sent(), "INSERT"), 2+int(time.Since(begin)/strategy.Pace); n > most {
			t.Errorf("it looks %d times in %v", n, time.Since(begin))
		}
		released := time.Now()
		dbtest.OK(t, lease.Release())
		dbtest.OK(t, <-passed)
		if took := time.Since(released); took > 15*time.Second { // it waits for longer, and the lease would have lasted
			t.Errorf("granted after %v", took)
		}
		dbtest.Soon(t, "no wake-up lock is left", func() bool { return s.wakeUps("k") == 0 })
	})
}

// TestAnExpiryTellsWhoHasTakenTheLeaseAway: a holder that was frozen when that happened finds first
// that its lease is over by its own clock.
func TestAnExpiryTellsWhoHasTakenTheLeaseAway(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		lease := l.acquire(request("k"))
		dbtest.Exec(t, s.db, "UPDATE "+s.table.String()+" r SET "+schema.SetReleased("host:1:cli", "ticket 4711")+", token = token + 1 WHERE name = 'k'")
		lease.mu.Lock()
		lease.deadline = time.Now()
		lease.mu.Unlock()
		lease.expire()
		if !errors.Is(lease.Err(), lockerr.ErrLost) {
			t.Fatalf("it is over: %v", lease.Err())
		}
		dbtest.Soon(t, "the reason is told", func() bool { return strings.Contains(lease.Err().Error(), `"ticket 4711"`) })
	})
}
