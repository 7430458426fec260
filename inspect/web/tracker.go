package web

import (
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
)

// tracker knows what one snapshot does not tell, from those right before it.
type tracker struct {
	waits     map[wait]time.Time // since when, by the server's clock
	leases    map[string]tenure  // by the lock's id
	deadlocks counter
}

// wait is that a connection waits for a lease. While the token is the same nobody
// was granted it, so whoever asks again on the connection has waited on.
type wait struct {
	lock  string
	token uint64
	conn  uint64
}

// tenure is a lease as it was seen.
type tenure struct {
	lock    inspect.Lock
	longest time.Duration // that it had left at any time
}

func newTracker() *tracker {
	return &tracker{waits: make(map[wait]time.Time), leases: make(map[string]tenure)}
}

// follow completes the waits in the snapshot, which took so long, and returns the
// leases that have run out since the last one.
func (t *tracker) follow(snap *inspect.Snapshot, took time.Duration) (lapsed []loss) {
	waits, leases := make(map[wait]time.Time), make(map[string]tenure)
	for _, l := range snap.Locks {
		if l.Strategy != hint.StrategyLease {
			continue
		}
		lock := id(l)
		for i := range l.Waiters {
			w := &l.Waiters[i]
			key := wait{lock, l.Token, w.ConnectionID}
			since := snap.Time.Add(-w.Waited)
			if before, known := t.waits[key]; known && before.Before(since) {
				since = before
				w.Waited = snap.Time.Sub(since)
			}
			waits[key] = since
		}
		if len(l.Holders) > 0 && !l.Holders[0].Left {
			now := tenure{l, l.Remaining}
			if before := t.leases[lock]; before.lock.Token == l.Token {
				now.longest = max(before.longest, l.Remaining)
			}
			leases[lock] = now
		}
	}
	end := snap.Time.Add(took) // leases are read some time after the beginning
	for lock, before := range t.leases {
		if leases[lock].lock.Token != before.lock.Token && before.neglected() && !end.Before(before.lock.Expires) {
			lapsed = append(lapsed, before.loss())
		}
	}
	t.waits, t.leases = waits, leases
	return lapsed
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
func (t tenure) neglected() bool { return t.lock.Remaining < t.longest/2 }

func (t tenure) loss() loss {
	v := newLockView(t.lock)
	return loss{at: time.Now(), keys: []string{t.lock.Key}, Key: v.Key, Strategy: v.Strategy, Who: v.Holders[0].Program, Why: "it ran out, neither renewed nor given back"}
}

// counter follows one of somebody else's.
type counter struct {
	known  bool
	before uint64
}

// grown returns by how much it has grown since the last time. One that has begun
// anew, with the server, has grown by what it is now. nil is unknown.
func (c *counter) grown(now *uint64) (n uint64) {
	if now == nil {
		return 0
	}
	if n = *now; n >= c.before {
		n -= c.before
	}
	if !c.known {
		n = 0
	}
	c.known, c.before = true, *now
	return n
}
