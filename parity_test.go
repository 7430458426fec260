package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// caller is the code of an application. It writes down what it sees between
// what arrives at the server.
type caller struct {
	t *testing.T
	s *fakeServer

	settle func() // waits until nothing runs any more
}

// same runs act on a bare fake driver and on a wrapped one, without and with an
// interceptor that does nothing.
func same(t *testing.T, server func() *fakeServer, act func(c *caller, db *sql.DB)) {
	t.Helper()
	transcript := func(wrap bool, cfg mysqllock.Config) []string {
		s := server()
		c := &caller{t, s, func() {}}
		var k driver.Connector = fakeCloser{fakeConnector{s}}
		if wrap {
			var err error
			if k, err = mysqllock.Wrap(k, cfg); err != nil {
				t.Fatal(err)
			}
		}
		db := sql.OpenDB(k)
		act(c, db)
		c.sees("db.Close", db.Close())
		return s.since()
	}
	bare := transcript(false, mysqllock.Config{})
	compare(t, bare, transcript(true, mysqllock.Config{}))
	compare(t, bare, transcript(true, mysqllock.Config{Base: intercept.With(sqlmw.NullInterceptor{})}))
}

func compare(t *testing.T, bare, wrapped []string) {
	t.Helper()
	for i := range max(len(bare), len(wrapped)) {
		if i < len(bare) && i < len(wrapped) && bare[i] == wrapped[i] {
			continue
		}
		from := max(0, i-4)
		upTo := func(log []string) string { return strings.Join(log[min(from, len(log)):min(i+4, len(log))], "\n\t") }
		t.Errorf("from line %d on\nbare:\n\t%s\nwrapped:\n\t%s", i, upTo(bare), upTo(wrapped))
		return
	}
}

func (c *caller) sees(what string, err error, details ...any) {
	c.s.write("= %s: %s %v", what, fakeErr(err), details)
}

// fakeErr says all that code can find out about an error.
func fakeErr(err error) string {
	if err == nil {
		return "ok"
	}
	text := fmt.Sprintf("%T %q", err, err)
	for _, target := range []error{
		errFake, errFakeClose, driver.ErrBadConn, driver.ErrSkip, sql.ErrConnDone, sql.ErrTxDone,
		sql.ErrNoRows, context.Canceled, context.DeadlineExceeded, mysqllock.ErrClosed,
	} {
		if errors.Is(err, target) {
			text += fmt.Sprintf(" is %q", target)
		}
	}
	return text
}

type queryer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	PrepareContext(context.Context, string) (*sql.Stmt, error)
}

func (c *caller) exec(ctx context.Context, q queryer, text string, args ...any) {
	res, err := q.ExecContext(ctx, text, args...)
	c.result("exec "+text, res, err)
}

func (c *caller) result(what string, res sql.Result, err error) {
	if err != nil {
		c.sees(what, err)
		return
	}
	id, err1 := res.LastInsertId()
	n, err2 := res.RowsAffected()
	c.sees(what, errors.Join(err1, err2), id, n)
}

func (c *caller) query(ctx context.Context, q queryer, text string, args ...any) {
	rows, err := q.QueryContext(ctx, text, args...)
	c.rows("query "+text, rows, err)
}

func (c *caller) rows(what string, rows *sql.Rows, err error) {
	if err != nil {
		c.sees(what, err)
		return
	}
	c.settle()
	var all []string
	for {
		names, err := rows.Columns()
		all = append(all, fmt.Sprint(names, err))
		types, err := rows.ColumnTypes()
		all = append(all, describe(types), fmt.Sprint(err))
		for rows.Next() {
			var a, b any
			err := rows.Scan(&a, &b)
			all = append(all, fmt.Sprintf("%T=%v %s %v", a, a, short(b), err))
		}
		all = append(all, fakeErr(rows.Err()))
		if !rows.NextResultSet() {
			break
		}
	}
	c.sees(what, rows.Close(), all, fakeErr(rows.Err()))
}

// short keeps the log readable where rows are long.
func short(v any) string {
	text := fmt.Sprintf("%T=%s", v, v)
	return fmt.Sprintf("%.40s (%d)", text, len(text))
}

