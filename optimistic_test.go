package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/DATA-DOG/go-sqlmock"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Optimistic locks: each entry point, what conflicts, and that nothing is lost.

// way is one of the ways in which a unit of work reads a stock under the key k,
// decides, and writes it. between runs before it writes.
type way struct {
	name string
	unit func(ctx context.Context, db *sql.DB, between func()) error
}

// hintedBy is what its hint asks for.
func (w way) hintedBy(opts ...lockctx.Option) func(context.Context, *sql.DB, func()) error {
	return func(ctx context.Context, db *sql.DB, between func()) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return w.unit(lockctx.With(ctx, "k", opts...), db, between)
	}
}

// besideASession is the way whose writes are, with a row lock, in another
// transaction than the lock, so that no commit can set the version with them.
const besideASession = "query, late hint"

const increment = "UPDATE p SET stock = ? WHERE id = 1"

// inTx reads with one context and writes with another in tx.
func inTx(reading, writing context.Context, tx *sql.Tx, between func()) error {
	defer tx.Rollback()
	n, err := read(reading, tx, 1)
	if err != nil {
		return err
	}
	between()
	if _, err := tx.ExecContext(writing, increment, n+1); err != nil {
		return err
	}
	return tx.Commit()
}

// ways are with a hint in ctx.
var ways = []way{
	{"BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		return inTx(ctx, context.Background(), tx, between)
	}},
	{"statements", func(ctx context.Context, db *sql.DB, between func()) error {
		n, err := read(ctx, db, 1)
		if err == nil {
			between()
			_, err = db.ExecContext(ctx, increment, n+1)
		}
		return err
	}},
	{"query, BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		n, err := read(ctx, db, 1)
		if err != nil {
			return err
		}
		between()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.Exec(increment, n+1); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"query that writes", func(ctx context.Context, db *sql.DB, between func()) error {
		n, err := read(ctx, db, 1)
		if err != nil {
			return err
		}
		between()
		rows, err := db.QueryContext(ctx, increment, n+1)
		if err == nil {
			err = rows.Close()
		}
		return err
	}},
	{"late hint", func(ctx context.Context, db *sql.DB, between func()) error {
		tx, err := db.Begin()
		if err != nil {
			return err
		}
		return inTx(ctx, context.Background(), tx, between)
	}},
	{besideASession, func(ctx context.Context, db *sql.DB, between func()) error {
		n, err := read(ctx, db, 1)
		if err != nil {
			return err
		}
		between()
		tx, err := db.Begin()
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, increment, n+1); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"prepared", func(ctx context.Context, db *sql.DB, between func()) error {
		reading, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
		if err != nil {
			return err
		}
		defer reading.Close()
		writing, err := db.Prepare(increment)
		if err != nil {
			return err
		}
		defer writing.Close()
		var n int
		if err := reading.QueryRowContext(ctx, 1).Scan(&n); err != nil {
			return err
		}
		between()
		_, err = writing.ExecContext(ctx, n+1)
		return err
	}},
	{"prepared in BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		writing, err := tx.PrepareContext(ctx, increment)
		if err != nil {
			return err
		}
		defer writing.Close()
		n, err := read(ctx, tx, 1)
		if err != nil {
			return err
		}
		between()
		if _, err = writing.Exec(n + 1); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"nested", func(ctx context.Context, db *sql.DB, between func()) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		outer, err := conn.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer outer.Rollback()
		inner, err := conn.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := inTx(ctx, ctx, inner, between); err != nil {
			return err
		}
		return outer.Commit()
	}},
}

// holds are without a hint in ctx: what they ask for is opts.
func holds(opts ...lockctx.Option) []way {
	body := func(ctx context.Context, db *sql.DB, between func()) error {
		n, err := read(ctx, db, 1)
		if err != nil {
			return err
		}
		between()
		_, err = db.ExecContext(ctx, increment, n+1)
		return err
	}
	return []way{
		{"Do", func(ctx context.Context, db *sql.DB, between func()) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return body(ctx, db, between) }, opts...)
		}},
		{"Acquire", func(ctx context.Context, db *sql.DB, between func()) error {
			h, err := mysqllock.Acquire(ctx, db, "k", opts...)
			if err != nil {
				return err
			}
			defer h.Rollback()
			if err := body(h.Context(), db, between); err != nil {
				return err
			}
			return h.Release()
		}},
		{"BeginTx in Do", func(ctx context.Context, db *sql.DB, between func()) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				return inTx(ctx, ctx, tx, between)
			}, opts...)
		}},
	}
}

// units are all ways, with opts.
func units(opts ...lockctx.Option) map[string]func(ctx context.Context, db *sql.DB, between func()) error {
	all := make(map[string]func(context.Context, *sql.DB, func()) error)
	for _, w := range ways {
		all[w.name] = w.hintedBy(opts...)
	}
	for _, w := range holds(opts...) {
		all[w.name] = w.unit
	}
	return all
}

// wantConflict checks the error of a unit of work that met somebody else's.
func wantConflict(t *testing.T, what string, err error, op string) {
	t.Helper()
	var e *mysqllock.Error
	var by *mysql.MySQLError
	changed := errors.As(err, &by) && by.Number == 1020 // the server may have seen it before the commit
	switch {
	case !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) || !errors.As(err, &e):
		t.Errorf("%s returned %v, want ErrConflict", what, err)
	case e.Op != op && (!changed || e.Op != "exec") || e.Key != "k" || e.Strategy != "optimistic":
		t.Errorf("%s returned op %q, key %q, strategy %q", what, e.Op, e.Key, e.Strategy)
	}
}

func wantVersion(t *testing.T, ctx context.Context, want uint64) {
	t.Helper()
	if version, ok := mysqllock.Version(ctx); version != want || ok != (want != 0) {
		t.Errorf("the version is %d, %v, want %d", version, ok, want)
	}
}

// optimistically is a new lock context.
func optimistically(t *testing.T, opts ...lockctx.Option) context.Context {
	return lockctx.With(dbtest.Limited(t), "k", append([]lockctx.Option{lockctx.Optimistic()}, opts...)...)
}

// TestOptimisticConflicts has every way meet every kind of other.
func TestOptimisticConflicts(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		add := func(ctx context.Context) {
			t.Helper()
			_, err := other.ExecContext(ctx, "UPDATE p SET stock = stock + 100 WHERE id = 1")
			dbtest.OK(t, err)
		}
		rivals := map[string]func(){
			"optimistic": func() { add(optimistically(t)) },
			"row":        func() { add(lockctx.With(dbtest.Limited(t), "k")) },
			"row, late": func() {
				tx, err := other.BeginTx(dbtest.Limited(t), nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 100 WHERE id = 1")
				_, err = tx.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1")
				dbtest.OK(t, err)
				dbtest.OK(t, tx.Commit())
			},
			"row, session": func() {
				ctx := lockctx.With(dbtest.Limited(t), "k")
				_, err := read(ctx, other, 1)
				dbtest.OK(t, err)
				add(ctx)
			},
			"slots": func() { add(lockctx.With(dbtest.Limited(t), "k", lockctx.Slots(1))) },
			"lease": func() { add(lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(ttl))) },
			"lease, Do": func() {
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(ctx context.Context) error { add(ctx); return nil }, lockctx.Lease(ttl)))
			},
			"row, Do": func() {
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(ctx context.Context) error { add(ctx); return nil }))
			},
		}
		for name, unit := range units(lockctx.Optimistic()) {
			before := s.stock(1)
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.wantStock(1, before+1)
			for rival, commits := range rivals {
				before := s.stock(1)
				err := unit(dbtest.Limited(t), db, commits)
				wantConflict(t, name+" beside "+rival, err, "commit")
				s.wantStock(1, before+100)
			}
		}
		if st := db.Stats(); st.InUse != 0 {
			t.Errorf("%d connections are in use", st.InUse)
		}
	})
}

// TestOptimisticHeld has somebody hold the key at the commit: the unit does not
// wait for it.
func TestOptimisticHeld(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockWait=2m"), s.open()
		for holder, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "shared": lockctx.Shared(), "lease": lockctx.Lease(ttl)} {
			for name, unit := range units(lockctx.Optimistic()) {
				dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
				before := s.stock(1)
				var h *mysqllock.Hold
				var start time.Time
				err := unit(dbtest.Limited(t), db, func() {
					var err error
					h, err = mysqllock.Acquire(dbtest.Limited(t), other, "k", opt)
					dbtest.OK(t, err)
					start = time.Now()
				})
				if took := time.Since(start); took > time.Minute { // the handle waits for longer
					t.Errorf("%s waited %v for a %s", name, took, holder)
				}
				wantConflict(t, name+" with a "+holder, err, "commit")
				if errors.Is(err, mysqllock.ErrLocked) != (holder != "lease") {
					t.Errorf("%s with a %s returned %v", name, holder, err)
				}
				dbtest.OK(t, h.Release())
				s.wantStock(1, before)
			}
		}
	})
}

