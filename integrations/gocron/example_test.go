package gocronlock_test

import (
	"database/sql"
	"fmt"
	"log"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/mysqllock/mysqllock"
	gocronlock "github.com/mysqllock/mysqllock/integrations/gocron"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

func Schedule(db *sql.DB, report func()) (gocron.Scheduler, error) {
	locker := gocronlock.NewLocker(db, gocronlock.MinHold(30*time.Second))
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	if err != nil {
		return nil, err
	}
	_, err = scheduler.NewJob(gocron.CronJob("0 4 * * *", false), gocron.NewTask(report), gocron.WithName("report"))
	return scheduler, err
}

// The locks are in memory here.
func Example() {
	db, err := mysqllocktest.New().Open(nil, mysqllock.Config{}) // sql.Open("mysqllock", dsn)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	done := make(chan struct{})
	scheduler, err := Schedule(db, func() {
		fmt.Println("the report is written")
		close(done)
	})
	if err != nil {
		log.Fatal(err)
	}
	scheduler.Start()
	if err := scheduler.Jobs()[0].RunNow(); err != nil { // not to wait until four
		log.Fatal(err)
	}
	<-done
	fmt.Println(scheduler.Shutdown())
	// Output:
	// the report is written
	// <nil>
}
