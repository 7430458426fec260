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

// told is a Request.Lost that remembers.
type told struct {
	times atomic.Int32
	err   chan error
	at    time.Time
}

func (r *Request) tell() *told {
	n := &told{err: make(chan error, 10)}
	r.Lost = func(err error) {
		n.times.Add(1)
		n.at = time.Now()
		n.err <- err
	}
	return n
}

func (n *told) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-n.err:
		if !errors.Is(err, lockerr.ErrLost) && !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("the holder is told %v", err)
		}
		return err
	case <-time.After(dbtest.Patience):
		t.Fatal("the holder is not told")
		return nil
	}
}

// TestCloseDuringRenewal: Close also gives back what it finds locked, by a renewal that is
// under way, and leaves alone what stays locked.
func TestCloseDuringRenewal(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, key := range []string{"free", "renewed", "locked"} {
			l.acquire(request(key))
		}
		lock := func(key string) *sql.Tx {
			tx, err := s.db.Begin()
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "SELECT 1 FROM "+s.table.String()+" WHERE "+l.row("", key)+" FOR UPDATE")
			return tx
		}
		renewal, other := lock("renewed"), lock("locked")
		defer other.Rollback()
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

// TestManyLeases holds 2,400 leases, on a few connections and goroutines.
func TestManyLeases(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const many, ttl = 2400, time.Minute
		l := s.locker(setup{ttl: ttl})
		held := make([]*Lease, many)
		var half int
		for i := range held { // one after the other, which needs few connections
			r := request(fmt.Sprintf("key%04d", i))
			r.TTL = ttl
			if i == many/2 {
				half = runtime.NumGoroutine()
			}
			held[i] = l.acquire(r)
		}
		// Other tests run beside, and what renews them may have connections of its own for a moment.
		dbtest.Soon(t, fmt.Sprintf("few more goroutines than %d with half of the leases", half), func() bool {
			return runtime.NumGoroutine() <= half+many/4
		})
		// Those that are full, and two with room, since one may be renewing.
		most := many/maxWakeUps + sharedConns
		dbtest.Soon(t, fmt.Sprintf("they are on %d connections", most), func() bool { return l.conns.Stat().InUse <= most })
		sent, begin := l.tap.Texts(), time.Now()
		var began string
		dbtest.OK(t, s.db.QueryRow("SELECT UTC_TIMESTAMP(6)").Scan(&began))
		dbtest.Soon(t, "all are renewed", func() bool {
			var old int
			dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM "+s.table.String()+" WHERE owner IS NOT NULL AND expires < '"+began+"' + INTERVAL 60 SECOND").Scan(&old))
			return old == 0
		})
		texts, seconds := sent(), int(time.Since(begin).Seconds())+1
		t.Logf("%d statements in %d s for %d leases of %v", len(texts), seconds, many, ttl)
		if renewals := count(texts, "INSERT"); renewals > 8*seconds { // of 500 each, for at most two groups a second
			t.Errorf("%d renewal statements, in all %q", renewals, heads(texts))
		}
		var live int
		dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM "+s.table.String()+" WHERE "+schema.Live("")).Scan(&live))
		for _, lease := range held {
			if err := lease.Err(); err != nil {
				t.Fatal(err)
			}
		}
		if live != many {
			t.Errorf("%d are live on the server", live)
		}
		begin = time.Now()
		l.Close()
		t.Logf("given back in %v", time.Since(begin))
		dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM "+s.table.String()+" WHERE "+schema.Live("")).Scan(&live))
		if live != 0 {
			t.Errorf("%d are live after Close", live)
		}
	})
}

// acquireMany takes n leases, some at a time.
func (l *locker) acquireMany(n int, name string, ttl ...time.Duration) []*Lease {
	l.s.T.Helper()
	held := make([]*Lease, n)
	errs := make([]error, n)
	var all sync.WaitGroup
	const atATime = 16
	for first := range atATime {
		all.Go(func() {
			for i := first; i < n; i += atATime {
				r := request(fmt.Sprintf("%s%d", name, i))
				if len(ttl) > 0 {
					r.TTL = ttl[0]
				}
				held[i], errs[i] = l.Acquire(dbtest.Limited(l.s.T), r)
			}
		})
	}
	all.Wait()
	dbtest.OK(l.s.T, errors.Join(errs...))
	return held
}

func heads(texts []string) (out []string) {
	for _, text := range texts {
		out = append(out, text[:min(len(text), 120)])
	}
	return out
}