// TestOptimisticVersions: what tells versions, what makes new ones, and what
// needs none.
func TestOptimisticVersions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockStrategy=optimistic")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		wantVersion(t, ctx, 0)
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		first := s.token("k")
		wantVersion(t, ctx, first)
		if st := db.Stats(); st.InUse != 0 {
			t.Errorf("%d connections are pinned", st.InUse)
		}
		s.wantLocked("k", false)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		wantVersion(t, ctx, first+1)
		if now := s.token("k"); now != first+1 {
			t.Errorf("the version is %d, want %d", now, first+1)
		}
		// The next unit of work, of another lock context: it does not rely on the read.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		dbtest.OK(t, err)
		wantVersion(t, ctx, first+2)
		s.wantStock(1, 8)

		// What only reads, and what is rolled back, changes no version.
		for what, unit := range map[string]func(ctx context.Context) error{
			"a query": func(ctx context.Context) error { _, err := read(ctx, db, 1); return err },
			"a transaction that reads": func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				_, err = read(ctx, tx, 1)
				dbtest.OK(t, err)
				return tx.Commit()
			},
			"a READ ONLY transaction": func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
				dbtest.OK(t, err)
				_, err = read(ctx, tx, 1)
				dbtest.OK(t, err)
				if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1"); err == nil {
					t.Error("a READ ONLY transaction has written")
				}
				return tx.Commit()
			},
			"a transaction that is rolled back": func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
				return tx.Rollback()
			},
			"a transaction of nothing": func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				return tx.Commit()
			},
			"Do that reads": func(ctx context.Context) error {
				return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { _, err := read(ctx, db, 1); return err })
			},
			"Do that fails": func(ctx context.Context) error {
				err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
					dbtest.OK(t, err)
					return sql.ErrNoRows
				})
				if !errors.Is(err, sql.ErrNoRows) {
					t.Errorf("Do returned %v", err)
				}
				return nil
			},
			"a hold that is rolled back": func(ctx context.Context) error {
				h, err := mysqllock.Acquire(ctx, db, "k")
				dbtest.OK(t, err)
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 1 WHERE id = 1")
				dbtest.OK(t, err)
				return h.Rollback()
			},
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, unit(ctx))
			if now := s.token("k"); now != first+2 {
				t.Errorf("%s: the version is %d, want %d", what, now, first+2)
				first = now - 2
			}
			wantVersion(t, ctx, first+2)
		}
		s.wantStock(1, 8)

		// A read needs no end, nor does what comes after it.
		ctx = lockctx.With(context.Background(), "k")
		if n, err = read(ctx, db, 1); err != nil {
			t.Fatalf("a read in a context that never ends: %v", err)
		}
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		// A context of the query alone ends nothing: there is nothing to give back.
		ctx = lockctx.With(context.Background(), "k")
		query, cancel := context.WithCancel(ctx)
		n, err = read(query, db, 1)
		dbtest.OK(t, err)
		cancel()
		time.Sleep(50 * time.Millisecond)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		s.wantStock(1, 6)

		// The end of the lock context ends the unit of work.
		base, end := context.WithCancel(dbtest.Limited(t))
		ctx = lockctx.With(base, "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		end()
		ended := context.WithoutCancel(ctx)
		dbtest.Soon(t, "the unit of work has ended", func() bool {
			_, err := read(ended, db, 1)
			return errors.Is(err, mysqllock.ErrLost)
		})
		_, err = db.ExecContext(ended, "UPDATE p SET stock = 1 WHERE id = 1")
		wantLost(t, "a write after the end of the lock context", err)
		s.wantStock(1, 6)
	})
}

// TestIfVersion carries a version to another unit of work.
func TestIfVersion(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		shown := func() uint64 {
			t.Helper()
			ctx := optimistically(t)
			_, err := read(ctx, other, 1)
			dbtest.OK(t, err)
			version, there := mysqllock.Version(ctx)
			if !there {
				t.Fatal("no version")
			}
			return version
		}
		stale := shown()
		for range 2 {
			_, err := other.ExecContext(optimistically(t), "UPDATE p SET stock = stock + 100 WHERE id = 1")
			dbtest.OK(t, err)
		}
		calls := 0
		for name, unit := range units(lockctx.IfVersion(stale)) {
			before := s.stock(1)
			calls = 0
			wantConflict(t, name+" with a version of old", unit(dbtest.Limited(t), db, func() { calls++ }), "commit")
			if calls != 1 { // no retry makes it new
				t.Errorf("%s ran %d times", name, calls)
			}
			s.wantStock(1, before)
		}
		for name := range units() {
			version := shown()
			before := s.stock(1)
			unit := units(lockctx.IfVersion(version))[name]
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.wantStock(1, before+1)
			wantConflict(t, name+" with the same version again", unit(dbtest.Limited(t), db, func() {}), "commit")
			wantConflict(t, name+" with a version to come", units(lockctx.IfVersion(version + 7))[name](dbtest.Limited(t), db, func() {}), "commit")
			s.wantStock(1, before+1)
		}

		// Clean-up removes the row: no version of the old one is one of the next.
		for _, version := range []uint64{shown(), shown()} {
			dbtest.Exec(t, s.plain, "UPDATE mysqllock f JOIN mysqllock r ON r.name = 'k' SET f.token = GREATEST(f.token, r.token) WHERE f.namespace = '' AND f.name = ''")
			dbtest.Exec(t, s.plain, "DELETE FROM mysqllock WHERE name = 'k'")
			for _, db := range []*sql.DB{db, s.open()} {
				_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(version)), increment, 1)
				wantConflict(t, "a version of a row that was removed", err, "commit")
				if next := shown(); next <= version {
					t.Errorf("the version goes from %d to %d", version, next)
				}
			}
		}

		// A key that was never used has no version.
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "new", lockctx.IfVersion(1)), increment, 1)
		if !errors.Is(err, mysqllock.ErrConflict) {
			t.Errorf("a key that was never used: %v", err)
		}
	})
}

// TestOptimisticConflictStays: what was decided on data that has changed is not
// written by trying again; only a new lock context can.
func TestOptimisticConflictStays(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for _, more := range []string{"", "m"} { // with another key, the unit of work is on a session
			for name, write := range map[string]func(ctx context.Context) error{
				"Exec": func(ctx context.Context) error { _, err := db.ExecContext(ctx, increment, 1); return err },
				"BeginTx": func(ctx context.Context) error {
					tx, err := db.BeginTx(ctx, nil)
					if err != nil {
						return err
					}
					defer tx.Rollback()
					if _, err := tx.Exec(increment, 1); err != nil {
						return err
					}
					return tx.Commit()
				},
				"Do": func(ctx context.Context) error {
					return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
						_, err := db.ExecContext(ctx, increment, 1)
						return err
					}, lockctx.Optimistic(), lockctx.Retry(3))
				},
			} {
				ctx := optimistically(t)
				if more != "" {
					ctx = lockctx.With(ctx, more, lockctx.Row())
				}
				_, err := read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = other.ExecContext(optimistically(t), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				dbtest.OK(t, err)
				before := s.stock(1)
				for try := range 3 {
					what := fmt.Sprintf("%s with another key %q, try %d", name, more, try)
					err := write(ctx)
					if !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) {
						t.Errorf("%s returned %v, want ErrConflict", what, err)
					}
					if _, err := read(ctx, db, 1); !errors.Is(err, mysqllock.ErrConflict) {
						t.Errorf("a read after %s returned %v, want ErrConflict", what, err)
					}
				}
				s.wantStock(1, before)
				if more != "" {
					s.wantLocked(more, false)
				}
				dbtest.OK(t, write(optimistically(t)))
				s.wantStock(1, 1)
			}
		}

		// A transaction that has read nothing outside of itself can be begun again.
		ctx := optimistically(t)
		for try := range 2 {
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			n, err := read(ctx, tx, 1)
			dbtest.OK(t, err)
			if try == 0 {
				_, err = other.ExecContext(optimistically(t), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				dbtest.OK(t, err)
			}
			if _, err = tx.Exec(increment, n+1); err == nil {
				err = tx.Commit()
			} else {
				_ = tx.Rollback()
			}
			if try == 0 {
				wantConflict(t, "Commit", err, "commit")
				continue
			}
			dbtest.OK(t, err)
			s.wantStock(1, n+1)
		}
	})
}

