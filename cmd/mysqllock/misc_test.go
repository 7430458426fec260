package main

import (
	"bufio"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

func TestBenchCountsTheRoundTripsOfEachLock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		var figures []figure
		s.command("bench", "--for", "100ms", "--json").read(&figures)
		trips, times := make(map[string]float64), make(map[string]int)
		for _, f := range figures {
			trips[f.What], times[f.What] = f.Trips, f.N
			if f.N < 1 || f.Median <= 0 || f.P99 < f.Median {
				t.Errorf("%+v", f)
			}
		}
		// Of few repetitions a renewal in between would count, too.
		for what, want := range map[string]float64{
			"ping": 1, "transaction of one statement, no lock": 3, "the same under a row lock": 3, "the same, optimistic": 3,
			"Acquire and Release, row": 2, "Acquire and Release, lease": 2, "Acquire and Release, advisory": 2,
		} {
			if got := trips[what]; got < want || got > want+0.9 && times[what] > 20 {
				t.Errorf("%s is %v round trips, want %v", what, got, want)
			}
		}
		var rows int
		dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ?", benchNamespace).Scan(&rows))
		if rows > 3 {
			t.Errorf("it has left %d rows", rows)
		}
		s.command("bench", "--for", "1h").start().fails(1, "--for")
	})
}

func TestThePageIsServedOnlyAtASecretAddress(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		c := s.command("ui")
		c.Cmd.Stdout = nil
		out, err := c.StdoutPipe()
		dbtest.OK(t, err)
		c.start()
		url, err := bufio.NewReader(out).ReadString('\n')
		dbtest.OK(t, err)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		answer, err := client.Get(strings.TrimSpace(url))
		dbtest.OK(t, err)
		page, err := io.ReadAll(answer.Body)
		dbtest.OK(t, err)
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK || !strings.Contains(string(page), "<title>Locks</title>") {
			t.Errorf("it answers %s and %.200s", answer.Status, page)
		}
		// Who does not know the address gets nothing.
		host := url[:strings.LastIndexByte(strings.TrimRight(url, "/\n"), '/')]
		for _, path := range []string{"/", "/events", "/x/events", "/page.js", "/release"} {
			answer, err := client.Get(host + path)
			dbtest.OK(t, err)
			answer.Body.Close()
			if answer.StatusCode != http.StatusNotFound {
				t.Errorf("%s is answered with %s", path, answer.Status)
			}
		}
		dbtest.OK(t, c.Process.Signal(syscall.SIGTERM))
		if code := c.code(); code != 0 {
			t.Errorf("it ends with %d: %s", code, c.errs.String())
		}
		s.command("ui", "--listen", "0.0.0.0:0").start().fails(1, "--allow-remote")
	})
}

// TestTheManualHasEveryCommandAndFlag: in a form that man understands.
func TestTheManualHasEveryCommandAndFlag(t *testing.T) {
	t.Parallel()
	s := offline(t)
	page := s.command("man").start().must(0)
	for _, c := range everyCommand(newRoot()) {
		if c.Hidden {
			continue
		}
		if c.Runnable() && !strings.Contains(page, "\n.SS "+c.Name()) && !strings.Contains(page, "\n.SS "+c.Parent().Name()+" "+c.Name()) {
			t.Errorf("it does not tell of %s", c.CommandPath())
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !regexp.MustCompile(`(?m)^\.B .*`+regexp.QuoteMeta(roff("--"+f.Name))+`( |$)`).MatchString(page) && f.Name != "help" && !f.Hidden {
				t.Errorf("it does not tell of %s --%s", c.CommandPath(), f.Name)
			}
		})
	}
	for line := range strings.Lines(page) {
		request, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if known := strings.Fields(".TH .SH .SS .PP .TP .B .BR .I .RI .EX .EE"); strings.HasPrefix(line, ".") && !slices.Contains(known, request) {
			t.Errorf("%q is no request", line)
		}
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("groff is not here to look, too")
		return
	}
	check := exec.Command(groff, "-man", "-ww", "-Tascii", "-z")
	check.Stdin = strings.NewReader(page)
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("groff says %v: %s", err, out)
	}
}

// TestEachCommandSaysHowItIsCalled: and what it is for.
func TestEachCommandSaysHowItIsCalled(t *testing.T) {
	t.Parallel()
	for _, c := range everyCommand(newRoot()) {
		if c.Hidden || !c.Runnable() {
			continue
		}
		if c.Short == "" || c.Long == "" || c.Example == "" {
			t.Errorf("%s has no help", c.CommandPath())
		}
	}
	s := offline(t)
	if out := s.command("run", "--help").start().must(0); !strings.Contains(out, "Exit status") || !strings.Contains(out, "Examples:") {
		t.Errorf("run --help says\n%s", out)
	}
	s.command("bogus").start().fails(exitUsage, "unknown command")
	s.command("ls", "more").start().fails(exitUsage, "more")
	s.command("show").start().fails(exitUsage, "arg")
	s.command("schema", "bogus").start().fails(exitUsage, "bogus")
}

// TestShellsCompleteCommandsAndKeys: they understand the scripts that are there for them.
func TestShellsCompleteCommandsAndKeys(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		for shell, check := range map[string][]string{"bash": {"bash", "-n"}, "zsh": {"zsh", "-n"}, "fish": {"fish", "--no-execute"}} {
			script := s.command("completion", shell).start().must(0)
			path, err := exec.LookPath(check[0])
			if err != nil {
				t.Logf("%s is not here to check its completion", shell)
				continue
			}
			run := exec.Command(path, check[1:]...)
			run.Stdin = strings.NewReader(script)
			if out, err := run.CombinedOutput(); err != nil {
				t.Errorf("%s says %v: %s", shell, err, out)
			}
		}
		c := s.run("the-key", "echo >>log; until [ -e go ]; do sleep 0.05; done").start()
		dbtest.Soon(t, "it runs", func() bool { return len(lines(t, s.file("log"))) == 1 })
		for _, command := range []string{"show", "release"} {
			if out := s.command(cobra.ShellCompRequestCmd, command, "").start().must(0); !strings.HasPrefix(out, "the-key\n") {
				t.Errorf("%s is completed by %q", command, out)
			}
		}
		dbtest.OK(t, c.Process.Signal(syscall.SIGTERM))
		c.must(128 + 15)
	})
}
