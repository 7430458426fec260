package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Workers of two processes take the same locks, over and over, and write down
// when they had them. TestHunt looks for deadlocks and for those who starve;
// "make hunt" runs the long form.

// crew is what the workers of each process do.
type crew struct {
	Way        string // how they ask for locks: one of allWays, or nested
	Strategy   string
	Workers    int
	Length     time.Duration
	Keys, Most int           // they take 1 to Most of so many keys,
	Shared     int           // each shared so often in 100 times,
	Slots      int           // or one of its slots,
	Think      time.Duration // for about so long
}

// The ways to take a lock.
const (
	byBeginTx  = "BeginTx"
	byExec     = "Exec"
	byPrepared = "Prepare and Exec"
	byRead     = "Query, then Exec"
	byDo       = "Do"
	byAcquire  = "Acquire"
	byLateHint = "a hint in a transaction begun without it"
	byNesting  = "Do in Do" // key by key
)

var allWays = []string{byBeginTx, byExec, byPrepared, byRead, byDo, byAcquire, byLateHint}

// tally is what the workers of one process have seen.
type tally struct {
	Grants  []int         // of each worker
	Broken  int           // deadlocks that the server broke, which only byNesting allows
	Longest time.Duration // that one has waited
	Failed  string
}

// section is the time for which somebody had a lock for sure.
type section struct {
	key          string
	shared       bool
	slot, slots  int // which of how many; -1 where that is not known
	who          string
	began, ended int64 // in µs
}

const sectionsTable = "CREATE TABLE sections (id INT AUTO_INCREMENT PRIMARY KEY, k VARCHAR(40) NOT NULL, shared BOOL NOT NULL, slot INT NOT NULL, slots INT NOT NULL," +
	" who VARCHAR(40) NOT NULL, began BIGINT NOT NULL, slept DOUBLE NOT NULL DEFAULT 0, ended BIGINT NOT NULL) ENGINE=InnoDB"

// slowSQL writes a section down that a single statement has. The server is on
// this machine, so its clock is ours.
const slowSQL = "INSERT INTO sections (k, shared, slot, slots, who, began, slept, ended)" +
	" SELECT ?, ?, -1, ?, ?, UNIX_TIMESTAMP(SYSDATE(6)) * 1000000, SLEEP(?), UNIX_TIMESTAMP(SYSDATE(6)) * 1000000"

func (c crew) options() (opts []lockctx.Option) {
	switch c.Strategy {
	case lockctx.StrategyRow:
		opts = append(opts, lockctx.Row())
	case lockctx.StrategyLease:
		opts = append(opts, lockctx.Lease(ttl))
	case lockctx.StrategyAdvisory:
		opts = append(opts, lockctx.Advisory())
	}
	if c.Slots > 0 {
		opts = append(opts, lockctx.Slots(c.Slots))
	}
	return opts
}

// pick chooses what to lock next, in any order.
func (c crew) pick(who string) (plan []section) {
	for _, i := range rand.Perm(c.Keys)[:1+rand.IntN(c.Most)] {
		plan = append(plan, section{key: fmt.Sprintf("k%02d", i), shared: rand.IntN(100) < c.Shared, slot: -1, slots: c.Slots, who: who})
	}
	return plan
}

// with asks for all of plan.
func (c crew) with(ctx context.Context, plan []section) context.Context {
	var exclusive, shared []string
	for _, s := range plan {
		if s.shared {
			shared = append(shared, s.key)
		} else {
			exclusive = append(exclusive, s.key)
		}
	}
	if len(exclusive) > 0 {
		ctx = lockctx.WithKeys(ctx, exclusive, c.options()...)
	}
	if len(shared) > 0 {
		ctx = lockctx.WithKeys(ctx, shared, append(c.options(), lockctx.Shared())...)
	}
	return ctx
}

// had writes down that all of plan was held from now on until it has thought.
func (c crew) had(ctx context.Context, db execer, plan []section) error {
	began := time.Now().UnixMicro()
	if slot, ok := mysqllock.Slot(ctx); ok {
		plan[0].slot = slot
	}
	time.Sleep(c.Think/2 + rand.N(c.Think))
	ended := time.Now().UnixMicro()
	var values []string
	for _, s := range plan {
		values = append(values, fmt.Sprintf("('%s', %v, %d, %d, '%s', %d, %d)", s.key, s.shared, s.slot, s.slots, s.who, began, ended))
	}
	_, err := db.ExecContext(ctx, "INSERT INTO sections (k, shared, slot, slots, who, began, ended) VALUES "+strings.Join(values, ", "))
	return err
}

