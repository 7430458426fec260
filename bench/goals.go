package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// goal is what the driver aims at on each server. A figure that could not be
// measured is NaN.
type goal struct {
	what  string
	limit float64
	least bool // the limit is the least, not the most
	got   func(r *record, on string) float64
}

// outcome is what came of a goal.
type outcome struct {
	What, Server string
	Limit        float64
	Least        bool
	Got          float64
	Met          bool
	Why          string // it was missed, as far as something was measured that shows it
}

// farDelay is the delay that goals speak of.
const farDelay = 500 * time.Microsecond

// Locks in Redis, in two forms: those who poll are as good as somebody has made
// them.
var (
	asTheyCome = []string{redsyncAsIs, redisAsIs}
	tuned      = []string{redsyncTuned, redisTuned}
)

var goals = []goal{
	{"a transaction without a hint, time against the bare driver", 1.02, false, func(r *record, on string) float64 {
		return r.ratio(label{withoutHint, 1, 0, "transaction, " + noHint, on}, label{withoutHint, 1, 0, "transaction, " + unlocked, on}, timeEach)
	}},
	{"a query without a hint, time against the bare driver", 1.02, false, func(r *record, on string) float64 {
		return r.ratio(label{withoutHint, 1, 0, "query, " + noHint, on}, label{withoutHint, 1, 0, "query, " + unlocked, on}, timeEach)
	}},
	{"a transaction without a hint, allocations more than the bare driver", 3, false, func(r *record, on string) float64 {
		return r.results.median(label{withoutHint, 1, 0, "transaction, " + noHint, on}, allocated) -
			r.results.median(label{withoutHint, 1, 0, "transaction, " + unlocked, on}, allocated)
	}},
	{lockedAim(row, farDelay), 1.05, false, locked(row, farDelay)},
	{lockedAim(lease, farDelay), 1.15, false, locked(lease, farDelay)},
	{lockedAim(optimistic, farDelay), 1.1, false, locked(optimistic, farDelay)},
	{lockedAim(advisory, farDelay), 1.15, false, locked(advisory, farDelay)},
	{"read, then write without a transaction, 0.5 ms away, time against the same unlocked", 2.1, false, func(r *record, on string) float64 {
		return r.ratio(label{decision, 1, farDelay, apartLocked, on}, label{decision, 1, farDelay, apart, on}, timeEach)
	}},
	{oneWriteAim, 1.05, false, func(r *record, on string) float64 {
		return r.ratio(label{oneWrite, 1, farDelay, wroteLocked, on}, label{oneWrite, 1, farDelay, wrote, on}, timeEach)
	}},
	{lockedAim(row, 0), 1.15, false, locked(row, 0)},
	{lockedAim(lease, 0), 1.6, false, locked(lease, 0)},
	{lockedAim(optimistic, 0), 1.4, false, locked(optimistic, 0)},
	{lockedAim(advisory, 0), 1.3, false, locked(advisory, 0)},
	{"a locked transaction (row), 0.5 ms away, time against one in redsync's lock", 0.7, false, func(r *record, on string) float64 {
		return r.sale(row, redsyncTuned, on, farDelay)
	}},
	{soldUnderRow, 0.9, false, func(r *record, on string) float64 {
		return r.sale(row, redsyncTuned, on, 0)
	}},
	{takenAlone, 1.15, false, func(r *record, on string) float64 {
		return r.ratio(label{uncontended, 1, 0, advisory, on}, label{uncontended, 1, 0, bare, on}, timeEach)
	}},
	{"advisory, 64 goroutines with keys of their own, locks a second against the better on Redis", 2, true, grants(tuned, distinct, 64, advisory)},
	{hotGrants, 20, true, grants(asTheyCome, hot, 64, advisory)},
	{hotGrantsTuned, 20, true, grants(tuned, hot, 64, advisory)},
	{askedOnce, 20, true, onceAgainstRedis(advisory)},
	{longestWait, 10, false, func(r *record, on string) float64 { return r.longest(advisory, on) }},
	{sharedGrants, 5, true, grants(asTheyCome, processes, 16, advisory)},
	{sharedGrantsTuned, 5, true, grants(tuned, processes, 16, advisory)},
	{"advisory, 4 processes of 16 goroutines, the smallest share of a process against the largest", 0.8, true, func(r *record, on string) float64 {
		return r.results.median(label{processes, 16, 0, advisory, on}, shareLeast)
	}},
	{"advisory, handoff to another process against GET_LOCK on pinned connections", 1.3, false, passedOn(advisory)},
	{hotNear.aim(inBegin), 0.85, true, hotNear.against(handLocked, inBegin)},
	{hotNear.aim(inHotDo), 1, true, hotNear.against(handLocked, inHotDo)},
	{hotNear.aim(apartJoined), 1, true, hotNear.against(handLocked, apartJoined)},
	{hotHalf.aim(inBegin), 0.65, true, hotHalf.against(handLocked, inBegin)},
	{hotHalf.aim(inHotDo), 0.65, true, hotHalf.against(handLocked, inHotDo)},
	{hotHalf.aim(apartJoined), 1.2, true, hotHalf.against(handLocked, apartJoined)},
	{hotTwo.aim(inBegin), 0.65, true, hotTwo.against(handLocked, inBegin)},
	{hotTwo.aim(inHotDo), 0.65, true, hotTwo.against(handLocked, inHotDo)},
	{hotTwo.aim(apartJoined), 1.2, true, hotTwo.against(handLocked, apartJoined)},
	{hotFew.aim(inBegin), 0.8, true, hotFew.against(handLocked, inBegin)},
	{hotFew.aim(inHotDo), 0.8, true, hotFew.against(handLocked, inHotDo)},
	{hotFew.aim(apartJoined), 0.8, true, hotFew.against(handLocked, apartJoined)},
	{hotRush.aim(inBegin), 0.8, true, hotRush.against(handLocked, inBegin)},
	{hotRush.aim(inHotDo), 0.8, true, hotRush.against(handLocked, inHotDo)},
	{hotRush.aim(apartJoined), 0.8, true, hotRush.against(handLocked, apartJoined)},
	{pingAim(inBegin), 1, false, pinged(inBegin)},
	{pingAim(inHotDo), 1, false, pinged(inHotDo)},
	{pingAim(apartJoined), 1, false, pinged(apartJoined)},
	{"row, 64 goroutines that sell one product in Do, sales a second against GET_LOCK on pinned connections", 1, true, func(r *record, on string) float64 {
		return r.ratio(label{busy, 64, 0, "transaction, " + inDo, on}, label{busy, 64, 0, "transaction, " + getLock, on}, rate)
	}},
	{rowGrants, 1.3, true, againstGetLock(row, hot, 64)},
	{rowGrantsShared, 1.1, true, againstGetLock(row, processes, 16)},
	{"row, 4 processes of 16 goroutines, the smallest share of a process against the largest", 0.8, true, func(r *record, on string) float64 {
		return r.results.median(label{processes, 16, 0, row, on}, shareLeast)
	}},
	{rowPassedOn, 1.3, false, passedOn(row)},
	{leasePassedOn, 1.3, false, passedOn(lease)},
	{leaseAlone, 0.7, false, aloneAgainstEtcd(lease)},
	{leasesApart, 2, true, apartAgainstEtcd(lease)},
	{leasesTaken, 3, false, takenAgainstRedis(lease)},
	{"lease, handoff to another process against GET_LOCK with a commit before and after", 1.3, false, func(r *record, on string) float64 {
		return r.ratio(label{handoff, 1, 0, lease, on}, label{handoff, 1, 0, getLockNoted, on}, latency)
	}},
	{"advisory, 10,000 holds, connections", 2, false, func(r *record, on string) float64 {
		return r.results.median(label{manyHolds, 10_000, 0, advisory, on}, sockets)
	}},
	{"advisory, 10,000 holds, bytes of client memory each", 2048, false, func(r *record, on string) float64 {
		return r.results.median(label{manyHolds, 10_000, 0, advisory, on}, clientBytes)
	}},
	{takenTogether, 0.5, false, func(r *record, on string) float64 {
		if on != onMySQL { // MariaDB itself takes longer the more a connection has
			return math.NaN()
		}
		return r.ratio(label{manyHolds, 10_000, 0, advisory, on}, label{manyHolds, 10_000, 0, redisTuned, onRedis}, taking)
	}},
	{"one key, 100 goroutines that read, think and write, maxConns=25, units a second against Do with unbounded pools", 0.95, true, func(r *record, on string) float64 {
		return r.ratio(label{oneKey, 100, 0, decided, on}, label{oneKey, 100, 0, decidedInDo, on}, rate)
	}},
	{"24 goroutines on 4 keys, maxConns=6, units a second against maxConns=100", 0.7, true, func(r *record, on string) float64 {
		return r.ratio(label{fourKeys, 24, 0, onFourKeysFew, on}, label{fourKeys, 24, 0, onFourKeys, on}, rate)
	}},
	{"without a hint, 64 goroutines, maxConns=25, time against the bare driver with SetMaxOpenConns(25)", 1.02, false, few(waitMean)},
	{"the same, 99 of 100 queries", 1.02, false, few(waitLate)},
	{"the same, allocations more", 2, false, func(r *record, on string) float64 {
		return r.results.median(label{bounded, 64, 0, queryBudget, on}, allocated) - r.results.median(label{bounded, 64, 0, queryBounded, on}, allocated)
	}},
	{"64 goroutines, all 25 connections in use, every other transaction locked, transactions a second against the bare driver with SetMaxOpenConns(25)", 0.6, true, func(r *record, on string) float64 {
		return r.ratio(label{fullBudget, 64, 0, fullLocked, on}, label{fullBudget, 64, 0, fullPlain, on}, rate)
	}},
	{"row, requests for each grant, the most of all loads", 3, false, mostRequests(row)},
	{"lease, requests for each grant, the most of all loads", 3, false, mostRequests(lease)},
	{"advisory, requests for each grant, the most of all loads", 3, false, mostRequests(advisory)},
}

