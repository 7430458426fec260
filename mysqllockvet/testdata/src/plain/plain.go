// Package plain uses database/sql and sqlx.
package plain

import (
	"context"
	"database/sql"
	"net/http"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/mysqllock/mysqllock/lockctx"
)

type Shop struct {
	db   *sql.DB
	x    *sqlx.DB
	logs *sql.DB
}

func noContext(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil {
		return err
	}
	_, err := db.Exec("UPDATE products SET stock = ?", stock-1) // want `Exec runs without the lock of line 22: it has no context; .*#no-context`
	return err
}

func readBefore(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := db.QueryRow("SELECT stock FROM products").Scan(&stock); err != nil { // want `QueryRow runs without the lock`
		return err
	}
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = ?", stock-1)
	return err
}

func outer(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil { // want `QueryRowContext runs without the lock of line 42: its context is from outside of the lock context; .*#outer-context`
		return err
	}
	_, err := db.ExecContext(locked, "UPDATE products SET stock = ?", stock-1)
	return err
}

func shadowed(ctx context.Context, s *Shop, ok bool) error {
	var stock int
	if ok {
		ctx := lockctx.With(ctx, "product:1")
		if err := s.db.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil {
			return err
		}
		_, err := s.db.ExecContext(ctx, "UPDATE products SET stock = 1")
		return err
	}
	_, err := s.db.ExecContext(ctx, "UPDATE products SET stock = 0") // the lock context is not there
	return err
}

func timeouts(ctx context.Context, s *Shop) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	locked := lockctx.With(ctx, "product:1")
	short, stop := context.WithTimeout(locked, time.Second)
	defer stop()
	other, end := context.WithTimeout(ctx, time.Second)
	defer end()
	if _, err := s.db.QueryContext(short, "SELECT stock FROM products"); err != nil {
		return err
	}
	if _, err := s.db.QueryContext(other, "SELECT stock FROM products"); err != nil { // want `QueryContext runs without the lock`
		return err
	}
	_, err := s.db.ExecContext(locked, "UPDATE products SET stock = 1")
	return err
}

func request(w http.ResponseWriter, r *http.Request, s *Shop) {
	ctx := lockctx.With(r.Context(), "product:1")
	s.db.QueryRowContext(r.Context(), "SELECT stock FROM products") // want `QueryRowContext runs without the lock`
	s.db.ExecContext(ctx, "UPDATE products SET stock = 1")
	s.db.ExecContext(context.Background(), "INSERT INTO log (text) VALUES ('sold')") // after the unit of work
}

func begin(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	tx, err := db.Begin() // want `the transaction of Begin runs without the lock of line 91: it has no context; use BeginTx .*#begin`
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.Exec("UPDATE products SET stock = 1"); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	return err
}

func beginOuter(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	tx, err := db.BeginTx(ctx, nil) // want `BeginTx runs without the lock`
	if err != nil {
		return err
	}
	tx.ExecContext(ctx, "UPDATE products SET stock = 1")
	tx.Commit()
	_, err = db.ExecContext(locked, "INSERT INTO orders VALUES (1)")
	return err
}

func besideTx(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	tx, err := db.BeginTx(locked, nil)
	if err != nil {
		db.ExecContext(ctx, "INSERT INTO failures VALUES (1)") // nothing is locked
		return err
	}
	defer tx.Rollback()
	if _, err := tx.Exec("UPDATE products SET stock = 1"); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, "INSERT INTO orders VALUES (1)"); err != nil { // want `ExecContext runs without the lock`
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, "INSERT INTO log VALUES (1)") // after the unit of work
	return err
}

func closures(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	read := func() error {
		_, err := s.db.QueryContext(ctx, "SELECT stock FROM products") // want `QueryContext runs without the lock`
		return err
	}
	if err := read(); err != nil {
		return err
	}
	return func() error {
		_, err := s.db.ExecContext(locked, "UPDATE products SET stock = 1")
		return err
	}()
}

func reassigned(ctx context.Context, s *Shop) error {
	ctx = lockctx.With(ctx, "product:1")
	read := func() error {
		_, err := s.db.QueryContext(ctx, "SELECT stock FROM products")
		return err
	}
	if err := read(); err != nil {
		return err
	}
	_, err := s.db.Exec("UPDATE products SET stock = 1") // want `Exec runs without the lock`
	return err
}

