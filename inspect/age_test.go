package inspect_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// span is when something has happened at the earliest, and at the latest.
type span struct{ first, last time.Time }

// timing allows for the server's clock, which measures the same time a little differently.
const timing = 20 * time.Millisecond

// checkAge compares what is shown of a holder with what is known: no lock is older than
// it is, and no transaction younger than its locks. What was read between from and to may
// show a lock as younger, if the server was busy when the statement ended that took it.
func checkAge(t *testing.T, s *scratch, what string, h inspect.Holder, granted span, from, to time.Time) {
	t.Helper()
	least, most := from.Sub(granted.last)-timing, to.Sub(granted.first)+timing
	if value(h.Since) > most {
		t.Errorf("%s: it is held for %v to %v, and said to be for %v", what, least, most, h.Since)
	}
	if h.Least > most {
		t.Errorf("%s: it is held for at most %v, and said to be for at least %v", what, most, h.Least)
	}
	if !s.mysql() { // MariaDB tells whole seconds of transactions
		least -= 2 * time.Second
	}
	if within, ok := h.Within.Get(); ok && within < least {
		t.Errorf("%s: it is held for at least %v, in a transaction said to be of %v", what, least, h.Within)
	}
}

// TestALockIsNotAsOldAsItsTransaction: that has waited first. Where the server does not tell the
// age, none is shown.
func TestALockIsNotAsOldAsItsTransaction(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for strategy, option := range strategies {
			key := "the-" + strategy
			i := s.inspector(s.open("root"))
			first := s.acquire(s.process("root", "first"), key, option)
			second := make(chan *mysqllock.Hold, 1)
			db := s.process("root", "second")
			go func() {
				h, err := mysqllock.Acquire(context.Background(), db, key, option, lockctx.Wait(2*dbtest.Patience))
				if err != nil {
					t.Error(err)
				}
				second <- h
			}()
			held := func(program string, wait time.Duration) (l *inspect.Lock, from, to time.Time) {
				dbtest.Soon(t, program+" has it", func() bool {
					from = time.Now()
					l = find(look(t, i), strategy, key)
					to = time.Now()
					ok := l != nil && len(l.Holders.List) == 1 && len(l.Waiters.List) == 1 && l.Waiters.List[0].Least >= wait
					return ok && (l.Holders.List[0].Program == "" || l.Holders.List[0].Program == program)
				})
				return l, from, to
			}
			held("first", 400*time.Millisecond)
			var granted span
			granted.first = time.Now()
			dbtest.OK(t, first.Release())
			h := <-second
			granted.last = time.Now()
			if h == nil {
				return
			}
			t.Cleanup(func() { _ = h.Release() })
			s.queue(func() int { // MariaDB shows a row that somebody waits for
				if l := find(look(t, i), strategy, key); l != nil {
					return len(l.Waiters.List)
				}
				return 0
			}, "root", key, 1, option)
			l, from, to := held("second", 0)
			who := l.Holders.List[0]
			checkAge(t, s, strategy, who, granted, from, to)
			early := to.Sub(granted.first) < 5*time.Second // before the lease was renewed, and the server forgot what it has run
			if known := s.mysql() && strategy != "lease"; early && known != !who.Since.IsZero() {
				t.Errorf("%s: since when it is held: %v", strategy, who.Since)
			}
			if strategy != "row" {
				continue
			}
			if value(who.Within) < from.Sub(granted.first)-2*time.Second || who.Activity == nil || who.Activity.Running {
				t.Errorf("%s: the holder is %+v, which does %v", strategy, who, who.Activity)
			}
			if !s.mysql() && who.Least == 0 {
				t.Errorf("%s: it has been idle, and the lock is said to be of %v at least", strategy, who.Least)
			}
			for n := range 30 { // more than the server remembers
				dbtest.ExecIn(t, h.Context(), db, fmt.Sprintf("DO %d, 'secret', x'5ec7e7'", n))
			}
			l, from, to = held("second", 0)
			who = l.Holders.List[0]
			checkAge(t, s, strategy+", long ago", who, granted, from, to)
			if !who.Since.IsZero() || who.Least == 0 {
				t.Errorf("%s: long ago: %+v", strategy, who)
			}
			if a := who.Activity; a == nil || a.Running || s.mysql() && a.Statement != "DO ?, ?, ?" || strings.Contains(a.String(), "ec") && strings.Contains(a.String(), "secret") {
				t.Errorf("%s: it does %v", strategy, a)
			}
		}
	})
}

