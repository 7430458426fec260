package drain

import (
	"context"
	"database/sql"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
)

var mySQL = entsql.Dialect(dialect.MySQL)

// SomeEnt is Some with ent. A generated client has the same with its features sql/lock and
// sql/execquery: tx.Task.Query().Where(…).ForUpdate(sql.WithLockAction(sql.SkipLocked)), and
// tx.ExecContext.
func SomeEnt(ctx context.Context, db *entsql.Driver, worker string, do func(tx dialect.Tx, id uint64) error) (n int, err error) {
	tx, err := db.BeginTx(ctx, readCommitted)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	tasks, err := todo(ctx, tx)
	if err != nil {
		return 0, err
	}
	for _, task := range tasks {
		if err := oneSQL(ctx, entTx{tx}, worker, task, func() error { return do(tx, task.ID) }); err != nil {
			return 0, err
		}
	}
	return len(tasks), tx.Commit()
}

// entTx has the ExecContext of a generated client.
type entTx struct{ dialect.Tx }

func (tx entTx) ExecContext(ctx context.Context, text string, args ...any) (res sql.Result, err error) {
	err = tx.Exec(ctx, text, args, &res)
	return res, err
}

func todo(ctx context.Context, tx dialect.Tx) (tasks []Task, err error) {
	text, args := mySQL.Select("id", "tries").From(entsql.Table("tasks")).Where(entsql.EQ("state", "new")).OrderBy("id").Limit(most).
		ForUpdate(entsql.WithLockAction(entsql.SkipLocked)).Query()
	var rows entsql.Rows
	if err := tx.Query(ctx, text, args, &rows); err != nil {
		return nil, err
	}
	defer rows.Close()
	err = entsql.ScanSlice(rows, &tasks)
	return tasks, err
}
