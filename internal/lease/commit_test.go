package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// written is how many rows are committed.
func (s *scratch) written() int {
	return dbtest.Column[int](s.T, s.db, "SELECT COUNT(*) FROM written")[0]
}

// writing begins a transaction that writes a row.
func (s *scratch) writing(conn driver.Conn) {
	s.T.Helper()
	s.Exec(conn, "START TRANSACTION")
	s.Exec(conn, "INSERT INTO written () VALUES ()")
}

// newWritten is newScratch with a table for what is written.
func newWritten(d *dbtest.Database) *scratch {
	d.T.Helper()
	s := newScratch(d)
	dbtest.Exec(d.T, s.db, "CREATE TABLE written (id INT PRIMARY KEY AUTO_INCREMENT)")
	return s
}

// severalWriters is the server taken for one of a cluster.
func (s *scratch) severalWriters() *server.Info {
	multi := s.info
	multi.Topology = "several writers"
	return &multi
}

// TestACommitNeedsAllItsLeases: what is written commits if, and only if, all leases are held; and
// no row is locked afterwards.
func TestACommitNeedsAllItsLeases(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for form, by := range forms {
			l, conn := s.locker(setup{}), s.session()
			a, b := l.acquire(request("a")), l.acquire(request("b'\""))
			for _, leases := range [][]*Grant{{a}, {b, a, b}} {
				before := s.written()
				s.writing(conn)
				if err := l.commit(by, conn, false, leases...); err != nil || s.written() != before+1 {
					t.Errorf("%s: %v, %d are written", form, err, s.written()-before)
				}
				if rows, err := server.Query(dbtest.Limited(t), conn, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = "+schema.Literal(s.Name)+" AND name IN ('a', x'622722') FOR UPDATE NOWAIT"); err != nil || len(rows) != 2 {
					t.Errorf("%s: of the rows %d are free: %v", form, len(rows), err)
				}
			}
			before := s.written()
			for name, assignments := range map[string]string{
				"stolen":      "owner = 'thief#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
				"run out":     "expires = UTC_TIMESTAMP(6)",
				"other token": "token = token + 1",
				"removed":     "name = x'00'",
			} {
				key := form + ", " + name
				c := l.acquire(request(key))
				s.set(key, assignments)
				s.writing(conn)
				err := l.commit(by, conn, false, a, c, b)
				var e *lockerr.Error
				if !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Key != key || e.Op != "commit" {
					t.Errorf("%s: %v", key, err)
				}
				dbtest.Is(t, "after its guard has failed", c.Err(), lockerr.ErrLost)
				s.Exec(conn, "ROLLBACK")
				dbtest.Exec(t, s.db, "DELETE FROM "+s.table.String()+" WHERE name = x'00'")
			}
			if n := s.written() - before; n != 0 {
				t.Errorf("%s: %d are written without their leases", form, n)
			}
			dbtest.OK(t, errors.Join(a.Err(), b.Err(), a.Release(), b.Release()))
		}
	})
}

// TestRenewalsKeepTheirPaceWhileACommitIsNotAnswered: they do not find the lease that it has released, and are not sent
// again and again until its answer comes.
func TestRenewalsKeepTheirPaceWhileACommitIsNotAnswered(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		l, conn := s.locker(setup{}), s.session()
		lease := l.acquire(request("k"))
		s.writing(conn)
		dbtest.OK(t, l.commit(func(ctx context.Context, conn driver.Conn, texts ...string) ([][][]string, error) {
			answers, err := server.SendPacket(ctx, conn, texts...)
			sent := l.tap.Texts()
			l.renewNow(lease)
			dbtest.Soon(t, "it was renewed", func() bool { return len(sent()) > 0 })
			time.Sleep(200 * time.Millisecond)
			if n := count(sent(), "INSERT"); n != 1 {
				t.Errorf("%d renewals", n)
			}
			return answers, err
		}, conn, true, lease))
		dbtest.OK(t, lease.Release())
	})
}

