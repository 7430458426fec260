package inspect

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Activity is what a connection does. Statements of the driver itself, which keep the lock
// or take it, are not told as work of the program.
type Activity struct {
	Running   bool          // it runs a statement; else it is idle
	For       time.Duration // since the statement began, or for how long the connection has been idle
	Least     bool          // it has been idle for at least so long: the driver's own statements hide how long
	Statement string        // that it runs, or has run last, with ? for its values; "" if the server does not show it

	// Elsewhere says that the program works on other connections, which cannot be told from
	// those of its other work: this one only keeps the lock. Nothing else is known then.
	Elsewhere bool

	own bool // its last statement was the driver's, as far as the server remembers
}

// String says it in words.
func (a *Activity) String() string {
	switch {
	case a == nil:
		return "what its connection does is not shown"
	case a.Elsewhere:
		return "what its program does is not shown: it works on other connections than the one that keeps the lock"
	case a.Running && a.Statement == "":
		return "has run a statement for " + rounded(a.For)
	case a.Running:
		return "has run for " + rounded(a.For) + ": " + a.Statement
	}
	text := "idle for " + rounded(a.For)
	switch {
	case a.Least && a.For < time.Millisecond:
		text = "idle"
	case a.Least:
		text += " at least"
	}
	if a.Statement != "" {
		text += ", after: " + a.Statement
	}
	return text
}

// Advice is what can be done about a holder for whom others wait; "" if nothing is known
// against it. It advises to end a connection only if its process is known, and is not seen to wait for a lock.
func (h *Holder) Advice() string {
	_, inTransaction := h.Within.Get()
	if a := h.Activity; a == nil || a.Running || a.For < calm || !inTransaction || len(h.WaitsFor) > 0 {
		return ""
	}
	if _, known := h.process(); !known {
		text := "its transaction is open, and no statement runs: its process may wait for another lock, which is not seen"
		if host, port, ok := strings.Cut(h.Host, ":"); ok {
			return text + fmt.Sprintf("; ss -tnp on %s names the process with port %s: see there why it does not go on", host, port)
		}
		return text + "; see why it does not go on"
	}
	return fmt.Sprintf("its transaction is open, and no statement runs: see why its program does not go on, or end it:"+
		" KILL %d rolls all of it back", h.ConnectionID)
}

// Unrenewing says what it means that a lease was not renewed when that was due; "" if it was. left is Lock.Remaining.
func (h *Holder) Unrenewing(left time.Duration) string {
	switch expected, _ := h.ExpectedTTL.Get(); {
	case h.Silent():
		return "its lease was not renewed when that was due: the program has ended, is frozen, cut off or too slow; the lease ends in " +
			rounded(left) + " unless it is renewed"
	case h.Overdue():
		return fmt.Sprintf("if its TTL is %s, as far as earlier leases or looks tell, its first renewal was due after %s:"+
			" the program has ended, is frozen, cut off or too slow, or has a MaxHold; the lease ends in %s unless it is renewed",
			rounded(expected), rounded(schema.RenewedAfter(expected)), rounded(left))
	}
	return ""
}

// calm is for how long a holder may be idle in its transaction without a word.
const calm = time.Second

func rounded(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return "less than 1ms"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return strings.Replace(d.Round(time.Second).String(), "m0s", "m", 1)
}

// event is a statement that performance_schema remembers of a connection. Times are
// those of its timer.
type event struct {
	first, last uint64 // the ids of its events; last is the highest where it runs
	begin, end  uint64 // in picoseconds; end is now where it runs
	running     bool
	outer       bool // not within a procedure
	text        string
}

const longestText = 600

// readActivity reads what the holders' connections do, and when they got their locks.
func (p *picture) readActivity(ctx context.Context) error {
	p.activity = make(map[uint64]*Activity)
	ids := p.claims.holding()
	if len(ids) == 0 {
		return nil
	}
	return p.view.activity(p, ctx, ids)
}

const whatRuns = "what holders run, or have run last"

