package inspect_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Of what the server does not show an account is told which grant would show it,
// and after that it is shown.
func TestEachGapNamesTheGrantThatClosesIt(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		user := s.user()
		all := s.inspector(s.root)
		for strategy, option := range strategies {
			key := "the-" + strategy
			s.acquire(s.process("root", "holder"), key, option) // of another account
			waiting := func() int {
				if l := find(look(t, all), strategy, key); l != nil {
					return len(l.Waiters.List)
				}
				return 0
			}
			s.queue(waiting, user, key, 2, option)
			s.queue(func() int { return waiting() - 2 }, "root", key, 1, option)
		}
		db := s.open(user)
		i := s.inspector(db)
		var snap *inspect.Snapshot
		// allWait looks until so many are shown to wait for each: one that asks again does not wait for a moment.
		allWait := func(n int) {
			dbtest.Soon(t, "all are shown", func() bool {
				snap = look(t, i)
				for strategy := range strategies {
					if l := find(snap, strategy, "the-"+strategy); l == nil || len(l.Waiters.List) != n {
						return false
					}
				}
				return true
			})
		}
		allWait(2) // of its own account
		grant := "GRANT PROCESS ON *.* TO '" + user + "'"
		if s.mysql() {
			grant = "GRANT SELECT ON performance_schema.* TO '" + user + "'"
		}
		g := gap(snap, "who has locked rows")
		if g == nil || !strings.HasPrefix(g.Remedy, grant) {
			t.Fatalf("the gaps are %+v", snap.Gaps)
		}
		for strategy := range strategies {
			l := find(snap, strategy, "the-"+strategy)
			if l == nil {
				t.Fatalf("%s: nothing is shown: %+v", strategy, snap)
			}
			for _, w := range l.Waiters.List {
				if w.ConnectionID == 0 || w.User != user || s.kind != plainMariaDB && !strings.HasPrefix(w.Program, "waiter-") {
					t.Errorf("%s: a waiter is %+v", strategy, w)
				}
			}
			if holders := map[string]int{"row": 0, "lease": 1, "advisory": 1}[strategy]; len(l.Holders.List) != holders {
				t.Errorf("%s: the holders are %+v", strategy, l.Holders.List)
			}
		}
		// Taken at its word.
		for _, g := range snap.Gaps {
			if strings.HasPrefix(g.Remedy, "GRANT ") {
				dbtest.Exec(t, s.root, g.Remedy)
			}
		}
		db.SetMaxIdleConns(0)
		allWait(3)
		if gap(snap, "who has locked rows") != nil {
			t.Errorf("the gaps are still %+v", snap.Gaps)
		}
		for strategy := range strategies {
			if l := find(snap, strategy, "the-"+strategy); l == nil || len(l.Holders.List) != 1 || len(l.Waiters.List) != 3 {
				t.Errorf("%s: after the grant: %+v", strategy, l)
			}
		}
	})
}

func TestAnAccountWithoutRightsIsToldWhichItNeeds(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		s.acquire(s.process("root", "holder"), "k", lockctx.Lease(30*time.Second))
		user := s.user()
		dbtest.Exec(t, s.root, "REVOKE SELECT, INSERT, UPDATE ON "+s.Name+".* FROM '"+user+"'@'%'")
		dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO '"+user+"'@'%'") // to be let in
		snap := look(t, s.inspector(s.open(user)))
		if g := gap(snap, "leases, and"); g == nil || !strings.Contains(g.Remedy, "GRANT SELECT ON `"+s.Name+"`.`mysqllock` TO '"+user+"'") {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
		if len(snap.Locks) > 0 {
			t.Errorf("the locks are %+v", snap.Locks)
		}
	})
}

func TestAMissingTableIsAGap(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		snap := look(t, s.inspector(s.root))
		if g := gap(snap, "leases, and"); g == nil || !strings.Contains(g.Why, "does not exist") {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
	})
}

// TestALookWaitsForNobody: nothing that is locked makes a question wait, and none waits long where the table itself
// is being changed.
func TestALookWaitsForNobody(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		s.acquire(db, "a", lockctx.Lease(30*time.Second))
		s.acquire(db, "b", lockctx.Lease(30*time.Second))
		tx, err := s.root.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock FOR UPDATE")
		i := s.inspector(s.root)
		inTime := func(what string, limit time.Duration, f func(context.Context)) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			if f(ctx); time.Since(began) > limit {
				t.Errorf("%s took %v", what, time.Since(began))
			}
		}
		inTime("a snapshot", 30*time.Second, func(ctx context.Context) {
			if l := find(look(t, i), "lease", "a"); l == nil || len(l.Holders.List) != 1 {
				t.Errorf("the lease is %+v", l)
			}
		})
		inTime("the doctor", 30*time.Second, func(ctx context.Context) {
			_, err := i.Doctor(ctx)
			dbtest.OK(t, err)
		})
		inTime("Clean", 30*time.Second, func(ctx context.Context) {
			done, err := i.Clean(ctx, inspect.CleanUp{Limit: 100})
			if done.Removed != 0 || !errors.Is(err, lockerr.ErrLocked) {
				t.Errorf("it did %+v, %v", done, err)
			}
		})

		altered := make(chan error, 1)
		alter := s.open("root")
		go func() {
			_, err := alter.Exec("ALTER TABLE mysqllock ADD COLUMN more INT")
			altered <- err
		}()
		dbtest.Soon(t, "the ALTER waits", func() bool {
			var n int
			dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND STATE LIKE 'Waiting for table metadata%'", s.Name).Scan(&n))
			return n == 1
		})
		inTime("a snapshot during ALTER", 30*time.Second, func(ctx context.Context) {
			if g := gap(look(t, i), "leases, and"); g == nil || !strings.Contains(g.Why, "altering") {
				t.Errorf("the gap is %+v", g)
			}
		})
		inTime("the doctor during ALTER", 30*time.Second, func(ctx context.Context) {
			_, err := i.Doctor(ctx)
			dbtest.OK(t, err)
		})
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, <-altered)
	})
}

