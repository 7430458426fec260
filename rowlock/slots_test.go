package rowlock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
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
	s.t.Helper()
	for _, row := range rows {
		if s.state(c, row) != isFree {
			taken = append(taken, row)
		}
	}
	return taken
}

// wantNoGaps checks that rows can be made anywhere.
func (s *scratch) wantNoGaps(c driver.Conn) {
	s.t.Helper()
	s.exec(c, "SET SESSION innodb_lock_wait_timeout = 1")
	for _, name := range []string{"a", "l", "s ", "s3", "slot 1 of s ", "slot 2", "slot 3", "zzz"} {
		s.exec(c, "BEGIN")
		s.exec(c, "INSERT INTO "+s.table.String()+" (namespace, name) VALUES ('app', '"+name+"')")
		s.exec(c, "ROLLBACK")
	}
}

// big fills the table, so that the optimizer has something to choose from.
func (s *scratch) big() {
	s.t.Helper()
	c := s.open()
	digits := "(SELECT 0 AS d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)"
	s.exec(c, "INSERT INTO "+s.table.String()+" (namespace, name) SELECT 'app', CONCAT('other ', a.d, b.d, e.d, f.d) FROM "+
		digits+" a, "+digits+" b, "+digits+" e, "+digits+" f")
	s.exec(c, "ANALYZE TABLE "+s.table.String())
}

// TestOneSlot: one row is locked and no other, which the caller is told, in a
// table of few rows and of many.
func TestOneSlot(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(4)
		probe := s.open()
		other := append([]string{"k"}, rows...) // and what else is in the table
		ok(t, p.rows.Exist(limited(t), []string{"k"}))
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
					c, grant, err := p.requestAs(limited(t), driver.TxOptions{Isolation: level}, rowlock.Request{Slots: rows})
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

func TestSlotsFull(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		for _, b := range []*process{p, other} { // in the process's own queue, and in the server
			ends := []func(){p.hold(rowlock.Request{Slots: slots(2)}), p.hold(rowlock.Request{Slots: slots(2)})}
			err := b.refused(rowlock.Request{Slots: slots(2), Label: "the key"}, lockerr.ErrLocked)
			var e *lockerr.Error
			if !errors.As(err, &e) || e.Key != "the key" || errors.Is(err, lockerr.ErrTimeout) {
				t.Error(err)
			}
			if e.Holder == nil && b == p { // another process is told where the server is quick to say
				t.Errorf("no holder: %v", err)
			}
			began := time.Now()
			err = b.refused(rowlock.Request{Slots: slots(2), Wait: 700 * time.Millisecond}, lockerr.ErrTimeout)
			if d := time.Since(began); d < 700*time.Millisecond || d > 5*time.Second {
				t.Errorf("waited %v", d)
			}
			if !errors.As(err, &e) || e.Key != "s" { // the holder is told where there was time to ask
				t.Error(err)
			}

			ctx, cancel := context.WithCancel(limited(t))
			stopped := make(chan time.Time, 1)
			after(t, 400*time.Millisecond, func() {
				stopped <- time.Now()
				cancel()
			})
			_, _, err = b.request(ctx, rowlock.Request{Slots: slots(2), Wait: 20 * time.Second})
			if d := time.Since(<-stopped); !errors.Is(err, context.Canceled) || d > 2*time.Second {
				t.Errorf("%v after it was cancelled: %v", d, err)
			}
			b.hold(rowlock.Request{Slots: slots(3)})() // one more is made
			for _, end := range ends {
				end()
			}
			s.wantFree(slots(3)...)
		}
	})
}

