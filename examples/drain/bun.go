package drain

import (
	"context"

	"github.com/uptrace/bun"
)

// SomeBun is Some with bun.
func SomeBun(ctx context.Context, db *bun.DB, worker string, do func(tx bun.Tx, id uint64) error) (n int, err error) {
	err = db.RunInTx(ctx, readCommitted, func(ctx context.Context, tx bun.Tx) error {
		var tasks []Task
		if err := tx.NewSelect().Table("tasks").Column("id", "tries").Where("state = ?", "new").Order("id").Limit(most).
			For("UPDATE SKIP LOCKED").Scan(ctx, &tasks); err != nil {
			return err
		}
		n = len(tasks)
		for _, task := range tasks {
			if err := oneSQL(ctx, tx, worker, task, func() error { return do(tx, task.ID) }); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}
