package rowlock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// beginOn begins a transaction with a lock on key on c, and checks that it has it.
func (p *process) beginOn(c *pool.Conn, implicit bool, key rowlock.Key) (*rowlock.Begun, error) {
	p.T.Helper()
	grant, err := p.Begin(dbtest.Limited(p.T), driver.TxOptions{}, implicit, rowlock.Request{
		Keys: []rowlock.Key{key}, Conn: func(context.Context) (*pool.Conn, error) { return c, nil }, Waiting: free,
	})
	if err == nil && p.free(key.Name) {
		p.T.Errorf("%q is not locked", key.Name)
	}
	return grant, err
}

// free reports whether nobody has locked the row of name.
func (s *scratch) free(name string) bool {
	s.T.Helper()
	c, err := s.Connector().Connect(s.T.Context())
	dbtest.OK(s.T, err)
	defer c.Close()
	err = server.Exec(s.T.Context(), c, fmt.Sprintf("SELECT 1 FROM %s WHERE namespace = 'app' AND name = x'%x' FOR UPDATE NOWAIT", s.table, name))
	if err != nil && !server.Locked(err) {
		s.T.Error(err)
	}
	return err == nil
}

// many is how often a connection is used that stays.
const many = 20

// TestPrepared: on a connection that stays, lock statements are prepared, once for
// all keys.
func TestPrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		for _, implicit := range []bool{false, true} {
			c := pool.Adopt(s.Connect())
			if implicit {
				s.Exec(c.Conn, "SET SESSION autocommit = 0")
			}
			prepared := func() string {
				return s.Query(c.Conn, "SHOW SESSION STATUS LIKE 'Com_stmt_prepare'")[0][1]
			}
			for i, shared := range []bool{false, true} {
				for n := range many {
					name := "it's\x00a\xff?" + strconv.Itoa(n%3)
					grant, err := p.beginOn(c, implicit, rowlock.Key{Name: name, Shared: shared})
					dbtest.OK(t, err)
					if others := "it's\x00a\xff?" + strconv.Itoa((n+1)%3); n > 3 && !s.free(others) {
						t.Errorf("%q is locked, too", others)
					}
					dbtest.OK(t, grant.Txn.Commit(0))
					grant.Ticket.Leave()
					if !s.free(name) {
						t.Errorf("%q is still locked", name)
					}
				}
				want := strconv.Itoa(i + 1)
				if !p.Info().MariaDB && !implicit { // a procedure does as well
					want = "0"
				}
				if got := prepared(); got != want {
					t.Errorf("implicit %v, shared %v: %s statements were prepared, want %s", implicit, shared, got, want)
				}
			}
		}
	})
}

// TestLeasedIsNotPrepared: on MySQL a session locks a key that has had a lease by the
// procedure, which does not keep one that is live from being renewed.
func TestLeasedIsNotPrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		if !p.procedures.Has(s.table.LockProcedure()) {
			t.Skip("there is none on MariaDB")
		}
		c := pool.Adopt(s.Connect())
		s.Exec(c.Conn, "SET SESSION autocommit = 0")
		s.lease("k", time.Nanosecond)
		for range many {
			grant, err := p.beginOn(c, true, rowlock.Key{Name: "k"})
			dbtest.OK(t, err)
			dbtest.OK(t, grant.Txn.Commit(0))
			grant.Ticket.Leave()
		}
		dbtest.Equal(t, "%s statements were prepared", s.Query(c.Conn, "SHOW SESSION STATUS LIKE 'Com_stmt_prepare'")[0][1], "0")
	})
}

// TestPreparedUnderSettings that the application makes.
func TestPreparedUnderSettings(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		settings := []string{"collation_connection = utf16_general_ci"}
		if !p.Info().MariaDB {
			settings = append(settings, "sql_select_limit = 0")
		}
		for _, setting := range settings {
			for _, implicit := range []bool{false, true} {
				c := pool.Adopt(s.Connect())
				s.Exec(c.Conn, "SET SESSION "+setting)
				if implicit {
					s.Exec(c.Conn, "SET SESSION autocommit = 0")
				}
				for n := range many {
					grant, err := p.beginOn(c, implicit, rowlock.Key{Name: "k"})
					if err != nil {
						t.Fatalf("%s, implicit %v, lock %d: %v", setting, implicit, n, err)
					}
					if s.free("k") {
						t.Errorf("%s, implicit %v, lock %d: it is not locked", setting, implicit, n)
					}
					dbtest.OK(t, grant.Txn.Commit(0))
					grant.Ticket.Leave()
				}
			}
		}
	})
}

// base is what go-sql-driver/mysql has that is used here.
type base interface {
	driver.Conn
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Validator
}

// preparing is a connection on which something happens to prepared statements.
type preparing struct {
	base
	refuse error // what preparing fails with
	runs   int   // of a statement, the last of which fails
	number uint16
	tries  int // to prepare
	ran    int
}

func (c *preparing) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	c.tries++
	if c.refuse != nil {
		return nil, c.refuse
	}
	stmt, err := c.base.PrepareContext(ctx, text)
	return &forgotten{stmt, c}, err
}

type forgotten struct {
	driver.Stmt
	c *preparing
}

func (s *forgotten) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if s.c.ran++; s.c.ran >= s.c.runs {
		return nil, &mysql.MySQLError{Number: s.c.number, Message: "it cannot be run"}
	}
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

// TestUnprepared: where a statement cannot be prepared, or the server has forgotten
// it, texts do, and it is not tried over and over.
func TestUnprepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		for _, implicit := range []bool{false, true} {
			for name, c := range map[string]*preparing{
				"not supported by the server": {refuse: &mysql.MySQLError{Number: 1295, Message: "not supported in the prepared statement protocol"}},
				"too many":                    {refuse: &mysql.MySQLError{Number: 1461, Message: "Can't create more than max_prepared_stmt_count"}},
				"not supported by the driver": {refuse: errors.New("no")},
				"forgotten":                   {runs: 3, number: 1243},
				"to be prepared anew":         {runs: 3, number: 1615},
			} {
				c.base = s.Connect().(base)
				link := pool.Adopt(c)
				if implicit {
					s.Exec(c, "SET SESSION autocommit = 0")
				}
				for range many {
					grant, err := p.beginOn(link, implicit, rowlock.Key{Name: "k"})
					if err != nil {
						t.Fatalf("%s, implicit %v: %v", name, implicit, err)
					}
					dbtest.OK(t, grant.Txn.Commit(0))
					grant.Ticket.Leave()
				}
				want := 1
				if !p.Info().MariaDB && !implicit {
					want = 0
				}
				if c.tries != want || c.ran != want*c.runs {
					t.Errorf("%s, implicit %v: it was prepared %d times, and ran %d times", name, implicit, c.tries, c.ran)
				}
			}
		}
	})
}

// TestLostWhilePreparing: nothing is held, so that another connection may be tried.
func TestLostWhilePreparing(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		link := pool.Adopt(&preparing{base: s.Connect().(base), refuse: driver.ErrBadConn})
		s.Exec(link.Conn, "SET SESSION autocommit = 0")
		for range many {
			grant, err := p.beginOn(link, true, rowlock.Key{Name: "k"})
			if err == nil {
				dbtest.OK(t, grant.Txn.Commit(0))
				grant.Ticket.Leave()
				continue
			}
			dbtest.Is(t, "the error", err, driver.ErrBadConn)
			if !s.free("k") {
				t.Error("k is locked")
			}
			return
		}
		t.Error("it was never prepared")
	})
}
