//go:build unix

package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// A holder whose process stands still, as one whose host has vanished: its
// connection stays open, and nothing comes over it. No statement has limited
// its transaction: the session had the limit before.
func TestLockOfASilentHolderIsFreeAfterItsTTL(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var cases dbtest.Together
		defer cases.Wait()
		for how, wants := range map[string]lockctx.Option{
			"hold": lockctx.Row(), "session": lockctx.Row(), "tx": lockctx.Row(), "lease tx": lockctx.Lease(ttl), "advisory tx": lockctx.Advisory(),
		} {
			cases.Run(t, how, func(t *testing.T) {
				s := newScratch(s.Beside(t))
				db := s.open()
				dsn := s.Config().FormatDSN()
				dsn += map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + "lockTTL=6s"
				c := dbtest.StartJob(t, how, dsn)
				if got := c.Line(); got != "done" {
					t.Fatal(got)
				}
				dbtest.OK(t, c.Signal(syscall.SIGSTOP))
				start := time.Now()
				h := stock.Acquire(t, db, "k", wants, lockctx.Wait(time.Minute))
				if took := time.Since(start); took > 40*time.Second {
					t.Errorf("the lock was free after %v, want the TTL of 6s", took)
				}
				dbtest.ExecIn(t, h.Context(), db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				dbtest.OK(t, h.Release())
				dbtest.OK(t, c.Signal(syscall.SIGCONT))
				c.Tell("")
				dbtest.Equal(t, "the holder that came back got %q", c.Line(), "lost")
				s.wantStock(1, 9)
			})
		}
	})
}

// TestAWaiterWhoseServerGoesHasLostNoLock: it never had it. It is told for which key it has waited, by which strategy
// and for how long, and that it has no connection any more. A holder has lost its lock, and what it wrote, but leases
// and their tokens outlive the server.
func TestAWaiterWhoseServerGoesHasLostNoLock(t *testing.T) {
	lease, slots := lockctx.Lease(time.Minute), lockctx.Slots(1)
	waits := map[string]struct{ held, wanted []lockctx.Option }{
		"row": {}, "lease": {[]lockctx.Option{lease}, []lockctx.Option{lease}}, "advisory": {[]lockctx.Option{lockctx.Advisory()}, []lockctx.Option{lockctx.Advisory()}},
		"row slots": {[]lockctx.Option{slots}, []lockctx.Option{slots}}, "lease slots": {[]lockctx.Option{lease, slots}, []lockctx.Option{lease, slots}},
		"shared": {nil, []lockctx.Option{lockctx.Shared()}}, "row behind a lease": {[]lockctx.Option{lease}, nil}, "lease behind a row": {nil, []lockctx.Option{lease}},
	}
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		connector, err := mysqllock.NewConnector(s.Config(), mysqllock.Config{})
		dbtest.OK(t, err)
		holder := sql.OpenDB(connector)
		defer holder.Close()
		for how, gone := range map[string]func() error{
			"killed":    s.Server.Kill,
			"shut down": func() error { dbtest.Exec(t, s.plain, "SHUTDOWN"); return nil },
		} {
			first, second := s.open(), s.open() // in one queue the second would wait until it is sure that the first has no lease
			var all sync.WaitGroup
			for name, of := range waits {
				key := name + ", " + how // leases stay
				h := stock.Acquire(t, holder, key, of.held...)
				defer h.Rollback()
				wanted := append(slices.Clone(of.wanted), lockctx.Wait(time.Hour))
				asks := func(way string, ask func(context.Context) error) {
					all.Go(func() {
						err := ask(dbtest.Limited(t))
						if err == nil && how == "shut down" && !slices.Contains([]string{"lease", "lease slots", "row behind a lease"}, name) {
							return // the server ended the holder's connection first
						}
						var e *mysqllock.Error
						if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrNoAnswer) || errors.Is(err, mysqllock.ErrLost) || errors.Is(err, mysqllock.ErrLocked) ||
							e.Key != key || e.Strategy == "" || e.Op != "lock" || e.Waited <= 0 {
							t.Errorf("%s of %s: %v", way, key, err)
						}
					})
				}
				asks("Acquire", func(ctx context.Context) error {
					h, err := mysqllock.Acquire(ctx, first, key, wanted...)
					if err == nil {
						_ = h.Rollback()
					}
					return err
				})
				asks("BeginTx", func(ctx context.Context) error {
					tx, err := second.BeginTx(lockctx.With(ctx, key, wanted...), nil)
					if err == nil {
						_ = tx.Rollback()
					}
					return err
				})
			}
			dbtest.Soon(t, "all wait", func() bool {
				one, err := mysqllock.Stats(first)
				other, err2 := mysqllock.Stats(second)
				return errors.Join(err, err2) == nil && one.Waiters+other.Waiters == 2*len(waits) && one.Opening+other.Opening == 0 // for a connection counts, too
			})
			written, tx := stock.Acquire(t, holder, "written"), dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "in tx"), holder)
			dbtest.ExecIn(t, written.Context(), holder, "UPDATE p SET stock = 0 WHERE id = 1")
			dbtest.Exec(t, tx, "UPDATE p SET stock = 0 WHERE id = 2")
			kept, free := stock.Acquire(t, holder, "kept", lockctx.Lease(10*time.Minute)), stock.Acquire(t, holder, "free", lease)
			dbtest.OK(t, free.Release())
			dbtest.OK(t, gone())
			all.Wait()
			dbtest.OK(t, s.Server.Restart(dbtest.Limited(t)))
			wantLost(t, "Release", written.Release())
			wantLost(t, "Commit", tx.Commit())
			s.wantStock(1, 10)
			s.wantStock(2, 10)
			granted := s.expires("kept")
			connector.(interface{ RenewNow() }).RenewNow()
			dbtest.Soon(t, "what outlived the server is renewed", func() bool { return s.expires("kept") != granted })
			dbtest.OK(t, kept.Release())
			again := stock.Acquire(t, holder, "free", lease)
			if again.Token() != free.Token()+1 {
				t.Errorf("%s: token %d comes after %d", how, again.Token(), free.Token())
			}
			dbtest.OK(t, again.Release())
		}
	})
}

