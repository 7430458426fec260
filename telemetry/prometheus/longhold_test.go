package lockprom_test

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

func TestLongHolds(t *testing.T) {
	locks, registry := lockprom.New(), prometheus.NewPedanticRegistry()
	registry.MustRegister(locks)
	for range 2 {
		locks.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.LongHold, Strategy: "lease", Keys: []string{"k"}, Long: true})
	}
	holds := gather(t, registry)["mysqllock_long_holds_total"]
	for strategy, want := range map[string]float64{"lease": 2, "row": 0} {
		if m := metric(holds, "strategy="+strategy); m == nil || m.GetCounter().GetValue() != want {
			t.Errorf("%s: %v, want %v", strategy, m, want)
		}
	}
}
