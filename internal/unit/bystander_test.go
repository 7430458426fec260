package unit_test

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestBystandersOnAnotherServerStay: a DSN can lead to several servers, which give the same ids to
// their connections. A unit of work whose statement is given up is on one server, and the control
// connections lead to the other one: what has its id there goes on.
func TestBystandersOnAnotherServerStay(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			var here, there *stock.Shop // where the units are, and the bystanders
			for _, s := range []**stock.Shop{&here, &there} {
				srv, err := tempserver.Start(dbtest.Within(t, dbtest.Patience), bin)
				dbtest.OK(t, err)
				t.Cleanup(func() { srv.Stop() })
				*s = stock.NewShop(dbtest.New(t, bin, srv))
			}
			dbtest.Exec(t, there.Plain, "CREATE DATABASE "+here.Name)
			for how, c := range map[string]mysqllock.Config{"": {}, "maxConns": {MaxConns: 80}} {
				t.Run(how, func(t *testing.T) { bystanders(t, here, there, c) })
			}
		})
	}
}

const (
	units     = 12 // of each kind
	fieldSize = 8 * units
)

func bystanders(t *testing.T, here, there *stock.Shop, c mysqllock.Config) {
	ctx := dbtest.Limited(t)
	var address atomic.Pointer[string]
	lead := func(to *stock.Shop) {
		addr := to.Config().Addr
		address.Store(&addr)
	}
	lead(there)
	cfg := here.Config()
	cfg.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, *address.Load())
	}
	db := here.OpenDB(mysqllock.NewConnector(cfg, c))
	db.SetMaxIdleConns(0)
	key := func(kind string, i int) string { return fmt.Sprint(kind, " ", i) }
	kinds := map[string]func(i int, run func(ctx context.Context, on execer) error) error{
		"BeginTx": func(i int, run func(ctx context.Context, on execer) error) error {
			ctx := lockctx.With(ctx, key("BeginTx", i))
			return stock.InTx(ctx, db, func(tx *sql.Tx) error { return run(ctx, tx) })
		},
		"Exec": func(i int, run func(ctx context.Context, on execer) error) error {
			return run(lockctx.With(ctx, key("Exec", i)), db)
		},
		"Do": func(i int, run func(ctx context.Context, on execer) error) error {
			return mysqllock.Do(ctx, db, key("Do", i), func(ctx context.Context) error { return run(ctx, db) })
		},
		"Do with a lease": func(i int, run func(ctx context.Context, on execer) error) error {
			return mysqllock.Do(ctx, db, key("Do with a lease", i), func(ctx context.Context) error {
				return stock.InTx(ctx, db, func(tx *sql.Tx) error { return run(ctx, tx) })
			}, lockctx.Lease(dbtest.Patience))
		},
	}
	own := here.Handle()
	for kind := range kinds { // the rows are there on each server
		for i := range units {
			for _, db := range []*sql.DB{own, db} {
				dbtest.OK(t, mysqllock.Do(ctx, db, key(kind, i), func(context.Context) error { return nil }))
			}
		}
	}
	dbtest.OK(t, mysqllock.Do(ctx, db, "warm", func(context.Context) error { return nil }, lockctx.Lease(dbtest.Patience)))
	hold := stock.Acquire(t, db, "has the session that leads there")

	id := func(s *stock.Shop) (id int) {
		conn := s.Connect()
		defer conn.Close()
		_, err := fmt.Sscan(s.One(conn, "SELECT CONNECTION_ID()"), &id)
		dbtest.OK(t, err)
		return id
	}
	for a, b := id(here), id(there); a != b; {
		if a < b {
			a = id(here)
		} else {
			b = id(there)
		}
	}
	const rests, works = "DO SLEEP(3600)", "DO SLEEP(7200)"
	running := func(s *stock.Shop, text string) []int {
		return dbtest.Column[int](t, s.Plain, "SELECT id FROM information_schema.processlist WHERE info LIKE '"+text+"%' ORDER BY id")
	}
	var field sync.WaitGroup
	for range fieldSize {
		conn := there.Connect()
		field.Go(func() { _ = server.Exec(ctx, conn, rests) })
	}
	dbtest.Soon(t, "the bystanders are busy", func() bool { return len(running(there, rests)) == fieldSize })
	before := running(there, rests)

	lead(here)
	var all sync.WaitGroup
	own2, giveUp := context.WithCancel(ctx)
	defer giveUp()
	for kind, unit := range kinds {
		for i := range units {
			all.Go(func() {
				err := unit(i, func(ctx context.Context, on execer) error {
					limited, cancel := context.WithCancel(ctx)
					defer cancel()
					defer context.AfterFunc(own2, cancel)()
					_, err := on.ExecContext(limited, works)
					return err
				})
				if err == nil {
					t.Errorf("%s: its statement was not given up", kind)
				}
			})
		}
	}
	dbtest.Soon(t, "the units are busy", func() bool { return len(running(here, works)) == units*len(kinds) })
	covered := 0
	for _, id := range running(here, works) {
		if before[0] <= id && id <= before[len(before)-1] {
			covered++
		}
	}
	if covered < units*len(kinds)*3/4 {
		t.Errorf("only %d units have the id of a bystander", covered)
	}
	giveUp()
	all.Wait()
	dbtest.OK(t, hold.Release())
	dbtest.OK(t, db.Close()) // which waits for what is to be killed
	after := running(there, rests)
	if len(after) != len(before) {
		t.Errorf("%d of %d bystanders were ended", len(before)-len(after), len(before))
	}
	for _, s := range []*stock.Shop{here, there} {
		for _, text := range []string{rests, works} {
			for _, id := range running(s, text) {
				_, _ = s.Plain.Exec(fmt.Sprint("KILL QUERY ", id)) // it may have ended by itself
			}
		}
	}
	field.Wait()
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}
