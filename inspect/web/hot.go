package web

import (
	"cmp"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

const (
	// remembers is how many minutes are kept, and hottest how many classes of keys for
	// each.
	remembers = 4 * 60
	hottest   = 10

	// restOfKeys is the class of those for which a minute has no room.
	restOfKeys = "all others"
)

// ranges are how far one can look back, in minutes.
var ranges = []int{int(window / time.Minute), 60, remembers}

// minute has the waits of one.
type minute struct {
	point        // its beginning, and the most of all that was seen
	keys  []heat // the hottest first, once it is over
}

// heat is how much was waited for the keys of a class, as far as was seen: at least so much.
type heat struct {
	Class   string `json:"class"`
	Waited  int64  `json:"waited"`  // by all waiters together, as far as was looked
	Longest int64  `json:"longest"` // wait that was seen
	Most    int    `json:"most"`    // that were seen to wait at the same time
	Lost    int    `json:"lost"`
	Now     int    `json:"now"`               // wait
	More    bool   `json:"more,omitempty"`    // more may have waited than Most
	NowMore bool   `json:"nowMore,omitempty"` // likewise, now
}

// add counts the waits of another time, or of other keys.
func (h *heat) add(other heat) {
	h.Waited += other.Waited
	h.Longest, h.Most = max(h.Longest, other.Longest), max(h.Most, other.Most)
	h.Lost += other.Lost
	h.More = h.More || other.More
}

// hotter sorts: the class most waited for comes first.
func hotter(a, b heat) int {
	return cmp.Or(cmp.Compare(b.Waited, a.Waited), cmp.Compare(b.Longest, a.Longest), cmp.Compare(b.Lost, a.Lost),
		cmp.Compare(a.Class, b.Class))
}

// past has the waits of late: at most remembers minutes, each with at most hottest
// classes of keys. It does not grow with the keys.
type past struct {
	class   func(key string) string
	minutes []minute // the oldest first
}

// see notes a look at the locks, and the losses since the one before, which was so long
// ago.
func (p *past) see(at point, snap *inspect.Snapshot, lost []loss, since time.Duration) {
	seen := p.heats(snap, lost, since)
	begin := at.Time - at.Time%time.Minute.Milliseconds()
	if n := len(p.minutes); n == 0 || p.minutes[n-1].Time != begin {
		if n > 0 {
			p.minutes[n-1].keys = cool(p.minutes[n-1].keys)
		}
		p.minutes = append(p.minutes, minute{point: point{Time: begin}})
		oldest := begin - remembers*time.Minute.Milliseconds()
		p.minutes = slices.DeleteFunc(p.minutes, func(m minute) bool { return m.Time <= oldest })
	}
	m := &p.minutes[len(p.minutes)-1]
	m.Longest, m.Waiting = most(m.Longest, at.Longest), most(m.Waiting, at.Waiting)
	m.Deadlocks += at.Deadlocks
	m.More = m.More || at.More
	m.keys = merged(append(m.keys, seen...))
	if len(m.keys) > 10*hottest { // of one minute, which is not over
		m.keys = cool(m.keys)
	}
}

// most is the greater of a and b. Either may be unknown.
func most[T cmp.Ordered](a, b inspect.Known[T]) inspect.Known[T] {
	x, known := a.Get()
	y, alsoKnown := b.Get()
	if !known || alsoKnown && y > x {
		return b
	}
	return a
}

// heats are those of one look.
func (p *past) heats(snap *inspect.Snapshot, lost []loss, since time.Duration) (seen []heat) {
	for _, l := range snap.Locks {
		if len(l.Waiters.List) == 0 {
			continue
		}
		h := heat{Class: p.classOf(l), Most: len(l.Waiters.List), More: l.Waiters.More}
		for _, w := range l.Waiters.List {
			h.Longest = max(h.Longest, milliseconds(w.Least))
			h.Waited += milliseconds(min(w.Least, since))
		}
		seen = append(seen, h)
	}
	// Of the keys of a class all wait at the same time.
	seen = sum(seen, func(into *heat, h heat) { most := into.Most + h.Most; into.add(h); into.Most = most })
	for _, l := range lost {
		if time.Since(l.at) > time.Minute {
			continue // while nobody looked
		}
		for _, key := range l.keys {
			seen = append(seen, heat{Class: p.named(key), Lost: 1})
		}
	}
	return seen
}

// classOf is the class of a lock's key, or the key where there are no classes.
func (p *past) classOf(l inspect.Lock) string {
	if l.Key == "" {
		return newLockView(l).Key
	}
	return p.named(l.Key)
}

func (p *past) named(key string) string {
	if p.class != nil {
		key = cmp.Or(p.class(key), inspect.OtherKeys)
	}
	return printable(key)
}

// points are those of the minutes, for the plots.
func (p *past) points() []point {
	out := make([]point, len(p.minutes))
	for i, m := range p.minutes {
		out[i] = m.point
	}
	return out
}

// hot are the hottest classes for each of the ranges, with who waits now.
func (p *past) hot(now int64, snap *inspect.Snapshot) [][]heat {
	waiting := make(map[string]inspect.Count)
	for _, l := range snap.Locks {
		if len(l.Waiters.List) > 0 {
			waiting[p.classOf(l)] = waiting[p.classOf(l)].Plus(l.Waiters.Count())
		}
	}
	out := make([][]heat, len(ranges))
	for i, minutes := range ranges {
		from := now - int64(minutes)*time.Minute.Milliseconds()
		var all []heat
		for _, m := range p.minutes {
			if m.Time > from-time.Minute.Milliseconds() {
				all = append(all, m.keys...)
			}
		}
		out[i] = cool(merged(all))
		for j := range out[i] {
			now := waiting[out[i][j].Class]
			out[i][j].Now, out[i][j].NowMore = now.Seen, now.More
		}
	}
	return out
}

// merged adds up by class the waits of different times.
func merged(list []heat) []heat { return sum(list, (*heat).add) }

// sum has each class once.
func sum(list []heat, add func(into *heat, h heat)) []heat {
	at := make(map[string]int)
	out := []heat{}
	for _, h := range list {
		if i, known := at[h.Class]; known {
			add(&out[i], h)
			continue
		}
		at[h.Class] = len(out)
		out = append(out, h)
	}
	return out
}

// cool keeps the hottest of list, and makes one of the rest.
func cool(list []heat) []heat {
	slices.SortFunc(list, hotter)
	if len(list) <= hottest {
		return list
	}
	rest := heat{Class: restOfKeys}
	for _, h := range list[hottest-1:] {
		rest.add(h)
	}
	return merged(append(list[:hottest-1:hottest-1], rest))
}
