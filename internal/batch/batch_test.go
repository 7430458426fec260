package batch

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestTheFirstOfAGroupLeadsTheOthers(t *testing.T) {
	var g Group[int]
	if !g.Join(1) || g.Join(2) || g.Join(3) || g.Join(4) {
		t.Error("one leads, the first")
	}
	if !g.Quit(2) || g.Quit(2) {
		t.Error("2 quits once")
	}
	if some, more := g.Depart(2); !slices.Equal(some, []int{1, 3}) || !more || g.Join(5) || !g.ShouldJoin() {
		t.Errorf("%v depart at first, more: %v", some, more)
	}
	g.Quit(4)
	g.Quit(5)
	if some, more := g.Depart(2); len(some) > 0 || more || !g.ShouldJoin() {
		t.Errorf("%v depart after all have quit, more: %v", some, more)
	}
	if !g.Join(6) {
		t.Error("the next one does not lead")
	}
	g.Join(7)
	if g.Depart(2); !g.ShouldJoin() {
		t.Error("where two came together, nobody else is expected")
	}
	g.Join(8)
	if g.Depart(2); g.ShouldJoin() {
		t.Error("where one came alone, others are expected")
	}

	if !g.Join(9) || g.Join(10) || g.Join(11) {
		t.Error("one leads, the first")
	}
	if some := g.Along(2); !slices.Equal(some, []int{9, 10}) || g.Join(12) {
		t.Errorf("%v go along, and nobody leads any more", some)
	}
	g.Along(2)
	if some, more := g.Depart(2); len(some) > 0 || more || !g.ShouldJoin() || !g.Join(13) {
		t.Errorf("%v depart after all have gone along, more: %v", some, more)
	}
}

// TestEachDepartsOnce: whatever happens at the same time, each is led once, by one.
func TestEachDepartsOnce(t *testing.T) {
	var g Group[int]
	const most, all = 7, 20_000
	var departed [all]atomic.Int32
	var quit atomic.Int32
	var callers sync.WaitGroup
	for first := range 8 {
		callers.Go(func() {
			for i := first; i < all; i += 8 {
				leads := g.Join(i)
				if i%5 == 0 && g.Quit(i) {
					quit.Add(1)
					departed[i].Add(1)
				}
				depart := func(some []int) {
					if len(some) > most {
						t.Errorf("%d depart at once", len(some))
					}
					for _, one := range some {
						departed[one].Add(1)
					}
				}
				if i%7 == 0 {
					depart(g.Along(most))
				}
				for more := leads; more; {
					var some []int
					some, more = g.Depart(most)
					depart(some)
				}
			}
		})
	}
	callers.Wait()
	for i := range departed {
		if n := departed[i].Load(); n != 1 {
			t.Fatalf("number %d has departed %d times", i, n)
		}
	}
	if g.led || quit.Load() == 0 {
		t.Errorf("led: %v; %d have quit", g.led, quit.Load())
	}
}
