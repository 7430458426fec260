package rowlock_test

import (
	"bufio"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockctx"
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
		c, grant := p.granted(rowlock.Request{Keys: exclusive("mine")})
		calls.Store(0)
		if _, alive, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Slots: rows, Wait: 8 * slice, Waiting: once}); !errors.Is(err, lockerr.ErrTimeout) || !alive {
			t.Errorf("alive %v: %v", alive, err)
		}
		want(1, 3)
		p.end(c, grant.Txn, grant.Ticket)

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

// TestAJoinWhoseWaitCannotBeStoppedEndsItsTransaction: where a KILL does not find the wait in time, the connection is closed, and the caller is
// not told that its transaction goes on.
func TestAJoinWhoseWaitCannotBeStoppedEndsItsTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(c *strategy.Config) {
			c.Control = pool.New(pool.Config{
				Connect: func(ctx context.Context) (driver.Conn, error) {
					conn, err := s.Connector().Connect(ctx)
					return &dbtest.Disturbed{
						Conn: conn, At: func(text string) bool { return strings.Contains(text, "INFO LIKE") }, Text: func(string) string { return "DO 0" },
					}, err
				},
				Setup: "SET SESSION autocommit = 1", Max: 4, Idle: time.Minute,
			})
			s.T.Cleanup(c.Control.Close)
		})
		other, rows := s.process(nil), slots(1)
		release := []func(){other.hold(rowlock.Request{Keys: exclusive("k")}), other.hold(rowlock.Request{Slots: rows})}
		for _, r := range []rowlock.Request{{Keys: exclusive("k")}, {Slots: rows}} {
			r.Wait, r.Waiting = 200*time.Millisecond, free
			c, grant := p.granted(rowlock.Request{Keys: exclusive("mine"), Wait: time.Minute})
			_, alive, err := p.Join(dbtest.Limited(t), c, r)
			valid := c.Valid()
			grant.Ticket.Leave()
			c.Destroy()
			ended := len(r.Slots) > 0 && valid // the server's own limit may have ended a wait for a slot
			if alive != ended || valid != ended || !errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("keys %v, slots %v: alive %v, valid %v, %v", r.Keys, r.Slots, alive, valid, err)
			}
		}
		for _, release := range release {
			release()
		}
	})
}

func TestAJoinLocksOneFreeSlotOrNone(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		rows := slots(2)
		probe := s.Connect()
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), rows))
		join := func(r rowlock.Request, want error, wantAlive bool, wantRows int) {
			t.Helper()
			r.Slots, r.Waiting = rows, free
			// It waits: what is left of the join before may end late on a busy server.
			c, grant := p.granted(rowlock.Request{Keys: exclusive("mine"), Wait: time.Minute})
			before := len(s.occupied(probe, rows))
			locked, alive, err := p.Join(dbtest.Limited(t), c, r)
			for try := 1; try < 20 && !alive && errors.Is(want, lockerr.ErrTimeout); try++ { // a busy server may answer too late
				_ = grant.Txn.Rollback(0)
				grant.Ticket.Leave()
				c.Destroy()
				c, grant = p.granted(rowlock.Request{Keys: exclusive("mine"), Wait: time.Minute})
				locked, alive, err = p.Join(dbtest.Limited(t), c, r)
			}
			defer p.end(c, grant.Txn, grant.Ticket)
			if !errors.Is(err, want) || alive != wantAlive {
				t.Errorf("alive %v: %v", alive, err)
			}
			if err == nil && s.state(probe, rows[locked.Slot]) != isLocked {
				t.Errorf("slot %d is not locked", locked.Slot)
			}
			if n := len(s.occupied(probe, rows)); alive && n != before+wantRows {
				t.Errorf("%d slots are locked, and before it were %d", n, before)
			}
			if alive && s.state(probe, "mine") != isLocked {
				t.Error("what was locked before is not any more")
			}
		}
		join(rowlock.Request{}, nil, true, 1)
		first := other.hold(rowlock.Request{Slots: rows})
		join(rowlock.Request{}, nil, true, 1)
		second := other.hold(rowlock.Request{Slots: rows})
		s.wantNoGaps(probe)
		join(rowlock.Request{}, lockerr.ErrLocked, true, 0)
		join(rowlock.Request{Wait: 600 * time.Millisecond}, lockerr.ErrTimeout, true, 0)
		after(t, 400*time.Millisecond, first)
		join(rowlock.Request{Wait: time.Minute}, nil, true, 0) // in place of the first
		second()

		// Leases are passed over, or waited for without locking their rows.
		s.lease(rows[0], time.Hour)
		s.lease(rows[1], time.Hour)
		join(rowlock.Request{}, lockerr.ErrLocked, true, 0)
		join(rowlock.Request{Wait: 400 * time.Millisecond}, lockerr.ErrTimeout, true, 0)
		s.wantFree(rows...)
		after(t, 200*time.Millisecond, func() { s.release(rows[1]) })
		join(rowlock.Request{Wait: time.Minute}, nil, true, 1)

		// One that is taken while we wait for its row is found when that is locked.
		holder := s.Connect()
		s.Exec(holder, "BEGIN")
		s.Exec(holder, "UPDATE "+s.table.String()+" SET token = token + 1, owner = 'y#00000000', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE namespace = 'app' AND name = '"+rows[1]+"'")
		s.onceOneWaits(func() { s.Exec(holder, "COMMIT") })
		join(rowlock.Request{Wait: time.Minute}, lockerr.ErrLocked, false, 0)
	})
}