// TestAServerThatBecomesReadOnlyGrantsNoRowLock, as after a switchover, also where nothing has failed meanwhile.
func TestAServerThatBecomesReadOnlyGrantsNoRowLock(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "lockUnsafe=allow"} {
			db := s.open(params)
			ways := map[string]func(opts ...lockctx.Option) error{
				"BeginTx": func(opts ...lockctx.Option) error {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", opts...), nil)
					if err == nil {
						err = tx.Rollback()
					}
					return err
				},
				"Acquire": func(opts ...lockctx.Option) error {
					h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", opts...)
					if err == nil {
						err = h.Rollback()
					}
					return err
				},
				"session": func(opts ...lockctx.Option) error {
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					defer cancel()
					_, err := read(lockctx.With(ctx, "k", opts...), db, 1)
					return err
				},
			}
			for _, way := range ways {
				dbtest.OK(t, way())
			}
			dbtest.Soon(t, "the key is free", func() bool { return ways["BeginTx"](lockctx.NoWait()) == nil })
			dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 1")
			for name, way := range ways {
				for what, opts := range map[string][]lockctx.Option{
					"exclusive": nil, "no wait": {lockctx.NoWait()}, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)},
				} {
					if err := way(opts...); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
						t.Errorf("%s, %s, %s: %v", params, name, what, err)
					}
				}
			}
			// What has no hint is not touched by it.
			db.SetMaxOpenConns(1)
			tx, err := db.BeginTx(dbtest.Limited(t), &sql.TxOptions{ReadOnly: true})
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
			dbtest.Exec(t, s.plain, "SET GLOBAL read_only = 0")
			for name, way := range ways {
				dbtest.Soon(t, name+" works again", func() bool { return way() == nil })
			}
		}
	})
}

// TestLeaseOutlivesAChange: a lease goes on where the server was found to be another
// one than it was, as after a failover, and so do its commits.
func TestLeaseOutlivesAChange(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		job := stock.Acquire(t, db, "job", lockctx.Lease(ttl))
		for i := range 6 {
			s.change(db, i)
			dbtest.ExecIn(t, job.Context(), db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		}
		dbtest.OK(t, job.Release())
		s.wantStock(1, 4)
	})
}

