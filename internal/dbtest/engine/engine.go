// Package engine has what the tests of the engines share that take leases row by row.
package engine

import (
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Again runs f until it meets no conflict. A conflict commits nothing.
func Again(f func() error) error {
	for {
		if err := f(); !errors.Is(err, mysqllock.ErrConflict) && !errors.Is(err, mysqllock.ErrDeadlock) {
			return err
		}
	}
}

// Tapped is a handle whose statements go through the tap.
func Tapped(t *testing.T, dsn string, tap *dbtest.Tap, c mysqllock.Config) *sql.DB {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	dbtest.OK(t, err)
	cfg.Logger = &mysql.NopLogger{}
	tap.On(cfg)
	c.Wait = 30 * time.Second
	connector, err := mysqllock.NewConnector(cfg, c)
	dbtest.OK(t, err)
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	return db
}

// LeasesAreRenewed checks that leases are kept for longer than their TTL, also behind somebody who
// locks the row of one, k1, and several at a time; that nothing else is locked for that; and that
// they are free then.
func LeasesAreRenewed(t *testing.T, db, other *sql.DB, lock func() (unlock func())) {
	t.Helper()
	ctx := dbtest.Limited(t)
	const ttl = 10 * time.Second
	var holds []*mysqllock.Hold
	for i := range 6 {
		h, err := mysqllock.Acquire(ctx, db, fmt.Sprint("k", i), lockctx.Lease(time.Duration(2+i%2)*time.Second))
		dbtest.OK(t, err)
		holds = append(holds, h)
	}
	for until := time.Now().Add(6 * time.Second); time.Now().Before(until); { // each renewal meets a row that is locked
		unlock := lock()
		beside, err := mysqllock.Acquire(ctx, other, "beside", lockctx.NoWait())
		dbtest.OK(t, err)
		time.Sleep(100 * time.Millisecond)
		dbtest.OK(t, beside.Release())
		unlock()
		time.Sleep(10 * time.Millisecond)
	}
	for i, h := range holds {
		key := fmt.Sprint("k", i)
		dbtest.OK(t, h.Context().Err())
		for _, o := range []lockctx.Option{lockctx.Lease(ttl), lockctx.Row()} {
			_, err := mysqllock.Acquire(ctx, other, key, o, lockctx.NoWait())
			dbtest.Want(t, err, mysqllock.ErrLocked)
		}
		dbtest.OK(t, h.Release())
		next, err := mysqllock.Acquire(ctx, other, key, lockctx.Lease(ttl)) // a renewal of others may still have its row
		dbtest.OK(t, err)
		if next.Token() <= h.Token() {
			t.Errorf("token %d after %d", next.Token(), h.Token())
		}
		dbtest.OK(t, next.Release())
	}
}

// LostAnswersLeaveNothing checks that what a COMMIT has granted or released whose answer is lost does
// not stay so. db is [Tapped].
func LostAnswersLeaveNothing(t *testing.T, tap *dbtest.Tap, db, other *sql.DB) {
	t.Helper()
	ctx := dbtest.Limited(t)
	commit := dbtest.Fault{At: func(text string) bool { return text == "COMMIT" }, Lost: true}
	warm, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(time.Minute))
	dbtest.OK(t, err)
	dbtest.OK(t, warm.Release())
	for range 3 {
		taking := tap.Strike(commit)
		h, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		releasing := tap.Strike(commit)
		dbtest.OK(t, h.Release())
		if !taking() || !releasing() {
			t.Error("no answer was lost")
		}
		next, err := mysqllock.Acquire(ctx, other, "k", lockctx.Lease(time.Minute), lockctx.Wait(5*time.Second))
		dbtest.OK(t, err)
		dbtest.OK(t, next.Release())
	}
}

// ManyKeys has callers of each handle take some keys at random: no key has two holders at a time,
// its tokens grow from holder to holder, where it has any, and nobody loses it. With so many keys
// requests gather while the handle's connections are busy, which those for one key never do.
func ManyKeys(t *testing.T, handles []*sql.DB, opts ...lockctx.Option) {
	t.Helper()
	const callers, keys, times = 12, 12, 10
	type holding struct {
		sync.Mutex
		by    *mysqllock.Hold // nil for none
		token uint64          // the highest so far
	}
	opts = append(opts, lockctx.Wait(dbtest.Patience))
	var held [keys]holding
	var all sync.WaitGroup
	ctx := dbtest.Limited(t)
	for _, db := range handles {
		for range callers {
			all.Go(func() {
				for range times {
					i := rand.N(keys)
					key := fmt.Sprint("key ", i)
					h, err := mysqllock.Acquire(ctx, db, key, opts...)
					for errors.Is(err, mysqllock.ErrUnsafe) { // clean-ups without a pause have removed its row again and again
						h, err = mysqllock.Acquire(ctx, db, key, opts...)
					}
					if err != nil {
						t.Error(err)
						return
					}
					k := &held[i]
					k.Lock()
					if k.by != nil {
						t.Errorf("%s has two holders, with the tokens %d and %d", key, k.by.Token(), h.Token())
					}
					if token := h.Token(); token != 0 && token <= k.token {
						t.Errorf("%s has the token %d after %d", key, token, k.token)
					}
					k.by, k.token = h, max(k.token, h.Token())
					k.Unlock()
					time.Sleep(50 * time.Millisecond)
					k.Lock()
					if k.by == h {
						k.by = nil
					}
					k.Unlock()
					if err := h.Release(); errors.Is(err, mysqllock.ErrLost) { // any other error is that of a slow server
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
}