// TestAJoinFindsThatASlotIsNotFreeAnyMore when it is tried. What that means for the transaction depends on why.
func TestAJoinFindsThatASlotIsNotFreeAnyMore(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(1)
		join := func(rows []string, wait time.Duration, change func(c *pool.Conn)) (alive bool, err error) {
			t.Helper()
			dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), rows))
			between := &meddled{Conn: s.Connect()}
			c := pool.Adopt(between)
			s.Exec(between.Conn, "BEGIN")
			_, err = c.ID(dbtest.Limited(t))
			dbtest.OK(t, err)
			between.change = func() { change(c) }
			_, alive, err = p.Join(dbtest.Limited(t), c, rowlock.Request{Slots: rows, Wait: wait, Waiting: free})
			if between.change != nil {
				t.Error("nothing was tried")
			}
			_ = server.Exec(dbtest.Limited(t), between.Conn, "ROLLBACK") // the server may notice the end of a connection late
			_ = between.Conn.Close()
			return alive, err
		}
		dbtest.OK(t, p.rows.Exist(dbtest.Limited(t), rows))
		for _, wait := range []time.Duration{0, 5 * time.Second} {
			// Its row is locked now, and must not stay so.
			alive, err := join(rows, wait, func(*pool.Conn) { s.lease(rows[0], time.Hour) })
			if alive || !errors.Is(err, lockerr.ErrLocked) {
				t.Errorf("leased: alive %v: %v", alive, err)
			}
			wantHolder(t, err, "x")
			s.release(rows[0])

			alive, err = join(rows, wait, func(*pool.Conn) {
				s.Exec(s.Connect(), "DELETE FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+rows[0]+"'")
			})
			if alive || err == nil || errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("vanished: alive %v: %v", alive, err)
			}

			alive, err = join(rows, wait, func(c *pool.Conn) { s.Exec(s.Connect(), fmt.Sprintf("KILL CONNECTION %d", c.KnownID())) })
			if alive || err == nil || errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("killed: alive %v: %v", alive, err)
			}
		}

		// One that is locked leaves the transaction as it was, and there is another.
		holder := s.Connect()
		alive, err := join(slots(2), 0, func(c *pool.Conn) {
			s.Exec(holder, "BEGIN")
			s.Query(holder, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+c.Conn.(*meddled).tried(slots(2))+"' FOR UPDATE")
		})
		if !alive || err != nil {
			t.Errorf("locked: alive %v: %v", alive, err)
		}
		s.Exec(holder, "ROLLBACK")
		s.wantFree(slots(2)...)
	})
}

