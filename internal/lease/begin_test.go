package lease

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// beginner is a connection of an application whose transactions begin with leases.
type beginner struct {
	*pool.Conn
	l    *locker
	with struct { // for the next transaction
		Options driver.TxOptions
		Begun   bool
	}
}

func (l *locker) beginner(wrap func(driver.Conn) driver.Conn) *beginner {
	l.s.T.Helper()
	conn := l.s.Connect(l.tap.On)
	if wrap != nil {
		conn = wrap(conn)
	}
	return &beginner{Conn: pool.Adopt(conn), l: l}
}

// begin asks for a lease and for a transaction with it.
func (b *beginner) begin(ctx context.Context, r Request) (*Lease, error) {
	b.l.makeProcedures()
	r.Begin = strategy.NewBeginning(func(ctx context.Context) (*pool.Conn, error) { return b.Conn, b.AwaitTurn(ctx) }, func(bool) { b.EndTurn() })
	r.Begin.Options = b.with.Options
	s, err := b.l.Acquire(ctx, r)
	var whole bool
	if b.with.Begun, whole = r.Begin.Conclude(); !whole {
		b.l.s.T.Error("the connection is still in use")
	}
	return s, err
}

// begun is begin where nothing is in the way.
func (b *beginner) begun(key string) *Lease {
	b.l.s.T.Helper()
	lease, err := b.begin(dbtest.Limited(b.l.s.T), request(key))
	dbtest.OK(b.l.s.T, err)
	if !b.with.Begun {
		b.l.s.T.Fatalf("the transaction has not begun with the lease on %s", key)
	}
	return lease
}

// takes and gives are what the statements begin with that take a lease and begin, and
// that check it, release it and commit.
func (s *scratch) takes() string {
	if s.MariaDB() {
		return "BEGIN NOT ATOMIC START"
	}
	return "CALL " + s.table.TakeProcedure().String()
}

func (s *scratch) gives() string {
	if s.MariaDB() {
		return "BEGIN NOT ATOMIC SET @mysqllock_name"
	}
	return "CALL " + s.table.GiveProcedure().String()
}

// beginning reports which statements begin so.
func beginning(with string) func(string) bool {
	return func(text string) bool { return strings.HasPrefix(text, with) }
}

// TestBeginWithLease: one statement takes the lease, visible to all, and begins the
// transaction with the options that were asked for; another one checks, releases and
// commits.
func TestBeginWithLease(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY)")
		l, other := s.locker(setup{}), s.locker(setup{})
		b := l.beginner(nil)
		dbtest.OK(t, b.begun("k'\"").Release())
		s.Exec(b.Conn.Conn, "ROLLBACK")
		for i, level := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			for _, reads := range []bool{false, true} {
				what := fmt.Sprintf("%v, read-only %v", level, reads)
				b.with.Options = driver.TxOptions{Isolation: driver.IsolationLevel(level), ReadOnly: reads}
				sent := l.tap.Texts()
				lease := b.begun("k")
				if n := len(sent()); n != 1 && i > 0 {
					t.Errorf("%s: %d statements: %q", what, n, sent())
				}
				if r := s.row("k"); !r.live || r.token != lease.Token() || r.left < 20*time.Second {
					t.Errorf("%s: others see %+v, the token is %d", what, r, lease.Token())
				}
				dbtest.Is(t, what+": another process", dbtest.Err(other.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrLocked)
				err := server.Exec(t.Context(), b.Conn.Conn, fmt.Sprintf("INSERT INTO written VALUES (%d)", i))
				if reads != (server.Number(err) == 1792) {
					t.Errorf("%s: a write: %v", what, err)
				}
				committed, _, err := l.CommitAndRelease(t.Context(), b.Conn, lease)
				if err != nil || !committed {
					t.Errorf("%s: committed %v, %v", what, committed, err)
				}
				given, _ := lease.released()
				if given == reads { // in a READ ONLY transaction nothing can be released
					t.Errorf("%s: released: %v", what, given)
				}
				dbtest.OK(t, lease.Release())
				dbtest.OK(t, lease.Detach())
				if s.row("k").live || s.wakeUps("k") != 0 || !errors.Is(lease.Err(), lockerr.ErrClosed) {
					t.Errorf("%s: afterwards %+v, %d wake-up locks, %v", what, s.row("k"), s.wakeUps("k"), lease.Err())
				}
			}
		}
		dbtest.Equal(t, "%d are written", s.written(), 5)
	})
}

