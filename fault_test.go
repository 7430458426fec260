package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What happens when someone else has the key, gives up, dies or falls silent.
// Two handles stand for two processes: they share nothing in the driver.

func TestNoWait(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice"), s.open()
		h, err := mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		defer h.Rollback()
		for _, from := range []*sql.DB{db, other} {
			start := time.Now()
			_, err := from.BeginTx(lockctx.With(limited(t), "k", lockctx.NoWait()), nil)
			took := time.Since(start)
			var e *mysqllock.Error
			for i := 0; i < 20 && !s.mariadb && errors.As(err, &e) && e.Holder == nil; i++ { // a busy server does not say in time
				_, err = from.BeginTx(lockctx.With(limited(t), "k", lockctx.NoWait()), nil)
			}
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) {
				t.Fatalf("NoWait on a held key: %v", err)
			}
			if took > 8*time.Second { // the default is to wait for 10 s
				t.Errorf("NoWait took %v", took)
			}
			if e.Key != "k" || e.Strategy != "row" || e.Op != "lock" {
				t.Errorf("the error does not say what it is about: %+v", e)
			}
			if from == db || !s.mariadb { // MariaDB shows a holder only after a wait
				if e.Holder == nil || e.Holder.ConnectionID == 0 || e.Holder.Program != "alice" {
					t.Errorf("holder: %+v", e.Holder)
				}
			}
		}
		_, err = mysqllock.Acquire(limited(t), s.open("lockWait=0"), "k")
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("lockWait=0 on a held key: %v", err)
		}
		for _, from := range []*sql.DB{db, other} {
			_, err = from.ExecContext(lockctx.With(limited(t), "free", lockctx.NoWait()), "UPDATE p SET stock = 9 WHERE id = 1")
			ok(t, err)
		}
	})
}

func TestWaitEndsWithTheHolderNamed(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice"), s.open()
		tx, err := db.BeginTx(lockctx.With(limited(t), "k"), nil)
		ok(t, err)
		defer tx.Rollback()
		var id uint64
		ok(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		for _, from := range []*sql.DB{db, other} {
			for _, end := range []string{"wait", "context"} {
				ctx, opt := limited(t), lockctx.Wait(200*time.Millisecond)
				if end == "context" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
					defer cancel()
					opt = lockctx.Wait(time.Minute)
				}
				_, err := mysqllock.Acquire(ctx, from, "k", opt)
				var e *mysqllock.Error
				// MariaDB shows a picture of up to 100 ms ago, a busy server none in time.
				for i := 0; i < 20 && from == other && end == "wait" && errors.As(err, &e) && e.Holder == nil; i++ {
					_, err = mysqllock.Acquire(ctx, from, "k", opt)
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) {
					t.Fatalf("%s: %v", end, err)
				}
				if got := errors.Is(err, context.DeadlineExceeded); got != (end == "context") {
					t.Errorf("%s: matches DeadlineExceeded: %v (%v)", end, got, err)
				}
				if e.Waited < 150*time.Millisecond {
					t.Errorf("%s: waited %v", end, e.Waited)
				}
				if end == "context" && e.Holder == nil && from == other {
					continue // there is less time to ask
				}
				if e.Holder == nil || e.Holder.ConnectionID != id {
					t.Errorf("%s, same process %v: the holder is %+v, want connection %d", end, from == db, e.Holder, id)
				} else if from == other && e.Holder.Since <= 0 {
					t.Errorf("%s: the holder's age is %v", end, e.Holder.Since)
				}
			}
		}
	})
}

// waiters counts those who wait for a row of the lock table, as the server sees
// it.
func (s *scratch) waiters() (n int) {
	s.t.Helper()
	ok(s.t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE '%FOR UPDATE%' AND INFO LIKE '%mysqllock %' AND ID <> CONNECTION_ID()",
		s.database).Scan(&n))
	return n
}