// mariadbActivity reads the process list. Without PROCESS it has only the connections of
// the same account.
func (p *picture) mariadbActivity(ctx context.Context, ids []uint64) error {
	rows, err := p.query(ctx, fmt.Sprintf("SELECT ID, COMMAND = 'Sleep', CAST(TIME_MS * 1000 AS SIGNED), LEFT(INFO, %d)"+
		" FROM %s WHERE ID IN (%s)", longestText, server.Connections, list(ids)))
	for _, r := range rows {
		conn, _ := strconv.ParseUint(r[0], 10, 64)
		a := &Activity{Running: r[1] != "1" && !ping(r[3]), For: max(0, p.age(r[2]))}
		switch {
		case !a.Running && r[1] != "1": // a sign of life of the driver, just now
			a.For, a.Least = 0, true
		case !a.Running: // since its last statement, or a sign of life
			a.Least = true
		case !p.own(r[3]):
			a.Statement = masked(r[3])
		}
		a.own = a.Statement == ""
		p.activity[conn] = a
	}
	for _, claims := range p.claims {
		for i, c := range claims {
			if a := p.activity[c.conn]; a != nil && !a.Running && !c.waiting {
				claims[i].least = a.For // it got the lock before it became idle
			}
		}
	}
	return p.tolerate(err, whatRuns, "")
}

// mysqlActivity reads the statements that performance_schema remembers: those that run or
// ran last, and on each connection the last ten that have ended.
func (p *picture) mysqlActivity(ctx context.Context, ids []uint64) error {
	if !p.schema {
		return nil // as other gaps tell
	}
	read := func(table string) string {
		return fmt.Sprintf("SELECT t.PROCESSLIST_ID, e.EVENT_ID, e.END_EVENT_ID, e.TIMER_START, e.TIMER_END,"+
			" e.NESTING_EVENT_LEVEL = 0, LEFT(e.SQL_TEXT, %d), t.PROCESSLIST_ID = CONNECTION_ID()"+
			" FROM performance_schema.threads t JOIN performance_schema.%s e ON e.THREAD_ID = t.THREAD_ID"+
			" WHERE t.PROCESSLIST_ID IN (%s) OR t.PROCESSLIST_ID = CONNECTION_ID()", longestText, table, list(ids))
	}
	events := make(map[uint64][]event)
	var now uint64 // when the statements that run were read
	for _, table := range []string{"events_statements_history", "events_statements_current"} {
		rows, err := p.query(ctx, read(table))
		if hidden(err) {
			p.gap(whatRuns, "the account may not read performance_schema", p.grant("SELECT", "performance_schema.*"))
			return nil
		}
		if err != nil {
			return p.tolerate(err, whatRuns, "")
		}
		for _, r := range rows {
			conn, _ := strconv.ParseUint(r[0], 10, 64)
			e := newEvent(r)
			if r[7] == "1" {
				now = max(now, e.end)
				continue
			}
			events[conn] = append(events[conn], e)
		}
	}
	if now == 0 {
		p.gap(whatRuns+", and since when they hold", "performance_schema does not keep statements",
			"UPDATE performance_schema.setup_consumers SET ENABLED = 'YES' WHERE NAME LIKE 'events_statements_%'")
		return nil
	}
	now -= uint64(p.late.Nanoseconds()) * 1000 //nolint:gosec // it counts from when the server began
	for conn, list := range events {
		p.activity[conn] = p.lastOf(list, now)
	}
	p.dateGrants(events, now)
	return nil
}

func newEvent(r []string) event {
	e := event{number(r[1]), number(r[2]), number(r[3]), number(r[4]), r[2] == "", r[5] == "1", r[6]}
	if e.running {
		e.last = math.MaxUint64
	}
	return e
}

// lastOf is the activity of a connection that has run list.
func (p *picture) lastOf(list []event, now uint64) *Activity {
	list = slices.DeleteFunc(slices.Clone(list), func(e event) bool { return !e.outer })
	if len(list) == 0 {
		return nil
	}
	slices.SortFunc(list, func(a, b event) int { return cmp.Compare(a.first, b.first) })
	for _, last := range slices.Backward(list) {
		if ping(last.text) {
			continue
		}
		a := &Activity{Running: last.running, For: elapsed(last.end, now), own: p.own(last.text)}
		if last.running {
			a.For = elapsed(last.begin, now)
		}
		if !a.own {
			a.Statement = masked(last.text)
		}
		return a
	}
	return &Activity{For: elapsed(list[0].begin, now), Least: true, own: true}
}

// doing is what the holder of a lock does.
func (p *picture) doing(l *Lock, h *Holder) *Activity {
	a := p.activity[h.ConnectionID]
	_, inTransaction := h.Within.Get()
	if l.Strategy == lease || l.Strategy == advisory && !inTransaction && a != nil && a.own {
		return &Activity{Elsewhere: true}
	}
	return a
}

