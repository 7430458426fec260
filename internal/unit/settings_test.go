package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// account makes an account without administrative rights, for which init_connect
// counts, and returns a handle of it with the driver under test.
func account(s *stock.Shop, t *testing.T, params ...string) *sql.DB {
	t.Helper()
	dbtest.Exec(t, s.Plain, "CREATE USER IF NOT EXISTS app@'%' IDENTIFIED BY 'pw'")
	dbtest.Exec(t, s.Plain, "GRANT ALL ON "+s.Name+".* TO app@'%'")
	cfg := s.Config()
	cfg.User, cfg.Passwd = "app", "pw"
	dsn := cfg.FormatDSN()
	sep := "?"
	if strings.Contains(dsn, "?") {
		sep = "&"
	}
	db, err := sql.Open("mysqllock", dsn+sep+strings.Join(params, "&"))
	dbtest.OK(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

var everyStrategy = map[string]lockctx.Option{
	"row": lockctx.Row(), "lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
}

// refusedEverywhere runs hinted statements on the one connection of db, which has a
// write of the caller's that is not committed: nothing may commit it.
func refusedEverywhere(s *stock.Shop, t *testing.T, what string, db *sql.DB) {
	t.Helper()
	db.SetMaxOpenConns(1)
	dbtest.Exec(t, db, "UPDATE p SET stock = 1 WHERE id = 1")
	for name, opt := range everyStrategy {
		ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
		var left int
		dbtest.Is(t, what+", "+name+": read", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 2").Scan(&left), mysqllock.ErrUnsafe)
		if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 3 WHERE id = 2"); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "autocommit=1") {
			t.Errorf("%s, %s: write: %v, want ErrUnsafe that says what to set", what, name, err)
		}
	}
	dbtest.Exec(t, db, "ROLLBACK")
	s.WantStock(1, 10)
	s.WantStock(2, 10)
}

// TestAutocommitOffIsRefused has autocommit off from the beginning.
func TestAutocommitOffIsRefused(t *testing.T) {
	dbtest.OnOwnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		s.Plain.SetMaxOpenConns(1)
		dbtest.OK(t, s.Plain.Ping())
		refusedEverywhere(s, t, "DSN", account(s, t, "autocommit=0"))

		for _, off := range []string{"autocommit", "init_connect"} {
			if off == "autocommit" {
				dbtest.Exec(t, s.Plain, "SET GLOBAL autocommit = 0")
			} else {
				dbtest.Exec(t, s.Plain, "SET GLOBAL init_connect = 'SET autocommit = 0'")
			}
			refusedEverywhere(s, t, off, account(s, t))

			db := account(s, t, "autocommit=1") // as the error says
			for name, opt := range everyStrategy {
				ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
				var left int
				dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 3").Scan(&left))
				if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 3"); err != nil {
					t.Errorf("%s, autocommit=1 in the DSN, %s: %v", off, name, err)
				}
			}
			dbtest.Exec(t, s.Plain, "SET GLOBAL autocommit = 1")
			dbtest.Exec(t, s.Plain, "SET GLOBAL init_connect = ''")
		}
		s.WantStock(3, 18)

		// Connections that are opened after the server's default was switched are noticed.
		db := account(s, t)
		dbtest.Exec(t, s.Plain, "SET GLOBAL autocommit = 0")
		db.SetMaxIdleConns(0) // each statement has a new connection
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		_, err := stock.Read(lockctx.With(ctx, dbtest.Random()), db, 2)
		dbtest.Want(t, err, mysqllock.ErrUnsafe)
	})
}

// TestCompletionTypeThatChainsIsRefused has COMMIT begin the next transaction, or end the connection.
func TestCompletionTypeThatChainsIsRefused(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, value := range []string{"2", "'CHAIN'", "NO_CHAIN"} {
			db := s.Handle("completion_type=" + strings.ReplaceAll(value, "'", "%27"))
			db.SetMaxOpenConns(1)
			refused := func(what string, err error) {
				t.Helper()
				if value == "NO_CHAIN" {
					dbtest.OK(t, err)
				} else if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "completion_type=NO_CHAIN") {
					t.Errorf("completion_type=%s, %s: %v, want ErrUnsafe that says what to set", value, what, err)
				}
			}
			for name, opt := range everyStrategy {
				_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), dbtest.Random(), opt), "UPDATE p SET stock = stock WHERE id = 1")
				refused(name+", Exec", err)
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), dbtest.Random(), opt), nil)
				refused(name+", BeginTx", err)
				if err == nil {
					dbtest.OK(t, tx.Commit())
				}
				refused(name+", Do", mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error { return nil }, opt))
			}
			db.Close()
		}
	})
}

