package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// served is a server that counts its connections. None of its statements are used.
type served struct {
	open, most, opened atomic.Int32
	slow               func() // is called while one is opened
}

type servedConn struct {
	driver.Conn
	of     *served
	closed atomic.Bool
}

func (s *served) connect(context.Context) (driver.Conn, error) {
	n := s.open.Add(1)
	s.opened.Add(1)
	for most := s.most.Load(); n > most && !s.most.CompareAndSwap(most, n); most = s.most.Load() {
	}
	if s.slow != nil {
		s.slow()
	}
	return &servedConn{of: s}, nil
}

func (sc *servedConn) Close() error {
	if !sc.closed.Swap(true) {
		sc.of.open.Add(-1)
	}
	return nil
}

// budgeted returns pools that share a budget; the first has the reserved places.
func (s *served) budgeted(t *testing.T, maxConns, reserved, n int) []*Pool {
	b := NewBudget(maxConns, reserved, 0)
	pools := make([]*Pool, n)
	for i := range pools {
		pools[i] = New(Config{Connect: s.connect, Max: maxConns, Budget: b, Bare: true, Control: i == 0})
		t.Cleanup(pools[i].Close)
	}
	return pools
}

func acquired(t *testing.T, p *Pool) *Conn {
	t.Helper()
	c, err := p.Acquire(dbtest.Limited(t))
	dbtest.OK(t, err)
	return c
}

// queue has a caller queue for p, and returns where its connection comes.
func queue(t *testing.T, as As, p *Pool) <-chan *Conn {
	t.Helper()
	before := p.Stat().Waiting
	got := make(chan *Conn, 1)
	go func() {
		c, err := p.AcquireAs(dbtest.Limited(t), as)
		if err != nil {
			t.Error(err)
		}
		got <- c
	}()
	dbtest.Soon(t, "it queues", func() bool { return p.Stat().Waiting == before+1 })
	return got
}

// TestBudgetMakesRoom: an idle connection of another pool is closed before a caller has
// to wait, and its place is used again only after that.
func TestBudgetMakesRoom(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 3, 1, 3)
	a, b := acquired(t, pools[1]), acquired(t, pools[1])
	a.Release()
	b.Release()
	c, d := acquired(t, pools[2]), acquired(t, pools[2])
	if st := pools[1].Stat(); st.Idle != 0 || st.InUse != 0 {
		t.Errorf("the other pool has %+v", st)
	}
	if s.most.Load() != 2 {
		t.Errorf("there were %d connections at a time", s.most.Load())
	}
	if pools[1].Ready() {
		t.Error("a pool is ready although all places are taken")
	}
	if !pools[0].Ready() {
		t.Error("the reserved place is not ready")
	}
	c.Release()
	if !pools[1].Ready() {
		t.Error("a pool is not ready although another one has an idle connection")
	}
	d.Release()
}

// TestMaxLimitsNobodyBeside: a caller that has a connection of database/sql gets another one while all are in use that
// Config.Max allows, also if others queue, whom it does not keep from theirs.
func TestMaxLimitsNobodyBeside(t *testing.T) {
	for name, budget := range map[string]*Budget{"": nil, "budget": NewBudget(8, 1, 0)} {
		t.Run(name, func(t *testing.T) {
			p := New(Config{Connect: new(served).connect, Max: 1, Budget: budget, Bare: true})
			t.Cleanup(p.Close)
			first := acquired(t, p)
			next := queue(t, As{}, p)
			var beside []*Conn
			for range 3 {
				c, err := p.AcquireAs(dbtest.Within(t, dbtest.Patience), As{Beside: true})
				dbtest.OK(t, err)
				beside = append(beside, c)
			}
			beside[0].Release()
			c, err := p.AcquireAs(dbtest.Limited(t), As{Beside: true}) // the idle one
			dbtest.OK(t, err)
			beside[0] = c
			if st := p.Stat(); st.InUse != 4 || st.Beside != 3 || st.Waiting != 1 {
				t.Errorf("there are %+v", st)
			}
			first.Release()
			(<-next).Release()
			for _, c := range beside {
				c.Release()
			}
			acquired(t, p).Release()
		})
	}
}

