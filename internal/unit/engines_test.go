package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/fakeserver/engines"
	"github.com/mysqllock/mysqllock/lockctx"
)

// asking are the ways to ask for a lock, by which the application itself sends no more than
// BEGIN.
var asking = map[string]func(db *sql.DB, ctx context.Context, o lockctx.Option) error{
	"BeginTx": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(ctx, "k", o), nil)
		if err == nil {
			err = tx.Rollback()
		}
		return err
	},
	"Exec": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		return put(lockctx.With(ctx, "k", o), db, 9)
	},
	"Query": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		var n int
		return db.QueryRowContext(lockctx.With(ctx, "k", o), read, 1).Scan(&n)
	},
	"Conn": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		return put(lockctx.With(ctx, "k", o), c, 9)
	},
	"Do": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		return mysqllock.Do(ctx, db, "k", func(context.Context) error { return errors.New("it has run") }, o)
	},
	"Acquire": func(db *sql.DB, ctx context.Context, o lockctx.Option) error {
		h, err := mysqllock.Acquire(ctx, db, "k", o)
		if err == nil {
			err = h.Rollback()
		}
		return err
	},
}

func inTransaction(db dbtest.Beginner, ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	return f(tx)
}

// openEngine opens a handle on a server that is e.
func openEngine(t *testing.T, e fakeserver.Engine, cfg mysqllock.Config) (*fakeserver.Server, *sql.DB, context.Context) {
	s, db, ctx := openWith(t, cfg)
	s.Be(e)
	ctx, cancel := context.WithTimeout(lockctx.Without(ctx), time.Minute)
	t.Cleanup(cancel)
	return s, db, ctx
}

// TestNothingIsLockedOnAnotherEngine: each way to ask for each kind of lock is refused with
// the engine's name, and nothing is sent but the question what it is. Half of them have a budget of
// connections.
func TestNothingIsLockedOnAnotherEngine(t *testing.T) {
	strategies := map[string]lockctx.Option{"optimistic": lockctx.Optimistic()}
	for name, kind := range kinds {
		strategies[name] = kind.option
	}
	for name, all := range engines.Foreign {
		for _, e := range all {
			refused := func(what string, ask func(*sql.DB, context.Context) error) {
				s, db, ctx := openEngine(t, e, mysqllock.Config{MaxConns: len(what) % 2 * 8})
				for range 2 { // the next one asks again
					own, cancel := context.WithCancel(ctx)
					err := ask(db, own)
					cancel()
					var told *mysqllock.Error
					if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &told) || !strings.Contains(err.Error(), "the server is "+name+", wh") {
						t.Errorf("%s, %s: got %v", name, what, err)
					}
					for _, text := range s.Sent() {
						if text != "SHOW VITESS_SHARDS" && !strings.HasPrefix(text, "SELECT VERSION()") && !strings.HasPrefix(text, "SELECT @@version,") && text != "START TRANSACTION" && text != "ROLLBACK" {
							t.Errorf("%s, %s: sent %q", name, what, text)
						}
					}
				}
				dbtest.OK(t, db.Close())
			}
			for strategy, option := range strategies {
				for way, ask := range asking {
					refused(strategy+", "+way, func(db *sql.DB, ctx context.Context) error { return ask(db, ctx, option) })
				}
			}
		}
	}
}

