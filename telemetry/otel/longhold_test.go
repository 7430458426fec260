package lockotel_test

import (
	"context"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/telemetry/otel"
)

// TestALongHoldIsCountedAndInItsSpan: it is counted while it lasts, and its span says so also where
// that began with the hold.
func TestALongHoldIsCountedAndInItsSpan(t *testing.T) {
	for name, statements := range map[string]bool{"spans of locks": false, "spans of statements, too": true} {
		t.Run(name, func(t *testing.T) {
			r := recordWith(t, tempserver.Require(t)[0], lockotel.Options{}, func(locks *lockotel.Observer) mysqllock.Config {
				cfg := mysqllock.Config{Observer: locks, LongHold: time.Millisecond}
				if statements {
					cfg.Base = intercept.With(locks.Statements())
				}
				return cfg
			})
			ctx, parent := r.tracer.Start(dbtest.Limited(t), "parent")
			dbtest.OK(t, mysqllock.Do(ctx, r.db, "k", func(context.Context) error {
				dbtest.Soon(t, "it lasts now", func() bool {
					now, _ := r.collect()["mysqllock.lock.active_long_holds"].Data.(metricdata.Sum[int64])
					return len(now.DataPoints) == 1 && now.DataPoints[0].Value == 1 && !now.IsMonotonic
				})
				dbtest.Soon(t, "it is counted", func() bool {
					held, _ := r.collect()["mysqllock.lock.long_holds"].Data.(metricdata.Sum[int64])
					if len(held.DataPoints) != 1 {
						return false
					}
					p := held.DataPoints[0]
					strategy, _ := p.Attributes.Value("mysqllock.strategy")
					return p.Value == 1 && strategy.AsString() == "row" && held.IsMonotonic
				})
				return nil
			}))
			dbtest.Equal(t, "at its end %d last", r.collect()["mysqllock.lock.active_long_holds"].Data.(metricdata.Sum[int64]).DataPoints[0].Value, 0)
			parent.End()
			spans := r.children(parent)
			for _, name := range []string{"acquire lock", "hold lock", "release lock"} {
				if s := spans[name]; s == nil || has(s, attribute.Bool("mysqllock.long", true)) != (name == "hold lock") {
					t.Errorf("%s: %v", name, s)
				}
			}
		})
	}
}
