// Package unittest has a service that uses locks, and its tests: without a server, and on one
// in a container.
package unittest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut says that nothing is left.
var ErrSoldOut = errors.New("sold out")

// Shop is the service under test. It does not know of tests.
type Shop struct{ DB *sql.DB }

// Sell sells one of a product, in Do.
func (s *Shop) Sell(ctx context.Context, product int) error {
	return mysqllock.Do(ctx, s.DB, productKey(product), func(ctx context.Context) error {
		var stock int
		if err := s.DB.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", product).Scan(&stock); err != nil {
			return err
		}
		if stock == 0 {
			return ErrSoldOut
		}
		_, err := s.DB.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, product)
		return err
	})
}

// Restock adds to the stock of a product, in a transaction.
func (s *Shop) Restock(ctx context.Context, product, n int) error {
	ctx = lockctx.With(ctx, productKey(product))
	tx, err := s.DB.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock + ? WHERE id = ?", n, product); err != nil {
		return err
	}
	return tx.Commit()
}

// Report has count do work that takes long, under a lease, and stores what it returns.
func (s *Shop) Report(ctx context.Context, count func(context.Context) (int, error)) error {
	return mysqllock.Do(ctx, s.DB, "report", func(ctx context.Context) error {
		n, err := count(ctx)
		if err != nil {
			return err
		}
		_, err = s.DB.ExecContext(ctx, "INSERT INTO reports VALUES (?)", n)
		return err
	}, lockctx.Lease(30*time.Second))
}

func productKey(id int) string { return fmt.Sprintf("product:%d", id) }