// TestOptimisticFailedWrite: the unit of work goes on after a statement that has
// failed, and does not conflict with itself.
func TestOptimisticFailedWrite(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		duplicate := "INSERT INTO p VALUES (1, 1)"
		for _, rival := range []bool{false, true} {
			ctx := optimistically(t)
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			for range 2 {
				if _, err := db.ExecContext(ctx, duplicate); err == nil || errors.Is(err, mysqllock.ErrConflict) {
					t.Errorf("a duplicate returned %v", err)
				}
			}
			if rival {
				_, err = other.ExecContext(optimistically(t), increment, 50)
				dbtest.OK(t, err)
			}
			_, err = db.ExecContext(ctx, increment, n+1)
			if rival {
				wantConflict(t, "the write", err, "commit")
				s.wantStock(1, 50)
				continue
			}
			dbtest.OK(t, err)
			s.wantStock(1, n+1)
			wantVersion(t, ctx, s.token("k"))
		}
		// If the failed one meets a conflict, that is its error, and nothing goes on.
		ctx := optimistically(t)
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		_, err = other.ExecContext(optimistically(t), increment, 60)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, duplicate)
		wantConflict(t, "the duplicate", err, "exec")
		_, err = db.ExecContext(ctx, increment, 1)
		wantConflict(t, "the write", err, "exec")
		s.wantStock(1, 60)
	})
}

// TestOptimisticInTransactions: late hints, and transactions in transactions.
func TestOptimisticInTransactions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		// It has read before: what it has seen may be older than the version.
		tx, err := db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		n, err := read(context.Background(), tx, 1)
		dbtest.OK(t, err)
		if _, err = tx.ExecContext(optimistically(t), increment, n+1); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("a late hint after a read returned %v", err)
		}
		dbtest.OK(t, tx.Rollback())
		tx, err = db.BeginTx(dbtest.Limited(t), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		dbtest.OK(t, err)
		_, err = read(context.Background(), tx, 1)
		dbtest.OK(t, err)
		n, err = read(optimistically(t), tx, 1)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, increment, n+1)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, n+1)
		// Nor does a version say anything of what was read before it, wherever it is
		// from.
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(s.token("k"))} {
			tx, err = db.BeginTx(dbtest.Limited(t), nil)
			dbtest.OK(t, err)
			_, err = read(context.Background(), tx, 1)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(lockctx.With(dbtest.Limited(t), "k", opt, lockctx.AllowStale()), increment, n+2)
			if !errors.Is(err, mysqllock.ErrStaleSnapshot) {
				t.Errorf("a late hint after a read, with AllowStale, returned %v", err)
			}
			dbtest.OK(t, tx.Rollback())
		}
		s.wantStock(1, n+1)

		// A savepoint that is rolled back takes what it wrote along.
		ctx := optimistically(t)
		conn, err := db.Conn(ctx)
		dbtest.OK(t, err)
		defer conn.Close()
		outer, err := conn.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, outer, "UPDATE p SET stock = 1 WHERE id = 2")
		inner, err := conn.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, inner, increment, 77)
		dbtest.OK(t, inner.Rollback())
		dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { // joins
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 3")
			return err
		}, lockctx.Optimistic()))
		s.wantStock(3, 10)
		dbtest.OK(t, outer.Commit())
		s.wantStock(1, n+1)
		s.wantStock(2, 1)
		s.wantStock(3, 1)

		// Statements of a transaction beside the unit of work can't be in its commit.
		ctx = lockctx.With(optimistically(t), "m", lockctx.Row())
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		tx, err = db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		if _, err := tx.ExecContext(ctx, increment, 1); err == nil || !strings.Contains(err.Error(), "begin the transaction with the lock context") {
			t.Errorf("a statement beside the unit of work returned %v", err)
		}
		dbtest.OK(t, tx.Rollback())
		_, err = db.ExecContext(ctx, increment, 5)
		dbtest.OK(t, err)

		// Two keys, one of them another's: neither is written under, nor changed.
		both := func() context.Context {
			return lockctx.WithKeys(dbtest.Limited(t), []string{"k", "l"}, lockctx.Optimistic())
		}
		_, err = db.ExecContext(both(), increment, 6)
		dbtest.OK(t, err)
		for _, key := range []string{"k", "l"} {
			tx, err := db.BeginTx(both(), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			_, err = other.ExecContext(lockctx.With(dbtest.Limited(t), key, lockctx.Optimistic()), increment, 7)
			dbtest.OK(t, err)
			k, l := s.token("k"), s.token("l")
			err = tx.Commit()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrConflict) || !errors.As(err, &e) || e.Key != "k, l" {
				t.Errorf("two keys, %s is changed: %v", key, err)
			}
			if s.token("k") != k || s.token("l") != l {
				t.Error("a commit that was refused has changed a version")
			}
		}
		s.wantStock(4, 10)
		// A second key that joins.
		ctx = optimistically(t)
		tx, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		k, l := s.token("k"), s.token("l")
		_, err = tx.ExecContext(lockctx.With(ctx, "l", lockctx.Optimistic()), increment, 8)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Commit())
		if s.token("k") != k+1 || s.token("l") != l+1 {
			t.Error("a commit under two keys has not changed both versions")
		}
	})
}

// TestOptimisticWaitsForALease: its holder may commit until it gives it back.
func TestOptimisticWaitsForALease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockWait=2m"), s.open()
		for name, unit := range units(lockctx.Optimistic()) {
			h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", lockctx.Lease(ttl))
			dbtest.OK(t, err)
			ended := make(chan time.Time, 1)
			before := s.stock(1)
			go func() {
				time.Sleep(100 * time.Millisecond)
				_, err := other.ExecContext(h.Context(), "UPDATE p SET stock = stock + 100 WHERE id = 1")
				ended <- time.Now()
				if err = errors.Join(err, h.Release()); err != nil {
					t.Error(err)
				}
			}()
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			if at := <-ended; time.Since(at) > time.Minute {
				t.Errorf("%s was through %v after the lease", name, time.Since(at))
			}
			s.wantStock(1, before+101)
		}

		h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		before := s.stock(1)
		var e *mysqllock.Error
		for name, unit := range units(lockctx.Optimistic(), lockctx.NoWait()) {
			start := time.Now()
			err := unit(dbtest.Limited(t), db, func() {})
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) ||
				e.Op != "lock" || e.Key != "k" || e.Strategy != "optimistic" || e.Holder == nil || time.Since(start) > time.Minute {
				t.Errorf("%s with NoWait returned %v", name, err)
			}
		}
		for name, unit := range units(lockctx.Optimistic(), lockctx.Wait(100*time.Millisecond)) {
			err := naming(func() error { return unit(dbtest.Limited(t), db, func() {}) })
			if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Holder == nil || e.Waited < 50*time.Millisecond { // what came before the wait counts against it
				t.Errorf("%s with a short wait returned %v", name, err)
			}
		}
		// A caller whose context ends gets away.
		for name, unit := range units(lockctx.Optimistic()) {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result := make(chan error, 1)
			go func() { result <- unit(ctx, db, func() {}) }()
			time.Sleep(100 * time.Millisecond)
			start := time.Now()
			cancel()
			err := <-result
			if took := time.Since(start); !errors.Is(err, context.Canceled) || took > time.Minute {
				t.Errorf("%s returned %v, %v after the end of its context", name, err, took)
			}
		}
		dbtest.OK(t, h.Release())
		s.wantStock(1, before)
		dbtest.Soon(t, "no connection is in use", func() bool {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return db.Stats().InUse == 0 && st.InUse == 0
		})
		dbtest.OK(t, units(lockctx.Optimistic(), lockctx.NoWait())["BeginTx"](dbtest.Limited(t), db, func() {}))

		// A handle that is closed ends the wait, too.
		h, err = mysqllock.Acquire(dbtest.Limited(t), other, "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		closing := s.open()
		result := make(chan error, 1)
		go func() { _, err := closing.ExecContext(optimistically(t), increment, 1); result <- err }()
		time.Sleep(200 * time.Millisecond)
		dbtest.OK(t, closing.Close())
		if err := <-result; err == nil {
			t.Error("a closed handle has written")
		}
		dbtest.OK(t, h.Release())
	})
}