// TestRenewalStatements renews a thousand in two statements, in whatever way the
// DSN has rows counted.
func TestRenewalStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "clientFoundRows=true"} {
			l := s.locker(setup{params: params})
			held := l.acquireMany(1000, "key"+params, 2*time.Minute)
			_, err := s.db.Exec("UPDATE " + s.table.String() + " SET expires = expires - INTERVAL 60 SECOND")
			dbtest.OK(t, err)
			var texts []string
			var began string
			dbtest.OK(t, s.db.QueryRow("SELECT UTC_TIMESTAMP(6)").Scan(&began))
			for start := time.Now(); time.Since(start) < dbtest.Patience; { // what took long to acquire is renewed beside that
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
					for _, lease := range held {
						if time.Until(lease.due) < 8*time.Second {
							return false
						}
					}
					return true
				})
				if texts = sent(); len(texts) == 2 {
					break
				}
			}
			if len(texts) != 2 {
				t.Errorf("%d statements: %q", len(texts), heads(texts))
			}
			var late int
			dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM "+s.table.String()+
				" WHERE owner IS NOT NULL AND expires < '"+began+"' + INTERVAL 61 SECOND").Scan(&late))
			if late != 0 {
				t.Errorf("%d are not renewed", late)
			}
			l.close()
		}
	})
}

// TestLockedRows: a lease whose row somebody has locked does not hold up the
// renewal of the others, and is renewed soon after.
func TestLockedRows(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		a, b := l.acquire(request("a")), l.acquire(request("b"))
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'61' LOCK IN SHARE MODE")
		dbtest.OK(t, err)
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

func TestStolen(t *testing.T) {
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
			if n.times.Load() != 1 {
				t.Errorf("told %d times", n.times.Load())
			}
		}
		// Found out by the release.
		lease := l.acquire(request("k"))
		s.steal("k")
		if err := lease.Release(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("released what is someone else's: %v", err)
		}
		if r := s.row("k"); !strings.HasPrefix(r.owner, "thief") || !r.live || s.wakeUps("k") != 0 {
			t.Errorf("the row is %+v", r)
		}
		dbtest.Soon(t, "no connection is kept", func() bool { return l.conns.Stat().InUse == 0 })
	})
}

// TestCutOff: who cannot renew is told before the server gives the lease to
// another.
func TestCutOff(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
		if n.times.Load() != 1 {
			t.Errorf("told %d times", n.times.Load())
		}
	})
}

// TestPause: a process that was stopped knows at once, before any of its timers
// has run.
func TestPause(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		n := r.tell()
		lease := l.acquire(r)
		lease.mu.Lock()
		lease.deadline = time.Now().Add(-time.Minute)
		lease.mu.Unlock()
		if err := lease.Err(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("past the deadline: %v", err)
		}
		n.wait(t)
		again := l.acquire(waiting("j", 0)) // the Locker goes on
		dbtest.OK(t, again.Release())
	})
}

// TestLostConnections: leases outlive the connections on which they were taken.
func TestLostConnections(t *testing.T) {
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
		granted := make(chan time.Time, 1)
		go func() {
			next, err := other.Acquire(dbtest.Limited(t), waiting("k", 25*time.Second))
			at := time.Now()
			if err != nil {
				t.Error(err)
			} else if err = next.Release(); err != nil {
				t.Error(err)
			}
			granted <- at
		}()
		dbtest.Soon(t, "the other has the wake-up lock", func() bool { return s.wakeUps("k") == 1 })
		sent, begin := other.tap.Texts(), time.Now()
		dbtest.Soon(t, "it looks", func() bool { return count(sent(), "INSERT") > 0 })
		time.Sleep(time.Second)
		if n, most := count(sent(), "INSERT"), 2+int(time.Since(begin)/pollEvery); n > most {
			t.Errorf("it looks %d times in %v", n, time.Since(begin))
		}
		released := time.Now()
		dbtest.OK(t, lease.Release())
		if took := (<-granted).Sub(released); took > 15*time.Second { // it waits for longer, and the lease would have lasted
			t.Errorf("granted after %v", took)
		}
		dbtest.Soon(t, "no wake-up lock is left", func() bool { return s.wakeUps("k") == 0 })
	})
}

