package chaos

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
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Workers of two processes take the same locks, over and over, and write down
// when they had them. TestDeadlockStress looks for deadlocks and for those who starve;
// "make deadlocks" runs the long form.

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
	case hint.StrategyRow:
		opts = append(opts, lockctx.Row())
	case hint.StrategyLease:
		opts = append(opts, lockctx.Lease(longTTL))
	case hint.StrategyAdvisory:
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
func (c crew) had(ctx context.Context, db dbtest.Execer, plan []section) error {
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
		if _, err := stock.Read(ctx, db, 1); err != nil {
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
				case c.Way == byNesting && (errors.Is(err, mysqllock.ErrDeadlock) || errors.Is(err, mysqllock.ErrTimeout) || errors.Is(err, mysqllock.ErrExhausted)): // a busy server may not have answered within the wait
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
func (s *scratch) work(other *dbtest.Child, db *sql.DB, c crew) ([]section, tally) {
	s.T.Helper()
	dbtest.Exec(s.T, s.Plain, "DELETE FROM sections")
	line, err := json.Marshal(c)
	dbtest.OK(s.T, err)
	other.Tell(string(line))
	sum := c.run(db)
	var others tally
	if err := json.Unmarshal([]byte(other.Line()), &others); err != nil {
		s.T.Fatal(err)
	}
	if failed := sum.Failed + others.Failed; failed != "" {
		s.T.Errorf("%+v: %s", c, failed)
	}
	return s.sections(), tally{Grants: append(sum.Grants, others.Grants...), Broken: sum.Broken + others.Broken, Longest: max(sum.Longest, others.Longest)}
}

// sections returns what was written down, in the order in which it began.
func (s *scratch) sections() (all []section) {
	s.T.Helper()
	rows, err := s.Plain.Query("SELECT k, shared, slot, slots, who, began, ended FROM sections ORDER BY began")
	dbtest.OK(s.T, err)
	defer rows.Close()
	for rows.Next() {
		var x section
		dbtest.OK(s.T, rows.Scan(&x.key, &x.shared, &x.slot, &x.slots, &x.who, &x.began, &x.ended))
		all = append(all, x)
	}
	dbtest.OK(s.T, rows.Err())
	return all
}

// history is what was written down as the history of locks. Of what has an unknown slot nothing
// is known.
func (s section) history(id int) (grant, release event) {
	key := s.key
	if s.slots > 0 {
		key = slotKey(key, s.slot)
	}
	grant = event{Kind: kindGrant, Job: "crew", Hold: fmt.Sprint(s.who, "/", id), Key: key, Shared: s.shared, Call: s.began, Return: s.began}
	release = grant
	release.Kind, release.Call, release.Return = kindRelease, s.ended, s.ended
	return grant, release
}

// wantExclusion checks sections and returns how many of a key have been at the same time.
func wantExclusion(t *testing.T, all []section) (most int) {
	t.Helper()
	wrong, most := together(all)
	for _, v := range wrong {
		t.Error(v)
	}
	for _, x := range all {
		if x.slots > 0 && x.slot >= x.slots {
			t.Errorf("slot %d of %d", x.slot, x.slots)
		}
	}
	return most
}

// together returns which keys had sections that should not have been at the same time, and
// how many of a key have been so at most.
func together(all []section) (wrong []violation, most int) {
	a := &arena{history: new(history)}
	for i, x := range all {
		if x.slots == 0 || x.slot >= 0 {
			grant, release := x.history(i)
			a.history.events = append(a.history.events, grant, release)
		}
	}
	return a.history.checkLocks(a.unsure, a.doubtful), atOnce(all)
}

// atOnce returns how many sections of a key have been at the same time at most.
func atOnce(all []section) (most int) {
	open := make(map[string][]section)
	for _, x := range all {
		open[x.key] = append(slices.DeleteFunc(open[x.key], func(o section) bool { return o.ended <= x.began }), x)
		most = max(most, len(open[x.key]))
	}
	return most
}

// A stress test for deadlocks: workers that take random sets of keys, named in any order,
// meet neither deadlocks nor those who never come to an end.
func TestDeadlockStress(t *testing.T) {
	t.Parallel()
	length, _ := lengthOf(t, "DEADLOCKS_TIME", 2*time.Second)
	stress := crew{Way: byBeginTx, Workers: 4, Length: length, Keys: 20, Most: 6, Think: 4 * time.Millisecond}
	for _, test := range []struct {
		name, strategy string
		shared         int
		params         []string
	}{
		{"row", hint.StrategyRow, 0, nil},
		{"lease", hint.StrategyLease, 0, nil},
		{"advisory", hint.StrategyAdvisory, 0, nil},
		{"shared", hint.StrategyRow, 50, nil},
		{"stripes", hint.StrategyRow, 50, []string{"lockStripes=4"}},
		{"leases on stripes", hint.StrategyLease, 0, []string{"lockStripes=4"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
				dbtest.Exec(t, s.Plain, sectionsTable)
				c := stress
				c.Strategy, c.Shared = test.strategy, test.shared
				params := append(slices.Clone(test.params), "lockWait=30s") // who waits for longer starves
				other, db := dbtest.StartJob(t, "crew", s.DSN(params...)), s.Handle(params...)
				for round := 1; ; round++ { // on a busy machine one of the processes may stand still for a while
					all, sum := s.work(other, db, c)
					most := wantExclusion(t, all)
					t.Logf("grants of each worker: %v; longest wait %v; %d sections, at most %d of a key at the same time", sum.Grants, sum.Longest, len(all), most)
					if fewest, highest := slices.Min(sum.Grants), slices.Max(sum.Grants); highest <= 5*fewest+10 {
						break
					}
					if round == 3 {
						t.Fatalf("not everybody got a share: %v", sum.Grants)
					}
				}
			})
		})
	}
}

// TestStripesUnderNesting: workers that nest keys, of which they cannot know who
// shares rows, may wait for each other. Of row locks the server breaks such a
// deadlock, of leases the end of the wait; they come through.
func TestStripesUnderNesting(t *testing.T) {
	for _, strategy := range []string{hint.StrategyRow, hint.StrategyLease} {
		t.Run(strategy, func(t *testing.T) {
			dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
				dbtest.Exec(t, s.Plain, sectionsTable)
				c := crew{Way: byNesting, Strategy: strategy, Workers: 4, Length: 2 * time.Second, Keys: 20, Most: 3, Think: 4 * time.Millisecond}
				if strategy == hint.StrategyRow {
					c.Shared = 50
				}
				all, sum := s.work(dbtest.StartJob(t, "crew", s.DSN("lockStripes=4")), s.Handle("lockStripes=4"), c)
				wantExclusion(t, all)
				if slices.Max(sum.Grants) == 0 {
					t.Error("nobody came through")
				}
				t.Logf("grants of each worker: %v, %d tries that met each other; longest wait %v", sum.Grants, sum.Broken, sum.Longest)
			})
		})
	}
}
