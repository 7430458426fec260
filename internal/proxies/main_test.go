//go:build unix

// Package proxies has the tests of the driver behind MySQL Router and HAProxy.
package proxies

import (
	"crypto/rand"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // lost connections are what it is about
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// strategies are what a key can be kept by.
var strategies = []struct {
	name string
	opt  lockctx.Option
}{
	{"row", lockctx.Row()},
	{"lease", lockctx.Lease(10 * time.Second)},
	{"advisory", lockctx.Advisory()},
	{"optimistic", lockctx.Optimistic()},
}

// scratch is a database of one test, with a table p (id, stock), on a server that is
// reached through a proxy, and directly.
type scratch struct {
	*testing.T
	database string
	proxy    string // its DSN through the proxy
	direct   *sql.DB
}

// newScratch makes a database on the server that direct leads to.
func newScratch(t *testing.T, proxy *tempserver.Proxy, direct *tempserver.Server) *scratch {
	t.Helper()
	database := "t_" + strings.ToLower(rand.Text())
	s := &scratch{T: t, database: database, proxy: proxy.DSN(database) + "?timeout=5s&interpolateParams=true"}
	admin := dbtest.Open(s, "mysql", direct.DSN(""))
	dbtest.Exec(s, admin, "CREATE DATABASE "+database)
	s.direct = dbtest.Open(s, "mysql", direct.DSN(database))
	dbtest.Exec(s, s.direct, "CREATE TABLE p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(s, s.direct, "INSERT INTO p VALUES (1, 0), (2, 0)")
	return s
}

// open opens the database through the proxy with the driver under test. params are
// added to the DSN, such as "lockWait=1s".
func (s *scratch) open(params ...string) *sql.DB {
	s.Helper()
	return dbtest.Open(s, "mysqllock", s.proxy+"&"+strings.Join(params, "&"))
}

// stock is that of a product, as the server says.
func (s *scratch) stock(id int) (stock int) {
	s.Helper()
	dbtest.OK(s.T, s.direct.QueryRowContext(s.Context(), "SELECT stock FROM p WHERE id = ?", id).Scan(&stock))
	return stock
}

func (s *scratch) wantStock(id, want int) {
	s.Helper()
	if got := s.stock(id); got != want {
		s.Errorf("product %d has stock %d, want %d", id, got, want)
	}
}

// mysqlServer returns the first MySQL server of this machine.
func mysqlServer(t *testing.T) tempserver.Binary {
	t.Helper()
	tempserver.RequireProxies(t)
	for _, b := range tempserver.Require(t) {
		if b.Flavour == tempserver.MySQL {
			return b
		}
	}
	t.Skip("no MySQL on this machine")
	panic("unreachable")
}
