package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// writer is a session, whose transactions are under advisory locks, and which counts how often it was lent and given
// back.
type writer struct {
	*pool.Conn
	p          *process
	none       error // why it is not lent
	gets, puts int
}

// writer makes the table that it writes to, written, if there is none.
func (p *process) writer(conn driver.Conn) *writer {
	p.T.Helper()
	p.Exec(conn, "CREATE TABLE IF NOT EXISTS "+p.written()+" (n INT)")
	w := &writer{Conn: pool.Adopt(conn), p: p}
	dbtest.OK(p.T, w.SetID(p.One(conn, "SELECT CONNECTION_ID()")))
	return w
}

func (s *scratch) written() string { return "`" + s.Name + "`.written" }

// request asks for the lock on k, and lends the session.
func (w *writer) request(wait time.Duration) advisory.Request {
	r := request("k", wait)
	r.Lends = &strategy.Lender{
		Get: func(ctx context.Context) (*pool.Conn, error) {
			if w.none != nil {
				return nil, w.none
			}
			w.gets++
			return w.Conn, w.AwaitTurn(ctx)
		},
		Put: func() {
			if w.puts++; !w.Clean() {
				_ = w.Close()
			}
			w.EndTurn()
		},
	}
	return r
}

func (w *writer) take(wait time.Duration) (*advisory.Grant, error) {
	return w.p.Acquire(dbtest.Limited(w.p.T), w.request(wait))
}

// takesLater is take in the background, which must be granted.
func (w *writer) takesLater() <-chan *advisory.Grant {
	granted := make(chan *advisory.Grant, 1)
	go func() {
		lock, err := w.take(20 * time.Second)
		if err != nil {
			w.p.T.Error(err)
		}
		granted <- lock
	}()
	return granted
}

// takesNext makes sure that nobody of the process has the lock, and that its own queue for it goes on.
func (w *writer) takesNext() {
	w.p.T.Helper()
	next := w.p.writer(w.p.session())
	lock, err := next.take(0)
	dbtest.OK(w.p.T, err)
	if next.puts != 0 {
		w.p.T.Error("it is not the first in its process")
	}
	w.p.Exec(next.Conn.Conn, "ROLLBACK")
	released(w.p.T, lock)
}

// onSession is a writer whose transaction, in which it has written a row, holds the lock.
func (p *process) onSession(conn driver.Conn) (*writer, *advisory.Grant) {
	p.T.Helper()
	w := p.writer(conn)
	lock, err := w.take(0)
	dbtest.OK(p.T, err)
	if lock.ConnectionID() != w.KnownID() {
		p.T.Fatalf("%d has the lock", lock.ConnectionID())
	}
	w.write()
	return w, lock
}

// released releases the lock, and takes it off its session.
func released(t testing.TB, lock *advisory.Grant) {
	t.Helper()
	dbtest.OK(t, errors.Join(lock.Release(), lock.Detach()))
}

