package tidb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/engine"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

func (s scratch) inspector(dsn string) *inspect.Inspector {
	s.t.Helper()
	i, err := inspect.New(dbtest.Open(s.t, "mysql", dsn), inspect.Options{})
	dbtest.OK(s.t, err)
	return i
}

// look returns the one lock of a strategy on the key, or none.
func (s scratch) look(i *inspect.Inspector, f inspect.Filter) *inspect.Lock {
	s.t.Helper()
	snap, err := i.Snapshot(dbtest.Limited(s.t), f)
	dbtest.OK(s.t, err)
	if len(snap.Locks) != 1 {
		s.t.Fatalf("%d locks are shown: %+v", len(snap.Locks), snap.Locks)
	}
	return &snap.Locks[0]
}

func TestDoctorSaysWhichStrategiesHold(t *testing.T) {
	s := newScratch(t)
	dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.handle(), "k", func(context.Context) error { return nil }))
	for param, unsafe := range map[string][]string{
		"lockTTL=1m": {"advisory"}, optimists[0]: {"lease", "advisory"}, optimists[1]: {"lease", "advisory"},
	} {
		i, err := inspect.New(s.handle(param), inspect.Options{})
		dbtest.OK(t, err)
		d, err := i.Doctor(dbtest.Limited(t))
		dbtest.OK(t, err)
		for _, v := range d.Verdicts {
			if v.Safe == slices.Contains(unsafe, v.Strategy) {
				t.Errorf("%s: %+v", param, v)
			}
		}
		for _, c := range d.Checks {
			if c.State == inspect.Warning || c.State == inspect.Failure {
				t.Errorf("%s: %+v", param, c)
			}
		}
	}
}

// TestLeaseIsShown, and taken away.
func TestLeaseIsShown(t *testing.T) {
	s := newScratch(t)
	i, db := s.inspector(s.dsn), s.handle("lockOwner=web-1:7:shopd")
	h := stock.Acquire(t, db, "k", lockctx.Lease(6*time.Second))
	var l *inspect.Lock
	dbtest.Soon(t, "it is renewed", func() bool {
		l = s.look(i, inspect.Filter{})
		_, known := l.Holders.List[0].Renewed.Get()
		return known
	})
	token, _ := l.Token.Get()
	holder := l.Holders.List[0]
	ttl, _ := holder.TTL.Get()
	since, _ := holder.Since.Get()
	if l.Strategy != "lease" || l.Key != "k" || token != h.Token() || holder.Program != "web-1:7:shopd" || ttl != 6*time.Second || since <= 0 || l.Remaining <= 0 || !l.Waiters.More {
		t.Errorf("it is shown as %+v", l)
	}
	var e *mysqllock.Error
	_, err := mysqllock.Acquire(dbtest.Limited(t), s.handle(), "k", lockctx.Lease(engine.Lease), lockctx.NoWait())
	if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked) || e.Holder == nil || e.Holder.Program != "web-1:7:shopd" {
		t.Errorf("another caller is told %v", err)
	}
	_, err = s.handle().BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(100*time.Millisecond)), nil)
	if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrTimeout) || e.Holder == nil || e.Holder.Program != "web-1:7:shopd" {
		t.Errorf("who wants a row lock is told %v", err)
	}

	released, err := i.Release(dbtest.Limited(t), *l, "a test")
	dbtest.OK(t, err)
	if released.Token != token+1 {
		t.Errorf("the new token is %d, after %d", released.Token, token)
	}
	err = stock.InTx(h.Context(), db, func(tx *sql.Tx) error { return count(h.Context(), tx) })
	dbtest.Want(t, err, mysqllock.ErrLost)
	if l = s.look(i, inspect.Filter{Keys: []string{"k"}}); l.Forced == nil || l.Forced.Reason != "a test" {
		t.Errorf("afterwards it is %+v", l)
	}
	s.counted(0)
	_ = h.Release()
}

