package queue

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// callers come to a queue by their names, and each is noted when it comes to the front.
type callers struct {
	t       *testing.T
	q       *Queue
	mu      sync.Mutex         // of those who come to the front together
	tickets map[string]*Ticket // of those in front
	cancels map[string]context.CancelFunc
}

func newCallers(t *testing.T) *callers {
	return &callers{t: t, q: new(Queue), tickets: make(map[string]*Ticket), cancels: make(map[string]context.CancelFunc)}
}

// comes lets somebody come, to whom others may come next.
func (c *callers) comes(who string, wants ...Key) {
	own, cancel := context.WithCancel(ctx)
	c.cancels[who] = cancel
	go func() {
		if ticket, err := c.q.Enter(own, wants, nil, Ends{}); err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.tickets[who] = ticket
		}
	}()
	synctest.Wait()
}

func (c *callers) granted(who string) {
	c.tickets[who].Granted(&lockerr.Holder{Program: who})
	synctest.Wait()
}

func (c *callers) leaves(who string) {
	ticket := c.tickets[who]
	delete(c.tickets, who)
	ticket.Leave()
	synctest.Wait()
}

func (c *callers) givesUp(who string) {
	c.cancels[who]()
	synctest.Wait()
}

// want checks who is in front.
func (c *callers) want(names string) {
	c.t.Helper()
	var front []string
	for who := range c.tickets {
		front = append(front, who)
	}
	slices.Sort(front)
	if got := strings.Join(front, " "); got != names {
		c.t.Errorf("in front are %q, not %q", got, names)
	}
}

// play runs steps: of r1, a reader, or w1, a writer, that comes (+r1), is granted the key (!r1),
// leaves (-r1) or gives up (~r1); and [r1 r2] are who must be in front then.
func (c *callers) play(steps string) {
	c.t.Helper()
	for _, step := range regexp.MustCompile(`\[[^]]*\]|\S+`).FindAllString(steps, -1) {
		switch who := step[1:]; step[0] {
		case '+':
			c.comes(who, map[byte]Key{'r': reader, 'w': writer}[who[0]])
		case '!':
			c.granted(who)
		case '-':
			c.leaves(who)
		case '~':
			c.givesUp(who)
		default:
			c.want(strings.Trim(step, "[]"))
		}
	}
}

func (c *callers) end() {
	for _, cancel := range c.cancels {
		cancel()
	}
	synctest.Wait()
	for who := range c.tickets {
		c.leaves(who)
	}
	c.q.empty(c.t)
}

var reader, writer = Key{Name: "k", Shared: true}, Key{Name: "k"}

// TestReadersGoTogether: the first of them alone, until it holds the key.
func TestReadersGoTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 +r2 +r3 [r1] !r1 [r1 r2 r3]")
		// r2 and r3 do not know yet whether they get it.
		c.play("+r4 [r1 r2 r3] !r2 [r1 r2 r3]")
		// Without having got it.
		c.play("-r3 [r1 r2 r4] !r4 +r5 [r1 r2 r4 r5] -r1 -r2 -r4 +r6 [r5]")
		// Without having got it, and the next finds out for itself.
		c.play("-r5 [r6] !r6 +r7 !r7 -r6 +r8 [r7 r8]")
		c.end()
	})
}

func TestNobodyPassesAWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 !r1 +r2 +w1 +r3 +r4 +w2 +r5 [r1 r2] !r2 [r1 r2]")
		if _, _, ok := c.q.TryEnter([]Key{reader}, true); ok {
			t.Error("a reader slipped past a writer that waits")
		}
		c.play("-r1 [r2] -r2 [w1] !w1 [w1] -w1 [r3] !r3 [r3 r4] !r4 -r3 -r4 [w2] -w2 [r5]")
		c.end()
	})
}

// TestWriterGivesUp: readers behind it go together with those before it.
func TestWriterGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 !r1 +w1 +r2 +r3 +w2 ~w1 [r1 r2 r3] ~w2 [r1 r2 r3]")
		c.end()
	})
}

// TestAReaderThatCannotWaitPassesOtherReaders: it need not know whether they get the key.
func TestAReaderThatCannotWaitPassesOtherReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 +r2")
		if _, _, ok := c.q.TryEnter([]Key{reader}, false); ok {
			t.Error("somebody who may wait came to the front before the first reader has the key")
		}
		passing, _, ok := c.q.TryEnter([]Key{reader}, true)
		if !ok {
			t.Fatal("among readers, a reader that does not wait is not let in")
		}
		if _, _, ok := c.q.TryEnter([]Key{writer}, true); ok {
			t.Error("a writer is in front together with readers")
		}
		passing.Leave()
		c.play("-r1 [r2]")
		c.end()

		c.comes("w", writer)
		if _, _, ok := c.q.TryEnter([]Key{reader}, true); ok {
			t.Error("a reader is in front together with a writer")
		}
		c.end()
	})
}