// The goals that have a bound.
const (
	hotGrants         = "advisory, one key, 64 goroutines that take it again and again, grants a second against the better on Redis as they come"
	hotGrantsTuned    = "advisory, the same, 64 goroutines in a process, against the better on Redis, tuned"
	askedOnce         = "advisory, one key, 64 goroutines that ask once, how many times as soon all had it as with the better on Redis"
	longestWait       = "advisory, 64 goroutines in a process, longest wait against the mean"
	sharedGrants      = "advisory, one key, 4 processes of 16 goroutines, grants a second against the better on Redis as they come"
	sharedGrantsTuned = "advisory, the same in 4 processes, against the better on Redis, tuned"
	takenAlone        = "advisory, one goroutine, time against two bare round trips"
	takenTogether     = "advisory, 10,000 holds, time to take them against redislock"
	oneWriteAim       = "a write without a transaction, 0.5 ms away, time against the same unlocked"
	soldUnderRow      = "a locked transaction (row), time against one in redsync's lock"
	rowGrants         = "row, one key, 64 goroutines, grants a second against GET_LOCK on pinned connections"
	rowGrantsShared   = "row, one key, 4 processes of 16 goroutines, grants a second against GET_LOCK on pinned connections"
	rowPassedOn       = "row, handoff to another process against GET_LOCK on pinned connections"
	leaseAlone        = "lease, one goroutine, time against etcd's Mutex"
	leasesApart       = "lease, 64 goroutines with keys of their own, locks a second against etcd's Mutex"
	leasesTaken       = "lease, 10,000 holds, time to take them against redislock"
	leasePassedOn     = "lease, handoff to another process against GET_LOCK on pinned connections"
)