func describe(types []*sql.ColumnType) string {
	var all []string
	for _, ct := range types {
		length, hasLength := ct.Length()
		nullable, hasNullable := ct.Nullable()
		precision, scale, hasPrecision := ct.DecimalSize()
		all = append(all, fmt.Sprint(ct.Name(), ct.DatabaseTypeName(), ct.ScanType(),
			length, hasLength, nullable, hasNullable, precision, scale, hasPrecision))
	}
	return strings.Join(all, "; ")
}

// inMiles is a driver.Valuer.
type inMiles float64

func (im inMiles) Value() (driver.Value, error) { return float64(im) * 1.609344, nil }

// late is a driver.Valuer that takes a second.
type late struct{}

func (late) Value() (driver.Value, error) { time.Sleep(time.Second); return "late", nil }

var someNumber = 3

// statements are run in every way there is.
var statements = []struct {
	text string
	args []any
}{
	{"UPDATE a SET b = 1", nil},
	{"UPDATE a SET b = ?, c = ?", []any{7, "seven"}},
	{"UPDATE a SET b = ?, c = ?", []any{nil, []byte("bytes")}},
	{"UPDATE a SET b = ?, c = ?", []any{true, time.Unix(1, 0).UTC()}},
	{"UPDATE a SET b = ?, c = ?", []any{inMiles(1), &someNumber}},
	{"UPDATE a SET b = ?, c = ?", []any{sql.NullString{}, uint64(1 << 63)}},
	{"UPDATE a SET b = ?, c = ?", []any{7}},
	{"UPDATE a SET b = ?, c = ?", []any{7, 8, 9}},
	{"UPDATE a SET b = ?", []any{sql.Named("name", 7)}},
	{"UPDATE a SET b = ?", []any{sql.Named("1", 7)}},
	{"UPDATE a SET b = ?", []any{fakePoint{1, 2}}},
	{"UPDATE a SET b = ?", []any{fakeGone{}, 7}},
	{"UPDATE a SET b = ?", []any{fakeRefused{}}},
	{"UPDATE a SET b = ?", []any{struct{}{}}},
	{"UPDATE a SET b = 1 -- skip", nil},
	{"UPDATE a SET b = ?, c = ? -- skip", []any{7, "seven"}},
	{"UPDATE a SET b = ? -- skip", []any{7, "seven"}},
	{"UPDATE a SET b = ? -- skip", []any{fakePoint{1, 2}}},
	{"UPDATE a SET b = 1 -- skip, prepare fails", nil},
	{"UPDATE a SET b = 1 -- skip, fail", nil},
	{"UPDATE a SET b = 1 -- fail", nil},
	{"SELECT a -- rows fail", nil},
	{"SELECT a -- skip, rows fail", nil},
}

func forEachShape(t *testing.T, test func(t *testing.T, server func() *fakeServer)) {
	for n, cs := range connShapes {
		t.Run(cs.name, func(t *testing.T) {
			for i, ss := range stmtShapes {
				if (n+i)%3 > 0 && i < len(stmtShapes)-1 && n < len(connShapes)-1 && !dbtest.Long(false, true) {
					continue // of two kinds that no driver here is of
				}
				test(t, func() *fakeServer {
					return &fakeServer{conn: cs.make, stmt: ss.make, rows: rowsLikeMySQL.make, anyInput: i%3 == 0}
				})
				if t.Failed() {
					t.Fatalf("with statements that have: %s", ss.name)
				}
			}
		})
	}
}

func TestStatementsWithoutAHintRunAsOnThePlainDriver(t *testing.T) {
	ctx := marked(context.Background(), "caller")
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		same(t, server, func(c *caller, db *sql.DB) {
			for _, st := range statements {
				c.exec(ctx, db, st.text, st.args...)
				c.query(ctx, db, st.text, st.args...)
			}
			conn, err := db.Conn(ctx)
			c.sees("conn", err)
			tx, err := db.BeginTx(ctx, nil)
			c.sees("begin", err)
			for _, st := range statements {
				for _, q := range []queryer{conn, tx} {
					c.exec(ctx, q, st.text, st.args...)
					c.query(ctx, q, st.text, st.args...)
				}
			}
			c.sees("commit", tx.Commit())
			c.exec(ctx, tx, "UPDATE a SET b = 2")
			c.sees("conn.Close", conn.Close())
			c.exec(ctx, conn, "UPDATE a SET b = 2")
		})
	})
}

