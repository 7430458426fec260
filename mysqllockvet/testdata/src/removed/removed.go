// Package removed has ways to lock that version 0.1 had.
package removed

import (
	"context"
	"database/sql"
	"net/http"
	"time"

	"github.com/jmoiron/sqlx"
	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/uptrace/bun"
	"gorm.io/gorm"
)

type Product struct{ ID, Stock int }

type Shop struct {
	db, logs *sql.DB
	x        *sqlx.DB
	gorm     *gorm.DB
	bun      *bun.DB
}

const update = "UPDATE products SET stock = 1"

func late(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	tx, err := db.BeginTx(ctx, nil) // reported where it asks for the lock
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(locked, update); err != nil { // want `ExecContext asks for the lock of line 29 in a transaction that began without it, on line 30, and fails with ErrUnsafe; begin the transaction with the lock context, .*#late`
		return err
	}
	tx.Exec(update)
	return tx.Commit()
}

func lateWithoutContext(ctx context.Context, db *sql.DB) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := tx.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil { // want `QueryRowContext asks for the lock of line 47`
		return err
	}
	return tx.Commit()
}

func request(w http.ResponseWriter, r *http.Request, s *Shop) {
	tx, err := s.x.BeginTxx(r.Context(), nil)
	if err != nil {
		return
	}
	var stock int
	tx.GetContext(lockctx.With(r.Context(), "product:1"), &stock, "SELECT stock FROM products") // want `GetContext asks for the lock`
	tx.Commit()
}

func under(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	var stock int
	if err := s.db.QueryRowContext(locked, "SELECT stock FROM products").Scan(&stock); err != nil {
		return err
	}
	tx, err := s.db.Begin()
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(locked, update); err != nil { // want `ExecContext asks for the lock`
		return err
	}
	return tx.Commit()
}

func underDo(ctx context.Context, s *Shop) error {
	return mysqllock.Do(ctx, s.db, "product:1", func(ctx context.Context) error {
		tx, err := s.db.Begin()
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, update); err != nil { // want `ExecContext asks for the lock of line 82`
			return err
		}
		return tx.Commit()
	})
}

func lateGorm(ctx context.Context, s *Shop) error {
	return s.gorm.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		return tx.WithContext(lockctx.With(ctx, "product:1")).Save(&Product{}).Error // want `Save asks for the lock of line 96 .* on line 95`
	})
}

func lateBun(ctx context.Context, s *Shop) error {
	return s.bun.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		_, err := tx.NewUpdate().Model(&Product{}).Exec(lockctx.With(ctx, "product:1")) // want `Exec asks for the lock`
		return err
	})
}

func lateInHelper(ctx context.Context, s *Shop) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	ctx = lockctx.With(ctx, "product:1")
	if err := s.reserve(ctx, tx); err != nil { // want `reserve asks for the lock of line \d+ in a transaction that began without it, on line \d+`
		return err
	}
	return tx.Commit()
}

func inTimeInHelper(ctx context.Context, s *Shop) error {
	ctx = lockctx.With(ctx, "product:1")
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := s.reserve(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}

func (s *Shop) reserve(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, update)
	return err
}

func lateInHelperOfGorm(ctx context.Context, s *Shop) error {
	return s.gorm.Transaction(func(tx *gorm.DB) error {
		return save(tx.WithContext(lockctx.With(ctx, "product:1"))) // want `save asks for the lock`
	})
}

func save(db *gorm.DB) error { return db.Save(&Product{}).Error }

func begunWithIt(ctx context.Context, s *Shop) error {
	ctx = lockctx.With(ctx, "product:1")
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if _, err := tx.ExecContext(short, update); err != nil {
		return err
	}
	if _, err := tx.ExecContext(lockctx.With(ctx, "product:2"), update); err != nil { // a second key
		return err
	}
	return tx.Commit()
}

func secondKey(ctx context.Context, s *Shop) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(lockctx.With(ctx, "product:2"), update); err != nil { // in the unit of its caller
		return err
	}
	return tx.Commit()
}

func callsSecondKey(ctx context.Context, s *Shop) error {
	return mysqllock.Do(ctx, s.db, "product:1", func(ctx context.Context) error { return secondKey(ctx, s) })
}

func begunBySomebody(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(lockctx.With(ctx, "product:1"), update)
	return err
}

func begunBySomebodyWithGorm(ctx context.Context, tx *gorm.DB) error {
	return tx.Transaction(func(inner *gorm.DB) error {
		return inner.WithContext(lockctx.With(ctx, "product:1")).Save(&Product{}).Error
	})
}