// change has db find that the server is another one than it was, as after a failover, for the i-th time: by another level of isolation,
// and a connection that is lost.
func (s *scratch) change(db *sql.DB, i int) {
	s.T.Helper()
	setting := "transaction_isolation"
	if s.MariaDB() {
		setting = "tx_isolation"
	}
	levels := []string{"READ-COMMITTED", "REPEATABLE-READ"}
	dbtest.Exec(s.T, s.plain, fmt.Sprintf("SET GLOBAL %s = '%s'", setting, levels[i%2]))
	h := stock.Acquire(s.T, db, "k")
	var id int
	dbtest.OK(s.T, db.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
	dbtest.Exec(s.T, s.plain, fmt.Sprintf("KILL %d", id))
	wantLost(s.T, "a hold whose connection was killed", h.Release())
}

// changeable is a handle on a fake server that a test can change.
type changeable struct {
	*fakeServer
	t  *testing.T
	db *sql.DB

	guards  sync.Mutex     // what follows
	probe   []driver.Value // what it says of itself; nil where it does not answer
	noTable bool           // it has no lock table
	refusal error          // of the next row lock
}

// What a fake server says of itself.
var (
	anyPrimary   = itself("8.4.0", "0", "")
	anySecondary = itself("8.4.0", "1", "")
	newerPrimary = itself("8.4.1", "0", "")
	otherEngine  = itself("8.0.34-SingleStore", "0", "")
	manyPrimary  = itself("8.4.0", "0", "name,OFF")
)

func itself(version, readOnly, group string) []driver.Value {
	return []driver.Value{version, "shop", "0", readOnly, "REPEATABLE-READ", "0", "OFF," + group, int64(0), "", int64(0), "0", int64(0), version, ""}
}

func newChangeable(t *testing.T) *changeable {
	s := &changeable{t: t, fakeServer: newFake().mysqlAnswers(), probe: anyPrimary}
	answer := s.answer
	s.answer = func(c *fakeConn, text string) (fakeReply, error) {
		s.guards.Lock()
		defer s.guards.Unlock()
		switch {
		case strings.HasPrefix(text, "SELECT VERSION()") && s.probe == nil:
			return fakeReply{}, errFake
		case strings.HasPrefix(text, "SELECT VERSION()"):
			return fakeReply{columns: slices.Repeat([]string{"c"}, len(s.probe)), rows: [][]driver.Value{s.probe}}, nil
		case strings.HasPrefix(text, "SELECT ENGINE") && s.noTable:
			return fakeReply{columns: []string{"c"}}, nil
		case strings.Contains(text, "`mysqllock`") && strings.HasSuffix(text, "FOR UPDATE NOWAIT") && s.refusal != nil:
			defer func() { s.refusal = nil }()
			return fakeReply{}, s.refusal
		}
		return answer(c, text)
	}
	k, err := mysqllock.Wrap(fakeConnector{s.fakeServer}, mysqllock.Config{Schema: "manual"})
	dbtest.OK(t, err)
	s.db = sql.OpenDB(k)
	t.Cleanup(func() { s.db.Close() })
	return s
}

// becomes has the server be another one from now on.
func (c *changeable) becomes(probe []driver.Value) {
	c.guards.Lock()
	defer c.guards.Unlock()
	c.probe = probe
}

// refuse has the next row lock fail.
func (c *changeable) refuse(n uint16) {
	c.t.Helper()
	c.guards.Lock()
	c.refusal = number(n)
	c.guards.Unlock()
	if c.lock() == nil {
		c.t.Errorf("a lock that is refused with %d is granted", n)
	}
	c.since()
}

// lock takes a row lock and gives it back.
func (c *changeable) lock() error {
	return exec(lockctx.With(dbtest.Limited(c.t), "k"), c.db, "UPDATE p SET stock = 1")
}

// want checks how often the server has been asked what it is, and for its table.
func (c *changeable) want(what string, probes, tables int) {
	c.t.Helper()
	log := strings.Join(c.sent(), "\n")
	if p, e := strings.Count(log, "SELECT VERSION()"), strings.Count(log, "SELECT ENGINE"); p != probes || e != tables {
		c.t.Errorf("%s: it was asked %d times what it is and %d times for its table, want %d and %d", what, p, e, probes, tables)
	}
}

// granted checks that locks are granted, by a handle that asks so much for the first
// and nothing for the next.
func (c *changeable) granted(what string, probes, tables int) {
	c.t.Helper()
	if err := c.lock(); err != nil {
		c.t.Errorf("%s: %v", what, err)
	}
	c.want(what, probes, tables)
	if err := c.lock(); err != nil {
		c.t.Errorf("%s, again: %v", what, err)
	}
	c.want(what+", again", 0, 0)
}

// unsafe checks that locks are refused.
func (c *changeable) unsafe(what string, probes, tables int) {
	c.t.Helper()
	dbtest.Is(c.t, what, c.lock(), mysqllock.ErrUnsafe)
	c.want(what, probes, tables)
}

// TestServerIsAskedAgain: after a failure that a failover explains the server is
// asked what it is. What was made for a server is used again when it is that.
func TestServerIsAskedAgain(t *testing.T) {
	s := newChangeable(t)
	s.granted("the first hint", 1, 1)
	for _, n := range []uint16{1290, 1836, 1047, 3100} {
		s.refuse(n)
		s.granted(fmt.Sprintf("after %d", n), 1, 0)
	}
	for _, n := range []uint16{1064, 1213} {
		s.refuse(n)
		s.granted(fmt.Sprintf("after %d, which says nothing of the server", n), 0, 0)
	}

	s.becomes(newerPrimary)
	s.granted("nobody has noticed", 0, 0)
	s.refuse(1290)
	s.granted("another server", 2, 1)
	for range 3 {
		s.becomes(anyPrimary)
		s.refuse(1290)
		s.granted("the first server", 1, 0)
		s.becomes(newerPrimary)
		s.refuse(1290)
		s.granted("the other server", 1, 0)
	}

	s.becomes(manyPrimary)
	s.refuse(1290)
	s.unsafe("several primaries", 2, 1)
	s.unsafe("several primaries, again", 0, 0)
}

// TestWhatWasMadeForASilentServerIsUsed while it does not say what it is, and where it takes no writes, nothing is.
func TestWhatWasMadeForASilentServerIsUsed(t *testing.T) {
	s := newChangeable(t)
	s.granted("the first hint", 1, 1)
	s.becomes(nil)
	s.refuse(1290)
	for range 3 {
		dbtest.OK(t, s.lock())
		s.want("it does not say what it is", 1, 0)
	}
	s.becomes(anySecondary)
	for range 3 {
		s.unsafe("it takes no writes", 1, 0)
	}
	s.becomes(anyPrimary)
	s.granted("it takes writes", 1, 0)
	s.refuse(1290)
	s.becomes(otherEngine)
	for range 3 {
		s.unsafe("it is another engine", 1, 0)
	}
	s.becomes(anyPrimary)
	s.granted("it is MySQL again", 1, 0)
}

// TestWhatNeedsTheLockTableIsTriedWithEachHint while there is none.
func TestWhatNeedsTheLockTableIsTriedWithEachHint(t *testing.T) {
	s := newChangeable(t)
	s.noTable = true
	for range 2 {
		if err := s.lock(); err == nil || !strings.Contains(err.Error(), "CREATE TABLE") {
			t.Errorf("without a table: %v", err)
		}
		s.want("without a table", 1, 1) // nothing is kept of what has failed
	}
	s.guards.Lock()
	s.noTable = false
	s.guards.Unlock()
	s.granted("with a table", 1, 1)
}

// TestThereAreNoLeasesWithABinaryLogOfStatements, since a replica that runs those of leases
// again grants other tokens than its primary did. All else goes on.
func TestThereAreNoLeasesWithABinaryLogOfStatements(t *testing.T) {
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
		dbtest.Soon(t, "all leases are given back", func() bool {
			st, err := mysqllock.Stats(db)
			return err == nil && st.Leases.InUse == 0
		})
		// What is open stays as it is, and what is opened from now on does not.
		dbtest.Exec(t, s.plain, "SET GLOBAL binlog_format = 'STATEMENT'")
		dbtest.OK(t, ways["Do"](db, lockctx.Lease(time.Minute)))
		s.KillAllBut(0)
		dbtest.Want(t, ways["Do"](db, lockctx.Lease(time.Minute)), mysqllock.ErrUnsafe)
		dbtest.Want(t, ways["BeginTx"](db, lockctx.Lease(time.Minute)), mysqllock.ErrUnsafe)
	}, "--server-id=1", "--log-bin=bin", "--binlog-format=STATEMENT")
}