// TestBeginWithIsolation: the transaction has the level that was asked for.
func TestBeginWithIsolation(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY)")
		l := s.locker(setup{})
		b := l.beginner(nil)
		for level, sees := range map[sql.IsolationLevel]int{sql.LevelReadUncommitted: 1, sql.LevelReadCommitted: 0, sql.LevelRepeatableRead: 0} {
			b.with.Options.Isolation = driver.IsolationLevel(level)
			lease := b.begun("k")
			tx, err := s.db.Begin()
			dbtest.OK(t, err)
			count := func() string { return s.One(b.Conn.Conn, "SELECT COUNT(*) FROM written") }
			before := count()
			dbtest.Exec(t, tx, "INSERT INTO written VALUES (1)")
			if got := count(); got != fmt.Sprint(sees) {
				t.Errorf("%v: sees %s rows that are not committed", level, got)
			}
			dbtest.OK(t, tx.Commit())
			if got, later := count(), level != sql.LevelRepeatableRead; (got == "1") != later || before != "0" {
				t.Errorf("%v: sees %s rows afterwards, %s before", level, got, before)
			}
			s.Exec(b.Conn.Conn, "ROLLBACK")
			dbtest.OK(t, errors.Join(lease.Release(), lease.Detach()))
			dbtest.Exec(t, s.db, "DELETE FROM written")
		}
	})
}

// TestBeginRefused: what is not free begins no transaction, nor does a session whose
// clock stands still, and nothing is left on the connection.
func TestBeginRefused(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		b := l.beginner(nil)
		dbtest.OK(t, b.begun("k").Release())
		s.Exec(b.Conn.Conn, "ROLLBACK")
		idle := func(what string) {
			t.Helper()
			dbtest.OK(t, server.Exec(t.Context(), b.Conn.Conn, "SAVEPOINT a"))
			if err := server.Exec(t.Context(), b.Conn.Conn, "RELEASE SAVEPOINT a"); !server.NoSavepoint(err) {
				t.Errorf("%s: a transaction is open: %v", what, err)
			}
			if n := s.One(b.Conn.Conn, "SELECT IS_USED_LOCK('"+l.wakeUpName("k")+"') <=> CONNECTION_ID()"); n != "0" {
				t.Errorf("%s: the connection has the wake-up lock", what)
			}
		}
		dbtest.OK(t, b.Detach("k"))
		idle("in the beginning")

		held := other.acquire(request("k"))
		sent := l.tap.Texts()
		_, err := b.begin(dbtest.Limited(t), request("k"))
		if !errors.Is(err, lockerr.ErrLocked) || b.with.Begun || count(sent(), "INSERT") != 0 {
			t.Errorf("of another: %v, begun %v, %q", err, b.with.Begun, sent())
		}
		idle("of another")
		dbtest.OK(t, held.Release())

		tx := s.lockRow("k")
		if _, err := b.begin(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) || b.with.Begun {
			t.Errorf("behind a row lock: %v, begun %v", err, b.with.Begun)
		}
		dbtest.OK(t, tx.Rollback())
		idle("behind a row lock")

		dbtest.OK(t, server.Exec(t.Context(), b.Conn.Conn, "SET timestamp = 2100000000"))
		lease, err := b.begin(dbtest.Limited(t), request("k"))
		dbtest.OK(t, err)
		if r := s.row("k"); b.with.Begun || r.left > time.Minute {
			t.Errorf("with a clock that stands still: begun %v, %+v", b.with.Begun, r)
		}
		idle("with a clock that stands still")
		dbtest.OK(t, lease.Release())
		dbtest.OK(t, server.Exec(t.Context(), b.Conn.Conn, "SET timestamp = DEFAULT"))

		s.set("k", "name = x'00'") // the row has vanished
		lease, err = b.begin(dbtest.Limited(t), request("k"))
		dbtest.OK(t, err)
		idle("without a row")
		dbtest.OK(t, lease.Release())
	})
}

func (l *Locker) wakeUpName(key string) string {
	_, name, _ := strings.Cut(l.releaseWakeUpsSQL(key), "'")
	return strings.TrimSuffix(name, "')")
}

