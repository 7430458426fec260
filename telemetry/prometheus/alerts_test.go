package lockprom_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

var (
	alertRule     = regexp.MustCompile(`(?s)- alert: (\w+)\n\s+expr: ([^\n]+)\n(.*?)(?:\n\n|$)`)
	alertSelector = regexp.MustCompile(`(mysqllock_[a-z_]+)(\{[^}]*\})?`)
	alertMatcher  = regexp.MustCompile(`([a-z_]+)(=~|=|!=|!~)"([^"]*)"`)
	alertGroups   = regexp.MustCompile(`by \(([^)]*)\)`)
	alertSeries   = regexp.MustCompile(`series: '(mysqllock_[a-z_]+)(\{[^']*\})'`)
	alertLabel    = regexp.MustCompile(`\$labels\.([a-z_]+)`)
)

// The alerts ask for what is exported, by labels and values that there are, and say
// nothing of labels that they have summed up.
func TestAlertsAskOnlyForWhatIsExported(t *testing.T) {
	db, registry := open(t, tempserver.Require(t)[0], 8)
	experience(t, db)
	families := gather(t, registry)
	text, err := os.ReadFile("../grafana/alerts.yaml")
	dbtest.OK(t, err)
	rules := alertRule.FindAllStringSubmatch(string(text), -1)
	if n := strings.Count(string(text), "- alert:"); n == 0 || len(rules) != n {
		t.Fatalf("of %d alerts %d are read", n, len(rules))
	}
	for _, rule := range rules {
		name, expr, says := rule[1], rule[2], rule[3]
		labels := checkSelectors(t, name, expr, families)
		checkGrouping(t, name, expr, says, labels)
	}
}

// checkSelectors checks that what the rule asks for is exported, and returns the labels of
// that, with the values that are seen.
func checkSelectors(t *testing.T, name, expr string, families map[string]*dto.MetricFamily) map[string][]string {
	t.Helper()
	labels := map[string][]string{"job": nil, "instance": nil, "db": nil, "le": nil}
	selectors := alertSelector.FindAllStringSubmatch(expr, -1)
	if len(selectors) == 0 {
		t.Errorf("%s asks for nothing: %s", name, expr)
	}
	for _, s := range selectors {
		f := families[s[1]]
		if base, found := strings.CutSuffix(s[1], "_bucket"); found {
			f = families[base]
		}
		if f == nil {
			t.Errorf("%s asks for %s, which is not exported", name, s[1])
			continue
		}
		values := labelValues(f)
		for l, all := range values {
			labels[l] = append(labels[l], all...)
		}
		for _, m := range alertMatcher.FindAllStringSubmatch(s[2], -1) {
			scraped := slices.Contains([]string{"job", "instance", "db", "le"}, m[1]) // not the driver's own
			if !scraped && !slices.Contains(values[m[1]], m[3]) {
				t.Errorf("%s asks for %s%s%s, of which %s has %q", name, m[1], m[2], m[3], s[1], values[m[1]])
			}
		}
	}
	return labels
}

// checkGrouping checks that the rule sums by labels that there are, and says no others.
func checkGrouping(t *testing.T, name, expr, says string, labels map[string][]string) {
	t.Helper()
	var groups []string
	for _, m := range alertGroups.FindAllStringSubmatch(expr, -1) {
		for by := range strings.SplitSeq(m[1], ", ") {
			if _, known := labels[by]; !known {
				t.Errorf("%s sums by %s, which there is not", name, by)
			}
			groups = append(groups, by)
		}
	}
	for _, m := range alertLabel.FindAllStringSubmatch(says, -1) {
		if !slices.Contains(groups, m[1]) {
			t.Errorf("%s says %s, which its expression has not: %s", name, m[1], expr)
		}
	}
}

// TestEachAlertFiresOnlyWhenItShould: as promtool finds. The series of its tests are such as are
// exported.
func TestEachAlertFiresOnlyWhenItShould(t *testing.T) {
	out, err := exec.Command(installed(t, "promtool"), "test", "rules", "../grafana/alerts_test.yaml").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile("../grafana/alerts_test.yaml")
	dbtest.OK(t, err)
	rules, err := os.ReadFile("../grafana/alerts.yaml")
	dbtest.OK(t, err)
	for _, rule := range alertRule.FindAllStringSubmatch(string(rules), -1) {
		if name := rule[1]; !strings.Contains(string(text), `alertname="`+name+`"`) && !strings.Contains(string(text), "alertname: "+name) {
			t.Errorf("%s is not seen to fire", name)
		}
	}
	db, registry := open(t, tempserver.Require(t)[0], 8)
	experience(t, db)
	families := gather(t, registry)
	series := alertSeries.FindAllStringSubmatch(string(text), -1)
	if n := strings.Count(string(text), "series: "); n == 0 || len(series) != n {
		t.Fatalf("of %d series %d are read", n, len(series))
	}
	for _, s := range series {
		checkSelectors(t, "a test", s[1]+s[2], families)
	}
}

// TestTheAlertsSeeThatTheBudgetIsExhausted: with any maxConns, the rule for the budget sees all of it used when a
// caller gets ErrExhausted, whatever the driver has kept connections for. So does the rule for that error, from the
// first time on.
func TestTheAlertsSeeThatTheBudgetIsExhausted(t *testing.T) {
	for _, maxConns := range []int{5, 6, 8, 10} {
		db, registry := open(t, tempserver.Require(t)[0], maxConns)
		experience(t, db) // with a lease
		refused := func() float64 {
			return metric(gather(t, registry)["mysqllock_refused_total"], "reason=exhausted", "strategy=row").GetCounter().GetValue()
		}
		if n := refused(); n != 0 {
			t.Errorf("maxConns %d: before it is exhausted, %v are refused", maxConns, n)
		}
		budget := func() (used, usable float64) {
			families := gather(t, registry)
			for _, m := range families["mysqllock_connections"].GetMetric() {
				if l := m.GetLabel(); l[0].GetValue() != "idle" && l[1].GetValue() != "control" { // state, use
					used += m.GetGauge().GetValue()
				}
			}
			return used, metric(families["mysqllock_connections_max"]).GetGauge().GetValue() - metric(families["mysqllock_connections_reserved"]).GetGauge().GetValue()
		}
		var holds []*mysqllock.Hold
		for {
			wait := lockctx.Wait(time.Millisecond)
			if used, usable := budget(); used != usable {
				wait = lockctx.Wait(20 * time.Second) // a server that does not answer in time exhausts it, too
			}
			hold, err := mysqllock.Acquire(dbtest.Limited(t), db, fmt.Sprint(len(holds)), wait)
			if errors.Is(err, mysqllock.ErrExhausted) {
				break
			}
			dbtest.OK(t, err)
			holds = append(holds, hold)
		}
		if used, usable := budget(); used != usable {
			t.Errorf("maxConns %d: %v of %v are used by %d: %v", maxConns, used, usable, len(holds), gather(t, registry)["mysqllock_connections"])
		}
		if n := refused(); n != 1 {
			t.Errorf("maxConns %d: %v are refused as exhausted", maxConns, n)
		}
		for _, hold := range holds {
			dbtest.OK(t, hold.Release())
		}
	}
}

// labelValues are the labels that the metrics have, and what is seen of each.
func labelValues(f *dto.MetricFamily) map[string][]string {
	out := make(map[string][]string)
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			out[l.GetName()] = append(out[l.GetName()], l.GetValue())
		}
	}
	return out
}
