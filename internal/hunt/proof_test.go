package hunt

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Here leases have to hold while their holders are stopped, cut off, killed and
// raced, and their server crashes. What everybody saw is checked as one history,
// and so is what was written: see history_test.go. "make prove" runs the long
// form.

// proof is a scratch database with the table fenced.
func (s *scratch) proof() *scratch {
	s.T.Helper()
	dbtest.Exec(s.T, s.Plain, fencedTable)
	return s
}

// race has several clients of each handle try to take the lease on k at the same
// moment, and returns those that have it.
func (h *history) race(ctx context.Context, dbs []*sql.DB) (won []*holder, err error) {
	const clients = 2
	var mu sync.Mutex
	var all sync.WaitGroup
	start := make(chan struct{})
	for _, db := range dbs {
		for range clients {
			all.Go(func() {
				<-start
				o, failed := h.acquire(ctx, db, "k", lockctx.Lease(time.Minute), lockctx.NoWait())
				mu.Lock()
				defer mu.Unlock()
				if failed == nil {
					won = append(won, o)
				} else if !errors.Is(failed, mysqllock.ErrLocked) {
					err = failed
				}
			})
		}
	}
	close(start)
	all.Wait()
	return won, err
}

// childRivals races when it is told to, and releases when it is told to.
func childRivals(db *sql.DB, in *bufio.Scanner) {
	h := &history{tell: true}
	dbs := []*sql.DB{db}
	for len(dbs) < 4 {
		db, _ := sql.Open("mysqllock", dbtest.JobDSN())
		defer db.Close()
		dbs = append(dbs, db)
	}
	for in.Scan() {
		won, err := h.race(context.Background(), dbs)
		fmt.Println(len(won), err)
		in.Scan()
		for _, o := range won {
			err = errors.Join(err, o.release())
		}
		fmt.Println(err)
	}
}

// TestProofRivals: of 32 clients that race for a lease whose holder has vanished
// one gets it, and its token is the next.
func TestProofRivals(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		rounds := dbtest.Long(200, 2000)
		ctx, h := dbtest.Within(t, 10*time.Minute), &history{}
		var dbs []*sql.DB
		for range 12 {
			dbs = append(dbs, s.Handle())
		}
		first, err := h.acquire(ctx, dbs[0], "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		dbtest.OK(t, first.release())
		c := dbtest.StartJob(t, "rivals", s.DSN())
		there := 0
		for round := range rounds {
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'vanished#00000000', expires = UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND")
			c.Tell("")
			won, err := h.race(ctx, dbs)
			dbtest.OK(t, err)
			line := h.next(c)
			n, answer, _ := strings.Cut(line, " ")
			if answer != "<nil>" {
				t.Fatal(line)
			}
			others, _ := strconv.Atoi(n)
			there += others
			if len(won)+others != 1 {
				t.Fatalf("round %d has %d winners", round, len(won)+others)
			}
			if token := s.Token("k"); token != uint64(round)+2 {
				t.Fatalf("round %d: the token is %d", round, token)
			}
			for _, o := range won {
				dbtest.OK(t, o.release())
			}
			c.Tell("")
			if line := h.next(c); line != "<nil>" {
				t.Fatal(line)
			}
		}
		h.want(t)
		t.Logf("%d rounds, %d won in the other process", rounds, there)
	})
}

// What the holder of a paused process does with a transaction under its lease,
// which has read before the pause.
const (
	wayLate    = "late"    // it writes after the pause, with no context that would tell
	wayEarly   = "early"   // it has written before
	wayChecked = "checked" // it writes after the pause, in the context of the hold
	wayContext = "context" // it began the transaction with a context that ends with the lease
	wayTx      = "tx"      // the lease is the transaction's own
)

var (
	fencedWays = []string{wayLate, wayEarly, wayChecked, wayContext, wayTx}
	fenceWays  = []string{wayLate, wayEarly} // where nothing but the fence is in the way
)

const pausedTTL = 2 * time.Second

func pausedKeys(ways []string) (keys []string) {
	for i := range dbtest.Long(10, 25) {
		for _, way := range ways {
			keys = append(keys, way+"-"+strconv.Itoa(i))
		}
	}
	return keys
}

