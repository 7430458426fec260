package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// leaseTTL is that of leases whose holders crash or freeze: a look has more than half of it to see that they are not renewed.
const leaseTTL = 30 * time.Second

// strategyOf is that of a key, as its name says.
func strategyOf(key string) lockctx.Option {
	switch {
	case strings.HasSuffix(key, "lease") && strings.HasPrefix(key, "loop"):
		return lockctx.Lease(10 * patience)
	case strings.HasSuffix(key, "lease"):
		return lockctx.Lease(leaseTTL)
	}
	return lockctx.Row()
}

// play is a process of the scene of troubles. It says its process id, and takes keys and waits for them as it is told: "adds" takes
// one in the transaction of another. It says when it begins, when it has a key, and when it has lost it.
func play(db *sql.DB, in *bufio.Scanner) {
	fmt.Println(os.Getpid())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var mu sync.Mutex
	holds := make(map[string]*mysqllock.Hold)
	for in.Scan() {
		words := strings.Fields(in.Text())
		within, wait := ctx, lockctx.Wait(time.Hour)
		switch words[0] {
		case "takes":
			wait = lockctx.NoWait()
		case "adds":
			mu.Lock()
			within = holds[words[2]].Context()
			mu.Unlock()
		}
		key, began := words[1], time.Now()
		fmt.Println("begins", key, began.UnixNano(), 0)
		go func() {
			hold, err := mysqllock.Acquire(within, db, key, strategyOf(key), wait)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				fmt.Println("fails", key, 0, 0, err)
				return
			}
			mu.Lock()
			holds[key] = hold
			mu.Unlock()
			fmt.Println("holds", key, began.UnixNano(), time.Now().UnixNano())
			if <-hold.Context().Done(); ctx.Err() == nil {
				fmt.Println("lost", key, 0, 0, context.Cause(hold.Context()))
			}
		}()
	}
}

// line is one that a player says.
type line struct {
	what, key string
	from, to  time.Time
	why       string
}

// player is a process of the scene.
type player struct {
	*dbtest.Child
	t     testing.TB
	owner string // how it begins
	said  []line // which nobody has waited for yet
}

// player starts one. After its lockTTL a waiter for a row would ask anew, and be the last.
func (s *scratch) player() *player {
	s.T.Helper()
	p := &player{Child: dbtest.StartJob(s.T, "player", s.DSN("lockTTL=600s")), t: s.T}
	host, err := os.Hostname()
	dbtest.OK(s.T, err)
	p.owner = host + ":" + p.Line() + ":"
	return p
}

// says is the next line of that kind about the key.
func (p *player) says(what, key string) line {
	p.t.Helper()
	return p.line(func(l line) bool {
		if l.what == "fails" && l.key == key {
			p.t.Fatalf("%s: %s", key, l.why)
		}
		return l.what == what && l.key == key
	})
}

// outcome is how it has ended that it asked for the key.
func (p *player) outcome(key string) line {
	p.t.Helper()
	return p.line(func(l line) bool { return (l.what == "holds" || l.what == "fails") && l.key == key })
}

// line is the next line that is the right one.
func (p *player) line(right func(line) bool) line {
	p.t.Helper()
	for {
		if i := slices.IndexFunc(p.said, right); i >= 0 {
			l := p.said[i]
			p.said = slices.Delete(p.said, i, i+1)
			return l
		}
		words := strings.SplitN(p.Line(), " ", 5)
		moment := func(s string) time.Time {
			nanos, err := strconv.ParseInt(s, 10, 64)
			dbtest.OK(p.t, err)
			return time.Unix(0, nanos)
		}
		l := line{what: words[0], key: words[1], from: moment(words[2]), to: moment(words[3])}
		if len(words) > 4 {
			l.why = words[4]
		}
		p.said = append(p.said, l)
	}
}

