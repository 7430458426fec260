package hunt

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/lockctx"
)

// rush is what the callers of each process do, on one product for each hot key.
type rush struct {
	Who     string // begins the name of what they write
	Callers int
	Keys    int
	Length  time.Duration
}

// What a caller was told of its write. Of a write that nobody has told anything of, nothing is
// known.
const (
	toldDone    = "done"
	toldRefused = "refused"
	rushOver    = "over"
)

// hotUnits are the ways to raise the stock of a product under a hot key.
var hotUnits = []func(ctx context.Context, db *sql.DB, key, who string, id int) error{
	func(ctx context.Context, db *sql.DB, key, who string, id int) error {
		ctx = lockctx.With(ctx, key)
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := raise(ctx, tx, who, id); err != nil {
			return err
		}
		return tx.Commit()
	},
	func(ctx context.Context, db *sql.DB, key, who string, id int) error {
		return changed(db.ExecContext(lockctx.With(ctx, key), "UPDATE p SET stock = stock + 1, who = ? WHERE id = ?", who, id))
	},
	func(ctx context.Context, db *sql.DB, key, who string, id int) error {
		return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return raise(ctx, db, who, id) })
	},
	func(ctx context.Context, db *sql.DB, key, who string, id int) error {
		return raise(lockctx.With(ctx, key), db, who, id)
	},
}

// raise reads the stock, and writes one more.
func raise(ctx context.Context, q interface {
	dbtest.Execer
	stock.Querier
}, who string, id int,
) error {
	n, err := stock.Read(ctx, q, id)
	if err != nil {
		return err
	}
	return changed(q.ExecContext(ctx, "UPDATE p SET stock = ?, who = ? WHERE id = ?", n+1, who, id))
}

// errUnchanged is of a statement that says that all is well and that it has changed nothing, as
// one on MariaDB 11.8 may that was killed.
var errUnchanged = errors.New("no row was changed")

// changed is the error of a statement that was to change one row.
func changed(res sql.Result, err error) error {
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errors.Join(errUnchanged, err)
	}
	return nil
}

// childRush runs a rush for each line, says what its callers were told, and that it is over.
func childRush(db *sql.DB, in *bufio.Scanner) {
	for in.Scan() {
		var r rush
		if err := json.Unmarshal(in.Bytes(), &r); err != nil {
			fmt.Println(err)
			return
		}
		r.run(db)
		fmt.Println(rushOver)
	}
}

func (r rush) run(db *sql.DB) {
	stop := time.Now().Add(r.Length)
	var all sync.WaitGroup
	for g := range r.Callers {
		all.Go(func() {
			for i := 0; time.Now().Before(stop); i++ {
				r.one(db, fmt.Sprintf("%s-%d-%d", r.Who, g, i))
			}
		})
	}
	all.Wait()
}

// one writes once, and says what it was told.
func (r rush) one(db *sql.DB, who string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if rand.IntN(5) == 0 {
		time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, cancel)
	}
	if rand.IntN(6) == 0 {
		if changed(db.ExecContext(ctx, "INSERT INTO done (who, id) VALUES (?, 0)", who)) == nil {
			fmt.Println(toldDone, who, "without a lock")
		}
		return
	}
	id, how := 1+rand.IntN(r.Keys), rand.IntN(len(hotUnits))
	err := hotUnits[how](ctx, db, hotKey(id), who, id)
	var e *mysqllock.Error
	switch {
	case err == nil:
		fmt.Println(toldDone, who, "way", how)
	case errors.As(err, &e) && (e.Op == "commit" || e.Op == "release"), ctx.Err() != nil, errors.Is(err, sql.ErrTxDone): // perhaps while COMMIT was under way
	default:
		fmt.Println(toldRefused, who, fmt.Sprintf("way %d: %q", how, err))
	}
}

func hotKey(id int) string { return "p:" + strconv.Itoa(id) }

// TestHotKeys: callers of two processes want a few advisory keys, with fewer connections to wait
// on than there are keys, while contexts are cancelled, and statements and connections killed:
// nothing hangs, nobody is told of a write that is not there or the other way round, no update is
// lost, and neither a lock nor a transaction is left. HOTKEYS_TIME is how long, for each server.
func TestHotKeys(t *testing.T) {
	length := 3 * time.Second
	if v := os.Getenv("HOTKEYS_TIME"); v != "" {
		var err error
		length, err = time.ParseDuration(v)
		dbtest.OK(t, err)
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.Plain, "INSERT INTO p VALUES (5, 10), (6, 10), (7, 10), (8, 10)")
		dbtest.Exec(t, s.Plain, "ALTER TABLE p ADD who VARCHAR(60)")
		dbtest.Exec(t, s.Plain, "CREATE TABLE done (n BIGINT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(60) NOT NULL UNIQUE, id INT NOT NULL)")
		dbtest.Exec(t, s.Plain, "CREATE TRIGGER raised AFTER UPDATE ON p FOR EACH ROW INSERT INTO done (who, id) VALUES (NEW.who, NEW.id)")
		s.hotKeys(t, length/2, false, "lockMaxConns=3", "lockStrategy=advisory", "lockWait=4s", "lockTTL=5s")
		s.hotKeys(t, length/2, true, "lockMaxConns=3", "lockStrategy=advisory", "lockWait=4s", "lockTTL=5s", "maxConns=8")
	})
}

