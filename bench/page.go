package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// page is docs/performance.md.
func (r *record) page() string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n\n", args...) }

	say("# Performance")
	say("mysqllock against what its users would pick instead. This page, [the figures](performance/figures.md) behind it, with more contenders, and [all that was measured](performance/results.json) are made by `make bench`.")
	say("All [contenders](performance/figures.md#the-contenders) run on [one machine](performance/figures.md#how-it-was-measured) and take turns in short rounds; their connections are open and warm. Figures are medians over the rounds, comparisons ratios of medians. Redis keeps locks in memory alone; MySQL, MariaDB and etcd sync each commit to disk.")
	if len(r.Missing) > 0 {
		say("Not installed, so not compared: %s.", strings.Join(r.Missing, ", "))
	}
	if busyMachine(r.Machine.LoadBefore, r.Machine.Cores) {
		say("**The machine was busy with other work (load %s when the run began): do not rely on the figures below.**", r.Machine.LoadBefore)
	}
	b.WriteString(r.opening())

	say("## Run it")
	say("On Debian or Ubuntu as root, or with `redis-server`, `etcd`, MySQL and MariaDB installed:")
	b.WriteString("```sh\nmake bench                  # about 25 minutes\nBENCH_TIME=1h make bench    # more rounds\n```\n")
	return b.String()
}