// TestARenewalMakesTheAgeOfALeaseKnown: and its TTL, its last renewal, and that it is not renewed
// any more. Before that, and of a program or a table of an older version, they are not.
func TestARenewalMakesTheAgeOfALeaseKnown(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		cfg, tap := s.Config(), new(dbtest.Tap)
		cfg.User = "root"
		tap.On(cfg)
		const ttl = 9 * time.Second // a look has the latter half of it to see that it is not renewed
		db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: "holder"}))
		i := s.inspector(s.open("root"))
		dbtest.OK(t, s.acquire(db, "other", lockctx.Lease(ttl)).Release())
		held := func() (h inspect.Holder) {
			t.Helper()
			if l := find(look(t, i), "lease", "k"); l != nil {
				h = l.Holders.List[0]
			}
			return h
		}
		known := func(h inspect.Holder) bool { return !h.Since.IsZero() && !h.TTL.IsZero() && !h.Renewed.IsZero() }
		unknown := func(h inspect.Holder) bool {
			return h.Program == "holder" && h.Since.IsZero() && h.TTL.IsZero() && h.Renewed.IsZero()
		}
		asked := time.Now()
		s.acquire(db, "k", lockctx.Lease(ttl))
		if h := held(); !unknown(h) && time.Since(asked) < ttl/4 {
			t.Errorf("before the first renewal: %+v", h)
		}
		var h inspect.Holder
		dbtest.Soon(t, "it is renewed", func() bool { h = held(); return known(h) && !h.Silent() })
		// It was sent after that, at the earliest, and says what was so when it was sent.
		if since := value(h.Since); value(h.TTL) != ttl || since < ttl/6 || since > time.Since(asked)+timing || value(h.Renewed) > since {
			t.Errorf("it is held for %v: %+v", time.Since(asked), h)
		}
		// A program of an older version takes it, for longer, which leaves those columns alone.
		dbtest.Exec(t, s.root, "UPDATE mysqllock SET token = token + 1, expires = expires + INTERVAL 1 HOUR WHERE name = 'k'")
		if h := held(); !unknown(h) {
			t.Errorf("of an older program: %+v", h)
		}
		dbtest.Exec(t, s.root, "UPDATE mysqllock SET token = token - 1, expires = expires - INTERVAL 1 HOUR WHERE name = 'k'")

		thaw := tap.Freeze()
		defer thaw()
		frozen := time.Now()
		dbtest.Soon(t, "it is silent", func() bool {
			h = held()
			return h.Silent()
		})
		if !known(h) || value(h.Renewed) > time.Since(frozen)+ttl/2+timing || value(h.Renewed) < ttl*2/5 {
			t.Errorf("frozen for %v: %+v", time.Since(frozen), h)
		}
		var l *inspect.Lock
		dbtest.Soon(t, "it runs out", func() bool {
			l = find(look(t, i, "k"), "", "k")
			return l != nil
		})
		// Ages are of the beginning of a look, and that the lease is over is of when its row was read, a moment later.
		if l.Lapsed == nil || l.Lapsed.Program != "holder" || value(l.Lapsed.Renewed) < ttl*9/10 || value(l.Lapsed.TTL) != ttl || len(l.Holders.List) > 0 {
			t.Errorf("run out: %+v, %+v", l, l.Lapsed)
		}
		thaw()
		dbtest.Soon(t, "it is lost", func() bool { return s.acquire(db, "k", lockctx.Lease(ttl)).Release() == nil })
		if l := find(look(t, i, "k"), "", "k"); l == nil || l.Lapsed != nil {
			t.Errorf("given back: %+v", l)
		}

		dbtest.Exec(t, s.root, dropTold)
		s.acquire(db, "k", lockctx.Lease(ttl))
		renewed := time.Now().Add(ttl)
		dbtest.Soon(t, "it is renewed without the columns", func() bool { return time.Now().After(renewed) })
		if h := held(); !unknown(h) {
			t.Errorf("without the columns: %+v", h)
		}
	})
}

