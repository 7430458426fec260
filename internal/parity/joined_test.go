//go:build unix

package parity

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/lockctx"
)

// joined opens a handle that puts arguments into texts, through a tap.
func joined(s *stock.Shop, c mysqllock.Config) (*sql.DB, *dbtest.Tap) {
	s.T.Helper()
	tap, cfg := new(dbtest.Tap), s.Config()
	cfg.InterpolateParams = true
	tap.On(cfg)
	return s.OpenDB(mysqllock.NewConnector(cfg, c)), tap
}

// sellByKey reads the stock of a product under a lock, and writes one less.
func sellByKey(ctx context.Context, db *sql.DB, write string) (sql.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = lockctx.With(ctx, "k")
	n, err := stock.Read(ctx, db, 1)
	if err != nil {
		return nil, err
	}
	return db.ExecContext(ctx, write, n-1, 1)
}

const setStock = "UPDATE p SET stock = ? WHERE id = ?"

// TestAWriteGoesOutWithItsCOMMIT: where it is the last of its unit, and a text that others may follow; what does not
// join goes out before COMMIT, as ever.
func TestAWriteGoesOutWithItsCOMMIT(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		under := func(text string, args ...any) func() error {
			return func() error {
				_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), text, args...)
				return err
			}
		}
		decide := func(write string) func() error {
			return func() error { return dbtest.Err(sellByKey(dbtest.Limited(t), db, write)) }
		}
		for range 5 { // what is sent once, and statements that are prepared
			dbtest.OK(t, decide(setStock)())
			dbtest.OK(t, under("UPDATE p SET stock = stock + 1 WHERE id = 1")())
		}
		for _, c := range []struct {
			what  string
			costs int
			do    func() error
		}{
			{"read, decide, write", 2, decide(setStock)},
			{"the same by a text with a comment", 3, decide("UPDATE p SET stock = ? /* */ WHERE id = ?")},
			{"a write", 1, under("UPDATE `p` SET stock = stock + ? WHERE id = ?", 1, 1)},
			{"a write without arguments", 1, under("UPDATE p SET stock = stock - 1 WHERE id = 1")},
			{"one with a call", 3, under("UPDATE p SET stock = ABS(stock) WHERE id = 1")},
			{"one with a semicolon in an argument", 5, under("UPDATE p SET stock = stock + 1 WHERE id = ? AND ? <> ?", 1, "a;b", "c")}, // it is prepared, and closed
			{"REPLACE", 3, under("REPLACE INTO p VALUES (98, 1)")},
		} {
			tap.Costs(t, c.what, c.costs, c.do)
		}
		texts := tap.Texts()
		dbtest.OK(t, decide(setStock)())
		all := strings.Join(texts(), "\n")
		if !strings.Contains(all, " */ UPDATE p SET stock = ") || !strings.Contains(all, "; COMMIT") {
			t.Errorf("it sends\n%s", all)
		}
	})
}

