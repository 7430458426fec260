package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

func TestMain(m *testing.M) {
	if isChild, err := runChild(os.Args[1:]); isChild {
		exit(err)
	}
	os.Exit(m.Run())
}

// TestEachWorkloadHasItsFigures: all run once, in seconds. The figures mean nothing.
func TestEachWorkloadHasItsFigures(t *testing.T) {
	r, err := measure(t.Context(), testLog{t}, 1, regexp.MustCompile(""), true, []time.Duration{farDelay})
	dbtest.OK(t, err)
	if len(r.Missing) > 0 {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s must be installed in CI: see scripts", strings.Join(r.Missing, ", "))
		}
		t.Logf("not installed, so not tested: %s; make servers rivals installs them", strings.Join(r.Missing, ", "))
	}
	at := make(addresses)
	for name := range r.Versions {
		at[name] = "there"
	}
	for _, want := range []struct {
		of      label
		names   []string
		figures []string
	}{
		{label{Workload: uncontended, N: 1}, alone, []string{timeEach, statements}},
		{label{Workload: uncontended, N: 1, Delay: farDelay}, locks, []string{timeEach}},
		{label{Workload: transaction, N: 1}, transactionNames(), []string{timeEach}},
		{label{Workload: transaction, N: 1, Delay: farDelay}, transactionNames(), []string{timeEach}},
		{label{Workload: decision, N: 1}, apartNames, []string{timeEach}},
		{label{Workload: decision, N: 1, Delay: farDelay}, apartNames, []string{timeEach}},
		{label{Workload: oneWrite, N: 1}, wroteNames, []string{timeEach}},
		{label{Workload: oneWrite, N: 1, Delay: farDelay}, wroteNames, []string{timeEach}},
		{label{Workload: busy, N: 64}, busyNames, []string{rate, waitMean}},
		{label{Workload: withoutHint, N: 1}, plainNames, []string{timeEach, allocated}},
		{label{Workload: oneKey, N: 100}, oneKeyNames, []string{rate}},
		{label{Workload: fourKeys, N: 24}, fourKeysNames, []string{rate}},
		{label{Workload: bounded, N: 64}, boundedNames, []string{rate, waitMean, waitLate, allocated}},
		{label{Workload: fullBudget, N: 64}, fullNames, []string{rate, waitMean}},
		{label{Workload: rush, N: 100}, hotRowFew, []string{pingLate, readLate}},
		{label{Workload: distinct, N: 64}, ownKeys, []string{rate}},
		{label{Workload: hot, N: 8}, loaded, []string{rate, waitMean, waitLongest, statements}},
		{label{Workload: burst, N: 64}, []string{row, lease, advisory, getLock}, []string{allHadIt}},
		{label{Workload: processes, N: 16}, loaded, []string{rate, shareLeast}},
		{label{Workload: handoff, N: 1}, passing, []string{latency}},
		{label{Workload: handoff, N: 1, Delay: farDelay}, passing, []string{latency}},
		{label{Workload: manyHolds, N: 1000 / 20}, keeping, []string{taking, freeing, clientBytes, sockets}},
	} {
		for _, name := range want.names {
			for _, c := range available(contenders(), at) {
				l := want.of
				l.Contender, l.Server = c.Name, c.Server
				for _, figure := range want.figures {
					if c.Name == name && math.IsNaN(r.results.median(l, figure)) {
						t.Errorf("%v: no %q", l, figure)
					}
				}
			}
		}
	}
	// What a round trip costs is known.
	for _, on := range []string{onMySQL, onMariaDB} {
		if at[on] == "" {
			continue
		}
		for name, want := range map[string]float64{bare: 2, noteTwice: 2, advisory: 2, getLock: 2, forUpdate: 3, insertDelete: 2} {
			l := label{uncontended, 1, 0, name, on}
			if got := r.results.median(l, statements); got < want-0.1 || got > want+0.9 {
				t.Errorf("%v: %v requests for each, want %v", l, got, want)
			}
		}
		l := label{uncontended, 1, farDelay, bare, on}
		if got := r.results.median(l, timeEach); got < 2000 {
			t.Errorf("%v: %v µs for two round trips of at least 1 ms each", l, got)
		}
	}
	dir := t.TempDir()
	dbtest.OK(t, r.write(dir))
	wellFormed(t, dir)
}

