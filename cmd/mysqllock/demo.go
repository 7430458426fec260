//go:build unix

package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// demo is what the command of that name shows: more buyers than seats.
type demo struct {
	at     *target
	out    io.Writer
	seats  int
	buyers int    // half of them on each of two handles, as in two processes
	table  string // of the seats; the name of the lock table begins with it
}

func newDemo(at *target) *cobra.Command {
	d := &demo{at: at, seats: 60, buyers: 8}
	return &cobra.Command{
		Use:   "demo",
		Short: "Show a race, and how a lock ends it, in a few seconds",
		Long: `demo sells seats twice, with the same code: eight buyers read how many are left,
pay, and write one less; first without a lock, then with one.

With --dsn that happens on the server named there, in a table and a lock table of
its own in that database, which it drops afterwards. The account needs CREATE and
DROP. Other tables, a lock table too, are not touched. Without --dsn it starts a
throwaway server of the MySQL or MariaDB that is installed on this machine.`,
		Example: `  mysqllock demo
  mysqllock demo --dsn 'app:secret@tcp(127.0.0.1:3306)/test'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			d.out = c.OutOrStdout()
			if at.dsn != "" {
				return d.show(c.Context())
			}
			return d.onThrowaway(c.Context())
		},
	}
}

func (d *demo) onThrowaway(ctx context.Context) (err error) {
	found := tempserver.Find()
	if len(found) == 0 {
		return errors.New("no MySQL or MariaDB is installed on this machine: name a server with --dsn")
	}
	server, err := tempserver.Start(ctx, found[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	fmt.Fprintf(d.out, "On a throwaway server, %s.\n", found[0])
	d.at.dsn = server.DSN("mysql")
	return d.show(ctx)
}

func (d *demo) show(ctx context.Context) (err error) {
	d.table = "mysqllock_demo_" + strings.ToLower(rand.Text()[:8])
	db, err := d.open()
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "CREATE TABLE "+d.table+" (id INT PRIMARY KEY, seats INT NOT NULL) ENGINE=InnoDB"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.drop(context.WithoutCancel(ctx), db)) }()
	fmt.Fprintf(d.out, `
%d seats, %d buyers. Each of them, until none is left:

	SELECT seats FROM shows WHERE id = 1
	-- pays, which takes 1 ms
	UPDATE shows SET seats = ? WHERE id = 1   -- one less

`, d.seats, d.buyers)
	c := coloursFor(d.out)
	without, err := d.sell(ctx, func(ctx context.Context) context.Context { return ctx })
	if err != nil {
		return err
	}
	line := "without a lock: " + without.String()
	if without.sold > d.seats {
		line = c.red(line)
	}
	fmt.Fprintln(d.out, line)
	with, err := d.sell(ctx, func(ctx context.Context) context.Context { return lockctx.With(ctx, "show:1") })
	if err != nil {
		return err
	}
	fmt.Fprintln(d.out, c.green("with a lock:    "+with.String()))
	if with.sold != d.seats {
		return fmt.Errorf("%d seats were sold under the lock, of %d", with.sold, d.seats)
	}
	fmt.Fprint(d.out, `
The difference is one line before the SELECT:

	ctx = lockctx.With(ctx, "show:1")

That is enough for one write. For more than one, and in most programs, use mysqllock.Do.
`)
	return nil
}

// open opens a handle whose locks are kept in the demo's own table, whatever the DSN says
// of locks.
func (d *demo) open() (*sql.DB, error) {
	return d.at.open(func(locks *mysqllock.Config) {
		*locks = mysqllock.Config{Table: d.lockTable(), Namespace: "mysqllock-demo", MaxConns: 25}
	})
}

func (d *demo) lockTable() string { return d.table + "_lock" }

// drop drops all that the demo has made.
func (d *demo) drop(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err := db.ExecContext(ctx, "DROP TABLE IF EXISTS "+d.table+", "+d.lockTable())
	return err
}

// sales is what came of one run.
type sales struct {
	seats, sold int
	took        time.Duration
	waits       []time.Duration // for the SELECT
}

func (s sales) String() string {
	verdict := "exact"
	if s.sold > s.seats {
		verdict = fmt.Sprintf("%d too many", s.sold-s.seats)
	}
	slices.Sort(s.waits)
	return fmt.Sprintf("%3d seats sold of %d, %s; %.1f s, median wait for the SELECT %.1f ms",
		s.sold, s.seats, verdict, s.took.Seconds(), ms(s.waits[len(s.waits)/2]))
}

// sell has the buyers buy, each purchase in the context that under makes.
func (d *demo) sell(ctx context.Context, under func(context.Context) context.Context) (sales, error) {
	s := sales{seats: d.seats}
	handles := make([]*sql.DB, 2)
	for i := range handles {
		db, err := d.open()
		if err != nil {
			return s, err
		}
		defer db.Close()
		handles[i] = db
	}
	if _, err := handles[0].ExecContext(ctx, "REPLACE INTO "+d.table+" VALUES (1, ?)", d.seats); err != nil {
		return s, err
	}
	var (
		mu     sync.Mutex
		errs   []error
		buyers sync.WaitGroup
	)
	begin := time.Now()
	for i := range d.buyers {
		buyers.Go(func() {
			for {
				sold, wait, err := d.buy(ctx, handles[i%2], under)
				mu.Lock()
				s.waits = append(s.waits, wait)
				if sold {
					s.sold++
				}
				if err != nil {
					errs = append(errs, err)
				}
				mu.Unlock()
				if !sold {
					return
				}
			}
		})
	}
	buyers.Wait()
	s.took = time.Since(begin)
	return s, errors.Join(errs...)
}

func (d *demo) buy(
	ctx context.Context, db *sql.DB, under func(context.Context) context.Context,
) (sold bool, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	ctx = under(ctx)
	var seats int
	begin := time.Now()
	err = db.QueryRowContext(ctx, "SELECT seats FROM "+d.table+" WHERE id = 1").Scan(&seats)
	wait = time.Since(begin)
	if err != nil || seats <= 0 {
		return false, wait, err
	}
	time.Sleep(time.Millisecond) // pays
	_, err = db.ExecContext(ctx, "UPDATE "+d.table+" SET seats = ? WHERE id = 1", seats-1)
	return err == nil, wait, err
}
