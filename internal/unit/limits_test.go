package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestOwnLimitsAreNoDeadlines: a caller without a deadline is not told that a deadline was exceeded,
// whichever limit of the driver's own ends what the server does not answer any more.
func TestOwnLimitsAreNoDeadlines(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		const update = "INSERT INTO p VALUES (NULL, 1)"
		dbtest.Exec(t, s.Plain, "ALTER TABLE p MODIFY id INT NOT NULL AUTO_INCREMENT")
		type way struct {
			at  string // the word that is not answered any more; "" is that nothing is, from now on
			run func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error
		}
		lost := func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(dbtest.Patience):
				return errors.New("it is not lost")
			}
		}
		ways := map[string]way{
			"a hold that does nothing": {"", func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error {
				h, err := mysqllock.Acquire(context.Background(), db, "k", opts...)
				if err != nil {
					return err
				}
				defer h.Rollback()
				blocked()
				defer mended()
				return lost(h.Context())
			}},
			"a transaction that does nothing": {"", func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error {
				tx, err := db.BeginTx(lockctx.With(context.Background(), "k", opts...), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				blocked()
				time.Sleep(8 * time.Second) // a COMMIT of the base driver's has no limit
				mended()
				return tx.Commit()
			}},
			"Release": {"", func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error {
				h, err := mysqllock.Acquire(context.Background(), db, "k", opts...)
				if err != nil {
					return err
				}
				blocked()
				return h.Release()
			}},
			"Do": {"COMMIT", func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error {
				return mysqllock.Do(context.Background(), db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, update)
					return err
				}, opts...)
			}},
			"a second key": {"mysqllock", func(db *sql.DB, opts []lockctx.Option, blocked, mended func()) error {
				tx, err := db.BeginTx(lockctx.With(context.Background(), "k", opts...), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				blocked()
				_, err = tx.ExecContext(lockctx.With(context.Background(), "l", opts...), update)
				mended()
				return err
			}},
		}
		var cells dbtest.Together
		for name, opts := range stock.KeptAs() {
			for how, way := range ways {
				cells.Run(t, name+", "+how, func(t *testing.T) {
					s := &stock.Shop{Database: s.Database, Plain: s.Plain}
					db, proxy := s.Proxied(mysqllock.Config{TTL: 9 * time.Second, Namespace: dbtest.Random()})
					dbtest.OK(t, stock.Told(func() error {
						return mysqllock.Do(t.Context(), db, "another", func(ctx context.Context) error {
							_, err := db.ExecContext(ctx, update)
							return err
						}, opts...)
					}))
					block := proxy.Block
					if way.at != "" {
						block = func(...dbtest.Direction) { proxy.BlockAt(way.at) }
					}
					if how == "Do" {
						block()
						defer time.AfterFunc(40*time.Second, proxy.Mend).Stop() // on a connection of the application's COMMIT has no limit
					}
					err := way.run(db, opts, func() { block() }, proxy.Mend)
					for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
						if errors.Is(err, end) || err != nil && strings.Contains(err.Error(), end.Error()) {
							t.Error(err)
						}
					}
					proxy.Mend()
				})
			}
		}
		cells.Wait()
	})
}