// take takes locks once, and returns how long it has waited for them.
func (c crew) take(db *sql.DB, slow *sql.Stmt, who string) (waited time.Duration, err error) {
	base, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	plan := c.pick(who)
	ctx := c.with(base, plan)
	start := time.Now()
	switch c.Way {
	case byBeginTx, byLateHint:
		begin := ctx
		if c.Way == byLateHint {
			begin = base
		}
		tx, err := db.BeginTx(begin, nil)
		if err != nil {
			return 0, err
		}
		defer tx.Rollback()
		if c.Way == byLateHint {
			if _, err := tx.ExecContext(ctx, "DO 0"); err != nil {
				return 0, err
			}
		}
		waited = time.Since(start)
		if err := c.had(ctx, tx, plan); err != nil {
			return 0, err
		}
		return waited, tx.Commit()
	case byExec, byPrepared:
		args := []any{plan[0].key, plan[0].shared, c.Slots, who, c.Think.Seconds()}
		if c.Way == byExec {
			_, err = db.ExecContext(ctx, slowSQL, args...)
		} else {
			_, err = slow.ExecContext(ctx, args...)
		}
		return time.Since(start) - c.Think, err
	case byRead:
		if _, err := read(ctx, db, 1); err != nil {
			return 0, err
		}
		waited = time.Since(start)
		return waited, c.had(ctx, db, plan)
	case byAcquire:
		h, err := mysqllock.Acquire(c.with(base, plan[1:]), db, plan[0].key, c.asked(plan[0])...)
		if err != nil {
			return 0, err
		}
		defer h.Rollback()
		waited = time.Since(start)
		if err := c.had(h.Context(), db, plan); err != nil {
			return 0, err
		}
		return waited, h.Release()
	case byNesting:
		return c.nest(base, db, plan, nil)
	default:
		err = mysqllock.Do(c.with(base, plan[1:]), db, plan[0].key, func(ctx context.Context) error {
			waited = time.Since(start)
			return c.had(ctx, db, plan)
		}, c.asked(plan[0])...)
		return waited, err
	}
}

func (c crew) asked(s section) []lockctx.Option {
	if s.shared {
		return append(c.options(), lockctx.Shared())
	}
	return c.options()
}

// nest takes plan key by key, in the order of keys.
func (c crew) nest(ctx context.Context, db *sql.DB, plan, taken []section) (waited time.Duration, err error) {
	if len(plan) == 0 {
		return 0, c.had(ctx, db, taken)
	}
	slices.SortFunc(plan, func(a, b section) int { return strings.Compare(a.key, b.key) })
	start := time.Now()
	err = mysqllock.Do(ctx, db, plan[0].key, func(ctx context.Context) error {
		waited = time.Since(start)
		more, err := c.nest(ctx, db, plan[1:], append(taken, plan[0]))
		waited = max(waited, more)
		return err
	}, append(c.asked(plan[0]), lockctx.Wait(300*time.Millisecond))...)
	return waited, err
}

// run has the workers of this process work.
func (c crew) run(db *sql.DB) (sum tally) {
	slow, err := db.Prepare(slowSQL)
	if err != nil {
		return tally{Failed: err.Error()}
	}
	defer slow.Close()
	var mu sync.Mutex
	var all sync.WaitGroup
	sum.Grants = make([]int, c.Workers)
	for worker := range c.Workers {
		who := fmt.Sprintf("%d-%d", os.Getpid(), worker)
		all.Go(func() {
			for end := time.Now().Add(c.Length); time.Now().Before(end); {
				waited, err := c.take(db, slow, who)
				mu.Lock()
				switch {
				case err == nil:
					sum.Grants[worker]++
					sum.Longest = max(sum.Longest, waited)
				case c.Way == byNesting && (errors.Is(err, mysqllock.ErrDeadlock) || errors.Is(err, mysqllock.ErrTimeout)):
					sum.Broken++
				default:
					sum.Failed = err.Error()
				}
				failed := sum.Failed != ""
				mu.Unlock()
				if failed {
					return
				}
			}
		})
	}
	all.Wait()
	return sum
}

