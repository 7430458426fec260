package pool

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// TestNoKillMeetsTheConnectionOfAnotherServer: another server, or one that was started again, gives the id of a connection to
// others, which no KILL must meet.
func TestNoKillMeetsTheConnectionOfAnotherServer(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), dbtest.Patience)
			t.Cleanup(cancel)
			cfg, err := mysql.ParseDSN(tempserver.Share(t, bin).DSN(""))
			dbtest.OK(t, err)
			connect := func(ctx context.Context) (driver.Conn, error) {
				c, err := mysql.NewConnector(cfg)
				if err != nil {
					return nil, err
				}
				return c.Connect(ctx)
			}
			control := New(Config{Connect: connect, Max: 2, Idle: time.Minute, Setup: "DO 1"})
			t.Cleanup(control.Close)
			open := func() *Conn {
				conn, err := connect(ctx)
				dbtest.OK(t, err)
				t.Cleanup(func() { conn.Close() })
				c := Adopt(conn)
				_, err = c.ID(ctx)
				dbtest.OK(t, err)
				return c
			}
			// kill reports whether a connection was ended that runs a statement. is
			// changes what is known of it.
			kill := func(lasts int, is func(c *Conn)) (ended bool) {
				c := open()
				is(c)
				done := make(chan error, 1)
				text := fmt.Sprintf("DO SLEEP(%d)", lasts)
				go func() { done <- server.Exec(ctx, c.Conn, text) }()
				watch := open()
				for running := false; !running && len(done) == 0; time.Sleep(time.Millisecond) {
					rows, err := server.Query(ctx, watch.Conn, fmt.Sprintf(
						"SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO = '%s' AND ID = %d", text, c.KnownID()))
					dbtest.OK(t, err)
					running = rows[0][0] == "1"
				}
				dbtest.OK(t, control.KillAdopted(ctx, c))
				return <-done != nil
			}
			elsewhere, unknown := func(c *Conn) { c.node += "1" }, func(c *Conn) { c.node = "" }
			if !kill(50, func(*Conn) {}) {
				t.Error("a busy one was not ended")
			}
			if kill(2, elsewhere) {
				t.Error("one of another server was ended")
			}
			if kill(2, unknown) {
				t.Error("one of an unknown server was ended")
			}
			if kill(2, func(c *Conn) { c.opened = time.Now().Add(-1000 * time.Hour) }) {
				t.Error("one of a server that has been up for less long was ended")
			}
			idle := open()
			dbtest.OK(t, control.KillAdopted(ctx, idle))
			dbtest.OK(t, server.Exec(ctx, idle.Conn, "DO 1"))
			_, err = server.Query(ctx, idle.Conn, "SELECT GET_LOCK('silent', 0)")
			dbtest.OK(t, err)
			for _, is := range []func(*Conn){elsewhere, unknown} {
				seen := Adopt(idle.Conn)
				seen.id, seen.node = idle.id, idle.node
				is(seen)
				dbtest.OK(t, control.KillConnection(ctx, seen))
				dbtest.OK(t, control.KillSilent(ctx, seen, "silent", 0))
				dbtest.OK(t, server.Exec(ctx, idle.Conn, "DO 1"))
			}

			name := "stranger_" + NewMark()[:12]
			dbtest.OK(t, server.Exec(ctx, idle.Conn, "CREATE USER "+name+"@'%' IDENTIFIED BY 'secret'"))
			own := cfg.Clone()
			t.Cleanup(func() { _ = server.Exec(context.Background(), idle.Conn, "DROP USER "+name+"@'%'") })
			cfg.User, cfg.Passwd = name, "secret"
			stranger := open()
			cfg.User, cfg.Passwd = own.User, own.Passwd
			done := make(chan error, 1)
			go func() { done <- server.Exec(ctx, stranger.Conn, "DO SLEEP(1)") }()
			for waiting := true; waiting; {
				select {
				case err := <-done:
					dbtest.OK(t, err)
					waiting = false
				default:
					dbtest.OK(t, control.KillAdopted(ctx, stranger))
				}
			}
		})
	}
}

