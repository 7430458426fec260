package queue

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/lockerr"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var ctx = context.Background()

// empty checks that no queue is left over.
func (q *Queue) empty(t *testing.T) {
	t.Helper()
	q.mu.Lock()
	defer q.mu.Unlock()
	for n, l := range q.queues {
		t.Errorf("the queue of %+v is left over, with %d in front and %d waiting", n, len(l.front), l.waiting.Len())
	}
}

// alone wants each of the queues of keys for one caller alone.
func alone(keys ...string) []Key {
	wants := make([]Key, len(keys))
	for i, key := range keys {
		wants[i].Name = key
	}
	return wants
}

// Holder returns the holder of key, or nil.
func (q *Queue) Holder(key string) *lockerr.Holder {
	h, _ := q.HolderOf(Key{Name: key})
	return h
}

func enter(t *testing.T, q *Queue, keys ...string) *Ticket {
	t.Helper()
	ticket, err := q.Enter(ctx, alone(keys...), nil, Ends{})
	dbtest.OK(t, err)
	return ticket
}

func succeed(t *testing.T, q *Queue, key string) *Ticket {
	t.Helper()
	ticket, _ := q.Enter(ctx, alone(key), "us", Ends{})
	if ticket == nil {
		t.Fatal("it did not come to the front")
	}
	return ticket
}

// busy has callers have k for a time each, one after the other, until stop: those that come wait behind n of them.
func busy(t *testing.T, q *Queue, n int, turn time.Duration) (stop func()) {
	t.Helper()
	var over atomic.Bool
	var all sync.WaitGroup
	for range n + 1 {
		all.Go(func() {
			for !over.Load() {
				ticket, err := q.Enter(ctx, alone("k"), nil, Ends{})
				if err != nil {
					t.Error(err)
					return
				}
				ticket.Granted(&lockerr.Holder{})
				time.Sleep(turn)
				ticket.Leave()
			}
		})
		synctest.Wait()
	}
	return func() { over.Store(true); all.Wait() }
}

// TestACallerWithTooManyInFrontIsRefusedAtOnce: its context, or wait, ends before its turn can come, by the quickest
// of the last turns. As long as there were few it is not known.
func TestACallerWithTooManyInFrontIsRefusedAtOnce(t *testing.T) {
	const turn = 100 * time.Millisecond
	try := func(q *Queue, from any, left time.Duration) (took time.Duration, err error) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(ctx, left)
		defer cancel()
		ticket, err := q.Enter(ctx, alone("k"), from, Ends{})
		ticket.Leave()
		return time.Since(began), err
	}
	for name, test := range map[string]struct {
		turns   int
		left    time.Duration
		refused bool
	}{
		"no time":          {20, 3 * turn, true},
		"just no time":     {20, 5*turn - 1, true},
		"time":             {20, 7 * turn, false},
		"nothing is known": {3, turn, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var q Queue
				defer busy(t, &q, 5, turn)()
				time.Sleep(time.Duration(test.turns)*turn + turn/2)
				took, err := try(&q, nil, test.left)
				switch {
				case test.refused:
					if !errors.Is(err, lockerr.ErrTimeout) || took != 0 {
						t.Errorf("after %v: %v", took, err)
					}
				case test.turns < 8:
					dbtest.Is(t, "the end of its context", err, context.DeadlineExceeded)
				default:
					dbtest.OK(t, err)
				}
			})
		})
	}
}

// TestThoseWhoShareAKeyAreOneTurn for a caller behind them, however many they are.
func TestThoseWhoShareAKeyAreOneTurn(t *testing.T) {
	const turn = 100 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		stop := busy(t, &q, 1, turn)
		time.Sleep(20*turn + turn/2)
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, 3*turn)
				defer cancel()
				ticket, err := q.Enter(ctx, []Key{{Name: "k", Shared: true}}, nil, Ends{})
				dbtest.Is(t, "one that shares the key", err, nil)
				ticket.Leave()
			})
			synctest.Wait()
		}
		stop()
		all.Wait()
	})
}