// Detach gives the wake-up lock of key back.
func (b *beginner) Detach(key string) error {
	return server.Exec(context.Background(), b.Conn.Conn, b.l.releaseWakeUpsSQL(key))
}

// TestBeginLostAnswer: the answer to the statement that takes the lease and begins comes
// too late, or never. The lease is not left behind, and the connection is not used again.
func TestBeginLostAnswer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, late := range []bool{true, false} {
			l := s.locker(setup{})
			b := l.beginner(nil)
			free := b.begun("k")
			s.back(free, free.Release())
			s.Exec(b.Conn.Conn, "ROLLBACK")
			before := s.row("k").token
			arrive := l.tap.Stall(s.takes())
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			failed := dbtest.Go(func() error { return dbtest.Err(b.begin(ctx, waiting("k", time.Minute))) })
			dbtest.Soon(t, "it is granted", func() bool { return s.row("k").token == before+1 })
			if late {
				cancel()
			} else {
				l.tap.Break() // once: it is asked for again, and then the connection is found to be gone
			}
			left := time.Now()
			err := <-failed
			switch {
			case late && time.Since(left) > 9*time.Second: // its connection reads for longer
				t.Errorf("a caller that has gone was told after %v", time.Since(left))
			case late && (!errors.Is(err, context.Canceled) || b.Clean() || b.with.Begun):
				t.Errorf("cancelled: %v, clean %v", err, b.Clean())
			case !late && errors.Is(err, lockerr.ErrExhausted) && time.Since(left) >= background/5: // what it was granted could not be given back in time for that
				if b.with.Begun || b.Clean() {
					t.Errorf("broken: begun %v, clean %v", b.with.Begun, b.Clean())
				}
			case !late && (err != nil || b.with.Begun || b.Clean()):
				t.Errorf("broken: %v, begun %v, clean %v", err, b.with.Begun, b.Clean())
			case !late && s.row("k").token != before+2:
				t.Errorf("broken: %+v after %d", s.row("k"), before)
			}
			arrive()
			cancel()
			if late {
				dbtest.Soon(t, "it is given back", func() bool { return !s.row("k").live && s.wakeUps("k") == 0 })
			}
			l.close()
			_ = b.Conn.Conn.Close()
		}
	})
}

// TestBeginArrivesLate: a statement whose caller has gone reaches the server too late to
// be granted anything, since its connection has been closed there.
func TestBeginArrivesLate(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		b := l.beginner(nil)
		dbtest.OK(t, b.begun("k").Release())
		s.Exec(b.Conn.Conn, "ROLLBACK")
		dbtest.OK(t, b.Detach("k"))
		arrive := l.tap.Delay(s.takes())
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		sent := l.tap.Texts()
		failed := dbtest.Go(func() error { return dbtest.Err(b.begin(ctx, waiting("k", time.Minute))) })
		dbtest.Soon(t, "it is sent", func() bool { return count(sent(), s.takes()) > 0 })
		cancel()
		dbtest.Is(t, "who gave up", <-failed, context.Canceled)
		next := l.acquire(waiting("k", 25*time.Second)) // once it is sure that it is not granted
		dbtest.OK(t, next.Release())
		arrive()
		if r := s.row("k"); r.live || r.token != next.Token() {
			t.Errorf("%+v, the token of the last grant is %d", r, next.Token())
		}
	})
}

// TestBeginKilled: a KILL QUERY that comes between the grant and the answer, or before it.
func TestBeginKilled(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, after := range []bool{true, false} {
			l := s.locker(setup{})
			k := &dbtest.Disturbed{After: after}
			b := l.beginner(func(conn driver.Conn) driver.Conn { k.Conn = conn; return k })
			dbtest.OK(t, b.begun("k").Release())
			s.Exec(b.Conn.Conn, "ROLLBACK")
			before := s.row("k").token
			k.Err = dbtest.Interrupted
			k.At = beginning(s.takes())
			_, err := b.begin(dbtest.Limited(t), request("k"))
			if server.Number(err) != 1317 || b.with.Begun || b.Clean() {
				t.Errorf("after %v: %v, begun %v, clean %v", after, err, b.with.Begun, b.Clean())
			}
			next := l.acquire(waiting("k", 25*time.Second))
			if got := next.Token() - before; got != 1 && !after || got != 2 && after {
				t.Errorf("after %v: the next token is %d more", after, got)
			}
			dbtest.OK(t, next.Release())
			_ = k.Conn.Close()
		}
	})
}

