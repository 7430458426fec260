package unit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockctx"
)

// second is what an attacker would have run.
const second = "UPDATE p SET stock = 0"

// TestATextStaysOneStatement: under a lock, a caller's text that holds two statements is refused, in its arguments,
// too, with each of the ways that lead to a session, and without the DSN's saying so nothing else changes.
func TestATextStaysOneStatement(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, params := range []string{"", "interpolateParams=true"} {
			tap, cfg := new(dbtest.Tap), s.Changed(dbtest.With(params)).Config()
			tap.On(cfg)
			db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{}))
			for way, in := range inASession {
				for _, text := range []string{
					"UPDATE p SET stock = 9; " + second, "SELECT 1; " + second,
					"UPDATE p SET stock = 9 /* ' */; " + second, "UPDATE p SET stock = 9 # ;\n;" + second, "UPDATE p SET stock = 9 /*!; " + second + " */",
					";" + second, "UPDATE p SET stock = 9;;" + second,
				} {
					err := in(dbtest.Limited(t), db, func(ctx context.Context) error { return dbtest.Err(db.ExecContext(ctx, text)) })
					if err == nil {
						t.Errorf("%s, %q: %q runs", params, way, text)
					}
					s.WantStock(1, 10)
				}
				for _, fine := range []struct {
					text string
					args []any
					want string
				}{
					{"SELECT 'a;b'", nil, "a;b"},
					{"SELECT 'a;b';", nil, "a;b"},
					{"SELECT 'a' ; ", nil, "a"},
					{"SELECT ? -- ;", []any{"a"}, "a"},
					{"SELECT ?", []any{"'; " + second + " -- "}, "'; " + second + " -- "},
					{"SELECT ?;", []any{[]byte(`\'; ` + second)}, `\'; ` + second},
				} {
					err := in(dbtest.Limited(t), db, func(ctx context.Context) error {
						var got string
						if err := db.QueryRowContext(ctx, fine.text, fine.args...).Scan(&got); err != nil {
							return err
						}
						if got != fine.want {
							return fmt.Errorf("it is %q", got)
						}
						return nil
					})
					if err != nil {
						t.Errorf("%s, %q: %q with %q: %v", params, way, fine.text, fine.args, err)
					}
				}
			}
			sent := tap.Texts()
			dbtest.OK(t, inASession["Do"](dbtest.Limited(t), db, func(ctx context.Context) error {
				return errors.Join(dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = 10 ;\n")), dbtest.Err(db.ExecContext(ctx, "DO 'a;b'")))
			}))
			if all := sent(); slices.Contains(all, "[prepare] UPDATE p SET stock = 10 ;\n") || !slices.Contains(all, "[prepare] DO 'a;b'") {
				t.Errorf("%s: sent %q", params, all)
			}
		}
	})
}

// inASession are ways of calls that run in a session.
var inASession = map[string]func(ctx context.Context, db *sql.DB, run func(context.Context) error) error{
	"Do": func(ctx context.Context, db *sql.DB, run func(context.Context) error) error {
		return mysqllock.Do(ctx, db, "k", run)
	},
	"a read": func(ctx context.Context, db *sql.DB, run func(context.Context) error) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		if _, err := stock.Read(ctx, db, 1); err != nil {
			return err
		}
		return run(ctx)
	},
}

// TestTheDSNMayAskForSeveralStatements: where the DSN has multiStatements=true callers' texts go as they are.
func TestTheDSNMayAskForSeveralStatements(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("multiStatements=true")
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			return dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1; UPDATE p SET stock = 8 WHERE id = 2"))
		}))
		s.WantStock(1, 9)
		s.WantStock(2, 8)
	})
}

