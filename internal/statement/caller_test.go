package statement_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/internal/statement"
)

// asked is what the stack says of a call.
type asked struct{ retried, forOne bool }

// called opens connections that note who calls them.
type called struct {
	forQueue chan bool  // of each connection
	asked    *[]asked   // of each statement
	waits    chan error // what statements return; a closed one is nil
}

func (c called) Driver() driver.Driver { return nil }

func (c called) Connect(context.Context) (driver.Conn, error) {
	c.forQueue <- statement.ForQueue()
	return calledConn{c}, nil
}

type calledConn struct{ called }

func (c calledConn) note() error {
	retried := func() bool { return statement.Retried(context.Background()) }
	is := asked{retried(), statement.ForOne()}
	for frames := range 20 { // as wrappers of drivers add some
		if deeper := (asked{deep(frames, retried), deep(frames, statement.ForOne)}); deeper != is {
			return fmt.Errorf("%v, and not %v, with %d frames more", deeper, is, frames)
		}
	}
	*c.asked = append(*c.asked, is)
	return <-c.waits
}

// deep calls ask with so many frames more on the stack.
func deep(frames int, ask func() bool) bool {
	if frames > 0 {
		return deep(frames-1, ask)
	}
	return ask()
}

func (c calledConn) Close() error                               { return nil }
func (c calledConn) Begin() (driver.Tx, error)                  { return c, c.note() }
func (c calledConn) Commit() error                              { return nil }
func (c calledConn) Rollback() error                            { return nil }
func (c calledConn) Prepare(string) (driver.Stmt, error)        { return c, nil }
func (c calledConn) NumInput() int                              { return 0 }
func (c calledConn) Exec([]driver.Value) (driver.Result, error) { return nil, c.note() }

func (c calledConn) Query([]driver.Value) (driver.Rows, error) { return nil, c.note() }

func (c calledConn) ExecContext(_ context.Context, _ string, _ []driver.NamedValue) (driver.Result, error) {
	return nil, c.note()
}

// TestConnectionsAreForTheQueueWhenAllAreUsed: a new one is for whoever stands in the queue if all
// that may be open were in use.
func TestConnectionsAreForTheQueueWhenAllAreUsed(t *testing.T) {
	ctx := t.Context()
	k := called{make(chan bool, 2), new([]asked), make(chan error)}
	db := sql.OpenDB(k)
	defer db.Close()
	db.SetMaxOpenConns(1)
	first, err := db.Conn(ctx)
	dbtest.OK(t, err)
	if <-k.forQueue {
		t.Error("the first connection is for whoever stands in the queue")
	}
	next := make(chan error, 1)
	go func() {
		conn, err := db.Conn(ctx)
		if err == nil {
			err = conn.Close()
		}
		next <- err
	}()
	for db.Stats().WaitCount == 0 {
		runtime.Gosched()
	}
	dbtest.Want(t, first.Raw(func(any) error { return driver.ErrBadConn }), driver.ErrBadConn)
	if !<-k.forQueue {
		t.Error("the connection of a caller that stood in the queue is not for it")
	}
	if err := <-next; err != nil {
		t.Error(err)
	}
}

// TestOnlyStatementsOfAHandleAreTriedAgain by database/sql: not those of a sql.Conn or of a
// sql.Tx, and no prepared ones. In a callback of sql.Conn.Raw that of another handle is none of
// the sql.Conn.
func TestOnlyStatementsOfAHandleAreTriedAgain(t *testing.T) {
	ctx := t.Context()
	k := called{make(chan bool, 2), new([]asked), make(chan error)}
	close(k.waits)
	db, other := sql.OpenDB(k), sql.OpenDB(k)
	defer db.Close()
	defer other.Close()
	db.SetMaxOpenConns(1)
	ok := func(err error) {
		t.Helper()
		dbtest.OK(t, err)
	}
	_, err := db.ExecContext(ctx, "x")
	ok(err)
	tx, err := db.BeginTx(ctx, nil)
	ok(err)
	_, err = tx.ExecContext(ctx, "x")
	ok(err)
	ok(tx.Commit())
	p, err := db.PrepareContext(ctx, "x")
	ok(err)
	_, err = p.ExecContext(ctx)
	ok(err)
	ok(p.Close())
	conn, err := db.Conn(ctx)
	ok(err)
	_, err = conn.ExecContext(ctx, "x")
	ok(err)
	ok(conn.Raw(func(any) error {
		_, err := other.ExecContext(ctx, "x")
		return err
	}))
	ok(conn.Close())
	want := []asked{{retried: true}, {retried: true}, {}, {}, {forOne: true}, {retried: true}}
	if !slices.Equal(*k.asked, want) {
		t.Errorf("%v, want %v", *k.asked, want)
	}
}
