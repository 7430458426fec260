package optimistic_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestTheFirstOnAKeyWaitsForARowLockTakenBefore the row was marked: that does not count its commit.
func TestTheFirstOnAKeyWaitsForARowLockTakenBefore(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		holder, versioned := s.lock("k", "FOR UPDATE")
		if versioned {
			t.Error("it is marked already")
		}
		s.Exec(holder, setCounter("k", 5))

		began := time.Now()
		if err := p.within(dbtest.Limited(t), 0, "k"); !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
			t.Errorf("without a wait: %v", err)
		}
		if d := time.Since(began); d > time.Minute {
			t.Errorf("without a wait it took %v", d)
		}
		var e *lockerr.Error
		err := p.told(200*time.Millisecond, "k")
		if !errors.Is(err, lockerr.ErrTimeout) || !errors.As(err, &e) || e.Waited < 200*time.Millisecond || e.Waited > 20*time.Second {
			t.Error(err)
		}
		s.wantRow("k", "0 0 nobody")

		remembered := make(chan []*optimistic.Version, 1)
		go func() { remembered <- p.remember(nil, "k") }()
		dbtest.Soon(t, "it waits", func() bool { return s.busy("ON DUPLICATE KEY") == 1 })
		select {
		case <-remembered:
			t.Fatal("it did not wait")
		default:
		}
		s.Exec(holder, "COMMIT")
		versions := <-remembered
		c := s.Connect()
		s.Exec(c, "START TRANSACTION")
		dbtest.Equal(t, "what the holder of the row lock wrote is not there: %d", s.counter(c, "k"), 5)
		s.wantRow("k", "1 1 nobody")
		later, versioned := s.lock("k", "FOR UPDATE")
		if !versioned {
			t.Error("those who lock the row now are not told to count")
		}
		s.Exec(later, "ROLLBACK")
		p.wantCommit(c, versions...)
	})
}

func TestWaitersForRowsKeepOneConnectionOfControl(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		var keys []string
		for i := range 6 {
			keys = append(keys, fmt.Sprint("locked", i))
		}
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), keys))
		var holders []driver.Conn
		for _, key := range keys {
			c, _ := s.lock(key, "FOR UPDATE")
			holders = append(holders, c)
		}
		var all sync.WaitGroup
		for _, key := range keys {
			all.Go(func() { p.remember(nil, key) })
		}
		dbtest.Soon(t, "they wait", func() bool { return s.busy("ON DUPLICATE KEY") == 1 && p.control.Stat().InUse == 1 })
		began := time.Now()
		p.remember(nil, "free")
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("another key took %v", d)
		}
		dbtest.Soon(t, "one connection waits, and those that only looked are back", func() bool { return p.control.Stat().InUse == 1 })
		for _, c := range holders {
			s.Exec(c, "COMMIT")
		}
		all.Wait()
	})
}

func TestAWaitBeyondTheServersBoundBeginsAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(cfg *strategy.Config) {
			cfg.Control = s.pool(2, control+", innodb_lock_wait_timeout = 1")
		})
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		holder, _ := s.lock("k", "FOR UPDATE")
		var ended sync.WaitGroup
		defer ended.Wait()
		began := time.Now()
		ended.Go(func() {
			time.Sleep(1200 * time.Millisecond)
			s.Exec(holder, "COMMIT")
		})
		p.remember(nil, "k")
		if d := time.Since(began); d < 1200*time.Millisecond || d > 10*time.Second {
			t.Errorf("remembered after %v", d)
		}
	})
}

