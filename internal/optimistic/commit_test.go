package optimistic_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// TestCommit: what is written commits if, and only if, all keys have their versions; in one
// statement, after which nothing is locked.
func TestCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "clientFoundRows=true"} {
			p := s.process()
			p.remember(nil, "k", "l")
			var mine dbtest.Tap
			c := s.Connect(dbtest.With(params), mine.On)
			try := func(what string, want bool, versions ...*optimistic.Version) error {
				t.Helper()
				was := s.counter(s.own, "k")
				s.Exec(c, "START TRANSACTION")
				s.Exec(c, setCounter("k", was+1))
				sent := mine.Texts()
				done, unknown, err := p.Commit(dbtest.Limited(t), adopt(c), versions)
				if done != want || unknown || (err == nil) != want || len(sent()) != 1 {
					t.Errorf("%s %s: %v, %v, %v; %q", params, what, done, unknown, err, sent())
				}
				if !want {
					s.Exec(c, "ROLLBACK")
				}
				if now := s.counter(s.own, "k"); now == was+1 != want {
					t.Errorf("%s: the counter was %d and is %d", what, was, now)
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
				"one has moved": {p.Given("k", k.Number()+1), l},
				"newer":         {p.Given("k", k.Number()+2)},
				"none there":    {p.Given("nowhere", 1)},
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

			// What nobody may commit at once is left to Compare.
			s.Exec(c, "START TRANSACTION")
			for what, versions := range map[string][]*optimistic.Version{
				"none": nil, "two of one key": {p.Given("k", 1), p.Given("k", 2)}, "no version": {p.Given("k", 0)},
			} {
				if done, unknown, err := p.Commit(dbtest.Limited(t), adopt(c), versions); done || unknown || err != nil {
					t.Errorf("%s: %v, %v, %v", what, done, unknown, err)
				}
			}
			s.Exec(c, "ROLLBACK")
		}
		// On a cluster, and without the procedure, that is all.
		cluster := s.process(func(cfg *strategy.Config) { cfg.Rows = s.rowsOf(server.Galera) })
		without := s.process()
		if without.remember(nil, "k"); !s.MariaDB() {
			s.Exec(s.own, "DROP PROCEDURE "+s.table.VersionsProcedure().String())
		}
		c := s.Connect()
		s.Exec(c, "START TRANSACTION")
		for range 2 {
			for _, p := range []*process{cluster, without} {
				if s.MariaDB() && p == without {
					continue
				}
				if done, unknown, err := p.Commit(dbtest.Limited(t), adopt(c), p.remember(nil, "k")); done || unknown || err != nil {
					t.Errorf("without: %v, %v, %v", done, unknown, err)
				}
			}
		}
		without.wantCommit(c, without.remember(nil, "k")...)
	})
}

// compares reports whether a statement compares and commits.
func compares(text string) bool {
	return strings.Contains(text, "mysqllock_same") || strings.Contains(text, "_next3`")
}

// TestDisturbedCommit: a KILL QUERY that comes between COMMIT and the answer makes no failure
// of a transaction that was committed, and one that comes before it commits nothing; and
// without an answer nobody says which it was.
func TestDisturbedCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k")
		const signal = "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317;"
		in := func(old, by string) func(string) string {
			return func(text string) string {
				if !strings.Contains(text, old) {
					t.Errorf("%q is not in %q", old, text)
				}
				return strings.Replace(text, old, by, 1)
			}
		}
		cases := dbtest.DisturbedCommits()
		cases["full"] = dbtest.DisturbedCommit{Disturbed: dbtest.Disturbed{Err: &mysql.MySQLError{Number: 1205}}}
		cases["killed at the check"] = dbtest.DisturbedCommit{Disturbed: dbtest.Disturbed{Text: in("SET STATEMENT", signal+" SET STATEMENT")}}
		cases["killed between"] = dbtest.DisturbedCommit{Disturbed: dbtest.Disturbed{Text: in("IF @mysqllock_same", signal+" IF @mysqllock_same")}}
		cases["killed at the answer"] = dbtest.DisturbedCommit{Disturbed: dbtest.Disturbed{Text: in("COMMIT;", "COMMIT; "+signal)}, Committed: true, Unknown: true}
		for name, c := range cases {
			for _, autocommit := range []string{"1", "0"} {
				t.Run(name+"/autocommit="+autocommit, func(t *testing.T) {
					if c.Text != nil && !s.MariaDB() {
						return // the text of a procedure is not ours to change
					}
					conn := s.Connect()
					s.Exec(conn, "SET autocommit = "+autocommit)
					ctx := dbtest.Limited(t)
					for range 2 { // what it has left misleads nobody
						s.Exec(conn, "START TRANSACTION")
						if done, _, err := p.Commit(ctx, adopt(conn), p.remember(nil, "k")); !done || err != nil {
							t.Fatalf("undisturbed: %v, %v", done, err)
						}
					}
					was := s.counter(s.own, "k")
					versions := p.remember(nil, "k")
					s.Exec(conn, "START TRANSACTION")
					s.Exec(conn, setCounter("k", was+1))
					d := c.Disturbed
					d.At = compares
					d.Conn = conn
					done, unknown, err := p.Commit(ctx, pool.Adopt(&d), versions)
					if done != c.Done || unknown != c.Unknown || (err == nil) != c.Done || errors.Is(err, driver.ErrBadConn) {
						t.Errorf("done %v, unknown %v, %v", done, unknown, err)
					}
					s.Exec(conn, "ROLLBACK")
					if now := s.counter(s.own, "k"); now == was+1 != c.Committed {
						t.Errorf("the counter was %d and is %d", was, now)
					}
					if now := p.remember(nil, "k")[0].Number(); now == versions[0].Number()+1 != c.Committed {
						t.Errorf("the version was %d and is %d", versions[0].Number(), now)
					}
				})
			}
		}
	})
}

