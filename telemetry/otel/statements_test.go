package lockotel_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

// nested has the observer make spans of statements. below are further interceptors, next to
// the server.
func nested(below ...sqlmw.Interceptor) func(*lockotel.Observer) mysqllock.Config {
	return func(locks *lockotel.Observer) mysqllock.Config {
		return mysqllock.Config{
			Observer: mysqllock.Observers{locks},
			Base:     intercept.With(append([]sqlmw.Interceptor{locks.Statements()}, below...)...),
		}
	}
}

// tree has the spans that have ended beneath one.
type tree struct {
	all  []sdktrace.ReadOnlySpan
	root trace.SpanID
	byID map[trace.SpanID]sdktrace.ReadOnlySpan
}

func (r *recorder) tree(root trace.Span) *tree {
	out := &tree{root: root.SpanContext().SpanID(), byID: make(map[trace.SpanID]sdktrace.ReadOnlySpan)}
	for _, s := range r.spans.Ended() {
		if s.SpanContext().TraceID() == root.SpanContext().TraceID() && s.SpanContext().SpanID() != out.root {
			out.all = append(out.all, s)
			out.byID[s.SpanContext().SpanID()] = s
		}
	}
	return out
}

func value(s sdktrace.ReadOnlySpan, key string) string {
	for _, a := range s.Attributes() {
		if string(a.Key) == key {
			return a.Value.String()
		}
	}
	return ""
}

// at is the name of the span that s lies beneath: "" is the caller's.
func (tr *tree) at(s sdktrace.ReadOnlySpan) string {
	switch parent, ok := tr.byID[s.Parent().SpanID()]; {
	case s.Parent().SpanID() == tr.root:
		return ""
	case !ok:
		return "a span that has not ended"
	default:
		return parent.Name()
	}
}

func (tr *tree) String() string {
	var b strings.Builder
	for _, s := range tr.all {
		fmt.Fprintf(&b, "\n\t%s > %s %s %s", tr.at(s), s.Name(), value(s, "mysqllock.step"), value(s, "db.query.text"))
	}
	return b.String()
}

// has reports whether there is a statement for that step beneath a span of that name.
func (tr *tree) has(above, step string) bool {
	return slices.ContainsFunc(tr.all, func(s sdktrace.ReadOnlySpan) bool {
		return tr.at(s) == above && value(s, "mysqllock.step") == step
	})
}

// TestStatementsOfALockLieBeneathItsSpans: in time, too; those of the application lie beneath the
// caller's. None tells a key, or a value.
func TestStatementsOfALockLieBeneathItsSpans(t *testing.T) {
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			r := recordWith(t, bin, lockotel.Options{}, nested())
			dbtest.Exec(t, r.db, "CREATE TABLE shop (id INT PRIMARY KEY, name VARCHAR(100))")
			dbtest.Exec(t, r.db, "INSERT INTO shop VALUES (1, '')")
			for strategy, c := range map[string]struct {
				option lockctx.Option
				want   map[string]string // a step, and the span that one of its statements lies beneath
			}{
				"row":        {lockctx.Row(), map[string]string{"take": "acquire lock", "end": "release lock"}},
				"lease":      {lockctx.Lease(time.Minute), map[string]string{"take": "acquire lock", "fence": "hold lock"}}, // which releases
				"advisory":   {lockctx.Advisory(), map[string]string{"take": "acquire lock", "fence": "hold lock"}},         // the same
				"optimistic": {lockctx.Optimistic(), map[string]string{"take": "acquire lock", "fence": "hold lock"}},
			} {
				for _, how := range []string{"transaction", "statement"} {
					t.Run(strategy+" "+how, func(t *testing.T) {
						ctx, parent := r.tracer.Start(dbtest.Limited(t), "parent")
						ctx, cancel := context.WithCancel(lockctx.With(ctx, "sesame "+strategy+how, c.option))
						defer cancel()
						update := func(db dbtest.Execer) error {
							_, err := db.ExecContext(ctx, "UPDATE shop SET name = ? WHERE 'hunter2' <> name /* app */", "hunter2"+strategy+how)
							return err
						}
						if how == "statement" {
							dbtest.OK(t, update(r.db))
						} else {
							tx, err := r.db.BeginTx(ctx, nil)
							dbtest.OK(t, err)
							defer tx.Rollback()
							dbtest.OK(t, update(tx))
							dbtest.OK(t, tx.Commit())
						}
						cancel()
						parent.End()
						dbtest.Soon(t, "the lock is given back", func() bool { return r.children(parent)["hold lock"] != nil })
						for name, above := range c.want {
							dbtest.Soon(t, name+" beneath "+above, func() bool { return r.tree(parent).has(above, name) })
						}
						checkTree(t, r.tree(parent))
					})
				}
			}
		})
	}
}

