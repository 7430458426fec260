package inspect_test

import (
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/fakeserver/engines"
	"github.com/mysqllock/mysqllock/lockerr"
)

func inspectorOn(t *testing.T, e fakeserver.Engine) (*fakeserver.Server, *inspect.Inspector) {
	t.Helper()
	s := fakeserver.New()
	s.Be(e)
	db := sql.OpenDB(s)
	t.Cleanup(func() { db.Close() })
	i, err := inspect.New(db, inspect.Options{})
	dbtest.OK(t, err)
	return s, i
}

// TestAnotherEngineIsRefused: the doctor says of an engine what the driver says, and whoever
// looks at its locks is not told that nobody holds any. Nothing is sent but the question what
// the server is.
func TestAnotherEngineIsRefused(t *testing.T) {
	for name, all := range engines.Foreign {
		for _, e := range all {
			s, i := inspectorOn(t, e)
			d, err := i.Doctor(t.Context())
			dbtest.OK(t, err)
			says := "the server is " + name + ", wh"
			if d.Version != e.Version || d.MariaDB || len(d.Verdicts) != 4 || safe(d) != "" || len(d.Checks) != 1 {
				t.Errorf("%s: the diagnosis is %+v", name, d)
			}
			for _, v := range d.Verdicts {
				if len(v.Why) != 1 || !strings.Contains(v.Why[0], says) {
					t.Errorf("%s: %s is unsafe because of %q", name, v.Strategy, v.Why)
				}
			}
			if c := check(d, "server"); c.State != inspect.Failure || !strings.Contains(c.Detail, says) || c.Remedy == "" {
				t.Errorf("%s: the check is %+v", name, c)
			}
			for what, look := range map[string]func() error{
				"Snapshot": func() error {
					_, err := i.Snapshot(t.Context(), inspect.Filter{})
					return err
				},
				"Release": func() error {
					_, err := i.Release(t.Context(), inspect.Lock{Key: "k", Strategy: "row"}, "")
					return err
				},
				"Clean": func() error {
					_, err := i.Clean(t.Context(), inspect.CleanUp{Unused: time.Hour})
					return err
				},
				"DropTable": func() error {
					_, err := i.DropTable(t.Context())
					return err
				},
				"MakeTable": func() error {
					_, err := i.MakeTable(t.Context())
					return err
				},
			} {
				if err := look(); !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), says) {
					t.Errorf("%s, %s: got %v", name, what, err)
				}
			}
			for _, text := range s.Sent() {
				if text != "SHOW VITESS_SHARDS" && !strings.HasPrefix(text, "SELECT VERSION()") && !strings.HasPrefix(text, "SELECT @@version,") {
					t.Errorf("%s: sent %q", name, text)
				}
			}
		}
	}
}

// TestOldServersAreToldOf, with what they are, and nothing else is asked there.
func TestOldServersAreToldOf(t *testing.T) {
	s, i := inspectorOn(t, fakeserver.Engine{Version: "5.7.44"})
	d, err := i.Doctor(t.Context())
	dbtest.OK(t, err)
	if c := check(d, "server"); c.State != inspect.Failure || !strings.Contains(c.Detail, "5.7.44 is too old") || safe(d) != "" {
		t.Errorf("the diagnosis is %+v", d)
	}
	if sent := s.Sent(); len(sent) != 1 {
		t.Errorf("sent %q", sent)
	}
}
