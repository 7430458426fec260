package socket

import (
	"context"
	"database/sql/driver"
	"net"
	"strconv"
	"testing"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// TestKillerKnowsItsConnections: the id that a greeting shows may be one that a proxy has
// made up, and on the server that of somebody else.
func TestKillerKnowsItsConnections(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		open := func(change ...func(*mysql.Config)) (driver.Conn, *Group) {
			group := NewGroup(nil)
			watched := func(cfg *mysql.Config) { cfg.DialFunc = Dial(new(net.Dialer).DialContext) }
			conn, err := d.Connector(append(change, watched)...).Connect(group.With(dbtest.Limited(t)))
			dbtest.OK(t, err)
			t.Cleanup(func() {
				conn.Close()
				group.Wait()
			})
			return conn, group
		}
		killer := func(change ...func(*mysql.Config)) *Killer {
			conn, group := open(change...)
			return NewKiller(func(_ context.Context, kill func(driver.Conn, *Group)) { kill(conn, group) })
		}
		one, ofOne := open()
		other, ofOther := open()
		for conn, group := range map[driver.Conn]*Group{one: ofOne, other: ofOther} {
			if got, want := strconv.Itoa(int(group.last.id.Load())), d.One(conn, "SELECT CONNECTION_ID()"); got != want {
				t.Fatalf("the greeting has the id %s, the server says %s", got, want)
			}
		}
		alive := func(conn driver.Conn) bool { return server.Exec(dbtest.Limited(t), conn, "DO 1") == nil }
		near := killer()
		made := &socket{Conn: ofOne.last.Conn}
		made.id.Store(ofOther.last.id.Load())
		near.kill([]*socket{made})
		if !alive(one) || !alive(other) {
			t.Error("a connection with another port was killed")
		}
		made = &socket{Conn: leadsElsewhere{ofOne.last.Conn}}
		made.id.Store(ofOne.last.id.Load())
		near.kill([]*socket{made})
		if !alive(one) {
			t.Error("a connection was killed for one that leads to another address")
		}
		proxy := dbtest.StartProxy(t, d.Config().Addr)
		killer(func(cfg *mysql.Config) { cfg.Net, cfg.Addr = "tcp", proxy.Addr() }).kill([]*socket{ofOne.last})
		if !alive(one) {
			t.Error("a connection was killed from one that a proxy has opened")
		}
		near.kill([]*socket{ofOne.last})
		if alive(one) {
			t.Error("the connection was not killed")
		}
		if !alive(other) {
			t.Error("another connection was killed")
		}
	})
}

// leadsElsewhere is a socket with the other end of another one.
type leadsElsewhere struct{ net.Conn }

func (leadsElsewhere) RemoteAddr() net.Addr { return new(net.TCPAddr) }