// TestACommitReleases: a lease that ends with the transaction is released by it, if that commits. A renewal that
// comes between does not take it for lost, and nothing is left for Release but the wake-up lock.
func TestACommitReleases(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for form, by := range forms {
			for _, info := range []*server.Info{&s.info, s.severalWriters()} {
				l, conn, what := s.locker(setup{info: info}), s.session(), form+" "+info.Topology
				lost := make(chan error, 1)
				r := request("k")
				r.Lost = func(err error) { lost <- err }
				lease, token := l.acquire(r), s.row("k").token
				before := s.written()
				s.writing(conn)
				dbtest.OK(t, l.commit(func(ctx context.Context, conn driver.Conn, texts ...string) ([][][]string, error) {
					answers, err := by(ctx, conn, texts...)
					l.renew([]*Grant{lease}, time.Second)
					dbtest.OK(t, l.renewBehind(dbtest.Limited(t), lease))
					return answers, err
				}, conn, true, lease))
				if r := s.row("k"); r.live || r.owner != "" || r.token != token || s.written() != before+1 {
					t.Errorf("%s: %+v after %d, %d are written", what, r, token, s.written()-before)
				}
				dbtest.OK(t, lease.Err())
				sent := l.tap.Texts()
				dbtest.OK(t, errors.Join(lease.Release(), lease.Release()))
				dbtest.Is(t, what, lease.Err(), lockerr.ErrClosed)
				dbtest.Soon(t, "the wake-up lock is free", func() bool { return s.wakeUps("k") == 0 })
				if n := len(sent()); n != count(sent(), "DO RELEASE_LOCK") || n != 1 {
					t.Errorf("%s: Release has sent %q", what, sent())
				}
				select {
				case err := <-lost:
					t.Errorf("%s: lost: %v", what, err)
				default:
				}

				lease = l.acquire(request("k"))
				s.steal("k")
				s.writing(conn)
				dbtest.Is(t, what+": stolen", l.commit(by, conn, true, lease), lockerr.ErrLost)
				s.Exec(conn, "ROLLBACK")
				dbtest.Is(t, what+": stolen, Release", lease.Release(), lockerr.ErrLost)
				if !s.row("k").live || s.written() != before+1 {
					t.Errorf("%s: the thief has %+v, %d are written", what, s.row("k"), s.written()-before)
				}
				s.set("k", "owner = NULL")
			}
		}
	})
}

// TestOthersOfTheProcessGetALeaseThatEnds: a lease that ends with its transaction is handed over to a caller that waits for
// it. One that comes right after the COMMIT does not wait for the wake-up lock of the last one, which it gives back itself.
func TestOthersOfTheProcessGetALeaseThatEnds(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		l, conn := s.locker(setup{}), s.session()
		lease, token := l.acquire(request("k")), s.row("k").token
		passed := l.pass(dbtest.Limited(t), waiting("k", time.Minute))
		l.inQueue("k", 1)
		s.writing(conn)
		dbtest.OK(t, l.commit(server.SendSingly, conn, true, lease))
		if r := s.row("k"); !r.live || r.token != token {
			t.Errorf("while somebody waits for it: %+v", r)
		}
		sent := l.tap.Texts()
		dbtest.OK(t, errors.Join(lease.Release(), <-passed))
		if n := count(sent(), "INSERT"); n != 0 || s.row("k").token != token+1 {
			t.Errorf("it is not handed over: %+v, %q", s.row("k"), sent())
		}

		r := request("k") // it stays for a while
		r.MinHold = time.Hour
		lease = l.acquire(r)
		s.writing(conn)
		dbtest.OK(t, errors.Join(l.commit(server.SendSingly, conn, true, lease), lease.Release()))
		if r := s.row("k"); !r.live || r.left < 50*time.Minute {
			t.Errorf("with MinHold: %+v", r)
		}

		lease = l.acquire(waiting("next", time.Minute))
		s.writing(conn)
		dbtest.OK(t, l.commit(server.SendSingly, conn, true, lease))
		lc := lease.conn
		dbtest.OK(t, lc.c.AwaitTurn(dbtest.Limited(t))) // so that the wake-up lock stays for now
		dbtest.OK(t, lease.Release())
		sent = l.tap.Texts()
		passed = l.pass(dbtest.Limited(t), waiting("next", time.Minute))
		dbtest.Soon(t, "the next caller wants the connection", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return lc.queued == 2 || count(sent(), "INSERT") > 0
		})
		lc.c.EndTurn()
		dbtest.OK(t, <-passed)
		for _, text := range sent() {
			if strings.HasPrefix(text, "SELECT") && strings.Contains(text, "GET_LOCK") {
				t.Errorf("the next caller has waited for the wake-up lock: %q", text)
			}
		}
	})
}

// TestAnUnknownCommitReleasesOnce: if the answer to a COMMIT with the release is lost, Release does not fail whether it has
// come through or not, and the key is free.
func TestAnUnknownCommitReleasesOnce(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, arrives := range []bool{true, false} {
			l, conn := s.locker(setup{}), s.session()
			lease := l.acquire(request("k"))
			s.writing(conn)
			err := l.commit(func(ctx context.Context, conn driver.Conn, texts ...string) ([][][]string, error) {
				if !arrives {
					texts = []string{"ROLLBACK"}
				}
				_, err := server.SendPacket(ctx, conn, texts...)
				return nil, errors.Join(err, mysql.ErrInvalidConn)
			}, conn, true, lease)
			dbtest.Is(t, "the answer", err, mysql.ErrInvalidConn)
			l.renew([]*Grant{lease}, time.Second)
			dbtest.OK(t, errors.Join(lease.Err(), lease.Release()))
			if s.row("k").live || s.wakeUps("k") != 0 {
				t.Errorf("arrives %v: %+v, %d wake-up locks", arrives, s.row("k"), s.wakeUps("k"))
			}
		}
		dbtest.Equal(t, "%d are written", s.written(), 1)
	})
}