// clean says that the session carries nothing of a lock, and no transaction.
func (w *writer) clean(what string) {
	w.p.T.Helper()
	dbtest.Equal(w.p.T, what+": it has %s named locks", w.p.One(w.Conn.Conn, "SELECT RELEASE_ALL_LOCKS()"), "0")
	w.p.Exec(w.Conn.Conn, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ") // in a transaction it would fail
	w.p.Exec(w.Conn.Conn, "DELETE FROM "+w.p.written())
	w.p.Exec(w.Conn.Conn, "COMMIT")
}

func (w *writer) write() {
	w.p.T.Helper()
	w.p.Exec(w.Conn.Conn, "INSERT INTO "+w.p.written()+" VALUES (1)")
}

// wantWritten says how many rows are committed.
func (s *scratch) wantWritten(what string, want int) {
	s.T.Helper()
	if n := s.One(s.open(), "SELECT COUNT(*) FROM "+s.written()); n != fmt.Sprint(want) {
		s.T.Errorf("%s: %s rows are written, want %d", what, n, want)
	}
}

// send is a form in which what goes out with a COMMIT is sent.
type send func(ctx context.Context, conn driver.Conn, texts ...string) (answers [][][]string, err error)

var forms = map[string]send{"packet": server.SendPacket, "single": server.SendSingly}

// check is what goes out with the COMMIT.
func (w *writer) check(ends bool, locks ...*advisory.Grant) (strategy.Check, error) {
	held := make([]strategy.Grant, len(locks))
	for i, lock := range locks {
		held[i] = lock
	}
	return w.p.Strategy().Check(dbtest.Limited(w.p.T), w.Conn, held, strategy.Commit{Wrote: true, Ends: ends})
}

// commit commits as a unit of work does. outcome is what is known of that.
func (w *writer) commit(send send, check strategy.Check, change ...func([]string) []string) (outcome strategy.Outcome, err error) {
	texts := slices.Concat(check.Before, []string{"COMMIT"}, check.After)
	for _, change := range change {
		texts = change(texts)
	}
	at := slices.Index(texts, "COMMIT")
	answers, err := send(dbtest.Limited(w.p.T), w.Conn.Conn, texts...)
	switch {
	case err == nil:
		outcome = strategy.Committed
	case len(answers) > at:
		outcome = strategy.OnlyCommitted
	case server.Number(err) == 0 || server.Interrupted(err) || server.Gone(err, w.Conn.Conn):
		outcome = strategy.Unknown
	default:
		err = check.Failed(dbtest.Limited(w.p.T), min(len(answers), len(check.Before)-1), err)
	}
	if check.Ended != nil {
		check.Ended(outcome)
	}
	return outcome, err
}

// commits commits, with the release of a lock that the session holds.
func (w *writer) commits(send send, locks ...*advisory.Grant) {
	w.p.T.Helper()
	check, err := w.check(true, locks...)
	dbtest.OK(w.p.T, err)
	if outcome, err := w.commit(send, check); outcome != strategy.Committed {
		w.p.T.Errorf("%v, %v", outcome, err)
	}
}

// inTurn has the statements of a connection wait for each other, those of a test, too: the lock connections are looked after all the time.
type inTurn struct {
	sqlmw.NullInterceptor
	sync.Mutex
}

func (i *inTurn) ConnQueryContext(ctx context.Context, c driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	i.Lock()
	rows, err := c.QueryContext(ctx, text, args)
	if err != nil {
		i.Unlock()
	}
	return ctx, rows, err
}

func (i *inTurn) RowsClose(_ context.Context, rows driver.Rows) error {
	defer i.Unlock()
	return rows.Close()
}

func (i *inTurn) ConnExecContext(ctx context.Context, c driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	i.Lock()
	defer i.Unlock()
	return c.ExecContext(ctx, text, args)
}

// TestTheGuardStopsACommitWithoutTheLocks: the COMMIT comes through as long as the server says that all locks are held,
// and not where one is lost, whoever has noticed, or where it is another connection that has it.
func TestTheGuardStopsACommitWithoutTheLocks(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, send := range forms {
			s := s.other(t)
			var lockConn driver.Conn
			turns := new(inTurn)
			lockExec := func(text string) {
				turns.Lock()
				defer turns.Unlock()
				s.Exec(lockConn, text)
			}
			p := s.process(settings{conns: 1, seen: []sqlmw.Interceptor{turns}, connect: func(ctx context.Context) (c driver.Conn, err error) {
				lockConn, err = s.Connector(dbtest.NoDatabase).Connect(ctx)
				return lockConn, err
			}})
			w := p.writer(s.session())
			refused := func(what string, check strategy.Check) {
				t.Helper()
				w.write()
				outcome, err := w.commit(send, check)
				var e *lockerr.Error
				if dbtest.Is(t, what, err, lockerr.ErrLost); outcome != strategy.Failed || !errors.As(err, &e) || e.Op != "commit" || e.Strategy != "advisory" {
					t.Errorf("%s, %s: %v, %v", name, what, outcome, err)
				}
				s.Exec(w.Conn.Conn, "ROLLBACK")
				s.wantWritten(name+", "+what, 0)
			}
			one, two := p.acquire("1", 0), p.acquire("2", 0)
			for _, limit := range []string{"DEFAULT", "0"} {
				s.Exec(w.Conn.Conn, "SET SESSION sql_select_limit = "+limit)
				w.write()
				w.commits(send, one, two)
				s.wantWritten(name, 1)
				check, err := w.check(false, one, two)
				dbtest.OK(t, err)
				lockExec("DO RELEASE_LOCK('" + two.Name() + "')")
				s.Exec(s.open(), "DELETE FROM "+s.written())
				refused("one is free", check)
				lockExec("DO GET_LOCK('" + two.Name() + "', 0)")
			}
			s.Exec(w.Conn.Conn, "SET SESSION sql_select_limit = DEFAULT")
			is := w.KnownID()
			dbtest.OK(t, w.SetID("1"))
			check, err := w.check(false, one)
			dbtest.OK(t, err)
			refused("on another connection", check)
			dbtest.OK(t, w.SetID(fmt.Sprint(is)))

			dbtest.OK(t, two.Release())
			_, err = w.check(false, one, two)
			dbtest.Is(t, "one was given back", err, lockerr.ErrClosed)

			// After a restart of the server the id may be that of another connection.
			check, err = w.check(false, one)
			dbtest.OK(t, err)
			lockExec("DO RELEASE_ALL_LOCKS()")
			lockExec("DO GET_LOCK('" + one.Name() + "', 0)")
			refused("another connection of the same id", check)
			s.Exec(w.Conn.Conn, fmt.Sprintf("KILL %d", one.ConnectionID()))
			s.free(w.Conn.Conn, "1")
			refused("killed", check)

			w, lock := p.onSession(s.session())
			s.Exec(w.Conn.Conn, "SET SESSION sql_select_limit = 0")
			w.commits(send, lock)
			dbtest.Equal(t, name+": connection %q has it after COMMIT", s.holder(s.open(), "k"), "")
			s.Exec(w.Conn.Conn, "SET SESSION sql_select_limit = DEFAULT")
			w.clean(name)

			w, lock = p.onSession(s.session())
			check, err = w.check(true, lock)
			dbtest.OK(t, err)
			s.Exec(w.Conn.Conn, "DO RELEASE_ALL_LOCKS()")
			refused("released by the application", check)
			released(t, lock)
			w.clean(name)
		}
	})
}

