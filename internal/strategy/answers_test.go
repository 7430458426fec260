package strategy_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// answers are what a caller can be told that gets no lock, each with the words that say so.
var answers = map[error]string{
	mysqllock.ErrTimeout:   "not granted within the wait",
	mysqllock.ErrExhausted: "no connection left for locks",
	mysqllock.ErrNoAnswer:  "the server has not answered",
}

// wantAnswer fails the test unless err is one answer, want, and in its text no other; and names the
// lock; and matches ended, and no other error of a context.
func wantAnswer(t *testing.T, cell string, err, want, ended error, says string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || e.Op != "lock" || e.Key == "" || e.Strategy == "" || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want %v of a lock: %s", cell, err, want, says)
		return
	}
	for answer, words := range answers {
		if is, told := errors.Is(err, answer), strings.Contains(err.Error(), words); is != (answer == want) || told != (answer == want) { //nolint:errorlint // a key of answers
			t.Errorf("%s: %v, want %v alone", cell, err, want)
			return
		}
	}
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, end) != errors.Is(ended, end) {
			t.Errorf("%s: %v; is it %v? want %v", cell, err, end, errors.Is(ended, end))
		}
	}
}

// TestAShortWaitForAHeldKeySaysThatItIsHeld, by another handle, when it ends.
func TestAShortWaitForAHeldKeySaysThatItIsHeld(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		holders := s.Handle("lockMaxConns=100")
		for name, opts := range kinds {
			if name == "optimistic" {
				continue // nobody has a version
			}
			for way, take := range takers {
				key := dbtest.Random()
				give := occupy(t, holders, name, key, opts)
				for _, wait := range []time.Duration{10 * time.Millisecond, 50 * time.Millisecond} { // one of 1 ms can end before the server has said anything
					db := s.Handle("maxConns=8")
					dbtest.OK(t, stock.Told(func() error { return take(t.Context(), db, "another "+key, opts) }))
					// On a busy machine the server may say nothing for so long, now and then: then another round is to show none of that.
					var told map[string]int
					for round := 0; round < 5 && told["timeout"] != 200; round++ {
						told = tally(20, 10, func() error {
							return take(t.Context(), db, key, append(opts[:len(opts):len(opts)], lockctx.Wait(wait)))
						})
					}
					if told["timeout"] != 200 {
						t.Errorf("%s, %s, %v: %v", name, way, wait, told)
					}
					db.Close()
				}
				give()
			}
		}
	})
}

// occupy has a key taken, so that nobody else gets it in that way until give.
func occupy(t *testing.T, db *sql.DB, name, key string, opts []lockctx.Option) (give func()) {
	t.Helper()
	n := 1
	switch {
	case strings.HasSuffix(name, "slots"):
		n = 2
	case name == "shared":
		opts = []lockctx.Option{lockctx.Row()}
	}
	var holds []*mysqllock.Hold
	for range n {
		holds = append(holds, stock.Acquire(t, db, key, opts...))
	}
	give = func() {
		for _, h := range holds {
			_ = h.Rollback()
		}
	}
	t.Cleanup(give)
	return give
}

