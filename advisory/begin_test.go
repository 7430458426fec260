package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// begin asks for a lock, and for a transaction that may begin meanwhile.
func (w *writer) begin(ctx context.Context, wait time.Duration) (*advisory.Lock, error) {
	if w.b.Connect == nil {
		w.b.Connect, w.b.Done = connects(w), w.EndTurn
	}
	r := request("k", wait)
	r.Begin = strategy.NewBeginning(w.b.Connect, func(bool) { w.b.Done() })
	r.Begin.Options, r.Begin.Ends = w.b.Options, w.b.Ends
	if w.b.Free != nil {
		r.Begin.Free = w.b.Free
	}
	lock, err := w.p.Acquire(ctx, r)
	var whole bool
	if w.b.Begun, whole = r.Begin.Conclude(); !whole {
		w.p.T.Error("the connection is still in use")
	}
	return lock, err
}

// begins is begin in the background, which must be granted.
func (w *writer) begins(wait time.Duration) <-chan *advisory.Lock {
	granted := make(chan *advisory.Lock, 1)
	go func() {
		lock, err := w.begin(dbtest.Limited(w.p.T), wait)
		if err != nil {
			w.p.T.Error(err)
		}
		granted <- lock
	}()
	return granted
}

// leaves is begin in the background, by a caller that may leave, and how it ended.
func (w *writer) leaves(ctx context.Context) <-chan error {
	return dbtest.Go(func() error { return dbtest.Err(w.begin(ctx, 0)) })
}

// released releases the lock, and takes it off the transaction's connection.
func released(t testing.TB, lock *advisory.Lock) {
	t.Helper()
	dbtest.OK(t, errors.Join(lock.Release(), lock.Detach()))
}

// commits commits, and releases the lock with that.
func (w *writer) commits(lock *advisory.Lock) {
	w.p.T.Helper()
	if done, unknown, err := w.check(lock).Release(dbtest.Limited(w.p.T)); !done || unknown || err != nil {
		w.p.T.Errorf("done %v, unknown %v, %v", done, unknown, err)
	}
}

// connects gives the turn of w's connection.
func connects(w *writer) func(context.Context) (*pool.Conn, error) {
	return func(ctx context.Context) (*pool.Conn, error) { return w.Conn, w.AwaitTurn(ctx) }
}

// tapped is process with a tap on the connections that have locks.
func (s *scratch) tapped(set settings) (*process, *dbtest.Tap) {
	s.T.Helper()
	cfg, tap := s.config(), new(dbtest.Tap)
	tap.On(cfg)
	set.connect = dbtest.Connector(s.T, cfg).Connect
	return s.process(set), tap
}

// TestTheTransactionBeginsWhileTheLockIsAskedFor: the transaction begins while the lock is asked
// for, and shows what was committed until it was granted.
func TestTheTransactionBeginsWhileTheLockIsAskedFor(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var mine dbtest.Tap
		p, locks := s.tapped(settings{change: s.inDatabase})
		w := p.writer(s.Connect(mine.On))
		lock, err := w.begin(dbtest.Limited(t), 0)
		dbtest.OK(t, err)
		s.Exec(w.Conn.Conn, "ROLLBACK")
		w.knows(lock)
		dbtest.OK(t, lock.Release())

		arrive := locks.Stall("SELECT IF(CONNECTION_ID()")
		sent, granted := mine.Texts(), w.begins(0)
		dbtest.Soon(t, "it begins", func() bool { return len(sent()) == 1 })
		s.Exec(s.open(), "INSERT INTO "+s.written()+" VALUES (1)")
		arrive()
		lock = <-granted
		if texts := sent(); !w.b.Begun || len(texts) != 1 || texts[0] != "START TRANSACTION" {
			t.Errorf("begun %v: %q", w.b.Begun, texts)
		}
		dbtest.Equal(t, "the transaction sees %s rows", s.One(w.Conn.Conn, "SELECT COUNT(*) FROM "+s.written()), "1")
		s.Exec(w.Conn.Conn, "INSERT INTO "+s.written()+" VALUES (2)")
		s.wantWritten("it has begun", 1)
		if done, _, err := w.check(lock).Commit(dbtest.Limited(t)); !done || err != nil {
			t.Errorf("%v, %v", done, err)
		}
		s.wantWritten("it has committed", 2)
		dbtest.OK(t, lock.Release())
	})
}