// TestALockedRowAndACountedCommitAreConflicts: the row is locked by one or by many.
func TestALockedRowAndACountedCommitAreConflicts(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		c := s.Connect()
		for _, how := range []string{"FOR UPDATE", "LOCK IN SHARE MODE"} {
			versions := p.remember(c, "k")
			holder, _ := s.lock("k", how)
			s.Exec(c, "START TRANSACTION")
			s.Exec(c, setCounter("k", 1))
			began := time.Now()
			err := p.compare(c, versions)
			if d := time.Since(began); d > 30*time.Second {
				t.Errorf("%s: it waited for %v", how, d)
			}
			if !errors.Is(err, lockerr.ErrConflict) || !errors.Is(err, lockerr.ErrLocked) {
				t.Errorf("%s: %v", how, err)
			}
			s.Exec(c, "ROLLBACK")
			s.Exec(holder, "ROLLBACK")
			p.wantCommit(s.begun(c), versions...)
		}
		versions := p.remember(c, "k")
		holder, _ := s.lock("k", "FOR UPDATE")
		s.Exec(holder, "UPDATE "+s.table.String()+" SET token = token + 1"+where("k"))
		s.Exec(holder, "COMMIT")
		p.wantConflict(s.begun(c), versions...)
		for _, never := range []uint64{0, versions[0].Number() + 3, 1<<64 - 1} {
			p.wantConflict(s.begun(c), p.Given("k", never))
		}

		err := p.compare(c, versions)
		var said *lockerr.Error
		if !errors.As(err, &said) || said.Op != "commit" || said.Key != "k" || said.Strategy != hint.StrategyOptimistic || errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("the error is %#v", err)
		}
	})
}

func TestNoVersionOutlivesItsRow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if !s.info.SkipLocked {
			t.Skip("there is no clean-up")
		}
		clean := func() {
			t.Helper()
			if n, err := s.table.Clean(t.Context(), s.own, 0, 10); err != nil || n != 1 {
				t.Fatalf("%d rows removed, %v", n, err)
			}
		}
		p, other := s.process(), s.process()
		c := s.Connect()
		keep := func() {
			t.Helper()
			if n, err := s.table.Clean(t.Context(), s.own, time.Hour, 10); err != nil || n != 0 {
				t.Fatalf("%d rows in use removed, %v", n, err)
			}
		}
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		s.set("k", "expires = '2020-01-01'")
		before := p.remember(c, "k")[0]
		keep()
		s.set("k", "expires = '2020-01-01'")
		p.wantCommit(s.begun(c), before)
		keep()
		before = p.remember(c, "k")[0]
		clean()
		p.wantConflict(s.begun(c), before)

		// The new row begins with the old one's token, and row locks do not count on it.
		dbtest.OK(t, other.rows.Exist(dbtest.Limited(t), []string{"k"}))
		s.wantRow("k", fmt.Sprint(before.Number(), " 0 nobody"))
		holder, _ := s.lock("k", "FOR UPDATE")
		s.Exec(holder, setCounter("k", 5))
		s.Exec(holder, "COMMIT")
		p.wantConflict(s.begun(c), before)

		after := p.remember(c, "k")[0]
		if after.Number() <= before.Number() {
			t.Errorf("%d before the clean-up, %d after it", before.Number(), after.Number())
		}
		p.wantConflict(s.begun(c), before)
		p.wantCommit(s.begun(c), after)

		// A row is made again where it is known to be there and is not.
		clean()
		again := p.remember(c, "k", "new")
		if again[0].Number() <= after.Number()+1 || again[1].Number() == 0 {
			t.Errorf("%d before the clean-up, %d and %d after it", after.Number(), again[0].Number(), again[1].Number())
		}
	})
}

func (p *process) lease(r lease.Request) *lease.Grant {
	p.T.Helper()
	r.Wait = time.Minute
	r.Waiting = func(ctx context.Context) (context.Context, func(), error) { return ctx, func() {}, nil }
	held, err := p.leases.Acquire(dbtest.Limited(p.T), r)
	dbtest.OK(p.T, err)
	return held
}

func wantHolder(t *testing.T, err error) {
	t.Helper()
	var said *lockerr.Error
	if !errors.As(err, &said) || said.Holder == nil || said.Holder.Program != owner {
		t.Errorf("the holder is not named: %v", err)
	}
}

