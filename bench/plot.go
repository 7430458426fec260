package main

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
	"time"
)

// The files of the plots.
const (
	plotUncontended = "uncontended.svg"
	plotHot         = "hot-key.svg"
	plotHandoff     = "handoff.svg"
	plotNear        = "transaction.svg"
	plotFar         = "transaction-far.svg"
	plotHotRow      = "hot-row.svg"
)

const (
	colourOurs  = "#1f6feb"
	colourRival = "#8c959f"
)

// bar is one contender in a chart.
type bar struct {
	name  string
	ours  bool
	value float64
}

// colour is that of ours, or that which the others have.
func (b bar) colour(others string) string {
	if b.ours {
		return colourOurs
	}
	return others
}

// svg is a drawing that grows.
type svg struct{ strings.Builder }

func newSVG(width, height int, title string) *svg {
	s := &svg{}
	fmt.Fprintf(s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(s, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	s.text(10, 20, "start", "#1f2328", title)
	return s
}

func (s *svg) text(x, y float64, anchor, colour, text string) {
	fmt.Fprintf(s, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, anchor, colour, html.EscapeString(text))
}

func (s *svg) line(x1, y1, x2, y2 float64, colour string) {
	fmt.Fprintf(s, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, colour)
}

func (s *svg) end() string {
	s.WriteString("</svg>\n")
	return s.String()
}

// barChart draws one bar each, on a logarithmic scale between powers of ten.
func barChart(title string, bars []bar) string {
	const left, right, top, step = 250, 90, 36, 20
	const width = 800
	low, high := math.Inf(1), 0.0
	for _, b := range bars {
		low, high = min(low, b.value), max(high, b.value)
	}
	s := newSVG(width, top+step*len(bars)+30, title+" (logarithmic)")
	if len(bars) == 0 {
		return s.end()
	}
	low, high = powerBelow(low), powerAbove(high)
	at := func(v float64) float64 {
		return left + (width-left-right)*(math.Log10(v)-math.Log10(low))/(math.Log10(high)-math.Log10(low))
	}
	bottom := float64(top + step*len(bars))
	for v := low; v <= high*1.01; v *= 10 {
		s.line(at(v), top-4, at(v), bottom, "#d0d7de")
		s.text(at(v), bottom+16, "middle", "#59636e", number(v))
	}
	for i, b := range bars {
		y := float64(top + step*i)
		fmt.Fprintf(s, `<rect x="%d" y="%.1f" width="%.1f" height="%d" fill="%s"/>`+"\n", left, y, max(1, at(b.value)-left), step-6, b.colour(colourRival))
		s.text(left-6, y+11, "end", "#1f2328", b.name)
		s.text(at(b.value)+5, y+11, "start", "#1f2328", number(b.value))
	}
	return s.end()
}

func powerBelow(v float64) float64 { return math.Pow(10, math.Floor(math.Log10(v)-0.01)) }
func powerAbove(v float64) float64 { return math.Pow(10, math.Ceil(math.Log10(v)+0.01)) }

// lineChart draws one line a series over the points, both scales logarithmic.
func lineChart(title string, points []int, series []bar, value func(i, point int) float64) string {
	const left, right, top, height, width = 60, 250, 40, 380, 800
	low, high := math.Inf(1), 0.0
	for i := range series {
		for _, p := range points {
			if v := value(i, p); v > 0 {
				low, high = min(low, v), max(high, v)
			}
		}
	}
	s := newSVG(width, top+height+40, title)
	if high == 0 {
		return s.end()
	}
	low, high = powerBelow(low), powerAbove(high)
	x := func(p int) float64 {
		return left + (width-left-right)*math.Log(float64(p)/float64(points[0]))/math.Log(float64(points[len(points)-1])/float64(points[0]))
	}
	y := func(v float64) float64 {
		return top + height*(1-(math.Log10(v)-math.Log10(low))/(math.Log10(high)-math.Log10(low)))
	}
	for v := low; v <= high*1.01; v *= 10 {
		s.line(left, y(v), width-right, y(v), "#d0d7de")
		s.text(left-6, y(v)+4, "end", "#59636e", number(v))
	}
	for _, p := range points {
		s.text(x(p), top+height+18, "middle", "#59636e", fmt.Sprint(p))
	}
	var names []lineName
	for i, one := range series {
		dash := ""
		if i%2 == 1 {
			dash = ` stroke-dasharray="5 3"`
		}
		var path []string
		end := 0.0
		for _, p := range points {
			if v := value(i, p); v > 0 {
				path = append(path, fmt.Sprintf("%.1f,%.1f", x(p), y(v)))
				end = y(v)
			}
		}
		fmt.Fprintf(s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", strings.Join(path, " "), one.colour(colourRival), dash)
		if len(path) > 0 {
			names = append(names, lineName{one, end})
		}
	}
	s.lineNames(width-right+8, names)
	return s.end()
}

// lineName is the name of a line of a chart, and where the line ends.
type lineName struct {
	bar
	y float64
}

// lineNames writes names from the top down, each as near to its line as it can be
// without overlap.
func (s *svg) lineNames(x float64, names []lineName) {
	slices.SortStableFunc(names, func(a, b lineName) int { return cmp.Compare(a.y, b.y) })
	last := 0.0
	for _, n := range names {
		last = max(n.y+4, last+14)
		s.text(x, last, "start", n.colour("#1f2328"), n.name)
	}
}

// bars are the medians of a figure in one workload, in the order of the tables.
func (r *record) bars(workload string, n int, delay time.Duration, figure string) (all []bar) {
	for _, c := range contenders() {
		if v := r.results.median(label{workload, n, delay, c.Name, c.Server}, figure); !math.IsNaN(v) {
			all = append(all, bar{strings.TrimPrefix(c.Name, "transaction, ") + " · " + c.Server, c.Ours, v})
		}
	}
	return all
}

func (r *record) plotUncontended() string {
	return barChart("Take a lock and give it back, nobody else wants it: µs", r.bars(uncontended, 1, 0, timeEach))
}

func (r *record) plotHandoff() string {
	return barChart("From giving back in one process to having it in another: µs", r.bars(handoff, 1, 0, latency))
}

func (r *record) plotTransaction(delay time.Duration) string {
	title := "BEGIN, UPDATE, COMMIT under a lock: µs"
	if delay > 0 {
		title += fmt.Sprintf(", all servers %v away", delay)
	}
	return barChart(title, r.bars(transaction, 1, delay, timeEach))
}

func (r *record) plotHot() string {
	series := r.bars(hot, 64, 0, rate)
	all := contenders()
	return lineChart("One key, goroutines of one process: grants a second (both axes logarithmic)", loadSizes, series, func(i, n int) float64 {
		for _, c := range all {
			if c.Name+" · "+c.Server == series[i].name {
				return r.results.median(label{hot, n, 0, c.Name, c.Server}, rate)
			}
		}
		return math.NaN()
	})
}

// hotRowDelays are how far away the servers are in the plot of a hot row.
var hotRowDelays = []time.Duration{0, farDelay, 4 * farDelay}

// plotHotRow draws what each of ours sells of a hot row, against FOR UPDATE by hand, over the distance.
func (r *record) plotHotRow() string {
	const left, right, top, height, width, most = 60, 250, 40, 300, 800, 2.0
	x := func(i int) float64 { return left + 30 + float64(i)*(width-left-right-60)/float64(len(hotRowDelays)-1) }
	y := func(v float64) float64 { return top + height*(1-min(v, most)/most) }
	s := newSVG(width, top+height+40, "A hot row, 64 goroutines of one process: sales, × FOR UPDATE by hand, over the distance of the server")
	for v := 0.0; v <= most; v += 0.5 {
		colour := "#d0d7de"
		if v == 1 { // as much as by hand
			colour = colourRival
		}
		s.line(left, y(v), width-right, y(v), colour)
		s.text(left-6, y(v)+4, "end", "#59636e", fmt.Sprint(v))
	}
	for i, delay := range hotRowDelays {
		s.text(x(i), top+height+18, "middle", "#59636e", awayBy(delay))
	}
	var names []lineName
	for _, c := range contenders() {
		if !c.Ours || !slices.Contains(hotRowNames, c.Name) {
			continue
		}
		dash := ""
		if c.Server == onMariaDB {
			dash = ` stroke-dasharray="5 3"`
		}
		var path []string
		end := 0.0
		for i, delay := range hotRowDelays {
			ours := r.results.median(label{hotRow, 64, delay, c.Name, c.Server}, rate)
			byHand := r.results.median(label{hotRow, 64, delay, handLocked, c.Server}, rate)
			if v := ours / byHand; v > 0 && !math.IsInf(v, 0) {
				end = y(v)
				path = append(path, fmt.Sprintf("%.1f,%.1f", x(i), end))
			}
		}
		fmt.Fprintf(s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", strings.Join(path, " "), colourOurs, dash)
		if len(path) > 0 {
			names = append(names, lineName{bar{strings.TrimPrefix(c.Name, "hot row, ") + " · " + c.Server, true, 0}, end})
		}
	}
	s.lineNames(width-right+8, names)
	return s.end()
}

// awayBy says how far away a server is.
func awayBy(delay time.Duration) string {
	if delay == 0 {
		return "near"
	}
	return fmt.Sprintf("%g ms away", float64(delay)/float64(time.Millisecond))
}
