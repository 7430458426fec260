package inspect

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Snapshot shows the locks, their holders and their waiters.
type Snapshot struct {
	Time      time.Time // the server's, when the reading began; all ages are of this moment
	Namespace string    // the namespace that it shows; "" for all
	NoTable   bool      // the lock table does not exist: its name is wrong, it was dropped, or no program has made it yet
	Locks     []Lock    // by namespace, key, slot and strategy
	Gaps      []Gap     // what it does not show

	// Unseen is how many transactions hold row locks, or on TiDB may, of this lock table or of others,
	// that the server does not show. It is not known if the account may not even count them.
	Unseen Known[int]

	// Namespaces are all namespaces in the lock table, also those without a held lock.
	// Advisory locks leave nothing there.
	Namespaces []Namespace

	// Deadlocks is how many deadlocks the server has broken since it started, those of
	// other applications included. It is not known if Filter.Deadlocks is not set, or if the
	// server does not tell. Deadlocks of GET_LOCK count on MySQL only.
	Deadlocks Known[uint64]

	// Forced are the leases that were taken away by [Inspector.Release], of each key the last one, with Lock.Forced
	// and without holders or waiters. Nil if Filter.Forced is not set, or if the table does not tell it.
	Forced []Lock

	beyond []Lock // of other keys than those asked for: chains lead there
}

// Lock is one lock: of a strategy, on one key, or one slot of it, or one stripe.
type Lock struct {
	Strategy  string // "row", "lease" or "advisory"; "" for a key of Filter.Keys of which no holder or waiter is seen
	Namespace string // "" if the name does not tell it
	Key       string // "" if the name does not tell it
	Name      string // of the row, or of the server's named lock; unique for each lock of a strategy and namespace
	Slot      int    // the index of the slot; 0 is also the lock of a key that is used without slots
	Slotted   bool   // the key has other slots in the lock table, so Slot is one of several
	Stripe    int    // the index of the row, if all keys share rows; else -1
	Holders   Seen[Holder]
	Waiters   Seen[Waiter]
	InOrder   bool // Waiters are in the server's queue for a row, and in its order; else the longest wait comes first

	// From the key's row in the lock table. Not known if the account may not read it; an
	// advisory lock has none.
	Token     Known[uint64] // of the last grant; 0 if there was none
	Versioned Known[bool]   // the key is also used with the optimistic strategy
	Used      Known[bool]   // it has a row: else it was never used in this namespace, or only by advisory locks, or long ago (see Clean)

	Expires   time.Time     // when the lease ends unless it is renewed: the server's time, UTC; zero without a lease
	Remaining time.Duration // the time until Expires, at the moment of reading

	// Lapsed had the lease on a key of Filter.Keys that nobody has since: it was neither renewed
	// nor given back. Nil if it was given back, or if the account may not read that.
	Lapsed *Holder

	// Forced is when a lease on the key was last taken away from its holder by [Inspector.Release].
	// Nil if that never was, or is not known.
	Forced *Forced
}

// Overtaken reports that a waiter in the server's queue for a row is before another one that has waited for
// longer: a waiter asks anew after its lockTTL, 30 s by default, and is the last in the queue then.
func (l *Lock) Overtaken() bool {
	return l.InOrder && !slices.IsSortedFunc(l.Waiters.List, func(a, b Waiter) int { return cmp.Compare(b.Least, a.Least) })
}

// Forced says who has taken a lease away from its holder.
type Forced struct {
	Token   uint64    // of the lease
	Time    time.Time // the server's, UTC
	Account string    // whose connection did it: user@host
	Process string    // which program: host:pid:program
	Reason  string    // "" if none was given
}

// Client is the connection, and its program, that holds a lock or waits for it. A field
// that the server does not show is zero.
type Client struct {
	ConnectionID uint64 // 0 for the holder of a lease, which needs no connection
	User         string // the account's name
	Host         string // where the connection comes from; for the holder of a lease, its own name for the host
	Program      string // the lockOwner, or else the name of the program
	PID          int
}

