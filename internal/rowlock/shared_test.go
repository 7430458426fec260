package rowlock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// shared are keys that are all shared.
func shared(names ...string) (keys []rowlock.Key) {
	for _, name := range names {
		keys = append(keys, rowlock.Key{Name: name, Shared: true})
	}
	return keys
}

// hold begins a transaction that is granted. end commits it.
func (p *process) hold(r rowlock.Request) (end func()) {
	p.T.Helper()
	c, grant, err := p.request(dbtest.Limited(p.T), r)
	if err != nil {
		p.T.Errorf("%+v: %v", r, err)
		return func() {}
	}
	return func() { p.end(c, grant.Txn, grant.Ticket) }
}

// refused makes a request that is not granted. It is made again where a busy server has not
// answered within a short wait.
func (p *process) refused(r rowlock.Request, want error) error {
	p.T.Helper()
	c, grant, err := p.request(dbtest.Limited(p.T), r)
	for began := time.Now(); errors.Is(err, lockerr.ErrNoAnswer) && time.Since(began) < dbtest.Patience; {
		c, grant, err = p.request(dbtest.Limited(p.T), r)
	}
	if err == nil {
		p.end(c, grant.Txn, grant.Ticket)
	}
	dbtest.Is(p.T, fmt.Sprintf("%+v", r), err, want)
	return err
}

// How somebody else finds a row.
const (
	isFree = iota
	isShared
	isLocked
)

func (s *scratch) state(c driver.Conn, name string) int {
	s.T.Helper()
	row := "SELECT 1 FROM " + s.table.String() + " WHERE namespace = 'app' AND name = '" + name + "'"
	probe := func(lock string) bool { return len(s.Query(c, row+lock+" SKIP LOCKED")) == 1 }
	share := " FOR SHARE"
	if s.MariaDB() {
		share = " LOCK IN SHARE MODE"
	}
	switch {
	case probe(" FOR UPDATE"):
		return isFree
	case probe(share):
		return isShared
	}
	return isLocked
}

func (s *scratch) wantState(name string, want int) {
	s.T.Helper()
	if got := s.state(s.Connect(), name); got != want {
		s.T.Errorf("%s is in state %d, not %d", name, got, want)
	}
}

// connect opens connections that the process can take locks on.
func (p *process) connect(n int) {
	p.T.Helper()
	dbtest.OK(p.T, p.rows.Exist(dbtest.Limited(p.T), []string{"k"}))
	for range n {
		c, err := p.conns.Acquire(dbtest.Limited(p.T))
		dbtest.OK(p.T, err)
		defer c.Release()
	}
}

// waitsInServer returns when so many wait for a row.
func (s *scratch) waitsInServer(n int) {
	s.T.Helper()
	c := s.Connect()
	dbtest.Soon(s.T, fmt.Sprintf("%d wait in the server", n), func() bool { return s.waiters(c) >= n })
}

// onceOneWaits runs f once somebody waits for a row. wait returns when f has.
func (s *scratch) onceOneWaits(f func()) (wait func()) {
	return after(s.T, 0, func() {
		s.waitsInServer(1)
		f()
	})
}

// waiters is how many of the database's connections wait for a row. MariaDB's
// tables show a copy, which ages while anybody looks; its text is of this moment.
func (s *scratch) waiters(c driver.Conn) (n int) {
	s.T.Helper()
	if !strings.Contains(s.Server.Version(), "MariaDB") {
		return len(s.Query(c, "SELECT DISTINCT w.REQUESTING_THREAD_ID FROM performance_schema.data_lock_waits w"+
			" JOIN performance_schema.threads t ON t.THREAD_ID = w.REQUESTING_THREAD_ID WHERE t.PROCESSLIST_DB = '"+s.Name+"'"))
	}
	for _, status := range s.Query(c, "SHOW ENGINE INNODB STATUS") {
		for _, transaction := range strings.Split(status[2], "---TRANSACTION")[1:] {
			if strings.Contains(transaction, "TRX HAS BEEN WAITING") && strings.Contains(transaction, "of table `"+s.Name+"`.") {
				n++
			}
		}
	}
	return n
}