// TestASemicolonInWhatCannotBePreparedIsRefused, with what to do, and the unit of work goes on. MariaDB prepares it.
func TestASemicolonInWhatCannotBePreparedIsRefused(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		mysql.RegisterReaderHandler(s.Name, func() io.Reader { return strings.NewReader("7;10\n") })
		defer mysql.DeregisterReaderHandler(s.Name)
		dbtest.Exec(t, s.Plain, "SET GLOBAL local_infile = ON")
		db := s.Handle()
		load := "LOAD DATA LOCAL INFILE 'Reader::" + s.Name + "' INTO TABLE p FIELDS TERMINATED BY "
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, load+"';' (id, stock)")
			if s.MariaDB() {
				return err
			}
			dbtest.Want(t, err, mysqllock.ErrUnsafe)
			dbtest.Says(t, err, "semicolon", "cannot prepare", "multiStatements=true", "1295")
			return dbtest.Err(db.ExecContext(ctx, load+"0x3B (id, stock)"))
		}))
		s.WantStock(7, 10)
	})
}

// TestOnlySessionsTakeSeveralStatements: of the connectors of a handle one opens connections that run a text of several
// statements, and that is the one for sessions. With Wrap none does.
func TestOnlySessionsTakeSeveralStatements(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var kinds []driver.Connector
		note := mysqllock.Config{Base: func(base driver.Connector) (driver.Connector, error) {
			kinds = append(kinds, base)
			return base, nil
		}}
		several := func() (n int) {
			for _, kind := range kinds {
				conn, err := kind.Connect(t.Context())
				dbtest.OK(t, err)
				if server.Exec(t.Context(), conn, "DO 1; DO 2") == nil {
					n++
				}
				conn.Close()
			}
			kinds = nil
			return n
		}
		s.OpenDB(mysqllock.NewConnector(s.Config(), note))
		if n := several(); n != 2 { // sessions, and connections for leases, on which nothing of the application runs
			t.Errorf("%d connectors do", n)
		}
		s.OpenDB(mysqllock.NewConnector(s.Changed(dbtest.With("multiStatements=true")).Config(), note))
		if n := several(); n != 3 { // and that of the application's statements
			t.Errorf("%d connectors do, with multiStatements=true", n)
		}
		s.OpenDB(mysqllock.Wrap(s.Connector(), note))
		if n := several(); n != 0 {
			t.Errorf("%d connectors do, with Wrap", n)
		}
	})
}