// TestWaiterLosesItsConnection goes on on another one.
func TestWaiterLosesItsConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		lease := l.acquire(request("k"))
		failed := make(chan error, 3)
		go func() {
			next, err := other.Acquire(dbtest.Within(t, dbtest.Patience), waiting("k", time.Minute))
			if err == nil {
				err = next.Release()
			}
			failed <- err
		}()
		for range 3 {
			var killed []int64
			dbtest.Soon(t, "it waits", func() bool { killed = s.inWakeUp(); return len(killed) == 1 })
			s.kill(killed)
			dbtest.Soon(t, "it does not wait there", func() bool { return !slices.Contains(s.inWakeUp(), killed[0]) })
		}
		dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
		dbtest.OK(t, lease.Release())
		dbtest.OK(t, <-failed)
		dbtest.Soon(t, "no connection is kept", func() bool { return other.conns.Stat().InUse == 0 })
	})
}

// TestFrozenHolder: a wake-up lock that a stopped process still has keeps nobody from
// its lease once that has run out.
func TestFrozenHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		conn, err := s.db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		l := s.locker(setup{})
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			dbtest.OK(t, l.acquire(request("k")).Release())
			_, err = conn.ExecContext(dbtest.Limited(t), "DO GET_LOCK('"+lockname.OfWakeUp(s.Name, "k")+"', 0)")
			dbtest.OK(t, err)
			s.set("k", "owner = 'frozen#12345678', expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
			begin := time.Now()
			lease := l.acquire(waiting("k", wait))
			t.Logf("with a wait of %v granted after %v", wait, time.Since(begin))
			if took := time.Since(begin); took > 15*time.Second || wait > 0 && took < pollEvery { // it waits for longer
				t.Errorf("with a wait of %v granted after %v", wait, took)
			}
			dbtest.OK(t, lease.Release())
		}
		// And one that is still live is waited for no longer than it runs.
		soonest, start := time.Minute, time.Now()
		for soonest > longest*3/4 && time.Since(start) < dbtest.Patience {
			begin := time.Now()
			s.set("k", "owner = 'frozen#12345678', expires = UTC_TIMESTAMP(6) + INTERVAL 1 SECOND")
			lease := l.acquire(waiting("k", 20*time.Second))
			soonest = min(soonest, time.Since(begin))
			dbtest.OK(t, lease.Release())
		}
		if soonest < 900*time.Millisecond || soonest > longest*3/4 {
			t.Errorf("granted after %v", soonest)
		}
	})
}

// TestFewConnections: where a pool has none to wait on, its waiters look.
func TestFewConnections(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for most := 1; most <= 3; most++ {
			a, b := s.locker(setup{max: most}), s.locker(setup{max: most})
			lease := a.acquire(request("k"))
			failed := make(chan error, 3)
			for range 3 {
				go func() {
					next, err := b.Acquire(dbtest.Limited(t), waiting("k", 25*time.Second))
					if err == nil {
						err = next.Release()
					}
					failed <- err
				}()
			}
			time.Sleep(400 * time.Millisecond)
			// Others are not held up.
			begin := time.Now()
			dbtest.OK(t, b.acquire(request("j")).Release())
			if took := time.Since(begin); took > 15*time.Second { // the others wait for longer
				t.Errorf("with %d connections another key took %v", most, took)
			}
			dbtest.OK(t, lease.Release())
			for range 3 {
				dbtest.OK(t, <-failed)
			}
		}
	})
}

func TestMinHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		r := request("k")
		r.MinHold = 20 * time.Second
		lease := l.acquire(r)
		renewal := l.changeSQL([]*Lease{lease}, func(s *Lease) time.Duration { return s.ttl }, lasted, extend, "")
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

func TestMaxHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, ttl := range []time.Duration{2 * time.Second, 30 * time.Second} {
			r := waiting(ttl.String(), 20*time.Second)
			r.TTL, r.MaxHold = ttl, 2500*time.Millisecond
			var n *told
			var lease *Lease
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

func TestLapse(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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

func TestClose(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
		failed := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := l.Acquire(dbtest.Limited(t), waiting("theirs", time.Minute))
				failed <- err
			}()
		}
		dbtest.Soon(t, "one waits on the server", func() bool { return len(s.inWakeUp()) == 1 })
		begin := time.Now()
		l.Close()
		l.Close()
		if took := time.Since(begin); took > 15*time.Second { // they wait for longer
			t.Errorf("Close takes %v", took)
		}
		for range 2 {
			if err := <-failed; !errors.Is(err, lockerr.ErrClosed) {
				t.Errorf("a waiter gets %v", err)
			}
		}
		if err := n.wait(t); !errors.Is(err, lockerr.ErrClosed) || !errors.Is(mine.Err(), lockerr.ErrClosed) {
			t.Errorf("the holder is told %v, Err is %v", err, mine.Err())
		}
		dbtest.OK(t, mine.Release())
		if s.row("mine").live || s.row("lapsed").live || !s.row("left").live || !s.row("theirs").live {
			t.Errorf("the rows are %+v, %+v, %+v, %+v", s.row("mine"), s.row("lapsed"), s.row("left"), s.row("theirs"))
		}
		if _, err := l.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if _, err := l.Await(dbtest.Limited(t), "k", time.Now(), time.Second); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		dbtest.Soon(t, "nothing is left on the server", func() bool { return len(s.inWakeUp()) == 0 && s.wakeUps("mine") == 0 })
		dbtest.OK(t, theirs.Release())
	})
}