// TestRowLocksStep: the commit of a row lock counts where, and only where, the key
// was kept optimistically, and it has written.
func TestRowLocksStep(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1") // makes the row
		dbtest.OK(t, err)
		for _, versioned := range []bool{false, true} {
			if versioned {
				_, err := read(optimistically(t), db, 1)
				dbtest.OK(t, err)
			}
			for name, unit := range units(lockctx.Row()) {
				before := s.token("k")
				err := unit(dbtest.Limited(t), db, func() {})
				if versioned && name == besideASession {
					if err == nil || !strings.Contains(err.Error(), "begin the transaction with the lock context") {
						t.Errorf("%s returned %v", name, err)
					}
					continue
				}
				dbtest.OK(t, err)
				after := s.token("k")
				if versioned && after != before+1 || !versioned && after != before {
					t.Errorf("%s, versioned %v: the version goes from %d to %d", name, versioned, before, after)
				}
			}
			before := s.token("k")
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			_, err = read(dbtest.Limited(t), tx, 1)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
			tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			dbtest.OK(t, tx.Commit())
			tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			dbtest.OK(t, tx.Rollback())
			if after := s.token("k"); after != before {
				t.Errorf("versioned %v: what has not written, or is shared, changes the version", versioned)
			}
		}

		// What a transaction has written before its hint counts, too.
		for what, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			before := s.token("k")
			tx, err := db.BeginTx(dbtest.Limited(t), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			_, err = read(lockctx.With(dbtest.Limited(t), "k", opt), tx, 1)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
			if after := s.token("k"); after != before+1 {
				t.Errorf("%s, written before the hint: the version goes from %d to %d", what, before, after)
			}
		}

		// Under the session's lock: its end would not tell others of what is
		// committed elsewhere.
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		beside, err := db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		for _, text := range []string{"SELECT stock FROM p WHERE id = 1", "UPDATE p SET stock = 1 WHERE id = 1"} {
			if _, err := beside.ExecContext(ctx, text); err == nil || !strings.Contains(err.Error(), "begin the transaction with the lock context") {
				t.Errorf("%s under the lock of a session returned %v", text, err)
			}
		}
		dbtest.OK(t, beside.Rollback())
		_, err = db.ExecContext(ctx, "DO 1")
		dbtest.OK(t, err)

		// A first unit that keeps the key optimistically waits for a row lock that
		// does not know of it.
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "first"), nil)
		dbtest.OK(t, err)
		n, err := read(dbtest.Limited(t), tx, 2)
		dbtest.OK(t, err)
		seen := make(chan int, 1)
		go func() {
			n, err := read(lockctx.With(dbtest.Limited(t), "first", lockctx.Optimistic()), db, 2)
			if err != nil {
				t.Error(err)
			}
			seen <- n
		}()
		time.Sleep(200 * time.Millisecond)
		dbtest.Exec(t, tx, "UPDATE p SET stock = ? WHERE id = 2", n+1)
		dbtest.OK(t, tx.Commit())
		if got := <-seen; got != n+1 {
			t.Errorf("the first unit has read %d, which was changed under a row lock", got)
		}
	})
}

// TestOptimisticInTextTransaction: SQL text has begun a transaction, whose
// snapshot may be older than the version.
func TestOptimisticInTextTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for _, begin := range []string{"BEGIN", "SET autocommit = 0"} {
			for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(1)} {
				conn, err := db.Conn(dbtest.Limited(t))
				dbtest.OK(t, err)
				dbtest.Exec(t, conn, begin)
				_, err = read(dbtest.Limited(t), conn, 1)
				dbtest.OK(t, err)
				_, err = other.ExecContext(optimistically(t), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				dbtest.OK(t, err)
				if n, err := read(lockctx.With(dbtest.Limited(t), "k", opt), conn, 1); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("after %s: %d, %v", begin, n, err)
				}
				dbtest.Exec(t, conn, "ROLLBACK")
				dbtest.Exec(t, conn, "SET autocommit = 1")
				_, err = read(optimistically(t), conn, 1)
				dbtest.OK(t, err)
				dbtest.OK(t, conn.Close())
			}
		}
	})
}

// TestOptimisticMixed: the same key in other ways, in one lock context.
func TestOptimisticMixed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		_, err := read(optimistically(t), db, 1)
		dbtest.OK(t, err)
		bump := func() {
			t.Helper()
			_, err := other.ExecContext(optimistically(t), "UPDATE p SET stock = stock + 1 WHERE id = 2")
			dbtest.OK(t, err)
		}
		write := func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		}
		for name, opt := range map[string]lockctx.Option{
			"row": lockctx.Row(), "slots": lockctx.Slots(1), "lease": lockctx.Lease(ttl), "lease slots": func(h *hint.Hint) { lockctx.Lease(ttl)(h); lockctx.Slots(1)(h) },
		} {
			t.Run(name, func(t *testing.T) {
				in := func(ctx context.Context) context.Context {
					return lockctx.With(ctx, "k", opt, lockctx.Wait(20*time.Second))
				}
				free := func() {
					t.Helper()
					s.wantLocked("k", false)
					s.wantLeased("k", false)
				}
				// Both from the beginning, in either order.
				before := s.token("k")
				dbtest.OK(t, write(in(optimistically(t))))
				dbtest.OK(t, write(lockctx.With(in(dbtest.Limited(t)), "k", lockctx.Optimistic())))
				if after := s.token("k"); after != before+2 {
					t.Errorf("two commits make the version %d of %d", after, before)
				}
				free()
				// With a version that was given.
				version := s.token("k")
				given := func(version uint64) context.Context {
					return lockctx.With(in(dbtest.Limited(t)), "k", lockctx.IfVersion(version))
				}
				dbtest.OK(t, write(given(version)))
				wantConflict(t, "a version of old", write(given(version)), map[bool]string{true: "lock", false: "commit"}[strings.HasPrefix(name, "lease")])
				free()
				// A lock after a read that remembers the version.
				for _, rival := range []bool{false, true} {
					ctx := optimistically(t)
					_, err := read(ctx, db, 1)
					dbtest.OK(t, err)
					if rival {
						bump()
					}
					stock := s.stock(1)
					if rival && strings.HasPrefix(name, "lease") { // known before the work
						_, err := db.BeginTx(in(ctx), nil)
						wantConflict(t, "BeginTx", err, "lock")
						free()
					}
					err = write(in(ctx))
					if !rival {
						dbtest.OK(t, err)
						s.wantStock(1, stock+1)
						free()
						continue
					}
					if !errors.Is(err, mysqllock.ErrConflict) {
						t.Errorf("a lock after a change returned %v", err)
					}
					s.wantStock(1, stock)
					free()
					if err := write(ctx); !errors.Is(err, mysqllock.ErrConflict) {
						t.Errorf("a write after that returned %v", err)
					}
					s.wantStock(1, stock)
					free()
				}
				// A lock that is given back since another one is not free, after which
				// the version still counts.
				h, err := mysqllock.Acquire(dbtest.Limited(t), other, "m")
				dbtest.OK(t, err)
				ctx := lockctx.With(context.Background(), "k", lockctx.Optimistic())
				_, err = read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = db.BeginTx(lockctx.With(in(ctx), "m", lockctx.Row(), lockctx.NoWait()), nil)
				if !errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("a second key that is not free: %v", err)
				}
				free()
				bump()
				stock := s.stock(1)
				if err := write(ctx); !errors.Is(err, mysqllock.ErrConflict) {
					t.Errorf("a write after a change returned %v", err)
				}
				s.wantStock(1, stock)
				dbtest.OK(t, h.Release())
				// Inside a hold nobody else can change it; but the holder of a lease has
				// transactions side by side.
				err = mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					for range 3 {
						ctx := lockctx.With(ctx, "k", lockctx.Optimistic())
						if _, err := read(ctx, db, 1); err != nil {
							return err
						}
						if err := write(ctx); err != nil {
							return err
						}
					}
					return nil
				}, opt)
				if strings.HasPrefix(name, "lease") {
					if !errors.Is(err, mysqllock.ErrUnsafe) {
						t.Errorf("inside a hold with a lease: %v", err)
					}
					s.wantStock(1, stock)
				} else {
					dbtest.OK(t, err)
					s.wantStock(1, stock+3)
				}
				free()
				// A hold after a read.
				for _, rival := range []bool{false, true} {
					stock := s.stock(1)
					ctx := optimistically(t)
					_, err := read(ctx, db, 1)
					dbtest.OK(t, err)
					if rival {
						bump()
					}
					err = mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return write(ctx) }, opt)
					if !rival {
						dbtest.OK(t, err)
						s.wantStock(1, stock+1)
					} else {
						if !errors.Is(err, mysqllock.ErrConflict) {
							t.Errorf("a hold after a change returned %v", err)
						}
						s.wantStock(1, stock)
					}
					free()
				}
			})
		}

		// Shared and more would be an upgrade.
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
		dbtest.OK(t, err)
		if _, err := tx.ExecContext(optimistically(t), "DO 1"); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("a shared key, kept optimistically: %v", err)
		}
		dbtest.OK(t, tx.Rollback())

		// Advisory locks are another space.
		dbtest.OK(t, write(lockctx.With(optimistically(t), "k", lockctx.Advisory())))
		ctx := lockctx.With(optimistically(t), "k", lockctx.Advisory())
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		bump()
		if err := write(ctx); !errors.Is(err, mysqllock.ErrConflict) {
			t.Errorf("under an advisory lock: %v", err)
		}
		s.wantNamed("k", false)
	})
}

