package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
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

// TestBegin: the transaction begins while the lock is asked for, and shows what was committed
// until it was granted.
func TestBegin(t *testing.T) {
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
		sent, granted := mine.Texts(), make(chan error, 1)
		go func() {
			var err error
			lock, err = w.begin(dbtest.Limited(t), 0)
			granted <- err
		}()
		dbtest.Soon(t, "it begins", func() bool { return len(sent()) == 1 })
		s.Exec(s.open(), "INSERT INTO "+s.written()+" VALUES (1)")
		arrive()
		dbtest.OK(t, <-granted)
		if texts := sent(); !w.b.Begun || len(texts) != 1 || texts[0] != "START TRANSACTION" {
			t.Errorf("begun %v: %q", w.b.Begun, texts)
		}
		if n := s.One(w.Conn.Conn, "SELECT COUNT(*) FROM "+s.written()); n != "1" {
			t.Errorf("the transaction sees %s rows", n)
		}
		s.Exec(w.Conn.Conn, "INSERT INTO "+s.written()+" VALUES (2)")
		s.wantWritten("it has begun", 1)
		if done, _, err := w.check(lock).Commit(dbtest.Limited(t)); !done || err != nil {
			t.Errorf("%v, %v", done, err)
		}
		s.wantWritten("it has committed", 2)
		dbtest.OK(t, lock.Release())
	})
}

// TestBeginInVain: a caller that is refused, or has to wait, has no transaction, and its
// connection has been given back before the wait.
func TestBeginInVain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(settings{}), s.process(settings{})
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
		if got := strings.Join(sent(), "; "); got != "START TRANSACTION; ROLLBACK" {
			t.Errorf("sent %q", got)
		}
		idle()
		s.wantWritten("no wait", 1)

		granted := make(chan *advisory.Lock, 1)
		go func() {
			lock, err := w.begin(dbtest.Limited(t), 20*time.Second)
			if err != nil {
				t.Error(err)
			}
			granted <- lock
		}()
		look := s.open()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(look, "k")) == 1 })
		idle()
		s.wantWritten("meanwhile", 2)
		second := make(chan *advisory.Lock, 1)
		two := p.writer(s.Connect(mine.On))
		sent = mine.Texts()
		go func() { // in line behind it: the lock is handed over
			lock, err := two.begin(dbtest.Limited(t), 20*time.Second)
			if err != nil {
				t.Error(err)
			}
			second <- lock
		}()
		p.inLine("k", 1)
		dbtest.OK(t, theirs.Release())
		lock := <-granted
		dbtest.OK(t, lock.Release())
		dbtest.OK(t, (<-second).Release())
		if w.b.Begun || two.b.Begun || len(sent()) != 0 {
			t.Errorf("begun %v, %v: %q", w.b.Begun, two.b.Begun, sent())
		}
	})
}

// TestBeginDoesNotComeOff: where no transaction can begin, or its options are more than a
// BEGIN, or no connection is free, the lock is taken all the same.
func TestBeginDoesNotComeOff(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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

// panicking is a connection whose driver panics, as an interceptor may, before a statement that
// begins so is sent.
type panicking struct {
	mysqlConn
	begin string
}

func (c panicking) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.check(text)
	return c.mysqlConn.ExecContext(ctx, text, args)
}

func (c panicking) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.check(text)
	return c.mysqlConn.QueryContext(ctx, text, args)
}

func (c panicking) check(text string) {
	if strings.HasPrefix(text, c.begin) {
		panic(text)
	}
}

// TestDriverPanicsWhileItBegins: if the driver of the transaction's connection panics, the lock is
// released, whether it was granted before or after, and the next caller of the process gets it.
func TestDriverPanicsWhileItBegins(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		panics := func(w *writer) {
			t.Helper()
			defer func() {
				if recover() == nil {
					t.Error("the driver has not panicked")
				}
			}()
			_, _ = w.begin(dbtest.Limited(t), 0)
		}
		next := func(p *process) {
			t.Helper()
			s.free(s.open(), "k")
			dbtest.OK(t, p.acquire("k", time.Minute).Release())
		}
		p, locks := s.tapped(settings{})
		dbtest.OK(t, p.acquire("other", 0).Release()) // there is a lock connection
		begins := panicking{s.Connect().(mysqlConn), "START TRANSACTION"}

		arrive := locks.Stall("SELECT IF(CONNECTION_ID()") // it is granted after the panic
		panics(p.writer(begins))
		arrive()
		next(p)

		w := p.writer(s.Connect()) // before
		w.b.Connect = func(context.Context) (*pool.Conn, error) {
			dbtest.Soon(t, "it is granted", func() bool { return s.holder(begins, "k") != "" })
			panic("it cannot connect")
		}
		w.b.Done = func() {}
		begins = panicking{s.Connect().(mysqlConn), "never"}
		panics(w)
		next(p)

		p = s.homes(settings{}) // on the transaction's own connection
		w = p.writer(panicking{s.Connect().(mysqlConn), map[bool]string{true: "BEGIN NOT ATOMIC", false: "CALL"}[s.MariaDB()]})
		w.b.Ends = true
		panics(w)
		next(p)
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
		sent, answer := mine.Texts(), make(chan error, 1)
		go func() {
			_, err := w.begin(ctx, 0)
			answer <- err
		}()
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
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
