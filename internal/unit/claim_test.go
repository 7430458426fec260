package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

const tasks = "SELECT id FROM tasks WHERE state = 'new' ORDER BY id LIMIT 2"

// tasked is a scratch database with 6 tasks.
func tasked(s *stock.Shop) {
	s.T.Helper()
	dbtest.Exec(s.T, s.Plain, "CREATE TABLE tasks (id INT PRIMARY KEY, state VARCHAR(10) NOT NULL, KEY (state, id)) ENGINE=InnoDB")
	dbtest.Exec(s.T, s.Plain, "INSERT INTO tasks VALUES (1, 'new'), (2, 'new'), (3, 'new'), (4, 'new'), (5, 'new'), (6, 'new')")
}

type lister interface {
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

// ids runs a query for them.
func ids(ctx context.Context, q lister, text string, args ...any) (found []int, err error) {
	rows, err := q.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		found = append(found, id)
	}
	return found, rows.Err()
}

func wantIDs(t *testing.T, ctx context.Context, q lister, want []int, text string, args ...any) {
	t.Helper()
	got, err := ids(ctx, q, text, args...)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestClaim(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		ctx := dbtest.Limited(t)
		skip := lockctx.Claim(ctx, lockctx.SkipLocked())
		db := s.Handle("interpolateParams=true")
		// Under REPEATABLE READ a claim keeps the gaps between its rows, too, and
		// others' updates of the state out of them.
		committed := func(ctx context.Context) *sql.Tx {
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			dbtest.OK(t, err)
			t.Cleanup(func() { _ = tx.Rollback() })
			return tx
		}
		one, two, three := committed(ctx), committed(ctx), committed(skip)
		wantIDs(t, skip, one, []int{1, 2}, tasks)
		wantIDs(t, skip, two, []int{3, 4}, tasks+";")
		wantIDs(t, skip, three, []int{5, 6}, "SELECT id FROM tasks WHERE state = ? ORDER BY id LIMIT ? -- the rest", "new", 9)
		dbtest.Exec(t, one, "UPDATE tasks SET state = 'done' WHERE id IN (1, 2)")
		dbtest.ExecIn(t, skip, two, "UPDATE tasks SET state = 'done' WHERE id IN (3, 4)") // a write in a claim's context is what it is
		dbtest.OK(t, one.Commit())
		dbtest.OK(t, two.Commit())
		dbtest.OK(t, three.Rollback())
		four := dbtest.Begin(t, ctx, db)
		wantIDs(t, skip, four, []int{5, 6}, tasks)
		wantIDs(t, ctx, four, []int{5, 6}, tasks) // without the claim it is a plain read
		dbtest.OK(t, four.Commit())
		dbtest.Equal(t, "%d connections are in use", db.Stats().InUse, 0)
		if _, err := s.Plain.Exec("SELECT 1 FROM mysqllock"); err == nil {
			t.Error("a claim needs no lock table, and has made one")
		}
	})
}

// TestClaimStatement has the claim in one statement each, with nothing added.
func TestClaimStatement(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		db, tap := s.Tapped(mysqllock.Config{})
		ctx := dbtest.Limited(t)
		tx := dbtest.Begin(t, ctx, db)
		wantIDs(t, lockctx.Claim(ctx, lockctx.ForUpdate()), tx, []int{1, 2}, tasks) // the first asks what the server is, elsewhere
		seen := tap.Since()
		wantIDs(t, lockctx.Claim(ctx, lockctx.ForUpdate()), tx, []int{1, 2}, tasks)
		wantIDs(t, lockctx.Claim(ctx, lockctx.ForUpdate()), tx, []int{1}, "SELECT id FROM tasks WHERE id = ?", 1)
		var texts []string
		for _, c := range seen() {
			texts = append(texts, c.Text)
		}
		want := []string{tasks + " FOR UPDATE", "[prepare] SELECT id FROM tasks WHERE id = ? FOR UPDATE", "[execute]", "[close]"}
		if !slices.Equal(texts, want) {
			t.Errorf("the statements are %q, want %q", texts, want)
		}
	})
}