// TestAJoinedWriteSaysWhatItsStatementDoes: rows, errors, and what becomes of the unit, are those of the statement alone.
func TestAJoinedWriteSaysWhatItsStatementDoes(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, _ := joined(s, mysqllock.Config{})
		under := func(text string, args ...any) (int64, error) {
			t.Helper()
			res, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), text, args...)
			if err != nil {
				return 0, err
			}
			if id, err := res.LastInsertId(); id != 0 || err != nil {
				t.Errorf("%s: an id: %d, %v", text, id, err)
			}
			n, err := res.RowsAffected()
			dbtest.OK(t, err)
			return n, nil
		}
		rows := func(want int64, text string, args ...any) {
			t.Helper()
			if n, err := under(text, args...); n != want || err != nil {
				t.Errorf("%s: %d rows, %v", text, n, err)
			}
		}
		rows(4, "UPDATE p SET stock = stock + 1")
		rows(0, "UPDATE p SET stock = stock")
		rows(0, "DELETE FROM p WHERE id = 77")
		rows(2, "UPDATE p SET stock = stock + ? WHERE id < ?", 1, 3)
		s.WantStock(1, 12)
		rows(0, "SELECT stock FROM p")
		rows(1, "UPDATE p SET stock = stock -? WHERE id = 1", -1)
		for text, number := range map[string]uint16{
			"UPDATE p SET id = 2 WHERE id = 1": 1062, "UPDATE p SET nothing = 1": 1054, "UPDATE p SET stock = 1 WHERE": 1064,
			"UPDATE p SET stock = stock + 9223372036854775807 WHERE id = 1": 1690,
		} {
			var said *mysql.MySQLError
			if _, err := under(text); !errors.As(err, &said) || said.Number != number {
				t.Errorf("%s: %v", text, err)
			}
		}
		if s.Locked("k") {
			t.Error("the key is locked")
		}

		// A write that changes nothing, after a read, leaves the unit open, with the lock.
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		n := stock.MustRead(t, ctx, db, 1)
		res, err := db.ExecContext(ctx, setStock, n, 1)
		dbtest.OK(t, err)
		if changed, err := res.RowsAffected(); changed != 0 || err != nil {
			t.Errorf("nothing changed: %d, %v", changed, err)
		}
		if !s.Locked("k") {
			t.Error("a write that changes nothing has given the lock back")
		}
		dbtest.ExecIn(t, ctx, db, setStock, n-1, 1)
		if s.WantStock(1, n-1); s.Locked("k") {
			t.Error("a write that changes something has not given the lock back")
		}

		// An error of a trigger is that of the write, also one that the driver uses itself.
		dbtest.Exec(t, s.Plain, "CREATE TRIGGER refuses BEFORE UPDATE ON p FOR EACH ROW SET @x = EXP(720 + NEW.id)")
		for range 2 {
			if _, err := sellByKey(dbtest.Limited(t), db, setStock); err == nil || !strings.Contains(err.Error(), "out of range") {
				t.Errorf("a trigger that fails: %v", err)
			}
		}
		s.WantStock(1, n-1)
	})
}

// TestJoinedWritesCountAsThePlainDriverDoes: with clientFoundRows, too.
func TestJoinedWritesCountAsThePlainDriverDoes(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, found := range []string{"false", "true"} {
			params := []string{"interpolateParams=true", "clientFoundRows=" + found}
			ours, plain := s.Open("mysqllock", params...), s.Open("mysql", params...)
			for _, text := range []string{
				"UPDATE p SET stock = stock + 1", "UPDATE p SET stock = stock", "UPDATE p SET stock = 1 WHERE id = 99", "UPDATE p SET stock = 11 WHERE id < 3",
				"DELETE FROM p WHERE id = 99", "DELETE FROM p WHERE id = 4",
			} {
				var got [2]int64
				for i, db := range []*sql.DB{ours, plain} {
					dbtest.Exec(t, s.Plain, "REPLACE INTO p VALUES (1, 10), (2, 11), (3, 12), (4, 13)")
					res, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), text)
					dbtest.OK(t, err)
					got[i], err = res.RowsAffected()
					dbtest.OK(t, err)
				}
				if got[0] != got[1] {
					t.Errorf("clientFoundRows=%s, %s: %d rows, and %d on the plain driver", found, text, got[0], got[1])
				}
			}
		}
	})
}

// TestNoSaleOfManyJoinedWritesIsLost, in one process and in two.
func TestNoSaleOfManyJoinedWritesIsLost(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		one, _ := joined(s, mysqllock.Config{})
		other, _ := joined(s, mysqllock.Config{})
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 1000 WHERE id = 1")
		const callers, times = 12, 10
		var all sync.WaitGroup
		for i := range callers {
			db := one
			if i%3 == 0 {
				db = other
			}
			all.Go(func() {
				for range times {
					if _, err := sellByKey(dbtest.Limited(t), db, setStock); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		s.WantStock(1, 1000-callers*times)
	})
}

// TestADisturbedJoinedWriteIsToldAsItIs: its caller hears what became of it; a lost answer is not taken for either.
func TestADisturbedJoinedWriteIsToldAsItIs(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		onEachJoin(func(join string, sell sale) {
			for name, test := range dbtest.DisturbedCommits() {
				if name == "nothing sent" && join == alone { // then it is tried again
					test.Committed, test.Done = true, true
				}
				disturbJoin(t, s, join+": "+name, test, sell)
			}
		})
	})
}

