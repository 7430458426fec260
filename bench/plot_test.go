package main

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"
)

func TestAChartPlacesEachValueByItsScale(t *testing.T) {
	none := math.NaN()
	toTwo, inset := lineChart{linear: true, most: 2}, lineChart{linear: true, most: 2, inset: 30}
	for _, test := range []struct {
		name   string
		c      lineChart
		points []float64
		values []float64
		want   string // the line
	}{
		{"linear, from 0", toTwo, []float64{1, 10, 100}, []float64{0, 1, 2}, "60.0,140.0 305.0,90.0 550.0,40.0"},
		{"linear, beyond what it goes up to as a rule", toTwo, []float64{1, 10, 100}, []float64{0, 1, 3.7}, "60.0,140.0 305.0,115.0 550.0,47.5"},
		{"linear, without a figure in between", toTwo, []float64{1, 10, 100}, []float64{1, none, 2}, "60.0,90.0 550.0,40.0"},
		{"linear, against nothing", toTwo, []float64{1, 10}, []float64{1, math.Inf(1)}, "60.0,90.0"},
		{"logarithmic", lineChart{}, []float64{1, 10, 100}, []float64{10, 100, 50}, "60.0,106.7 305.0,73.3 550.0,83.4"},
		{"logarithmic, which has no place for 0", lineChart{}, []float64{1, 10, 100}, []float64{0, 100, 10}, "305.0,73.3 550.0,106.7"},
		{"a point at 0 of two", toTwo, []float64{0, 1}, []float64{1, 1}, "60.0,90.0 550.0,90.0"},
		{"a point at 0", toTwo, []float64{0, 1, 4}, []float64{1, 1, 1}, "60.0,90.0 305.0,90.0 550.0,90.0"},
		{"a point at 0 of four", toTwo, []float64{0, 1, 4, 16}, []float64{1, 1, 1, 1}, "60.0,90.0 223.3,90.0 386.7,90.0 550.0,90.0"},
		{"points off the ends of the axis", inset, []float64{1, 10, 100}, []float64{1, 1, 1}, "90.0,90.0 305.0,90.0 520.0,90.0"},
		{"one point", lineChart{}, []float64{8}, []float64{20}, "305.0,109.9"},
		{"nothing", toTwo, []float64{1, 10}, []float64{none, none}, ""},
		{"nothing, on a logarithmic scale", lineChart{}, []float64{1, 10}, []float64{0, none}, ""},
	} {
		c := test.c
		c.height, c.points = 100, test.points
		c.label = func(point float64) string { return fmt.Sprint(point) }
		c.series = []series{{bar: bar{name: "a"}, values: test.values}}
		drawing := c.draw()
		got := ""
		if line := regexp.MustCompile(`<polyline points="([^"]*)"`).FindStringSubmatch(drawing); line != nil {
			got = line[1]
		}
		if got != test.want || strings.Contains(drawing, "NaN") || strings.Contains(drawing, "Inf") {
			t.Errorf("%s: the line is %q, want %q, in\n%s", test.name, got, test.want, drawing)
		}
	}
}

func TestAChartHasRoomForItsTexts(t *testing.T) {
	widths := regexp.MustCompile(`^<svg [^>]* width="(\d+)"`)
	draw := func(name string, most float64) (width int, drawing string) {
		c := lineChart{height: 100, points: []float64{1, 10}, label: func(float64) string { return "" }}
		c.series = []series{{bar: bar{name: name}, values: []float64{1, most}}}
		drawing = c.draw()
		_, err := fmt.Sscan(widths.FindStringSubmatch(drawing)[1], &width)
		if err != nil {
			t.Fatal(err)
		}
		return width, drawing
	}
	if width, _ := draw("a short name", 10); width != 800 {
		t.Errorf("a chart with a short name is %d wide, want 800", width)
	}
	if width, _ := draw(strings.Repeat("wide", 12), 10); width < 550+8+48*7 {
		t.Errorf("a chart with a name of 48 letters is %d wide", width)
	}
	if _, drawing := draw("a", 2e6); !strings.Contains(drawing, `<text x="64.0" y="44.0" text-anchor="end" fill="#59636e">10000000</text>`) {
		t.Errorf("eight digits do not end 64 from the edge, which they need, in\n%s", drawing)
	}
}
