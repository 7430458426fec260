package soak

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// planEnv makes the test binary a process of clients.
const planEnv = "MYSQLLOCK_SOAK"

// plan is what one process of clients does.
type plan struct {
	DSN     string
	MaxOpen int // for SetMaxOpenConns
	Process int
	Clients int
	Keys    int           // of each kind
	Think   time.Duration // at most so long between two units of work
}

// report is what a process says after a while of work, when all its clients rest.
type report struct {
	Ended      map[string]int // units of work, by how they ended
	Committed  map[string]int // by kind of lock
	Slowest    time.Duration  // the longest that one took beyond its limit; negative where none did
	Failures   []string       // what must not be
	Goroutines int
	Heap       int64 // bytes
}

const (
	longestWait = 4 * time.Second // for a lock
	limit       = 6 * time.Second // of the context of a unit of work
	margin      = 30 * time.Second
)

// work has the clients work whenever the parent says for how long, and reports.
func work(text string) int {
	var p plan
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_ = mysql.SetLogger(&mysql.NopLogger{}) // connections are refused and cut on purpose
	db, err := sql.Open("mysqllock", p.DSN)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	db.SetMaxOpenConns(p.MaxOpen)
	defer db.Close()
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		lasting, err := time.ParseDuration(lines.Text())
		if err == nil {
			err = out.Encode(p.shift(db, lasting))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}

// shift has all clients work for a while, and looks at the process when they rest.
func (p plan) shift(db *sql.DB, lasting time.Duration) *report {
	r := &report{Ended: make(map[string]int), Committed: make(map[string]int), Slowest: -limit}
	var mu sync.Mutex
	var all sync.WaitGroup
	end := time.Now().Add(lasting)
	for i := range p.Clients {
		all.Go(func() {
			for n := 0; time.Now().Before(end); n++ {
				time.Sleep(rand.N(p.Think))
				kind := kinds[rand.IntN(len(kinds))]
				began := time.Now()
				how, err := p.once(db, kind, fmt.Sprintf("%d.%d.%d.%d", p.Process, i, n, began.UnixNano()))
				took := time.Since(began)
				mu.Lock()
				r.Slowest = max(r.Slowest, took-limit)
				r.Ended[how]++
				switch how {
				case "committed":
					r.Committed[kind.name]++
				case "failed":
					r.Failures = append(r.Failures, kind.name+": "+err.Error())
				}
				if took > limit+margin {
					r.Failures = append(r.Failures, fmt.Sprintf("%s took %v: %v", kind.name, took, err))
				}
				mu.Unlock()
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		all.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(lasting + limit + 2*margin):
		stacks := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "somebody hangs:\n%s\n", stacks[:runtime.Stack(stacks, true)])
		os.Exit(1)
	}
	r.Goroutines = settled(runtime.NumGoroutine)
	debug.FreeOSMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	r.Heap = int64(memory.HeapAlloc)
	if len(r.Failures) > 10 {
		r.Failures = append(r.Failures[:10], fmt.Sprintf("and %d more", len(r.Failures)-10))
	}
	return r
}

// settled waits until a number has not fallen for a second.
func settled(number func() int) int {
	least := number()
	for since := time.Now(); time.Since(since) < time.Second; time.Sleep(20 * time.Millisecond) {
		if n := number(); n < least {
			least, since = n, time.Now()
		}
	}
	return least
}

// kind is one way to lock.
type kind struct {
	name string
	opts []lockctx.Option
	does bool // it is a hold around a transaction, else the transaction's own
}

// Each has keys of its own, but for leases and row locks, which share theirs.
var kinds = []kind{
	{"row", []lockctx.Option{lockctx.Row()}, false},
	{"lease", []lockctx.Option{lockctx.Lease(30 * time.Second)}, false},
	{"two", []lockctx.Option{lockctx.Row()}, false},
	{"held", []lockctx.Option{lockctx.Row()}, true},
	{"leased", []lockctx.Option{lockctx.Lease(30 * time.Second)}, true},
	{"advisory", []lockctx.Option{lockctx.Advisory()}, true},
	{"optimistic", []lockctx.Option{lockctx.Optimistic()}, true},
	{"slots", []lockctx.Option{lockctx.Row(), lockctx.Slots(3)}, true},
	{"leased slots", []lockctx.Option{lockctx.Lease(30 * time.Second), lockctx.Slots(3)}, true},
}

// families are the kinds whose keys are the same.
var families = map[string]string{
	"row": "key", "lease": "key", "two": "key", "held": "key", "leased": "key",
	"advisory": "advisory", "optimistic": "optimistic", "slots": "slots", "leased slots": "slots",
}

// retries are for Do alone.
var retries = map[string][]lockctx.Option{"optimistic": {lockctx.Retry(10)}}

// once counts under a lock: what it has counted stands in the ledger by the same
// transaction. One in ten gives up early. It returns how it ended.
func (p plan) once(db *sql.DB, k kind, id string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	gaveUp := rand.IntN(10) == 0
	if gaveUp {
		defer time.AfterFunc(rand.N(100*time.Millisecond), cancel).Stop()
	}
	wait := rand.N(longestWait) + time.Millisecond
	opts := append(slices.Clone(k.opts), lockctx.Wait(wait))
	key := fmt.Sprintf("%s:%d", families[k.name], rand.IntN(p.Keys))
	var err error
	switch {
	case k.name == "two":
		other := fmt.Sprintf("%s:%d", families[k.name], rand.IntN(p.Keys))
		keys := []string{key, other}
		slices.Sort(keys)
		err = count(lockctx.WithKeys(ctx, keys, opts...), db, id, slices.Compact(keys)...)
	case k.does:
		err = mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
			name := key
			if slot, slotted := mysqllock.Slot(ctx); slotted {
				name = fmt.Sprintf("%s/%d", key, slot)
			}
			return count(ctx, db, id, name)
		}, append(opts, retries[k.name]...)...)
	default:
		err = count(lockctx.With(ctx, key, opts...), db, id, key)
	}
	var locked *mysqllock.Error
	switch {
	case err == nil:
		return "committed", nil
	case full(err):
		if errors.As(err, &locked) && !strings.Contains(err.Error(), "lockMaxConns") {
			return "failed", err
		}
		return "no connection left", err
	case errors.Is(err, mysqllock.ErrConflict):
		return "conflict", err
	case errors.Is(err, mysqllock.ErrLocked):
		return "not granted", err
	case errors.Is(err, mysqllock.ErrExhausted) && ctx.Err() == nil:
		return "no connection while its context lasts", err
	case errors.Is(err, mysqllock.ErrExhausted):
		return "no connection until its context ended", err
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil:
		return "gave up", err
	case ctx.Err() != nil && errors.Is(err, mysqllock.ErrLost):
		return "gave up", err
	}
	return "failed", err
}

// full reports whether the server had no connection left.
func full(err error) bool {
	var refusal *mysql.MySQLError
	return errors.As(err, &refusal) && refusal.Number == 1040
}

// count adds one to each name, in a way that loses numbers where two do so at the
// same time, and writes it down.
func count(ctx context.Context, db *sql.DB, id string, names ...string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, name := range names {
		var n int
		if err := tx.QueryRowContext(ctx, "SELECT n FROM counter WHERE name = ?", name).Scan(&n); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE counter SET n = ? WHERE name = ?", n+1, name); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO ledger (id, name) VALUES (?, ?)", id, name); err != nil {
			return err
		}
	}
	return tx.Commit()
}
