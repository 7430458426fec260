package drain

import (
	"context"
	"database/sql"
	"errors"
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

func TestMain(m *testing.M) { testshop.Main(m, drainAll) }

// exec runs a statement in the transaction of a task.
type exec func(text string, args ...any) error

// work does a task, in the transaction of exec.
type work func(exec exec, id uint64) error

type some func(ctx context.Context, worker string, do work) (int, error)

// tools are the ways to try some tasks.
var tools = map[string]func(dsn string) (some, error){
	"SQL": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do work) (int, error) {
			return SomeSQL(ctx, db, worker, func(tx *sql.Tx, id uint64) error { return do(execOf(ctx, tx), id) })
		}, err
	},
	"GORM": func(dsn string) (some, error) {
		db, err := Open(dsn, quiet)
		return someGORM(db), err
	},
	"GORM, prepared": func(dsn string) (some, error) {
		db, err := Open(dsn, &gorm.Config{PrepareStmt: true, Logger: logger.Discard})
		return someGORM(db), err
	},
	"bun": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do work) (int, error) {
			return SomeBun(ctx, bun.NewDB(db, mysqldialect.New()), worker, func(tx bun.Tx, id uint64) error { return do(execOf(ctx, tx), id) })
		}, err
	},
	"ent": func(dsn string) (some, error) {
		db, err := sql.Open("mysqllock", dsn)
		return func(ctx context.Context, worker string, do work) (int, error) {
			return SomeEnt(ctx, entsql.OpenDB(dialect.MySQL, db), worker, func(tx dialect.Tx, id uint64) error {
				return do(func(text string, args ...any) error { return tx.Exec(ctx, text, args, nil) }, id)
			})
		}, err
	},
	withoutClause: func(dsn string) (some, error) {
		db, err := Open(dsn, quiet)
		if err == nil {
			err = db.Callback().Query().Before("gorm:query").Register("no lock", func(db *gorm.DB) { delete(db.Statement.Clauses, "FOR") })
		}
		return someGORM(db), err
	},
}

// withoutClause is a tool whose workers get the same tasks, as on TiDB.
const withoutClause = "GORM, without the clause"

func someGORM(db *gorm.DB) some {
	return func(ctx context.Context, worker string, do work) (int, error) {
		return Some(ctx, db, worker, func(tx *gorm.DB, id uint64) error {
			return do(func(text string, args ...any) error { return tx.Exec(text, args...).Error }, id)
		})
	}
}

func execOf(ctx context.Context, tx execer) exec {
	return func(text string, args ...any) error {
		_, err := tx.ExecContext(ctx, text, args...)
		return err
	}
}

// result is what the work on a task leaves.
type result struct{ ID, TaskID uint64 }

func leaveResult(exec exec, id uint64) error {
	return exec("INSERT INTO results (task_id) VALUES (?)", id)
}

// drainAll drains the tasks with the tool and the DSN in args, and prints how many it has tried.
func drainAll(args ...string) error {
	some, err := tools[args[0]](args[1])
	if err != nil {
		return err
	}
	n, err := drain(4, strconv.Itoa(os.Getpid()), some, leaveResult)
	if err != nil {
		return err
	}
	_, err = fmt.Println(n)
	return err
}

// drain has workers drain the tasks, and returns how many they have tried.
func drain(workers int, name string, some some, do work) (sum int, err error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			n, failed := All(func() (int, error) { return some(context.Background(), fmt.Sprintf("%s/%d", name, i), do) })
			mu.Lock()
			defer mu.Unlock()
			sum += n
			err = errors.Join(err, failed)
		})
	}
	all.Wait()
	return sum, err
}

// board is the table of tasks.
type board struct {
	shop *testshop.Shop
	db   *gorm.DB
}

// onTools runs a test with each tool on each server.
func onTools(t *testing.T, test func(t *testing.T, b board, tool string)) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, err := Open(shop.DSN, quiet)
		check(t, err)
		closeLater(t, db)
		check(t, db.AutoMigrate(&Task{}, &result{}))
		for tool := range tools {
			t.Run(tool, func(t *testing.T) { test(t, board{shop, db}, tool) })
		}
	})
}

// fill has n new tasks, from 1 on.
func (b board) fill(t *testing.T, n int) {
	t.Helper()
	check(t, b.db.Exec("DELETE FROM results").Error)
	check(t, b.db.Exec("DELETE FROM tasks").Error)
	tasks := make([]Task, n)
	for i := range tasks {
		tasks[i].ID, tasks[i].State = uint64(i+1), "new"
	}
	check(t, b.db.CreateInBatches(tasks, 1000).Error)
}

// want fails the test unless each task is done at the first try and has one result. Others says of
// which tasks that does not hold: their state, tries and results.
func (b board) want(t *testing.T, others map[uint64]string) {
	t.Helper()
	var found []struct {
		Task
		Results int
	}
	check(t, b.db.Table("tasks").Select("tasks.*, (SELECT COUNT(*) FROM results WHERE task_id = tasks.id) AS results").Find(&found).Error)
	for _, f := range found {
		want, ok := others[f.ID]
		if !ok {
			want = "done 1 1"
		}
		if got := fmt.Sprintf("%s %d %d", f.State, f.Tries, f.Results); got != want {
			t.Errorf("task %d: state, tries and results are %s, want %s", f.ID, got, want)
		}
	}
}