type testLog struct{ *testing.T }

func (l testLog) Write(p []byte) (int, error) {
	l.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// wellFormed fails the test unless the report is there and everything in it can
// be read.
func wellFormed(t *testing.T, dir string) {
	t.Helper()
	var pages string
	for _, name := range []string{"performance.md", filepath.Join("performance", "figures.md")} {
		page, err := os.ReadFile(filepath.Join(dir, name))
		dbtest.OK(t, err)
		pages += string(page)
		for _, no := range []string{"NaN", "Inf", "%!"} {
			if strings.Contains(string(page), no) {
				t.Errorf("%s contains %s", name, no)
			}
		}
	}
	figures, err := os.ReadFile(filepath.Join(dir, "performance", "results.json"))
	dbtest.OK(t, err)
	if !json.Valid(figures) {
		t.Error("results.json is not JSON")
	}
	plots, err := filepath.Glob(filepath.Join(dir, "performance", "*.svg"))
	dbtest.OK(t, err)
	if len(plots) != 6 {
		t.Errorf("plots are %v", plots)
	}
	for _, plot := range plots {
		if !strings.Contains(pages, filepath.Base(plot)) {
			t.Errorf("%s is on no page", plot)
		}
		f, err := os.Open(plot)
		dbtest.OK(t, err)
		defer f.Close()
		for d := xml.NewDecoder(f); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s: %v", plot, err)
				break
			}
		}
	}
}

// free grants everybody everything.
type free struct{ after time.Duration }

func (f free) Lock(context.Context, int, string) (func() error, error) {
	time.Sleep(f.after)
	return func() error { time.Sleep(f.after); return nil }, nil
}
func (free) Close() error { return nil }

func TestLoadSeesTwoInside(t *testing.T) {
	s := &stand{client: free{}}
	o := order{Workers: 16, Lasting: 50 * time.Millisecond, Patience: time.Second}
	for round := 1; ; round++ { // a busy machine may run one after the other
		_, err := s.load(t.Context(), o)
		if err != nil && strings.Contains(err.Error(), "two have the lock") {
			break
		}
		if err != nil || round == 40 {
			t.Fatalf("a lock that excludes nobody: %v", err)
		}
	}
	o.Own = true
	if _, err := s.load(t.Context(), o); err != nil {
		t.Errorf("keys of their own: %v", err)
	}
}

func TestALoadCountsItsGrantsAndWaits(t *testing.T) {
	s := &stand{client: free{after: 5 * time.Millisecond}}
	r, err := s.load(t.Context(), order{Workers: 3, Own: true, Lasting: 100 * time.Millisecond, Patience: time.Second})
	dbtest.OK(t, err)
	if r.All < 6 || r.All > 33 || r.Grants > r.All || r.Grants < r.All-3 {
		t.Errorf("%d grants, %d in time, of 3 goroutines that need 10 ms each for 100 ms", r.All, r.Grants)
	}
	if each := r.Busy / time.Duration(r.All); each < 10*time.Millisecond {
		t.Errorf("%v each, want 10 ms or more", each)
	}
	if each := r.Wait / time.Duration(r.All); each < 5*time.Millisecond || r.Longest < each {
		t.Errorf("waits of %v, the longest %v, want 5 ms or more", each, r.Longest)
	}
}

