package rowlock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// slots are the rows of the slots of key s, which is the first of them.
func slots(n int) []string {
	rows := []string{"s"}
	for i := 1; i < n; i++ {
		rows = append(rows, fmt.Sprintf("slot %d of s", i))
	}
	return rows
}

// occupied returns which of the rows somebody has locked.
func (s *scratch) occupied(c driver.Conn, rows []string) (taken []string) {
	s.T.Helper()
	var names []string
	for _, row := range rows {
		names = append(names, schema.Literal(row))
	}
	free := make(map[string]bool)
	for _, row := range s.Query(c, "SELECT name FROM "+s.table.String()+" WHERE namespace = 'app' AND name IN ("+strings.Join(names, ", ")+") FOR UPDATE SKIP LOCKED") {
		free[row[0]] = true
	}
	return slices.DeleteFunc(slices.Clone(rows), func(row string) bool { return free[row] })
}

// wantNoGaps checks that rows can be made anywhere.
func (s *scratch) wantNoGaps(c driver.Conn) {
	s.T.Helper()
	s.Exec(c, "SET SESSION innodb_lock_wait_timeout = 1")
	for _, name := range []string{"a", "l", "s ", "s3", "slot 1 of s ", "slot 2", "slot 3", "zzz"} {
		s.Exec(c, "BEGIN")
		s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name) VALUES ('app', '"+name+"')")
		s.Exec(c, "ROLLBACK")
	}
}

// big fills the table, so that the optimizer has something to choose from.
func (s *scratch) big() {
	s.T.Helper()
	c := s.Connect()
	digits := "(SELECT 0 AS d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)"
	s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name) SELECT 'app', CONCAT('other ', a.d, b.d, e.d, f.d) FROM "+
		digits+" a, "+digits+" b, "+digits+" e, "+digits+" f")
	s.Exec(c, "ANALYZE TABLE "+s.table.String())
}

// TestOneSlotIsLockedAndNoOtherRow, which the caller is told, in a table of few rows and of
// many.
func TestOneSlotIsLockedAndNoOtherRow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(4)
		probe := s.Connect()
		other := append([]string{"k"}, rows...) // and what else is in the table
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), []string{"k"}))
		for _, big := range []bool{false, true} {
			if big {
				s.big()
				other = append(other, "other 0000", "other 4711")
			}
			for _, level := range []driver.IsolationLevel{0, 2, 4, 6} { // default, READ COMMITTED, REPEATABLE READ, SERIALIZABLE
				chosen := make(map[int]bool)
				var ends []func()
				var taken []string
				for i := range rows {
					c, grant, err := p.requestAs(dbtest.Limited(t), driver.TxOptions{Isolation: level}, rowlock.Request{Slots: rows})
					if err != nil {
						t.Errorf("level %d, slot %d: %v", level, i, err)
						continue
					}
					chosen[grant.Slot] = true
					taken = append(taken, rows[grant.Slot])
					slices.Sort(taken)
					got := s.occupied(probe, other)
					if slices.Sort(got); !slices.Equal(got, taken) {
						t.Errorf("level %d: locked are %q, not %q", level, got, taken)
					}
					ends = append(ends, func() { p.end(c, grant.Txn, grant.Ticket) })
				}
				s.wantNoGaps(probe)
				if len(chosen) != len(rows) {
					t.Errorf("level %d: the slots were %v", level, chosen)
				}
				for _, end := range ends {
					end()
				}
			}
		}
		if got := s.occupied(probe, other); len(got) > 0 {
			t.Errorf("%q are left locked", got)
		}
	})
}

// TestAWaiterForAllSlotsGetsTheOneThatComesFree in another process, and in what time.
func TestAWaiterForAllSlotsGetsTheOneThatComesFree(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		var longest time.Duration
		for range 8 {
			ends := []func(){p.hold(rowlock.Request{Slots: slots(3)}), p.hold(rowlock.Request{Slots: slots(3)}), p.hold(rowlock.Request{Slots: slots(3)})}
			granted := make(chan time.Time)
			go func() {
				end := other.hold(rowlock.Request{Slots: slots(3), Wait: time.Minute})
				granted <- time.Now()
				end()
				close(granted)
			}()
			s.waitsInServer(1)
			free := time.Now()
			ends[1]()
			longest = max(longest, (<-granted).Sub(free))
			<-granted
			ends[0]()
			ends[2]()
		}
		t.Logf("granted at most %v after a slot came free", longest)
		if longest > 15*time.Second { // and not the whole wait
			t.Errorf("granted %v after a slot came free", longest)
		}
	})
}