// TestNobodyComesToTheFrontInItsLastMoments: the context of the caller ends in less than a turn, and the one behind
// it comes to the front.
func TestNobodyComesToTheFrontInItsLastMoments(t *testing.T) {
	const turn = 8 * time.Millisecond
	for _, handsOver := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var q Queue
			tickets := make(chan *Ticket, 1)
			next := func() { go func() { tickets <- succeed(t, &q, "k") }(); synctest.Wait() }
			next()
			for range 9 {
				ticket := <-tickets
				ticket.Granted(&lockerr.Holder{})
				next()
				time.Sleep(turn)
				ticket.Leave()
			}
			holder := <-tickets
			holder.Granted(&lockerr.Holder{})
			late := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(ctx, turn/2+turn/4)
				defer cancel()
				ticket, err := q.Enter(ctx, alone("k"), "us", Ends{})
				ticket.Leave()
				late <- err
			}()
			synctest.Wait()
			next()
			time.Sleep(turn / 2)
			if handsOver {
				if !holder.Handoff("us", "the lock") {
					t.Error("nobody is next")
				}
			} else {
				holder.Leave()
			}
			dbtest.Is(t, "in its last moments", <-late, lockerr.ErrTimeout)
			got := <-tickets
			if handed := got.HandedOver() != nil; handed != handsOver {
				t.Errorf("handed over: %v", handed)
			}
			got.Leave()
			q.empty(t)
		})
	}
}

// TestTheNextWaitsElsewhere: a caller that asks for that is told when it is the next behind one that has the key and could hand it
// over. It is not handed over to it then. It comes to the front when the one before leaves, or when it is granted the lock before that.
func TestTheNextWaitsElsewhere(t *testing.T) {
	next := func(t *testing.T, q *Queue, from any) chan *Ticket {
		t.Helper()
		got := make(chan *Ticket, 1)
		go func() {
			ticket, err := q.Enter(ctx, alone("k"), from, Ends{GoesAhead: func() bool { return true }})
			if err != nil {
				t.Error(err)
				return
			}
			got <- ticket
		}()
		synctest.Wait()
		return got
	}
	for name, test := range map[string]struct {
		from          any  // who has granted the lock of the one in front
		late, granted bool // that has it only after the next has come; the next is granted the lock before that leaves
	}{
		"another strategy":                    {from: "others"},
		"the one in front leaves":             {from: "us"},
		"the same, granted later":             {from: "us", late: true},
		"granted before the other has left":   {from: "us", granted: true},
		"the same, where that was told later": {from: "us", late: true, granted: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var q Queue
				front := enter(t, &q, "k")
				use := func() {
					front.GrantedBy(test.from, &lockerr.Holder{ConnectionID: 1})
					front.Used()
					synctest.Wait()
				}
				if !test.late {
					use()
				}
				got := next(t, &q, "us")
				if test.late {
					if len(got) > 0 {
						t.Fatal("it is told that it is the next before the one in front has the key")
					}
					use()
				}
				if test.from != "us" {
					if len(got) > 0 {
						t.Fatal("it would wait for a lock that others have")
					}
					front.Leave()
					(<-got).Leave()
					return
				}
				ahead := <-got
				third := next(t, &q, "us")
				if !ahead.Ahead() || front.HasNext("us") || front.Handoff("us", "the lock") || len(third) > 0 || q.Waiting("k") != 2 {
					t.Errorf("next: %v, and the lock could be handed over: %v; %d wait", ahead.Ahead(), front.HasNext("us"), q.Waiting("k"))
				}
				if test.granted {
					ahead.GrantedBy("us", &lockerr.Holder{ConnectionID: 2})
					ahead.Used()
					synctest.Wait()
					if h := q.Holder("k"); h == nil || h.ConnectionID != 2 {
						t.Errorf("%v has the key while the one before is still there", h)
					}
					if ahead.HasNext("us") || ahead.Handoff("us", "the lock") || len(third) > 0 {
						t.Error("the lock could be handed over to one that is not in front then")
					}
					front.Leave()
				} else {
					front.Leave()
					if ahead.Ahead() {
						t.Error("it is not in front")
					}
					ahead.GrantedBy("us", &lockerr.Holder{ConnectionID: 2})
					ahead.Used()
				}
				if h := q.Holder("k"); h == nil || h.ConnectionID != 2 || ahead.Ahead() {
					t.Errorf("%v has the key", h)
				}
				last := <-third
				if !last.Ahead() {
					t.Error("the third is not the next")
				}
				last.Leave() // it gives up
				ahead.Leave()
				q.empty(t)
			})
		})
	}
}

