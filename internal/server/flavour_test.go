package server_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/fakeserver/engines"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// probeAs asks a server that is e, and returns what was sent for that, too.
func probeAs(t *testing.T, e fakeserver.Engine) (server.Info, []string, error) {
	t.Helper()
	s := fakeserver.New()
	s.Be(e)
	conn, err := s.Connect(t.Context())
	dbtest.OK(t, err)
	info, err := server.Probe(t.Context(), conn)
	return info, s.Sent(), err
}

func TestOtherEnginesAreRecognised(t *testing.T) {
	for name, all := range engines.Foreign {
		for _, e := range all {
			info, sent, err := probeAs(t, e)
			if err != nil || info.RowLocks || info.SkipLocked && strings.HasPrefix(name, "Dolt") {
				t.Errorf("%+v is taken for %+v, %v", e, info, err)
				continue
			}
			if err := info.Reliable(); !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "the server is "+name+", wh") || !strings.Contains(err.Error(), "lockUnsafe=allow") {
				t.Errorf("%+v is refused with %v", e, err)
			}
			if e.Lacks == nil && len(sent) != 1 && !strings.HasPrefix(name, "Vitess") {
				t.Errorf("to recognise %+v %q were sent", e, sent)
			}
			if info.Version != e.Version || info.Database != "shop" {
				t.Errorf("of %+v is known %+v", e, info)
			}
		}
	}
}

// TestTiDBIsRecognised by what it calls itself, with what holds there.
func TestTiDBIsRecognised(t *testing.T) {
	for name, e := range engines.TiDB {
		info, sent, err := probeAs(t, e)
		if err != nil || info.Engine != name || info.Reliable() != nil || !info.EarlySnapshot || info.SkipLocked || info.Share != "" || info.NamedLocks || info.Kills {
			t.Errorf("%+v is taken for %+v, %v", e, info, err)
		}
		if len(sent) != 3 || info.Database != "shop" || info.Isolation != "REPEATABLE-READ" || info.Silence != 8*time.Hour {
			t.Errorf("of %+v is known %+v, by %q", e, info, sent)
		}
	}
}

// TestVitessWithOneShardIsRecognised, with what holds there.
func TestVitessWithOneShardIsRecognised(t *testing.T) {
	for name, e := range engines.Vitess {
		info, _, err := probeAs(t, e)
		if err != nil || info.Engine != name || info.Reliable() != nil || !info.Tablets || info.NamedLocks || info.Kills || info.Database != "shop" || info.Isolation != "REPEATABLE-READ" {
			t.Errorf("%+v is taken for %+v, %v", e, info, err)
		}
	}
}

// TestErrorsAfterWhichVitessHasNoTransaction, as vtgate 24 says them, and after which it has.
func TestErrorsAfterWhichVitessHasNoTransaction(t *testing.T) {
	const target = "target: shop.0.primary: vttablet: rpc error: code = "
	const statement = ` (CallerID: me): Sql: "insert into t values (:a)", BindVars: {a: "transaction 5: ended at (errno 1203), transaction rolled back"}`
	for text, c := range map[string]struct {
		number uint16
		ended  bool
		any    bool // on other engines, too
	}{
		"Aborted desc = transaction 5: ended at 2026-11-27 16:00:24.620 UTC (exceeded timeout: 6s)":                                                                             {1317, true, true},
		"Aborted desc = transaction 5: ended at 2026-11-27 16:00:24.250 UTC (unlocked closed connection)":                                                                       {1317, true, true},
		"Aborted desc = transaction 5: not found (potential transaction timeout)":                                                                                               {1317, true, true},
		"Aborted desc = transaction 5: in use: for tx killer rollback":                                                                                                          {1317, true, true},
		"Aborted desc = transaction was aborted: kill":                                                                                                                          {1317, true, true},
		"Canceled desc = (errno 3024) (sqlstate HY000): Query execution was interrupted, maximum statement execution time exceeded, elapsed time: 6s, killing connection ID 38": {3024, true, true},
		"Aborted desc = Row count exceeded 10000 (CallerID: userData1)":                                                                                                         {1317, true, true},
		"Aborted desc = multi-db transaction attempted: [target:{keyspace:\"shop\"}]":                                                                                           {1317, true, true},
		"ResourceExhausted desc = transaction pool connection limit exceeded":                                                                                                   {1203, true, false},
		"Aborted desc = transaction rolled back to reverse changes of partial DML execution: Duplicate entry (errno 1062) (sqlstate 23000)":                                     {1062, true, false},
		"Unavailable desc = no healthy tablet":                                                                                                                                  {1105, true, false},
		"AlreadyExists desc = Duplicate entry '1' for key 't.PRIMARY' (errno 1062) (sqlstate 23000)" + statement:                                                                {1062, false, false},
		"Unknown desc = Statement aborted because lock(s) could not be acquired immediately and NOWAIT is set. (errno 3572) (sqlstate HY000)" + statement:                       {3572, false, false},
		"Unknown desc = Query execution was interrupted, maximum statement execution time exceeded (errno 3024) (sqlstate HY000)" + statement:                                   {3024, false, false},
		"Unknown desc = Query execution was interrupted (errno 1317) (sqlstate 70100)" + statement:                                                                              {1317, false, false},
		"NotFound desc = Table 'vt_shop.x' doesn't exist (errno 1146) (sqlstate 42S02)" + statement:                                                                             {1146, false, false},
	} {
		err := &mysql.MySQLError{Number: c.number, Message: target + text}
		on := server.Info{Flavour: server.Flavour{Tablets: true}}
		if got := on.EndsTransaction(err); got != c.ended {
			t.Errorf("%s: ended %t", text, got)
		}
		if got := (server.Info{}).EndsTransaction(err); got != c.any {
			t.Errorf("%s: ended elsewhere %t", text, got)
		}
		if server.Interrupted(err) && c.ended {
			t.Errorf("%s is taken for a KILL", text)
		}
	}
	for _, text := range []string{"VT12001: unsupported: x", "syntax error at position 49 near 'timestamp'"} {
		if (server.Info{Flavour: server.Flavour{Tablets: true}}).EndsTransaction(&mysql.MySQLError{Number: map[bool]uint16{true: 1235, false: 1105}[strings.HasPrefix(text, "VT")], Message: text}) {
			t.Errorf("%s: ended", text)
		}
	}
}

