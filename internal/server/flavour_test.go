package server_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

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
			if err != nil || info.RowLocks || info.SkipLocked && (strings.HasPrefix(name, "TiDB") || strings.HasPrefix(name, "Dolt")) {
				t.Errorf("%+v is taken for %+v, %v", e, info, err)
				continue
			}
			if err := info.Reliable(); !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "the server is "+name+", wh") || !strings.Contains(err.Error(), "lockUnsafe=allow") {
				t.Errorf("%+v is refused with %v", e, err)
			}
			if want := 1; e.Lacks == nil && len(sent) != want {
				t.Errorf("to recognise %+v %q were sent", e, sent)
			}
			if info.Version != e.Version || info.Database != "shop" {
				t.Errorf("of %+v is known %+v", e, info)
			}
		}
	}
}

func TestBuildsOfMySQLAndMariaDBAreNotRefused(t *testing.T) {
	for _, e := range engines.Builds {
		info, sent, err := probeAs(t, e)
		if err != nil || info.Reliable() != nil || info.Skips("leases", "") != nil || info.MariaDB != strings.Contains(e.Version, "MariaDB") {
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
		refused := info.Skips("leases", "use a row lock")
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
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		settings := []string{"sql_select_limit=0", "sql_mode='ANSI,NO_BACKSLASH_ESCAPES'", "group_concat_max_len=4", "sql_safe_updates=1", "autocommit=0", "character_set_results=NULL"}
		for _, setting := range slices.Concat([]string{""}, settings) {
			c := s.Connect()
			if setting != "" {
				s.Exec(c, "SET SESSION "+setting)
			}
			info, err := server.Probe(t.Context(), c)
			dbtest.OK(t, err)
			want := map[bool]string{true: "MariaDB ", false: "MySQL "}[s.MariaDB()] + info.Version
			if info.Engine != want || info.Reliable() != nil || info.Skips("leases", "") != nil || info.Isolation == "" || info.Node == "" {
				t.Errorf("with %q it is %+v", setting, info)
			}
		}
	})
}