func sometimes(ctx context.Context, s *Shop, locked bool) error {
	if locked {
		ctx = lockctx.With(ctx, "product:1")
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	tx.ExecContext(ctx, update)
	return tx.Commit()
}

func otherDatabase(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	if _, err := s.db.ExecContext(locked, update); err != nil {
		return err
	}
	tx, err := s.logs.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	tx.ExecContext(locked, "INSERT INTO log VALUES (1)") // a server of another kind, perhaps
	return tx.Commit()
}

func wayOut(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	tx.ExecContext(lockctx.Without(locked), update)
	return tx.Commit()
}

func leftOnConn(ctx context.Context, s *Shop) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, "SET SESSION time_zone = '+00:00'"); err != nil {
		return err
	}
	locked := lockctx.With(ctx, "product:1")
	var stock int
	if err := conn.QueryRowContext(locked, "SELECT stock FROM products").Scan(&stock); err != nil { // want `QueryRowContext asks for the lock of line \d+ on a sql.Conn on which ExecContext on line \d+ has left something \(SET time_zone\), and fails with ErrUnsafe.*#left`
		return err
	}
	if err := conn.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil { // want `outside of the lock context`
		return err
	}
	if err := s.db.QueryRowContext(locked, "SELECT stock FROM products").Scan(&stock); err != nil {
		return err
	}
	_, err = conn.ExecContext(locked, update) // want `ExecContext asks for the lock`
	return err
}

func usesADatabase(ctx context.Context, s *Shop) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	conn.ExecContext(ctx, "USE tenant")
	tx, err := conn.BeginTx(lockctx.With(ctx, "product:1"), nil) // want `BeginTx asks for the lock .* \(use\)`
	if err != nil {
		return err
	}
	return tx.Commit()
}

func leavesNothing(ctx context.Context, s *Shop, other *sql.Conn) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	conn.ExecContext(ctx, "SET foreign_key_checks = 0")
	conn.ExecContext(ctx, "SET foreign_key_checks = 1")
	conn.ExecContext(ctx, "SET time_zone = DEFAULT")
	conn.ExecContext(ctx, "LOCK TABLES products WRITE")
	conn.ExecContext(ctx, "UNLOCK TABLES")
	conn.ExecContext(ctx, "SET @stock = 1")
	conn.ExecContext(ctx, "SET GLOBAL max_connections = 100")
	conn.ExecContext(ctx, "SET TRANSACTION READ ONLY")
	conn.ExecContext(ctx, "SELECT stock FROM products")
	other.ExecContext(ctx, "USE tenant")
	locked := lockctx.With(ctx, "product:1")
	_, err = conn.ExecContext(locked, update)
	conn.ExecContext(ctx, "CREATE TEMPORARY TABLE t (id INT)")
	conn.ExecContext(ctx, "DROP TEMPORARY TABLE t")
	return err
}

func claims(ctx context.Context, tx *sql.Tx) error {
	claim := lockctx.Claim(ctx, lockctx.SkipLocked()) // want `lockctx.Claim is gone: the driver changes no SELECT; .*#claims`
	if _, err := tx.QueryContext(claim, "SELECT id FROM tasks"); err != nil {
		return err
	}
	ctx = lockctx.With(ctx, "tasks",
		lockctx.ForUpdate(), // want `lockctx.ForUpdate is gone`
		lockctx.NoWait())
	opts := []lockctx.Option{lockctx.ForShare()} // want `lockctx.ForShare is gone`
	_, err := tx.QueryContext(lockctx.With(ctx, "others", opts...), "SELECT id FROM tasks")
	return err
}

func claim(ctx context.Context, ForUpdate string) string { return ForUpdate }

func beside(ctx context.Context, s *Shop, opts ...lockctx.Option) error {
	ctx = lockctx.With(ctx, "product:1", lockctx.Row())
	version := lockctx.With(ctx, "prices", lockctx.Optimistic()) // want `With asks for Optimistic in a lock context that has Row, by With on line \d+, .*#optimistic`
	if _, err := s.db.ExecContext(version, update); err != nil {
		return err
	}
	return mysqllock.Do(ctx, s.db, "report", func(ctx context.Context) error {
		_, err := s.db.ExecContext(lockctx.With(ctx, "prices", lockctx.IfVersion(7)), update) // want `With asks for Optimistic in a lock context that has Lease, by Do on line \d+`
		return err
	}, lockctx.Lease(time.Minute))
}

func besideVersion(ctx context.Context, s *Shop) error {
	version := lockctx.With(ctx, "prices", lockctx.Optimistic())
	_, err := s.db.ExecContext(lockctx.With(version, "product:1", lockctx.Shared()), update) // want `With asks for Shared in a lock context that has Optimistic`
	return err
}

func alike(ctx context.Context, s *Shop, opts ...lockctx.Option) {
	version := lockctx.With(ctx, "prices", lockctx.Optimistic())
	s.db.ExecContext(lockctx.With(version, "product:1", lockctx.Optimistic()), update)
	s.db.ExecContext(lockctx.With(version, "product:1"), update) // as the handle's lockStrategy says
	s.db.ExecContext(lockctx.With(version, "product:1", opts...), update)
	s.db.ExecContext(lockctx.With(lockctx.Without(version), "product:1", lockctx.Row()), update)
	s.db.ExecContext(lockctx.With(lockctx.With(ctx, "a", lockctx.Row()), "b", lockctx.Lease(time.Minute)), update)
}
