// Package dbtest has what the tests of many packages share: each server of this
// machine with a database of the test's own, connections that record what is
// sent (Tap), a network that fails (Proxy), and small checks. It imports no
// package that has locks, so that their internal tests can use it.
package dbtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Patience is how long a test waits for what is sure to come: far longer than it
// takes, also on a busy machine.
const Patience = 2 * time.Minute

// OK ends the test unless err is nil.
func OK(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Want ends the test unless err matches each of the targets.
func Want(t testing.TB, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Fatalf("error %v, want %v", err, target)
		}
	}
}

// Is fails the test unless err, which what has returned, matches target.
func Is(t testing.TB, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: %v, want %v", what, err, target)
	}
}

// Err is what a call that returns a value, too, has failed with.
func Err[T any](_ T, err error) error { return err }

// Equal fails the test unless got is want; text says what it is, with a verb for got.
func Equal[T comparable](t testing.TB, text string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf(text+", want %v", got, want)
	}
}

// Says fails the test unless the text of err has all of these in it.
func Says(t testing.TB, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("the error does not say %q: %v", text, err)
		}
	}
}

// Soon waits until cond holds.
func Soon(t testing.TB, what string, cond func() bool) {
	t.Helper()
	Eventually(t, what, func() error {
		if !cond() {
			return errors.New("not so")
		}
		return nil
	})
}

// Eventually waits until ask returns no error. It asks often at first, and less often the longer it takes. It pauses for at
// least twice as long as ask takes, since the machine has other work.
func Eventually(t testing.TB, what string, ask func() error) {
	t.Helper()
	for began := time.Now(); ; {
		asked := time.Now()
		err := ask()
		if err == nil {
			return
		}
		waited := time.Since(began)
		if waited > Patience {
			t.Fatalf("not within %v: %s: %v", Patience, what, err)
		}
		time.Sleep(min(max(waited/20, 2*time.Since(asked), 2*time.Millisecond), 100*time.Millisecond))
	}
}

// AtItsPace runs try with d, which is too short where the machine stands still for as long, and
// then again with twice as much, up to 8 times d. The test fails if it never comes off.
func AtItsPace(t testing.TB, d time.Duration, try func(d time.Duration) error) {
	t.Helper()
	for last := 8 * d; ; d *= 2 {
		err := try(d)
		if err == nil {
			return
		}
		if d >= last {
			t.Fatalf("with %v: %v", d, err)
		}
		t.Logf("with %v, on a machine that may have stood still: %v", d, err)
	}
}

// Go runs f in the background, and tells how it ended.
func Go(f func() error) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- f() }()
	return ended
}

// Until runs ask until it returns what is right, for as long as a test is patient.
func Until(ask func() error, right func(error) bool) (err error) {
	for began := time.Now(); time.Since(began) < Patience; {
		if err = ask(); right(err) {
			break
		}
	}
	return err
}

// Limited returns a context for what must not hang. It ends when a test's patience does,
// or with the test.
func Limited(t testing.TB) context.Context { return Within(t, Patience) }

// Within returns a context that ends after d, or with the test.
func Within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// Execer is a *sql.DB, *sql.Conn or *sql.Tx.
type Execer interface {
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

// Exec runs a statement, which must not fail.
func Exec(t testing.TB, db Execer, text string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), text, args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// Queryer is a *sql.DB, *sql.Conn or *sql.Tx.
type Queryer interface {
	QueryContext(ctx context.Context, text string, args ...any) (*sql.Rows, error)
}

// Column returns the one column that a query has, which must not fail.
func Column[T any](t testing.TB, db Queryer, text string, args ...any) (column []T) {
	t.Helper()
	rows, err := db.QueryContext(context.Background(), text, args...)
	OK(t, err)
	defer rows.Close()
	for rows.Next() {
		var value T
		OK(t, rows.Scan(&value))
		column = append(column, value)
	}
	OK(t, rows.Err())
	return column
}

// Open opens a handle that is closed at the end of the test.
func Open(t testing.TB, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	OK(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// Long picks the figure for the long form of a test, which PROVE in the environment asks
// for.
func Long[T any](short, long T) T {
	if os.Getenv("PROVE") != "" {
		return long
	}
	return short
}

// Transactions are those that the connections whose ids sessions selects have open, as InnoDB
// prints them. INNODB_TRX is a copy, which is made anew only if nobody has asked for it for
// 100 ms: who asks again and again, or beside others who do, can be shown the old one for ever.
func Transactions(t testing.TB, db *sql.DB, sessions string, args ...any) (open []string) {
	t.Helper()
	ids := Column[string](t, db, sessions, args...)
	var kind, name, status string
	OK(t, db.QueryRowContext(Limited(t), "SHOW ENGINE INNODB STATUS").Scan(&kind, &name, &status))
	for _, text := range strings.Split(status, "---TRANSACTION ")[1:] {
		state, rest, _ := strings.Cut(text, "\n")
		_, rest, _ = strings.Cut(rest, " thread id ")
		if id, _, _ := strings.Cut(rest, ","); strings.Contains(state, "ACTIVE") && slices.Contains(ids, id) {
			open = append(open, text)
		}
	}
	return open
}

// Random returns letters and digits for the name of something that only this test
// has.
func Random() string { return strings.ToLower(rand.Text()[:12]) }

// Together are subtests that do little but wait. They run all at once: t.Parallel would
// have most of them wait for one of the few places that -parallel gives, too. The test
// may not end before Wait.
type Together struct{ sync.WaitGroup }

// Run starts a subtest of parent.
func (t *Together) Run(parent *testing.T, name string, test func(*testing.T)) {
	t.Go(func() { parent.Run(name, test) })
}

// Beginner is a *sql.DB or *sql.Conn.
type Beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

// Begin begins a transaction, which must not fail. It is rolled back at the end of the test.
func Begin(t testing.TB, ctx context.Context, db Beginner) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(ctx, nil)
	OK(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// Conn takes a connection of a handle.
func Conn(t testing.TB, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(Limited(t))
	OK(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// ExecIn is Exec in a context.
func ExecIn(t testing.TB, ctx context.Context, db Execer, text string, args ...any) {
	t.Helper()
	_, err := db.ExecContext(ctx, text, args...)
	OK(t, err)
}
