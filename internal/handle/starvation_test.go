package handle

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// enter has a caller wait that database/sql would try again.
func enter(t *testing.T, c *starvationGuard, asked *bool) (ctx context.Context, leave func()) {
	t.Helper()
	ctx, leave, err := c.enter(t.Context(), asked)
	dbtest.OK(t, err)
	c.waiting[len(c.waiting)-1].retried = true
	return ctx, leave
}

// TestStarvationAsksEachOnce: where all connections have a waiter while a session is held, the
// newest is made to try again, and none twice.
func TestStarvationAsksEachOnce(t *testing.T) {
	c := &starvationGuard{grace: time.Hour} // so that nobody is asked but by us
	defer c.stop()
	c.Opened()
	c.Opened()
	var first, second bool
	older, leaveOlder := enter(t, c, &first)
	newer, leaveNewer := enter(t, c, &second)
	if c.ask(); first || second {
		t.Fatal("a waiter was asked while no session is held")
	}
	c.hold()
	c.ask()
	if !second || first || !errors.Is(context.Cause(newer), errYield) || older.Err() != nil {
		t.Fatalf("asked: older %v (%v), newer %v (%v); want the newer one", first, context.Cause(older), second, context.Cause(newer))
	}
	leaveNewer()
	_, leaveNewer = enter(t, c, &second) // it has come back
	c.ask()
	if !first || !errors.Is(context.Cause(older), errYield) {
		t.Error("the one that was asked before was asked again")
	}
	leaveOlder()
	leaveNewer()
	if len(c.waiting) != 0 {
		t.Errorf("%d are still counted", len(c.waiting))
	}
}

// TestStarvationKeepsOneFree: once it is known how many connections there may be, nobody waits
// on the last one while a session is held.
func TestStarvationKeepsOneFree(t *testing.T) {
	c := &starvationGuard{grace: time.Hour, bound: 2}
	defer c.stop()
	c.Opened()
	c.Opened()
	c.hold()
	var asked bool
	_, leave := enter(t, c, &asked)
	defer leave()
	if _, _, err := c.enter(t.Context(), &asked); err == nil {
		t.Errorf("on the last connection it is let in")
	}
	c.done()
	_, leaveLast, err := c.enter(t.Context(), &asked)
	if err != nil {
		t.Fatalf("with no session held: %v", err)
	}
	leaveLast()
	c.Opened() // more than was thought
	if c.bound != 0 {
		t.Errorf("three are open, and the bound is still %d", c.bound)
	}
}
