package plain

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/mysqllock/mysqllock"
)

// Move moves units of stock from one product to another. DoKeys takes both locks or none, in one order everywhere, so
// that moves in both directions do not wait for each other in a circle.
func Move(ctx context.Context, db *sql.DB, from, to, units int) error {
	keys := []string{fmt.Sprintf("product:%d", from), fmt.Sprintf("product:%d", to)}
	return mysqllock.DoKeys(ctx, db, keys, func(ctx context.Context) error {
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", from).Scan(&stock); err != nil {
			return err
		}
		if stock < units {
			return ErrSoldOut
		}
		if _, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-units, from); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock + ? WHERE id = ?", units, to)
		return err
	})
}