// childCrew does what each line says, and tells its tally.
func childCrew(db *sql.DB, in *bufio.Scanner) {
	for in.Scan() {
		var c crew
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			fmt.Println(err)
			return
		}
		line, _ := json.Marshal(c.run(db))
		fmt.Printf("%s\n", line)
	}
}

// work has the crew work in this process and in the other, and returns what they
// had, and their tallies as one.
func (s *scratch) work(other *child, db *sql.DB, c crew) ([]section, tally) {
	s.t.Helper()
	exec(s.t, s.plain, "DELETE FROM sections")
	line, err := json.Marshal(c)
	ok(s.t, err)
	fmt.Fprintf(other.in, "%s\n", line)
	sum := c.run(db)
	var others tally
	if err := json.Unmarshal([]byte(other.line()), &others); err != nil {
		s.t.Fatal(err)
	}
	if failed := sum.Failed + others.Failed; failed != "" {
		s.t.Errorf("%+v: %s", c, failed)
	}
	return s.sections(), tally{Grants: append(sum.Grants, others.Grants...), Broken: sum.Broken + others.Broken, Longest: max(sum.Longest, others.Longest)}
}

// sections returns what was written down, in the order in which it began.
func (s *scratch) sections() (all []section) {
	s.t.Helper()
	rows, err := s.plain.Query("SELECT k, shared, slot, slots, who, began, ended FROM sections ORDER BY began")
	ok(s.t, err)
	defer rows.Close()
	for rows.Next() {
		var x section
		ok(s.t, rows.Scan(&x.key, &x.shared, &x.slot, &x.slots, &x.who, &x.began, &x.ended))
		all = append(all, x)
	}
	ok(s.t, rows.Err())
	return all
}

// excludes reports whether a and b, of the same key, must not be at the same
// time.
func (a section) excludes(b section) bool {
	switch {
	case a.slots > 0 && b.slots > 0:
		return a.slot >= 0 && a.slot == b.slot
	case a.shared && b.shared:
		return false
	}
	return true
}

// overlaps returns the pairs of sections that should not have been at the same
// time, how many of a key have been so at most, and of how many workers.
func overlaps(all []section) (wrong []string, most int) {
	open := make(map[string][]section)
	for _, x := range all {
		there := slices.DeleteFunc(open[x.key], func(o section) bool { return o.ended <= x.began })
		for _, o := range there {
			if o.excludes(x) {
				wrong = append(wrong, fmt.Sprintf("%+v and %+v", o, x))
			}
		}
		open[x.key] = append(there, x)
		most = max(most, len(open[x.key]))
	}
	return wrong, most
}

// wantExclusion checks sections and returns how many of a key have been at the same time.
func wantExclusion(t *testing.T, all []section) (most int) {
	t.Helper()
	wrong, most := overlaps(all)
	for i, pair := range wrong {
		if i == 5 {
			t.Errorf("and %d others", len(wrong)-5)
			break
		}
		t.Errorf("at the same time: %s", pair)
	}
	for _, x := range all {
		if x.slots > 0 && x.slot >= x.slots {
			t.Errorf("slot %d of %d", x.slot, x.slots)
		}
	}
	return most
}

