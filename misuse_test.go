package mysqllock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wantBadHint wants an *Error that says what is wrong with a hint.
func wantBadHint(t *testing.T, what string, err error, says string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "bad hint") || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want a bad hint: %s", what, err, says)
	}
}

func TestOptionsWithoutEffect(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, leasing := s.open(), s.open("lockStrategy=lease")
		for says, opts := range map[string][]lockctx.Option{
			"Retry":               {lockctx.Retry(3)},
			"both row and lease":  {lockctx.Row(), lockctx.Lease(ttl)},
			"both lease and row":  {lockctx.Lease(ttl), lockctx.Row()},
			"both advisory and o": {lockctx.Advisory(), lockctx.Optimistic()},
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k", opts...)
			_, err := db.ExecContext(ctx, setStock, 0)
			wantBadHint(t, "Exec", err, says)
			_, err = read(ctx, db, 1)
			wantBadHint(t, "Query", err, says)
			_, err = db.BeginTx(ctx, nil)
			wantBadHint(t, "BeginTx", err, says)
			_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", opts...)
			wantBadHint(t, "Acquire", err, says)
			if says != "Retry" {
				err = mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return errors.New("it ran") }, opts...)
				wantBadHint(t, "Do", err, says)
			}
		}
		nothing := func(context.Context) error { return nil }
		for _, opt := range []lockctx.Option{lockctx.Lease(ttl), lockctx.Advisory()} {
			err := mysqllock.Do(dbtest.Limited(t), db, "k", nothing, lockctx.Retry(3), opt)
			wantBadHint(t, "Do", err, "Retry")
		}
		wantBadHint(t, "Do of leases", mysqllock.Do(dbtest.Limited(t), leasing, "k", nothing, lockctx.Retry(3)), "Retry")
		for _, opts := range [][]lockctx.Option{{lockctx.Retry(3)}, {lockctx.Retry(3), lockctx.Row()}, {lockctx.Optimistic(), lockctx.Retry(3)}, {lockctx.Lease(ttl), lockctx.Retry(0)}} {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing, opts...))
		}
		s.wantStock(1, 10)
	})
}

func TestNilContexts(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		var none context.Context
		for _, ctx := range []context.Context{lockctx.With(none, "k"), lockctx.WithKeys(none, []string{"a", "b"}), lockctx.Claim(none, lockctx.ForUpdate())} {
			_, err := db.ExecContext(ctx, setStock, 0)
			wantBadHint(t, "Exec", err, "context is nil")
			_, err = read(ctx, db, 1)
			wantBadHint(t, "Query", err, "context is nil")
		}
		_, err := mysqllock.Acquire(none, db, "k")
		wantBadHint(t, "Acquire", err, "context is nil")
		err = mysqllock.Do(none, db, "k", func(context.Context) error { return errors.New("it ran") })
		wantBadHint(t, "Do", err, "context is nil")
		if _, ok := mysqllock.Token(none); ok {
			t.Error("nil has a token")
		}
		s.wantStock(1, 10)
	})
}

// TestKeysPileUp: a loop that derives each context from the one before.
func TestKeysPileUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := dbtest.Limited(t)
		began := time.Now()
		for i := range 300 {
			ctx = lockctx.With(ctx, fmt.Sprint("row ", i))
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			if i <= lockctx.MaxNested {
				dbtest.OK(t, err)
			} else {
				wantBadHint(t, fmt.Sprint("loop ", i), err, "in a loop")
			}
			if i == lockctx.MaxNested {
				t.Logf("%d statements in %v", i, time.Since(began))
			}
		}
		s.wantStock(1, 10+lockctx.MaxNested+1)

		for _, n := range []int{300, 3000} { // as many as one likes, in one WithKeys
			keys := make([]string, n)
			for i := range keys {
				keys[i] = fmt.Sprint("key ", i)
			}
			began = time.Now()
			for range 2 {
				_, err := db.ExecContext(lockctx.WithKeys(dbtest.Limited(t), keys), "UPDATE p SET stock = 10 WHERE id = 1")
				dbtest.OK(t, err)
				t.Logf("%d keys in %v", n, time.Since(began))
				began = time.Now()
			}
		}
	})
}

func TestHasInHolds(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opts := range keptAs() {
			outer := lockctx.With(dbtest.Limited(t), "outer")
			dbtest.OK(t, mysqllock.Do(outer, db, "k", func(ctx context.Context) error {
				if !lockctx.Has(ctx, "k") || !lockctx.Has(ctx, "outer") || lockctx.Has(ctx, "other") || lockctx.Has(lockctx.Without(ctx), "k") {
					t.Errorf("in a hold, %s", name)
				}
				return nil
			}, opts...))
			if lockctx.Has(outer, "k") {
				t.Errorf("around a hold, %s", name)
			}
		}
	})
}