// TestAKilledCommitIsNotTakenForWhatItIsNot: the COMMIT of a transaction that holds its lock on its session is
// killed, or its connection, before each of its statements. What was committed is never taken for what was not, and
// the lock is said to be free only where it is.
func TestAKilledCommitIsNotTakenForWhatItIsNot(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		look, gate := s.open(), "`"+s.Name+"`.gate"
		s.Exec(look, "CREATE TABLE "+gate+" (n INT)")
		s.Exec(look, "INSERT INTO "+gate+" VALUES (1)")
		for name, send := range forms {
			for at, where := range []string{"the guard", "COMMIT", "the release", "the answer"} {
				for _, kill := range []string{"KILL QUERY", "KILL CONNECTION"} {
					what := fmt.Sprintf("%s, %s before %s", name, kill, where)
					p := s.process(settings{})
					w, lock := p.onSession(s.session())
					check, err := w.check(true, lock)
					dbtest.OK(t, err)
					s.Exec(look, "BEGIN")
					s.One(look, "SELECT n FROM "+gate+" FOR UPDATE")
					type result struct {
						outcome strategy.Outcome
						err     error
					}
					answer := make(chan result, 1)
					go func() {
						outcome, err := w.commit(send, check, func(texts []string) []string {
							return slices.Insert(texts, at, "SELECT n FROM "+gate+" FOR UPDATE")
						})
						answer <- result{outcome, err}
					}()
					id := fmt.Sprint(w.KnownID())
					dbtest.Soon(t, "it waits", func() bool {
						rows, err := server.Query(t.Context(), look, "SELECT INFO FROM information_schema.PROCESSLIST WHERE ID = "+id)
						return err == nil && len(rows) == 1 && strings.HasPrefix(rows[0][0], "SELECT n FROM ")
					})
					s.Exec(look, kill+" "+id)
					r := <-answer
					s.Exec(look, "ROLLBACK")
					committed := at > 1
					told := map[strategy.Outcome]bool{
						strategy.Committed: at == 3, strategy.OnlyCommitted: committed, strategy.Failed: !committed, strategy.Unknown: true,
					}
					if !told[r.outcome] {
						t.Errorf("%s: %v, %v", what, r.outcome, r.err)
					}
					s.wantWritten(what, map[bool]int{true: 1}[committed])
					if over := errors.Is(lock.Err(), lockerr.ErrClosed); over != (r.outcome == strategy.Committed) {
						t.Errorf("%s: %v, and the lock is over: %v", what, r.outcome, over)
					}
					if kill == "KILL QUERY" {
						s.Exec(w.Conn.Conn, "ROLLBACK")
					} else {
						check.Unsure(dbtest.Limited(t)) // the lock is nobody's, and others have it next
						w.Taint()
						dbtest.OK(t, w.Close())
					}
					released(t, lock)
					s.free(look, "k")
					w.takesNext()
					s.Exec(look, "DELETE FROM "+s.written())
				}
			}
		}
	})
}