// TestAReplicaHasTheSameRowsAndCommitsStaySafe, also where it runs the statements again. One that is
// promoted before it has heard of a lease grants the lease again, with the same token: its former
// holder commits nothing there, and the new one keeps it.
func TestAReplicaHasTheSameRowsAndCommitsStaySafe(t *testing.T) {
	type way struct {
		key string
		how []lockctx.Option
	}
	row := way{"k", []lockctx.Option{lockctx.Row(), lockctx.Retry(1000)}}
	optimistic := way{"k", []lockctx.Option{lockctx.Optimistic(), lockctx.Retry(1000)}}
	lease := way{"leased", []lockctx.Option{lockctx.Lease(time.Minute)}}
	onPairs(t, func(t *testing.T, s *scratch, primary, replica *tempserver.Server) {
		want := 10
		for _, log := range []struct {
			format string
			ways   []way
		}{{"STATEMENT", []way{row, optimistic}}, {"MIXED", []way{row, optimistic, lease}}} {
			dbtest.Exec(t, s.plain, "SET GLOBAL binlog_format = '"+log.format+"'")
			const handles, times = 4, 20
			var wg sync.WaitGroup
			for range handles {
				db := s.open()
				for _, w := range log.ways {
					wg.Go(func() {
						for range times {
							err := mysqllock.Do(dbtest.Limited(t), db, w.key+log.format, func(ctx context.Context) error {
								return exec(ctx, db, "UPDATE p SET stock = stock + 1 WHERE id = 1")
							}, w.how...)
							if err != nil {
								t.Errorf("%s: %v", log.format, err)
							}
						}
					})
				}
			}
			wg.Wait()
			want += handles * times * len(log.ways)
			s.wantStock(1, want)
		}
		rows := "SELECT CONCAT_WS(' ', name, token, IFNULL(owner, '-'), expires, versioned) FROM mysqllock ORDER BY name"
		here := dbtest.Column[string](t, s.plain, rows)
		there := s.Changed(func(cfg *mysql.Config) { cfg.Addr = replica.Addr() }).Open("mysql")
		dbtest.Soon(t, "the replica has the table", func() bool { return there.QueryRow("SELECT COUNT(*) FROM mysqllock").Scan(new(int)) == nil })
		dbtest.Soon(t, "the replica has the same rows", func() bool { return slices.Equal(dbtest.Column[string](t, there, rows), here) })
		s.promote(primary, replica)
	})
}