// TestAVersionWaitsForCommitsUnderALapsedLease: the last one of its holder, which its fence has
// let through, may still be under way when the lease has run out.
func TestAVersionWaitsForCommitsUnderALapsedLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(), s.process()
		p.remember(nil, "k")
		holder := s.Connect()
		held := other.lease(lease.Request{Key: "k", TTL: 8 * time.Second})
		held.Lapse()
		s.Exec(holder, "BEGIN")
		s.Exec(holder, setCounter("k", 5))
		check, err := other.leases.Check(dbtest.Limited(t), pool.Adopt(holder), []strategy.Grant{held}, strategy.Commit{Wrote: true})
		dbtest.OK(t, err)
		dbtest.OK(t, dbtest.Err(server.SendSingly(dbtest.Limited(t), holder, check.Before...)))
		dbtest.Soon(t, "the lease runs out", func() bool {
			return s.Query(s.own, "SELECT "+schema.Live("")+" FROM "+s.table.String()+where("k"))[0][0] == "0"
		})
		c := s.Connect()
		p.wantConflict(s.begun(c), p.Given("k", held.Token()))

		remembered := make(chan []*optimistic.Version, 1)
		go func() { remembered <- p.remember(nil, "k") }()
		dbtest.Soon(t, "it waits", func() bool { return s.busy("ON DUPLICATE KEY") == 1 })
		select {
		case <-remembered:
			t.Error("it did not wait")
			return
		default:
		}
		s.Exec(holder, "COMMIT")
		versions := <-remembered
		s.wantRow("k", fmt.Sprint(held.Token()+1, " 1 nobody"))

		// Nothing that its holder does late finds it.
		dbtest.Is(t, "the release of a lease that has run out", held.Release(), lockerr.ErrLost)
		s.wantRow("k", fmt.Sprint(held.Token()+1, " 1 nobody"))
		s.Exec(c, "START TRANSACTION")
		dbtest.Equal(t, "what the holder of the lease wrote is not there: %d", s.counter(c, "k"), 5)
		p.wantCommit(c, versions...)

		// A lease's token is no version, even where nobody has prepared it.
		s.set("k", "owner = 'x#12345678', expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND")
		p.wantConflict(s.begun(c), p.Given("k", versions[0].Number()+1))
	})
}

// TestARowTakenMeanwhileIsLeftAsItIs: it is not to be prepared any more, once nobody has locked
// it.
func TestARowTakenMeanwhileIsLeftAsItIs(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var cases dbtest.Together
		defer cases.Wait()
		for _, before := range []string{"versioned = 0", "versioned = 1, owner = 'x', expires = '2020-01-01'"} {
			cases.Run(t, before, func(t *testing.T) {
				s := newScratch(s.Beside(t))
				p := s.process()
				dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
				s.set("k", before)
				holder, _ := s.lock("k", "FOR UPDATE")
				ended := dbtest.Go(func() error { return p.within(dbtest.Limited(t), 6*time.Second, "k") })
				dbtest.Soon(t, "it waits", func() bool { return s.busy("ON DUPLICATE KEY") == 1 })
				s.Exec(holder, "UPDATE "+s.table.String()+" SET token = 7, owner = '"+owner+"#12345678', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR"+where("k"))
				s.Exec(holder, "COMMIT")
				err := <-ended
				dbtest.Is(t, before, err, lockerr.ErrTimeout)
				wantHolder(t, err)
				if got := s.row("k"); !strings.HasPrefix(got, "7 ") || !strings.HasSuffix(got, owner+"#12345678") {
					t.Errorf("%s: the row is %q", before, got)
				}
			})
		}
	})
}

// TestAWaiterThatIsWokenForNothingRests: the same lease is still there. It does not ask again and again, and ends
// each turn that it is given.
func TestAWaiterThatIsWokenForNothingRests(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		calls, turns := 0, 0
		p := s.process(func(cfg *strategy.Config) {
			cfg.Await = func(_ context.Context, key string, _ time.Time, atMost time.Duration) (func(), error) {
				if key != "k" || atMost > ttl/3 {
					t.Errorf("asked to wait for %s, for %v", key, atMost)
				}
				calls++
				turns++
				return func() { turns-- }, nil
			}
		})
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		s.set("k", "owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
		for began := time.Now(); ; {
			calls = 0
			err := p.within(dbtest.Limited(t), 600*time.Millisecond, "k")
			if errors.Is(err, lockerr.ErrNoAnswer) && time.Since(began) < dbtest.Patience {
				continue // a busy server has not answered in time
			}
			if !errors.Is(err, lockerr.ErrTimeout) || calls < 1 || calls > 5 {
				t.Errorf("%d times: %v", calls, err)
			}
			break
		}
		s.set("k", "expires = UTC_TIMESTAMP(6) + INTERVAL 400000 MICROSECOND")
		p.remember(nil, "k")
		dbtest.Equal(t, "%d turns are not over", turns, 0)
	})
}