// childPaused takes leases, reads under them, waits for a line, and then goes on
// to write and commit, in rounds. It says of each key how that ended.
func childPaused(db *sql.DB, in *bufio.Scanner, ways []string) {
	h := &history{tell: true}
	for in.Scan() {
		prefix := in.Text()
		goOn := make(chan struct{})
		var ready, over sync.WaitGroup
		for _, key := range pausedKeys(ways) {
			way, _, _ := strings.Cut(key, "-")
			ready.Add(1)
			over.Go(func() {
				o, ctx, err := h.paused(db, prefix+key, way)
				ready.Done()
				<-goOn
				if err != nil {
					fmt.Println(key, "not begun:", err)
					return
				}
				defer o.tx.Rollback()
				if way != wayEarly {
					err = o.insert(ctx)
				}
				if err == nil {
					err = o.commit()
				}
				answer := fmt.Sprint(err)
				if errors.Is(err, mysqllock.ErrLost) {
					answer = "lost"
				}
				if o.hold != nil && !errors.Is(o.release(), mysqllock.ErrLost) {
					answer += ", and its release did not say that it was lost"
				}
				fmt.Println(key, answer)
			})
		}
		ready.Wait()
		fmt.Println("ready")
		in.Scan()
		close(goOn)
		over.Wait()
	}
}

// paused does what comes before the pause, and returns the context for what
// comes after it.
func (h *history) paused(db *sql.DB, key, way string) (o *holder, ctx context.Context, err error) {
	ctx = context.Background()
	if way == wayTx {
		o, err = h.acquireTx(ctx, db, key, lockctx.Lease(pausedTTL))
	} else {
		o, err = h.acquire(ctx, db, key, lockctx.Lease(pausedTTL))
	}
	if err != nil {
		return nil, nil, err
	}
	switch way {
	case wayContext:
		ctx = o.hold.Context()
	case wayChecked:
		ctx = context.WithoutCancel(o.hold.Context())
	}
	if way != wayTx {
		begin := o.hold.Context()
		if way != wayContext {
			begin = context.WithoutCancel(begin)
		}
		if err := o.begin(begin, db); err != nil {
			return nil, nil, err
		}
	}
	err = o.read(ctx)
	if err == nil && way == wayEarly {
		err = o.insert(ctx)
	}
	return o, ctx, err
}

// pause stops the child in its transactions until others have taken all of its
// leases and written, and lets it go on. It returns what the child says of each
// key.
func (s *scratch) pause(c *dbtest.Child, h *history, db *sql.DB, prefix string, ways []string) map[string]string {
	s.T.Helper()
	c.Tell(prefix)
	if line := h.next(c); line != "ready" {
		s.T.Fatal(line)
	}
	dbtest.OK(s.T, c.Signal(syscall.SIGSTOP))
	ctx := dbtest.Within(s.T, time.Minute)
	took := make([]*holder, len(pausedKeys(ways)))
	failed := make([]error, len(took))
	var all sync.WaitGroup
	for i, key := range pausedKeys(ways) {
		all.Go(func() {
			took[i], failed[i] = h.acquire(ctx, db, prefix+key, lockctx.Lease(20*time.Second), lockctx.Wait(time.Minute))
			if failed[i] == nil {
				failed[i] = took[i].write(db, 0)
			}
		})
	}
	all.Wait()
	dbtest.OK(s.T, c.Signal(syscall.SIGCONT))
	dbtest.OK(s.T, errors.Join(failed...))
	c.Tell("")
	answers := make(map[string]string)
	for range took {
		key, answer, _ := strings.Cut(h.next(c), " ")
		answers[key] = answer
	}
	for _, o := range took { // the lease did not go with the other's release
		dbtest.OK(s.T, o.write(db, 0))
		dbtest.OK(s.T, o.release())
	}
	return answers
}

// TestProofPause: a process that was stopped in its transactions until others had
// its leases, and had written, commits nothing.
func TestProofPause(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.proof()
		h, db := &history{}, s.Handle()
		c := dbtest.StartJob(t, "paused", s.DSN())
		stopped := 0
		for round := range dbtest.Long(1, 4) {
			for key, answer := range s.pause(c, h, db, fmt.Sprint(round, "-"), fencedWays) {
				way, _, _ := strings.Cut(key, "-")
				if stopped++; answer != "lost" && (way != wayContext || answer != sql.ErrTxDone.Error() && answer != context.Canceled.Error()) {
					t.Errorf("%s: a commit after the pause ended with %q", key, answer)
				}
			}
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d transactions were stopped until others had their leases", stopped)
	})
}