// meddled lets something happen before it locks for the first time.
type meddled struct {
	driver.Conn
	change func()
	text   string
}

func (m *meddled) Prepare(text string) (driver.Stmt, error) {
	if strings.Contains(text, "NOWAIT") && m.change != nil {
		m.text = text
		m.change()
		m.change = nil
	}
	return m.Conn.Prepare(text)
}

// tried returns the row that is about to be locked.
func (m *meddled) tried(rows []string) string {
	at := slices.IndexFunc(rows, func(row string) bool { return strings.Contains(m.text, schema.Literal(row)) })
	return rows[at]
}

// TestTwoWhoWantEachOthersSlotsEndInADeadlock: they each hold one semaphore and want the other's only slot, and do
// not wait for each other until their wait is over.
func TestTwoWhoWantEachOthersSlotsEndInADeadlock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		names := []string{"a", "b"}
		var both sync.WaitGroup
		var conns []*pool.Conn
		var grants []*rowlock.Begun
		for _, name := range names {
			c, grant := p.granted(rowlock.Request{Slots: []string{name}})
			conns, grants = append(conns, c), append(grants, grant)
		}
		var deadlocks atomic.Int32
		began := time.Now()
		for i, name := range []string{"b", "a"} {
			both.Go(func() {
				_, alive, err := p.Join(dbtest.Limited(t), conns[i], rowlock.Request{Slots: []string{name}, Wait: time.Minute, Waiting: free})
				if errors.Is(err, lockerr.ErrDeadlock) && !alive {
					deadlocks.Add(1)
				} else if err != nil {
					t.Error(err)
				}
				_ = grants[i].Txn.Rollback(0)
				grants[i].Ticket.Leave()
				conns[i].Release()
			})
		}
		both.Wait()
		if d := time.Since(began); deadlocks.Load() != 1 || d > 15*time.Second {
			t.Errorf("%d deadlocks after %v", deadlocks.Load(), d)
		}
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

// slotKinds are the strategies that have slots.
var slotKinds = []struct {
	strategy string
	option   lockctx.Option
}{
	{hint.StrategyRow, lockctx.Row()},
	{hint.StrategyLease, lockctx.Lease(stock.TTL)},
}

// onSlots runs a test on each server with each strategy that has slots.
func onSlots(t *testing.T, test func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option)) {
	dbtest.OnServers(t, stock.NewShop, eachSlotKind(test))
}

func eachSlotKind(test func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option)) func(t *testing.T, s *stock.Shop) {
	return func(t *testing.T, s *stock.Shop) {
		var kinds dbtest.Together
		defer kinds.Wait()
		for _, kind := range slotKinds {
			kinds.Run(t, kind.strategy, func(t *testing.T) { test(t, stock.NewShop(s.Beside(t)), kind.strategy, kind.option) })
		}
	}
}

func wantSlot(t *testing.T, ctx context.Context, want int) {
	t.Helper()
	if slot, ok := mysqllock.Slot(ctx); ok != (want >= 0) || ok && slot != want {
		t.Errorf("the slot is %d, %v, want %d", slot, ok, want)
	}
}

