package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// scratch is a database of one test, with a connection to look at the server by.
type scratch struct {
	*dbtest.Database
	look driver.Conn
}

func newScratch(d *dbtest.Database) *scratch { return &scratch{Database: d, look: d.Connect()} }

// pool makes one of at most two connections, closed at the end. change may alter
// its configuration.
func (s *scratch) pool(change func(*Config)) *Pool {
	s.T.Helper()
	cfg := Config{Connect: s.Connector().Connect, Max: 2, Idle: time.Hour, Setup: "SET @mysqllock = @@autocommit"}
	if change != nil {
		change(&cfg)
	}
	p := New(cfg)
	s.T.Cleanup(p.Close)
	return p
}

func (s *scratch) acquire(p *Pool) *Conn {
	s.T.Helper()
	c, err := p.Acquire(dbtest.Limited(s.T))
	dbtest.OK(s.T, err)
	return c
}

// connections are those to the database, but for the one that looks.
func (s *scratch) connections() string {
	s.T.Helper()
	return s.One(s.look, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = '"+s.Name+"' AND ID <> CONNECTION_ID()")
}

// breaking is a connection that is lost at its first statement.
type breaking struct {
	driver.Conn
	err error
}

func (b breaking) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, b.err
}

// TestAConnectionLostBeforeItIsSetUpIsReplaced, twice as database/sql does; other errors are not tried again. No
// connection is left.
func TestAConnectionLostBeforeItIsSetUpIsReplaced(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, c := range []struct {
			err     error
			breaks  int32 // how many, one after the other
			opened  int32
			granted bool
		}{
			{driver.ErrBadConn, 2, 3, true},
			{mysql.ErrInvalidConn, 2, 3, true},
			{driver.ErrBadConn, 3, 3, false},
			{&mysql.MySQLError{Number: 1064, Message: "a wrong statement"}, 1, 1, false},
		} {
			var opened atomic.Int32
			base := s.Connector()
			p := s.pool(func(cfg *Config) {
				cfg.Connect = func(ctx context.Context) (driver.Conn, error) {
					conn, err := base.Connect(ctx)
					if n := opened.Add(1); err == nil && n <= c.breaks {
						return breaking{conn, c.err}, nil
					}
					return conn, err
				}
			})
			conn, err := p.Acquire(dbtest.Limited(t))
			if (err == nil) != c.granted || opened.Load() != c.opened {
				t.Errorf("%v, %d times: error %v after %d connections", c.err, c.breaks, err, opened.Load())
			}
			if err == nil {
				conn.Destroy()
			} else {
				dbtest.Want(t, err, c.err)
				dbtest.Says(t, err, "setting up a connection for locks")
			}
			dbtest.Soon(t, "no connection is left", func() bool {
				st := p.Stat()
				return st.InUse+st.Opening+st.Idle == 0 && s.connections() == "0"
			})
			next := s.acquire(p) // is not touched by it
			dbtest.OK(t, server.Exec(t.Context(), next.Conn, "DO 1"))
			next.Release()
			p.Close()
		}
	})
}

// TestAConnectionThatCheckRefusesIsClosed, and its error is the caller's. Check is told what
// the connection was before Setup.
func TestAConnectionThatCheckRefusesIsClosed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		refused := errors.New("refused by the test")
		var found Found
		p := s.pool(func(cfg *Config) {
			cfg.Connect = s.Connector(dbtest.With("autocommit=0&completion_type=CHAIN")).Connect
			cfg.Setup = "SET @mysqllock = @@autocommit, SESSION autocommit = 1"
			cfg.Check = func(f Found) error { found = f; return refused }
		})
		_, err := p.Acquire(dbtest.Limited(t))
		dbtest.Want(t, err, refused)
		if found.Autocommit || found.CompletionType != "CHAIN" {
			t.Errorf("Check was told %+v", found)
		}
		dbtest.Soon(t, "it is closed", func() bool { return s.connections() == "0" })
	})
}

// TestTheErrorOfAFullServerNamesTheSettings that there are about it.
func TestTheErrorOfAFullServerNamesTheSettings(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		user := "u_" + dbtest.Random()
		s.Exec(s.look, "CREATE USER "+user+" WITH MAX_USER_CONNECTIONS 1")
		t.Cleanup(func() { s.Exec(s.look, "DROP USER "+user) })
		s.Exec(s.look, "GRANT SELECT ON "+s.Name+".* TO "+user)
		p := s.pool(func(cfg *Config) { cfg.Connect = s.Connector(dbtest.As(user)).Connect })
		first := s.acquire(p)
		_, err := p.Acquire(dbtest.Limited(t))
		dbtest.Says(t, err, "max_user_connections", "lockMaxConns", "SetMaxOpenConns")
		if !server.Full(err) {
			t.Errorf("not taken for a full server: %v", err)
		}
		first.Release()
	})
}

