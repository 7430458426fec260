package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// writes are the ways of a write on db: with ctx, in a transaction that began with begin, where
// it is in one.
var writes = map[string]func(db *sql.DB, begin, ctx context.Context) error{
	"Exec": func(db *sql.DB, _, ctx context.Context) error { return exec(ctx, db, takeOne) },
	"Exec with arguments": func(db *sql.DB, _, ctx context.Context) error {
		return exec(ctx, db, "UPDATE p SET stock = stock - ? WHERE id = 1", 1)
	},
	"Query": func(db *sql.DB, _, ctx context.Context) error {
		rows, err := db.QueryContext(ctx, takeOne)
		if err != nil {
			return err
		}
		return rows.Close()
	},
	"prepared": func(db *sql.DB, _, ctx context.Context) error {
		st, err := db.PrepareContext(ctx, takeOne)
		if err != nil {
			return err
		}
		defer st.Close()
		_, err = st.ExecContext(ctx)
		return err
	},
	"sql.Conn": func(db *sql.DB, _, ctx context.Context) error {
		return onConn(db, func(conn *sql.Conn) error { return exec(ctx, conn, takeOne) })
	},
	"sql.Conn, prepared": func(db *sql.DB, _, ctx context.Context) error {
		return onConn(db, func(conn *sql.Conn) error {
			st, err := conn.PrepareContext(ctx, takeOne)
			if err != nil {
				return err
			}
			defer st.Close()
			_, err = st.ExecContext(ctx)
			return err
		})
	},
	"sql.Tx": func(db *sql.DB, begin, ctx context.Context) error {
		return stock.InTx(begin, db, func(tx *sql.Tx) error { return exec(ctx, tx, takeOne) })
	},
	"sql.Tx, prepared": func(db *sql.DB, begin, ctx context.Context) error {
		return stock.InTx(begin, db, func(tx *sql.Tx) error {
			st, err := tx.PrepareContext(ctx, takeOne)
			if err != nil {
				return err
			}
			_, err = st.ExecContext(ctx)
			return err
		})
	},
	"sql.Tx of a sql.Conn": func(db *sql.DB, begin, ctx context.Context) error {
		return onConn(db, func(conn *sql.Conn) error {
			return stock.InTx(begin, conn, func(tx *sql.Tx) error { return exec(ctx, tx, takeOne) })
		})
	},
}

func onConn(db *sql.DB, f func(*sql.Conn) error) error {
	conn, err := db.Conn(context.Background())
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(conn)
}

// strictHandles are those of strict mode for the table p.
func (s *scratch) strictHandles() map[string]*sql.DB {
	return map[string]*sql.DB{
		"": s.open("lockRequire=p"), "maxConns": s.open("lockRequire=p&maxConns=6"), "interpolated": s.open("lockRequire=P*&interpolateParams=true"),
		"wrapped": s.wrapped(wrappers["only preparing"], "lockRequire=p"),
	}
}

// TestStrictModeHasTablesWrittenUnderALock only, in whatever way: those that lockRequire names.
func TestStrictModeHasTablesWrittenUnderALock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for how, db := range s.strictHandles() {
			for way, write := range writes {
				name := how + " " + way
				plain := dbtest.Limited(t)
				refused := func(what string, err error) {
					t.Helper()
					if !errors.Is(err, mysqllock.ErrNoLock) || !strings.Contains(err.Error(), "_test.go:") || !strings.Contains(err.Error(), " writes p ") {
						t.Errorf("%s, %s: %v", name, what, err)
					}
				}
				ok := func(what string, err error) {
					t.Helper()
					if err != nil {
						t.Errorf("%s, %s: %v", name, what, err)
					}
				}
				before := s.stock(1)
				refused("without a context", write(db, plain, plain))
				without := lockctx.Without(lockctx.With(plain, "k"))
				refused("lockctx.Without", write(db, without, without))
				shared := lockctx.With(plain, "k", lockctx.Shared())
				refused("a shared lock", write(db, shared, shared))
				ok("Do", mysqllock.Do(plain, db, "k", func(ctx context.Context) error {
					refused("the outer context in Do", write(db, plain, plain))
					return nil
				}))
				s.wantStock(1, before)

				for strategy, kind := range strategies {
					with := lockctx.With(plain, "k", kind)
					ok(strategy, write(db, with, with))
					ok(strategy+", Do", mysqllock.Do(plain, db, "k", func(ctx context.Context) error { return write(db, ctx, ctx) }, kind))
					before -= 2
					if strings.Contains(way, "Tx") {
						ok(strategy+", only begun with it", write(db, lockctx.With(plain, "k", kind), plain))
						dbtest.Is(t, name+", "+strategy+", asked for late", write(db, plain, lockctx.With(plain, "k", kind)), mysqllock.ErrUnsafe)
						before--
					}
				}
				s.wantStock(1, before)
			}
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			dbtest.Exec(t, db, "CREATE TABLE IF NOT EXISTS q (id INT PRIMARY KEY)")
			_, err := db.Exec("REPLACE INTO q SELECT id FROM p") // which only reads it
			dbtest.OK(t, err)
			stock.MustRead(t, dbtest.Limited(t), db, 1)
		}
	})
}

