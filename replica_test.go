//go:build unix

package mysqllock_test

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestStatementLog: a replica that runs the statements of leases again grants other tokens than
// its primary did, so there are no leases with such a binary log; all else goes on.
func TestStatementLog(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		ways := map[string]func(db *sql.DB, how ...lockctx.Option) error{
			"Do": func(db *sql.DB, how ...lockctx.Option) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, how...)
			},
			"BeginTx": func(db *sql.DB, how ...lockctx.Option) error {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", how...), nil)
				if err == nil {
					err = tx.Commit()
				}
				return err
			},
		}
		db := s.open()
		for name, way := range ways {
			for _, how := range [][]lockctx.Option{{lockctx.Lease(time.Minute)}, {lockctx.Lease(time.Minute), lockctx.Slots(2)}} {
				err := way(db, how...)
				dbtest.Want(t, err, mysqllock.ErrUnsafe)
				dbtest.Says(t, err, "binlog_format is STATEMENT")
			}
			for _, how := range []lockctx.Option{lockctx.Row(), lockctx.Advisory(), lockctx.Optimistic()} {
				if err := way(db, how); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			dbtest.OK(t, way(s.open("lockUnsafe=allow"), lockctx.Lease(time.Minute)))
		}
		i, err := inspect.New(s.plain, inspect.Options{})
		dbtest.OK(t, err)
		found, err := i.Doctor(dbtest.Limited(t))
		dbtest.OK(t, err)
		for _, v := range found.Verdicts {
			if lease := v.Strategy == "lease"; v.Safe == lease {
				t.Errorf("doctor on %s: %v", v.Strategy, v)
			}
		}
		dbtest.Exec(t, s.plain, "SET GLOBAL binlog_format = 'MIXED'")
		for name, way := range ways {
			dbtest.Soon(t, name+" works", func() bool { return way(db, lockctx.Lease(time.Minute)) == nil })
		}
		// What is open stays as it is, and what is opened from now on does not.
		dbtest.Exec(t, s.plain, "SET GLOBAL binlog_format = 'STATEMENT'")
		dbtest.OK(t, ways["Do"](db, lockctx.Lease(time.Minute)))
		s.killAllBut(0)
		dbtest.Want(t, ways["Do"](db, lockctx.Lease(time.Minute)), mysqllock.ErrUnsafe)
		dbtest.Want(t, ways["BeginTx"](db, lockctx.Lease(time.Minute)), mysqllock.ErrUnsafe)
	}, "--server-id=1", "--log-bin=bin", "--binlog-format=STATEMENT")
}

// TestPromoted: a replica that is promoted before it has heard of a lease grants the lease again,
// with the same token. Its former holder commits nothing there, and the new one keeps it.
func TestPromoted(t *testing.T) {
	onPairs(t, func(t *testing.T, s *scratch, primary, replica *tempserver.Server) {
		p := dbtest.StartProxy(t, primary.Addr())
		at := func(addr string) *stock.Shop {
			d := s.Changed(func(cfg *mysql.Config) { cfg.Addr = addr })
			return &stock.Shop{Database: d, Plain: d.Open("mysql")}
		}
		promoted := at(replica.Addr())
		former, next := at(p.Addr()).Handle(), promoted.Handle()
		take := func(db *sql.DB) *mysqllock.Hold {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(time.Minute))
			dbtest.OK(t, err)
			return h
		}
		first := take(former)
		dbtest.OK(t, first.Release())
		dbtest.Soon(t, "the replica knows that", func() bool {
			var free bool
			err := promoted.Plain.QueryRow("SELECT owner IS NULL FROM mysqllock WHERE name = 'k' AND token = ?", first.Token()).Scan(&free)
			return err == nil && free
		})
		dbtest.Exec(t, promoted.Plain, "STOP REPLICA")

		var second *mysqllock.Hold
		err := mysqllock.Do(dbtest.Limited(t), former, "k", func(ctx context.Context) error {
			dbtest.OK(t, primary.Kill())
			t.Cleanup(func() { dbtest.OK(t, primary.Restart(context.Background())) }) // with the test's database, to be dropped
			p.TurnTo(replica.Addr())
			p.Reset()
			second = take(next)
			held, _ := mysqllock.Token(ctx)
			if held != first.Token()+1 || second.Token() != held {
				t.Errorf("tokens are %d and %d after %d", held, second.Token(), first.Token())
			}
			_, err := former.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			return err
		}, lockctx.Lease(time.Minute))
		dbtest.Want(t, err, mysqllock.ErrLost)
		promoted.WantStock(1, 10)
		dbtest.OK(t, context.Cause(second.Context()))
		dbtest.OK(t, second.Release())
	})
}