// TestProofPauseUnfenced is the control: with the fence off the same loses
// updates, and the checks see it.
func TestProofPauseUnfenced(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.proof()
		h, db := &history{}, s.Handle()
		c := dbtest.StartJob(t, "unfenced", s.DSN())
		keys := len(pausedKeys(fenceWays))
		for key, answer := range s.pause(c, h, db, "", fenceWays) {
			if !strings.HasPrefix(answer, "<nil>") {
				t.Errorf("%s: a commit without the fence ended with %q", key, answer)
			}
		}
		if n := len(s.stale()); n < keys {
			t.Errorf("the check of what is written finds %d faults in %d stale writes", n, keys)
		}
		if n := len(h.wrong()); n != keys {
			t.Errorf("the check of histories finds %d of %d stale writes", n, keys)
		}
	})
}

// TestProofCut: holders whose network is cut in their transactions. Others get
// the leases and write; then the network is back, or the connections turn out to
// be gone.
func TestProofCut(t *testing.T) {
	const (
		late     = iota // commits after the cut
		underWay        // commits in the cut
		racing          // commits before: the first COMMIT, with its check, is what the cut swallows
		leaving         // releases the lease in the cut
		nobody          // as late, and nobody else takes the lease
		ways
	)
	const ttl = 6 * time.Second
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.proof()
		h, others := &history{}, s.Handle()
		var dbs [3]*sql.DB // whose connections are back in the end, turn out to be gone, and whose renewals then come late
		var proxies [3]*dbtest.Proxy
		for i := range dbs {
			dbs[i], proxies[i] = s.Proxied(mysqllock.Config{})
		}
		ctx, n := dbtest.Within(t, time.Minute), ways*dbtest.Long(10, 24)
		type victim struct {
			*holder
			err  error
			left time.Duration // of the lease on the server when its holder is told
		}
		victims := make([]*victim, n)
		var ready, told, over sync.WaitGroup
		isReady, isCut, isOver := make(chan struct{}), make(chan struct{}), make(chan struct{})
		for i := range n {
			victims[i] = &victim{}
			ready.Add(1)
			over.Go(func() {
				v, way, db := victims[i], i%ways, dbs[i/ways%2]
				if way == nobody {
					db = dbs[2]
				}
				v.holder, v.err = h.acquire(ctx, db, fmt.Sprint("k", i), lockctx.Lease(ttl))
				if v.err != nil {
					ready.Done()
					return
				}
				stays := context.WithoutCancel(v.hold.Context())
				if v.err = v.begin(stays, db); v.err == nil {
					v.err = v.read(stays)
				}
				if v.err == nil {
					v.err = v.insert(stays)
				}
				ready.Done()
				if v.err != nil {
					return
				}
				switch way {
				case racing:
					<-isReady
				case underWay:
					<-isCut
				case leaving:
					<-isCut
					_ = v.release()
					<-isOver
				default:
					<-isOver
				}
				v.err = v.commit()
			})
		}
		ready.Wait()
		for i, v := range victims {
			if v.err != nil {
				t.Fatal(i, v.err)
			}
			if i%ways == late {
				told.Go(func() {
					<-v.hold.Context().Done()
					var micros int64
					if err := s.Plain.QueryRow("SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) FROM mysqllock WHERE name = ?", v.key).Scan(&micros); err != nil {
						t.Error(err)
					}
					v.left = time.Duration(micros) * time.Microsecond
				})
			}
		}
		for _, p := range proxies[:2] {
			p.BlockAt("COMMIT")
		}
		proxies[2].Block()
		close(isReady)
		for _, p := range proxies[:2] {
			dbtest.Soon(t, "a COMMIT is under way", p.Blocked)
		}
		close(isCut)

		took := make([]*holder, n)
		var sure, may sync.WaitGroup
		for i := range n {
			take := func() {
				o, err := h.acquire(ctx, others, fmt.Sprint("k", i), lockctx.Lease(20*time.Second), lockctx.Wait(time.Minute))
				if err == nil {
					err = o.write(others, 0)
				}
				if err != nil {
					t.Error(err)
				}
				took[i] = o
			}
			switch i % ways {
			case racing: // where it is before the cut, it keeps the lease until it is through
				may.Go(take)
			case nobody:
			default:
				sure.Go(take)
			}
		}
		sure.Wait()
		told.Wait()
		for i, v := range victims { // the last renewal that came through may have been another's
			if i%ways == nobody {
				dbtest.Soon(t, "a lease that nobody renews has run out", func() bool { return !s.Leased(v.key) })
			}
		}
		proxies[2].Mend()
		time.Sleep(300 * time.Millisecond) // renewals that were under way have come through
		for i, v := range victims {
			if i%ways == nobody {
				if s.Leased(v.key) {
					t.Errorf("the lease on %s is live again", v.key)
				}
			}
		}
		proxies[0].Mend()
		proxies[1].Close()
		close(isOver)
		over.Wait()
		may.Wait()

		committed := 0
		var left []time.Duration
		for i, v := range victims {
			v.tx.Rollback()
			rows := s.written(v.key, v.token)
			switch {
			case v.err == nil && i%ways == racing:
				committed++
				if rows != 1 {
					t.Errorf("an acknowledged commit is not there")
				}
			case !errors.Is(v.err, mysqllock.ErrLost):
				t.Errorf("way %d, proxy %d: Commit returned %v", i%ways, i/ways%2, v.err)
			case rows != 0 && i%ways != racing:
				t.Errorf("way %d, proxy %d: a write without the lease", i%ways, i/ways%2)
			}
			if i%ways == late {
				left = append(left, v.left)
			}
			if i%ways != leaving {
				if err := v.release(); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("Release returned %v, want ErrLost", err)
				}
			}
		}
		slices.Sort(left)
		if left[len(left)/2] < ttl/20 {
			t.Errorf("holders were told that their leases were lost when they had %v left on the server, by the median", left[len(left)/2])
		}
		for i, o := range took {
			if i%ways != nobody {
				dbtest.OK(t, o.write(others, 0))
				dbtest.OK(t, o.release())
			}
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d cut off in their transactions, %d in time committed; holders were told %v to %v before the end of the lease", n, committed, left[0], left[len(left)-1])
	})
}

