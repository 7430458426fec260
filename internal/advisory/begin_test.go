package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// takes is how the statement begins that takes a lock on a session, and the guard of its COMMIT.
const takes = "SELECT " + server.Untimed + "IF(CONNECTION_ID() = "

// TestATransactionHoldsItsLockOnItsSession: one statement takes the lock on the session, and begins no transaction.
// What checks and releases it goes out with the COMMIT; after a ROLLBACK one statement releases it.
func TestATransactionHoldsItsLockOnItsSession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(settings{}), s.process(settings{})
		for name, send := range forms {
			for _, commit := range []bool{true, false} {
				what := fmt.Sprintf("%s, commit %v", name, commit)
				var mine dbtest.Tap
				w := p.writer(s.session(mine.On))
				dbtest.OK(t, w.Identify(dbtest.Limited(t)))
				sent := mine.Texts()
				lock, err := w.take(0)
				dbtest.OK(t, err)
				if texts := sent(); len(texts) != 1 || !strings.HasPrefix(texts[0], takes) || lock.ConnectionID() != w.KnownID() || w.puts != 0 {
					t.Errorf("%s: %d has it, and the session was given back %d times: %q", what, lock.ConnectionID(), w.puts, texts)
				}
				s.Exec(s.open(), "INSERT INTO "+s.written()+" VALUES (2)")
				seen := s.One(w.Conn.Conn, "SELECT COUNT(*) FROM "+s.written()+" WHERE n = 2")
				dbtest.Equal(t, what+": the snapshot is older than the first read: %s", seen, "1")
				s.Exec(s.open(), "DELETE FROM "+s.written())
				s.Exec(w.Conn.Conn, "INSERT INTO "+s.written()+" VALUES (1)")
				dbtest.Is(t, what+": another process", dbtest.Err(other.Acquire(dbtest.Limited(t), request("k", 0))), lockerr.ErrLocked)
				if h := other.Holder(dbtest.Limited(t), "k"); h == nil || h.ConnectionID != w.KnownID() {
					t.Errorf("%s: %+v is said to have it", what, h)
				}
				sent = mine.Texts()
				if commit {
					w.commits(send, lock)
					if !errors.Is(lock.Err(), lockerr.ErrClosed) || s.holder(s.open(), "k") != "" {
						t.Errorf("%s: it is held: %v", what, lock.Err())
					}
				} else {
					s.Exec(w.Conn.Conn, "ROLLBACK")
				}
				released(t, lock)
				if texts := sent(); len(texts) != map[bool]int{true: map[string]int{"packet": 1, "single": 3}[name], false: 2}[commit] {
					t.Errorf("%s: %q", what, texts)
				}
				released(t, lock)
				dbtest.OK(t, other.acquire("k", 0).Release())
				s.wantWritten(what, map[bool]int{true: 1}[commit])
				w.clean(what)
				w.takesNext()
			}
		}
	})
}

// TestALockIsOnALockConnectionWithoutASession: a caller that lends no session, or is not the first in its process, has the
// lock on a lock connection, and so has one where lockUnsafe allows it.
func TestALockIsOnALockConnectionWithoutASession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		elsewhere := func(what string, w *writer, lock *advisory.Grant, err error) {
			t.Helper()
			dbtest.OK(t, err)
			if id := s.holder(s.open(), "k"); id == "" || id == fmt.Sprint(w.KnownID()) || w.gets != w.puts {
				t.Errorf("%s: %q has it, the session was lent %d times, and given back %d times", what, id, w.gets, w.puts)
			}
			w.commits(server.SendPacket, lock) // which does not release it
			dbtest.OK(t, lock.Detach())
			p.held(s.open(), lock)
			dbtest.OK(t, lock.Release())
			w.clean(what)
		}
		w := p.writer(s.session())
		lock, err := p.Acquire(dbtest.Limited(t), request("k", 0))
		elsewhere("nothing lent", w, lock, err)
		w = p.writer(s.session())
		w.none = errors.New("there is none")
		lock, err = w.take(0)
		elsewhere("no session", w, lock, err)
		for what, change := range map[string]func(*strategy.Config){
			"cluster": func(cfg *strategy.Config) { cfg.Info.Topology, cfg.Unsafe = server.Galera, true },
			"unsafe":  func(cfg *strategy.Config) { cfg.Unsafe = true },
		} {
			w := s.process(settings{change: change}).writer(s.session())
			lock, err := w.take(0)
			elsewhere(what, w, lock, err)
		}
		first, held := p.onSession(s.session())
		w = p.writer(s.session())
		next := w.takesLater()
		p.inQueue("k", 1)
		first.commits(server.SendPacket, held)
		dbtest.OK(t, held.Release())
		elsewhere("second in the queue", w, <-next, nil)
	})
}

