package mysqllock_test

import (
	"context"
	"database/sql"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// vanishing are the connections of a host that vanishes once it has sent the statement
// that checks its lease before a COMMIT, or another one: the server hears nothing more of
// it, and is not told that it has gone.
type vanishing struct {
	at    []string      // what is in the statement; nil is what is in such a check
	armed chan struct{} // closed when it is to vanish
	gone  chan struct{} // closed when it has
	once  sync.Once
	over  chan struct{} // closed at the end of the test
}

func (v *vanishing) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	return &vanishingConn{c, v}, err
}

// await waits until it has vanished.
func (v *vanishing) await(t testing.TB) {
	t.Helper()
	select {
	case <-v.gone:
	case <-time.After(dbtest.Patience):
		t.Fatal("it does not send the statement")
	}
}

type vanishingConn struct {
	net.Conn
	v *vanishing
}

func (c *vanishingConn) vanished() bool {
	select {
	case <-c.v.gone:
		<-c.v.over
		return true
	default:
		return false
	}
}

func (c *vanishingConn) Write(b []byte) (int, error) {
	if c.vanished() {
		return 0, net.ErrClosed
	}
	n, err := c.Conn.Write(b)
	select {
	case <-c.v.armed:
		at := c.v.at
		if at == nil {
			at = []string{"LOCK IN SHARE MODE", "mysqllock_done2", "@mysqllock_held"}
		}
		for _, text := range at {
			if strings.Contains(string(b), text) {
				c.v.once.Do(func() { close(c.v.gone) })
			}
		}
	default:
	}
	return n, err
}

func (c *vanishingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.vanished() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *vanishingConn) Close() error {
	select {
	case <-c.v.gone:
		<-c.v.over
	default:
	}
	return c.Conn.Close()
}

// TestHostVanishesAtCommit: a host that vanishes right after the check of its lease has
// committed, and keeps the key no longer than its TTL. Nobody asks for the key before the
// commit, and the TTL is a long one: a check that meets another request, or a renewal, from a
// third of the TTL on, is refused, and a host that has vanished does not send it again.
func TestHostVanishesAtCommit(t *testing.T) {
	for name, write := range map[string]func(ctx context.Context, db *sql.DB) error{
		"Exec": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
			return err
		},
		"BeginTx": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1"); err != nil {
				return err
			}
			return tx.Commit()
		},
	} {
		t.Run(name, func(t *testing.T) {
			dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
				other := s.open()
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // all is there
				v := &vanishing{armed: make(chan struct{}), gone: make(chan struct{}), over: make(chan struct{})}
				cfg := s.Config()
				cfg.DialFunc = v.dial
				connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
				dbtest.OK(t, err)
				db := sql.OpenDB(connector)
				var all sync.WaitGroup
				all.Go(func() {
					_ = mysqllock.Do(context.Background(), db, "k", func(ctx context.Context) error {
						close(v.armed)
						return write(ctx, db)
					}, lockctx.Lease(12*time.Second))
				})
				defer func() {
					close(v.over)
					all.Wait()
					db.Close()
				}()
				v.await(t)
				began := time.Now()
				dbtest.Soon(t, "it is committed", func() bool { return s.stock(1) == 1 })
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, lockctx.Lease(ttl), lockctx.Wait(2*time.Minute)))
				t.Logf("free after %v", time.Since(began))
			})
		})
	}
}

// TestHostVanishesWithoutProcedure is the same for an account on MySQL that may not make
// the procedure: nothing is committed, and the key is free within the TTL.
func TestHostVanishesWithoutProcedure(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("there the same is an anonymous block")
		}
		other := s.open("lockSchema=manual", "lockNamespace=app")
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.open("lockNamespace=app"), "made", func(context.Context) error { return nil }))
		_, err := s.plain.Exec("DROP PROCEDURE IF EXISTS mysqllock_done2")
		dbtest.OK(t, err)
		do := func(db *sql.DB, fn func(context.Context) error, ttl time.Duration) error {
			return mysqllock.Do(context.Background(), db, "k", fn, lockctx.Lease(ttl), lockctx.Wait(2*time.Minute))
		}
		dbtest.OK(t, do(other, func(ctx context.Context) error { // and the limit is off again
			conn, err := other.Conn(ctx)
			dbtest.OK(t, err)
			defer conn.Close()
			const wait = "SELECT @@SESSION.wait_timeout"
			var before, after int
			dbtest.OK(t, conn.QueryRowContext(ctx, wait).Scan(&before))
			_, err = conn.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 2")
			dbtest.OK(t, err)
			dbtest.OK(t, conn.QueryRowContext(ctx, wait).Scan(&after))
			if before != after {
				t.Errorf("wait_timeout was %d and is %d", before, after)
			}
			return nil
		}, ttl))
		s.wantStock(2, 9)
		v := &vanishing{armed: make(chan struct{}), gone: make(chan struct{}), over: make(chan struct{})}
		cfg := s.Config()
		cfg.DialFunc = v.dial
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Schema: "manual", Namespace: "app"})
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		var all sync.WaitGroup
		all.Go(func() {
			_ = do(db, func(ctx context.Context) error {
				close(v.armed)
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
				return err
			}, 6*time.Second)
		})
		defer func() {
			close(v.over)
			all.Wait()
			db.Close()
		}()
		v.await(t)
		dbtest.OK(t, do(other, func(context.Context) error { return nil }, ttl))
		s.wantStock(1, 10)
	})
}