// TestThereAreNeverMoreConnectionsThanMax. A caller waits for one until its context ends.
func TestThereAreNeverMoreConnectionsThanMax(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.pool(nil)
		if !p.Ready() {
			t.Error("an empty pool is not ready")
		}
		a, b := s.acquire(p), s.acquire(p)
		if p.Ready() || s.connections() != "2" {
			t.Errorf("ready is %v, the server has %s connections", p.Ready(), s.connections())
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if _, err := p.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("one more is %v", err)
		}
		got := make(chan *Conn)
		go func() {
			c, err := p.Acquire(dbtest.Limited(t))
			if err != nil {
				t.Error(err)
			}
			got <- c
		}()
		id, err := b.ID(t.Context())
		dbtest.OK(t, err)
		b.Release()
		next := <-got
		if next.KnownID() != id {
			t.Errorf("the caller got connection %d, %d was given back", next.KnownID(), id)
		}
		if st := p.Stat(); st.Max != 2 || st.InUse != 2 || st.Idle != 0 || st.Acquired != 3 || st.Waited < 1 {
			t.Errorf("the counts are %+v", st)
		}
		a.Release()
		next.Release()
	})
}

// TestCloseWaitsForTheConnectionsInUse, and callers who wait for one get none when it is given back.
func TestCloseWaitsForTheConnectionsInUse(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.pool(func(cfg *Config) { cfg.Max = 1 })
		c := s.acquire(p)
		waiter, closed := make(chan error, 1), make(chan struct{})
		go func() {
			late, err := p.Acquire(dbtest.Limited(t))
			if err == nil { // on a slow machine Close has not begun yet
				late.Release()
				err = lockerr.ErrClosed
			}
			waiter <- err
		}()
		go func() {
			p.Close()
			close(closed)
		}()
		select {
		case <-closed:
			t.Error("Close has not waited for the connection in use")
		case <-time.After(50 * time.Millisecond):
		}
		if err := server.Exec(t.Context(), c.Conn, "DO 1"); err != nil {
			t.Error(err)
		}
		c.Release()
		dbtest.Is(t, "who waited", <-waiter, lockerr.ErrClosed)
		<-closed
		_, err := p.Acquire(t.Context())
		dbtest.Want(t, err, lockerr.ErrClosed)
		dbtest.Soon(t, "all are closed", func() bool { return s.connections() == "0" })
	})
}

// TestASpoiltConnectionIsNotUsedAgain: one that was idle for too long, that the server has ended, that carries state,
// or that was given back broken.
func TestASpoiltConnectionIsNotUsedAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for what, spoil := range map[string]func(c *Conn){
			"idle for too long": func(c *Conn) {
				c.Answered(time.Now().Add(-2 * time.Hour))
				c.Release()
			},
			"killed": func(c *Conn) {
				c.Release()
				s.Exec(s.look, fmt.Sprintf("KILL %d", c.KnownID()))
				dbtest.Soon(t, "the socket says so", func() bool { return !c.Fresh(t.Context()) })
			},
			"tainted": func(c *Conn) {
				c.Taint()
				c.Release()
			},
			"broken in use": func(c *Conn) {
				s.Exec(s.look, fmt.Sprintf("KILL %d", c.KnownID()))
				dbtest.Soon(t, "it is noticed", func() bool { return server.Exec(t.Context(), c.Conn, "DO 1") != nil })
				c.Release()
			},
			"destroyed": func(c *Conn) { c.Destroy() },
		} {
			p := s.pool(nil)
			c := s.acquire(p)
			was := c.KnownID()
			spoil(c)
			next := s.acquire(p)
			if next.KnownID() == was {
				t.Errorf("%s: it is handed out again", what)
			}
			dbtest.OK(t, server.Exec(t.Context(), next.Conn, "DO 1"))
			next.Release()
			again := s.acquire(p)
			if again.KnownID() != next.KnownID() {
				t.Errorf("%s: a good connection is not used again", what)
			}
			again.Release()
		}
	})
}

// TestIdleAreClosed: connections that nobody uses are closed, and not those in use.
func TestIdleAreClosed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.pool(func(cfg *Config) { cfg.Idle = 100 * time.Millisecond })
		used, idle := s.acquire(p), s.acquire(p)
		idle.Release()
		dbtest.Soon(t, "the idle one is closed", func() bool { return p.Stat().Idle == 0 && s.connections() == "1" })
		dbtest.OK(t, server.Exec(t.Context(), used.Conn, "DO 1"))
		used.Release()
	})
}

// TestWhoeverKeepsAConnectionIsToldOfItsLoss, once, and in time, and not after Forget.
func TestWhoeverKeepsAConnectionIsToldOfItsLoss(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.pool(nil)
		k := NewKeepAlive(time.Second, 0)
		defer k.Close()
		var told [2]atomic.Int32
		lost := make(chan error, 8)
		conns := [2]*Conn{s.acquire(p), s.acquire(p)}
		for i, c := range conns {
			c.EndTurn() // they are kept while nobody has the turn
			k.Keep(c, func(err error) { told[i].Add(1); lost <- err })
		}
		k.Forget(conns[1])
		for _, c := range conns {
			s.Exec(s.look, fmt.Sprintf("KILL %d", c.KnownID()))
		}
		err := <-lost
		dbtest.Want(t, err, lockerr.ErrLost)
		if strings.TrimPrefix(err.Error(), lockerr.ErrLost.Error()) == "" {
			t.Errorf("the error does not say why: %v", err)
		}
		time.Sleep(300 * time.Millisecond) // a few rounds
		if told[0].Load() != 1 || told[1].Load() != 0 {
			t.Errorf("told %d times of the one, and %d times of the other, which was forgotten", told[0].Load(), told[1].Load())
		}
		for _, c := range conns {
			dbtest.OK(t, c.AwaitTurn(t.Context()))
			c.Destroy()
		}
	})
}