// TestPreparedStatementsRunAsOnThePlainDriver without a hint.
func TestPreparedStatementsRunAsOnThePlainDriver(t *testing.T) {
	ctx := marked(context.Background(), "caller")
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		same(t, server, func(c *caller, db *sql.DB) {
			for _, st := range statements {
				tx, err := db.BeginTx(ctx, nil)
				c.sees("begin", err)
				for _, q := range []queryer{db, tx} {
					p, err := q.PrepareContext(ctx, st.text)
					c.sees("prepare "+st.text, err)
					if err != nil {
						continue
					}
					res, err := p.ExecContext(ctx, st.args...)
					c.result("exec prepared", res, err)
					rows, err := p.QueryContext(ctx, st.args...)
					c.rows("query prepared", rows, err)
					res, err = tx.StmtContext(ctx, p).ExecContext(ctx, st.args...)
					c.result("exec prepared in tx", res, err)
					c.sees("stmt.Close", p.Close())
				}
				c.sees("rollback", tx.Rollback())
			}
		})
	})
}

// TestBadConnectionsAreTriedAgainAsOnThePlainDriver.
func TestBadConnectionsAreTriedAgainAsOnThePlainDriver(t *testing.T) {
	ctx := marked(context.Background(), "caller")
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		same(t, server, func(c *caller, db *sql.DB) {
			for _, how := range []string{"bad once", "bad always", "skip, bad once", "skip, bad always", "rows bad"} {
				c.exec(ctx, db, "UPDATE a -- "+how)
				c.query(ctx, db, "SELECT a -- "+how)
				p, err := db.PrepareContext(ctx, "UPDATE b -- "+how)
				c.sees("prepare", err)
				res, err := p.ExecContext(ctx)
				c.result("exec prepared", res, err)
				c.sees("stmt.Close", p.Close())

				tx, err := db.BeginTx(ctx, nil)
				c.sees("begin", err)
				c.exec(ctx, tx, "UPDATE c -- "+how)
				c.query(ctx, tx, "SELECT c -- "+how)
				c.sees("commit", tx.Commit())

				conn, err := db.Conn(ctx)
				c.sees("conn", err)
				c.exec(ctx, conn, "UPDATE d -- "+how)
				c.query(ctx, conn, "SELECT d -- "+how)
				c.sees("conn.Close", conn.Close())
			}
			for _, err := range []error{errFake, driver.ErrBadConn} {
				c.s.txErr = err
				tx, err := db.BeginTx(ctx, nil)
				c.sees("begin", err)
				c.sees("commit", tx.Commit())
				tx, err = db.BeginTx(ctx, nil)
				c.sees("begin", err)
				c.sees("rollback", tx.Rollback())
			}
			c.s.closeErr = errFakeClose
		})
	})
}

// TestConnectionsAreReusedAsOnThePlainDriver goes through what decides whether a connection is
// used again.
func TestConnectionsAreReusedAsOnThePlainDriver(t *testing.T) {
	ctx := marked(context.Background(), "caller")
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		same(t, server, func(c *caller, db *sql.DB) {
			for _, reset := range []error{nil, errFake, driver.ErrBadConn} {
				for _, invalid := range []bool{false, true} {
					c.s.reset, c.s.invalid = reset, invalid
					for range 2 {
						c.exec(ctx, db, "UPDATE a")
					}
					c.sees("ping", db.PingContext(ctx))
					conn, err := db.Conn(ctx)
					c.sees("conn", err)
					if err == nil {
						c.sees("conn.Ping", conn.PingContext(ctx))
						c.sees("conn.Close", conn.Close())
					}
				}
			}
			c.s.closeErr = errFakeClose
		})
	})
}

// TestTransactionOptionsMeanWhatTheyDoOnThePlainDriver without a hint.
func TestTransactionOptionsMeanWhatTheyDoOnThePlainDriver(t *testing.T) {
	ctx := marked(context.Background(), "caller")
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		same(t, server, func(c *caller, db *sql.DB) {
			for level := sql.LevelDefault; level <= sql.LevelLinearizable; level++ {
				for _, readOnly := range []bool{false, true} {
					tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level, ReadOnly: readOnly})
					c.sees(fmt.Sprint("begin", level, readOnly), err)
					if err == nil {
						c.sees("rollback", tx.Rollback())
					}
				}
			}
			tx, err := db.Begin()
			c.sees("begin without context", err)
			c.sees("commit", tx.Commit())
		})
	})
}

