package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestStatementsUnderALockLeaveWhatTheyLeaveWithout: what a statement answers in a
// transaction, and what it leaves for the next one, is the same with a lock and without.
func TestStatementsUnderALockLeaveWhatTheyLeaveWithout(t *testing.T) {
	run := []string{
		"CALL twice()", "CALL shows()", "CALL warns()", "CALL raises()", "CALL shows_and_raises()", "CALL raises_in_rows()",
		"INSERT INTO words (w) VALUES ('a'), ('b')", "INSERT IGNORE INTO words (id, w) VALUES (1, 'x')",
		"UPDATE words SET w = CONCAT(w, '!')", "DELETE FROM words WHERE id = 1", "SELECT SQL_CALC_FOUND_ROWS w FROM words ORDER BY id LIMIT 1",
		"SELECT CAST('x' AS SIGNED)", "INSERT INTO words (id, w) VALUES (1, 'x')", "SAVEPOINT mine", "ROLLBACK TO SAVEPOINT base",
		"SELECT nothing FROM nowhere",
	}
	look := []string{
		"SELECT ROW_COUNT()", "SHOW WARNINGS", "SHOW COUNT(*) WARNINGS", "SHOW ERRORS", "SELECT @@warning_count, @@error_count", "SELECT FOUND_ROWS()",
		"SELECT LAST_INSERT_ID()", "GET DIAGNOSTICS @n = ROW_COUNT, @m = NUMBER", "SELECT ROW_COUNT(), COUNT(*) FROM words",
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, text := range []string{
			"CREATE TABLE words (id INT AUTO_INCREMENT PRIMARY KEY, w VARCHAR(9))",
			"CREATE PROCEDURE twice() BEGIN INSERT INTO words (w) VALUES ('c'); UPDATE words SET w = CONCAT(w, '?') WHERE id < 3; END",
			"CREATE PROCEDURE shows() BEGIN SELECT w FROM words ORDER BY id; SELECT 2; UPDATE words SET w = 'd'; END",
			"CREATE PROCEDURE warns() SIGNAL SQLSTATE '01000' SET MESSAGE_TEXT = 'beware', MYSQL_ERRNO = 1642",
			"CREATE PROCEDURE raises() BEGIN UPDATE words SET w = 'e' WHERE id = 1; SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END",
			"CREATE PROCEDURE shows_and_raises() BEGIN SELECT w FROM words ORDER BY id; SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END",
			"CREATE PROCEDURE raises_in_rows() BEGIN SELECT w FROM words ORDER BY id; SELECT (SELECT id FROM words WHERE id <= w.id + 1) FROM words w ORDER BY id; END",
		} {
			dbtest.Exec(t, s.plain, text)
		}
		plain, locked := s.plain, s.open()
		optimistic := s.open("lockStrategy=optimistic")
		seen := func(db *sql.DB, ctx context.Context, query bool, text, look string) (all []string) {
			empty := "DELETE FROM words"
			if strings.Contains(text, "(w)") || strings.Contains(text, "twice") { // it makes ids
				empty = "TRUNCATE words"
			}
			dbtest.Exec(t, s.plain, empty)
			dbtest.Exec(t, s.plain, "INSERT INTO words VALUES (1, 'a'), (2, 'b')")
			tx := dbtest.Begin(t, ctx, db)
			defer tx.Rollback()
			dbtest.Exec(t, tx, "SAVEPOINT base")
			dbtest.Exec(t, tx, "UPDATE words SET w = 'z' WHERE id = 2")
			dbtest.Exec(t, tx, "DO LAST_INSERT_ID(7)") // what another user of the connection has left is nobody's business
			note := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
			answer := func(text string) {
				rows, err := tx.QueryContext(ctx, text)
				if err != nil {
					note("error %v", err)
					return
				}
				defer func() { note("closed: %v", rows.Close()) }()
				for more := true; more; more = rows.NextResultSet() {
					columns, _ := rows.Columns()
					note("columns %v", columns)
					values := make([]sql.NullString, len(columns))
					into := make([]any, len(columns))
					for i := range values {
						into[i] = &values[i]
					}
					for rows.Next() {
						dbtest.OK(t, rows.Scan(into...))
						note("row %v", values)
					}
				}
				note("end %v", rows.Err())
			}
			if query {
				answer(text)
			} else if res, err := tx.ExecContext(ctx, text); err != nil {
				note("error %v", err)
			} else {
				n, _ := res.RowsAffected()
				id, _ := res.LastInsertId()
				note("%d rows, id %d", n, id)
			}
			answer(look)
			if strings.HasPrefix(look, "GET") {
				answer("SELECT @n, @m")
			}
			note("commit %v", tx.Commit())
			return all
		}
		all := dbtest.Long(false, true) // else a text and a look meet in one way on one server, in another one on the other
		for i, text := range run {
			for j, look := range look {
				for way, query := range []bool{false, true} {
					if !all && s.MariaDB() != ((i+j+way)%2 == 0) {
						continue
					}
					want := seen(plain, dbtest.Limited(t), query, text, look)
					for k, db := range []*sql.DB{locked, optimistic} {
						if !all && k != (i+j/2)%2 {
							continue
						}
						got := seen(db, lockctx.With(dbtest.Limited(t), "k"), query, text, look)
						if !slices.Equal(got, want) {
							t.Errorf("%d, %s, query %v, then %s:\n%q\nwithout a lock:\n%q", k, text, query, look, got, want)
						}
					}
				}
			}
		}
		// QueryRow reads one row only, and tells the error all the same.
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), locked)
		var w string
		if err := tx.QueryRow("CALL shows_and_raises()").Scan(&w); err == nil || w == "" {
			t.Errorf("QueryRow of a CALL that raises an error after its rows: %q, %v", w, err)
		}
	})
}

