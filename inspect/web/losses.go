package web

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock"
)

// Losses remembers which locks a process has lost, for [Options]. It is made the
// [mysqllock.Observer] of the process's database handles. The zero value is ready
// for use. It is safe for concurrent use.
type Losses struct {
	mu     sync.Mutex
	from   time.Time // when they began to be counted, at the latest
	total  uint64
	recent []loss // the latest last
}

// remembered is how many losses there is room for.
const remembered = 20

// loss is a lock that was lost.
type loss struct {
	at       time.Time
	keys     []string
	Ago      int64  `json:"ago"`
	Key      string `json:"key"`
	Strategy string `json:"strategy"`
	Who      string `json:"who,omitempty"`
	Why      string `json:"why"`
}

// Observe implements [mysqllock.Observer].
func (l *Losses) Observe(_ context.Context, e mysqllock.Event) {
	if e.Kind != mysqllock.Lost {
		return
	}
	lost := loss{at: time.Now(), Strategy: e.Strategy, keys: e.Keys}
	for i, key := range e.Keys {
		if i > 0 {
			lost.Key += ", "
		}
		lost.Key += printable(key)
	}
	if e.Err != nil {
		lost.Why = printable(why(e.Err))
	}
	l.add(lost)
}

// why is the error less what is shown beside it.
func why(err error) string {
	const prefix = "mysqllock: "
	var e *mysqllock.Error
	if errors.As(err, &e) {
		return e.Op + ": " + strings.TrimPrefix(e.Err.Error(), prefix)
	}
	return strings.TrimPrefix(err.Error(), prefix)
}

// begin notes that they are counted from now on, if they are not yet.
func (l *Losses) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.from.IsZero() {
		l.from = time.Now()
	}
}

func (l *Losses) add(lost loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.from.IsZero() {
		l.from = lost.at
	}
	l.total++
	l.recent = append(l.recent, lost)
	if len(l.recent) > remembered {
		l.recent = slices.Delete(l.recent, 0, 1)
	}
}

// since returns the losses after the first n, as far as they are remembered, and how many
// there are now.
func (l *Losses) since(n uint64) ([]loss, uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.recent[max(0, len(l.recent)-int(min(l.total-n, remembered))):]), l.total
}

// list returns how many there were in all, since when, and the latest of them, first.
func (l *Losses) list() (total uint64, since time.Time, recent []loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	recent = append([]loss{}, l.recent...)
	slices.Reverse(recent)
	return l.total, l.from, recent
}
