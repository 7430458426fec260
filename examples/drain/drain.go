// Package drain has workers share a table of tasks, each of which is to be done once: with
// database/sql, GORM, bun and ent. The SELECT of a worker says FOR UPDATE SKIP LOCKED. It locks
// the tasks that it returns until the transaction ends, and leaves out those that others have
// locked. No key is locked.
//
// Under READ COMMITTED it locks these and nothing between them; under REPEATABLE READ workers
// would keep each other from changing the index on the state.
package drain

import (
	"context"
	"database/sql"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	_ "github.com/mysqllock/mysqllock" // the driver
)

// Task is something to be done.
type Task struct {
	ID     uint64
	State  string `gorm:"size:10;index:todo,priority:1"` // "new" or "done"
	Worker string `gorm:"size:40"`
	Runs   int    // how many times it was done
}

// most is how many tasks a worker takes at a time.
const most = 10

var readCommitted = &sql.TxOptions{Isolation: sql.LevelReadCommitted}

// All does tasks, some in a transaction, until none is left that nobody else is at.
func All(some func() (int, error)) (done int, err error) {
	for {
		n, err := some()
		if err != nil || n == 0 {
			return done, err
		}
		done += n
	}
}

// Open opens the database for GORM.
func Open(dsn string, opts ...gorm.Option) (*gorm.DB, error) {
	return gorm.Open(mysql.New(mysql.Config{DriverName: "mysqllock", DSN: dsn}), opts...)
}

// Some does some tasks in a transaction, with GORM.
func Some(ctx context.Context, db *gorm.DB, worker string, do func(id uint64) error) (n int, err error) {
	skipLocked := clause.Locking{Strength: clause.LockingStrengthUpdate, Options: clause.LockingOptionsSkipLocked}
	err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		var tasks []Task
		if err := tx.Clauses(skipLocked).Where("state = ?", "new").Order("id").Limit(most).Find(&tasks).Error; err != nil {
			return err
		}
		if n = len(tasks); n == 0 {
			return nil
		}
		for _, task := range tasks {
			if err := do(task.ID); err != nil {
				return err
			}
		}
		return tx.Model(&tasks).Updates(map[string]any{"state": "done", "worker": worker, "runs": gorm.Expr("runs + 1")}).Error
	}, readCommitted)
	return n, err
}
