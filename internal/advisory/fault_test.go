package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// failing has statements fail, after the server has carried out those that return rows.
// Nothing can be prepared: all of them are texts.
func failing(fail func(text string) error) []sqlmw.Interceptor {
	return []sqlmw.Interceptor{&faults{fail: fail}, unprepared{err: errors.New("it prepares nothing")}}
}

type faults struct {
	sqlmw.NullInterceptor
	fail func(text string) error
}

func (f *faults) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if err := f.fail(text); err != nil {
		return nil, err
	}
	return f.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (f *faults) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	if failed := f.fail(text); failed != nil && err == nil {
		_ = rows.Close()
		return ctx, nil, failed
	}
	return ctx, rows, err
}

// unprepared refuses to prepare.
type unprepared struct {
	sqlmw.NullInterceptor
	err error
}

func (u unprepared) ConnPrepareContext(ctx context.Context, _ driver.ConnPrepareContext, _ string) (context.Context, driver.Stmt, error) {
	return ctx, nil, u.err
}

// TestStatementsOfOneLockArePreparedWhereTheyCanBe: a connection that stays has the statements
// prepared that take and free one lock, and goes on with texts where it cannot.
func TestStatementsOfOneLockArePreparedWhereTheyCanBe(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		plain := s.open()
		for _, able := range []bool{true, false} {
			runs := new(counting)
			seen := []sqlmw.Interceptor{runs}
			if !able {
				seen = append(seen, unprepared{err: &mysql.MySQLError{Number: 1461, Message: "Can't create more than max_prepared_stmt_count statements"}})
			}
			p := s.process(settings{conns: 1, seen: seen})
			for i := range 20 {
				key := fmt.Sprintf("Key %d", i%3)
				lock := p.acquire(key, 0)
				p.held(plain, lock)
				dbtest.OK(t, lock.Release())
				dbtest.Equal(t, "connection %q still has it", s.holder(plain, key), "")
			}
			if n := runs.prepared.Load(); able && n < 20 || !able && n > 0 {
				t.Errorf("able to prepare is %v: %d statements were", able, n)
			}
		}
	})
}

// TestWhatTheServerRefusesCostsNobodyElseALock: what the server refuses is not held, and costs
// nobody else a lock.
func TestWhatTheServerRefusesCostsNobodyElseALock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var number atomic.Int32
		var left atomic.Int32
		p := s.process(settings{seen: failing(func(text string) error {
			if strings.Contains(text, "GET_LOCK('"+advisory.Name(s.namespace, "bad")) && left.Add(-1) >= 0 {
				return &mysql.MySQLError{Number: uint16(number.Load()), Message: "refused"}
			}
			return nil
		})})
		plain := s.open()
		good := p.acquire("good", 0)
		for n, want := range map[int32]error{4163: nil, 3058: lockerr.ErrDeadlock, 1213: lockerr.ErrDeadlock} {
			number.Store(n)
			left.Store(1)
			_, err := p.Acquire(t.Context(), request("bad", 0))
			if server.Number(err) != uint16(n) || want != nil && !errors.Is(err, want) {
				t.Errorf("%d became %v", n, err)
			}
			dbtest.Equal(t, "connection %s has it", s.holder(plain, "bad"), "")
		}
		number.Store(1317) // KILL QUERY
		left.Store(1)
		dbtest.OK(t, p.acquire("bad", 0).Release())
		if err := good.Err(); err != nil {
			t.Errorf("another lock was lost: %v", err)
		}
		dbtest.Equal(t, "connection %s has it", s.holder(plain, "bad"), "")
		dbtest.OK(t, good.Release())
	})
}

// TestAConnectionThatMayKeepALockIsClosed: a connection goes that may have kept a lock which its
// statement could not give back, and with it the others on it.
func TestAConnectionThatMayKeepALockIsClosed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var bad atomic.Bool
		name := advisory.Name(s.namespace, "bad")
		p := s.process(settings{seen: failing(func(text string) error {
			if bad.Load() && strings.Contains(text, name) {
				return &mysql.MySQLError{Number: 1317, Message: "interrupted"}
			}
			return nil
		})})
		plain := s.open()
		for _, taken := range []bool{false, true} { // and cannot be given back
			var lost told
			good, err := p.Acquire(t.Context(), lost.request("good"))
			dbtest.OK(t, err)
			var lock *advisory.Grant
			if taken {
				lock = p.acquire("bad", 0)
			}
			bad.Store(true)
			if taken {
				err = lock.Release()
			} else {
				_, err = p.Acquire(t.Context(), request("bad", 0))
			}
			bad.Store(false)
			if err == nil || errors.Is(err, lockerr.ErrLost) != taken {
				t.Errorf("taken is %v: %v", taken, err)
			}
			dbtest.Soon(t, "the other holder is told", func() bool { return lost.count() == 1 && errors.Is(good.Err(), lockerr.ErrLost) })
			s.free(plain, "bad")
		}
	})
}

