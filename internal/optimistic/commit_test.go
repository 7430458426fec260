package optimistic_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// session is a connection that is not in autocommit, and takes several statements in a text.
func (s *scratch) session(change ...func(*mysql.Config)) driver.Conn {
	s.T.Helper()
	c := s.Connect(append(change, func(cfg *mysql.Config) { cfg.MultiStatements = true })...)
	s.Exec(c, "SET autocommit = 0")
	return c
}

// commit commits as a unit of work does. known reports that all is known to have come through.
func (p *process) commit(c driver.Conn, send send, check strategy.Check, change ...func([]string) []string) (known bool, err error) {
	texts := append(slices.Clone(check.Before), "COMMIT")
	for _, change := range change {
		texts = change(texts)
	}
	answers, err := send(dbtest.Limited(p.T), c, texts...)
	if err != nil && server.Number(err) != 0 && len(answers) < len(check.Before) {
		err = check.Failed(dbtest.Limited(p.T), len(answers), err)
	}
	return err == nil, err
}

// TestACommitNeedsAllItsVersions, and then nothing is locked.
func TestACommitNeedsAllItsVersions(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, send := range forms {
			for _, params := range []string{"", "clientFoundRows=true"} {
				p := s.process()
				p.remember(nil, "k", "l")
				c := s.session(dbtest.With(params))
				try := func(what string, want bool, versions ...*optimistic.Version) error {
					t.Helper()
					was := s.counter(s.own, "k")
					s.Exec(c, setCounter("k", was+1))
					known, err := p.commit(c, send, p.check(versions...))
					if known != want {
						t.Errorf("%s %s %s: %v", name, params, what, err)
					}
					s.Exec(c, "ROLLBACK")
					if now := s.counter(s.own, "k"); now == was+1 != want {
						t.Errorf("%s %s %s: the counter was %d and is %d", name, params, what, was, now)
					}
					return err
				}
				versions := p.remember(nil, "k", "l")
				k, l := versions[0], versions[1]
				free := func() {
					t.Helper()
					if rows := s.Query(s.own, "SELECT 1 FROM "+s.table.String()+" FOR UPDATE NOWAIT"); len(rows) < 2 {
						t.Error("the rows are not free")
					}
				}
				try("both", true, l, k, l)
				free()
				s.wantRow("k", fmt.Sprintf("%d 1 nobody", k.Number()+1))
				s.wantRow("l", fmt.Sprintf("%d 1 nobody", l.Number()+1))
				for what, versions := range map[string][]*optimistic.Version{
					"one has moved":  {p.Given("k", k.Number()+1), l},
					"newer":          {p.Given("k", k.Number()+2)},
					"none there":     {p.Given("nowhere", 1)},
					"two of one key": {p.Given("k", k.Number()), p.Given("k", k.Number()+1)},
					"no version":     {p.Given("k", 0)},
				} {
					dbtest.Want(t, try(what, false, versions...), lockerr.ErrConflict)
					free()
					s.wantRow("k", fmt.Sprintf("%d 1 nobody", k.Number()+1))
				}
				s.set("k", "owner = 'x'")
				err := try("leased", false, p.Given("k", k.Number()+1))
				if dbtest.Want(t, err, lockerr.ErrConflict); !strings.Contains(err.Error(), fmt.Sprintf("was version %d when", k.Number()+1)) {
					t.Errorf("the version is not told: %v", err)
				}
				s.set("k", "owner = NULL")
				for _, how := range []string{"FOR UPDATE", "LOCK IN SHARE MODE"} {
					other, _ := s.lock("k", how)
					began := time.Now()
					err := try("locked "+how, false, p.Given("k", k.Number()+1))
					dbtest.Want(t, err, lockerr.ErrConflict, lockerr.ErrLocked)
					if d := time.Since(began); d > 20*time.Second {
						t.Errorf("locked %s: it has waited for %v", how, d)
					}
					s.Exec(other, "ROLLBACK")
				}
				try("at last", true, p.Given("k", k.Number()+1))
			}
		}
		p := s.process()
		for what, how := range map[string]strategy.Commit{"nothing was written": {}, "nothing is compared": {Wrote: true}} {
			var held []strategy.Grant
			if !how.Wrote {
				held = []strategy.Grant{p.Given("k", 1)}
			}
			if check, err := p.Check(t.Context(), nil, held, how); err != nil || len(check.Before) != 0 {
				t.Errorf("%s: %v, %v", what, check.Before, err)
			}
		}
	})
}

