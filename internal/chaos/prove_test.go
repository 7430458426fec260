package chaos

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Here leases have to hold while their holders are stopped, cut off, killed and raced at
// chosen moments. "make prove" runs the long form.

// held is a lease that a worker holds, with the transaction that it has under it.
type held struct {
	*hold
	lock  *mysqllock.Hold
	t     *transfer
	tx    *sql.Tx
	state account // to be committed
}

// acquire takes a lease for a worker of its own.
func (w *worker) acquire(ctx context.Context, key string, opts ...lockctx.Option) (*held, error) {
	call := now()
	lock, err := mysqllock.Acquire(ctx, w.db, key, opts...)
	if err != nil {
		return nil, err
	}
	own := *w
	own.random = rand.New(rand.NewPCG(seed, uint64(w.ids.Add(1))))
	return &held{hold: own.granted(call, lock.Token(), false, key), lock: lock}, nil
}

// begin begins a transaction, and reads in it.
func (h *held) begin(ctx, statements context.Context) error {
	h.t = h.transfer()
	since := now()
	tx, err := h.db.BeginTx(ctx, nil)
	if err == nil {
		h.tx = tx
		h.state, err = h.t.read(statements, tx, since, h.keys[0])
		h.state = h.t.moved(h.state)
	}
	if err != nil {
		h.t.end(err, false)
	}
	return err
}

// write writes what begin has decided.
func (h *held) write(ctx context.Context) error {
	err := h.t.write(ctx, h.tx, h.state)
	if err != nil {
		h.t.end(err, false)
	}
	return err
}

func (h *held) commit() error {
	call := h.t.attempt(h.state)
	err := h.tx.Commit()
	if err == nil {
		h.say(kindUse, call, 0)
	}
	h.t.end(err, true)
	return err
}

// change is a whole transaction.
func (h *held) change() error {
	ctx := h.lock.Context()
	err := h.begin(ctx, ctx)
	if err == nil {
		err = h.write(ctx)
	}
	if err == nil {
		err = h.commit()
	}
	if h.tx != nil {
		_ = h.tx.Rollback()
	}
	return err
}

func (h *held) release() error {
	call := now()
	err := h.lock.Release()
	if err == nil {
		h.say(kindRelease, call, 0)
	}
	return err
}

// prove runs a test on each of the servers, with an arena where clients do the jobs.
func prove(t *testing.T, jobs []string, all []orders, test func(t *testing.T, a *arena)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			a := shared(t, bin, dbtest.Random())
			a.employ(jobs, all...)
			test(t, a)
		})
	}
}

// wantRight ends the round, and checks it.
func (a *arena) wantRight() {
	a.t.Helper()
	wrong, known := a.judge(a.end())
	for _, v := range append(wrong, known...) {
		a.t.Error(v)
	}
}

// TestProofRivals: of 32 clients of 16 handles that race for a lease whose holder has vanished
// one gets it, and its token is the next.
func TestProofRivals(t *testing.T) {
	prove(t, nil, nil, func(t *testing.T, a *arena) {
		ctx := dbtest.Within(t, 10*time.Minute)
		var rivals []*worker
		var ends []func()
		for i := range 16 {
			w, end := a.worker(fmt.Sprint("rival", i), a.addr(a.primary), time.Minute)
			rivals, ends = append(rivals, w, w), append(ends, end)
		}
		minute := lockctx.Lease(time.Minute)
		first, err := rivals[0].acquire(ctx, "k0", minute)
		dbtest.OK(t, err)
		token := first.lock.Token()
		dbtest.OK(t, first.release())
		for round := range dbtest.Long(100, 2000) {
			dbtest.OK(t, a.exec("UPDATE "+a.database+".mysqllock SET owner = 'vanished#00000000', expires = UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND"))
			won, errs := make([]*held, len(rivals)), make([]error, len(rivals))
			var all sync.WaitGroup
			start := make(chan struct{})
			for i, w := range rivals {
				all.Go(func() {
					<-start
					won[i], errs[i] = w.acquire(ctx, "k0", minute, lockctx.NoWait())
				})
			}
			close(start)
			all.Wait()
			for _, err := range errs {
				if err != nil {
					dbtest.Want(t, err, mysqllock.ErrLocked)
				}
			}
			won = slices.DeleteFunc(won, func(h *held) bool { return h == nil })
			if token++; len(won) != 1 || won[0].lock.Token() != token {
				t.Fatalf("round %d has %d winners, and the token is to be %d: %+v", round, len(won), token, won)
			}
			dbtest.OK(t, won[0].release())
		}
		for _, end := range ends {
			end()
		}
		a.wantRight()
	})
}

