// Package drain has workers share a table of tasks, each of which is to be done
// once. It is plain GORM, which has no word for SKIP LOCKED in it: the context
// says it.
package drain

import (
	"context"
	"database/sql"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"

	_ "github.com/mysqllock/mysqllock" // the driver
	"github.com/mysqllock/mysqllock/lockctx"
)

// Task is something to be done.
type Task struct {
	ID     uint64
	State  string `gorm:"size:10;index:todo,priority:1"` // "new" or "done"
	Worker string `gorm:"size:40"`
	Runs   int    // how many times it was done
}

// Open opens the database with the driver of that name: "mysqllock", or "mysql"
// to see what happens without.
func Open(driver, dsn string, opts ...gorm.Option) (*gorm.DB, error) {
	return gorm.Open(mysql.New(mysql.Config{DriverName: driver, DSN: dsn}), opts...)
}

// Work does tasks, 10 in a transaction, until none is left that nobody else is
// at. The SELECT locks the tasks that it returns and leaves out those that others
// have locked, so that each is done once.
//
// Under READ COMMITTED it locks these and nothing between them; under REPEATABLE
// READ workers would keep each other from changing the index on the state.
func Work(ctx context.Context, db *gorm.DB, worker string, do func(Task) error) (done int, err error) {
	for {
		n := 0
		err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			var tasks []Task
			claim := lockctx.Claim(ctx, lockctx.SkipLocked())
			if err := tx.WithContext(claim).Where("state = ?", "new").Order("id").Limit(10).Find(&tasks).Error; err != nil {
				return err
			}
			if n = len(tasks); n == 0 {
				return nil
			}
			for _, task := range tasks {
				if err := do(task); err != nil {
					return err
				}
			}
			return tx.Model(&tasks).Updates(map[string]any{"state": "done", "worker": worker, "runs": gorm.Expr("runs + 1")}).Error
		}, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil || n == 0 {
			return done, err
		}
		done += n
	}
}