// tables is docs/performance/figures.md.
func (r *record) tables() string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n\n", args...) }

	say("# The figures behind Performance")
	say("Made by `make bench`. [Performance](../performance.md) has what to decide by.")
	say("- [What is slower and what is faster](#what-is-slower-and-what-is-faster)\n- [Goals](#goals)\n- [The figures](#the-figures)\n- [The contenders](#the-contenders)\n- [How it was measured](#how-it-was-measured)")

	say("## What is slower and what is faster")
	say("Each strategy against the rivals on the same server, and against those on Redis and etcd. The factor says how many times as slow, or as fast, mysqllock is. Within 5 %% either way it is about even.")
	for _, c := range comparisons {
		b.WriteString(r.compare(c))
	}

	say("## Goals")
	say("What the driver aims at, and what this run measured.")
	lines := [][]string{{"goal", "server", "aim", "measured", ""}}
	for _, o := range r.goals() {
		met := "met"
		if !o.Met {
			met = "**missed**"
			if o.Why != "" {
				met += ": " + o.Why
			}
		}
		lines = append(lines, []string{o.What, o.Server, o.aim(), number(o.Got), met})
	}
	b.WriteString(markdown(lines, "llrrl"))

	say("## The figures")
	say("### Nobody else wants the key")
	say("One goroutine takes a lock and gives it back. A request is a statement for MySQL and MariaDB. The columns with a delay have a proxy before every server that delays what passes, each way.")
	say("![](%s)", plotUncontended)
	b.WriteString(r.table(append(slices.Clip(alone), notesMany), []column{
		{"µs", label{Workload: uncontended, N: 1}, timeEach, ""},
		{"× two bare round trips", label{Workload: uncontended, N: 1}, timeEach, bare},
		{"requests", label{Workload: uncontended, N: 1}, statements, ""},
		{"0.5 ms away, µs", label{Workload: uncontended, N: 1, Delay: farDelay}, timeEach, ""},
		{"2 ms away, µs", label{Workload: uncontended, N: 1, Delay: 4 * farDelay}, timeEach, ""},
		{"64 goroutines, a key each: locks/s", label{Workload: distinct, N: 64}, rate, ""},
	}))

	say("### A business transaction")
	say("BEGIN, `UPDATE products SET stock = stock - 1 WHERE id = 1`, COMMIT, by one goroutine; the row is in the named server, and Redis and etcd are as far away as it.")
	say("![](%s)\n\n![](%s)", plotNear, plotFar)
	b.WriteString(r.table(transactionNames(), nearAndFar(transaction, "transaction, "+unlocked)))

	say("### One product that all sell")
	say("The same by 64 goroutines of one process.")
	b.WriteString(r.table(busyNames, sales()))

	say("### Read, then write, without a transaction")
	say("A SELECT and an UPDATE of the same row, by one goroutine: two round trips without a lock. Under a row lock the SELECT waits for BEGIN with the lock, and the UPDATE is followed by COMMIT.")
	b.WriteString(r.table(apartNames, nearAndFar(decision, apart)))

	say("### A write without a transaction")
	say("`UPDATE products SET stock = stock - 1 WHERE id = 1`, by one goroutine: one round trip without a lock. It has no arguments, so the driver can put it beside its own statements.")
	b.WriteString(r.table(wroteNames, nearAndFar(oneWrite, wrote)))

	say("### Without a hint")
	say("The same work on the bare driver and on mysqllock where the context has no hint.")
	b.WriteString(r.table(plainNames, []column{
		{"µs", label{Workload: withoutHint, N: 1}, timeEach, ""},
		{"allocations", label{Workload: withoutHint, N: 1}, allocated, ""},
	}))

	say("### Few connections")
	say("100 goroutines read the stock of one product, think for a millisecond and write it; 24 do so on four keys, with `BeginTx`, `Do`, and without a transaction; 64 run a query without a hint; 64 read and write a product of their own in a transaction, every other one under a lock.")
	for _, w := range []struct {
		workload string
		n        int
		names    []string
	}{{oneKey, 100, oneKeyNames}, {fourKeys, 24, fourKeysNames}, {bounded, 64, boundedNames}, {fullBudget, 64, fullNames}} {
		l := label{Workload: w.workload, N: w.n}
		b.WriteString(r.table(w.names, []column{
			{"units/s", l, rate, ""},
			{"mean, µs", l, waitMean, ""},
			{"99 % within, µs", l, waitLate, ""},
			{"longest, µs", l, waitLongest, ""},
			{"allocations", l, allocated, ""},
		}))
	}

	say("### One key that all want")
	say("Goroutines of one process take the key, give it back at once, and ask again. Grants a second count no fairness: where waiters sleep between two tries, whoever has just given the key back gets it again, and the others get nothing; so see also how many goroutines of 64 got nothing in a round of %v, and how long it takes until 64 goroutines that ask once have all had it.", hotRound)
	say("![](%s)", plotHot)
	var columns []column
	for _, n := range loadSizes {
		columns = append(columns, column{strconv.Itoa(n), label{Workload: hot, N: n}, rate, ""})
	}
	b.WriteString(r.table(inOne, append(columns,
		column{"64, 0.5 ms away", label{Workload: hot, N: 64, Delay: farDelay}, rate, ""},
		column{"64, 2 ms away", label{Workload: hot, N: 64, Delay: 4 * farDelay}, rate, ""})))
	say("With 64 goroutines; and requests for each grant. Who still waited %v after the end of a round gave up; that long the wait is counted.", patience)
	columns = []column{
		{"got nothing", label{Workload: hot, N: 64}, gotNothing, ""},
		{"mean wait, µs", label{Workload: hot, N: 64}, waitMean, ""},
		{"longest, µs", label{Workload: hot, N: 64}, waitLongest, ""},
		{"64 that ask once: ms until all had it", label{Workload: burst, N: 64}, allHadIt, ""},
		{"0.5 ms away", label{Workload: burst, N: 64, Delay: farDelay}, allHadIt, ""},
		{"2 ms away", label{Workload: burst, N: 64, Delay: 4 * farDelay}, allHadIt, ""},
	}
	for _, n := range loadSizes {
		columns = append(columns, column{fmt.Sprintf("requests, %d", n), label{Workload: hot, N: n}, statements, ""})
	}
	b.WriteString(r.table(inOne, columns))

	say("### The same in 4 processes of 16 goroutines")
	b.WriteString(r.table(loaded, []column{
		{"grants/s", label{Workload: processes, N: 16}, rate, ""},
		{"got nothing, of 64", label{Workload: processes, N: 16}, gotNothing, ""},
		{"smallest share of a process ÷ largest", label{Workload: processes, N: 16}, shareLeast, ""},
		{"mean wait, µs", label{Workload: processes, N: 16}, waitMean, ""},
		{"longest, µs", label{Workload: processes, N: 16}, waitLongest, ""},
		{"requests", label{Workload: processes, N: 16}, statements, ""},
	}))

	say("### Handoff to another process")
	say("One process holds the key and one waits: from the call that gives it back to having it, in µs. Those who poll are met at a random moment between two tries.")
	say("![](%s)", plotHandoff)
	b.WriteString(r.table(passing, []column{
		{"µs", label{Workload: handoff, N: 1}, latency, ""},
		{"× GET_LOCK", label{Workload: handoff, N: 1}, latency, getLock},
		{"0.5 ms away", label{Workload: handoff, N: 1, Delay: farDelay}, latency, ""},
		{"2 ms away", label{Workload: handoff, N: 1, Delay: 4 * farDelay}, latency, ""},
	}))

	say("### Many locks at a time")
	say("%d goroutines take that many locks, all are held, then all are given back. Memory is that of the client, its connections included. Who needs a connection for each lock is not tried with 10,000.", takers)
	columns = nil
	for _, n := range []int{1000, 10_000} {
		l := label{Workload: manyHolds, N: n}
		columns = append(columns, column{fmt.Sprintf("%d: take, µs each", n), l, taking, ""}, column{"give back", l, freeing, ""},
			column{"bytes each", l, clientBytes, ""}, column{"connections", l, sockets, ""})
	}
	b.WriteString(r.table(keeping, columns))

	say("## The contenders")
	lines = [][]string{{"contender", "set up"}}
	for _, c := range contenders() {
		if c.Note != "" && !slices.ContainsFunc(lines, func(l []string) bool { return l[0] == c.Name }) {
			lines = append(lines, []string{c.Name, c.Note})
		}
	}
	b.WriteString(markdown(lines, "ll"))
	say("All statements of rivals on MySQL and MariaDB are one round trip (`interpolateParams`), and so are those of the transactions.")

	say("## How it was measured")
	say("- %s, %d cores, %s of memory, %s\n- load average %s before, %s after; the run took %v and ended %s", r.Machine.CPU, r.Machine.Cores, r.Machine.Memory, r.Machine.System,
		r.Machine.LoadBefore, r.Machine.LoadAfter, r.Ended.Sub(r.Begun).Round(time.Second), r.Ended.UTC().Format("2006-01-02"))
	lines = [][]string{{"", "version"}}
	for _, name := range sortedKeys(r.Versions) {
		lines = append(lines, []string{name, r.Versions[name]})
	}
	b.WriteString(markdown(lines, "ll"))
	say("The proxies, measured before the run with an echo server:")
	lines = [][]string{{"delay each way", "added to a round trip, median", "95th percentile", "MiB/s through it", "MiB/s without"}}
	for _, p := range r.Proxies {
		lines = append(lines, []string{p.Delay.String(), p.Added.Round(time.Microsecond).String(), p.Added95.Round(time.Microsecond).String(), number(p.MiBps), number(p.DirectMiBps)})
	}
	b.WriteString(markdown(lines, "rrrrr"))
	return b.String()
}