// TestTheNextIsNotCalledWhereItNeedNotWait: the one in front has run nothing, so that the lock can be handed over as it is, or the
// next does not want to wait elsewhere now.
func TestTheNextIsNotCalledWhereItNeedNotWait(t *testing.T) {
	for name, test := range map[string]struct{ used, wants bool }{"nothing has run": {wants: true}, "it does not want to": {used: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var q Queue
				front := enter(t, &q, "k")
				front.GrantedBy("us", &lockerr.Holder{ConnectionID: 1})
				if test.used {
					front.Used()
				}
				got := make(chan *Ticket, 1)
				go func() {
					ticket, err := q.Enter(ctx, alone("k"), "us", Ends{GoesAhead: func() bool { return test.wants }})
					if err != nil {
						t.Error(err)
						return
					}
					got <- ticket
				}()
				synctest.Wait()
				if len(got) > 0 || !front.Handoff("us", "the lock") {
					t.Fatal("it was called")
				}
				next := <-got
				dbtest.Equal(t, "%v was handed over, want %v", next.HandedOver(), "the lock")
				next.Leave()
				q.empty(t)
			})
		})
	}
}

func TestCallersAreServedInTheOrderInWhichTheyCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		front := enter(t, &q, "k")
		var order []int // guarded by the queue
		for i := range 20 {
			go func() {
				ticket, err := q.Enter(ctx, alone("k"), nil, Ends{})
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				time.Sleep(time.Millisecond)
				ticket.Leave()
			}()
			synctest.Wait()
		}
		if _, _, ok := q.TryEnter(alone("k"), false); ok {
			t.Error("someone got in front although the queue is not empty")
		}
		front.Leave()
		// Nor may anyone slip in between two of the queue.
		for range 30 {
			if ticket, _, ok := q.TryEnter(alone("k"), false); ok {
				if len(order) != 20 {
					t.Errorf("someone slipped in behind %d", len(order))
				}
				ticket.Leave()
			}
			time.Sleep(time.Millisecond)
		}
		if len(order) != 20 || !slices.IsSorted(order) {
			t.Errorf("the order was %v", order)
		}
		q.empty(t)
	})
}

func TestKeysAreApart(t *testing.T) {
	var q Queue
	a := enter(t, &q, "a")
	b := enter(t, &q, "b")
	if _, _, ok := q.TryEnter(alone("a"), false); ok {
		t.Error("two are in front of one queue")
	}
	a.Leave()
	again, _, ok := q.TryEnter(alone("a"), false)
	if !ok {
		t.Fatal("the queue is empty, and nobody gets in")
	}
	again.Leave()
	b.Leave()
	q.empty(t)
}

func TestACancelledWaiterLeavesAllItsQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		front := enter(t, &q, "b")

		// One that waits for b while it is in front for a, one behind it.
		waiting, cancel := context.WithCancel(ctx)
		failed := make(chan error, 1)
		go func() {
			_, err := q.Enter(waiting, alone("a", "b", "c"), nil, Ends{})
			failed <- err
		}()
		synctest.Wait()
		var behind *Ticket
		go func() { behind, _ = q.Enter(ctx, alone("a"), nil, Ends{}) }()
		synctest.Wait()
		if behind != nil {
			t.Fatal("two are in front of one queue")
		}

		cancel()
		synctest.Wait()
		dbtest.Is(t, "the cancelled one", <-failed, context.Canceled)
		if behind == nil {
			t.Fatal("the cancelled one still has its place in another queue")
		}
		behind.Leave()

		// Whoever comes too late does not get in, even where nobody is.
		dbtest.Is(t, "with an ended context", dbtest.Err(q.Enter(waiting, alone("b"), nil, Ends{})), context.Canceled)
		front.Leave()
		q.empty(t)

		next, _, ok := q.TryEnter(alone("a", "b", "c"), false)
		if !ok {
			t.Fatal("the queues are empty, and nobody gets in")
		}
		next.Leave()
		q.empty(t)
	})
}

// TestThoseBehindACancelledCallerMoveUp: it is in the middle of a queue.
func TestThoseBehindACancelledCallerMoveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		front := enter(t, &q, "k")
		var order []int
		cancels := make([]context.CancelFunc, 5)
		for i := range cancels {
			var own context.Context
			own, cancels[i] = context.WithCancel(ctx)
			go func() {
				ticket, err := q.Enter(own, alone("k"), nil, Ends{})
				if err == nil {
					order = append(order, i)
					ticket.Leave()
				}
			}()
			synctest.Wait()
		}
		cancels[2]()
		cancels[4]()
		synctest.Wait()
		front.Leave()
		synctest.Wait()
		if !slices.Equal(order, []int{0, 1, 3}) {
			t.Errorf("the order was %v", order)
		}
		for _, cancel := range cancels {
			cancel()
		}
		q.empty(t)
	})
}