// truth is what is so of a key.
type truth struct {
	holder   string    // how its owner begins
	from, to time.Time // between which it got the key
	until    time.Time // so long at least this is so; zero is to the end
	waiters  []wait
	polls    bool     // the waiter waits for nothing in the server, which MariaDB does not show by default
	circle   bool     // it is in a circle of waits
	says     []string // ls, show and the page say all these
	never    []string // none of them says any of these
}

type wait struct {
	who         string
	first, last time.Time // between which it began
}

func (w wait) String() string { return w.who }

// troubles are the scene, as it is.
type troubles struct {
	*tools
	tells bool // the server tells the processes of connections
	is    map[string]*truth
	late  map[string]bool    // the page has seen that the lease is not renewed
	short map[string][]error // what tools did not say of keys when they should
}

// TestNoToolIsCalmInTrouble: holders are idle, wait themselves, freeze and crash, processes wait in a circle, and a lease is taken
// away by force. Of each ls, ls --top, show, the page, history and errors say who holds and who waits, no time that is longer than it
// is, and what to do: to end a connection only of a process that is known, and does not wait for another lock.
func TestNoToolIsCalmInTrouble(t *testing.T) {
	inTrouble(t, func(t *testing.T, tr *troubles) {
		one, two := tr.player(), tr.player()
		tr.deadlock(one, two)
		idler, chained, waiter, other := tr.player(), tr.player(), tr.player(), tr.player()
		tr.idle(idler, chained, waiter, other)
		tr.circle(one, two)
		tr.byForce(other, chained)
		frozen, killed := tr.player(), tr.player()
		tr.silence(frozen, killed, waiter)

		all := tr.lookers()
		for _, tool := range []string{"ls", "the page"} { // what they do not say yet is no matter
			_ = tr.look(tool, all[tool])
		}
		time.Sleep(time.Until(tr.is["frozen-lease"].to.Add(leaseTTL * 2 / 5))) // its renewal is due
		for tool, says := range all {
			dbtest.Eventually(t, tool+" says all", func() error { return tr.look(tool, says) })
		}
		tr.errors()
		tr.lapse(frozen, waiter)
	})
}

// inTrouble runs a test on MySQL, which tells processes, on MariaDB as it is, which does not, and on one that does, if
// MYSQLLOCK_TEST_SCENE asks for it.
func inTrouble(t *testing.T, test func(t *testing.T, tr *troubles)) {
	t.Helper()
	if os.Getenv("MYSQLLOCK_TEST_SCENE") == "" {
		t.Skip("only with MYSQLLOCK_TEST_SCENE, as in make scene: it takes a minute, on a machine that is quiet")
	}
	t.Parallel()
	run := func(name string, bin tempserver.Binary, tells bool, opts ...string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScratch(dbtest.New(t, bin, tempserver.Share(t, bin, opts...)))
			test(t, &troubles{
				tools: s.tools(web.Options{Background: true}), tells: tells,
				is: make(map[string]*truth), late: make(map[string]bool), short: make(map[string][]error),
			})
		})
	}
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		if bin.Flavour == tempserver.MariaDB {
			run(bin.Name+" as it is", bin, false)
		}
		run(bin.Name, bin, true, showing(bin)...)
	}
}

// takes has p take the key.
func (tr *troubles) takes(p *player, key string) *truth {
	tr.T.Helper()
	p.Tell("takes " + key)
	l := p.says("holds", key)
	is := &truth{holder: p.owner, from: l.from, to: l.to, never: []string{"KILL", "nobody"}}
	tr.is[key] = is
	return is
}

// waits has p wait for the key.
func (tr *troubles) waits(p *player, key string) {
	tr.T.Helper()
	p.Tell("waits " + key)
	tr.is[key].waiters = append(tr.is[key].waiters, wait{p.owner, p.says("begins", key).from, time.Time{}})
}

// queued waits until as many wait in the server for the row of the key.
func (tr *troubles) queued(key string, n int) {
	tr.T.Helper()
	dbtest.Soon(tr.T, fmt.Sprintf("%d wait for %s", n, key), func() bool {
		const text = "SELECT COUNT(*) FROM information_schema.processlist WHERE ID <> CONNECTION_ID() AND LOCATE(?, INFO) > 0"
		return dbtest.Column[int](tr.T, tr.root, text, fmt.Sprintf("name = x'%x'", key))[0] == n
	})
}