// promote has a lease granted by the primary, and again by its replica.
func (s *scratch) promote(primary, replica *tempserver.Server) {
	t, p := s.T.(*testing.T), dbtest.StartProxy(s.T, primary.Addr())
	at := func(addr string) *stock.Shop {
		d := s.Changed(func(cfg *mysql.Config) { cfg.Addr = addr })
		return &stock.Shop{Database: d, Plain: d.Open("mysql")}
	}
	promoted := at(replica.Addr())
	former, next := at(p.Addr()).Handle(), promoted.Handle()
	before := promoted.Stock(1)
	first := stock.Acquire(t, former, "k", lockctx.Lease(time.Minute))
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
		second = stock.Acquire(t, next, "k", lockctx.Lease(time.Minute))
		held, _ := mysqllock.Token(ctx)
		if held != first.Token()+1 || second.Token() != held {
			t.Errorf("tokens are %d and %d after %d", held, second.Token(), first.Token())
		}
		return exec(ctx, former, "UPDATE p SET stock = stock - 1 WHERE id = 1")
	}, lockctx.Lease(time.Minute))
	dbtest.Want(t, err, mysqllock.ErrLost)
	promoted.WantStock(1, before)
	dbtest.OK(t, context.Cause(second.Context()))
	dbtest.OK(t, second.Release())
}

// onPairs runs a test on a primary and a replica of each program.
func onPairs(t *testing.T, test func(t *testing.T, s *scratch, primary, replica *tempserver.Server)) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			start := func(id int) (*tempserver.Server, *sql.DB) {
				opts := []string{fmt.Sprintf("--server-id=%d", id), "--log-bin=bin"}
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

// TestAHostThatVanishesAtCommitKeepsItsKeyNoLongerThanItsTTL, and has committed: it vanishes right after the check of
// its lease. Nobody asks for the key before the commit, and the TTL is a long one: a check that meets another
// request, or a renewal, from a third of the TTL on, is refused, and a host that has vanished does not send it again:
// then it is tried with a longer one.
func TestAHostThatVanishesAtCommitKeepsItsKeyNoLongerThanItsTTL(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		other := s.open()
		dbtest.OK(t, stock.Acquire(t, other, "made", lockctx.Lease(ttl)).Release()) // all is there
		var cases dbtest.Together
		defer cases.Wait()
		for id, write := range map[int]func(ctx context.Context, db *sql.DB) error{
			1: func(ctx context.Context, db *sql.DB) error {
				return exec(ctx, db, "UPDATE p SET stock = 1 WHERE id = 1")
			},
			2: func(ctx context.Context, db *sql.DB) error {
				return stock.InTx(ctx, db, func(tx *sql.Tx) error { return exec(ctx, tx, "UPDATE p SET stock = 1 WHERE id = 2") })
			},
		} {
			cases.Run(t, []string{"", "Exec", "BeginTx"}[id], func(t *testing.T) {
				dbtest.AtItsPace(t, 9*time.Second, func(lasts time.Duration) error {
					s.vanish(t, fmt.Sprint("k", id), lasts, mysqllock.Config{}, other, write)
					if s.stock(id) != 1 {
						return errors.New("it is not committed")
					}
					return nil
				})
			})
		}
	})
}