func TestCancelledWaiterLeavesNothing(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		cancelled := func(how string) (took time.Duration, left int) {
			h, err := mysqllock.Acquire(limited(t), db, "k")
			ok(t, err)
			ctx, cancel := context.WithCancel(limited(t))
			result := make(chan error, 1)
			go func() {
				lctx := lockctx.With(ctx, "k")
				var err error
				switch how {
				case "BeginTx":
					_, err = other.BeginTx(lctx, nil)
				case "Query":
					_, err = read(lctx, other, 1)
				case "Exec":
					_, err = other.ExecContext(lctx, "UPDATE p SET stock = 0")
				case "Acquire":
					_, err = mysqllock.Acquire(ctx, other, "k")
				}
				result <- err
			}()
			soon(t, "it waits on the server", func() bool { return s.waiters() == 1 })
			start := time.Now()
			cancel()
			err = <-result
			took, left = time.Since(start), s.waiters()
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", how, err)
			}
			soon(t, "it does not any more", func() bool { return s.waiters() == 0 })
			ok(t, h.Release())
			s.wantLocked("k", false)
			return took, left
		}
		for _, how := range []string{"BeginTx", "Query", "Exec", "Acquire"} {
			for round := 1; ; round++ { // a busy machine may delay one
				took, left := cancelled(how)
				if took <= 500*time.Millisecond && left == 0 {
					break
				}
				if round == 20 {
					t.Errorf("%s: of %d times, the error never came within 500ms with nobody left on the server; at last after %v, with %d", how, round, took, left)
					break
				}
			}
		}
		s.wantStock(1, 10)
	})
}

func TestCancelAtTheMomentOfRelease(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const rounds = 400
		granted, latest := 0, 1500*time.Microsecond
		for i := range rounds {
			h, err := mysqllock.Acquire(limited(t), db, "k")
			ok(t, err)
			ctx, cancel := context.WithCancel(limited(t))
			result, was := make(chan error, 1), granted
			go func() {
				tx, err := other.BeginTx(lockctx.With(ctx, "k"), nil)
				if err == nil {
					err = tx.Rollback()
					if errors.Is(err, sql.ErrTxDone) || errors.Is(err, mysqllock.ErrLost) {
						err = nil // the cancellation was quicker, or closed the connection, as it does without a lock
					}
					granted++
				}
				result <- err
			}()
			time.Sleep(time.Duration(rand.IntN(800)) * time.Microsecond)
			var both sync.WaitGroup
			both.Go(func() { time.Sleep(rand.N(latest)); cancel() })
			both.Go(func() { ok(t, h.Release()) })
			both.Wait()
			if err := <-result; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("round %d: %v", i, err)
			}
			if granted > was { // as fast as the machine is just now, so that it is a race
				latest = latest * 49 / 50
			} else {
				latest = min(latest*51/50, 200*time.Millisecond)
			}
			if h, err = mysqllock.Acquire(limited(t), db, "k", lockctx.Wait(20*time.Second)); err != nil {
				t.Fatalf("round %d: the lock is still held: %v", i, err)
			}
			ok(t, h.Release())
		}
		if granted < 10 || granted > rounds-10 {
			t.Errorf("%d of %d were granted before the cancellation: the race was not run", granted, rounds)
		}
		soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
	})
}

// A child is this test binary again, as another process. It says on standard
// output what it did, a line each, and goes on when it reads a line.
type child struct {
	t     *testing.T
	cmd   *osexec.Cmd
	lines *bufio.Scanner
	in    *os.File
}

func startChild(t *testing.T, what, dsn string) *child {
	t.Helper()
	exe, err := os.Executable()
	ok(t, err)
	c := &child{t: t, cmd: osexec.Command(exe)}
	c.cmd.Env = append(os.Environ(), "MYSQLLOCK_TEST_CHILD="+what, "MYSQLLOCK_TEST_CHILD_DSN="+dsn)
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	ok(t, err)
	c.lines = bufio.NewScanner(out)
	r, w, err := os.Pipe()
	ok(t, err)
	c.cmd.Stdin, c.in = r, w
	ok(t, c.cmd.Start())
	r.Close()
	t.Cleanup(func() { w.Close(); c.cmd.Process.Kill(); c.cmd.Wait() })
	return c
}

