//go:build unix

package matrix

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// place is where the cells of one kind of server run: a database with a table of counters.
type place struct {
	*dbtest.Database
	name  string
	file  string // the golden one: all versions of a product have one
	form  form
	addr  string // of the proxy through which the accounts of cells go; "" without one
	admin *sql.DB
	units atomic.Int64 // numbers the cells
}

// form is a kind of one server.
type form struct {
	name        string
	grants      string // what the accounts of cells may do in the database
	router      bool
	mysql       bool         // for MySQL alone
	mine, other mysql.Option // of the DSN of the process that the cell is about, and of another one
}

// forms are the kinds of one server. Router leads to MySQL. In none of them is anything else sent.
var forms = []form{
	{grants: "ALL"},
	{name: " with the least rights", grants: "SELECT, INSERT, UPDATE, DELETE", mysql: true},
	{name: " behind Router", grants: "ALL", router: true, mysql: true},
	{name: " in two character sets", grants: "ALL", mine: setting("character_set_connection", "utf16"), other: mysql.Charset("gbk", "gbk_chinese_ci")},
}

// setting is a system variable in a DSN.
func setting(name, value string) mysql.Option {
	return func(cfg *mysql.Config) error {
		cfg.Params = map[string]string{name: value}
		return nil
	}
}

// places returns one of each kind.
func places(t *testing.T, bins []tempserver.Binary) (all []*place) {
	t.Helper()
	tempserver.RequireProxies(t)
	for _, bin := range bins {
		server := tempserver.Share(t, bin)
		for _, form := range forms {
			if form.mysql && bin.Flavour != tempserver.MySQL {
				continue
			}
			p := &place{Database: dbtest.New(t, bin, server), name: bin.Name + form.name, file: golden(string(bin.Flavour)), form: form}
			if form.router {
				router, err := tempserver.StartRouter(t.Context(), tempserver.Passed, server)
				dbtest.OK(t, err)
				t.Cleanup(func() { dbtest.OK(t, router.Stop()) })
				cfg, err := mysql.ParseDSN(router.DSN(p.Name))
				dbtest.OK(t, err)
				p.addr = cfg.Addr
			}
			p.admin = p.Open("mysql")
			dbtest.Exec(t, p.admin, "CREATE TABLE counters (id INT PRIMARY KEY, n DOUBLE NOT NULL) ENGINE=InnoDB")
			_, err := p.Open("mysqllock").ExecContext(lockctx.With(dbtest.Limited(t), "makes the lock table"), "DO 1")
			dbtest.OK(t, err)
			all = append(all, p)
		}
	}
	return all
}

// account makes an account for one process of a cell. What it has on the server is told by
// its name.
func (p *place) account(t *testing.T) string {
	t.Helper()
	user := "u_" + dbtest.Random()
	dbtest.Exec(t, p.admin, "CREATE USER "+user)
	t.Cleanup(func() { p.admin.Exec("DROP USER " + user) })
	dbtest.Exec(t, p.admin, fmt.Sprintf("GRANT %s ON %s.* TO %s", p.form.grants, p.Name, user))
	return user
}

// open opens a handle of an account, as a process of its own would, for one test. tap is nil for
// another process than the one that the cell is about.
func (p *place) open(t *testing.T, user string, tap *dbtest.Tap, c mysqllock.Config, wrapped bool) *sql.DB {
	t.Helper()
	cfg := p.Config()
	dbtest.As(user)(cfg)
	if p.addr != "" {
		cfg.Net, cfg.Addr = "tcp", p.addr
	}
	charset := p.form.other
	if tap != nil {
		charset = p.form.mine
		network := cfg.Net
		cfg.DialFunc = func(ctx context.Context, _, addr string) (net.Conn, error) { return tap.Dial(ctx, network, addr) }
	}
	if charset != nil {
		dbtest.OK(t, cfg.Apply(charset))
	}
	k, err := mysqllock.NewConnector(cfg, c)
	if wrapped {
		k = dbtest.Wrapper{Connector: k, Tells: c.MaxConns > 0}
	}
	return p.For(t).OpenDB(k, err)
}

// count returns what a query for a number says.
func (p *place) count(t *testing.T, text string, args ...any) (n int) {
	t.Helper()
	dbtest.OK(t, p.admin.QueryRowContext(dbtest.Limited(t), text, args...).Scan(&n))
	return n
}
