package queue

import (
	"fmt"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// turns are how long the last callers were in front that had the key exclusively.
type turns struct {
	last [8]time.Duration
	n    int // how many turns there were in all
}

// end notes that a turn has ended which began then.
func (t *turns) end(began time.Time) {
	t.last[t.n%len(t.last)] = time.Since(began)
	t.n++
}

// quickest returns the shortest of the last turns; 0 while there are too few to tell.
func (t *turns) quickest() time.Duration {
	if t.n < len(t.last) {
		return 0
	}
	return slices.Min(t.last[:])
}

// lastMoments bounds how much time left is too little for a caller that comes to the front, if turns take longer.
const lastMoments = 10 * time.Millisecond

// hopeless returns why a caller is refused, in front of which so many others wait to have the key alone, and whose context
// or wait ends after left; nil if the caller may succeed. Those who share the key have it together.
func (t *turns) hopeless(others int, left time.Duration) error {
	turn := t.quickest()
	if turn == 0 || time.Duration(others)*turn <= left {
		return nil
	}
	return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("%d callers of this process wait in front of it,"+
		" the last ones had the key for %v each, and it has %v left",
		others, turn.Round(time.Microsecond), left.Round(time.Microsecond)))
}

// tooLate returns why w is refused, which would come to the front now; nil if it is not.
func (t *turns) tooLate(w *waiter) error {
	if w.ends.IsZero() || w.ticket.place == w {
		return nil
	}
	turn, left := t.quickest(), time.Until(w.ends)
	if left >= min(turn, lastMoments) {
		return nil
	}
	return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the last ones had the key for %v each, and its context ends in %v",
		turn.Round(time.Microsecond), left.Round(time.Microsecond)))
}
