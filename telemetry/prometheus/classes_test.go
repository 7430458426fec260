package lockprom_test

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

// TestEventsAreCountedByTheClassOfTheirKeys: once for each class.
func TestEventsAreCountedByTheClassOfTheirKeys(t *testing.T) {
	locks, registry := lockprom.NewWithClasses(inspect.Classes("order:*")), prometheus.NewPedanticRegistry()
	registry.MustRegister(locks)
	for _, e := range []mysqllock.Event{
		{Kind: mysqllock.Acquired, Keys: []string{"order:1", "order:2", "x"}, Duration: 2 * time.Second},
		{Kind: mysqllock.Refused, Keys: []string{"order:3"}, Duration: time.Minute, Err: mysqllock.ErrTimeout},
		{Kind: mysqllock.Lost, Keys: []string{"order:1"}, Err: mysqllock.ErrLost},
		{Kind: mysqllock.Advised, Err: mysqllock.ErrExhausted},
	} {
		e.Strategy = "row"
		locks.Observe(t.Context(), e)
	}
	waits, lost := gather(t, registry)["mysqllock_class_wait_seconds"], gather(t, registry)["mysqllock_class_lost_total"]
	for labels, want := range map[string]float64{"class=order:* outcome=acquired": 2, "class=order:* outcome=refused": 60, "class=other outcome=acquired": 2} {
		if m := metric(waits, labels); m == nil || m.GetHistogram().GetSampleSum() != want || m.GetHistogram().GetSampleCount() != 1 {
			t.Errorf("%s: %v, want one of %v s", labels, m, want)
		}
	}
	for class, want := range map[string]float64{"order:*": 1, "other": 0} {
		if m := metric(lost, "class="+class); m == nil || m.GetCounter().GetValue() != want {
			t.Errorf("of %s %v were lost, want %v", class, m, want)
		}
	}
}
