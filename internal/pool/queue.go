package pool

import (
	"time"
)

// rank is how urgent a caller is.
type rank int

const (
	urgent rank = iota // others wait for what the caller holds
	ordinary
	blocking // the caller is about to wait in the server
	ranks
)

// asker is a caller that queues for a connection.
type asker struct {
	rank       rank
	beside     bool // see As
	arrival    uint64
	start      time.Time
	ready      bool       // there was an idle connection when the caller came
	queued     bool       // false once the caller has been served
	prev, next *asker     // in the queue of the asker's pool
	got        chan *Conn // a connection, or nil for a permit with which to open one; buffered
}

// service is when a caller was served.
type service struct {
	arrival uint64
	at      time.Time
}

// askerQueue is a queue of askers. The zero value is empty.
type askerQueue struct {
	first, last *asker
	n           int
	beside      int // of them are As.Beside
}

func (aq *askerQueue) push(a *asker) {
	if a.prev, a.next, a.queued = aq.last, nil, true; aq.last != nil {
		aq.last.next = a
	} else {
		aq.first = a
	}
	aq.last = a
	aq.count(a, 1)
}

func (aq *askerQueue) remove(a *asker) {
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		aq.first = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	} else {
		aq.last = a.prev
	}
	a.prev, a.next, a.queued = nil, nil, false
	aq.count(a, -1)
}

func (aq *askerQueue) count(a *asker, n int) {
	aq.n += n
	if a.beside {
		aq.beside += n
	}
}
