package server_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// scratch is a database of one test with a table n that has the rows 1 and 2.
type scratch struct {
	*dbtest.Database
	conn driver.Conn
}

func newScratch(d *dbtest.Database) *scratch {
	s := &scratch{d, d.Connect()}
	s.Exec(s.conn, "CREATE TABLE n (id INT PRIMARY KEY) ENGINE=InnoDB")
	s.Exec(s.conn, "INSERT INTO n VALUES (1), (2)")
	return s
}

// TestProbeFindsWhatTheServerSaysOfItself when it is asked for each.
func TestProbeFindsWhatTheServerSaysOfItself(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		info, err := server.Probe(t.Context(), s.conn)
		dbtest.OK(t, err)
		if info.MariaDB != s.MariaDB() || info.Version != s.One(s.conn, "SELECT VERSION()") || info.Database != s.Name {
			t.Errorf("it is %+v", info)
		}
		if info.Topology != "" || info.SinglePrimary || info.Router || info.Streams() {
			t.Errorf("a single server is taken for %+v", info)
		}
		isolation := "transaction_isolation"
		if s.MariaDB() {
			isolation = "tx_isolation"
		}
		if want := s.One(s.conn, "SELECT @@"+isolation); info.Isolation != want {
			t.Errorf("the isolation level is %q, want %q", info.Isolation, want)
		}
		if want := s.One(s.conn, "SELECT @@global.wait_timeout"); fmt.Sprint(int(info.Silence.Seconds())) != want {
			t.Errorf("it ends a connection after %v, want %s s", info.Silence, want)
		}
		if got := s.One(s.conn, "SELECT "+server.Writable) == "1"; info.ReadOnly || !got || info.Writable() != nil {
			t.Errorf("it takes no writes: %+v, %v", info, info.Writable())
		}
		again, err := server.Probe(t.Context(), s.Connect(dbtest.NoDatabase))
		dbtest.OK(t, err)
		if again.Server != info.Server || info.Server == "" || again.Database != "" {
			t.Errorf("on another connection it is %+v", again)
		}
		again.Database = info.Database
		if !again.Alike(info) {
			t.Errorf("%+v and %+v need other locks", again, info)
		}
	})
}

func TestProbeNeedsNoPrivilege(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		user := "u_" + dbtest.Random()
		s.Exec(s.conn, "CREATE USER "+user)
		t.Cleanup(func() { s.Exec(s.conn, "DROP USER "+user) })
		want, err := server.Probe(t.Context(), s.Connect(dbtest.NoDatabase))
		dbtest.OK(t, err)
		got, err := server.Probe(t.Context(), s.Connect(dbtest.As(user), dbtest.NoDatabase))
		dbtest.OK(t, err)
		if got != want {
			t.Errorf("it is %+v, root sees %+v", got, want)
		}
	})
}

// TestErrorsOfServersAreTakenForWhatTheyMean, and for nothing else.
func TestErrorsOfServersAreTakenForWhatTheyMean(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		ctx := dbtest.Limited(t)
		a, b := s.Connect(), s.Connect()
		user := "u_" + dbtest.Random()
		s.Exec(s.conn, "CREATE USER "+user)
		t.Cleanup(func() { s.Exec(s.conn, "DROP USER "+user) })
		stranger := s.Connect(dbtest.As(user), dbtest.NoDatabase)
		id := s.One(a, "SELECT CONNECTION_ID()")
		lock := "SELECT id FROM n WHERE id = %d FOR UPDATE"
		begin := func(id int) { // a has the row, b is asked for it
			s.Exec(a, "BEGIN")
			s.Query(a, fmt.Sprintf(lock, id))
		}
		for _, c := range []struct {
			what  string
			fails func() error
			means []string
		}{
			{"NOWAIT", func() error {
				begin(1)
				_, err := server.Query(ctx, b, fmt.Sprintf(lock, 1)+" NOWAIT")
				return err
			}, []string{"Locked"}},
			{"a wait that is over", func() error {
				begin(1)
				s.Exec(b, "SET SESSION innodb_lock_wait_timeout = 1")
				_, err := server.Query(ctx, b, fmt.Sprintf(lock, 1))
				return err
			}, []string{"Locked", "Interrupted"}},
			{"KILL QUERY", func() error {
				done := make(chan error, 1)
				go func() { done <- server.Exec(ctx, a, "UPDATE n SET id = id + 10 WHERE SLEEP(60) = 0") }()
				dbtest.Soon(t, "it runs", func() bool {
					return s.One(s.conn, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'UPDATE n%' AND ID = "+id) == "1"
				})
				s.Exec(s.conn, "KILL QUERY "+id)
				return <-done
			}, []string{"Interrupted"}},
			{"a deadlock", func() error {
				s.Exec(b, "SET SESSION innodb_lock_wait_timeout = 50")
				begin(1)
				s.Exec(b, "BEGIN")
				s.Query(b, fmt.Sprintf(lock, 2))
				first := make(chan error, 1)
				go func() { first <- server.Exec(ctx, a, "DELETE FROM n WHERE id = 2") }()
				second := server.Exec(ctx, b, "DELETE FROM n WHERE id = 1")
				if err := <-first; err != nil {
					return err
				}
				return second
			}, []string{"Deadlock"}},
			{"a table that is not there", func() error { return server.Exec(ctx, a, "DELETE FROM nothing") }, []string{"Missing"}},
			{"a database that is not there", func() error { return server.Exec(ctx, a, "USE nothing_"+s.Name) }, []string{"Missing"}},
			{"a procedure that is not there", func() error { return server.Exec(ctx, a, "CALL nothing()") }, []string{"Missing", "NoSavepoint"}},
			{"a savepoint that is not there", func() error { return server.Exec(ctx, a, "ROLLBACK TO nothing") }, []string{"Missing", "NoSavepoint"}},
			{"no right to a table", func() error { return server.Exec(ctx, stranger, "DELETE FROM "+s.Name+".n") }, []string{"Denied"}},
			{"no right to a database", func() error { return server.Exec(ctx, stranger, "USE "+s.Name) }, []string{"Denied"}},
			{"a write in a transaction that only reads", func() error {
				s.Exec(a, "START TRANSACTION READ ONLY")
				return server.Exec(ctx, a, "DELETE FROM n")
			}, []string{"Refused"}},
			{"a duplicate", func() error { return server.Exec(ctx, a, "INSERT INTO n VALUES (1)") }, nil},
			{"a statement that is none", func() error { return server.Exec(ctx, a, "NOTHING") }, nil},
		} {
			err := c.fails()
			s.Exec(a, "ROLLBACK")
			s.Exec(b, "ROLLBACK")
			if err == nil || server.Number(err) == 0 {
				t.Errorf("%s: error %v", c.what, err)
				continue
			}
			var means []string
			for name, is := range map[string]func(error) bool{
				"Locked": server.Locked, "Interrupted": server.Interrupted, "Deadlock": server.Deadlock, "NoSavepoint": server.NoSavepoint,
				"Refused": server.Refused, "Undecided": server.Undecided, "Denied": server.Denied, "Full": server.Full, "Missing": server.Missing,
				"Broken": server.Broken, "Gone": func(err error) bool { return server.Gone(err, a) }, "Shared": server.Shared, "Unprepared": server.Unprepared,
			} {
				if is(fmt.Errorf("locking: %w", err)) {
					means = append(means, name)
				}
			}
			slices.Sort(means)
			slices.Sort(c.means)
			if s.MariaDB() && c.what == "NOWAIT" { // there it looks like a wait that is over
				c.means = []string{"Interrupted", "Locked"}
			}
			if !slices.Equal(means, c.means) {
				t.Errorf("%s: %v is taken for %v, want %v", c.what, err, means, c.means)
			}
		}
	})
}