// TestALateLockIsAsOldAsItIs: its transaction is older.
func TestALateLockIsAsOldAsItIs(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("early", "late")
		i := s.inspector(s.open("root"))
		started := time.Now()
		tx := s.rowsLocked("FOR UPDATE", "early")
		early := time.Now()
		dbtest.Soon(t, "time goes by", func() bool { return time.Since(early) > 300*time.Millisecond })
		granted := span{first: time.Now()}
		dbtest.Exec(t, tx, s.lockSQL("FOR UPDATE", "late"))
		granted.last = time.Now()
		s.rowAwaited("FOR UPDATE", "early")
		s.rowAwaited("FOR UPDATE", "late")
		var from, to time.Time
		var snap *inspect.Snapshot
		dbtest.Soon(t, "both are shown", func() bool { // MariaDB answers from a copy
			from, snap, to = time.Now(), look(t, i), time.Now()
			one, other := find(snap, "row", "early"), find(snap, "row", "late")
			return one != nil && other != nil && len(one.Holders.List) == 1 && len(other.Holders.List) == 1
		})
		for key, when := range map[string]span{"early": {started, early}, "late": granted} {
			l := find(snap, "row", key)
			if l == nil || len(l.Holders.List) != 1 {
				t.Fatalf("%s: %+v", key, l)
			}
			checkAge(t, s, key, l.Holders.List[0], when, from, to)
			if within := value(l.Holders.List[0].Within); within > to.Sub(started)+timing {
				t.Errorf("%s: its transaction began %v ago, and is said to be %v old", key, to.Sub(started), within)
			}
			// MySQL tells the same of both, which lie on one page.
			if !l.Holders.List[0].Since.IsZero() || l.Holders.List[0].Least == 0 || l.Holders.List[0].Within.IsZero() {
				t.Errorf("%s: %+v", key, l.Holders.List[0])
			}
		}
	})
}

// TestTheChainEndsAtWhoIsToBlame: A waits for a row of B, B for one of C, and C is idle. It is C's
// doing.
func TestTheChainEndsAtWhoIsToBlame(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ctx := context.Background()
		s.makeTable("one", "two", "three")
		conns := make([]uint64, 3)
		for n, keys := range [][2]string{{"three", ""}, {"two", "three"}, {"one", "two"}} {
			conn, err := s.root.Conn(ctx)
			dbtest.OK(t, err)
			dbtest.OK(t, conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&conns[n]))
			dbtest.OK(t, conn.PingContext(ctx))
			tx := dbtest.Begin(t, ctx, conn)
			dbtest.Exec(t, tx, s.lockSQL("FOR UPDATE", keys[0]))
			done := make(chan struct{})
			go func() {
				defer close(done)
				if keys[1] != "" {
					_, _ = tx.Exec(s.lockSQL("FOR UPDATE", keys[1]))
				}
			}()
			t.Cleanup(func() {
				dbtest.Exec(t, s.root, fmt.Sprintf("KILL %d", conns[n]))
				<-done
				_ = tx.Rollback()
				_ = conn.Close()
			})
			if keys[1] != "" {
				dbtest.Soon(t, keys[0]+" waits for "+keys[1], func() bool {
					l := find(look(t, s.inspector(s.root)), "row", keys[1])
					return l != nil && len(l.Waiters.List) == 1
				})
			}
		}
		s.rowAwaited("FOR UPDATE", "one")
		var snap *inspect.Snapshot
		dbtest.Soon(t, "all is shown", func() bool {
			snap = look(t, s.inspector(s.root))
			l := find(snap, "row", "one")
			return l != nil && len(l.Holders.List) == 1 && len(snap.Chain(l)) == 3
		})
		var found []uint64
		chain := snap.Chain(find(snap, "row", "one"))
		for _, link := range chain {
			found = append(found, link.Holder.ConnectionID)
		}
		if want := []uint64{conns[2], conns[1], conns[0]}; fmt.Sprint(found) != fmt.Sprint(want) {
			t.Fatalf("the chain is %v, want %v: %+v", found, want, snap.Locks)
		}
		dbtest.Equal(t, "they wait for %s", fmt.Sprint(chain[0].Holder.WaitsFor, chain[1].Holder.WaitsFor, chain[2].Holder.WaitsFor), "[two] [three] []")
		if a := chain[2].Holder.Activity; a == nil || a.Running || !chain[1].Holder.Activity.Running {
			t.Errorf("the last one does %v, and the one before %v", a, chain[1].Holder.Activity)
		}
	})
}

