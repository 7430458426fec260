package hunt

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// 64 goroutines on 4 connections and 2 sessions, with keys mixed, contexts
// cancelled and connections killed at random: nothing hangs, nothing leaks, no
// lock is left, and every acknowledged commit is there. With maxConns they have 6
// connections in all, and the server takes no more.
func TestStorm(t *testing.T) {
	length := 8 * time.Second
	if v := os.Getenv("STORM_TIME"); v != "" {
		var err error
		length, err = time.ParseDuration(v)
		dbtest.OK(t, err)
	}
	for mode, open := range map[string]func(*testing.T, *scratch) *sql.DB{
		"SetMaxOpenConns": func(_ *testing.T, s *scratch) *sql.DB {
			db := s.Handle("lockMaxConns=2", "lockWait=2s", "lockTTL=5s")
			db.SetMaxOpenConns(4)
			return db
		},
		"maxConns": func(t *testing.T, s *scratch) *sql.DB { return s.Limited(t, 6, "lockWait=2s", "lockTTL=5s") },
	} {
		t.Run(mode, func(t *testing.T) { storm(t, length/2, open) })
	}
}

func storm(t *testing.T, length time.Duration, open func(*testing.T, *scratch) *sql.DB) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		db := open(t, s)
		dbtest.Exec(t, s.Plain, "CREATE TABLE done (id INT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(40) UNIQUE)")
		stop := time.Now().Add(length)
		var commits, unknown, failures atomic.Int64
		var mu sync.Mutex
		acknowledged, refused := map[string]bool{}, map[string]bool{}
		var wg sync.WaitGroup
		work := func(g, i int) {
			who := fmt.Sprintf("%d-%d", g, i)
			id := 1 + rand.IntN(4)
			key := "p:" + strconv.Itoa(id)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			if rand.IntN(4) == 0 {
				time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, cancel)
			}
			step := func(ctx context.Context, q interface {
				dbtest.Execer
				stock.Querier
			},
			) error {
				n, err := stock.Read(ctx, q, id)
				if err != nil {
					return err
				}
				if _, err := q.ExecContext(ctx, "INSERT INTO done (who) VALUES (?)", who); err != nil {
					return err
				}
				_, err = q.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", n+1, id)
				return err
			}
			var err error
			if rand.IntN(2) == 0 {
				var tx *sql.Tx
				if tx, err = db.BeginTx(lockctx.With(ctx, key), nil); err == nil {
					if err = step(ctx, tx); err == nil {
						err = tx.Commit()
					}
					tx.Rollback()
				}
			} else {
				err = mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return step(ctx, db) })
			}
			mu.Lock()
			defer mu.Unlock()
			var e *mysqllock.Error
			switch {
			case err == nil:
				commits.Add(1)
				acknowledged[who] = true
			case errors.As(err, &e) && e.Op == "commit":
				unknown.Add(1)
			case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, sql.ErrTxDone):
				unknown.Add(1) // perhaps while COMMIT was under way
			default:
				failures.Add(1)
				refused[who] = true
			}
		}
		for g := range 64 {
			wg.Go(func() {
				for i := 0; time.Now().Before(stop); i++ {
					work(g, i)
				}
			})
		}
		wg.Go(func() { // kills connections, at random
			for time.Now().Before(stop) {
				time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
				var id int
				if s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND COMMAND IN ('Sleep', 'Query') ORDER BY RAND() LIMIT 1", s.Name).Scan(&id) == nil {
					s.Plain.Exec(fmt.Sprintf("KILL %d", id))
				}
			}
		})
		finished := make(chan struct{})
		go func() { wg.Wait(); close(finished) }()
		select {
		case <-finished:
		case <-time.After(length + 60*time.Second):
			t.Fatal("it hangs")
		}
		st, err := mysqllock.Stats(db)
		dbtest.OK(t, err)
		if st.InUse != 0 {
			dbtest.Soon(t, "sessions are given back", func() bool { st, _ = mysqllock.Stats(db); return st.InUse == 0 })
		}
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections of database/sql are in use", n)
		}
		for id := 1; id <= 4; id++ {
			dbtest.Soon(t, "no lock is left", func() bool { return !s.Locked("p:" + strconv.Itoa(id)) })
		}
		there := map[string]bool{}
		for _, who := range dbtest.Column[string](t, s.Plain, "SELECT who FROM done") {
			there[who] = true
		}
		sum := 0
		for id := 1; id <= 4; id++ {
			sum += s.Stock(id) - 10
		}
		if sum != len(there) {
			t.Errorf("%d increments for %d finished units: an update was lost", sum, len(there))
		}
		for who := range acknowledged {
			if !there[who] {
				t.Errorf("%s was acknowledged and is not there", who)
			}
		}
		for who := range refused {
			if there[who] {
				t.Errorf("%s failed and is there", who)
			}
		}
		if commits.Load() == 0 {
			t.Error("nothing was committed")
		}
		t.Logf("%d commits, %d of unknown outcome or cancelled, %d failed; %+v", commits.Load(), unknown.Load(), failures.Load(), st)
	})
}