// TestASlotGoesToWhoeverHasWaitedForIt: of two slots the other is out of reach, and the holder of the first gives it
// back and asks for it again at once. Whoever has waited before that is told.
func TestASlotGoesToWhoeverHasWaitedForIt(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		rows := slots(2)
		for _, leased := range []bool{false, true} {
			p := s.process(nil)
			free := func() {}
			if leased {
				s.lease(rows[1], time.Hour)
			} else {
				free = s.process(nil).hold(rowlock.Request{Keys: exclusive(rows[1])})
			}
			var latency []time.Duration
			for began := time.Now(); len(latency) < 9 || !leased && slices.Min(latency) > slice/2 && time.Since(began) < dbtest.Patience; {
				end := p.hold(rowlock.Request{Slots: rows})
				var ended atomic.Bool
				granted, passed := make(chan time.Time, 1), make(chan struct{})
				calls := p.wakeUps.calls.Load()
				go func() {
					end := p.hold(rowlock.Request{Slots: rows, Wait: time.Minute})
					granted <- time.Now()
					<-passed
					time.Sleep(10 * time.Millisecond)
					ended.Store(true)
					end()
				}()
				if leased {
					dbtest.Soon(t, "it waits for a lease", func() bool { return p.wakeUps.calls.Load() > calls })
				} else {
					s.waitsInServer(1)
				}
				end()
				left := time.Now()
				if c, grant, err := p.request(dbtest.Limited(t), rowlock.Request{Slots: rows}); !errors.Is(err, lockerr.ErrLocked) {
					t.Errorf("one who does not wait gets past one who does: %v", err)
					if err == nil {
						p.end(c, grant.Txn, grant.Ticket)
					}
				}
				close(passed)
				end = p.hold(rowlock.Request{Slots: rows, Wait: time.Minute})
				if !ended.Load() {
					t.Error("the same one has got it again")
				}
				end()
				latency = append(latency, (<-granted).Sub(left))
			}
			slices.Sort(latency)
			t.Logf("leased %v: told and granted after %v", leased, latency)
			if !leased && latency[0] > slice/2 { // a busy machine may delay the others
				t.Errorf("granted %v after a slot came free", latency)
			}
			if leased && p.wakeUps.cut.Load() == 0 {
				t.Error("a wait for a lease was not given up for a slot")
			}
			free()
		}
	})
}

// slice is how long the wait for one slot lasts.
const slice = 250 * time.Millisecond

// TestACallerThatCanHaveNoSlotWaitsUntilItIsToldOfOne: others of its process that ask for more of the slots have
// these.
func TestACallerThatCanHaveNoSlotWaitsUntilItIsToldOfOne(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		end := s.process(nil).hold(rowlock.Request{Slots: slots(1)})
		granted := make(chan func(), 1)
		go func() { granted <- p.hold(rowlock.Request{Slots: slots(1), Wait: time.Minute}) }()
		s.waitsInServer(1)
		ticket, _, front := p.queue.TryEnter([]queue.Key{{Name: "s", Slots: 3}}, false)
		if !front {
			t.Fatal("one who asks for three slots is not in front")
		}
		ticket.Holds(0)
		time.Sleep(2 * slice)
		look := s.Connect()
		dbtest.Soon(t, "it does not wait in the server any more", func() bool { return s.waiters(look) == 0 })
		end()
		select {
		case end := <-granted:
			t.Error("a slot that somebody has was tried")
			end()
		case <-time.After(2 * slice):
			ticket.Leave()
			(<-granted)()
		}
		s.wantFree("s")
	})
}