func (c *child) line() string {
	c.t.Helper()
	if !c.lines.Scan() {
		c.t.Fatal("the child process ended")
	}
	return c.lines.Text()
}

func (c *child) proceed() { fmt.Fprintln(c.in) }

func runChild(what string) int {
	db, err := sql.Open("mysqllock", os.Getenv("MYSQLLOCK_TEST_CHILD_DSN"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer db.Close()
	in := bufio.NewScanner(os.Stdin)
	say := func(err error) {
		switch {
		case err == nil:
			fmt.Println("done")
		case errors.Is(err, mysqllock.ErrLost):
			fmt.Println("lost")
		default:
			fmt.Println(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	switch what {
	case "hold": // Acquire, write, pause, commit
		h, err := mysqllock.Acquire(ctx, db, "k")
		if err == nil {
			_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 666 WHERE id = 1")
		}
		say(err)
		in.Scan()
		say(h.Release())
	case "session": // a pinned read, pause, write
		ctx := lockctx.With(ctx, "k")
		_, err := read(ctx, db, 1)
		say(err)
		in.Scan()
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 666 WHERE id = 1")
		say(err)
	case "tx": // a transaction on the application's own connection
		tx, err := db.BeginTx(lockctx.With(ctx, "k"), nil)
		if err == nil {
			_, err = tx.Exec("UPDATE p SET stock = 666 WHERE id = 1")
		}
		say(err)
		in.Scan()
		say(tx.Commit())
	case "rivals":
		childRivals(db, in)
	case "paused":
		childPaused(db, in, fencedWays)
	case "unfenced":
		sabotage.NoFence.Store(true)
		childPaused(db, in, fenceWays)
	case "leases":
		childLeases(in)
	case "giver":
		childGiver(db, in)
	case "turmoil":
		childTurmoil(db)
	case "optimistic":
		childOptimistic(db, in)
	case "crew":
		childCrew(db, in)
	case "slots":
		childSlots(db, in)
	default:
		return 2
	}
	return 0
}

// A holder whose process stands still, as one whose host has vanished: its
// connection stays open, and nothing comes over it.
func TestSilentHolder(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=2s")
		for _, how := range []string{"hold", "session", "tx"} {
			if how == "tx" && !s.mariadb {
				continue // MySQL has no limit on an idle transaction; see the documentation
			}
			t.Run(how, func(t *testing.T) {
				exec(t, s.plain, "UPDATE p SET stock = 10")
				dsn := s.cfg().FormatDSN()
				dsn += map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + "lockTTL=2s"
				c := startChild(t, how, dsn)
				if got := c.line(); got != "done" {
					t.Fatal(got)
				}
				ok(t, c.cmd.Process.Signal(syscall.SIGSTOP))
				start := time.Now()
				h, err := mysqllock.Acquire(limited(t), db, "k", lockctx.Wait(20*time.Second))
				ok(t, err)
				took := time.Since(start)
				if took > 12*time.Second {
					t.Errorf("the lock was free after %v, want the TTL of 2s", took)
				}
				t.Logf("free after %v", took)
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
				ok(t, err)
				ok(t, h.Release())
				ok(t, c.cmd.Process.Signal(syscall.SIGCONT))
				c.proceed()
				if got := c.line(); got != "lost" {
					t.Errorf("the holder that came back got %q, want ErrLost", got)
				}
				s.wantStock(1, 9)
			})
		}
	})
}

func TestKilledHolder(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, how := range []string{"hold", "session", "tx"} {
			c := startChild(t, how, s.cfg().FormatDSN())
			if got := c.line(); got != "done" {
				t.Fatal(got)
			}
			ok(t, c.cmd.Process.Kill())
			h, err := mysqllock.Acquire(limited(t), db, "k", lockctx.Wait(5*time.Second))
			ok(t, err)
			ok(t, h.Release())
			s.wantStock(1, 10)
		}
	})
}

func TestServerRestart(t *testing.T) {
	onOwnServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		h, err := mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 0 WHERE id = 1")
		ok(t, err)
		ctx := lockctx.With(limited(t), "k2")
		tx, err := db.BeginTx(ctx, nil)
		ok(t, err)
		exec(t, tx, "UPDATE p SET stock = 0 WHERE id = 2")
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			if h, err := mysqllock.Acquire(limited(t), db, "k"); err == nil {
				h.Rollback()
			}
		}()
		ok(t, s.temp.Kill())
		ok(t, s.temp.Restart(limited(t)))
		if err := h.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Release after a restart: %v", err)
		}
		if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Commit after a restart: %v", err)
		}
		<-waits
		s.wantStock(1, 10)
		s.wantStock(2, 10)
		// Everything goes on with new connections.
		ok(t, mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
			return err
		}))
		_, err = db.ExecContext(lockctx.With(limited(t), "k"), "UPDATE p SET stock = 8 WHERE id = 1")
		ok(t, err)
		s.wantStock(1, 8)
	})
}

