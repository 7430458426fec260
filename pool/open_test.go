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
				p := newPool(Config{Max: 1, Bare: bare, Connect: func(ctx context.Context) (driver.Conn, error) {
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
