package lockctx_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// db is opened with the driver "mysqllock".
var db *sql.DB

func TestTheExamplesRunOnEachServer(t *testing.T) {
	for _, d := range dbtest.Each(t) {
		db = d.Open("mysqllock")
		for _, text := range []string{
			"CREATE TABLE products (id INT PRIMARY KEY, stock INT NOT NULL)",
			"INSERT INTO products VALUES (42, 10), (43, 10)",
			"CREATE TABLE tasks (id INT PRIMARY KEY, state VARCHAR(10) NOT NULL)",
			"INSERT INTO tasks VALUES (1, 'new'), (2, 'new'), (3, 'new')",
		} {
			dbtest.Exec(t, db, text)
		}
		for i, example := range []func(){ // in this order: the first one has the lock table made
			ExampleWith, ExampleWithKeys, ExampleHas, ExampleWithout, ExampleRow,
			ExampleLease, ExampleAdvisory, ExampleOptimistic, ExampleIfVersion, ExampleShared, ExampleSlots,
			ExampleMinHold, ExampleMaxHold, ExampleNoWait,
			ExampleWait, ExampleWaitForever, ExampleRetry, ExampleAllowStale,
		} {
			t.Log(d.Flavour, i) // an example that fails ends the program
			example()
		}
		var stock int
		dbtest.OK(t, db.QueryRow("SELECT SUM(stock) FROM products").Scan(&stock))
		if want := 20 - sold; stock != want {
			t.Errorf("on %s %d products are left, want %d", d.Flavour, stock, want)
		}
	}
}

// sold is how many products the examples take out of the stock.
const sold = 7

func ExampleWith() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = lockctx.With(ctx, "product:42")

	tx, err := db.BeginTx(ctx, nil) // takes the lock
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	var stock int
	if err := tx.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil {
		log.Fatal(err)
	}
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1); err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil { // gives it back
		log.Fatal(err)
	}
}

// Keys that are taken together do not deadlock, whatever order others name them in.
func ExampleWithKeys() {
	ctx := lockctx.WithKeys(context.Background(), []string{"product:43", "product:42"})
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id IN (42, 43)"); err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
}

// A function can insist on the lock that its caller has to see to.
func ExampleHas() {
	setStock := func(ctx context.Context, id, stock int) error {
		if !lockctx.Has(ctx, fmt.Sprintf("product:%d", id)) {
			return errors.New("setStock needs the lock on its product")
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock, id)
		return err
	}
	if err := setStock(context.Background(), 42, 5); err == nil {
		log.Fatal("it has run without its lock")
	}
}

// What has nothing to do with the lock, such as a log, neither waits for it nor ends with it.
func ExampleWithout() {
	ctx := lockctx.With(context.Background(), "product:42")
	if _, err := db.ExecContext(lockctx.Without(ctx), "INSERT INTO tasks VALUES (4, 'new')"); err != nil {
		log.Fatal(err)
	}
}

// Row is what a handle does that has no other lockStrategy.
func ExampleRow() {
	ctx := lockctx.With(context.Background(), "product:42", lockctx.Row())
	if _, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 42"); err != nil {
		log.Fatal(err)
	}
}

// A lease is for work that is more than one transaction. What the function does elsewhere
// can be refused there if it comes with a token that is older than the last one seen.
func ExampleLease() {
	err := mysqllock.Do(context.Background(), db, "report", func(ctx context.Context) error {
		token, ok := mysqllock.Token(ctx)
		if !ok || token == 0 {
			return errors.New("no token")
		}
		_, err := db.ExecContext(ctx, "UPDATE tasks SET state = 'done' WHERE id = 1")
		return err // ErrLost if the lease has run out meanwhile: then nothing was written
	}, lockctx.Lease(30*time.Second))
	if err != nil {
		log.Fatal(err)
	}
}

// An advisory lock needs no table, and writes nothing.
func ExampleAdvisory() {
	err := mysqllock.Do(context.Background(), db, "warm-cache", func(context.Context) error {
		return nil // something that one process at a time should do
	}, lockctx.Advisory())
	if err != nil {
		log.Fatal(err)
	}
}

// Nobody waits; who comes second runs again.
func ExampleOptimistic() {
	err := mysqllock.Do(context.Background(), db, "product:42", func(ctx context.Context) error {
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1)
		return err
	}, lockctx.Optimistic(), lockctx.Retry(5))
	if err != nil {
		log.Fatal(err)
	}
}

