package main

import (
	"math"
	"slices"
	"time"
)

// label says what a figure is of.
type label struct {
	Workload  string
	N         int // goroutines, or holds
	Delay     time.Duration
	Contender string
	Server    string
}

// results are all that was measured, one number a round.
type results struct {
	order  []label // as first filed
	values map[label]map[string][]float64
}

func (r *results) add(l label, figure string, value float64) {
	if r.values == nil {
		r.values = make(map[label]map[string][]float64)
	}
	if r.values[l] == nil {
		r.values[l] = make(map[string][]float64)
		r.order = append(r.order, l)
	}
	r.values[l][figure] = append(r.values[l][figure], value)
}

// median returns NaN where nothing was measured.
func (r *results) median(l label, figure string) float64 {
	return quantile(r.values[l][figure], 0.5)
}

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low == len(sorted)-1 {
		return sorted[low]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}