// TestPassingReadersStarveNobody who waits, although there is always one of them
// in front of whom it is not known whether it gets the key.
func TestPassingReadersStarveNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 +r2")
		var passing *Ticket
		for i := range 1000 {
			next, _, ok := c.q.TryEnter([]Key{reader}, true)
			if !ok {
				t.Fatal("among readers, a reader that does not wait is not let in")
			}
			if i%2 == 1 {
				next.Granted(&lockerr.Holder{Program: "passing"})
			}
			passing.Leave()
			passing = next
			if i == 100 {
				c.play("+r3 [r1]")
				// Without having got it, so that the next finds out for itself.
				c.play("-r1 [r2]")
			}
		}
		passing.Granted(&lockerr.Holder{})
		c.play("[r2] !r2 [r2 r3]")
		passing.Leave()
		c.end()

		passing, _, _ = c.q.TryEnter([]Key{reader}, true)
		c.play("+r1 [r1]")
		passing.Leave()
		c.end()

		// A writer is waited for.
		passing, _, _ = c.q.TryEnter([]Key{reader}, true)
		c.play("+w +r1 []")
		if _, _, ok := c.q.TryEnter([]Key{reader}, true); ok {
			t.Error("a reader slipped past a writer that waits")
		}
		passing.Leave()
		synctest.Wait()
		c.want("w")
		c.end()
	})
}

// TestACallerInFrontOfOneQueueMayWaitInAnother, also with others that share the first key.
func TestACallerInFrontOfOneQueueMayWaitInAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.comes("w", Key{Name: "b"})
		c.comes("r1", Key{Name: "a", Shared: true}, Key{Name: "b", Shared: true})
		c.comes("r2", Key{Name: "a", Shared: true})
		c.play("[w] ~r1 [r2 w]")
		c.comes("r3", Key{Name: "a", Shared: true}, Key{Name: "b", Shared: true}, Key{Name: "c"})
		c.play("!r2 -w [r2 r3] !r3")
		// Once more.
		c.play("!r3")
		c.comes("r4", Key{Name: "a", Shared: true}, Key{Name: "b", Shared: true})
		c.comes("r5", Key{Name: "c", Shared: true})
		c.want("r2 r3 r4")
		c.end()
	})
}

func TestTheHolderOfASharedKeyIsOneThatIsStillThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 !r1 +r2 !r2 +r3 -r1")
		if h := c.q.Holder("k"); h == nil || h.Program != "r2" {
			t.Errorf("the holder is %v", h)
		}
		if _, h, ok := c.q.TryEnter(alone("k"), false); ok || h == nil || h.Program != "r2" {
			t.Errorf("the holder is %v", h)
		}
		c.leaves("r2")
		if h := c.q.Holder("k"); h != nil {
			t.Errorf("who does not hold it yet is %v", h)
		}
		if h, _ := c.q.HolderOf(Key{Name: "k", Slots: 1}); h != nil {
			t.Errorf("nobody is %v", h)
		}
		c.end()
	})
}

// TestSharedIsNotHandedOver: others would still hold what the next is given.
func TestSharedIsNotHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		c.play("+r1 !r1 +r2")
		own, cancel := context.WithCancel(ctx)
		go func() {
			if ticket, _ := c.q.Enter(own, alone("k"), "us", Ends{}); ticket != nil {
				ticket.Leave()
			}
		}()
		synctest.Wait()
		if c.tickets["r1"].Handoff("us", "lock") {
			t.Error("it was handed over")
		}
		cancel()
		c.end()
	})
}

func slots(n int) Key { return Key{Name: "k", Slots: n} }

func TestAsManyAreInFrontAsThereAreSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		for _, who := range []string{"a", "b", "c", "d", "e"} {
			c.comes(who, slots(3))
		}
		c.want("a b c")
		if _, _, ok := c.q.TryEnter([]Key{slots(3)}, true); ok {
			t.Error("there is no slot for one more")
		}
		c.granted("b")
		if _, h, _ := c.q.TryEnter([]Key{slots(3)}, true); h == nil || h.Program != "b" {
			t.Errorf("the holder is %v", h)
		}
		c.play("[a b c] -b [a c d]")
		// A queue of its own.
		c.play("+w [a c d w] -a -c -d [e w]")
		c.end()
	})
}