// nearAndFar are the columns of work by one goroutine, and how it compares with the same
// unlocked, near the server and away from it.
func nearAndFar(workload, unlocked string) (columns []column) {
	for _, d := range []struct {
		title string
		delay time.Duration
	}{{"µs", 0}, {"0.5 ms away, µs", farDelay}, {"2 ms away, µs", 4 * farDelay}} {
		l := label{Workload: workload, N: 1, Delay: d.delay}
		columns = append(columns, column{d.title, l, timeEach, ""}, column{"× unlocked", l, timeEach, unlocked})
	}
	return columns
}

// opening is what a reader decides by: a transaction near and far, and a key that all want.
func (r *record) opening() string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n\n", args...) }

	say("## What to decide by")
	say("**What a lock adds to a transaction**: its time against the same transaction without a lock. Near the server the work of client and server counts, and each commit that a lock needs beside that of the transaction. Some way off the round trips count. Our locks travel with BEGIN and COMMIT; other locks are round trips of their own.")
	var columns []column
	for _, d := range []struct {
		title string
		delay time.Duration
	}{{"near", 0}, {"0.5 ms away", farDelay}, {"2 ms away", 4 * farDelay}} {
		columns = append(columns, column{d.title, label{Workload: transaction, N: 1, Delay: d.delay}, timeEach, "transaction, " + unlocked})
	}
	b.WriteString(r.table(usualOnes(transactionNames()), columns))
	say("**What a row allows that all change**: the same transaction, by 64 goroutines of one process that all sell the same product. Locks without a transaction, in one process and in four: [figures](performance/figures.md#one-key-that-all-want).")
	b.WriteString(r.table(usualOnes(busyNames), sales()[:3]))
	say("**A hot row**: a stock is read, and one less is written, by 64 goroutines of one process, all of the same product; sales a second, and against FOR UPDATE by hand (BEGIN, SELECT … FOR UPDATE, UPDATE, COMMIT). *Read, then write* is outside of a transaction, by texts that the driver can put beside its own. By hand the next caller waits in the server, and two round trips pass between two sales, UPDATE and COMMIT; with a lock before the read it is three: *lock, then read, by hand* shows what there can be of `BeginTx` and `Do`.")
	say("![](performance/%s)", plotHotRow)
	b.WriteString(r.table(hotRowNames, hotRowColumns(64, hotRowDelays...)))
	say("The same in three processes with 17 connections each: of 8 goroutines and one product; and of 100 goroutines, five products, and callers that wait for a second at most. In rounds of their own each process also begins a ping and an unlocked read every %v, through the same handle: 99 of 100 had their answer within that many milliseconds.", besideEvery)
	b.WriteString(r.table(hotRowFew, []column{
		{"3 × 8, sales/s", label{Workload: hotRow, N: 8}, rate, ""},
		{"× by hand", label{Workload: hotRow, N: 8}, rate, handLocked + fewEach},
		{"3 × 100, sales/s", label{Workload: rush, N: 100}, rate, ""},
		{"× by hand", label{Workload: rush, N: 100}, rate, handLocked + fewEach},
		{"gave up", label{Workload: rush, N: 100}, gaveUp, ""},
		{"ping", label{Workload: rush, N: 100}, pingLate, ""},
		{"unlocked read", label{Workload: rush, N: 100}, readLate, ""},
	}))
	return b.String()
}