// TestARefusedCallerHasNoTransaction: a caller that is refused, or has to wait, has no transaction,
// and its connection has been given back before the wait.
func TestARefusedCallerHasNoTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOverTime = time.Minute }}) // on a busy machine, too
		other := s.process(settings{})
		var mine dbtest.Tap
		w := p.writer(s.Connect(mine.On))
		theirs := other.acquire("k", 0)
		idle := func() {
			t.Helper()
			if texts := mine.Texts(); len(texts()) != 0 {
				t.Errorf("%q", texts())
			}
			dbtest.OK(t, w.AwaitTurn(dbtest.Limited(t)))
			w.EndTurn()
			s.Exec(w.Conn.Conn, "INSERT INTO "+s.written()+" VALUES (1)")
			s.Exec(w.Conn.Conn, "ROLLBACK") // there is nothing to roll back
		}
		sent := mine.Texts()
		if _, err := w.begin(dbtest.Limited(t), 0); !errors.Is(err, lockerr.ErrLocked) || w.b.Begun {
			t.Errorf("no wait: %v, begun %v", err, w.b.Begun)
		}
		dbtest.Equal(t, "sent %q", strings.Join(sent(), "; "), "START TRANSACTION; ROLLBACK")
		idle()
		s.wantWritten("no wait", 1)

		granted := w.begins(20 * time.Second)
		look := s.open()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(look, "k")) == 1 })
		idle()
		s.wantWritten("meanwhile", 2)
		two := p.writer(s.Connect(mine.On))
		sent = mine.Texts()
		second := two.begins(20 * time.Second) // in the queue behind it: the lock is handed over
		p.inQueue("k", 1)
		dbtest.OK(t, theirs.Release())
		lock := <-granted
		dbtest.OK(t, lock.Release())
		dbtest.OK(t, (<-second).Release())
		if w.b.Begun || two.b.Begun || len(sent()) != 0 {
			t.Errorf("begun %v, %v: %q", w.b.Begun, two.b.Begun, sent())
		}
	})
}

// TestTheLockIsTakenWhereNothingCanBegin: where no transaction can begin, or its options are more
// than a BEGIN, or no connection is free, the lock is taken all the same.
func TestTheLockIsTakenWhereNothingCanBegin(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		for what, change := range map[string]func(w *writer){
			"options":      func(w *writer) { w.b.Options.ReadOnly = true },
			"nothing free": func(w *writer) { w.b.Free = func() bool { return false } },
			"it is broken": func(w *writer) { dbtest.OK(t, w.Close()) },
		} {
			w := p.writer(s.Connect())
			change(w)
			lock, err := w.begin(dbtest.Limited(t), 0)
			if err != nil || w.b.Begun {
				t.Fatalf("%s: %v, begun %v", what, err, w.b.Begun)
			}
			dbtest.OK(t, w.AwaitTurn(dbtest.Limited(t))) // its turn was given back
			w.EndTurn()
			dbtest.OK(t, lock.Release())
		}
	})
}

// TestBeginIsCancelled: who leaves before the answer has neither the lock nor a transaction.
func TestBeginIsCancelled(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, locks := s.tapped(settings{})
		var mine dbtest.Tap
		w := p.writer(s.Connect(mine.On))
		dbtest.OK(t, p.acquire("other", 0).Release()) // there is a lock connection
		arrive := locks.Stall("SELECT IF(CONNECTION_ID()")
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		sent, answer := mine.Texts(), w.leaves(ctx)
		dbtest.Soon(t, "it begins", func() bool { return len(sent()) == 1 })
		cancel()
		if err := <-answer; !errors.Is(err, context.Canceled) || w.b.Begun {
			t.Errorf("%v, begun %v", err, w.b.Begun)
		}
		if got := strings.Join(sent(), "; "); got != "START TRANSACTION; ROLLBACK" && w.Clean() { // it may have left before BEGIN was answered
			t.Errorf("sent %q", got)
		}
		arrive()
		look := s.open()
		s.free(look, "k")
		dbtest.OK(t, w.AwaitTurn(dbtest.Limited(t)))
		w.EndTurn()
	})
}