// TestOverlaps shows that the check of sections finds what it is for.
func TestOverlaps(t *testing.T) {
	for _, test := range []struct {
		name  string
		right bool
		most  int
		all   []section
	}{
		{"one after the other", true, 1, []section{{key: "k", began: 1, ended: 2}, {key: "k", began: 2, ended: 3}}},
		{"two at a time", false, 2, []section{{key: "k", began: 1, ended: 3}, {key: "k", began: 2, ended: 4}}},
		{"two keys", true, 1, []section{{key: "k", began: 1, ended: 3}, {key: "l", began: 2, ended: 4}}},
		{"two who share", true, 2, []section{{key: "k", shared: true, began: 1, ended: 3}, {key: "k", shared: true, began: 2, ended: 4}}},
		{"one who shares", false, 2, []section{{key: "k", shared: true, began: 1, ended: 3}, {key: "k", began: 2, ended: 4}}},
		{"two slots", true, 2, []section{{key: "k", slot: 0, slots: 2, began: 1, ended: 3}, {key: "k", slot: 1, slots: 2, began: 2, ended: 4}}},
		{"the same slot", false, 2, []section{{key: "k", slot: 1, slots: 2, began: 1, ended: 3}, {key: "k", slot: 1, slots: 3, began: 2, ended: 4}}},
		{"a long one", false, 2, []section{{key: "k", began: 1, ended: 9}, {key: "k", shared: true, began: 2, ended: 3}, {key: "k", shared: true, began: 4, ended: 5}}},
	} {
		if wrong, most := overlaps(test.all); len(wrong) == 0 != test.right || most != test.most {
			t.Errorf("%s: found right: %v, at most %d", test.name, len(wrong) == 0, most)
		}
	}
}

// A deadlock hunt: workers that take random sets of keys, named in any order,
// meet neither deadlocks nor those who never come to an end.
func TestHunt(t *testing.T) {
	length := 3 * time.Second
	if v := os.Getenv("HUNT_TIME"); v != "" {
		var err error
		length, err = time.ParseDuration(v)
		ok(t, err)
	}
	hunt := crew{Way: byBeginTx, Workers: 4, Length: length, Keys: 20, Most: 6, Think: 4 * time.Millisecond}
	for _, test := range []struct {
		name, strategy string
		shared         int
		params         []string
	}{
		{"row", lockctx.StrategyRow, 0, nil},
		{"lease", lockctx.StrategyLease, 0, nil},
		{"advisory", lockctx.StrategyAdvisory, 0, nil},
		{"shared", lockctx.StrategyRow, 50, nil},
		{"stripes", lockctx.StrategyRow, 50, []string{"lockStripes=4"}},
		{"leases on stripes", lockctx.StrategyLease, 0, []string{"lockStripes=4"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			onServers(t, func(t *testing.T, s *scratch) {
				exec(t, s.plain, sectionsTable)
				c := hunt
				c.Strategy, c.Shared = test.strategy, test.shared
				params := append(slices.Clone(test.params), "lockWait=30s") // who waits for longer starves
				all, sum := s.work(startChild(t, "crew", s.childDSN(params...)), s.open(params...), c)
				most := wantExclusion(t, all)
				if fewest, highest := slices.Min(sum.Grants), slices.Max(sum.Grants); highest > 5*fewest+10 {
					t.Errorf("not everybody got a share: %v", sum.Grants)
				}
				t.Logf("grants of each worker: %v; longest wait %v; %d sections, at most %d of a key at the same time", sum.Grants, sum.Longest, len(all), most)
			})
		})
	}
}

// kind is a lock on a key of its own, and how to take it away from others.
type kind struct {
	key   string
	opts  []lockctx.Option
	holds int              // that take all of it; 0 where it locks nothing
	by    []lockctx.Option // what the holds are; nil is opts
}

func (k kind) hold(t *testing.T, db *sql.DB, wait time.Duration) (release func()) {
	t.Helper()
	var holds []*mysqllock.Hold
	opts := k.opts
	if k.by != nil {
		opts = k.by
	}
	for range k.holds {
		h, err := mysqllock.Acquire(limited(t), db, k.key, append(slices.Clone(opts), lockctx.Wait(wait))...)
		if err != nil {
			t.Errorf("%s is not free: %v", k.key, err)
			break
		}
		holds = append(holds, h)
	}
	return func() {
		t.Helper()
		for _, h := range holds {
			ok(t, h.Release())
		}
	}
}