// vanish has the host of a process vanish while it writes under a lease on key, and waits until
// another process has had it.
func (s *scratch) vanish(t *testing.T, key string, lasts time.Duration, c mysqllock.Config, other *sql.DB, write func(ctx context.Context, db *sql.DB) error) {
	t.Helper()
	v, cfg := dbtest.NewVanishing(), s.Config()
	cfg.DialFunc = v.Dial
	connector, err := mysqllock.NewConnector(cfg, c)
	dbtest.OK(t, err)
	db := sql.OpenDB(connector)
	var all sync.WaitGroup
	all.Go(func() {
		_ = mysqllock.Do(context.Background(), db, key, func(ctx context.Context) error {
			close(v.Armed)
			return write(ctx, db)
		}, lockctx.Lease(lasts))
	})
	defer func() {
		close(v.Over)
		all.Wait()
		db.Close()
	}()
	v.Await(t)
	began := time.Now()
	dbtest.OK(t, stock.Acquire(t, other, key, lockctx.Lease(ttl), lockctx.Wait(2*time.Minute)).Release())
	t.Logf("free after %v", time.Since(began))
}

// TestAWaiterHearsThatItsServerHasFallenSilent, long before its wait is over, so that others of its process can ask.
func TestAWaiterHearsThatItsServerHasFallenSilent(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{TTL: 5 * time.Second})
		holder := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), s.open())
		ended := dbtest.Go(func() error {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(time.Hour)), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		})
		dbtest.Soon(t, "it waits", func() bool { return s.Waiters() == 1 })
		thaw := tap.Freeze()
		defer thaw()
		dbtest.Is(t, "the waiter", <-ended, mysqllock.ErrNoAnswer)
		thaw()
		dbtest.OK(t, holder.Rollback())
		dbtest.OK(t, exec(lockctx.With(dbtest.Limited(t), "k"), db, "DO 1"))
	})
}

// TestALongStatementThatWentOutWithItsLockIsNoSilence: its answer comes later than the session may be silent.
func TestALongStatementThatWentOutWithItsLockIsNoSilence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=5s", "innodb_lock_wait_timeout=6")
		dbtest.OK(t, exec(lockctx.With(dbtest.Limited(t), "made"), db, "DO 1"))
		dbtest.Exec(t, s.plain, "CREATE TABLE slow (id INT PRIMARY KEY, n INT)")
		dbtest.Exec(t, s.plain, "INSERT INTO slow VALUES (1, 7)")
		conn := dbtest.Conn(t, s.plain)
		dbtest.Exec(t, conn, "LOCK TABLES slow WRITE")
		time.AfterFunc(5200*time.Millisecond, func() { _, _ = conn.ExecContext(context.Background(), "UNLOCK TABLES") })
		blocker := dbtest.Begin(t, context.Background(), s.plain)
		dbtest.Exec(t, blocker, "UPDATE p SET stock = 10 WHERE id = 4")
		var cases dbtest.Together
		defer cases.Wait()
		cases.Run(t, "a read", func(t *testing.T) {
			ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "read"))
			defer cancel()
			var n int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT n FROM slow WHERE id = 1").Scan(&n))
		})
		cases.Run(t, "a write that fails", func(t *testing.T) {
			err := exec(lockctx.With(dbtest.Limited(t), "write"), db, "UPDATE p SET stock = 1 WHERE id = 4")
			if server.Number(err) != server.LockWaitTimeout {
				t.Errorf("it ended with %v", err)
			}
		})
	})
}

// What fails is an answer of the server all the same: a unit of work whose statement
// has failed late is not silent.

func TestLateFailureIsNoSilence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=5s")
		blocker := dbtest.Begin(t, lockctx.With(context.Background(), "taken"), s.open())
		dbtest.Exec(t, blocker, "UPDATE p SET stock = 10 WHERE id = 4")
		failing := map[string]func(ctx context.Context) error{
			"a duplicate key": func(ctx context.Context) error { return exec(ctx, db, "INSERT INTO p SELECT 1, SLEEP(5.1)") },
			"a read that fails": func(ctx context.Context) error {
				var n int
				return db.QueryRowContext(ctx, "SELECT SLEEP(5.1), (SELECT id FROM p)").Scan(&n, &n)
			},
			"rows that fail": func(ctx context.Context) error {
				rows, err := db.QueryContext(ctx, "SELECT id, IF(id = 2, SLEEP(5.1), 0), IF(id = 2, (SELECT p2.id FROM p p2 WHERE p2.id < 10 + SLEEP(0)), 0) FROM p")
				if err != nil {
					return err
				}
				defer rows.Close()
				for rows.Next() {
				}
				return rows.Err()
			},
			"a lock wait": func(ctx context.Context) error {
				if _, err := db.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = 6"); err != nil {
					return nil
				}
				return exec(ctx, db, "UPDATE p SET stock = 1 WHERE id = 4")
			},
			"a key that is not granted": func(ctx context.Context) error {
				return exec(lockctx.With(ctx, "taken", lockctx.Wait(5100*time.Millisecond)), db, "DO 1")
			},
			"a key that is not granted to a transaction": func(ctx context.Context) error {
				_, err := db.BeginTx(lockctx.With(ctx, "taken", lockctx.Wait(5100*time.Millisecond)), nil)
				return err
			},
		}
		var cases dbtest.Together
		defer cases.Wait()
		row := 100
		for name, fail := range failing {
			row++ // one of its own: none that has changed since its snapshot
			row := row
			cases.Run(t, name, func(t *testing.T) {
				key := "k " + name
				unit := func() error {
					return mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
						err := fail(ctx)
						if err == nil {
							t.Error("it does not fail")
						} else if errors.Is(err, mysqllock.ErrLost) {
							return err
						}
						return exec(ctx, db, "INSERT INTO p VALUES (?, 1)", row)
					})
				}
				err := unit()
				// A server that was too slow to refuse a key in time, or a machine that stood still, is
				// not the point.
				for try := 1; try < 5 && errors.Is(err, mysqllock.ErrLost); try++ {
					err = unit()
				}
				if err != nil {
					t.Errorf("what comes after it: %v", err)
				}
				s.soonFree(key)
			})
		}
	})
}