// TestProofKill: connections are killed in the middle of transactions under
// leases: the transaction's own, or all that the application has.
func TestProofKill(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.proof()
		h, ctx := &history{}, dbtest.Within(t, 2*time.Minute)
		dbs := []*sql.DB{s.Handle(), s.Handle()}
		own, err := s.Plain.Conn(ctx)
		dbtest.OK(t, err)
		defer own.Close()
		all := func() []int {
			return dbtest.Column[int](t, own, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.Name)
		}
		kill := func(ids ...int) {
			for _, id := range ids {
				var gone *mysql.MySQLError
				if _, err := own.ExecContext(ctx, fmt.Sprint("KILL ", id)); err != nil && (!errors.As(err, &gone) || gone.Number != 1094) {
					t.Error(err)
				}
			}
		}
		const keys = 25
		begin := func(i int) (o *holder, id int, err error) {
			o, err = h.acquire(ctx, dbs[i%2], fmt.Sprint("k", i), lockctx.Lease(10*time.Second))
			if err != nil {
				return nil, 0, err
			}
			inside := context.WithoutCancel(o.hold.Context())
			from := inside
			if i%3 == 0 {
				from = ctx // and only the first statement is inside the hold
			}
			if err = o.begin(from, dbs[i%2]); err == nil {
				err = o.read(inside)
			}
			if err == nil {
				err = o.insert(inside)
			}
			if err == nil {
				err = o.tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id)
			}
			return o, id, err
		}
		committed, failed := 0, 0
		for round := range dbtest.Long(4, 12) {
			everything := round%2 == 1
			holders, ids, errs := make([]*holder, keys), make([]int, keys), make([]error, keys)
			var begun sync.WaitGroup
			for i := range keys {
				begun.Go(func() {
					holders[i], ids[i], errs[i] = begin(i)
				})
			}
			begun.Wait()
			dbtest.OK(t, errors.Join(errs...))
			var commits sync.WaitGroup
			killed := make(chan struct{})
			for i, o := range holders {
				commits.Go(func() {
					if everything {
						time.Sleep(rand.N(10 * time.Millisecond))
					} else {
						<-killed
					}
					errs[i] = o.commit()
				})
			}
			if everything {
				ids = all()
			}
			kill(ids...)
			dbtest.Soon(t, "the connections are gone", func() bool {
				return !slices.ContainsFunc(all(), func(id int) bool { return slices.Contains(ids, id) })
			})
			close(killed)
			commits.Wait()
			for i, o := range holders {
				rows := s.written(o.key, o.token)
				switch err := errs[i]; {
				case err == nil && everything && rows == 1:
					committed++
				case err == nil:
					t.Errorf("a commit succeeded on a killed connection, or %d rows of it are there", rows)
				case !errors.Is(err, mysqllock.ErrLost):
					t.Errorf("Commit returned %v", err)
				case rows == 1 && !everything:
					t.Errorf("a commit that returned %v is there", err)
				default:
					failed++
				}
			}
			// Leases outlive connections: the holders go on.
			var rest sync.WaitGroup
			for i, o := range holders {
				rest.Go(func() {
					_, err := mysqllock.Acquire(ctx, dbs[1-i%2], o.key, lockctx.Lease(10*time.Second), lockctx.Wait(300*time.Millisecond))
					if !errors.Is(err, mysqllock.ErrTimeout) {
						t.Errorf("%s: Acquire beside the holder whose connections were killed: %v", o.key, err)
					}
					if err := o.write(dbs[i%2], 0); err != nil {
						t.Errorf("%s: a write after the kill: %v", o.key, err)
					}
					if err := o.release(); err != nil {
						t.Errorf("%s: Release after the kill: %v", o.key, err)
					}
				})
			}
			rest.Wait()
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d commits failed, %d were quicker than the kill", failed, committed)
	})
}