// TestDisturbedRelease: as TestDisturbedCommit, for the commit that releases the lease.
func TestDisturbedRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY AUTO_INCREMENT)")
		cases := dbtest.DisturbedCommits()
		cases["undisturbed"] = dbtest.DisturbedCommit{Committed: true, Done: true}
		if s.MariaDB() {
			cases["killed right after COMMIT"] = dbtest.DisturbedCommit{Disturbed: interrupted("COMMIT;", true), Committed: true, Unknown: true}
			cases["killed at the release"] = dbtest.DisturbedCommit{Disturbed: interrupted("DO RELEASE_LOCK", false), Committed: true, Done: true}
			cases["killed at the check"] = dbtest.DisturbedCommit{Disturbed: interrupted("IF ROW_COUNT()", false)}
			cases["killed at COMMIT"] = dbtest.DisturbedCommit{Disturbed: interrupted("COMMIT;", false)}
		}
		for name, c := range cases {
			l, k := s.locker(setup{}), c.Disturbed
			b := l.beginner(func(conn driver.Conn) driver.Conn { k.Conn = conn; return &k })
			lost := make(chan error, 1)
			r := request("k")
			r.Lost = func(err error) { lost <- err }
			lease, err := b.begin(dbtest.Limited(t), r)
			dbtest.OK(t, err)
			s.Exec(b.Conn.Conn, "INSERT INTO written () VALUES ()")
			before := s.written()
			k.At = beginning(s.gives())
			done, unknown, err := l.CommitAndRelease(dbtest.Limited(t), b.Conn, lease)
			if done != c.Done || unknown != c.Unknown || (err == nil) != c.Done || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: done %v, unknown %v, %v", name, done, unknown, err)
			}
			k.At, k.Next = nil, nil
			s.Exec(b.Conn.Conn, "ROLLBACK")
			s.back(lease, lease.Release())
			dbtest.OK(t, lease.Detach())
			if n := s.written() - before; n == 1 != c.Committed {
				t.Errorf("%s: %d are written", name, n)
			}
			if s.row("k").live || s.wakeUps("k") != 0 {
				t.Errorf("%s: afterwards %+v, %d wake-up locks", name, s.row("k"), s.wakeUps("k"))
			}
			select {
			case err := <-lost:
				t.Errorf("%s: lost: %v", name, err)
			default:
			}
			dbtest.OK(t, l.acquire(request("k")).Release())
			l.close()
			_ = k.Conn.Close()
		}
	})
}

// TestReleaseChecks: what is not held any more is not committed, nor released.
func TestReleaseChecks(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY AUTO_INCREMENT)")
		for name, take := range map[string]func(){
			"stolen":  func() { s.steal("k") },
			"run out": func() { s.set("k", "expires = UTC_TIMESTAMP(6)") },
			"removed": func() { s.set("k", "name = x'00'") },
		} {
			l := s.locker(setup{})
			b := l.beginner(nil)
			lease := b.begun("k")
			dbtest.OK(t, server.Exec(t.Context(), b.Conn.Conn, "INSERT INTO written () VALUES ()"))
			take()
			committed, unknown, err := l.CommitAndRelease(dbtest.Limited(t), b.Conn, lease)
			if committed || !errors.Is(err, lockerr.ErrLost) || unknown {
				t.Errorf("%s: committed %v, %v", name, committed, err)
			}
			s.Exec(b.Conn.Conn, "ROLLBACK")
			dbtest.Is(t, name+": Release", lease.Release(), lockerr.ErrLost)
			dbtest.OK(t, lease.Detach())
			if name == "stolen" && !s.row("k").live {
				t.Error("the thief's lease is released")
			}
			if s.wakeUps("k") != 0 {
				t.Errorf("%s: the wake-up lock is kept", name)
			}
			dbtest.OK(t, b.Conn.Conn.Close())
			l.close()
			dbtest.Exec(t, s.db, "DELETE FROM "+s.table.String()+" WHERE name <> x''")
		}
		dbtest.Equal(t, "%d are written", s.written(), 0)
	})
}