func TestBuildsOfMySQLAndMariaDBAreNotRefused(t *testing.T) {
	for _, e := range engines.Builds {
		info, sent, err := probeAs(t, e)
		if err != nil || info.Reliable() != nil || !info.SkipLocked || info.MariaDB != strings.Contains(e.Version, "MariaDB") {
			t.Errorf("%+v is taken for %+v, %v", e, info, err)
		}
		if len(sent) != 1 {
			t.Errorf("to recognise %+v %q were sent", e, sent)
		}
	}
}

// TestOldServersAreTooOld, and no other engine, though they do not answer all that newer ones do.
func TestOldServersAreTooOld(t *testing.T) {
	lacks := &mysql.MySQLError{Number: 1064, Message: "syntax error"}
	for _, version := range []string{"5.7.44-log", "10.2.44-MariaDB", "5.5.5-10.2.44-MariaDB"} {
		for _, e := range []fakeserver.Engine{{Version: version}, {Version: version, Lacks: lacks}} {
			info, _, err := probeAs(t, e)
			if err == nil || errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), version+" is too old") || info.Version != version {
				t.Errorf("%+v: %+v, %v", e, info, err)
			}
		}
	}
}

// TestSkipLockedIsInMariaDBFrom10_6 on, in all of MySQL, and in what has a form of its own in neither.
func TestSkipLockedIsInMariaDBFrom10_6(t *testing.T) {
	for version, want := range map[string]bool{
		"10.3.39-MariaDB": false, "10.5.23-MariaDB-0+deb11u1": false, "5.5.5-10.5.23-MariaDB": false,
		"10.6.0-MariaDB": true, "10.11.2-MariaDB": true, "11.8.3-MariaDB": true, "8.0.11": true, "9.7.0": true,
	} {
		info, _, err := probeAs(t, fakeserver.Engine{Version: version})
		dbtest.OK(t, err)
		if info.SkipLocked != want {
			t.Errorf("%s: SKIP LOCKED is %v", version, info.SkipLocked)
		}
		refused := info.Leases()
		if (refused == nil) != want || !want && (!errors.Is(refused, lockerr.ErrUnsafe) || !strings.Contains(refused.Error(), "leases need SKIP LOCKED") || !strings.Contains(refused.Error(), version)) {
			t.Errorf("%s: leases are refused with %v", version, refused)
		}
	}
}

// TestAFailureIsNoAnswer: what is no gap of the engine's is the error of Probe.
func TestAFailureIsNoAnswer(t *testing.T) {
	for _, err := range []error{&mysql.MySQLError{Number: 3024, Message: "maximum statement execution time exceeded"}, mysql.ErrInvalidConn} {
		_, sent, got := probeAs(t, fakeserver.Engine{Version: "8.0.33", Lacks: err})
		if !errors.Is(got, err) || errors.Is(got, lockerr.ErrUnsafe) || len(sent) != 1 {
			t.Errorf("after %v: %v, %q", err, got, sent)
		}
	}
}

// TestServersAreWhatTheyAre: real servers are recognised at once, whatever their settings are.
func TestServersAreWhatTheyAre(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		settings := []string{"sql_select_limit=0", "sql_mode='ANSI,NO_BACKSLASH_ESCAPES'", "group_concat_max_len=4", "sql_safe_updates=1", "autocommit=0", "character_set_results=NULL"}
		for _, setting := range slices.Concat([]string{""}, settings) {
			c := s.Connect()
			if setting != "" {
				s.Exec(c, "SET SESSION "+setting)
			}
			info, err := server.Probe(t.Context(), c)
			dbtest.OK(t, err)
			want := map[bool]string{true: "MariaDB ", false: "MySQL "}[s.MariaDB()] + info.Version
			if info.Engine != want || info.Reliable() != nil || !info.SkipLocked || info.Isolation == "" {
				t.Errorf("with %q it is %+v", setting, info)
			}
		}
	})
}