// pings are the texts by which the driver sees whether the server still answers. A ping of
// the protocol has no text.
var pings = regexp.MustCompile(`^(?:DO 1|SELECT IF\(CONNECTION_ID\(\) = [0-9]+, [^']*)$`)

func ping(text string) bool { return text == "" || pings.MatchString(text) }

// ours are texts of the driver's statements, which may follow a comment or a call.
var ours = regexp.MustCompile(`_LOCK\(|RELEASE_ALL_LOCKS\(|^/\* mysqllock |@mysqllock_|^SELECT IF\(CONNECTION_ID\(\) = |^SET `)

// own reports a statement of the driver itself.
func (p *picture) own(text string) bool {
	return ours.MatchString(text) || strings.Contains(text, p.table.String()) || strings.Contains(text, p.procedures())
}

// procedures is how the names of the procedures begin that programs of earlier versions call.
func (p *picture) procedures() string { return strings.TrimSuffix(p.table.String(), "`") + "_" }

// elapsed is the time between two moments of the timer, which counts picoseconds.
func elapsed(from, to uint64) time.Duration {
	if from >= to {
		return 0
	}
	return time.Duration((to - from) / 1000) //nolint:gosec // a server that runs for centuries
}

// dateGrants finds out since when locks are held. performance_schema tells with each lock
// in which statement it was asked for. If that is still remembered, its end is the grant;
// if it is forgotten, the lock is older than all that came later. A row that a transaction
// locks later can come with the number of an earlier one on the same page: of several with
// the same number, none is dated.
func (p *picture) dateGrants(events map[uint64][]event, now uint64) {
	asked, locked := p.countLocks(events)
	for _, claims := range p.claims {
		for i, c := range claims {
			if c.waiting || c.event == 0 {
				continue
			}
			e := creator(events[c.conn], c.event)
			switch {
			case asked[eventID{c.conn, c.event}] > 1:
				if a := p.activity[c.conn]; a != nil && !a.Running {
					claims[i].least = a.For
				}
			case e == nil:
				claims[i].least = sinceThen(events[c.conn], c.event, now)
			case e.running: // it has got this lock, and waits for another one
			case locked[eventID{c.conn, e.first}] > 1 && elapsed(e.begin, e.end) > time.Second:
				claims[i].least = elapsed(e.end, now)
			default:
				claims[i].since = max(elapsed(e.end, now), time.Microsecond)
			}
		}
	}
}

// eventID is an event of a connection, which counts its own.
type eventID struct{ conn, event uint64 }

// countLocks returns how many locks were asked for in each event, and in each statement,
// by its first event.
func (p *picture) countLocks(events map[uint64][]event) (asked, locked map[eventID]int) {
	asked, locked = make(map[eventID]int), make(map[eventID]int)
	for _, claims := range p.claims {
		for _, c := range claims {
			asked[eventID{c.conn, c.event}]++
			if e := creator(events[c.conn], c.event); e != nil {
				locked[eventID{c.conn, e.first}]++
			}
		}
	}
	return asked, locked
}

// creator is the innermost statement of list to which the event belongs.
func creator(list []event, id uint64) (found *event) {
	for i, e := range list {
		if e.first <= id && id <= e.last && (found == nil || e.first > found.first) {
			found = &list[i]
		}
	}
	return found
}

// sinceThen is how long ago the first statement after the event began.
func sinceThen(list []event, id, now uint64) (age time.Duration) {
	for _, e := range list {
		if e.first > id {
			age = max(age, elapsed(e.begin, now))
		}
	}
	return age
}

// values are what a statement's text says of the data: strings, numbers, and those that
// the text was cut within. Marks of ours are comments at the end.
var values = regexp.MustCompile(`(?s)[xXbBnN]?'(?:[^'\\]|\\.|'')*(?:'|\\?$)|"(?:[^"\\]|\\.|"")*(?:"|\\?$)` +
	`|\b0x[0-9a-fA-F]+\b|\b[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\b`)

var (
	comments = regexp.MustCompile(`(?s)/\*[^!+M].*?(?:\*/|$)`)
	spaces   = regexp.MustCompile(`\s+`)
)

// masked is a statement's text without its values.
func masked(text string) string {
	text = comments.ReplaceAllString(values.ReplaceAllString(text, "?"), " ")
	return strings.TrimSpace(spaces.ReplaceAllString(text, " "))
}

// list is ids for IN (…).
func list(ids []uint64) string {
	var out []string
	for _, n := range ids {
		out = append(out, strconv.FormatUint(n, 10))
	}
	return strings.Join(out, ", ")
}
