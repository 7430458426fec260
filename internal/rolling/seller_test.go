package rolling

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// This file is all of the program that "make rolling" builds with an earlier version. It names only what that has, too.

// sellerVariable has the DSN for a child that is a seller.
const sellerVariable = "MYSQLLOCK_ROLLING_SELLER"

func TestMain(m *testing.M) {
	if dsn := os.Getenv(sellerVariable); dsn != "" {
		if err := runSeller(dsn); err != nil {
			fmt.Fprintln(os.Stderr, "seller:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// runSeller sells as its input says. For each line, "strategy n", it sells n pieces under a lock on the same key, in each way
// in turn, from several goroutines, and answers with a line that is empty, or an error.
func runSeller(dsn string) error {
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var strategy string
		var n int
		if _, err := fmt.Sscan(lines.Text(), &strategy, &n); err != nil {
			return err
		}
		answer := ""
		if err := sellAll(db, options[strategy], n); err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		fmt.Println(answer)
	}
	return nil
}

var options = map[string]lockctx.Option{
	"row": lockctx.Row(), "slots": lockctx.Slots(1), "lease": lockctx.Lease(15 * time.Second),
	"advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
}

// sellAll sells n pieces.
func sellAll(db *sql.DB, how lockctx.Option, n int) error {
	const sellers = 3
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	errs := make([]error, sellers)
	var all sync.WaitGroup
	for seller := range sellers {
		all.Go(func() {
			for i := seller; i < n; i += sellers {
				sell := ways[i/sellers%len(ways)]
				err := sell(ctx, db, how)
				for errors.Is(err, mysqllock.ErrConflict) {
					err = sell(ctx, db, how)
				}
				if err != nil {
					errs[seller] = fmt.Errorf("way %d: %w", i/sellers%len(ways), err)
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// ways are how a caller can lock while it sells a piece.
var ways = []func(ctx context.Context, db *sql.DB, how lockctx.Option) error{
	func(ctx context.Context, db *sql.DB, how lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(ctx, "stock", how), nil)
		if err != nil {
			return err
		}
		if err := sell(ctx, tx); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	},
	func(ctx context.Context, db *sql.DB, how lockctx.Option) error {
		ctx, cancel := context.WithCancel(ctx) // which gives the lock back, whatever fails
		defer cancel()
		return sell(lockctx.With(ctx, "stock", how), db)
	},
	func(ctx context.Context, db *sql.DB, how lockctx.Option) error {
		return mysqllock.Do(ctx, db, "stock", func(ctx context.Context) error { return sell(ctx, db) }, how)
	},
	func(ctx context.Context, db *sql.DB, how lockctx.Option) error {
		_, err := db.ExecContext(lockctx.With(ctx, "stock", how), "UPDATE stock SET n = n - 1")
		return err
	},
}

// handle is what a piece is sold over: a sql.DB, or a sql.Tx.
type handle interface {
	QueryRowContext(ctx context.Context, text string, args ...any) *sql.Row
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

// sell sells a piece by two statements: a piece that another caller sells between them is sold twice.
func sell(ctx context.Context, over handle) error {
	var n int
	if err := over.QueryRowContext(ctx, "SELECT n FROM stock").Scan(&n); err != nil {
		return err
	}
	_, err := over.ExecContext(ctx, "UPDATE stock SET n = ?", n-1)
	return err
}