func TestTryEnterTakesAllOrNothing(t *testing.T) {
	var q Queue
	b := enter(t, &q, "b")
	b.Granted(&lockerr.Holder{ConnectionID: 7})
	ticket, holder, ok := q.TryEnter(alone("a", "b", "c"), false)
	if ok || ticket != nil {
		t.Fatal("two are in front of one queue")
	}
	if holder == nil || holder.ConnectionID != 7 {
		t.Errorf("the holder is %v", holder)
	}
	for _, key := range []string{"a", "c"} {
		other, _, ok := q.TryEnter(alone(key), false)
		if !ok {
			t.Errorf("who did not get in is in front for %s", key)
			continue
		}
		other.Leave()
	}
	b.Leave()
	q.empty(t)
}

func TestAHolderIsKnownFromItsGrantUntilItLeaves(t *testing.T) {
	var q Queue
	if h := q.Holder("a"); h != nil {
		t.Errorf("nobody is %v", h)
	}
	ticket := enter(t, &q, "a", "b")
	if _, holder, ok := q.TryEnter(alone("a"), false); ok || holder != nil {
		t.Errorf("who does not hold it yet is %v", holder)
	}
	ticket.Granted(&lockerr.Holder{ConnectionID: 7})
	for _, key := range []string{"a", "b"} {
		if h := q.Holder(key); h == nil || h.ConnectionID != 7 || !h.ThisProcess {
			t.Errorf("the holder of %s, in this process, is %v", key, h)
		}
	}
	ticket.Leave()
	if h := q.Holder("a"); h != nil {
		t.Errorf("who has left still holds it: %v", h)
	}
	q.empty(t)
}

// TestWhoeverComesToTheFrontIsNotWhoWasThere, as a holder that others are told of.
func TestWhoeverComesToTheFrontIsNotWhoWasThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		first := enter(t, &q, "k")
		first.Granted(&lockerr.Holder{ConnectionID: 7})
		var second *Ticket
		go func() { second, _ = q.Enter(ctx, alone("k"), nil, Ends{}) }()
		synctest.Wait()
		first.Leave()
		synctest.Wait()
		if h := q.Holder("k"); h != nil {
			t.Errorf("the second is taken for %v", h)
		}
		second.Leave()
		q.empty(t)
	})
}

// TestTheNextGetsWhatTheLockIsKnownBy: the next in the queue; one that comes to an empty queue
// does not.
func TestTheNextGetsWhatTheLockIsKnownBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		front := enter(t, &q, "k")
		if front.HandedOver() != nil || front.Handoff("us", "nobody") {
			t.Error("handed over to nobody")
		}
		for i := range 3 {
			got := make(chan *Ticket)
			go func() { got <- succeed(t, &q, "k") }()
			synctest.Wait()
			front.Granted(&lockerr.Holder{ConnectionID: 7})
			if !front.Handoff("us", i) {
				t.Error("not handed over although somebody waits")
			}
			front.Leave() // does nothing any more
			front = <-got
			if front.HandedOver() != i || q.Holder("k") != nil {
				t.Errorf("the next has %v, and %v is said to hold it", front.HandedOver(), q.Holder("k"))
			}
		}
		front.Leave()
		if last := enter(t, &q, "k"); last.HandedOver() != nil {
			t.Errorf("a new queue begins with %v", last.HandedOver())
		} else {
			last.Leave()
		}
		both := enter(t, &q, "a", "b")
		if both.Handoff("us", 1) {
			t.Error("two keys were handed over")
		}
		both.Leave()
		front = enter(t, &q, "k")
		got := make(chan *Ticket)
		go func() { got <- enter(t, &q, "k") }()
		synctest.Wait()
		if front.Handoff("us", 1) {
			t.Error("handed over to one that cannot take it")
		}
		front.Leave()
		(<-got).Leave()
		q.empty(t)
	})
}