// TestOptimisticStripes: different keys are one row, so they conflict with each
// other, but never with themselves.
func TestOptimisticStripes(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockStripes=1"), s.open("lockStripes=1")
		write := func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		}
		with := func(ctx context.Context, key string, opts ...lockctx.Option) context.Context {
			return lockctx.With(ctx, key, opts...)
		}
		for name, unit := range units(lockctx.Optimistic()) {
			before := s.stock(1)
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.wantStock(1, before+1)
			for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.Row(), lockctx.Lease(ttl)} {
				wantConflict(t, name, unit(dbtest.Limited(t), db, func() { dbtest.OK(t, write(with(dbtest.Limited(t), "other", opt), other)) }), "commit")
			}
		}
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.Row(), lockctx.Lease(ttl), lockctx.Slots(1), lockctx.Advisory()} {
			opts := []lockctx.Option{opt, lockctx.Wait(20 * time.Second)}
			before := s.stock(1)
			dbtest.OK(t, write(with(optimistically(t), "other", opts...), db))
			dbtest.OK(t, write(with(with(dbtest.Limited(t), "other", opts...), "k", lockctx.Optimistic()), db))
			ctx := optimistically(t)
			_, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			dbtest.OK(t, write(with(ctx, "other", opts...), db))
			s.wantStock(1, before+3)
		}
		// Of two versions each has to be right.
		ctx := optimistically(t)
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		version, _ := mysqllock.Version(ctx)
		dbtest.OK(t, write(with(ctx, "other", lockctx.Optimistic()), db))
		wantVersion(t, ctx, version+1)
		for _, versions := range [][2]uint64{{version, version + 1}, {version + 1, version}} {
			ctx := with(with(dbtest.Limited(t), "k", lockctx.IfVersion(versions[0])), "other", lockctx.IfVersion(versions[1]))
			if err := write(ctx, db); !errors.Is(err, mysqllock.ErrConflict) {
				t.Errorf("versions %v, and it is %d: %v", versions, version+1, err)
			}
		}
	})
}

// connections are those to the database, but for the one that tells.
func (s *scratch) connections() []int {
	s.T.Helper()
	return dbtest.Column[int](s.T, s.plain, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.Name)
}

// TestOptimisticConnectionLost has the connection break, or be killed, in the
// middle: nothing is committed unseen.
func TestOptimisticConnectionLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := read(optimistically(t), s.open(), 1)
		dbtest.OK(t, err)
		for name, unit := range units(lockctx.Optimistic()) {
			// The comparison and COMMIT are one.
			db, p := s.Proxied(mysqllock.Config{})
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			before, version := s.stock(1), s.token("k")
			result := make(chan error, 1)
			go func() {
				result <- unit(dbtest.Limited(t), db, func() { p.BlockAt("COMMIT") })
			}()
			dbtest.Soon(t, "the network is cut", p.Blocked)
			p.Close()
			err := <-result
			if !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: %v", name, err)
			}
			if errors.Is(err, mysqllock.ErrConflict) {
				t.Errorf("%s: a conflict: %v", name, err)
			}
			s.wantStock(1, before) // it did not come through
			if s.token("k") != version {
				t.Errorf("%s: the version has changed", name)
			}
		}

		// Killed before it writes. Single statements have no connection then.
		db := s.open()
		s.plain.SetMaxOpenConns(1)
		for name, unit := range units(lockctx.Optimistic()) {
			killed := 0
			before := s.stock(1)
			err := unit(dbtest.Limited(t), db, func() {
				for _, id := range s.connections() {
					if _, err := s.plain.Exec(fmt.Sprint("KILL ", id)); err == nil { // else it has just ended
						killed++
					}
				}
			})
			if killed == 0 {
				t.Error("nothing was killed")
			}
			if s.stock(1) != before+1 && err == nil || s.stock(1) != before && err != nil {
				t.Errorf("%s: the stock goes from %d to %d, and the error is %v", name, before, s.stock(1), err)
			}
			if errors.Is(err, mysqllock.ErrConflict) {
				t.Errorf("%s: a conflict: %v", name, err)
			}
		}
	})
}

const optimisticWorkers = 8 // in each process

// kinds are what workers do, by name.
func kinds() map[string]func(ctx context.Context, db *sql.DB, between func()) error {
	all := units(lockctx.Optimistic())
	for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl)} {
		for way, unit := range units(opt) {
			all[name+" "+way] = unit
		}
	}
	delete(all, "row "+besideASession)
	retried := holds(lockctx.Optimistic(), lockctx.Retry(1_000_000))
	all["Do with Retry"] = retried[0].unit
	return all
}

// work has workers add one to the stock, each as many times, by the kinds in
// turn, and returns how many units of work had to be run again.
func work(db *sql.DB, kind []string, each int) (again int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	all := kinds()
	var mu sync.Mutex
	var workers sync.WaitGroup
	for i := range optimisticWorkers {
		unit := all[kind[i%len(kind)]]
		workers.Go(func() {
			for range each {
				runs := 0
				var failed error
				for {
					failed = unit(ctx, db, func() { runs++ })
					if !errors.Is(failed, mysqllock.ErrConflict) && !errors.Is(failed, mysqllock.ErrDeadlock) {
						break
					}
					time.Sleep(rand.N(5 * time.Millisecond << min(runs, 6))) // as Do does
				}
				mu.Lock()
				again += runs - 1
				err = errors.Join(err, failed)
				mu.Unlock()
				if failed != nil {
					return
				}
			}
		})
	}
	workers.Wait()
	return again, err
}

// childOptimistic works as it is told, a line at a time.
func childOptimistic(db *sql.DB, in *bufio.Scanner) {
	for in.Scan() {
		var each int
		count, kind, _ := strings.Cut(in.Text(), " ")
		fmt.Sscan(count, &each)
		again, err := work(db, strings.Split(kind, "; "), each)
		fmt.Println(again, err)
	}
}

// TestOptimisticNothingIsLost: 16 workers of two processes read, decide and write,
// by each way alone, and beside row locks and leases on the same key.
func TestOptimisticNothingIsLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		c := dbtest.StartJob(t, "optimistic", s.DSN("lockWait=2m"))
		type run struct {
			total int
			kinds []string
		}
		runs := []run{{dbtest.Long(320, 2000), []string{"Do with Retry"}}, {dbtest.Long(320, 2000), []string{"BeginTx"}}}
		var names []string
		for name := range kinds() {
			switch way, _, _ := strings.Cut(name, " "); {
			case name == "Do with Retry" || name == "BeginTx": // in full, above
			case way != "row" && way != "lease":
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			runs = append(runs, run{dbtest.Long(48, 1600), []string{name}})
		}
		mixed := func(other ...string) []string {
			return append([]string{"Do with Retry", "BeginTx", "statements"}, other...)
		}
		runs = append(runs, run{dbtest.Long(160, 2000), mixed("row BeginTx", "row statements")}, run{dbtest.Long(160, 2000), mixed("lease BeginTx", "lease Do")},
			run{dbtest.Long(160, 2000), []string{"BeginTx", "row BeginTx", "Do with Retry", "lease statements"}})
		for _, r := range runs {
			dbtest.Exec(t, s.plain, increment, 0)
			each := r.total / 2 / optimisticWorkers
			start := time.Now()
			c.Tell(fmt.Sprint(each, " ", strings.Join(r.kinds, "; ")))
			again, err := work(db, r.kinds, each)
			dbtest.OK(t, err)
			var there int
			line := c.Line()
			if n, _ := fmt.Sscan(line, &there); n != 1 || !strings.HasSuffix(line, " <nil>") {
				t.Fatal(line)
			}
			s.wantStock(1, 2*optimisticWorkers*each)
			t.Logf("%s: %d units of work in %v, %d and %d of them were run again", strings.Join(r.kinds, "; "), r.total, time.Since(start).Round(time.Millisecond), again, there)
		}
	})
}