// hotRowColumns are the columns of a hot row so far away.
func hotRowColumns(workers int, delays ...time.Duration) (columns []column) {
	for _, d := range delays {
		of := label{Workload: hotRow, N: workers, Delay: d}
		columns = append(columns, column{awayBy(d) + ", sales/s", of, rate, ""}, column{"× by hand", of, rate, handLocked})
	}
	return columns
}

// sales are the columns of those who all sell one product, the longest wait last.
func sales() []column {
	return []column{
		{"sales/s", label{Workload: busy, N: 64}, rate, ""},
		{"× GET_LOCK", label{Workload: busy, N: 64}, rate, "transaction, " + getLock},
		{"mean wait, µs", label{Workload: busy, N: 64}, waitMean, ""},
		{"longest, µs", label{Workload: busy, N: 64}, waitLongest, ""},
	}
}

// usualOnes are names without what no lock can be faster than, and without what is like
// another contender: the figures have them all.
func usualOnes(names []string) []string {
	others := append(selling(insertDelete, redisTuned), leasts...)
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(others, name) })
}

// column is one figure of all contenders, as it is or against that of another
// contender on the same server.
type column struct {
	title   string
	of      label // without contender and server
	figure  string
	against string
}

func (r *record) table(names []string, columns []column) string {
	lines := [][]string{{"", "on"}}
	align := "ll"
	for _, c := range columns {
		lines[0] = append(lines[0], c.title)
		align += "r"
	}
	for _, c := range contenders() {
		if !slices.Contains(names, c.Name) {
			continue
		}
		line := []string{c.Name, c.Server}
		if w := columns[0].of.Workload; w == transaction || w == busy {
			line[0] = strings.TrimPrefix(c.Name, "transaction, ")
		}
		line[0] = strings.TrimSuffix(strings.TrimPrefix(line[0], "hot row, "), fewEach)
		if c.Ours {
			line[0] = "**" + line[0] + "**"
		}
		empty := true
		for _, col := range columns {
			l := col.of
			l.Contender, l.Server = c.Name, c.Server
			v := r.results.median(l, col.figure)
			if col.against != "" {
				l.Contender = col.against
				v /= r.results.median(l, col.figure)
			}
			line = append(line, number(v))
			empty = empty && math.IsNaN(v)
		}
		if !empty {
			lines = append(lines, line)
		}
	}
	return markdown(lines, align)
}

// comparison is a figure by which all of a workload are compared.
type comparison struct {
	title  string
	of     label
	figure string
	more   bool // is better
	names  []string
}

