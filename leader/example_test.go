package leader_test

import (
	"context"
	"database/sql"
	"log"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/leader"
)

// What the example works with: db is opened with the driver "mysqllock".
var (
	db   *sql.DB
	plan func(context.Context) error
)

// The leader gives its leadership back when the process gets SIGTERM, so that another process
// leads at once, and not only after the TTL.
func ExampleRun() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := leader.Run(ctx, db, "planner", func(ctx context.Context) error {
		for {
			if err := plan(ctx); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Minute):
			}
		}
	})
	if err != nil {
		log.Print(err)
	}
}

func TestExampleGivesLeadershipBackAtSIGTERM(t *testing.T) {
	db = dbtest.One(t).Open("mysqllock")
	planned := 0
	plan = func(context.Context) error {
		planned++
		return syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}
	ExampleRun()
	left := dbtest.Column[int](t, db, "SELECT COUNT(*) FROM mysqllock WHERE owner IS NOT NULL")[0]
	if planned != 1 || left != 0 {
		t.Errorf("it planned %d times, and %d leases are left", planned, left)
	}
}
