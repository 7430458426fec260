package drain

import (
	"context"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
)

var mySQL = entsql.Dialect(dialect.MySQL)

// SomeEnt is Some with ent. A generated client has the same with its feature sql/lock:
// tx.Task.Query().Where(…).ForUpdate(sql.WithLockAction(sql.SkipLocked)).
func SomeEnt(ctx context.Context, db *entsql.Driver, worker string, do func(id uint64) error) (n int, err error) {
	tx, err := db.BeginTx(ctx, readCommitted)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	ids, err := todo(ctx, tx)
	if err != nil {
		return 0, err
	}
	for _, id := range ids {
		if err := do(id); err != nil {
			return 0, err
		}
		text, args := mySQL.Update("tasks").Set("state", "done").Set("worker", worker).Add("runs", 1).Where(entsql.EQ("id", id)).Query()
		if err := tx.Exec(ctx, text, args, nil); err != nil {
			return 0, err
		}
	}
	return len(ids), tx.Commit()
}

func todo(ctx context.Context, tx dialect.Tx) (ids []uint64, err error) {
	text, args := mySQL.Select("id").From(entsql.Table("tasks")).Where(entsql.EQ("state", "new")).OrderBy("id").Limit(most).
		ForUpdate(entsql.WithLockAction(entsql.SkipLocked)).Query()
	var rows entsql.Rows
	if err := tx.Query(ctx, text, args, &rows); err != nil {
		return nil, err
	}
	defer rows.Close()
	err = entsql.ScanSlice(rows, &ids)
	return ids, err
}
