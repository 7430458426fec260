package queue

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// crowd are callers with names, of whom each notes when it comes to the front.
type crowd struct {
	t       *testing.T
	q       *Queue
	mu      sync.Mutex         // of those who come to the front together
	tickets map[string]*Ticket // of those in front
	cancels map[string]context.CancelFunc
}

func newCrowd(t *testing.T) *crowd {
	return &crowd{t: t, q: new(Queue), tickets: make(map[string]*Ticket), cancels: make(map[string]context.CancelFunc)}
}

// comes lets somebody come, to whom others may come next.
func (c *crowd) comes(who string, entries ...Entry) {
	own, cancel := context.WithCancel(ctx)
	c.cancels[who] = cancel
	go func() {
		if ticket, err := c.q.EnterAs(own, entries); err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.tickets[who] = ticket
		}
	}()
	synctest.Wait()
}

func (c *crowd) granted(who string) {
	c.tickets[who].Granted(&lockerr.Holder{Program: who})
	synctest.Wait()
}

func (c *crowd) leaves(who string) {
	ticket := c.tickets[who]
	delete(c.tickets, who)
	ticket.Leave()
	synctest.Wait()
}

func (c *crowd) givesUp(who string) {
	c.cancels[who]()
	synctest.Wait()
}

// want checks who is in front.
func (c *crowd) want(names string) {
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

func (c *crowd) end() {
	for _, cancel := range c.cancels {
		cancel()
	}
	synctest.Wait()
	for who := range c.tickets {
		c.leaves(who)
	}
	c.q.empty(c.t)
}

var reader, writer = Entry{Key: "k", Shared: true}, Entry{Key: "k"}

// TestReadersGoTogether: the first of them alone, until it holds the key.
func TestReadersGoTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.comes("r2", reader)
		c.comes("r3", reader)
		c.want("r1")
		c.granted("r1")
		c.want("r1 r2 r3")
		c.comes("r4", reader) // r2 and r3 do not know yet whether they get it
		c.want("r1 r2 r3")
		c.granted("r2")
		c.want("r1 r2 r3")
		c.leaves("r3") // without having got it
		c.want("r1 r2 r4")
		c.granted("r4")
		c.comes("r5", reader)
		c.want("r1 r2 r4 r5")
		c.leaves("r1")
		c.leaves("r2")
		c.leaves("r4")
		c.comes("r6", reader)
		c.want("r5")
		c.leaves("r5") // without having got it, and the next finds out for itself
		c.want("r6")
		c.granted("r6")
		c.comes("r7", reader)
		c.granted("r7")
		c.leaves("r6")
		c.comes("r8", reader)
		c.want("r7 r8")
		c.end()
	})
}

func TestNobodyPassesAWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.granted("r1")
		c.comes("r2", reader)
		c.comes("w1", writer)
		c.comes("r3", reader)
		c.comes("r4", reader)
		c.comes("w2", writer)
		c.comes("r5", reader)
		c.want("r1 r2")
		c.granted("r2")
		c.want("r1 r2")
		if _, _, ok := c.q.TryEnterAs([]Entry{reader}, true); ok {
			t.Error("a reader slipped past a writer that waits")
		}
		c.leaves("r1")
		c.want("r2")
		c.leaves("r2")
		c.want("w1")
		c.granted("w1")
		c.want("w1")
		c.leaves("w1")
		c.want("r3")
		c.granted("r3")
		c.want("r3 r4")
		c.granted("r4")
		c.leaves("r3")
		c.leaves("r4")
		c.want("w2")
		c.leaves("w2")
		c.want("r5")
		c.end()
	})
}

// TestWriterGivesUp: readers behind it go together with those before it.
func TestWriterGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.granted("r1")
		c.comes("w1", writer)
		c.comes("r2", reader)
		c.comes("r3", reader)
		c.comes("w2", writer)
		c.givesUp("w1")
		c.want("r1 r2 r3")
		c.givesUp("w2")
		c.want("r1 r2 r3")
		c.end()
	})
}