// TestKillQueryFindsItsStatementBesideAnotherSearch for it, which still runs on the server although nobody waits for
// it.
func TestKillQueryFindsItsStatementBesideAnotherSearch(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		tap := new(dbtest.Tap)
		control := New(Config{Connect: d.Connector(tap.On).Connect, Max: 1, Idle: time.Minute, Setup: "DO 1"})
		t.Cleanup(control.Close)
		ctx, mark := dbtest.Limited(t), NewMark()
		other, c, watch := d.Connect(), d.Connect(), d.Connect() // the other is found first
		texts := tap.Texts()
		control.KillQuery(ctx, mark)
		search := texts()[len(texts())-1]
		run := func(conn driver.Conn, text string) (ended chan struct{}) {
			t.Helper()
			id := d.One(conn, "SELECT CONNECTION_ID()")
			ended = make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = server.Query(ctx, conn, text) // MySQL and MariaDB differ in what a killed SLEEP returns
			}()
			dbtest.Soon(t, "it runs", func() bool {
				return d.One(watch, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep' AND ID = "+id) == "1"
			})
			return ended
		}
		beside := run(other, search+" UNION ALL SELECT SLEEP(600)")
		statement := run(c, "SELECT SLEEP(600) /* "+mark+" */")
		control.KillQuery(ctx, mark)
		select {
		case <-statement:
		case <-time.After(dbtest.Patience / 4):
			t.Error("the statement goes on")
		}
		control.EndQuery(ctx, "SLEEP(600)")
		<-beside
		<-statement
	})
}

// TestEachKillFindsItsConnectionBesideWhatCannotBeListed, whatever that is, also if MySQL has no other list of
// connections than the one that depends on texts.
func TestEachKillFindsItsConnectionBesideWhatCannotBeListed(t *testing.T) {
	for name, opts := range map[string][]string{"": nil, "without performance_schema": {"--performance-schema=OFF"}} {
		t.Run(name, func(t *testing.T) {
			dbtest.OnOwnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
				d.Neighbours()
				ctx := dbtest.Limited(t)
				control := New(Config{Connect: d.Connector().Connect, Max: 2, Idle: time.Minute, Setup: "DO 1"})
				t.Cleanup(control.Close)
				for what, kill := range map[string]func(c *Conn, mark string){
					"KillQuery":      func(_ *Conn, mark string) { control.KillQuery(ctx, mark) },
					"EndQuery":       func(_ *Conn, mark string) { control.EndQuery(ctx, mark) },
					"KillAdopted":    func(c *Conn, _ string) { dbtest.OK(t, control.KillAdopted(ctx, c)) },
					"KillConnection": func(c *Conn, _ string) { dbtest.OK(t, control.KillConnection(ctx, c)) },
				} {
					c, mark, ended := Adopt(d.Connect()), NewMark(), make(chan struct{})
					dbtest.OK(t, c.Identify(ctx))
					go func() {
						defer close(ended)
						_, _ = server.Query(ctx, c.Conn, "/* "+mark+" */ SELECT SLEEP(3600), '"+strings.Repeat("z", 1<<20)+"'")
					}()
					for over := false; !over; { // it may not have come to the server yet
						kill(c, mark)
						select {
						case <-ended:
							over = true
						case <-ctx.Done():
							t.Fatal(what + ": the statement goes on")
						case <-time.After(10 * time.Millisecond):
						}
					}
				}
				silent := Adopt(d.Connect())
				dbtest.OK(t, silent.Identify(ctx))
				d.One(silent.Conn, "SELECT GET_LOCK('"+d.Name+"', 0)")
				dbtest.Soon(t, "KillSilent: the connection is ended", func() bool {
					dbtest.OK(t, control.KillSilent(ctx, silent, d.Name, 0))
					return d.One(d.Connect(), "SELECT IS_FREE_LOCK('"+d.Name+"')") == "1"
				})
			}, opts...)
		})
	}
}
