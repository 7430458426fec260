package leader_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/leader"
	"github.com/mysqllock/mysqllock/lockctx"
)

func open(d *dbtest.Database) *dbtest.Database { return d }

// untilEnd is a lead that does nothing.
func untilEnd(ctx context.Context) error { <-ctx.Done(); return nil }

// TestALeaderThatReturnsNilCampaignsAgain: it has resigned.
func TestALeaderThatReturnsNilCampaignsAgain(t *testing.T) {
	dbtest.OnOneServer(t, open, func(t *testing.T, d *dbtest.Database) {
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		var tokens []uint64
		dbtest.OK(t, leader.Run(ctx, d.Open("mysqllock"), key, func(ctx context.Context) error {
			token, ok := mysqllock.Token(ctx)
			if tokens = append(tokens, token); !ok || len(tokens) == 2 {
				cancel()
			}
			return nil
		}))
		if len(tokens) != 2 || tokens[0] >= tokens[1] {
			t.Errorf("it led with the tokens %d, want two that grow", tokens)
		}
	})
}

// TestWhatALeaderReturnsReachesTheCallerOfRun, and so does its panic, and the next one leads at
// once.
func TestWhatALeaderReturnsReachesTheCallerOfRun(t *testing.T) {
	dbtest.OnOneServer(t, open, func(t *testing.T, d *dbtest.Database) {
		db, failed := d.Open("mysqllock"), errors.New("failed")
		var changes []leader.Change
		note := leader.OnChange(func(c leader.Change) { changes = append(changes, c) })
		err := leader.Run(dbtest.Limited(t), db, key, func(context.Context) error { return failed }, note)
		dbtest.Want(t, err, failed)
		func() {
			defer func() {
				dbtest.Equal(t, "recovered %v", recover(), "oops")
			}()
			_ = leader.Run(dbtest.Limited(t), db, key, func(context.Context) error { panic("oops") }, note, leader.TTL(time.Hour))
		}()
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		dbtest.OK(t, leader.Run(ctx, db, key, func(ctx context.Context) error { cancel(); return ctx.Err() }, note))
		if len(changes) != 6 || !changes[0].Leads || changes[1].Leads || !errors.Is(changes[1].Err, failed) || changes[5].Err != nil || changes[5].Token != changes[4].Token {
			t.Errorf("the changes were %+v", changes)
		}
	})
}

// An ErrLost of another lock is an error of the leader's function as any other. The leadership goes
// on, so Run does not lead again and again, without a pause.
func TestLeaderLosesAnotherLock(t *testing.T) {
	dbtest.OnOneServer(t, open, func(t *testing.T, d *dbtest.Database) {
		db, terms := d.Open("mysqllock"), 0
		err := leader.Run(dbtest.Limited(t), db, key, func(context.Context) error {
			if terms++; terms > 1 {
				return errors.New("it leads again")
			}
			return mysqllock.Do(dbtest.Limited(t), db, "another", func(ctx context.Context) error {
				var id uint64
				if err := db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id); err != nil {
					return err
				}
				dbtest.Exec(t, d.Open("mysql"), fmt.Sprint("KILL ", id))
				_, err := db.ExecContext(ctx, "DO 0")
				return err
			})
		})
		dbtest.Want(t, err, mysqllock.ErrLost)
		dbtest.Says(t, err, "another")
	})
}

func TestRunReturnsWhatDoesNotPass(t *testing.T) {
	dbtest.OnServers(t, open, func(t *testing.T, d *dbtest.Database) {
		never := func(context.Context) error { return errors.New("it ran") }
		run := func(what string, db *sql.DB, key string, says string, opts ...leader.Option) {
			t.Helper()
			err := leader.Run(dbtest.Limited(t), db, key, never, opts...)
			if err == nil {
				t.Errorf("%s: no error", what)
			}
			dbtest.Says(t, err, says)
		}
		db, closed := d.Open("mysqllock"), d.Open("mysqllock")
		dbtest.OK(t, closed.Close())
		run("another driver", d.Open("mysql"), key, `not with "mysqllock"`)
		run("no key", db, "", "key")
		run("a short TTL", db, key, "bad hint", leader.TTL(time.Millisecond))
		run("a closed handle", closed, key, "closed")

		root := d.Open("mysql")
		user := "poor_" + dbtest.Random()
		dbtest.Exec(t, root, "CREATE USER "+user)
		defer dbtest.Exec(t, root, "DROP USER "+user)
		dbtest.Exec(t, root, "GRANT CREATE TEMPORARY TABLES ON "+d.Name+".* TO "+user) // it may connect
		cfg := d.Config()
		dbtest.As(user)(cfg)
		run("no privilege", d.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{})), key, "denied")

		ended, cancel := context.WithCancel(t.Context())
		cancel()
		dbtest.OK(t, leader.Run(ended, db, key, never))
	})
}

