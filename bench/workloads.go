package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"slices"
	"time"
)

// bench is one run of the workloads. In each, the contenders take turns in short
// rounds, in a new order each time, so that a busy machine hits all of them.
type bench struct {
	ctx     context.Context
	servers servers
	at      addresses
	delay   time.Duration  // that is added each way
	scale   float64        // of the number of rounds
	only    *regexp.Regexp // the workloads that are run
	short   bool           // everything once, for the tests
	results *results
	log     io.Writer
}

// The workloads, as results are filed.
const (
	uncontended = "uncontended"
	distinct    = "distinct keys"
	hot         = "hot key"
	burst       = "burst"
	processes   = "processes"
	handoff     = "handoff"
	manyHolds   = "holds"
	transaction = "transaction"
	busy        = "one product"
	decision    = "read, then write"
	oneWrite    = "one write"
	withoutHint = "without a hint"
	oneKey      = "one key, few connections"
	fourKeys    = "four keys, few connections"
	bounded     = "without a hint, few connections"
	hotRow      = "hot row"
	rush        = "rush" // whose callers wait for a second at most
	fullBudget  = "all connections in use, half of the callers locked"
)

// The figures, as results are filed.
const (
	timeEach    = "µs each" // take and give back, or one transaction
	rate        = "grants/s"
	waitMean    = "mean wait µs"
	waitLongest = "longest µs" // wait of all
	waitLate    = "99 % within µs"
	pingLate    = "ping, 99 % within ms" // beside the load, through the same handle
	readLate    = "unlocked read, 99 % within ms"
	statements  = "requests"    // of the lock's server for each grant
	gotNothing  = "got nothing" // goroutines
	gaveUp      = "gave up"     // calls, of all
	allHadIt    = "ms until all had it"
	shareLeast  = "least share" // of a process, against the largest
	allocated   = "allocations" // for each
	latency     = "µs"          // from giving back to having
	taking      = "take µs each"
	freeing     = "free µs each"
	clientBytes = "bytes each" // of client memory, its connections included
	sockets     = "connections"
)

// pauseToTurn is how long all processes have to hear that a round begins.
const pauseToTurn = 5 * time.Millisecond

// locks are those that wait well enough to be compared where nobody waits, and
// waiting are also those as they come.
var (
	locks   = []string{row, lease, advisory, getLock, forUpdate, insertDelete, redsyncTuned, redisTuned, etcdMutex}
	waiting = append(slices.Clip(locks), redsyncAsIs, redisAsIs)
	loaded  = append(slices.Clip(waiting), longTurns)         // with what the default could be at the price of fairness
	inOne   = append(slices.Clip(loaded), queued)             // with what bounds the hot key of one process
	passing = append(slices.Clip(waiting), getLockNoted)      // with what bounds the handoff of leases
	keeping = append(slices.Clip(locks), getLocks, notesMany) // with what bounds the taking of many
	ownKeys = append(slices.Clip(locks), notesMany)           // the same where each has its own key
	alone   = append([]string{bare, noteTwice}, locks...)     // with what bounds one caller
)

// patience is how long callers may go on waiting after the end of a round. Some
// of those who poll would take minutes.
const patience = time.Second

// hotRound is how long a round with the hot key lasts.
const hotRound = 300 * time.Millisecond

// loadSizes are how many goroutines want the hot key.
var loadSizes = []int{1, 8, 64, 256}