// TestKilledReleaseIsRepeated: a release that is killed again and again loses no other lock of its
// connection, and neither does a request that is killed after the server has granted it.
func TestKilledReleaseIsRepeated(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var kills atomic.Int64
		name := advisory.Name(s.namespace, "bad")
		p := s.process(settings{seen: failing(func(text string) error {
			if strings.Contains(text, name) && kills.Add(-1) >= 0 {
				return &mysql.MySQLError{Number: 1317, Message: "interrupted"}
			}
			return nil
		})})
		plain := s.open()
		var lost told
		good, err := p.Acquire(t.Context(), lost.request("good"))
		dbtest.OK(t, err)
		for killed := int64(1); killed <= 5; killed++ {
			lock := p.acquire("bad", 0)
			kills.Store(killed)
			dbtest.OK(t, lock.Release())
			s.free(plain, "bad")

			kills.Store(killed)
			lock, err := p.Acquire(t.Context(), request("bad", 0))
			dbtest.OK(t, err)
			dbtest.OK(t, lock.Release())
		}
		dbtest.OK(t, good.Err())
		if lost.count() != 0 {
			t.Error("the other holder was told of a loss")
		}
		dbtest.OK(t, good.Release())
	})
}

// brokenAtFirst are connections that break with the first statement that sets them up: as
// many as it says are opened.
type brokenAtFirst struct {
	sqlmw.NullInterceptor
	broken int32
	opened atomic.Int32
}

func (b *brokenAtFirst) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	b.opened.Add(1)
	return k.Connect(ctx)
}

func (b *brokenAtFirst) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if b.opened.Load() > b.broken {
		return b.NullInterceptor.ConnExecContext(ctx, conn, text, args)
	}
	_ = conn.(driver.Conn).Close()
	return nil, mysql.ErrInvalidConn
}

// TestConnectionsThatBreakWhileTheyAreSetUpAreReplaced: connections that break while they are set
// up are replaced, a dozen of them at most.
func TestConnectionsThatBreakWhileTheyAreSetUpAreReplaced(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, broken := range []int32{2, 3, 100} {
			b := &brokenAtFirst{broken: broken}
			p := s.process(settings{seen: []sqlmw.Interceptor{b}})
			lock, err := p.Acquire(t.Context(), request("k", 0))
			switch {
			case broken < 100:
				dbtest.OK(t, err)
				dbtest.OK(t, lock.Release())
			case !errors.Is(err, lockerr.ErrNoAnswer) || b.opened.Load() > 12:
				t.Errorf("after %d connections: %v", b.opened.Load(), err)
			}
		}
	})
}

// breaking breaks connections under a request for a lock, after it was carried out, as long
// as some are left.
type breaking struct {
	sqlmw.NullInterceptor
	left atomic.Int64
}

func (b *breaking) broken(text string) bool {
	return strings.Contains(text, "GET_LOCK") && b.left.Add(-1) >= 0
}

func (b *breaking) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	if err == nil && b.broken(text) {
		_ = rows.Close()
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return ctx, rows, err
}

func (b *breaking) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	if b.broken(text) {
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return b.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

// TestARequestWhoseConnectionBreaksIsSentAgain: a request whose connection breaks is sent again, and
// where that does not help either it ends with a sentinel.
func TestARequestWhoseConnectionBreaksIsSentAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		b := new(breaking)
		k, err := intercept.With(b)(s.Connector(dbtest.NoDatabase))
		dbtest.OK(t, err)
		p := s.process(settings{connect: k.Connect})
		b.left.Store(1)
		dbtest.OK(t, p.acquire("k", 0).Release())
		b.left.Store(1 << 20)
		var e *lockerr.Error
		if _, err := p.Acquire(t.Context(), request("k", 0)); !errors.Is(err, lockerr.ErrNoAnswer) || !errors.As(err, &e) || e.Key != "k" {
			t.Errorf("it ended with %v", err)
		}
		b.left.Store(0)
		dbtest.OK(t, p.acquire("k", 0).Release())
	})
}
