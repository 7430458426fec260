package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Settings of connections that change what BEGIN and COMMIT mean: by the DSN, the
// server's default, init_connect and plain SQL text.

// account makes an account without administrative rights, for which init_connect
// counts, and returns a handle of it with the driver under test.
func (s *scratch) account(t *testing.T, params ...string) *sql.DB {
	t.Helper()
	dbtest.Exec(t, s.plain, "CREATE USER IF NOT EXISTS app@'%' IDENTIFIED BY 'pw'")
	dbtest.Exec(t, s.plain, "GRANT ALL ON "+s.Name+".* TO app@'%'")
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
	"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
}

// refusedEverywhere runs hinted statements on the one connection of db, which has a
// write of the caller's that is not committed: nothing may commit it.
func (s *scratch) refusedEverywhere(t *testing.T, what string, db *sql.DB) {
	t.Helper()
	db.SetMaxOpenConns(1)
	dbtest.Exec(t, db, "UPDATE p SET stock = 1 WHERE id = 1")
	for name, opt := range everyStrategy {
		ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 2").Scan(&stock); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("%s, %s: read: %v, want ErrUnsafe", what, name, err)
		}
		if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 3 WHERE id = 2"); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "autocommit=1") {
			t.Errorf("%s, %s: write: %v, want ErrUnsafe that says what to set", what, name, err)
		}
	}
	dbtest.Exec(t, db, "ROLLBACK")
	s.wantStock(1, 10)
	s.wantStock(2, 10)
}

// TestAutocommitOff has autocommit off from the beginning.
func TestAutocommitOff(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.plain.SetMaxOpenConns(1)
		dbtest.OK(t, s.plain.Ping())
		s.refusedEverywhere(t, "DSN", s.account(t, "autocommit=0"))

		for _, off := range []string{"autocommit", "init_connect"} {
			if off == "autocommit" {
				dbtest.Exec(t, s.plain, "SET GLOBAL autocommit = 0")
			} else {
				dbtest.Exec(t, s.plain, "SET GLOBAL init_connect = 'SET autocommit = 0'")
			}
			s.refusedEverywhere(t, off, s.account(t))

			db := s.account(t, "autocommit=1") // as the error says
			for name, opt := range everyStrategy {
				ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
				var stock int
				dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 3").Scan(&stock))
				if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 3"); err != nil {
					t.Errorf("%s, autocommit=1 in the DSN, %s: %v", off, name, err)
				}
			}
			dbtest.Exec(t, s.plain, "SET GLOBAL autocommit = 1")
			dbtest.Exec(t, s.plain, "SET GLOBAL init_connect = ''")
		}
		s.wantStock(3, 18)
	})
}

// TestAutocommitSwitchedOff switches the server's default while a handle is in use:
// connections that are opened after that are noticed.
func TestAutocommitSwitchedOff(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.plain.SetMaxOpenConns(1)
		dbtest.OK(t, s.plain.Ping())
		db := s.account(t)
		dbtest.Exec(t, s.plain, "SET GLOBAL autocommit = 0")
		db.SetMaxIdleConns(0) // each statement has a new connection
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		var stock int
		err := db.QueryRowContext(lockctx.With(ctx, dbtest.Random()), "SELECT stock FROM p WHERE id = 2").Scan(&stock)
		if !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("read: %v, want ErrUnsafe", err)
		}
	})
}

// TestCompletionType has COMMIT begin the next transaction, or end the connection.
func TestCompletionType(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, value := range []string{"1", "2", "'CHAIN'", "NO_CHAIN"} {
			db := s.open("completion_type=" + strings.ReplaceAll(value, "'", "%27"))
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

// TestSetByText has plain SQL text set what locks need as it was.
func TestSetByText(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		conn := conned(t, db)
		for _, set := range []string{"SET completion_type = 1", "SET SESSION completion_type = 'RELEASE'", "SET @@timestamp = 1000000000"} {
			dbtest.Exec(t, conn, set)
			for name, opt := range everyStrategy {
				ctx := lockctx.With(dbtest.Limited(t), dbtest.Random(), opt)
				if _, err := conn.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1"); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("%s, %s: write: %v, want ErrUnsafe", set, name, err)
				}
				if _, err := conn.BeginTx(ctx, nil); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("%s, %s: BeginTx: %v, want ErrUnsafe", set, name, err)
				}
				tx, err := conn.BeginTx(dbtest.Limited(t), nil)
				dbtest.OK(t, err)
				if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1"); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("%s, %s: late: %v, want ErrUnsafe", set, name, err)
				}
				dbtest.Exec(t, conn, "SET completion_type = DEFAULT") // so that it ends here
				dbtest.OK(t, tx.Rollback())
				dbtest.Exec(t, conn, set)
			}
			dbtest.Exec(t, conn, "SET completion_type = DEFAULT, timestamp = DEFAULT")
			dbtest.Exec(t, runsIn{conn, lockctx.With(dbtest.Limited(t), dbtest.Random())}, "UPDATE p SET stock = stock WHERE id = 1")
		}
	})
}

// TestReadOnlyByDefault has transactions that are READ ONLY unless they say
// otherwise: nothing is written, nothing is locked, and there is an error.
func TestReadOnlyByDefault(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		setting := "transaction_read_only=1"
		if s.MariaDB() {
			setting = "tx_read_only=1"
		}
		db := s.open(setting)
		s.open().PingContext(dbtest.Limited(t))
		for name, opt := range everyStrategy {
			if _, err := db.ExecContext(lockctx.With(dbtest.Limited(t), dbtest.Random(), opt), "UPDATE p SET stock = 0 WHERE id = 1"); err == nil {
				t.Errorf("%s: write succeeded", name)
			}
		}
		s.wantStock(1, 10)
	})
}