// TestGivingUpAStatementFreesTheKey: the server does not notice that the client of a
// busy connection has gone, so the driver ends it.
func TestGivingUpAStatementFreesTheKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		// Busy for minutes, and deaf to the end of its client.
		const busy = "UPDATE p SET stock = stock + BENCHMARK(500000000, SHA2('x', 512)) WHERE id = "
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1") // makes the table
		dbtest.OK(t, err)
		id := 10
		for how, run := range map[string]func(ctx context.Context, key, busy string) error{
			"Exec": func(ctx context.Context, key, busy string) error { return exec(lockctx.With(ctx, key), db, busy) },
			"BeginTx": func(ctx context.Context, key, busy string) error {
				return stock.InTx(lockctx.With(dbtest.Limited(t), key), db, func(tx *sql.Tx) error { return exec(ctx, tx, busy) })
			},
			"BeginTx with the context": func(ctx context.Context, key, busy string) error {
				return stock.InTx(lockctx.With(ctx, key), db, func(tx *sql.Tx) error { return exec(ctx, tx, busy) })
			},
			"prepared": func(ctx context.Context, key, busy string) error {
				st, err := db.PrepareContext(ctx, busy)
				if err != nil {
					return err
				}
				defer st.Close()
				_, err = st.ExecContext(lockctx.With(ctx, key))
				return err
			},
			"a lease, then a row lock": func(ctx context.Context, key, busy string) error {
				lease := lockctx.With(ctx, "lease of "+key, lockctx.Lease(30*time.Second))
				return stock.InTx(lease, db, func(tx *sql.Tx) error { return exec(lockctx.With(lease, key, lockctx.Row()), tx, busy) })
			},
			"Do": func(ctx context.Context, key, busy string) error {
				return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return exec(ctx, db, busy) })
			},
		} {
			id++
			dbtest.Exec(t, s.plain, "INSERT INTO p VALUES (?, 1)", id)
			t.Run(how, func(t *testing.T) {
				key := "k " + how
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				done := make(chan error, 1)
				go func() { done <- run(ctx, key, busy+strconv.Itoa(id)) }()
				dbtest.Soon(t, "it runs under the lock", func() bool { return s.locked(key) && s.runs(id) })
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("whoever gave up got %v", err)
				}
				dbtest.Soon(t, "the key is free", func() bool { return !s.locked(key) })
			})
		}
	})
}

// runs reports whether an update of a product runs, and not only waits.
func (s *scratch) runs(id int) (yes bool) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE ?",
		s.Name, fmt.Sprintf("UPDATE p SET%%BENCHMARK%%id = %d", id)).Scan(&yes))
	return yes
}

// TestLocksDoNotDependOnWhatOthersRun: MySQL does not list some texts in information_schema.PROCESSLIST.
func TestLocksDoNotDependOnWhatOthersRun(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, besideWhatCannotBeListed)
}

// TestLocksDoNotNeedPerformanceSchema: MySQL has no other list of what others run then, and an old one never has.
func TestLocksDoNotNeedPerformanceSchema(t *testing.T) {
	dbtest.OnOwnMySQL(t, newScratch, besideWhatCannotBeListed, "--performance-schema=OFF")
}

