package cronlock_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/mysqllock/mysqllock"
	cronlock "github.com/mysqllock/mysqllock/integrations/cron"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

func Schedule(ctx context.Context, c *cron.Cron, db *sql.DB, report func(context.Context) error) error {
	job := cronlock.OnceFunc(ctx, db, "report", report,
		cronlock.AtLeast(30*time.Second), // longer than the clocks of the machines differ
		cronlock.AtMost(10*time.Minute),
		cronlock.OnError(func(err error) { log.Print(err) }))
	_, err := c.AddJob("@hourly", job)
	return err
}

// Two machines come to the same tick; their locks are in memory here.
func Example() {
	locks := mysqllocktest.New()
	for range 2 {
		db, err := locks.Open(nil, mysqllock.Config{}) // sql.Open("mysqllock", dsn)
		if err != nil {
			log.Fatal(err)
		}
		defer db.Close()
		c := cron.New()
		err = Schedule(context.Background(), c, db, func(context.Context) error {
			fmt.Println("the report is written")
			return nil
		})
		if err != nil {
			log.Fatal(err)
		}
		c.Entries()[0].Job.Run() // as Start does at the hour
	}
	// Output: the report is written
}