// TestRefusalsSayWhy, in whole.
func TestRefusalsSayWhy(t *testing.T) {
	const end = "; connect to MySQL or MariaDB, or use lockUnsafe=allow if you know that these locks hold there"
	for name, want := range map[string]string{
		"Vitess 8.4.6-Vitess":                          "which has 2 shards (shop/-80, shop/80- …); they commit one after the other, so a lock can be free before another one has the data",
		"Vitess 8.4.6":                                 `whose database here is "shop@replica"; say only the keyspace, which is its primary`,
		"Vitess 8.0.34-PlanetScale":                    "which does not tell that it has one shard; of several a lock can be free before another one has the data (Error 1317: no topology)",
		"Dolt or go-mysql-server 8.0.33":               "where FOR UPDATE is accepted and locks nothing, so that updates would be lost silently, and a test would prove nothing (package mysqllocktest tests without a server)",
		"OceanBase 5.7.25-OceanBase_CE-v4.2.1":         "where nobody has tested whether locks exclude",
		"an unknown engine, Abacus-3 (Abacus DB)":      "whose version has another form than those of MySQL and MariaDB",
		"an unknown engine, 8.0.44-Abacus (Abacus DB)": "which does not know what MySQL from 8.0 and MariaDB from 10.3 know (Error 1193: Unknown system variable 'innodb_rollback_on_timeout')",
	} {
		_, db, ctx := openEngine(t, engines.Foreign[name][0], mysqllock.Config{})
		want = `mysqllock: lock "k" (row): not safe here: the server is ` + name + ", " + want + end
		if err := put(lockctx.With(ctx, "k"), db, 9); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// TestEnginesRefuseWhatDoesNotHoldThere, and nothing of it is sent. A row lock holds.
func TestEnginesRefuseWhatDoesNotHoldThere(t *testing.T) {
	with := func(o lockctx.Option) func(*sql.DB, context.Context) error {
		return func(db *sql.DB, ctx context.Context) error { return asking["BeginTx"](db, ctx, o) }
	}
	lacks := ", which does not work on "
	refuse := func(all map[string]fakeserver.Engine, what map[string]func(*sql.DB, context.Context) error) {
		for name, e := range all {
			for says, ask := range what {
				s, db, ctx := openEngine(t, e, mysqllock.Config{})
				if err := ask(db, ctx); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), strings.ReplaceAll(says, "%", name)) {
					t.Errorf("got %v, want %s", err, says)
				}
				for _, text := range s.Sent() {
					if strings.Contains(text, "FOR SHARE") || strings.Contains(text, "GET_LOCK") || strings.Contains(text, "SKIP LOCKED") {
						t.Errorf("%s: sent %q", says, text)
					}
				}
			}
		}
	}
	refuse(engines.TiDB, map[string]func(*sql.DB, context.Context) error{
		"advisory locks need GET_LOCK" + lacks + "%; ":    with(lockctx.Advisory()),
		"shared row locks need FOR SHARE" + lacks + "%; ": with(lockctx.Shared()),
	})
	refuse(engines.Vitess, map[string]func(*sql.DB, context.Context) error{
		"advisory locks need GET_LOCK" + lacks + "%; ": with(lockctx.Advisory()),
	})
	for _, e := range engines.Vitess {
		for way, work := range ways {
			s, db, ctx := openEngine(t, e, mysqllock.Config{})
			work(t, db, lockctx.With(ctx, "k"), lockctx.Row(), func() {
				if s.Held() != 1 {
					t.Errorf("%+v, %s: %d locks are held", e, way, s.Held())
				}
			})
			wantState(t, s, 9, 0)
		}
	}
}