// may is what is said of a holder that is idle in its transaction.
func (tr *troubles) may(is *truth) {
	if tr.tells {
		is.says, is.never = []string{"its transaction is open", "end it: KILL "}, []string{"nobody"}
	} else {
		is.says = []string{"its process may wait for another lock, which is not seen"}
	}
}

// deadlock has two processes want each other's row. InnoDB ends it: the victim has lost all.
func (tr *troubles) deadlock(one, two *player) {
	t := tr.T
	t.Helper()
	left, right := tr.takes(one, "left"), tr.takes(two, "right")
	one.Tell("adds right left")
	tr.queued("right", 1)
	two.Tell("adds left right")
	l, r := one.outcome("right"), two.outcome("left")
	switch {
	case l.what == "holds" && r.what == "fails":
		right.holder, right.from, right.to = one.owner, l.from, l.to
		tr.victim(two, r, "right")
	case l.what == "fails" && r.what == "holds":
		left.holder, left.from, left.to = two.owner, r.from, r.to
		tr.victim(one, l, "left")
	default:
		t.Fatalf("of two who want each other's row one says %+v, and the other %+v", l, r)
	}
}

func (tr *troubles) victim(p *player, l line, held string) {
	tr.T.Helper()
	lost := p.says("lost", held)
	for _, why := range []string{l.why, lost.why} {
		if !strings.Contains(why, "deadlock") {
			tr.T.Errorf("the victim is told %s", why)
		}
	}
}

// idle has holders that are alive: one is idle, one waits itself elsewhere in its process, and several wait in the order of the server.
func (tr *troubles) idle(idler, chained, waiter, other *player) {
	tr.may(tr.takes(idler, "idle"))
	tr.takes(idler, "far-lease")
	is := tr.takes(chained, "chained")
	if tr.may(is); tr.tells {
		is.says, is.never = []string{"perhaps elsewhere in it, for ", "far-lease", idler.owner}, []string{"nobody", "KILL"}
	}
	tr.waits(chained, "far-lease")
	tr.waits(waiter, "idle")
	tr.waits(waiter, "chained")
	tr.may(tr.takes(idler, "queue"))
	for n, p := range []*player{waiter, other, chained} {
		if p == chained { // which may wait for one lock only, so that it is known which
			p = tr.player()
		}
		tr.waits(p, "queue")
		tr.queued("queue", n+1)
	}
}

// circle has two processes wait for each other over two strategies, which neither the server nor a process sees.
func (tr *troubles) circle(one, two *player) {
	row, lease := tr.takes(one, "loop-row"), tr.takes(two, "loop-lease")
	tr.waits(one, "loop-lease")
	tr.waits(two, "loop-row")
	if tr.tells {
		row.circle, lease.circle = true, true
		row.says, lease.says = []string{"a circle of waits: "}, []string{"a circle of waits: "}
	} else {
		tr.may(row)
	}
}

// byForce has a lease taken away, after the release of another key was refused.
func (tr *troubles) byForce(loser, next *player) {
	t := tr.T
	t.Helper()
	is := tr.takes(loser, "taken-lease")
	tr.waits(next, "taken-lease")
	tr.view() // the page has seen it
	tr.command("release", "takn-lease", "--force", "--yes").start().fails(exitFailure, "never used here")
	before := time.Now()
	out := tr.command("release", "taken-lease", "--force", "--yes", "--reason", "it hangs").start().must(0)
	if !strings.Contains(out, "lease on taken-lease ended") {
		t.Errorf("the release says %s", out)
	}
	lost := loser.says("lost", "taken-lease")
	if !strings.Contains(lost.why, "lock lost") || !strings.Contains(lost.why, "it hangs") {
		t.Errorf("the loser is told %s", lost.why)
	}
	has := next.says("holds", "taken-lease")
	*is = truth{holder: next.owner, from: before, to: has.to, never: is.never}
}

