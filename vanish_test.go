package mysqllock_test

import (
	"context"
	"database/sql"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

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
				v := dbtest.NewVanishing()
				cfg := s.Config()
				cfg.DialFunc = v.Dial
				connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
				dbtest.OK(t, err)
				db := sql.OpenDB(connector)
				var all sync.WaitGroup
				all.Go(func() {
					_ = mysqllock.Do(context.Background(), db, "k", func(ctx context.Context) error {
						close(v.Armed)
						return write(ctx, db)
					}, lockctx.Lease(12*time.Second))
				})
				defer func() {
					close(v.Over)
					all.Wait()
					db.Close()
				}()
				v.Await(t)
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
		v := dbtest.NewVanishing()
		cfg := s.Config()
		cfg.DialFunc = v.Dial
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Schema: "manual", Namespace: "app"})
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		var all sync.WaitGroup
		all.Go(func() {
			_ = do(db, func(ctx context.Context) error {
				close(v.Armed)
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
				return err
			}, 6*time.Second)
		})
		defer func() {
			close(v.Over)
			all.Wait()
			db.Close()
		}()
		v.Await(t)
		dbtest.OK(t, do(other, func(context.Context) error { return nil }, ttl))
		s.wantStock(1, 10)
	})
}
