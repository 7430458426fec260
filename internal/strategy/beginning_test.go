package strategy_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// conn notes that it was closed.
type conn struct {
	driver.Conn
	closed bool
}

func (c *conn) Close() error { c.closed = true; return nil }

// lending is a Beginning on a connection of its own.
type lending struct {
	*strategy.Beginning
	conn *conn
	c    *pool.Conn
	done []bool // what done has heard
}

func newLending(t *testing.T) *lending {
	l := &lending{conn: new(conn)}
	l.c = pool.Adopt(l.conn)
	l.Beginning = strategy.NewBeginning(func(ctx context.Context) (*pool.Conn, error) { return l.c, l.c.AwaitTurn(ctx) }, func(begun bool) {
		l.done = append(l.done, begun)
		l.c.EndTurn()
	})
	t.Cleanup(func() {
		if !l.c.TryTurn() {
			t.Error("somebody has kept the turn")
		}
	})
	return l
}

// want fails the test unless the connection was given back once, in that state.
func (l *lending) want(t *testing.T, begun, whole, closed bool) {
	t.Helper()
	if b, w := l.Conclude(); b != begun || w != whole {
		t.Errorf("begun %v, whole %v", b, w)
	}
	if len(l.done) != 1 || l.done[0] != begun {
		t.Errorf("it was given back %v", l.done)
	}
	if l.conn.closed != closed || l.c.Clean() == closed {
		t.Errorf("closed %v, clean %v", l.conn.closed, l.c.Clean())
	}
}

// TestUse: whatever way a strategy ends the use of the connection, it is given back once. It
// stays open only if the strategy says in what state it is.
func TestUse(t *testing.T) {
	for left, c := range map[strategy.State]struct{ begun, closed bool }{
		strategy.Begun: {true, false}, strategy.Vacant: {false, false}, strategy.Unsure: {false, true},
	} {
		l := newLending(t)
		if err := l.Use(t.Context(), func(c *pool.Conn) strategy.State {
			if c != l.c || c.TryTurn() {
				t.Error("it has not the turn of the connection")
			}
			return left
		}); err != nil {
			t.Error(err)
		}
		l.want(t, c.begun, true, c.closed)
	}
}

// TestConclude: a connection that is still in use when Take has returned is closed, and nobody
// hears of a transaction on it.
func TestConclude(t *testing.T) {
	l := newLending(t)
	used, end, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		_ = l.Use(t.Context(), func(*pool.Conn) strategy.State {
			close(used)
			<-end
			return strategy.Begun
		})
	}()
	<-used
	l.want(t, false, false, true)
	close(end)
	<-over
	l.want(t, false, true, true)

	var none *strategy.Beginning
	if begun, whole := none.Conclude(); begun || !whole {
		t.Errorf("without one: begun %v, whole %v", begun, whole)
	}
	broken := errors.New("there is none")
	b := strategy.NewBeginning(func(context.Context) (*pool.Conn, error) { return nil, broken }, func(bool) { t.Error("nothing was lent") })
	if err := b.Use(t.Context(), func(*pool.Conn) strategy.State { t.Error("there is none"); return strategy.Begun }); !errors.Is(err, broken) {
		t.Error(err)
	}
	if begun, whole := b.Conclude(); begun || !whole {
		t.Errorf("without a connection: begun %v, whole %v", begun, whole)
	}
}