// TestWhatIsNotSeenIsNotSaidToBeNothing, whatever the right of the account. Nobody waits, so MariaDB shows no row
// lock to anybody.
func TestWhatIsNotSeenIsNotSaidToBeNothing(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		for strategy, option := range strategies {
			s.acquire(db, "the-"+strategy, option)
		}
		table := "GRANT SELECT ON " + s.Name + ".* TO "
		cases := []struct {
			rights string
			grants []string
			seen   map[kind]string
			unseen map[kind]int
		}{
			{"none", nil, map[kind]string{equippedMariaDB: "advisory"}, map[kind]int{mysqlServer: -1, plainMariaDB: -1, equippedMariaDB: -1}},
			{
				"the lock table",
				[]string{table},
				map[kind]string{mysqlServer: "lease", plainMariaDB: "lease", equippedMariaDB: "advisory lease"},
				map[kind]int{mysqlServer: -1, plainMariaDB: -1, equippedMariaDB: -1},
			},
			{
				"the lock table, PROCESS",
				[]string{table, "GRANT PROCESS ON *.* TO "},
				map[kind]string{mysqlServer: "lease", plainMariaDB: "lease", equippedMariaDB: "advisory lease"},
				map[kind]int{mysqlServer: -1, plainMariaDB: 1, equippedMariaDB: 1},
			},
			{
				"the lock table, performance_schema",
				[]string{table, "GRANT SELECT ON performance_schema.* TO "},
				map[kind]string{mysqlServer: "advisory lease row", plainMariaDB: "lease", equippedMariaDB: "advisory lease"},
				map[kind]int{plainMariaDB: -1, equippedMariaDB: -1},
			},
		}
		for _, c := range cases {
			user := s.user()
			account := "'" + user + "'@'%'"
			dbtest.Exec(t, s.root, "REVOKE SELECT, INSERT, UPDATE ON "+s.Name+".* FROM "+account)
			dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO "+account) // to be let in
			for _, grant := range c.grants {
				dbtest.Exec(t, s.root, grant+account)
			}
			i := s.inspector(s.open(user))
			var snap *inspect.Snapshot
			dbtest.Soon(t, c.rights, func() bool { // other tests have locks, too, and MariaDB counts all
				snap = look(t, i)
				if want := c.unseen[s.kind]; want > 0 {
					return value(snap.Unseen) >= want
				}
				return true
			})
			var seen []string
			for _, strategy := range []string{"advisory", "lease", "row"} {
				if find(snap, strategy, "the-"+strategy) != nil {
					seen = append(seen, strategy)
				}
			}
			if got := strings.Join(seen, " "); got != c.seen[s.kind] {
				t.Errorf("%s: seen are %q, want %q", c.rights, got, c.seen[s.kind])
			}
			if want := c.unseen[s.kind]; snap.Unseen.IsZero() != (want < 0) || value(snap.Unseen) < want || want == 0 && value(snap.Unseen) > 0 {
				t.Errorf("%s: %v are unseen, want %d", c.rights, snap.Unseen, want)
			}
			if holders, _ := snap.Incomplete(); holders != (len(seen) < 3) {
				t.Errorf("%s: of three %q are seen, and it is said that some may be missing: %v: %+v", c.rights, seen, holders, snap.Gaps)
			}
		}
	})
}