// TestProofCrash: the server is killed again and again while leases are taken,
// written under, and given back.
func TestProofCrash(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			ctx := dbtest.Within(t, 10*time.Minute)
			srv, err := tempserver.Start(ctx, bin)
			dbtest.OK(t, err)
			t.Cleanup(func() { srv.Stop() })
			s := newScratch(dbtest.New(t, bin, srv)).proof()
			h := &history{}
			var stop atomic.Bool
			var all sync.WaitGroup
			for range 3 {
				db := s.Handle()
				for i := range 4 {
					all.Go(func() {
						for !stop.Load() {
							o, err := h.acquire(ctx, db, fmt.Sprint("k", i%2), lockctx.Lease(time.Second), lockctx.Wait(3*time.Second))
							if err != nil {
								time.Sleep(20 * time.Millisecond)
								continue
							}
							for range 1 + rand.N(3) {
								_ = o.write(db, rand.N(10*time.Millisecond))
							}
							_ = o.release()
						}
					})
				}
			}
			patient := s.Handle()
			o, err := h.acquire(ctx, patient, "patient", lockctx.Lease(5*time.Minute))
			dbtest.OK(t, err)
			crashes := dbtest.Long(3, 10)
			for crash := range crashes {
				time.Sleep(500*time.Millisecond + rand.N(500*time.Millisecond))
				dbtest.OK(t, srv.Kill())
				time.Sleep(rand.N(time.Second))
				dbtest.OK(t, srv.Restart(ctx))
				before := h.count("grant")
				dbtest.Soon(t, "leases are granted again", func() bool { return h.count("grant") > before+5 })
				dbtest.Soon(t, fmt.Sprint("the holder of a long lease goes on after crash ", crash), func() bool { return o.write(patient, 0) == nil })
			}
			stop.Store(true)
			finished := make(chan struct{})
			go func() { all.Wait(); close(finished) }()
			select {
			case <-finished:
			case <-time.After(30 * time.Second):
				t.Fatal("it hangs")
			}
			dbtest.OK(t, o.release())
			s.wantNoneStale()
			h.want(t)
			t.Logf("%d crashes: %d grants, %d commits, %d of the holds lost", crashes, h.count("grant"), h.count("use"), h.lost())
		})
	}
}