// Holder holds the lock.
type Holder struct {
	Client
	Since Known[time.Duration] // how long it has held the lock
	Least time.Duration        // if Since is not known: it has held the lock for at least so long
	// Within is the age of its connection's transaction, which may have waited for the lock first; on MariaDB, which tells
	// whole seconds, at least.
	Within Known[time.Duration]
	Shared bool // shared with others; a transaction that commits under a lease also holds its row shared
	Left   bool // it has given the lease back, which stays for its MinHold: its process may have ended
	// Of a lease: how long ago it was renewed last, and its TTL. Not known before the first
	// renewal, which is due a third of the TTL after the grant; if the holder is a program of a
	// version that does not tell it; if the lock table lacks the columns for it, see
	// [Inspector.MakeTable]; or if no renewal is due any more, because of its MaxHold. The same
	// goes for Since of a lease.
	Renewed, TTL Known[time.Duration]

	// Of a lease that has told no renewal yet: how long ago it was granted, if its TTL is ExpectedTTL: that of the
	// lease before it on the key, or what this lease was seen to have left in an earlier Snapshot of the
	// Inspector. Not known if there is neither.
	Unrenewed, ExpectedTTL Known[time.Duration]

	Locks Count // how many advisory locks the connection holds; all of them end with it

	Activity *Activity // what its connection does; nil if the server does not show it

	// WaitsFor are the keys of other locks for which its connection waits; or, if that runs
	// no statement, its process, perhaps by another goroutine. See [Snapshot.Chain].
	WaitsFor []string
}

// Silent reports that a lease was not renewed when that was due: its holder has ended, is frozen, cut off,
// or too slow. The lease ends when Renewed reaches the TTL.
func (h *Holder) Silent() bool {
	renewed, known := h.Renewed.Get()
	ttl, _ := h.TTL.Get()
	return known && late(renewed, ttl)
}

// Overdue reports that the first renewal of a lease was due, if its TTL is ExpectedTTL, and was not told:
// its holder has ended, is frozen, cut off, or too slow; or no renewal is due at all, because of its MaxHold.
func (h *Holder) Overdue() bool {
	unrenewed, known := h.Unrenewed.Get()
	expected, _ := h.ExpectedTTL.Get()
	return known && late(unrenewed, expected)
}

// late reports whether a renewal is more than a fifth late: it may be a tenth late.
func late(since, ttl time.Duration) bool { return since > schema.RenewedAfter(ttl)*6/5 }

// Waiter waits for the lock in the server.
type Waiter struct {
	Client
	Waited Known[time.Duration] // how long its caller has waited
	Least  time.Duration        // it has waited for at least so long; if Waited is not known: since its last statement began; 0 says nothing
	Shared bool                 // it waits for a shared lock
}

// Gap is something that a Snapshot does not show.
type Gap struct {
	What   string // what is not shown
	Why    string
	Remedy string // a statement or a setting that would show it; "" if there is none

	// Holders and Waiters may be missing from the Snapshot because of it.
	Holders, Waiters bool

	holdersOf, waitersOf []string // of these strategies
}

// Held counts the locks that are held.
func (s *Snapshot) Held() Count {
	var c Count
	for i := range s.Locks {
		c.Seen += min(len(s.Locks[i].Holders.List), 1)
	}
	c.More, _ = s.Incomplete()
	return c
}

// Waiting counts the waiters for all locks, without callers that wait for nothing in the server,
// but ask again and again, as some do for leases and advisory locks.
func (s *Snapshot) Waiting() Count {
	var c Count
	for i := range s.Locks {
		c.Seen += len(s.Locks[i].Waiters.List)
	}
	_, c.More = s.Incomplete()
	return c
}

// Incomplete reports whether holders or waiters may be missing from the Snapshot, also those
// of locks that it does not show at all: of locks of these strategies, or of any without.
func (s *Snapshot) Incomplete(strategies ...string) (holders, waiters bool) {
	return incomplete(s.Gaps, strategies)
}

func incomplete(gaps []Gap, strategies []string) (holders, waiters bool) {
	of := func(missing bool, list []string) bool { // without a list, of any strategy: a caller has made the Gap
		all := len(strategies) == 0 || len(list) == 0
		return missing && (all || slices.ContainsFunc(list, func(s string) bool { return slices.Contains(strategies, s) }))
	}
	for _, g := range gaps {
		holders, waiters = holders || of(g.Holders, g.holdersOf), waiters || of(g.Waiters, g.waitersOf)
	}
	return holders, waiters
}

// id identifies a lock.
type id struct{ strategy, namespace, name string }

// id is how claims name the lock.
func (l *Lock) id() id {
	if l.Strategy == advisory {
		return id{strategy: advisory, name: l.Name}
	}
	return id{l.Strategy, l.Namespace, l.Name}
}

// claim says that a connection holds a lock, or waits for it.
type claim struct {
	conn    uint64 // 0 is unknown
	waiting bool
	shared  bool
	order   uint64        // among the waiters
	age     time.Duration // of the transaction, or of the wait, at least; 0 is unknown
	waited  bool          // age is that of the wait, and not only of its last statement
	event   uint64        // of performance_schema, in which it asked for the lock; 0 is unknown
	since   time.Duration // it holds the lock; 0 is unknown
	least   time.Duration // it has held it for at least so long
}