// TestAKilledCommitMakesANewVersionOnlyIfItCommits: it is killed, or its connection, before each of its statements.
// The version is new if, and only if, what was written with it is committed.
func TestAKilledCommitMakesANewVersionOnlyIfItCommits(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		s.Exec(s.own, "CREATE TABLE gate (n INT)")
		s.Exec(s.own, "INSERT INTO gate VALUES (1)")
		for name, send := range forms {
			for at, where := range []string{"it compares", "the guard", "COMMIT", "the answer"} {
				for _, kill := range []string{"KILL QUERY", "KILL CONNECTION"} {
					what := fmt.Sprintf("%s, %s before %s", name, kill, where)
					c, look := s.session(), s.Connect()
					id := s.One(c, "SELECT CONNECTION_ID()")
					was := s.counter(look, "k")
					version := p.remember(c, "k")[0]
					s.Exec(c, setCounter("k", was+1))
					s.Exec(look, "BEGIN")
					s.Query(look, "SELECT n FROM gate FOR UPDATE")
					gate := "SELECT n FROM gate FOR UPDATE"
					if where == "the guard" { // which looks at the statement in front of it
						gate = "INSERT INTO gate SELECT 2 FROM gate FOR UPDATE"
					}
					answer := dbtest.Go(func() error {
						_, err := p.commit(c, send, p.check(version), func(texts []string) []string { return slices.Insert(texts, at, gate) })
						return err
					})
					dbtest.Soon(t, "it waits", func() bool {
						return len(s.Query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id+" AND INFO LIKE '"+gate+"%'")) == 1
					})
					s.Exec(look, kill+" "+id)
					err := <-answer
					s.Exec(look, "ROLLBACK")
					if err == nil || errors.Is(err, lockerr.ErrConflict) {
						t.Errorf("%s: %v", what, err)
					}
					_ = c.Close()
					committed := 0
					if at > 2 {
						committed = 1
					}
					dbtest.Soon(t, "the server has done with it", func() bool {
						return len(s.Query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id)) == 0
					})
					if now := s.counter(look, "k"); now != was+committed {
						t.Errorf("%s: the counter was %d and is %d", what, was, now)
					}
					s.wantRow("k", fmt.Sprintf("%d 1 nobody", version.Number()+uint64(committed)))
				}
			}
		}
	})
}

// TestALostAnswerToACommitProvesNothing, since others set another version, too, as here: the connection breaks in
// place of an answer.
func TestALostAnswerToACommitProvesNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		for name, send := range forms {
			for at, lost := range []string{"INSERT", "SET STATEMENT", "SELECT " + server.Untimed + "IF(", "COMMIT"} {
				if name == "packet" && at > 1 {
					continue // it is one text
				}
				what := name + ", " + lost
				var mine dbtest.Tap
				c := s.session(mine.On)
				was := s.counter(s.own, "k")
				versions := p.remember(c, "k", "l")
				s.Exec(c, setCounter("k", was+1))
				happened := mine.Strike(dbtest.Fault{Lost: true, At: func(text string) bool { return strings.HasPrefix(text, lost) }})
				id := s.One(c, "SELECT CONNECTION_ID()")
				known, err := p.commit(c, send, p.check(versions...))
				if !happened() {
					continue // the statement begins otherwise on this server
				}
				if known || server.Number(err) != 0 || errors.Is(err, lockerr.ErrConflict) {
					t.Errorf("%s: %v", what, err)
				}
				dbtest.Soon(t, "the server has done with it", func() bool {
					return len(s.Query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id)) == 0
				})
				committed := s.counter(s.own, "k") == was+1
				if want := name == "packet" || lost == "COMMIT"; committed != want {
					t.Errorf("%s: committed is %v", what, committed)
				}
				other := s.process()
				now := other.remember(nil, "k", "l")
				if new := now[0].Number() == versions[0].Number()+1; new != committed {
					t.Errorf("%s: the version is new: %v", what, new)
				}
				other.wantCommit(s.begun(s.own), now...)
			}
		}
	})
}

// TestAWaitingComparisonIsKilled: what compares waits for the table's definition, for a second, and is killed there, or
// its connection is. Nothing is committed.
func TestAWaitingComparisonIsKilled(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("there it waits for nothing")
		}
		p := s.process()
		versions := p.remember(nil, "k")
		for _, kill := range []string{"KILL QUERY", "KILL CONNECTION"} {
			c := s.session()
			id := s.One(c, "SELECT CONNECTION_ID()")
			s.Exec(c, setCounter("k", 7))
			s.Exec(s.own, "FLUSH TABLES "+s.table.String()+" WITH READ LOCK")
			answer := dbtest.Go(func() error { return dbtest.Err(p.commit(c, server.SendPacket, p.check(versions...))) })
			look := s.Connect()
			dbtest.Soon(t, "the statement waits", func() bool {
				return len(answer) > 0 || // it was slower to be found than its own limit
					len(s.Query(look, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id+" AND STATE LIKE 'Waiting for%'")) > 0
			})
			s.Exec(look, kill+" "+id)
			err := <-answer
			s.Exec(s.own, "UNLOCK TABLES")
			if err == nil {
				t.Errorf("%s: it has committed", kill)
			}
			_ = c.Close()
			dbtest.Equal(t, kill+": the counter is %d", s.counter(s.own, "k"), 0)
		}
	})
}