// TestReservedPlacesAreThereForControl, whatever the others take; beyond these it has what is
// free.
func TestReservedPlacesAreThereForControl(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 4, 1, 2)
	var others []*Conn
	for range 3 {
		others = append(others, acquired(t, pools[1]))
	}
	got := queue(t, As{}, pools[1])
	first := acquired(t, pools[0])
	first.Release()
	if st := pools[1].Stat(); st.Waiting != 1 {
		t.Errorf("a caller has the reserved place: %+v", st)
	}
	others[0].Destroy()
	(<-got).Release()
	second := acquired(t, pools[0])
	third := acquired(t, pools[0]) // the place of the one that is idle
	for _, c := range append(others[1:], second, third) {
		c.Release()
	}
	if s.most.Load() != 4 {
		t.Errorf("there were %d connections at a time", s.most.Load())
	}
}

// TestCallersThatOthersWaitForComeFirst; the rest are served as they come.
func TestCallersThatOthersWaitForComeFirst(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 1, 0, 2)
	c := acquired(t, pools[0])
	first := queue(t, As{}, pools[0])
	second := queue(t, As{}, pools[0])
	holder := queue(t, As{Urgent: true}, pools[1]) // even by another pool
	c.Release()
	for i, next := range []<-chan *Conn{holder, first, second} {
		c := <-next
		for _, later := range []<-chan *Conn{first, second}[min(i, 2):] {
			select {
			case <-later:
				t.Errorf("the caller after number %d has one, too", i)
			default:
			}
		}
		c.Release()
	}
	if s.most.Load() != 1 {
		t.Errorf("there were %d connections at a time", s.most.Load())
	}
}

// TestEveryThirdPlaceIsForThoseWhoAreNotUrgent, in their order, while callers queue that others
// wait for.
func TestEveryThirdPlaceIsForThoseWhoAreNotUrgent(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 1, 0, 2)
	c := acquired(t, pools[0])
	type served struct {
		who string
		c   *Conn
	}
	got := make(chan served, 16)
	join := func(who string, as As, p *Pool) {
		next := queue(t, as, p)
		go func() { got <- served{who, <-next} }()
	}
	for range 6 {
		join("urgent", As{Urgent: true}, pools[0])
	}
	join("first", As{}, pools[1])
	join("second", As{Waits: true}, pools[0])
	join("third", As{}, pools[0])
	var order []string
	for range 9 {
		c.Release()
		next := <-got
		order = append(order, next.who)
		c = next.c
	}
	c.Release()
	if want := []string{"urgent", "urgent", "first", "urgent", "urgent", "second", "urgent", "urgent", "third"}; !slices.Equal(order, want) {
		t.Errorf("served in the order %q", order)
	}
}

// TestAPoolHasThePermitThatItKeeps from the start, and again although its connection was lost
// while others queue, those that come first and those that others wait for. An idle one is not
// taken from it.
func TestAPoolHasThePermitThatItKeeps(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 4, 1, 2)
	pools[0].budget.keeping = 1
	before := []*Conn{acquired(t, pools[1]), acquired(t, pools[1])} // the pool that keeps one is not made yet
	first, second := queue(t, As{Urgent: true}, pools[1]), queue(t, As{}, pools[1])
	keeping := New(Config{Connect: s.connect, Max: 2, Budget: pools[0].budget, Bare: true, Keeps: true})
	t.Cleanup(keeping.Close)
	if inUse, _, reserved := pools[0].budget.Shortage(); inUse != 2 || reserved != 2 || !keeping.Ready() {
		t.Errorf("before its first one: %d in use, %d reserved, ready: %v", inUse, reserved, keeping.Ready())
	}
	kept := acquired(t, keeping)
	if keeping.Ready() {
		t.Error("it is ready to have more than is kept")
	}
	for range 3 {
		kept.Destroy()
		dbtest.Soon(t, "it is closed", func() bool { return s.open.Load() == 2 })
		acquired(t, pools[0]).Destroy()
		dbtest.Soon(t, "it is closed", func() bool { return s.open.Load() == 2 })
		if n := pools[1].Stat().Waiting; n != 2 {
			t.Fatalf("%d others queue: one has the permit that is kept", n)
		}
		kept = acquired(t, keeping)
	}
	if inUse, _, reserved := pools[0].budget.Shortage(); inUse != 3 || reserved != 1 {
		t.Errorf("%d in use, %d reserved", inUse, reserved)
	}
	kept.Release()
	if inUse, _, reserved := pools[0].budget.Shortage(); inUse != 2 || reserved != 2 {
		t.Errorf("with an idle one that is kept: %d in use, %d reserved", inUse, reserved)
	}
	if n := pools[1].Stat().Waiting; n != 2 || pools[1].Ready() {
		t.Errorf("%d others queue: one has taken the idle connection", n)
	}
	before[0].Release()
	(<-first).Release()
	(<-second).Release()
	before[1].Release()
}

