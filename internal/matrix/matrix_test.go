//go:build unix

package matrix

import (
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// atOnce is how many cells run at a time. They do little but wait.
const atOnce = 12

// TestMatrix runs the cells: all of them with MATRIX=all, else as few as visit each pair of
// values of two dimensions. MATRIX=some text runs those whose names have it in them.
func TestMatrix(t *testing.T) {
	t.Parallel()
	all := places(t, tempserver.Require(t))
	cells := possible(all)
	switch asked := os.Getenv("MATRIX"); asked {
	case "all":
	case "":
		cells = pairs(cells)
	default:
		cells = slices.DeleteFunc(cells, func(c cell) bool { return !strings.Contains(c.name(all), asked) })
	}
	t.Logf("%d cells", len(cells))
	each(t, cells, all, func(t *testing.T, c cell) {
		f := faults[c.fault]
		r := c.begin(t, all[c.place])
		f.verify(r, f.run(r))
		r.check()
	})
}

// each runs a test for each cell.
func each(t *testing.T, cells []cell, all []*place, test func(*testing.T, cell)) {
	t.Helper()
	var wg sync.WaitGroup
	turn := make(chan struct{}, atOnce)
	for _, c := range cells {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			t.Run(c.name(all), func(t *testing.T) { test(t, c) })
		})
	}
	wg.Wait()
}

// possible are the cells that can be.
func possible(all []*place) (cells []cell) {
	for s := range strategies {
		for w := range ways {
			for p := range all {
				for k := range conns {
					for f := range faults {
						if c := (cell{s, w, p, k, f}); impossible(c) == "" {
							cells = append(cells, c)
						}
					}
				}
			}
		}
	}
	return cells
}

// pair are values of two dimensions.
type pair struct{ i, v, j, w int }

func (c cell) pairs() (all []pair) {
	at := c.at()
	for i := range at {
		for j := i + 1; j < len(at); j++ {
			all = append(all, pair{i, at[i], j, at[j]})
		}
	}
	return all
}

// pairs are some of the cells: so that each pair of values that is in one of all is in one of
// these, too. It always takes the next cell that has the most new ones.
func pairs(all []cell) (some []cell) {
	left := make(map[pair]bool)
	for _, c := range all {
		for _, p := range c.pairs() {
			left[p] = true
		}
	}
	fresh := func(c cell) (n int) {
		for _, p := range c.pairs() {
			if left[p] {
				n++
			}
		}
		return n
	}
	for len(left) > 0 {
		best := slices.MaxFunc(all, func(a, b cell) int { return fresh(a) - fresh(b) })
		for _, p := range best.pairs() {
			delete(left, p)
		}
		some = append(some, best)
	}
	return some
}
