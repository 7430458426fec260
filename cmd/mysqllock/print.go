package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// printable is s without anything that would move the cursor or begin a line:
// keys, and what programs say of themselves, may hold anything.
func printable(s string) string {
	quoted := strconv.QuoteToGraphic(s)
	return strings.ReplaceAll(strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`), `\\`, `\`)
}

// plainKey is a key that a shell leaves as it is.
var plainKey = regexp.MustCompile(`^[A-Za-z0-9_.:/@%+=,-]+$`)

// pasteable is a key in the form in which it can be given to show in a shell.
func pasteable(key string) string {
	quoted := strconv.QuoteToGraphic(key)
	inner := strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
	escapes := strings.Contains(strings.ReplaceAll(inner, `\\`, ""), `\`)
	word := key
	switch {
	case strings.Contains(key, "\x00"): // which no argument has
		return "--hex " + hex.EncodeToString([]byte(key))
	case plainKey.MatchString(key):
	case !escapes && !strings.Contains(key, "'"):
		word = "'" + key + "'"
	default:
		word = "$'" + strings.ReplaceAll(inner, "'", `\'`) + "'"
	}
	if key[0] == '-' {
		return "-- " + word
	}
	return word
}

// colours are for a person at a terminal who has not asked for none.
type colours bool

func coloursFor(w io.Writer) colours {
	_, ok := terminalOf(w)
	return colours(ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb")
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

// terminalOf is the terminal to which w writes. ok is false if it is none.
func terminalOf(w io.Writer) (file *os.File, ok bool) {
	if s, page := w.(*screen); page {
		w = s.of
	}
	if o, standard := w.(*output); standard {
		w = o.File
	}
	file, ok = w.(*os.File)
	return file, ok && term.IsTerminal(int(file.Fd()))
}

// screen gathers what is then shown at once, in place of the text before.
type screen struct {
	bytes.Buffer
	of io.Writer
}

func (s *screen) show() {
	file, ok := terminalOf(s.of)
	if !ok {
		_, _ = s.WriteTo(s.of)
		return
	}
	text := s.String()
	if width, height, err := term.GetSize(int(file.Fd())); err == nil {
		text = cut(text, width, height)
	}
	fmt.Fprint(s.of, "\x1b[H\x1b[2J"+text)
	s.Reset()
}

var colour = regexp.MustCompile("\x1b\\[[0-9]*m")

// cut returns the lines of text that fit into a terminal, and how many do not.
func cut(text string, width, height int) string {
	lines := strings.SplitAfter(text, "\n")
	last := lines[len(lines)-1] // "" after a line end
	lines = lines[:len(lines)-1]
	rows := 0
	for i, line := range lines {
		// The last line is for the rest, and for the cursor.
		rows += 1 + max(0, utf8.RuneCountInString(colour.ReplaceAllString(line, ""))-2)/max(width, 1)
		if rows > height-2 && i < len(lines)-1 || rows > height-1 {
			return strings.Join(lines[:i], "") + fmt.Sprintf("… and %d lines more: ls without --watch, or --top\n", len(lines)-i)
		}
	}
	return strings.Join(lines, "") + last
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

// widthOf is how wide the terminal is; 0 if w is none.
func widthOf(w io.Writer) int {
	if file, ok := terminalOf(w); ok {
		if width, _, err := term.GetSize(int(file.Fd())); err == nil {
			return width
		}
	}
	return 0
}

// narrowest is the narrowest that a column is made.
const narrowest = 10

// dispensable are the columns that are left out of rows that are too wide, in this order. What
// identifies a lock and its holder stays.
var dispensable = []string{"FROM", "TOKEN", "STRATEGY", "CONNECTION"}

// names are the columns whose cells are shortened if the rows are too wide without the dispensable
// columns. The other cells are whole as long as these can be narrower: STATE has the only time of a lease.
var names = []string{"KEY", "KEYS", "WHO", "FOR"}

// fitted returns rows that fit into a width of so many characters, if that is possible, and says
// what is not shown therefore. The width 0 is any. Long cells are shortened in the middle: their ends
// tell them apart.
func fitted(rows [][]string, width int) (out [][]string, leftOut string) {
	if width == 0 {
		return rows, ""
	}
	for _, row := range rows {
		cells := make([]string, len(row))
		for j, cell := range row {
			cells[j] = printable(cell)
		}
		out = append(out, cells)
	}
	var gone, short []string
	for _, name := range dispensable {
		column := slices.Index(out[0], name)
		if total(out, width, nil) <= width || column < 0 {
			continue
		}
		who := slices.Index(out[0], "WHO")
		for i := range out {
			if name == "CONNECTION" && who >= 0 && out[i][who] == "" && out[i][column] != "" {
				out[i][who] = "connection " + out[i][column] // nothing else tells who it is
			}
			out[i] = slices.Delete(out[i], column, column+1)
		}
		gone = append(gone, name)
	}
	shortened := names
	if total(out, narrowest, names) > width {
		shortened = out[0]
	}
	most := narrowest // of a cell there
	for most < width && total(out, most+1, shortened) <= width {
		most++
	}
	for j, name := range out[0] {
		for i := range out {
			whole := out[i][j]
			if slices.Contains(shortened, name) {
				out[i][j] = middle(whole, most)
			}
			if out[i][j] != whole && !slices.Contains(short, name) {
				short = append(short, name)
			}
		}
	}
	return out, notShown(gone, short)
}

// notShown says which columns are left out, and which have shortened cells.
func notShown(gone, short []string) string {
	var parts []string
	if len(gone) > 0 {
		parts = append(parts, "left out: "+strings.Join(gone, ", "))
	}
	if len(short) > 0 {
		parts = append(parts, "shortened: "+strings.Join(short, ", "))
	}
	if len(parts) == 0 {
		return ""
	}
	return strings.Join(parts, "; ") + " (the terminal is too narrow; --wide has all)"
}

// total is how wide rows are if no cell of the columns shortened is wider than most.
func total(rows [][]string, most int, shortened []string) (sum int) {
	for column, name := range rows[0] {
		widest := 0
		for _, row := range rows {
			n := utf8.RuneCountInString(row[column])
			if slices.Contains(shortened, name) {
				n = min(n, most)
			}
			widest = max(widest, n)
		}
		sum += widest + 2
	}
	return sum - 2
}

// middle shortens s in the middle to so many characters.
func middle(s string, most int) string {
	runes := []rune(s)
	if len(runes) <= most {
		return s
	}
	head := most / 2
	return string(runes[:head]) + "…" + string(runes[len(runes)-(most-head-1):])
}

// wrapped breaks a line between words, so that it fits into a width; 0 is any width.
func wrapped(line string, width int, indent string) string {
	if width == 0 {
		return line
	}
	var out []string
	for {
		runes := []rune(line)
		if len(runes) <= width {
			return strings.Join(append(out, line), "\n")
		}
		cut := width
		if i := strings.LastIndexByte(string(runes[:width+1]), ' '); i > len(indent) {
			cut = utf8.RuneCountInString(string(runes[:width+1])[:i])
		}
		out = append(out, string(runes[:cut]))
		line = indent + strings.TrimLeft(string(runes[cut:]), " ")
		if width <= len(indent) {
			return strings.Join(append(out, line), "\n")
		}
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
		return strings.Replace(d.Round(time.Second).String(), "m0s", "m", 1)
	case d < 24*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