// TestStrictModeSeesTheTable: what a text says it writes, on the servers that take it.
func TestStrictModeSeesTheTable(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE q (id INT PRIMARY KEY, stock INT)")
		dbtest.Exec(t, s.plain, "INSERT INTO q VALUES (1, 1)")
		db, free := s.open("lockRequire=p"), s.open()
		for _, text := range []string{
			"UPDATE `p` SET stock = 11 WHERE id = 1",
			"UPDATE " + s.Name + ".p SET stock = 12 WHERE id = 1",
			"/* a comment */ uPdAtE -- another\n p SET stock = 13 WHERE id = 1",
			"UPDATE q JOIN p USING (id) SET p.stock = 14",
			"UPDATE q, p AS x SET x.stock = 15 WHERE q.id = x.id",
			"UPDATE (q JOIN p ON p.id = q.id) SET p.stock = 16",
			"INSERT INTO p (id, stock) SELECT id, 17 FROM q ON DUPLICATE KEY UPDATE stock = 17",
			"REPLACE p VALUES (1, 18)",
			"REPLACE INTO p SET id = 1, stock = 19",
			"/*!50000 UPDATE */ p SET stock = 20 WHERE id = 1",
			"WITH x AS (SELECT id FROM q) UPDATE p JOIN x USING (id) SET stock = 21",
			"DELETE x FROM p AS x JOIN q USING (id)",
			"DELETE FROM p WHERE id = 1",
		} {
			before := dbtest.Column[string](t, s.plain, "SELECT CONCAT(id, ' ', stock) FROM p ORDER BY id")
			_, err := db.Exec(text)
			dbtest.Want(t, err, mysqllock.ErrNoLock)
			if now := dbtest.Column[string](t, s.plain, "SELECT CONCAT(id, ' ', stock) FROM p ORDER BY id"); !slices.Equal(now, before) {
				t.Errorf("%s was sent", text)
			}
			if _, err := free.Exec(text); err != nil {
				if !strings.HasPrefix(text, "WITH") { // of MySQL only
					t.Errorf("%s: %v", text, err)
				}
				continue
			}
			if now := dbtest.Column[string](t, s.plain, "SELECT CONCAT(id, ' ', stock) FROM p ORDER BY id"); slices.Equal(now, before) {
				t.Errorf("%s writes nothing", text)
			}
			dbtest.Exec(t, s.plain, "REPLACE INTO p VALUES (1, 10)")
		}
		for _, text := range []string{"TRUNCATE TABLE q", "EXPLAIN UPDATE p SET stock = 1", "DELETE FROM q WHERE id IN (SELECT id FROM p)"} {
			dbtest.Exec(t, db, text)
		}
	})
}

// TestStrictModeKeepsDecisions: what was read outside a transaction is written in a hold, or
// read again: a write that would commit alone is refused before it is sent.
func TestStrictModeKeepsDecisions(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE q (id INT PRIMARY KEY)")
		for how, db := range s.strictHandles() {
			for strategy, kind := range strategies {
				for way, write := range writes {
					name := fmt.Sprintf("%s, %s, %s", how, strategy, way)
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					with := lockctx.With(ctx, "k", kind)
					n := stock.MustRead(t, with, db, 1)
					if err := write(db, with, with); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "mysqllock.Do") {
						t.Errorf("%s: %v", name, err)
					}
					s.wantStock(1, n)
					cancel()
				}
			}
		}
		db := s.open("lockRequire=p")
		for strategy, kind := range strategies {
			decided := func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				ctx = lockctx.With(ctx, "k", kind)
				stock.MustRead(t, ctx, db, 1)
				return ctx, cancel
			}
			before := s.stock(1)

			// The transaction of an ORM around one call: what was written before the refusal goes, too.
			ctx, cancel := decided()
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, "INSERT INTO q VALUES (1)")
			_, err := tx.ExecContext(ctx, takeOne)
			dbtest.Want(t, err, mysqllock.ErrUnsafe)
			dbtest.Want(t, tx.Commit(), mysqllock.ErrUnsafe)
			if left := dbtest.Column[int](t, s.plain, "SELECT id FROM q"); len(left) > 0 {
				t.Errorf("%s: the transaction was committed", strategy)
			}
			cancel()

			// A read in the transaction is enough for it, and so is a hold, or AllowStale.
			ctx, cancel = decided()
			dbtest.OK(t, stock.InTx(ctx, db, func(tx *sql.Tx) error {
				if _, err := read(ctx, tx, 1); err != nil {
					return err
				}
				return exec(ctx, tx, takeOne)
			}))
			cancel()
			ctx, cancel = decided()
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return exec(ctx, db, takeOne) }, kind))
			cancel()
			ctx, cancel = decided()
			dbtest.ExecIn(t, lockctx.With(ctx, "k", kind, lockctx.AllowStale()), db, takeOne)
			cancel()
			s.wantStock(1, before-3)

			// Other tables are as they were.
			ctx, cancel = decided()
			dbtest.Exec(t, db, "DELETE FROM q")
			dbtest.ExecIn(t, ctx, db, "REPLACE INTO q VALUES (1)")
			cancel()
			dbtest.Exec(t, s.plain, "DELETE FROM q")
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
		}
	})
}

