package shops

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/examples/plain"
	"github.com/mysqllock/mysqllock/lockctx"
)

const (
	processes  = 2
	goroutines = 8 // in each process
)

// As a worker, this program sells by the style, to the DSN and as often per
// goroutine as its environment says.
const (
	envStyle = "SHOPS_STYLE"
	envDSN   = "SHOPS_DSN"
	envSales = "SHOPS_SALES"
)

// allStyles, as a style's name, gives each goroutine another one.
const allStyles = "all"

func TestMain(m *testing.M) {
	if name := os.Getenv(envStyle); name != "" {
		if err := work(name, os.Getenv(envDSN), os.Getenv(envSales)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestNothingIsLost sells one product in every style from 16 goroutines of two
// processes, each style alone and all of them at once.
func TestNothingIsLost(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		t.Parallel()
		// Without this the rest would show nothing.
		t.Run(control.name, func(t *testing.T) {
			shop.Restock(t, control.sales)
			run(t, shop, control.name, control.sales)
			left := shop.Stock(t)
			t.Logf("the driver mysql lost %d of %d", left, control.sales)
			if left == 0 {
				t.Error("the driver mysql lost no update: the workers were not in each other's way")
			}
		})
		for _, s := range slices.Concat(styles, ownVersions, []style{{name: allStyles, sales: 480}}) {
			t.Run(s.name, func(t *testing.T) {
				shop.Restock(t, s.sales)
				start := time.Now()
				run(t, shop, s.name, s.sales)
				t.Logf("%d sales, %v each", s.sales, (time.Since(start) / time.Duration(s.sales)).Round(time.Microsecond))
				if left := shop.Stock(t); left != 0 {
					t.Errorf("%d of %d updates were lost", left, s.sales)
				}
			})
		}
	})
}

// run has two processes sell.
func run(t *testing.T, shop *testshop.Shop, style string, sales int) {
	t.Helper()
	var workers []*worker
	for range processes {
		workers = append(workers, start(t, style, shop.DSN, sales/processes/goroutines))
	}
	for _, w := range workers {
		w.awaitReady(t)
	}
	for _, w := range workers {
		w.in.Close() // and they go
	}
	for _, w := range workers {
		if err := w.cmd.Wait(); err != nil {
			t.Errorf("a worker failed: %v\n%s", err, &w.errors)
		}
	}
}

// worker is one of the two processes, seen from outside. It writes a line when
// it is ready and goes at the end of its input.
type worker struct {
	cmd    *exec.Cmd
	in     io.Closer
	out    io.Reader
	errors bytes.Buffer
}

func start(t *testing.T, style, dsn string, sales int) *worker {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{cmd: exec.CommandContext(t.Context(), self)}
	w.cmd.Env = append(os.Environ(), envStyle+"="+style, envDSN+"="+dsn, envSales+"="+strconv.Itoa(sales))
	w.cmd.Stderr = &w.errors
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if w.out, err = w.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *worker) awaitReady(t *testing.T) {
	t.Helper()
	if _, err := w.out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("a worker did not start: %v\n%s", errors.Join(err, w.cmd.Wait()), &w.errors)
	}
}

// work is what a worker does.
func work(name, dsn, sales string) error {
	n, err := strconv.Atoi(sales)
	if err != nil {
		return err
	}
	var sells []sell
	sold := styles
	if name != allStyles {
		all := slices.Concat(styles, ownVersions, []style{control})
		sold = slices.DeleteFunc(all, func(s style) bool { return s.name != name })
	}
	for _, s := range sold {
		sell, err := s.open(dsn)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		sells = append(sells, sell)
	}
	if len(sells) == 0 {
		return fmt.Errorf("no style %q", name)
	}
	fmt.Println("ready")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	errs := make([]error, goroutines)
	// Two processes begin at different ends, so that together they use all styles.
	first := os.Getpid()
	var wg sync.WaitGroup
	for i := range goroutines {
		sell := sells[(first+i)%len(sells)]
		wg.Go(func() {
			for range n {
				if err := sell(ctx); err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// openPrepared sells with statements that were prepared once, outside of any
// lock context.
func openPrepared(dsn string) (sell, error) {
	db, err := plain.Open(dsn)
	if err != nil {
		return nil, err
	}
	read, err := db.Prepare("SELECT stock FROM products WHERE id = ?")
	if err != nil {
		return nil, err
	}
	write, err := db.Prepare("UPDATE products SET stock = ? WHERE id = ?")
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error { return sellPrepared(ctx, read, write) }, nil
}

func sellPrepared(ctx context.Context, read, write *sql.Stmt) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := read.QueryRowContext(ctx, product).Scan(&stock); err != nil {
		return err
	}
	if stock == 0 {
		return plain.ErrSoldOut
	}
	_, err := write.ExecContext(ctx, stock-1, product)
	return err
}

func TestTheSalesOfEachStyleDivideEvenly(t *testing.T) {
	for _, s := range slices.Concat(styles, ownVersions) {
		if s.sales%(processes*goroutines) != 0 || strings.Contains(s.name, " ") {
			t.Errorf("%q: %d sales do not divide by %d", s.name, s.sales, processes*goroutines)
		}
	}
}

// TestStrictModeRefusesSalesWithoutALock: what sells in a transaction or in Do does so as before.
// What reads and writes without one is refused.
func TestStrictModeRefusesSalesWithoutALock(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		t.Parallel()
		strict := *shop
		strict.DSN += "?lockRequire=products,orders"
		for _, s := range slices.Concat(styles, ownVersions) {
			t.Run(s.name, func(t *testing.T) {
				want := error(nil)
				for how, err := range map[string]error{
					"QueryExec": mysqllock.ErrUnsafe, "sql/Prepared": mysqllock.ErrUnsafe, "GetNamedExec": mysqllock.ErrUnsafe,
					"FirstSave": mysqllock.ErrUnsafe, "SelectUpdate": mysqllock.ErrUnsafe, "Version": mysqllock.ErrNoLock,
				} {
					if strings.Contains(s.name, how) {
						want = err
					}
				}
				shop.Restock(t, 80)
				if want == nil {
					run(t, &strict, s.name, 80)
					if left := shop.Stock(t); left != 0 {
						t.Errorf("%d of 80 updates were lost", left)
					}
					return
				}
				sell, err := s.open(strict.DSN)
				if err == nil {
					err = sell(t.Context())
				}
				if left := shop.Stock(t); !errors.Is(err, want) || left != 80 {
					t.Errorf("%d are left of 80, and the error is %v, want %v", left, err, want)
				}
			})
		}
	})
}