// TestKilledWhileItCompares: the statement waits, for the table's definition, and is killed
// there, or its connection is; nothing is committed.
func TestKilledWhileItCompares(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("there it waits for nothing")
		}
		p := s.process()
		versions := p.remember(nil, "k")
		for _, kill := range []string{"KILL QUERY", "KILL CONNECTION"} {
			conn := s.Connect()
			id := s.One(conn, "SELECT CONNECTION_ID()")
			s.Exec(conn, "START TRANSACTION")
			s.Exec(conn, setCounter("k", 7))
			s.Exec(s.own, "FLUSH TABLES "+s.table.String()+" WITH READ LOCK")
			type result struct {
				done, unknown bool
				err           error
			}
			answer := make(chan result, 1)
			go func() {
				done, unknown, err := p.Commit(context.Background(), adopt(conn), versions)
				answer <- result{done, unknown, err}
			}()
			look := s.Connect()
			dbtest.Soon(t, "the statement waits", func() bool {
				select {
				case r := <-answer: // it was slower to be found than its own limit
					answer <- r
					return true
				default:
				}
				return len(s.Query(look, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id+" AND STATE LIKE 'Waiting for%'")) > 0
			})
			s.Exec(look, kill+" "+id)
			r := <-answer
			s.Exec(s.own, "UNLOCK TABLES")
			if r.done || r.err == nil || r.unknown && kill == "KILL QUERY" {
				t.Errorf("%s: %+v", kill, r)
			}
			_ = conn.Close()
			dbtest.Equal(t, kill+": the counter is %d", s.counter(s.own, "k"), 0)
		}
	})
}

// TestKilledAtCommit: FLUSH TABLES WITH READ LOCK holds up the COMMIT of the statement, which is
// killed there. The server rolls the transaction back, so the caller is not told of a success.
func TestKilledAtCommit(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) { // which stand still meanwhile
		p := s.process()
		versions := p.remember(nil, "k")
		gate := func(text string) string {
			return strings.Replace(text, "COMMIT;", "DO GET_LOCK('gate', 20); COMMIT;", 1)
		}
		conn, look := s.Connect(), s.Connect()
		id := s.One(conn, "SELECT CONNECTION_ID()")
		d := &dbtest.Disturbed{Conn: conn}
		if s.MariaDB() {
			d.At, d.Text = compares, gate
		} else {
			procedure := s.table.VersionsProcedure()
			s.Exec(s.own, "DROP PROCEDURE "+procedure.String())
			s.Exec(s.own, gate(procedure.DDL()))
		}
		s.One(look, "SELECT GET_LOCK('gate', 0)")
		s.Exec(conn, "START TRANSACTION")
		s.Exec(conn, setCounter("k", 7))
		type result struct {
			done, unknown bool
			err           error
		}
		answer := make(chan result, 1)
		go func() {
			done, unknown, err := p.Commit(context.Background(), pool.Adopt(d), versions)
			answer <- result{done, unknown, err}
		}()
		state := func(like string) {
			t.Helper()
			dbtest.Soon(t, like, func() bool {
				return len(s.Query(look, "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = "+id+" AND STATE LIKE '"+like+"'")) > 0
			})
		}
		state("User lock")
		s.Exec(s.own, "FLUSH TABLES WITH READ LOCK")
		s.One(look, "SELECT RELEASE_LOCK('gate')")
		state("Waiting for % lock")
		s.Exec(look, "KILL QUERY "+id)
		r := <-answer
		s.Exec(s.own, "UNLOCK TABLES")
		if r.done || !r.unknown || r.err == nil || errors.Is(r.err, lockerr.ErrConflict) {
			t.Errorf("%+v", r)
		}
		dbtest.Equal(t, "the counter is %d", s.counter(look, "k"), 0)
	})
}

// begin reads the version of k for a transaction that is to begin on conn.
func (p *process) begin(conn driver.Conn) (begun bool, v *optimistic.Version, err error) {
	p.T.Helper()
	begun, versions, err := p.beginWith(conn, optimistic.Request{Keys: []string{"k"}, Wait: 20 * time.Second})
	if err == nil {
		v = versions[0]
	}
	return begun, v, err
}