// TestSlotOfAnotherProcess: who waits for all gets the one that comes free, and
// in what time.
func TestSlotOfAnotherProcess(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		var longest time.Duration
		for range 8 {
			ends := []func(){p.hold(rowlock.Request{Slots: slots(3)}), p.hold(rowlock.Request{Slots: slots(3)}), p.hold(rowlock.Request{Slots: slots(3)})}
			granted := make(chan time.Time)
			go func() {
				end := other.hold(rowlock.Request{Slots: slots(3), Wait: 20 * time.Second})
				granted <- time.Now()
				end()
			}()
			time.Sleep(70 * time.Millisecond)
			free := time.Now()
			ends[1]()
			longest = max(longest, (<-granted).Sub(free))
			ends[0]()
			ends[2]()
		}
		t.Logf("granted at most %v after a slot came free", longest)
		if longest > 5*time.Second { // and not the whole wait
			t.Errorf("granted %v after a slot came free", longest)
		}
	})
}

// TestSlotsUnderLoad: at most so many hold a slot, and as many do while others
// wait; slots of holders that are killed come back.
func TestSlotsUnderLoad(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		const n, workers, hold = 5, 50, 50 * time.Millisecond
		rows := slots(n)
		ps := []*process{s.process(nil), s.process(nil)}
		for _, p := range ps {
			p.connect(2 * n)
		}
		var bySlot [n]atomic.Int32
		var inside, grants, killed atomic.Int32
		ctx, stop := context.WithTimeout(limited(t), 2500*time.Millisecond)
		defer stop()
		var all sync.WaitGroup
		for w := range workers {
			p := ps[w%2]
			all.Go(func() {
				for ctx.Err() == nil {
					c, grant, err := p.request(limited(t), rowlock.Request{Slots: rows, Wait: 20 * time.Second})
					if err != nil {
						t.Error(err)
						return
					}
					if bySlot[grant.Slot].Add(1) > 1 {
						t.Errorf("two have slot %d", grant.Slot)
					}
					if got := inside.Add(1); got > n {
						t.Errorf("%d have slots", got)
					}
					time.Sleep(hold)
					number := grants.Add(1)
					inside.Add(-1)
					bySlot[grant.Slot].Add(-1)
					if number%25 == 0 {
						killed.Add(1)
						p.exec(p.open(), fmt.Sprintf("KILL CONNECTION %d", c.KnownID()))
						c.Taint()
						grant.Ticket.Leave()
						c.Release()
						continue
					}
					p.end(c, grant.Txn, grant.Ticket)
				}
			})
		}
		var samples [n + 1]int
		time.Sleep(500 * time.Millisecond)
		for ctx.Err() == nil {
			samples[min(inside.Load(), n)]++
			time.Sleep(time.Millisecond)
		}
		all.Wait()
		var sum, total int
		for i, count := range samples {
			sum, total = sum+i*count, total+count
		}
		t.Logf("%d grants, %d holders killed; samples with 0 to 5 inside: %v, mean %.2f", grants.Load(), killed.Load(), samples, float64(sum)/float64(total))
		if 2*sum < n*total || samples[n] == 0 {
			t.Errorf("the slots are not in use: %v", samples)
		}
		s.wantFree(rows...)
	})
}

// TestSlotsChangeInUse from 5 to 3 and back: never more than the larger number,
// and with the smaller alone never more than that.
func TestSlotsChangeInUse(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ps := []*process{s.process(nil), s.process(nil)}
		for _, p := range ps {
			p.connect(10)
		}
		var n, inside, most, grants atomic.Int64
		var asking [6]atomic.Int64 // by how many slots they ask for
		n.Store(5)
		ctx, stop := context.WithCancel(limited(t))
		defer stop()
		var all sync.WaitGroup
		for w := range 20 {
			p := ps[w%2]
			all.Go(func() {
				for ctx.Err() == nil {
					mine := n.Load()
					asking[mine].Add(1)
					end := p.hold(rowlock.Request{Slots: slots(int(mine)), Wait: 20 * time.Second})
					now := inside.Add(1)
					for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
					}
					time.Sleep(5 * time.Millisecond)
					inside.Add(-1)
					grants.Add(1)
					end()
					asking[mine].Add(-1)
				}
			})
		}
		for _, now := range []int64{5, 3, 5, 3} {
			before := n.Swap(now)
			if before != now {
				soon(t, func() bool { return asking[before].Load() == 0 })
			}
			most.Store(0)
			enough := grants.Load() + 20
			soon(t, func() bool { return grants.Load() > enough && most.Load() >= now })
			if got := most.Load(); got > now {
				t.Errorf("%d are inside with %d slots", got, now)
			}
		}
		stop()
		all.Wait()
	})
}