const (
	longerTurns = "with lockHandOvers=200, for which other processes wait longer, it"
	byHand      = "SELECT … FOR UPDATE written by hand, given back by COMMIT"
	noServer    = "a queue in the process, without a server,"
)

// bound is a contender that does what the server has to do for a goal and no more, by the
// goal's measure. Only what goes beyond is the driver's own.
type bound struct {
	name string
	got  func(r *record, on string) float64
}

// boundOf returns the bound of a goal.
func boundOf(goal string) (bound, bool) {
	for _, p := range []hotPlace{hotNear, hotHalf, hotTwo, hotFew, hotRush} {
		if goal == p.aim(inBegin) || goal == p.aim(inHotDo) { // the other way has no lock before the read
			return bound{"the same with a lock by hand, then the read,", p.against(handLocked, lockedFirst)}, true
		}
	}
	b, ok := bounds[goal]
	return b, ok
}

var bounds = map[string]bound{
	hotGrants:         {noServer, grants(asTheyCome, hot, 64, queued)},
	hotGrantsTuned:    {noServer, grants(tuned, hot, 64, queued)},
	sharedGrants:      {longerTurns, grants(asTheyCome, processes, 16, longTurns)},
	sharedGrantsTuned: {longerTurns, grants(tuned, processes, 16, longTurns)},
	askedOnce:         {"GET_LOCK on a connection for each", onceAgainstRedis(getLock)},
	longestWait:       {noServer, func(r *record, on string) float64 { return r.longest(queued, on) }},
	takenAlone: {"GET_LOCK on a pinned connection, which is lost when its caller gives up,", func(r *record, on string) float64 {
		return r.ratio(label{uncontended, 1, 0, getLock, on}, label{uncontended, 1, 0, bare, on}, timeEach)
	}},
	takenTogether: {"GET_LOCK 32 to a statement, with no waiting, cancelling or holder to tell,", func(r *record, on string) float64 {
		return r.ratio(label{manyHolds, 10_000, 0, getLocks, on}, label{manyHolds, 10_000, 0, redisTuned, onRedis}, taking)
	}},
	soldUnderRow: {"the transaction with SELECT … FOR UPDATE written in it", func(r *record, on string) float64 {
		return r.sale(forUpdate, redsyncTuned, on, 0)
	}},
	oneWriteAim: {"a lock in one text with it by hand", func(r *record, on string) float64 {
		return r.ratio(label{oneWrite, 1, farDelay, wroteJoined, on}, label{oneWrite, 1, farDelay, wrote, on}, timeEach)
	}},
	lockedAim(row, 0):               {leastRow, locked(leastRow, 0)},
	lockedAim(row, farDelay):        {leastRow, locked(leastRow, farDelay)},
	lockedAim(lease, 0):             {leastLease, locked(leastLease, 0)},
	lockedAim(lease, farDelay):      {leastLease, locked(leastLease, farDelay)},
	lockedAim(optimistic, 0):        {leastVersion, locked(leastVersion, 0)},
	lockedAim(optimistic, farDelay): {leastVersion, locked(leastVersion, farDelay)},
	lockedAim(advisory, 0):          {leastNamed, locked(leastNamed, 0)},
	lockedAim(advisory, farDelay):   {leastNamed, locked(leastNamed, farDelay)},
	leaseAlone:                      {"two notes of it, each with the COMMIT that a lease cannot do without,", aloneAgainstEtcd(noteTwice)},
	leasesApart:                     {"32 notes to a statement, with no waiting, cancelling or wake-up lock,", apartAgainstEtcd(notesMany)},
	leasesTaken:                     {"32 notes to a statement, with no waiting, cancelling or wake-up lock,", takenAgainstRedis(notesMany)},
	rowGrants:                       {byHand, againstGetLock(forUpdate, hot, 64)},
	rowGrantsShared:                 {byHand, againstGetLock(forUpdate, processes, 16)},
	rowPassedOn:                     {byHand, passedOn(forUpdate)},
	leasePassedOn:                   {"GET_LOCK with a commit before and after, which a lease cannot do without,", passedOn(getLockNoted)},
}

