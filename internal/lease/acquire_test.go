package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestALeaseIsInItsRowUntilItsRelease, which costs one statement, as taking it does, once the row is there.
func TestALeaseIsInItsRowUntilItsRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		began := time.Now()
		first := l.acquire(request("k"))
		if first.Key() != "k" || first.Token() != 1 || first.Err() != nil {
			t.Errorf("the lease on %q has token %d and error %v", first.Key(), first.Token(), first.Err())
		}
		r := s.row("k")
		if !r.live || r.token != 1 || r.owner != l.owner || r.left > 30*time.Second || r.left < 29*time.Second-time.Since(began) {
			t.Errorf("the row is %+v", r)
		}
		dbtest.OK(t, first.Release())
		if r := s.row("k"); r.live || r.token != 1 || r.owner != "" || r.left > 0 {
			t.Errorf("after the release the row is %+v", r)
		}
		dbtest.Is(t, "after the release", first.Err(), lockerr.ErrClosed)
		dbtest.OK(t, first.Release()) // again

		// From now on one statement each.
		sent := l.tap.Texts()
		second := l.acquire(request("k"))
		dbtest.Equal(t, "the token is %d", second.Token(), 2)
		if texts := sent(); len(texts) != 1 {
			t.Errorf("taking costs %q", texts)
		}
		sent = l.tap.Texts()
		dbtest.OK(t, second.Release())
		if texts := sent(); len(texts) != 1 {
			t.Errorf("releasing costs %q", texts)
		}
		sent = l.tap.Texts()
		third := l.acquire(waiting("k", 20*time.Second))
		dbtest.OK(t, third.Release())
		if texts := sent(); len(texts) != 2 {
			t.Errorf("with a wait it costs %q", texts)
		}
		dbtest.Equal(t, "%d connections are kept for nothing", l.conns.Stat().InUse, 0)
	})
}

func TestAHeldLeaseIsRefusedWithItsHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		held := l.acquire(request("k"))
		for name, who := range map[string]*locker{"the same": l, "another": other} {
			err := who.refused(request("k"))
			var e *lockerr.Error
			if !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) || !errors.As(err, &e) {
				t.Fatalf("%s process: %v", name, err)
			}
			if e.Op != "lock" || e.Key != "k" || e.Strategy != "lease" || e.Holder == nil || e.Holder.Program != "host:1:test" {
				t.Errorf("%s process: %+v, %v", name, e, e.Holder)
			}
		}
		if r := s.row("k"); r.token != 1 {
			t.Errorf("the row is %+v", r)
		}
		dbtest.OK(t, held.Release())
		dbtest.OK(t, other.acquire(request("k")).Release())
	})
}

// TestALeaseThatHasRunOutHasOneWinner has clients go for a lease that has run out.
func TestALeaseThatHasRunOutHasOneWinner(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var clients []*locker
		for range 8 {
			l := s.locker(setup{max: 2})
			clients = append(clients, l)
			dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
		}
		for round := range dbtest.Long(12, 50) {
			was := s.row("k").token
			s.set("k", "owner = 'dead#12345678', expires = UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND")
			var all sync.WaitGroup
			var winners atomic.Int32
			begin := make(chan struct{})
			for _, l := range clients {
				all.Go(func() {
					<-begin
					lease, err := l.Acquire(context.Background(), request("k"))
					if errors.Is(err, lockerr.ErrLocked) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					winners.Add(1)
					if lease.Token() != was+1 {
						t.Errorf("round %d: the token is %d after %d", round, lease.Token(), was)
					}
					lease.lose(errors.New("the round is over"))
				})
			}
			close(begin)
			all.Wait()
			if r := s.row("k"); winners.Load() != 1 || r.token != was+1 {
				t.Fatalf("round %d: %d winners, and token %d after %d", round, winners.Load(), r.token, was)
			}
		}
	})
}

func TestAWaitThatIsOverNamesTheHolder(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		held := l.acquire(request("k"))
		for _, who := range []*locker{l, other} {
			err := who.refused(waiting("k", 300*time.Millisecond))
			var e *lockerr.Error
			if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &e) {
				t.Fatal(err)
			}
			if e.Holder == nil || e.Holder.Program != "host:1:test" || e.Waited < 300*time.Millisecond || e.Waited > 20*time.Second {
				t.Errorf("%v", err)
			}
		}
		var err error
		for limit := 200 * time.Millisecond; limit < 10*time.Second; limit *= 2 { // a busy server has not answered in time
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			_, err = other.Acquire(ctx, waiting("k", time.Minute))
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, lockerr.ErrTimeout) {
				break
			}
		}
		if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		refused := errors.New("too many")
		r := waiting("k", time.Minute)
		r.Waiting = func(context.Context) (context.Context, func(), error) { return nil, nil, refused }
		if _, err := other.Acquire(dbtest.Limited(t), r); !errors.Is(err, refused) {
			t.Error(err)
		}
		if err := held.Err(); err != nil {
			t.Error(err)
		}
		if r := s.row("k"); r.token != 1 || !r.live {
			t.Errorf("the row is %+v", r)
		}
	})
}

