package server_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

var several = dbtest.With("multiStatements=true")

// send is how texts are sent in either form.
type send func(ctx context.Context, conn driver.Conn, texts ...string) ([][][]string, error)

// TestBothFormsMeanTheSame: what texts answer, which of them failed, and what they have done, is the same as one text
// and one by one.
func TestBothFormsMeanTheSame(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, d *scratch) {
		own := d.Connect()
		d.Exec(own, "CREATE TABLE t (id INT PRIMARY KEY) ENGINE=InnoDB")
		info, err := server.Probe(t.Context(), own)
		dbtest.OK(t, err)
		guard := info.Guard("1 = 0")
		for name, form := range map[string]send{"packet": server.SendPacket, "singly": server.SendSingly} {
			conn := d.Connect(several)
			for _, test := range []struct {
				texts    []string
				known    int // how many of them are known to have come through
				answers  string
				number   uint16
				rowsLeft string
			}{
				{[]string{"START TRANSACTION", "INSERT INTO t VALUES (1)", "SELECT 7, NULL", "COMMIT", "SELECT 8 WHERE 1 = 0", "(SELECT 9) UNION ALL (SELECT 10)"}, 6, "[[] [] [[7 ]] [] [] [[9] [10]]]", 0, "1"},
				{[]string{"START TRANSACTION", "INSERT INTO t VALUES (2)", guard, "COMMIT", "SELECT 1"}, 2, "[[] []]", 1242, "1"},
				{[]string{"START TRANSACTION", "SELECT 4", "INSERT INTO t VALUES (2)", guard, "COMMIT"}, 3, "[[] [[4]] []]", 1242, "1"},
				{[]string{"START TRANSACTION", "INSERT INTO t VALUES (2)", "SELECT 1", "INSERT INTO t VALUES (1)", "COMMIT"}, 3, "[[] [] [[1]]]", 1062, "1"},
				{[]string{"INSERT INTO t VALUES (2)", "COMMIT", "INSERT INTO t VALUES (1)", "SELECT 1"}, 2, "[[] []]", 1062, "2"},
				{[]string{"COMMIT", "SELECT * FROM t WHERE id = (" + "SELECT 1 UNION SELECT 2" + ")", "DELETE FROM t"}, 1, "[[]]", 1242, "2"},
			} {
				answers, err := form(t.Context(), conn, test.texts...)
				known := fmt.Sprint(answers)
				if name == "singly" { // it may know more
					known = fmt.Sprint(answers[:min(len(answers), test.known)])
				}
				if server.Number(err) != test.number || known != test.answers || len(answers) < test.known {
					t.Errorf("%s: %q: %v, %v", name, test.texts, answers, err)
				}
				d.Exec(conn, "ROLLBACK")
				if n := d.One(own, "SELECT COUNT(*) FROM t"); n != test.rowsLeft {
					t.Errorf("%s: %q: %s rows are committed, want %s", name, test.texts, n, test.rowsLeft)
				}
			}
			d.Exec(own, "DELETE FROM t")
			d.Exec(conn, "SET sql_select_limit = 0")
			if answers, err := form(t.Context(), conn, guard, "COMMIT"); !server.Stopped(err) || len(answers) > 0 {
				t.Errorf("%s: where no SELECT may return rows: %v, %v", name, answers, err)
			}
		}
	})
}

// shown is a connection whose rows are those of show.
type shown struct {
	driver.Conn
	show func(driver.Rows) driver.Rows
}

func (s shown) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := s.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return s.show(rows), nil
}

// firstOnly are rows of a wrapper that knows of no further result set.
type firstOnly struct{ driver.Rows }

// first runs the first statement of a text, as a proxy might, and says that all is well.
type first struct{ driver.Conn }

func (f first) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return f.Conn.(driver.QueryerContext).QueryContext(ctx, text[:len(text)-len("; SELECT 2")], args)
}

// TestAGuardThatStopsNoTextIsFoundOut: the guard of the server's flavour is found to stop a text and to let one
// pass; a guard that does not, a connection without the flag, and what hides answers are found out, and the
// connection goes on.
func TestAGuardThatStopsNoTextIsFoundOut(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, d *scratch) {
		plain, conn := d.Connect(), d.Connect(several)
		info, err := server.Probe(t.Context(), plain)
		dbtest.OK(t, err)
		for _, mode := range []string{"", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"} {
			d.Exec(conn, "SET sql_mode = '"+mode+"', autocommit = 0, sql_select_limit = 1")
			if why, err := info.TakesPackets(t.Context(), conn); why != "" || err != nil {
				t.Errorf("in sql_mode %q: %s, %v", mode, why, err)
			}
		}
		do := func(condition string) string { return "DO IF(" + condition + ", 1, (SELECT 1 UNION ALL SELECT 2))" }
		always := func(string) string { return "SELECT 1" }
		never := func(string) string { return "SELECT (SELECT 1 UNION ALL SELECT 2)" }
		for name, refused := range map[string]func() (string, error){
			"no flag":      func() (string, error) { return info.TakesPackets(t.Context(), plain) },
			"DO":           func() (string, error) { return server.TakesPacketsBy(t.Context(), conn, do) },
			"never stops":  func() (string, error) { return server.TakesPacketsBy(t.Context(), conn, always) },
			"always stops": func() (string, error) { return server.TakesPacketsBy(t.Context(), conn, never) },
			"first rows only": func() (string, error) {
				return info.TakesPackets(t.Context(), shown{conn, func(r driver.Rows) driver.Rows { return firstOnly{r} }})
			},
			"only prepares": func() (string, error) { return info.TakesPackets(t.Context(), struct{ driver.Conn }{conn}) },
			"a part is run": func() (string, error) { return info.TakesPackets(t.Context(), first{conn}) },
		} {
			if why, err := refused(); why == "" || err != nil {
				t.Errorf("%s: %q, %v", name, why, err)
			}
		}
		if got := d.One(conn, "SELECT 1"); got != "1" {
			t.Errorf("afterwards: %s", got)
		}
		d.Exec(plain, "KILL "+d.One(conn, "SELECT CONNECTION_ID()"))
		if why, err := info.TakesPackets(t.Context(), conn); why != "" || !server.Gone(err, conn) {
			t.Errorf("on a connection that is lost: %q, %v", why, err)
		}
	})
}

// TestAnswersThatAreNotThoseOfTheTexts: fewer answers than statements, or more, are no success.
func TestAnswersThatAreNotThoseOfTheTexts(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, d *scratch) {
		conn := d.Connect(several)
		for name, texts := range map[string][]string{"fewer": {"SELECT 1 INTO @x", "SELECT 2"}, "more": {"DO 1", "SET @x = 1; SELECT 3", "SELECT 2"}} {
			answers, err := server.SendPacket(t.Context(), conn, texts...)
			if !errors.Is(err, server.ErrAnswers) || server.Number(err) != 0 {
				t.Errorf("%s: %v, %v", name, answers, err)
			}
		}
	})
}
