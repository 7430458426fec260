package drain

import (
	"context"

	"github.com/uptrace/bun"
)

// SomeBun is Some with bun.
func SomeBun(ctx context.Context, db *bun.DB, worker string, do func(id uint64) error) (n int, err error) {
	err = db.RunInTx(ctx, readCommitted, func(ctx context.Context, tx bun.Tx) error {
		var ids []uint64
		if err := tx.NewSelect().Table("tasks").Column("id").Where("state = ?", "new").Order("id").Limit(most).
			For("UPDATE SKIP LOCKED").Scan(ctx, &ids); err != nil {
			return err
		}
		if n = len(ids); n == 0 {
			return nil
		}
		for _, id := range ids {
			if err := do(id); err != nil {
				return err
			}
		}
		_, err := tx.NewUpdate().Table("tasks").Set("state = 'done'").Set("worker = ?", worker).Set("runs = runs + 1").Where("id IN (?)", bun.List(ids)).Exec(ctx)
		return err
	})
	return n, err
}
