package mysqllock

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
)

// Observer is told what becomes of the locks of a database handle: see
// [Config.Observer].
//
// Observe is called within the calls of the application, also by several goroutines
// at a time, and they wait for it: it must return soon, and not use the handle. ctx
// is that of the caller who asked for the lock, for its values; it may have ended. If it
// panics, the lock goes on, and [log/slog.Default] gets a line with the stack (level ERROR).
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// EventKind is what has happened.
type EventKind int

// For each lock that is asked for there is one of Acquired and Refused, also if the server
// cannot be reached; and for each one Acquired, later, one of Released and Lost. What a lock
// context holds already is not asked for again. A lock context that is wrong in itself, such as an empty
// key, asks for nothing. If database/sql opens a connection in the background, because of
// SetMaxOpenConns, and fails, nobody is told.
const (
	Acquired EventKind = handle.Acquired
	Refused  EventKind = handle.Refused  // not granted
	Released EventKind = handle.Released // given back: by COMMIT or ROLLBACK, by Release, or when its context ended

	// Lost: the holder's connection or lease is gone, or it was refused its COMMIT. What it had not
	// committed never will be, unless Err says that this is unknown.
	Lost EventKind = handle.Lost

	// Advised is not about a lock: SetMaxOpenConns keeps callers from each other's locks, or a
	// statement lacks the lock that [Config].Require asks for, in its log mode; then Err is
	// an *Error. Err says what to change. A handle tells each such thing once.
	Advised EventKind = handle.Advised

	// LongHold comes between Acquired and its end, once, if the lock is held for longer than
	// [Config].LongHold. The hold goes on.
	LongHold EventKind = handle.LongHold

	// Retried is only for a [Tracer], instead of Acquired or Refused: the lock is asked for
	// anew on another connection.
	Retried EventKind = handle.Retried
)

// String returns the kind's name in lower case.
func (ek EventKind) String() string {
	switch ek {
	case Acquired:
		return "acquired"
	case Refused:
		return "refused"
	case Released:
		return "released"
	case Lost:
		return "lost"
	case Advised:
		return "advised"
	case LongHold:
		return "long hold"
	case Retried:
		return "retried"
	}
	return "unknown"
}

// Event is something that has happened to a lock, or to several that were asked
// for in one statement. Of Advised there are Start and Err only.
type Event struct {
	Kind       EventKind
	Keys       []string      // sorted by where they are kept; not to be changed
	Strategy   string        // "row", "lease", "advisory" or "optimistic"
	Shared     bool          // all of the keys are
	Leadership bool          // asked for by package leader: to stand by for it for long, and to hold it for long, is its purpose
	Start      time.Time     // Acquired and Refused: when it was asked for; LongHold: when it is told; else when giving back began
	Duration   time.Duration // since Start; for Acquired and Refused this is the wait, round trips included
	Held       time.Duration // LongHold, Released and Lost: from the grant to Start
	Token      uint64        // of a lease; else 0
	Long       bool          // LongHold; and Released and Lost if there was a LongHold before

	// Holder, of Acquired and Refused, is who had one of the keys, after the caller had waited for
	// [Config].SlowWait; or of Err; nil if not known.
	Holder *Holder

	// Err of Refused and Lost says why, and of Advised what to change. Of Released it is ErrConflict where
	// the commit found another version. Else it is nil.
	Err error
}

// observe has o told what becomes of locks, and, if it is a Tracer, what begins.
func observe(s *handle.Settings, o Observer) {
	if o == nil {
		return
	}
	s.Observe = func(ctx context.Context, e handle.Event) {
		defer goOn(ctx)
		o.Observe(ctx, event(e))
	}
	if !traces(o) {
		return
	}
	t := o.(Tracer)
	s.Asking = func(ctx context.Context, e handle.Event) (own context.Context) {
		own = ctx
		defer goOn(ctx)
		return t.Asking(ctx, event(e))
	}
	s.Releasing = func(ctx context.Context, e handle.Event) {
		defer goOn(ctx)
		t.Releasing(ctx, event(e))
	}
}

// goOn is deferred around calls of an observer: a caller that recovers its panic must not
// keep a lock that nobody gives back.
func goOn(ctx context.Context) {
	if v := recover(); v != nil {
		slog.ErrorContext(ctx, "mysqllock: the Observer has panicked", "panic", v, "stack", string(debug.Stack()))
	}
}

func event(e handle.Event) Event {
	return Event{
		Kind: EventKind(e.Kind), Keys: e.Keys, Strategy: e.Strategy, Shared: e.Shared, Leadership: e.Leadership,
		Start: e.Start, Duration: e.Duration, Held: e.Held, Token: e.Token, Long: e.Long, Holder: e.Holder, Err: e.Err,
	}
}

// LogTo returns an Observer that writes to l what is worth a line: locks that were
// lost (level ERROR), locks for which somebody has waited for slow or longer, whether
// or not they were granted, and those that failed for another reason than that
// somebody else has them; holds longer than [Config].LongHold, while they last and when
// they end; and advice about the handle (all level WARN). The lines have the attributes
// strategy, keys, waited_ms, holder (of a wait that was granted: see [Config].SlowWait),
// held_ms, token and error, as far as there are any. A process that stands by for a leadership
// (package leader) does not wait for slow.
func LogTo(l *slog.Logger, slow time.Duration) Observer { return &logger{l, slow} }

type logger struct {
	*slog.Logger
	slow time.Duration
}

// Observe implements [Observer].
func (l *logger) Observe(ctx context.Context, e Event) {
	if e.Kind == Advised {
		text := "connections are limited so that locks suffer"
		if lacks := (*Error)(nil); errors.As(e.Err, &lacks) {
			text = handle.LacksLock
		}
		l.LogAttrs(ctx, slog.LevelWarn, text, slog.String("error", e.Err.Error()))
		return
	}
	attrs := []slog.Attr{slog.String("strategy", e.Strategy), slog.Any("keys", e.Keys)}
	if e.Token != 0 {
		attrs = append(attrs, slog.Uint64("token", e.Token))
	}
	var level slog.Level
	var text string
	slow := e.Duration >= l.slow && !e.Leadership
	switch busy := errors.Is(e.Err, ErrLocked) || errors.Is(e.Err, context.Canceled); {
	case e.Kind == Lost:
		level, text = slog.LevelError, "lock lost"
		attrs = append(attrs, milliseconds("held_ms", e.Held))
	case e.Kind == LongHold:
		level, text = slog.LevelWarn, "long hold of a lock"
		attrs = append(attrs, milliseconds("held_ms", e.Held))
	case e.Kind == Released && e.Long:
		level, text = slog.LevelWarn, "long hold of a lock has ended"
		attrs = append(attrs, milliseconds("held_ms", e.Held))
	case e.Kind == Acquired && slow:
		level, text = slog.LevelWarn, "slow wait for a lock"
		attrs = append(attrs, milliseconds("waited_ms", e.Duration))
		if e.Holder != nil {
			attrs = append(attrs, slog.String("holder", e.Holder.String()))
		}
	case e.Kind == Refused && (slow || !busy):
		level, text = slog.LevelWarn, "lock not granted"
		attrs = append(attrs, milliseconds("waited_ms", e.Duration))
	default:
		return
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error", e.Err.Error()))
	}
	l.LogAttrs(ctx, level, text, attrs...)
}

// milliseconds is an attribute whose name says the unit; a slog.Duration is a number without one
// in JSON.
func milliseconds(name string, d time.Duration) slog.Attr {
	return slog.Int64(name, d.Milliseconds())
}