func disturbJoin(t *testing.T, s *stock.Shop, name string, test dbtest.DisturbedCommit, sell sale) {
	d := &disturbing{with: test.Disturbed}
	cfg := s.Config()
	db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Base: func(base driver.Connector) (driver.Connector, error) {
		return joining{base, d}, nil
	}}))
	dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
	dbtest.OK(t, sell(dbtest.Limited(t), db))
	d.armed.Store(true)
	err := sell(dbtest.Limited(t), db)
	if d.armed.Load() {
		t.Fatalf("%s: nothing was disturbed", name)
	}
	// Before the COMMIT the error is that of the write.
	interrupted := strings.Contains(name, ": killed after")
	if interrupted {
		if err == nil {
			t.Errorf("%s: no error", name) // the text as a whole was said to have failed
		}
	} else if (err == nil) != test.Done {
		t.Errorf("%s: %v", name, err)
	}
	if number := (*mysql.MySQLError)(nil); test.Unknown && !interrupted && (errors.As(err, &number) || !errors.Is(err, mysqllock.ErrLost)) {
		t.Errorf("%s: %v is taken for a refusal", name, err)
	}
	want := 9
	if test.Committed {
		want = 8
	}
	s.WantStock(1, want)
	dbtest.Soon(t, name+": the key is free", func() bool { return !s.Locked("k") })
	dbtest.OK(t, db.Close())
}

// sale sells a product by texts without arguments.
type sale func(context.Context, *sql.DB) error

// alone is a write without a read before it.
const alone = "alone"

// onEachJoin calls test for a write that goes out with its COMMIT, and for one that goes out with its lock, too.
func onEachJoin(test func(join string, sell sale)) {
	test("after a read", func(ctx context.Context, db *sql.DB) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		n, err := stock.Read(ctx, db, 1)
		if err != nil {
			return err
		}
		return dbtest.Err(db.ExecContext(ctx, fmt.Sprintf("UPDATE p SET stock = %d WHERE id = 1", n-1)))
	})
	test(alone, func(ctx context.Context, db *sql.DB) error {
		return dbtest.Err(db.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = stock - 1 WHERE id = 1"))
	})
}

// disturbing has something happen to the next write that goes out with its COMMIT.
type disturbing struct {
	with  dbtest.Disturbed
	armed atomic.Bool
}

// joining is a connector on whose connections that happens.
type joining struct {
	driver.Connector
	by *disturbing
}

func (j joining) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := j.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	own := j.by.with
	own.Conn = conn
	own.At = func(text string) bool {
		return strings.Contains(text, " */ UPDATE p ") && j.by.armed.CompareAndSwap(true, false)
	}
	return &own, nil
}

// TestAJoinedWriteStoppedAnywhereTellsTheTruth: it is killed, its connection is, or that is cut, in front of each
// statement of the text.
func TestAJoinedWriteStoppedAnywhereTellsTheTruth(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		onEachJoin(func(join string, sell sale) {
			places := []string{"the write", "the count", "COMMIT", "the end"}
			if join == alone {
				places = append([]string{"the lock"}, places...)
			}
			for at := range places {
				for _, how := range []string{"KILL QUERY", "KILL CONNECTION", "cut"} {
					stopJoin(t, s, join, places, at, how, sell)
				}
			}
		})
	})
}

// stopJoin stops a sale in front of the statement places[at].
func stopJoin(t *testing.T, s *stock.Shop, join string, places []string, at int, how string, sell sale) {
	commit := len(places) - 2
	name, tap, cfg := join+": "+how+" in front of "+places[at], new(dbtest.Tap), s.Config()
	tap.On(cfg)
	d := &disturbing{with: dbtest.Disturbed{Text: func(packet string) string {
		texts := strings.SplitN(packet, "; ", len(places))
		texts = append(texts[:at:at], append([]string{dbtest.Waits}, texts[at:]...)...)
		if at < commit { // the rows of the statement that waits are not to be taken for those of another
			texts[at] = "SET @waited = (" + dbtest.Waits + ")"
		}
		return strings.Join(texts, "; ")
	}}}
	db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Base: func(base driver.Connector) (driver.Connector, error) {
		return joining{base, d}, nil
	}}))
	dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
	dbtest.OK(t, sell(dbtest.Limited(t), db))
	done := dbtest.StopWaiting(t, s.Plain, s.Name, how, tap.Break)
	d.armed.Store(true)
	err := sell(dbtest.Limited(t), db)
	done()
	sold := 9 - s.Stock(1)
	switch {
	case sold == 1 && at <= commit, sold == 0 && at > commit:
		t.Errorf("%s: %d sold, %v", name, sold, err)
	case err == nil && sold == 0:
		t.Errorf("%s: nothing is sold, and there is no error", name)
	case err != nil && sold == 1 && (!errors.Is(err, mysqllock.ErrLost) || !strings.Contains(err.Error(), "may be committed")):
		t.Errorf("%s: it is sold: %v", name, err)
	}
	dbtest.Soon(t, name+": the key is free", func() bool { return !s.Locked("k") })
	_ = db.Close()
}

