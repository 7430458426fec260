package lockprom_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

func TestALongHoldIsCountedUntilItEnds(t *testing.T) {
	locks, registry := lockprom.New(), prometheus.NewPedanticRegistry()
	registry.MustRegister(locks)
	now := func() float64 {
		return metric(gather(t, registry)["mysqllock_active_long_holds"], "strategy=lease").GetGauge().GetValue()
	}
	for range 2 {
		locks.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.LongHold, Strategy: "lease", Keys: []string{"k"}, Long: true})
	}
	holds := gather(t, registry)["mysqllock_long_holds_total"]
	for strategy, want := range map[string]float64{"lease": 2, "row": 0} {
		if m := metric(holds, "strategy="+strategy); m == nil || m.GetCounter().GetValue() != want {
			t.Errorf("%s: %v, want %v", strategy, m, want)
		}
	}
	dbtest.Equal(t, "%v last now", now(), 2)
	locks.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Released, Strategy: "lease", Held: time.Second}) // a short one
	locks.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Released, Strategy: "lease", Long: true})
	dbtest.Equal(t, "%v last when one has ended", now(), 1)
	locks.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Lost, Strategy: "lease", Long: true, Err: mysqllock.ErrLost})
	dbtest.Equal(t, "%v last when the other one is lost", now(), 0)
}

func TestStandingByForALeadershipIsNoWait(t *testing.T) {
	locks, registry := lockprom.NewWithClasses(func(string) string { return "all" }), prometheus.NewPedanticRegistry()
	registry.MustRegister(locks)
	for _, kind := range []mysqllock.EventKind{mysqllock.Acquired, mysqllock.Refused, mysqllock.Released} {
		locks.Observe(t.Context(), mysqllock.Event{Kind: kind, Strategy: "lease", Keys: []string{"k"}, Leadership: true, Duration: time.Hour, Held: time.Hour, Err: map[mysqllock.EventKind]error{mysqllock.Refused: mysqllock.ErrTimeout}[kind]})
	}
	all := gather(t, registry)
	if all["mysqllock_wait_seconds"] != nil || all["mysqllock_class_wait_seconds"] != nil {
		t.Errorf("it is a wait: %v, %v", all["mysqllock_wait_seconds"], all["mysqllock_class_wait_seconds"])
	}
	dbtest.Equal(t, "%v are refused", metric(all["mysqllock_refused_total"], "reason=waited", "strategy=lease").GetCounter().GetValue(), 1)
}
