package inspect

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
)

// Snapshot is who holds what, and who waits for it.
type Snapshot struct {
	Time      time.Time // the server's, when the reading began
	Namespace string    // whose locks it shows; "" for all
	Locks     []Lock    // by namespace, key, slot and strategy
	Gaps      []Gap     // what it does not tell

	// Deadlocks is how many the server has broken since it started, of all who use
	// it; nil where Filter.Deadlocks did not ask, or the server does not tell. Those
	// among GET_LOCK are counted on MySQL, and not on MariaDB.
	Deadlocks *uint64
}

// Lock is one lock: of a strategy, on one key, or one slot of it, or one stripe.
type Lock struct {
	Strategy  string // "row", "lease" or "advisory"; "" where nobody has a key that was asked for
	Namespace string // "" where the name does not tell it
	Key       string // "" where the name does not tell it
	Name      string // that of the row, or of the server's named lock, which always tells one from another
	Slot      int    // of a key with slots
	Stripe    int    // the row is the i-th of those that all keys share; -1 where it is none of them
	Holders   []Holder
	Waiters   []Waiter // in the order in which they have asked

	// What the key's row says; nothing where there is none.
	Token     uint64        // of the last grant
	Versioned bool          // the key is kept optimistically, too
	Expires   time.Time     // when the lease ends, unless it is renewed: the server's time, UTC; zero where there is none
	Remaining time.Duration // until then, when it was read
}

// Client is who holds a lock, or waits for it. What the server does not show is
// zero.
type Client struct {
	ConnectionID uint64 // 0 for who has a lease, which needs none
	User         string // the account's name
	Host         string // where the connection comes from; for who has a lease what it calls itself
	Program      string // the lockOwner, else the program's name
	PID          int
}

// Holder has the lock.
type Holder struct {
	Client
	Since  time.Duration // age of the transaction that has locked the row
	Shared bool          // with others; or a transaction that is about to commit under a lease, which keeps its row so
	Left   bool          // it has given the lease back, which stays for its MinHold
	Locks  int           // how many advisory locks are on the connection, and end with it
}

// Waiter waits for the lock in the server.
type Waiter struct {
	Client
	Waited time.Duration // since it asked the last time
	Shared bool          // it is ready to share
}

// Gap is something that a Snapshot does not tell.
type Gap struct {
	What   string // what is not shown
	Why    string
	Remedy string // a statement, or a setting, that would show it; "" where nothing would
}

// id tells one lock from another.
type id struct{ strategy, namespace, name string }

// claim is that a connection has a lock, or wants to have it.
type claim struct {
	conn    uint64 // 0 is unknown
	waiting bool
	shared  bool
	order   uint64        // among those who wait
	age     time.Duration // of the transaction, or of the wait
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

// held is how many named locks each connection has.
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
func (l *Lock) fill(list []claim, clients map[uint64]Client, held map[uint64]int) {
	slices.SortStableFunc(list, func(a, b claim) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(b.age, a.age), cmp.Compare(a.conn, b.conn))
	})
	for _, one := range list {
		client := clients[one.conn]
		client.ConnectionID = one.conn
		if one.waiting {
			l.Waiters = append(l.Waiters, Waiter{Client: client, Waited: one.age, Shared: one.shared})
			continue
		}
		h := Holder{Client: client, Since: one.age, Shared: one.shared}
		if l.Strategy == advisory {
			h.Locks = held[one.conn]
		}
		l.Holders = append(l.Holders, h)
	}
}

// leaseHolder says who has a lease, from the row's owner.
func leaseHolder(owner string) Holder {
	h := Holder{Client: Client{Program: keyrow.HolderOf(owner).Program}, Left: strings.HasSuffix(owner, leftMark)}
	h.Host, h.PID = selfNamed(h.Program)
	return h
}

// leftMark ends the owner of a lease that nobody has any more.
const leftMark = "#00000000"

var defaultOwner = regexp.MustCompile(`^(.+):([0-9]{1,9}):[^:]*$`)

// selfNamed reads host and process from a lockOwner that was not set by hand.
func selfNamed(owner string) (host string, pid int) {
	m := defaultOwner.FindStringSubmatch(owner)
	if m == nil {
		return "", 0
	}
	pid, _ = strconv.Atoi(m[2])
	return m[1], pid
}
