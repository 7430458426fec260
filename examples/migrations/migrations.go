// Package migrations changes the schema from one of several pods that start at the same time; the
// others wait until it has done.
package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Steps are the versions of the schema, in order. A step is added, and none is changed.
var Steps = []string{
	"CREATE TABLE customers (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, name VARCHAR(100) NOT NULL)",
	"ALTER TABLE customers ADD COLUMN email VARCHAR(200)",
	"CREATE INDEX by_email ON customers (email)",
}

// Migrate runs the steps that are missing. DDL commits by itself, so it runs under a lease, which
// needs no transaction: the driver checks the lease before each statement, and has the server stop
// one whose lease is lost. The wait is longer than the longest step.
//
// A pod that dies between a step and its row in the table leaves a step that is done and not
// written down, as with every tool for MySQL: the next one fails with "already exists", and a
// person looks at it.
func Migrate(ctx context.Context, db *sql.DB) error {
	return mysqllock.Do(ctx, db, "migrations", func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS migrations (step INT UNSIGNED PRIMARY KEY,"+
			" done TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP)")
		if err != nil {
			return err
		}
		var done int
		if err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM migrations").Scan(&done); err != nil {
			return err
		}
		for step := done; step < len(Steps); step++ {
			if _, err := db.ExecContext(ctx, Steps[step]); err != nil {
				return fmt.Errorf("step %d: %w", step+1, err)
			}
			if _, err := db.ExecContext(ctx, "INSERT INTO migrations (step) VALUES (?)", step+1); err != nil {
				return fmt.Errorf("step %d is done and not written down: %w", step+1, err)
			}
		}
		return nil
	}, lockctx.Lease(30*time.Second), lockctx.Wait(time.Hour))
}

// Up runs a tool that takes no context, such as golang-migrate: up and stop are the Up and the
// GracefulStop of its Migrate, which ends after the step that runs if the lock is lost.
func Up(ctx context.Context, db *sql.DB, up func() error, stop chan<- bool) error {
	return mysqllock.Do(ctx, db, "migrations", func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { stop <- true })()
		return up()
	}, lockctx.Lease(30*time.Second), lockctx.Wait(time.Hour))
}