// TestWorkersDrainEachTaskOnce: there are 4 processes of 4 workers each, with each tool.
func TestWorkersDrainEachTaskOnce(t *testing.T) {
	onTools(t, func(t *testing.T, b board, tool string) {
		const tasks = 600
		b.fill(t, tasks)
		start := time.Now()
		tried := b.processes(t, tool)
		b.want(t, nil)
		if tool == withoutClause { // without this the rest would show nothing
			for more := 1; tried == tasks && more < 5; more++ { // one that begins late finds nothing left
				b.fill(t, tasks)
				tried = b.processes(t, tool)
				b.want(t, nil)
			}
			if tried == tasks {
				t.Error("the workers were not in each other's way")
			}
			t.Logf("%d of %d tasks were found once more, and left alone", tried-tasks, tasks)
			return
		}
		var workers int64
		check(t, b.db.Model(&Task{}).Distinct("worker").Count(&workers).Error)
		if tried != tasks || workers < 2 {
			t.Errorf("%d workers have tried %d tasks, want %d", workers, tried, tasks)
		}
		t.Logf("%d tasks by %d workers in %v", tasks, workers, time.Since(start).Round(time.Millisecond))
	})
}

// processes returns how many tasks the processes say they have tried.
func (b board) processes(t *testing.T, tool string) (sum int) {
	t.Helper()
	for _, printed := range testshop.Processes(t, 4, tool, b.shop.DSN) {
		n, err := strconv.Atoi(strings.TrimSpace(printed))
		check(t, err)
		sum += n
	}
	return sum
}

// TestATaskThatAlwaysFailsIsGivenUp, and one that fails once is done. The others are run once.
func TestATaskThatAlwaysFailsIsGivenUp(t *testing.T) {
	const poison, once = 7, 15
	onTools(t, func(t *testing.T, b board, tool string) {
		if tool == withoutClause {
			t.Skip("its workers wait for each other, and then leave a failed task to the next batch")
		}
		b.fill(t, 40)
		some, err := tools[tool](b.shop.DSN)
		check(t, err)
		var mu sync.Mutex
		runs := make(map[uint64]int)
		_, err = drain(4, "w", some, func(exec exec, id uint64) error {
			mu.Lock()
			runs[id]++
			run := runs[id]
			mu.Unlock()
			if err := leaveResult(exec, id); err != nil {
				return err
			}
			if id == poison || id == once && run == 1 {
				return exec("INSERT INTO results (id) VALUES (NULL), ('no number')")
			}
			return nil
		})
		check(t, err)
		b.want(t, map[uint64]string{poison: "failed 3 0", once: "done 2 1"})
		for id := range uint64(40) {
			if want := map[uint64]int{poison: mostTries, once: 2}[id+1]; runs[id+1] != max(want, 1) {
				t.Errorf("task %d was run %d times, want %d", id+1, runs[id+1], max(want, 1))
			}
		}
	})
}

// TestAWorkerThatCrashesHasTriedNothing: its transaction ends in the middle, and other workers do its tasks.
func TestAWorkerThatCrashesHasTriedNothing(t *testing.T) {
	crashes := map[string]func(b board, exec exec, cancel func()) error{
		"its connection is killed": func(_ board, exec exec, _ func()) error { return exec("KILL CONNECTION_ID()") },
		"its context ends": func(_ board, _ exec, cancel func()) error {
			cancel()
			return errors.New("told to stop")
		},
		"a deadlock": deadlock,
	}
	onTools(t, func(t *testing.T, b board, tool string) {
		if tool == withoutClause {
			t.Skip("its workers wait for each other")
		}
		for how, crash := range crashes {
			t.Run(how, func(t *testing.T) {
				const tasks, crashesAt = 30, 5
				b.fill(t, tasks)
				some, err := tools[tool](b.shop.DSN)
				check(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				n, err := some(ctx, "crashes", func(exec exec, id uint64) error {
					if err := leaveResult(exec, id); err != nil || id != crashesAt {
						return err
					}
					if n, err := drain(2, "meanwhile", some, leaveResult); err != nil || n != tasks-most {
						t.Errorf("the others have tried %d tasks: %v", n, err)
					}
					return crash(b, exec, cancel)
				})
				if err == nil {
					t.Fatalf("nothing failed, and %d tasks were tried", n)
				}
				left := 0 // they are skipped until the server has rolled back what it has killed
				for until := time.Now().Add(30 * time.Second); left < most && time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
					n, err = drain(2, "after", some, leaveResult)
					check(t, err)
					left += n
				}
				if left != most {
					t.Errorf("%d tasks were left, want %d", left, most)
				}
				b.want(t, nil)
			})
		}
	})
}

// deadlock has the server roll back the transaction of exec: it has changed fewer rows than the other.
func deadlock(b board, exec exec, _ func()) error {
	other := b.db.Begin(readCommitted)
	defer other.Rollback()
	if err := other.Exec("REPLACE INTO products (id, stock) SELECT id, 1 FROM tasks").Error; err != nil {
		return err
	}
	if err := exec("INSERT INTO events (id) VALUES ('deadlock')"); err != nil {
		return err
	}
	waits := make(chan error)
	go func() { waits <- other.Exec("INSERT INTO events (id) VALUES ('deadlock')").Error }()
	err := exec("UPDATE products SET stock = 2 WHERE id = 1")
	if err := <-waits; err != nil {
		return fmt.Errorf("the other transaction: %w", err)
	}
	return err
}

func closeLater(t *testing.T, db *gorm.DB) {
	t.Helper()
	pool, err := db.DB()
	check(t, err)
	t.Cleanup(func() { pool.Close() })
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
		closeLater(t, db)
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
