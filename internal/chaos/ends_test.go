package chaos

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/leader"
	"github.com/mysqllock/mysqllock/lockctx"
)

// A process holds a key in each way and ends. What it leaves is what docs/errors.md says under
// "Holders that fall silent".

// keeping is a way to hold a key, whose name is that of the way.
type keeping struct {
	name  string
	opts  func(ttl time.Duration) []lockctx.Option
	next  func(ttl time.Duration) []lockctx.Option // of the next holder; nil is opts
	hold  func(ctx context.Context, db *sql.DB, key string, held func(), opts ...lockctx.Option) error
	holds int  // how many holders; 0 is one
	free  bool // it excludes nobody
	lasts bool // a crash leaves it for the rest of the TTL
}

func keepings() []keeping {
	row := func(time.Duration) []lockctx.Option { return []lockctx.Option{lockctx.Row()} }
	lease := func(ttl time.Duration) []lockctx.Option { return []lockctx.Option{lockctx.Lease(ttl)} }
	advisory := func(time.Duration) []lockctx.Option { return []lockctx.Option{lockctx.Advisory()} }
	slots := func(of func(time.Duration) []lockctx.Option) func(time.Duration) []lockctx.Option {
		return func(ttl time.Duration) []lockctx.Option { return append(of(ttl), lockctx.Slots(2)) }
	}
	return []keeping{
		{name: "row, Do", opts: row, hold: keepInDo},
		{name: "row, BeginTx", opts: row, hold: keepInTx},
		{name: "row, Acquire", opts: row, hold: keepAcquired},
		{name: "row, shared", opts: func(time.Duration) []lockctx.Option { return []lockctx.Option{lockctx.Row(), lockctx.Shared()} }, next: row, hold: keepInDo},
		{name: "row, slots", opts: slots(row), hold: keepInDo, holds: 2},
		{name: "lease, Do", opts: lease, hold: keepInDo, lasts: true},
		{name: "lease, BeginTx", opts: lease, hold: keepInTx, lasts: true},
		{name: "lease, Acquire", opts: lease, hold: keepAcquired, lasts: true},
		{name: "lease, slots", opts: slots(lease), hold: keepInDo, holds: 2, lasts: true},
		{name: "leader", opts: lease, hold: keepLeading, lasts: true},
		{name: "advisory, Do", opts: advisory, hold: keepInDo},
		{name: "advisory, BeginTx", opts: advisory, hold: keepInTx},
		{name: "optimistic", opts: func(time.Duration) []lockctx.Option { return []lockctx.Option{lockctx.Optimistic()} }, hold: keepInDo, free: true},
	}
}

func keepInDo(ctx context.Context, db *sql.DB, key string, held func(), opts ...lockctx.Option) error {
	return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
		held()
		<-ctx.Done()
		return ctx.Err()
	}, opts...)
}

func keepInTx(ctx context.Context, db *sql.DB, key string, held func(), opts ...lockctx.Option) error {
	tx, err := db.BeginTx(lockctx.With(ctx, key, opts...), nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err = tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1 AND 1 = 0"); err != nil {
		return err
	}
	held()
	<-ctx.Done()
	return ctx.Err()
}

func keepAcquired(ctx context.Context, db *sql.DB, key string, held func(), opts ...lockctx.Option) error {
	hold, err := mysqllock.Acquire(ctx, db, key, opts...)
	if err != nil {
		return err
	}
	held()
	<-hold.Context().Done()
	return hold.Release()
}

func keepLeading(ctx context.Context, db *sql.DB, key string, held func(), _ ...lockctx.Option) error {
	return leader.Run(ctx, db, key, func(ctx context.Context) error {
		held()
		<-ctx.Done()
		return nil
	}, leader.TTL(leadingTTL))
}

// How a process ends.
const (
	endsContexts = "contexts" // at SIGTERM it ends the contexts of its holds, and returns from main
	endsHandle   = "close"    // at SIGTERM it closes the handle, and returns from main
	endsAtOnce   = "default"  // Go's default at SIGTERM: it dies
	endsKilled   = "killed"   // SIGKILL
)

const (
	// endsTTL is that of leases which are given back: nobody waits so long for them.
	endsTTL = 4 * dbtest.Patience
	// crashTTL is that of leases which are left.
	crashTTL = 8 * time.Second
)

