package basedriver_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"log/slog"
	"testing"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

type panics struct {
	driver.Conn
	closed int
}

func (p *panics) Close() error                       { p.closed++; return nil }
func (p *panics) IsValid() bool                      { return p.Conn.(driver.Validator).IsValid() }
func (p *panics) ResetSession(context.Context) error { panic("a reset") }

func TestAPanicIsAnErrorThatSaysWhere(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	c := &panics{}
	err := func() (err error) {
		defer basedriver.Catch(c, &err)
		c.IsValid()
		return nil
	}()
	var p *basedriver.Panic
	if !errors.As(err, &p) || c.closed != 1 {
		t.Fatalf("%v; closed %d times", err, c.closed)
	}
	dbtest.Says(t, err, "basedriver_test.(*panics).IsValid (", "panic_test.go:", "nil")
	if basedriver.Valid(c) || c.closed != 2 {
		t.Errorf("valid after a panic; closed %d times", c.closed)
	}
	dbtest.Says(t, basedriver.Reset(t.Context(), c), "a reset")
}