// TestWhatATextHasSetReachesNoTransactionUnderALock has plain SQL text set what locks need as it was, on a connection of the pool. Transactions under a
// lock have sessions, which know nothing of it. A read beside its lock runs there: it is refused.
func TestWhatATextHasSetReachesNoTransactionUnderALock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		db.SetMaxOpenConns(1) // so that a use of the connection meets what the one before has left
		for _, set := range []string{"SET completion_type = 1", "SET SESSION completion_type = 'RELEASE'", "SET @@timestamp = 1000000000"} {
			dbtest.Exec(t, db, set)
			for name, opt := range everyStrategy {
				what := fmt.Sprintf("%s, %s: ", set, name)
				ctx := func() context.Context { return lockctx.With(dbtest.Limited(t), dbtest.Random(), opt) }
				dbtest.Is(t, what+"write", dbtest.Err(db.ExecContext(ctx(), "UPDATE p SET stock = stock WHERE id = 1")), nil)
				dbtest.Is(t, what+"BeginTx", stock.InTx(ctx(), db, func(tx *sql.Tx) error {
					return dbtest.Err(tx.ExecContext(dbtest.Limited(t), "UPDATE p SET stock = stock WHERE id = 1"))
				}), nil)
				own, cancel := context.WithCancel(dbtest.Limited(t))
				_, err := stock.Read(lockctx.With(own, dbtest.Random(), opt), db, 1)
				cancel()
				var want error
				if name != "row" {
					want = mysqllock.ErrUnsafe
				}
				dbtest.Is(t, what+"read", err, want)
			}
			dbtest.Exec(t, db, "SET completion_type = DEFAULT, timestamp = DEFAULT")
			dbtest.Exec(t, runsIn{db, lockctx.With(dbtest.Limited(t), dbtest.Random())}, "UPDATE p SET stock = stock WHERE id = 1")
		}
	})
}

// TestReadOnlyTransactionsWriteNothing has transactions that are READ ONLY unless they say
// otherwise: nothing is written, and there is an error. A lock that such a transaction is granted
// is given back at its end.
func TestReadOnlyTransactionsWriteNothing(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		setting := "transaction_read_only=1"
		if s.MariaDB() {
			setting = "tx_read_only=1"
		}
		db, writer := s.Handle(setting), s.Handle()
		for name, opt := range everyStrategy {
			key, nothing := dbtest.Random(), func(context.Context) error { return nil }
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), writer, key, nothing, opt))
			for how, end := range map[string]func(*sql.Tx) error{"ROLLBACK": (*sql.Tx).Rollback, "COMMIT": (*sql.Tx).Commit} {
				if tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), key, opt), nil); err == nil {
					stock.MustRead(t, dbtest.Limited(t), tx, 1)
					if err := end(tx); err != nil {
						t.Errorf("%s: %s of a transaction that read: %v", name, how, err)
					}
				}
				if err := mysqllock.Do(dbtest.Limited(t), writer, key, nothing, opt, lockctx.NoWait()); err != nil {
					t.Errorf("%s: after %s: %v", name, how, err)
				}
			}
			if _, err := db.ExecContext(lockctx.With(dbtest.Limited(t), dbtest.Random(), opt), "UPDATE p SET stock = 0 WHERE id = 1"); err == nil {
				t.Errorf("%s: write succeeded", name)
			}
		}
		s.WantStock(1, 10)
	})
}

