package lockprom_test

import (
	"context"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// TestConnectionsAreExportedByUse: those of a handle with maxConns, with the bound, and who waits
// for one. What is not known without maxConns is not there.
func TestConnectionsAreExportedByUse(t *testing.T) {
	db, registry := open(t, tempserver.Require(t)[0], 6)
	dbtest.OK(t, mysqllock.Do(t.Context(), db, "k", func(context.Context) error { return nil }))
	value := func(name string, labels ...string) float64 {
		t.Helper()
		m := metric(gather(t, registry)["mysqllock_connections"+name], labels...)
		if m == nil {
			t.Errorf("there is no mysqllock_connections%s %v", name, labels)
		}
		return m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	var end []func() error
	for range 3 { // three of the six are kept
		tx, err := db.Begin()
		dbtest.OK(t, err)
		end = append(end, tx.Rollback)
	}
	queued := make(chan error)
	go func() { queued <- db.PingContext(t.Context()) }()
	dbtest.Soon(t, "a caller is seen to wait for a connection", func() bool { return value("_waiting", "use=app") == 1 })
	if bound, used := value("_max"), value("", "state=in_use", "use=app"); bound != 6 || used != 3 {
		t.Errorf("of %v connections %v are in use", bound, used)
	}
	before := value("_wait_seconds_total", "use=app")
	for _, f := range end {
		dbtest.OK(t, f())
	}
	dbtest.OK(t, <-queued)
	if n, took := value("_waited_total", "use=app"), value("_wait_seconds_total", "use=app"); n == 0 || took <= before {
		t.Errorf("%v have waited for %v s", n, took)
	}
	for _, use := range []string{"sessions", "leases", "advisory", "control"} {
		if n := value("_waiting", "use="+use); n != 0 {
			t.Errorf("%s: %v wait", use, n)
		}
	}

	_, registry = open(t, tempserver.Require(t)[0])
	families := gather(t, registry)
	if m := families["mysqllock_connections_max"]; m != nil {
		t.Errorf("the bound without maxConns is %v", m)
	}
	all := families["mysqllock_connections"]
	if metric(all, "state=in_use", "use=app") != nil || metric(all, "state=in_use", "use=sessions") == nil {
		t.Errorf("without maxConns there are %v", all)
	}
}