// TestAJoinedWriteThatIsGivenUpWritesNothing: a caller whose context ends while the write waits for a row of the
// application gets its error soon, and the key is free.
func TestAJoinedWriteThatIsGivenUpWritesNothing(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, _ := joined(s, mysqllock.Config{})
		for range 2 {
			dbtest.OK(t, dbtest.Err(sellByKey(dbtest.Limited(t), db, setStock)))
		}
		blocker := dbtest.Begin(t, t.Context(), s.Plain)
		dbtest.Exec(t, blocker, "SELECT stock FROM p WHERE id = 1 FOR UPDATE")
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		var both sync.WaitGroup
		for key, sell := range map[string]func() error{
			"k":     func() error { return dbtest.Err(sellByKey(ctx, db, setStock)) },
			"alone": func() error { return dbtest.Err(db.ExecContext(lockctx.With(ctx, "alone"), setStock, 1, 1)) },
		} {
			both.Go(func() {
				began := time.Now()
				err := sell()
				if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 10*time.Second {
					t.Errorf("%s: after %v: %v", key, took, err)
				}
			})
		}
		both.Wait()
		dbtest.OK(t, blocker.Rollback())
		dbtest.Soon(t, "the other key is free", func() bool { return !s.Locked("alone") })
		dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })
		s.WantStock(1, 8)
		dbtest.OK(t, dbtest.Err(sellByKey(dbtest.Limited(t), db, setStock)))
		s.WantStock(1, 7)
	})
}

// TestAWriteAloneRunsOnlyUnderItsLock: where the row of its key says anything but that it is free, the write is not sent with the lock.
func TestAWriteAloneRunsOnlyUnderItsLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		sell := func(opts ...lockctx.Option) error {
			return dbtest.Err(db.ExecContext(lockctx.With(dbtest.Limited(t), "k", opts...), "UPDATE p SET stock = stock - 1 WHERE id = 1"))
		}
		for range 10 { // until the lock statement is prepared
			dbtest.OK(t, sell())
		}
		tap.Costs(t, "a key that is free", 1, func() error { return sell() })

		n := s.Stock(1)
		blocker := dbtest.Begin(t, t.Context(), s.Plain)
		dbtest.Exec(t, blocker, "SELECT * FROM mysqllock WHERE name = 'k' FOR UPDATE")
		if err := sell(lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("the row is locked: %v", err)
		}
		sold := dbtest.Go(func() error { return sell() })
		dbtest.OK(t, blocker.Rollback())
		dbtest.OK(t, <-sold)
		s.WantStock(1, n-1)

		dbtest.Exec(t, s.Plain, "DELETE FROM mysqllock WHERE name = 'k'")
		dbtest.OK(t, sell())
		other, _ := joined(s, mysqllock.Config{}) // which knows the key, but neither of the version nor of the lease
		third, _ := joined(s, mysqllock.Config{})
		for _, db := range []*sql.DB{other, third} {
			dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		}
		version, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		version = lockctx.With(version, "k", lockctx.Optimistic())
		compares := s.Open("mysqllock")
		n = stock.MustRead(t, version, compares, 1)
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), other, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		s.WantStock(1, n-1)
		if _, err := compares.ExecContext(version, "UPDATE p SET stock = 100 WHERE id = 1"); !errors.Is(err, mysqllock.ErrConflict) {
			t.Errorf("nobody has raised the version: %v", err)
		}

		lease, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		if _, err := third.ExecContext(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), "UPDATE p SET stock = 100 WHERE id = 1"); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("the key is leased: %v", err)
		}
		dbtest.OK(t, lease.Release())
		s.WantStock(1, n-1)
	})
}

