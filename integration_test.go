package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The tests run against every server that is found on this machine, one subtest
// tree each, or against the one that MYSQLLOCK_TEST_DSN names.

func TestMain(m *testing.M) {
	jobs().Run()
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// scratch is a database of one test, with a table p (id, stock) that has a few
// products of stock 10.
type scratch struct {
	*stock.Shop
	plain *sql.DB // Plain, for short
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	shop := stock.NewShop(d)
	return &scratch{shop, shop.Plain}
}

// at is the same database by another way: of another account, or for a subtest.
func (s *scratch) at(d *dbtest.Database) *scratch {
	return &scratch{&stock.Shop{Database: d, Plain: s.plain}, s.plain}
}

// open opens the scratch database with the driver under test. params are added
// to the DSN, such as "lockWait=1s".
func (s *scratch) open(params ...string) *sql.DB { s.T.Helper(); return s.Handle(params...) }

// limited opens it with at most n connections.
func (s *scratch) limited(t *testing.T, n int, params ...string) *sql.DB {
	t.Helper()
	return s.Limited(t, n, params...)
}

// tapped opens it through a tap on its connections.
func (s *scratch) tapped(c mysqllock.Config) (*sql.DB, *dbtest.Tap) { s.T.Helper(); return s.Tapped(c) }

func (s *scratch) stock(id int) int { s.T.Helper(); return s.Stock(id) }

func (s *scratch) wantStock(id, want int) { s.T.Helper(); s.WantStock(id, want) }

func (s *scratch) locked(key string) bool { s.T.Helper(); return s.Locked(key) }

func (s *scratch) leased(key string) bool { s.T.Helper(); return s.Leased(key) }

func (s *scratch) steal(key string) { s.T.Helper(); s.Steal(key) }

func (s *scratch) expires(key string) string { s.T.Helper(); return s.Expires(key) }

func (s *scratch) named(key string) int64 { s.T.Helper(); return s.Named(key) }

func (s *scratch) connections() []int { s.T.Helper(); return s.Connections() }

func (s *scratch) wantLocked(key string, want bool) { s.T.Helper(); s.WantLocked(key, want) }

func (s *scratch) wantLeased(key string, want bool) { s.T.Helper(); s.WantLeased(key, want) }

const ttl = stock.TTL

func wantLost(t testing.TB, what string, err error) { t.Helper(); stock.WantLost(t, what, err) }

func naming(refused func() error) error { return stock.Naming(refused) }

// The rules of a lock context: one test for each cell of the table.

type querier = stock.Querier

func read(ctx context.Context, db querier, id int) (int, error) { return stock.Read(ctx, db, id) }

// exec runs a statement of which nothing but its error matters.
func exec(ctx context.Context, db dbtest.Execer, text string, args ...any) error {
	_, err := db.ExecContext(ctx, text, args...)
	return err
}

// jobs are what this program does as another process of a test. It says on standard
// output what it did, a line each, and goes on when it reads a line.
func jobs() dbtest.Jobs {
	say := func(err error) {
		switch {
		case err == nil:
			fmt.Println("done")
		case errors.Is(err, mysqllock.ErrLost):
			fmt.Println("lost")
		default:
			fmt.Println(err)
		}
	}
	within := func(job func(ctx context.Context, db *sql.DB, in *bufio.Scanner)) func(*sql.DB, *bufio.Scanner) {
		return func(db *sql.DB, in *bufio.Scanner) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			job(ctx, db, in)
		}
	}
	transaction := func(how lockctx.Option) func(context.Context, *sql.DB, *bufio.Scanner) {
		return func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // BeginTx, write, pause, commit
			tx, err := db.BeginTx(lockctx.With(ctx, "k", how), nil)
			if err == nil {
				_, err = tx.Exec("UPDATE p SET stock = 666 WHERE id = 1")
			}
			say(err)
			in.Scan()
			say(tx.Commit())
		}
	}
	return dbtest.Jobs{
		"hold": within(func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // Acquire, write, pause, commit
			h, err := mysqllock.Acquire(ctx, db, "k")
			if err == nil {
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 666 WHERE id = 1")
			}
			say(err)
			in.Scan()
			say(h.Release())
		}),
		"session": within(func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // a pinned read, pause, write
			ctx = lockctx.With(ctx, "k")
			_, err := read(ctx, db, 1)
			say(err)
			in.Scan()
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = 666 WHERE id = 1")
			say(err)
		}),
		"tx":          within(transaction(lockctx.Row())),
		"lease tx":    within(transaction(lockctx.Lease(6 * time.Second))),
		"advisory tx": within(transaction(lockctx.Advisory())),
		"nest":        childNest,
	}
}

// TestMariaDB10_5RefusesOnlyWhatNeedsSkipLocked, in words, and all else holds there. It is
// Debian 11's.
func TestMariaDB10_5RefusesOnlyWhatNeedsSkipLocked(t *testing.T) {
	t.Parallel()
	bin := tempserver.RequireOld(t)
	s := newScratch(dbtest.New(t, bin, tempserver.Share(t, bin)))
	const callers, times = 4, 10 // on each handle
	handles := []*sql.DB{s.open("lockWait=1m"), s.open("lockWait=1m", "maxConns=8")}
	inTx := func(ctx context.Context, db *sql.DB, f func(*sql.Tx) error) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := f(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	add := func(ctx context.Context, db interface {
		querier
		dbtest.Execer
	}, id int,
	) error {
		n, err := read(ctx, db, id)
		if err == nil {
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", n+1, id)
		}
		return err
	}
	with := func(o ...lockctx.Option) func(context.Context, *sql.DB, int) error {
		return func(ctx context.Context, db *sql.DB, id int) error {
			ctx = lockctx.With(ctx, fmt.Sprint("k", id), o...)
			return inTx(ctx, db, func(tx *sql.Tx) error { return add(ctx, tx, id) })
		}
	}
	id := 0
	for what, work := range map[string]func(context.Context, *sql.DB, int) error{
		"row":        with(),
		"advisory":   with(lockctx.Advisory()),
		"optimistic": with(lockctx.Optimistic()),
		"row, Do": func(ctx context.Context, db *sql.DB, id int) error {
			return mysqllock.Do(ctx, db, "do", func(ctx context.Context) error { return add(ctx, db, id) })
		},
	} {
		id++
		t.Run(what, func(t *testing.T) {
			ctx := dbtest.Limited(t)
			var all sync.WaitGroup
			for _, db := range handles {
				for range callers {
					all.Go(func() {
						for range times {
							err := work(ctx, db, id)
							for errors.Is(err, mysqllock.ErrConflict) {
								err = work(ctx, db, id)
							}
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			all.Wait()
			s.wantStock(id, 10+len(handles)*callers*times)
		})
	}
	const end = ", which does not work on MariaDB "
	for want, err := range map[string]error{
		"leases need SKIP LOCKED": with(lockctx.Lease(ttl))(dbtest.Limited(t), handles[0], 1),
		"slots need SKIP LOCKED":  with(lockctx.Slots(2))(dbtest.Limited(t), handles[0], 1),
	} {
		dbtest.Want(t, err, mysqllock.ErrUnsafe)
		dbtest.Says(t, err, want+end+s.Server.Version()+" (MariaDB has it from 10.6 on); ")
	}
}
