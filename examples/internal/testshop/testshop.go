// Package testshop gives the tests of the examples a shop to try them on.
package testshop

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// Shop is a database with one product, whose id is 1, and its orders.
type Shop struct {
	DSN  string // for "mysqllock" and "mysql" alike
	name string
	db   *sql.DB
}

// LockDSN is the DSN for "mysqllock" with one bound for all connections, as a program in
// production has it.
func (s *Shop) LockDSN() string { return s.DSN + "?maxConns=25" }

// Run runs test on a server of each flavour, each a throwaway with an empty shop.
func Run(t *testing.T, test func(*testing.T, *Shop)) {
	t.Helper()
	for _, b := range tempserver.EachFlavour(tempserver.Require(t)) {
		t.Run(b.Name, func(t *testing.T) {
			s, stop, err := open(b)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := stop(); err != nil {
					t.Error(err)
				}
			})
			test(t, s)
		})
	}
}

// Show runs an example on one server, with an empty shop, and prints its error.
func Show(example func(*Shop) error) {
	found, err := tempserver.ForTests()
	if err == nil && len(found) == 0 {
		err = errors.New("there is no server")
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	s, stop, err := open(found[0])
	if err == nil {
		err = errors.Join(example(s), stop())
	}
	if err != nil {
		fmt.Println(err)
	}
}

// open starts a server with an empty shop.
func open(b tempserver.Binary) (_ *Shop, stop func() error, err error) {
	// The tests crash no server, so a commit need not reach the disk.
	server, err := tempserver.Start(context.Background(), b, "--innodb-flush-log-at-trx-commit=0", "--sync-binlog=0")
	if err != nil {
		return nil, nil, err
	}
	shop := "shop_" + strings.ToLower(rand.Text()[:8]) // the server may have others
	db, err := sql.Open("mysql", server.DSN(""))
	for _, text := range []string{
		"CREATE DATABASE " + shop,
		"CREATE TABLE " + shop + ".products (id BIGINT UNSIGNED PRIMARY KEY, stock INT NOT NULL, version BIGINT UNSIGNED NOT NULL DEFAULT 1)",
		"CREATE TABLE " + shop + ".orders (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, product_id BIGINT UNSIGNED NOT NULL," +
			" buyer VARCHAR(40) NOT NULL)",
		"CREATE TABLE " + shop + ".events (id VARBINARY(200) PRIMARY KEY)",
	} {
		if err == nil {
			_, err = db.Exec(text)
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, server.Stop())
	}
	stop = func() error {
		_, err := db.Exec("DROP DATABASE " + shop)
		return errors.Join(err, db.Close(), server.Stop())
	}
	return &Shop{DSN: server.DSN(shop), name: shop, db: db}, stop, nil
}

// Restock sets the product's stock and forgets all orders.
func (s *Shop) Restock(t *testing.T, stock int) {
	t.Helper()
	s.exec(t, "DELETE FROM "+s.name+".orders")
	s.exec(t, "REPLACE INTO "+s.name+".products (id, stock) VALUES (1, ?)", stock)
}

// Want fails the test unless the shop has this stock and this many orders.
func (s *Shop) Want(t *testing.T, stock, orders int) {
	t.Helper()
	if got := s.Stock(t); got != stock {
		t.Errorf("stock is %d, want %d", got, stock)
	}
	var got int
	if err := s.db.QueryRow("SELECT COUNT(*) FROM " + s.name + ".orders").Scan(&got); err != nil {
		t.Fatal(err)
	}
	if got != orders {
		t.Errorf("there are %d orders, want %d", got, orders)
	}
}

// Stock is what is committed.
func (s *Shop) Stock(t *testing.T) (stock int) {
	t.Helper()
	if err := s.db.QueryRow("SELECT stock FROM " + s.name + ".products WHERE id = 1").Scan(&stock); err != nil {
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