// TestAllReadersAreInsideAtTheSameTime: 64 of them, in one process and in two.
func TestAllReadersAreInsideAtTheSameTime(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const readers = 64
		ps := []*process{s.process(nil), s.process(nil)}
		for _, processes := range []int{1, 2, 1, 2} { // the second time with connections that are open
			var all sync.WaitGroup
			var inside atomic.Int32
			everybody := make(chan struct{})
			began := time.Now()
			for i := range readers {
				p := ps[i%processes]
				all.Go(func() {
					end := p.hold(rowlock.Request{Keys: shared("k"), Wait: time.Minute})
					if inside.Add(1) == readers {
						close(everybody)
					}
					select {
					case <-everybody:
					case <-time.After(time.Minute):
						t.Errorf("only %d are inside", inside.Load())
					}
					time.Sleep(50 * time.Millisecond)
					end()
				})
			}
			all.Wait()
			t.Logf("%d readers of 50 ms in %d processes: %v", readers, processes, time.Since(began))
		}
	})
}

func TestASharedLockExcludesWhoeverWantsTheKeyAlone(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		for _, b := range []*process{p, other} { // in the process's own queue, and in the server
			end := p.hold(rowlock.Request{Keys: shared("k")})
			s.wantState("k", isShared)
			b.hold(rowlock.Request{Keys: shared("k")})()
			b.hold(rowlock.Request{Keys: shared("k"), Wait: time.Minute})()
			err := b.refused(rowlock.Request{Keys: exclusive("k")}, lockerr.ErrLocked)
			if errors.Is(err, lockerr.ErrTimeout) {
				t.Error(err)
			}
			var e *lockerr.Error
			for began := time.Now(); e == nil || e.Holder == nil && time.Since(began) < dbtest.Patience; { // a busy server does not say in time
				err = b.refused(rowlock.Request{Keys: exclusive("k"), Wait: 150 * time.Millisecond}, lockerr.ErrTimeout)
				if !errors.As(err, &e) {
					t.Fatal(err)
				}
			}
			if e.Holder == nil || e.Key != "k" {
				t.Errorf("who holds it is not told: %v", err)
			}
			end()
			s.wantFree("k")

			end = p.hold(rowlock.Request{Keys: exclusive("k")})
			s.wantState("k", isLocked)
			b.refused(rowlock.Request{Keys: shared("k")}, lockerr.ErrLocked)
			b.refused(rowlock.Request{Keys: shared("k"), Wait: 150 * time.Millisecond, Label: "the key"}, lockerr.ErrTimeout)
			granted := make(chan time.Time)
			go func() {
				end := b.hold(rowlock.Request{Keys: shared("k"), Wait: time.Minute})
				granted <- time.Now()
				end()
				close(granted)
			}()
			look := s.Connect()
			dbtest.Soon(t, "it waits", func() bool { return b.queue.Waiting("k") > 0 || s.waiters(look) > 0 })
			began := time.Now()
			end()
			t.Logf("granted %v after the writer", (<-granted).Sub(began))
			<-granted
			s.wantFree("k")
		}
	})
}

func TestAnErrorNamesTheLabelInPlaceOfTheKeys(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		end := p.hold(rowlock.Request{Keys: exclusive("a", "b")})
		for label, want := range map[string]string{"": "a, b", "the key": "the key"} {
			var e *lockerr.Error
			if err := p.refused(rowlock.Request{Keys: shared("a", "b"), Label: label}, lockerr.ErrLocked); !errors.As(err, &e) || e.Key != want {
				t.Errorf("%v", err)
			}
		}
		end()
	})
}

