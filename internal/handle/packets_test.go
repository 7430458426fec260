package handle

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// answers is a connector that answers with conn or err.
type answers struct {
	conn  driver.Conn
	err   error
	asked int
}

func (a *answers) Connect(context.Context) (driver.Conn, error) { a.asked++; return a.conn, a.err }
func (a *answers) Driver() driver.Driver                        { return nil }

// TestWhoRefusesTheFlagGetsSessionsWithout: what lies between may refuse a connection that asks for several statements
// in a text. Then the session is opened as those of the application are. Another error is no reason.
func TestWhoRefusesTheFlagGetsSessionsWithout(t *testing.T) {
	plain := struct{ driver.Conn }{}
	for _, test := range []struct {
		err     error
		without bool
	}{
		{&mysql.MySQLError{Number: 1235}, true},
		{&mysql.MySQLError{Number: 1251}, true},
		{&mysql.MySQLError{Number: 1040}, false},
		{&mysql.MySQLError{Number: 1045}, false},
		{mysql.ErrInvalidConn, false},
	} {
		base := &answers{conn: plain}
		k := New(Connectors{
			App: Connector{Connector: base}, Session: Connector{Connector: &answers{err: test.err}, Several: true},
		}, Settings{})
		conn, err := k.connect(t.Context())
		if test.without {
			dbtest.OK(t, err)
		}
		if (conn == plain) != test.without || base.asked > 0 != test.without || !test.without && !errors.Is(err, test.err) {
			t.Errorf("%v: %v, %v", test.err, conn, err)
		}
		k.Close()
	}
}
