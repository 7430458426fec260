package main

import (
	"context"
	"errors"
	"net"
	"os/exec"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// TestRoundTripsOfAWriteSomeWayOff counts what the contenders send through the proxy that they are measured through.
func TestRoundTripsOfAWriteSomeWayOff(t *testing.T) {
	found := tempserver.Require(t)
	for _, on := range []string{onMySQL, onMariaDB} {
		t.Run(on, func(t *testing.T) {
			s, err := startSQL(t.Context(), found, tempserver.Flavour(on))
			if errors.Is(err, exec.ErrNotFound) {
				t.Skip("not installed")
			}
			dbtest.OK(t, err)
			defer func() { dbtest.OK(t, s.stop()) }()
			p, err := startProxy(farDelay, addresses{on: s.address})
			dbtest.OK(t, err)
			defer func() { dbtest.OK(t, p.end()) }()
			tap := new(dbtest.Tap)
			mysql.RegisterDialContext("tcp", func(ctx context.Context, addr string) (net.Conn, error) { return tap.Dial(ctx, "tcp", addr) })
			defer mysql.DeregisterDialContext("tcp")
			for name, want := range map[string]int{
				wrote: 1, wroteLocked: 1, // the lock, the write and its COMMIT
				apart: 2, apartLocked: 2, // the lock with the SELECT, and the UPDATE with its COMMIT
			} {
				c, err := find(contender{Name: name, Server: on}.String())
				dbtest.OK(t, err)
				client, err := c.open(t.Context(), p.at, size{Workers: 1, Locks: 1})
				dbtest.OK(t, err)
				each := func() error { return dbtest.Err(client.Lock(t.Context(), 0, product)) }
				for range 10 { // what is sent once
					dbtest.OK(t, each())
				}
				tap.Costs(t, name, want, each)
				dbtest.OK(t, client.Close())
			}
		})
	}
}