// TestFirstSlotIsTheKey: one slot and the key itself exclude each other.
func TestFirstSlotIsTheKey(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		end := p.hold(rowlock.Request{Slots: slots(1)})
		p.refused(rowlock.Request{Keys: exclusive("s")}, lockerr.ErrLocked)
		p.refused(rowlock.Request{Keys: shared("s"), Wait: 100 * time.Millisecond}, lockerr.ErrTimeout)
		end()
		for _, keys := range [][]rowlock.Key{exclusive("s"), shared("s")} {
			end = p.hold(rowlock.Request{Keys: keys})
			p.refused(rowlock.Request{Slots: slots(1)}, lockerr.ErrLocked)
			p.refused(rowlock.Request{Slots: slots(1), Wait: 400 * time.Millisecond}, lockerr.ErrTimeout)
			c, grant, err := p.request(limited(t), rowlock.Request{Slots: slots(2)})
			ok(t, err)
			if grant.Slot != 1 {
				t.Errorf("slot %d is the key's", grant.Slot)
			}
			p.end(c, grant.Txn, grant.Ticket)
			after(t, 300*time.Millisecond, end)
			p.hold(rowlock.Request{Slots: slots(1), Wait: 20 * time.Second})()
		}
		s.wantFree("s")
	})
}

// TestLeasedSlots are passed over, and waited for where no other is free.
func TestLeasedSlots(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(3)
		s.lease(rows[0], time.Hour)
		s.lease(rows[2], time.Hour)
		for range 8 {
			c, grant, err := p.request(limited(t), rowlock.Request{Slots: rows})
			ok(t, err)
			if grant.Slot != 1 {
				t.Errorf("slot %d", grant.Slot)
			}
			if got := s.occupied(s.open(), rows); !slices.Equal(got, rows[1:2]) {
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
		p.hold(rowlock.Request{Slots: rows, Wait: 20 * time.Second})()
		if d := time.Since(began); d > 8*time.Second {
			t.Errorf("it took %v", d)
		}
		end()

		// All are leased.
		s.lease(rows[1], time.Hour)
		s.lease(rows[2], time.Hour)
		wantHolder(t, p.refused(rowlock.Request{Slots: rows}, lockerr.ErrLocked), "x")
		wantHolder(t, p.refused(rowlock.Request{Slots: rows, Wait: 600 * time.Millisecond}, lockerr.ErrTimeout), "x")
		s.wantFree(rows...)
		calls := p.bells.calls.Load()
		after(t, 300*time.Millisecond, func() { s.release(rows[1]) })
		began = time.Now()
		p.hold(rowlock.Request{Slots: rows, Wait: 20 * time.Second})()
		if d := time.Since(began); d > 8*time.Second {
			t.Errorf("it took %v", d)
		}
		if n := p.bells.calls.Load() - calls; n < 1 || n > 6 {
			t.Errorf("it waited %d times for a lease", n)
		}
		if n := p.bells.turns.Load(); n != 0 {
			t.Errorf("%d turns were not given back", n)
		}
	})
}