// silence has a process freeze and one crash, each with a lease that was not renewed yet and a row, for which one waits.
func (tr *troubles) silence(frozen, killed, waiter *player) {
	t := tr.T
	t.Helper()
	for _, p := range []*player{frozen, killed} {
		name := map[*player]string{frozen: "frozen", killed: "killed"}[p]
		tr.takes(p, name+"-row")
		lease := tr.takes(p, name+"-lease")
		lease.until = lease.from.Add(leaseTTL)
		lease.says = []string{"not renewed yet, ~"}
		const text = "UPDATE mysqllock SET ttl = ? WHERE namespace = ? AND name = ?" // as a lease before on the key leaves it
		dbtest.Exec(t, tr.root, text, leaseTTL.Microseconds(), tr.Name, name+"-lease")
		tr.waits(waiter, name+"-row")
		tr.waits(waiter, name+"-lease")
	}
	tr.allWait()
	dbtest.OK(t, frozen.Signal(syscall.SIGSTOP))
	tr.may(tr.is["frozen-row"])
	at := time.Now()
	killed.Kill()
	has := waiter.says("holds", "killed-row")
	tr.is["killed-row"] = &truth{holder: waiter.owner, from: at, to: has.to, never: []string{"nobody"}}
	tr.is["killed-lease"].polls = !tr.tells
	for _, key := range []string{"frozen-lease", "killed-lease"} {
		const text = "SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND name = ? AND renewed_token = token"
		if dbtest.Column[int](t, tr.root, text, tr.Name, key)[0] > 0 {
			t.Logf("on a slow machine %s was renewed", key)
			tr.is[key].says = []string{"not renewed for "}
		}
	}
}

// allWait waits until all waiters are seen.
func (tr *troubles) allWait() {
	tr.T.Helper()
	dbtest.Eventually(tr.T, "all wait", func() error {
		time.Sleep(150 * time.Millisecond) // MariaDB tells of rows from a copy
		all, _ := tr.listed("ls")
		for key, is := range tr.is {
			if n := len(all[key].waiters); n < len(is.waiters) {
				return fmt.Errorf("for %s %d", key, n)
			}
		}
		return nil
	})
	for _, is := range tr.is {
		for i := range is.waiters {
			is.waiters[i].last = time.Now()
		}
	}
}

// lookers are the tools.
func (tr *troubles) lookers() map[string]func() map[string]told {
	var keys []string
	for key := range tr.is {
		keys = append(keys, key)
	}
	said := func(args ...string) func() map[string]told {
		return func() map[string]told {
			all, _ := tr.listed(args...)
			for key, text := range blocks(tr.command(args...).start().must(0)) {
				is := all[key]
				is.text = text
				all[key] = is
			}
			return all
		}
	}
	page := func() map[string]told {
		all := tr.onPage()
		for key, got := range all {
			tr.late[key] = tr.late[key] || got.left > 0 && got.left < ms(leaseTTL/2)
		}
		return all
	}
	return map[string]func() map[string]told{
		"ls": said("ls"), "show": said(append([]string{"show"}, keys...)...), "ls --top": tr.top, "the page": page, "history": tr.history,
	}
}

// blocks are the lines of each key.
func blocks(out string) map[string]string {
	all, key := make(map[string]string), ""
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, " ") {
			key, _, _ = strings.Cut(line, " ")
		}
		all[key] += line
	}
	return all
}

// look compares what a tool says with the truth, and returns what it does not say yet.
func (tr *troubles) look(tool string, says func() map[string]told) error {
	tr.T.Helper()
	from := time.Now()
	all := says()
	to := time.Now()
	var lacking []error
	for key, is := range tr.is {
		if !is.until.IsZero() && to.After(is.until) {
			tr.over(tool, key)
			continue
		}
		got := all[key]
		tr.holds(tool, key, got, from, to)
		tr.waited(tool, key, got, from, to)
		err := tr.lacks(tool, key, got)
		if due := is.to.Add(leaseTTL * 2 / 5); err != nil && from.After(due) {
			tr.short[tool+", "+key] = append(tr.short[tool+", "+key], err)
		}
		lacking = append(lacking, err)
	}
	return errors.Join(lacking...)
}