// TestBeginTakesItsConnectionLast: while a lock connection is opened nobody has one of the
// application.
func TestBeginTakesItsConnectionLast(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		w, open := p.writer(s.Connect()), 0
		w.b.Connect, w.b.Done = func(ctx context.Context) (*pool.Conn, error) {
			open = p.conns.Stat().InUse
			return connects(w)(ctx)
		}, w.EndTurn
		lock, err := w.begin(dbtest.Limited(t), 0)
		if err != nil || !w.b.Begun || open != 1 {
			t.Fatalf("%v, begun %v; with %d lock connections", err, w.b.Begun, open)
		}
		s.Exec(w.Conn.Conn, "ROLLBACK")
		dbtest.OK(t, lock.Release())
	})
}

// txConns is a process that knows how to begin a transaction with the lock.
func (s *scratch) txConns(set settings) *process {
	s.T.Helper()
	change := set.change
	set.change = func(cfg *strategy.Config) {
		s.inDatabase(cfg)
		if change != nil {
			change(cfg)
		}
	}
	p := s.process(set)
	w := p.writer(s.Connect())
	dbtest.Soon(s.T, "it is known how to begin", func() bool {
		lock, err := w.txConn()
		dbtest.OK(s.T, err)
		s.Exec(w.Conn.Conn, "ROLLBACK")
		carried := lock.ConnectionID() == w.KnownID()
		dbtest.OK(s.T, lock.Release())
		dbtest.OK(s.T, lock.Detach())
		return carried
	})
	return p
}

// txConn begins a transaction with a lock that ends with it, or says why not at once. From then
// on the test has the turn of the connection, so that nobody pings it.
func (w *writer) txConn() (*advisory.Lock, error) {
	if w.b.Connect == nil {
		turn := connects(w)
		w.b.Done = func() {}
		w.b.Connect = func(ctx context.Context) (*pool.Conn, error) {
			c, err := turn(ctx)
			turn = func(context.Context) (*pool.Conn, error) { return w.Conn, nil }
			return c, err
		}
	}
	w.b.Ends = true
	return w.begin(dbtest.Limited(w.p.T), 0)
}

// onTxConn is a writer whose transaction, in which it has written a row, holds the lock.
func (p *process) onTxConn(conn driver.Conn) (*writer, *advisory.Lock) {
	p.T.Helper()
	w := p.writer(conn)
	lock, err := w.txConn()
	dbtest.OK(p.T, err)
	if !w.b.Begun || lock.ConnectionID() != w.KnownID() {
		p.T.Fatalf("begun %v, and %d has the lock", w.b.Begun, lock.ConnectionID())
	}
	p.Exec(conn, "INSERT INTO "+p.written()+" VALUES (1)")
	return w, lock
}

// clean says that the connection carries nothing of a lock, and no transaction.
func (w *writer) clean(what string) {
	w.p.T.Helper()
	dbtest.Equal(w.p.T, what+": it has %s named locks", w.p.One(w.Conn.Conn, "SELECT RELEASE_ALL_LOCKS()"), "0")
	dbtest.Equal(w.p.T, what+": its wait_timeout differs by %s", w.p.One(w.Conn.Conn, "SELECT @@SESSION.wait_timeout - @@GLOBAL.wait_timeout"), "0")
	w.p.Exec(w.Conn.Conn, "INSERT INTO "+w.p.written()+" VALUES (0)")
	w.p.Exec(w.Conn.Conn, "ROLLBACK") // there is nothing to roll back
	if n := w.p.One(w.p.open(), "SELECT COUNT(*) FROM "+w.p.written()+" WHERE n = 0"); n != "1" {
		w.p.T.Errorf("%s: a transaction is open", what)
	}
	w.p.Exec(w.Conn.Conn, "DELETE FROM "+w.p.written())
}