func TestClaimKinds(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		ctx := dbtest.Limited(t)
		db := s.Handle()
		claim := func(opts ...lockctx.Option) context.Context { return lockctx.Claim(ctx, opts...) }
		holder := dbtest.Begin(t, ctx, db)
		wantIDs(t, claim(lockctx.ForShare()), holder, []int{3}, "SELECT id FROM tasks WHERE id = 3")

		other := dbtest.Begin(t, ctx, db)
		wantIDs(t, claim(lockctx.ForShare()), other, []int{3}, "SELECT id FROM tasks WHERE id = 3")
		wantIDs(t, claim(lockctx.ForShare(), lockctx.NoWait()), other, []int{3}, "SELECT id FROM tasks WHERE id = ?", 3)
		wantIDs(t, claim(lockctx.ForShare(), lockctx.SkipLocked()), other, []int{1, 2, 3, 4, 5, 6}, "SELECT id FROM tasks ORDER BY id")
		dbtest.OK(t, other.Rollback())

		other = dbtest.Begin(t, ctx, db)
		wantIDs(t, claim(lockctx.SkipLocked()), other, []int{1, 2, 4, 5, 6}, "SELECT id FROM tasks ORDER BY id")
		dbtest.OK(t, other.Rollback())
		for _, query := range []string{"SELECT id FROM tasks WHERE id = 3", "SELECT id FROM tasks ORDER BY id"} { // the second finds others first
			for _, args := range [][]any{nil, {1}} {
				if args != nil {
					query = strings.Replace(query, "id FROM tasks", "id FROM tasks FORCE INDEX (PRIMARY)", 1)
					query = strings.Replace(query, "SELECT id", "SELECT id * ?", 1)
				}
				other = dbtest.Begin(t, ctx, db)
				_, err := ids(claim(lockctx.ForUpdate(), lockctx.NoWait()), other, query, args...)
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Op != "query" {
					t.Errorf("%s returned %v", query, err)
				}
				dbtest.OK(t, other.Rollback())
			}
		}
		start := time.Now()
		other = dbtest.Begin(t, ctx, db)
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if _, err := ids(lockctx.Claim(short, lockctx.ForUpdate()), other, "SELECT id FROM tasks WHERE id = 3"); err == nil || time.Since(start) > 20*time.Second {
			t.Errorf("a claim that waits returned %v after %v", err, time.Since(start))
		}
	})
}

// TestClaimInUnit has claims in the transactions of units of work, wherever they
// are.
func TestClaimInUnit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		db := s.Handle()
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		free := func() (found []int) {
			t.Helper()
			tx := dbtest.Begin(t, context.Background(), s.Plain)
			defer tx.Rollback()
			found, err := ids(base, tx, "SELECT id FROM tasks ORDER BY id FOR UPDATE SKIP LOCKED")
			dbtest.OK(t, err)
			return found
		}
		want := func(want ...int) {
			t.Helper()
			if got := free(); !slices.Equal(got, want) {
				t.Errorf("%v are free, want %v", got, want)
			}
		}
		both := lockctx.With(base, "k", lockctx.SkipLocked())

		tx := dbtest.Begin(t, both, db) // a transaction under a lock
		wantIDs(t, both, tx, []int{1, 2}, tasks)
		s.WantLocked("k", true)
		want(3, 4, 5, 6)
		dbtest.Exec(t, tx, "UPDATE tasks SET state = 'done' WHERE id IN (1, 2)")
		dbtest.OK(t, tx.Commit())
		want(1, 2, 3, 4, 5, 6)

		wantIDs(t, both, db, []int{3, 4}, tasks) // a session
		want(1, 2, 5, 6)
		dbtest.ExecIn(t, both, db, "UPDATE tasks SET state = 'done' WHERE id IN (3, 4)")
		want(1, 2, 3, 4, 5, 6)

		for _, opt := range []lockctx.Option{lockctx.Row(), lockctx.Lease(stock.TTL), lockctx.Optimistic()} { // holds
			dbtest.OK(t, mysqllock.Do(base, db, "k", func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				defer tx.Rollback()
				wantIDs(t, ctx, tx, []int{5, 6}, tasks)
				want(1, 2, 3, 4)
				return tx.Commit()
			}, opt, lockctx.ForUpdate()))
		}
		want(1, 2, 3, 4, 5, 6)

		tx = dbtest.Begin(t, base, db) // the lock comes late, with the claim
		wantIDs(t, both, tx, []int{5, 6}, tasks)
		s.WantLocked("k", true)
		want(1, 2, 3, 4)
		dbtest.OK(t, tx.Rollback())

		// The claim takes no snapshot: a lock can follow it.
		tx = dbtest.Begin(t, base, db)
		wantIDs(t, lockctx.Claim(base, lockctx.ForUpdate()), tx, []int{5, 6}, tasks)
		dbtest.ExecIn(t, lockctx.With(base, "k"), tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Rollback())
		tx = dbtest.Begin(t, base, db)
		wantIDs(t, base, tx, []int{5, 6}, tasks)
		_, err := tx.ExecContext(lockctx.With(base, "k"), "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.Is(t, "a lock after a plain read", err, mysqllock.ErrStaleSnapshot)
	})
}