// TestOptimisticStatements: what keeping a key optimistically costs, and what it
// costs row locks.
func TestOptimisticStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		add := "UPDATE p SET stock = stock + 1 WHERE id = 1"
		inTx := func(ctx context.Context, opts *sql.TxOptions, work func(ctx context.Context, tx *sql.Tx)) error {
			tx, err := db.BeginTx(ctx, opts)
			dbtest.OK(t, err)
			work(ctx, tx)
			return tx.Commit()
		}
		writes := func(ctx context.Context, tx *sql.Tx) { dbtest.Exec(t, tx, add) }
		read := func(ctx context.Context, db querier) (n int, err error) { // not prepared
			return n, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
		}
		reads := func(ctx context.Context, tx *sql.Tx) { _, err := read(ctx, tx); dbtest.OK(t, err) }
		row := func() context.Context { return lockctx.With(dbtest.Limited(t), "k") }
		// Row locks cost no statement more on keys that are kept optimistically.
		onlyRows := func() {
			t.Helper()
			tap.Costs(t, "row, transaction", 3, func() error { return inTx(row(), nil, writes) })
			tap.Costs(t, "row, transaction that reads", 3, func() error { return inTx(row(), nil, reads) })
			tap.Costs(t, "row, Exec", 3, func() error { _, err := db.ExecContext(row(), add); return err })
			tap.Costs(t, "row, read and write", 4, func() error {
				ctx := row()
				_, err := read(ctx, db)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, add)
				return err
			})
			tap.Costs(t, "row, Do", 3, func() error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { _, err := db.ExecContext(ctx, add); return err })
			})
			tap.Costs(t, "row, another key", 3, func() error { return inTx(lockctx.With(dbtest.Limited(t), "never"), nil, writes) })
		}
		onlyRows()

		tap.Costs(t, "transaction without a hint", 3, func() error { return inTx(dbtest.Limited(t), nil, writes) })
		tap.Costs(t, "transaction", 3, func() error { return inTx(optimistically(t), nil, writes) })
		tap.Costs(t, "transaction that reads and writes", 4, func() error {
			return inTx(optimistically(t), nil, func(ctx context.Context, tx *sql.Tx) { reads(ctx, tx); writes(ctx, tx) })
		})
		tap.Costs(t, "transaction that reads", 3, func() error { return inTx(optimistically(t), nil, reads) })
		tap.Costs(t, "READ ONLY transaction", 3+1, func() error { return inTx(optimistically(t), &sql.TxOptions{ReadOnly: true}, reads) })
		tap.Costs(t, "transaction of two keys", 3+1, func() error {
			return inTx(lockctx.WithKeys(dbtest.Limited(t), []string{"k", "l"}, lockctx.Optimistic()), nil, writes)
		})
		tap.Costs(t, "transaction with a version that was given", 3, func() error {
			return inTx(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(s.token("k"))), nil, writes)
		})
		tap.Costs(t, "transaction that is rolled back", 3, func() error {
			tx, err := db.BeginTx(optimistically(t), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, add)
			return tx.Rollback()
		})
		tap.Costs(t, "query", 1+1, func() error { _, err := read(optimistically(t), db); return err })
		tap.Costs(t, "query with a version that was given", 1, func() error {
			_, err := read(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(1)), db)
			return err
		})
		tap.Costs(t, "Exec", 3, func() error { _, err := db.ExecContext(optimistically(t), add); return err })
		tap.Costs(t, "query, query, Exec", 2+3+1, func() error {
			ctx := optimistically(t)
			for range 2 {
				_, err := read(ctx, db)
				dbtest.OK(t, err)
			}
			_, err := db.ExecContext(ctx, add)
			return err
		})
		tap.Costs(t, "Do, a write", 2+1, func() error { // BEGIN goes without saying on sessions
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, add)
				return err
			}, lockctx.Optimistic())
		})
		tap.Costs(t, "Do, a read and a write", 3+1, func() error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				_, err := read(ctx, db)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, add)
				return err
			}, lockctx.Optimistic())
		})
		onlyRows()
	})
}

// Texts that the driver sends for the versions of k.
const (
	sqlVersion = "SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(n) */ @@transaction_isolation" + sqlVersionOf
	// on MariaDB
	sqlVersionMaria = "SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(n) */ @@tx_isolation" + sqlVersionOf
	sqlVersionOf    = ", name, token, versioned = 1 AND owner IS NULL," +
		" IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0), owner" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b') LIMIT 1"
	sqlBrief  = "/*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */"
	sqlSettle = "INSERT " + sqlBrief + " INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM `shop`.`mysqllock` r WHERE r.namespace = x'73686f70' AND r.name = x'6b'" +
		" AND (r.versioned = 0 OR r.owner IS NOT NULL) AND NOT (r.owner IS NOT NULL AND r.expires > UTC_TIMESTAMP(6)) FOR UPDATE NOWAIT" +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)"
	sqlStep = "UPDATE `shop`.`mysqllock` SET token = token + 1, expires = UTC_TIMESTAMP(6) WHERE namespace = x'73686f70' AND name = x'6b'"
)

// sqlCompare compares a version of k and sets the next one.
func sqlCompare(version int) string {
	return "INSERT " + sqlBrief + " INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM (SELECT x'6b' AS n, " + fmt.Sprint(version) + " AS v) d" +
		" STRAIGHT_JOIN `shop`.`mysqllock` r ON r.namespace = x'73686f70' AND r.name = d.n" +
		" WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT" +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)"
}

// version expects the question for the version of k.
func (m *mocked) version(a answers, token, settled int) {
	text := sqlVersion
	if a.mariadb() {
		text = sqlVersionMaria
	}
	m.ExpectQuery(text).WillReturnRows(sqlmock.NewRows([]string{"isolation", "name", "token", "settled", "remaining", "owner"}).
		AddRow(a.isolation, "k", token, settled, 0, nil))
}

// compares expects the statement that compares a version of k, with COMMIT where the server
// has a way for that. fits is that version, or 0 if the row of k is locked anyway.
func (m *mocked) compares(a answers, fits int) (together *sqlmock.ExpectedQuery, alone *sqlmock.ExpectedExec) {
	switch {
	case a.mariadb():
		is := ""
		if fits != 0 {
			is = fmt.Sprintf(" AND token = %d AND versioned = 1 AND owner IS NULL", fits)
		}
		return m.ExpectQuery("BEGIN NOT ATOMIC SET @mysqllock_same = 0; " +
			"SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR " +
			strings.Replace(sqlStep, "x'6b'", "UNHEX(CONVERT('6b' USING ascii))", 1) + is + "; SET @mysqllock_same = @mysqllock_same + ROW_COUNT(); " +
			"IF @mysqllock_same = 1 THEN COMMIT; SET @mysqllock_done = 'MARK'; ELSE SELECT 0; END IF; END"), nil
	case !a.apart():
		return m.ExpectQuery(fmt.Sprintf("CALL `shop`.`mysqllock_next2`(x'73686f70', x'6b', %d, NULL, 'MARK') /* versions and COMMIT */", fits)), nil
	case fits == 0:
		return nil, m.ExpectExec(sqlStep)
	}
	return nil, m.ExpectExec(sqlCompare(fits))
}

// compared expects that a version of k is compared, fits, and is committed.
func (m *mocked) compared(a answers, version int) {
	together, alone := m.compares(a, version)
	if together != nil {
		together.WillReturnRows(sqlmock.NewRows(nil)) // no result set
		return
	}
	alone.WillReturnResult(sqlmock.NewResult(0, 2))
	m.expectExec("COMMIT")
}

// refused expects that a version of k does not fit, or that its row is locked.
func (m *mocked) refused(a answers, version int, locked bool) {
	together, alone := m.compares(a, version)
	number := number(3572)
	if a.mariadb() {
		number = &mysql.MySQLError{Number: 1205}
	}
	switch {
	case together != nil && locked:
		together.WillReturnError(number)
	case together != nil:
		together.WillReturnRows(column("0"))
	case locked:
		alone.WillReturnError(number)
	default:
		alone.WillReturnResult(sqlmock.NewResult(0, 0))
	}
	m.expectExec("ROLLBACK")
}

// provided expects the questions for the procedures that compare and commit, and that read
// and begin.
func (m *mocked) provided(a answers) {
	if !a.apart() && !a.mariadb() {
		m.expectQuery("SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f6e65787432'", "1")
		m.expectQuery("SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f7365656e32'", "1")
	}
}