// TestATransactionBeginsWithItsLockAndEndsWithIt: one statement begins a transaction with the lock,
// on its own connection, and one checks it, commits and releases it. After a ROLLBACK one statement
// releases it.
func TestATransactionBeginsWithItsLockAndEndsWithIt(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.txConns(settings{}), s.process(settings{})
		var mine dbtest.Tap
		conn := s.Connect(mine.On)
		for _, commit := range []bool{true, false} {
			what := fmt.Sprintf("commit %v", commit)
			sent := mine.Texts()
			w := p.writer(conn)
			known := len(sent())
			lock, err := w.txConn()
			dbtest.OK(t, err)
			if texts := sent()[known:]; !w.b.Begun || len(texts) != 2 || !strings.Contains(texts[0], "@@hostname") { // which server it is, once
				t.Errorf("%s: begun %v: %q", what, w.b.Begun, texts)
			}
			s.Exec(conn, "INSERT INTO "+s.written()+" VALUES (1)")
			dbtest.Is(t, what+": another process", dbtest.Err(other.Acquire(dbtest.Limited(t), request("k", 0))), lockerr.ErrLocked)
			dbtest.Equal(t, what+": the server would end it after %s s", s.One(conn, "SELECT @@SESSION.wait_timeout"), "30")
			if h := other.Holder(dbtest.Limited(t), "k"); h == nil || h.ConnectionID != w.KnownID() {
				t.Errorf("%s: %+v is said to have it", what, h)
			}
			sent = mine.Texts()
			if commit {
				w.commits(lock)
			} else {
				s.Exec(conn, "ROLLBACK")
			}
			released(t, lock)
			if texts := sent(); len(texts) != map[bool]int{true: 1, false: 2}[commit] {
				t.Errorf("%s: %q", what, texts)
			}
			released(t, lock)
			dbtest.OK(t, other.acquire("k", 0).Release())
			s.wantWritten(what, map[bool]int{true: 1}[commit])
			w.clean(what)
			p.acquireNext(w)
		}
	})
}

// acquireNext makes sure that nobody of the process has the lock, and that its own queue for it
// goes on.
func (p *process) acquireNext(w *writer) {
	p.T.Helper()
	lock, err := w.txConn()
	dbtest.OK(p.T, err)
	p.Exec(w.Conn.Conn, "ROLLBACK")
	released(p.T, lock)
}

// TestALockThatMayOutliveItsTransactionIsOnALockConnection: a caller that does not come first, or
// whose lock may outlive the transaction, or who has options, has the lock on a lock connection,
// and so have those on a server that has no way.
func TestALockThatMayOutliveItsTransactionIsOnALockConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		elsewhere := func(what string, w *writer, lock *advisory.Lock, err error) {
			t.Helper()
			dbtest.OK(t, err)
			if lock.ConnectionID() == w.KnownID() {
				t.Errorf("%s: the transaction has it", what)
			}
			dbtest.OK(t, lock.Detach()) // that has nothing to do
			if s.holder(s.open(), "k") == "" {
				t.Errorf("%s: nobody has it", what)
			}
			s.Exec(w.Conn.Conn, "ROLLBACK")
			dbtest.OK(t, lock.Release())
		}
		w := p.writer(s.Connect())
		lock, err := w.begin(dbtest.Limited(t), 0)
		elsewhere("may outlive it", w, lock, err)
		w = p.writer(s.Connect())
		w.b.Options.ReadOnly = true
		lock, err = w.txConn()
		elsewhere("options", w, lock, err)
		for what, change := range map[string]func(*strategy.Config){
			"Router":  func(cfg *strategy.Config) { cfg.Info.Router = true },
			"cluster": func(cfg *strategy.Config) { cfg.Info.Topology, cfg.Unsafe = server.Galera, true },
			"unsafe":  func(cfg *strategy.Config) { cfg.Unsafe = true },
		} {
			q := s.process(settings{change: func(cfg *strategy.Config) { s.inDatabase(cfg); change(cfg) }})
			w := q.writer(s.Connect())
			for range 3 {
				lock, err := w.txConn()
				elsewhere(what, w, lock, err)
				time.Sleep(10 * time.Millisecond) // it may look for a procedure
			}
		}

		first, held := p.onTxConn(s.Connect())
		w = p.writer(s.Connect())
		w.b.Ends = true
		next := w.begins(20 * time.Second)
		p.inQueue("k", 1)
		first.commits(held)
		dbtest.OK(t, held.Release())
		elsewhere("second in the queue", w, <-next, nil)

		if !s.MariaDB() {
			s.Exec(s.open(), "DROP PROCEDURE "+p.locks.Table.NamedProcedure().String())
			w = p.writer(s.Connect())
			lock, err = w.txConn()
			elsewhere("dropped", w, lock, err)
		}
	})
}

