package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/mysqllock/mysqllock/lockerr"
)

// TestHungOpeningIsGivenUp: a server that accepts a connection and never greets keeps no
// place for ever, although neither the caller nor the DSN has a time limit.
func TestHungOpeningIsGivenUp(t *testing.T) {
	for name, bare := range map[string]bool{"own": false, "of the application": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				opened := 0
				p := New(Config{Max: 1, Bare: bare, Connect: func(ctx context.Context) (driver.Conn, error) {
					opened++
					<-ctx.Done()
					return nil, ctx.Err()
				}})
				defer p.Close()
				for n := 1; n <= 2; n++ { // the second one needs the place of the first
					if _, err := p.Acquire(context.Background()); !errors.Is(err, lockerr.ErrNoAnswer) {
						t.Fatalf("a hung opening: %v", err)
					}
					if opened < n {
						t.Fatalf("%d connections were opened for %d callers", opened, n)
					}
				}
			})
		})
	}
}

// brittle is a connection on which nothing runs, and whose driver panics when it is closed.
type brittle struct{ driver.Conn }

func (brittle) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, errors.New("it has gone")
}

func (brittle) Close() error { panic("the driver in Close") }

// TestAPanicInACloseDoesNotReachTheGoroutineThatOpens connections, which would end the process: a connection that is
// not set up is closed.
func TestAPanicInACloseDoesNotReachTheGoroutineThatOpens(t *testing.T) {
	for name, cfg := range map[string]Config{
		"set-up": {Setup: "SET autocommit = 0"},
		"first":  {BeforeSetup: func(context.Context, driver.Conn) error { return errors.New("not this one") }},
	} {
		cfg.Max, cfg.Connect = 1, func(context.Context) (driver.Conn, error) { return brittle{}, nil }
		p := New(cfg)
		if c, err := p.Acquire(t.Context()); err == nil {
			t.Errorf("%s: %v is no error", name, c)
		}
		p.Close()
	}
}