// TestTheProxyDelaysAsLongAsItSays compares with the same without the proxy: a busy machine is slow at both.
func TestTheProxyDelaysAsLongAsItSays(t *testing.T) {
	for _, delay := range []time.Duration{500 * time.Microsecond, 2 * time.Millisecond} {
		near, fast := false, false
		for round := 1; !near || !fast; round++ {
			x, err := examineProxy(delay)
			dbtest.OK(t, err)
			if x.Added < 2*delay {
				t.Errorf("%v each way adds only %v to a round trip", delay, x.Added)
			}
			near = near || x.Added <= 2*delay+3*time.Millisecond
			fast = fast || x.MiBps >= min(20, x.DirectMiBps/4)
			if round == 8 {
				t.Fatalf("%v each way adds %v to a round trip, with %.0f MiB/s, %.0f without the proxy", delay, x.Added, x.MiBps, x.DirectMiBps)
			}
		}
	}
}

func TestNumbersArePrintedWithThreeDigits(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.01234: "0.012", 0.5: "0.500", 1: "1", 1.02: "1.02", 12.34: "12.3", 123.4: "123", 123456: "123456", math.Inf(1): "",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) is %q, want %q", v, got, want)
		}
	}
}

func TestGoalsSayWhatIsMissed(t *testing.T) {
	r := &record{}
	r.results.add(label{uncontended, 1, 0, bare, onMySQL}, timeEach, 100)
	r.results.add(label{uncontended, 1, 0, advisory, onMySQL}, timeEach, 120)
	r.results.add(label{oneWrite, 1, farDelay, wroteLocked, onMySQL}, timeEach, 1040)
	r.results.add(label{oneWrite, 1, farDelay, wrote, onMySQL}, timeEach, 1000)
	r.results.add(label{oneWrite, 1, farDelay, wroteLocked, onMariaDB}, timeEach, 2000)
	r.results.add(label{oneWrite, 1, farDelay, wrote, onMariaDB}, timeEach, 1000)
	r.results.add(label{oneWrite, 1, 0, wroteLocked, onMariaDB}, timeEach, 5000) // which is no goal
	r.results.add(label{oneWrite, 1, 0, wrote, onMariaDB}, timeEach, 1000)
	r.results.add(label{hot, 64, 0, advisory, onMySQL}, rate, 3000)
	r.results.add(label{hot, 64, 0, redsyncTuned, onRedis}, rate, 100)
	r.results.add(label{hot, 64, 0, redisTuned, onRedis}, rate, 120)
	r.results.add(label{handoff, 1, 0, row, onMySQL}, latency, 200)
	r.results.add(label{handoff, 1, 0, forUpdate, onMySQL}, latency, 150)
	r.results.add(label{handoff, 1, 0, getLock, onMySQL}, latency, 100)
	r.results.add(label{handoff, 1, 0, row, onMariaDB}, latency, 120)
	r.results.add(label{handoff, 1, 0, forUpdate, onMariaDB}, latency, 110)
	r.results.add(label{handoff, 1, 0, getLock, onMariaDB}, latency, 100)
	r.results.add(label{rush, 100, 0, inHotDo + fewEach, onMySQL}, pingLate, 30)
	r.results.add(label{rush, 100, 0, handLocked + fewEach, onMySQL}, pingLate, 40)
	r.results.add(label{rush, 100, 0, inBegin + fewEach, onMariaDB}, pingLate, 60)
	r.results.add(label{rush, 100, 0, handLocked + fewEach, onMariaDB}, pingLate, 40)
	var got []string
	for _, o := range r.goals() {
		got = append(got, fmt.Sprint(o.aim(), " ", o.Got, " ", o.Met, o.Why))
	}
	if want := "≤ 1.05 1.04 true, ≤ 1.05 2 false, ≤ 1.15 1.2 false, ≥ 20 25 true, ≤ 1 1.5 false, ≤ 1 0.75 true, ≤ 1.30 2 falseSELECT … FOR UPDATE written by hand, given back by COMMIT is at 1.50, ≤ 1.30 1.2 true"; strings.Join(got, ", ") != want {
		t.Errorf("goals are %q, want %q", got, want)
	}
	for what := range bounds {
		if !slices.ContainsFunc(goals, func(g goal) bool { return g.what == what }) {
			t.Errorf("there is a bound of %q, which is no goal", what)
		}
	}
}