// TestLoadDataWhoseReaderFailsWritesNothingUnderALock: the server takes what it has got for
// all of it.
func TestLoadDataWhoseReaderFailsWritesNothingUnderALock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var was int
		dbtest.OK(t, s.plain.QueryRow("SELECT @@GLOBAL.local_infile").Scan(&was))
		dbtest.Exec(t, s.plain, "SET GLOBAL local_infile = 1")
		defer dbtest.Exec(t, s.plain, fmt.Sprint("SET GLOBAL local_infile = ", was))
		dbtest.Exec(t, s.plain, "CREATE TABLE loaded (id INT PRIMARY KEY)")
		name := dbtest.Random()
		fails := errors.New("the reader fails")
		mysql.RegisterReaderHandler(name, func() io.Reader {
			return io.MultiReader(strings.NewReader("1\n2\n"), iotest.ErrReader(fails))
		})
		defer mysql.DeregisterReaderHandler(name)
		load := "LOAD DATA LOCAL INFILE 'Reader::" + name + "' INTO TABLE loaded"
		for _, params := range [][]string{nil, {"maxConns=6"}} {
			db := s.open(params...)
			for kind, opt := range map[string]lockctx.Option{
				"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
			} {
				for how, run := range map[string]func(ctx context.Context) error{
					"exec": func(ctx context.Context) error { _, err := db.ExecContext(ctx, load); return err },
					"read before": func(ctx context.Context) error {
						stock.MustRead(t, ctx, db, 1)
						return exec(ctx, db, load)
					},
					"Do": func(ctx context.Context) error {
						return mysqllock.Do(lockctx.Without(ctx), db, "inner", func(ctx context.Context) error { return exec(ctx, db, load) }, opt)
					},
				} {
					ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), fmt.Sprint(params, kind, how), opt))
					dbtest.Is(t, fmt.Sprintf("%s, %s", kind, how), run(ctx), fails)
					cancel()
					var n int
					dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM loaded").Scan(&n))
					if n != 0 {
						t.Errorf("%s, %s: %d rows", kind, how, n)
					}
					dbtest.Exec(t, s.plain, "DELETE FROM loaded")
				}
			}
		}
		loadPanics(t, s)
	})
}

// loadPanics is for a reader that panics, or ends its goroutine: nothing is written, the lock is
// free, and the handle goes on.
func loadPanics(t *testing.T, s *scratch) {
	other := s.open()
	for _, params := range [][]string{nil, {"maxConns=6"}} {
		db := s.open(params...)
		for kind, opt := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
		} {
			for end, ends := range map[string]func(){"panic": func() { panic("the reader panics") }, "Goexit": runtime.Goexit} {
				name := dbtest.Random()
				mysql.RegisterReaderHandler(name, func() io.Reader {
					return io.MultiReader(strings.NewReader("1\n2\n"), readerFunc(func([]byte) (int, error) { ends(); return 0, io.EOF }))
				})
				defer mysql.DeregisterReaderHandler(name)
				load := "LOAD DATA LOCAL INFILE 'Reader::" + name + "' INTO TABLE loaded"
				for how, run := range map[string]func(ctx context.Context) error{
					"exec": func(ctx context.Context) error { return exec(lockctx.With(ctx, "k", opt), db, load) },
					"BeginTx": func(ctx context.Context) error {
						return stock.InTx(lockctx.With(ctx, "k", opt), db, func(tx *sql.Tx) error { return exec(ctx, tx, load) })
					},
					"Do": func(ctx context.Context) error {
						return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return exec(ctx, db, load) }, opt)
					},
				} {
					what := fmt.Sprint(params, kind, " ", end, " ", how)
					over := make(chan struct{})
					go func() {
						defer close(over)
						defer func() {
							if p := recover(); p != nil && p != "the reader panics" {
								t.Errorf("%s: recovered %v", what, p)
							}
						}()
						t.Errorf("%s: it went on: %v", what, run(dbtest.Limited(t)))
					}()
					<-over
					for _, handle := range []*sql.DB{other, db} {
						dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), handle, "k", func(ctx context.Context) error {
							return exec(ctx, handle, "UPDATE p SET stock = stock + 1 WHERE id = 1")
						}, opt, lockctx.Wait(dbtest.Patience)))
					}
					var n int
					if dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM loaded").Scan(&n)); n != 0 {
						t.Errorf("%s: %d rows", what, n)
					}
				}
			}
		}
	}
}

type readerFunc func([]byte) (int, error)

func (rf readerFunc) Read(p []byte) (int, error) { return rf(p) }
