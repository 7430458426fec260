package strategy_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

var (
	row        = strategy.Traits{Name: hint.StrategyRow, Table: true, Inside: true, Excludes: true}
	lease      = strategy.Traits{Name: hint.StrategyLease, Table: true, Excludes: true}
	optimistic = strategy.Traits{Name: hint.StrategyOptimistic, Table: true}
)

func resource(key, row string, traits strategy.Traits, kind hint.Kind) strategy.Resource {
	kind.Strategy = traits.Name
	return strategy.Resource{Lock: hint.Lock{Key: key, Kind: kind}, Traits: traits, Row: row}
}

// TestWhatIsKeptAtTheSameRowIsLockedOnce, if the space is the same, too, as strictly as any of
// those that ask for it.
func TestWhatIsKeptAtTheSameRowIsLockedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		resources []strategy.Resource
		want      string
	}{
		"sorted":                    {[]strategy.Resource{resource("b", "2", row, hint.Kind{}), resource("a", "1", row, hint.Kind{})}, "1:row[] 2:row[]"},
		"shared and exclusive":      {[]strategy.Resource{resource("a", "1", row, hint.Kind{Shared: true}), resource("a", "1", row, hint.Kind{})}, "1:row[]"},
		"both shared":               {[]strategy.Resource{resource("a", "1", row, hint.Kind{Shared: true}), resource("a", "1", row, hint.Kind{Shared: true})}, "1:row[] shared"},
		"the lower number of slots": {[]strategy.Resource{resource("a", "1", row, hint.Kind{Slots: 5}), resource("a", "1", row, hint.Kind{Slots: 3})}, "1:row[] 3 slots"},
		"slots and none are two":    {[]strategy.Resource{resource("a", "1", row, hint.Kind{Slots: 5}), resource("a", "1", row, hint.Kind{})}, "1:row[] 1:row[] 5 slots"},
		"a stripe with a lease":     {[]strategy.Resource{resource("a", "1", row, hint.Kind{}), resource("b", "1", lease, hint.Kind{})}, "1:lease[b]"},
		"a version beside a lock":   {[]strategy.Resource{resource("a", "1", row, hint.Kind{}), resource("a", "1", optimistic, hint.Kind{})}, "1:optimistic[] 1:row[]"},
		"the older version":         {[]strategy.Resource{resource("a", "1", optimistic, hint.Kind{Version: 7}), resource("b", "1", optimistic, hint.Kind{Version: 4})}, "1:optimistic[b] version 4"},
		"a version and none":        {[]strategy.Resource{resource("a", "1", optimistic, hint.Kind{}), resource("a", "1", optimistic, hint.Kind{Version: 4})}, "1:optimistic[] version 4"},
	} {
		var got []string
		for _, p := range strategy.Merge(c.resources) {
			s := fmt.Sprintf("%s:%s%v", p.Row, p.Traits.Name, p.Also)
			if p.Shared {
				s += " shared"
			}
			if p.Slots > 0 {
				s += fmt.Sprintf(" %d slots", p.Slots)
			}
			if p.Version > 0 {
				s += fmt.Sprintf(" version %d", p.Version)
			}
			got = append(got, s)
		}
		if got := strings.Join(got, " "); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestErrorsNameTheCallersKeysNotTheRows: each once, and sorted.
func TestErrorsNameTheCallersKeysNotTheRows(t *testing.T) {
	resources := []strategy.Resource{resource("b", "1", row, hint.Kind{}), resource("a", "2", row, hint.Kind{}), resource("b", "1", optimistic, hint.Kind{})}
	err := strategy.Naming(fmt.Errorf("around: %w", &lockerr.Error{Key: "1, 2", Err: lockerr.ErrLocked}), resources)
	var e *lockerr.Error
	if !errors.As(err, &e) || e.Key != "a, b" {
		t.Errorf("%v", err)
	}
	if err := strategy.Naming(&lockerr.Error{Err: lockerr.ErrClosed}, resources); strings.Contains(err.Error(), "a, b") {
		t.Errorf("an error that was about no key names one: %v", err)
	}
	dbtest.Equal(t, "%q", strategy.Label(resources[:1]), "b")
}

func TestAnErrorExplainsWhyALockWasNotTaken(t *testing.T) {
	terms := strategy.Terms{Strategy: hint.StrategyRow, Grants: "SELECT", Writes: "nothing can be locked"}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	of := func(number uint16) error { return &mysql.MySQLError{Number: number, Message: "server"} }
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		want []error
		says string
	}{
		"the wait is over":         {context.Background(), strategy.ErrWaitOver, []error{lockerr.ErrTimeout, lockerr.ErrLocked}, "not granted within the wait"},
		"the wait is over, and so": {ended, strategy.ErrWaitOver, []error{lockerr.ErrTimeout}, "not granted within the wait"},
		"cancelled":                {ended, errors.New("closed"), []error{lockerr.ErrTimeout, context.Canceled}, ""},
		"exhausted, cancelled":     {ended, lockerr.ErrExhausted, []error{lockerr.ErrTimeout, context.Canceled}, ""},
		"exhausted":                {context.Background(), lockerr.ErrExhausted, []error{lockerr.ErrExhausted}, ""},
		"full":                     {context.Background(), of(1040), []error{lockerr.ErrExhausted}, ""},
		"locked":                   {context.Background(), lockerr.ErrLocked, []error{lockerr.ErrLocked}, ""},
		"deadlock":                 {context.Background(), of(1213), []error{lockerr.ErrDeadlock}, ""},
		"deadlock of named locks":  {context.Background(), of(3058), []error{lockerr.ErrDeadlock}, ""},
		"killed":                   {context.Background(), of(1317), []error{lockerr.ErrTimeout}, "KILL"},
		"read-only":                {context.Background(), of(1290), []error{lockerr.ErrUnsafe}, "takes no writes, so nothing can be locked"},
		"denied":                   {context.Background(), of(1142), nil, "the account needs SELECT"},
		"shared by a router":       {context.Background(), of(3566), []error{lockerr.ErrUnsafe}, "connection_sharing=0"},
		"broken":                   {context.Background(), driver.ErrBadConn, []error{lockerr.ErrNoAnswer}, "the connection broke, and the lock is not held"},
		"ended by the server":      {context.Background(), of(1053), []error{lockerr.ErrNoAnswer}, "it went away"},
		"lost before":              {context.Background(), lockerr.With(lockerr.ErrLost, mysql.ErrInvalidConn), []error{lockerr.ErrLost}, ""},
	} {
		a := &strategy.Attempt{Key: "k", Wait: time.Hour, Start: time.Now().Add(-time.Minute)}
		a.Heard.Store(true)
		err := a.Explain(c.ctx, terms, c.err, nil)
		for _, want := range c.want {
			if !errors.Is(err, want) {
				t.Errorf("%s: %v is not %v", name, err, want)
			}
		}
		var e *lockerr.Error
		if !strings.Contains(err.Error(), c.says) || !errors.As(err, &e) || e.Waited < time.Minute || e.Op != "lock" || e.Key != "k" {
			t.Errorf("%s: %v", name, err)
		}
		if errors.Is(err, driver.ErrBadConn) {
			t.Errorf("%s: database/sql would try %v again", name, err)
		}
		if errors.Is(err, lockerr.ErrTimeout) && (errors.Is(err, lockerr.ErrExhausted) || errors.Is(err, lockerr.ErrNoAnswer)) {
			t.Errorf("%s is two things: %v", name, err)
		}
	}
	a := &strategy.Attempt{Key: "k", Wait: time.Hour, Start: time.Now()}
	a.Heard.From(driver.ErrBadConn)
	for name, err := range map[string]error{
		"the wait is over":      a.Explain(context.Background(), terms, strategy.ErrWaitOver, nil),
		"no answer in time":     a.Explain(context.Background(), terms, context.DeadlineExceeded, nil),
		"cancelled, no answer":  a.Explain(ended, terms, errors.New("closed"), nil),
		"cancelled, wait is up": a.Explain(ended, terms, strategy.ErrWaitOver, nil),
	} {
		cancelled := strings.HasPrefix(name, "cancelled")
		if !errors.Is(err, lockerr.ErrNoAnswer) || errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrExhausted) || errors.Is(err, context.Canceled) != cancelled ||
			errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "has not answered") {
			t.Errorf("silence, %s: %v", name, err)
		}
	}
	dbtest.Is(t, "the server's answer is none", a.Explain(ended, terms, of(1317), nil), lockerr.ErrTimeout)
	if err := terms.Failure("release", "k", driver.ErrBadConn); errors.Is(err, driver.ErrBadConn) {
		t.Errorf("database/sql would try %v again", err)
	}
}