func TestFence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.info.SnapshotIsolation != s.MariaDB() {
			t.Errorf("the probe tells %+v", s.info)
		}
		multi := s.info
		multi.Topology = "several writers"
		for _, info := range []server.Info{s.info, multi} {
			l := s.locker(setup{info: &info})
			keyA, keyB, keyC := "a"+info.Topology, "b"+info.Topology, "c"+info.Topology
			a, b := l.acquire(request(keyA)), l.acquire(request(keyB))
			s.onConn(func(conn driver.Conn) {
				ctx := dbtest.Limited(t)
				sql := func(text string) {
					t.Helper()
					dbtest.OK(t, server.Exec(ctx, conn, text))
				}
				if info.SnapshotIsolation {
					sql("SET SESSION innodb_snapshot_isolation = ON")
					defer sql("SET SESSION innodb_snapshot_isolation = DEFAULT")
				}
				sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
				l.renew([]*Lease{a, b}, time.Second) // the rows change after the snapshot
				dbtest.OK(t, l.Fence(ctx, conn, []*Lease{b, a, b}))
				dbtest.OK(t, l.Fence(ctx, conn, nil))
				// Nobody else gets it, even if it runs out.
				_, err := s.db.Exec("SET SESSION innodb_lock_wait_timeout = 1")
				dbtest.OK(t, err)
				if _, err := s.locker(setup{}).Acquire(ctx, request(keyA)); !errors.Is(err, lockerr.ErrLocked) {
					t.Errorf("while a fence stands: %v", err)
				}
				// It does not hold up renewals, which come through soon after it.
				soonest := time.Minute
				for try := 0; try < 5 && soonest > 4*time.Second; try++ {
					begin := time.Now()
					l.renew([]*Lease{a, b}, 20*time.Second)
					soonest = min(soonest, time.Since(begin))
				}
				if soonest > 4*time.Second { // nor wait for the row, for 5 s
					t.Errorf("a renewal took %v", soonest)
				}
				dbtest.OK(t, errors.Join(a.Err(), b.Err()))
				sql("COMMIT")
			})

			// A release waits for a fence.
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				dbtest.OK(t, l.Fence(dbtest.Limited(t), conn, []*Lease{b}))
				released, begin := make(chan error, 3), time.Now()
				go func() { released <- b.Release() }()
				time.Sleep(1300 * time.Millisecond)
				if !s.row(keyB).live {
					t.Error("released although a fence stands")
				}
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "COMMIT"))
				if err := <-released; err != nil && time.Since(begin) < handoffWait { // it waits no longer, and goes on in the background
					t.Error(err)
				}
				dbtest.Soon(t, "it is released", func() bool { return !s.row(keyB).live })
			})
			if err := l.Fence(dbtest.Limited(t), nil, []*Lease{b}); !errors.Is(err, lockerr.ErrClosed) {
				t.Errorf("a fence after the release: %v", err)
			}

			c := l.acquire(request(keyC))
			s.steal(c.key)
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
				err := l.Fence(dbtest.Limited(t), conn, []*Lease{a, c})
				var e *lockerr.Error
				if !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Op != "commit" || e.Key != c.key {
					t.Errorf("the fence of a lost lease: %v", err)
				}
			})
			if err := c.Err(); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("after its fence failed: %v", err)
			}
			dbtest.OK(t, a.Err())
		}
	})
}

