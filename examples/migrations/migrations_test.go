package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
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

// TestPodsMigrateANewSchemaTogether: four start at once, and another one finds nothing to do. A
// step that ran twice would fail.
func TestPodsMigrateANewSchemaTogether(t *testing.T) {
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

// TestTheToolRunsAloneUntilItsLockEnds: it is told to stop when the context of its lock ends.
func TestTheToolRunsAloneUntilItsLockEnds(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		t.Parallel()
		db, err := sql.Open("mysqllock", shop.LockDSN())
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		stop, stopped := make(chan bool, 1), errors.New("stopped")
		err = Up(ctx, db, func() error {
			if _, err := mysqllock.Acquire(context.Background(), db, "migrations", lockctx.Lease(time.Minute), lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("another pod: %v", err)
			}
			cancel()
			<-stop
			return stopped
		}, stop)
		if !errors.Is(err, stopped) {
			t.Error(err)
		}
	})
}
