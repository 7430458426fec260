package sqlxshop

import (
	"context"
	"errors"

	"github.com/jmoiron/sqlx"

	"github.com/mysqllock/mysqllock"
)

// VersionedProduct is a product whose version is a column of its own table: no
// lock table takes part, and all who write it must change the version.
type VersionedProduct struct {
	ID      int
	Stock   int
	Version int
}

// SellByVersion sells one unit if nobody else has written the product since it
// was read, and begins again if somebody has.
func SellByVersion(ctx context.Context, db *sqlx.DB, product int) error {
	for {
		var p VersionedProduct
		if err := db.GetContext(ctx, &p, "SELECT id, stock, version FROM products WHERE id = ?", product); err != nil {
			return err
		}
		if p.Stock == 0 {
			return ErrSoldOut
		}
		p.Stock--
		err := mysqllock.Changed(db.NamedExecContext(ctx,
			"UPDATE products SET stock = :stock, version = version + 1 WHERE id = :id AND version = :version", p))
		if !errors.Is(err, mysqllock.ErrConflict) {
			return err
		}
	}
}
