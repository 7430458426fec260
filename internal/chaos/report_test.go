package chaos

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// cell is what became of one strategy under one fault.
type cell struct {
	tried      int
	results    map[result]int
	violations int
	known      int           // what the strategy does not promise to prevent
	gap        time.Duration // the longest time in which nothing was committed in one account
}

// column is what happened on one topology.
type column struct {
	topology string
	refused  map[string]string // why the driver refuses a strategy there
	rounds   int
	took     time.Duration
	faults   []*fault
	injected map[string]int             // by fault
	cells    map[string]map[string]cell // by strategy and fault
}

// report is what the page says. Tests that run beside each other add to it.
type report struct {
	mu      sync.Mutex
	columns []*column
	wrong   map[string]map[string]time.Duration // when a wrong way was seen, by it and topology
}

var page = report{wrong: make(map[string]map[string]time.Duration)}

func (r *report) saw(way, topology string, after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wrong[way] == nil {
		r.wrong[way] = make(map[string]time.Duration)
	}
	r.wrong[way][topology] = after
}

func (r *report) add(c *column) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.columns = append(r.columns, c)
	slices.SortFunc(r.columns, func(a, b *column) int { return cmp.Compare(a.topology, b.topology) })
}

// count adds the round that has ended on a.
func (c *column) count(a *arena, wrong, known []violation) {
	c.rounds++
	for _, w := range a.windows {
		c.injected[w.fault.name] += w.times
		for _, job := range a.jobs {
			if c.cells[job] == nil {
				c.cells[job] = make(map[string]cell)
			}
			each := c.cells[job][w.fault.name]
			if each.results == nil {
				each.results = make(map[result]int)
			}
			each.count(a.history, w, job, wrong, known)
			c.cells[job][w.fault.name] = each
		}
	}
}

func (c *cell) count(h *history, w *window, job string, wrong, known []violation) {
	during := func(at int64) bool { return w.from <= at && at <= w.back }
	accounts, acknowledged := make(map[string][]string), make(map[string][]int64)
	for _, e := range h.events {
		switch {
		case e.Job != job:
		case e.Kind == kindTry && during(e.Call):
			c.tried++
		case e.Kind == kindCommit:
			accounts[e.Op] = append(accounts[e.Op], e.Key)
		case e.Kind == kindEnd:
			if during(e.Return) {
				c.results[e.Result]++
			}
			for _, key := range accounts[e.Op] {
				if e.Result == done {
					acknowledged[key] = append(acknowledged[key], e.Return)
				}
			}
		}
	}
	for _, times := range acknowledged {
		slices.Sort(times)
		since := w.from
		for _, at := range times {
			if at >= w.from && since <= w.to {
				c.gap = max(c.gap, time.Duration(at-since))
			}
			since = max(since, at)
		}
	}
	for _, v := range wrong {
		if v.Job == job && during(v.At) {
			c.violations++
		}
	}
	for _, v := range known {
		if v.Job == job && during(v.At) {
			c.known++
		}
	}
}

// The generated part of the page is between these.
const (
	begins = "<!-- made by make chaos -->\n"
	ends   = "<!-- the end of what make chaos makes -->\n"
)

// write replaces the generated part of the page at path.
func (r *report) write(path string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, found := bytes.Cut(text, []byte(begins))
	_, after, ended := bytes.Cut(rest, []byte(ends))
	if !found || !ended {
		return fmt.Errorf("%s does not say where the generated part begins and ends", path)
	}
	return os.WriteFile(path, slices.Concat(before, []byte(begins), []byte(r.text()), []byte(ends), after), 0o644)
}

func (r *report) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nMeasured on %s, CHAOS_SEED=%d.\n", time.Now().UTC().Format("2 January 2006"), seed)
	for _, c := range r.columns {
		c.text(&b)
	}
	fmt.Fprintf(&b, "\n### What is done wrong is seen\n\n| done wrong | the fault that shows it | seen after |\n|---|---|---|\n")
	for _, w := range wrongWays {
		var after []string
		for topology, d := range r.wrong[w.job] {
			after = append(after, fmt.Sprintf("%s: %s", topology, seconds(d)))
		}
		slices.Sort(after)
		fmt.Fprintf(&b, "| %s | %s | %s |\n", w.about, w.fault.name, strings.Join(after, "; "))
	}
	b.WriteString("\n")
	return b.String()
}

func (c *column) text(b *strings.Builder) {
	names := make([]string, 0, len(c.cells))
	for _, name := range strategies {
		if c.cells[name] != nil {
			names = append(names, name)
		}
	}
	fmt.Fprintf(b, "\n### %s\n\nRounds of all faults: %d, in %v. Transfers tried, and the longest time in which none was committed under one key:\n\n", c.topology, c.rounds, c.took.Round(time.Second))
	fmt.Fprintf(b, "| fault | injected | %s | violations |\n|---|--:|%s--:|\n", strings.Join(names, " | "), strings.Repeat("--:|", len(names)))
	for _, f := range c.faults {
		violations, line := 0, ""
		if _, was := c.injected[f.name]; !was {
			continue
		}
		for _, name := range names {
			each := c.cells[name][f.name]
			violations += each.violations
			line += fmt.Sprintf(" %d, %s |", each.tried, seconds(each.gap))
		}
		fmt.Fprintf(b, "| %s | %d |%s %d |\n", f.name, c.injected[f.name], line, violations)
	}
	fmt.Fprintf(b, "\n| | tried | committed | refused: someone else has it | lost | conflict, deadlock | the caller gave up | not safe here | no connection, and the like | outcome unknown | violations |\n|---|%s\n", strings.Repeat("--:|", len(results)+2))
	for _, name := range names {
		sum := cell{results: make(map[result]int)}
		for _, each := range c.cells[name] {
			sum.tried += each.tried
			sum.violations += each.violations
			sum.known += each.known
			for r, n := range each.results {
				sum.results[r] += n
			}
		}
		fmt.Fprintf(b, "| %s | %d |", name, sum.tried)
		for _, r := range results {
			fmt.Fprintf(b, " %d |", sum.results[r])
		}
		fmt.Fprintf(b, " %d", sum.violations)
		if sum.known > 0 {
			fmt.Fprintf(b, ", and %d that are not promised", sum.known)
		}
		b.WriteString(" |\n")
	}
	for _, name := range slices.Sorted(maps.Keys(c.refused)) {
		fmt.Fprintf(b, "\n%s is refused: `%s`\n", name, c.refused[name])
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
