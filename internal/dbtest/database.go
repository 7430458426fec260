//go:build unix

package dbtest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// OnServers runs a test on a server of each flavour, beside the other tests. open makes what
// the test works with of a database of its own.
func OnServers[S any](t *testing.T, open func(*Database) S, test func(t *testing.T, s S)) {
	t.Helper()
	t.Parallel()
	on(t, tempserver.EachFlavour(tempserver.Require(t)), open, test)
}

// OnEveryServer is OnServers for what another version of a flavour may do in another way, such
// as snapshots, which MariaDB 11.8 isolates, and the statements of the lock table.
func OnEveryServer[S any](t *testing.T, open func(*Database) S, test func(t *testing.T, s S)) {
	t.Helper()
	t.Parallel()
	on(t, tempserver.Require(t), open, test)
}

// OnOneServer is OnServers for what no flavour does in another way, as it is about what the driver
// does by itself. It takes the last flavour that there is: MariaDB, which needs the least time.
func OnOneServer[S any](t *testing.T, open func(*Database) S, test func(t *testing.T, s S)) {
	t.Helper()
	t.Parallel()
	on(t, one(t), open, test)
}

func one(t testing.TB) []tempserver.Binary {
	t.Helper()
	bins := tempserver.EachFlavour(tempserver.Require(t))
	return bins[len(bins)-1:]
}

func on[S any](t *testing.T, bins []tempserver.Binary, open func(*Database) S, test func(t *testing.T, s S)) {
	t.Helper()
	for _, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel() // the servers start at the same time, too
			test(t, open(New(t, bin, tempserver.Share(t, bin))))
		})
	}
}

// OnOwnServers is OnServers with servers of the test's own, started with opts: to
// change their settings, or to stop them.
func OnOwnServers[S any](t *testing.T, open func(*Database) S, test func(t *testing.T, s S), opts ...string) {
	t.Helper()
	onOwn(t, tempserver.EachFlavour(tempserver.RequireOwn(t)), open, test, opts)
}

// OnOwnMySQL is OnOwnServers for what is so on MySQL only.
func OnOwnMySQL[S any](t *testing.T, open func(*Database) S, test func(t *testing.T, s S), opts ...string) {
	t.Helper()
	bins := tempserver.EachFlavour(tempserver.RequireOwn(t))
	onOwn(t, slices.DeleteFunc(bins, func(b tempserver.Binary) bool { return b.Flavour != tempserver.MySQL }), open, test, opts)
}

func onOwn[S any](t *testing.T, bins []tempserver.Binary, open func(*Database) S, test func(t *testing.T, s S), opts []string) {
	t.Helper()
	t.Parallel()
	for _, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			srv, err := tempserver.Start(Within(t, Patience), bin, opts...)
			OK(t, err)
			t.Cleanup(func() { srv.Stop() })
			OK(t, srv.Settle(t.Context()))
			test(t, open(New(t, bin, srv)))
		})
	}
}

// Database is a database of one test, dropped at its end.
type Database struct {
	T       testing.TB
	Name    string // of the database
	Server  *tempserver.Server
	Flavour tempserver.Flavour
	config  *mysql.Config
}

// New makes a database on a server of that program.
func New(t testing.TB, bin tempserver.Binary, srv *tempserver.Server) *Database {
	t.Helper()
	return (&Database{Server: srv, Flavour: bin.Flavour}).Beside(t)
}

// At returns the database that a DSN leads to, for a process that another test has
// started. Its server is not known.
func At(t testing.TB, dsn string) *Database {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	OK(t, err)
	cfg.Logger = &mysql.NopLogger{}
	return &Database{T: t, Name: cfg.DBName, config: cfg}
}

// Each returns a database on each server.
func Each(t testing.TB) (all []*Database) {
	t.Helper()
	for _, bin := range tempserver.Require(t) {
		all = append(all, New(t, bin, tempserver.Share(t, bin)))
	}
	return all
}

// One returns a database on the server of OnOneServer.
func One(t testing.TB) *Database {
	t.Helper()
	bin := one(t)[0]
	return New(t, bin, tempserver.Share(t, bin))
}

// Beside makes another database on the same server.
func (d *Database) Beside(t testing.TB) *Database {
	t.Helper()
	cfg := tempserver.Database(t, d.Server.DSN(""))
	return &Database{T: t, Name: cfg.DBName, Server: d.Server, Flavour: d.Flavour, config: cfg}
}

// Changed returns the same database with another configuration.
func (d *Database) Changed(change func(*mysql.Config)) *Database {
	c := *d
	c.config = d.Config()
	change(c.config)
	return &c
}