// TestALeaseOnTiDBLocksItsRowFirst, in each transaction in which it is taken, fenced, renewed or released, and in no
// other words.
func TestALeaseOnTiDBLocksItsRowFirst(t *testing.T) {
	const (
		row    = "WHERE namespace = X AND name = X"
		lock   = "SELECT token, left " + row + " FOR UPDATE NOWAIT"
		grant  = "UPDATE SET token = token + N, owner = X, expires = later " + row
		began  = "START TRANSACTION"
		write  = "UPDATE p SET stock = ? WHERE id = ?"
		some   = "WHERE namespace = X AND name IN (X)"
		extend = "INSERT INTO `shop`.`mysqllock` (namespace, name, owner, token, expires) SELECT r.namespace, r.name, r.owner, r.token, r.expires" +
			" FROM (SELECT X AS n, N AS k, N AS ttl, N AS age, N AS told) d STRAIGHT_JOIN `shop`.`mysqllock` r ON r.namespace = X AND r.name = d.n AND r.token = d.k AND r.owner = X" +
			" WHERE r.expires > UTC_TIMESTAMP(N) FOR UPDATE ON DUPLICATE KEY UPDATE expires = UTC_TIMESTAMP(N) + INTERVAL d.ttl MICROSECOND," +
			" renewed_token = r.token, granted_at = UTC_TIMESTAMP(N) - INTERVAL d.age MICROSECOND, ttl = d.told"
		fence   = "SELECT IF(MAX(r.token = N AND r.owner = X AND lasts), N, stop) r WHERE r.namespace = X AND r.name = X LIMIT N FOR UPDATE WAIT N"
		give    = "UPDATE SET owner = NULL, expires = now " + row + " AND token = N AND owner = X"
		unknown = "SELECT owner = X " + row + " FOR UPDATE"
		free    = "UPDATE SET owner = NULL, expires = now " + row
	)
	short := strings.NewReplacer(
		"IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(N)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(N), expires), N)", "left",
		"(TIMESTAMPDIFF(SECOND, NOW(N), SYSDATE(N)) NOT BETWEEN N AND N OR r.expires > UTC_TIMESTAMP(N) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(N), SYSDATE(N)) MICROSECOND)", "lasts", "JSON_EXTRACT(CONCAT('x', CONNECTION_ID()), '$')", "stop",
		"UTC_TIMESTAMP(N) + INTERVAL N MICROSECOND", "later", "LEAST(expires, UTC_TIMESTAMP(N))", "now", " FROM `shop`.`mysqllock`", "", "UPDATE `shop`.`mysqllock`", "UPDATE",
	)
	hex, numbers := regexp.MustCompile(`x'[0-9a-f]*'`), regexp.MustCompile(`\b[0-9]+\b`)
	for what, c := range map[string]struct {
		before func(*fakeserver.Server) // the lease is asked for
		quits  bool                     // the caller gives up while the COMMIT that grants is under way
		within func(*fakeserver.Server) // before the transaction under it commits
		is     error
		says   string
		sent   []string
	}{
		"held": {sent: []string{lock, grant, "COMMIT", began, write, fence, "COMMIT", give, "COMMIT"}},
		"of somebody else": {
			before: func(s *fakeserver.Server) { s.Lease("k", time.Minute) },
			is:     mysqllock.ErrLocked, says: "shopd", sent: []string{lock, "ROLLBACK", "SELECT owner " + row + " AND (owner IS NOT NULL AND expires > UTC_TIMESTAMP(N))"},
		},
		"whose row is locked": {
			before: func(s *fakeserver.Server) {
				s.Fail("FOR UPDATE NOWAIT", &mysql.MySQLError{Number: 3572, Message: "could not be acquired immediately"})
			},
			is: mysqllock.ErrLocked, sent: []string{lock, "ROLLBACK", "SELECT owner " + row + " AND (owner IS NOT NULL AND expires > UTC_TIMESTAMP(N))"},
		},
		"taken away": {
			within: func(s *fakeserver.Server) { s.Steal() },
			is:     mysqllock.ErrLost, sent: []string{lock, grant, "COMMIT", began, write, fence, "SELECT released, CAST(UTC_TIMESTAMP(N) AS CHAR) " + row, "ROLLBACK"},
		},
		"granted, and the answer is lost": {
			before: func(s *fakeserver.Server) { s.LoseAnswer("COMMIT") },
			sent: []string{
				lock, grant, "COMMIT", unknown, free, "COMMIT", // and it is asked for again
				lock, grant, "COMMIT", began, write, fence, "COMMIT", give, "COMMIT",
			},
		},
		"granted to nobody": {quits: true, is: context.Canceled, sent: []string{lock, grant, "COMMIT", give, "COMMIT"}},
		"renewed": {
			within: func(s *fakeserver.Server) {
				for _, arrives := range []<-chan struct{}{s.Arrival("renewed_token"), s.Arrival("COMMIT")} {
					<-arrives
				}
				synctest.Wait() // the COMMIT that arrived is through
			},
			sent: []string{
				lock, grant, "COMMIT", began, write, "SELECT name, token " + some + " AND owner = X AND expires > UTC_TIMESTAMP(N) FOR UPDATE NOWAIT",
				extend, "COMMIT", fence, "COMMIT", give, "COMMIT",
			},
		},
		"a fence that fails": {
			within: func(s *fakeserver.Server) {
				s.Fail("FOR UPDATE WAIT", &mysql.MySQLError{Number: 8229, Message: "TTL manager has timed out"})
			},
			is: mysqllock.ErrLost, sent: []string{lock, grant, "COMMIT", began, write, fence, "ROLLBACK", give, "COMMIT"},
		},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, db, ctx := openEngine(t, engines.TiDB["TiDB 8.0.11-TiDB-v8.5.0"], mysqllock.Config{})
				dbtest.OK(t, asking["Acquire"](db, ctx, lockctx.Lease(time.Minute))) // on a connection that is known from now on
				s.Sent()
				if c.before != nil {
					c.before(s)
				}
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				if c.quits {
					s.Before("COMMIT", func() {
						cancel()
						time.Sleep(time.Second)
					})
				}
				err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					return inTransaction(db, ctx, func(tx *sql.Tx) error {
						dbtest.OK(t, put(ctx, tx, 9))
						if c.within != nil {
							c.within(s)
						}
						return tx.Commit()
					})
				}, lockctx.Lease(time.Minute), lockctx.NoWait())
				if (err == nil) != (c.is == nil) || c.is != nil && !errors.Is(err, c.is) || err != nil && !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v", err)
				}
				if c.quits {
					time.Sleep(5 * time.Second) // it is given back in the background
				}
				var sent []string
				for _, text := range s.Sent() {
					text = short.Replace(numbers.ReplaceAllString(hex.ReplaceAllString(text, "X"), "N"))
					if !strings.Contains(text, "@@completion_type") && !strings.HasPrefix(text, "SET @mysqllock = ") {
						sent = append(sent, text)
					}
				}
				if !slices.Equal(sent, c.sent) {
					t.Errorf("sent\n%s\nwant\n%s", strings.Join(sent, "\n"), strings.Join(c.sent, "\n"))
				}
				stock := int64(10)
				if c.is == nil {
					stock = 9
				}
				wantState(t, s, stock, 0)
				if leases := s.Leases(); leases != 0 && what != "of somebody else" && what != "taken away" {
					t.Errorf("%d leases are left", leases)
				}
			})
		})
	}
}