// TestProofClock: sessions whose clocks show other times agree on leases, and no
// statement of a lease's life carries the client's time.
func TestProofClock(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		ctx := dbtest.Within(t, time.Minute)
		const ttl = 6 * time.Second
		zones := []string{"+13:00", "-11:00", "+00:00"}
		dbs := make(map[string]*sql.DB)
		for _, zone := range zones {
			dbs[zone] = s.Handle("time_zone=%27" + strings.ReplaceAll(zone, "+", "%2B") + "%27")
			var got string
			dbtest.OK(t, dbs[zone].QueryRow("SELECT @@time_zone").Scan(&got))
			if got != zone {
				t.Fatalf("the session's time zone is %s, want %s", got, zone)
			}
			dbtest.OK(t, mysqllock.Do(ctx, dbs[zone], zone, func(context.Context) error { return nil }, lockctx.Lease(ttl))) // opens connections
		}
		var all sync.WaitGroup
		for _, first := range zones {
			for _, second := range zones {
				if first == second {
					continue
				}
				all.Go(func() {
					key := first + second
					holding, vanish := context.WithCancel(ctx)
					defer vanish()
					start := time.Now()
					h, err := mysqllock.Acquire(holding, dbs[first], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					defer h.Release()
					vanish() // so that it is not renewed any more
					if _, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl), lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s beside %s: %v", second, first, err)
					}
					if !s.Leased(key) {
						t.Errorf("the lease of %s does not look live", first)
					}
					next, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					if took := time.Since(start); took < ttl || took > ttl+20*time.Second {
						t.Errorf("%s took over from %s after %v, want %v", second, first, took, ttl)
					}
					if err := next.Release(); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()

		db, tap := s.Tapped(mysqllock.Config{})
		dbtest.OK(t, mysqllock.Do(ctx, db, "warm", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // makes the table
		seen := tap.Since()
		dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
			time.Sleep(ttl * 3 / 2)
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
			return err
		}, lockctx.Lease(ttl)))
		commands := seen()
		for _, what := range []string{fmt.Sprintf("INTERVAL %d MICROSECOND", ttl.Microseconds()), "d.ttl", "RELEASE_LOCK", "COMMIT"} {
			if !slices.ContainsFunc(commands, func(c dbtest.Command) bool { return strings.Contains(c.Text, what) }) {
				t.Errorf("the tap has not seen %s", what)
			}
		}
		for _, c := range commands {
			if what := clientTime(c.Text, time.Now()); what != "" {
				t.Errorf("a statement carries the client's time, %s: %s", what, c.Text)
			}
		}
		for _, bad := range []string{time.Now().UTC().Format(time.DateTime), fmt.Sprint(time.Now().Unix()), fmt.Sprint(time.Now().UnixMicro())} {
			if clientTime("SELECT '"+bad+"'", time.Now()) == "" {
				t.Errorf("the check does not see %s", bad)
			}
		}
	})
}

var (
	datePattern   = regexp.MustCompile(`\d{4}-\d\d-\d\d`)
	numberPattern = regexp.MustCompile(`\b\d{10,}\b`)
)

// clientTime returns what in a statement looks like the current time.
func clientTime(text string, now time.Time) string {
	if date := datePattern.FindString(text); date != "" {
		return date
	}
	for _, number := range numberPattern.FindAllString(text, -1) {
		n, _ := strconv.ParseFloat(number, 64)
		for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
			if off := n - float64(now.UnixNano())/float64(unit); max(off, -off)*unit.Seconds() < 1e6 {
				return number
			}
		}
	}
	return ""
}

const leases = 1000

// leasesTTL is that of many leases at a time.
func leasesTTL() time.Duration { return 9 * time.Second }

// childLeases holds many leases, and says, when it is asked, how many statements
// were sent, over how many connections, and how many goroutines there are.
func childLeases(_ *sql.DB, in *bufio.Scanner) {
	tap := new(dbtest.Tap)
	sent := tap.Since()
	cfg, err := mysql.ParseDSN(dbtest.JobDSN())
	if err == nil {
		tap.On(cfg)
		var c mysqllock.Config
		connector, failed := mysqllock.NewConnector(cfg, c)
		if failed == nil {
			db := sql.OpenDB(connector)
			defer db.Close()
			failed = takeMany(db)
		}
		err = failed
	}
	fmt.Println(err)
	for in.Scan() {
		goroutines := runtime.NumGoroutine()
		for range 50 { // without those that come and go
			time.Sleep(2 * time.Millisecond)
			goroutines = min(goroutines, runtime.NumGoroutine())
		}
		fmt.Println(len(sent()), tap.Opened(), goroutines)
	}
}