// OverSocket changes a configuration so that it leads to the server's unix socket, by a
// path that is short enough for one.
func OverSocket(t testing.TB, server *tempserver.Server) func(*mysql.Config) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "")
	OK(t, err)
	t.Cleanup(func() { OK(t, os.RemoveAll(dir)) })
	path := filepath.Join(dir, "socket")
	OK(t, os.Symlink(server.Socket(), path))
	return func(cfg *mysql.Config) { cfg.Net, cfg.Addr = "unix", path }
}

// For returns the same database for another test, such as a subtest.
func (d *Database) For(t testing.TB) *Database {
	c := *d
	c.T = t
	return &c
}

// MariaDB reports whether the server is one.
func (d *Database) MariaDB() bool { return d.Flavour == tempserver.MariaDB }

// Config returns a configuration that leads to the database and logs nothing,
// since tests break connections on purpose. It is the caller's to change.
func (d *Database) Config() *mysql.Config { return d.config.Clone() }

// DSN leads to the database. params are added to it, such as "lockWait=1s".
func (d *Database) DSN(params ...string) string {
	return add(d.config.FormatDSN(), params...)
}

// add adds parameters to a DSN.
func add(dsn string, params ...string) string {
	if len(params) == 0 {
		return dsn
	}
	sep := "?"
	if strings.Contains(dsn, "?") {
		sep = "&"
	}
	return dsn + sep + strings.Join(params, "&")
}

// Open opens a handle with a driver of that name, closed at the end of the test.
func (d *Database) Open(driver string, params ...string) *sql.DB {
	d.T.Helper()
	return Open(d.T, driver, d.DSN(params...))
}

// OpenDB is Open for a connector.
func (d *Database) OpenDB(connector driver.Connector, err error) *sql.DB {
	d.T.Helper()
	OK(d.T, err)
	db := sql.OpenDB(connector)
	d.T.Cleanup(func() { db.Close() })
	return db
}

// Connector returns one of the plain driver. change alters its configuration.
func (d *Database) Connector(change ...func(*mysql.Config)) driver.Connector {
	d.T.Helper()
	cfg := d.Config()
	for _, change := range change {
		change(cfg)
	}
	return Connector(d.T, cfg)
}

// Connector returns one of the plain driver.
func Connector(t testing.TB, cfg *mysql.Config) driver.Connector {
	t.Helper()
	connector, err := mysql.NewConnector(cfg)
	OK(t, err)
	return connector
}

// Connect opens a connection of the plain driver, closed at the end of the test.
func (d *Database) Connect(change ...func(*mysql.Config)) driver.Conn {
	d.T.Helper()
	c, err := d.Connector(change...).Connect(d.T.Context())
	OK(d.T, err)
	d.T.Cleanup(func() { c.Close() })
	return c
}

// NoDatabase, for Connect, has connections begin in no database.
func NoDatabase(cfg *mysql.Config) { cfg.DBName = "" }

// As, for Connect, has them log in as that user, without a password; "" is the
// same as ever.
func As(user string) func(*mysql.Config) {
	return func(cfg *mysql.Config) {
		if user != "" && user != cfg.User {
			cfg.User, cfg.Passwd = user, ""
		}
	}
}

// With, for Connect, sets parameters of a DSN, such as "clientFoundRows=true".
func With(params string) func(*mysql.Config) {
	return func(cfg *mysql.Config) {
		logger := cfg.Logger
		parsed, err := mysql.ParseDSN(add(cfg.FormatDSN(), params))
		if err != nil {
			panic(err)
		}
		*cfg = *parsed
		cfg.Logger = logger
	}
}

// Exec, Query and One may run on other goroutines than the test's: a failure does
// not end the test.

// Exec runs a statement on a connection.
func (d *Database) Exec(c driver.Conn, text string) {
	d.T.Helper()
	if err := server.Exec(context.Background(), c, text); err != nil {
		d.T.Errorf("%s: %v", text, err)
	}
}

// Query returns the rows of a statement's answer.
func (d *Database) Query(c driver.Conn, text string) [][]string {
	d.T.Helper()
	rows, err := server.Query(context.Background(), c, text)
	if err != nil {
		d.T.Errorf("%s: %v", text, err)
	}
	return rows
}

// One returns the only value of a statement's answer.
func (d *Database) One(c driver.Conn, text string) string {
	d.T.Helper()
	rows := d.Query(c, text)
	if len(rows) != 1 || len(rows[0]) != 1 {
		d.T.Errorf("%s: %v, want one value", text, rows)
		return ""
	}
	return rows[0][0]
}
