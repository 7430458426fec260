package lockotel_test

import (
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

// TestEventsAreCountedByTheClassOfTheirKeys: once for each class.
func TestEventsAreCountedByTheClassOfTheirKeys(t *testing.T) {
	reader := metric.NewManualReader()
	locks, err := lockotel.New(lockotel.Options{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader)), Class: inspect.Classes("order:*")})
	dbtest.OK(t, err)
	for _, e := range []mysqllock.Event{
		{Kind: mysqllock.Acquired, Keys: []string{"order:1", "order:2", "x"}, Duration: 2 * time.Second},
		{Kind: mysqllock.Refused, Keys: []string{"order:3"}, Duration: time.Minute, Err: mysqllock.ErrTimeout},
		{Kind: mysqllock.Lost, Keys: []string{"order:1"}, Err: mysqllock.ErrLost},
	} {
		e.Strategy, e.Start = "row", time.Now()
		locks.Observe(t.Context(), e)
	}
	var all metricdata.ResourceMetrics
	dbtest.OK(t, reader.Collect(t.Context(), &all))
	got := make(map[string]float64)
	for _, m := range all.ScopeMetrics[0].Metrics {
		switch data := m.Data.(type) {
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				class, _ := p.Attributes.Value("mysqllock.key_class")
				why, _ := p.Attributes.Value("error.type")
				got[m.Name+" "+class.AsString()+" "+why.AsString()] = p.Sum
			}
		case metricdata.Sum[int64]:
			for _, p := range data.DataPoints {
				class, _ := p.Attributes.Value("mysqllock.key_class")
				got[m.Name+" "+class.AsString()] = float64(p.Value)
			}
		}
	}
	for name, want := range map[string]float64{
		"mysqllock.key_class.wait_time order:* ": 2, "mysqllock.key_class.wait_time other ": 2,
		"mysqllock.key_class.wait_time order:* waited": 60, "mysqllock.key_class.losses order:*": 1,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v: %v", name, got[name], want, got)
		}
	}
}