// pausedWays are transactions under leases that think until they are told to go on, and have
// read before.
func pausedWays(lease lockctx.Option) []way {
	paused := func(early bool, within func(held context.Context) (begin, statements context.Context)) way {
		return func(w *worker, _ context.Context) {
			h, err := w.acquire(context.Background(), w.keys[0], lease)
			if err != nil {
				w.transfer().end(err, false)
				return
			}
			begin, statements := within(h.lock.Context())
			if h.begin(begin, statements) != nil || early && h.write(statements) != nil {
				return
			}
			defer h.tx.Rollback()
			<-w.goOn
			if early || h.write(statements) == nil {
				_ = h.commit()
			}
			if err := h.lock.Release(); !errors.Is(err, mysqllock.ErrLost) {
				w.note(event{Kind: kindEnd, Job: w.job, Op: "release", Result: failed, Error: fmt.Sprint("it did not say that the lease is lost: ", err)})
			}
		}
	}
	unaware := func(held context.Context) (begin, statements context.Context) {
		return context.WithoutCancel(held), context.Background()
	}
	return []way{
		paused(false, unaware), // with no context that would tell
		paused(true, unaware),  // it has written before
		paused(false, func(held context.Context) (begin, statements context.Context) {
			return context.WithoutCancel(held), context.WithoutCancel(held)
		}),
		paused(false, func(held context.Context) (begin, statements context.Context) { return held, held }),
		func(w *worker, _ context.Context) { // the lease is the transaction's own
			w.ctx = context.Background()
			w.beginTx(w.ctx, true, w.keys, []lockctx.Option{lease})
		},
	}
}

// pause stops a client in its transactions until somebody else has had all of its leases, and
// has written. Then it goes on.
func (a *arena) pause(job string) {
	keys := jobs[job].keysOf(job, 0)
	a.soon("all have read", func() bool {
		a.must(a.history.refresh())
		return a.history.count(kindRead) == len(keys)
	})
	a.must(a.processes[0].signal(syscall.SIGSTOP))
	other, end := a.worker("other", a.addr(a.primary), time.Minute)
	defer end()
	took, errs := make([]*held, len(keys)), make([]error, len(keys))
	var all sync.WaitGroup
	for i, key := range keys {
		all.Go(func() {
			if took[i], errs[i] = other.acquire(a.t.Context(), key, lockctx.Lease(time.Minute), lockctx.Wait(patience)); errs[i] == nil {
				errs[i] = took[i].change()
			}
		})
	}
	all.Wait()
	a.must(a.processes[0].signal(syscall.SIGCONT))
	a.must(errors.Join(errs...))
	a.settle()
	a.turn()
	for _, h := range took { // the lease did not go with the other's release
		if h.change() == nil {
			a.must(h.release())
		}
	}
}

// soon waits for what must happen.
func (a *arena) soon(what string, happened func() bool) {
	a.t.Helper()
	for end := time.Now().Add(patience); !happened(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			a.t.Fatal("it never came to that: ", what)
		}
	}
}

// TestProofPause: a process that was stopped in its transactions until others had its leases,
// and had written, commits nothing. Without the fence it does, and the checks see it.
func TestProofPause(t *testing.T) {
	for _, job := range []string{"paused", "paused without a fence"} {
		t.Run(job, func(t *testing.T) {
			n := jobs[job].keys
			prove(t, []string{job}, []orders{{Workers: n, Limit: patience}}, func(t *testing.T, a *arena) {
				a.pause(job)
				if b := a.end(); jobs[job].breaks != nil {
					if seen := len(b.overwritten(a.history)); seen < n {
						t.Errorf("the check of what is written finds %d of %d stale writes", seen, n)
					}
					if seen := len(a.history.checkLocks(a.unsure, a.doubtful)); seen != n {
						t.Errorf("the check of the locks finds %d of %d stale writes", seen, n)
					}
				} else {
					wrong, known := a.judge(b)
					for _, v := range append(wrong, known...) {
						t.Error(v)
					}
				}
				for _, e := range a.history.events {
					if e.Kind == kindEnd && e.Job == job && (e.Op == "release" || jobs[job].breaks == nil && e.Result != lost && e.Result != gaveUp) {
						t.Errorf("%s ended with %q: %s", e.Op, e.Result, e.Error)
					}
				}
			})
		})
	}
}

// The holders of TestProofCut.
const (
	cutLate     = iota // commits after the cut
	cutUnderWay        // commits in the cut
	cutRacing          // commits before: the first COMMIT, with its check, is what the cut swallows
	cutLeaving         // releases the lease in the cut
	cutNobody          // as late, and nobody else takes the lease
	cutWays
)

// victim is a holder whose network is cut.
type victim struct {
	*held
	way  int
	err  error
	left time.Duration // of the lease on the server when its holder is told
}

