package mysqllock

import (
	"context"
	"database/sql/driver"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// Observer is told what becomes of the locks of a database handle: see
// [Config.Observer].
//
// Observe is called within the calls of the application, also by several goroutines
// at a time, and they wait for it: it must return soon, and not use the handle. ctx
// is that of the caller who asked for the lock, for its values; it may have ended.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// Observers is an Observer that tells several others, one after the other.
type Observers []Observer

// Observe implements [Observer].
func (o Observers) Observe(ctx context.Context, e Event) {
	for _, each := range o {
		each.Observe(ctx, e)
	}
}

// EventKind is what has happened.
type EventKind int

// For each lock that is asked for there is one of Acquired and Refused; and for
// each one Acquired, later, one of Released and Lost. What a lock context holds
// already is not asked for again.
const (
	Acquired EventKind = iota + 1
	Refused            // not granted
	Released           // given back: by COMMIT or ROLLBACK, by Release, or when its context ended
	Lost               // the holder's connection or lease is gone, or it was refused its COMMIT: what it had not committed never will be, unless Err says that this is unknown
)

// String returns the kind's name in lower case.
func (k EventKind) String() string {
	switch k {
	case Acquired:
		return "acquired"
	case Refused:
		return "refused"
	case Released:
		return "released"
	case Lost:
		return "lost"
	}
	return "unknown"
}

// Event is something that has happened to a lock, or to several that were asked
// for in one statement.
type Event struct {
	Kind     EventKind
	Keys     []string      // sorted by where they are kept; not to be changed
	Strategy string        // "row", "lease", "advisory" or "optimistic"
	Shared   bool          // all of the keys are
	Start    time.Time     // Acquired and Refused: when it was asked for; else when giving back began
	Duration time.Duration // since Start; for Acquired and Refused this is the wait, round trips included
	Held     time.Duration // Released and Lost: from the grant to Start
	Token    uint64        // of a lease; else 0
	Err      error         // Refused and Lost: why. Released: ErrConflict where the commit found another version; else nil
}

// observation is a lock of which the observer is told. A nil one, where there is
// no observer, costs nothing.
type observation struct {
	observer Observer
	ctx      context.Context
	event    Event // as it was asked for
	granted  time.Time
	end      sync.Once
}

// observe begins to watch locks that are asked for now.
func (k *connector) observe(ctx context.Context, places ...place) *observation {
	if k.settings.observer == nil || len(places) == 0 {
		return nil
	}
	o := &observation{observer: k.settings.observer, ctx: ctx}
	o.event = Event{Strategy: places[0].Strategy, Shared: true, Start: time.Now()}
	for _, p := range places {
		o.event.Keys = append(append(o.event.Keys, p.Key), p.also...)
		o.event.Shared = o.event.Shared && p.Shared
	}
	return o
}

// answered notes whether the locks that o is about were granted, for the observer,
// and what a failure says of the server. Where another connection is to be tried,
// there is no answer yet.
func (k *connector) answered(o *observation, token uint64, err error) {
	if err != nil {
		k.suspect(err)
	}
	if o == nil || errors.Is(err, errYield) || errors.Is(err, driver.ErrBadConn) {
		return
	}
	o.event.Token = token
	o.granted = time.Now()
	e := o.event
	e.Kind, e.Err, e.Duration = Acquired, err, o.granted.Sub(e.Start)
	if err != nil {
		e.Kind = Refused
	}
	o.observer.Observe(o.ctx, e)
}

// leaving returns when giving back begins.
func (o *observation) leaving() time.Time {
	if o == nil {
		return time.Time{}
	}
	return time.Now()
}

// over notes that the locks are held no more. The first call counts. Whoever does
// not know when giving back began says the zero time.
func (o *observation) over(began time.Time, err error) {
	if o == nil {
		return
	}
	o.end.Do(func() {
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		e := o.event
		e.Kind, e.Err = Released, err
		if errors.Is(err, ErrLost) {
			e.Kind = Lost
		}
		e.Start, e.Duration, e.Held = began, now.Sub(began), began.Sub(o.granted)
		o.observer.Observe(o.ctx, e)
	})
}

// LogTo returns an Observer that writes to l what is worth a line: locks that were
// lost (level ERROR), locks for which somebody has waited for slow or longer, whether
// or not they were granted, and those that failed for another reason than that
// somebody else has them (level WARN). The lines have the attributes strategy, keys,
// waited, held, token and error, as far as there are any.
func LogTo(l *slog.Logger, slow time.Duration) Observer { return &logger{l, slow} }

type logger struct {
	*slog.Logger
	slow time.Duration
}

// Observe implements [Observer].
func (l *logger) Observe(ctx context.Context, e Event) {
	attrs := []slog.Attr{slog.String("strategy", e.Strategy), slog.Any("keys", e.Keys)}
	if e.Token != 0 {
		attrs = append(attrs, slog.Uint64("token", e.Token))
	}
	var level slog.Level
	var text string
	switch busy := errors.Is(e.Err, ErrLocked) || errors.Is(e.Err, context.Canceled); {
	case e.Kind == Lost:
		level, text = slog.LevelError, "lock lost"
		attrs = append(attrs, slog.Duration("held", e.Held))
	case e.Kind == Acquired && e.Duration >= l.slow:
		level, text = slog.LevelWarn, "slow wait for a lock"
		attrs = append(attrs, slog.Duration("waited", e.Duration))
	case e.Kind == Refused && (e.Duration >= l.slow || !busy):
		level, text = slog.LevelWarn, "lock not granted"
		attrs = append(attrs, slog.Duration("waited", e.Duration))
	default:
		return
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error", e.Err.Error()))
	}
	l.LogAttrs(ctx, level, text, attrs...)
}