// leadingTTL is the TTL of leadership in a child.
var leadingTTL = endsTTL

// childEnds holds a key in each way until it is told to end, in the way that it has read.
func childEnds(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	end := in.Text()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ttl := crashTTL
	if end == endsContexts || end == endsHandle {
		ttl = endsTTL
		ctx, stop = signal.NotifyContext(ctx, syscall.SIGTERM)
		defer stop()
	}
	leadingTTL = ttl
	holding := ctx
	if end == endsHandle { // their contexts end with the handle
		holding = context.Background()
	}
	var all sync.WaitGroup
	for _, w := range keepings() {
		for range max(1, w.holds) {
			all.Go(func() {
				err := w.hold(holding, db, w.name, func() { fmt.Println("holds") }, w.opts(ttl)...)
				if ctx.Err() == nil {
					fmt.Println(w.name, err)
				}
			})
		}
	}
	if end == endsHandle {
		<-ctx.Done()
		fmt.Println("closed", db.Close())
	} else {
		all.Wait()
	}
	os.Exit(0) // as the end of main: nothing else is closed
}

// TestWhatAnEndingProcessLeaves: a process that ends its contexts, or closes its handle, at SIGTERM
// leaves no lock, and no leadership. One that dies leaves its leases until they expire, and nothing
// else.
func TestWhatAnEndingProcessLeaves(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var all dbtest.Together
		defer all.Wait()
		for _, end := range []string{endsContexts, endsHandle, endsAtOnce, endsKilled} {
			all.Run(t, end, func(t *testing.T) { newScratch(s.Beside(t)).leaves(t, end) })
		}
	})
}

func (s *scratch) leaves(t *testing.T, end string) {
	orderly := end == endsContexts || end == endsHandle
	lockTTL := fmt.Sprintf("lockTTL=%v", endsTTL)
	c, db := dbtest.StartJob(t, "ends", s.DSN(lockTTL)), s.Handle(lockTTL)
	c.Tell(end)
	ways := keepings()
	for _, w := range ways {
		for range max(1, w.holds) {
			if line := c.Line(); line != "holds" {
				t.Fatal(line)
			}
		}
	}
	take := func(w keeping, wait lockctx.Option) error {
		opts := w.opts
		if w.next != nil {
			opts = w.next
		}
		nothing := func(context.Context) error { return nil }
		return mysqllock.Do(t.Context(), db, w.name, nothing, append(opts(endsTTL), wait)...)
	}
	for _, w := range ways {
		if err := take(w, lockctx.NoWait()); w.free && err != nil || !w.free && !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("%s, while the other process holds it: %v", w.name, err)
		}
	}
	how := os.Signal(syscall.SIGTERM)
	if end == endsKilled {
		how = os.Kill
	}
	dbtest.OK(t, c.Signal(how))
	if err := c.End(); (err == nil) != orderly {
		t.Errorf("it ended with %v", err)
	}
	ended := time.Now()
	var all sync.WaitGroup
	defer all.Wait()
	for _, w := range ways {
		expires := s.expiry(w.name)
		if left := expires != ""; left != (w.lasts && !orderly) {
			t.Errorf("%s: a lease is left: %v, until %s", w.name, left, expires)
		}
		all.Go(func() {
			if err := take(w, lockctx.Wait(dbtest.Patience)); err != nil {
				t.Errorf("%s: %v", w.name, err)
				return
			}
			took := time.Since(ended).Round(time.Millisecond)
			var early bool
			if err := s.Plain.QueryRow("SELECT ? <> '' AND UTC_TIMESTAMP(6) < ?", expires, expires).Scan(&early); err != nil || early {
				t.Errorf("%s: it is granted before the lease is over, after %v: %v", w.name, took, err)
			}
			t.Logf("%s: free after %v", w.name, took)
		})
	}
}

// expiry is when the first lease on the key, or on one of its slots, expires; "" if there is none.
func (s *scratch) expiry(key string) (expires string) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT COALESCE(MIN(CAST(expires AS CHAR)), '') FROM mysqllock "+
		"WHERE owner IS NOT NULL AND (name = ? OR name LIKE CONCAT('%:', ?))", key, key).Scan(&expires))
	return expires
}