// TestContextsEndStatementsAsOnThePlainDriver runs everything with contexts that end before and
// while it runs. Time stands still but for the statements that take a second.
func TestContextsEndStatementsAsOnThePlainDriver(t *testing.T) {
	forEachShape(t, func(t *testing.T, server func() *fakeServer) {
		synctest.Test(t, func(t *testing.T) {
			same(t, server, func(c *caller, db *sql.DB) {
				c.settle = synctest.Wait
				ended, cancel := context.WithCancel(marked(context.Background(), "ended"))
				tx, err := db.BeginTx(context.Background(), nil)
				c.sees("begin", err)
				cancel()
				for _, q := range []queryer{db, tx} {
					c.exec(ended, q, "UPDATE a")
					c.query(ended, q, "SELECT a")
					_, err := q.PrepareContext(ended, "UPDATE a")
					c.sees("prepare", err)
				}
				_, err = db.BeginTx(ended, nil)
				c.sees("begin", err)
				c.sees("ping", db.PingContext(ended))
				c.sees("rollback", tx.Rollback())

				soon := func() (context.Context, context.CancelFunc) {
					return context.WithTimeout(marked(context.Background(), "soon"), 100*time.Millisecond)
				}
				for _, text := range []string{"slow", "slow, skip"} {
					ctx, cancel := soon()
					c.exec(ctx, db, "UPDATE "+text)
					cancel()
					ctx, cancel = soon()
					c.query(ctx, db, "SELECT "+text)
					cancel()
					ctx, cancel = soon()
					p, err := db.PrepareContext(ctx, "UPDATE "+text)
					c.sees("prepare", err)
					if err == nil {
						c.sees("stmt.Close", p.Close())
					}
					cancel()
				}
				for _, args := range [][]any{nil, {late{}}} {
					text := []string{"UPDATE slow", "UPDATE a SET b = ?"}[len(args)]
					p, err := db.PrepareContext(context.Background(), text)
					c.sees("prepare", err)
					ctx, cancel := soon()
					res, err := p.ExecContext(ctx, args...)
					c.result("exec prepared", res, err)
					cancel()
					ctx, cancel = soon()
					rows, err := p.QueryContext(ctx, args...)
					c.rows("query prepared", rows, err)
					cancel()
					c.sees("stmt.Close", p.Close())
				}
				ctx, cancel := soon()
				c.exec(ctx, db, "UPDATE a SET b = ?", late{})
				cancel()
				ctx, cancel = soon()
				c.query(ctx, db, "UPDATE a SET b = ?", late{})
				cancel()

				c.s.begins = "slow"
				ctx, cancel = soon()
				_, err = db.BeginTx(ctx, nil)
				c.sees("begin", err)
				cancel()
				c.s.begins = ""

				// The end of the context rolls back, and the connection is
				// kept only by a driver that can reset and check it.
				for _, work := range []string{"", "UPDATE a", "UPDATE slow"} {
					ctx, cancel := context.WithCancel(marked(context.Background(), "tx"))
					tx, err := db.BeginTx(ctx, nil)
					c.sees("begin", err)
					if work != "" {
						c.exec(ctx, tx, work)
					}
					cancel()
					synctest.Wait()
					c.exec(context.Background(), tx, "UPDATE late")
					c.sees("commit", tx.Commit())
					c.sees("rollback", tx.Rollback())
					c.sees("open", nil, db.Stats().OpenConnections)
					c.exec(context.Background(), db, "UPDATE next")
				}

				// Rows end with the context.
				ctx, cancel = context.WithCancel(marked(context.Background(), "rows"))
				rows, err := db.QueryContext(ctx, "SELECT a")
				c.sees("query", err, rows.Next())
				cancel()
				synctest.Wait()
				c.sees("rows", rows.Err(), rows.Next())
			})
		})
	})
}