// TestHoldersOfSlotsKnowWhichTheyHave. These are different, and a caller is told when there is none.
func TestHoldersOfSlotsKnowWhichTheyHave(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		const slots = 4
		dbs := []*sql.DB{s.Handle(), s.Handle()}
		var holds []*mysqllock.Hold
		var taken []int
		for i := range slots {
			h := stock.Acquire(t, dbs[i%2], "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			slot, there := mysqllock.Slot(h.Context())
			if !there {
				t.Error("a holder does not know its slot")
			}
			holds, taken = append(holds, h), append(taken, slot)
		}
		if slices.Sort(taken); !slices.Equal(taken, []int{0, 1, 2, 3}) {
			t.Errorf("the slots are %v", taken)
		}
		for i, db := range []*sql.DB{dbs[0], dbs[1], s.Handle()} {
			ctx := lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			_, err := db.BeginTx(ctx, nil)
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Strategy != strategy {
				t.Errorf("handle %d, NoWait: %v", i, err)
			}
			wantSlot(t, ctx, -1)
			const wait = 200 * time.Millisecond
			err = stock.Told(func() error {
				_, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots), lockctx.Wait(wait)), nil)
				return err
			})
			if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Waited < wait-10*time.Millisecond || e.Waited > wait+time.Minute {
				t.Errorf("handle %d: Wait(%v): %v", i, wait, err)
			}
			for limit := 300 * time.Millisecond; ; limit *= 2 {
				early, cancel := context.WithTimeout(dbtest.Limited(t), limit)
				start := time.Now()
				_, err = mysqllock.Acquire(early, db, "k", kind, lockctx.Slots(slots), lockctx.Wait(time.Minute))
				took := time.Since(start)
				cancel()
				if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, mysqllock.ErrTimeout) && limit < 10*time.Second {
					continue // a busy server has not answered in time
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) || took > 50*time.Second {
					t.Errorf("handle %d: after %v, a context that ends: %v", i, took, err)
				}
				break
			}
		}
		// A slot that is given back is the next holder's.
		for _, h := range holds {
			slot, _ := mysqllock.Slot(h.Context())
			dbtest.OK(t, h.Release())
			ctx := lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots))
			tx, err := dbs[0].BeginTx(ctx, nil)
			dbtest.OK(t, err)
			wantSlot(t, ctx, slot)
			defer tx.Rollback()
		}
	})
}

// TestSlotZeroIsTheKey: the lock itself and slot 0 exclude each other, and other
// slots do not mind it.
func TestSlotZeroIsTheKey(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		free := func(opts ...lockctx.Option) bool {
			t.Helper()
			h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", append(opts, lockctx.NoWait())...)
			if err == nil {
				dbtest.OK(t, h.Release())
			} else if !errors.Is(err, mysqllock.ErrLocked) {
				t.Error(err)
			}
			return err == nil
		}
		for _, plain := range slotKinds {
			for _, slotted := range slotKinds {
				what := plain.strategy + ", slots " + slotted.strategy
				h := stock.Acquire(t, db, "k", plain.option)
				if free(slotted.option, lockctx.Slots(1)) {
					t.Errorf("%s: the only slot is free while the key is held", what)
				}
				if !free(slotted.option, lockctx.Slots(2)) {
					t.Errorf("%s: no slot is free while only the key is held", what)
				}
				two := stock.Acquire(t, db, "k", slotted.option, lockctx.Slots(2))
				wantSlot(t, two.Context(), 1)
				dbtest.OK(t, h.Release())
				if !free(plain.option) {
					t.Errorf("%s: slot 1 keeps the key", what)
				}
				one := stock.Acquire(t, db, "k", slotted.option, lockctx.Slots(2))
				wantSlot(t, one.Context(), 0)
				if free(plain.option) || free(plain.option, lockctx.Slots(2)) {
					t.Errorf("%s: the key or a slot is free while both slots are taken", what)
				}
				dbtest.OK(t, one.Release())
				dbtest.OK(t, two.Release())
			}
		}
	})
}

// childSlots takes slots, says which, and keeps them.
func childSlots(db *sql.DB, in *bufio.Scanner) {
	for in.Scan() {
		kind := slotKinds[slices.IndexFunc(slotKinds, func(k struct {
			strategy string
			option   lockctx.Option
		},
		) bool {
			return k.strategy == in.Text()
		})]
		opts := []lockctx.Option{kind.option, lockctx.Slots(3)}
		if kind.strategy == hint.StrategyLease { // whose end the test waits for
			opts[0] = lockctx.Lease(9 * time.Second)
		}
		h, err := mysqllock.Acquire(context.Background(), db, "k", opts...)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(mysqllock.Slot(h.Context()))
	}
}

