package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

func TestMain(m *testing.M) { testshop.Main(m, pod) }

// pod migrates, and then uses the schema, as a program does that has started.
func pod(args ...string) error {
	db, err := sql.Open("mysqllock", args[0])
	if err != nil {
		return err
	}
	if err := Migrate(context.Background(), db); err != nil {
		return err
	}
	if _, err := db.Exec("INSERT INTO customers (name, email) VALUES ('Ann', 'ann@example.com')"); err != nil {
		return fmt.Errorf("after the migration: %w", err)
	}
	return db.Close()
}

// TestMigrate: four pods that start at once migrate a new schema together, and another one finds
// nothing to do. A step that ran twice would fail.
func TestMigrate(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		t.Parallel()
		db, err := sql.Open("mysql", shop.DSN)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		for pods := 4; pods > 0; pods -= 3 {
			testshop.Processes(t, pods, shop.LockDSN())
		}
		var steps, customers int
		if err := db.QueryRow("SELECT (SELECT COUNT(*) FROM migrations), (SELECT COUNT(*) FROM customers)").Scan(&steps, &customers); err != nil {
			t.Fatal(err)
		}
		if steps != len(Steps) || customers != 5 {
			t.Errorf("%d steps and %d customers, want %d and 5", steps, customers, len(Steps))
		}
	})
}
