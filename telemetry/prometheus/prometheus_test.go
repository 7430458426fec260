package lockprom_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

func TestEachOutcomeOfALockIsCounted(t *testing.T) {
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			db, registry := open(t, bin)
			experience(t, db)
			families := gather(t, registry)

			histograms := []struct {
				name, outcome, strategy string
				count                   uint64
				least                   float64 // sum
			}{
				{"wait", "acquired", "row", 2, 0},
				{"wait", "acquired", "lease", 1, 0},
				{"wait", "acquired", "advisory", 1, 0},
				{"wait", "acquired", "optimistic", 2, 0},
				{"wait", "refused", "row", 2, 0.03},
				{"hold", "released", "row", 1, 0.03},
				{"hold", "released", "lease", 1, 0.03},
				{"hold", "released", "advisory", 1, 0},
				{"hold", "released", "optimistic", 2, 0},
				{"hold", "lost", "row", 1, 0},
			}
			for _, h := range histograms {
				f := families["mysqllock_"+h.name+"_seconds"]
				got := metric(f, "outcome="+h.outcome, "strategy="+h.strategy).GetHistogram()
				if got.GetSampleCount() != h.count || got.GetSampleSum() < h.least || got.GetSampleSum() > 60 {
					t.Errorf("%+v: %d in %v s", h, got.GetSampleCount(), got.GetSampleSum())
				}
				if len(got.GetBucket()) == 0 || got.Schema != nil {
					t.Errorf("%+v is native, or has no buckets: %v", h, got)
				}
			}
			for name, n := range map[string]int{"wait": 5, "hold": 5} {
				if got := len(families["mysqllock_"+name+"_seconds"].GetMetric()); got != n {
					t.Errorf("%s has %d series: %v", name, got, families["mysqllock_"+name+"_seconds"])
				}
			}
			for _, c := range []struct {
				name    string
				reasons []string
			}{
				{"refused", []string{"locked"}},
				{"refused", []string{"waited"}},
				{"lost", []string{"connection", "lost"}}, // by how the driver finds out
			} {
				f, n := families["mysqllock_"+c.name+"_total"], 0.0
				for _, reason := range c.reasons {
					n += metric(f, "reason="+reason, "strategy=row").GetCounter().GetValue()
				}
				if n != 1 {
					t.Errorf("%+v: %v: %v", c, n, f)
				}
			}
			if m := metric(families["mysqllock_lost_total"], "reason=lost", "strategy=lease"); m == nil || m.GetCounter().GetValue() != 0 {
				t.Errorf("of what has never happened there is %v", m)
			}
			dbtest.Equal(t, "%v conflicts", metric(families["mysqllock_conflicts_total"]).GetCounter().GetValue(), 1)
		})
	}
}

func TestSessionsAndWaitersAreExported(t *testing.T) {
	db, registry := open(t, tempserver.Require(t)[0])
	value := func(name string, labels ...string) float64 {
		m := metric(gather(t, registry)["mysqllock_"+name], labels...)
		if m.GetCounter() != nil {
			return m.GetCounter().GetValue()
		}
		return m.GetGauge().GetValue()
	}
	dbtest.Equal(t, "at most %v sessions", value("sessions_max"), 16)
	hold, err := mysqllock.Acquire(t.Context(), db, "k")
	dbtest.OK(t, err)
	if used, n := value("sessions", "state=in_use"), value("sessions_acquired_total"); used != 1 || n < 1 {
		t.Errorf("%v are in use, %v were handed out", used, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error)
	go func() {
		h, err := mysqllock.Acquire(ctx, db, "k")
		if err == nil {
			err = h.Release()
		}
		waited <- err
	}()
	for deadline := time.Now().Add(time.Minute); value("waiters") != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody is seen to wait")
		}
	}
	dbtest.OK(t, hold.Release())
	dbtest.OK(t, <-waited)
	cancel()
	dbtest.Equal(t, "%v still wait", value("waiters"), 0)
}

func TestStatsOfAnotherDriverAreRefused(t *testing.T) {
	db, err := sql.Open("mysql", "/")
	dbtest.OK(t, err)
	defer db.Close()
	if stats, err := lockprom.NewStatsCollector(db); stats != nil || err == nil || !strings.Contains(err.Error(), `not with "mysqllock"`) {
		t.Errorf("it is %v, with %v", stats, err)
	}
}

// The dashboard shows what is exported, and nothing else.
func TestTheDashboardShowsAllThatIsExported(t *testing.T) {
	db, registry := open(t, tempserver.Require(t)[0], 12)
	experience(t, db)
	families := gather(t, registry)
	text, err := os.ReadFile("../grafana/dashboard.json")
	dbtest.OK(t, err)
	var dashboard struct {
		Title  string
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	dbtest.OK(t, json.Unmarshal(text, &dashboard))
	selector := regexp.MustCompile(`(mysqllock_[a-z_]+)(\{[^}]*\})?`)
	label := regexp.MustCompile(`([a-z_]+)(=~|=|!=|!~)"([^"]*)"`)
	grouping := regexp.MustCompile(`by ?\(([^)]*)\)`)
	legend := regexp.MustCompile(`\{\{([^}]*)\}\}`)
	known := []string{"le", "instance", "job"}
	shown := make(map[string]bool)
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			var labels []string
			for _, m := range selector.FindAllStringSubmatch(target.Expr, -1) {
				name := m[1]
				f := families[name]
				for _, suffix := range []string{"_bucket", "_sum", "_count"} {
					base, found := strings.CutSuffix(name, suffix)
					if found && families[base].GetType() == dto.MetricType_HISTOGRAM {
						name, f = base, families[base]
					}
				}
				if f == nil {
					t.Errorf("%q shows %s, which is not exported", panel.Title, m[1])
					continue
				}
				shown[name] = true
				for _, l := range f.GetMetric()[0].GetLabel() {
					labels = append(labels, l.GetName())
				}
				for _, l := range label.FindAllStringSubmatch(m[2], -1) {
					if !slices.Contains(labels, l[1]) && !slices.Contains(known, l[1]) {
						t.Errorf("%q selects by %s, which %s has not", panel.Title, l[1], name)
					}
				}
			}
			if len(labels) == 0 && !strings.Contains(target.Expr, "mysqllock_") {
				t.Errorf("%q shows nothing: %s", panel.Title, target.Expr)
			}
			var groups []string
			for _, m := range grouping.FindAllStringSubmatch(target.Expr, -1) {
				for by := range strings.SplitSeq(m[1], ",") {
					if by = strings.TrimSpace(by); !slices.Contains(labels, by) && !slices.Contains(known, by) {
						t.Errorf("%q groups by %s, which there is not", panel.Title, by)
					}
					groups = append(groups, by)
				}
			}
			for _, m := range legend.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !slices.Contains(groups, m[1]) {
					t.Errorf("%q has a legend by %s, of which there can be several: %s", panel.Title, m[1], target.Expr)
				}
			}
		}
	}
	for name := range families {
		if !shown[name] {
			t.Errorf("%s is exported, and not shown", name)
		}
	}
}