// TestBudgetKeepsNotForWaiters: a caller that waits in the server does not use up the permit that
// is kept for its pool: whoever it waits for may need it. Nor does a pool that keeps none any more.
func TestBudgetKeepsNotForWaiters(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 4, 0, 1)
	pools[0].budget.keeping = 1
	cfg := Config{Connect: s.connect, Max: 3, Budget: pools[0].budget, Bare: true, Keeps: true}
	keeping := New(cfg)
	t.Cleanup(keeping.Close)
	waits, err := keeping.AcquireAs(dbtest.Limited(t), As{Waits: true})
	dbtest.OK(t, err)
	others := []*Conn{acquired(t, pools[0]), acquired(t, pools[0])}
	third := queue(t, As{Urgent: true}, pools[0])
	kept := acquired(t, keeping)
	waits.Unblocked() // so that it is the one that is kept
	kept.Release()
	others = append(others, <-third)
	waits.Release()

	keeping.Keep(false) // as after a failover: another pool is made in its place
	now := New(cfg)
	t.Cleanup(now.Close)
	third = queue(t, As{Urgent: true}, pools[0])
	acquired(t, now).Release()
	others[0].Release()
	others[0] = <-third
	for _, c := range others {
		c.Release()
	}
}

// TestOnlyFewUsersBeginToWaitInTheServer: one more gives its connection back, and a caller that
// cannot block has it then.
func TestOnlyFewUsersBeginToWaitInTheServer(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 5, 0, 1)
	var conns []*Conn
	for range 4 {
		conns = append(conns, acquired(t, pools[0]))
	}
	for i, c := range conns {
		if may := c.Block(); may != (i < 3) || i < 3 && !c.Block() {
			t.Errorf("number %d may wait: %v", i, may)
		}
	}
	if inUse, blocked, reserved := pools[0].budget.Shortage(); inUse != 4 || blocked != 3 || reserved != 0 {
		t.Errorf("%d in use, %d wait, %d reserved", inUse, blocked, reserved)
	}
	conns[3].Release()
	dbtest.Equal(t, "nobody waits, for %v", pools[0].Stat().OldestWait, 0)
	waits := queue(t, As{Waits: true}, pools[0])
	if old := pools[0].Stat().OldestWait; old <= 0 {
		t.Errorf("a caller has waited for %v", old)
	}
	acquired(t, pools[0]).Release() // passes it
	conns[0].Unblocked()
	conns[3] = <-waits
	if !conns[3].Block() || conns[0].Block() {
		t.Error("who has queued does not count")
	}
	for _, c := range conns {
		c.Release()
	}
	if b := pools[0].budget; b.blocked != 0 {
		t.Errorf("%d still count as waiting in the server", b.blocked)
	}
}

// TestAUserThatHoldsALockMayWaitHoweverManyDo, and fewer wait then that hold none.
func TestAUserThatHoldsALockMayWaitHoweverManyDo(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 5, 0, 1)
	var conns []*Conn
	for range 5 {
		conns = append(conns, acquired(t, pools[0]))
	}
	conns[0].BlockHolding()
	if !conns[1].Block() || !conns[2].Block() || conns[3].Block() {
		t.Error("three may wait, the one that holds a lock included")
	}
	conns[3].BlockHolding()
	conns[0].Unblocked()
	if conns[4].Block() {
		t.Error("three wait, and one more may")
	}
	for _, c := range conns {
		c.Release()
	}
	dbtest.Equal(t, "%d still count as waiting", pools[0].budget.blocked, 0)
}

// TestCallersThatMayWaitInTheServerLeavePlaces to the others, and count no more once they have
// their lock.
func TestCallersThatMayWaitInTheServerLeavePlaces(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 5, 0, 1)
	blocks := As{Waits: true}
	var conns []*Conn
	for range 3 {
		c, err := pools[0].AcquireAs(dbtest.Limited(t), blocks)
		dbtest.OK(t, err)
		conns = append(conns, c)
	}
	got := queue(t, blocks, pools[0])
	acquired(t, pools[0]).Release() // passes it
	dbtest.Equal(t, "%d callers wait", pools[0].Stat().Waiting, 1)
	conns[0].Unblocked()
	conns = append(conns, <-got)
	got = queue(t, blocks, pools[0])
	conns[1].Destroy()
	conns[1] = <-got
	for _, c := range conns {
		c.Release()
	}
	if b := pools[0].budget; b.blocked != 0 {
		t.Errorf("%d still count as waiting in the server", b.blocked)
	}
}