// TestNobodyPassesAnotherWhereNumbersOfSlotsDiffer: each comes to the front when fewer than its
// own number are there.
func TestNobodyPassesAnotherWhereNumbersOfSlotsDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		for _, who := range []string{"a", "b", "c", "d", "e"} {
			c.comes(who, slots(5))
		}
		c.want("a b c d e")
		c.comes("f", slots(3))
		c.comes("g", slots(5))
		c.play("-a -b [c d e] -c [d e f g]")
		c.comes("h", slots(3))
		c.comes("i", slots(6))
		c.play("[d e f g] ~h [d e f g i]")
		c.comes("j", slots(6))
		c.want("d e f g i j")
		c.end()
	})
}

// wantFree checks which slot somebody is told of.
func (c *callers) wantFree(who string, want int) {
	c.t.Helper()
	if got := c.tickets[who].Free(); got != want {
		c.t.Errorf("%s finds slot %d free, not %d", who, got, want)
	}
}

// wantFreed checks who would stop waiting now, of those in front.
func (c *callers) wantFreed(names string) {
	c.t.Helper()
	var freed []string
	for who, ticket := range c.tickets {
		select {
		case <-ticket.Freed():
			freed = append(freed, who)
		default:
		}
	}
	slices.Sort(freed)
	if got := strings.Join(freed, " "); got != names {
		c.t.Errorf("those who can stop waiting are %q, not %q", got, names)
	}
}

func (c *callers) wantTaken(who string, want ...int) {
	c.t.Helper()
	got := c.tickets[who].Taken()
	if slices.Sort(got); !slices.Equal(got, want) {
		c.t.Errorf("to %s the slots %v are taken, not %v", who, got, want)
	}
}

// TestSlotsGivenBackAreToldToThoseWhoComeNext, the last one first.
func TestSlotsGivenBackAreToldToThoseWhoComeNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		for slot, who := range []string{"a", "b", "c", "d"} {
			c.comes(who, slots(4))
			c.wantFree(who, -1)
			c.tickets[who].Holds(slot)
		}
		c.comes("e", slots(4))
		c.leaves("b")
		c.wantFreed("e")
		c.wantFree("e", 1)
		c.wantFreed("")
		c.tickets["e"].Holds(1)
		c.play("-a -c")
		c.comes("f", slots(4))
		c.wantFree("f", 2)
		c.comes("g", slots(1)) // two are there
		c.play("[d e f] ~g")
		c.tickets["f"].Holds(0) // another process had the other one, and it finds this one itself
		c.comes("h", slots(4))
		c.wantFree("h", 2)
		c.comes("i", slots(6))
		c.wantFree("i", -1)
		c.end()
	})
}

// TestSlotIsForTheFirst in front who has none, and for nobody else.
func TestSlotIsForTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t)
		enters := func(who string, passing bool) {
			t.Helper()
			ticket, _, ok := c.q.TryEnter([]Key{slots(5)}, passing)
			if !ok {
				t.Fatalf("%s does not come to the front", who)
			}
			c.tickets[who] = ticket
		}
		enters("a", false)
		c.tickets["a"].Holds(4)
		c.granted("a")
		enters("b", false)
		c.tickets["b"].Holds(0)
		enters("p", true)
		c.comes("x", slots(5))
		c.comes("y", slots(5))
		for _, who := range []string{"x", "y", "p"} {
			c.wantFree(who, -1)
			c.wantTaken(who, 0, 4)
		}
		c.leaves("b") // and comes again at once
		enters("b", false)
		c.wantFreed("x")
		c.wantFree("b", -1)
		c.wantFree("p", -1)
		c.wantTaken("b", 0, 4)
		c.wantTaken("x", 4)
		c.wantFree("x", 0)
		c.wantTaken("y", 0, 4)

		// x finds another one: what was kept for it is for the next.
		c.tickets["x"].Holds(3)
		c.wantFreed("y")
		c.wantTaken("b", 0, 3, 4)

		// y gives up, before it knows.
		c.leaves("y")
		c.wantFreed("b")
		c.wantFree("b", 0)

		// Another process has it: it is nobody's.
		c.wantFree("b", -1)
		c.wantTaken("p", 3, 4)

		// With none to wait for it, it is for those who come next.
		c.tickets["b"].Holds(1)
		c.leaves("a")
		c.wantFree("p", 4)
		c.leaves("p")
		c.comes("z", slots(4)) // which does not know slot 4
		c.wantFree("z", -1)
		c.comes("a", slots(5))
		c.wantFree("a", 4)
		c.tickets["a"].Holds(4)
		c.wantFree("a", -1)
		c.leaves("a")
		c.wantFreed("")
		c.leaves("x")
		c.wantFreed("z")
		if c.comes("w", writer); c.tickets["w"].Freed() != nil || c.tickets["w"].Free() != -1 || c.tickets["w"].Taken() != nil {
			t.Error("who is alone in front is told of slots")
		}
		c.end()
	})
}