func (r *record) ratio(a, b label, figure string) float64 {
	return r.results.median(a, figure) / r.results.median(b, figure)
}

// sale is the time of a transaction against that of another.
func (r *record) sale(a, b, on string, delay time.Duration) float64 {
	return r.ratio(label{transaction, 1, delay, "transaction, " + a, on}, label{transaction, 1, delay, "transaction, " + b, on}, timeEach)
}

// grants is a rate against the best of those on Redis in the same workload.
func grants(rivals []string, workload string, n int, contender string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		best := math.NaN()
		for _, rival := range rivals {
			if v := r.results.median(label{workload, n, 0, rival, onRedis}, rate); !math.IsNaN(v) && !(best >= v) {
				best = v
			}
		}
		return r.results.median(label{workload, n, 0, contender, on}, rate) / best
	}
}

// aloneAgainstEtcd, apartAgainstEtcd and takenAgainstRedis are what a lease is compared with.
func aloneAgainstEtcd(contender string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{uncontended, 1, 0, contender, on}, label{uncontended, 1, 0, etcdMutex, onEtcd}, timeEach)
	}
}

func apartAgainstEtcd(contender string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{distinct, 64, 0, contender, on}, label{distinct, 64, 0, etcdMutex, onEtcd}, rate)
	}
}

func takenAgainstRedis(contender string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{manyHolds, 10_000, 0, contender, on}, label{manyHolds, 10_000, 0, redisTuned, onRedis}, taking)
	}
}

// longest is the longest wait of all against the mean.
func (r *record) longest(contender, on string) float64 {
	l := label{hot, 64, 0, contender, on}
	return quantile(r.results.values[l][waitLongest], 1) / r.results.median(l, waitMean)
}

