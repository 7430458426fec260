// Package wrapped opens handles with wrappers of drivers above this one, for traces and
// logs.
package wrapped

import (
	"context"
	"database/sql"
	"database/sql/driver"

	xsam "github.com/XSAM/otelsql"
	"github.com/luna-duclos/instrumentedsql"
	"github.com/mysqllock/mysqllock"
	"github.com/ngrok/sqlmw"
	sqldblogger "github.com/simukti/sqldb-logger"
	nhat "go.nhat.io/otelsql"
)

// The way of most wrappers: a driver with a name of its own. instrumentedsql and sqlmw do not
// pass on that a handle is closed. So they get the driver without OpenConnector: it closes
// what it has opened by itself, about a second after the last connection.
func init() {
	bare := struct{ driver.Driver }{new(mysqllock.Driver)}
	sql.Register("mysqllock-instrumented", instrumentedsql.WrapDriver(bare))
	sql.Register("mysqllock-intercepted", sqlmw.Driver(bare, new(sqlmw.NullInterceptor)))
	sql.Register("mysqllock-nhat", nhat.Wrap(new(mysqllock.Driver)))
}

// openers are ways to open a handle with a wrapper.
var openers = map[string]func(dsn string) (*sql.DB, error){
	"instrumentedsql": func(dsn string) (*sql.DB, error) { return sql.Open("mysqllock-instrumented", dsn) },
	"nhat otelsql":    func(dsn string) (*sql.DB, error) { return sql.Open("mysqllock-nhat", dsn) },
	"sqlmw":           func(dsn string) (*sql.DB, error) { return sql.Open("mysqllock-intercepted", dsn) },
	"XSAM otelsql": func(dsn string) (*sql.DB, error) {
		k, err := new(mysqllock.Driver).OpenConnector(dsn)
		if err != nil {
			return nil, err
		}
		return xsam.OpenDB(k), nil
	},
	"XSAM otelsql, by name": func(dsn string) (*sql.DB, error) { return xsam.Open("mysqllock", dsn) },
	"sqldb-logger": func(dsn string) (*sql.DB, error) {
		return sqldblogger.OpenDriver(dsn, new(mysqllock.Driver), logger{}), nil
	},
	"sqldb-logger, as its README has it": func(dsn string) (*sql.DB, error) {
		db, err := sql.Open("mysqllock", dsn)
		if err != nil {
			return nil, err
		}
		return sqldblogger.OpenDriver(dsn, db.Driver(), logger{}), db.Close()
	},
}

// logger logs nothing.
type logger struct{}

func (logger) Log(context.Context, sqldblogger.Level, string, map[string]any) {}