// TestAPingOfTheDriverIsNoWork: the last statement of the holder was earlier. If the server does
// not tell, its time is a bound.
func TestAPingOfTheDriverIsNoWork(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		cfg := s.Config()
		cfg.User = "root"
		db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: "holder", TTL: 6 * time.Second})) // pings each 2 s
		row, err := mysqllock.Acquire(t.Context(), db, "the-row")
		dbtest.OK(t, err)
		defer row.Release()
		asked := time.Now()
		dbtest.ExecIn(t, row.Context(), db, "DO 42, 'secret'")
		worked := time.Now()
		named, err := mysqllock.Acquire(t.Context(), db, "the-advisory", lockctx.Advisory())
		dbtest.OK(t, err)
		defer named.Release()
		s.queue(func() int {
			if l := find(look(t, s.inspector(s.root)), "row", "the-row"); l != nil {
				return len(l.Waiters.List)
			}
			return 0
		}, "root", "the-row", 1)
		i := s.inspector(s.open("root"))
		var h *inspect.Holder
		idle := func() time.Duration { // that is shown
			h = nil
			if l := find(look(t, i), "row", "the-row"); l != nil && len(l.Holders.List) == 1 {
				h = &l.Holders.List[0]
			}
			if h == nil || h.Activity == nil {
				return 0
			}
			return h.Activity.For
		}
		pinged, looks := false, dbtest.Within(t, dbtest.Patience)
		if s.mysql() {
			looks = dbtest.Within(t, 5*time.Second) // at least two pings
		}
		for last := idle(); looks.Err() == nil && !pinged; {
			before := time.Since(worked) - timing
			now := idle()
			switch {
			case h == nil:
			case s.mysql() && (now < before || h.Activity.Least || h.Activity.Statement != "DO ?, ?"):
				t.Fatalf("it has been idle for %v at least, and is said to be %v", before, h.Activity)
			case !s.mysql() && (!h.Activity.Least || h.Activity.Statement != "" || now > time.Since(asked)+timing):
				t.Fatalf("it has been idle for %v at least, and is said to be %v", before, h.Activity)
			}
			pinged, last = pinged || now < last, now
		}
		if pinged == s.mysql() {
			t.Errorf("a ping is seen: %v", pinged)
		}
		l := find(look(t, i, "the-advisory"), "advisory", "the-advisory")
		if l == nil || len(l.Holders.List) != 1 || l.Holders.List[0].Activity == nil || !l.Holders.List[0].Activity.Elsewhere {
			t.Errorf("the connection that only keeps the lock: %+v", l)
		}
		dbtest.OK(t, s.acquire(db, "another").Release())
		dbtest.Soon(t, "a transaction that holds an advisory lock itself is not said to work elsewhere", func() bool {
			tx := dbtest.Begin(t, lockctx.With(t.Context(), "in-transaction", lockctx.Advisory()), db)
			defer tx.Rollback()
			dbtest.Exec(t, tx, "SELECT COUNT(*) FROM mysqllock")
			l := find(look(t, i, "in-transaction"), "advisory", "in-transaction")
			return l != nil && len(l.Holders.List) == 1 && !l.Holders.List[0].Within.IsZero() && l.Holders.List[0].Activity != nil && !l.Holders.List[0].Activity.Elsewhere
		})
	})
}

// TestWaitersOfLeasesAndAdvisoryLocksMayBeMore: a caller without a connection to wait on asks again
// and again, which the server does not show.
func TestWaitersOfLeasesAndAdvisoryLocksMayBeMore(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		for strategy, option := range strategies {
			s.acquire(db, "the-"+strategy, option)
			l := find(look(t, s.inspector(s.root), "the-"+strategy), strategy, "the-"+strategy)
			polls := strategy != "row"
			if !polls && s.MariaDB() {
				continue // which does not list who holds row locks
			}
			if l == nil || l.Waiters.More != polls || l.Waiters.Count().Known().IsZero() != polls {
				t.Errorf("%s: %+v", strategy, l)
			}
		}
	})
}

// TestAgeOutlivesPings: the driver's signs of life hide since when a connection was idle. What earlier looks
// have seen of a row lock's age stays.
func TestAgeOutlivesPings(t *testing.T) {
	t.Parallel()
	onKinds(t, func(t *testing.T, s *scratch) {
		db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{TTL: 3 * time.Second}))
		before := time.Now()
		s.acquire(db, "k", lockctx.Row())
		i := s.inspector(s.root)
		s.queue(func() int {
			if l := find(look(t, i), "row", "k"); l != nil {
				return len(l.Waiters.List)
			}
			return 0
		}, "root", "k", 1)
		dbtest.Soon(t, "it is held for longer than between two signs of life", func() bool {
			l := find(look(t, i), "row", "k")
			if l == nil || len(l.Holders.List) != 1 {
				return false
			}
			h := l.Holders.List[0]
			if h.Least > time.Since(before) {
				t.Errorf("it was taken %v ago, and is held for %v at least", time.Since(before), h.Least)
			}
			return h.Least > 4*time.Second && h.Activity != nil && h.Activity.For < 3*time.Second
		})
	}, plainMariaDB)
}