var comparisons = []comparison{
	{"A transaction under a lock", label{Workload: transaction, N: 1}, timeEach, false, ways()},
	{"The same, servers 0.5 ms away", label{Workload: transaction, N: 1, Delay: farDelay}, timeEach, false, ways()},
	{"One key, 64 goroutines in a process: grants a second", label{Workload: hot, N: 64}, rate, true, loaded},
	{"One key, 64 goroutines that ask once: until all had it", label{Workload: burst, N: 64}, allHadIt, false, waiting},
	{"One key, 4 processes of 16 goroutines: grants a second", label{Workload: processes, N: 16}, rate, true, loaded},
	{"One goroutine, nobody else wants the key", label{Workload: uncontended, N: 1}, timeEach, false, locks},
	{"The same, servers 0.5 ms away", label{Workload: uncontended, N: 1, Delay: farDelay}, timeEach, false, locks},
	{"64 goroutines, a key each", label{Workload: distinct, N: 64}, rate, true, locks},
	{"Handoff to another process", label{Workload: handoff, N: 1}, latency, false, waiting},
	{"Taking 10,000 locks", label{Workload: manyHolds, N: 10_000}, taking, false, locks},
}

// compare says of each strategy whom it is slower than and whom it is faster than.
func (r *record) compare(c comparison) string {
	lines := [][]string{{c.title, "on", "slower than", "about even", "faster than"}}
	value := func(x contender) float64 {
		l := c.of
		l.Contender, l.Server = x.Name, x.Server
		return r.results.median(l, c.figure)
	}
	var ours, others []contender
	for _, x := range contenders() {
		switch {
		case math.IsNaN(value(x)) || !slices.Contains(c.names, x.Name):
		case !x.Ours:
			others = append(others, x)
		case !strings.HasSuffix(x.Name, noHint):
			ours = append(ours, x)
		}
	}
	for _, our := range ours {
		var verdicts []verdict
		for _, other := range others {
			if other.Server != our.Server && (other.Server == onMySQL || other.Server == onMariaDB) {
				continue
			}
			times := value(our) / value(other)
			if c.more {
				times = 1 / times
			}
			verdicts = append(verdicts, verdict{strings.TrimPrefix(other.Name, "transaction, "), times})
		}
		lines = append(lines, append([]string{strings.TrimPrefix(our.Name, "transaction, "), our.Server}, sorted(verdicts)...))
	}
	if len(lines) == 1 {
		return ""
	}
	return markdown(lines, "lllll")
}

// verdict is how many times as slow as another one of ours is.
type verdict struct {
	other string
	times float64
}

// sorted returns three cells: the others than which ours is slower, those that are about
// even, and those than which it is faster.
func sorted(verdicts []verdict) []string {
	slices.SortStableFunc(verdicts, func(a, b verdict) int { return cmp.Compare(b.times, a.times) })
	var slower, even, faster []string
	for _, v := range verdicts {
		switch {
		case v.times > 1.05:
			slower = append(slower, v.other+" ×"+number(v.times))
		case v.times > 1/1.05:
			even = append(even, v.other)
		default:
			faster = append(faster, v.other+" ×"+number(1/v.times))
		}
	}
	return []string{strings.Join(slower, "; "), strings.Join(even, "; "), strings.Join(faster, "; ")}
}

// markdown is a table whose first line is its head; align has an l or r a column.
func markdown(lines [][]string, align string) string {
	var b strings.Builder
	for i, line := range lines {
		b.WriteString("| " + strings.Join(line, " | ") + " |\n")
		if i == 0 {
			for _, a := range align {
				b.WriteString(map[rune]string{'l': "|---", 'r': "|---:"}[a])
			}
			b.WriteString("|\n")
		}
	}
	return b.String() + "\n"
}

// number prints three digits, or all before the point; nothing for NaN.
func number(v float64) string {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return ""
	case v == 0:
		return "0"
	}
	digits := 2 - int(math.Floor(math.Log10(math.Abs(v))))
	text := strconv.FormatFloat(v, 'f', max(0, min(digits, 3)), 64)
	if whole, fraction, found := strings.Cut(text, "."); found && strings.Trim(fraction, "0") == "" {
		text = whole
	}
	return text
}
