package web

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

const (
	interval  = time.Second // between looks at the server, at least
	calm      = 10          // and so many times what a look takes
	lookBound = 10 * time.Second
	afterFail = 2 * time.Second

	// window is how far the plots go back.
	window = 10 * time.Minute

	// maxViewers bounds the streams, each of which takes a goroutine.
	maxViewers = 100
)

var (
	errClosed  = errors.New("mysqllock: the page of locks is closed")
	errCrowded = errors.New("mysqllock: too many look at the page of locks")
)

// viewer is where a stream is told what to send: the latest message, if it has
// not come to those before.
type viewer chan message

// sampler looks at the server for all viewers, while there are any.
type sampler struct {
	inspector *inspect.Inspector
	losses    *Losses
	seen      bool // losses are those that it sees itself
	done      chan struct{}
	running   sync.WaitGroup
	looking   sync.Mutex // held by the one goroutine that looks

	mu      sync.Mutex
	viewers map[viewer]bool
	stop    context.CancelFunc // ends the goroutine; nil where none runs
	latest  message
	history []point
	next    time.Time // not before that
	closed  bool
}

func newSampler(i *inspect.Inspector, l *Losses) *sampler {
	s := &sampler{inspector: i, losses: l, done: make(chan struct{}), viewers: make(map[viewer]bool)}
	if l == nil {
		s.losses, s.seen = new(Losses), true
	}
	return s
}

// enter adds a viewer, who is sent the latest message at once if it is fresh, and
// returns the points before it.
func (s *sampler) enter() (viewer, []point, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, nil, errClosed
	case len(s.viewers) >= maxViewers:
		return nil, nil, errCrowded
	}
	v := make(viewer, 1)
	s.viewers[v] = true
	if s.stop == nil {
		ctx, stop := context.WithCancel(context.Background())
		s.stop = stop
		s.running.Go(func() { s.run(ctx) })
	} else if s.latest != nil {
		v <- s.latest
	}
	return v, append([]point{}, s.history...), nil
}

func (s *sampler) leave(v viewer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.viewers, v)
	if len(s.viewers) == 0 && s.stop != nil {
		s.stop()
		s.stop, s.latest = nil, nil
	}
}

func (s *sampler) close() {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
	}
	if s.stop != nil {
		s.stop()
	}
	s.mu.Unlock()
	s.running.Wait()
}

// run looks until ctx ends. The one that ran before may not have noticed yet that
// it is to end.
func (s *sampler) run(ctx context.Context) {
	s.looking.Lock()
	defer s.looking.Unlock()
	t := newTracker()
	for s.sleep(ctx) {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, lookBound)
		snap, err := s.inspector.Snapshot(limited, inspect.Filter{Deadlocks: true})
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.publish(ctx, newMessage("failed", failure{err.Error()}), nil, afterFail)
			continue
		}
		took := time.Since(began)
		lapsed := t.follow(snap, took)
		if s.seen {
			for _, lost := range lapsed {
				s.losses.add(lost)
			}
		}
		v := newView(snap)
		v.Losses.Total, v.Losses.Recent = s.losses.list()
		for i := range v.Losses.Recent {
			v.Losses.Recent[i].Ago = milliseconds(time.Since(v.Losses.Recent[i].at))
		}
		v.Point.Deadlocks = t.deadlocks.grown(v.Deadlocks)
		s.publish(ctx, newMessage("view", v), &v.Point, max(interval, calm*took))
	}
}

// sleep waits until the server can be asked again.
func (s *sampler) sleep(ctx context.Context) bool {
	s.mu.Lock()
	pause := time.Until(s.next)
	s.mu.Unlock()
	select {
	case <-time.After(pause):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// publish has all viewers sent m.
func (s *sampler) publish(ctx context.Context, m message, p *point, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next = time.Now().Add(pause)
	if p != nil {
		old := p.Time - window.Milliseconds()
		s.history = append(slices.DeleteFunc(s.history, func(p point) bool { return p.Time < old }), *p)
	}
	if ctx.Err() != nil { // those who look now are somebody else's
		return
	}
	s.latest = m
	for v := range s.viewers {
		select {
		case <-v: // it has not come to that one
		default:
		}
		v <- m // there is room: nobody else sends
	}
}