// TestAHandleClosesABaseConnectorThatCanBeClosed, and does without where one cannot be.
func TestAHandleClosesABaseConnectorThatCanBeClosed(t *testing.T) {
	s := newFake()
	s.closeErr = errFakeClose
	k, err := mysqllock.Wrap(fakeCloser{fakeConnector{s}}, mysqllock.Config{})
	dbtest.OK(t, err)
	if err := sql.OpenDB(k).Close(); !errors.Is(err, errFakeClose) {
		t.Errorf("Close returned %v, want the base connector's error", err)
	}
	if log := s.since(); !slices.Equal(log, []string{"connector close"}) {
		t.Errorf("the base connector got %q", log)
	}

	k, err = mysqllock.Wrap(fakeConnector{s}, mysqllock.Config{})
	dbtest.OK(t, err)
	if err := sql.OpenDB(k).Close(); err != nil {
		t.Errorf("Close of a connector that is no closer returned %v", err)
	}
}

// TestPlainValuesComeBackUntouched goes below database/sql: what the base
// driver returns is what comes out, not a copy or a wrapper.
func TestPlainValuesComeBackUntouched(t *testing.T) {
	ctx := context.Background()
	for _, shape := range rowsShapes {
		s := newFake()
		s.rows = shape.make
		wrapped(t, s, func(c driver.Conn) {
			rows, err := c.(driver.QueryerContext).QueryContext(ctx, "SELECT a", nil)
			dbtest.OK(t, err)
			if got, want := reflect.TypeOf(rows), reflect.TypeOf(shape.make(nil)); got != want {
				t.Errorf("rows with %s come back as %v", shape.name, got)
			}
			res, err := c.(driver.ExecerContext).ExecContext(ctx, "UPDATE a", nil)
			dbtest.OK(t, err)
			if res != (fakeResult{5, 2}) {
				t.Errorf("the result comes back as %#v", res)
			}
			for _, text := range []string{"fail", "skip", "bad always"} {
				want := map[string]error{"fail": errFake, "skip": driver.ErrSkip, "bad always": driver.ErrBadConn}[text]
				if _, err := c.(driver.ExecerContext).ExecContext(ctx, text, nil); err != want { //nolint:errorlint // the very same
					t.Errorf("the error of %q comes back as %v", text, err)
				}
			}
		})
	}
}

// TestRowsUnderALockLookAsTheyDoWithout: some are read ahead, and of others the rest is streamed.
func TestRowsUnderALockLookAsTheyDoWithout(t *testing.T) {
	big := fakeReply{columns: []string{"id", "text"}, more: [][]driver.Value{{int64(1), "x"}, {int64(2), "y"}}}
	for i := range 6 {
		big.rows = append(big.rows, []driver.Value{int64(i), strings.Repeat("x", 1<<20)})
	}
	replies := map[string]fakeReply{
		"few":  fakeTable(),
		"none": {columns: []string{"id", "name"}, more: [][]driver.Value{{int64(1), "x"}}},
		"many": big,
	}
	for name, reply := range replies {
		for _, shape := range rowsShapes {
			t.Run(name+"/"+shape.name, func(t *testing.T) {
				s := newFake().mysqlAnswers()
				s.rows = shape.make
				answers := s.answer
				s.answer = func(c *fakeConn, text string) (fakeReply, error) {
					if strings.HasPrefix(text, "SELECT a") {
						return reply, nil
					}
					return answers(c, text)
				}
				k, err := mysqllock.Wrap(fakeConnector{s}, mysqllock.Config{Schema: "manual"})
				dbtest.OK(t, err)
				db := sql.OpenDB(k)
				defer db.Close()
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				hint := lockctx.With(ctx, "k")
				tx, err := db.BeginTx(lockctx.With(ctx, "tx"), nil)
				dbtest.OK(t, err)
				defer tx.Rollback()
				sees := func(ctx context.Context, q queryer) []string {
					s.since()
					(&caller{t, s, func() {}}).query(ctx, q, "SELECT a")
					return slices.DeleteFunc(s.since(), func(line string) bool { return !strings.HasPrefix(line, "= ") })
				}
				plain := sees(ctx, db)
				compare(t, plain, sees(ctx, tx))
				compare(t, plain, sees(hint, db))
				compare(t, plain, sees(hint, db)) // on the session again
			})
		}
	}
}
