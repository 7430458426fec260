package web

import (
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
)

// tracker knows what one snapshot does not tell, from those right before it.
type tracker struct {
	waits     map[wait]time.Time   // since when, by the server's clock
	holds     map[hold]time.Time   // likewise
	leases    map[string]seenLease // by the lock's id
	last      time.Time            // of the snapshot before
	deadlocks counter
}

// wait is that a connection waits for a lease. While the token is the same nobody
// was granted it, so whoever asks again on the connection has waited on.
type wait struct {
	lock  string
	token uint64
	conn  uint64
}

// hold is a lease, or a row lock of a connection's transaction.
type hold struct {
	lock  string
	token uint64 // of a lease
	conn  uint64 // of a row lock
}

// seenLease is a lease as it was seen.
type seenLease struct {
	lock    inspect.Lock
	longest time.Duration // that it had left at any time
}

func newTracker() *tracker {
	return &tracker{waits: make(map[wait]time.Time), holds: make(map[hold]time.Time), leases: make(map[string]seenLease)}
}

// follow completes the waits and the ages of locks in the snapshot, which took so long, and
// returns the leases that have run out since the last one.
func (t *tracker) follow(snap *inspect.Snapshot, took time.Duration) (lapsed []loss) {
	end := snap.Time.Add(took) // all was read before
	waits, holds, leases := make(map[wait]time.Time), make(map[hold]time.Time), make(map[string]seenLease)
	for i := range snap.Locks {
		l := &snap.Locks[i]
		t.followHolders(l, snap.Time, end, holds)
		if l.Strategy != hint.StrategyLease {
			continue
		}
		lock := id(*l)
		token, _ := l.Token.Get()
		for i := range l.Waiters.List {
			w := &l.Waiters.List[i]
			key := wait{lock, token, w.ConnectionID}
			since := snap.Time.Add(-w.Least)
			if before, known := t.waits[key]; known && before.Before(since) && w.Waited.IsZero() {
				since = before
				w.Least = snap.Time.Sub(since)
			}
			waits[key] = since
		}
		if len(l.Holders.List) > 0 && !l.Holders.List[0].Left {
			now := seenLease{*l, l.Remaining}
			if before := t.leases[lock]; before.lock.Token == l.Token {
				now.longest = max(before.longest, l.Remaining)
			}
			leases[lock] = now
		}
	}
	for lock, before := range t.leases {
		if leases[lock].lock.Token != before.lock.Token && before.neglected() && !end.Before(before.lock.Expires) {
			lapsed = append(lapsed, before.loss())
		}
	}
	t.waits, t.holds, t.leases, t.last = waits, holds, leases, snap.Time
	return lapsed
}

// followHolders notes since when a lock was seen to be held without a break: a lease with one
// token, or a row lock in one transaction. That is a bound of its age.
func (t *tracker) followHolders(l *inspect.Lock, now, end time.Time, holds map[hold]time.Time) {
	for i := range l.Holders.List {
		h := &l.Holders.List[i]
		key, same := hold{lock: id(*l)}, true
		switch token, _ := l.Token.Get(); {
		case l.Strategy == hint.StrategyLease:
			key.token = token
		case l.Strategy == hint.StrategyRow && h.ConnectionID != 0:
			within, known := h.Within.Get()
			key.conn = h.ConnectionID
			// MariaDB counts whole seconds.
			same = known && end.Add(time.Second-within).Before(t.last)
		default:
			continue
		}
		since := end
		if h.Least > 0 {
			since = now.Add(-h.Least)
		}
		if before, known := t.holds[key]; known && same && before.Before(since) {
			since = before
		}
		holds[key] = since
		if h.Since.IsZero() {
			h.Least = max(h.Least, now.Sub(since))
		}
	}
}

// soonest is how soon to look again, so as to see each lease once while it is neglected,
// before it runs out; at most atMost.
func (t *tracker) soonest(atMost time.Duration) time.Duration {
	for _, of := range t.leases {
		atMost = min(atMost, of.longest/3)
	}
	return atMost
}

// neglected reports a lease that was due to be renewed for long: that happens
// when a third of the TTL has passed.
func (t seenLease) neglected() bool { return t.lock.Remaining < t.longest/2 }

func (t seenLease) loss() loss {
	v := newLockView(t.lock)
	return loss{at: time.Now(), keys: []string{t.lock.Key}, Key: v.Key, Strategy: v.Strategy, Who: v.Holders[0].Program, Why: "it ran out, neither renewed nor given back"}
}

// lose forgets what would be taken for the present after a time in which nobody looked: the count of
// deadlocks, and who had a lease.
func (t *tracker) lose() {
	t.deadlocks = counter{}
	clear(t.leases)
}

// counter follows one of somebody else's.
type counter struct {
	known  bool
	before uint64
}

// grown returns by how much it has grown since the last time. One that has begun
// anew, with the server, has grown by what it is now.
func (c *counter) grown(now inspect.Known[uint64]) (n uint64) {
	is, known := now.Get()
	if !known {
		return 0
	}
	if n = is; n >= c.before {
		n -= c.before
	}
	if !c.known {
		n = 0
	}
	c.known, c.before = true, is
	return n
}