// TestClaimPrepared: a prepared statement is what the context of each use says.
func TestClaimPrepared(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		db := s.Handle()
		ctx := dbtest.Limited(t)
		skip := lockctx.Claim(ctx, lockctx.SkipLocked())
		stmt, err := db.PrepareContext(skip, tasks)
		dbtest.OK(t, err)
		defer stmt.Close()
		run := func(ctx context.Context, tx *sql.Tx, want ...int) {
			t.Helper()
			rows, err := tx.StmtContext(ctx, stmt).QueryContext(ctx)
			dbtest.OK(t, err)
			defer rows.Close()
			var got []int
			for rows.Next() {
				var id int
				dbtest.OK(t, rows.Scan(&id))
				got = append(got, id)
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		one, two, three := dbtest.Begin(t, ctx, db), dbtest.Begin(t, lockctx.With(ctx, "k"), db), dbtest.Begin(t, ctx, db)
		run(skip, one, 1, 2)
		run(skip, two, 3, 4)
		run(ctx, three, 1, 2)
		run(skip, three, 5, 6)
	})
}

func TestClaimRefused(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		tasked(s)
		ctx := dbtest.Limited(t)
		db, tap := s.Tapped(mysqllock.Config{})
		skip := lockctx.Claim(ctx, lockctx.SkipLocked())
		tx := dbtest.Begin(t, ctx, db)
		locked := dbtest.Begin(t, lockctx.With(ctx, "k"), db)
		for _, query := range []string{
			"SELECT id FROM tasks UNION SELECT id FROM p", "WITH t AS (SELECT id FROM tasks) SELECT id FROM t", "SELECT id FROM tasks FOR SHARE",
			"SELECT id FROM (SELECT id FROM tasks) t", "SELECT 1", "SELECT DISTINCT state FROM tasks",
		} {
			for _, q := range []lister{db, tx, locked} {
				seen := tap.Since()
				_, err := ids(skip, q, query)
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Op != "query" {
					t.Errorf("%s returned %v", query, err)
				}
				if sent := seen(); len(sent) > 0 {
					t.Errorf("%s: the server got %v", query, sent)
				}
			}
		}
		// The transactions go on.
		wantIDs(t, skip, tx, []int{1, 2}, tasks)
		wantIDs(t, skip, locked, []int{3, 4}, tasks)
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, locked.Rollback())

		// Outside of a transaction nothing would be claimed.
		outside := func(ctx context.Context) {
			t.Helper()
			_, err := ids(ctx, db, tasks)
			if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(fmt.Sprint(err), "outside of a transaction") {
				t.Errorf("a claim outside of a transaction returned %v", err)
			}
			if _, err = db.ExecContext(ctx, tasks); !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("Exec of a claim outside of a transaction returned %v", err)
			}
		}
		outside(skip)
		outside(lockctx.With(ctx, "k", lockctx.SkipLocked(), lockctx.Lease(stock.TTL)))
		outside(lockctx.With(ctx, "k", lockctx.SkipLocked(), lockctx.Optimistic()))
		dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
			outside(lockctx.Claim(ctx, lockctx.SkipLocked()))
			return nil
		}, lockctx.Lease(stock.TTL)))
		s.WantLeased("k", false)

		_, err := ids(lockctx.Claim(ctx), db, tasks)
		if err == nil || !strings.Contains(err.Error(), "none of ForUpdate") {
			t.Errorf("a claim of nothing returned %v", err)
		}
	})
}