// An Inspector leaves nothing of its settings behind, whatever the session is like.
func TestAnInspectorLeavesNoSettingsBehind(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		holder := s.process("root", "holder")
		s.acquire(holder, "k", lockctx.Lease(30*time.Second))
		s.acquire(holder, "named", lockctx.Advisory())
		db := s.process("root", "inspector")
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "SET SESSION autocommit = 0, sql_mode = 'ANSI_QUOTES', sql_select_limit = 1, time_zone = '+05:00', lock_wait_timeout = 77")
		var before, after uint64
		dbtest.OK(t, db.QueryRow("SELECT CONNECTION_ID()").Scan(&before))
		ctx := lockctx.With(t.Context(), "k", lockctx.NoWait()) // not under the lock of its caller
		snap, err := s.inspector(db).Snapshot(ctx, inspect.Filter{Keys: []string{"k", "named"}})
		dbtest.OK(t, err)
		if l := find(snap, "advisory", "named"); l == nil || l.Holders.List[0].User != "root" || s.kind != plainMariaDB && l.Holders.List[0].PID != os.Getpid() {
			t.Errorf("the advisory lock is %+v", l)
		}
		if l := find(snap, "lease", "k"); l == nil || len(l.Holders.List) != 1 || l.Remaining < 5*time.Second || l.Expires.Before(time.Now().UTC()) {
			t.Errorf("the lease is %+v", l)
		}
		if time.Since(snap.Time).Abs() > 10*time.Minute {
			t.Errorf("it is %v there, and %v here", snap.Time, time.Now().UTC())
		}
		dbtest.OK(t, db.QueryRow("SELECT CONNECTION_ID()").Scan(&after))
		if before == after {
			t.Error("the connection with the settings was given back")
		}
		_, err = s.inspector(db).Snapshot(canceled(), inspect.Filter{})
		if err == nil {
			t.Error("a context that has ended is no matter")
		}
	})
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestBadNamesInOptionsAreErrors(t *testing.T) {
	for _, o := range []inspect.Options{{Table: "a.b.c"}, {Table: "a`b"}, {Namespace: strings.Repeat("n", 256)}} {
		if _, err := inspect.New(new(sql.DB), o); err == nil {
			t.Errorf("%+v is no error", o)
		}
	}
}

// TestWhatIsShownDoesNotDependOnTheTextsOfOthers, to an account without rights either. If the server has no other
// list, there is a gap.
func TestWhatIsShownDoesNotDependOnTheTextsOfOthers(t *testing.T) {
	for name, opts := range map[string][]string{"": nil, "without performance_schema": {"--performance-schema=OFF"}} {
		t.Run(name, func(t *testing.T) {
			on := dbtest.OnOwnServers[*scratch]
			if opts != nil { // MariaDB has it off in any case
				on = dbtest.OnOwnMySQL
			}
			on(t, func(d *dbtest.Database) *scratch {
				return newScratch(map[bool]kind{true: plainMariaDB, false: mysqlServer}[d.MariaDB()], d)
			}, func(t *testing.T, s *scratch) {
				s.Neighbours()
				holder := s.process("root", "holder")
				for strategy, option := range strategies {
					s.acquire(holder, "the-"+strategy, option)
				}
				tx := dbtest.Begin(t, lockctx.With(t.Context(), "emoji"), holder)
				defer tx.Rollback()
				dbtest.Exec(t, tx, "DO '\U0001F512', _binary'\xff\xfe', '"+strings.Repeat("z", 3<<20)+"'")
				for _, user := range []string{"root", s.user(), s.user("PROCESS ON *.*")} {
					i := s.inspector(s.open(user))
					snap := look(t, i)
					if find(snap, "lease", "the-lease") == nil {
						t.Errorf("%s sees %+v, gaps %+v", user, snap.Locks, snap.Gaps)
					}
					if user == "root" && s.mysql() && opts == nil {
						if l := find(snap, "row", "emoji"); l == nil || l.Holders.List[0].Activity == nil {
							t.Errorf("the row's holder is not shown: %+v", l)
						}
					}
					_, err := i.Doctor(t.Context())
					dbtest.OK(t, err)
				}
			}, opts...)
		})
	}
}
