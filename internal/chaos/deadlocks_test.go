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
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Workers of two processes take the same locks, over and over, and write down
// when they had them. TestDeadlockStress looks for deadlocks and for those who starve;
// "make deadlocks" runs the long form.

// crew is what the workers of each process do.
type crew struct {
	Nests      bool // they take their keys one by one, by Do in Do; else together, by BeginTx
	Strategy   string
	Workers    int
	Length     time.Duration
	Keys, Most int           // they take 1 to Most of so many keys,
	Shared     int           // each shared so often in 100 times,
	Think      time.Duration // for about so long
}

// tally is what the workers of one process have seen.
type tally struct {
	Grants  []int         // of each worker
	Broken  int           // deadlocks that the server broke, which only nesting allows
	Longest time.Duration // that one has waited
	Failed  string
}

// section is the time for which somebody had a lock for sure.
type section struct {
	key          string
	shared       bool
	who          string
	began, ended int64 // in µs
}

const sectionsTable = "CREATE TABLE sections (id INT AUTO_INCREMENT PRIMARY KEY, k VARCHAR(40) NOT NULL, shared BOOL NOT NULL," +
	" who VARCHAR(40) NOT NULL, began BIGINT NOT NULL, ended BIGINT NOT NULL) ENGINE=InnoDB"

func (c crew) options() (opts []lockctx.Option) {
	switch c.Strategy {
	case hint.StrategyRow:
		opts = append(opts, lockctx.Row())
	case hint.StrategyLease:
		opts = append(opts, lockctx.Lease(longTTL))
	case hint.StrategyAdvisory:
		opts = append(opts, lockctx.Advisory())
	}
	return opts
}