// TestAllWaitsOfARequestForSlotsAreOne to Request.Waiting, in the queue and in the server.
func TestAllWaitsOfARequestForSlotsAreOne(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		rows := slots(1)
		var calls, dones atomic.Int32
		once := func(ctx context.Context) (context.Context, func(), error) {
			if calls.Add(1) > 1 {
				return nil, nil, errors.New("refused late")
			}
			return ctx, func() { dones.Add(1) }, nil
		}
		want := func(wantCalls, wantDones int32) {
			t.Helper()
			if calls.Load() != wantCalls || dones.Load() != wantDones {
				t.Errorf("%d waits began and %d ended", calls.Load(), dones.Load())
			}
		}

		end := p.hold(rowlock.Request{Slots: rows})
		granted := make(chan func())
		go func() { granted <- p.hold(rowlock.Request{Slots: rows, Wait: time.Minute, Waiting: once}) }()
		dbtest.Soon(t, "it has asked", func() bool { return calls.Load() == 1 })
		theirs := make(chan func())
		go func() { theirs <- other.hold(rowlock.Request{Keys: exclusive(rows[0]), Wait: time.Minute}) }()
		s.waitsInServer(1)
		end() // the other process is next
		end = <-theirs
		time.Sleep(3 * slice)
		want(1, 0)
		end()
		(<-granted)()
		want(1, 1)

		// Where it fails, and in a transaction that goes on.
		end = other.hold(rowlock.Request{Slots: rows})
		calls.Store(0)
		p.refused(rowlock.Request{Slots: rows, Wait: 8 * slice, Waiting: once}, lockerr.ErrTimeout)
		want(1, 2)
		for try, alive := 1, false; !alive; try++ { // a transaction ends if the machine stands still at the end of the wait
			var err error
			c, grant := p.granted(rowlock.Request{Keys: exclusive("mine")})
			calls.Store(0)
			dones.Store(2)
			_, alive, err = p.Join(dbtest.Limited(t), c, rowlock.Request{Slots: rows, Wait: 8 * slice, Waiting: once})
			want(1, 3)
			switch {
			case !errors.Is(err, lockerr.ErrTimeout) || !alive && try == 5:
				t.Fatalf("alive %v: %v", alive, err)
			case alive:
				p.end(c, grant.Txn, grant.Ticket)
			default:
				grant.Ticket.Leave()
				c.Destroy()
			}
		}

		// The context that it gave ends the wait, and no other is begun.
		enough := errors.New("enough")
		ended := func(ctx context.Context) (context.Context, func(), error) {
			ctx, cancel := context.WithCancelCause(ctx)
			timer := time.AfterFunc(3*slice/2, func() { cancel(enough) })
			return ctx, func() { timer.Stop() }, nil
		}
		began := time.Now()
		p.refused(rowlock.Request{Slots: rows, Wait: time.Minute, Waiting: ended}, enough)
		if d := time.Since(began); d > 40*time.Second { // and not the whole wait
			t.Errorf("it took %v", d)
		}
		p.refused(rowlock.Request{Slots: rows, Wait: time.Minute, Waiting: func(context.Context) (context.Context, func(), error) {
			return nil, nil, enough
		}}, enough)
		end()
		s.wantFree(rows...)
	})
}

// TestAFreeSlotIsNeitherLockedNorLeased, nor excepted.
func TestAFreeSlotIsNeitherLockedNorLeased(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows, all := slots(4), []int{0, 1, 2, 3}
		want := func(p *process, want []int, except ...int) {
			t.Helper()
			got := make(map[int]bool)
			for range 80 {
				i, err := p.cfg.FreeSlot(dbtest.Limited(t), rows, queue.Without(all, except))
				dbtest.OK(t, err)
				got[i] = true
			}
			if len(got) != len(want) || slices.ContainsFunc(want, func(i int) bool { return !got[i] }) {
				t.Errorf("free were %v, not %v", got, want)
			}
		}
		want(p, []int{-1}) // the rows are not there
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), rows))
		want(p, []int{0, 1, 2, 3})
		if got := s.occupied(s.Connect(), rows); len(got) > 0 {
			t.Errorf("%q are locked", got)
		}
		want(p, []int{1, 3}, 2, 0, 7)
		end := p.hold(rowlock.Request{Keys: exclusive(rows[1])})
		s.lease(rows[2], time.Hour)
		want(p, []int{0, 3})
		want(p, []int{-1}, 3, 0)
		want(s.process(func(cfg *strategy.Config) { cfg.Info.SkipLocked = false }), []int{0, 1, 3})
		end()
		s.release(rows[2])
		want(p, []int{1, 2}, 3, 0)

		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		cancel()
		if _, err := p.cfg.FreeSlot(ctx, rows, all); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestWhoeverDoesNotWaitWaitsForNoConnectionEither, on which it could look who else is there.