// TestACommitWhoseAnswerIsLostKeepsItsLockUntilItsEnd: the answer to one of its statements is lost. Another process
// gets the lock only once the server has done with the COMMIT, whatever has become of that, and proves nothing by it.
func TestACommitWhoseAnswerIsLostKeepsItsLockUntilItsEnd(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		other := s.process(settings{})
		for name, send := range forms {
			for _, lost := range []string{takes, "COMMIT", "SELECT " + server.Untimed + "RELEASE_LOCK"} {
				if name == "packet" && lost != takes {
					continue // it is one text
				}
				what := name + ", " + lost
				var mine dbtest.Tap
				p := s.process(settings{})
				w, lock := p.onSession(s.session(mine.On))
				check, err := w.check(true, lock)
				dbtest.OK(t, err)
				happened := mine.Strike(dbtest.Fault{Lost: true, At: func(text string) bool { return strings.HasPrefix(text, lost) }})
				outcome, err := w.commit(send, check)
				want := strategy.Unknown
				if lost == "SELECT "+server.Untimed+"RELEASE_LOCK" {
					want = strategy.OnlyCommitted
				}
				if !happened() || outcome != want || server.Number(err) != 0 {
					t.Errorf("%s: %v, %v", what, outcome, err)
				}
				check.Unsure(dbtest.Limited(t))
				taken := other.acquire("k", 20*time.Second)
				committed := map[bool]int{true: 1}[name == "packet" || lost != takes]
				s.wantWritten(what, committed) // nothing of the COMMIT comes later
				if errors.Is(lock.Err(), lockerr.ErrClosed) {
					t.Errorf("%s: the lock is said to be free", what)
				}
				w.Taint()
				released(t, lock)
				dbtest.OK(t, taken.Release())
				w.takesNext()
				s.Exec(s.open(), "DELETE FROM "+s.written())
			}
		}
	})
}

// TestADeadSessionIsEndedBeforeItsLocksAreGivenBack: a COMMIT whose answer is lost may still be running. Its session has ended when the
// locks, which lock connections hold, are given back.
func TestADeadSessionIsEndedBeforeItsLocksAreGivenBack(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		lock := p.acquire("k", 0)
		var mine dbtest.Tap
		w := p.writer(s.session(mine.On))
		w.write()
		check, err := w.check(true, lock)
		dbtest.OK(t, err)
		arrive := mine.Stall(takes)
		defer arrive()
		own, cancel := context.WithCancel(dbtest.Limited(t))
		sent := mine.Texts()
		answer := dbtest.Go(func() error {
			_, err := server.SendPacket(own, w.Conn.Conn, append(slices.Clone(check.Before), "DO SLEEP(60)", "COMMIT")...)
			return err
		})
		look := s.open()
		dbtest.Soon(t, "it is sent", func() bool { return len(sent()) == 1 })
		cancel()
		if err := <-answer; err == nil {
			t.Error("it was answered")
		}
		check.Unsure(dbtest.Limited(t))
		rows, err := server.Query(t.Context(), look, fmt.Sprintf("SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %d", w.KnownID()))
		if err != nil || len(rows) != 0 {
			t.Errorf("its session goes on: %v, %v", rows, err)
		}
		dbtest.OK(t, lock.Release())
		s.wantWritten("killed", 0)
	})
}

// TestAReleaseWaitsForTheCommitThatHasCheckedTheLock: the next holder would read the data from before it.
func TestAReleaseWaitsForTheCommitThatHasCheckedTheLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(settings{}), s.open()
		w := p.writer(p.session())
		lock, err := p.Acquire(dbtest.Limited(t), request("k", 0))
		dbtest.OK(t, err)
		var checks []strategy.Check
		for range 2 {
			check, err := w.check(false, lock)
			dbtest.OK(t, err)
			checks = append(checks, check)
		}
		released := dbtest.Go(lock.Release)
		for _, check := range checks {
			time.Sleep(200 * time.Millisecond)
			if s.holder(c, "k") == "" {
				t.Error("it is released while a COMMIT is under way")
			}
			check.Ended(strategy.Committed)
		}
		dbtest.OK(t, <-released)
		s.free(c, "k")
	})
}