// TestHandoffIsNeverLost: a waiter that gives up in the moment of a handoff
// either has it or leaves it to the next.
func TestHandoffIsNeverLost(t *testing.T) {
	var q Queue
	var holding atomic.Int32
	front := enter(t, &q, "k")
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for range 50 {
				own, cancel := context.WithTimeout(ctx, rand.N(200*time.Microsecond))
				ticket, _ := q.Enter(own, alone("k"), "us", Ends{})
				cancel()
				if ticket == nil {
					continue
				}
				if holding.Add(1) != 1 {
					t.Error("two are in front")
				}
				holding.Add(-1)
				if !ticket.Handoff("us", "lock") {
					ticket.Leave()
				}
			}
		})
	}
	front.Handoff("us", "lock")
	front.Leave()
	all.Wait()
	q.empty(t)
}

func TestLeavingAgainTakesNobodysPlace(t *testing.T) {
	var nobody *Ticket
	nobody.Leave()

	var q Queue
	first := enter(t, &q, "k")
	first.Leave()
	second := enter(t, &q, "k")
	first.Leave() // not the second one's place
	if _, _, ok := q.TryEnter(alone("k"), false); ok {
		t.Error("two are in front of one queue")
	}
	second.Leave()
	second.Leave()
	q.empty(t)
}

// TestATicketIsAwaitedWhileOthersQueueForItsKey, or stand in front of the queue of a key that a
// transaction beside it has locked.
func TestATicketIsAwaitedWhileOthersQueueForItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		var none *Ticket
		held, beside := enter(t, &q, "k"), q.Claim([]Key{{Name: "other"}})
		if none.Awaited() || held.Awaited() || beside.Awaited() {
			t.Error("awaited by nobody")
		}
		came := make(chan *Ticket)
		go func() { came <- succeed(t, &q, "k") }()
		synctest.Wait()
		if !held.Awaited() || beside.Awaited() {
			t.Error("not awaited, or for another key")
		}
		held.Leave()
		next := <-came
		if next.Awaited() {
			t.Error("awaited by nobody any more")
		}
		front := enter(t, &q, "other")
		if !beside.Awaited() || front.Awaited() {
			t.Error("who has locked the row is not awaited")
		}
		for _, ticket := range []*Ticket{next, front, beside} {
			ticket.Leave()
		}
		q.empty(t)
	})
}

// TestAReaderWaitsForOthersOnlyBehindAWriter: who shares a key waits for others who do where somebody goes before it
// who wants the key for itself, and else does not.
func TestAReaderWaitsForOthersOnlyBehindAWriter(t *testing.T) {
	for _, writer := range []bool{false, true} {
		for _, claimed := range []bool{false, true} { // the other one shares it without a place in the queue
			for _, last := range []bool{false, true} { // who shares it begins to wait last
				synctest.Test(t, func(t *testing.T) {
					var q Queue
					a, _, _ := q.TryEnter(alone("a"), false)
					a.Granted(&lockerr.Holder{})
					var b *Ticket
					if claimed {
						b = q.Claim([]Key{{Name: "b", Shared: true}})
					} else {
						b, _, _ = q.TryEnter([]Key{{Name: "b", Shared: true}}, false)
						b.Granted(&lockerr.Holder{})
					}
					ctx, cancel := context.WithCancel(t.Context())
					if writer {
						go func() {
							w, err := q.Enter(ctx, alone("b"), nil, Ends{})
							if err == nil {
								<-ctx.Done()
								w.Leave()
							}
						}()
						synctest.Wait()
					}
					waits := []*Wanted{
						{Queue: &q, Holds: []*Ticket{a}, Keys: []Key{{Name: "b", Shared: true}}},
						{Queue: &q, Holds: []*Ticket{b}, Keys: []Key{{Name: "a"}}},
					}
					first, second := waits[0], waits[1]
					if last {
						first, second = second, first
					}
					done, ok := first.Wait()
					if !ok {
						t.Fatal("the first to wait is refused")
					}
					done2, ok := second.Wait()
					if ok == writer {
						t.Errorf("writer %v, claimed %v, last %v: it may wait: %v", writer, claimed, last, ok)
					}
					if ok {
						done2()
					}
					done()
					cancel()
					synctest.Wait()
					a.Leave()
					b.Leave()
					if len(q.queues) > 0 || len(q.claims) > 0 || len(graph.waits) > 0 {
						t.Error("something is left over")
					}
				})
			}
		}
	}
}