// TestProofCut: holders whose network is cut in their transactions. Others get the leases and
// write; then the network is back, or the connections turn out to be gone.
func TestProofCut(t *testing.T) {
	const ttl = 6 * time.Second
	n := cutWays * dbtest.Long(10, 24)
	prove(t, nil, nil, func(t *testing.T, a *arena) {
		ctx := dbtest.Within(t, patience)
		others, endOthers := a.worker("others", a.addr(a.primary), time.Minute)
		var holders [3]*worker // whose connections are back in the end, turn out to be gone, and whose renewals then come late
		var proxies [3]*dbtest.Proxy
		var ends [3]func()
		for i := range holders {
			proxies[i] = dbtest.StartProxy(t, a.addr(a.primary))
			holders[i], ends[i] = a.worker(fmt.Sprint("cut off ", i), proxies[i].Addr(), ttl)
		}
		victims := make([]*victim, n)
		var ready, told, over sync.WaitGroup
		isReady, isCut, isOver := make(chan struct{}), make(chan struct{}), make(chan struct{})
		for i := range n {
			v := &victim{way: i % cutWays}
			victims[i] = v
			w := holders[i/cutWays%2]
			if v.way == cutNobody {
				w = holders[2]
			}
			ready.Add(1)
			over.Go(func() {
				if v.held, v.err = w.acquire(ctx, fmt.Sprint("k", i), lockctx.Lease(ttl)); v.err == nil {
					stays := context.WithoutCancel(v.lock.Context())
					if v.err = v.begin(stays, stays); v.err == nil {
						v.err = v.write(stays)
					}
				}
				ready.Done()
				if v.err != nil {
					return
				}
				switch v.way {
				case cutRacing:
					<-isReady
				case cutUnderWay:
					<-isCut
				case cutLeaving:
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
		left := func(v *victim) (d time.Duration) {
			a.must(a.admin().QueryRow("SELECT IF(token = ?, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) * 1000, 0) FROM "+a.database+".mysqllock WHERE name = ?",
				v.lock.Token(), v.keys[0]).Scan(&d))
			return d
		}
		for _, v := range victims {
			dbtest.OK(t, v.err)
			if v.way == cutLate {
				told.Go(func() { <-v.lock.Context().Done(); v.left = left(v) })
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

		took := make([]*held, n)
		var sure, may sync.WaitGroup
		for i, v := range victims {
			take := func() {
				var err error
				if took[i], err = others.acquire(ctx, v.keys[0], lockctx.Lease(time.Minute), lockctx.Wait(patience)); err == nil {
					err = took[i].change()
				}
				if err != nil {
					t.Error(err)
				}
			}
			switch v.way {
			case cutRacing: // where it is before the cut, it keeps the lease until it is through
				may.Go(take)
			case cutNobody:
			default:
				sure.Go(take)
			}
		}
		sure.Wait()
		told.Wait()
		for _, v := range victims { // the last renewal that came through may have been another's
			if v.way == cutNobody {
				dbtest.Soon(t, "a lease that nobody renews has run out", func() bool { return left(v) <= 0 })
			}
		}
		proxies[2].Mend()
		proxies[0].Mend()
		proxies[1].Close()
		close(isOver)
		over.Wait()
		may.Wait()
		for _, v := range victims { // renewals that were under way have come through
			if d := left(v); v.way == cutNobody && d > 0 {
				t.Errorf("the lease on %s is live again: %v", v.keys[0], d)
			}
		}
		var notices []time.Duration
		for i, v := range victims {
			_ = v.tx.Rollback()
			if v.err != nil && !errors.Is(v.err, mysqllock.ErrLost) || v.err == nil && v.way != cutRacing {
				t.Errorf("way %d, proxy %d: Commit returned %v", v.way, i/cutWays%2, v.err)
			}
			if v.way == cutLate {
				notices = append(notices, v.left)
			}
			if v.way != cutLeaving {
				dbtest.Want(t, v.release(), mysqllock.ErrLost)
			}
			if took[i] != nil {
				dbtest.OK(t, took[i].change())
				dbtest.OK(t, took[i].release())
			}
		}
		slices.Sort(notices)
		if notices[len(notices)/2] < ttl/20 {
			t.Errorf("holders were told that their leases were lost when they had %v left on the server, by the median", notices[len(notices)/2])
		}
		endOthers()
		for _, end := range ends {
			end()
		}
		b := a.end()
		for _, v := range victims {
			if v.way != cutRacing && b.has(v.t.id, v.keys[0]) {
				t.Errorf("way %d: a write without the lease", v.way)
			}
		}
		wrong, known := a.judge(b)
		for _, v := range append(wrong, known...) {
			t.Error(v)
		}
	})
}

// TestProofKill: connections are killed in the middle of transactions under leases: the
// transaction's own, or all that the application has. The leases outlive them.
func TestProofKill(t *testing.T) {
	const keys = 25
	prove(t, nil, nil, func(t *testing.T, a *arena) {
		ctx := dbtest.Within(t, patience)
		var ends [2]func()
		var workers [2]*worker
		for i := range workers {
			workers[i], ends[i] = a.worker(fmt.Sprint("holder", i), a.addr(a.primary), time.Minute)
		}
		each := func(do func(i int) error) {
			var all sync.WaitGroup
			errs := make([]error, keys)
			for i := range keys {
				all.Go(func() { errs[i] = do(i) })
			}
			all.Wait()
			dbtest.OK(t, errors.Join(errs...))
		}
		committed, refused := 0, 0
		for round := range dbtest.Long(4, 12) {
			everything := round%2 == 1
			holders, ids := make([]*held, keys), make([]int64, keys)
			each(func(i int) (err error) {
				if holders[i], err = workers[i%2].acquire(ctx, fmt.Sprint("k", i), lockctx.Lease(time.Minute)); err != nil {
					return err
				}
				inside := context.WithoutCancel(holders[i].lock.Context())
				from := inside
				if i%3 == 0 {
					from = ctx // and only the first statement is inside the hold
				}
				if err = holders[i].begin(from, inside); err == nil {
					err = holders[i].write(inside)
				}
				return errors.Join(err, holders[i].tx.QueryRow("SELECT CONNECTION_ID()").Scan(&ids[i]))
			})
			killed, errs := make(chan struct{}), make([]error, keys)
			var commits sync.WaitGroup
			for i, h := range holders {
				commits.Go(func() {
					if everything {
						time.Sleep(rand.N(10 * time.Millisecond))
					} else {
						<-killed
					}
					errs[i] = h.commit()
				})
			}
			if everything {
				var err error
				ids, err = a.connections(a.primary, "")
				dbtest.OK(t, err)
			}
			for _, id := range ids {
				var gone *mysql.MySQLError
				if err := a.exec(fmt.Sprint("KILL ", id)); err != nil && (!errors.As(err, &gone) || gone.Number != 1094) {
					t.Error(err)
				}
			}
			a.soon("the connections are gone", func() bool {
				there, err := a.connections(a.primary, "")
				a.must(err)
				return !slices.ContainsFunc(there, func(id int64) bool { return slices.Contains(ids, id) })
			})
			close(killed)
			commits.Wait()
			for _, err := range errs {
				switch {
				case err == nil && everything:
					committed++
				case err == nil:
					t.Error("a commit succeeded on a killed connection")
				default:
					dbtest.Want(t, err, mysqllock.ErrLost)
					refused++
				}
			}
			each(func(i int) error { // the holders go on
				if _, err := mysqllock.Acquire(ctx, workers[1-i%2].db, holders[i].keys[0], lockctx.Lease(time.Minute), lockctx.Wait(300*time.Millisecond)); !errors.Is(err, mysqllock.ErrTimeout) {
					t.Errorf("Acquire beside the holder whose connections were killed: %v", err)
				}
				return errors.Join(holders[i].change(), holders[i].release())
			})
		}
		t.Logf("%d commits failed, %d were quicker than the kill", refused, committed)
		for _, end := range ends {
			end()
		}
		a.wantRight()
	})
}

// TestProofCrash: the server is killed again and again while leases are taken, written under,
// and given back. The holder of a long lease goes on each time.
func TestProofCrash(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			a := newArena(t, bin)
			a.employ([]string{"lease"}, slices.Repeat([]orders{{Workers: 4, Pause: 5 * time.Millisecond}}, 3)...)
			patient, end := a.worker("patient", a.addr(a.primary), 5*time.Minute)
			h, err := patient.acquire(t.Context(), "k0", lockctx.Lease(5*time.Minute))
			dbtest.OK(t, err)
			a.recover(0)
			for range dbtest.Long(3, 10) {
				a.inflict(serverKilled)
				a.soon("the holder of a long lease goes on", func() bool { return h.change() == nil })
			}
			dbtest.OK(t, h.release())
			end()
			a.wantRight()
		})
	}
}

// TestProofTurmoil: three processes take leases and row locks on the same keys, and read their
// versions, while calls are cancelled, connections killed, and a process stopped now and then.
func TestProofTurmoil(t *testing.T) {
	t.Parallel()
	disturbed := &fault{"connections killed, and a client stopped", true, func(a *arena) (times int) {
		a.stop(a.victim(), func() { times = a.killEach("KILL", "") })
		return times
	}}
	onLoad(t, tempserver.EachFlavour(tempserver.Require(t)), dbtest.Long(5*time.Second, time.Minute), load{
		name: "mixed", jobs: []string{"mixed"}, faults: []*fault{disturbed},
		clients: slices.Repeat([]orders{{Workers: 3, Keys: 3, GiveUp: 4, Pause: 5 * time.Millisecond}}, 3),
	})
}