func TestWhoeverDoesNotWaitWaitsForNoConnectionEither(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var control *pool.Pool
		p := s.process(func(cfg *strategy.Config) { control = cfg.Control })
		other := s.process(nil)
		rows := slots(2)
		p.hold(rowlock.Request{Slots: rows})()
		p.hold(rowlock.Request{Keys: exclusive("k")})()
		for _, r := range []rowlock.Request{{Slots: rows}, {Slots: rows}, {Keys: exclusive("k")}} {
			defer other.hold(r)()
		}
		for range control.Stat().Max {
			c, err := control.Acquire(dbtest.Limited(t))
			dbtest.OK(t, err)
			defer c.Release()
		}
		const many = time.Minute
		quick := func(what string, f func() error, want error) {
			t.Helper()
			began := time.Now()
			if err := f(); !errors.Is(err, want) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", what, err)
			}
			if d := time.Since(began); d > many {
				t.Errorf("%s: it took %v", what, d)
			}
		}
		quick("slots", func() error { return p.refused(rowlock.Request{Slots: rows}, lockerr.ErrLocked) }, lockerr.ErrLocked)
		quick("a key", func() error { return p.refused(rowlock.Request{Keys: exclusive("k")}, lockerr.ErrLocked) }, lockerr.ErrLocked)
		quick("FreeSlot", func() error {
			_, err := p.cfg.FreeSlot(dbtest.Limited(t), rows, []int{0, 1})
			return err
		}, lockerr.ErrExhausted)
		quick("a short wait", func() error { return p.refused(rowlock.Request{Slots: rows, Wait: time.Second}, lockerr.ErrTimeout) }, lockerr.ErrTimeout)
		ctx, cancel := context.WithTimeout(dbtest.Limited(t), 100*time.Millisecond)
		defer cancel()
		if _, err := p.cfg.FreeSlot(ctx, rows, []int{0, 1}); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("with a context that ends: %v", err)
		}
	})
}

// TestNoSlotsAreExceededWhileTheirNumberChanges from 5 to 3 and back: never more than the larger number are taken,
// and with the smaller alone never more than that.
func TestNoSlotsAreExceededWhileTheirNumberChanges(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		ps := []*process{s.process(nil), s.process(nil)}
		for _, p := range ps {
			p.connect(10)
		}
		var n, grants atomic.Int64
		var mu sync.Mutex
		var inside, most int64
		enter := func(d int64) {
			mu.Lock()
			defer mu.Unlock()
			inside += d
			most = max(most, inside)
		}
		mostSince := func() int64 {
			mu.Lock()
			defer mu.Unlock()
			return most
		}
		var asking [6]atomic.Int64 // by how many slots they ask for
		n.Store(5)
		ctx, stop := context.WithCancel(context.Background())
		var all sync.WaitGroup
		defer func() {
			stop()
			all.Wait()
		}()
		for w := range 20 {
			p := ps[w%2]
			all.Go(func() {
				for ctx.Err() == nil {
					mine := n.Load()
					asking[mine].Add(1)
					end := p.hold(rowlock.Request{Slots: slots(int(mine)), Wait: time.Minute})
					enter(1)
					time.Sleep(20 * time.Millisecond)
					enter(-1)
					grants.Add(1)
					end()
					asking[mine].Add(-1)
				}
			})
		}
		for _, now := range []int64{5, 3, 5, 3} {
			before := n.Swap(now)
			if before != now {
				dbtest.Soon(t, "the others have asked", func() bool { return asking[before].Load() == 0 })
			}
			mu.Lock()
			most = 0
			mu.Unlock()
			enough := grants.Load() + 20
			dbtest.Soon(t, "all slots are in use at a time", func() bool { return grants.Load() > enough && mostSince() >= now })
			if got := mostSince(); got > now {
				t.Errorf("%d are inside with %d slots", got, now)
			}
		}
	})
}