// TestNoStrategyDependsOnSessionSettingsOfTheDSN, with which the application's connections begin, whatever way is
// taken.
func TestNoStrategyDependsOnSessionSettingsOfTheDSN(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for i, setting := range []string{
			"group_concat_max_len=4", "sql_select_limit=0", "sql_select_limit=1", "sql_big_selects=0&max_join_size=1", "max_execution_time=1", "max_statement_time=0.2",
			"sql_mode='ANSI'", "sql_mode='NO_BACKSLASH_ESCAPES'", "sql_mode='PAD_CHAR_TO_FULL_LENGTH'", "sql_mode='ONLY_FULL_GROUP_BY,TRADITIONAL'", "sql_mode='ORACLE'",
			"sql_mode='PIPES_AS_CONCAT,HIGH_NOT_PRECEDENCE,REAL_AS_FLOAT,NO_UNSIGNED_SUBTRACTION,NO_ZERO_DATE'", "sql_mode='TIME_TRUNCATE_FRACTIONAL'", "sql_mode='TIME_ROUND_FRACTIONAL'",
			"sql_safe_updates=1", "sql_auto_is_null=1", "sql_quote_show_create=0", "sql_notes=0&max_error_count=0", "div_precision_increment=0", "max_sort_length=8", "eq_range_index_dive_limit=1",
			"lock_wait_timeout=1", "innodb_lock_wait_timeout=1", "idle_transaction_timeout=5", "transaction_isolation='SERIALIZABLE'", "tx_isolation='SERIALIZABLE'", "innodb_snapshot_isolation=1",
			"character_set_results=NULL", "character_set_results='latin1'", "character_set_client='gbk'", "collation_connection='utf8mb4_bin'", "collation_connection='latin1_german2_ci'", "collation_connection='binary'",
			"time_zone='-12:00'", "lc_messages='de_DE'", "standard_compliant_cte=0", "max_recursive_iterations=0", "cte_max_recursion_depth=0", "big_tables=1", "max_heap_table_size=16384",
			"optimizer_switch='derived_merge=off,materialization=off,semijoin=off,index_merge=off'", "optimizer_switch='subquery_to_derived=on,derived_condition_pushdown=off'", "range_optimizer_max_mem_size=1",
			"sql_require_primary_key=1", "default_storage_engine='MyISAM'", "binlog_row_image='MINIMAL'", "low_priority_updates=1", "in_predicate_conversion_threshold=2", "insert_id=7", "last_insert_id=7",
		} {
			plain := s.Open("mysql", escaped(setting))
			if err := plain.Ping(); err != nil {
				continue // this server does not have it
			}
			params := []string{escaped(setting), fmt.Sprintf("lockTable=settings_%d", i), "lockTTL=5s"}
			db, other := s.Handle(params...), s.Handle(params...)
			for j, name := range []string{"row", "lease", "advisory", "optimistic", "shared", "slots", "slots of leases"} {
				if !some(i, j, 3) {
					continue
				}
				opt := map[string][]lockctx.Option{
					"row": {lockctx.Row()}, "lease": {lockctx.Lease(stock.TTL)}, "advisory": {lockctx.Advisory()}, "optimistic": {lockctx.Optimistic()},
					"shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)}, "slots of leases": {lockctx.Slots(2), lockctx.Lease(stock.TTL)},
				}[name]
				failed := func(way string, err error) {
					if err != nil {
						t.Errorf("%s, %s, %s: %v", setting, name, way, err)
					}
				}
				const sell = "UPDATE p SET stock = stock WHERE id = 1"
				key := dbtest.Random()
				for range 10 { // until statements are prepared
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), key, opt...), nil)
					if err == nil {
						if _, err = tx.Exec(sell); err == nil {
							err = tx.Commit()
						} else {
							failed("rollback", tx.Rollback())
						}
					}
					failed("BeginTx", err)
					if err != nil {
						break
					}
				}
				_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), key, opt...), sell)
				failed("Exec", err)
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				ctx = lockctx.With(ctx, key, opt...)
				// The caller's own statement may take longer than its own limit.
				rows, err := db.QueryContext(ctx, "SELECT /*+ MAX_EXECUTION_TIME(60000) */ stock FROM p WHERE id = 1")
				if err == nil {
					failed("closing the rows", rows.Close())
					_, err = db.ExecContext(ctx, sell)
				}
				failed("read, write", err)
				cancel()
				if !strings.HasPrefix(name, "slots") {
					tx, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), []string{key, key + "2", key + "3"}, opt...), nil)
					if err == nil {
						if _, err = tx.Exec(sell); err == nil {
							err = tx.Commit()
						} else {
							failed("rollback", tx.Rollback())
						}
					}
					failed("several keys", err)
				}
				if name == "optimistic" {
					continue
				}
				held, err := mysqllock.Acquire(dbtest.Limited(t), db, key, opt...)
				if name == "shared" {
					dbtest.OK(t, err)
					dbtest.OK(t, held.Release())
					held, err = mysqllock.Acquire(dbtest.Limited(t), db, key)
				}
				failed("Acquire", err)
				if err != nil || strings.HasPrefix(name, "slots") {
					if err == nil {
						failed("Release", held.Release())
					}
					continue
				}
				_, err = other.ExecContext(lockctx.With(dbtest.Limited(t), key, append(opt, lockctx.NoWait())...), sell)
				if !errors.Is(err, mysqllock.ErrLocked) {
					failed("NoWait", fmt.Errorf("%w, want ErrLocked", err))
				}
				over := make(chan error, 1)
				go func() {
					_, err := other.ExecContext(lockctx.With(dbtest.Limited(t), key, append(opt, lockctx.Wait(time.Minute))...), sell)
					over <- err
				}()
				dbtest.Soon(t, "it waits", func() bool {
					stats, err := mysqllock.Stats(other)
					return err == nil && stats.Waiters > 0 || len(over) > 0
				})
				failed("Release", held.Release())
				failed("wait", <-over)
			}
			db.Close()
			other.Close()
			plain.Close()
		}
	})
}