// TestPassing: who does not wait need not know whether the readers before it get
// the key.
func TestPassing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.comes("r2", reader)
		if _, _, ok := c.q.TryEnterAs([]Entry{reader}, false); ok {
			t.Error("somebody who may wait came to the front before the first reader has the key")
		}
		passing, _, ok := c.q.TryEnterAs([]Entry{reader}, true)
		if !ok {
			t.Fatal("among readers, a reader that does not wait is not let in")
		}
		if _, _, ok := c.q.TryEnterAs([]Entry{writer}, true); ok {
			t.Error("a writer is in front together with readers")
		}
		passing.Leave()
		c.leaves("r1")
		c.want("r2")
		c.end()

		c.comes("w", writer)
		if _, _, ok := c.q.TryEnterAs([]Entry{reader}, true); ok {
			t.Error("a reader is in front together with a writer")
		}
		c.end()
	})
}

// TestPassingReadersStarveNobody who waits, although there is always one of them
// in front of whom it is not known whether it gets the key.
func TestPassingReadersStarveNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.comes("r2", reader)
		var passing *Ticket
		for i := range 1000 {
			next, _, ok := c.q.TryEnterAs([]Entry{reader}, true)
			if !ok {
				t.Fatal("among readers, a reader that does not wait is not let in")
			}
			if i%2 == 1 {
				next.Granted(&lockerr.Holder{Program: "passing"})
			}
			passing.Leave()
			passing = next
			if i == 100 {
				c.comes("r3", reader)
				c.want("r1")
				c.leaves("r1") // without having got it, so that the next finds out for itself
				c.want("r2")
			}
		}
		passing.Granted(&lockerr.Holder{})
		c.want("r2")
		c.granted("r2")
		c.want("r2 r3")
		passing.Leave()
		c.end()

		passing, _, _ = c.q.TryEnterAs([]Entry{reader}, true)
		c.comes("r1", reader)
		c.want("r1")
		passing.Leave()
		c.end()

		// A writer is waited for.
		passing, _, _ = c.q.TryEnterAs([]Entry{reader}, true)
		c.comes("w", writer)
		c.comes("r1", reader)
		c.want("")
		if _, _, ok := c.q.TryEnterAs([]Entry{reader}, true); ok {
			t.Error("a reader slipped past a writer that waits")
		}
		passing.Leave()
		synctest.Wait()
		c.want("w")
		c.end()
	})
}

// TestKeysAndReaders: somebody is in front of one line while it waits in another.
func TestKeysAndReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("w", Entry{Key: "b"})
		c.comes("r1", Entry{Key: "a", Shared: true}, Entry{Key: "b", Shared: true})
		c.comes("r2", Entry{Key: "a", Shared: true})
		c.want("w")
		c.givesUp("r1")
		c.want("r2 w")
		c.comes("r3", Entry{Key: "a", Shared: true}, Entry{Key: "b", Shared: true}, Entry{Key: "c"})
		c.granted("r2")
		c.leaves("w")
		c.want("r2 r3")
		c.granted("r3")
		c.granted("r3") // once more
		c.comes("r4", Entry{Key: "a", Shared: true}, Entry{Key: "b", Shared: true})
		c.comes("r5", Entry{Key: "c", Shared: true})
		c.want("r2 r3 r4")
		c.end()
	})
}

func TestHolderOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.granted("r1")
		c.comes("r2", reader)
		c.granted("r2")
		c.comes("r3", reader)
		c.leaves("r1")
		if h := c.q.Holder("k"); h == nil || h.Program != "r2" {
			t.Errorf("the holder is %v", h)
		}
		if _, h, ok := c.q.TryEnter([]string{"k"}); ok || h == nil || h.Program != "r2" {
			t.Errorf("the holder is %v", h)
		}
		c.leaves("r2")
		if h := c.q.Holder("k"); h != nil {
			t.Errorf("who does not hold it yet is %v", h)
		}
		if h, _ := c.q.HolderOf(Entry{Key: "k", Slots: 1}); h != nil {
			t.Errorf("nobody is %v", h)
		}
		c.end()
	})
}

// TestSharedIsNotHandedOver: others would still hold what the next is given.
func TestSharedIsNotHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		c.comes("r1", reader)
		c.granted("r1")
		c.comes("r2", reader)
		own, cancel := context.WithCancel(ctx)
		go func() {
			if ticket := c.q.Succeed(own, "k", "us", Ends{}); ticket != nil {
				ticket.Leave()
			}
		}()
		synctest.Wait()
		if c.tickets["r1"].HandOver("us", "lock") {
			t.Error("it was handed over")
		}
		cancel()
		c.end()
	})
}