// TestACommitLocksOnlyTheRowsOfItsKeys, whatever the optimizer thinks of the table's size.
func TestACommitLocksOnlyTheRowsOfItsKeys(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		free := func() string {
			return s.Query(s.own, "SELECT COUNT(*) FROM (SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' FOR UPDATE SKIP LOCKED) d")[0][0]
		}
		insert := func(from, to int) {
			var lines []string
			for i := from; i < to; i++ {
				lines = append(lines, fmt.Sprintf("('app', 'n%05d', 7, 1)", i))
			}
			s.Exec(s.own, "INSERT INTO "+s.table.String()+" (namespace, name, token, versioned) VALUES "+strings.Join(lines, ", "))
			s.Query(s.own, "ANALYZE TABLE "+s.table.String())
		}
		total := 0
		for _, size := range []int{12, 10000} {
			insert(total, size)
			total = size
			for _, isolation := range []string{"REPEATABLE READ", "READ COMMITTED"} {
				for _, n := range []int{1, 2, 9, 12} {
					c := s.Connect()
					s.Exec(c, "SET SESSION TRANSACTION ISOLATION LEVEL "+isolation)
					var versions []*optimistic.Version
					for i := range n {
						versions = append(versions, p.Given(fmt.Sprintf("n%05d", i), 7))
					}
					s.Exec(c, "START TRANSACTION")
					dbtest.OK(t, p.compare(c, versions))
					if got := free(); got != fmt.Sprint(size-n) {
						t.Errorf("%s, %d keys: %s of %d rows are free", isolation, n, got, size)
					}
					other := s.Connect()
					s.Exec(other, "SET SESSION innodb_lock_wait_timeout = 1")
					s.Exec(other, "BEGIN")
					for _, name := range []string{"", "n00000 ", "n00001 ", "n00011 ", "z"} { // between the rows
						s.Exec(other, "INSERT INTO "+s.table.String()+" (namespace, name) VALUES ('app', '"+name+"-')")
					}
					s.Exec(other, "ROLLBACK")
					s.Exec(c, "ROLLBACK")
				}
			}
		}
	})
}

