package rowlock_test

import (
	"database/sql/driver"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
)

// versioned makes rows of which some are versioned.
func (s *scratch) versioned(p *process, all, some []string) {
	s.T.Helper()
	dbtest.OK(s.T, p.rows.Exist(dbtest.Limited(s.T), all))
	for _, name := range some {
		s.Exec(s.Connect(), "UPDATE "+s.table.String()+" SET versioned = 1, token = 10 WHERE namespace = 'app' AND name = '"+name+"'")
	}
}

// TestTheCallerIsToldWhichLockedRowsAreVersioned, of those that it has locked for itself,
// however the statement came to run.
func TestTheCallerIsToldWhichLockedRowsAreVersioned(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(nil), s.process(nil)
		s.versioned(p, []string{"a", "b", "c", "d"}, []string{"a", "b", "d"})
		mixed := []rowlock.Key{{Name: "a"}, {Name: "b", Shared: true}, {Name: "c"}, {Name: "d"}}
		for _, c := range []struct {
			r    rowlock.Request
			want []string
		}{
			{rowlock.Request{Keys: exclusive("a")}, []string{"a"}},
			{rowlock.Request{Keys: shared("a")}, nil},
			{rowlock.Request{Keys: exclusive("c")}, nil},
			{rowlock.Request{Keys: mixed}, []string{"a", "d"}},
			{rowlock.Request{Slots: []string{"a"}}, []string{"a"}},
			{rowlock.Request{Slots: []string{"c"}}, nil},
		} {
			want := func(got []string) {
				t.Helper()
				if !slices.Equal(got, c.want) {
					t.Errorf("%+v: versioned are %q", c.r, got)
				}
			}
			conn, grant := p.granted(c.r)
			want(grant.Versioned)
			p.end(conn, grant.Txn, grant.Ticket)

			conn, grant, err := p.requestAs(dbtest.Limited(t), driver.TxOptions{Isolation: 2}, c.r)
			dbtest.OK(t, err)
			want(grant.Versioned)
			p.end(conn, grant.Txn, grant.Ticket)

			// In the transaction of another key.
			r := c.r
			r.Waiting = free
			conn, grant = p.granted(rowlock.Request{Keys: exclusive("mine")})
			locked, _, err := p.Join(dbtest.Limited(t), conn, r)
			if err != nil {
				t.Error(err)
			}
			want(locked.Versioned)
			p.end(conn, grant.Txn, grant.Ticket)

			// Behind somebody else.
			first := slices.Clone(c.r.Slots)
			for _, key := range c.r.Keys {
				first = append(first, key.Name)
			}
			released := after(t, 50*time.Millisecond, other.hold(rowlock.Request{Keys: exclusive(first[0])}))
			r.Wait = 20 * time.Second
			conn, grant = p.granted(r)
			want(grant.Versioned)
			p.end(conn, grant.Txn, grant.Ticket)
			released()
		}
	})
}

