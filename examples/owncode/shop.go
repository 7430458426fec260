// Package owncode shows how to test code of one's own that takes locks.
package owncode

import (
	"context"
	"fmt"

	"github.com/mysqllock/mysqllock/lockctx"
)

// Store is what the shop needs of its database.
type Store interface {
	Stock(ctx context.Context, product int) (int, error)
	SetStock(ctx context.Context, product, stock int) error
}

// Return puts one unit back.
func Return(ctx context.Context, store Store, product int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	stock, err := store.Stock(ctx, product)
	if err != nil {
		return err
	}
	return store.SetStock(ctx, product, stock+1)
}