// TestLeasedSlotsArePassedOver, and waited for where no other is free.
func TestLeasedSlotsArePassedOver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(3)
		s.lease(rows[0], time.Hour)
		s.lease(rows[2], time.Hour)
		for range 8 {
			c, grant := p.granted(rowlock.Request{Slots: rows})
			dbtest.Equal(t, "slot %d", grant.Slot, 1)
			if got := s.occupied(s.Connect(), rows); !slices.Equal(got, rows[1:2]) {
				t.Errorf("locked are %q", got)
			}
			p.end(c, grant.Txn, grant.Ticket)
		}

		// One of them is given back while another is locked.
		end := s.process(nil).hold(rowlock.Request{Keys: exclusive(rows[1])})
		p.refused(rowlock.Request{Slots: rows}, lockerr.ErrLocked)
		p.refused(rowlock.Request{Slots: rows, Wait: 600 * time.Millisecond}, lockerr.ErrTimeout)
		after(t, 300*time.Millisecond, func() { s.release(rows[2]) })
		began := time.Now()
		p.hold(rowlock.Request{Slots: rows, Wait: time.Minute})()
		if d := time.Since(began); d > 15*time.Second {
			t.Errorf("it took %v", d)
		}
		end()

		// All are leased.
		s.lease(rows[1], time.Hour)
		s.lease(rows[2], time.Hour)
		wantHolder(t, p.refused(rowlock.Request{Slots: rows}, lockerr.ErrLocked), "x")
		wantHolder(t, p.refused(rowlock.Request{Slots: rows, Wait: 600 * time.Millisecond}, lockerr.ErrTimeout), "x")
		s.wantFree(rows...)
		calls := p.wakeUps.calls.Load()
		after(t, 0, func() {
			dbtest.Soon(t, "it waits for a lease", func() bool { return p.wakeUps.calls.Load() > calls })
			s.release(rows[1])
		})
		began = time.Now()
		p.hold(rowlock.Request{Slots: rows, Wait: time.Minute})()
		if d := time.Since(began); d > 15*time.Second {
			t.Errorf("it took %v", d)
		}
		if n := p.wakeUps.calls.Load() - calls; n < 1 || n > 6+2*int32(time.Since(began)/slice) {
			t.Errorf("it waited %d times for a lease in %v", n, time.Since(began))
		}
		dbtest.Equal(t, "%d turns were not given back", p.wakeUps.turns.Load(), 0)
	})
}

func TestSlotsThatACleanUpHasRemovedAreMadeAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(4)
		remove := func(rows ...string) {
			for _, row := range rows {
				s.Exec(s.Connect(), "DELETE FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+row+"'")
			}
		}
		there := func() int {
			return len(s.Query(s.Connect(), "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name LIKE '%s'"))
		}
		p.hold(rowlock.Request{Slots: rows})()

		remove(rows...)
		p.hold(rowlock.Request{Slots: rows})()
		if there() != 4 {
			t.Error("not all rows were made again")
		}

		// The last is locked.
		end := p.hold(rowlock.Request{Keys: exclusive(rows[3])})
		remove(rows[:3]...)
		p.hold(rowlock.Request{Slots: rows})()
		if there() != 4 {
			t.Error("not all rows were made again")
		}
		end()

		// Nothing is locked where a transaction goes on.
		remove(rows...)
		c, grant := p.granted(rowlock.Request{Keys: exclusive("mine")})
		if _, _, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Slots: rows, Waiting: free}); err != nil {
			t.Error(err)
		}
		if there() != 4 {
			t.Error("not all rows were made again")
		}
		p.end(c, grant.Txn, grant.Ticket)

		// Some are there: before long the others are missed.
		remove(rows[2:]...)
		for range 200 {
			p.hold(rowlock.Request{Slots: rows})()
		}
		if there() != 4 {
			t.Error("not all rows were made again")
		}
		s.wantFree(rows...)
	})
}

// TestSlotsNeedSkipLocked, which a server may lack.
func TestSlotsNeedSkipLocked(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(cfg *strategy.Config) { cfg.Info.SkipLocked = false })
		p.refused(rowlock.Request{Slots: slots(2), Wait: time.Second}, lockerr.ErrUnsafe)
		c := pool.Adopt(s.Connect())
		if _, alive, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Slots: slots(2), Waiting: free}); !alive || !errors.Is(err, lockerr.ErrUnsafe) {
			t.Errorf("alive %v, %v", alive, err)
		}
		if err := server.Exec(dbtest.Limited(t), c.Conn, "DO 1"); err != nil {
			t.Error(err)
		}
	})
}

// A key with slots: a semaphore that counts the holders of all processes.