// TestARaiseMovesTokensOneStepAndNothingElse: no other row is touched or locked, whatever the
// session is like.
func TestARaiseMovesTokensOneStepAndNothingElse(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		all := []string{"a", "b", "c", "d", "e"}
		s.versioned(p, all, all)
		probe := s.Connect()
		tokens := func() (out []string) {
			for _, row := range s.Query(probe, "SELECT name, token, expires BETWEEN UTC_TIMESTAMP(6) - INTERVAL 5 MINUTE AND UTC_TIMESTAMP(6), owner FROM "+
				s.table.String()+" WHERE namespace = 'app' AND name < 'f' ORDER BY name") {
				out = append(out, strings.Join(row, ","))
			}
			return out
		}
		sessions := []string{
			"SET SESSION sql_safe_updates = 1",
			"SET SESSION sql_mode = 'ANSI,TRADITIONAL,NO_BACKSLASH_ESCAPES,NO_ZERO_DATE,NO_ZERO_IN_DATE'",
			"SET SESSION sql_select_limit = 1",
			"SET SESSION time_zone = '+05:00'",
			"SET NAMES gbk",
			"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
			"SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
		}
		if p.Info().MariaDB {
			sessions = append(sessions, "SET SESSION sql_mode = 'SIMULTANEOUS_ASSIGNMENT'", "SET SESSION join_cache_level = 8, optimizer_switch = 'mrr=on,join_cache_bka=on'")
			if p.Info().SnapshotIsolation {
				sessions = append(sessions, "SET SESSION innodb_snapshot_isolation = ON")
			}
		} else {
			sessions = append(sessions, "SET SESSION optimizer_switch = 'batched_key_access=on,mrr=on,mrr_cost_based=off'")
		}
		for _, big := range []bool{false, true} {
			if big {
				s.big()
			}
			connector := s.Connector(func(cfg *mysql.Config) { cfg.ClientFoundRows = big })
			for _, session := range append([]string{"DO 0"}, sessions...) {
				for _, keys := range [][]string{{"b"}, {"d", "a", "b"}} {
					c, err := connector.Connect(t.Context())
					dbtest.OK(t, err)
					if p.Info().SnapshotIsolation {
						s.Exec(c, "SET SESSION innodb_snapshot_isolation = OFF") // ON from 11.6 on
					}
					s.Exec(c, session)
					s.Exec(probe, "UPDATE "+s.table.String()+" SET token = 10, expires = '2020-01-01' WHERE namespace = 'app' AND name < 'f'")
					s.Exec(c, "BEGIN")
					// An old snapshot, which innodb_snapshot_isolation does not let lock what has changed.
					if !strings.Contains(session, "innodb_snapshot") && !strings.Contains(session, "SERIALIZABLE") {
						s.Query(c, "SELECT COUNT(*) FROM "+s.table.String())
					}
					s.Exec(probe, "UPDATE "+s.table.String()+" SET token = 11 WHERE namespace = 'app' AND name < 'f'")
					for _, key := range keys {
						s.Query(c, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = '"+key+"' FOR UPDATE")
					}
					if err := server.Exec(t.Context(), c, p.Raise(keys)); err != nil {
						t.Errorf("%s, %q: %v", session, keys, err)
					}
					present := all
					if big {
						present = append([]string{"other 0000", "other 4711"}, all...)
					}
					if got := s.occupied(probe, present); !slices.Equal(got, slices.Sorted(slices.Values(keys))) {
						t.Errorf("%s, %q: locked are %q", session, keys, got)
					}
					s.Exec(c, "COMMIT")
					var want []string
					for _, name := range all {
						row := name + ",11,0,"
						if slices.Contains(keys, name) {
							row = name + ",12,1,"
						}
						want = append(want, row)
					}
					if got := tokens(); !slices.Equal(got, want) {
						t.Errorf("%s, %q: %q", session, keys, got)
					}
					dbtest.OK(t, c.Close())
				}
			}
		}
	})
}

// TestRaiseDoesNotDisturb what the caller's own statements have left.
func TestRaiseDoesNotDisturb(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(nil)
		s.versioned(p, []string{"a", "b"}, []string{"a", "b"})
		c := pool.Adopt(s.Connect())
		s.Exec(c.Conn, "CREATE TABLE "+s.Name+".n (id INT AUTO_INCREMENT PRIMARY KEY)")
		s.Exec(c.Conn, "INSERT INTO "+s.Name+".n VALUES (41), (NULL)")
		for _, keys := range [][]string{{"a"}, {"a", "b"}} {
			s.Exec(c.Conn, "BEGIN")
			s.Exec(c.Conn, p.Raise(keys))
			s.Exec(c.Conn, "COMMIT")
			dbtest.Equal(t, "LAST_INSERT_ID() is %s", s.Query(c.Conn, "SELECT LAST_INSERT_ID()")[0][0], "42")
		}
	})
}