// TestBudgetKeepsItsPool: a connection stays with its pool while that has callers, but not
// for ever while another pool has one.
func TestBudgetKeepsItsPool(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 1, 0, 2)
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	c := acquired(t, pools[0])
	for range 3 {
		busy.Go(func() {
			for ctx.Err() == nil {
				c, err := pools[0].Acquire(ctx)
				if err == nil {
					c.Release()
				}
			}
		})
	}
	other := queue(t, As{}, pools[1])
	c.Release()
	(<-other).Release()
	cancel()
	busy.Wait()
}

// TestACallerLeavesTheQueueWithItsContextOrPool, and nothing is lost by it.
func TestACallerLeavesTheQueueWithItsContextOrPool(t *testing.T) {
	s := new(served)
	pools := s.budgeted(t, 1, 0, 2)
	c := acquired(t, pools[0])
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := pools[1].Acquire(ctx)
		failed <- err
	}()
	dbtest.Soon(t, "it queues", func() bool { return pools[1].Stat().Waiting == 1 })
	cancel()
	dbtest.Want(t, <-failed, context.Canceled)
	go func() {
		_, err := pools[1].Acquire(t.Context())
		failed <- err
	}()
	dbtest.Soon(t, "it queues", func() bool { return pools[1].Stat().Waiting == 1 })
	pools[1].Close()
	dbtest.Want(t, <-failed, lockerr.ErrClosed)
	pools[0].Shut() // does not wait for c
	c.Release()
	dbtest.Soon(t, "it is closed", func() bool { return s.open.Load() == 0 })
	dbtest.Is(t, "with an ended context", dbtest.Err(pools[0].Acquire(ctx)), context.Canceled)
	dbtest.Is(t, "of a closed pool", dbtest.Err(pools[0].Acquire(t.Context())), lockerr.ErrClosed)
}

// TestAConnectionWhoseCallerHasLeftGoesToTheNext: the context of the caller ends while it is opened for it.
func TestAConnectionWhoseCallerHasLeftGoesToTheNext(t *testing.T) {
	opening, opened := make(chan struct{}), make(chan struct{})
	s := &served{slow: func() { close(opening); <-opened }}
	pools := s.budgeted(t, 1, 0, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-opening; cancel() }()
	_, err := pools[0].AcquireAs(ctx, As{Waits: true})
	dbtest.Want(t, err, context.Canceled)
	next := queue(t, As{}, pools[0])
	close(opened)
	(<-next).Release()
	if s.opened.Load() != 1 || pools[0].budget.blocked != 0 {
		t.Errorf("%d were opened, %d are blocked", s.opened.Load(), pools[0].budget.blocked)
	}
}

// TestTheOldestIdleConnectionIsClosed, that which was opened first, whichever was used last.
func TestTheOldestIdleConnectionIsClosed(t *testing.T) {
	s := new(served)
	p := s.budgeted(t, 4, 0, 1)[0]
	p.CloseOldest() // there is none
	first, second, third := acquired(t, p), acquired(t, p), acquired(t, p)
	second.Release()
	third.Release()
	first.Release()
	for _, want := range []*Conn{first, second, third} {
		p.CloseOldest()
		if !want.Conn.(*servedConn).closed.Load() {
			dbtest.Soon(t, "the oldest one is closed", want.Conn.(*servedConn).closed.Load)
		}
	}
	dbtest.Equal(t, "%d are idle", p.Stat().Idle, 0)
}