// TestOnlyWhatTheServerHasEndedIsGone, and not what only failed.
func TestOnlyWhatTheServerHasEndedIsGone(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.Connect()
		s.Exec(s.conn, "KILL "+s.One(c, "SELECT CONNECTION_ID()"))
		var err error
		dbtest.Soon(t, "it fails", func() bool { err = server.Exec(t.Context(), c, "DO 1"); return err != nil })
		if !server.Gone(err, c) {
			t.Errorf("not taken for gone: %v", err)
		}
		if server.Gone(nil, s.conn) || server.Gone(context.Canceled, s.conn) {
			t.Error("a connection is gone without cause")
		}
	})
}

// TestQueryReadsAllResultSets; NULL is "", and no rows are told from no result.
func TestQueryReadsAllResultSets(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.Connect(dbtest.With("multiStatements=true"))
		for text, want := range map[string]string{
			"SELECT id, NULL FROM n ORDER BY id":              "[[1 ] [2 ]]",
			"SELECT 1; SELECT 2, 3":                           "[[1] [2 3]]",
			"SELECT id FROM n WHERE id = 9":                   "[]",
			"SELECT id FROM n WHERE id = 9; SELECT TRUE, 0.5": "[[1 0.5]]",
		} {
			rows, err := server.Query(t.Context(), c, text)
			if got := fmt.Sprint(rows); err != nil || got != want || rows == nil {
				t.Errorf("%s returns %s, %v, want %s", text, got, err, want)
			}
		}
		if rows, err := server.Query(t.Context(), c, "DO 1"); err != nil || rows != nil {
			t.Errorf("a statement without a result returns %v, %v", rows, err)
		}
		_, err := server.Query(t.Context(), c, "SELECT 1; SELECT id FROM nothing")
		if !server.Missing(err) {
			t.Errorf("the error of the second result is %v", err)
		}
		if n, err := server.Affected(t.Context(), c, "DELETE FROM n"); err != nil || n != 2 {
			t.Errorf("%d rows are affected, %v", n, err)
		}
	})
}

func TestADriverThatOnlyPreparesIsEnough(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := struct{ driver.Conn }{s.conn}
		rows, err := server.Query(t.Context(), c, "SELECT id, NULL FROM n ORDER BY id")
		if got := fmt.Sprint(rows); err != nil || got != "[[1 ] [2 ]]" {
			t.Errorf("the rows are %s, %v", got, err)
		}
		dbtest.OK(t, server.Exec(t.Context(), c, "DELETE FROM n WHERE id = 1"))
		info, err := server.Probe(t.Context(), c)
		if err != nil || !strings.HasPrefix(s.One(s.conn, "SELECT VERSION()"), info.Version) {
			t.Errorf("Probe returns %+v, %v", info, err)
		}
	})
}

// TestAnOldConnectionIsNotTakenForANewOne: the seconds that a server tells are up to one more
// than it has been up, so one that is older than a restart is never taken for one after it.
func TestAnOldConnectionIsNotTakenForANewOne(t *testing.T) {
	for _, test := range []struct{ age, needs time.Duration }{
		{0, 0},
		{1, time.Second},
		{999 * time.Millisecond, time.Second},
		{time.Second, time.Second},
		{time.Second + 1, 2 * time.Second},
		{time.Hour - 1, time.Hour},
	} {
		condition := server.Up(test.age)
		if want := fmt.Sprintf(" > %d", int(test.needs.Seconds())); !strings.HasSuffix(condition, want) {
			t.Errorf("a connection that is %v old: %s, want %s", test.age, condition, want)
		}
	}
}
