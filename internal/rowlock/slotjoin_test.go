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
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

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
