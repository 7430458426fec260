package drain

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/mysqldialect"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// quiet keeps remarks on slow statements off the output.
var quiet = &gorm.Config{Logger: logger.Discard}

func TestMain(m *testing.M) { testshop.Main(m, work) }

type some func(ctx context.Context, worker string, do func(id uint64) error) (int, error)

// tools are the ways to do some tasks.
var tools = map[string]func(dsn string) (some, error){
	"SQL": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do func(uint64) error) (int, error) {
			return SomeSQL(ctx, db, worker, do)
		}, err
	},
	"GORM": func(dsn string) (some, error) {
		db, err := Open(dsn, quiet)
		return func(ctx context.Context, worker string, do func(uint64) error) (int, error) {
			return Some(ctx, db, worker, do)
		}, err
	},
	"bun": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do func(uint64) error) (int, error) {
			return SomeBun(ctx, bun.NewDB(db, mysqldialect.New()), worker, do)
		}, err
	},
	"ent": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do func(uint64) error) (int, error) {
			return SomeEnt(ctx, entsql.OpenDB(dialect.MySQL, db), worker, do)
		}, err
	},
	"GORM, without the clause": func(dsn string) (some, error) {
		db, err := Open(dsn, quiet)
		if err == nil {
			err = db.Callback().Query().Before("gorm:query").Register("no lock", func(db *gorm.DB) { delete(db.Statement.Clauses, "FOR") })
		}
		return func(ctx context.Context, worker string, do func(uint64) error) (int, error) {
			return Some(ctx, db, worker, do)
		}, err
	},
}

// work drains the tasks with the tool and the DSN in args, and prints how many it has done.
func work(args ...string) error {
	some, err := tools[args[0]](args[1])
	if err != nil {
		return err
	}
	var sum int
	var mu sync.Mutex
	var all sync.WaitGroup
	errs := make(chan error, 4)
	for i := range 4 {
		all.Go(func() {
			n, err := All(func() (int, error) {
				return some(context.Background(), fmt.Sprintf("%d/%d", os.Getpid(), i), func(uint64) error { return nil })
			})
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

// TestDrain has 4 processes of 4 workers each drain tasks, with each tool.
func TestDrain(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, err := Open(shop.DSN, quiet)
		check(t, err)
		sqlDB, err := db.DB()
		check(t, err)
		t.Cleanup(func() { sqlDB.Close() })
		check(t, db.AutoMigrate(&Task{}))
		for tool := range tools {
			t.Run(tool, func(t *testing.T) {
				const tasks = 2000
				fill(t, db, tasks)
				start := time.Now()
				done := drain(t, tool, shop.DSN)
				var left int64
				check(t, db.Model(&Task{}).Where("state <> 'done'").Count(&left).Error)
				if left != 0 {
					t.Errorf("%d tasks are left", left)
				}
				if twice := done - tasks; tool == "GORM, without the clause" { // without this the rest would show nothing
					t.Logf("%d of %d tasks were done once more", twice, tasks)
					for try := 1; twice == 0 && try < 5; try++ { // one that begins late finds nothing left
						fill(t, db, tasks)
						twice = drain(t, tool, shop.DSN) - tasks
					}
					if twice == 0 {
						t.Error("the workers were not in each other's way")
					}
					return
				}
				var once, workers int64
				check(t, db.Model(&Task{}).Where("runs = 1").Count(&once).Error)
				check(t, db.Model(&Task{}).Distinct("worker").Count(&workers).Error)
				if once != tasks || done != tasks {
					t.Errorf("%d tasks were done once, and %d in all, want %d", once, done, tasks)
				}
				if workers < 2 {
					t.Errorf("%d workers did it all", workers)
				}
				t.Logf("%d tasks by %d workers in %v", tasks, workers, time.Since(start).Round(time.Millisecond))
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
func drain(t *testing.T, tool, dsn string) (sum int) {
	t.Helper()
	for _, printed := range testshop.Processes(t, 4, tool, dsn) {
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

type order struct {
	ID    uint64
	Items []item
}

type item struct{ ID, OrderID uint64 }

// TestSkipLockedLeavesOtherSelectsAlone: the clause is for the rows that are asked for, not for those
// that GORM loads beside them, so an order has all of its items although one of them is locked.
func TestSkipLockedLeavesOtherSelectsAlone(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, err := Open(shop.DSN, quiet)
		check(t, err)
		sqlDB, err := db.DB()
		check(t, err)
		t.Cleanup(func() { sqlDB.Close() })
		check(t, db.Migrator().DropTable("orders"))
		check(t, db.AutoMigrate(&order{}, &item{}))
		check(t, db.Create(&order{ID: 1, Items: []item{{ID: 1}, {ID: 2}, {ID: 3}}}).Error)
		other := db.Begin()
		defer other.Rollback()
		check(t, other.Clauses(clause.Locking{Strength: clause.LockingStrengthUpdate}).First(new(item), 2).Error)
		check(t, db.Transaction(func(tx *gorm.DB) error {
			var found []order
			err := tx.Clauses(clause.Locking{Strength: clause.LockingStrengthUpdate, Options: clause.LockingOptionsSkipLocked}).Preload("Items").Find(&found).Error
			if err == nil && (len(found) != 1 || len(found[0].Items) != 3) {
				err = fmt.Errorf("found %+v", found)
			}
			return err
		}))
	})
}