// all is the whole of it: the workloads next to the servers, and those in which
// round trips count again through proxies.
func (b *bench) all(delays []time.Duration) error {
	near := []loads{
		{workload: uncontended, names: alone, workers: 1, own: true, lasting: 50 * time.Millisecond, epochs: 4, rounds: 6},
		{workload: transaction, names: transactionNames(), workers: 1, lasting: 60 * time.Millisecond, epochs: 3, rounds: 6},
		{workload: busy, names: busyNames, workers: 64, lasting: hotRound, epochs: 1, rounds: 4},
		{workload: decision, names: apartNames, workers: 1, lasting: 60 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: oneWrite, names: wroteNames, workers: 1, lasting: 60 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: withoutHint, names: plainNames, workers: 1, lasting: 40 * time.Millisecond, epochs: 60, rounds: 5},
		{workload: oneKey, names: oneKeyNames, workers: 100, own: true, lasting: 500 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: fourKeys, names: fourKeysNames, workers: 24, own: true, lasting: 500 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: bounded, names: boundedNames, workers: 64, own: true, lasting: 150 * time.Millisecond, epochs: 4, rounds: 15},
		{workload: fullBudget, names: fullNames, workers: 64, own: true, lasting: 300 * time.Millisecond, epochs: 3, rounds: 8},
		{workload: hotRow, names: hotRowNames, workers: 64, lasting: hotRound, epochs: 1, rounds: 6},
		{workload: hotRow, names: hotRowFew, processes: 3, workers: 8, lasting: 2 * hotRound, epochs: 1, rounds: 5},
		{
			workload: rush, names: hotRowFew, processes: 3, workers: 100, rush: inRush, beside: besideEvery,
			lasting: 3 * time.Second, epochs: 1, rounds: 3,
		},
		{workload: distinct, names: ownKeys, workers: 64, own: true, lasting: 200 * time.Millisecond, epochs: 1, rounds: 5},
		{workload: processes, names: loaded, processes: 4, workers: 16, lasting: 600 * time.Millisecond, epochs: 1, rounds: 3},
	}
	sizes := loadSizes
	if b.short {
		sizes = sizes[1:2]
	}
	for _, n := range sizes {
		near = append(near, loads{workload: hot, names: inOne, workers: n, lasting: hotRound, epochs: 1, rounds: 3})
	}
	near = append(near, loads{workload: burst, names: waiting, workers: 64, times: 1, lasting: 10 * time.Second, epochs: 1, rounds: 3})
	for _, w := range near {
		if err := b.loads(w); err != nil {
			return err
		}
	}
	if err := b.handoffs(passing, 25); err != nil {
		return err
	}
	if err := b.holds(1000, 3); err != nil {
		return err
	}
	if !b.short {
		if err := b.holds(10_000, 2); err != nil {
			return err
		}
	}
	for _, delay := range delays {
		if err := b.far(delay); err != nil {
			return err
		}
	}
	return nil
}

// far is what is measured through a proxy.
func (b bench) far(delay time.Duration) (err error) {
	p, err := startProxy(delay, b.servers.addresses())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.end()) }()
	b.at, b.delay = p.at, delay
	all := []loads{
		{workload: uncontended, names: alone, workers: 1, own: true, lasting: 60 * time.Millisecond, epochs: 2, rounds: 4},
		{workload: transaction, names: transactionNames(), workers: 1, lasting: 80 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: decision, names: apartNames, workers: 1, lasting: 80 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: oneWrite, names: wroteNames, workers: 1, lasting: 80 * time.Millisecond, epochs: 2, rounds: 5},
		{workload: hotRow, names: hotRowNames, workers: 64, lasting: hotRound, epochs: 1, rounds: 6},
	}
	if !b.short {
		all = append(all,
			loads{workload: hot, names: waiting, workers: 64, lasting: hotRound, epochs: 1, rounds: 2},
			loads{workload: burst, names: waiting, workers: 64, times: 1, lasting: 10 * time.Second, epochs: 1, rounds: 2})
	}
	for _, w := range all {
		if err := b.loads(w); err != nil {
			return err
		}
	}
	return b.handoffs(passing, 12)
}

// transactionNames are all ways to sell a product.
func transactionNames() (names []string) {
	for _, c := range transactions(onMySQL) {
		names = append(names, c.Name)
	}
	return names
}

// ways are transactionNames without what no way to lock can be faster than.
func ways() []string {
	return slices.DeleteFunc(transactionNames(), func(name string) bool { return slices.Contains(leasts, name) })
}

// plainNames are the same work on the plain driver and on ours without a hint.
var plainNames = []string{"query, " + unlocked, "query, " + noHint, "transaction, " + unlocked, "transaction, " + noHint}

// named are the contenders of these names, on all servers there are.
func (b *bench) named(names []string) (chosen []contender) {
	for _, c := range available(contenders(), b.at) {
		if slices.Contains(names, c.Name) {
			chosen = append(chosen, c)
		}
	}
	return chosen
}

func (b *bench) times(n int) int {
	if b.short {
		return 1
	}
	return max(1, int(float64(n)*b.scale+0.5))
}

// inTurns calls do for each contender in each round.
func (b *bench) inTurns(rounds int, all []contender, do func(contender) error) error {
	for range rounds {
		for _, i := range rand.Perm(len(all)) {
			if err := b.ctx.Err(); err != nil {
				return err
			}
			if err := do(all[i]); err != nil {
				return fmt.Errorf("%s: %w", all[i], err)
			}
		}
	}
	return nil
}