func methodValue(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	exec := s.db.ExecContext
	if _, err := s.db.QueryContext(locked, "SELECT stock FROM products"); err != nil {
		return err
	}
	_, err := exec(ctx, "UPDATE products SET stock = 1") // want `ExecContext runs without the lock`
	return err
}

func neverUsed(ctx context.Context, db *sql.DB, log func(context.Context)) {
	ctx = lockctx.With(ctx, "product:1")
	_ = ctx.Err()
	db.Exec("UPDATE products SET stock = 1") // want `Exec runs without the lock`
}

func otherDatabase(ctx context.Context, s *Shop) {
	locked := lockctx.With(ctx, "product:1")
	s.db.QueryRowContext(locked, "SELECT stock FROM products")
	s.logs.ExecContext(ctx, "INSERT INTO log VALUES (1)")
	s.db.ExecContext(locked, "UPDATE products SET stock = 1")
}

func meant(ctx context.Context, s *Shop) {
	locked := lockctx.With(ctx, "product:1")
	s.db.QueryRowContext(locked, "SELECT stock FROM products")
	s.db.ExecContext(lockctx.Without(ctx), "INSERT INTO log VALUES (1)")
	s.db.ExecContext(locked, "UPDATE products SET stock = 1")
}

func passedOn(ctx context.Context, s *Shop) error {
	locked := lockctx.With(ctx, "product:1")
	if err := reassigned(locked, s); err != nil {
		return err
	}
	_, err := s.db.ExecContext(ctx, "INSERT INTO log VALUES (1)") // the unit of work was there
	return err
}

func sometimes(ctx context.Context, s *Shop, lock bool) {
	if lock {
		ctx = lockctx.With(ctx, "product:1")
	}
	s.db.QueryRowContext(ctx, "SELECT stock FROM products")
	s.db.ExecContext(ctx, "UPDATE products SET stock = 1")
}

func eachItsOwn(ctx context.Context, s *Shop) {
	for range 3 {
		locked := lockctx.With(ctx, "product:1")
		s.db.QueryRowContext(locked, "SELECT stock FROM products")
		s.db.ExecContext(locked, "UPDATE products SET stock = 1")
		s.db.ExecContext(ctx, "INSERT INTO log VALUES (1)")
	}
}

func deferred(ctx context.Context, s *Shop) {
	locked := lockctx.With(ctx, "product:1")
	defer s.db.Exec("INSERT INTO log VALUES (1)")
	go s.db.ExecContext(ctx, "INSERT INTO log VALUES (2)")
	s.db.QueryRowContext(locked, "SELECT stock FROM products")
	s.db.ExecContext(locked, "UPDATE products SET stock = 1")
}

func withSqlx(ctx context.Context, s *Shop) {
	locked := lockctx.With(ctx, "product:1")
	var stock int
	s.x.Get(&stock, "SELECT stock FROM products")                 // want `Get runs without the lock`
	sqlx.Get(s.x, &stock, "SELECT stock FROM products")           // want `Get runs without the lock`
	sqlx.GetContext(ctx, s.x, &stock, "SELECT stock FROM prices") // want `GetContext runs without the lock`
	s.x.GetContext(locked, &stock, "SELECT stock FROM products")
	s.x.MustExec("UPDATE products SET stock = 1") // want `MustExec runs without the lock`
	s.x.Exec("UPDATE products SET stock = 1")     // want `Exec runs without the lock`
	tx := s.x.MustBegin()                         // want `the transaction of MustBegin runs without`
	tx.MustExec("UPDATE products SET stock = 1")
	tx.Commit()
	s.x.NamedExecContext(locked, "UPDATE products SET stock = 1", nil)
}

func prepared(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	read, err := db.PrepareContext(ctx, "SELECT stock FROM products")
	if err != nil {
		return err
	}
	defer read.Close()
	if _, err := read.Query(); err != nil { // want `Query runs without the lock`
		return err
	}
	_, err = db.ExecContext(locked, "UPDATE products SET stock = 1")
	return err
}

func connection(ctx context.Context, db *sql.DB) error {
	locked := lockctx.With(ctx, "product:1")
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.QueryContext(locked, "SELECT stock FROM products"); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, "UPDATE products SET stock = 1") // want `ExecContext runs without the lock`
	return err
}
