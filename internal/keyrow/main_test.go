package keyrow

import (
	"database/sql/driver"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// scratch is a database of one test, with the lock table.
type scratch struct {
	*dbtest.Database
	info  server.Info
	table schema.Table
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	can := server.Flavour{Settings: d.MariaDB(), Share: " LOCK IN SHARE MODE", SkipLocked: true}
	s := &scratch{Database: d, info: server.Info{MariaDB: d.MariaDB(), Flavour: can}}
	var err error
	s.table, err = schema.Parse(d.Name + ".locks")
	dbtest.OK(d.T, err)
	err = s.table.Ensure(d.T.Context(), s.open(), s.info, true)
	dbtest.OK(d.T, err)
	return s
}

// open opens a connection in no database.
func (s *scratch) open() driver.Conn { return s.Connect(dbtest.NoDatabase) }

// rows makes Rows as another process would have them.
func (s *scratch) rows() *Rows { return s.rowsAt("REPEATABLE READ") }

func (s *scratch) rowsAt(isolation string) *Rows {
	s.T.Helper()
	control := pool.New(pool.Config{
		Connect: s.Connector(dbtest.NoDatabase).Connect, Max: 4, Idle: time.Minute, Setup: "SET SESSION TRANSACTION ISOLATION LEVEL " + isolation,
	})
	s.T.Cleanup(control.Close)
	return New(Config{Control: control, Table: s.table, Namespace: "app", Info: s.info, Auto: true})
}