// TestReplica: a replica comes to the same rows, also where it runs the statements again.
func TestReplica(t *testing.T) {
	type way struct {
		key string
		how []lockctx.Option
	}
	row := way{"k", []lockctx.Option{lockctx.Row(), lockctx.Retry(1000)}}
	optimistic := way{"k", []lockctx.Option{lockctx.Optimistic(), lockctx.Retry(1000)}}
	lease := way{"leased", []lockctx.Option{lockctx.Lease(time.Minute)}}
	for format, ways := range map[string][]way{
		"STATEMENT": {row, optimistic},
		"MIXED":     {row, optimistic, lease},
	} {
		t.Run(format, func(t *testing.T) {
			onPairs(t, func(t *testing.T, s *scratch, _, replica *tempserver.Server) {
				const handles, times = 4, 20
				var wg sync.WaitGroup
				for range handles {
					db := s.open()
					for _, w := range ways {
						wg.Go(func() {
							for range times {
								err := mysqllock.Do(dbtest.Limited(t), db, w.key, func(ctx context.Context) error {
									_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
									return err
								}, w.how...)
								if err != nil {
									t.Error(err)
								}
							}
						})
					}
				}
				wg.Wait()
				s.WantStock(1, 10+handles*times*len(ways))
				rows := "SELECT CONCAT_WS(' ', name, token, IFNULL(owner, '-'), expires, versioned) FROM mysqllock ORDER BY name"
				want := dbtest.Column[string](t, s.plain, rows)
				there := s.Changed(func(cfg *mysql.Config) { cfg.Addr = replica.Addr() }).Open("mysql")
				dbtest.Soon(t, "the replica has the table", func() bool { return there.QueryRow("SELECT COUNT(*) FROM mysqllock").Scan(new(int)) == nil })
				dbtest.Soon(t, "the replica has the same rows", func() bool { return slices.Equal(dbtest.Column[string](t, there, rows), want) })
			}, "--binlog-format="+format)
		})
	}
}

// onPairs runs a test on a primary and a replica of each program.
func onPairs(t *testing.T, test func(t *testing.T, s *scratch, primary, replica *tempserver.Server), more ...string) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			start := func(id int) (*tempserver.Server, *sql.DB) {
				opts := append([]string{fmt.Sprintf("--server-id=%d", id), "--log-bin=bin"}, more...)
				if bin.Flavour == tempserver.MySQL {
					opts = append(opts, "--gtid-mode=ON", "--enforce-gtid-consistency=ON")
				}
				srv, err := tempserver.Start(dbtest.Within(t, dbtest.Patience), bin, opts...)
				dbtest.OK(t, err)
				t.Cleanup(func() { srv.Stop() })
				return srv, dbtest.Open(t, "mysql", srv.DSN(""))
			}
			primary, db := start(1)
			dbtest.Exec(t, db, "CREATE USER replica IDENTIFIED BY 'r'")
			dbtest.Exec(t, db, "GRANT REPLICATION SLAVE ON *.* TO replica")
			replica, db := start(2)
			follow := "CHANGE MASTER TO MASTER_HOST='%s', MASTER_PORT=%s, MASTER_USER='replica', MASTER_PASSWORD='r', MASTER_USE_GTID=slave_pos"
			if bin.Flavour == tempserver.MySQL {
				follow = "CHANGE REPLICATION SOURCE TO SOURCE_HOST='%s', SOURCE_PORT=%s, SOURCE_USER='replica', SOURCE_PASSWORD='r', SOURCE_AUTO_POSITION=1, GET_SOURCE_PUBLIC_KEY=1"
			}
			host, port, err := net.SplitHostPort(primary.Addr())
			dbtest.OK(t, err)
			dbtest.Exec(t, db, fmt.Sprintf(follow, host, port))
			dbtest.Exec(t, db, "START REPLICA")
			test(t, newScratch(dbtest.New(t, bin, primary)), primary, replica)
		})
	}
}
