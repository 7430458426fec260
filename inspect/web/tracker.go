package web

import (
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/internal/hint"
)

// tracker knows what one snapshot does not tell, from those right before it.
type tracker struct {
	waits     map[wait]time.Time // since when, by the server's clock
	lapses    record.Lapses
	deadlocks counter
	holders   map[string]string // of the leases in the look before, by lock
	forced    map[string]uint64 // tokens of the leases that were taken away, by lock; nil before the first look
}

// wait is a connection's wait for a lease. While the token is the same nobody was
// granted it, so a caller that asks again on the connection has waited on.
type wait struct {
	lock  string
	token uint64
	conn  uint64
}

func newTracker() *tracker {
	return &tracker{waits: make(map[wait]time.Time)}
}

// follow completes the waits in the snapshot, which took so long, and returns the leases that have run
// out, or were taken away, since the last one.
func (t *tracker) follow(snap *inspect.Snapshot, took time.Duration) (lapsed []loss) {
	waits := make(map[wait]time.Time)
	for i := range snap.Locks {
		l := &snap.Locks[i]
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
	}
	t.waits = waits
	for _, l := range t.lapses.Follow(snap, took) {
		lapsed = append(lapsed, newLoss(l))
	}
	return append(lapsed, t.taken(snap)...)
}

// taken returns the leases that were taken away by force since the look before.
func (t *tracker) taken(snap *inspect.Snapshot) (lost []loss) {
	if hidden, _ := snap.Incomplete(hint.StrategyLease); hidden { // not all of them are told
		return nil
	}
	forced, holders := make(map[string]uint64), make(map[string]string)
	for i := range snap.Forced {
		l := &snap.Forced[i]
		lock, f := id(*l), l.Forced
		forced[lock] = f.Token
		if t.forced == nil || t.forced[lock] == f.Token {
			continue
		}
		why := fmt.Sprintf("it was taken away by %s in process %s", f.Account, f.Process)
		if f.Reason != "" {
			why += ": " + f.Reason
		}
		lost = append(lost, loss{
			at: time.Now(), keys: []string{l.Key}, Key: newLockView(*l).Key, Strategy: hint.StrategyLease, Who: t.holders[lock], Why: printable(why),
		})
	}
	for i := range snap.Locks {
		if l := &snap.Locks[i]; l.Strategy == hint.StrategyLease && len(l.Holders.List) > 0 {
			holders[id(*l)] = printable(l.Holders.List[0].Program)
		}
	}
	t.forced, t.holders = forced, holders
	return lost
}

// newLoss is that of a lease that has run out.
func newLoss(l inspect.Lock) loss {
	v := newLockView(l)
	return loss{
		at: time.Now(), keys: []string{l.Key}, Key: v.Key, Strategy: v.Strategy, Who: v.Holders[0].Program,
		Why: "it ran out, neither renewed nor given back",
	}
}

// lose forgets what would be taken for the present after a time in which nobody looked: the count of
// deadlocks, who had a lease, and which were taken away.
func (t *tracker) lose() {
	t.deadlocks = counter{}
	t.lapses = record.Lapses{}
	t.forced, t.holders = nil, nil
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
