package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

// printable is s without anything that would move the cursor or begin a line:
// keys, and what programs say of themselves, may hold anything.
func printable(s string) string {
	quoted := strconv.QuoteToGraphic(s)
	return strings.ReplaceAll(strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`), `\\`, `\`)
}

// colours are for a person at a terminal who has not asked for none.
type colours bool

func coloursFor(w io.Writer) colours {
	file, ok := w.(*os.File)
	return colours(ok && term.IsTerminal(int(file.Fd())) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb")
}

func (c colours) bold(s string) string   { return c.with("1", s) }
func (c colours) red(s string) string    { return c.with("31", s) }
func (c colours) green(s string) string  { return c.with("32", s) }
func (c colours) yellow(s string) string { return c.with("33", s) }
func (c colours) dim(s string) string    { return c.with("2", s) }

func (c colours) with(code, s string) string {
	if !c {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// table writes rows below each other, the first being the head. Cells are made
// printable; paint, which may be nil, colours the i-th row.
func table(w io.Writer, c colours, rows [][]string, paint func(i int, line string) string) {
	var b bytes.Buffer
	columns := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0) // would count colour as width
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = printable(cell)
		}
		fmt.Fprintln(columns, strings.Join(cells, "\t"))
	}
	_ = columns.Flush() // to memory
	for i, line := range strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n") {
		line = strings.TrimRight(line, " ")
		switch {
		case i == 0:
			line = c.bold(line)
		case paint != nil:
			line = paint(i, line)
		}
		fmt.Fprintln(w, line)
	}
}

// printJSON writes v for programs, indented for people who look.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// brief is a duration in at most two units.
func brief(d time.Duration) string {
	switch {
	case d <= 0:
		return ""
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return strings.TrimSuffix(d.Round(time.Second).String(), "0s")
	case d < 24*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