// pick chooses what to lock next, in any order.
func (c crew) pick(who string) (plan []section) {
	for _, i := range rand.Perm(c.Keys)[:1+rand.IntN(c.Most)] {
		plan = append(plan, section{key: fmt.Sprintf("k%02d", i), shared: rand.IntN(100) < c.Shared, who: who})
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
	time.Sleep(c.Think/2 + rand.N(c.Think))
	ended := time.Now().UnixMicro()
	var values []string
	for _, s := range plan {
		values = append(values, fmt.Sprintf("('%s', %v, '%s', %d, %d)", s.key, s.shared, s.who, began, ended))
	}
	_, err := db.ExecContext(ctx, "INSERT INTO sections (k, shared, who, began, ended) VALUES "+strings.Join(values, ", "))
	return err
}

// take takes locks once, and returns how long it has waited for them.
func (c crew) take(db *sql.DB, who string) (waited time.Duration, err error) {
	base, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	plan := c.pick(who)
	if c.Nests {
		return c.nest(base, db, plan, nil)
	}
	ctx, start := c.with(base, plan), time.Now()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	waited = time.Since(start)
	if err := c.had(ctx, tx, plan); err != nil {
		return 0, err
	}
	return waited, tx.Commit()
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
	var mu sync.Mutex
	var all sync.WaitGroup
	sum.Grants = make([]int, c.Workers)
	for worker := range c.Workers {
		who := fmt.Sprintf("%d-%d", os.Getpid(), worker)
		all.Go(func() {
			for end, more := time.Now().Add(c.Length), true; more; {
				waited, err := c.take(db, who)
				mu.Lock()
				switch {
				case err == nil:
					sum.Grants[worker]++
					sum.Longest = max(sum.Longest, waited)
				case c.Nests && (errors.Is(err, mysqllock.ErrDeadlock) || errors.Is(err, mysqllock.ErrTimeout) || errors.Is(err, mysqllock.ErrNoAnswer)): // a busy server may not have answered within the wait
					sum.Broken++
				default:
					sum.Failed = err.Error()
				}
				// Where one has had nothing yet all go on: among them it has to get its share.
				more = sum.Failed == "" && (time.Now().Before(end) || !c.Nests && slices.Min(sum.Grants) == 0)
				mu.Unlock()
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
	dbtest.OK(s.T, json.Unmarshal([]byte(other.Line()), &others))
	if failed := sum.Failed + others.Failed; failed != "" {
		s.T.Errorf("%+v: %s", c, failed)
	}
	return s.sections(), tally{Grants: append(sum.Grants, others.Grants...), Broken: sum.Broken + others.Broken, Longest: max(sum.Longest, others.Longest)}
}

// sections returns what was written down, in the order in which it began.
func (s *scratch) sections() (all []section) {
	s.T.Helper()
	rows, err := s.Plain.Query("SELECT k, shared, who, began, ended FROM sections ORDER BY began")
	dbtest.OK(s.T, err)
	defer rows.Close()
	for rows.Next() {
		var x section
		dbtest.OK(s.T, rows.Scan(&x.key, &x.shared, &x.who, &x.began, &x.ended))
		all = append(all, x)
	}
	dbtest.OK(s.T, rows.Err())
	return all
}

// history is what was written down as the history of locks.
func (s section) history(id int) (grant, release event) {
	grant = event{Kind: kindGrant, Job: "crew", Hold: fmt.Sprint(s.who, "/", id), Key: s.key, Shared: s.shared, Call: s.began, Return: s.began}
	release = grant
	release.Kind, release.Call, release.Return = kindRelease, s.ended, s.ended
	return grant, release
}

// wantExclusion fails the test for each key that had sections which should not have been at the
// same time.
func wantExclusion(t *testing.T, all []section) {
	t.Helper()
	for _, v := range wrongOf(all) {
		t.Error(v)
	}
}

// wrongOf checks sections as the history of their locks.
func wrongOf(all []section) []violation {
	a := &arena{history: new(history)}
	for i, x := range all {
		grant, release := x.history(i)
		a.history.events = append(a.history.events, grant, release)
	}
	return a.history.checkLocks(a.unsure, a.doubtful)
}

// A stress test for deadlocks: workers that take random sets of keys, named in any order,
// meet neither deadlocks nor those who never come to an end.
func TestDeadlockStress(t *testing.T) {
	t.Parallel()
	length, _ := lengthOf(t, "DEADLOCKS_TIME", time.Second)
	stress := crew{Workers: 4, Length: length, Keys: 20, Most: 6, Think: 4 * time.Millisecond}
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
					wantExclusion(t, all)
					t.Logf("grants of each worker: %v; longest wait %v; %d sections", sum.Grants, sum.Longest, len(all))
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
				c := crew{Nests: true, Strategy: strategy, Workers: 4, Length: 2 * time.Second, Keys: 20, Most: 3, Think: 4 * time.Millisecond}
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

// TestWriterAmongReaders: among a steady stream of readers in two processes a
// writer, in one of them or in a third, gets in before many more have.
func TestWriterAmongReaders(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.Plain, sectionsTable)
		other, db, third := dbtest.StartJob(t, "crew", s.DSN("lockWait=2m")), s.Handle("lockWait=2m"), s.Handle("lockWait=2m")
		for _, db := range []*sql.DB{db, third} { // connections, and what comes with the first lock
			_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k00"), "DO 0")
			dbtest.OK(t, err)
		}
		const workers = 8
		type wait struct{ asked, granted int64 }
		var waits []wait
		var writer sync.WaitGroup
		writer.Go(func() {
			time.Sleep(300 * time.Millisecond)
			for i := range 20 {
				asked := time.Now().UnixMicro()
				tx, err := []*sql.DB{db, third}[i%2].BeginTx(lockctx.With(dbtest.Limited(t), "k00"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				waits = append(waits, wait{asked, time.Now().UnixMicro()})
				dbtest.Exec(t, tx, "INSERT INTO sections (k, shared, who, began, ended) VALUES ('k00', FALSE, 'writer', ?, ?)", waits[i].granted, time.Now().UnixMicro())
				if err := tx.Commit(); err != nil {
					t.Error(err)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
		all, _ := s.work(other, db, crew{Workers: workers, Length: 2 * time.Second, Keys: 1, Most: 1, Shared: 100, Think: 10 * time.Millisecond})
		writer.Wait()
		wantExclusion(t, s.sections())
		var grants []int
		var longest int64
		for _, w := range waits {
			n := 0
			for _, x := range all {
				if x.shared && w.asked < x.began && x.began < w.granted {
					n++
				}
			}
			grants, longest = append(grants, n), max(longest, w.granted-w.asked)
		}
		slices.Sort(grants)
		// Without a queue it would never get in. A machine that stands still for a
		// moment delays a writer that has not yet asked the server.
		if n := len(grants); n == 0 || grants[n*3/4] > 10*workers {
			t.Errorf("while a writer waited, %v readers of %d workers got in", grants, 2*workers)
		}
		t.Logf("readers that began while a writer waited: %v; longest wait %v; %d readers", grants, time.Duration(longest)*time.Microsecond, len(all))
	})
}
