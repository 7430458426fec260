package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wrapped gives f a connection of Wrap over s, as Conn.Raw hands it out.
func wrapped(t *testing.T, s *fakeServer, f func(driver.Conn)) {
	t.Helper()
	k, err := mysqllock.Wrap(fakeConnector{s}, mysqllock.Config{})
	dbtest.OK(t, err)
	raw(t, k, f)
}

func raw(t *testing.T, k driver.Connector, f func(driver.Conn)) {
	t.Helper()
	db := sql.OpenDB(k)
	defer db.Close()
	conn, err := db.Conn(context.Background())
	dbtest.OK(t, err)
	defer conn.Close()
	dbtest.OK(t, conn.Raw(func(c any) error { f(c.(driver.Conn)); return nil }))
}

// TestRawLooksLikeMySQL compares with connections of go-sql-driver/mysql
// itself, which are of an unexported type: one end of a pipe plays a server
// that knows enough of the protocol to sign in, prepare and execute.
func TestRawLooksLikeMySQL(t *testing.T) {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Net, cfg.Addr, cfg.DBName = "app", "tcp", "db:3306", "shop"
	cfg.MultiStatements = true
	cfg.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		go playMySQL(server)
		return client, nil
	}
	bare, err := mysql.NewConnector(cfg)
	dbtest.OK(t, err)
	ours, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
	dbtest.OK(t, err)
	interfaces := []reflect.Type{
		reflect.TypeFor[driver.Conn](), reflect.TypeFor[driver.ConnBeginTx](), reflect.TypeFor[driver.ConnPrepareContext](),
		reflect.TypeFor[driver.Execer](), reflect.TypeFor[driver.ExecerContext](), //nolint:staticcheck // it has them
		reflect.TypeFor[driver.Queryer](), reflect.TypeFor[driver.QueryerContext](), //nolint:staticcheck // as above
		reflect.TypeFor[driver.NamedValueChecker](), reflect.TypeFor[driver.Pinger](),
		reflect.TypeFor[driver.SessionResetter](), reflect.TypeFor[driver.Validator](),
		reflect.TypeFor[driver.Stmt](), reflect.TypeFor[driver.StmtExecContext](), reflect.TypeFor[driver.StmtQueryContext](),
		reflect.TypeFor[driver.ColumnConverter](), //nolint:staticcheck // it has it
		reflect.TypeFor[io.Closer](),
	}
	has := func(v any) (names []string) {
		for _, i := range interfaces {
			if reflect.TypeOf(v).Implements(i) {
				names = append(names, i.String())
			}
		}
		return names
	}
	compareWith := func(what string, ours, bare any) {
		if got, want := has(ours), has(bare); !slices.Equal(got, want) {
			t.Errorf("a %s has\n%q, that of go-sql-driver/mysql\n%q", what, got, want)
		}
	}
	prepare := func(c driver.Conn) driver.Stmt {
		stmt, err := c.Prepare("UPDATE a")
		dbtest.OK(t, err)
		return stmt
	}
	raw(t, bare, func(theirs driver.Conn) {
		raw(t, ours, func(c driver.Conn) {
			compareWith("connection", c, theirs)
			compareWith("statement", prepare(c), prepare(theirs))

			u, ok := c.(interface{ Unwrap() driver.Conn })
			if !ok {
				t.Fatal("a connection has no Unwrap")
			}
			if got := u.Unwrap(); reflect.TypeOf(got) != reflect.TypeOf(theirs) {
				t.Errorf("Unwrap returns %T, want %T", got, theirs)
			}
			res, err := c.(driver.ExecerContext).ExecContext(context.Background(), "UPDATE a; UPDATE b", nil)
			dbtest.OK(t, err)
			all, ok := res.(mysql.Result)
			if !ok {
				t.Fatalf("a result is %T, want mysql.Result", res)
			}
			if got := all.AllRowsAffected(); !slices.Equal(got, []int64{1, 2}) {
				t.Errorf("two statements affect %v, want 1 and 2", got)
			}
		})
	})
}

// playMySQL signs one client in and answers each query with the results of two
// statements, each prepare with a statement that has no parameters.
func playMySQL(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	send := func(seq byte, payload string) {
		_, _ = io.WriteString(conn, string([]byte{byte(len(payload)), 0, 0, seq})+payload)
	}
	receive := func() []byte {
		var head [4]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return nil
		}
		body := make([]byte, int(head[0])|int(head[1])<<8|int(head[2])<<16)
		_, _ = io.ReadFull(in, body)
		return body
	}
	const okay = "\x00\x00\x00\x02\x00\x00\x00"
	send(0, "\x0a8.4.0\x00"+"\x01\x00\x00\x00"+"12345678\x00"+
		"\x0f\xa2"+"\xff\x02\x00"+"\x0b\x00"+"\x15"+strings.Repeat("\x00", 10)+
		"123456789012\x00"+"mysql_native_password\x00")
	receive()
	send(2, okay)
	for {
		switch command := receive(); {
		case len(command) == 0, command[0] == 0x01: // the connection, or COM_QUIT
			return
		case command[0] == 0x03: // COM_QUERY: one row affected, more results; two rows affected
			send(1, "\x00\x01\x05\x0a\x00\x00\x00")
			send(2, "\x00\x02\x06\x02\x00\x00\x00")
		case command[0] == 0x16: // COM_STMT_PREPARE: number 1, no columns, no parameters
			send(1, "\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
		case command[0] != 0x19: // COM_STMT_CLOSE has no answer
			send(1, okay)
		}
	}
}