// TestARefusedBeginLeavesNothingOnItsConnection: who is refused has no transaction, and nothing is
// left on the connection.
func TestARefusedBeginLeavesNothingOnItsConnection(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.txConns(settings{}), s.process(settings{})
		theirs := other.acquire("k", 0)
		var mine dbtest.Tap
		w := p.writer(s.Connect(mine.On))
		dbtest.OK(t, w.Identify(dbtest.Limited(t)))
		sent := mine.Texts()
		if _, err := w.txConn(); !errors.Is(err, lockerr.ErrLocked) || w.b.Begun {
			t.Errorf("%v, begun %v", err, w.b.Begun)
		}
		if texts := sent(); len(texts) != 1 {
			t.Errorf("sent %q", texts)
		}
		w.clean("refused")
		w = p.writer(s.Connect())
		w.b.Ends = true
		granted := w.begins(20 * time.Second)
		look := s.open()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(look, "k")) == 1 })
		dbtest.OK(t, w.AwaitTurn(dbtest.Limited(t))) // its connection is free meanwhile
		w.clean("waits")
		w.EndTurn()
		dbtest.OK(t, theirs.Release())
		lock := <-granted
		if w.b.Begun || lock.ConnectionID() == w.KnownID() {
			t.Errorf("begun %v", w.b.Begun)
		}
		dbtest.OK(t, lock.Release())

		// The server does not take writes.
		s.Exec(s.open(), "SET GLOBAL read_only = 1")
		if _, err := w.txConn(); !errors.Is(err, lockerr.ErrUnsafe) || w.b.Begun {
			t.Errorf("read_only: %v, begun %v", err, w.b.Begun)
		}
	})
}

// TestALockThatLeftItsTransactionCommitsNothing: what the transaction's connection does not have
// any more is not committed; and the server ends a connection of which it hears nothing.
func TestALockThatLeftItsTransactionCommitsNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		w, lock := p.onTxConn(s.Connect())
		s.Exec(w.Conn.Conn, "DO RELEASE_ALL_LOCKS()")
		check := w.check(lock)
		if done, unknown, err := check.Release(dbtest.Limited(t)); done || unknown || err != nil {
			t.Errorf("released by the application: %v, %v, %v", done, unknown, err)
		}
		dbtest.Want(t, check.Fence(dbtest.Limited(t)), lockerr.ErrLost)
		s.Exec(w.Conn.Conn, "ROLLBACK")
		s.wantWritten("released by the application", 0)
		released(t, lock)
		w.clean("released by the application")

		// A process that stands still: nobody pings.
		dead := s.txConns(settings{ttl: 3 * time.Second})
		dead.onTxConn(s.Connect())
		s.free(s.open(), "k")
		s.wantWritten("stands still", 0)
	})
}

// TestAShorterIdleLimitIsKept: an application's own limit is kept where it is shorter.
func TestAShorterIdleLimitIsKept(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		conn := s.Connect()
		s.Exec(conn, "SET SESSION wait_timeout = 7")
		w, lock := p.onTxConn(conn)
		dbtest.Equal(t, "it is %s", s.One(conn, "SELECT @@SESSION.wait_timeout"), "7")
		w.commits(lock)
		dbtest.Equal(t, "it is %s", s.One(conn, "SELECT @@SESSION.wait_timeout"), "7")
	})
}

// TestCloseKeepsNobodyFromCommitting: Close keeps nobody from committing, or from detaching.
func TestCloseKeepsNobodyFromCommitting(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, commit := range []bool{true, false} {
			p := s.txConns(settings{})
			w, lock := p.onTxConn(s.Connect())
			check := w.check(lock)
			p.Close()
			if commit {
				if done, _, err := check.Release(dbtest.Limited(t)); !done || err != nil {
					t.Errorf("%v, %v", done, err)
				}
			} else {
				s.Exec(w.Conn.Conn, "ROLLBACK")
			}
			released(t, lock)
			w.clean(fmt.Sprintf("commit %v", commit))
			dbtest.Is(t, "after Close", dbtest.Err(w.txConn()), lockerr.ErrClosed)
		}
	})
}

