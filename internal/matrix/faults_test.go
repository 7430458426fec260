//go:build unix

package matrix

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// The TTL of a cell is so long that a lock which only ends by it is seen: free is how long a
// key may stay taken. Where the TTL is what frees it, it is short.
const (
	longTTL  = 5 * time.Minute
	shortTTL = 5 * time.Second
	free     = time.Minute
)

// fault is what goes wrong while the unit of work of a cell runs.
type fault struct {
	name string
	ttl  time.Duration
	run  func(r *run) error // runs the unit of work, and returns what its caller is told
	want []error            // what that may be, any of; nil is success
	any  bool               // it may be another error, too
	keys bool               // an error of ours names the key
}

var faults = []fault{
	{name: "none", ttl: longTTL, want: []error{nil}, run: func(r *run) error { return r.finish(r.work) }},

	{name: "cancel while it waits", ttl: longTTL, want: []error{context.Canceled}, keys: true, run: func(r *run) error {
		release := r.occupied()
		defer release()
		for try := 1; ; try++ {
			ctx, cancel := context.WithCancel(dbtest.Limited(r))
			told := make(chan error, 1)
			go func() { told <- r.finish(func(context.Context) error { return r.work(ctx) }) }()
			r.waits()
			cancel()
			err := <-told
			r.idle()
			if !errors.Is(err, mysqllock.ErrTimeout) {
				if errors.Is(err, context.Canceled) && try < 20 {
					continue // it has waited for a connection, or a busy server had not answered yet
				}
				r.Errorf("%v is not ErrTimeout", err)
			}
			return err
		}
	}},

	{name: "deadline in a statement", ttl: longTTL, want: []error{context.DeadlineExceeded}, run: func(r *run) error {
		r.unit.slow = true
		ctx, cancel := context.WithTimeout(dbtest.Limited(r), 500*time.Millisecond)
		defer cancel()
		err := r.finish(func(context.Context) error { return r.work(ctx) })
		if errors.Is(err, mysqllock.ErrLost) {
			r.Errorf("%v is ErrLost", err)
		}
		r.idle()
		return err
	}},

	{name: "KILL at take", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, mysqllock.ErrNoAnswer, killed}, keys: true, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isTake, Answer: killed})
	}},
	{name: "KILL at commit", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, killed}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isCommit, Answer: killed})
	}},
	{name: "answer to take lost", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, mysqllock.ErrTimeout, mysqllock.ErrNoAnswer, mysql.ErrInvalidConn}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isTake, Lost: true})
	}},
	{name: "answer to COMMIT lost", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, mysql.ErrInvalidConn}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isCommit, Lost: true})
	}},
	{name: "KILL at release", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, killed}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isRelease, Answer: killed})
	}},
	{name: "no writes at release", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, readOnly}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isRelease, Answer: readOnly, Times: 12})
	}},
	{name: "answer to release lost", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, mysql.ErrInvalidConn}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isRelease, Lost: true})
	}},
	{name: "cut", ttl: longTTL, want: []error{nil, mysqllock.ErrLost, mysql.ErrInvalidConn}, run: func(r *run) error {
		return r.hit(dbtest.Fault{At: isWrite, Before: r.tap.Break})
	}},

	{name: "frozen and thawed", ttl: shortTTL, want: []error{mysqllock.ErrLost, mysqllock.ErrConflict, context.Canceled}, any: true, run: func(r *run) error {
		var others sync.WaitGroup
		defer others.Wait()
		return r.hit(dbtest.Fault{At: isWrite, Before: func() {
			thaw := r.tap.Freeze()
			others.Go(func() { r.told(r.another(dbtest.Limited(r))); thaw() })
		}})
	}},

	{name: "lease stolen", ttl: longTTL, want: []error{mysqllock.ErrLost, context.Canceled}, run: func(r *run) error {
		row := func(set string) {
			dbtest.Exec(r, r.place.admin, "UPDATE mysqllock SET "+set+" WHERE namespace = ? AND name = ?", r.place.Name, r.unit.keys[0])
		}
		defer row("owner = NULL")
		err := r.hit(dbtest.Fault{At: isWrite, Before: func() {
			row("token = token + 1, owner = 'a thief', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
		}})
		r.maybe = 0 // whatever its end says: all that it has written came after the theft
		return err
	}},

	{name: "neighbour", ttl: longTTL, want: []error{nil}, run: func(r *run) error {
		defer r.neighbour()()
		if !r.waiting() {
			return r.finish(r.work)
		}
		release := r.occupied()
		for limit := 500 * time.Millisecond; ; limit *= 2 {
			ctx, cancel := context.WithTimeout(dbtest.Limited(r), limit)
			err := r.finish(func(context.Context) error { return r.work(ctx) })
			cancel()
			r.idle()
			if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, mysqllock.ErrTimeout) && limit < 10*time.Second {
				continue // a busy server has not answered in time
			}
			if !errors.Is(err, mysqllock.ErrTimeout) {
				r.Errorf("a caller that gives up is told %v", err)
			}
			break
		}
		told := make(chan error, 1)
		go func() { told <- r.finish(r.work) }()
		r.waits()
		release()
		return <-told
	}},

	{name: "handle closed", ttl: longTTL, want: []error{nil, mysqllock.ErrClosed, mysqllock.ErrLost, sql.ErrConnDone, context.Canceled}, any: true, run: func(r *run) error {
		closed := make(chan struct{})
		err := r.hit(dbtest.Fault{At: isWrite, Before: func() {
			go func() { defer close(closed); r.mine.Close() }()
			time.Sleep(20 * time.Millisecond) // it may or may not be through
		}})
		<-closed
		return err
	}},
}