// TestAWriteAloneIsOnePacketAlsoAfterALease: only a version, which the write has to raise, costs more, and then not also a text that
// is refused.
func TestAWriteAloneIsOnePacketAlsoAfterALease(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		sell := func(key string) func() error {
			return func() error {
				return dbtest.Err(db.ExecContext(lockctx.With(dbtest.Limited(t), key), "UPDATE p SET stock = stock - 1 WHERE id = 1"))
			}
		}
		for range 10 { // until the lock statement is prepared
			dbtest.OK(t, sell("leased")())
			dbtest.OK(t, sell("versioned")())
		}
		lease, err := mysqllock.Acquire(dbtest.Limited(t), db, "leased", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		dbtest.OK(t, lease.Release())
		tap.Costs(t, "a key that had a lease", 1, sell("leased"))
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'x', expires = UTC_TIMESTAMP(6) WHERE name = 'leased'")
		dbtest.OK(t, sell("leased")())
		tap.Costs(t, "a key that had a lease which expired", 1, sell("leased"))

		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "versioned", lockctx.Optimistic()), db, "UPDATE p SET stock = 10 WHERE id = 1")
		dbtest.OK(t, sell("versioned")())
		tap.Costs(t, "a key that has a version", 3, sell("versioned"))
	})
}

// TestNoneOfManyWritesAloneIsLost, beside others that read first, in two processes.
func TestNoneOfManyWritesAloneIsLost(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		one, _ := joined(s, mysqllock.Config{})
		other, _ := joined(s, mysqllock.Config{MaxConns: 5})
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 1000 WHERE id = 1")
		const callers, times = 12, 10
		var all sync.WaitGroup
		for i := range callers {
			db := []*sql.DB{one, other}[i%2]
			all.Go(func() {
				for n := range times {
					var err error
					if n%3 == 0 {
						_, err = sellByKey(dbtest.Limited(t), db, setStock)
					} else {
						_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = stock - 1 WHERE id = 1")
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		s.WantStock(1, 1000-callers*times)
	})
}

// TestAReadGoesOutWithItsLock: it shows what it would by itself, and nothing of a time at which the key was not locked.
func TestAReadGoesOutWithItsLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		under := func(opts ...lockctx.Option) (ctx context.Context, cancel context.CancelFunc) {
			ctx, cancel = context.WithCancel(dbtest.Limited(t))
			return lockctx.With(ctx, "k", opts...), cancel
		}
		read := func(ctx context.Context) int { t.Helper(); return stock.MustRead(t, ctx, db, 1) }
		for range 4 {
			ctx, cancel := under()
			read(ctx)
			cancel()
			dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })
		}

		// An error is that of the query, and the lock stays, as if it had come later.
		ctx, cancel := under()
		var said *mysql.MySQLError
		if err := db.QueryRowContext(ctx, "SELECT nothing FROM p WHERE id = 1").Scan(new(int)); !errors.As(err, &said) || said.Number != 1054 {
			t.Errorf("a query that fails: %v", err)
		}
		if !s.Locked("k") {
			t.Error("a query that fails has given the lock back")
		}
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.Equal(t, "then it reads %d", read(ctx), 9)
		cancel()
		dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })

		// While somebody else has the key, by a row lock or a lease, nothing is read.
		other := s.Handle()
		for name, opts := range map[string][]lockctx.Option{"row": nil, "lease": {lockctx.Lease(time.Minute)}} {
			hold := stock.Acquire(t, other, "k", opts...)
			ctx, cancel := under(lockctx.Wait(dbtest.Patience))
			saw := make(chan int, 1)
			go func() {
				n, err := stock.Read(ctx, db, 1)
				if err != nil {
					t.Error(name, err)
				}
				saw <- n
			}()
			texts := tap.Texts()
			time.Sleep(200 * time.Millisecond)
			want := s.Stock(1) + 100
			dbtest.ExecIn(t, hold.Context(), other, "UPDATE p SET stock = stock + 100 WHERE id = 1")
			dbtest.OK(t, hold.Release())
			if got := <-saw; got != want {
				t.Errorf("%s: it has read %d, want %d\n%s", name, got, want, strings.Join(texts(), "\n"))
			}
			cancel()
			dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })
		}

		// The query has the time that its caller has, not that of an answer of the lock.
		blocker, err := s.Plain.Conn(t.Context())
		dbtest.OK(t, err)
		defer blocker.Close()
		dbtest.ExecIn(t, t.Context(), blocker, "LOCK TABLES p WRITE")
		ctx, cancel = under()
		slow := dbtest.Go(func() error { return dbtest.Err(stock.Read(ctx, db, 1)) })
		time.Sleep(pool.AnswerTime + time.Second)
		dbtest.ExecIn(t, t.Context(), blocker, "UNLOCK TABLES")
		dbtest.OK(t, <-slow)
		cancel()
		dbtest.Soon(t, "the key is free", func() bool { return !s.Locked("k") })

		// Of several keys no query goes out with the first.
		ctx, cancel = context.WithCancel(dbtest.Limited(t))
		texts := tap.Texts()
		n, err := stock.Read(lockctx.With(lockctx.WithKeys(ctx, []string{"a", "b"}), "k", lockctx.Slots(2)), db, 1)
		dbtest.OK(t, err)
		dbtest.Equal(t, "under several keys it reads %d", n, s.Stock(1))
		for _, text := range texts() {
			if strings.Contains(text, "NOWAIT; SELECT stock") {
				t.Errorf("it sends %s", text)
			}
		}
		cancel()

		// More rows than are read ahead are all there, in order.
		dbtest.Exec(t, s.Plain, "CREATE TABLE wide (id INT PRIMARY KEY, filler MEDIUMTEXT NOT NULL) ENGINE=InnoDB")
		for id := range 6 {
			dbtest.Exec(t, s.Plain, "INSERT INTO wide VALUES (?, ?)", id, strings.Repeat(fmt.Sprint(id), 1<<20))
		}
		ctx, cancel = under()
		defer cancel()
		rows, err := db.QueryContext(ctx, "SELECT id, filler FROM wide WHERE id < 100 ORDER BY id")
		dbtest.OK(t, err)
		defer rows.Close()
		next := 0
		for ; rows.Next(); next++ {
			var id int
			var filler string
			if dbtest.OK(t, rows.Scan(&id, &filler)); id != next || filler != strings.Repeat(fmt.Sprint(id), 1<<20) {
				t.Fatalf("row %d is %d, with %d bytes", next, id, len(filler))
			}
		}
		dbtest.OK(t, rows.Err())
		dbtest.Equal(t, "there are %d rows", next, 6)
	})
}