// begun expects that the version of k is read, and a transaction begun, in one statement where
// the server has a way for that.
func (m *mocked) begun(a answers, token int) {
	if m.opens(a, token, true) {
		return
	}
	m.version(a, token, 1)
	m.expectExec("START TRANSACTION")
}

// unsettled is begun where the row is not marked yet.
func (m *mocked) unsettled(a answers, token int) {
	if !m.opens(a, token, false) {
		m.version(a, token, 0)
	}
}

// opens expects the statement that reads the version of k and may begin a transaction. It
// returns false where there is none.
func (m *mocked) opens(a answers, token int, settled bool) bool {
	text := "CALL `shop`.`mysqllock_seen2`(x'73686f70', x'6b')"
	switch {
	case a.apart():
		return false
	case a.mariadb():
		text = "BEGIN NOT ATOMIC SELECT MAX(token) INTO @mysqllock_token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = UNHEX(CONVERT('6b' USING ascii))" +
			" AND versioned = 1 AND owner IS NULL AND @@tx_isolation <> 'READ-UNCOMMITTED' LIMIT 1;" +
			" IF @mysqllock_token IS NOT NULL THEN START TRANSACTION; SELECT @mysqllock_token; END IF; END"
	}
	if settled {
		m.expectQuery(text, fmt.Sprint(token))
	} else {
		m.ExpectQuery(text).WillReturnRows(sqlmock.NewRows(nil)) // no result set
		m.version(a, token, 0)
	}
	return true
}

func TestMockOptimistic(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{Strategy: "optimistic"})
		// A transaction; the row is there, and not marked.
		m.setUp(a)
		m.exist(sqlExists, "k")
		m.provided(a)
		m.unsettled(a, 4)
		m.ExpectExec(sqlSettle).WillReturnResult(sqlmock.NewResult(0, 2))
		m.begun(a, 5)
		m.expectExec(sqlUpdate, 3, 42)
		m.compared(a, 5)
		tx := m.begin()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, nil)
		m.want(tx.Commit(), nil)

		// Reads and a write of one unit of work, then a write alone, in a lock context of
		// its own.
		m.version(a, 6, 1)
		m.expectQuery(sqlRead, "3")
		m.expectQuery(sqlRead, "3")
		for version := range 2 {
			if version > 0 {
				m.begun(a, 7)
			} else {
				m.expectExec("START TRANSACTION")
			}
			m.expectExec(sqlUpdate, 2, 42)
			m.compared(a, 6+version)
		}
		var stock int
		for range 2 {
			m.want(m.db.QueryRowContext(m.ctx, sqlRead).Scan(&stock), nil)
		}
		for _, ctx := range []context.Context{m.ctx, lockctx.With(context.Background(), "k")} {
			_, err = m.db.ExecContext(ctx, sqlUpdate, 2, 42)
			m.want(err, nil)
		}

		// What only reads, in a transaction.
		m.begun(a, 8)
		m.expectQuery(sqlRead, "2")
		m.expectExec("COMMIT")
		tx = m.begin()
		m.want(tx.QueryRowContext(m.ctx, sqlRead).Scan(&stock), nil)
		m.want(tx.Commit(), nil)

		// A conflict, and the same of a row that somebody has locked.
		for _, held := range []bool{false, true} {
			ctx := lockctx.With(context.Background(), "k")
			m.version(a, 8, 1)
			m.expectQuery(sqlRead, "2")
			m.expectExec("START TRANSACTION")
			m.expectExec(sqlUpdate, 1, 42)
			m.refused(a, 8, held)
			m.want(m.db.QueryRowContext(ctx, sqlRead).Scan(&stock), nil)
			for range 3 { // the others send nothing
				_, err = m.db.ExecContext(ctx, sqlUpdate, 1, 42)
				wantConflict(t, "Exec", err, "commit")
				if errors.Is(err, mysqllock.ErrLocked) != held {
					t.Errorf("held %v: %v", held, err)
				}
			}
		}

		// With a version that was given nothing is asked.
		given := lockctx.With(context.Background(), "k", lockctx.IfVersion(9))
		m.expectQuery(sqlRead, "2")
		m.expectExec("START TRANSACTION")
		m.expectExec(sqlUpdate, 1, 42)
		m.compared(a, 9)
		m.want(m.db.QueryRowContext(given, sqlRead).Scan(&stock), nil)
		_, err = m.db.ExecContext(given, sqlUpdate, 1, 42)
		m.want(err, nil)

		// After a statement that has failed the unit of work goes on, with the
		// version that it has set.
		ctx := lockctx.With(context.Background(), "k")
		m.version(a, 10, 1)
		m.expectQuery(sqlRead, "1")
		m.expectExec("START TRANSACTION")
		m.ExpectExec(sqlUpdate).WithArgs(1, 1).WillReturnError(number(1062))
		m.compared(a, 10)
		m.expectExec("START TRANSACTION")
		m.expectExec(sqlUpdate, 1, 42)
		m.compared(a, 11)
		m.want(m.db.QueryRowContext(ctx, sqlRead).Scan(&stock), nil)
		if _, err = m.db.ExecContext(ctx, sqlUpdate, 1, 1); err == nil {
			t.Error("no error")
		}
		_, err = m.db.ExecContext(ctx, sqlUpdate, 1, 42)
		m.want(err, nil)
		wantVersion(t, ctx, 12)
	})
}

// TestMockStep has a row lock on a key that others keep optimistically.
func TestMockStep(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.setUp(a)
		m.exist(sqlExists, "k")
		for i, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback, (*sql.Tx).Commit} {
			m.tells(a, 7, 5, nil, 1, "0", "0")
			if i < 2 {
				m.expectExec(sqlUpdate, 3, 42)
			}
			switch i {
			case 0:
				if m.provided(a); a.apart() {
					m.expectExec(sqlStep)
					m.ExpectCommit()
					break
				}
				m.compared(a, 0)
			case 1:
				m.rollback(a)
			default:
				m.commit(a)
			}
			tx := m.begin()
			if i < 2 {
				_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
				m.want(err, nil)
			}
			m.want(end(tx), nil)
		}
	})
}

// TestRecordOptimisticDo has Do compare, and run again what met somebody else.
func TestRecordOptimisticDo(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		version := func(n int) {
			r.replying(sqlVersion, "REPEATABLE-READ", "k", int64(n), int64(1), int64(0), nil)
		}
		version(5)
		work := func(ctx context.Context) error {
			if err := r.read(ctx, r.db); err != nil {
				return err
			}
			return r.write(ctx, r.db)
		}
		r.is(mysqllock.Do(ctx, r.db, "k", work, lockctx.Optimistic()), nil)
		unit := func(version int, end string) []string {
			return []string{
				"control1: " + sqlVersion,
				"session1: SELECT stock FROM p",
				"session1: UPDATE p SET stock = 1",
				"session1: " + sqlCompare(version),
				"session1: " + end,
			}
		}
		r.want(append([]string{"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes}, unit(5, "COMMIT")...)...)

		// Somebody is in the way twice.
		tries := 0
		for v := range 2 {
			r.failing(sqlCompare(6+v), number(3572))
		}
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
			tries++
			if now, _ := mysqllock.Version(ctx); now != uint64(4+tries) {
				t.Errorf("the version of try %d is %d", tries, now)
			}
			version(5 + tries)
			return work(ctx)
		}, lockctx.Optimistic(), lockctx.Retry(5)), nil)
		r.want(slices.Concat(unit(5, "COMMIT"))...)
		tries = 1
		again := func() error {
			return mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
				tries++
				version(5 + tries)
				return work(ctx)
			}, lockctx.Optimistic(), lockctx.Retry(2))
		}
		r.is(again(), nil)
		r.want(slices.Concat(unit(6, "ROLLBACK"), unit(7, "ROLLBACK"), unit(8, "COMMIT"))...)

		// As often as it may, and not at all with a version that was given.
		for v := range 3 {
			r.failing(sqlCompare(9+v), number(3572))
		}
		tries = 4
		r.is(again(), mysqllock.ErrConflict)
		r.want(slices.Concat(unit(9, "ROLLBACK"), unit(10, "ROLLBACK"), unit(11, "ROLLBACK"))...)
		r.is(mysqllock.Do(ctx, r.db, "k", work, lockctx.IfVersion(9), lockctx.Retry(5)), mysqllock.ErrConflict)
		r.want(unit(9, "ROLLBACK")[1:]...)
		// A function that fails is not compared, one that only reads neither.
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error { _ = work(ctx); return errFake }, lockctx.Optimistic(), lockctx.Retry(5)), errFake)
		r.want("control1: "+sqlVersion, "session1: SELECT stock FROM p", "session1: UPDATE p SET stock = 1", "session1: ROLLBACK")
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error { return r.read(ctx, r.db) }, lockctx.Optimistic()), nil)
		r.want("control1: "+sqlVersion, "session1: SELECT stock FROM p", "session1: COMMIT")
	})
}

