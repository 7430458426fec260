package web

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
)

const (
	interval  = time.Second // between looks at the server, at least
	calm      = 10          // and so many times what a look takes
	lookBound = 10 * time.Second
	afterFail = 2 * time.Second

	// background is between looks for nobody, at most.
	background = 10 * time.Second

	// window is how far the plots go back.
	window = 10 * time.Minute

	// maxViewers bounds the streams, each of which takes a goroutine.
	maxViewers = 100
)

var (
	errClosed  = errors.New("mysqllock: the page of locks is closed")
	errTooMany = errors.New("mysqllock: too many look at the page of locks")
)

// viewer is where a stream is told what to send: the latest message, if it has
// not come to those before.
type viewer chan message

// sampler looks at the server for all viewers, while there are any.
type sampler struct {
	inspector *inspect.Inspector
	losses    *Losses
	own       bool // losses are those that it sees itself
	done      chan struct{}
	always    bool // also while there are no viewers
	entered   chan struct{}
	running   sync.WaitGroup
	looking   sync.Mutex // held by the one goroutine that looks
	past      past       // guarded by looking
	counted   uint64     // losses that past has; guarded by looking

	mu      sync.Mutex
	viewers map[viewer]bool
	stop    context.CancelFunc // ends the goroutine; nil where none runs
	latest  message            // the last view
	seen    time.Time          // when that was
	failed  message            // the failure since; nil if there was none
	history []point
	minutes []point
	next    time.Time     // when the server is asked again, not before
	unseen  time.Duration // so much later if nobody looks at the page
	closed  bool
}

func newSampler(i *inspect.Inspector, o Options) *sampler {
	l, always := o.Losses, o.Background
	s := &sampler{
		past: past{class: o.Class}, unseen: background - interval, inspector: i, losses: l, always: always,
		entered: make(chan struct{}, 1), done: make(chan struct{}), viewers: make(map[viewer]bool),
	}
	if l == nil {
		s.losses, s.own = new(Losses), true
	}
	s.losses.begin()
	if always {
		s.start()
	}
	return s
}

// enter adds a viewer, and returns what to tell it first: the hello with the views before,
// then the last view, however old, and the failure since.
func (s *sampler) enter() (_ viewer, h hello, first []message, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, h, nil, errClosed
	case len(s.viewers) >= maxViewers:
		return nil, h, nil, errTooMany
	}
	v := make(viewer, 1)
	s.viewers[v] = true
	if s.stop == nil {
		s.start()
	}
	h = hello{Seen: s.own, History: append([]point{}, s.history...), Minutes: append([]point{}, s.minutes...)}
	if s.latest != nil {
		h.Age, h.Next = milliseconds(time.Since(s.seen)), milliseconds(time.Until(s.next))
		first = append(first, s.latest)
	}
	if s.failed != nil {
		first = append(first, s.failed)
	}
	select {
	case s.entered <- struct{}{}: // ends the sleep of one that looks for nobody
	default:
	}
	return v, h, first, nil
}

// start begins to look.
func (s *sampler) start() {
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.running.Go(func() { s.run(ctx) })
}

func (s *sampler) leave(v viewer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.viewers, v)
	if len(s.viewers) == 0 && s.stop != nil && !s.always {
		s.stop()
		s.stop = nil
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
	var before time.Time // the look before this one
	for s.sleep(ctx) {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, lookBound)
		snap, err := s.inspector.Snapshot(limited, inspect.Filter{Deadlocks: true, Forced: s.own})
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			t.lose() // what happened meanwhile is not known
			s.publish(ctx, newMessage("failed", failure{err.Error(), s.inspector.LastAnswer().UTC()}), nil, afterFail)
			continue
		}
		took := time.Since(began)
		lapsed := t.follow(snap, took)
		if s.own {
			for _, lost := range lapsed {
				s.losses.add(lost)
			}
		}
		v := newView(snap, s.past.classOf)
		total, since, recent := s.losses.list()
		v.Losses.Since, v.Losses.Recent = since.UnixMilli(), recent
		if hidden, _ := snap.Incomplete(hint.StrategyLease); !s.own || !hidden {
			v.Losses.Total = inspect.Value(total)
		}
		for i := range v.Losses.Recent {
			v.Losses.Recent[i].Ago = milliseconds(time.Since(v.Losses.Recent[i].at))
		}
		s.setUnseen(t.lapses.Soonest(background) - interval)
		v.Point.Deadlocks = t.deadlocks.grown(v.Deadlocks)
		var lost []loss
		lost, s.counted = s.losses.since(s.counted)
		s.past.see(v.Point, snap, lost, min(began.Sub(before), background))
		before = began
		v.Hot = s.past.hot(v.Point.Time, snap)
		v.Minute = s.past.minutes[len(s.past.minutes)-1].point
		pause := max(interval, calm*took)
		v.Next = milliseconds(pause)
		s.publish(ctx, newMessage("view", v), &v.Point, pause)
	}
}

// sleep waits until the server can be asked again.
func (s *sampler) sleep(ctx context.Context) bool {
	for {
		s.mu.Lock()
		pause := time.Until(s.next)
		if len(s.viewers) == 0 {
			pause += s.unseen
		}
		s.mu.Unlock()
		select {
		case <-time.After(pause):
			return ctx.Err() == nil
		case <-s.entered: // somebody looks now
		case <-ctx.Done():
			return false
		}
	}
}

// setUnseen says how much later to look if nobody looks at the page.
func (s *sampler) setUnseen(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unseen = max(0, d)
}

// publish has all viewers sent m: a view with its point in the plots, or a failure without.
func (s *sampler) publish(ctx context.Context, m message, p *point, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next = time.Now().Add(pause)
	if p != nil {
		old := p.Time - window.Milliseconds()
		s.minutes = s.past.points()
		s.history = append(slices.DeleteFunc(s.history, func(p point) bool { return p.Time < old }), *p)
	}
	if ctx.Err() != nil { // those who look now are somebody else's
		return
	}
	if p == nil {
		s.failed = m
	} else {
		s.latest, s.seen, s.failed = m, time.Now(), nil
	}
	for v := range s.viewers {
		select {
		case <-v: // it has not come to that one
		default:
		}
		v <- m // there is room: nobody else sends
	}
}