// TestTheNextReadWaitsInTheServer while a caller of its process has the key: it has the key, and the rows, at the COMMIT of that. It is
// refused, and leaves nothing behind, if its wait is over or its context ends; once it has the key only its context ends the query.
func TestTheNextReadWaitsInTheServer(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		waits := func() bool {
			var n int
			dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE '%FOR UPDATE%' AND INFO NOT LIKE '%NOWAIT%' AND ID <> CONNECTION_ID()", s.Name).Scan(&n))
			return n > 0
		}
		free := func(what string) {
			t.Helper()
			dbtest.Soon(t, what+": the key is free", func() bool { return !s.Locked("k") })
			dbtest.Soon(t, what+": no session is in use", func() bool { st, err := mysqllock.Stats(db); return err == nil && st.InUse == 0 })
		}
		type next struct {
			ctx    context.Context
			cancel context.CancelFunc
			n      int
			err    error
			done   chan struct{}
		}
		behind := func(opts ...lockctx.Option) *next {
			t.Helper()
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			b := &next{ctx: lockctx.With(ctx, "k", opts...), cancel: cancel, done: make(chan struct{})}
			go func() {
				defer close(b.done)
				b.n, b.err = stock.Read(b.ctx, db, 1)
			}()
			dbtest.Soon(t, "it waits in the server", waits)
			return b
		}
		idle, err := db.Conn(t.Context()) // else a caller that waits has all connections of database/sql, and is asked to try another one
		dbtest.OK(t, err)
		defer idle.Close()
		for range 3 { // with connections that are known, and a row that is there
			dbtest.OK(t, dbtest.Err(sellByKey(dbtest.Limited(t), db, setStock)))
		}

		first, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		first = lockctx.With(first, "k")
		n := stock.MustRead(t, first, db, 1)
		texts := tap.Texts()
		b := behind()
		dbtest.ExecIn(t, first, db, setStock, n-1, 1)
		<-b.done
		if dbtest.OK(t, b.err); b.n != n-1 {
			t.Errorf("it has read %d, want %d", b.n, n-1)
		}
		sent := slices.DeleteFunc(texts(), func(text string) bool { return !strings.Contains(text, "stock") }) // a session may have been opened
		if len(sent) != 2 || !strings.Contains(sent[0], "; /* mysqllock ") || strings.Contains(sent[1], "FOR UPDATE") {
			t.Errorf("want the lock with the query, and the write without the lock of the next:\n%s", strings.Join(sent, "\n"))
		}
		dbtest.ExecIn(t, b.ctx, db, setStock, b.n-1, 1)
		s.WantStock(1, n-2)
		free("both have sold")
		b.cancel()

		for name, c := range map[string]struct {
			opts  []lockctx.Option
			gone  bool // its context ends
			wants error
		}{
			"its wait is over":  {opts: []lockctx.Option{lockctx.Wait(300 * time.Millisecond)}, wants: mysqllock.ErrTimeout},
			"its context ended": {gone: true, wants: context.Canceled},
		} {
			first, cancel := context.WithCancel(dbtest.Limited(t))
			first = lockctx.With(first, "k")
			n := stock.MustRead(t, first, db, 1)
			b := behind(c.opts...)
			if c.gone {
				b.cancel()
			}
			<-b.done
			dbtest.Is(t, name, b.err, c.wants)
			dbtest.ExecIn(t, first, db, setStock, n, 1)
			cancel()
			free(name)
			b.cancel()
		}

		blocker, err := s.Plain.Conn(t.Context())
		dbtest.OK(t, err)
		defer blocker.Close()
		for _, gone := range []bool{false, true} {
			first, cancel := context.WithCancel(dbtest.Limited(t))
			stock.MustRead(t, lockctx.With(first, "k"), db, 1)
			b := behind(lockctx.Wait(time.Second))
			locked := dbtest.Go(func() error { return dbtest.Err(blocker.ExecContext(t.Context(), "LOCK TABLES p WRITE")) })
			dbtest.Soon(t, "it waits for the first", func() bool {
				var n int
				dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND STATE LIKE 'Waiting for table metadata lock%'", s.Name).Scan(&n))
				return n > 0
			})
			cancel() // the key is granted, and the query waits
			dbtest.OK(t, <-locked)
			dbtest.Soon(t, "the query waits", func() bool { return !waits() })
			time.Sleep(1500 * time.Millisecond)
			if gone {
				b.cancel()
				<-b.done
			}
			dbtest.ExecIn(t, t.Context(), blocker, "UNLOCK TABLES")
			if <-b.done; gone {
				dbtest.Is(t, "its context ended in the query", b.err, context.Canceled)
			} else if dbtest.OK(t, b.err); !s.Locked("k") {
				t.Error("the key is not locked")
			}
			b.cancel()
			free("a query that waits")
		}
	})
}