// tally has callers ask, each some times, and counts what they are told.
func tally(callers, times int, ask func() error) map[string]int {
	var mu sync.Mutex
	told := make(map[string]int)
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range times {
				word := "granted"
				if err := ask(); err != nil {
					if word = err.Error(); errors.Is(err, mysqllock.ErrTimeout) && !errors.Is(err, mysqllock.ErrExhausted) {
						word = "timeout"
					}
				}
				mu.Lock()
				told[word]++
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	all.Wait()
	return told
}

// TestACallerWithoutALockIsToldWhy, by what has become of the server and of the connections.
func TestACallerWithoutALockIsToldWhy(t *testing.T) {
	const brief = 300 * time.Millisecond
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		holders := s.Handle("lockMaxConns=100")
		var cells dbtest.Together
		defer cells.Wait()
		atOnce := make(chan struct{}, 30) // more would open connections for longer than the driver waits for one
		for name, opts := range kinds {
			for way, take := range takers {
				s := &stock.Shop{Database: s.Database, Plain: s.Plain}
				asks := func(ctx context.Context, db *sql.DB, key string, wait time.Duration) error {
					return take(ctx, db, key, append(opts[:len(opts):len(opts)], lockctx.Wait(wait)))
				}
				ready := func(t *testing.T, db *sql.DB) { // what many handles open together takes long
					dbtest.OK(t, stock.Told(func() error { return asks(t.Context(), db, "another "+dbtest.Random(), time.Minute) }))
					dbtest.OK(t, db.Ping())
				}
				cell := func(situation string, run func(t *testing.T, cell string)) {
					cells.Run(t, situation+", "+name+", "+way, func(t *testing.T) {
						atOnce <- struct{}{}
						defer func() { <-atOnce }()
						run(t, situation)
					})
				}
				if name != "optimistic" { // nobody has a version
					cell("somebody has the key", func(t *testing.T, cell string) {
						db, key := s.Handle(), dbtest.Random()
						ready(t, db)
						occupy(t, holders, name, key, opts)
						wantAnswer(t, cell, asks(t.Context(), db, key, brief), mysqllock.ErrTimeout, nil, "")
						wantAnswer(t, cell, asks(t.Context(), db, key, time.Nanosecond), mysqllock.ErrTimeout, nil, "")
						ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
						defer cancel()
						wantAnswer(t, cell+", its context ends", asks(ctx, db, key, time.Minute), mysqllock.ErrTimeout, context.DeadlineExceeded, "")
						err := asks(t.Context(), db, key, 0)
						if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) {
							t.Errorf("%s, without a wait: %v", cell, err)
						}
					})
				}
				for _, maxConns := range []int{0, 8} {
					cell(fmt.Sprintf("the server refuses connections, maxConns=%d", maxConns), func(t *testing.T, cell string) {
						db, proxy := s.Proxied(mysqllock.Config{MaxConns: maxConns})
						ready(t, db)
						proxy.TurnTo(deaf(t))
						proxy.Reset()
						wantAnswer(t, cell, asks(t.Context(), db, "k", brief), mysqllock.ErrNoAnswer, nil, "")
					})
					cell(fmt.Sprintf("the server is silent, maxConns=%d", maxConns), func(t *testing.T, cell string) {
						db, proxy := s.Proxied(mysqllock.Config{MaxConns: maxConns})
						ready(t, db)
						proxy.BlockAt("mysqllock")
						first := dbtest.Go(func() error { return asks(dbtest.Limited(t), db, "k", brief) })
						dbtest.Soon(t, "it is silent", proxy.Blocked)
						ctx, cancel := context.WithTimeout(t.Context(), 2*brief)
						defer cancel()
						if maxConns == 0 { // BeginTx waits for ever for database/sql to open a connection
							wantAnswer(t, cell+", behind another caller, its context ends", asks(ctx, db, "k", time.Minute), mysqllock.ErrNoAnswer, context.DeadlineExceeded, "")
						} else {
							wantAnswer(t, cell+", behind another caller", asks(dbtest.Limited(t), db, "k", brief), mysqllock.ErrNoAnswer, nil, "")
						}
						wantAnswer(t, cell, <-first, mysqllock.ErrNoAnswer, nil, "")
					})
					cell(fmt.Sprintf("the server ends each connection, maxConns=%d", maxConns), func(t *testing.T, cell string) {
						if name == "advisory" {
							return // it goes on with a lock connection, no text of which says mysqllock
						}
						db, proxy := s.Proxied(mysqllock.Config{MaxConns: maxConns})
						ready(t, db)
						proxy.CutAt("mysqllock")
						err := asks(dbtest.Limited(t), db, dbtest.Random(), 10*time.Second)
						if !strings.HasPrefix(name, "lease") && !errors.Is(err, mysqllock.ErrLost) { // what was granted is given back, or lost
							wantAnswer(t, cell, err, mysqllock.ErrNoAnswer, nil, "")
						}
					})
				}
				cell("the server refuses connections, a new handle", func(t *testing.T, cell string) {
					cfg := s.Config()
					cfg.Net, cfg.Addr = "tcp", deaf(t)
					err := asks(t.Context(), s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 8})), "k", brief)
					wantAnswer(t, cell, err, mysqllock.ErrNoAnswer, nil, "connection refused")
				})
				cell("the server never greets, a new handle", func(t *testing.T, cell string) {
					cfg := s.Config()
					cfg.Net = "tcp"
					cfg.Addr, _ = hole(t, "", false)
					db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 8}))
					wantAnswer(t, cell, asks(dbtest.Limited(t), db, "k", brief), mysqllock.ErrNoAnswer, nil, "")
					cfg = cfg.Clone()
					cfg.Timeout = brief
					db = s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 8}))
					wantAnswer(t, cell+", with a timeout in the DSN", asks(dbtest.Limited(t), db, "k", brief), mysqllock.ErrNoAnswer, nil, "")
				})
				cell("the account has no connection left on the server", func(t *testing.T, cell string) {
					dsn := s.LimitedDSN(t, 5)
					taken := make([]*sql.Conn, 5)
					others := dbtest.Open(t, "mysql", plainDSN(dsn))
					for i := range taken {
						taken[i] = dbtest.Conn(t, others)
					}
					db := dbtest.Open(t, "mysqllock", dsn)
					wantAnswer(t, cell, asks(dbtest.Limited(t), db, dbtest.Random(), brief), mysqllock.ErrExhausted, nil, "1226")
				})
				cell("all of maxConns is in use", func(t *testing.T, cell string) {
					db := s.Handle("maxConns=5")
					ready(t, db)
					if strings.HasPrefix(name, "lease") || name == "advisory" {
						return // they have a connection
					}
					for id := 100; ; id++ {
						ctx, cancel := context.WithCancel(dbtest.Limited(t))
						last := time.AfterFunc(2*time.Second, cancel)
						tx, err := db.BeginTx(ctx, nil)
						if err != nil {
							break
						}
						last.Stop()
						dbtest.Exec(t, tx, "UPDATE p SET stock = stock WHERE id = ?", id)
						defer tx.Rollback()
						defer cancel()
					}
					wantAnswer(t, cell, asks(t.Context(), db, dbtest.Random(), brief), mysqllock.ErrExhausted, nil, "maxConns")
				})
			}
		}
	})
}

// deaf is an address on which nobody listens.
func deaf(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	dbtest.OK(t, err)
	defer l.Close()
	return l.Addr().String()
}

// plainDSN is a DSN without the parameter of the driver's own.
func plainDSN(dsn string) string {
	dsn, _, _ = strings.Cut(dsn, "maxConns=")
	return strings.TrimRight(dsn, "?&")
}
