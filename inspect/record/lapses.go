package record

import (
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

// Lapses finds leases that run out while they are held, in looks one after the other. The zero value
// is before the first look.
type Lapses struct{ leases map[string]seenLease }

// seenLease is a lease as it was seen.
type seenLease struct {
	lock    inspect.Lock
	longest time.Duration // that it had left at any time
}

// Follow returns the leases that have run out since the look before, neither renewed nor given back. The
// snapshot took so long.
func (f *Lapses) Follow(snap *inspect.Snapshot, took time.Duration) (lapsed []inspect.Lock) {
	end := snap.Time.Add(took) // all was read before
	leases := make(map[string]seenLease)
	for i := range snap.Locks {
		l := &snap.Locks[i]
		if l.Strategy != lease || len(l.Holders.List) == 0 || l.Holders.List[0].Left {
			continue
		}
		now := seenLease{*l, l.Remaining}
		if before := f.leases[name(l)]; before.lock.Token == l.Token {
			now.longest = max(before.longest, l.Remaining)
		}
		leases[name(l)] = now
	}
	for name, before := range f.leases {
		if leases[name].lock.Token != before.lock.Token && before.neglected() && !end.Before(before.lock.Expires) {
			lapsed = append(lapsed, before.lock)
		}
	}
	f.leases = leases
	return lapsed
}

// Soonest is how soon to look again, so as to see each lease once while it is neglected,
// before it runs out; at most atMost.
func (f *Lapses) Soonest(atMost time.Duration) time.Duration {
	for _, of := range f.leases {
		atMost = min(atMost, of.longest/3)
	}
	return atMost
}

// neglected reports a lease that was due to be renewed for long: that happens
// when a third of the TTL has passed.
func (l seenLease) neglected() bool { return l.lock.Remaining < l.longest/2 }

func name(l *inspect.Lock) string { return l.Namespace + "\x00" + l.Name }
