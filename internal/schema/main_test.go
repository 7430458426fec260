package schema_test

import (
	"database/sql/driver"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// scratch is a database of one test.
type scratch struct {
	*dbtest.Database
	info  server.Info
	table schema.Table // in the database, not made yet
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	table, err := schema.Parse(d.Name + ".locks")
	dbtest.OK(d.T, err)
	flavour := server.Flavour{Settings: d.MariaDB(), Share: " LOCK IN SHARE MODE", SkipLocked: true}
	return &scratch{Database: d, info: server.Info{MariaDB: d.MariaDB(), Flavour: flavour}, table: table}
}

// open opens a connection in no database.
func (s *scratch) open() driver.Conn { return s.Connect(dbtest.NoDatabase) }

// setup makes the table.
func (s *scratch) setup(c driver.Conn) {
	s.T.Helper()
	for _, text := range s.table.Setup() {
		s.Exec(c, text)
	}
}
