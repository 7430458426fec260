package lease

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// lender lends the session of a transaction to a caller of a locker.
type lender struct {
	*locker
	tap   *dbtest.Tap
	conns *pool.Pool
	conn  *pool.Conn // the one that is lent
	puts  int
}

// lender is one whose sessions take several statements in a text, or do not.
func (l *locker) lender(packs bool) *lender {
	l.s.T.Helper()
	e := &lender{locker: l, tap: new(dbtest.Tap)}
	connector := l.s.Connector(e.tap.On, func(cfg *mysql.Config) { cfg.MultiStatements = packs })
	several := func(context.Context, *pool.Conn) (bool, error) { return packs, nil }
	e.conns = pool.New(pool.Config{Connect: connector.Connect, Several: several, Max: 4, Idle: time.Minute, Setup: "SET autocommit = 0"})
	l.s.T.Cleanup(e.conns.Close)
	return e
}

// take asks for the lease on k.
func (l *lender) take(ctx context.Context, wait time.Duration) (*Grant, error) {
	r := waiting("k", wait)
	r.Lends = &strategy.Lender{
		Get: func(ctx context.Context) (c *pool.Conn, err error) {
			l.conn, err = l.conns.Acquire(ctx)
			return l.conn, err
		},
		Put: func() { l.puts++; l.conn.Release(); l.conn = nil },
	}
	return l.Acquire(ctx, r)
}

// takes is take, on the session.
func (l *lender) takes() *Grant {
	l.s.T.Helper()
	g, err := l.take(dbtest.Limited(l.s.T), 0)
	dbtest.OK(l.s.T, err)
	if l.conn == nil || g.session != l.conn || l.s.wakeUps("k") != 1 || !l.s.row("k").live {
		l.s.T.Fatalf("it is not on the session: %d wake-up locks, %+v", l.s.wakeUps("k"), l.s.row("k"))
	}
	return g
}

// ends commits the transaction on the session, or rolls it back, and gives back lease and session.
func (l *lender) ends(g *Grant, commit bool) {
	l.s.T.Helper()
	ctx := dbtest.Limited(l.s.T)
	if !commit {
		l.s.Exec(l.conn.Conn, "ROLLBACK")
	} else {
		check, err := l.Check(ctx, l.conn, []strategy.Grant{g}, strategy.Commit{Wrote: true, Ends: true})
		dbtest.OK(l.s.T, err)
		_, err = l.conn.Send(ctx, append(append(check.Before, "COMMIT"), check.After...)...)
		dbtest.OK(l.s.T, err)
		check.Ended(strategy.Committed)
	}
	dbtest.OK(l.s.T, errors.Join(g.Release(), g.Detach()))
	if l.s.row("k").live || l.s.wakeUps("k") != 0 {
		l.s.T.Errorf("commit %v: %d wake-up locks, %+v", commit, l.s.wakeUps("k"), l.s.row("k"))
	}
	l.conn.Release()
}

// TestALeaseIsTakenAndReleasedOnItsSession: no other connection has to do with it if its transaction commits.
func TestALeaseIsTakenAndReleasedOnItsSession(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, packs := range []bool{true, false} {
			l := s.locker(setup{})
			dbtest.OK(t, l.acquire(request("k")).Release()) // the row is there
			e := l.lender(packs)
			before, elsewhere := s.row("k").token, l.tap.Texts()
			for n := range 12 { // the statement is prepared, too
				commit := n%2 == 0
				lease := e.takes()
				if want := before + uint64(n) + 1; lease.Token() != want { //nolint:gosec // it is small
					t.Errorf("packs %v: the token is %d, want %d", packs, lease.Token(), want)
				}
				s.Exec(e.conn.Conn, "INSERT INTO written () VALUES ()")
				e.ends(lease, commit)
			}
			if n := len(elsewhere()); n != 6 { // after ROLLBACK the release, on a lock connection
				t.Errorf("packs %v: %d statements elsewhere: %q", packs, n, elsewhere())
			}
			dbtest.Equal(t, "%d rows are written", s.written(), 6*map[bool]int{true: 1, false: 2}[packs])
		}
	})
}

