package main

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
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

// scale is how an axis places values. A logarithmic one has 0, if at all, at low.
type scale struct {
	linear    bool
	low, high float64
}

// at is where a value stands, from 0 at low to 1 at high; a single one stands in the middle.
func (s scale) at(v float64) float64 {
	switch {
	case s.low == s.high:
		return 0.5
	case s.linear:
		return (v - s.low) / (s.high - s.low)
	}
	return math.Log(max(v, s.low)/s.low) / math.Log(s.high/s.low)
}

// shows reports whether a value has a place.
func (s scale) shows(v float64) bool { return !math.IsInf(v, 0) && (v > 0 || v == 0 && s.linear) }

// ticks are the values that have a line: powers of ten, or at most nine, evenly apart.
func (s scale) ticks() (all []float64) {
	if !s.linear {
		for v := s.low; v <= s.high*1.01; v *= 10 {
			all = append(all, v)
		}
		return all
	}
	step := 0.5
	for s.high > 8*step {
		step *= 2
	}
	for v := s.low; v <= s.high; v += step {
		all = append(all, v)
	}
	return all
}

// text is how the axis names a value.
func (s scale) text(v float64) string {
	if s.linear {
		return fmt.Sprint(v)
	}
	return number(v)
}

// pointScale is a logarithmic scale of points. If the first is 0, it stands as far before the second as the third stands behind it.
func pointScale(points []float64) scale {
	s := scale{low: points[0], high: points[len(points)-1]}
	switch {
	case s.low > 0 || s.high == 0:
	case len(points) == 2:
		s.low = s.high / 2
	default:
		s.low = points[1] * points[1] / points[2]
	}
	return s
}

// lineChart is a drawing with a line for each series over the points, which stand on a logarithmic scale.
type lineChart struct {
	title  string
	height float64
	inset  float64 // of the first and the last point, from the ends of the axis
	points []float64
	label  func(point float64) string
	linear bool    // the scale of values, from 0 on; else it is logarithmic, between powers of ten
	most   float64 // what a linear scale goes up to, or to what is drawn beyond that
	normal float64 // the value whose line stands out; 0 for none
	series []series
}

// series is a line of a chart.
type series struct {
	bar
	dashed bool
	values []float64 // one for each point; NaN where nothing was measured
}

// valueScale is the scale of what the series have; ok is false if it is logarithmic and they have nothing.
func (c lineChart) valueScale() (s scale, ok bool) {
	s = scale{linear: c.linear, low: math.Inf(1)}
	for _, one := range c.series {
		for _, v := range one.values {
			if s.shows(v) {
				s.low, s.high = min(s.low, v), max(s.high, v)
			}
		}
	}
	if c.linear {
		return scale{true, 0, max(c.most, math.Ceil(2*s.high)/2)}, true
	}
	return scale{false, powerBelow(s.low), powerAbove(s.high)}, s.high > 0
}

func (c lineChart) draw() string {
	const top, width = 40, 490 // of the space for the lines
	values, ok := c.valueScale()
	left, right := 60, 250
	if ok {
		for _, v := range values.ticks() {
			left = max(left, 8*len(values.text(v))+6)
		}
	}
	for _, one := range c.series {
		right = max(right, 7*utf8.RuneCountInString(one.name)+8)
	}
	s := newSVG(left+width+right, int(top+c.height)+40, c.title)
	if !ok {
		return s.end()
	}
	from, to := float64(left), float64(left+width)
	points := pointScale(c.points)
	x := func(point float64) float64 { return from + c.inset + (width-2*c.inset)*points.at(point) }
	y := func(v float64) float64 { return top + c.height*(1-values.at(v)) }
	for _, v := range values.ticks() {
		colour := "#d0d7de"
		if v > 0 && v == c.normal {
			colour = colourRival
		}
		s.line(from, y(v), to, y(v), colour)
		s.text(from-6, y(v)+4, "end", "#59636e", values.text(v))
	}
	for _, p := range c.points {
		s.text(x(p), top+c.height+18, "middle", "#59636e", c.label(p))
	}
	var names []lineName
	for _, one := range c.series {
		var path []string
		end := 0.0
		for i, v := range one.values {
			if values.shows(v) {
				end = y(v)
				path = append(path, fmt.Sprintf("%.1f,%.1f", x(c.points[i]), end))
			}
		}
		if len(path) > 0 {
			s.path(path, one.colour(colourRival), one.dashed)
			names = append(names, lineName{one.bar, end})
		}
	}
	s.lineNames(to+8, names)
	return s.end()
}

// path draws a line through points.
func (s *svg) path(points []string, colour string, dashed bool) {
	dash := ""
	if dashed {
		dash = ` stroke-dasharray="5 3"`
	}
	fmt.Fprintf(s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", strings.Join(points, " "), colour, dash)
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
	c := lineChart{
		title: "One key, goroutines of one process: grants a second (both axes logarithmic)", height: 380,
		label: func(n float64) string { return fmt.Sprint(n) },
	}
	for _, n := range loadSizes {
		c.points = append(c.points, float64(n))
	}
	for _, x := range contenders() {
		if !math.IsNaN(r.results.median(label{hot, 64, 0, x.Name, x.Server}, rate)) {
			one := series{bar: bar{name: x.Name + " · " + x.Server, ours: x.Ours}, dashed: len(c.series)%2 == 1}
			for _, n := range loadSizes {
				one.values = append(one.values, r.results.median(label{hot, n, 0, x.Name, x.Server}, rate))
			}
			c.series = append(c.series, one)
		}
	}
	return c.draw()
}

// hotRowDelays are how far away the servers are in the plot of a hot row.
var hotRowDelays = []time.Duration{0, farDelay, 4 * farDelay}

// plotHotRow draws what each of ours sells of a hot row, against FOR UPDATE by hand, over the distance.
func (r *record) plotHotRow() string {
	c := lineChart{
		title:  "A hot row, 64 goroutines of one process: sales, × FOR UPDATE by hand, over the distance of the server",
		height: 300, inset: 30, linear: true, most: 2, normal: 1,
		label: func(delay float64) string { return awayBy(time.Duration(delay)) },
	}
	for _, delay := range hotRowDelays {
		c.points = append(c.points, float64(delay))
	}
	for _, x := range contenders() {
		if !x.Ours || !slices.Contains(hotRowNames, x.Name) {
			continue
		}
		one := series{bar: bar{name: strings.TrimPrefix(x.Name, "hot row, ") + " · " + x.Server, ours: true}, dashed: x.Server == onMariaDB}
		for _, delay := range hotRowDelays {
			at := hotPlace{of: label{Workload: hotRow, N: 64, Delay: delay}}
			one.values = append(one.values, at.against(handLocked, x.Name)(r, x.Server))
		}
		c.series = append(c.series, one)
	}
	return c.draw()
}

// awayBy says how far away a server is.
func awayBy(delay time.Duration) string {
	if delay == 0 {
		return "near"
	}
	return fmt.Sprintf("%g ms away", float64(delay)/float64(time.Millisecond))
}