func onceAgainstRedis(contender string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		best := math.Inf(1)
		for _, rival := range slices.Concat(asTheyCome, tuned) {
			if v := r.results.median(label{burst, 64, 0, rival, onRedis}, allHadIt); v < best { // not NaN
				best = v
			}
		}
		return best / r.results.median(label{burst, 64, 0, contender, on}, allHadIt)
	}
}

func passedOn(strategy string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{handoff, 1, 0, strategy, on}, label{handoff, 1, 0, getLock, on}, latency)
	}
}

// few is a figure of queries on a budget of connections against the bare driver.
func few(figure string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{bounded, 64, 0, queryBudget, on}, label{bounded, 64, 0, queryBounded, on}, figure)
	}
}

func mostRequests(strategy string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		var all []float64
		for _, l := range r.results.order {
			if l.Contender == strategy && l.Server == on && (l.Workload == hot && l.N > 1 || l.Workload == processes) {
				all = append(all, r.results.median(l, statements))
			}
		}
		if len(all) == 0 {
			return math.NaN()
		}
		return slices.Max(all)
	}
}

// lockedAim is what the goal for a transaction under a lock is called.
func lockedAim(strategy string, delay time.Duration) string {
	away := ""
	if delay > 0 {
		away = ", 0.5 ms away"
	}
	return fmt.Sprintf("a locked transaction (%s)%s, time against the unlocked one", strings.TrimPrefix(strategy, "mysqllock "), away)
}

// locked is the time of a transaction under a lock against one without.
func locked(strategy string, delay time.Duration) func(*record, string) float64 {
	return func(r *record, on string) float64 { return r.sale(strategy, unlocked, on, delay) }
}

// hotPlace is where a hot row is sold from.
type hotPlace struct {
	where string // in the names of goals
	of    label  // without contender and server
	few   string // the end of the contenders' names
}

var (
	hotNear = hotPlace{"", label{Workload: hotRow, N: 64}, ""}
	hotHalf = hotPlace{", 0.5 ms away", label{Workload: hotRow, N: 64, Delay: farDelay}, ""}
	hotTwo  = hotPlace{", 2 ms away", label{Workload: hotRow, N: 64, Delay: 4 * farDelay}, ""}
	hotFew  = hotPlace{", 3 processes of 8", label{Workload: hotRow, N: 8}, fewEach}
	hotRush = hotPlace{", 3 processes of 100, 5 keys, for a second each", label{Workload: rush, N: 100}, fewEach}
)

// aim is what the goal for a way to sell is called.
func (p hotPlace) aim(way string) string {
	return "a " + way + p.where + ", sales a second against FOR UPDATE by hand"
}

// against is the rate of a way to sell against that of another.
func (p hotPlace) against(other, way string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		a, b := p.of, p.of
		a.Contender, a.Server, b.Contender, b.Server = way+p.few, on, other+p.few, on
		return r.ratio(a, b, rate)
	}
}

// pingAim is what the goal for pings beside a way to sell is called.
func pingAim(way string) string {
	return "a " + way + ", 3 processes of 100, 5 keys, for a second each, 99 of 100 pings beside it, time against FOR UPDATE by hand"
}

// pinged is how long 99 of 100 pings beside a rush took at most, against FOR UPDATE by hand.
func pinged(way string) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{rush, 100, 0, way + fewEach, on}, label{rush, 100, 0, handLocked + fewEach, on}, pingLate)
	}
}

// againstGetLock is a rate against that of GET_LOCK in the same workload.
func againstGetLock(contender, workload string, n int) func(*record, string) float64 {
	return func(r *record, on string) float64 {
		return r.ratio(label{workload, n, 0, contender, on}, label{workload, n, 0, getLock, on}, rate)
	}
}

// goals returns what came of those that could be measured.
func (r *record) goals() (all []outcome) {
	for _, g := range goals {
		for _, on := range []string{onMySQL, onMariaDB} {
			if got := g.got(r, on); !math.IsNaN(got) && !math.IsInf(got, 0) {
				o := outcome{g.what, on, g.limit, g.least, rounded(got), got == g.limit || got > g.limit == g.least, ""}
				if bound, ok := boundOf(g.what); ok && !o.Met {
					if least := bound.got(r, on); !math.IsNaN(least) {
						o.Why = fmt.Sprintf("%s is at %s", bound.name, number(least))
					}
				}
				all = append(all, o)
			}
		}
	}
	return all
}

func (o outcome) aim() string {
	if o.Least {
		return fmt.Sprintf("≥ %s", number(o.Limit))
	}
	return fmt.Sprintf("≤ %s", number(o.Limit))
}