func TestAwait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		dbtest.OK(t, other.acquire(request("j")).Release()) // there is a connection to wait on
		soonest := time.Minute
		for try := 0; try < 20 && soonest > longest/2; try++ { // a busy machine may delay some
			lease := l.acquire(waiting("k", 20*time.Second))
			woken := make(chan time.Time, 1)
			go func() {
				done, err := other.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
				woken <- time.Now()
				if err != nil {
					t.Error(err)
					return
				}
				done()
				done()
			}()
			dbtest.Soon(t, "it waits", func() bool { return len(s.inWakeUp()) == 1 })
			released := time.Now()
			dbtest.OK(t, lease.Release())
			soonest = min(soonest, (<-woken).Sub(released))
		}
		if soonest > longest/2 { // not only since it looks by itself
			t.Errorf("woken after %v", soonest)
		}

		// No longer than asked.
		lease := l.acquire(waiting("k", 20*time.Second))
		for _, most := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond} {
			soonest := time.Minute
			for try := 0; try < 20 && soonest > most+longest/2; try++ {
				begin := time.Now()
				done, err := other.Await(dbtest.Limited(t), "k", time.Now(), most)
				dbtest.OK(t, err)
				soonest = min(soonest, time.Since(begin))
				done()
			}
			if soonest < min(most, pollEvery)*9/10 || soonest > most+longest/2 {
				t.Errorf("for at most %v it waits %v", most, soonest)
			}
		}

		// Without a wake-up lock it does not spin, and with a cancelled context it ends.
		dbtest.Soon(t, "the wake-up locks are given back", func() bool { return other.conns.Stat().InUse == 0 })
		dbtest.OK(t, s.db.QueryRow("SELECT RELEASE_ALL_LOCKS()").Scan(new(int)))
		s.kill([]int64{int64(s.lockConnOf(lease))})
		dbtest.Soon(t, "the wake-up lock is gone", func() bool { return s.wakeUps("k") == 0 })
		begin := time.Now()
		for range 3 {
			done, err := other.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
			dbtest.OK(t, err)
			done()
		}
		if took := time.Since(begin); took < 600*time.Millisecond || took > 15*time.Second {
			t.Errorf("three times it waits %v", took)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if _, err := other.Await(ctx, "k", time.Now(), 20*time.Second); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		few := s.locker(setup{max: 1})
		begin = time.Now()
		done, err := few.Await(dbtest.Limited(t), "k", time.Now(), 20*time.Second)
		dbtest.OK(t, err)
		done()
		if took := time.Since(begin); took < pollEvery || took > 15*time.Second {
			t.Errorf("without a connection it waits %v", took)
		}
		dbtest.Soon(t, "all is given back", func() bool { return other.conns.Stat().InUse == 0 && s.wakeUps("k") == 0 })
	})
}

// lockConnOf is the id of the connection that has the lease's wake-up lock.
func (s *scratch) lockConnOf(lease *Lease) uint64 {
	lease.l.mu.Lock()
	defer lease.l.mu.Unlock()
	return lease.conn.c.KnownID()
}

func TestSessions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		bare, err := schema.Parse("mysqllock")
		dbtest.OK(t, err)
		for name, with := range map[string]setup{
			"time zone":   {params: "time_zone=%27%2B13%3A00%27"},
			"found rows":  {params: "clientFoundRows=true"},
			"parse time":  {params: "parseTime=true&loc=Local"},
			"latin1":      {params: "charset=latin1"},
			"utf8":        {params: "collation=utf8mb4_general_ci"},
			"strict":      {params: "sql_mode=%27STRICT_ALL_TABLES%2CANSI_QUOTES%27"},
			"serializing": {params: "transaction_isolation=%27READ-COMMITTED%27"},
			"bare table":  {table: &bare},
		} {
			if s.MariaDB() && name == "serializing" {
				with.params = "tx_isolation=%27READ-COMMITTED%27"
			}
			l, plain := s.locker(with), s.locker(setup{})
			began := time.Now()
			lease := l.acquire(request(name))
			if r := s.row(name); r.left > 30*time.Second || r.left < 25*time.Second-time.Since(began) {
				t.Errorf("%s: the row is %+v", name, r)
			}
			if _, err := plain.Acquire(dbtest.Limited(t), request(name)); !errors.Is(err, lockerr.ErrLocked) {
				t.Errorf("%s: %v", name, err)
			}
			l.renew([]*Lease{lease}, time.Second)
			dbtest.OK(t, lease.Err())
			s.onConn(func(conn driver.Conn) { dbtest.OK(t, l.Fence(dbtest.Limited(t), conn, []*Lease{lease})) })
			dbtest.OK(t, lease.Release())
			next := plain.acquire(request(name))
			if err := l.told(waiting(name, 400*time.Millisecond)); !errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("%s: %v", name, err)
			}
			dbtest.OK(t, next.Release())
			// A lease that is lost is not ours to renew, however rows are counted.
			lease = l.acquire(request(name))
			s.steal(name)
			l.renew([]*Lease{lease}, 20*time.Second)
			if err := lease.Err(); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%s: after a theft: %v", name, err)
			}
		}
	})
}

func TestBigTokensAndOddKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, key := range []string{"k", "\x00\xff'`\\\n", "K", "k ", strings.Repeat("ä", 127)} {
			dbtest.OK(t, l.acquire(request(key)).Release())
			for _, token := range []uint64{1<<32 - 1, 1<<53 + 1, 1<<61 + 1} {
				s.set(key, fmt.Sprintf("token = %d", token))
				lease := l.acquire(waiting(key, 20*time.Second))
				if lease.Token() != token+1 {
					t.Errorf("after %d comes %d", token, lease.Token())
				}
				if _, err := l.Acquire(dbtest.Limited(t), waiting(key, 10*time.Millisecond)); !errors.Is(err, lockerr.ErrLocked) {
					t.Error(err)
				}
				l.renew([]*Lease{lease}, time.Second)
				s.onConn(func(conn driver.Conn) { dbtest.OK(t, l.Fence(dbtest.Limited(t), conn, []*Lease{lease})) })
				dbtest.OK(t, lease.Release())
			}
		}
		if len(lockname.OfWakeUp(strings.Repeat("n", 255), strings.Repeat("k", 255))) > 64 {
			t.Error("names of wake-up locks are too long")
		}
	})
}

// TestLongOwner: what does not fit into the column is cut off.
func TestLongOwner(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		long := New(strategy.Config{
			Conns: l.conns, Control: l.control, Rows: l.cfg.Rows, Queue: l.cfg.Queue, Table: l.cfg.Table, Namespace: l.cfg.Namespace,
			Owner: strings.Repeat("o", 300), Info: l.cfg.Info, TTL: time.Second, Procedures: l.cfg.Procedures,
		})
		defer long.Close()
		_, err := long.Acquire(dbtest.Limited(t), request("k"))
		dbtest.OK(t, err)
		if n := len(s.row("k").owner); n != 255 {
			t.Errorf("the owner has %d bytes", n)
		}
		err = s.locker(setup{}).refused(request("k"))
		var e *lockerr.Error
		if !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != strings.Repeat("o", 246) {
			t.Error(err)
		}
	})
}

// TestRowVanishes: a clean-up may remove the row of a key that is not held.
func TestRowVanishes(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		_, err := s.db.Exec("DELETE FROM " + s.table.String() + " WHERE name = x'6b'")
		dbtest.OK(t, err)
		dbtest.OK(t, l.acquire(request("k")).Release())
		_, err = s.db.Exec("DROP TABLE " + s.table.String())
		dbtest.OK(t, err)
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}

func TestDenied(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		user := "u_" + dbtest.Random()
		_, err := s.db.Exec("CREATE USER " + user)
		dbtest.OK(t, err)
		defer s.db.Exec("DROP USER " + user)
		_, err = s.db.Exec("GRANT SELECT ON " + s.Name + ".* TO " + user)
		dbtest.OK(t, err)
		l := s.locker(setup{user: user})
		dbtest.OK(t, s.locker(setup{}).acquire(request("k")).Release())
		_, err = l.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
		if err == nil || !strings.Contains(err.Error(), "needs SELECT, INSERT, UPDATE") || l.conns.Stat().InUse != 0 {
			t.Errorf("with SELECT only: %v", err)
		}
	})
}

// TestReleaseOutlivesClose: a release that its caller has waited for in vain is still sent if the
// Locker is closed meanwhile, for as long as a caller would wait.
func TestReleaseOutlivesClose(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{max: 2})
		lease := l.acquire(request("k"))
		h := lease.conn
		l.turnOf(h)
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
		l.giveBack(h)
		<-closed
		if r := s.row("k"); r.live {
			t.Errorf("it is left: %+v", r)
		}
	})
}

// TestAnExpiryTellsWhoHasTakenTheLeaseAway: a holder that was frozen when that happened finds first
// that its lease is over by its own clock.
func TestAnExpiryTellsWhoHasTakenTheLeaseAway(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		lease := l.acquire(request("k"))
		_, err := s.db.Exec("UPDATE " + s.table.String() + " r SET " + schema.SetReleased("host:1:cli", "ticket 4711") + ", token = token + 1 WHERE name = 'k'")
		dbtest.OK(t, err)
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