// A holder that pinned a session with a read must get a connection of
// database/sql for its write, although those who wait for its lock would take
// them all.
func TestHolderGetsThroughAFullPool(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for round := range 3 {
			db := s.open("lockWait=20s")
			db.SetMaxOpenConns(4)
			exec(t, s.plain, "UPDATE p SET stock = 10")
			ctx := lockctx.With(limited(t), "k")
			n, err := read(ctx, db, 1)
			ok(t, err)
			var early, granted atomic.Int32
			var wg sync.WaitGroup
			for range 40 {
				wg.Go(func() {
					tx, err := db.BeginTx(lockctx.With(limited(t), "k"), nil)
					switch {
					case err == nil:
						granted.Add(1)
						tx.Rollback()
					case errors.Is(err, mysqllock.ErrLocked) && strings.Contains(err.Error(), "SetMaxOpenConns"):
						early.Add(1)
					default:
						t.Error(err)
					}
				})
			}
			soon(t, "the pool is full", func() bool { return db.Stats().InUse == 4 })
			start := time.Now()
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
			took := time.Since(start)
			ok(t, err)
			if took > 8*time.Second { // the others wait for 10 s
				t.Errorf("the holder's write took %v", took)
			}
			wg.Wait()
			s.wantStock(1, 9)
			t.Logf("round %d: the write took %v; %d waiters were turned away, %d granted", round, took, early.Load(), granted.Load())
		}
	})
}

// An unbounded pool never turns anybody away, however long the holder thinks.
func TestNobodyIsTurnedAwayFromAnUnboundedPool(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=20s")
		ctx := lockctx.With(limited(t), "k")
		_, err := read(ctx, db, 1)
		ok(t, err)
		var wg sync.WaitGroup
		for range 12 {
			wg.Go(func() {
				tx, err := db.BeginTx(lockctx.With(limited(t), "k"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				tx.Rollback()
			})
		}
		time.Sleep(time.Second)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
		ok(t, err)
		wg.Wait()
	})
}