func besideWhatCannotBeListed(t *testing.T, s *scratch) {
	s.Neighbours()
	first, second := s.open("lockTTL=10m"), s.open("lockTTL=10m")
	for how, option := range map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(10 * time.Minute), "advisory": lockctx.Advisory(), "slots": lockctx.Slots(1),
	} {
		key := "\U0001F512 " + how
		held := stock.Acquire(t, first, key, option)
		_, err := mysqllock.Acquire(dbtest.Limited(t), second, key, option, lockctx.NoWait())
		dbtest.Want(t, err, mysqllock.ErrLocked)
		dbtest.Want(t, stock.Told(func() error {
			_, err := mysqllock.Acquire(dbtest.Limited(t), second, key, option, lockctx.Wait(100*time.Millisecond))
			return err
		}), mysqllock.ErrTimeout)

		waiting, cancel := context.WithCancel(dbtest.Limited(t))
		over := make(chan error, 1)
		wait := func(ctx context.Context) {
			got, err := mysqllock.Acquire(ctx, second, key, option, lockctx.Wait(time.Hour))
			if err == nil {
				err = got.Release()
			}
			over <- err
		}
		go wait(waiting)
		if how != "slots" { // whose waits are short
			dbtest.Soon(t, how+": it waits in the server", func() bool { return s.waitingTexts() > 0 })
		}
		cancel()
		dbtest.Want(t, <-over, context.Canceled)
		dbtest.Soon(t, how+": no statement waits any more", func() bool { return s.waitingTexts() == 0 })
		go wait(dbtest.Limited(t))
		if how != "slots" {
			dbtest.Soon(t, how+": it waits again", func() bool { return s.waitingTexts() > 0 })
		}
		dbtest.OK(t, held.Release())
		dbtest.OK(t, <-over)
	}

	row := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "version"), first)
	waiting, cancel := context.WithCancel(dbtest.Limited(t))
	over := make(chan error, 1)
	go func() {
		_, err := second.BeginTx(lockctx.With(waiting, "version", lockctx.Optimistic(), lockctx.Wait(time.Hour)), nil)
		over <- err
	}()
	dbtest.Soon(t, "optimistic: it waits in the server", func() bool { return s.waitingTexts() > 0 })
	cancel()
	dbtest.Want(t, <-over, context.Canceled)
	dbtest.Soon(t, "optimistic: no statement waits any more", func() bool { return s.waitingTexts() == 0 })
	dbtest.OK(t, row.Rollback())

	own, stop := context.WithCancel(dbtest.Limited(t))
	go func() {
		_, err := first.ExecContext(lockctx.With(own, "own"), "UPDATE p SET stock = 1 + SLEEP(3600) WHERE id = 1 /* \U0001F512 \xff */")
		over <- err
	}()
	dbtest.Soon(t, "the caller's own statement runs under the lock", func() bool { return s.running("UPDATE p") > 0 })
	stop()
	dbtest.Want(t, <-over, context.Canceled)
	dbtest.Soon(t, "the key of the caller's own statement is free", func() bool { return !s.locked("own") })
}

// waitingTexts counts the statements of the driver that wait for a lock.
func (s *scratch) waitingTexts() int {
	s.T.Helper()
	return s.running("/* mysqllock ") + s.running("User lock")
}

// running counts the statements of the database with that state, or with that in the beginning of
// their texts, which SHOW PROCESSLIST lists, whatever they are.
func (s *scratch) running(what string) (n int) {
	s.T.Helper()
	c := s.Connect()
	defer c.Close()
	for _, row := range s.Query(c, "SHOW PROCESSLIST") {
		if row[3] == s.Name && row[4] != "Sleep" && (row[6] == what || strings.Contains(row[7], what)) && !strings.Contains(row[7], "CREATE") {
			n++
		}
	}
	return n
}

// TestAConnectionThatBreaksWhileAskedIsReplaced, as often as database/sql does: the server is asked what it is.
func TestAConnectionThatBreaksWhileAskedIsReplaced(t *testing.T) {
	for _, breaks := range []int{2, 3} {
		fake := newFake().mysqlAnswers()
		var asked atomic.Int32
		answer := fake.answer
		fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if strings.HasPrefix(text, "SELECT VERSION()") && int(asked.Add(1)) <= breaks {
				return fakeReply{}, mysql.ErrInvalidConn
			}
			return answer(c, text)
		}
		k, err := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{Schema: "manual"})
		dbtest.OK(t, err)
		db := sql.OpenDB(k)
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 1")
		if (err == nil) != (breaks < 3) || asked.Load() != 3 {
			t.Errorf("after %d connections have broken, and %d questions: %v", breaks, asked.Load(), err)
		}
		dbtest.OK(t, db.Close())
	}
}