func (b *bench) say(format string, args ...any) {
	far := ""
	if b.delay > 0 {
		far = fmt.Sprintf(", %v each way", b.delay)
	}
	fmt.Fprintf(b.log, "%s  %s%s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...), far)
}

func (b *bench) file(workload string, n int, c contender, figure string, value float64) {
	b.results.add(label{workload, n, b.delay, c.Name, c.Server}, figure, value)
}

// loads is a workload of goroutines that take and give back locks.
type loads struct {
	workload  string
	names     []string
	processes int // 0 is 1
	workers   int // in each
	own       bool
	times     int           // each goroutine takes it; 0 is as often as it can
	rush      time.Duration // each call is ready to wait for so long; 0 is for as long as it takes
	beside    time.Duration // how often a ping and a read are begun beside it, in rounds of their own; 0 is never
	lasting   time.Duration
	epochs    int // everything is opened anew, since one connection can be faster than another
	rounds    int // in each epoch
}

func (b *bench) loads(w loads) error {
	if !b.only.MatchString(w.workload) {
		return nil
	}
	all := b.named(w.names)
	w.processes = max(1, w.processes)
	b.say("%s, %d x %d goroutines", w.workload, w.processes, w.workers)
	n := size{Workers: w.workers, Locks: 1, Rush: w.rush}
	if w.own {
		n.Locks = w.workers
	}
	wait := patience
	if b.short {
		w.lasting = min(w.lasting, 40*time.Millisecond)
		if wait = 300 * time.Millisecond; w.workers == 1 {
			wait = 20 * time.Second // a caller that is alone gets the lock once, however busy the machine is
		}
	}
	for range b.times(w.epochs) {
		if err := b.inProcesses(w.processes, all, n, func(ps []*process) error {
			turn := func(c contender, lasting, beside time.Duration) ([]report, float64, error) {
				return b.load(ps, c, order{
					Do: "load", Contender: c.String(), Key: product, Workers: w.workers, Own: w.own,
					Begin: time.Now().Add(pauseToTurn), Lasting: lasting, Patience: wait, Times: w.times, Beside: beside,
				})
			}
			warm := w.lasting/2 + 10*b.delay
			if err := b.inTurns(1, all, func(c contender) error { _, _, err := turn(c, warm, 0); return err }); err != nil {
				return err
			}
			rounds := w.rounds
			if b.short {
				rounds = 1
			}
			return b.inTurns(rounds, all, func(c contender) error {
				for {
					reports, asked, err := turn(c, w.lasting, 0)
					if err != nil {
						return err
					}
					if b.fileLoad(w, c, reports, asked) || !b.short || wait >= time.Minute {
						break
					}
					wait *= 4 // the machine is so busy that nobody has had it
				}
				if w.beside == 0 {
					return nil
				}
				reports, _, err := turn(c, w.lasting, w.beside)
				if err == nil {
					b.fileBeside(w, c, reports)
				}
				return err
			})
		}); err != nil {
			return fmt.Errorf("%s: %w", w.workload, err)
		}
	}
	return nil
}

// inProcesses calls do with fresh processes in which all contenders are open.
func (b *bench) inProcesses(n int, all []contender, s size, do func([]*process) error) (err error) {
	ps := make([]*process, 0, n)
	defer func() {
		for _, p := range ps {
			err = errors.Join(err, p.end())
		}
	}()
	for range n {
		p, err := startProcess()
		if err != nil {
			return err
		}
		ps = append(ps, p)
	}
	for _, c := range all {
		for _, p := range ps {
			if _, err := p.ask(order{Do: "open", Contender: c.String(), At: b.at, Size: s}); err != nil {
				return err
			}
		}
	}
	return do(ps)
}

// load runs the load in all processes, and returns what each says and
// how many requests the server got meanwhile.
func (b *bench) load(ps []*process, c contender, o order) (reports []report, asked float64, err error) {
	before, err := b.servers[c.Server].requests(b.ctx)
	if err != nil {
		return nil, 0, err
	}
	for _, p := range ps {
		if err := p.tell(o); err != nil {
			return nil, 0, err
		}
	}
	for _, p := range ps {
		r, err := p.hear()
		if err != nil {
			return nil, 0, err
		}
		reports = append(reports, r)
	}
	after, err := b.servers[c.Server].requests(b.ctx)
	return reports, float64(after - before - 1), err // the question itself is one
}

// fileLoad reports false, and files nothing, if nobody has had the lock.
func (b *bench) fileLoad(w loads, c contender, reports []report, asked float64) bool {
	var sum report
	var shares []int
	for _, r := range reports {
		sum.add(r)
		shares = append(shares, r.All)
	}
	if sum.All == 0 {
		return false
	}
	file := func(figure string, value float64) { b.file(w.workload, w.workers, c, figure, value) }
	if w.workload == burst {
		file(allHadIt, micros(reports[0].Lasted)/1000)
		file(statements, asked/float64(sum.All))
		return true
	}
	file(rate, float64(sum.Grants)/w.lasting.Seconds())
	file(statements, asked/float64(sum.All))
	if w.workers == 1 {
		file(timeEach, micros(sum.Busy)/float64(sum.All))
		file(allocated, reports[0].Allocations)
		return true
	}
	file(waitMean, micros(sum.Wait)/float64(sum.Waits))
	file(waitLate, micros(reports[0].Late))
	file(allocated, reports[0].Allocations)
	file(waitLongest, micros(sum.Longest))
	file(gotNothing, float64(sum.Starved))
	if w.rush > 0 {
		file(gaveUp, float64(sum.GaveUp)/float64(sum.GaveUp+sum.All))
	}
	if len(shares) > 1 {
		file(shareLeast, float64(slices.Min(shares))/float64(slices.Max(shares)))
	}
	return true
}

// fileBeside files how long pings and reads took, of all processes together.
func (b *bench) fileBeside(w loads, c contender, reports []report) {
	var sum report
	for _, r := range reports {
		sum.add(r)
	}
	b.file(w.workload, w.workers, c, pingLate, within(sum.Beside.Pings))
	b.file(w.workload, w.workers, c, readLate, within(sum.Beside.Reads))
}

// within is how many milliseconds 99 of 100 took at most.
func within(took []time.Duration) float64 {
	var all []float64
	for _, d := range took {
		all = append(all, micros(d)/1000)
	}
	return quantile(all, 0.99)
}

// handoffs has one process wait for what another holds, and measures how long
// after it is given back it gets it.
func (b *bench) handoffs(names []string, rounds int) error {
	if !b.only.MatchString(handoff) {
		return nil
	}
	all := b.named(names)
	b.say("%s", handoff)
	once := func(holder, waiter *process, c contender) (time.Duration, error) {
		take := order{Do: "take", Contender: c.String(), Key: product}
		give := order{Do: "give", Contender: c.String()}
		if _, err := holder.ask(take); err != nil {
			return 0, err
		}
		if err := waiter.tell(take); err != nil {
			return 0, err
		}
		// Who polls is met at any moment between two tries.
		polls := time.Duration(c.polls) * time.Millisecond
		if b.short {
			polls = 0
		}
		time.Sleep(20*time.Millisecond + 10*b.delay + rand.N(polls+time.Millisecond))
		given, err := holder.ask(give)
		if err != nil {
			return 0, err
		}
		got, err := waiter.hear()
		if err != nil {
			return 0, err
		}
		_, err = waiter.ask(give)
		return got.Taken.Sub(given.Taken), err
	}
	return b.inProcesses(2, all, size{Workers: 1, Locks: 1}, func(ps []*process) error {
		for _, p := range [][]*process{{ps[0], ps[1]}, {ps[1], ps[0]}} { // opens connections
			if err := b.inTurns(1, all, func(c contender) error { _, err := once(p[0], p[1], c); return err }); err != nil {
				return err
			}
		}
		return b.inTurns(b.times(rounds), all, func(c contender) error {
			from := rand.N(2)
			took, err := once(ps[from], ps[1-from], c)
			if err == nil {
				b.file(handoff, 1, c, latency, micros(took))
			}
			return err
		})
	})
}

// takers is how many goroutines take and free many holds.
const takers = 64

// holds takes many locks, keeps all of them, and frees them. Each turn has a
// process of its own, whose memory is compared with that before the contender was
// opened.
func (b *bench) holds(n, rounds int) error {
	if !b.only.MatchString(manyHolds) {
		return nil
	}
	b.say("%d %s", n, manyHolds)
	var all []contender
	for _, c := range b.named(keeping) {
		if !c.wide || n <= 1000 { // beyond, none has as many connections
			all = append(all, c)
		}
	}
	if b.short {
		n /= 20
	}
	return b.inTurns(b.times(rounds), all, func(c contender) error {
		return b.inProcesses(1, []contender{c}, size{Workers: takers, Locks: n}, func(ps []*process) error {
			held, freed, err := holdMany(ps[0], c, n)
			if err != nil {
				return err
			}
			b.file(manyHolds, n, c, taking, micros(held.Lasted)/float64(n))
			b.file(manyHolds, n, c, freeing, micros(freed.Lasted)/float64(n))
			b.file(manyHolds, n, c, clientBytes, float64(held.Memory)/float64(n))
			b.file(manyHolds, n, c, sockets, float64(held.Connections))
			return nil
		})
	})
}

// holdMany has a process take n locks, and free them.
func holdMany(p *process, c contender, n int) (held, freed report, err error) {
	touch := order{Do: "touch", Contender: c.String(), Key: product, Workers: takers, Locks: n}
	hold, free := touch, touch
	hold.Do, free.Do = "hold", "free"
	// What rows there must be are made before others are held: see schema.
	if _, err := p.ask(touch); err != nil {
		return held, freed, err
	}
	times := 1
	if c.wide {
		times = 2 // the first opens a connection for each
	}
	for range times {
		if held, err = p.ask(hold); err != nil {
			return held, freed, err
		}
		if freed, err = p.ask(free); err != nil {
			return held, freed, err
		}
	}
	return held, freed, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