// TestEachKeyIsLockedAsItWasAskedFor, however the statement comes to run.
func TestEachKeyIsLockedAsItWasAskedFor(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		keys := []rowlock.Key{{Name: "a", Shared: true}, {Name: "b"}, {Name: "c", Shared: true}}
		want := func() {
			t.Helper()
			s.wantState("a", isShared)
			s.wantState("b", isLocked)
			s.wantState("c", isShared)
		}
		end := p.hold(rowlock.Request{Keys: keys})
		want()
		end()

		end = other.hold(rowlock.Request{Keys: exclusive("b", "c")})
		s.onceOneWaits(end)
		end = p.hold(rowlock.Request{Keys: keys, Wait: time.Minute})
		want()
		end()

		for _, keys := range [][]rowlock.Key{keys, keys[:1], keys[1:2]} {
			for _, wait := range []time.Duration{0, 20 * time.Second} {
				if wait > 0 && len(keys) > 1 {
					continue // of several keys that were not granted, some are locked: the transaction has to go
				}
				c, grant := p.granted(rowlock.Request{Keys: exclusive("mine")})
				if wait > 0 {
					s.onceOneWaits(other.hold(rowlock.Request{Keys: exclusive(keys[0].Name)}))
				}
				if _, _, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Keys: keys, Wait: wait, Waiting: free}); err != nil {
					t.Error(err)
				}
				for _, key := range keys {
					s.wantState(key.Name, map[bool]int{true: isShared, false: isLocked}[key.Shared])
				}
				p.end(c, grant.Txn, grant.Ticket)
			}
		}

		// Together with others who share it.
		end = other.hold(rowlock.Request{Keys: shared("a")})
		c, grant := p.granted(rowlock.Request{Keys: exclusive("mine")})
		_, alive, err := p.Join(dbtest.Limited(t), c, rowlock.Request{Keys: exclusive("a"), Waiting: free})
		if !alive || !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("alive %v, %v", alive, err)
		}
		if _, _, err = p.Join(dbtest.Limited(t), c, rowlock.Request{Keys: shared("a"), Waiting: free}); err != nil {
			t.Error(err)
		}
		p.end(c, grant.Txn, grant.Ticket)
		end()
	})
}

// TestAReaderDoesNotPassAWriterThatWaits in another process, or others would starve it.
func TestAReaderDoesNotPassAWriterThatWaits(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		end := s.process(nil).hold(rowlock.Request{Keys: shared("k")})
		var order []string
		var mu sync.Mutex
		var all sync.WaitGroup
		comes := func(who string, keys []rowlock.Key) {
			p := s.process(nil)
			all.Go(func() {
				end := p.hold(rowlock.Request{Keys: keys, Wait: time.Minute})
				mu.Lock()
				order = append(order, who)
				mu.Unlock()
				time.Sleep(50 * time.Millisecond)
				end()
			})
		}
		comes("w1", exclusive("k"))
		s.waitsInServer(1)
		p := s.process(nil)
		p.refused(rowlock.Request{Keys: shared("k")}, lockerr.ErrLocked)
		p.refused(rowlock.Request{Keys: shared("k"), Wait: 100 * time.Millisecond}, lockerr.ErrTimeout)
		comes("r2", shared("k"))
		s.waitsInServer(2)
		comes("w3", exclusive("k"))
		s.waitsInServer(3)
		comes("r4", shared("k"))
		s.waitsInServer(4)
		end()
		all.Wait()
		t.Log("holder S, then waiters in four processes: ", order)
		if order[0] != "w1" {
			t.Errorf("the order was %v", order)
		}
	})
}

// TestReadersQueueUp: those who wait for another process's writer occupy one
// connection of the server, not one each.
func TestReadersQueueUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		p.hold(rowlock.Request{Keys: shared("k")})()
		end := other.hold(rowlock.Request{Keys: exclusive("k")})
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() { p.hold(rowlock.Request{Keys: shared("k"), Wait: time.Minute})() })
		}
		s.waitsInServer(1)
		dbtest.Soon(t, "all are in the queue", func() bool { return p.queue.Waiting("k") == 9 })
		dbtest.Equal(t, "%d connections are in use", p.conns.Stat().InUse, 1)
		end()
		all.Wait()
		s.wantFree("k")
	})
}

// TestTheServerSeesADeadlockOfTwoWhoShare: between two who hold a key shared and want it for
// themselves, and between two who join crosswise.
func TestTheServerSeesADeadlockOfTwoWhoShare(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		var both sync.WaitGroup
		results := make(chan error, 2)
		var conns []*pool.Conn
		var grants []*rowlock.Begun
		for _, name := range []string{"a", "b"} {
			c, grant := p.granted(rowlock.Request{Keys: exclusive(name)})
			conns, grants = append(conns, c), append(grants, grant)
		}
		for i, name := range []string{"b", "a"} {
			both.Go(func() {
				_, alive, err := p.Join(dbtest.Limited(t), conns[i], rowlock.Request{Keys: shared(name), Wait: time.Minute, Waiting: free})
				if err != nil && alive {
					t.Error("the transaction is said to be alive")
				}
				results <- err
				_ = grants[i].Txn.Rollback(0)
				grants[i].Ticket.Leave()
				conns[i].Release()
			})
		}
		both.Wait()
		var said []string
		for range 2 {
			if err := <-results; err != nil {
				said = append(said, fmt.Sprint(errors.Is(err, lockerr.ErrDeadlock)))
			}
		}
		dbtest.Equal(t, "deadlocks: %q", strings.Join(said, " "), "true")
	})
}