func takeMany(db *sql.DB) error {
	errs := make([]error, leases)
	var all sync.WaitGroup
	turns := make(chan struct{}, 32)
	for i := range leases {
		turns <- struct{}{}
		all.Go(func() {
			_, errs[i] = mysqllock.Acquire(context.Background(), db, fmt.Sprint("k", i), lockctx.Lease(leasesTTL()))
			<-turns
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// TestProofRenewal: a process keeps a thousand leases with few statements, few
// connections and few goroutines, however long.
func TestProofRenewal(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		c := dbtest.StartJob(t, "leases", s.DSN())
		if line := c.Line(); line != "<nil>" {
			t.Fatal(line)
		}
		var figures [2]struct{ statements, conns, goroutines int }
		look := func(i int) {
			t.Helper()
			c.Tell("")
			f := &figures[i]
			_, err := fmt.Sscan(c.Line(), &f.statements, &f.conns, &f.goroutines)
			dbtest.OK(t, err)
		}
		time.Sleep(leasesTTL() / 2) // they have been renewed once
		start := time.Now()
		look(0)
		time.Sleep(dbtest.Long(6*time.Second, time.Minute))
		look(1)
		lasted := time.Since(start)
		var live int
		dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND owner IS NOT NULL AND expires > UTC_TIMESTAMP(6) AND token = 1", s.Name).Scan(&live))
		if live != leases {
			t.Errorf("%d of %d leases are still the first holder's", live, leases)
		}
		if figures[1].conns > figures[0].conns+1 || figures[1].goroutines > figures[0].goroutines+5 { // one may have been lost, or a renewal be under way
			t.Errorf("it grows: from %+v to %+v", figures[0], figures[1])
		}
		rate := float64(figures[1].statements-figures[0].statements) / lasted.Seconds()
		renewals := lasted.Seconds() / (leasesTTL().Seconds() / 3)
		t.Logf("%d leases with a TTL of %v, for %v: %.1f statements a second, %.1f a renewal of all; %d connections opened, %d goroutines",
			leases, leasesTTL(), lasted.Round(time.Second), rate, rate*lasted.Seconds()/renewals, figures[1].conns, figures[1].goroutines)
		if rate > 20 {
			t.Errorf("%.1f statements a second for %d leases", rate, leases)
		}
		dbtest.OK(t, c.End())
		dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND owner IS NOT NULL", s.Name).Scan(&live))
		if live != 0 {
			t.Errorf("%d leases are left by a handle that was closed", live)
		}
	})
}

// TestProofFirstLeases: the first leases of a handle, more at once than it may
// have connections.
func TestProofFirstLeases(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for range 5 {
			db, ctx := s.Handle("lockMaxConns=4"), dbtest.Within(t, 25*time.Second)
			holds := make([]*mysqllock.Hold, 64)
			errs := make([]error, len(holds))
			var all sync.WaitGroup
			for i := range holds {
				all.Go(func() {
					holds[i], errs[i] = mysqllock.Acquire(ctx, db, fmt.Sprint("k", i), lockctx.Lease(time.Minute))
				})
			}
			all.Wait()
			dbtest.OK(t, errors.Join(errs...))
			dbtest.OK(t, db.Close())
		}
	})
}

// childGiver takes the lease, and gives it back, each time when it is told to, again
// and again. It says when it did.
func childGiver(db *sql.DB, in *bufio.Scanner) {
	for {
		h, err := mysqllock.Acquire(context.Background(), db, "k", lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
		fmt.Println(err)
		if err != nil || !in.Scan() {
			return
		}
		time.Sleep(20 * time.Millisecond)
		released := now()
		_ = h.Release()
		fmt.Println(released)
		if !in.Scan() {
			return
		}
	}
}

// TestProofWakeUp: a waiter in another process is woken, and does not find out by
// looking now and then.
func TestProofWakeUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		ctx, db := dbtest.Within(t, 5*time.Minute), s.Handle()
		c := dbtest.StartJob(t, "giver", s.DSN())
		var took []time.Duration
		for range 50 {
			if line := c.Line(); line != "<nil>" {
				t.Fatal(line)
			}
			granted := make(chan int64, 1)
			var h *mysqllock.Hold
			var err error
			go func() {
				h, err = mysqllock.Acquire(ctx, db, "k", lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
				granted <- now()
			}()
			dbtest.Soon(t, "it waits", func() (waits bool) {
				dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) = 1 FROM information_schema.PROCESSLIST WHERE DB = ? AND STATE = 'User lock'",
					s.Name).Scan(&waits))
				return waits
			})
			c.Tell("")
			at := <-granted
			dbtest.OK(t, err)
			released, err := strconv.ParseInt(c.Line(), 10, 64)
			dbtest.OK(t, err)
			took = append(took, time.Duration(at-released))
			dbtest.OK(t, h.Release())
			c.Tell("")
		}
		slices.Sort(took)
		t.Logf("from Release to the grant in another process: median %v, 90 %% within %v, at most %v", took[len(took)/2], took[len(took)*9/10], took[len(took)-1])
		if took[0] > 100*time.Millisecond { // a busy machine may delay the others, and who only looks does so after a quarter of a second
			t.Errorf("a hand-over takes %v at the least", took[0])
		}
	})
}

