package lockprom_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// A server is a Prometheus that scrapes a registry and evaluates the alerts.
type server struct {
	t      *testing.T
	url    string
	client *http.Client
}

// installed is where a program of Prometheus is.
func installed(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	switch {
	case err != nil && os.Getenv("CI") != "":
		t.Fatalf("%s must be installed in CI: scripts/install-tools.sh prometheus", program)
	case err != nil:
		t.Skipf("there is no %s on the PATH; make prometheus installs it", program)
	}
	return path
}

// scraped starts a Prometheus that scrapes the registry.
func scraped(t *testing.T, registry *prometheus.Registry) *server {
	t.Helper()
	program := installed(t, "prometheus")
	exporter := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(exporter.Close)
	alerts, err := filepath.Abs("../grafana/alerts.yaml")
	dbtest.OK(t, err)
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	dbtest.OK(t, os.WriteFile(config, fmt.Appendf(nil, "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"+
		"rule_files: [%q]\nscrape_configs: [{job_name: shop, static_configs: [{targets: [%q]}]}]\n",
		alerts, strings.TrimPrefix(exporter.URL, "http://")), 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	dbtest.OK(t, err)
	address := free.Addr().String()
	dbtest.OK(t, free.Close())
	var log strings.Builder
	run := exec.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	run.Stderr = &log
	dbtest.OK(t, run.Start())
	t.Cleanup(func() {
		_ = run.Process.Kill()
		_ = run.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	p := &server{t, "http://" + address, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	dbtest.Soon(t, "it has scraped a few times", func() bool {
		var result []struct{ Value [2]any }
		return p.get("query", "sum_over_time(up[1m]) > 2", &struct{ Result any }{&result}) == nil && len(result) == 1
	})
	return p
}

// get asks the API, and reads the data of the answer.
func (p *server) get(path, query string, data any) error {
	answer, err := p.client.Get(p.url + "/api/v1/" + path + "?query=" + url.QueryEscape(query))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
		return err
	}
	if body.Status != "success" {
		return fmt.Errorf("%s: %s", body.Status, body.Error)
	}
	return nil
}

// TestEachQueryOfTheDashboardHasAnAnswerInPrometheus, and each alert is evaluated without an error.
func TestEachQueryOfTheDashboardHasAnAnswerInPrometheus(t *testing.T) {
	db, registry := open(t, tempserver.Require(t)[0], 12)
	experience(t, db)
	p := scraped(t, registry)

	text, err := os.ReadFile("../grafana/dashboard.json")
	dbtest.OK(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	dbtest.OK(t, json.Unmarshal(text, &dashboard))
	variables := strings.NewReplacer("$job", "shop", "$instance", ".*", "$__rate_interval", "1m", "$__range", "5m")
	asked := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			asked++
			dbtest.Soon(t, fmt.Sprintf("%q has an answer: %s", panel.Title, target.Expr), func() bool { // the next scrape may have failed
				var result []any
				dbtest.OK(t, p.get("query", variables.Replace(target.Expr), &struct{ Result any }{&result}))
				return len(result) > 0
			})
		}
	}
	if asked < 20 {
		t.Errorf("only %d queries were asked", asked)
	}

	text, err = os.ReadFile("../grafana/alerts.yaml")
	dbtest.OK(t, err)
	dbtest.Soon(t, "all alerts are evaluated", func() bool {
		var rules struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
		dbtest.OK(t, p.get("rules", "", &rules))
		evaluated := 0
		for _, g := range rules.Groups {
			for _, r := range g.Rules {
				if r.LastError != "" {
					t.Fatalf("%s: %s", r.Name, r.LastError)
				}
				if r.Health == "ok" {
					evaluated++
				}
			}
		}
		return evaluated == strings.Count(string(text), "- alert:")
	})
}