// Many readers or one writer.

// TestSharedIsNotRaised: who has the key shared is refused the exclusive lock,
// and keeps what it has.
func TestSharedIsNotRaised(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		shared := func(db *sql.DB) error {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Shared(), lockctx.NoWait())
			if err == nil {
				dbtest.OK(t, h.Release())
			}
			return err
		}
		wantRefused := func(what string, err error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("%s: %v", what, err)
			}
			dbtest.OK(t, shared(other))
		}
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Shared())
		tx := dbtest.Begin(t, ctx, db)
		_, err := tx.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement of the transaction", err)
		_, err = db.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement beside it", err)
		_, err = db.BeginTx(lockctx.With(ctx, "k"), nil)
		wantRefused("BeginTx", err)
		wantRefused("Do", mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }))
		_, err = tx.ExecContext(lockctx.With(ctx, "k", lockctx.Slots(3)), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a slot", err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.WantStock(1, 9)

		// Asked for both before anything is locked, it is exclusive; and who has
		// that has the key shared, too.
		for _, ctx := range []context.Context{
			lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), "k"),
			lockctx.With(lockctx.With(dbtest.Limited(t), "k"), "k", lockctx.Shared()),
		} {
			tx = dbtest.Begin(t, ctx, db)
			dbtest.Is(t, "shared beside exclusive", shared(other), mysqllock.ErrLocked)
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, lockctx.Shared()))
			dbtest.OK(t, tx.Commit())
		}
		s.WantLocked("k", false)

		// Slots of a key that is asked for shared in the same breath.
		tx, err = db.BeginTx(lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), "k", lockctx.Slots(3)), nil)
		if err == nil {
			dbtest.OK(t, tx.Rollback())
		}
		wantRefused("shared and a slot", err)
		s.WantLocked("k", false)
	})
}

// TestSharedNeedsARowLock: it is never quietly another lock.
func TestSharedNeedsARowLock(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, strategy := range []string{hint.StrategyLease, hint.StrategyAdvisory, hint.StrategyOptimistic} {
			db := s.Handle("lockStrategy=" + strategy)
			_, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
			if err == nil || errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("a handle with lockStrategy=%s: %v", strategy, err)
			}
			_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Shared())
			if err == nil {
				t.Errorf("Acquire on a handle with lockStrategy=%s went through", strategy)
			}
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", lockctx.Shared(), lockctx.Row()), db)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestLeasesAndThoseWhoShareAKeyExcludeEachOther: who shares it waits for a lease on it, and a lease for who shares
// it.
func TestLeasesAndThoseWhoShareAKeyExcludeEachOther(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		h := stock.Acquire(t, db, "k", lockctx.Lease(stock.TTL))
		_, err := other.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared(), lockctx.NoWait()), nil)
		dbtest.Is(t, "shared, beside a lease", err, mysqllock.ErrLocked)
		granted := make(chan *sql.Tx)
		go func() {
			tx, err := other.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
			if err != nil {
				t.Error(err)
			}
			granted <- tx
		}()
		dbtest.Soon(t, "it waits", func() bool { st, err := mysqllock.Stats(other); return err == nil && st.Waiters == 1 })
		dbtest.OK(t, h.Release())
		tx := <-granted
		err = stock.Told(func() error {
			_, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(stock.TTL), lockctx.Wait(100*time.Millisecond))
			return err
		})
		dbtest.Is(t, "a lease, beside one who shares", err, mysqllock.ErrTimeout)
		s.WantLeased("k", false)
		dbtest.OK(t, tx.Commit())
		h = stock.Acquire(t, db, "k", lockctx.Lease(stock.TTL))
		dbtest.OK(t, h.Release())
	})
}
