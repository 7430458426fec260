package leader_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/leader"
	"github.com/mysqllock/mysqllock/mysqllocktest"
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

// Of a leadership others are told when it begins, and when it ends.
func ExampleOnChange() {
	db, err := mysqllocktest.New().Open(nil, mysqllock.Config{}) // sql.Open("mysqllock", dsn)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	ctx, stop := context.WithCancel(context.Background())
	err = leader.Run(ctx, db, "planner", func(ctx context.Context) error {
		stop()
		<-ctx.Done()
		return nil
	}, leader.OnChange(func(c leader.Change) {
		fmt.Println("leads:", c.Leads, "token:", c.Token)
	}))
	fmt.Println(err)
	// Output:
	// leads: true token: 1
	// leads: false token: 1
	// <nil>
}

// Any program can ask who leads.
func ExampleCurrent() {
	inspector, err := inspect.New(db, inspect.Options{})
	if err != nil {
		log.Fatal(err)
	}
	leads, ok, err := leader.Current(context.Background(), inspector, "planner")
	if err != nil {
		log.Fatal(err)
	}
	if ok {
		fmt.Println(leads.Program, "leads with token", leads.Token)
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
	ExampleCurrent()
	left := dbtest.Column[int](t, db, "SELECT COUNT(*) FROM mysqllock WHERE owner IS NOT NULL")[0]
	if planned != 1 || left != 0 {
		t.Errorf("it planned %d times, and %d leases are left", planned, left)
	}
}
