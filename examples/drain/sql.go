package drain

import (
	"context"
	"database/sql"
)

// SomeSQL is Some with database/sql.
func SomeSQL(ctx context.Context, db *sql.DB, worker string, do func(id uint64) error) (n int, err error) {
	tx, err := db.BeginTx(ctx, readCommitted)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	ids, err := idsOf(tx.QueryContext(ctx, "SELECT id FROM tasks WHERE state = 'new' ORDER BY id LIMIT ? FOR UPDATE SKIP LOCKED", most))
	if err != nil {
		return 0, err
	}
	for _, id := range ids {
		if err := do(id); err != nil {
			return 0, err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE tasks SET state = 'done', worker = ?, runs = runs + 1 WHERE id = ?", worker, id); err != nil {
			return 0, err
		}
	}
	return len(ids), tx.Commit()
}

func idsOf(rows *sql.Rows, err error) (ids []uint64, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id uint64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
