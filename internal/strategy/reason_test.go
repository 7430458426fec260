package strategy_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestAnEndedLockStatementSaysOnlyWhatIsKnownOfTheKey: a KILL is no sign that somebody has the key, nor is a limit on a
// statement that does not wait. A lock wait that has ended is one.
func TestAnEndedLockStatementSaysOnlyWhatIsKnownOfTheKey(t *testing.T) {
	sentinels := []error{lockerr.ErrTimeout, lockerr.ErrNoAnswer}
	for name, c := range map[string]struct {
		number uint16
		heard  bool // somebody is known to have the key
		wait   time.Duration
		want   error
		locked bool // ErrLocked matches, too
	}{
		"KILL QUERY":                              {1317, false, time.Minute, lockerr.ErrNoAnswer, false},
		"a limit of MySQL's":                      {3024, false, time.Minute, lockerr.ErrNoAnswer, false},
		"a limit of MariaDB's":                    {1969, false, time.Minute, lockerr.ErrNoAnswer, false},
		"KILL QUERY of a caller without a wait":   {1317, false, 0, lockerr.ErrNoAnswer, false},
		"KILL QUERY of a caller that waits":       {1317, true, time.Minute, lockerr.ErrTimeout, true},
		"KILL QUERY beside a holder, not waiting": {1317, true, 0, lockerr.ErrLocked, true},
		"a row that is locked":                    {1205, false, time.Minute, lockerr.ErrTimeout, true},
	} {
		a := &strategy.Attempt{Key: "k", Wait: c.wait, Start: time.Now()}
		a.Heard.Store(c.heard)
		err := a.Explain(t.Context(), strategy.Terms{Strategy: "row"}, &mysql.MySQLError{Number: c.number, Message: "ended"},
			func(context.Context) *lockerr.Holder { return nil })
		if !errors.Is(err, c.want) || errors.Is(err, lockerr.ErrLocked) != c.locked {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		for _, other := range sentinels {
			if other != c.want && errors.Is(err, other) { //nolint:errorlint // which sentinel it is
				t.Errorf("%s: %v is %v, too", name, err, other)
			}
		}
		if c.want != lockerr.ErrLocked && !strings.Contains(err.Error(), "ended") { //nolint:errorlint // which sentinel it is
			t.Errorf("%s: %v does not have what the server said", name, err)
		}
	}
}
