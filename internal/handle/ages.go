package handle

import (
	"container/list"
	"sync"
	"time"
)

// ages knows since when things last. The zero value has none.
type ages struct {
	mu     sync.Mutex
	begins list.List // when each began, the oldest first
}

// begin notes something that lasts from now on, until end.
func (a *ages) begin() *list.Element {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.begins.PushBack(time.Now())
}

// end forgets what has ended; nil is nothing.
func (a *ages) end(e *list.Element) {
	if e == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begins.Remove(e)
}

// oldest is how long the oldest lasts by now; 0 if there is none.
func (a *ages) oldest() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if first := a.begins.Front(); first != nil {
		return time.Since(first.Value.(time.Time))
	}
	return 0
}