// TestSlotsOfAKilledProcessComeBack at once, or when the lease has run out.
func TestSlotsOfAKilledProcessComeBack(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		c, db := dbtest.StartJob(t, "slots", s.DSN()), s.Handle()
		for range 2 {
			c.Tell(strategy)
			if line := c.Line(); !strings.HasSuffix(line, "true") {
				t.Fatal(line)
			}
		}
		last := stock.Acquire(t, db, "k", kind, lockctx.Slots(3))
		dbtest.Is(t, "a fourth of three slots", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), db, "k", kind, lockctx.Slots(3), lockctx.NoWait())), mysqllock.ErrLocked)
		killed := time.Now()
		c.Kill()
		for range 2 {
			h := stock.Acquire(t, db, "k", kind, lockctx.Slots(3), lockctx.Wait(time.Minute))
			defer h.Release()
		}
		if took := time.Since(killed); took > time.Minute {
			t.Errorf("the slots of a killed process were back after %v", took)
		} else {
			t.Logf("back after %v", took)
		}
		dbtest.OK(t, last.Release())
	})
}

// TestWhoHasASlotAndAsksAgainJoins, as far as that slot is one of those that are asked for.
func TestWhoHasASlotAndAsksAgainJoins(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		db, other := s.Handle(), s.Handle()
		taken := func(n int) (taken int) { // of n slots
			t.Helper()
			var holds []*mysqllock.Hold
			for {
				h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", kind, lockctx.Slots(n), lockctx.NoWait())
				if err != nil {
					break
				}
				holds = append(holds, h)
			}
			for _, h := range holds {
				dbtest.OK(t, h.Release())
			}
			return n - len(holds)
		}
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			slot, _ := mysqllock.Slot(ctx)
			for range 2 {
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					wantSlot(t, ctx, slot)
					return nil
				}, kind, lockctx.Slots(3)))
				inner := lockctx.With(ctx, "k", kind, lockctx.Slots(5))
				tx := dbtest.Begin(t, inner, db)
				wantSlot(t, inner, slot)
				dbtest.OK(t, tx.Commit())
			}
			dbtest.Equal(t, "%d slots are taken", taken(5), 1)
			return nil
		}, kind, lockctx.Slots(3)))

		// Asked for with two numbers before it is locked, it is one of the fewer.
		for range 5 {
			for _, n := range [][]int{{5, 1}, {1, 5}} {
				ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(n[0])), "k", kind, lockctx.Slots(n[1]))
				tx := dbtest.Begin(t, ctx, db)
				wantSlot(t, ctx, 0)
				if n := taken(1); n != 1 {
					t.Error("the only slot is free")
				}
				dbtest.OK(t, tx.Rollback())
			}
		}

		// The key itself is its first slot.
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", kind), "k", kind, lockctx.Slots(1), lockctx.Wait(20*time.Second))
		tx := dbtest.Begin(t, ctx, db)
		dbtest.ExecIn(t, ctx, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		wantSlot(t, ctx, 0)
		dbtest.OK(t, tx.Commit())
		wantSlot(t, ctx, -1)
		dbtest.Equal(t, "%d slots are taken", taken(5), 0)
	})
}

// TestSlotIsFenced: who has lost the lease on its slot commits nothing, and is
// told of the key by its name.
func TestSlotIsFenced(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for range 4 { // whichever slot it is
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(stock.TTL), lockctx.Slots(4))
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'thief#00000000', token = token + 1 WHERE owner IS NOT NULL")
			err := tx.Commit()
			stock.WantLost(t, "Commit", err)
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("the error is of another key: %v", err)
			}
			s.WantStock(1, 10)
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = NULL")
		}
	})
}
