package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// events is an observer that keeps what it is told.
type events struct {
	mu   sync.Mutex
	told []mysqllock.Event
}

func (e *events) Observe(_ context.Context, event mysqllock.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.told = append(e.told, event)
}

// TestEachRefusalIsTold: an observer is told once of each lock that was asked for in vain, also by a
// handle that has never reached its server.
func TestEachRefusalIsTold(t *testing.T) {
	asks := map[string]func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error{
		"Do": func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error {
			return mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, opts...)
		},
		"Acquire": func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error {
			h, err := mysqllock.Acquire(ctx, db, "k", opts...)
			if err == nil {
				err = h.Release()
			}
			return err
		},
		"BeginTx": func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error {
			tx, err := db.BeginTx(lockctx.With(ctx, "k", opts...), nil)
			if err == nil {
				err = tx.Commit()
			}
			return err
		},
		"Exec": func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error {
			return dbtest.Err(db.ExecContext(lockctx.With(ctx, "k", opts...), "UPDATE p SET stock = stock WHERE id = 1"))
		},
		"Query": func(ctx context.Context, db *sql.DB, opts []lockctx.Option) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			return dbtest.Err(stock.Read(lockctx.With(ctx, "k", opts...), db, 1))
		},
	}
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE VIEW locks AS SELECT * FROM p")
		limited, err := mysql.ParseDSN(strings.Replace(s.LimitedDSN(t, 1), "maxConns=1", "", 1))
		dbtest.OK(t, err)
		dbtest.Conn(t, dbtest.Open(t, "mysql", limited.FormatDSN()))
		l, err := net.Listen("tcp", "127.0.0.1:0")
		dbtest.OK(t, err)
		dbtest.OK(t, l.Close())
		var cells dbtest.Together
		for situation, c := range map[string]struct {
			change func(*mysql.Config)
			config mysqllock.Config
			want   error
		}{
			"refused":           {func(cfg *mysql.Config) { cfg.Net, cfg.Addr = "tcp", l.Addr().String() }, mysqllock.Config{}, mysqllock.ErrNoAnswer},
			"full":              {func(cfg *mysql.Config) { *cfg = *limited.Clone() }, mysqllock.Config{}, mysqllock.ErrExhausted},
			"wrong password":    {func(cfg *mysql.Config) { cfg.User, cfg.Passwd = "nobody", "x" }, mysqllock.Config{}, nil},
			"no such database":  {func(cfg *mysql.Config) { cfg.DBName = "none_" + dbtest.Random() }, mysqllock.Config{}, nil},
			"unusable settings": {func(cfg *mysql.Config) { cfg.Params = map[string]string{"completion_type": "1"} }, mysqllock.Config{}, mysqllock.ErrUnsafe},
			"a view":            {func(*mysql.Config) {}, mysqllock.Config{Table: "locks"}, mysqllock.ErrUnsafe},
		} {
			for _, maxConns := range []int{0, 8} {
				for name, opts := range stock.KeptAs() {
					if situation == "a view" && name == "advisory" {
						continue // it needs no table
					}
					for way, ask := range asks {
						cells.Run(t, fmt.Sprintf("%s, %s, %s, maxConns=%d", situation, name, way, maxConns), func(t *testing.T) {
							cfg, told := s.Config(), new(events)
							c.change(cfg)
							config := c.config
							config.MaxConns, config.Observer = maxConns, told
							k, err := mysqllock.NewConnector(cfg, config)
							dbtest.OK(t, err)
							db := sql.OpenDB(k)
							defer db.Close()
							err = ask(dbtest.Limited(t), db, append(opts[:len(opts):len(opts)], lockctx.Wait(time.Second)))
							told.mu.Lock()
							defer told.mu.Unlock()
							switch {
							case err == nil, c.want != nil && !errors.Is(err, c.want):
								t.Errorf("%v, want %v", err, c.want)
							case len(told.told) != 1:
								t.Errorf("there are %d events: %v", len(told.told), err)
							default:
								e := told.told[0]
								if e.Kind != mysqllock.Refused || !slices.Equal(e.Keys, []string{"k"}) || e.Strategy == "" || e.Err == nil || e.Start.IsZero() {
									t.Errorf("%+v", e)
								}
							}
						})
					}
				}
			}
		}
		cells.Wait()
	})
}
