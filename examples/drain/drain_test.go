package drain

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// quiet keeps remarks on slow statements off the output.
var quiet = &gorm.Config{Logger: logger.Discard}

func TestMain(m *testing.M) { testshop.Main(m, work) }

// work drains the tasks with the driver and the DSN in args, and prints how many it has done.
func work(args ...string) error {
	db, err := Open(args[0], args[1], quiet)
	if err != nil {
		return err
	}
	var sum int
	var mu sync.Mutex
	var all sync.WaitGroup
	errs := make(chan error, 4)
	for i := range 4 {
		all.Go(func() {
			n, err := Work(context.Background(), db, fmt.Sprintf("%d/%d", os.Getpid(), i), func(Task) error { return nil })
			mu.Lock()
			defer mu.Unlock()
			sum += n
			if err != nil {
				errs <- err
			}
		})
	}
	all.Wait()
	select {
	case err := <-errs:
		return err
	default:
	}
	_, err = fmt.Println(sum)
	return err
}

// TestDrain has 4 processes of 4 workers each drain 5,000 tasks.
func TestDrain(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, err := Open("mysql", shop.DSN, quiet)
		check(t, err)
		sqlDB, err := db.DB()
		check(t, err)
		t.Cleanup(func() { sqlDB.Close() })
		check(t, db.AutoMigrate(&Task{}))
		for _, c := range []struct {
			driver string
			tasks  int
		}{{"mysql", 1000}, {"mysqllock", 5000}} {
			t.Run(c.driver, func(t *testing.T) {
				fill(t, db, c.tasks)
				start := time.Now()
				done := drain(t, c.driver, shop.DSN)
				var left int64
				check(t, db.Model(&Task{}).Where("state <> 'done'").Count(&left).Error)
				if left != 0 {
					t.Errorf("%d tasks are left", left)
				}
				if twice := done - c.tasks; c.driver == "mysql" { // without this the rest would show nothing
					t.Logf("the driver mysql did %d of %d tasks once more", twice, c.tasks)
					for try := 1; twice == 0 && try < 5; try++ { // one that begins late finds nothing left
						fill(t, db, c.tasks)
						twice = drain(t, c.driver, shop.DSN) - c.tasks
					}
					if twice == 0 {
						t.Error("the workers were not in each other's way")
					}
					return
				}
				var once, workers int64
				check(t, db.Model(&Task{}).Where("runs = 1").Count(&once).Error)
				check(t, db.Model(&Task{}).Distinct("worker").Count(&workers).Error)
				if once != int64(c.tasks) || done != c.tasks {
					t.Errorf("%d tasks were done once, and %d in all, want %d", once, done, c.tasks)
				}
				if workers < 2 {
					t.Errorf("%d workers did it all", workers)
				}
				t.Logf("%d tasks by %d workers in %v", c.tasks, workers, time.Since(start).Round(time.Millisecond))
			})
		}
	})
}

func fill(t *testing.T, db *gorm.DB, n int) {
	t.Helper()
	check(t, db.Exec("DELETE FROM tasks").Error)
	tasks := make([]Task, n)
	for i := range tasks {
		tasks[i].State = "new"
	}
	check(t, db.CreateInBatches(tasks, 1000).Error)
}

// drain returns how many tasks the processes say they have done.
func drain(t *testing.T, driver, dsn string) (sum int) {
	t.Helper()
	for _, printed := range testshop.Processes(t, 4, driver, dsn) {
		n, err := strconv.Atoi(strings.TrimSpace(printed))
		check(t, err)
		sum += n
	}
	return sum
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