// TestARefusedCallerGivesItsSessionBack: a caller that is refused, or has to wait, has given its session back before,
// with nothing left on it.
func TestARefusedCallerGivesItsSessionBack(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(settings{}), s.process(settings{})
		theirs := other.acquire("k", 0)
		var mine dbtest.Tap
		w := p.writer(s.session(mine.On))
		dbtest.OK(t, w.Identify(dbtest.Limited(t)))
		sent := mine.Texts()
		_, err := w.take(0)
		dbtest.Is(t, "no wait", err, lockerr.ErrLocked)
		if texts := sent(); len(texts) != 1 || w.puts != 1 || !w.Clean() {
			t.Errorf("given back %d times, clean %v: %q", w.puts, w.Clean(), texts)
		}
		w.clean("refused")
		w = p.writer(s.session())
		granted := w.takesLater()
		look := s.open()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(look, "k")) == 1 })
		dbtest.OK(t, w.AwaitTurn(dbtest.Limited(t))) // it was given back
		w.clean("waits")
		w.EndTurn()
		dbtest.OK(t, theirs.Release())
		lock := <-granted
		if lock.ConnectionID() == w.KnownID() || w.puts != 1 {
			t.Errorf("the session has it, and was given back %d times", w.puts)
		}
		dbtest.OK(t, lock.Release())

		s.Exec(s.open(), "SET GLOBAL read_only = 1")
		w = p.writer(s.session())
		_, err = w.take(0)
		dbtest.Is(t, "a server that takes no writes", err, lockerr.ErrUnsafe)
		if s.holder(s.open(), "k") != "" || w.puts != 1 {
			t.Errorf("%q has it; given back %d times", s.holder(s.open(), "k"), w.puts)
		}
	})
}

// TestASessionThatNobodyHearsOfLosesItsLock: the server ends a session of which it hears nothing.
func TestASessionThatNobodyHearsOfLosesItsLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		conn := s.session()
		s.Exec(conn, "SET SESSION wait_timeout = 3")
		s.process(settings{}).onSession(conn)
		s.free(s.open(), "k")
		s.wantWritten("stands still", 0)
	})
}

// TestCloseKeepsNobodyFromCommitting: Close keeps nobody from committing, or from detaching.
func TestCloseKeepsNobodyFromCommitting(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, commit := range []bool{true, false} {
			p := s.process(settings{})
			w, lock := p.onSession(s.session())
			p.Close()
			if commit {
				w.commits(server.SendPacket, lock)
			} else {
				s.Exec(w.Conn.Conn, "ROLLBACK")
			}
			released(t, lock)
			w.clean(fmt.Sprintf("commit %v", commit))
			dbtest.Is(t, "after Close", dbtest.Err(w.take(0)), lockerr.ErrClosed)
		}
	})
}

// TestACallerThatLeavesGetsNoLockOnItsSession: a caller that leaves before the answer has no lock, and its session goes.
func TestACallerThatLeavesGetsNoLockOnItsSession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		var mine dbtest.Tap
		w := p.writer(s.session(mine.On))
		dbtest.OK(t, w.Identify(dbtest.Limited(t)))
		arrive := mine.Stall(takes)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		sent := mine.Texts()
		answer := dbtest.Go(func() error { return dbtest.Err(p.Acquire(ctx, w.request(0))) })
		dbtest.Soon(t, "it asks", func() bool { return len(sent()) == 1 })
		cancel()
		if err := <-answer; !errors.Is(err, context.Canceled) || w.Clean() || w.puts != 1 {
			t.Errorf("%v, clean %v, given back %d times", err, w.Clean(), w.puts)
		}
		arrive()
		other := s.open()
		dbtest.Soon(t, "the session has gone, and what arrives late with it", func() bool {
			return s.One(other, fmt.Sprintf("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID = %d", w.KnownID())) == "0"
		})
		s.free(other, "k")
		p.writer(s.session()).takesNext()
	})
}

// TestALockIsTakenElsewhereWhereItsSessionIsDisturbed: whatever happens to the statement that takes the lock on the
// session, nobody is left with it, and the caller has the lock on a lock connection.
func TestALockIsTakenElsewhereWhereItsSessionIsDisturbed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		for name, c := range dbtest.DisturbedCommits() {
			d := c.Disturbed
			d.Conn, d.At = s.session(), func(text string) bool { return strings.HasPrefix(text, takes) }
			w := p.writer(&d)
			lock, err := w.take(20 * time.Second) // the server may take a moment to end the session
			if err != nil || w.puts != 1 || w.Clean() {
				t.Errorf("%s: %v, given back %d times, clean %v", name, err, w.puts, w.Clean())
				continue
			}
			if id := s.holder(s.open(), "k"); id == "" || id == fmt.Sprint(w.KnownID()) {
				t.Errorf("%s: %q has it", name, id)
			}
			dbtest.OK(t, lock.Release())
		}
	})
}

// TestALockOfALostSessionIsOver: a lock goes with its session, and the next caller of the process can ask for it.
func TestALockOfALostSessionIsOver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		for name, ends := range map[string]func(*advisory.Grant) error{"Release": (*advisory.Grant).Release, "Detach": (*advisory.Grant).Detach} {
			w, lock := p.onSession(s.session())
			w.Taint()
			dbtest.OK(t, w.Close())
			dbtest.OK(t, ends(lock))
			s.free(s.open(), "k")
			if n := p.locks.Queue.Waiting("k"); n != 0 || lock.Err() == nil {
				t.Errorf("%s: %d wait, and it is held: %v", name, n, lock.Err())
			}
			p.writer(s.session()).takesNext()
		}
	})
}

// session is a connection that is not in autocommit, and takes several statements in a text.
func (s *scratch) session(opts ...func(*mysql.Config)) driver.Conn {
	s.T.Helper()
	conn := s.Connect(append([]func(*mysql.Config){dbtest.With("multiStatements=true")}, opts...)...)
	s.Exec(conn, "SET autocommit = 0")
	return conn
}
