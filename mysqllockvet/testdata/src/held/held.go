// Package held uses Do and Acquire.
package held

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
	"gorm.io/gorm"
)

type Shop struct {
	db, logs *sql.DB
	gorm     *gorm.DB
}

func do(ctx context.Context, s *Shop) error {
	return mysqllock.Do(ctx, s.db, "product:1", func(locked context.Context) error {
		s.db.QueryRowContext(ctx, "SELECT stock FROM products") // want `QueryRowContext runs without the lock of line 19`
		s.logs.ExecContext(ctx, "INSERT INTO log VALUES (1)")
		tx, err := s.db.Begin() // want `the transaction of Begin runs without the lock`
		if err != nil {
			return err
		}
		tx.Exec("UPDATE products SET stock = 1")
		_, err = s.db.ExecContext(locked, "UPDATE products SET stock = 1")
		return err
	})
}

func doGorm(ctx context.Context, db *gorm.DB) error {
	pool, err := db.DB()
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, pool, "product:1", func(ctx context.Context) error {
		if err := db.Create(&struct{}{}).Error; err != nil { // want `Create runs without the lock .* WithContext`
			return err
		}
		return db.WithContext(ctx).Create(&struct{}{}).Error
	})
}

func doNamed(ctx context.Context, s *Shop) error { return mysqllock.Do(ctx, s.db, "product:1", s.body) }

func (s *Shop) body(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, "UPDATE products SET stock = 1")
	return err
}

func inside(ctx context.Context, s *Shop) error {
	return mysqllock.Do(ctx, s.db, "products", func(ctx context.Context) error {
		locked := lockctx.With(ctx, "product:1")
		s.db.QueryRowContext(ctx, "SELECT stock FROM products") // it has the lock of Do
		s.db.QueryRowContext(locked, "SELECT stock FROM products")
		s.db.ExecContext(locked, "UPDATE products SET stock = 1")
		_, err := s.db.ExecContext(locked, "UPDATE products SET stock = 2") // all of this is one transaction
		return err
	})
}

func acquire(ctx context.Context, s *Shop) error {
	hold, err := mysqllock.Acquire(ctx, s.db, "product:1")
	if err != nil {
		s.db.ExecContext(ctx, "INSERT INTO failures VALUES (1)") // nothing is locked
		return err
	}
	defer hold.Rollback()
	s.db.QueryRowContext(ctx, "SELECT stock FROM products") // want `QueryRowContext runs without the lock of line 64`
	s.db.ExecContext(hold.Context(), "UPDATE products SET stock = 1")
	if err := hold.Release(); err != nil {
		return err
	}
	_, err = s.db.ExecContext(ctx, "INSERT INTO log VALUES (1)") // after it
	return err
}

func doKeys(ctx context.Context, s *Shop) error {
	return mysqllock.DoKeys(ctx, s.db, []string{"a", "b"}, func(locked context.Context) error {
		_, err := s.db.ExecContext(ctx, "UPDATE products SET stock = 1") // want `ExecContext runs without the lock`
		return err
	}, lockctx.Retry(3))
}

func acquireKeys(ctx context.Context, s *Shop) error {
	hold, err := mysqllock.AcquireKeys(ctx, s.db, []string{"a", "b"}, lockctx.Retry(3)) // want `AcquireKeys cannot run anything again`
	if err != nil {
		return err
	}
	defer hold.Release()
	_, err = s.db.Exec("UPDATE products SET stock = 1") // want `Exec runs without the lock`
	return err
}