// 64 goroutines on 4 connections and 2 sessions, with keys mixed, contexts
// cancelled and connections killed at random: nothing hangs, nothing leaks, no
// lock is left, and every acknowledged commit is there.
func TestStorm(t *testing.T) {
	length := 8 * time.Second
	if v := os.Getenv("STORM_TIME"); v != "" {
		var err error
		length, err = time.ParseDuration(v)
		ok(t, err)
	}
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockMaxConns=2", "lockWait=2s", "lockTTL=5s")
		db.SetMaxOpenConns(4)
		exec(t, s.plain, "CREATE TABLE done (id INT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(40) UNIQUE)")
		stop := time.Now().Add(length)
		var commits, unknown, failures atomic.Int64
		var mu sync.Mutex
		acknowledged, refused := map[string]bool{}, map[string]bool{}
		var wg sync.WaitGroup
		work := func(g, i int) {
			who := fmt.Sprintf("%d-%d", g, i)
			id := 1 + rand.IntN(4)
			key := "p:" + strconv.Itoa(id)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			if rand.IntN(4) == 0 {
				time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, cancel)
			}
			step := func(ctx context.Context, q interface {
				execer
				querier
			},
			) error {
				n, err := read(ctx, q, id)
				if err != nil {
					return err
				}
				if _, err := q.ExecContext(ctx, "INSERT INTO done (who) VALUES (?)", who); err != nil {
					return err
				}
				_, err = q.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", n+1, id)
				return err
			}
			var err error
			if rand.IntN(2) == 0 {
				var tx *sql.Tx
				if tx, err = db.BeginTx(lockctx.With(ctx, key), nil); err == nil {
					if err = step(ctx, tx); err == nil {
						err = tx.Commit()
					}
					tx.Rollback()
				}
			} else {
				err = mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return step(ctx, db) })
			}
			mu.Lock()
			defer mu.Unlock()
			var e *mysqllock.Error
			switch {
			case err == nil:
				commits.Add(1)
				acknowledged[who] = true
			case errors.As(err, &e) && e.Op == "commit":
				unknown.Add(1)
			case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, sql.ErrTxDone):
				unknown.Add(1) // perhaps while COMMIT was under way
			default:
				failures.Add(1)
				refused[who] = true
			}
		}
		for g := range 64 {
			wg.Go(func() {
				for i := 0; time.Now().Before(stop); i++ {
					work(g, i)
				}
			})
		}
		wg.Go(func() { // kills connections, at random
			for time.Now().Before(stop) {
				time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
				var id int
				if s.plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND COMMAND IN ('Sleep', 'Query') ORDER BY RAND() LIMIT 1", s.database).Scan(&id) == nil {
					s.plain.Exec(fmt.Sprintf("KILL %d", id))
				}
			}
		})
		finished := make(chan struct{})
		go func() { wg.Wait(); close(finished) }()
		select {
		case <-finished:
		case <-time.After(length + 60*time.Second):
			t.Fatal("it hangs")
		}
		st, err := mysqllock.Stats(db)
		ok(t, err)
		if st.InUse != 0 {
			soon(t, "sessions are given back", func() bool { st, _ = mysqllock.Stats(db); return st.InUse == 0 })
		}
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections of database/sql are in use", n)
		}
		for id := 1; id <= 4; id++ {
			soon(t, "no lock is left", func() bool { return !s.locked("p:" + strconv.Itoa(id)) })
		}
		there := map[string]bool{}
		rows, err := s.plain.Query("SELECT who FROM done")
		ok(t, err)
		for rows.Next() {
			var who string
			ok(t, rows.Scan(&who))
			there[who] = true
		}
		ok(t, rows.Close())
		sum := 0
		for id := 1; id <= 4; id++ {
			sum += s.stock(id) - 10
		}
		if sum != len(there) {
			t.Errorf("%d increments for %d finished units: an update was lost", sum, len(there))
		}
		for who := range acknowledged {
			if !there[who] {
				t.Errorf("%s was acknowledged and is not there", who)
			}
		}
		for who := range refused {
			if there[who] {
				t.Errorf("%s failed and is there", who)
			}
		}
		if commits.Load() == 0 {
			t.Error("nothing was committed")
		}
		t.Logf("%d commits, %d of unknown outcome or cancelled, %d failed; %+v", commits.Load(), unknown.Load(), failures.Load(), st)
	})
}