// TestNothingIsRememberedOfALockContextThatIsOver: a lock context is garbage as soon as the
// application has dropped it, also if it has read and never committed, and if the context
// around it goes on as long as the program.
func TestNothingIsRememberedOfALockContextThatIsOver(t *testing.T) {
	uses := map[string]func(ctx context.Context, db *sql.DB) error{
		"read, decide, write": func(ctx context.Context, db *sql.DB) error {
			if _, err := read(ctx, db, 1); err != nil {
				return err
			}
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		},
		"exec": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		},
		"rollback": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
			return errors.Join(err, tx.Rollback())
		},
		"refused": func(ctx context.Context, db *sql.DB) error {
			if _, err := db.ExecContext(ctx, "UPDATE nowhere SET stock = 1"); err == nil {
				return errors.New("no error")
			}
			return nil
		},
		"Do": func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "inner", func(ctx context.Context) error { _, err := read(ctx, db, 1); return err })
		},
	}
	reads := map[string]func(ctx context.Context, db *sql.DB) error{
		"read": func(ctx context.Context, db *sql.DB) error { _, err := read(ctx, db, 1); return err },
		"prepared": func(ctx context.Context, db *sql.DB) error {
			st, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = 1")
			if err != nil {
				return err
			}
			defer st.Close()
			var n int
			return st.QueryRowContext(ctx).Scan(&n)
		},
		"a write that fails": func(ctx context.Context, db *sql.DB) error {
			if _, err := read(ctx, db, 1); err != nil {
				return err
			}
			if _, err := db.ExecContext(ctx, "UPDATE nowhere SET stock = 1"); err == nil {
				return errors.New("no error")
			}
			return nil
		},
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		long, cancel := context.WithCancel(context.Background())
		defer cancel()
		for mode, params := range map[string][]string{"": nil, "maxConns": {"maxConns=6"}} {
			db := s.open(params...)
			check := func(kind, way string, opt lockctx.Option, outer context.Context, use func(context.Context, *sql.DB) error) {
				t.Helper()
				s.forgets(fmt.Sprintf("%s %s, %s", kind, way, mode), func(own context.Context, key string) {
					dbtest.OK(t, use(lockctx.With(own, key, opt), db))
				}, outer)
			}
			for kind, opt := range map[string]lockctx.Option{
				"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
			} {
				for way, use := range uses {
					check(kind, way, opt, long, use)
				}
			}
			for way, use := range reads {
				check("optimistic", way, lockctx.Optimistic(), long, use)
				check("optimistic, endless", way, lockctx.Optimistic(), context.Background(), use)
			}
		}
	})
}

// forgets fails the test unless the contexts that were used are garbage soon. A few may be the
// last ones that a connection, or what is given back behind the caller, was used with.
func (s *scratch) forgets(what string, use func(own context.Context, key string), outer context.Context) {
	s.T.Helper()
	const all, few = 40, 15
	type mark struct{ _ [64]byte }
	var marks []weak.Pointer[mark]
	for i := range all {
		own := new(mark)
		marks = append(marks, weak.Make(own))
		use(context.WithValue(outer, markKey{}, own), fmt.Sprint("k", i%3))
	}
	dbtest.Eventually(s.T, what, func() error {
		runtime.GC()
		left := 0
		for _, m := range marks {
			if m.Value() != nil {
				left++
			}
		}
		if left > few {
			return fmt.Errorf("%d of %d lock contexts are remembered", left, all)
		}
		return nil
	})
}

type markKey struct{}

// TestAStatementThatFailsOnWhatOthersCommittedIsAConflict: two callers both see that a row is
// missing, or is there, and the second one's write fails on what the first one has done.
func TestAStatementThatFailsOnWhatOthersCommittedIsAConflict(t *testing.T) {
	races := map[string]struct {
		rival, own string
		number     []uint16
	}{
		"duplicate key": {"INSERT INTO child (id, p) VALUES (7, 1)", "INSERT INTO child (id, p) VALUES (7, 2)", []uint16{1062}},
		"deleted row":   {"DELETE FROM parent WHERE id = 3", "INSERT INTO child (id, p) VALUES (8, 3)", []uint16{1452}},
		"referred row":  {"INSERT INTO child (id, p) VALUES (9, 2)", "DELETE FROM parent WHERE id = 2", []uint16{1451}},
		"check":         {"UPDATE parent SET n = 0 WHERE id = 1", "UPDATE parent SET n = n - 1 WHERE id = 1", []uint16{3819, 4025}},
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		fresh := func() {
			for _, text := range []string{
				"DROP TABLE IF EXISTS child", "DROP TABLE IF EXISTS parent",
				"CREATE TABLE parent (id INT PRIMARY KEY, n INT NOT NULL, CHECK (n >= 0))",
				"CREATE TABLE child (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES parent (id))",
				"INSERT INTO parent VALUES (1, 1), (2, 1), (3, 1)",
			} {
				dbtest.Exec(t, s.plain, text)
			}
		}
		optimistic := func(key string) context.Context { return lockctx.With(dbtest.Limited(t), key, lockctx.Optimistic()) }
		ways := map[string]func(key, own string, meanwhile func()) error{
			"BeginTx": func(key, own string, meanwhile func()) error {
				tx, err := db.BeginTx(optimistic(key), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				meanwhile()
				if _, err := tx.Exec(own); err != nil {
					return err
				}
				return tx.Commit()
			},
			"read and Exec": func(key, own string, meanwhile func()) error {
				ctx := optimistic(key)
				if _, err := read(ctx, db, 1); err != nil {
					return err
				}
				meanwhile()
				_, err := db.ExecContext(ctx, own)
				return err
			},
			"prepared": func(key, own string, meanwhile func()) error {
				ctx := optimistic(key)
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				st, err := tx.PrepareContext(ctx, own)
				if err != nil {
					return err
				}
				defer st.Close()
				meanwhile()
				if _, err := st.ExecContext(ctx); err != nil {
					return err
				}
				return tx.Commit()
			},
			"Do": func(key, own string, meanwhile func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
					if _, err := read(ctx, db, 1); err != nil {
						return err
					}
					meanwhile()
					_, err := db.ExecContext(ctx, own)
					return err
				}, lockctx.Optimistic())
			},
		}
		for what, race := range races {
			for how, run := range ways {
				for _, moves := range []bool{true, false} {
					fresh()
					key := what + how
					// Once, so that what the first use of a key does is over.
					_, err := other.ExecContext(optimistic(key), "UPDATE p SET stock = stock + 1 WHERE id = 1")
					dbtest.OK(t, err)
					err = run(key, race.own, func() {
						if moves {
							_, err := other.ExecContext(optimistic(key), race.rival)
							dbtest.OK(t, err)
						} else { // without the key
							dbtest.Exec(t, s.plain, race.rival)
						}
					})
					var said *mysql.MySQLError
					if errors.As(err, &said) && said.Number == 1020 && errors.Is(err, mysqllock.ErrConflict) {
						continue // innodb_snapshot_isolation comes first
					}
					if !errors.As(err, &said) || !slices.Contains(race.number, said.Number) || errors.Is(err, mysqllock.ErrConflict) != moves {
						t.Errorf("%s, %s, the version moves: %v: %v", what, how, moves, err)
					}
				}
			}
		}

		// A transaction whose version has not moved goes on after the error.
		fresh()
		tx, err := db.BeginTx(optimistic("goes on"), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE parent SET n = 5 WHERE id = 2")
		if _, err := tx.Exec("INSERT INTO parent VALUES (1, 1)"); err == nil {
			t.Error("a row twice")
		}
		dbtest.OK(t, tx.Commit())

		// With Retry both insert, one after the other.
		fresh()
		runs := 0
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "retry", func(ctx context.Context) error {
			var n int
			err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM child WHERE id = 7").Scan(&n)
			if runs++; runs == 1 {
				_, err := other.ExecContext(optimistic("retry"), "INSERT INTO child VALUES (7, 1)")
				dbtest.OK(t, err)
			}
			if err != nil || n > 0 {
				return err
			}
			_, err = db.ExecContext(ctx, "INSERT INTO child VALUES (7, 2)")
			return err
		}, lockctx.Optimistic(), lockctx.Retry(2)))
		if runs != 2 {
			t.Errorf("%d runs, want 2", runs)
		}
	})
}