func TestSettingsOfASessionChangeNoVersion(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		sessions := []string{
			"sql_mode = ''", "sql_mode = 'ANSI,TRADITIONAL,HIGH_NOT_PRECEDENCE,NO_BACKSLASH_ESCAPES,IGNORE_SPACE,PAD_CHAR_TO_FULL_LENGTH'",
			"sql_safe_updates = 1", "sql_select_limit = 0", "sql_select_limit = 1", "sql_big_selects = 0, max_join_size = 1000", "NAMES gbk", "NAMES sjis",
			"character_set_connection = ucs2", "time_zone = '+05:30'", "optimizer_switch = 'derived_merge=off'", "optimizer_switch = 'derived_merge=on'",
			"div_precision_increment = 0", "group_concat_max_len = 4", "innodb_lock_wait_timeout = 50", "autocommit = 0", "unique_checks = 0",
		}
		for _, isolation := range []string{"READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"} {
			sessions = append(sessions, "SESSION TRANSACTION ISOLATION LEVEL "+isolation)
		}
		if s.info.MariaDB {
			sessions = append(sessions, "sql_mode = 'ORACLE'", "sql_mode = 'SIMULTANEOUS_ASSIGNMENT'", "sql_mode = 'MSSQL'", "sql_mode = 'EMPTY_STRING_IS_NULL'",
				"innodb_snapshot_isolation = ON", "innodb_snapshot_isolation = OFF", "max_statement_time = 5", "join_cache_level = 8")
		}
		keys := []string{"'; DROP TABLE x; --", "\\\x00\xff\x81'", "schön"}
		checked := s.checksSnapshots()
		p, other := s.process(), s.process()
		s.Exec(s.own, "CREATE TABLE numbers (id INT AUTO_INCREMENT PRIMARY KEY, n INT)")
		for _, params := range []string{"", "clientFoundRows=true", "interpolateParams=true&multiStatements=true"} {
			for _, session := range sessions {
				if params != "" && session != "sql_mode = ''" {
					continue
				}
				c := s.Connect(dbtest.With(params))
				s.Exec(c, "SET "+session)
				conflicting := 0
				for _, conflict := range []bool{false, true} {
					versions := p.remember(c, keys...)
					s.Exec(c, "COMMIT")
					s.Exec(c, "START TRANSACTION")
					s.Query(c, "SELECT n FROM counter")
					s.Exec(c, "INSERT INTO numbers (n) VALUES (1), (2)")
					id := s.Query(c, "SELECT LAST_INSERT_ID() LIMIT 1")[0][0]
					if conflict {
						s.Exec(s.own, "BEGIN")
						other.wantCommit(s.own, other.Given(keys[1], versions[1].Number()))
						err := p.compare(c, versions)
						if !errors.Is(err, lockerr.ErrConflict) || errors.Is(err, lockerr.ErrLocked) {
							t.Errorf("%s, %s: %v", params, session, err)
						}
						if strings.Contains(err.Error(), "1020") {
							conflicting++
						}
						s.Exec(c, "ROLLBACK")
						continue
					}
					if err := p.compare(c, versions); err != nil {
						t.Errorf("%s, %s: %v", params, session, err)
					}
					if got := s.Query(c, "SELECT LAST_INSERT_ID() LIMIT 1")[0][0]; got != id {
						t.Errorf("%s, %s: LAST_INSERT_ID() was %s and is %s", params, session, id, got)
					}
					if rows := s.Query(c, "SHOW WARNINGS"); len(rows) > 0 {
						t.Errorf("%s, %s: %q", params, session, rows)
					}
					s.Exec(c, "COMMIT")
					if got, want := s.row(keys[2]), fmt.Sprint(versions[2].Number()+1, " 1 nobody"); got != want {
						t.Errorf("%s, %s: %q, want %q", params, session, got, want)
					}
				}
				seen := checked
				switch session {
				case "innodb_snapshot_isolation = ON":
					seen = true
				case "sql_select_limit = 0", "innodb_snapshot_isolation = OFF", "SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED", "SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED":
					seen = false
				}
				if (conflicting == 1) != seen {
					t.Errorf("%s: %d times 1020", session, conflicting)
				}
			}
		}
	})
}

// TestAnUncommittedVersionIsNotRemembered: it may never be one.
func TestAnUncommittedVersionIsNotRemembered(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		before := p.remember(nil, "k")[0]
		holder, _ := s.lock("k", "FOR UPDATE")
		s.Exec(holder, "UPDATE "+s.table.String()+" SET token = token + 1"+where("k"))
		for _, control := range []bool{false, true} {
			c := s.Connect()
			s.Exec(c, "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
			dbtest.Equal(t, "the test sees %s", s.Query(c, "SELECT token FROM "+s.table.String()+where("k"))[0][0], fmt.Sprint(before.Number()+1))
			if control {
				made := s.pool(1, "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
				p, c = s.process(func(cfg *strategy.Config) { cfg.Control = made }), nil
			}
			for range 2 {
				if got := p.remember(c, "k")[0]; got.Number() != before.Number() {
					t.Errorf("remembered %d, and %d is committed", got.Number(), before.Number())
				}
			}
		}
	})
}