// escaped is a setting as a DSN has it.
func escaped(setting string) string {
	return strings.NewReplacer("'", "%27", "+", "%2B", " ", "%20", ":", "%3A", ",", "%2C").Replace(setting)
}

// TestProgramsWithDifferentCharacterSetsExcludeEachOther, whatever the key consists of, or one of them is told that
// it cannot.
func TestProgramsWithDifferentCharacterSetsExcludeEachOther(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		const change = "UPDATE p SET stock = stock + 1 WHERE id = 1"
		lock := func(db *sql.DB, key string, opts ...lockctx.Option) (*sql.Tx, error) {
			return db.BeginTx(lockctx.With(dbtest.Limited(t), key, append(opts, lockctx.NoWait())...), nil)
		}
		usual := s.Handle("lockTTL=5s")
		for i, setting := range []string{
			"character_set_connection=utf32", "collation_connection=utf16_bin", "character_set_connection=swe7", "character_set_connection=binary",
			"character_set_client=latin1", "character_set_client=sjis", "charset=gbk", "charset=big5", "character_set_results=utf16", "character_set_client=gbk&sql_mode='NO_BACKSLASH_ESCAPES'", "character_set_connection=utf16&interpolateParams=true",
		} {
			plain := s.Open("mysql", escaped(setting))
			err := plain.Ping()
			plain.Close()
			if err != nil {
				continue // this server does not have it
			}
			db := s.Handle(escaped(setting), "lockTTL=5s")
			for j, name := range []string{"row", "lease", "advisory", "optimistic"} {
				if !some(i, j, 2) {
					continue
				}
				opt := everyStrategy[name]
				keys := []string{dbtest.Random(), strings.ToUpper(dbtest.Random()) + "É\x81\\'表"}
				for _, key := range keys {
					what := fmt.Sprintf("%s, %s, %q", setting, name, key)
					for n, pair := range [][2]*sql.DB{{usual, db}, {db, usual}, {db, db}} {
						times := 1
						if n == 0 && key == keys[0] {
							times = 9 // until statements are prepared
						}
						for range times {
							first, err := lock(pair[0], key, opt)
							if err != nil {
								if !strings.HasPrefix(setting, "character_set_results") {
									t.Errorf("%s: the first of pair %d: %v", what, n, err)
								}
								break
							}
							second, err := lock(pair[1], key, opt)
							if err == nil { // under an optimistic version, which must compare
								_, err = second.Exec(change)
								if err == nil {
									err = second.Commit()
								}
								dbtest.OK(t, err)
								if _, err = first.Exec(change); err == nil {
									err = first.Commit()
								}
								if name != "optimistic" || !errors.Is(err, mysqllock.ErrConflict) {
									t.Errorf("%s: pair %d both have it: %v", what, n, err)
								}
								_ = first.Rollback()
								continue
							}
							if !errors.Is(err, mysqllock.ErrLocked) && !strings.HasPrefix(setting, "character_set_results") {
								t.Errorf("%s: the second of pair %d: %v", what, n, err)
							}
							if _, err = first.Exec(change); err == nil {
								err = first.Commit()
							}
							if err != nil && !strings.HasPrefix(setting, "character_set_results") {
								t.Errorf("%s: the commit of pair %d: %v", what, n, err)
							}
							_ = first.Rollback()
						}
					}
				}
			}
			db.Close()
		}
	})
}
