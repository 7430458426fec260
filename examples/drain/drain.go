// Package drain has workers share a table of tasks, each of which is to be done once: with
// database/sql, GORM, bun and ent. The SELECT of a worker says FOR UPDATE SKIP LOCKED. It locks
// the tasks that it returns until the transaction ends, and leaves out those that others have
// locked. No key is locked.
//
// Under READ COMMITTED it locks these and nothing between them; under REPEATABLE READ workers
// would keep each other from changing the index on the state.
//
// Each task has a savepoint. A task that fails is undone alone, and is tried again: without the
// savepoint its transaction would fail, and with it the tasks before, again and again.
package drain

import (
	"context"
	"database/sql"
	"errors"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	_ "github.com/mysqllock/mysqllock" // the driver
)

// Task is something to be done.
type Task struct {
	ID     uint64
	State  string `gorm:"size:10;index:todo,priority:1"` // "new", "done" or "failed"
	Worker string `gorm:"size:40"`                       // that tried it last
	Tries  int
}

const (
	most      = 10 // tasks in a transaction
	mostTries = 3  // of a task
)

// afterFailure is the state of a task that has failed once more.
func (t Task) afterFailure() string {
	if t.Tries+1 < mostTries {
		return "new"
	}
	return "failed"
}

var readCommitted = &sql.TxOptions{Isolation: sql.LevelReadCommitted}

// All tries tasks, some in a transaction, until none is left that nobody else is at. After an
// error the transaction's tasks are as they were, and All can be called again.
func All(some func() (int, error)) (tried int, err error) {
	for {
		n, err := some()
		if err != nil || n == 0 {
			return tried, err
		}
		tried += n
	}
}

// Open opens the database for GORM.
func Open(dsn string, opts ...gorm.Option) (*gorm.DB, error) {
	return gorm.Open(mysql.New(mysql.Config{DriverName: "mysqllock", DSN: dsn}), opts...)
}

// Some tries some tasks in a transaction, with GORM. The function do writes by its tx, and says
// in a log why it fails. An error of Some is one of the transaction, not of a task.
func Some(ctx context.Context, db *gorm.DB, worker string, do func(tx *gorm.DB, id uint64) error) (n int, err error) {
	skipLocked := clause.Locking{Strength: clause.LockingStrengthUpdate, Options: clause.LockingOptionsSkipLocked}
	err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		var tasks []Task
		if err := tx.Clauses(skipLocked).Where("state = ?", "new").Order("id").Limit(most).Find(&tasks).Error; err != nil {
			return err
		}
		n = len(tasks)
		for _, task := range tasks {
			if err := one(tx, worker, task, do); err != nil {
				return err
			}
		}
		return nil
	}, readCommitted)
	return n, err
}

// one tries one task. It marks it done before the work, which no other worker then begins.
func one(tx *gorm.DB, worker string, task Task, do func(tx *gorm.DB, id uint64) error) error {
	mark := func(state string) *gorm.DB {
		return tx.Model(&Task{}).Where("id = ? AND state = ?", task.ID, "new").
			Updates(map[string]any{"state": state, "worker": worker, "tries": task.Tries + 1})
	}
	if err := tx.SavePoint("task").Error; err != nil {
		return err
	}
	if done := mark("done"); done.Error != nil || done.RowsAffected == 0 { // another worker has done it
		return done.Error
	}
	failure := do(tx, task.ID)
	if failure == nil {
		return nil
	}
	if err := tx.RollbackTo("task").Error; err != nil { // the transaction has ended, as after a deadlock
		return errors.Join(failure, err)
	}
	return mark(task.afterFailure()).Error
}