func TestCancelledCallersAreToldWhyAndLeaveNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var awaits atomic.Int64 // waits for leases
		p := s.process(func(cfg *strategy.Config) {
			await := cfg.Await
			cfg.Await = func(ctx context.Context, key string, since time.Time, atMost time.Duration) (func(), error) {
				awaits.Add(1)
				return await(ctx, key, since, atMost)
			}
			cfg.Control = s.pool(4, "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 6") // after that the server ends by itself what nobody kills
		})
		keys := []string{"first", "leased", "locked"}
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), keys))
		s.set("leased", "owner = 'host:1:test#12345678', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, token = 9")
		s.lock("locked", "FOR UPDATE")
		s.lock("first", "FOR UPDATE")
		for _, key := range []string{"leased", "locked"} {
			killed := false
			for try := 0; try < 20 && !killed; try++ { // on a busy machine one may be left to the server's own limit
				ctx, cancel := context.WithCancel(context.Background())
				ended, before := make(chan error, 1), awaits.Load()
				go func() { ended <- p.within(ctx, time.Minute, key) }()
				if key == "locked" {
					dbtest.Soon(t, "it waits", func() bool { return s.busy("/* mysqllock") == 1 })
				} else {
					dbtest.Soon(t, "it waits for the lease", func() bool { return awaits.Load() > before })
				}
				cancel()
				if err := <-ended; !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, lockerr.ErrLocked) || !errors.Is(err, context.Canceled) {
					t.Errorf("%s: %v", key, err)
				}
				began := time.Now()
				dbtest.Soon(t, "nothing is left", func() bool { return s.busy("ON DUPLICATE KEY") == 0 })
				killed = time.Since(began) < 3*time.Second
			}
			if !killed {
				t.Errorf("%s: nobody ends the statement of a caller who is gone", key)
			}
		}
		s.wantRow("locked", "0 0 nobody")

		// Behind another that waits in the server.
		first, cancelFirst := context.WithCancel(context.Background())
		var all sync.WaitGroup
		all.Go(func() { _ = p.within(first, time.Minute, "first") })
		dbtest.Soon(t, "it waits", func() bool { return s.busy("/* mysqllock") == 1 })
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := p.within(ctx, 20*time.Second, "locked")
		if d := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || d > 10*time.Second {
			t.Errorf("after %v: %v", d, err)
		}
		cancelFirst()
		all.Wait()

		ended, cancel := context.WithCancel(context.Background())
		cancel()
		c := s.Connect()
		dbtest.Is(t, "before it began", dbtest.Err(p.rememberOn(ended, c, optimistic.Request{Keys: []string{"k"}})), context.Canceled)
	})
}

func TestWhoeverIsAskedBeforeAWaitMayRefuseIt(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"leased", "locked"}))
		s.set("leased", "owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
		s.lock("locked", "FOR UPDATE")
		refused := errors.New("refused")
		for _, key := range []string{"leased", "locked"} {
			calls, done := 0, 0
			r := optimistic.Request{Keys: []string{key}, Wait: 20 * time.Second}
			r.Waiting = func(ctx context.Context) (context.Context, func(), error) {
				if calls++; calls == 2 {
					return nil, nil, refused
				}
				ctx, cancel := context.WithCancelCause(ctx)
				time.AfterFunc(20*time.Millisecond, func() { cancel(lockerr.ErrClosed) })
				return ctx, func() { done++; cancel(nil) }, nil
			}
			dbtest.Is(t, key, dbtest.Err(p.Remember(dbtest.Limited(t), r)), lockerr.ErrClosed)
			dbtest.Is(t, key, dbtest.Err(p.Remember(dbtest.Limited(t), r)), refused)
			if calls != 2 || done != 1 {
				t.Errorf("%s: %d calls, %d done", key, calls, done)
			}
		}
	})
}

// TestChangesOfTheTableKeepCommitsForASecond at most: those of the lock table's definition.
func TestChangesOfTheTableKeepCommitsForASecond(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(), s.Connect()
		versions := p.remember(c, "k")
		reader := s.Connect()
		s.Exec(reader, "BEGIN")
		s.Query(reader, "SELECT 1 FROM "+s.table.String())
		var all sync.WaitGroup
		changer := s.Connect()
		all.Go(func() { s.Exec(changer, "ALTER TABLE "+s.table.String()+" COMMENT = 'changed'") })
		dbtest.Soon(t, "it waits", func() bool {
			return len(s.Query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE DB = '"+s.Name+"' AND STATE LIKE 'Waiting for table metadata%'")) == 1
		})
		p.wantConflict(s.begun(c), versions...)
		s.Exec(reader, "COMMIT")
		all.Wait()
		p.wantCommit(s.begun(c), versions...)
	})
}