// TestRowLockIsNotShown: nobody is told that nobody holds a row lock, and with Filter.Try whether
// somebody does, and who where it can be one only. It is not released: TiDB 8.5.0 would crash.
func TestRowLockIsNotShown(t *testing.T) {
	s := newScratch(t)
	i := s.inspector(s.dsn)
	begin := func(key string) *sql.Tx {
		t.Helper()
		return dbtest.Begin(t, lockctx.With(dbtest.Limited(t), key), s.handle())
	}
	k := inspect.Filter{Keys: []string{"k"}}
	tried := inspect.Filter{Keys: []string{"k"}, Try: true}
	free := begin("k")
	dbtest.OK(t, free.Rollback())
	if l := s.look(i, k); l.Holders.Any() != inspect.Value(false) {
		t.Errorf("while nobody has it, it is %+v", l)
	}

	tx := begin("k")
	if l := s.look(i, k); l.Holders.Any().String() != "not known" {
		t.Errorf("without a try it is %+v", l)
	}
	l := s.look(i, tried)
	if l.Strategy != "row" || len(l.Holders.List) != 1 || l.Holders.List[0].ConnectionID == 0 || l.Holders.List[0].Program == "" {
		t.Fatalf("with a try it is %+v", l)
	}
	waits := make(chan error)
	go func() {
		waits <- stock.InTx(lockctx.With(dbtest.Limited(t), "k"), s.handle(), func(*sql.Tx) error { return nil })
	}()
	dbtest.Soon(t, "the waiter is shown", func() bool {
		snap, err := i.Snapshot(dbtest.Limited(t), k)
		return err == nil && len(snap.Locks) == 1 && len(snap.Locks[0].Waiters.List) == 1
	})

	other := begin("j")
	two := s.look(i, tried)
	if two.Strategy != "row" || len(two.Holders.List) != 1 || two.Holders.List[0].ConnectionID != 0 {
		t.Errorf("with two that can have it, it is %+v", two)
	}
	_, err := i.Release(dbtest.Limited(t), *two, "")
	dbtest.Want(t, err, inspect.ErrNotKnown)
	dbtest.Says(t, err, fmt.Sprint(l.Holders.List[0].ConnectionID))
	dbtest.OK(t, other.Rollback())

	l = s.look(i, tried)
	_, err = i.Release(dbtest.Limited(t), *l, "")
	dbtest.Says(t, err, "nothing was released: a KILL of an idle transaction can crash TiDB ", fmt.Sprintf("connection %d, at the server 127.0.0.1:", l.Holders.List[0].ConnectionID))
	dbtest.OK(t, tx.Commit())
	dbtest.OK(t, <-waits)

	user := "u_" + dbtest.Random()
	admin := dbtest.Open(t, "mysql", s.dsn)
	dbtest.Exec(t, admin, "CREATE USER "+user)
	defer dbtest.Exec(t, admin, "DROP USER "+user)
	cfg, err := mysql.ParseDSN(s.dsn)
	dbtest.OK(t, err)
	dbtest.Exec(t, admin, "GRANT SELECT ON "+cfg.DBName+".* TO "+user)
	tx = begin("k")
	defer tx.Rollback()
	asUser := strings.Replace(s.dsn, "root@", user+"@", 1)
	if l := s.look(s.inspector(asUser), k); l.Holders.Any().String() != "not known" {
		t.Errorf("an account without PROCESS is shown %+v", l)
	}
	// What it sees of its own it does not take for all that there is.
	dbtest.Exec(t, admin, "GRANT ALL ON "+cfg.DBName+".* TO "+user)
	own := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "its own"), dbtest.Open(t, "mysqllock", asUser))
	defer own.Rollback()
	if l := s.look(s.inspector(asUser), tried); len(l.Holders.List) != 1 || l.Holders.List[0].ConnectionID != 0 {
		t.Errorf("an account without PROCESS is told of %+v", l.Holders)
	}
}

// TestCleanUpRemovesOnlyWhatNobodyUses, and no token goes back.
func TestCleanUpRemovesOnlyWhatNobodyUses(t *testing.T) {
	s := newScratch(t)
	db, i := s.handle(), s.inspector(s.dsn)
	ctx := dbtest.Limited(t)
	var last uint64
	for range 3 {
		h, err := mysqllock.Acquire(ctx, db, "old", lockctx.Lease(engine.Lease))
		dbtest.OK(t, err)
		last = h.Token()
		dbtest.OK(t, h.Release())
	}
	leased, err := mysqllock.Acquire(ctx, db, "leased", lockctx.Lease(engine.Lease))
	dbtest.OK(t, err)
	locked := dbtest.Begin(t, lockctx.With(ctx, "locked"), db)
	done, err := i.Clean(ctx, inspect.CleanUp{})
	dbtest.OK(t, err)
	names := dbtest.Column[string](t, dbtest.Open(t, "mysql", s.dsn), "SELECT name FROM mysqllock ORDER BY name")
	if !done.Done || done.Removed != 1 || done.Left != 1 || !slices.Equal(names, []string{"", "leased", "locked"}) {
		t.Errorf("%+v, and there are %q", done, names)
	}
	dbtest.OK(t, leased.Release())
	dbtest.OK(t, locked.Rollback())
	h, err := mysqllock.Acquire(ctx, db, "old", lockctx.Lease(engine.Lease))
	dbtest.OK(t, err)
	if h.Token() <= last {
		t.Errorf("the token is %d, after %d", h.Token(), last)
	}
	dbtest.OK(t, h.Release())
}
