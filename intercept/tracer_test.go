package intercept_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// tracer is a mysqllock.Tracer that numbers the locks, and an interceptor that notes for
// which of them statements are.
type tracer struct {
	sqlmw.NullInterceptor
	mu     sync.Mutex
	locks  int
	events map[string][]string // by the number of the lock
	steps  map[string][]intercept.Step
	breaks bool // the next statement that takes a lock finds its connection broken
}

type number struct{}

func (t *tracer) note(ctx context.Context, what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := fmt.Sprint(ctx.Value(number{}))
	t.events[n] = append(t.events[n], what)
}

func (t *tracer) Asking(ctx context.Context, e mysqllock.Event) context.Context {
	t.mu.Lock()
	t.locks++
	ctx = context.WithValue(ctx, number{}, t.locks)
	t.mu.Unlock()
	t.note(ctx, fmt.Sprint("asking ", e.Strategy, e.Keys))
	return ctx
}

func (t *tracer) Releasing(ctx context.Context, _ mysqllock.Event) { t.note(ctx, "releasing") }

func (t *tracer) Observe(ctx context.Context, e mysqllock.Event) { t.note(ctx, e.Kind.String()) }

// hit notes a statement. It fails the one that is to be broken.
func (t *tracer) hit(ctx context.Context) error {
	lock, _ := intercept.Of(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, asked := range lock.Contexts {
		n := fmt.Sprint(asked.Value(number{}))
		t.steps[n] = append(t.steps[n], lock.Step)
	}
	if lock.Step == intercept.Take && t.breaks {
		t.breaks = false
		return driver.ErrBadConn
	}
	return nil
}

func (t *tracer) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if err := t.hit(ctx); err != nil {
		return nil, err
	}
	return t.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (t *tracer) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if err := t.hit(ctx); err != nil {
		return ctx, nil, err
	}
	return t.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (t *tracer) StmtQueryContext(ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if err := t.hit(ctx); err != nil {
		return ctx, nil, err
	}
	return t.NullInterceptor.StmtQueryContext(ctx, stmt, text, args)
}

func (t *tracer) TxCommit(ctx context.Context, tx driver.Tx) error {
	if err := t.hit(ctx); err != nil {
		return err
	}
	return t.NullInterceptor.TxCommit(ctx, tx)
}

// kinds is an Observer that is no Tracer.
type kinds struct {
	mu  sync.Mutex
	all []mysqllock.EventKind
}

func (k *kinds) Observe(_ context.Context, e mysqllock.Event) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, e.Kind)
}

// TestAllEventsOfALockHaveTheTracersContext: so do all statements for it, in the background, too. A
// lock that is asked for anew has a new one, of which no other observer hears.
func TestAllEventsOfALockHaveTheTracersContext(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for strategy, c := range map[string]struct {
			option lockctx.Option
			steps  []intercept.Step
		}{
			"row":        {lockctx.Row(), []intercept.Step{intercept.Take, intercept.End}},
			"lease":      {lockctx.Lease(20 * time.Second), []intercept.Step{intercept.Take, intercept.Fence}}, // and its release, in a hold
			"advisory":   {lockctx.Advisory(), []intercept.Step{intercept.Take, intercept.Fence}},              // the same
			"optimistic": {lockctx.Optimistic(), []intercept.Step{intercept.Take, intercept.Fence}},
		} {
			for _, name := range []string{"transaction", "statement", "hold", "retried"} {
				t.Run(strategy+" "+name, func(t *testing.T) {
					r := &tracer{events: make(map[string][]string), steps: make(map[string][]intercept.Step)}
					plain := new(kinds)
					db := s.open(mysqllock.Config{Observer: mysqllock.Observers{plain, r}}, r)
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					defer cancel()
					work := sell
					switch name {
					case "statement":
						work = buy
					case "hold":
						work = func(ctx context.Context, db *sql.DB) error {
							return mysqllock.Do(ctx, db, "a key", func(ctx context.Context) error { return buy(ctx, db) }, c.option)
						}
					}
					dbtest.OK(t, buy(lockctx.With(ctx, "k", c.option), db)) // makes what is made once
					r.mu.Lock()
					r.breaks = name == "retried"
					before := r.locks
					r.mu.Unlock()
					locked := lockctx.With(ctx, "a key", c.option)
					if name == "hold" {
						locked = ctx
					}
					dbtest.OK(t, work(locked, db))
					cancel()
					dbtest.OK(t, db.Close())

					r.mu.Lock()
					defer r.mu.Unlock()
					last := fmt.Sprint(r.locks)
					asking := "asking " + strategy + "[a key]"
					if got, want := r.events[last], []string{asking, "acquired", "releasing", "released"}; !slices.Equal(got, want) {
						t.Errorf("the events are %q, want %q", got, want)
					}
					steps := c.steps
					if name == "hold" && (strategy == "lease" || strategy == "advisory") {
						steps = append(slices.Clip(steps), intercept.Release)
					}
					for _, step := range steps {
						if !slices.Contains(r.steps[last], step) {
							t.Errorf("no statement is for the step %s of it: %v", step, r.steps)
						}
					}
					if retried := r.locks - before - 1; retried > 0 {
						if got, want := r.events[fmt.Sprint(before+1)], []string{asking, "retried"}; !slices.Equal(got, want) {
							t.Errorf("the first events are %q, want %q", got, want)
						}
					}
					plain.mu.Lock()
					defer plain.mu.Unlock()
					if slices.Contains(plain.all, mysqllock.Retried) {
						t.Errorf("an Observer has got %v", plain.all)
					}
				})
			}
		}
	})
}