// TestALeaseThatSomebodyHasIsAwaitedElsewhere: the session is given back for the wait, without a transaction.
func TestALeaseThatSomebodyHasIsAwaitedElsewhere(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, packs := range []bool{true, false} {
			l, other := s.locker(setup{}), s.locker(setup{})
			e := l.lender(packs)
			held := other.acquire(request("k"))
			dbtest.Is(t, "without a wait", dbtest.Err(e.take(dbtest.Limited(t), 0)), lockerr.ErrLocked)
			granted := dbtest.Go(func() error {
				lease, err := e.take(dbtest.Limited(t), dbtest.Patience)
				if err == nil {
					err = lease.Release()
				}
				return err
			})
			dbtest.Soon(t, "it waits in the server", func() bool { return len(s.inWakeUp()) == 1 })
			dbtest.Equal(t, "the session was given back %d times", e.puts, 2)
			dbtest.OK(t, held.Release())
			dbtest.OK(t, <-granted)
			if n := len(s.threads("ID IN (SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX)")); n != 0 {
				t.Errorf("packs %v: %d transactions are open", packs, n)
			}
			e.ends(e.takes(), true) // the session is as good as before
		}
	})
}

// TestALeaseIsTakenElsewhereWhereItsSessionIsDisturbed: whatever happens to the statements that take the lease on the
// session, nobody is left with it, and the caller has it on a lock connection.
func TestALeaseIsTakenElsewhereWhereItsSessionIsDisturbed(t *testing.T) {
	killed := &mysql.MySQLError{Number: server.QueryInterrupted, Message: "Query execution was interrupted"}
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		for _, packs := range []bool{true, false} {
			take := "INSERT"
			switch {
			case packs:
				take = "DO LAST_INSERT_ID"
			case s.MariaDB():
				take = "SET STATEMENT sql_mode"
			}
			for name, fault := range map[string]dbtest.Fault{
				"killed":                         {Answer: killed},
				"a deadlock":                     {Answer: &mysql.MySQLError{Number: server.LockDeadlock}},
				"read only":                      {Answer: &mysql.MySQLError{Number: 1792, Message: "Cannot execute statement in a READ ONLY transaction."}},
				"the answer is lost":             {Lost: true},
				"the answer to COMMIT is lost":   {Lost: true, At: func(text string) bool { return text == "COMMIT" }},
				"COMMIT is killed":               {Answer: killed, At: func(text string) bool { return text == "COMMIT" }},
				"the row is locked for a moment": {Before: func() { _ = s.lockRow("k").Rollback() }},
			} {
				if fault.At == nil {
					fault.At = func(text string) bool { return strings.HasPrefix(text, take) }
				} else if packs {
					continue // COMMIT goes with the lease
				}
				e := l.lender(packs)
				before, happened := s.row("k").token, e.tap.Strike(fault)
				lease, err := e.take(dbtest.Limited(t), dbtest.Patience)
				what := fmt.Sprintf("packs %v, %s", packs, name)
				if err != nil || !happened() {
					t.Errorf("%s: %v, happened %v", what, err, happened())
					continue
				}
				if lease.Token() <= before || lease.Token() != s.row("k").token {
					t.Errorf("%s: token %d, before %d, now %d", what, lease.Token(), before, s.row("k").token)
				}
				if fault.Before == nil && (lease.session != nil || e.puts != 1) {
					t.Errorf("%s: on the session %v, given back %d times", what, lease.session != nil, e.puts)
				}
				dbtest.OK(t, errors.Join(lease.Release(), lease.Detach()))
				if e.conn != nil {
					e.conn.Release()
				}
				dbtest.Soon(t, what+": all is free", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
				again := l.lender(packs)
				again.ends(again.takes(), true)
			}
		}
	})
}