// over is for a tool that has looked too late: that is the machine, unless looks in time have not told it.
func (tr *troubles) over(tool, key string) {
	tr.T.Helper()
	if short := tr.short[tool+", "+key]; len(short) > 1 { // one that waits for a lease may not be seen in one look
		tr.T.Errorf("%s: %v", tool, errors.Join(short...))
	} else {
		tr.T.Logf("%s: the machine is too slow to look at %s", tool, key)
	}
}

// clocks measure the same time a little differently.
const clocks = 20

// holds compares what is said of the holder.
func (tr *troubles) holds(tool, key string, got told, from, to time.Time) {
	tr.T.Helper()
	is := tr.is[key]
	atLeast, atMost := ms(from.Sub(is.to))-clocks, ms(to.Sub(is.from))+clocks
	if got.nobody {
		tr.T.Errorf("%s: nobody holds %s", tool, key)
	}
	if got.held > atMost || got.heldLeast > atMost || got.held > 0 && got.held < atLeast {
		tr.T.Errorf("%s: %s is held for %.0f to %.0f ms, and it says %.0f, at least %.0f",
			tool, key, atLeast, atMost, got.held, got.heldLeast)
	}
	for _, who := range got.holders {
		if who != "" && !strings.HasPrefix(who, is.holder) {
			tr.T.Errorf("%s: %s is held by %s, and it says by %s", tool, key, is.holder, who)
		}
	}
	if len(got.holders) > 1 {
		tr.T.Errorf("%s: %s has one holder, and it says %q", tool, key, got.holders)
	}
	for _, text := range is.never {
		if strings.Contains(got.text, text) {
			tr.T.Errorf("%s says %q of %s:\n%s", tool, text, key, got.text)
		}
	}
	if got.circle && !is.circle {
		tr.T.Errorf("%s: %s is in a circle of waits", tool, key)
	}
}

// waited compares what is said of the waiters.
func (tr *troubles) waited(tool, key string, got told, from, to time.Time) {
	tr.T.Helper()
	is := tr.is[key]
	if len(got.waiters) > len(is.waiters) {
		tr.T.Errorf("%s: %d wait for %s, and it says %q", tool, len(is.waiters), key, got.waiters)
		return
	}
	for i, who := range got.waiters {
		n := slices.IndexFunc(is.waiters, func(w wait) bool { return strings.HasPrefix(who, w.who) })
		if who != "" && (n < 0 || got.inOrder && n != i) {
			tr.T.Errorf("%s: for %s wait %v, and it says %q", tool, key, is.waiters, got.waiters)
		}
	}
	if len(is.waiters) == 0 {
		return
	}
	atLeast, atMost := ms(from.Sub(is.waiters[0].last))-clocks, ms(to.Sub(is.waiters[0].first))+clocks
	if got.known > atMost || got.least > atMost || got.known > 0 && got.known < atLeast {
		tr.T.Errorf("%s: the first waiter for %s has waited for %.0f to %.0f ms, and it says %.0f, at least %.0f",
			tool, key, atLeast, atMost, got.known, got.least)
	}
}

// lacks is what a tool does not say yet of a key.
func (tr *troubles) lacks(tool, key string, got told) error {
	is := tr.is[key]
	row := !strings.HasSuffix(key, "lease")
	if tr.MariaDB() && row && len(is.waiters) == 0 { // it shows a row while somebody waits for it
		return nil
	}
	if !got.seen {
		return fmt.Errorf("%s is not shown", key)
	}
	wanted := len(is.waiters)
	if is.polls {
		wanted = 0
	}
	if is.polls && !got.more && tool != "history" {
		tr.T.Errorf("%s: that others may wait for %s is not said", tool, key)
	}
	if len(got.waiters) < wanted {
		return fmt.Errorf("%d wait for %s, and it says %q", wanted, key, got.waiters)
	}
	switch tool {
	case "ls --top", "history": // which tell less
		return nil
	}
	if got.circle != is.circle {
		return fmt.Errorf("that %s is in a circle is %v", key, got.circle)
	}
	if row && wanted > 1 && !got.inOrder {
		return fmt.Errorf("the waiters for %s are in no order", key)
	}
	for _, text := range is.says {
		if !strings.Contains(got.text, text) {
			return fmt.Errorf("it does not say %q of %s: %s", text, key, got.text)
		}
	}
	return nil
}

