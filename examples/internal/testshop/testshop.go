// Package testshop gives the tests of the examples a shop to try them on.
package testshop

import (
	"context"
	"database/sql"
	"testing"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// Shop is a database with one product, whose id is 1, and its orders.
type Shop struct {
	DSN string // for "mysqllock" and "mysql" alike
	db  *sql.DB
}

// Run runs test on every server there is, each a throwaway with an empty shop.
func Run(t *testing.T, test func(*testing.T, *Shop)) {
	t.Helper()
	for _, b := range tempserver.Require(t) {
		t.Run(string(b.Flavour), func(t *testing.T) {
			// The tests crash no server, so a commit need not reach the disk.
			server, err := tempserver.Start(context.Background(), b, "--innodb-flush-log-at-trx-commit=0", "--sync-binlog=0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := server.Stop(); err != nil {
					t.Error(err)
				}
			})
			db, err := sql.Open("mysql", server.DSN(""))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			s := &Shop{DSN: server.DSN("shop"), db: db}
			s.exec(t, "CREATE DATABASE shop")
			s.exec(t, "CREATE TABLE shop.products (id BIGINT UNSIGNED PRIMARY KEY, stock INT NOT NULL)")
			s.exec(t, "CREATE TABLE shop.orders (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, product_id BIGINT UNSIGNED NOT NULL, buyer VARCHAR(40) NOT NULL)")
			test(t, s)
		})
	}
}

// Restock sets the product's stock and forgets all orders.
func (s *Shop) Restock(t *testing.T, stock int) {
	t.Helper()
	s.exec(t, "DELETE FROM shop.orders")
	s.exec(t, "REPLACE INTO shop.products (id, stock) VALUES (1, ?)", stock)
}

// Want fails the test unless the shop has this stock and this many orders.
func (s *Shop) Want(t *testing.T, stock, orders int) {
	t.Helper()
	if got := s.Stock(t); got != stock {
		t.Errorf("stock is %d, want %d", got, stock)
	}
	var got int
	if err := s.db.QueryRow("SELECT COUNT(*) FROM shop.orders").Scan(&got); err != nil {
		t.Fatal(err)
	}
	if got != orders {
		t.Errorf("there are %d orders, want %d", got, orders)
	}
}

// Stock is what is committed.
func (s *Shop) Stock(t *testing.T) (stock int) {
	t.Helper()
	if err := s.db.QueryRow("SELECT stock FROM shop.products WHERE id = 1").Scan(&stock); err != nil {
		t.Fatal(err)
	}
	return stock
}

func (s *Shop) exec(t *testing.T, text string, args ...any) {
	t.Helper()
	if _, err := s.db.Exec(text, args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}