// TestSlotsVanish: rows that a clean-up has removed are made again.
func TestSlotsVanish(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		rows := slots(4)
		remove := func(rows ...string) {
			for _, row := range rows {
				s.exec(s.open(), "DELETE FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+row+"'")
			}
		}
		there := func() int {
			return len(s.query(s.open(), "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name LIKE '%s'"))
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
		c, grant, err := p.request(limited(t), rowlock.Request{Keys: exclusive("mine")})
		ok(t, err)
		if _, _, err := p.Join(limited(t), c, rowlock.Request{Slots: rows, Waiting: free}); err != nil {
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

func TestJoinSlot(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		rows := slots(2)
		probe := s.open()
		ok(t, p.rows.Exist(limited(t), rows))
		join := func(r rowlock.Request, want error, wantAlive bool, wantRows int) {
			t.Helper()
			r.Slots, r.Waiting = rows, free
			c, grant, err := p.request(limited(t), rowlock.Request{Keys: exclusive("mine")})
			ok(t, err)
			defer p.end(c, grant.Txn, grant.Ticket)
			before := len(s.occupied(probe, rows))
			locked, alive, err := p.Join(limited(t), c, r)
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
		join(rowlock.Request{Wait: 20 * time.Second}, nil, true, 0) // in place of the first
		second()

		// Leases are passed over, or waited for without locking their rows.
		s.lease(rows[0], time.Hour)
		s.lease(rows[1], time.Hour)
		join(rowlock.Request{}, lockerr.ErrLocked, true, 0)
		join(rowlock.Request{Wait: 400 * time.Millisecond}, lockerr.ErrTimeout, true, 0)
		s.wantFree(rows...)
		after(t, 200*time.Millisecond, func() { s.release(rows[1]) })
		join(rowlock.Request{Wait: 20 * time.Second}, nil, true, 1)

		// One that is taken while we wait for its row is found when that is locked.
		holder := s.open()
		s.exec(holder, "BEGIN")
		s.exec(holder, "UPDATE "+s.table.String()+" SET token = token + 1, owner = 'y#00000000', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE namespace = 'app' AND name = '"+rows[1]+"'")
		after(t, 120*time.Millisecond, func() { s.exec(holder, "COMMIT") })
		join(rowlock.Request{Wait: 20 * time.Second}, lockerr.ErrLocked, false, 0)
	})
}

// TestJoinSlotDeadlock: two who each hold one semaphore and want the other's only
// slot do not wait for each other until their wait is over.
func TestJoinSlotDeadlock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		names := []string{"a", "b"}
		var both sync.WaitGroup
		var conns []*pool.Conn
		var grants []*rowlock.Grant
		for _, name := range names {
			c, grant, err := p.request(limited(t), rowlock.Request{Slots: []string{name}})
			ok(t, err)
			conns, grants = append(conns, c), append(grants, grant)
		}
		var deadlocks atomic.Int32
		began := time.Now()
		for i, name := range []string{"b", "a"} {
			both.Go(func() {
				_, alive, err := p.Join(limited(t), conns[i], rowlock.Request{Slots: []string{name}, Wait: 20 * time.Second, Waiting: free})
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
		if d := time.Since(began); deadlocks.Load() != 1 || d > 5*time.Second {
			t.Errorf("%d deadlocks after %v", deadlocks.Load(), d)
		}
	})
}

// TestSlotsNeedSkipLocked, which a server may lack.
func TestSlotsNeedSkipLocked(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		p := s.process(func(cfg *rowlock.Config) { cfg.Info.MariaDB, cfg.Info.Version = true, "10.5.9-MariaDB" })
		p.refused(rowlock.Request{Slots: slots(2), Wait: time.Second}, lockerr.ErrUnsafe)
		c := pool.Adopt(s.open())
		if _, alive, err := p.Join(limited(t), c, rowlock.Request{Slots: slots(2), Waiting: free}); !alive || !errors.Is(err, lockerr.ErrUnsafe) {
			t.Errorf("alive %v, %v", alive, err)
		}
		if err := server.Exec(limited(t), c.Conn, "DO 1"); err != nil {
			t.Error(err)
		}
	})
}