// TestStrictModeAsksForTheKey: RequireKey sees the keys of each way to hold them.
func TestStrictModeAsksForTheKey(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, _ := s.watched(mysqllock.Config{Require: "p", RequireKey: func(table string, keys []string) error {
			if table != "p" || !slices.Contains(keys, "right") {
				return fmt.Errorf("not %q of %s", keys, table)
			}
			return nil
		}})
		for way, write := range writes {
			for strategy, kind := range strategies {
				plain := dbtest.Limited(t)
				for key, want := range map[string]error{"right": nil, "wrong": mysqllock.ErrNoLock} {
					with := lockctx.With(lockctx.With(plain, "other", kind), key, kind)
					errs := []error{
						write(db, with, with),
						mysqllock.Do(plain, db, key, func(ctx context.Context) error { return write(db, ctx, ctx) }, kind),
						mysqllock.Do(plain, db, key, func(ctx context.Context) error {
							ctx = lockctx.With(ctx, "another", kind)
							return write(db, ctx, ctx)
						}, kind),
					}
					for i, err := range errs {
						if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), "not [") {
							t.Errorf("%s, %s, %s, %d: %v", way, strategy, key, i, err)
						}
					}
				}
			}
		}
	})
}

// TestStrictModeAsksForTheKeyAlone: RequireKey sees the keys that the statement holds alone,
// however it holds them; a key that others may hold at the same time is none of them, whatever is
// held besides.
func TestStrictModeAsksForTheKeyAlone(t *testing.T) {
	type kind struct {
		what  string
		opts  []lockctx.Option
		alone bool
	}
	kinds := []kind{
		{"shared", []lockctx.Option{lockctx.Row(), lockctx.Shared()}, false},
		{"one of three slots", []lockctx.Option{lockctx.Row(), lockctx.Slots(3)}, false},
		{"the only slot", []lockctx.Option{lockctx.Row(), lockctx.Slots(1)}, true},
		{"lease, one of three slots", []lockctx.Option{lockctx.Lease(ttl), lockctx.Slots(3)}, false},
		{"lease, the only slot", []lockctx.Option{lockctx.Lease(ttl), lockctx.Slots(1)}, true},
	}
	for name, strategy := range strategies {
		kinds = append(kinds, kind{name, []lockctx.Option{strategy}, true})
	}
	type under struct {
		ctx  context.Context
		over func() error
	}
	open := func() error { return nil }
	ways := map[string]func(ctx context.Context, db *sql.DB, opts ...lockctx.Option) (under, error){
		"With": func(ctx context.Context, _ *sql.DB, opts ...lockctx.Option) (under, error) {
			ctx = lockctx.With(ctx, "right", opts...)
			return under{ctx, open}, nil
		},
		"WithKeys": func(ctx context.Context, _ *sql.DB, opts ...lockctx.Option) (under, error) {
			ctx = lockctx.WithKeys(ctx, []string{"right", "more"}, opts...)
			return under{ctx, open}, nil
		},
		"Acquire": func(ctx context.Context, db *sql.DB, opts ...lockctx.Option) (under, error) {
			hold, err := mysqllock.Acquire(ctx, db, "right", opts...)
			if err != nil {
				return under{}, err
			}
			return under{hold.Context(), hold.Release}, nil
		},
		"AcquireKeys": func(ctx context.Context, db *sql.DB, opts ...lockctx.Option) (under, error) {
			hold, err := mysqllock.AcquireKeys(ctx, db, []string{"right", "more"}, opts...)
			if err != nil {
				return under{}, err
			}
			return under{hold.Context(), hold.Release}, nil
		},
	}
	// What the caller has besides. It holds the key alone if that is so here.
	besides := map[string]struct {
		in    func(ctx context.Context, db *sql.DB, run func(context.Context) error) error
		alone bool
	}{
		"nothing": {in: func(ctx context.Context, _ *sql.DB, run func(context.Context) error) error { return run(ctx) }},
		"another key": {in: func(ctx context.Context, _ *sql.DB, run func(context.Context) error) error {
			return run(lockctx.With(ctx, "other", lockctx.Row()))
		}},
		"a lease on another key": {in: func(ctx context.Context, db *sql.DB, run func(context.Context) error) error {
			return mysqllock.Do(ctx, db, "other", run, lockctx.Lease(ttl))
		}},
		"a lease on the key": {in: func(ctx context.Context, db *sql.DB, run func(context.Context) error) error {
			return mysqllock.Do(ctx, db, "right", run, lockctx.Lease(ttl))
		}, alone: true},
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for how, c := range map[string]mysqllock.Config{"": {}, "all keys on one row": {Stripes: 1}} {
			c.Table, c.Require, c.RequireKey = fmt.Sprintf("locks%d", c.Stripes), "p", func(_ string, keys []string) error {
				if !slices.Contains(keys, "right") {
					return fmt.Errorf("not %q", keys)
				}
				return nil
			}
			db, _ := s.watched(c)
			for _, k := range kinds {
				if c.Stripes > 0 && k.what == "shared" {
					k.alone = true // there is no such thing on a row of several keys
				}
				for way, take := range ways {
					for beside, b := range besides {
						leased := strings.Contains(beside, "lease") && (b.alone || c.Stripes > 0)
						if (leased || beside == "another key") && k.what == "optimistic" || c.Stripes > 0 && !k.alone && beside != "nothing" {
							continue // a hint that is refused; a slot of a row that the caller has for itself
						}
						for _, by := range []string{"Exec", "sql.Tx"} {
							name := fmt.Sprintf("%s, %s, beside %s, %s, %s", k.what, way, beside, by, how)
							before := s.stock(1)
							err := b.in(dbtest.Limited(t), db, func(ctx context.Context) error {
								in, err := take(ctx, db, k.opts...)
								if err == nil {
									err = errors.Join(writes[by](db, in.ctx, in.ctx), in.over())
								}
								return err
							})
							switch {
							case k.alone || b.alone:
								if err != nil {
									t.Errorf("%s: %v", name, err)
								}
								s.wantStock(1, before-1)
							case !errors.Is(err, mysqllock.ErrNoLock) || !strings.Contains(err.Error(), "leave lockctx.Shared and Slots out"):
								t.Errorf("%s: %v", name, err)
							default:
								s.wantStock(1, before)
							}
						}
					}
				}
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 1000000")
			}
		}
	})
}