func turmoilTime() time.Duration { return dbtest.Long(8*time.Second, time.Minute) }

// turmoil takes leases and row locks on few keys, at random, and holds, loses,
// abandons and gives them back.
func (h *history) turmoil(db *sql.DB, until time.Time) {
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for time.Now().Before(until) {
				h.anything(db)
			}
		})
	}
	all.Wait()
}

func (h *history) anything(db *sql.DB) {
	once := func(n int) bool { return rand.N(n) == 0 }
	key := fmt.Sprint("k", rand.N(3))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if once(4) {
		time.AfterFunc(rand.N(50*time.Millisecond), cancel)
	}
	opts := []lockctx.Option{lockctx.Wait(rand.N(time.Second))}
	if once(3) {
		opts = append(opts, lockctx.Row())
	} else {
		opts = append(opts, lockctx.Lease(time.Second+rand.N(time.Second)))
	}
	think := rand.N(5 * time.Millisecond)
	if once(50) {
		think = rand.N(1500 * time.Millisecond)
	}
	if once(2) {
		o, err := h.acquireTx(ctx, db, key, opts...)
		if err == nil {
			_ = o.finish(ctx, think)
		}
		return
	}
	o, err := h.acquire(ctx, db, key, opts...)
	if err != nil {
		return
	}
	for range 1 + rand.N(2) {
		_ = o.write(db, think)
	}
	if once(10) {
		cancel() // it is not renewed any more
		time.Sleep(think)
	}
	_ = o.release()
}

func childTurmoil(db *sql.DB, _ *bufio.Scanner) {
	h := &history{tell: true}
	h.turmoil(db, time.Now().Add(turmoilTime()))
	fmt.Println("over")
}

// TestProofTurmoil: three processes take leases and row locks on the same keys
// while their calls are cancelled, their connections killed, and two of them
// stopped now and then.
func TestProofTurmoil(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		s.proof()
		h := &history{}
		db := s.Handle("lockTTL=2s")
		until := time.Now().Add(turmoilTime())
		var all sync.WaitGroup
		for range 2 {
			c := dbtest.StartJob(t, "turmoil", s.DSN("lockTTL=2s"))
			all.Go(func() {
				for line := range c.Said() {
					if !h.heard(line) {
						if line != "over" {
							t.Error(line)
						}
						return
					}
				}
				t.Error("a child process ended")
			})
			all.Go(func() {
				for {
					time.Sleep(rand.N(1500 * time.Millisecond))
					if time.Now().After(until) {
						return
					}
					c.Signal(syscall.SIGSTOP)
					time.Sleep(rand.N(2500 * time.Millisecond))
					c.Signal(syscall.SIGCONT)
				}
			})
		}
		all.Go(func() { h.turmoil(db, until) })
		all.Go(func() {
			for time.Now().Before(until) {
				time.Sleep(50*time.Millisecond + rand.N(100*time.Millisecond))
				var id int
				if s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() ORDER BY RAND() LIMIT 1", s.Name).Scan(&id) == nil {
					s.Plain.Exec(fmt.Sprint("KILL ", id))
				}
			}
		})
		finished := make(chan struct{})
		go func() { all.Wait(); close(finished) }()
		select {
		case <-finished:
		case <-time.After(turmoilTime() + time.Minute):
			t.Fatal("it hangs")
		}
		for i := range 3 { // nothing is left that would not end
			o, err := h.acquire(dbtest.Within(t, time.Minute), s.Handle(), fmt.Sprint("k", i), lockctx.Lease(time.Second), lockctx.Wait(time.Minute))
			dbtest.OK(t, err)
			dbtest.OK(t, o.release())
		}
		s.wantNoneStale()
		h.want(t)
		if h.count("use") < 20 || h.lost() == 0 {
			t.Error("hardly anything happened")
		}
		t.Logf("%d grants, %d commits within holds, %d holds and transactions that were lost, cancelled or failed", h.count("grant"), h.count("use"), h.lost())
	})
}