// checkTree checks what is true of all spans of TestStatementsOfALockLieBeneathItsSpans.
func checkTree(t *testing.T, tr *tree) {
	t.Helper()
	app := 0
	for _, s := range tr.all {
		at := tr.at(s)
		stepOf := value(s, "mysqllock.step") // of step "other" some are for the caller's transaction
		switch {
		case strings.HasSuffix(s.Name(), " lock"):
			if at != "" {
				t.Errorf("%s lies beneath %q", s.Name(), at)
			}
			continue
		case stepOf != "other" && (stepOf != "") != (at != "") || at == "a span that has not ended":
			t.Errorf("%s (%s) lies beneath %q: %v", s.Name(), stepOf, at, tr)
		case at != "" && s.StartTime().Before(tr.byID[s.Parent().SpanID()].StartTime()):
			t.Errorf("%s begins before the span that it lies beneath", s.Name())
		case stepOf == "fence" && s.Name() != "COMMIT":
			t.Errorf("the text that checks and commits is named %s: %v", s.Name(), tr)
		case s.Name() == "UPDATE" && value(s, "db.query.text") == "UPDATE shop SET name = ? WHERE ? <> name":
			app++
		}
		if value(s, "db.system.name") == "" || s.SpanKind() != trace.SpanKindClient {
			t.Errorf("%s lacks attributes: %v", s.Name(), s.Attributes())
		}
		if all := fmt.Sprint(s.Name(), s.Attributes(), s.Status(), s.Events()); strings.Contains(all, "hunter2") || strings.Contains(all, "sesame") {
			t.Errorf("a span tells a value, or a key: %s", all)
		}
	}
	if app != 1 {
		t.Errorf("the application's UPDATE has %d spans: %v", app, tr)
	}
}

// TestARenewalLiesBeneathTheSpanOfItsHold: as does what else is sent in the background while a lock
// is held.
func TestARenewalLiesBeneathTheSpanOfItsHold(t *testing.T) {
	r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{}, nested())
	ctx, parent := r.tracer.Start(context.Background(), "parent")
	hold, err := mysqllock.Acquire(ctx, r.db, "k", lockctx.Lease(time.Second))
	dbtest.OK(t, err)
	dbtest.Soon(t, "a renewal", func() bool {
		return slices.ContainsFunc(r.tree(parent).all, func(s sdktrace.ReadOnlySpan) bool { return value(s, "mysqllock.step") == "renew" })
	})
	_ = hold.Release() // on a slow machine it is lost
	dbtest.Soon(t, "the renewal beneath the span of the hold", func() bool { return r.tree(parent).has("hold lock", "renew") })
}

// TestAStatementForSeveralLocksIsLinkedToEach: it lies beneath the first and is linked to the others.
func TestAStatementForSeveralLocksIsLinkedToEach(t *testing.T) {
	var statements sqlmw.Interceptor
	r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{}, func(locks *lockotel.Observer) mysqllock.Config {
		statements = locks.Statements()
		return mysqllock.Config{Observer: locks, Base: intercept.With(statements)}
	})
	ctx, parent := r.tracer.Start(context.Background(), "parent")
	asked := purpose.Asked{r.observer.Asking(ctx, mysqllock.Event{}), r.observer.Asking(ctx, mysqllock.Event{})}
	background := purpose.Named(asked.In(context.Background()), purpose.Renew, "lease", "a", "b")
	dbtest.OK(t, statements.ConnPing(background, pinger{}))
	for _, ctx := range asked {
		r.observer.Observe(ctx, mysqllock.Event{Kind: mysqllock.Retried})
	}
	for _, s := range r.tree(parent).all {
		if s.Name() == "ping" {
			if s.Parent().SpanID() != trace.SpanContextFromContext(asked[0]).SpanID() || len(s.Links()) != 1 ||
				s.Links()[0].SpanContext.SpanID() != trace.SpanContextFromContext(asked[1]).SpanID() {
				t.Errorf("it lies beneath %v, with links to %v", s.Parent(), s.Links())
			}
			return
		}
	}
	t.Errorf("there is no span: %v", r.tree(parent))
}

type pinger struct{}

func (pinger) Ping(context.Context) error { return nil }

// broken is an interceptor by which the first statement that takes a lock finds its
// connection broken.
type broken struct {
	sqlmw.NullInterceptor
	armed atomic.Bool
}

func (b *broken) breaks(ctx context.Context) bool {
	lock, _ := intercept.Of(ctx)
	return lock.Step == intercept.Take && b.armed.CompareAndSwap(true, false)
}

func (b *broken) StmtQueryContext(ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if b.breaks(ctx) {
		return ctx, nil, driver.ErrBadConn
	}
	return b.NullInterceptor.StmtQueryContext(ctx, stmt, text, args)
}

func (b *broken) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	if b.breaks(ctx) {
		return ctx, nil, driver.ErrBadConn
	}
	return b.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

func (b *broken) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if b.breaks(ctx) {
		return ctx, nil, driver.ErrBadConn
	}
	return b.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (b *broken) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if b.breaks(ctx) {
		return nil, driver.ErrBadConn
	}
	return b.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

