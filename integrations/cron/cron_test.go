package cronlock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/mysqllock/mysqllock"
	cronlock "github.com/mysqllock/mysqllock/integrations/cron"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	dbtest.Jobs{"cron": child}.Run()
	os.Exit(tempserver.Tests{M: m}.Run())
}

// child runs its job whenever it is told to, as cron does at a tick, and has it end when it is
// told to.
func child(db *sql.DB, in *bufio.Scanner) {
	var job cron.Job = cron.FuncJob(func() {
		fmt.Println("runs")
		in.Scan()
	})
	once := cronlock.Once(context.Background(), db, "report", cronlock.AtLeast(time.Hour), cronlock.AtMost(time.Hour),
		cronlock.OnSkip(func(err error) { fmt.Println("skips", errors.Is(err, mysqllock.ErrLocked)) }),
		cronlock.OnError(func(err error) { fmt.Println("failed", err) }))
	job = cron.NewChain(once).Then(job)
	for in.Scan() {
		job.Run()
		fmt.Println("done")
	}
}

// saysAll wants a process to say these lines.
func saysAll(t *testing.T, c *dbtest.Child, want ...string) {
	t.Helper()
	for _, line := range want {
		select {
		case said := <-c.Said():
			if said != line {
				t.Fatalf("it said %q, want %q", said, line)
			}
		case <-time.After(dbtest.Patience):
			t.Fatalf("it does not say %q", line)
		}
	}
}

// Of two processes one runs the job at a tick, and none again before AtLeast is over.
func TestAJobRunsOnceAtEachTick(t *testing.T) {
	dbtest.OnServers(t, itself, func(t *testing.T, d *dbtest.Database) {
		a, b := dbtest.StartJob(t, "cron", d.DSN()), dbtest.StartJob(t, "cron", d.DSN())
		a.Tell("tick")
		saysAll(t, a, "runs")
		b.Tell("tick")
		saysAll(t, b, "skips true", "done")
		a.Tell("end")
		saysAll(t, a, "done")
		for _, c := range []*dbtest.Child{a, b} { // their clocks are late
			c.Tell("tick")
			saysAll(t, c, "skips true", "done")
		}
	})
}

// OnceFunc's context is fenced: a job that has lost its lock does not commit. AtMost ends it.
func TestAJobThatLostItsLockDoesNotCommit(t *testing.T) {
	dbtest.OnServers(t, itself, func(t *testing.T, d *dbtest.Database) {
		db, plain := d.Open("mysqllock"), d.Open("mysql")
		dbtest.Exec(t, plain, "CREATE TABLE reports (id INT PRIMARY KEY AUTO_INCREMENT) ENGINE=InnoDB")
		write := func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "INSERT INTO reports VALUES (DEFAULT)")
			return err
		}
		var failed, skipped error
		tell := []cronlock.Option{cronlock.OnError(func(err error) { failed = err }), cronlock.OnSkip(func(err error) { skipped = err })}
		cronlock.OnceFunc(t.Context(), db, "report", write, tell...).Run()
		if failed != nil || skipped != nil {
			t.Fatal(failed, skipped)
		}
		cronlock.OnceFunc(t.Context(), db, "report", func(ctx context.Context) error {
			<-ctx.Done()
			return write(context.WithoutCancel(ctx))
		}, append(tell, cronlock.TTL(4*time.Second), cronlock.AtMost(4*time.Second))...).Run()
		dbtest.Want(t, failed, mysqllock.ErrLost)
		var n int
		dbtest.OK(t, plain.QueryRow("SELECT COUNT(*) FROM reports").Scan(&n))
		if n != 1 {
			t.Errorf("%d reports, want 1", n)
		}
		cronlock.OnceFunc(t.Context(), db, "", write, tell...).Run()
		if skipped == nil || errors.Is(skipped, mysqllock.ErrLocked) {
			t.Errorf("without a key: %v", skipped)
		}
	})
}

func itself(d *dbtest.Database) *dbtest.Database { return d }