// refusing is a connector of a wrapper of drivers whose first connections are refused.
type refusing struct {
	driver.Connector
	left atomic.Int32
}

func (r *refusing) Connect(ctx context.Context) (driver.Conn, error) {
	if r.left.Add(-1) >= 0 {
		return nil, errors.New("refused")
	}
	return r.Connector.Connect(ctx)
}

func (r *refusing) Driver() driver.Driver { return struct{ driver.Driver }{r.Connector.Driver()} }

func (r *refusing) Close() error { return r.Connector.(io.Closer).Close() }

// Beneath a wrapper of drivers, too, a campaign that fails is tried again.
func TestRunTriesAgainBeneathAWrapper(t *testing.T) {
	dbtest.OnOneServer(t, open, func(t *testing.T, d *dbtest.Database) {
		k, err := mysqllock.NewConnector(d.Config(), mysqllock.Config{})
		dbtest.OK(t, err)
		wrapper := &refusing{Connector: k}
		wrapper.left.Store(3)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		failed, led := 0, 0
		dbtest.OK(t, leader.Run(ctx, d.OpenDB(wrapper, nil), key, func(context.Context) error {
			led++
			cancel()
			return nil
		}, leader.OnError(func(err error) {
			dbtest.Says(t, err, "refused")
			failed++
		})))
		if led != 1 || failed == 0 {
			t.Errorf("it has led %d times, after %d failures", led, failed)
		}
	})
}

