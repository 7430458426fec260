package advisory_test

import (
	"context"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

var config strategy.Config // the pools, the queue, and what the server is

// To wait for a lock takes no more than a key and how long.
func ExampleLocker_Acquire() {
	locker := advisory.New(config)
	defer locker.Close()

	lock, err := locker.Acquire(context.Background(), advisory.Request{Key: "nightly-report", Wait: 10 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("running, with the lock on connection", lock.ConnectionID())
	if err := lock.Release(); err != nil {
		fmt.Println(err)
	}
}