// A form is shown in one request, and sent back in another one, minutes later.
func ExampleIfVersion() {
	shown := lockctx.With(context.Background(), "product:43", lockctx.Optimistic())
	var stock int
	if err := db.QueryRowContext(shown, "SELECT stock FROM products WHERE id = 43").Scan(&stock); err != nil {
		log.Fatal(err)
	}
	version, ok := mysqllock.Version(shown) // goes into the form
	if !ok {
		log.Fatal("no version")
	}

	sent := lockctx.With(context.Background(), "product:43", lockctx.IfVersion(version))
	_, err := db.ExecContext(sent, "UPDATE products SET stock = ? WHERE id = 43", stock-1)
	if errors.Is(err, mysqllock.ErrConflict) {
		return // somebody was quicker: show the form again
	}
	if err != nil {
		log.Fatal(err)
	}
}

// Readers that rely on several rows exclude who writes them, and not each other.
func ExampleShared() {
	ctx := lockctx.With(context.Background(), "inventory", lockctx.Shared())
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	var all int
	if err := tx.QueryRowContext(ctx, "SELECT SUM(stock) FROM products").Scan(&all); err != nil {
		log.Fatal(err)
	}
}

// Three at a time, in all processes together.
func ExampleSlots() {
	err := mysqllock.Do(context.Background(), db, "export", func(ctx context.Context) error {
		slot, ok := mysqllock.Slot(ctx) // 0, 1 or 2
		if !ok || slot > 2 {
			return errors.New("no slot")
		}
		return nil
	}, lockctx.Slots(3))
	if err != nil {
		log.Fatal(err)
	}
}

// A job of a second runs once, although the clocks of the machines that start it differ by
// some seconds.
func ExampleMinHold() {
	err := mysqllock.Do(context.Background(), db, "nightly", func(context.Context) error {
		return nil // the job
	}, lockctx.Lease(30*time.Second), lockctx.MinHold(time.Minute), lockctx.NoWait())
	if errors.Is(err, mysqllock.ErrLocked) {
		return // another machine runs it, or has
	}
	if err != nil {
		log.Fatal(err)
	}
}

// A job that hangs keeps the key from others for ten minutes at most.
func ExampleMaxHold() {
	err := mysqllock.Do(context.Background(), db, "import", func(ctx context.Context) error {
		return ctx.Err() // ctx ends when the lease is lost
	}, lockctx.Lease(30*time.Second), lockctx.MaxHold(10*time.Minute))
	if err != nil {
		log.Fatal(err)
	}
}

// Who comes second does not wait.
func ExampleNoWait() {
	ctx := lockctx.With(context.Background(), "product:42", lockctx.NoWait())
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 42")
	var e *mysqllock.Error
	if errors.Is(err, mysqllock.ErrLocked) && errors.As(err, &e) {
		log.Fatal("somebody else has it: ", e.Holder)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// Wait is about the lock, the deadline of the context about all together.
func ExampleWait() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = lockctx.With(ctx, "product:42", lockctx.Wait(3*time.Second))
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock WHERE id = 42")
	if errors.Is(err, mysqllock.ErrTimeout) {
		log.Fatal("not within three seconds")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// A process that stands by waits until the one before it has ended, however long that takes.
func ExampleWaitForever() {
	hold, err := mysqllock.Acquire(context.Background(), db, "primary", lockctx.Lease(10*time.Second), lockctx.WaitForever())
	if err != nil {
		log.Fatal(err)
	}
	defer hold.Release()
	// hold.Context() ends when the lease is lost.
}

// The function runs again where the server has broken a deadlock by rolling it back.
func ExampleRetry() {
	err := mysqllock.Do(context.Background(), db, "product:42", func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock WHERE id IN (42, 43)")
		return err
	}, lockctx.Retry(3))
	if err != nil {
		log.Fatal(err)
	}
}

// What the transaction has read before it asks for its second lock does not matter here.
func ExampleAllowStale() {
	ctx := lockctx.With(context.Background(), "tasks")
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	var tasks int
	if err := tx.QueryRow("SELECT COUNT(*) FROM tasks").Scan(&tasks); err != nil {
		log.Fatal(err)
	}
	ctx = lockctx.With(ctx, "product:42", lockctx.AllowStale())
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock WHERE id = 42"); err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
}