// What the server answers to a statement that was ended by KILL QUERY, and to one that writes
// while it takes no writes, as during a planned failover.
var (
	killed   = &mysql.MySQLError{Number: 1317, Message: "Query execution was interrupted"}
	readOnly = &mysql.MySQLError{Number: 1290, Message: "The MySQL server is running with the --super-read-only option so it cannot execute this statement"}
)

var (
	take    = regexp.MustCompile(`mysqllock.*FOR (UPDATE|SHARE)|mysqllock.*LOCK IN SHARE MODE|GET_LOCK|^SELECT .*@@t\w+_isolation, name, token|^INSERT INTO .*mysqllock`)
	release = regexp.MustCompile(`RELEASE_LOCK|SET owner = `)
	commit  = regexp.MustCompile(`(^|; )COMMIT`)
)

// What the statements on the wire are for.
func isTake(text string) bool {
	return take.MatchString(text) && !strings.Contains(text, "RELEASE_LOCK")
}
func isCommit(text string) bool  { return commit.MatchString(text) }
func isRelease(text string) bool { return release.MatchString(text) }
func isWrite(text string) bool   { return strings.HasPrefix(text, "UPDATE counters") }

// hit runs the unit of work with a fault on the wire, which must happen.
func (r *run) hit(f dbtest.Fault) error {
	r.Helper()
	happened := r.tap.Strike(f)
	err := r.finish(r.work)
	if !happened() {
		r.Errorf("the fault did not happen; the unit of work was told %v", err)
	}
	return err
}

// occupied has another process hold the key, until the function is called that it returns.
func (r *run) occupied() (release func()) {
	r.Helper()
	hold, err := mysqllock.AcquireKeys(dbtest.Limited(r), r.other, r.unit.keys, r.excluding()...)
	dbtest.OK(r, err)
	var released bool
	return func() {
		if !released {
			released = true
			if err := hold.Release(); err != nil {
				r.Errorf("the release of the other process: %v", err)
			}
		}
	}
}

// waits waits until a caller of this process waits for the key.
func (r *run) waits() {
	r.Helper()
	dbtest.Eventually(r, "a caller waits", func() error {
		if stats, err := mysqllock.Stats(r.mine); err != nil || stats.Waiters > 0 {
			return err
		}
		return errors.New("none does")
	})
}

// waiting reports whether the strategy waits for a holder.
func (r *run) waiting() bool { return strategies[r.strategy].name != "optimistic" }

// idle waits until no statement of this process runs on the server.
func (r *run) idle() {
	r.Helper()
	dbtest.Eventually(r, "no statement of it runs", func() error {
		if n := r.place.count(r.T, running, r.user); n > 0 {
			return errors.New("one does")
		}
		return nil
	})
}

// neighbour has another session run a statement that cannot be shown in every character set,
// and is long.
func (r *run) neighbour() (stop func()) {
	r.Helper()
	conn, err := r.place.admin.Conn(dbtest.Limited(r))
	dbtest.OK(r, err)
	text := "DO SLEEP(600) /* \U0001f512 \xff\xfe" + strings.Repeat("x", 3<<20) + " */"
	ctx, cancel := context.WithCancel(dbtest.Limited(r))
	ended := make(chan struct{})
	var id int
	dbtest.OK(r, conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
	go func() { defer close(ended); _, _ = conn.ExecContext(ctx, text) }()
	dbtest.Eventually(r, "the neighbour's statement runs", func() error {
		if r.place.count(r.T, "SELECT COUNT(*) "+processes+" WHERE p.ID = ? AND p.COMMAND = 'Query'", id) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	return func() {
		cancel()
		<-ended
		conn.Close()
		r.place.admin.Exec(fmt.Sprintf("KILL %d", id))
	}
}

// verify asks whether the caller was told what the fault calls for.
func (f fault) verify(r *run, err error) {
	r.Helper()
	fits := func(want error) bool { return errors.Is(err, want) }
	if !slices.ContainsFunc(f.want, fits) && (err == nil || !f.any) {
		r.Errorf("told %v, want one of %v", err, f.want)
	}
	var e *mysqllock.Error
	if f.keys && err != nil && (!errors.As(err, &e) || !strings.Contains(e.Key, r.unit.keys[0])) {
		r.Errorf("%v does not name the key", err)
	}
}

// impossible are the cells that cannot be, with the reason.
func impossible(c cell) string {
	strategy, fault := strategies[c.strategy].name, faults[c.fault].name
	switch {
	case fault == "lease stolen" && strategy != "lease":
		return "there is no lease"
	case fault == "no writes at release" && strategy == "advisory":
		return "RELEASE_LOCK writes nothing"
	case strings.HasSuffix(fault, "at release") || fault == "answer to release lost":
		if strategy != "lease" && strategy != "advisory" {
			return "COMMIT is the release"
		}
	case fault == "cancel while it waits" && strategy == "optimistic":
		return "a version is not waited for"
	}
	return ""
}