// TestAGuardDecidesByTheRowAsItGetsIt: and by the time that it is then, at each isolation level and with any time zone.
func TestAGuardDecidesByTheRowAsItGetsIt(t *testing.T) {
	dbtest.OnEveryServer(t, newWritten, func(t *testing.T, s *scratch) {
		for name, c := range map[string]struct {
			assignments string
			held        bool
		}{
			"renewed": {"expires = expires + INTERVAL 1 SECOND", true},
			"run out": {"expires = UTC_TIMESTAMP(6) + INTERVAL 200000 MICROSECOND", false},
			"stolen":  {"owner = 'thief#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR", false},
		} {
			var all dbtest.Together
			lockers := []*locker{s.locker(setup{}), s.locker(setup{info: s.severalWriters()})}
			for level, zone := range map[string]string{"READ UNCOMMITTED": "SYSTEM", "READ COMMITTED": "+00:00", "REPEATABLE READ": "-11:30", "SERIALIZABLE": "+13:00"} {
				for _, ends := range []bool{true, false} {
					for i, l := range lockers {
						key := fmt.Sprint(name, level, ends, i)
						all.Run(t, key, func(t *testing.T) {
							lease, conn := l.acquire(request(key)), s.session()
							if s.info.SnapshotIsolation {
								s.Exec(conn, "SET SESSION innodb_snapshot_isolation = ON")
							}
							s.Exec(conn, "SET time_zone = '"+zone+"'")
							s.Exec(conn, "SET SESSION TRANSACTION ISOLATION LEVEL "+level)
							s.Exec(conn, "START TRANSACTION")
							s.One(conn, "SELECT COUNT(*) FROM written") // takes the snapshot
							tx := dbtest.Begin(t, context.Background(), s.db)
							dbtest.Exec(t, tx, "UPDATE "+s.table.String()+" SET "+c.assignments+" WHERE namespace = ? AND name = ?", s.Name, key)
							time.AfterFunc(400*time.Millisecond, func() { _ = tx.Commit() })
							err := l.commit(forms["one text"], conn, ends, lease)
							if (err == nil) != c.held || err != nil && !errors.Is(err, lockerr.ErrLost) {
								t.Errorf("%v", err)
							}
							s.Exec(conn, "ROLLBACK")
							_ = lease.Release()
						})
					}
				}
			}
			all.Wait()
		}
	})
}

// TestAGuardThatIsKilledIsNotSaidToHaveWaited: nobody has locked the row.
func TestAGuardThatIsKilledIsNotSaidToHaveWaited(t *testing.T) {
	g := &Grant{key: "k"}
	err := g.refused(&mysql.MySQLError{Number: server.QueryInterrupted, Message: "Query execution was interrupted"})
	dbtest.Is(t, "killed", err, lockerr.ErrLost)
	dbtest.Says(t, err, "ended by a KILL")
}

// TestAGuardWaitsAsLongAsItsLease: it is ended by the server then, and not by a shorter limit of the application's.
func TestAGuardWaitsAsLongAsItsLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, conn := s.locker(setup{}), s.session()
		r := waiting("k", 20*time.Second)
		r.TTL = 4 * time.Second
		lease := l.acquire(r)
		l.mu.Lock()
		lease.due = time.Time{} // no renewal
		l.mu.Unlock()
		tx := s.lockRow("k")
		s.Exec(conn, "SET innodb_lock_wait_timeout = 1")
		s.Exec(conn, "START TRANSACTION")
		began := time.Now()
		err := l.fence(conn, lease)
		dbtest.Is(t, "behind a locked row", err, lockerr.ErrLost)
		dbtest.Says(t, err, "somebody has locked the row for as long as the lease lasts")
		if took := time.Since(began); took < 2*time.Second {
			t.Errorf("it has waited for %v", took)
		}
		s.Exec(conn, "ROLLBACK")
		dbtest.OK(t, tx.Rollback())
	})
}