// TestAVersionIsReadOnTheSession: one statement reads the version, and begins the transaction with its snapshot.
func TestAVersionIsReadOnTheSession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k", "l")
		var mine dbtest.Tap
		c, other := s.session(mine.On), s.Connect()
		for _, keys := range [][]string{{"k"}, {"k", "l"}} {
			sent := mine.Texts()
			versions := p.remember(c, keys...)
			if texts := sent(); len(texts) != 1 || s.row("k") != fmt.Sprintf("%d 1 nobody", versions[0].Number()) {
				t.Errorf("version %d of %s: %q", versions[0].Number(), s.row("k"), texts)
			}
			was := s.counter(s.own, "k")
			s.Exec(other, setCounter("k", was+1))
			dbtest.Equal(t, "it reads %d: the snapshot is not that of the version", s.counter(c, "k"), was)
			s.Exec(c, "ROLLBACK")
		}
	})
}

// TestASessionIsGivenBackWithoutATransaction: where the version is to be waited for, or may not be one, the session has
// been given back, without a transaction, before the caller waits.
func TestASessionIsGivenBackWithoutATransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k")
		for what, c := range map[string]struct {
			before, set string
			err         error
		}{
			"not marked":       {before: "versioned = 0"},
			"leased":           {before: "owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR", err: lockerr.ErrLocked},
			"lapsed":           {before: "owner = 'x', expires = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR"},
			"READ UNCOMMITTED": {set: "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED"},
			"no row":           {before: "name = 'another'"},
			"a lost session":   {set: "KILL CONNECTION_ID()"},
		} {
			conn := s.session()
			if c.before != "" {
				s.set("k", c.before)
			}
			if c.set != "" {
				_ = server.Exec(t.Context(), conn, c.set) // it may be the last one
			}
			given := 0
			r := optimistic.Request{Keys: []string{"k"}}
			on := pool.Adopt(conn)
			r.Lends = &strategy.Lender{Get: func(context.Context) (*pool.Conn, error) { return on, nil }, Put: func() {
				given++
				if what != "a lost session" { // in a transaction it would fail
					s.Exec(conn, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
				}
				if on.Clean() == (what == "a lost session") {
					t.Errorf("%s: it can be given to another: %v", what, on.Clean())
				}
			}}
			versions, err := p.Remember(dbtest.Limited(t), r)
			if given != 1 || !errors.Is(err, c.err) || err == nil && s.row("k") != fmt.Sprintf("%d 1 nobody", versions[0].Number()) {
				t.Errorf("%s: given back %d times; the row is %s, %v", what, given, s.row("k"), err)
			}
			s.set("k", "owner = NULL, versioned = 1")
		}
	})
}

// TestADisturbedReadLeavesNoTransaction: a read that is interrupted, or not answered, leaves no transaction on the session, and the version
// is read on another connection.
func TestADisturbedReadLeavesNoTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k")
		for name, o := range map[string]dbtest.Disturbed{
			"killed before": {Err: dbtest.Interrupted},
			"killed after":  {After: true, Err: dbtest.Interrupted},
			"cut after":     {After: true, Err: mysql.ErrInvalidConn},
			"nothing sent":  {Err: driver.ErrBadConn},
		} {
			c := s.session()
			o.Conn, o.At = c, func(text string) bool { return strings.Contains(text, s.table.String()) }
			if v := p.remember(&o, "k")[0]; s.row("k") != fmt.Sprintf("%d 1 nobody", v.Number()) {
				t.Errorf("%s: version %d of %s", name, v.Number(), s.row("k"))
			}
			s.Exec(c, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ") // in a transaction it would fail
		}
		c := s.session()
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		o := dbtest.Disturbed{Conn: c, Then: cancel, Err: context.Canceled}
		o.At = func(text string) bool { return strings.Contains(text, s.table.String()) }
		_, err := p.rememberOn(ctx, &o, optimistic.Request{Keys: []string{"k"}})
		dbtest.Is(t, "a caller that has left", err, context.Canceled)
	})
}
