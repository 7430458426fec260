package inspect

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
)

// Snapshot shows the locks, their holders and their waiters.
type Snapshot struct {
	Time      time.Time // the server's, when the reading began
	Namespace string    // the namespace that it shows; "" for all
	Locks     []Lock    // by namespace, key, slot and strategy
	Gaps      []Gap     // what it does not show

	// Unseen is how many transactions hold row locks, of this lock table or of others,
	// that the server does not show. It is not known if the account may not even count them.
	Unseen Known[int]

	// Namespaces are all namespaces in the lock table, also those without a held lock.
	// Advisory locks leave nothing there.
	Namespaces []Namespace

	// Deadlocks is how many deadlocks the server has broken since it started, those of
	// other applications included. It is not known if Filter.Deadlocks is not set, or if the
	// server does not tell. Deadlocks of GET_LOCK count on MySQL only.
	Deadlocks Known[uint64]
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
	Waiters   Seen[Waiter] // in the order in which they asked

	// From the key's row in the lock table. Not known if the account may not read it; an
	// advisory lock has none.
	Token     Known[uint64] // of the last grant; 0 if there was none
	Versioned Known[bool]   // the key is also used with the optimistic strategy

	Expires   time.Time     // when the lease ends unless it is renewed: the server's time, UTC; zero without a lease
	Remaining time.Duration // the time until Expires, at the moment of reading
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
	Since  Known[time.Duration] // how long it has held the lock
	Least  time.Duration        // if Since is not known: it has held the lock for at least so long
	Within Known[time.Duration] // the age of its connection's transaction, which may have waited for the lock first
	Shared bool                 // shared with others; a transaction that commits under a lease also holds its row shared
	Left   bool                 // it has given the lease back, which stays for its MinHold: its process may have ended
	Locks  Count                // how many advisory locks the connection holds; all of them end with it

	Activity *Activity // what its connection does; nil if the server does not show it

	// WaitsFor are the keys of other locks for which its connection waits; or, if that runs
	// no statement, its process, perhaps by another goroutine. See [Snapshot.Chain].
	WaitsFor []string
}

// Waiter waits for the lock in the server.
type Waiter struct {
	Client
	Least  time.Duration // it has waited for at least so long: since it asked the last time; 0 says nothing
	Shared bool          // it waits for a shared lock
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

// Waiting counts the waiters for all locks.
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
	of := func(missing bool, list []string) bool {
		return missing && (len(strategies) == 0 || slices.ContainsFunc(list, func(s string) bool { return slices.Contains(strategies, s) }))
	}
	for _, g := range gaps {
		holders, waiters = holders || of(g.Holders, g.holdersOf), waiters || of(g.Waiters, g.waitersOf)
	}
	return holders, waiters
}

// id identifies a lock.
type id struct{ strategy, namespace, name string }

// claim says that a connection holds a lock, or waits for it.
type claim struct {
	conn    uint64 // 0 is unknown
	waiting bool
	shared  bool
	order   uint64        // among the waiters
	age     time.Duration // of the transaction, or of the wait; 0 is unknown
	event   uint64        // of performance_schema, in which it asked for the lock; 0 is unknown
	since   time.Duration // it holds the lock; 0 is unknown
	least   time.Duration // it has held it for at least so long
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
	slices.SortStableFunc(list, func(a, b claim) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(b.age, a.age), cmp.Compare(a.conn, b.conn))
	})
	for _, one := range list {
		client := clients[one.conn]
		client.ConnectionID = one.conn
		if one.waiting {
			l.Waiters.List = append(l.Waiters.List, Waiter{Client: client, Least: one.age, Shared: one.shared})
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

// leaseHolder returns the holder of a lease, from the owner in its row.
func leaseHolder(owner string) Holder {
	from := keyrow.HolderOf(owner)
	h := Holder{Client: Client{Program: from.Program}, Left: from.Left}
	h.Host, h.PID = selfNamed(h.Program)
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
