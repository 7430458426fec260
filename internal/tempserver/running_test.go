//go:build unix

package tempserver

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// TestARunningServerIsTakenUnlessItDiffers: that of MYSQLLOCK_TEST_DSN, unless tests need one
// of their own, or one that is set otherwise.
func TestARunningServerIsTakenUnlessItDiffers(t *testing.T) {
	forEach(t, func(t *testing.T, b Binary) {
		s := start(t, b, "--lock-wait-timeout=7")
		t.Setenv(testDSN, s.DSN(""))
		t.Setenv("CI", "true")
		r := &recorder{}
		found := Require(r)
		if r.last != "" || len(found) != 1 || found[0].Flavour != b.Flavour || found[0].Version != s.Version() {
			t.Fatalf("Require: %q, %v", r.last, found)
		}
		for option, want := range map[string]string{
			"--lock-wait-timeout=7":              "",
			"--lock-wait-timeout=8":              "runs without --lock-wait-timeout=8: it is set otherwise",
			"--innodb-flush-log-at-trx-commit=1": "",
			"--sync-binlog=0":                    "",
			"--performance-schema=ON":            map[Flavour]string{MariaDB: "set otherwise"}[b.Flavour],
			"--plugin-load-add=no_such.so":       "runs without --plugin-load-add=no_such.so",
			"--no-such-option=1":                 "no_such_option",
		} {
			own, err := Start(t.Context(), found[0], option)
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", option, err, want)
			}
			if err == nil && (own.Addr() != s.Addr() || own.DSN("x") != s.DSN("x")) {
				t.Errorf("%s: it is at %s, want %s", option, own.DSN("x"), s.DSN("x"))
			}
		}
		own, err := Start(t.Context(), found[0])
		if err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{"Kill": own.Kill(), "Restart": own.Restart(t.Context()), "Pause": own.Pause()} {
			if !errors.Is(err, errStopped) {
				t.Errorf("%s: %v, want %v", name, err, errStopped)
			}
		}
		if err := own.Stop(); err != nil {
			t.Error(err)
		}
		query(t, s, "SELECT 1") // nobody stopped it

		for name, require := range map[string]func(TB){
			"RequireOwn":     func(tb TB) { RequireOwn(tb) },
			"RequireCluster": func(tb TB) { RequireCluster(tb, Galera) },
			"Share":          func(tb TB) { Share(tb, found[0], "--lock-wait-timeout=8") },
		} {
			r := &skipper{}
			func() {
				defer func() { _ = recover() }()
				require(r)
			}()
			if !strings.HasPrefix(r.last, "skip: ") {
				t.Errorf("%s: %q, want a skip", name, r.last)
			}
		}
	})
	for _, dsn := range []string{"root:secret@tcp(127.0.0.1:1)/", "root@tcp(127.0.0.1:1)/?timeout=1s", "root@unix(/x)/", "nonsense"} {
		if _, err := running(context.Background(), dsn); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: error %v", dsn, err)
		}
	}
}

// skipper is a recorder whose test ends with Skip.
type skipper struct{ recorder }

func (s *skipper) Skip(args ...any) {
	s.recorder.Skip(args...)
	panic("skipped")
}

// TestTheEnvironmentSaysOnHowManyServersTestsRun, by MYSQLLOCK_TEST_SERVERS.
func TestTheEnvironmentSaysOnHowManyServersTestsRun(t *testing.T) {
	t.Setenv("CI", "true")
	all := RequireOwn(t)
	for text, want := range map[string]int{"": len(all), "1": 1, "2": 2, "9": len(all), "-1": 0, "MySQL": 0} {
		t.Setenv(testServers, text)
		r := &recorder{}
		found := Require(r)
		if len(found) != want || want > 0 && (r.last != "" || found[0].Path != all[0].Path) || want == 0 && !strings.Contains(r.last, "fail: tempserver: "+testServers+" is ") {
			t.Errorf("%q: %v, %q", text, found, r.last)
		}
	}
	t.Setenv(testServers, "0") // also in CI, and whatever else is there
	for name, require := range map[string]func(TB){
		"a server":   func(tb TB) { Require(tb) },
		"own server": func(tb TB) { RequireOwn(tb) },
		"a cluster":  func(tb TB) { RequireCluster(tb, Galera) },
		"proxies":    RequireProxies,
	} {
		r := &recorder{}
		require(r)
		if !strings.HasPrefix(r.last, "skip: tempserver: it takes a server") {
			t.Errorf("%s without any: %q", name, r.last)
		}
	}
}