func TestWhatTheServerRefusesIsSaidInWordsThatHelp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		versions := p.remember(nil, "k")
		user := "u_" + s.Name[len(s.Name)-8:]
		s.Exec(s.own, "CREATE USER '"+user+"'@'%'")
		t.Cleanup(func() { s.Exec(s.own, "DROP USER '"+user+"'@'%'") })
		s.Exec(s.own, "GRANT SELECT ON "+s.Name+".* TO '"+user+"'@'%'")
		c := s.Connect(dbtest.As(user))
		if err := p.compare(s.begun(c), versions); err == nil || !strings.Contains(err.Error(), optimistic.Grants) {
			t.Errorf("without the privileges: %v", err)
		}
		c = s.Connect()
		s.Exec(c, "START TRANSACTION READ ONLY")
		dbtest.Is(t, "in a transaction that only reads", p.compare(c, versions), lockerr.ErrUnsafe)
		dbtest.OK(t, c.Close())
		if err := p.compare(c, versions); err == nil || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("without a connection: %v", err)
		}
		dbtest.OK(t, dbtest.Err(p.rememberOn(dbtest.Limited(t), c, optimistic.Request{Keys: []string{"k"}}))) // it is not the only one

		broken := pool.New(pool.Config{
			Connect: func(context.Context) (driver.Conn, error) { return nil, driver.ErrBadConn }, Max: 1, Idle: time.Minute,
		})
		defer broken.Close()
		elsewhere := s.process(func(cfg *strategy.Config) { cfg.Control, cfg.Rows = broken, p.rows })
		if err := elsewhere.within(dbtest.Limited(t), 0, "k"); err == nil || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("without a connection of its own: %v", err)
		}

		// The table is made anew, and the rows.
		s.Exec(s.own, "DROP TABLE "+s.table.String())
		if v := p.remember(nil, "k"); v[0].Number() < 1e15 { // microseconds
			t.Errorf("in a new table: %d", v[0].Number())
		}
		p.control.Close()
		dbtest.Is(t, "after the end", p.within(dbtest.Limited(t), 0, "k"), lockerr.ErrClosed)
	})
}

// TestADeadlockAtCommitIsLeftToTheCaller: the server has chosen who is to begin again.
func TestADeadlockAtCommitIsLeftToTheCaller(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		versions := p.remember(nil, "k")
		err := p.compare(failing{&mysql.MySQLError{Number: 1213}}, versions)
		if !server.Deadlock(err) || errors.Is(err, lockerr.ErrConflict) {
			t.Errorf("the error is %v", err)
		}
	})
}

func TestAConnectionThatOnlyPreparesIsEnough(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(), s.Connect()
		bare := struct{ driver.Conn }{c}
		versions := p.remember(bare, "k", "l")
		s.Exec(c, "START TRANSACTION")
		p.wantCommit(bare, versions...)
		s.Exec(c, "START TRANSACTION")
		p.wantConflict(bare, versions...)
	})
}

// TestALockedTableIsToldWithSentinelAndKey: what the server ends by its own limit while
// somebody has locked all of the table.
func TestALockedTableIsToldWithSentinelAndKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "known")
		version := p.remember(nil, "committed")
		c, committing := s.Connect(), s.Connect()
		s.Exec(c, "SET SESSION lock_wait_timeout = 1")
		s.Exec(committing, "BEGIN")
		other := s.Connect()
		s.Exec(other, "LOCK TABLES "+s.table.String()+" WRITE")
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			for _, conn := range []driver.Conn{nil, c} {
				for _, key := range []string{"known", "new"} {
					if key == "new" && (wait > 0 || conn != nil) {
						continue // it is made on a connection of its own, whoever asks
					}
					_, err := p.rememberOn(dbtest.Limited(t), conn, optimistic.Request{Keys: []string{key}, Wait: wait})
					var e *lockerr.Error
					if !errors.As(err, &e) || e.Key != key || !errors.Is(err, lockerr.ErrLocked) || !errors.Is(err, lockerr.ErrTimeout) {
						t.Errorf("%s with a wait of %v, on its own connection %v: %v", key, wait, conn == nil, err)
					}
				}
			}
		}
		began := time.Now()
		err := p.compare(committing, version)
		if d := time.Since(began); !errors.Is(err, lockerr.ErrLocked) || d > 30*time.Second {
			t.Errorf("the commit, after %v: %v", d, err)
		}
		p.wantConflict(committing, version...)
		s.Exec(other, "UNLOCK TABLES")
		p.remember(nil, "known", "new")
	})
}