// TestWritesAloneUnderFireAreWrittenAsTold: while statements and connections are killed, and the way to the server is
// cut, what was told to be written is, and of the rest only what may be.
func TestWritesAloneUnderFireAreWrittenAsTold(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := joined(s, mysqllock.Config{})
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 0 WHERE id = 1")
		ctx, over := context.WithTimeout(t.Context(), 3*time.Second)
		defer over()
		var sold, unknown, refused atomic.Int64
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), fmt.Sprintf("k%d", (i+n)%3)), "UPDATE p SET stock = stock + 1 WHERE id = 1")
					switch {
					case err == nil:
						sold.Add(1)
					case strings.Contains(err.Error(), "may be committed"):
						unknown.Add(1)
					default:
						refused.Add(1)
					}
				}
			})
		}
		for n := 0; ctx.Err() == nil; n++ {
			time.Sleep(10 * time.Millisecond)
			var id int
			if n%20 == 19 {
				tap.Break()
			} else if s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND COMMAND <> 'Sleep' ORDER BY RAND() LIMIT 1", s.Name).Scan(&id) == nil {
				_, _ = s.Plain.Exec(fmt.Sprintf("KILL %s %d", []string{"QUERY", "CONNECTION"}[n%2], id)) // it may have gone
			}
		}
		all.Wait()
		counted := int64(s.Stock(1))
		t.Logf("%d sold, %d unknown, %d refused; counted %d", sold.Load(), unknown.Load(), refused.Load(), counted)
		if sold.Load() == 0 || counted < sold.Load() || counted > sold.Load()+unknown.Load() {
			t.Errorf("%d were written: %d were told so, and %d that they may be", counted, sold.Load(), unknown.Load())
		}
		for i := range 3 {
			dbtest.Soon(t, "the keys are free", func() bool { return !s.Locked(fmt.Sprintf("k%d", i)) })
		}
	})
}
