// Package plain uses mysqllock with database/sql and nothing else.
package plain

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Open opens the shop. The DSN is that of github.com/go-sql-driver/mysql, with maxConns=25
// or so for all connections together: then leave SetMaxOpenConns alone.
func Open(dsn string) (*sql.DB, error) {
	return sql.Open("mysqllock", dsn)
}

// OpenLogged opens the shop, and logs locks that were lost and those that somebody
// has waited for more than a second for.
func OpenLogged(dsn string, logger *slog.Logger) (*sql.DB, error) {
	base, locks, err := mysqllock.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	locks.Observer = mysqllock.LogTo(logger, time.Second)
	locks.LongHold = time.Minute
	locks.SlowWait = time.Second // as LogTo
	connector, err := mysqllock.NewConnector(base, locks)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

// Sell sells one unit in a transaction. The lock is taken as it begins, and
// goes with COMMIT or ROLLBACK.
func Sell(ctx context.Context, db *sql.DB, product int) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	var stock int
	if err := tx.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", product).Scan(&stock); err != nil {
		return err
	}
	if stock == 0 {
		return ErrSoldOut
	}
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, product); err != nil {
		return err
	}
	return tx.Commit()
}

// SellWithoutTransaction reads, decides and writes once. The read takes the lock, the write
// commits and releases it; another write would need another read. If nothing is written, the
// lock goes when the context ends: that is what cancel is for.
func SellWithoutTransaction(ctx context.Context, db *sql.DB, product int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))

	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", product).Scan(&stock); err != nil {
		return err
	}
	if stock == 0 {
		return ErrSoldOut
	}
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, product)
	return err
}

// SellTooMuch writes twice after one read, and so it fails: the first write gives the
// lock back, and others may have sold the product before the second.
func SellTooMuch(ctx context.Context, db *sql.DB, product int, buyer string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))

	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", product).Scan(&stock); err != nil { // takes the lock
		return err
	}
	// This commits, and gives the lock back.
	if _, err := db.ExecContext(ctx, "INSERT INTO orders (product_id, buyer) VALUES (?, ?)", product, buyer); err != nil {
		return err
	}
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, product)
	return err // ErrStaleRead: others may have changed the stock since it was read
}

// Stocktaking is a job that must not run twice at a time, wherever it is
// started. All that it does is one transaction: an error, or a panic, undoes it.
func Stocktaking(ctx context.Context, db *sql.DB, product int, count func() (int, error)) error {
	return mysqllock.Do(ctx, db, "stocktaking", func(ctx context.Context) error {
		if _, err := db.ExecContext(ctx, "DELETE FROM orders WHERE product_id = ?", product); err != nil {
			return err
		}
		stock, err := count()
		if err != nil {
			return err
		}
		_, err = db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock, product)
		return err
	}, lockctx.NoWait())
}

// Restock orders from a supplier, which takes longer than a transaction should.
// Its lease is renewed meanwhile; each write commits by itself, as long as the
// lease is ours.
func Restock(
	ctx context.Context, db *sql.DB, products []int, order func(ctx context.Context, product int, token uint64) (int, error),
) error {
	return mysqllock.Do(ctx, db, "restock", func(ctx context.Context) error {
		token, _ := mysqllock.Token(ctx) // grows with each grant: the supplier refuses an older one
		for _, product := range products {
			units, err := order(ctx, product, token) // may take minutes
			if err != nil {
				return err
			}
			if _, err := db.ExecContext(ctx, "UPDATE products SET stock = stock + ? WHERE id = ?", units, product); err != nil {
				return err // ErrLost where somebody else may have the lease by now
			}
		}
		return nil
	}, lockctx.Lease(30*time.Second))
}

// Page shows who holds locks and who waits, beside the application's pprof. Close it
// with the server.
func Page(mux *http.ServeMux, db *sql.DB) (*web.Handler, error) {
	i, err := inspect.New(db, inspect.Options{})
	if err != nil {
		return nil, err
	}
	page := web.New(i, web.Options{}) // this machine only, and nothing can be released
	mux.Handle("/debug/locks/", page)
	return page, nil
}

// Busy says who has the lock that a caller did not get. For other errors, and
// for nil, it says nothing.
func Busy(err error) string {
	var e *mysqllock.Error
	if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked) {
		return ""
	}
	who := "someone"
	if e.Holder != nil {
		who = e.Holder.String() // host, process, connection id, since when
	}
	if errors.Is(err, mysqllock.ErrTimeout) {
		return fmt.Sprintf("%s still has %q after %v", who, e.Key, e.Waited.Round(time.Millisecond))
	}
	return fmt.Sprintf("%s has %q", who, e.Key) // with lockctx.NoWait
}