// TestALockThatIsAskedForAnewHasOneSpan: its session was broken.
func TestALockThatIsAskedForAnewHasOneSpan(t *testing.T) {
	var fault broken
	r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{}, nested(&fault))
	dbtest.OK(t, mysqllock.Do(context.Background(), r.db, "k", func(context.Context) error { return nil }))
	ctx, parent := r.tracer.Start(context.Background(), "parent")
	fault.armed.Store(true)
	tx, err := r.db.BeginTx(lockctx.With(ctx, "k"), nil)
	dbtest.OK(t, err)
	dbtest.OK(t, tx.Rollback())
	tr := r.tree(parent)
	retried, acquired := 0, 0
	for _, s := range tr.all {
		if s.Name() == "acquire lock" {
			acquired++
			if has(s, attribute.Bool("mysqllock.retried", true)) {
				retried++
			}
		}
	}
	if retried != 0 || acquired != 1 || tr.has("a span that has not ended", "take") {
		t.Errorf("of %d spans %d are retried: %v", acquired, retried, tr)
	}
}

// TestAFailedStatementTellsOnlyANumber: the server cites the statement in its text. Without a span
// of the caller's, or when only lock statements are wanted, there is none.
func TestAFailedStatementTellsOnlyANumber(t *testing.T) {
	for _, only := range []bool{false, true} {
		r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{LockStatementsOnly: only}, nested())
		ctx, parent := r.tracer.Start(context.Background(), "parent")
		if _, err := r.db.ExecContext(ctx, "SELECT 'hunter2' FROM nowhere"); err == nil {
			t.Fatal("it has not failed")
		}
		dbtest.OK(t, mysqllock.Do(context.Background(), r.db, "k", func(context.Context) error { return nil }))
		tr := r.tree(parent)
		if len(r.spans.Ended()) != len(tr.all) {
			t.Error("there are spans without one of the caller's")
		}
		i := slices.IndexFunc(tr.all, func(s sdktrace.ReadOnlySpan) bool { return s.Name() == "SELECT" })
		if only {
			if i >= 0 {
				t.Errorf("there are spans of the application's: %v", tr)
			}
			dbtest.OK(t, mysqllock.Do(ctx, r.db, "k", func(context.Context) error { return nil }))
			dbtest.Soon(t, "the lock's statements", func() bool { return r.tree(parent).has("acquire lock", "take") })
			continue
		}
		if i < 0 {
			t.Fatalf("there is no span: %v", tr)
		}
		s := tr.all[i]
		if s.Status() != (sdktrace.Status{Code: codes.Error, Description: "1146"}) || value(s, "error.type") != "1146" ||
			value(s, "db.response.status_code") != "1146" || value(s, "db.query.text") != "SELECT ? FROM nowhere" ||
			value(s, "db.operation.name") != "SELECT" {
			t.Errorf("%v %v", s.Status(), s.Attributes())
		}
	}
}

// TestARefusedLockHasNoSpanOfAHold: that of its acquisition says why.
func TestARefusedLockHasNoSpanOfAHold(t *testing.T) {
	r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{}, nested())
	held, err := mysqllock.Acquire(context.Background(), r.db, "k")
	dbtest.OK(t, err)
	ctx, parent := r.tracer.Start(context.Background(), "parent")
	dbtest.Is(t, "a lock that is held", dbtest.Err(mysqllock.Acquire(ctx, r.db, "k", lockctx.Wait(50*time.Millisecond))), mysqllock.ErrTimeout)
	dbtest.OK(t, held.Release())
	if s := r.children(parent)["acquire lock"]; s == nil || s.Status().Description != "waited" || r.children(parent)["hold lock"] != nil {
		t.Errorf("the spans are %v", r.tree(parent))
	}
}

// TestHeldIsNoError: the server's answer that a lock is held is no status Error, of the statement
// or of the lock, if the caller would not wait.
func TestHeldIsNoError(t *testing.T) {
	answers := 0
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		r := recordWith(t, bin, lockotel.Options{}, nested())
		held, err := mysqllock.Acquire(context.Background(), r.open(0), "k") // of another handle: else nothing is sent
		dbtest.OK(t, err)
		ctx, parent := r.tracer.Start(context.Background(), "parent")
		for range 2 { // the statements of a new handle are others
			dbtest.Is(t, "a lock that is held", dbtest.Err(r.db.BeginTx(lockctx.With(ctx, "k", lockctx.NoWait()), nil)), mysqllock.ErrLocked)
		}
		dbtest.OK(t, held.Release())
		for _, s := range r.tree(parent).all {
			if value(s, "db.response.status_code") != "" {
				answers++
			}
			if s.Status().Code == codes.Error {
				t.Errorf("%s: %s is an error: %v %v", bin.Name, s.Name(), s.Status(), s.Attributes())
			}
		}
	}
	if answers == 0 {
		t.Error("no server has answered so")
	}
}