// TestACancelledBeginLeavesNeitherLockNorTransaction: who leaves before the answer has neither the
// lock nor a transaction.
func TestACancelledBeginLeavesNeitherLockNorTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		var mine dbtest.Tap
		w := p.writer(s.Connect(mine.On))
		dbtest.OK(t, w.Identify(dbtest.Limited(t)))
		arrive := mine.Stall(s.begins())
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		w.b.Ends = true
		sent, answer := mine.Texts(), w.leaves(ctx)
		dbtest.Soon(t, "it asks", func() bool { return len(sent()) == 1 })
		cancel()
		if err := <-answer; !errors.Is(err, context.Canceled) || w.b.Begun || w.Clean() {
			t.Errorf("%v, begun %v, clean %v", err, w.b.Begun, w.Clean())
		}
		arrive()
		s.free(s.open(), "k")
		p.acquireNext(p.writer(s.Connect()))
	})
}

// begins is how the statement begins that acquires the lock and begins the transaction.
func (s *scratch) begins() string {
	if s.MariaDB() {
		return "BEGIN NOT ATOMIC SET @mysqllock_held"
	}
	return "CALL " + "`" + s.Name + "`.`mysqllock_named1`"
}

// TestALockIsTakenApartWhereItsBeginIsDisturbed: whatever happens to the statement that begins,
// nobody is left with the lock, and the lock is had on a lock connection.
func TestALockIsTakenApartWhereItsBeginIsDisturbed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		for name, c := range dbtest.DisturbedCommits() {
			d := c.Disturbed
			d.Conn, d.At = s.Connect(), func(text string) bool { return strings.HasPrefix(text, s.begins()) }
			w := p.writer(&d)
			w.b.Ends = true
			lock, err := w.begin(dbtest.Limited(t), 20*time.Second) // the server may take a moment to end the connection
			if name == "nothing sent" {                             // the caller may try another connection
				if !errors.Is(err, driver.ErrBadConn) || w.b.Begun || w.Clean() || s.holder(s.open(), "k") != "" {
					t.Errorf("%s: %v, begun %v, clean %v", name, err, w.b.Begun, w.Clean())
				}
				continue
			}
			if err != nil || w.b.Begun || w.Clean() {
				t.Errorf("%s: %v, begun %v, clean %v", name, err, w.b.Begun, w.Clean())
				continue
			}
			if id := s.holder(s.open(), "k"); id == "" || id == fmt.Sprint(w.KnownID()) {
				t.Errorf("%s: %q has it", name, id)
			}
			dbtest.OK(t, lock.Release())
		}
	})
}

// TestDisturbedCommitThatReleases: what becomes of a COMMIT that releases the lock, and whose
// answer is lost or is a KILL.
func TestDisturbedCommitThatReleases(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.txConns(settings{})
		cases := dbtest.DisturbedCommits()
		cases["killed at the release"] = dbtest.DisturbedCommit{Disturbed: dbtest.Disturbed{Text: func(text string) string {
			return strings.Replace(text, "DO RELEASE_LOCK", "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317; DO RELEASE_LOCK", 1)
		}}, Committed: true, Done: true}
		for name, c := range cases {
			if c.Text != nil && !s.MariaDB() {
				continue // the text of a procedure is not ours to change
			}
			d := c.Disturbed
			d.Conn, d.At = s.Connect(), func(text string) bool { return strings.Contains(text, s.commits()) }
			s.Exec(s.open(), "DELETE FROM "+s.written())
			w, lock := p.onTxConn(&d)
			done, unknown, err := w.check(lock).Release(dbtest.Limited(t))
			if done != c.Done || unknown != c.Unknown || (err == nil) != c.Done || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: done %v, unknown %v, %v", name, done, unknown, err)
			}
			d.Next = nil
			s.Exec(d.Conn, "ROLLBACK")
			s.wantWritten(name, map[bool]int{true: 1}[c.Committed])
			released(t, lock)
			w.clean(name)
		}
	})
}