// The settings of a session that change where a text, or an argument in it, ends.
var (
	modes    = []string{"", "ANSI_QUOTES", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"}
	charsets = []string{"utf8mb4", "gbk", "sjis", "big5", "binary"}
)

// FuzzOneStatement runs texts with arguments as callers' statements run on sessions, and asks the server, which counts
// statements, whether any of them was more than one. how is a setting of the session, and how the statement runs.
func FuzzOneStatement(f *testing.F) {
	type account struct {
		*dbtest.Database
		user string
	}
	var servers []account
	for _, d := range dbtest.Each(f) {
		root := d.Connect()
		d.Exec(root, "CREATE TABLE p (id INT PRIMARY KEY, stock VARCHAR(100)) ENGINE=InnoDB")
		user := "u_" + dbtest.Random()
		d.Exec(root, "CREATE USER "+user)
		d.Exec(root, "GRANT ALL ON "+d.Name+".* TO "+user) // and nothing of the server's
		f.Cleanup(func() { d.Exec(root, "DROP USER "+user) })
		servers = append(servers, account{d, user})
	}
	settings := len(modes) * len(charsets)
	for i, seed := range []struct{ text, arg string }{
		{"DO 1; DO 2", ""},
		{"DO 1;DO 2;", ""},
		{";DO 2", ""},
		{"DO 1;\x00DO 2", ""},
		{"DO 1 /* ; */; DO 2", ""},
		{"DO 1 /*! ; DO 2 */", ""},
		{"DO 1 /*!50000 ; DO 2 */ ;", ""},
		{"DO 1 /*M! ; DO 2 */", ""},
		{"DO 1 /*+ ; */ ; DO 2", ""},
		{"DO 1 -- x\n; DO 2", ""},
		{"DO 1 --x\n; DO 2", ""},
		{"DO 1 # '\n; DO 2 # '", ""},
		{"SELECT 'a;b'; DO 2", ""},
		{`SELECT '\'; DO 2 -- '`, ""},
		{`SELECT "\"; DO 2 -- "`, ""},
		{"SELECT `a;`; DO 2", ""},
		{"SELECT ''''; DO 2", ""},
		{"SELECT '\xbf\x27; DO 2 -- '", ""},
		{"SELECT '\x95\x5c'; DO 2 -- '", ""},
		{"SELECT '\x81\x3b'", ""},
		{"SELECT ?", "'; DO 2 -- "},
		{"SELECT ?", `\'; DO 2 -- `},
		{"SELECT ?", "\xbf\x27; DO 2 -- "},
		{"SELECT ?", "\xbf\x5c'; DO 2 -- "},
		{`SELECT "?"`, "\"; DO 2 -- "},
		{"SELECT ? -- ?", "\n; DO 2"},
		{"SELECT ?, ?;", "\\"},
		{"SELECT ?, ?", "', 1; DO 2 -- \\"},
		{"SELECT `?`, ?", "`; DO 2"},
		{"INSERT INTO p VALUES (1, ?) ; ", ";"},
		{"EXECUTE IMMEDIATE 'DO 1; DO 2'", ""},
		{"PREPARE x FROM 'DO 1; DO 2'", ""},
		{"SET @x = ';' ; DO 2", ""},
		{"BEGIN NOT ATOMIC DO 1; DO 2; END", ""},
		{"DELIMITER //\nDO 1//DO 2", ""},
	} {
		for k := range settings {
			if !some(i, k, 2) {
				continue
			}
			f.Add(seed.text, []byte(seed.arg), uint16((k<<3)|(i+k)%8))
		}
	}
	f.Fuzz(func(t *testing.T, text string, arg []byte, how uint16) {
		setting := int(how>>3) % settings
		mode, charset := modes[setting%len(modes)], charsets[setting/len(modes)]
		var args []driver.NamedValue
		for i := range min(strings.Count(text, "?"), 4) {
			args = append(args, driver.NamedValue{Ordinal: i + 1, Value: arg})
			if how&4 != 0 {
				args[i].Value = string(arg)
			}
		}
		st := statement.Statement{Text: text, Args: args, Query: how&1 != 0, Alone: true}
		for _, on := range servers {
			s := on.For(t)
			conn, err := s.Connector(dbtest.As(on.user), func(cfg *mysql.Config) {
				cfg.MultiStatements, cfg.InterpolateParams = true, how&2 != 0
			}).Connect(t.Context())
			dbtest.OK(t, err)
			s.Exec(conn, "SET NAMES "+charset)
			s.Exec(conn, "SET sql_mode = '"+mode+"'")
			before, known := questions(conn)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			rows, _, err := st.Run(ctx, conn)
			if err == nil && rows != nil {
				_, _ = statement.ReadAhead(rows, 0)
			}
			cancel()
			after, alive := questions(conn)
			if known && alive && after-before > 2 { // one is the question
				t.Errorf("%s, sql_mode %q, %s: %q with %q, interpolated %v, were %d statements (%v)", s.Flavour, mode, charset, text, arg, how&2 != 0, after-before-1, err)
			}
			conn.Close()
		}
	})
}

// questions returns how many statements the client of a connection has had run there; false if the connection is lost.
func questions(conn driver.Conn) (n int, alive bool) {
	rows, err := server.Query(context.Background(), conn, "SHOW SESSION STATUS LIKE 'Questions'")
	if err != nil || len(rows) != 1 {
		return 0, false
	}
	n, err = strconv.Atoi(rows[0][1])
	return n, err == nil
}
