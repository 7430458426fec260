package rowlock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
)

// beginOn begins a transaction with a lock on key on c, and checks that it has it.
func (p *process) beginOn(c *pool.Conn, key rowlock.Key) (*rowlock.Begun, error) {
	p.T.Helper()
	grant, err := p.Begin(dbtest.Limited(p.T), driver.TxOptions{}, rowlock.Request{
		Keys: []rowlock.Key{key}, Sessions: &sessions{get: func(context.Context) (*pool.Conn, error) { return c, nil }}, Waiting: free,
	})
	if err == nil && p.free(key.Name) {
		p.T.Errorf("%q is not locked", key.Name)
	}
	return grant, err
}

// session is a connection that is not in autocommit, as sessions are.
func (s *scratch) session() *pool.Conn {
	s.T.Helper()
	c := pool.Adopt(s.Connect())
	s.Exec(c.Conn, "SET SESSION autocommit = 0")
	return c
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

// TestLockStatementsArePreparedOnASessionThatStays, once for all keys.
func TestLockStatementsArePreparedOnASessionThatStays(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(nil), s.session()
		for i, shared := range []bool{false, true} {
			for n := range many {
				name := "it's\x00a\xff?" + strconv.Itoa(n%3)
				grant, err := p.beginOn(c, rowlock.Key{Name: name, Shared: shared})
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
			got := s.Query(c.Conn, "SHOW SESSION STATUS LIKE 'Com_stmt_prepare'")[0][1]
			if want := strconv.Itoa(i + 1); got != want {
				t.Errorf("shared %v: %s statements were prepared, want %s", shared, got, want)
			}
		}
	})
}

// TestPreparedLockStatementsLockUnderAnySetting that the application makes.
func TestPreparedLockStatementsLockUnderAnySetting(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		settings := []string{"collation_connection = utf16_general_ci"}
		if !p.Info().MariaDB {
			settings = append(settings, "sql_select_limit = 0")
		}
		for _, setting := range settings {
			c := s.session()
			s.Exec(c.Conn, "SET SESSION "+setting)
			for n := range many {
				grant, err := p.beginOn(c, rowlock.Key{Name: "k"})
				if err != nil {
					t.Fatalf("%s, lock %d: %v", setting, n, err)
				}
				if s.free("k") {
					t.Errorf("%s, lock %d: it is not locked", setting, n)
				}
				dbtest.OK(t, grant.Txn.Commit(0))
				grant.Ticket.Leave()
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

func (p *preparing) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	p.tries++
	if p.refuse != nil {
		return nil, p.refuse
	}
	stmt, err := p.base.PrepareContext(ctx, text)
	return &forgotten{stmt, p}, err
}

type forgotten struct {
	driver.Stmt
	c *preparing
}

func (f *forgotten) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if f.c.ran++; f.c.ran >= f.c.runs {
		return nil, &mysql.MySQLError{Number: f.c.number, Message: "it cannot be run"}
	}
	return f.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

// TestTextsDoWhereALockStatementCannotBePrepared, or the server has forgotten it, and it is not
// tried over and over.
func TestTextsDoWhereALockStatementCannotBePrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		for name, c := range map[string]*preparing{
			"not supported by the server": {refuse: &mysql.MySQLError{Number: 1295, Message: "not supported in the prepared statement protocol"}},
			"too many":                    {refuse: &mysql.MySQLError{Number: 1461, Message: "Can't create more than max_prepared_stmt_count"}},
			"not supported by the driver": {refuse: errors.New("no")},
			"forgotten":                   {runs: 3, number: 1243},
			"to be prepared anew":         {runs: 3, number: 1615},
		} {
			c.base = s.Connect().(base)
			link := pool.Adopt(c)
			s.Exec(c, "SET SESSION autocommit = 0")
			for range many {
				grant, err := p.beginOn(link, rowlock.Key{Name: "k"})
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				dbtest.OK(t, grant.Txn.Commit(0))
				grant.Ticket.Leave()
			}
			if c.tries != 1 || c.ran != c.runs {
				t.Errorf("%s: it was prepared %d times, and ran %d times", name, c.tries, c.ran)
			}
		}
	})
}

// TestAConnectionLostWhilePreparingHoldsNothing, so that another one may be tried.
func TestAConnectionLostWhilePreparingHoldsNothing(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		link := pool.Adopt(&preparing{base: s.Connect().(base), refuse: driver.ErrBadConn})
		s.Exec(link.Conn, "SET SESSION autocommit = 0")
		for range many {
			grant, err := p.beginOn(link, rowlock.Key{Name: "k"})
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