// TestWhoCannotReadTheLeasesIsNotToldThatNobodyLeads: it is an account without the right.
func TestWhoCannotReadTheLeasesIsNotToldThatNobodyLeads(t *testing.T) {
	dbtest.OnServers(t, open, func(t *testing.T, d *dbtest.Database) {
		plain := d.Open("mysql")
		hold, err := mysqllock.Acquire(t.Context(), d.Open("mysqllock"), key, lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		defer hold.Release()
		user := "u_" + d.Name
		dbtest.Exec(t, plain, "CREATE USER "+user)
		t.Cleanup(func() { dbtest.Exec(t, plain, "DROP USER "+user) })
		dbtest.Exec(t, plain, "GRANT EXECUTE ON "+d.Name+".* TO "+user) // to be let in
		in, err := inspect.New(d.OpenDB(d.Connector(dbtest.As(user)), nil), inspect.Options{})
		dbtest.OK(t, err)
		_, ok, err := leader.Current(t.Context(), in, key)
		if ok || err == nil {
			t.Fatalf("there is a leader: %v, %v", ok, err)
		}
		dbtest.Says(t, err, "who leads is not known")
		dbtest.Exec(t, plain, "GRANT SELECT ON "+d.Name+".mysqllock TO "+user) // what it says
		if _, ok, err := leader.Current(t.Context(), in, key); !ok || err != nil {
			t.Errorf("with the right there is a leader: %v, %v", ok, err)
		}
	})
}

// TestALostLeadershipEndsItsContextAndCannotWrite. The process campaigns again, and Current
// shows who leads.
func TestALostLeadershipEndsItsContextAndCannotWrite(t *testing.T) {
	dbtest.OnServers(t, open, func(t *testing.T, d *dbtest.Database) {
		db, plain := d.Open("mysqllock"), d.Open("mysql")
		dbtest.Exec(t, plain, "CREATE TABLE done (token BIGINT) ENGINE=InnoDB")
		in, err := inspect.New(plain, inspect.Options{})
		dbtest.OK(t, err)
		if _, ok, err := leader.Current(t.Context(), in, key); ok || err != nil {
			t.Errorf("before the first election there is a leader: %v, %v", ok, err)
		}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var mu sync.Mutex
		var ends []error
		terms := 0
		dbtest.OK(t, leader.Run(ctx, db, key, func(ctx context.Context) error {
			token, _ := mysqllock.Token(ctx)
			who, ok, err := leader.Current(t.Context(), in, key)
			if err != nil || !ok || who.Token != token || who.PID == 0 || who.Host == "" || who.Expires.IsZero() {
				t.Errorf("the leader is %+v, %v, %v, want token %d", who, ok, err, token)
			}
			if terms++; terms == 2 {
				cancel()
				return nil
			}
			if _, err := plain.Exec("UPDATE mysqllock SET owner = 'another#00000000', token = token + 1 WHERE owner IS NOT NULL"); err != nil {
				return err
			}
			dbtest.Is(t, "the write without leadership", dbtest.Err(db.ExecContext(ctx, "INSERT INTO done VALUES (?)", token)), mysqllock.ErrLost)
			dbtest.Exec(t, plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6)") // the other one is gone
			return errors.New("what a leader says that has lost does not count")
		}, leader.OnChange(func(c leader.Change) {
			mu.Lock()
			defer mu.Unlock()
			if !c.Leads {
				ends = append(ends, c.Err)
			}
		})))
		mu.Lock()
		defer mu.Unlock()
		if len(ends) != 2 || !errors.Is(ends[0], mysqllock.ErrLost) || ends[1] != nil {
			t.Errorf("the leaderships ended with %v", ends)
		}
	})
}

// TestCandidatesWaitForLongerThanLockWait, without an error. One that gives up leaves nobody
// waiting.
func TestCandidatesWaitForLongerThanLockWait(t *testing.T) {
	dbtest.OnOneServer(t, open, func(t *testing.T, d *dbtest.Database) {
		first, second := d.Open("mysqllock"), d.Open("mysqllock", "lockWait=1ms")
		lease := lockctx.Lease(30 * time.Second)
		for _, opts := range [][]lockctx.Option{{lockctx.Row()}, {lease}, {lockctx.Advisory()}, {lease, lockctx.Slots(1)}} {
			hold, err := mysqllock.Acquire(dbtest.Limited(t), first, "k", opts...)
			dbtest.OK(t, err)
			got := make(chan error)
			go func() {
				waited, err := mysqllock.Acquire(dbtest.Limited(t), second, "k", append(opts, lockctx.WaitForever())...)
				if err == nil {
					err = waited.Release()
				}
				got <- err
			}()
			dbtest.Soon(t, "somebody waits", func() bool { return waiters(t, second) == 1 })
			dbtest.Want(t, stock.Told(func() error { // after lockWait
				_, err := mysqllock.Acquire(dbtest.Limited(t), second, "k", opts...)
				return err
			}), mysqllock.ErrTimeout)
			dbtest.OK(t, hold.Release())
			dbtest.OK(t, <-got)
		}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		leads, ended := make(chan struct{}), make(chan error)
		go func() {
			ended <- leader.Run(ctx, first, key, func(ctx context.Context) error { close(leads); return untilEnd(ctx) })
		}()
		<-leads
		waits, giveUp := context.WithCancel(dbtest.Limited(t))
		go func() { ended <- leader.Run(waits, second, key, untilEnd) }()
		dbtest.Soon(t, "the other candidate waits", func() bool { return waiters(t, second) == 1 })
		for _, db := range []*sql.DB{first, second} {
			if st, err := mysqllock.Stats(db); err != nil || st.OldestWait != 0 || st.OldestHold != 0 {
				t.Errorf("a leadership is a wait of %v, or a hold of %v, to alert on: %v", st.OldestWait, st.OldestHold, err)
			}
		}
		giveUp()
		dbtest.OK(t, <-ended)
		dbtest.Soon(t, "nobody waits any more", func() bool { return waiters(t, second) == 0 })
		cancel()
		dbtest.OK(t, <-ended)
	})
}

func waiters(t *testing.T, db *sql.DB) int64 {
	t.Helper()
	stats, err := mysqllock.Stats(db)
	dbtest.OK(t, err)
	return int64(stats.Waiters)
}

// witness notes what an observer is told.
type witness chan mysqllock.Event

func (w witness) Observe(_ context.Context, e mysqllock.Event) { w <- e }

// TestLeadershipIsNoDelay: observers are told which lease is a leadership, and of no long hold.
func TestLeadershipIsNoDelay(t *testing.T) {
	d := dbtest.One(t)
	told := make(witness, 10)
	connector, err := mysqllock.NewConnector(d.Config(), mysqllock.Config{Observer: told, LongHold: time.Millisecond, SlowWait: time.Millisecond})
	dbtest.OK(t, err)
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	ctx, cancel := context.WithCancel(dbtest.Limited(t))
	dbtest.OK(t, leader.Run(ctx, db, key, func(context.Context) error {
		time.Sleep(20 * time.Millisecond)
		cancel()
		return nil
	}))
	dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, key, func(context.Context) error { return nil }, lockctx.Lease(time.Minute)))
	for _, want := range []string{"acquired true", "released true", "acquired false", "released false"} {
		e := <-told
		for e.Kind == mysqllock.LongHold && !e.Leadership { // Do may take longer than that
			e = <-told
		}
		if fmt.Sprint(e.Kind, e.Leadership) != want {
			t.Errorf("the observer is told %v, leadership %v, want %s", e.Kind, e.Leadership, want)
		}
	}
}
