// Command oversold shows a shop that sells more than it has, and the same shop
// under a lock.
//
//	go run ./oversold
//
// Eight buyers in two processes buy one product, one unit at a time, with
// ordinary GORM code: they read the stock, pay, and write the stock back. With
// the driver "mysql" they oversell. With the driver "mysqllock" and one line,
// lockctx.With, they do not; nor with SELECT … FOR UPDATE by hand, for which the
// read has to move into the transaction. The code is in shop.go.
//
// It starts throwaway servers of what is installed; -dsn names one that runs,
// where it makes a database of its own and drops it again. The exit code is
// not 0 when a run under a lock was not exact, or when the plain one did not
// oversell.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// runLimit bounds what happens on one server.
const runLimit = time.Minute

type options struct {
	server    string
	dsn       string
	units     int
	processes int
	buyers    int // per process
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) > 1 && os.Args[1] == asBuyers {
		err = runBuyers(ctx, os.Args[2:])
	} else {
		err = demonstrate(ctx, os.Args[1:])
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "oversold:", err)
		stop()
		os.Exit(1)
	}
}

func demonstrate(ctx context.Context, args []string) error {
	var o options
	flags := flag.NewFlagSet("oversold", flag.ContinueOnError)
	flags.StringVar(&o.server, "server", "all", "`flavour` of throwaway server to start: mysql, mariadb or all that are installed")
	flags.StringVar(&o.dsn, "dsn", "", "use this server instead; a `DSN` of github.com/go-sql-driver/mysql")
	flags.IntVar(&o.units, "units", 100, "units to sell")
	flags.IntVar(&o.processes, "processes", 2, "processes of buyers")
	flags.IntVar(&o.buyers, "buyers", 4, "buyers in each process")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.units < 1 || o.processes < 1 || o.buyers < 1 || o.processes*o.buyers < 2 {
		return errors.New("-units, -processes and -buyers must be at least 1, and two must want the same")
	}

	fmt.Printf("%d units of one product, %d buyers in %d processes. Each buyer reads the stock (First),\n",
		o.units, o.processes*o.buyers, o.processes)
	fmt.Println("pays for 1-3 ms, writes the stock back (Save) and inserts an order, until it reads 0.")
	fmt.Println("With mysqllock the code is the same as with mysql, but for the name of the driver and one line:")
	fmt.Printf("\n  ctx = lockctx.With(ctx, %q)\n\n", productKey)
	fmt.Println("FOR UPDATE by hand is other code: First moves into the transaction, and says so.")
	if o.dsn != "" {
		return o.onServer(ctx, o.dsn, false)
	}
	binaries, err := installed(o.server)
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range binaries {
		if err := o.onThrowaway(ctx, b); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", b, err))
		}
	}
	return errors.Join(errs...)
}

func installed(server string) (chosen []tempserver.Binary, err error) {
	switch server {
	case "mysql", "mariadb", "all":
	default:
		return nil, fmt.Errorf("-server is %q, want mysql, mariadb or all", server)
	}
	for _, b := range tempserver.EachFlavour(tempserver.Find()) {
		if server == "all" || strings.EqualFold(server, string(b.Flavour)) {
			chosen = append(chosen, b)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no server found for -server %s; make demo installs them (Debian or Ubuntu, as root),"+
			" -dsn names one that runs", server)
	}
	return chosen, nil
}

func (o options) onThrowaway(ctx context.Context, b tempserver.Binary) (err error) {
	server, err := tempserver.Start(ctx, b)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	return o.onServer(ctx, server.DSN(""), true)
}