// TestThereAreNeverMoreConnectionsThanTheBudget allows, whatever callers do; no caller is
// forgotten, and in the end no place is missing.
func TestThereAreNeverMoreConnectionsThanTheBudget(t *testing.T) {
	s := new(served)
	const most = 5
	pools := s.budgeted(t, most, 1, 4)
	var callers sync.WaitGroup
	for range 40 {
		callers.Go(func() {
			for range 300 {
				p := pools[rand.IntN(len(pools))]
				ctx, cancel := dbtest.Limited(t), context.CancelFunc(func() {})
				var as As
				switch rand.IntN(4) {
				case 0:
					ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(300))*time.Microsecond)
				case 1:
					as.Urgent = true
				case 2:
					as.Waits = true
				}
				c, err := p.AcquireAs(ctx, as)
				if err == nil {
					if c.Conn.(*servedConn).closed.Load() {
						t.Error("a closed connection was handed out")
					}
					c.Block()
					if rand.IntN(2) == 0 {
						c.Unblocked()
					}
					if rand.IntN(8) == 0 {
						c.Destroy()
					} else {
						c.Release()
					}
				} else if ctx.Err() == nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	callers.Wait()
	if s.most.Load() > most {
		t.Errorf("there were %d connections at a time, of %d", s.most.Load(), most)
	}
	b := pools[0].budget
	dbtest.Soon(t, "all is given back", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.taken == int(s.open.Load()) && b.blocked == 0 && b.queued == 0
	})
	for _, p := range pools {
		p.Close()
	}
	if b.taken != 0 || b.controls != 0 || s.open.Load() != 0 {
		t.Errorf("%d places are taken, %d by control, and %d connections open", b.taken, b.controls, s.open.Load())
	}
}

// TestAFullServerIsAskedAgainOnlyForABudget's pools: it has no connection left for a moment, since it still
// counts those that it has closed.
func TestAFullServerIsAskedAgainOnlyForABudget(t *testing.T) {
	full := &mysql.MySQLError{Number: 1040, Message: "Too many connections"}
	for _, bare := range []bool{false, true} {
		var asked atomic.Int32
		cfg := Config{Max: 1, Bare: bare, Idle: time.Hour, Connect: func(context.Context) (driver.Conn, error) {
			if asked.Add(1) <= 3 {
				return nil, full
			}
			return nil, errRefused
		}}
		alone := New(cfg)
		_, err := alone.Acquire(dbtest.Limited(t))
		dbtest.Want(t, err, full)
		alone.Close()
		asked.Store(0)
		cfg.Budget = NewBudget(4, 1, 0)
		p := New(cfg)
		_, err = p.Acquire(dbtest.Limited(t))
		dbtest.Want(t, err, errRefused)
		dbtest.Equal(t, "asked %d times", asked.Load(), 4)
		p.Close()
	}
}

var errRefused = errors.New("refused")

// TestPatienceLastsWhileThoseBeforeAreServed, by whatever pool, and while there are some that
// go first. It ends when none was for so long.
func TestPatienceLastsWhileThoseBeforeAreServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no machine is too slow for its patience
		s := new(served)
		pools := s.budgeted(t, 2, 0, 2)
		const patience = 200 * time.Millisecond
		held, turns := acquired(t, pools[0]), acquired(t, pools[0])
		var before []<-chan *Conn
		for i := range 6 {
			before = append(before, queue(t, As{}, pools[i%2]))
		}
		ends := make(chan error, 1)
		go func() {
			c, err := pools[0].AcquireAs(t.Context(), As{Patience: patience})
			if err == nil {
				c.Release()
			}
			ends <- err
		}()
		dbtest.Soon(t, "it queues", func() bool { return pools[0].Stat().Waiting == 4 })
		goesOn := func() {
			t.Helper()
			select {
			case err := <-ends:
				t.Fatalf("it has ended: %v", err)
			case <-time.After(patience / 2):
			}
		}
		for _, next := range before {
			goesOn()
			turns.Release()
			turns = <-next
		}
		for range share {
			goesOn()
			next := queue(t, As{Urgent: true}, pools[0])
			turns.Release()
			turns = <-next
		}
		dbtest.Want(t, <-ends, lockerr.ErrExhausted)
		turns.Release()
		held.Release()
		acquired(t, pools[1]).Release()
	})
}

// TestNoCallerWithPatienceWaitsForEver for a server that does not answer.
func TestNoCallerWithPatienceWaitsForEver(t *testing.T) {
	t.Parallel()
	opened := make(chan struct{})
	defer close(opened)
	s := &served{slow: func() { <-opened }}
	_, err := s.budgeted(t, 1, 0, 1)[0].AcquireAs(t.Context(), As{Patience: time.Millisecond})
	dbtest.Want(t, err, lockerr.ErrNoAnswer)
}
