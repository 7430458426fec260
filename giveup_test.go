package mysqllock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestGivingUpAStatementFreesTheKey: the server does not notice that the client of a
// busy connection has gone, so the driver ends it.
func TestGivingUpAStatementFreesTheKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		// Busy for minutes, and deaf to the end of its client.
		const busy = "UPDATE p SET stock = stock + BENCHMARK(500000000, SHA2('x', 512)) WHERE id = "
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1") // makes the table
		dbtest.OK(t, err)
		id := 10
		for how, run := range map[string]func(ctx context.Context, key, busy string) error{
			"Exec": func(ctx context.Context, key, busy string) error {
				_, err := db.ExecContext(lockctx.With(ctx, key), busy)
				return err
			},
			"BeginTx": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), key), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(ctx, busy)
				return err
			},
			"BeginTx with the context": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(lockctx.With(ctx, key), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(ctx, busy)
				return err
			},
			"a late hint": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(dbtest.Limited(t), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(lockctx.With(ctx, key), busy)
				return err
			},
			"prepared": func(ctx context.Context, key, busy string) error {
				st, err := db.PrepareContext(ctx, busy)
				if err != nil {
					return err
				}
				defer st.Close()
				_, err = st.ExecContext(lockctx.With(ctx, key))
				return err
			},
			"a lease, then a row lock": func(ctx context.Context, key, busy string) error {
				lease := lockctx.With(ctx, "lease of "+key, lockctx.Lease(30*time.Second))
				tx, err := db.BeginTx(lease, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(lockctx.With(lease, key, lockctx.Row()), busy)
				return err
			},
			"Do": func(ctx context.Context, key, busy string) error {
				return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, busy)
					return err
				})
			},
		} {
			id++
			dbtest.Exec(t, s.plain, "INSERT INTO p VALUES (?, 1)", id)
			t.Run(how, func(t *testing.T) {
				key := "k " + how
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				done := make(chan error, 1)
				go func() { done <- run(ctx, key, busy+strconv.Itoa(id)) }()
				dbtest.Soon(t, "it runs under the lock", func() bool { return s.locked(key) && s.runs(id) })
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("whoever gave up got %v", err)
				}
				dbtest.Soon(t, "the key is free", func() bool { return !s.locked(key) })
			})
		}
	})
}

// runs reports whether an update of a product runs, and not only waits.
func (s *scratch) runs(id int) (yes bool) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE ?",
		s.Name, fmt.Sprintf("UPDATE p SET%%BENCHMARK%%id = %d", id)).Scan(&yes))
	return yes
}

// TestLocksBesideWhatCannotBeListed: nothing of a lock depends on the texts that other
// connections run. MySQL does not list them in information_schema.PROCESSLIST.
func TestLocksBesideWhatCannotBeListed(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, besideWhatCannotBeListed)
}

// TestLocksWithoutPerformanceSchema: MySQL has no other list then, and an old one never has.
func TestLocksWithoutPerformanceSchema(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, besideWhatCannotBeListed, "--performance-schema=OFF")
}

func besideWhatCannotBeListed(t *testing.T, s *scratch) {
	s.Neighbours()
	first, second := s.open("lockTTL=10m"), s.open("lockTTL=10m")
	for how, option := range map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(10 * time.Minute), "advisory": lockctx.Advisory(), "slots": lockctx.Slots(1),
	} {
		key := "\U0001F512 " + how
		held, err := mysqllock.Acquire(dbtest.Limited(t), first, key, option)
		dbtest.OK(t, err)
		_, err = mysqllock.Acquire(dbtest.Limited(t), second, key, option, lockctx.NoWait())
		dbtest.Want(t, err, mysqllock.ErrLocked)
		_, err = mysqllock.Acquire(dbtest.Limited(t), second, key, option, lockctx.Wait(100*time.Millisecond))
		dbtest.Want(t, err, mysqllock.ErrTimeout)

		waiting, cancel := context.WithCancel(dbtest.Limited(t))
		over := make(chan error, 1)
		wait := func(ctx context.Context) {
			got, err := mysqllock.Acquire(ctx, second, key, option, lockctx.Wait(time.Hour))
			if err == nil {
				err = got.Release()
			}
			over <- err
		}
		go wait(waiting)
		if how != "slots" { // whose waits are short
			dbtest.Soon(t, how+": it waits in the server", func() bool { return s.waitingTexts() > 0 })
		}
		cancel()
		dbtest.Want(t, <-over, context.Canceled)
		dbtest.Soon(t, how+": no statement waits any more", func() bool { return s.waitingTexts() == 0 })
		go wait(dbtest.Limited(t))
		if how != "slots" {
			dbtest.Soon(t, how+": it waits again", func() bool { return s.waitingTexts() > 0 })
		}
		dbtest.OK(t, held.Release())
		dbtest.OK(t, <-over)
	}

	row, err := first.BeginTx(lockctx.With(dbtest.Limited(t), "version"), nil)
	dbtest.OK(t, err)
	waiting, cancel := context.WithCancel(dbtest.Limited(t))
	over := make(chan error, 1)
	go func() {
		_, err := second.BeginTx(lockctx.With(waiting, "version", lockctx.Optimistic(), lockctx.Wait(time.Hour)), nil)
		over <- err
	}()
	dbtest.Soon(t, "optimistic: it waits in the server", func() bool { return s.waitingTexts() > 0 })
	cancel()
	dbtest.Want(t, <-over, context.Canceled)
	dbtest.Soon(t, "optimistic: no statement waits any more", func() bool { return s.waitingTexts() == 0 })
	dbtest.OK(t, row.Rollback())

	own, stop := context.WithCancel(dbtest.Limited(t))
	go func() {
		_, err := first.ExecContext(lockctx.With(own, "own"), "UPDATE p SET stock = 1 + SLEEP(3600) WHERE id = 1 /* \U0001F512 \xff */")
		over <- err
	}()
	dbtest.Soon(t, "the caller's own statement runs under the lock", func() bool { return s.running("UPDATE p") > 0 })
	stop()
	dbtest.Want(t, <-over, context.Canceled)
	dbtest.Soon(t, "the key of the caller's own statement is free", func() bool { return !s.locked("own") })
}

// waitingTexts counts the statements of the driver that wait for a lock.
func (s *scratch) waitingTexts() int {
	s.T.Helper()
	return s.running("/* mysqllock ") + s.running("User lock")
}

// running counts the statements of the database with that state, or with that in the beginning of
// their texts, which SHOW PROCESSLIST lists, whatever they are.
func (s *scratch) running(what string) (n int) {
	s.T.Helper()
	c := s.Connect()
	defer c.Close()
	for _, row := range s.Query(c, "SHOW PROCESSLIST") {
		if row[3] == s.Name && row[4] != "Sleep" && (row[6] == what || strings.Contains(row[7], what)) && !strings.Contains(row[7], "CREATE") {
			n++
		}
	}
	return n
}