// hotKeys is TestHotKeys for handles with those parameters, among which is maxConns if they are
// bounded. Connections are killed only then: else the first transaction of a connection checks
// its lock in one statement and commits in the next, and a lock connection that somebody kills
// between the two has lost the lock too late to be noticed.
func (s *scratch) hotKeys(t *testing.T, length time.Duration, bounded bool, params ...string) {
	const keys, callers, most = 8, 30, 10 * time.Second
	user := "u_" + dbtest.Random() // whose connections are killed
	dbtest.Exec(t, s.Plain, "CREATE USER "+user)
	defer s.Plain.Exec("DROP USER " + user)
	dbtest.Exec(t, s.Plain, "GRANT ALL ON "+s.Name+".* TO "+user)
	dsn := s.Changed(dbtest.As(user)).DSN(params...)
	children := []*dbtest.Child{dbtest.StartJob(t, "hotkeys", dsn), dbtest.StartJob(t, "hotkeys", dsn)}
	over := make(chan struct{})
	var killer sync.WaitGroup
	var killed atomic.Int64
	killer.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(time.Duration(50+rand.IntN(100)) * time.Millisecond):
			}
			var id int
			if s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE USER = ? ORDER BY RAND() LIMIT 1", user).Scan(&id) != nil {
				continue
			}
			kill := "KILL QUERY "
			if bounded && rand.IntN(2) == 0 {
				kill = "KILL "
			}
			if _, err := s.Plain.Exec(kill + strconv.Itoa(id)); err == nil {
				killed.Add(1)
			}
		}
	})
	var sum struct{ done, refused, unsaid int }
	for began, round := time.Now(), 0; time.Since(began) < length; round++ {
		told, why := make(map[string]string), make(map[string]string)
		before := s.stocks(t)
		for i, c := range children {
			line, err := json.Marshal(rush{Who: fmt.Sprint(user, ".", round, ".", i), Callers: callers, Keys: keys, Length: min(most, length-time.Since(began))})
			dbtest.OK(t, err)
			c.Tell(string(line))
		}
		late := time.After(most + time.Minute)
		for _, c := range children {
			for line := range within(t, c, late) {
				if what, who, ok := strings.Cut(line, " "); ok {
					who, said, _ := strings.Cut(who, " ")
					told[who], why[who] = what, said
				}
			}
		}
		s.settled(t, keys)
		there := s.writers(t)
		raised := make(map[int]int)
		for who, id := range there {
			raised[id]++
			if told[who] == toldRefused {
				t.Errorf("%s: %s was refused, and is there: %s", params, who, why[who])
			}
			if told[who] == "" {
				sum.unsaid++
			}
		}
		for who, what := range told {
			if _, is := there[who]; what == toldDone && !is {
				t.Errorf("%s: %s was done, and is not there: %s", params, who, why[who])
			}
			if what == toldDone {
				sum.done++
			} else {
				sum.refused++
			}
		}
		for id, n := range s.stocks(t) {
			if n-before[id] != raised[id] {
				t.Errorf("%s: %d was raised %d times, by %d: an update was lost", params, id, raised[id], n-before[id])
			}
		}
	}
	close(over)
	killer.Wait()
	for _, c := range children {
		ended := make(chan error, 1)
		go func() { ended <- c.End() }()
		select {
		case err := <-ended:
			dbtest.OK(t, err)
		case <-time.After(time.Minute):
			t.Fatalf("%s: Close hangs", params)
		}
	}
	if sum.done == 0 {
		t.Errorf("%s: nothing was done", params)
	}
	t.Logf("%s: %+v, %d killed", params, sum, killed.Load())
}

// within are the lines of a child until its rush is over. The test fails when late is.
func within(t *testing.T, c *dbtest.Child, late <-chan time.Time) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for {
			select {
			case line, ok := <-c.Said():
				if !ok {
					t.Fatal("a process ended")
				}
				if line == rushOver || !yield(line) {
					return
				}
			case <-late:
				_ = c.Signal(syscall.SIGQUIT) // it says where
				_ = c.End()
				t.Fatal("it hangs")
			}
		}
	}
}

// settled waits until no transaction is open and no key locked.
func (s *scratch) settled(t *testing.T, keys int) {
	dbtest.Soon(t, "no transaction is left", func() bool {
		var n int
		dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.INNODB_TRX JOIN information_schema.PROCESSLIST ON ID = trx_mysql_thread_id WHERE DB = ?", s.Name).Scan(&n))
		return n == 0
	})
	for id := 1; id <= keys; id++ {
		dbtest.Soon(t, "no lock is left", func() bool {
			var holder sql.NullInt64
			dbtest.OK(t, s.Plain.QueryRow("SELECT IS_USED_LOCK(?)", lockname.OfAdvisory(s.Name, hotKey(id))).Scan(&holder))
			return !holder.Valid
		})
	}
}

// stocks are the stocks of the products.
func (s *scratch) stocks(t *testing.T) map[int]int {
	t.Helper()
	stocks := make(map[int]int)
	rows, err := s.Plain.Query("SELECT id, stock FROM p")
	dbtest.OK(t, err)
	defer rows.Close()
	for rows.Next() {
		var id, n int
		dbtest.OK(t, rows.Scan(&id, &n))
		stocks[id] = n
	}
	dbtest.OK(t, rows.Err())
	return stocks
}

// writers are who has written since they were asked for last, and which product; 0 is none.
func (s *scratch) writers(t *testing.T) map[string]int {
	t.Helper()
	there, last := make(map[string]int), 0
	rows, err := s.Plain.Query("SELECT n, who, id FROM done")
	dbtest.OK(t, err)
	defer rows.Close()
	for rows.Next() {
		var id int
		var who string
		dbtest.OK(t, rows.Scan(&last, &who, &id))
		there[who] = id
	}
	dbtest.OK(t, rows.Err())
	dbtest.Exec(t, s.Plain, "DELETE FROM done")
	return there
}