func slots(n int) Entry { return Entry{Key: "k", Slots: n} }

func TestSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		for _, who := range []string{"a", "b", "c", "d", "e"} {
			c.comes(who, slots(3))
		}
		c.want("a b c")
		if _, _, ok := c.q.TryEnterAs([]Entry{slots(3)}, true); ok {
			t.Error("there is no slot for one more")
		}
		c.granted("b")
		if _, h, _ := c.q.TryEnterAs([]Entry{slots(3)}, true); h == nil || h.Program != "b" {
			t.Errorf("the holder is %v", h)
		}
		c.want("a b c")
		c.leaves("b")
		c.want("a c d")
		c.comes("w", writer) // a line of its own
		c.want("a c d w")
		c.leaves("a")
		c.leaves("c")
		c.leaves("d")
		c.want("e w")
		c.end()
	})
}

// TestSlotsChange: each comes to the front when fewer than its own number are
// there, and nobody passes another.
func TestSlotsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
		for _, who := range []string{"a", "b", "c", "d", "e"} {
			c.comes(who, slots(5))
		}
		c.want("a b c d e")
		c.comes("f", slots(3))
		c.comes("g", slots(5))
		c.leaves("a")
		c.leaves("b")
		c.want("c d e")
		c.leaves("c")
		c.want("d e f g")
		c.comes("h", slots(3))
		c.comes("i", slots(6))
		c.want("d e f g")
		c.givesUp("h")
		c.want("d e f g i")
		c.comes("j", slots(6))
		c.want("d e f g i j")
		c.end()
	})
}

// wantFree checks which slot somebody is told of.
func (c *crowd) wantFree(who string, want int) {
	c.t.Helper()
	if got := c.tickets[who].Free(); got != want {
		c.t.Errorf("%s finds slot %d free, not %d", who, got, want)
	}
}

// wantFreed checks who would stop waiting now, of those in front.
func (c *crowd) wantFreed(names string) {
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

func (c *crowd) wantTaken(who string, want ...int) {
	c.t.Helper()
	got := c.tickets[who].Taken()
	if slices.Sort(got); !slices.Equal(got, want) {
		c.t.Errorf("to %s the slots %v are taken, not %v", who, got, want)
	}
}

// TestSlotsGivenBack are told to those who come next, the last one first.
func TestSlotsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t)
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
		c.leaves("a")
		c.leaves("c")
		c.comes("f", slots(4))
		c.wantFree("f", 2)
		c.comes("g", slots(1)) // two are there
		c.want("d e f")
		c.givesUp("g")
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
		c := newCrowd(t)
		enters := func(who string, passing bool) {
			t.Helper()
			ticket, _, ok := c.q.TryEnterAs([]Entry{slots(5)}, passing)
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

// TestSlotsStorm has many who take slots and wait for nothing but to be told of
// one.
func TestSlotsStorm(t *testing.T) {
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
				ticket, err := q.EnterAs(limited, []Entry{place})
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

// TestSharedStorm has readers, writers and users of slots, of whom some give up.
func TestSharedStorm(t *testing.T) {
	var q Queue
	var readers, writers, users [4]atomic.Int32
	var together atomic.Int32
	limited, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 300 {
				var entries []Entry
				if i := rand.N(12); i < 4 {
					entries = []Entry{{Key: fmt.Sprint(i), Slots: 2 + rand.N(2)}}
				} else {
					for i := range readers {
						if rand.N(3) == 0 {
							entries = append(entries, Entry{Key: fmt.Sprint(i), Shared: rand.N(4) > 0})
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
					ticket, _, _ = q.TryEnterAs(entries, rand.N(2) == 0)
				} else {
					ticket, err = q.EnterAs(own, entries)
				}
				stop()
				if err != nil && own == limited {
					t.Errorf("nobody comes through: %v", err)
					return
				}
				if ticket == nil {
					continue
				}
				for _, p := range entries {
					i := p.Key[0] - '0'
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
				for _, p := range entries {
					i := p.Key[0] - '0'
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
