package basedriver_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// bare is a connection of a driver that can only prepare.
type bare struct {
	driver.Conn
	prepared, closed int
}

func (b *bare) Prepare(string) (driver.Stmt, error) { b.prepared++; return &stmt{b}, nil }

type stmt struct{ c *bare }

func (s *stmt) Close() error                               { s.c.closed++; return nil }
func (s *stmt) NumInput() int                              { return 1 }
func (s *stmt) Exec([]driver.Value) (driver.Result, error) { return driver.RowsAffected(1), nil }
func (s *stmt) Query([]driver.Value) (driver.Rows, error)  { return nil, errors.New("no query") }

// old is a connection of a driver without contexts.
type old struct {
	bare
	ran int
}

func (o *old) Exec(string, []driver.Value) (driver.Result, error) {
	o.ran++
	return driver.RowsAffected(1), nil
}

func (o *old) Query(string, []driver.Value) (driver.Rows, error) {
	o.ran++
	return nil, driver.ErrSkip
}

var one = []driver.NamedValue{{Ordinal: 1, Value: int64(1)}}

// TestSkipIsPrepared: a driver that cannot run a text directly has it prepared, and the
// statement closed.
func TestSkipIsPrepared(t *testing.T) {
	ctx := context.Background()
	dbtest.Is(t, "Exec", dbtest.Err(basedriver.Exec(ctx, &bare{}, "x", nil)), driver.ErrSkip)
	dbtest.Is(t, "Query", dbtest.Err(basedriver.Query(ctx, &bare{}, "x", nil)), driver.ErrSkip)
	for name, s := range map[string]*statement.Statement{"exec": {Text: "x", Args: one}, "query that fails": {Text: "x", Args: one, Query: true}, "wrong number of arguments": {Text: "x"}} {
		c := &bare{}
		_, _, err := s.Run(ctx, c)
		if fails := name != "exec"; fails != (err != nil) || c.prepared != 1 || c.closed != 1 {
			t.Errorf("%s: %v; prepared %d times, closed %d", name, err, c.prepared, c.closed)
		}
	}
}

// TestArgumentsAreCounted: a statement that database/sql could not ask for their number is not run
// with another one, and the error is that of database/sql.
func TestArgumentsAreCounted(t *testing.T) {
	ctx, s := context.Background(), &stmt{&bare{}}
	_, execErr := basedriver.StmtExec(ctx, s, nil)
	_, queryErr := basedriver.StmtQuery(ctx, s, append(one, one...))
	for err, want := range map[error]string{execErr: "sql: expected 1 arguments, got 0", queryErr: "sql: expected 1 arguments, got 2"} {
		if err == nil || err.Error() != want {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestADriverWithoutContextsIsNotAskedAfterTheirEnd, and never gets arguments with names.
func TestADriverWithoutContextsIsNotAskedAfterTheirEnd(t *testing.T) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	c := &old{}
	dbtest.Is(t, "Exec", dbtest.Err(basedriver.Exec(ended, c, "x", one)), context.Canceled)
	dbtest.Is(t, "Query", dbtest.Err(basedriver.Query(ended, c, "x", one)), context.Canceled)
	if _, err := basedriver.Exec(context.Background(), c, "x", []driver.NamedValue{{Name: "n"}}); err == nil {
		t.Error("a named argument has lost its name")
	}
	if c.ran != 0 {
		t.Errorf("%d statements ran", c.ran)
	}
	if _, err := basedriver.Prepare(ended, c, "x"); !errors.Is(err, context.Canceled) || c.closed != 1 {
		t.Errorf("Prepare: %v; closed %d", err, c.closed)
	}
	if _, err := basedriver.Exec(context.Background(), c, "x", one); err != nil || c.ran != 1 {
		t.Errorf("%v; %d statements ran", err, c.ran)
	}
}
