package drain

import (
	"context"
	"database/sql"
	"errors"
)

// SomeSQL is Some with database/sql.
func SomeSQL(ctx context.Context, db *sql.DB, worker string, do func(tx *sql.Tx, id uint64) error) (n int, err error) {
	tx, err := db.BeginTx(ctx, readCommitted)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	tasks, err := tasksOf(tx.QueryContext(ctx, "SELECT id, tries FROM tasks WHERE state = 'new'"+
		" ORDER BY id LIMIT ? FOR UPDATE SKIP LOCKED", most))
	if err != nil {
		return 0, err
	}
	for _, task := range tasks {
		if err := oneSQL(ctx, tx, worker, task, func() error { return do(tx, task.ID) }); err != nil {
			return 0, err
		}
	}
	return len(tasks), tx.Commit()
}

func tasksOf(rows *sql.Rows, err error) (tasks []Task, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var t Task
		if err := rows.Scan(&t.ID, &t.Tries); err != nil {
			return nil, err
		}
		tasks = append(tasks, t)
	}
	return tasks, rows.Err()
}

// execer is a transaction.
type execer interface {
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

// oneSQL is one for an execer.
func oneSQL(ctx context.Context, tx execer, worker string, task Task, do func() error) error {
	mark := func(state string) (rows int64, err error) {
		res, err := tx.ExecContext(ctx, "UPDATE tasks SET state = ?, worker = ?, tries = ? WHERE id = ? AND state = 'new'",
			state, worker, task.Tries+1, task.ID)
		if err != nil {
			return 0, err
		}
		return res.RowsAffected()
	}
	if _, err := tx.ExecContext(ctx, "SAVEPOINT task"); err != nil {
		return err
	}
	if rows, err := mark("done"); err != nil || rows == 0 { // another worker has done it
		return err
	}
	failure := do()
	if failure == nil {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT task"); err != nil { // the transaction has ended, as after a deadlock
		return errors.Join(failure, err)
	}
	_, err := mark(task.afterFailure())
	return err
}