// TestAllOrNothing: where one of several locks, of whatever kinds, is not
// granted, none stays locked, and the same lock context may ask again.
func TestAllOrNothing(t *testing.T) {
	lease := lockctx.Lease(10 * time.Second)
	options := func(opts ...lockctx.Option) []lockctx.Option { return opts }
	row := func(key string) kind { return kind{key, options(lockctx.Row()), 1, nil} }
	leased := func(key string) kind { return kind{key, options(lease), 1, nil} }
	advisory := func(key string) kind { return kind{key, options(lockctx.Advisory()), 1, nil} }
	shared := func(key string) kind { return kind{key, options(lockctx.Shared()), 1, options(lockctx.Row())} }
	slots := func(key string) kind { return kind{key, options(lockctx.Row(), lockctx.Slots(2)), 2, nil} }
	leasedSlots := func(key string) kind { return kind{key, options(lease, lockctx.Slots(2)), 2, nil} }
	optimistic := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 0, nil} }
	unread := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 1, options(lease)} } // a lease is waited for
	onServers(t, func(t *testing.T, s *scratch) {
		db, other, third := s.open(), s.open(), s.open()
		for number, test := range []struct {
			name string
			free []kind
			held kind
		}{
			{"row", []kind{row("a")}, row("b")},
			{"row, the first held", []kind{row("b")}, row("a")},
			{"shared", []kind{shared("a")}, shared("b")},
			{"lease", []kind{leased("a")}, leased("b")},
			{"advisory", []kind{advisory("a")}, advisory("b")},
			{"optimistic", []kind{optimistic("a")}, unread("b")},
			{"slots", []kind{slots("a")}, slots("b")},
			{"slots of leases", []kind{leasedSlots("a")}, leasedSlots("b")},
			{"row and slots", []kind{row("b")}, slots("a")},
			{"row and lease", []kind{row("a")}, leased("b")},
			{"lease and row", []kind{leased("a")}, row("b")},
			{"lease and slots", []kind{leased("a")}, slots("b")},
			{"advisory and slots of leases", []kind{advisory("a")}, leasedSlots("b")},
			{"lease and optimistic", []kind{leased("a")}, unread("b")},
			{"all, and slots", []kind{row("a"), leased("b"), advisory("c"), shared("d"), optimistic("e"), leasedSlots("f"), slots("g")}, slots("h")},
			{"all, and row", []kind{row("a"), leased("b"), advisory("c"), shared("d"), optimistic("e"), leasedSlots("f"), slots("g")}, row("h")},
		} {
			for i, way := range []string{byBeginTx, byExec, byRead, byLateHint} {
				end := []string{"NoWait", "Wait", "cancel"}[(i+number)%3]
				what := fmt.Sprintf("%s, by %s, %s", test.name, way, end)
				for _, k := range append(slices.Clone(test.free), test.held) { // rows and versions are there
					_, err := db.ExecContext(lockctx.With(limited(t), k.key, k.opts...), "DO 0")
					ok(t, err)
				}
				release := test.held.hold(t, other, 0)
				base, cancel := context.WithCancel(limited(t))
				ctx := base
				for _, k := range append(slices.Clone(test.free), test.held) {
					wait := lockctx.Wait(20 * time.Second)
					switch end {
					case "NoWait":
						wait = lockctx.NoWait()
					case "Wait":
						wait = lockctx.Wait(60 * time.Millisecond)
					case "cancel":
						if k.key == test.held.key {
							time.AfterFunc(60*time.Millisecond, cancel)
						}
					}
					ctx = lockctx.With(ctx, k.key, append(slices.Clone(k.opts), wait)...)
				}
				ask := func() (err error) {
					switch way {
					case byBeginTx:
						var tx *sql.Tx
						if tx, err = db.BeginTx(ctx, nil); err == nil {
							err = tx.Rollback()
						}
					case byExec:
						_, err = db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
					case byRead:
						_, err = read(ctx, db, 1)
					default:
						tx, begun := db.Begin()
						ok(t, begun)
						_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
						if failed := tx.Rollback(); err == nil {
							err = failed
						}
					}
					return err
				}
				err := ask()
				switch {
				case !errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, context.Canceled):
					t.Errorf("%s: %v", what, err)
				case end == "cancel" && !errors.Is(err, context.Canceled) && way != byLateHint: // several row locks of a transaction that is open are not waited for
					t.Errorf("%s: %v", what, err)
				}
				var wait time.Duration
				if end != "NoWait" { // a busy server may not have answered in the moments that a caller gives it
					wait = 10 * time.Second
				}
				for _, k := range test.free {
					k.hold(t, third, wait)()
				}
				release()
				test.held.hold(t, third, wait)()
				if end != "cancel" {
					if err := ask(); err != nil {
						t.Errorf("%s: once more in the same lock context: %v", what, err)
					}
				}
				cancel()
				for _, k := range append(slices.Clone(test.free), test.held) { // a read gives them back with the context
					if way == byRead {
						k.hold(t, third, 10*time.Second)()
					}
				}
				if t.Failed() {
					t.Fatal(what)
				}
			}
		}
	})
}