// TestWakeUpLockIsTakenOnce: what is taken twice would have to be given back twice.
func TestWakeUpLockIsTakenOnce(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		lc, err := l.borrow(dbtest.Limited(t))
		dbtest.OK(t, err)
		for range 2 {
			got, err := l.listen(dbtest.Limited(t), lc, "k", time.Now(), time.Second)
			if err != nil || !got {
				t.Errorf("%v, %v", got, err)
			}
		}
		_, err = lc.ask(dbtest.Limited(t), l.takeBlock("k", time.Second, true, true))
		dbtest.OK(t, err)
		if s.wakeUps("k") != 1 {
			t.Error("the wake-up lock was not taken")
		}
		_, err = lc.exec(dbtest.Limited(t), l.releaseWakeUpsSQL("k"))
		dbtest.OK(t, err)
		if s.wakeUps("k") != 0 {
			t.Error("the wake-up lock is still there")
		}
		l.giveBack(lc)
	})
}

// TestHostsAreKept: the server would end a connection that is silent for so long,
// and with it the wake-up locks.
func TestHostsAreKept(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.AtItsPace(t, time.Second, func(ttl time.Duration) error {
			l := s.locker(setup{ttl: ttl})
			lease := l.acquire(waiting("k", 20*time.Second))
			time.Sleep(ttl * 5 / 2)
			kept := s.wakeUps("k") == 1
			s.back(lease, lease.Release())
			if !kept {
				return errors.New("the wake-up lock is lost")
			}
			return nil
		})
	})
}

// TestStatementsOfLeasesArePreparedWhereTheyRunOften on a connection, except in a cluster,
// where a prepared statement is not repeated, and behind MySQL Router.
func TestStatementsOfLeasesArePreparedWhereTheyRunOften(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		cluster, router := s.info, s.info
		cluster.Topology, router.Router = server.Galera, true
		for name, info := range map[string]*server.Info{"one server": nil, "cluster": &cluster, "router": &router} {
			l := s.locker(setup{info: info})
			other := l.acquire(request("other")) // keeps the connection
			sent := l.tap.Since()
			var last uint64
			for range 20 {
				began := time.Now()
				lease := l.acquire(request("k"))
				if last > 0 && lease.Token() != last+1 {
					t.Errorf("%s: token %d after %d", name, lease.Token(), last)
				}
				last = lease.Token()
				if r := s.row("k"); !r.live || r.token != last || r.left < 29*time.Second-time.Since(began) || s.wakeUps("k") != 1 {
					t.Errorf("%s: the row is %+v", name, r)
				}
				dbtest.OK(t, lease.Release())
				if r := s.row("k"); r.live || s.wakeUps("k") != 0 {
					t.Errorf("%s: after its release the row is %+v", name, r)
				}
			}
			var takes, releases, prepares int
			for _, c := range sent() {
				switch {
				case strings.HasPrefix(c.Of, "INSERT INTO"):
					takes++
				case strings.HasPrefix(c.Of, "UPDATE"):
					releases++
				case strings.HasPrefix(c.Text, "[prepare]"):
					prepares++
				}
			}
			if info == nil && (takes < 10 || releases < 10) || info != nil && takes+releases+prepares > 0 {
				t.Errorf("%s: %d takes and %d releases of 20 were prepared", name, takes, releases)
			}
			dbtest.OK(t, other.Release())
			l.close()
		}
	})
}

// TestExpiryIsNotLaterThanTheServersUnderMaxHold, with which the last renewals are for less than the TTL.
func TestExpiryIsNotLaterThanTheServersUnderMaxHold(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL, r.MaxHold = 30*time.Second, 30*time.Second+500*time.Millisecond
		lease := l.acquire(r)
		for range 3 {
			expiry, left := lease.Expiry(), s.row("k").left
			if late := time.Until(expiry) - left; late > 0 {
				t.Errorf("Expiry is %v later than the server's, in %v", late, left)
			}
			time.Sleep(800 * time.Millisecond)
			l.renew([]*Grant{lease}, 10*time.Second)
			dbtest.OK(t, lease.Err())
		}
		dbtest.OK(t, lease.Release())
	})
}

// TestALimitOnTheTimeOfStatementsIsNoneForAWait, be it the account's or the server's.
func TestALimitOnTheTimeOfStatementsIsNoneForAWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		params := "max_execution_time=100"
		if s.MariaDB() {
			params = "max_statement_time=0.1"
		}
		l := s.locker(setup{params: params})
		dbtest.OK(t, l.acquire(request("k")).Release())
		for began := time.Now(); ; {
			lease := l.acquire(waiting("k", 20*time.Second))
			tx, asked := s.lockRow("k"), time.Now()
			time.AfterFunc(300*time.Millisecond, func() { _ = tx.Commit() })
			err := lease.Release()
			if err == nil {
				break
			}
			if time.Since(asked) < handoffWait || time.Since(began) > dbtest.Patience { // else it waits no longer
				t.Fatal(err)
			}
		}

		tx := s.lockRow("k")
		time.AfterFunc(500*time.Millisecond, func() { _ = tx.Commit() })
		lease := l.acquire(waiting("k", 20*time.Second))
		next := s.locker(setup{params: params}).pass(dbtest.Limited(t), waiting("k", 20*time.Second))
		dbtest.Soon(t, "another process waits", func() bool { return len(s.inWakeUp()) == 1 })
		time.Sleep(300 * time.Millisecond)
		dbtest.OK(t, errors.Join(lease.Release(), <-next))
	})
}

func TestSettingsOfASessionChangeNoLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		bare, err := schema.Parse("mysqllock")
		dbtest.OK(t, err)
		for name, with := range map[string]setup{
			"time zone":   {params: "time_zone=%27%2B13%3A00%27"},
			"found rows":  {params: "clientFoundRows=true"},
			"parse time":  {params: "parseTime=true&loc=Local"},
			"latin1":      {params: "charset=latin1"},
			"utf8":        {params: "collation=utf8mb4_general_ci"},
			"strict":      {params: "sql_mode=%27STRICT_ALL_TABLES%2CANSI_QUOTES%27"},
			"serializing": {params: "transaction_isolation=%27READ-COMMITTED%27"},
			"bare table":  {table: &bare},
		} {
			if s.MariaDB() && name == "serializing" {
				with.params = "tx_isolation=%27READ-COMMITTED%27"
			}
			l, plain := s.locker(with), s.locker(setup{})
			began := time.Now()
			lease := l.acquire(request(name))
			if r := s.row(name); r.left > 30*time.Second || r.left < 25*time.Second-time.Since(began) {
				t.Errorf("%s: the row is %+v", name, r)
			}
			dbtest.Is(t, name, dbtest.Err(plain.Acquire(dbtest.Limited(t), request(name))), lockerr.ErrLocked)
			l.renew([]*Grant{lease}, time.Second)
			dbtest.OK(t, lease.Err())
			s.onConn(func(conn driver.Conn) { dbtest.OK(t, l.fence(conn, lease)) })
			dbtest.OK(t, lease.Release())
			next := plain.acquire(request(name))
			dbtest.Is(t, name, l.told(waiting(name, 400*time.Millisecond)), lockerr.ErrTimeout)
			dbtest.OK(t, next.Release())
			// A lease that is lost is not ours to renew, however rows are counted.
			lease = l.acquire(request(name))
			s.steal(name)
			l.renew([]*Grant{lease}, 20*time.Second)
			dbtest.Soon(t, name+": it is lost after a theft", func() bool { return errors.Is(lease.Err(), lockerr.ErrLost) }) // when it has asked for the thief
		}
	})
}

// TestBigTokensAndOddKeysAreGrantedRenewedAndFenced as others are.
func TestBigTokensAndOddKeysAreGrantedRenewedAndFenced(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		for _, key := range []string{"k", "\x00\xff'`\\\n", "K", "k ", strings.Repeat("ä", 127)} {
			dbtest.OK(t, l.acquire(request(key)).Release())
			for _, token := range []uint64{1<<32 - 1, 1<<53 + 1, 1<<61 + 1} {
				s.set(key, fmt.Sprintf("token = %d", token))
				lease := l.acquire(waiting(key, 20*time.Second))
				if lease.Token() != token+1 {
					t.Errorf("after %d comes %d", token, lease.Token())
				}
				if _, err := l.Acquire(dbtest.Limited(t), waiting(key, 10*time.Millisecond)); !errors.Is(err, lockerr.ErrLocked) {
					t.Error(err)
				}
				l.renew([]*Grant{lease}, time.Second)
				s.onConn(func(conn driver.Conn) { dbtest.OK(t, l.fence(conn, lease)) })
				dbtest.OK(t, lease.Release())
			}
		}
		if len(lockname.OfWakeUp(strings.Repeat("n", 255), strings.Repeat("k", 255))) > 64 {
			t.Error("names of wake-up locks are too long")
		}
	})
}

// TestALongOwnerIsCutOff: what does not fit into the column is cut off.
func TestALongOwnerIsCutOff(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		long := New(strategy.Config{
			Config: l.cfg.Config, Rows: l.cfg.Rows, Conns: l.conns, Queue: l.cfg.Queue, Owner: strings.Repeat("o", 300), TTL: time.Second,
		})
		defer long.Close()
		dbtest.OK(t, dbtest.Err(long.Acquire(dbtest.Limited(t), request("k"))))
		dbtest.Equal(t, "the owner has %d bytes", len(s.row("k").owner), 255)
		err := s.locker(setup{}).refused(request("k"))
		var e *lockerr.Error
		if !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != strings.Repeat("o", 246) {
			t.Error(err)
		}
	})
}

// TestARowThatHasVanishedIsMadeAgain: a clean-up may remove the row of a key that is not held.
func TestARowThatHasVanishedIsMadeAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		dbtest.Exec(t, s.db, "DELETE FROM "+s.table.String()+" WHERE name = x'6b'")
		dbtest.OK(t, l.acquire(request("k")).Release())
		dbtest.Exec(t, s.db, "DROP TABLE "+s.table.String())
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}