// TestACallerThatLeavesHasNoLeaseOnItsSession: what it may have been granted is given back in the background, and
// nobody of its process is granted the key before.
func TestACallerThatLeavesHasNoLeaseOnItsSession(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, packs := range []bool{true, false} {
			l := s.locker(setup{})
			dbtest.OK(t, l.acquire(request("k")).Release())
			e := l.lender(packs)
			e.ends(e.takes(), true) // its session is there
			before, begin := s.row("k").token, "COMMIT"
			if packs {
				begin = "DO LAST_INSERT_ID"
			}
			arrive := e.tap.Stall(begin)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			left := dbtest.Go(func() error { return dbtest.Err(e.take(ctx, time.Minute)) })
			dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
			cancel()
			dbtest.Is(t, "it left", <-left, context.Canceled)
			arrive()
			dbtest.Equal(t, "the session was given back %d times", e.puts, 1)
			next := l.acquire(waiting("k", dbtest.Patience))
			if next.Token() != before+2 {
				t.Errorf("packs %v: the next token is %d after %d", packs, next.Token(), before)
			}
			dbtest.OK(t, next.Release())
		}
	})
}

// TestALeaseOfALostSessionIsGivenBack: its wake-up lock is gone, and the next one is taken as any other.
func TestALeaseOfALostSessionIsGivenBack(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		e := l.lender(true)
		lease := e.takes()
		s.kill(s.threads(fmt.Sprintf("ID = %d", e.conn.KnownID())))
		e.conn.Taint()
		dbtest.OK(t, errors.Join(lease.Release(), lease.Detach()))
		e.conn.Release()
		dbtest.Soon(t, "it is free", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
		e.ends(e.takes(), true)
	})
}

// TestASessionWithAClockOfItsOwnGrantsNothing: by the clock that the application has set the lease of another would be over.
func TestASessionWithAClockOfItsOwnGrantsNothing(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, packs := range []bool{true, false} {
			for _, clock := range []string{"UNIX_TIMESTAMP() + 86400", "UNIX_TIMESTAMP() - 86400"} {
				l, other := s.locker(setup{}), s.locker(setup{})
				e := l.lender(packs)
				e.ends(e.takes(), true)
				c, err := e.conns.Acquire(dbtest.Limited(t)) // the same
				dbtest.OK(t, err)
				s.Exec(c.Conn, "SET timestamp = "+clock)
				c.Release()
				lease, err := e.take(dbtest.Limited(t), 0)
				dbtest.OK(t, err)
				if left := s.row("k").left; lease.session != nil || left < 20*time.Second || left > 30*time.Second {
					t.Errorf("packs %v, %s: on the session %v, for %v", packs, clock, lease.session != nil, left)
				}
				dbtest.OK(t, lease.Release())
				held := other.acquire(request("k"))
				dbtest.Is(t, "held by another", dbtest.Err(e.take(dbtest.Limited(t), 0)), lockerr.ErrLocked)
				dbtest.OK(t, held.Release())
			}
		}
	})
}

// TestALeaseOfAKeyWithoutARowHasATokenOfItsOwn: the id that an earlier statement of the session has told is none.
func TestALeaseOfAKeyWithoutARowHasATokenOfItsOwn(t *testing.T) {
	dbtest.OnServers(t, newWritten, func(t *testing.T, s *scratch) {
		for _, packs := range []bool{true, false} {
			l := s.locker(setup{})
			e := l.lender(packs)
			e.ends(e.takes(), true)
			dbtest.Exec(t, s.db, "DELETE FROM "+s.table.String())
			lease, err := e.take(dbtest.Limited(t), 0)
			dbtest.OK(t, err)
			if r := s.row("k"); !r.live || r.token != lease.Token() {
				t.Errorf("packs %v: the token is %d, the row is %+v", packs, lease.Token(), r)
			}
			dbtest.OK(t, lease.Release())
		}
	})
}