// TestSlotRefusedUnderALease: a unit of work that goes on keeps what it had.
func TestSlotRefusedUnderALease(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h, err := mysqllock.Acquire(limited(t), other, "b", lockctx.Row())
		ok(t, err)
		base, cancel := context.WithCancel(limited(t))
		defer cancel()
		ctx := lockctx.With(base, "job", lockctx.Lease(ttl))
		_, err = read(ctx, db, 1)
		ok(t, err)
		more := lockctx.With(lockctx.With(ctx, "a", lockctx.Row()), "b", lockctx.Row(), lockctx.Slots(1), lockctx.NoWait())
		_, err = db.BeginTx(more, nil)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("BeginTx: %v", err)
		}
		_, err = db.ExecContext(more, "UPDATE p SET stock = 0 WHERE id = 1")
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("Exec: %v", err)
		}
		_, err = read(more, db, 1)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("Query: %v", err)
		}
		s.wantLeased("job", true)
		s.wantLocked("a", false)
		ok(t, h.Release())
		tx, err := db.BeginTx(more, nil)
		ok(t, err)
		s.wantLocked("b", true)
		exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		ok(t, tx.Commit())
		s.wantLeased("job", false)
		s.wantStock(1, 9)
	})
}

// TestWaitIsForAllTogether: several locks are waited for no longer than one.
func TestWaitIsForAllTogether(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const wait = 2 * time.Second
		for _, strategies := range [][2]lockctx.Option{{lockctx.Row(), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Lease(ttl)}} {
			for round := 1; ; round++ { // a busy machine may delay one
				first, err := mysqllock.Acquire(limited(t), other, "a", strategies[0])
				ok(t, err)
				second, err := mysqllock.Acquire(limited(t), other, "b", strategies[1])
				ok(t, err)
				time.AfterFunc(wait*2/3, func() { ok(t, first.Release()) })
				ctx := lockctx.With(lockctx.With(limited(t), "a", strategies[0]), "b", strategies[1], lockctx.Slots(1), lockctx.Wait(wait))
				tx, err := db.Begin()
				ok(t, err)
				start := time.Now()
				_, err = tx.ExecContext(ctx, "DO 0")
				took := time.Since(start)
				tx.Rollback()
				ok(t, second.Release())
				if !errors.Is(err, mysqllock.ErrTimeout) {
					t.Fatalf("after %v, with a wait of %v: %v", took, wait, err)
				}
				if took <= wait*3/2 {
					break
				}
				if round == 6 {
					t.Fatalf("of %d times it never took less than %v, with a wait of %v; at last %v", round, wait*3/2, wait, took)
				}
			}
		}
	})
}

// TestStripesDisagree: handles that differ in how many rows keys share refuse to
// work, and what the error says mends it.
func TestStripesDisagree(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		use := func(params ...string) error {
			_, err := s.open(params...).ExecContext(lockctx.With(limited(t), "k", lockctx.Lease(ttl)), "DO 0")
			return err
		}
		mend := func(err error) {
			t.Helper()
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Fatalf("another number of rows: %v", err)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != 4 {
				t.Fatalf("%v does not say what to do", err)
			}
			for _, text := range lines[1:3] {
				exec(t, s.plain, text)
			}
		}
		tokens := func() (highest int) {
			t.Helper()
			ok(t, s.plain.QueryRow("SELECT MAX(token) FROM mysqllock WHERE NOT (namespace = ? AND name = ?)", s.database, "\x00stripes").Scan(&highest))
			return highest
		}
		for range 7 {
			ok(t, use())
		}
		// From rows of their own to four, to eight, and back.
		for _, params := range [][]string{{"lockStripes=4"}, {"lockStripes=8"}, nil} {
			before := tokens()
			mend(use(params...))
			ok(t, use(params...))
			if after := tokens(); after <= before {
				t.Errorf("%v: the token went from %d to %d", params, before, after)
			}
			for _, others := range [][]string{{"lockStripes=4"}, {"lockStripes=8"}, nil} {
				if err := use(others...); errors.Is(err, mysqllock.ErrUnsafe) == slices.Equal(params, others) {
					t.Errorf("%v after %v: %v", others, params, err)
				}
			}
		}
	})
}

