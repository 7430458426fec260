package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

// openShop returns what sql.Open("mysqllock", dsn) does, on locks in memory, so that the examples run without a server.
// base is a database of sqlmock; nil for an example that only locks.
func openShop(base *sql.DB) *sql.DB {
	db, err := mysqllocktest.New().Open(base, mysqllock.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return db
}

// A Config has what the parameters of a DSN have, and what has no text, such as an Observer.
func ExampleNewConnector() {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd = "app", os.Getenv("DB_PASSWORD")
	cfg.Net, cfg.Addr, cfg.DBName = "tcp", "127.0.0.1:3306", "shop"
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 25, Wait: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	db := sql.OpenDB(connector) // connects at its first statement
	defer db.Close()

	fmt.Printf("%T\n", db.Driver())
	// Output: *mysqllock.Driver
}

// A lock that was lost is a line of level ERROR, and a wait of a second or longer one of level WARN.
func ExampleLogTo() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: only("level", "strategy", "keys")}))
	locks := mysqllocktest.New() // with a server: mysqllock.NewConnector, with the same Config
	db, err := locks.Open(nil, mysqllock.Config{Observer: mysqllock.LogTo(logger, time.Second)})
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	err = mysqllock.Do(context.Background(), db, "nightly-report", func(ctx context.Context) error {
		locks.Lose("nightly-report")
		<-ctx.Done()
		return nil
	}, lockctx.Lease(30*time.Second))
	fmt.Println(errors.Is(err, mysqllock.ErrLost))
	// Output:
	// level=ERROR strategy=lease keys=[nightly-report]
	// true
}

// only leaves out all other attributes.
func only(keep ...string) func([]string, slog.Attr) slog.Attr {
	return func(_ []string, a slog.Attr) slog.Attr {
		if strings.Contains(" "+strings.Join(keep, " ")+" ", " "+a.Key+" ") {
			return a
		}
		return slog.Attr{}
	}
}

func ExampleStats() {
	db := openShop(nil) // sql.Open("mysqllock", dsn)
	defer db.Close()
	hold, err := mysqllock.Acquire(context.Background(), db, "import")
	if err != nil {
		log.Fatal(err)
	}
	defer hold.Rollback()

	stats, err := mysqllock.Stats(db)
	if err != nil {
		log.Fatal(err) // db has another driver
	}
	fmt.Println(stats.InUse, "session in use,", stats.Waiters, "callers wait;", stats.OldestHold > 0)
	// Output: 1 session in use, 0 callers wait; true
}

// All keys are locked together, in an order that is the same for every caller: no two of them deadlock.
func ExampleDoKeys() {
	db := openShop(nil) // sql.Open("mysqllock", dsn)
	defer db.Close()

	err := mysqllock.DoKeys(context.Background(), db, []string{"account:7", "account:2"}, func(ctx context.Context) error {
		fmt.Println(lockctx.Has(ctx, "account:2"), lockctx.Has(ctx, "account:7"))
		return nil // after the two UPDATEs, with ctx
	})
	fmt.Println(err)
	// Output:
	// true true
	// <nil>
}

// A system outside of the database refuses a token that is smaller than the greatest that it has seen.
func ExampleToken() {
	db := openShop(nil) // sql.Open("mysqllock", dsn)
	defer db.Close()

	for range 2 {
		err := mysqllock.Do(context.Background(), db, "restock", func(ctx context.Context) error {
			token, ok := mysqllock.Token(ctx)
			fmt.Println(token, ok)
			return nil
		}, lockctx.Lease(30*time.Second))
		if err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 1 true
	// 2 true
}

// The version of what a form shows goes into the form, and comes back to lockctx.IfVersion.
func ExampleVersion() {
	base, mock, err := sqlmock.New()
	if err != nil {
		log.Fatal(err)
	}
	defer base.Close()
	mock.ExpectQuery("SELECT stock").WillReturnRows(sqlmock.NewRows([]string{"stock"}).AddRow(10))
	db := openShop(base) // sql.Open("mysqllock", dsn)
	defer db.Close()

	ctx := lockctx.With(context.Background(), "product:42", lockctx.Optimistic())
	_, before := mysqllock.Version(ctx) // no statement has run
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil {
		log.Fatal(err)
	}
	version, ok := mysqllock.Version(ctx)
	fmt.Println(before, ok, version > 0)
	// Output: false true true
}