// errors are what callers are told who do not wait, or not for long.
func (tr *troubles) errors() {
	tr.T.Helper()
	var all sync.WaitGroup
	for key := range tr.is {
		for _, wait := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(300 * time.Millisecond)} {
			all.Go(func() { tr.refused(key, wait) })
		}
	}
	all.Wait()
}

func (tr *troubles) refused(key string, wait lockctx.Option) {
	t, is := tr.T, tr.is[key]
	t.Helper()
	_, err := mysqllock.Acquire(t.Context(), tr.asker, key, strategyOf(key), wait)
	to := time.Now()
	var e *mysqllock.Error
	switch {
	case !is.until.IsZero() && to.After(is.until):
		t.Logf("the machine is too slow to ask for %s", key)
	case !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked):
		t.Errorf("%s: %v", key, err)
	case e.Holder == nil: // a busy server has not told in time
	case e.Holder.Program != "" && !strings.HasPrefix(e.Holder.Program, is.holder):
		t.Errorf("%s is held by %s, and the error says %v", key, is.holder, err)
	case ms(e.Holder.Held) > ms(to.Sub(is.from))+clocks:
		t.Errorf("%s is held for %v, and the error says %v", key, to.Sub(is.from), err)
	}
}

// lapse waits until the leases of those that are silent have run out: the waiter has them then, and not before, and one that wakes
// up is told.
func (tr *troubles) lapse(frozen, waiter *player) {
	t := tr.T
	t.Helper()
	for _, key := range []string{"killed-lease", "frozen-lease"} {
		has := waiter.says("holds", key)
		is := tr.is[key]
		if has.to.Before(is.until) {
			t.Errorf("%s is free %v before the lease has run out", key, is.until.Sub(has.to))
		}
		tr.is[key] = &truth{holder: waiter.owner, from: is.until, to: has.to, never: is.never}
	}
	dbtest.OK(t, frozen.Signal(syscall.SIGCONT))
	lost := frozen.says("lost", "frozen-lease")
	if !strings.Contains(lost.why, "lock lost") {
		t.Errorf("one that was frozen is told %s", lost.why)
	}
	tr.tell()
}

// tell looks at what the page and history tell of what has happened.
func (tr *troubles) tell() {
	t := tr.T
	t.Helper()
	lost := make(map[string]string)
	v := tr.view()
	for _, l := range v.Losses.Recent {
		lost[l.Key] = l.Who + ": " + l.Why
	}
	for _, key := range []string{"killed-lease", "frozen-lease", "taken-lease"} {
		if (tr.late[key] || key == "taken-lease") && lost[key] == "" {
			t.Errorf("the page does not tell that %s was lost: %+v", key, v.Losses)
		}
	}
	if !strings.HasSuffix(lost["taken-lease"], ": it hangs") {
		t.Errorf("of the lease that was taken away the page says %s", lost["taken-lease"])
	}
	happened := map[string]string{"killed-lease": record.Lost, "frozen-lease": record.Lost, "taken-lease": record.Forced, "": record.Deadlocks}
	dbtest.Eventually(t, "history tells what has happened", func() error {
		m := tr.moment(time.Now())
		for key, what := range happened {
			if !slices.ContainsFunc(m.Around, func(e record.Event) bool { return e.Key == key && e.What == what }) {
				return fmt.Errorf("of %q not that it was %s: %+v", key, what, m.Around)
			}
		}
		return nil
	})
}