// saying is the claim of one who waits by a statement of that text, which may say for how long
// its caller had waited before. The age of a statement that the server counts is exact.
func (c claim) saying(text string) claim {
	if before, ok := server.ReadWaits(text); ok && c.waiting {
		c.age, c.waited = c.age+before, c.order != 0
	}
	return c
}

// claims are what the server shows of the locks.
type claims map[id][]claim

// add notes a claim, once for each connection.
func (c claims) add(lock id, one claim) {
	i := slices.IndexFunc(c[lock], func(other claim) bool {
		return other.conn == one.conn && other.waiting == one.waiting && one.conn != 0
	})
	if i < 0 {
		c[lock] = append(c[lock], one)
		return
	}
	c[lock][i].shared = c[lock][i].shared && one.shared
	if e := c[lock][i].event; one.event != 0 && (e == 0 || one.event < e) {
		c[lock][i].event = one.event
	}
}

// holding are the connections that hold locks.
func (c claims) holding() []uint64 {
	var out []uint64
	for _, list := range c {
		for _, one := range list {
			if one.conn != 0 && !one.waiting {
				out = append(out, one.conn)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// connections are those that have claims.
func (c claims) connections() []uint64 {
	var out []uint64
	for _, list := range c {
		for _, one := range list {
			if one.conn != 0 {
				out = append(out, one.conn)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// held is how many named locks each connection is seen to have.
func (c claims) held() map[uint64]int {
	out := make(map[uint64]int)
	for lock, list := range c {
		for _, one := range list {
			if lock.strategy == advisory && !one.waiting {
				out[one.conn]++
			}
		}
	}
	return out
}

// fill puts the claims into the lock.
func (l *Lock) fill(list []claim, clients map[uint64]Client) {
	l.InOrder = l.Strategy == row && !slices.ContainsFunc(list, func(c claim) bool { return c.waiting && c.order == 0 })
	slices.SortStableFunc(list, func(a, b claim) int {
		byOrder := 0
		if l.InOrder {
			byOrder = cmp.Compare(a.order, b.order)
		}
		return cmp.Or(byOrder, cmp.Compare(b.age, a.age), cmp.Compare(a.conn, b.conn))
	})
	for _, one := range list {
		client := clients[one.conn]
		client.ConnectionID = one.conn
		if one.waiting {
			l.Waiters.List = append(l.Waiters.List, Waiter{Client: client, Least: one.age, Shared: one.shared})
			if one.waited {
				l.Waiters.List[len(l.Waiters.List)-1].Waited = Value(one.age)
			}
			continue
		}
		h := Holder{Client: client, Since: positive(one.since), Shared: one.shared}
		if one.since == 0 {
			h.Least = one.least
		}
		if one.age > 0 { // which was read before
			h.Within = Value(max(one.age, one.since, one.least))
		}
		l.Holders.List = append(l.Holders.List, h)
	}
}

// positive is d, and not known if that is 0.
func positive(d time.Duration) Known[time.Duration] {
	if d <= 0 {
		return Known[time.Duration]{}
	}
	return Value(d)
}

// expect notes of the holder of a lease that has so much left, and has told no renewal yet, that its TTL may
// be ttl.
func (h *Holder) expect(ttl Known[time.Duration], left time.Duration) {
	if expected, known := ttl.Get(); known && left <= expected {
		h.ExpectedTTL, h.Unrenewed = ttl, Value(expected-left)
	}
}

// leaseHolder returns the holder of a lease, from its row.
func leaseHolder(r tableRow) Holder {
	from := keyrow.HolderOf(r.owner)
	h := Holder{Client: Client{Program: from.Program}, Left: from.Left}
	h.Host, h.PID = selfNamed(h.Program)
	if !h.Left { // else its last holder had it
		h.Since, h.TTL, h.Renewed = r.since, r.ttl, r.renewed
		h.expect(r.ttlBefore, r.remaining)
	}
	return h
}

var defaultOwner = regexp.MustCompile(`^(.+):([0-9]{1,9}):[^:]*$`)

// selfNamed reads host and process id from a lockOwner of the default form.
func selfNamed(owner string) (host string, pid int) {
	m := defaultOwner.FindStringSubmatch(owner)
	if m == nil {
		return "", 0
	}
	pid, _ = strconv.Atoi(m[2])
	return m[1], pid
}
