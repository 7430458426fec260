package schema_test

import (
	"context"
	"database/sql/driver"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// onServers runs a test on each server, in a database of its own.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		srv := tempserver.Share(t, bin)
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			s := &scratch{t: t, server: srv, info: server.Info{MariaDB: bin.Flavour == tempserver.MariaDB}}
			s.database = tempserver.Database(t, srv.DSN("")).DBName
			table, err := schema.Parse(s.database + ".locks")
			ok(t, err)
			s.table = table
			test(t, s)
		})
	}
}

// scratch is a database of one test.
type scratch struct {
	t        *testing.T
	server   *tempserver.Server
	info     server.Info
	database string
	table    schema.Table // in the database, not made yet
}

// open opens a connection to the database, or to none.
func (s *scratch) open(database string) driver.Conn {
	s.t.Helper()
	return s.openAs("root", database)
}

func (s *scratch) openAs(user, database string) driver.Conn {
	s.t.Helper()
	cfg, err := mysql.ParseDSN(s.server.DSN(database))
	ok(s.t, err)
	cfg.User = user
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	c, err := connector.Connect(s.t.Context())
	ok(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

// exec and query may run on other goroutines than the test's.

func (s *scratch) exec(c driver.Conn, text string) {
	s.t.Helper()
	if err := server.Exec(context.Background(), c, text); err != nil {
		s.t.Errorf("%s: %v", text, err)
	}
}

func (s *scratch) query(c driver.Conn, text string) [][]string {
	s.t.Helper()
	rows, err := server.Query(context.Background(), c, text)
	if err != nil {
		s.t.Errorf("%s: %v", text, err)
	}
	return rows
}

// one is the only value of a statement's answer.
func (s *scratch) one(c driver.Conn, text string) string {
	s.t.Helper()
	rows := s.query(c, text)
	if len(rows) != 1 {
		s.t.Fatalf("%s: %d rows", text, len(rows))
	}
	return rows[0][0]
}

// setup makes the table.
func (s *scratch) setup(c driver.Conn) {
	s.t.Helper()
	for _, text := range s.table.Setup() {
		s.exec(c, text)
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// limited is a context that ends when a test hangs.
func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}