// onServer runs the demonstration in a new database. throwaway means that the server has
// no others.
func (o options) onServer(ctx context.Context, dsn string, throwaway bool) (err error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	config, err := mysql.ParseDSN(dsn)
	if err != nil {
		return fmt.Errorf("-dsn: %w", err)
	}
	server, err := sql.Open("mysql", dsn)
	if err != nil {
		return err
	}
	defer server.Close()
	var version string
	if err := server.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
		return err
	}
	flavour := "MySQL"
	if number, _, ok := strings.Cut(version, "-MariaDB"); ok {
		flavour, version = "MariaDB", number
	}
	fmt.Printf("\n%s %s\n\n", flavour, version)

	config.DBName = "shop"
	if !throwaway {
		config.DBName = fmt.Sprintf("oversold_%d", time.Now().UnixMicro())
	}
	s := shop{options: o, server: server, database: config.DBName, dsn: config.FormatDSN()}
	if err := s.build(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.tearDown()) }()

	var results []result
	var verdicts []error
	for _, how := range []way{unlocked, forUpdate, locked} {
		r, err := s.sell(ctx, how)
		if err != nil {
			return err
		}
		results = append(results, r)
		if v := r.verdict(); v != "" {
			verdicts = append(verdicts, errors.New(v))
		}
	}
	table(os.Stdout, painter(os.Stdout), results)
	fmt.Println("\n  A wait is how long First took; with a lock it includes the queue.")
	fmt.Println("  What First has read is good for one transaction after it. In most programs the read belongs into that," +
		" or into mysqllock.Do.")
	return errors.Join(append(verdicts, s.showSQL(ctx))...)
}

// shop is the database of one demonstration.
type shop struct {
	options
	server   *sql.DB
	database string
	dsn      string // of the database
}

func (s shop) build(ctx context.Context) error {
	for _, text := range []string{
		"CREATE DATABASE " + s.database,
		"CREATE TABLE " + s.database + ".products (id BIGINT UNSIGNED PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB",
		"CREATE TABLE " + s.database + ".orders (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY," +
			" product_id BIGINT UNSIGNED NOT NULL, buyer VARCHAR(40) NOT NULL) ENGINE=InnoDB",
	} {
		if _, err := s.server.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("%s: %w", text, err)
		}
	}
	return nil
}

// tearDown also works after an interrupt.
func (s shop) tearDown() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := s.server.ExecContext(ctx, "DROP DATABASE IF EXISTS "+s.database)
	return err
}

// restock fills the shelf and forgets all orders.
func (s shop) restock(ctx context.Context) error {
	if _, err := s.server.ExecContext(ctx, "TRUNCATE TABLE "+s.database+".orders"); err != nil {
		return err
	}
	_, err := s.server.ExecContext(ctx, "REPLACE INTO "+s.database+".products (id, stock) VALUES (?, ?)", productID, s.units)
	return err
}

// sell sells everything, in one of the ways.
func (s shop) sell(ctx context.Context, how way) (result, error) {
	r := result{how: how, units: s.units}
	if err := s.restock(ctx); err != nil {
		return r, err
	}
	var err error
	if r.tally, err = rush(ctx, how, s.dsn, s.processes, s.buyers); err != nil {
		return r, err
	}
	err = s.server.QueryRowContext(ctx, "SELECT (SELECT COUNT(*) FROM "+s.database+".orders), (SELECT stock FROM "+
		s.database+".products WHERE id = ?)", productID).Scan(&r.orders, &r.stock)
	return r, err
}

// showSQL prints what the server gets for one purchase with and without lock.
func (s shop) showSQL(ctx context.Context) error {
	var seen [2][]string
	for i, how := range []way{unlocked, locked} {
		w := new(wiretap)
		pool, err := w.open(s.dsn, how == locked)
		if err != nil {
			return err
		}
		defer pool.Close()
		db, err := openShopOn(pool)
		if err != nil {
			return err
		}
		one := func() error {
			_, err := purchase(ctx, db, how, "a buyer")
			return err
		}
		if err := s.restock(ctx); err != nil {
			return err
		}
		if err := one(); err != nil { // the first one also opens connections and sets them up
			return err
		}
		if err := s.restock(ctx); err != nil {
			return err
		}
		if seen[i], err = w.listen(one); err != nil {
			return err
		}
	}
	p := painter(os.Stdout)
	fmt.Println("\n  One purchase, as it goes to the server: what mysqllock adds (+) and needs no more (-).")
	fmt.Println()
	for _, line := range compare(seen[0], seen[1]) {
		switch line[0] {
		case '+':
			fmt.Println("  " + p.green(line))
			if note := readable(line); note != "" {
				fmt.Println("      " + p.dim(note))
			}
		default:
			fmt.Println("  " + line)
		}
	}
	return nil
}