// beginWith is begin for what r asks for.
func (p *process) beginWith(conn driver.Conn, r optimistic.Request) (begun bool, versions []*optimistic.Version, err error) {
	p.T.Helper()
	r.Begin = strategy.NewBeginning(func(context.Context) (*pool.Conn, error) { return adopt(conn), nil }, func(bool) {})
	versions, err = p.Remember(dbtest.Limited(p.T), adopt(conn), r)
	begun, whole := r.Begin.Conclude()
	if !whole {
		p.T.Error("the connection is still in use")
	}
	return begun, versions, err
}

// TestBegin: the version is read and the transaction begins in one statement, whose snapshot is
// that of its first read; and what has to be waited for is waited for without a transaction.
func TestBegin(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k")
		var mine dbtest.Tap
		c, other := s.Connect(mine.On), s.Connect()
		for n := range 2 {
			sent := mine.Texts()
			begun, v, err := p.begin(c)
			if !begun || err != nil || len(sent()) != 1 {
				t.Fatalf("begun %v, %v; %q", begun, err, sent())
			}
			s.Exec(other, setCounter("k", 10+n))
			if got := s.counter(c, "k"); got != 10+n { // the snapshot begins here
				t.Errorf("it reads %d, want %d", got, 10+n)
			}
			s.Exec(other, setCounter("k", 20+n))
			if got := s.counter(c, "k"); got != 10+n {
				t.Errorf("it reads %d, want %d: no transaction has begun", got, 10+n)
			}
			if fmt.Sprintf("%d 1 nobody", v.Number()) != s.row("k") {
				t.Errorf("version %d of %s", v.Number(), s.row("k"))
			}
			s.Exec(c, "ROLLBACK")
		}
		idle := func(what string) {
			t.Helper()
			s.Exec(other, setCounter("l", 1))
			s.Exec(c, setCounter("l", 2)) // which commits by itself
			if got := s.counter(s.own, "l"); got != 2 {
				t.Errorf("%s: a transaction has begun", what)
			}
			s.Exec(c, "ROLLBACK")
		}
		// What is not marked yet, or reads what is not committed, begins later.
		s.set("k", "versioned = 0")
		if begun, v, err := p.begin(c); !begun || err != nil || fmt.Sprintf("%d 1 nobody", v.Number()) != s.row("k") {
			t.Errorf("not marked: %v, %v", begun, err)
		}
		s.Exec(c, "ROLLBACK")
		s.Exec(c, "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
		if begun, _, err := p.begin(c); begun || err != nil {
			t.Errorf("READ UNCOMMITTED: %v, %v", begun, err)
		}
		idle("READ UNCOMMITTED")
		s.Exec(c, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
		s.set("k", "owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
		if begun, _, err := p.beginWith(c, optimistic.Request{Keys: []string{"k"}}); begun || !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("leased: %v, %v", begun, err)
		}
		idle("leased")
		s.set("k", "owner = NULL")
		if begun, versions, err := p.beginWith(c, optimistic.Request{Keys: []string{"k", "l"}, Wait: 20 * time.Second}); begun || err != nil || len(versions) != 2 {
			t.Errorf("two keys: %v, %v", begun, err)
		}
		idle("two keys")
		if s.MariaDB() {
			return
		}
		s.Exec(s.own, "DROP PROCEDURE "+s.table.BeginProcedure().String())
		for range 2 {
			if begun, _, err := p.begin(c); begun || err != nil {
				t.Errorf("without the procedure: %v, %v", begun, err)
			}
			idle("without the procedure")
		}
	})
}

// begins reports whether a statement reads a version and begins.
func begins(text string) bool {
	return strings.Contains(text, "START TRANSACTION") || strings.Contains(text, "_seen2`")
}

// TestDisturbedBegin: a statement that reads and begins, and is interrupted before or after
// BEGIN, leaves no transaction and says that none has begun.
func TestDisturbedBegin(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "k")
		const signal = "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317; "
		for name, o := range map[string]dbtest.Disturbed{
			"after":        {After: true, Err: &mysql.MySQLError{Number: 1317}},
			"before BEGIN": {Text: func(text string) string { return strings.Replace(text, "IF @mysqllock", signal+"IF @mysqllock", 1) }},
			"after BEGIN": {Text: func(text string) string {
				return strings.Replace(text, "START TRANSACTION; ", "START TRANSACTION; "+signal, 1)
			}},
			"cut afterward": {After: true, Err: mysql.ErrInvalidConn},
		} {
			if o.Text != nil && !s.MariaDB() {
				continue // the text of a procedure is not ours to change
			}
			c := s.Connect()
			o.Conn, o.At = c, begins
			begun, _, err := p.begin(&o)
			if begun || err == nil {
				t.Errorf("%s: %v, %v", name, begun, err)
			}
			s.Exec(c, setCounter("k", 5))
			if got := s.counter(s.own, "k"); got != 5 {
				t.Errorf("%s: a transaction was left", name)
			}
			s.Exec(c, "ROLLBACK")
			s.set("k", "token = token + 1")
			s.Exec(s.own, setCounter("k", 0))
		}
	})
}
