package gocronlock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/google/uuid"

	"github.com/mysqllock/mysqllock"
	gocronlock "github.com/mysqllock/mysqllock/integrations/gocron"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/leader"
)

func TestMain(m *testing.M) {
	dbtest.Jobs{
		"lead":     func(db *sql.DB, in *bufio.Scanner) { fmt.Println("ended", lead(db, in)) },
		"schedule": func(db *sql.DB, in *bufio.Scanner) { fmt.Println("ended", schedule(db, in)) },
	}.Run()
	os.Exit(tempserver.Tests{M: m}.Run())
}

func lead(db *sql.DB, in *bufio.Scanner) error {
	elector := gocronlock.NewElector(context.Background(), db, "scheduler", leader.TTL(2*time.Second))
	go func() {
		for elector.IsLeader(context.Background()) != nil {
			time.Sleep(5 * time.Millisecond)
		}
		fmt.Println("leads")
	}()
	in.Scan()
	return elector.Close()
}

func schedule(db *sql.DB, in *bufio.Scanner) error {
	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronlock.NewLocker(db, gocronlock.MinHold(time.Hour))))
	if err != nil {
		return err
	}
	_, err = scheduler.NewJob(gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()),
		gocron.NewTask(func() {
			fmt.Println("runs")
			in.Scan()
		}),
		gocron.WithName("report"),
		gocron.WithEventListeners(
			gocron.AfterJobRuns(func(uuid.UUID, string) { fmt.Println("has run") }),
			gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) {
				fmt.Println("skips", errors.Is(err, mysqllock.ErrLocked))
			})))
	if err != nil {
		return err
	}
	scheduler.Start()
	select {} // until it is killed
}

func next(t *testing.T, c *dbtest.Child) string {
	t.Helper()
	select {
	case line := <-c.Said():
		return line
	case <-time.After(dbtest.Patience):
		t.Fatal("the other process says nothing")
		return ""
	}
}

// Of two processes one runs the job, while it runs and for as long after it as MinHold
// says.
func TestOneProcessRunsTheJob(t *testing.T) {
	dbtest.OnServers(t, itself, func(t *testing.T, d *dbtest.Database) {
		first := dbtest.StartJob(t, "schedule", d.DSN())
		if said := next(t, first); said != "runs" {
			t.Fatalf("the first process %s", said)
		}
		for range 2 {
			other := dbtest.StartJob(t, "schedule", d.DSN())
			dbtest.Equal(t, "the other process %s", next(t, other), "skips true")
			if first != nil {
				first.Tell("finish")
				dbtest.Equal(t, "the first process %s", next(t, first), "has run")
				first = nil
			}
		}
	})
}

// gocron ends the context of a job that is removed, or whose scheduler is shut down, while the job
// still runs: it stays locked until it has ended.
func TestLockerOfARunningJobThatIsStopped(t *testing.T) {
	dbtest.OnServers(t, itself, func(t *testing.T, d *dbtest.Database) {
		db := d.Open("mysqllock")
		other := gocronlock.NewLocker(d.Open("mysqllock"))
		for _, key := range []string{"removed", "shut down"} {
			dbtest.AtItsPace(t, time.Second, func(ttl time.Duration) error {
				scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronlock.NewLocker(db, gocronlock.TTL(ttl))), gocron.WithStopTimeout(dbtest.Patience))
				dbtest.OK(t, err)
				runs, finish, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
				job, err := scheduler.NewJob(gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()), gocron.NewTask(func() {
					close(runs)
					<-finish
				}), gocron.WithName(key))
				dbtest.OK(t, err)
				scheduler.Start()
				<-runs
				if key == "removed" {
					dbtest.OK(t, scheduler.RemoveJob(job.ID()))
				}
				go func() {
					defer close(ended)
					_ = scheduler.Shutdown()
				}()
				time.Sleep(3 * ttl / 2)
				lock, err := other.Lock(t.Context(), key)
				if err == nil {
					err = errors.Join(fmt.Errorf("%s: the job's lock was free while it ran", key), lock.Unlock(t.Context()))
				} else if errors.Is(err, mysqllock.ErrLocked) {
					err = nil
				}
				close(finish)
				<-ended
				dbtest.Soon(t, "it is given back", func() bool { // a busy server may take its time
					lock, taken := other.Lock(t.Context(), key)
					return taken == nil && lock.Unlock(t.Context()) == nil
				})
				return err
			})
		}
	})
}

// Of two processes one leads; when it is killed the other does.
func TestAnotherLeadsWhenTheLeaderIsKilled(t *testing.T) {
	dbtest.OnServers(t, itself, func(t *testing.T, d *dbtest.Database) {
		a := dbtest.StartJob(t, "lead", d.DSN())
		b := dbtest.StartJob(t, "lead", d.DSN())
		var other *dbtest.Child
		select {
		case <-a.Said():
			other = b
			a.Kill()
		case <-b.Said():
			other = a
			b.Kill()
		case <-time.After(dbtest.Patience):
			t.Fatal("nobody leads")
		}
		dbtest.Equal(t, "the other process %s", next(t, other), "leads")
		other.Tell("end")
		dbtest.Equal(t, "the other process %s", next(t, other), "ended <nil>")
	})
}

func itself(d *dbtest.Database) *dbtest.Database { return d }