// TestReleaseWaits: a commit that releases decides by the row as it is once it has got it, and
// by the time that it is then.
func TestReleaseWaits(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.beginner(nil).begun("known").Release())
		var all dbtest.Together
		defer all.Wait()
		for _, level := range []string{"READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"} {
			for name, c := range map[string]struct {
				assignments string
				committed   bool
			}{
				"renewed": {"expires = expires + INTERVAL 1 SECOND", true},
				"run out": {"expires = UTC_TIMESTAMP(6) + INTERVAL 200000 MICROSECOND", false},
				"stolen":  {"owner = 'thief#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR", false},
			} {
				all.Run(t, level+", "+name, func(t *testing.T) {
					key := level + name
					b := l.beginner(nil)
					s.Exec(b.Conn.Conn, "SET SESSION TRANSACTION ISOLATION LEVEL "+level)
					lease := b.begun(key)
					tx := dbtest.Begin(t, context.Background(), s.db)
					dbtest.Exec(t, tx, "UPDATE "+s.table.String()+" SET "+c.assignments+" WHERE namespace = ? AND name = ?", s.Name, key)
					time.AfterFunc(400*time.Millisecond, func() { _ = tx.Commit() })
					committed, unknown, err := l.CommitAndRelease(dbtest.Limited(t), b.Conn, lease)
					if committed != c.committed || unknown || (err == nil) != c.committed || err != nil && !errors.Is(err, lockerr.ErrLost) {
						t.Errorf("committed %v, %v", committed, err)
					}
					if !committed {
						s.Exec(b.Conn.Conn, "ROLLBACK")
					}
					_ = lease.Release()
					dbtest.OK(t, errors.Join(lease.Detach(), b.Conn.Conn.Close()))
				})
			}
		}
	})
}

// TestRenewalBesideRelease: a renewal that comes after the commit has released the lease,
// and before its caller knows of that, makes no lost lease of it.
func TestRenewalBesideRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, k := s.locker(setup{}), &dbtest.Disturbed{}
		b := l.beginner(func(conn driver.Conn) driver.Conn { k.Conn = conn; return k })
		lost := make(chan error, 1)
		r := request("k")
		r.Lost = func(err error) { lost <- err }
		lease, err := b.begin(dbtest.Limited(t), r)
		dbtest.OK(t, err)
		k.At = beginning(s.gives())
		k.Then = func() {
			l.renew([]*Lease{lease}, time.Second)
			dbtest.OK(t, l.renewBehind(dbtest.Limited(t), lease))
		}
		committed, _, err := l.CommitAndRelease(dbtest.Limited(t), b.Conn, lease)
		if err != nil || !committed {
			t.Errorf("committed %v, %v", committed, err)
		}
		dbtest.OK(t, lease.Err())
		dbtest.OK(t, lease.Release())
		select {
		case err := <-lost:
			t.Errorf("lost: %v", err)
		default:
		}
		dbtest.OK(t, b.Conn.Conn.Close())
	})
}

// TestBeginWithoutProcedures: where they may not be made, or are dropped while they are in
// use, leases are taken apart, and the commit is one without the release.
func TestBeginWithoutProcedures(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("there the same is an anonymous block")
		}
		drop := func() {
			for _, name := range []string{s.table.TakeProcedure().String(), s.table.GiveProcedure().String()} {
				dbtest.Exec(t, s.db, "DROP PROCEDURE IF EXISTS "+name)
			}
		}
		l := s.locker(setup{})
		b := l.beginner(nil)
		lease := b.begun("k")
		drop()
		if committed, _, err := l.CommitAndRelease(dbtest.Limited(t), b.Conn, lease); err != nil || !committed {
			t.Errorf("committed %v, %v", committed, err)
		}
		dbtest.OK(t, errors.Join(lease.Release(), lease.Detach()))
		if s.row("k").live || s.wakeUps("k") != 0 {
			t.Errorf("afterwards %+v, %d wake-up locks", s.row("k"), s.wakeUps("k"))
		}

		other := s.locker(setup{})
		b = other.beginner(nil)
		dbtest.OK(t, b.begun("k").Release()) // which has made them again
		s.Exec(b.Conn.Conn, "ROLLBACK")
		dbtest.OK(t, b.Detach("k"))
		drop()
		lease, err := b.begin(dbtest.Limited(t), request("k"))
		if err != nil || b.with.Begun || !b.Clean() {
			t.Fatalf("dropped: %v, begun %v, clean %v", err, b.with.Begun, b.Clean())
		}
		dbtest.OK(t, lease.Release())
	})
}
