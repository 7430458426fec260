package lockotel

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/mysqllock/mysqllock"
)

var _ mysqllock.Tracer = (*Observer)(nil)

type recordKey struct{}

// record has the spans of a lock that begin when it does. It is in the context with which
// the lock is taken.
type record struct {
	caller context.Context // that asked for the lock
	mu     sync.Mutex
	span   trace.Span // that has begun last
	leaves bool       // that is "release lock"
	over   bool       // nothing begins any more
}

// current is the span of what is being done with the lock.
func (r *record) current() trace.SpanContext {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.span.SpanContext()
}

// Asking implements [mysqllock.Tracer].
func (o *Observer) Asking(ctx context.Context, e mysqllock.Event) context.Context {
	if !o.nested.Load() || !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	r := &record{caller: ctx}
	ctx, r.span = o.begin(ctx, "acquire lock", trace.SpanKindClient, e.Start)
	return context.WithValue(ctx, recordKey{}, r)
}

// Releasing implements [mysqllock.Tracer].
func (o *Observer) Releasing(ctx context.Context, e mysqllock.Event) {
	r, ok := ctx.Value(recordKey{}).(*record)
	if !ok {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || r.leaves {
		return
	}
	o.finish(r.span, e.Start, e, nil)
	_, r.span = o.begin(r.caller, "release lock", trace.SpanKindClient, e.Start)
	r.leaves = true
}

// observe ends the spans that e ends.
func (o *Observer) observe(r *record, e mysqllock.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := e.Start.Add(e.Duration)
	switch e.Kind {
	case mysqllock.Acquired:
		o.finish(r.span, end, e, nil)
		_, r.span = o.begin(r.caller, "hold lock", trace.SpanKindInternal, end)
		return
	case mysqllock.Refused:
		o.finish(r.span, end, e, e.Err)
	case mysqllock.Retried:
		r.span.SetAttributes(attribute.Bool("mysqllock.retried", true))
		o.finish(r.span, end, e, nil)
	case mysqllock.Released, mysqllock.Lost:
		switch {
		case r.leaves:
			o.finish(r.span, end, e, e.Err)
		case e.Kind == mysqllock.Lost:
			o.finish(r.span, e.Start, e, e.Err)
		default:
			o.finish(r.span, e.Start, e, nil)
			if e.Duration > 0 {
				_, release := o.begin(r.caller, "release lock", trace.SpanKindClient, e.Start)
				o.finish(release, end, e, e.Err)
			}
		}
	case mysqllock.LongHold: // it goes on
		r.span.SetAttributes(long(e)...)
		return
	default:
		return
	}
	r.over = true
}

// begin begins a span beneath that of ctx.
func (o *Observer) begin(ctx context.Context, name string, kind trace.SpanKind, start time.Time) (context.Context, trace.Span) {
	return o.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithTimestamp(start), trace.WithAttributes(o.attributes...))
}