// TestStrictModeLogs: in log mode all of it runs, and each line of code is told once, also if
// several lines have one text, as with an ORM, or one line has several texts.
func TestStrictModeLogs(t *testing.T) {
	const writes = 4
	use := func(t *testing.T, db *sql.DB) {
		for i := range 3 {
			dbtest.Exec(t, db, takeOne)
			dbtest.Exec(t, db, takeOne)
			dbtest.Exec(t, db, fmt.Sprintf("UPDATE p SET stock = stock - 1 WHERE id = %d", i))
			with := lockctx.With(dbtest.Limited(t), "k")
			stock.MustRead(t, with, db, 1)
			dbtest.ExecIn(t, with, db, "UPDATE p SET stock = 9")
		}
	}
	var lines bytes.Buffer
	was := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&lines, nil)))
	var servers atomic.Int32
	t.Cleanup(func() {
		slog.SetDefault(was)
		if got := lines.String(); strings.Count(got, "a write lacks its lock") != writes*int(servers.Load()) {
			t.Errorf("the log says %s", got)
		}
	})
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, w := s.watched(mysqllock.Config{Require: "log:p"})
		use(t, db)
		told, lines := w.advice(), make(map[string]bool)
		for i, says := range told {
			line := regexp.MustCompile(`strict_test\.go:\d+ writes p `).FindString(says)
			want := "no lock"
			if i == writes-1 {
				want = "after a read outside"
			}
			if line == "" || lines[line] || !strings.Contains(says, want) {
				t.Errorf("the observer was told %q", says)
			}
			lines[line] = true
		}
		if len(told) != writes {
			t.Errorf("the observer was told %d times, want %d", len(told), writes)
		}
		servers.Add(1)
		use(t, s.open("lockRequire=log:p")) // without an observer
	})
}