// TestManyWhoTakeSlotsHaveOneEach, and wait for nothing but to be told of one.
func TestManyWhoTakeSlotsHaveOneEach(t *testing.T) {
	var q Queue
	var used [3]atomic.Bool
	limited, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var told atomic.Int32
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 300 {
				place := slots(2 + rand.N(2))
				ticket, err := q.Enter(limited, []Key{place}, nil, Ends{})
				if err != nil {
					t.Errorf("nobody comes through: %v", err)
					return
				}
				held := -1
				for held < 0 {
					try := ticket.Free()
					if try >= 0 {
						told.Add(1)
					}
					for i := 0; i < place.Slots && try < 0; i++ {
						if !slices.Contains(ticket.Taken(), i) {
							try = i
						}
					}
					if try >= 0 && used[try].CompareAndSwap(false, true) {
						held = try
						break
					}
					select {
					case <-ticket.Freed():
						if rand.N(20) == 0 {
							held = place.Slots
						}
					case <-limited.Done():
						t.Error("nobody is told of a free slot")
						ticket.Leave()
						return
					}
				}
				if held < place.Slots { // else it gives up, although it was told of one
					ticket.Holds(held)
					ticket.Granted(&lockerr.Holder{})
					time.Sleep(rand.N(20 * time.Microsecond))
					used[held].Store(false)
				}
				ticket.Leave()
			}
		})
	}
	all.Wait()
	if told.Load() == 0 {
		t.Error("nobody was ever told of a slot")
	}
	q.empty(t)
}

// TestAWriterIsAloneAmongManyReaders has readers, writers and users of slots, of whom some give
// up.
func TestAWriterIsAloneAmongManyReaders(t *testing.T) {
	var q Queue
	var readers, writers, users [4]atomic.Int32
	var together atomic.Int32
	limited, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 300 {
				var wants []Key
				if i := rand.N(12); i < 4 {
					wants = []Key{{Name: fmt.Sprint(i), Slots: 2 + rand.N(2)}}
				} else {
					for i := range readers {
						if rand.N(3) == 0 {
							wants = append(wants, Key{Name: fmt.Sprint(i), Shared: rand.N(4) > 0})
						}
					}
				}
				own, stop := limited, func() {}
				if rand.N(3) == 0 {
					own, stop = context.WithTimeout(limited, rand.N(time.Millisecond))
				}
				var ticket *Ticket
				var err error
				if rand.N(4) == 0 {
					ticket, _, _ = q.TryEnter(wants, rand.N(2) == 0)
				} else {
					ticket, err = q.Enter(own, wants, nil, Ends{})
				}
				stop()
				if err != nil && own == limited {
					t.Errorf("nobody comes through: %v", err)
					return
				}
				if ticket == nil {
					continue
				}
				for _, p := range wants {
					i := p.Name[0] - '0'
					switch {
					case p.Slots > 0:
						if n := users[i].Add(1); n > 3 {
							t.Errorf("%d have slots", n)
						}
					case p.Shared:
						if readers[i].Add(1) > 1 {
							together.Add(1)
						}
						if writers[i].Load() > 0 {
							t.Error("a reader is in front together with a writer")
						}
					default:
						if writers[i].Add(1) > 1 || readers[i].Load() > 0 {
							t.Error("a writer is not alone")
						}
					}
				}
				if rand.N(3) > 0 {
					ticket.Granted(&lockerr.Holder{})
				}
				time.Sleep(rand.N(50 * time.Microsecond))
				for _, p := range wants {
					i := p.Name[0] - '0'
					switch {
					case p.Slots > 0:
						users[i].Add(-1)
					case p.Shared:
						readers[i].Add(-1)
					default:
						writers[i].Add(-1)
					}
				}
				ticket.Leave()
			}
		})
	}
	all.Wait()
	if together.Load() == 0 {
		t.Error("no two readers were ever in front together")
	}
	q.empty(t)
}
