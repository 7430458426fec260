package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// benchNamespace keeps the keys of bench from all others. They are always the
// same, so that it leaves a few rows behind, however often it runs.
const benchNamespace = "mysqllock-bench"

func newBench(at *target) *cobra.Command {
	var each time.Duration
	var asJSON bool
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure what a lock costs on the server",
		Long: `bench takes a lock that nobody else wants and gives it back, again and again, one
at a time, with each strategy, and counts what goes to the server and how long it
takes. It uses few connections and a namespace of its own, ` + benchNamespace + `, of
which three rows stay in the lock table. Each row of the result takes --for long.

With --json it is a list of "what", "n", "round_trips", "median_ms" and "p99_ms".`,
		Example: `  mysqllock bench --for 3s`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if each < 10*time.Millisecond || each > time.Minute {
				return fmt.Errorf("--for is %v, want 10ms to 1m", each)
			}
			figures, err := measureAll(c.Context(), at, each)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(c.OutOrStdout(), figures)
			}
			printFigures(c.OutOrStdout(), figures)
			return nil
		},
	}
	c.Flags().DurationVar(&each, "for", time.Second, "for how long to measure each")
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	return c
}

// figure is the measurement of one way to lock.
type figure struct {
	What   string  `json:"what"`
	N      int     `json:"n"` // how often it was done
	Trips  float64 `json:"round_trips"`
	Median float64 `json:"median_ms"`
	P99    float64 `json:"p99_ms"`
}

func measureAll(ctx context.Context, at *target, each time.Duration) ([]figure, error) {
	cfg, locks, err := at.configs()
	if err != nil {
		return nil, err
	}
	var trips atomic.Int64
	countTrips(cfg, &trips)
	locks.Namespace, locks.Stripes = benchNamespace, 0
	connector, err := mysqllock.NewConnector(cfg, locks)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxIdleConns(2)

	transaction := func(opts ...lockctx.Option) func(context.Context) error {
		return func(ctx context.Context) error {
			if len(opts) > 0 {
				ctx = lockctx.With(ctx, "transaction", opts...)
			}
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, "DO 0"); err != nil { // counts as a write, and does nothing
				return errors.Join(err, tx.Rollback())
			}
			return tx.Commit()
		}
	}
	hold := func(key string, option lockctx.Option) func(context.Context) error {
		return func(ctx context.Context) error {
			h, err := mysqllock.Acquire(ctx, db, key, option)
			if err != nil {
				return err
			}
			return h.Release()
		}
	}
	var out []figure
	for _, one := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"ping", db.PingContext},
		{"transaction of one statement, no lock", transaction()},
		{"the same under a row lock", transaction(lockctx.Row())},
		{"the same, optimistic", transaction(lockctx.Optimistic())},
		{"Acquire and Release, row", hold("transaction", lockctx.Row())},
		{"Acquire and Release, lease", hold("lease", lockctx.Lease(30*time.Second))},
		{"Acquire and Release, advisory", hold("advisory", lockctx.Advisory())},
	} {
		f, err := measure(ctx, each, &trips, one.do)
		if err != nil && !errors.Is(err, mysqllock.ErrUnsafe) {
			return nil, fmt.Errorf("%s: %w", one.what, err)
		}
		if err == nil { // what is not safe here has no figures: doctor says why
			f.What = one.what
			out = append(out, f)
		}
	}
	return out, nil
}

// measure does it for that long. The first time, which may connect and make rows,
// is not counted.
func measure(ctx context.Context, each time.Duration, trips *atomic.Int64, do func(context.Context) error) (figure, error) {
	if err := do(ctx); err != nil {
		return figure{}, err
	}
	before, begin := trips.Load(), time.Now()
	var took []time.Duration
	for time.Since(begin) < each {
		start := time.Now()
		if err := do(ctx); err != nil {
			return figure{}, err
		}
		took = append(took, time.Since(start))
	}
	n := len(took)
	slices.Sort(took)
	return figure{
		N: n, Trips: float64(trips.Load()-before) / float64(n), Median: ms(took[n/2]), P99: ms(took[min(n-1, n*99/100)]),
	}, nil
}

func printFigures(w io.Writer, figures []figure) {
	rows := [][]string{{"WHAT", "ROUND TRIPS", "MEDIAN", "99 %", "TIMES"}}
	for _, f := range figures {
		rows = append(rows, []string{
			f.What, fmt.Sprintf("%.1f", f.Trips), fmt.Sprintf("%.2f ms", f.Median), fmt.Sprintf("%.2f ms", f.P99), fmt.Sprint(f.N),
		})
	}
	table(w, coloursFor(w), rows, nil)
}

// countTrips has the connections of cfg count how often something is sent and
// then waited for.
func countTrips(cfg *mysql.Config, trips *atomic.Int64) {
	var d net.Dialer
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := d.DialContext(ctx, network, addr)
		return &countingConn{Conn: conn, trips: trips}, err
	}
}

// countingConn counts round trips. A connection is used by one goroutine at a time.
type countingConn struct {
	net.Conn
	trips *atomic.Int64
	sent  atomic.Bool // something that was not answered yet
}

func (c *countingConn) Write(b []byte) (int, error) {
	c.sent.Store(true)
	return c.Conn.Write(b)
}

func (c *countingConn) Read(b []byte) (int, error) {
	if c.sent.Swap(false) {
		c.trips.Add(1)
	}
	return c.Conn.Read(b)
}
