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
func (l *Lapses) Follow(snap *inspect.Snapshot, took time.Duration) (lapsed []inspect.Lock) {
	end := snap.Time.Add(took) // all was read before
	leases := make(map[string]seenLease)
	for i := range snap.Locks {
		lock := &snap.Locks[i]
		if lock.Strategy != lease || len(lock.Holders.List) == 0 || lock.Holders.List[0].Left {
			continue
		}
		now := seenLease{*lock, lock.Remaining}
		if before := l.leases[name(lock)]; before.lock.Token == lock.Token {
			now.longest = max(before.longest, lock.Remaining)
		}
		leases[name(lock)] = now
	}
	for name, before := range l.leases {
		if leases[name].lock.Token != before.lock.Token && before.neglected() && !end.Before(before.lock.Expires) {
			lapsed = append(lapsed, before.lock)
		}
	}
	l.leases = leases
	return lapsed
}

// Soonest is how soon to look again, so as to see each lease once while it is neglected,
// before it runs out; at most atMost.
func (l *Lapses) Soonest(atMost time.Duration) time.Duration {
	for _, of := range l.leases {
		atMost = min(atMost, of.longest/3)
	}
	return atMost
}

// neglected reports whether less than half of the longest remaining time is left: a renewal is due after a third of the TTL.
func (sl seenLease) neglected() bool { return sl.lock.Remaining < sl.longest/2 }

func name(l *inspect.Lock) string { return l.Namespace + "\x00" + l.Name }