// TestStripesKeepTheTableSmall: a thousand keys use four rows.
func TestStripesKeepTheTableSmall(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockStripes=4")
		var all sync.WaitGroup
		for worker := range 10 {
			all.Go(func() {
				for i := range 100 {
					opts := [][]lockctx.Option{{lockctx.Row()}, {lockctx.Lease(ttl)}, {lockctx.Shared()}, {lockctx.Optimistic()}}[i%4]
					for {
						_, err := db.ExecContext(lockctx.With(limited(t), fmt.Sprintf("%d-%d", worker, i), opts...), "DO 0")
						if errors.Is(err, mysqllock.ErrConflict) {
							continue
						}
						if err != nil {
							t.Error(err)
						}
						break
					}
				}
			})
		}
		all.Wait()
		var rows int
		ok(t, s.plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ?", s.database).Scan(&rows))
		if rows != 4+1 {
			t.Errorf("%d rows, want 4 and the note", rows)
		}
	})
}

// TestStripesNest: keys that share a row are one lock, to be had again and again.
func TestStripesNest(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open("lockStripes=4", "lockWait=2s"), s.open("lockStripes=4")
		var keys []string
		for i := range 20 {
			keys = append(keys, fmt.Sprintf("k%02d", i))
		}
		var nest func(ctx context.Context, rest []string, opts ...[]lockctx.Option) error
		nest = func(ctx context.Context, rest []string, opts ...[]lockctx.Option) error {
			if len(rest) == 0 {
				for _, key := range keys {
					_, err := mysqllock.Acquire(limited(t), other, key, lockctx.NoWait())
					if !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s is not locked: %v", key, err)
					}
				}
				return nil
			}
			return mysqllock.Do(ctx, db, rest[0], func(ctx context.Context) error { return nest(ctx, rest[1:], opts...) }, opts[len(rest)%len(opts)]...)
		}
		row, lease, shared := []lockctx.Option{lockctx.Row()}, []lockctx.Option{lockctx.Lease(ttl)}, []lockctx.Option{lockctx.Shared()}
		ok(t, nest(limited(t), keys, row))
		ok(t, nest(limited(t), keys, lease))
		ok(t, nest(limited(t), keys, shared))
		ok(t, nest(limited(t), keys, row, shared))
		for _, opts := range [][]lockctx.Option{row, lease, shared} {
			tx, err := db.BeginTx(lockctx.WithKeys(limited(t), keys, opts...), nil)
			ok(t, err)
			ok(t, nest(limited(t), nil))
			exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
			ok(t, tx.Commit())
		}
	})
}

// TestStripesUnderNesting: workers that nest keys, of which they cannot know who
// shares rows, may wait for each other. Of row locks the server breaks such a
// deadlock, of leases the end of the wait; they come through.
func TestStripesUnderNesting(t *testing.T) {
	for _, strategy := range []string{lockctx.StrategyRow, lockctx.StrategyLease} {
		t.Run(strategy, func(t *testing.T) {
			onServers(t, func(t *testing.T, s *scratch) {
				exec(t, s.plain, sectionsTable)
				c := crew{Way: byNesting, Strategy: strategy, Workers: 4, Length: 4 * time.Second, Keys: 20, Most: 3, Think: 4 * time.Millisecond}
				if strategy == lockctx.StrategyRow {
					c.Shared = 50
				}
				all, sum := s.work(startChild(t, "crew", s.childDSN("lockStripes=4")), s.open("lockStripes=4"), c)
				wantExclusion(t, all)
				if slices.Min(sum.Grants) == 0 && strategy == lockctx.StrategyRow || slices.Max(sum.Grants) == 0 {
					t.Errorf("not everybody got a share: %v", sum.Grants)
				}
				t.Logf("grants of each worker: %v, %d tries that met each other; longest wait %v", sum.Grants, sum.Broken, sum.Longest)
			})
		})
	}
}