// TestAHolderFrozenBeforeItsRenewalDoesNotLookHealthy until its lease is over: by the TTL of the lease before on the
// key, or by an earlier look.
func TestAHolderFrozenBeforeItsRenewalDoesNotLookHealthy(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		cfg, tap := s.Config(), new(dbtest.Tap)
		cfg.User = "root"
		tap.On(cfg)
		const ttl = 15 * time.Second // a look has more than half of it to see that it is not renewed
		db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: "holder"}))
		plain := s.open("root")
		i := s.inspector(plain)
		held := func(i *inspect.Inspector, key string) (h inspect.Holder) {
			t.Helper()
			if l := find(look(t, i), "lease", key); l != nil {
				h = l.Holders.List[0]
			}
			return h
		}
		hold := s.acquire(db, "used", lockctx.Lease(ttl))
		dbtest.Soon(t, "it is renewed", func() bool { return !held(i, "used").Renewed.IsZero() })
		dbtest.OK(t, hold.Release())
		before := time.Now()
		s.acquire(db, "used", lockctx.Lease(ttl))
		s.acquire(db, "new", lockctx.Lease(ttl))
		after := time.Now()
		thaw := tap.Freeze()
		defer thaw()
		fresh, first := held(s.inspector(plain), "used"), held(i, "new")
		if early := time.Since(before) < ttl/4; early && (fresh.Overdue() || first.Overdue()) || fresh.ExpectedTTL != inspect.Value(ttl) {
			t.Errorf("after %v the holder is %+v", time.Since(before), fresh)
		}
		dbtest.Soon(t, "its first renewal is overdue", func() bool {
			from := time.Now()
			h := held(s.inspector(plain), "used") // one that has not looked before
			if unrenewed, known := h.Unrenewed.Get(); known && (unrenewed < from.Sub(after)-timing || unrenewed > time.Since(before)+timing) {
				t.Errorf("it is %v to %v old, and said to be %v old", from.Sub(after), time.Since(before), unrenewed)
			}
			return h.Overdue()
		})
		dbtest.Soon(t, "that of a key without a lease before is overdue", func() bool {
			h := held(i, "new")
			return h.Overdue() && value(h.ExpectedTTL) <= ttl
		})
		if h := held(s.inspector(plain), "new"); h.Overdue() {
			t.Errorf("one look at a key without a lease before tells: %+v", h)
		}
	})
}

// TestAllAgesAreOfTheTimeOfTheSnapshot: also those that are read later, on a slow machine. MariaDB reads the text of a
// statement and its time one after the other: of a waiter that asks again at that moment it can tell the time of the
// statement before. So another look is taken.
func TestAllAgesAreOfTheTimeOfTheSnapshot(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		slow, err := intercept.With(slowAnswers{})(s.Connector(dbtest.As("root")))
		dbtest.OK(t, err)
		i := s.inspector(s.OpenDB(slow, nil))
		began := time.Now()
		for key, option := range map[string]lockctx.Option{"the-row": lockctx.Row(), "the-lease": lockctx.Lease(time.Minute)} {
			s.acquire(s.process("root", "holder"), key, option)
			s.queue(func() int {
				if l := find(look(t, s.inspector(s.root)), strings.TrimPrefix(key, "the-"), key); l != nil {
					return len(l.Waiters.List)
				}
				return 0
			}, "root", key, 1, option)
		}
		var wrong []error
		for range 3 {
			if wrong = agesAfter(look(t, i), began); len(wrong) == 0 {
				break
			}
		}
		dbtest.OK(t, errors.Join(wrong...))
	})
}

// agesAfter returns what snap says to be older than what began then.
func agesAfter(snap *inspect.Snapshot, began time.Time) (wrong []error) {
	most := snap.Time.Sub(began) + timing
	for _, l := range snap.Locks {
		for _, h := range l.Holders.List {
			age := max(value(h.Since), h.Least, value(h.Within))
			if h.Activity != nil {
				age = max(age, h.Activity.For)
			}
			if age > most || l.Strategy == "lease" && l.Remaining < time.Minute-most {
				wrong = append(wrong, fmt.Errorf("%v after it began %s is held by %+v, which does %v", most, l.Key, h, h.Activity))
			}
		}
		for _, w := range l.Waiters.List {
			if w.Least > most {
				wrong = append(wrong, fmt.Errorf("%v after it began somebody has waited for %s for %v", most, l.Key, w.Least))
			}
		}
	}
	if len(snap.Locks) != 2 {
		wrong = append(wrong, fmt.Errorf("shown are %+v", snap.Locks))
	}
	return wrong
}

// slowAnswers makes each answer late.
type slowAnswers struct{ sqlmw.NullInterceptor }

func (slowAnswers) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	time.Sleep(250 * time.Millisecond)
	rows, err := conn.QueryContext(ctx, text, args)
	return ctx, rows, err
}
