package unittest

import (
	"crypto/rand"
	"database/sql"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
)

// openServer returns a handle on a database of the test's own, on the server of SHOP_TEST_DSN.
func openServer(t *testing.T) *sql.DB {
	if os.Getenv("SHOP_TEST_DSN") == "" {
		t.Skip("no server: set SHOP_TEST_DSN")
	}
	root, err := sql.Open("mysql", os.Getenv("SHOP_TEST_DSN"))
	must(t, err)
	name := "test_" + strings.ToLower(rand.Text())
	_, err = root.Exec("CREATE DATABASE " + name)
	must(t, err)
	t.Cleanup(func() { root.Exec("DROP DATABASE " + name); root.Close() })

	cfg, err := mysql.ParseDSN(os.Getenv("SHOP_TEST_DSN"))
	must(t, err)
	cfg.DBName = name
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 20}) // the lock table is made there
	must(t, err)
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	return db
}

func TestOnAServer(t *testing.T) { testOnAServer(t) }

func testOnAServer(t *testing.T) {
	shop := &Shop{DB: openServer(t)}
	for _, text := range []string{"CREATE TABLE products (id INT PRIMARY KEY, stock INT)", "INSERT INTO products VALUES (42, 3)"} {
		_, err := shop.DB.ExecContext(t.Context(), text)
		must(t, err)
	}
	var sold atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			switch err := shop.Sell(t.Context(), 42); {
			case err == nil:
				sold.Add(1)
			case !errors.Is(err, ErrSoldOut):
				t.Error(err)
			}
		})
	}
	all.Wait()
	if sold.Load() != 3 {
		t.Errorf("%d were sold of 3", sold.Load())
	}
}