// TestNoGapOfSqlmwIsOpen: there is a subtest for each gap that was found in the generic interception layer
// ngrok/sqlmw, which is not above this driver for that reason, but beneath it for those who ask for it, and that the
// comparisons above, which are made without and with an interceptor, do not see: they cover Exec where the driver has
// no Execer, options of transactions where it has no ConnBeginTx, and ColumnConverter.
func TestNoGapOfSqlmwIsOpen(t *testing.T) {
	ctx := context.Background()
	hint, cancel := context.WithCancel(ctx)
	defer cancel()
	hint = lockctx.With(hint, "k")
	open := func(t *testing.T, s *fakeServer) *sql.DB {
		k, err := mysqllock.Wrap(fakeConnector{s}, mysqllock.Config{Schema: "manual"})
		dbtest.OK(t, err)
		db := sql.OpenDB(k)
		t.Cleanup(func() { db.Close() })
		return db
	}
	for _, gap := range []struct {
		name string
		test func(t *testing.T)
	}{
		{"mysql.Result is lost", func(t *testing.T) {
			wrapped(t, newFake(), func(c driver.Conn) {
				res, err := c.(driver.ExecerContext).ExecContext(ctx, "UPDATE a", nil)
				if _, ok := res.(mysql.Result); err != nil || !ok {
					t.Errorf("the result is %T, %v", res, err)
				}
				stmt, err := c.Prepare("UPDATE a")
				dbtest.OK(t, err)
				defer stmt.Close()
				res, err = stmt.(driver.StmtExecContext).ExecContext(ctx, nil)
				if _, ok := res.(mysql.Result); err != nil || !ok {
					t.Errorf("the result of a prepared statement is %T, %v", res, err)
				}
			})
		}},
		{"DB.Driver is of no use", func(t *testing.T) {
			db := open(t, newFake())
			if _, ok := db.Driver().(*mysqllock.Driver); !ok {
				t.Errorf("the driver is %T", db.Driver())
			}
			if stats, err := mysqllock.Stats(db); err != nil || stats.Max == 0 {
				t.Errorf("Stats finds %+v, %v", stats, err)
			}
		}},
		{"ErrSkip looks like a failure", func(t *testing.T) {
			s := newFake().mysqlAnswers()
			answers := s.answer
			s.answer = func(c *fakeConn, text string) (fakeReply, error) {
				if strings.Contains(text, "?") && s.first(text) {
					return fakeReply{}, driver.ErrSkip
				}
				return answers(c, text)
			}
			if _, err := open(t, s).ExecContext(hint, "UPDATE a SET b = ?", 1); err != nil {
				t.Error(err)
			}
			sent := s.sent()
			if got, want := sent[len(sent)-5:], []string{
				"3 ExecContext UPDATE a SET b = ? [{ 1 1}]", // on a session, behind the connection of database/sql and one for control
				"3 PrepareContext UPDATE a SET b = ?",
				"3 Stmt.ExecContext UPDATE a SET b = ? [{ 1 1}]",
				"3 Stmt.Close UPDATE a SET b = ?",
				"3 Commit",
			}; !slices.Equal(got, want) {
				t.Errorf("the server got\n%s", strings.Join(got, "\n"))
			}
		}},
		{"calls without a context are not seen", func(t *testing.T) {
			s := newFake().mysqlAnswers()
			k, err := mysqllock.Wrap(fakeConnector{s}, mysqllock.Config{Schema: "manual"})
			dbtest.OK(t, err)
			raw(t, k, func(c driver.Conn) {
				dbtest.OK(t, dbtest.Err(c.(driver.ConnBeginTx).BeginTx(hint, driver.TxOptions{})))
				stmt, err := c.Prepare("COMMIT")
				dbtest.OK(t, err)
				// These would end the lock, so whoever sees them refuses them.
				_, err1 := c.(driver.Execer).Exec("COMMIT", nil)   //nolint:staticcheck // the old form is meant
				_, err2 := c.(driver.Queryer).Query("COMMIT", nil) //nolint:staticcheck // as above
				_, err3 := stmt.Exec(nil)                          //nolint:staticcheck // as above
				_, err4 := stmt.Query(nil)                         //nolint:staticcheck // as above
				for i, err := range []error{err1, err2, err3, err4} {
					if !errors.Is(err, mysqllock.ErrUnsafe) {
						t.Errorf("call %d returns %v, want ErrUnsafe", i+1, err)
					}
				}
				s.since()
				dbtest.OK(t, c.Close())
				if got, want := s.sent(), []string{"3 Rollback"}; !slices.Equal(got, want) {
					t.Errorf("the server got\n%s", strings.Join(got, "\n"))
				}
			})
		}},
		{"a cancelled context reaches Rollback", func(t *testing.T) {
			s := newFake().mysqlAnswers()
			db := open(t, s)
			ended, end := context.WithCancel(marked(hint, "caller"))
			_, err := db.BeginTx(ended, nil)
			dbtest.OK(t, err)
			end()
			db.SetMaxOpenConns(1)
			if _, err := db.Exec("UPDATE next"); err != nil { // waits for the rollback
				t.Fatal(err)
			}
			for _, line := range s.since() {
				if strings.Contains(line, context.Canceled.Error()) {
					t.Errorf("the server got %s", line)
				}
			}
		}},
	} {
		t.Run(gap.name, gap.test)
	}
}
