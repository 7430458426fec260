package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// result is how the shop stands after a run.
type result struct {
	tally
	how    way
	units  int
	orders int // rows of the order table
	stock  int // left in the product's row
}

func (r result) oversold() int { return r.orders - r.units }

// exact reports that every unit was sold once, and that the row says so.
func (r result) exact() bool {
	return r.orders == r.units && r.stock == 0 && r.Bought == r.orders
}

// verdict says what is wrong with the run, "" if it showed what it is to show.
// Without a lock that is its failure: without it, the others' success means
// nothing.
func (r result) verdict() string {
	switch {
	case r.how != unlocked && !r.exact():
		return fmt.Sprintf("%s was not exact: %d orders for %d units, the buyers count %d, stock left %d",
			r.how, r.orders, r.units, r.Bought, r.stock)
	case r.how == unlocked && r.oversold() <= 0:
		return fmt.Sprintf("%s did not oversell this time (%d orders for %d units), so the comparison shows nothing", r.how, r.orders, r.units)
	}
	return ""
}

// paint is colour for terminals, and nothing elsewhere.
type paint bool

func painter(f *os.File) paint {
	info, err := f.Stat()
	return paint(err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb")
}

func (p paint) red(s string) string   { return p.with("31", s) }
func (p paint) green(s string) string { return p.with("32", s) }
func (p paint) dim(s string) string   { return p.with("2", s) }

func (p paint) with(code, s string) string {
	if !p {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// table prints the results below each other. text/tabwriter would count colour
// as width.
func table(w io.Writer, p paint, results []result) {
	rows := [][]string{{"driver", "units", "orders sold", "stock left", "oversold by", "errors", "wait median", "p99", "longest", "duration"}}
	for _, r := range results {
		rows = append(rows, []string{
			string(r.how), strconv.Itoa(r.units), strconv.Itoa(r.orders), strconv.Itoa(r.stock), strconv.Itoa(r.oversold()), strconv.Itoa(r.Errors),
			millis(quantile(r.Waits, 0.5)), millis(quantile(r.Waits, 0.99)), millis(quantile(r.Waits, 1)), fmt.Sprintf("%.1f s", r.Took.Seconds()),
		})
	}
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	for n, row := range rows {
		var b strings.Builder
		for i, cell := range row {
			if i == 0 {
				fmt.Fprintf(&b, "  %-*s", widths[i], cell)
				continue
			}
			fmt.Fprintf(&b, "  %*s", widths[i], cell)
		}
		switch line := b.String(); {
		case n == 0:
			fmt.Fprintln(w, p.dim(line))
		case results[n-1].exact():
			fmt.Fprintln(w, p.green(line))
		default:
			fmt.Fprintln(w, p.red(line))
		}
	}
	for _, r := range results {
		if r.Errors > 0 {
			fmt.Fprintf(w, "  %s: %d purchases failed; the first: %s\n", r.how, r.Errors, r.Example)
		}
	}
}

// quantile returns the smallest duration that at least the share q is within.
func quantile(durations []time.Duration, q float64) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(durations))
	return sorted[max(0, min(len(sorted)-1, int(math.Ceil(q*float64(len(sorted))))-1))]
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}