// TestASetClockNeitherLosesNorKeepsALeaseAtTheFence: SET timestamp on the application's connection does not lose a
// lease that is held, nor keep one that is not.
func TestASetClockNeitherLosesNorKeepsALeaseAtTheFence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, info := range []*server.Info{&s.info, s.severalWriters()} {
			for _, at := range []string{"UNIX_TIMESTAMP() + 1800", "UNIX_TIMESTAMP() + 15000000", "UNIX_TIMESTAMP() - 1800", "UNIX_TIMESTAMP() - 15000000", "1"} {
				l := s.locker(setup{info: info})
				lease := l.acquire(request("k"))
				s.onConn(func(conn driver.Conn) {
					fence := func() error {
						dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
						defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
						return l.fence(conn, lease)
					}
					dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET timestamp = "+at))
					defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET timestamp = DEFAULT")) }()
					if err := fence(); err != nil {
						t.Errorf("at %s: %v", at, err)
					}
					s.set("k", "owner = NULL")
					dbtest.Is(t, fmt.Sprintf("at %s: what is not held any more is kept", at), fence(), lockerr.ErrLost)
				})
				l.close()
			}
		}
	})
}

// TestATimestampInTheDSNMovesNoLease, neither the time at which it is taken nor that at which it ends.
func TestATimestampInTheDSNMovesNoLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder := s.locker(setup{})
		lease := holder.acquire(request("k"))
		thief := s.locker(setup{params: "timestamp=2100000000"})
		dbtest.Is(t, "beside a live lease", dbtest.Err(thief.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrLocked)
		dbtest.OK(t, lease.Release())
		old := s.locker(setup{params: "timestamp=1000000000"})
		lease = old.acquire(request("k"))
		if r := s.row("k"); !r.live || r.left > 30*time.Second {
			t.Errorf("the row is %+v", r)
		}
		old.renew([]*Grant{lease}, time.Second)
		dbtest.OK(t, lease.Err())
		dbtest.OK(t, lease.Release())
	})
}

func TestAFenceKeepsTheLeaseUntilItsCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.info.SnapshotIsolation != s.MariaDB() {
			t.Errorf("the probe tells %+v", s.info)
		}
		for _, info := range []*server.Info{&s.info, s.severalWriters()} {
			l := s.locker(setup{info: info})
			keyA, keyB, keyC := "a"+info.Topology, "b"+info.Topology, "c"+info.Topology
			a, b := l.acquire(request(keyA)), l.acquire(request(keyB))
			s.onConn(func(conn driver.Conn) {
				ctx := dbtest.Limited(t)
				sql := func(text string) {
					t.Helper()
					dbtest.OK(t, server.Exec(ctx, conn, text))
				}
				if info.SnapshotIsolation {
					sql("SET SESSION innodb_snapshot_isolation = ON")
					defer sql("SET SESSION innodb_snapshot_isolation = DEFAULT")
				}
				sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
				l.renew([]*Grant{a, b}, time.Second) // the rows change after the snapshot
				dbtest.OK(t, errors.Join(l.fence(conn, b, a, b), l.fence(conn)))
				if info.Topology == "" { // another transaction under it does not wait
					side := s.session()
					s.Exec(side, "SET innodb_lock_wait_timeout = 1")
					dbtest.OK(t, l.commit(server.SendSingly, side, false, a, b))
				}
				// Nobody else gets it, even if it runs out.
				dbtest.Exec(t, s.db, "SET SESSION innodb_lock_wait_timeout = 1")
				dbtest.Is(t, "while a fence stands", dbtest.Err(s.locker(setup{}).Acquire(ctx, request(keyA))), lockerr.ErrLocked)
				// It does not hold up renewals, which come through soon after it.
				soonest := time.Minute
				for try := 0; try < 5 && soonest > 4*time.Second; try++ {
					begin := time.Now()
					l.renew([]*Grant{a, b}, 20*time.Second)
					soonest = min(soonest, time.Since(begin))
				}
				if soonest > 4*time.Second { // nor wait for the row, for 5 s
					t.Errorf("a renewal took %v", soonest)
				}
				dbtest.OK(t, errors.Join(a.Err(), b.Err()))
				sql("COMMIT")
			})

			// A release waits for a fence.
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				dbtest.OK(t, l.fence(conn, b))
				released, begin := make(chan error, 3), time.Now()
				go func() { released <- b.Release() }()
				time.Sleep(1300 * time.Millisecond)
				if !s.row(keyB).live {
					t.Error("released although a fence stands")
				}
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "COMMIT"))
				if err := <-released; err != nil && time.Since(begin) < handoffWait { // it waits no longer, and goes on in the background
					t.Error(err)
				}
				dbtest.Soon(t, "it is released", func() bool { return !s.row(keyB).live })
			})
			dbtest.Is(t, "a fence after the release", l.fence(nil, b), lockerr.ErrClosed)

			c := l.acquire(request(keyC))
			s.steal(c.key)
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
				err := l.fence(conn, a, c)
				var e *lockerr.Error
				if !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Op != "commit" || e.Key != c.key {
					t.Errorf("the fence of a lost lease: %v", err)
				}
			})
			dbtest.Is(t, "after its fence failed", c.Err(), lockerr.ErrLost)
			dbtest.OK(t, a.Err())
		}
	})
}