// TestUnsafeAllowsAnotherEngine: with lockUnsafe=allow each way is what it is on MySQL, as far
// as the engine goes.
func TestUnsafeAllowsAnotherEngine(t *testing.T) {
	for name, all := range engines.Foreign {
		for way, work := range ways {
			s, db, ctx := openEngine(t, all[0], mysqllock.Config{Unsafe: "allow"})
			work(t, db, lockctx.With(ctx, "k"), lockctx.Row(), func() {
				if s.Held() != 1 {
					t.Errorf("%s, %s: %d locks are held", name, way, s.Held())
				}
			})
			wantState(t, s, 9, 0)
		}
	}
}

// TestBuildsOfMySQLAreNotRefused, whatever their builders call them.
func TestBuildsOfMySQLAreNotRefused(t *testing.T) {
	for _, e := range engines.Builds {
		if strings.Contains(e.Version, "MariaDB") {
			continue // the fake has no blocks
		}
		s, db, ctx := openEngine(t, e, mysqllock.Config{})
		lease := kinds["lease"] // which asks for the most
		ways["Do"](t, db, lockctx.With(ctx, "k", lease.option), lease.option, func() {
			if !lease.kept(s) {
				t.Errorf("%+v: a lease is not kept", e)
			}
		})
	}
}

// TestMariaDB10_5LacksSkipLocked: what needs it is refused in words.
func TestMariaDB10_5LacksSkipLocked(t *testing.T) {
	const version = "10.5.23-MariaDB-0+deb11u1"
	for what, want := range map[string]struct {
		ask func(*sql.DB, context.Context) error
		err string
	}{
		"lease": {
			func(db *sql.DB, ctx context.Context) error {
				return asking["Acquire"](db, ctx, lockctx.Lease(time.Minute))
			},
			`mysqllock: lock "k" (lease): not safe here: leases need SKIP LOCKED, which does not work on MariaDB ` + version + " (MariaDB has it from 10.6 on); use a row lock; waited ",
		},
		"slots": {
			func(db *sql.DB, ctx context.Context) error { return asking["Acquire"](db, ctx, lockctx.Slots(2)) },
			`mysqllock: lock "k" (row): not safe here: slots need SKIP LOCKED, which does not work on MariaDB ` + version +
				" (MariaDB has it from 10.6 on); use a key of its own for each slot; waited ",
		},
	} {
		for _, unsafe := range []string{"refuse", "allow"} {
			s, db, ctx := openEngine(t, fakeserver.Engine{Version: version, Comment: "Debian 11"}, mysqllock.Config{Unsafe: unsafe})
			if err := want.ask(db, ctx); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.HasPrefix(err.Error(), want.err) {
				t.Errorf("%s, %s: got  %v\nwant %s", what, unsafe, err, want.err)
			}
			if sent := s.Sent(); slices.ContainsFunc(sent, func(text string) bool { return strings.Contains(text, "SKIP LOCKED") }) {
				t.Errorf("%s, %s: sent %q", what, unsafe, sent)
			}
		}
	}
}

// TestTheServerIsAskedOnce, before anything else is sent on the driver's own connections.
func TestTheServerIsAskedOnce(t *testing.T) {
	s, db, ctx := openEngine(t, engines.Builds[0], mysqllock.Config{})
	dbtest.OK(t, put(lockctx.With(ctx, "k"), db, 9))
	sent := s.Sent()
	if !strings.HasPrefix(sent[0], "SELECT VERSION()") {
		t.Errorf("%q is sent first", sent[0])
	}
	dbtest.OK(t, put(lockctx.With(ctx, "k", lockctx.Lease(time.Minute)), db, 8))
	for _, text := range append(sent[1:], s.Sent()...) {
		if strings.HasPrefix(text, "SELECT VERSION()") || strings.Contains(text, "@@version") {
			t.Errorf("it is asked again: %q", text)
		}
	}
}

// TestALimitOfTheAccountsIsNoEngine: where the first question fails by a limit that the
// driver's connections lift, it is asked again behind that.
func TestALimitOfTheAccountsIsNoEngine(t *testing.T) {
	s, db, ctx := openWith(t, mysqllock.Config{})
	s.Fail("SELECT VERSION()", &mysql.MySQLError{Number: 3024, Message: "maximum statement execution time exceeded"})
	dbtest.OK(t, put(ctx, db, 9))
	sent := s.Sent()
	asked := slices.IndexFunc(sent[1:], func(text string) bool { return strings.HasPrefix(text, "SELECT VERSION()") })
	if !strings.HasPrefix(sent[0], "SELECT VERSION()") || asked < 1 {
		t.Errorf("sent %q", sent)
	}
}
