//go:build unix

package tempserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"
)

// childEnv makes the test binary start the server of that name, tell about
// it on its standard output, and wait for its end.
const childEnv = "MYSQLLOCK_TEMPSERVER_CHILD"

// childClusterEnv makes it start a Galera cluster instead.
const childClusterEnv = "MYSQLLOCK_TEMPSERVER_CHILD_CLUSTER"

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child(name)
	}
	goleak.VerifyTestMain(m)
}

func child(name string) {
	if os.Getenv(childClusterEnv) != "" {
		_, err := StartCluster(context.Background(), Galera)
		fmt.Println(err)
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	found := Find()
	i := slices.IndexFunc(found, func(b Binary) bool { return b.Name == name })
	s, err := Start(context.Background(), found[i])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(s.process.Pid, s.guardian.Process.Pid, s.dir)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent kills us or dies
	os.Exit(0)
}

// forEach runs the test on a server of each flavour.
func forEach(t *testing.T, test func(*testing.T, Binary)) {
	t.Helper()
	on(t, EachFlavour(RequireOwn(t)), test)
}

// onOne runs it on one server, for what is this package's own doing.
func onOne(t *testing.T, test func(*testing.T, Binary)) {
	t.Helper()
	bins := EachFlavour(RequireOwn(t))
	on(t, bins[len(bins)-1:], test)
}

func on(t *testing.T, bins []Binary, test func(*testing.T, Binary)) {
	t.Helper()
	for _, b := range bins {
		t.Run(b.Name, func(t *testing.T) { test(t, b) })
	}
}

// start starts a server for the test, in a temporary folder of the test's own.
func start(t *testing.T, b Binary, opts ...string) *Server {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	began := time.Now()
	s, err := Start(t.Context(), b, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s started in %v", b, time.Since(began).Round(time.Millisecond))
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		wantEmpty(t, os.TempDir())
	})
	return s
}

func open(t *testing.T, s *Server) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", s.DSN("")+"?timeout=5s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func query(t *testing.T, s *Server, text string) string {
	t.Helper()
	var answer string
	if err := open(t, s).QueryRowContext(t.Context(), text).Scan(&answer); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return answer
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
	}
	for _, entry := range entries {
		t.Errorf("left behind: %s", filepath.Join(dir, entry.Name()))
	}
}

// refused reports whether nobody listens on the address.
func refused(addr string) bool {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

func TestAServerStartsAsAskedAndLeavesNothing(t *testing.T) {
	on(t, RequireOwn(t), func(t *testing.T, b Binary) {
		s := start(t, b, "--lock-wait-timeout=7")
		if got := query(t, s, "SELECT VERSION()"); got != s.Version() {
			t.Errorf("VERSION() = %q, Version() = %q", got, s.Version())
		}
		if !strings.HasPrefix(s.Version(), b.Version) {
			t.Errorf("Version() = %q, but the program said %q", s.Version(), b.Version)
		}
		for _, want := range []struct{ query, answer string }{
			{"SELECT @@lock_wait_timeout", "7"}, // ours
			{"SELECT @@innodb_flush_log_at_trx_commit", "1"},
			{"SELECT @@max_connections", "2000"},
			{"SELECT CONCAT('127.0.0.1:', @@port)", s.Addr()},
		} {
			if got := query(t, s, want.query); got != want.answer {
				t.Errorf("%s = %s, want %s", want.query, got, want.answer)
			}
		}
		var dsn, name string
		t.Run("Database", func(t *testing.T) {
			cfg := Database(t, s.DSN(""))
			dsn, name = cfg.FormatDSN(), cfg.DBName
		})
		if dsn != s.DSN(name) {
			t.Errorf("a test's database is at %s, want %s", dsn, s.DSN(name))
		}
		if got := query(t, s, "SELECT COUNT(*) FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = '"+name+"'"); got != "0" {
			t.Error("the database outlives its test")
		}
		if err := s.Stop(); err != nil {
			t.Errorf("Stop: %v", err)
		}
		if err := s.Stop(); err != nil {
			t.Errorf("second Stop: %v", err)
		}
		wantEmpty(t, os.TempDir())
		if !refused(s.Addr()) {
			t.Error("the server still listens after Stop")
		}
		for name, err := range map[string]error{
			"Kill": s.Kill(), "Restart": s.Restart(t.Context()), "Pause": s.Pause(), "Resume": s.Resume(),
		} {
			if !errors.Is(err, errStopped) {
				t.Errorf("%s after Stop: %v, want %v", name, err, errStopped)
			}
		}
	})
}

func TestServersAreSeparate(t *testing.T) {
	forEach(t, func(t *testing.T, b Binary) {
		// Both also make the template at the same time.
		t.Setenv("XDG_CACHE_HOME", t.TempDir())
		t.Setenv("TMPDIR", t.TempDir())
		servers := make([]*Server, 2)
		errs := make([]error, len(servers))
		var wg sync.WaitGroup
		for i := range servers {
			wg.Go(func() { servers[i], errs[i] = Start(t.Context(), b) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for _, s := range servers {
			defer s.Stop()
		}
		const identity = "SELECT CONCAT(@@port, @@datadir, @@tmpdir, @@hostname)"
		if query(t, servers[0], identity) == query(t, servers[1], identity) {
			t.Error("one server answers for both")
		}
		if b.Flavour == MySQL && query(t, servers[0], "SELECT @@server_uuid") == query(t, servers[1], "SELECT @@server_uuid") {
			t.Error("both have the same server_uuid")
		}
		query(t, servers[0], "SELECT 1")
		if err := servers[0].Stop(); err != nil {
			t.Error(err)
		}
		query(t, servers[1], "SELECT 1")
	})
}

func TestRestartKeepsData(t *testing.T) {
	onOne(t, func(t *testing.T, b Binary) {
		s := start(t, b)
		db := open(t, s)
		for _, statement := range []string{
			"CREATE DATABASE shop", "CREATE TABLE shop.t (n INT) ENGINE=InnoDB", "INSERT INTO shop.t VALUES (1)",
		} {
			if _, err := db.ExecContext(t.Context(), statement); err != nil {
				t.Fatal(err)
			}
		}
		steps := []struct {
			name   string
			before func() error
		}{
			{"orderly", func() error { return nil }},
			{"after Kill while paused", func() error { return errors.Join(s.Pause(), s.Kill()) }},
			{"while paused", s.Pause},
			{"after a crash", func() error { return s.process.Signal(syscall.SIGKILL) }},
		}
		for i, step := range steps {
			if err := step.before(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			if strings.Contains(step.name, "Kill") {
				if !refused(s.Addr()) {
					t.Errorf("%s: still listens", step.name)
				}
				if err := s.Pause(); !errors.Is(err, errDown) {
					t.Errorf("%s: Pause: %v, want %v", step.name, err, errDown)
				}
				if err := s.Kill(); err != nil {
					t.Errorf("%s: second Kill: %v", step.name, err)
				}
			}
			addr := s.Addr()
			if err := s.Restart(t.Context()); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			if s.Addr() != addr {
				t.Errorf("%s: Addr %s became %s", step.name, addr, s.Addr())
			}
			if got, want := query(t, s, "SELECT SUM(n) FROM shop.t"), strconv.Itoa(i+1); got != want {
				t.Errorf("%s: %s rows, want %s", step.name, got, want)
			}
			if _, err := open(t, s).ExecContext(t.Context(), "INSERT INTO shop.t VALUES (1)"); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
		}
	})
}

func TestAPausedServerAnswersAfterItsResume(t *testing.T) {
	onOne(t, func(t *testing.T, b Binary) {
		s := start(t, b)
		db := open(t, s)
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := s.Pause(); err != nil {
			t.Fatal(err)
		}
		answered := make(chan error, 1)
		go func() {
			var one int
			answered <- conn.QueryRowContext(context.WithoutCancel(t.Context()), "SELECT 1").Scan(&one)
		}()
		select {
		case err := <-answered:
			t.Fatalf("a paused server answered; error %v", err)
		case <-time.After(200 * time.Millisecond): // what it would need is far less
		}
		if refused(s.Addr()) {
			t.Error("a paused server refuses connections")
		}
		if err := s.Resume(); err != nil {
			t.Fatal(err)
		}
		if err := <-answered; err != nil {
			t.Errorf("after Resume: %v", err)
		}
	})
}

func TestAFailedStartShowsTheLogAndLeavesNothing(t *testing.T) {
	onOne(t, func(t *testing.T, b Binary) {
		t.Setenv("TMPDIR", t.TempDir())
		_, err := Start(t.Context(), b, "--no-such-option=1")
		if err == nil || !strings.Contains(err.Error(), "no-such-option") {
			t.Errorf("error %v does not show the server's log", err)
		}
		wantEmpty(t, os.TempDir())

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Start(ctx, b); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want %v", err, context.Canceled)
		}
		wantEmpty(t, os.TempDir())

		s := start(t, b)
		if err := s.Restart(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Restart: %v, want %v", err, context.Canceled)
		}
		if !refused(s.Addr()) {
			t.Error("the server still listens after a failed Restart")
		}
		if err := s.Restart(t.Context()); err != nil {
			t.Errorf("Restart after a failed one: %v", err)
		}
	})
}

// TestAServerMayBeUsedConcurrently is for the race detector.
func TestAServerMayBeUsedConcurrently(t *testing.T) {
	onOne(t, func(t *testing.T, b Binary) {
		s := start(t, b)
		var wg sync.WaitGroup
		for _, use := range []func(){
			func() { _ = s.Pause() },
			func() { _ = s.Resume() },
			func() { _ = s.Kill() },
			func() { _ = s.Restart(t.Context()) },
			func() { _ = s.Version() + s.DSN("") },
		} {
			wg.Go(use)
			wg.Go(use)
		}
		wg.Wait()
		wg.Go(func() { _ = s.Restart(t.Context()) })
		wg.Go(func() { _ = s.Stop() })
		wg.Wait()
	})
}

// TestAServerEndsWithTheProcessThatStartedIt, however that is killed.
func TestAServerEndsWithTheProcessThatStartedIt(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs /proc to see processes")
	}
	onOne(t, func(t *testing.T, b Binary) {
		for _, death := range []struct {
			name string
			kill func(parent *os.Process, server int) error
		}{
			{"kill -9", func(parent *os.Process, _ int) error { return parent.Kill() }},
			{"kill -9 of its group", func(parent *os.Process, _ int) error {
				return syscall.Kill(-parent.Pid, syscall.SIGKILL)
			}},
			{"interrupt", func(parent *os.Process, _ int) error { return parent.Signal(os.Interrupt) }},
			{"kill -9 while the server is paused", func(parent *os.Process, server int) error {
				return errors.Join(syscall.Kill(server, syscall.SIGSTOP), parent.Kill())
			}},
		} {
			t.Run(death.name, func(t *testing.T) {
				t.Setenv("TMPDIR", t.TempDir())
				parent, out := startChild(t, b)
				var server, guardian int
				var dir string
				if _, err := fmt.Fscan(out, &server, &guardian, &dir); err != nil {
					t.Fatal(err)
				}
				for what, pid := range map[string]int{"server": server, "guardian": guardian} {
					if !alive(pid) {
						t.Fatalf("the %s is not there in the first place", what)
					}
				}
				if err := death.kill(parent.Process, server); err != nil {
					t.Fatal(err)
				}
				_ = parent.Wait() // tells that it was killed
				died := time.Now()
				for alive(server) || alive(guardian) || exists(dir) {
					if time.Since(died) > time.Minute {
						t.Fatalf("after a minute: server alive %v, guardian alive %v, folder exists %v",
							alive(server), alive(guardian), exists(dir))
					}
					time.Sleep(5 * time.Millisecond) // strangers' ends cannot be waited for
				}
				t.Logf("all gone after %v", time.Since(died).Round(time.Millisecond))
				wantEmpty(t, os.TempDir())
			})
		}
	})
}

// TestNoHalfStartedServerSurvivesItsParent, which is killed at moments all over the start.
func TestNoHalfStartedServerSurvivesItsParent(t *testing.T) {
	onOne(t, func(t *testing.T, b Binary) {
		start(t, b) // so that the template is there
		t.Setenv("TMPDIR", t.TempDir())
		const longest = 400 * time.Millisecond
		for delay := time.Duration(0); delay < longest; delay += longest / 6 {
			parent, _ := startChild(t, b)
			time.Sleep(delay)
			if err := parent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = parent.Wait()
		}
		nothingLeft(t)
	})
}

// nothingLeft waits until no process and no file is left of servers in the folder
// for temporary files.
func nothingLeft(t *testing.T) {
	t.Helper()
	const patience = time.Minute
	began := time.Now()
	for !empty(t, os.TempDir()) || len(mentioning(os.TempDir())) > 0 {
		if time.Since(began) > patience {
			wantEmpty(t, os.TempDir())
			t.Fatalf("after %v: processes %v", patience, mentioning(os.TempDir()))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// startChild starts the test binary as a process that starts a server of b.
func startChild(t *testing.T, b Binary) (*exec.Cmd, io.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+b.Name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close() })
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// alive reports whether the process is there and not a zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(state, "Z")
}

func empty(t *testing.T, dir string) bool {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries) == 0
}

// mentioning returns the processes with the text in their command line.
func mentioning(text string) []string {
	var found []string
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			found = append(found, path+": "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// program writes a shell script that prints a server's version line.
func program(t *testing.T, name, line string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho '"+line+"'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestServersAreFoundOnPathAndInTheEnvironment(t *testing.T) {
	mysqld := program(t, "mysqld", "mysqld  Ver 8.0.99-1 for Linux on x86_64 ((Debian))")
	disguised := program(t, "mysqld", "mysqld  Ver 10.11.99-MariaDB-0+deb12u1 for debian-linux-gnu on x86_64")
	missing := filepath.Join(t.TempDir(), "mysqld")

	find := func(env string) string {
		for _, b := range Find() {
			if b.err != nil && b.Flavour == MySQL {
				_, err := Start(t.Context(), b)
				return err.Error()
			}
			if strings.HasSuffix(b.Version, ".99") || strings.HasSuffix(b.Version, ".99-1") {
				return b.String()
			}
		}
		return "nothing with " + env
	}
	for _, test := range []struct{ name, env, value, want string }{
		{"MySQL on PATH", "PATH", filepath.Dir(mysqld), "MySQL 8.0.99-1"},
		{"MariaDB as mysqld on PATH", "PATH", filepath.Dir(disguised), "MariaDB 10.11.99"},
		{"MySQL in the environment", "MYSQLLOCK_MYSQLD", mysqld, "MySQL 8.0.99-1"},
		{"MariaDB in the environment", "MYSQLLOCK_MARIADBD", disguised, "MariaDB 10.11.99"},
		{"the other flavour in the environment", "MYSQLLOCK_MYSQLD", disguised, "is MariaDB, not MySQL"},
		{"nothing there in the environment", "MYSQLLOCK_MYSQLD", missing, "no such file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("MYSQLLOCK_MYSQLD", "")
			t.Setenv("MYSQLLOCK_MARIADBD", "")
			t.Setenv(test.env, test.value)
			if got := find(test.env); !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// recorder is a TB that remembers what happened last, and goes on.
type recorder struct{ last string }

func (r *recorder) Helper()             {}
func (r *recorder) Cleanup(func())      {}
func (r *recorder) Logf(string, ...any) { r.last = "log" }
func (r *recorder) Fatal(args ...any)   { r.last = "fail: " + fmt.Sprint(args...) }
func (r *recorder) Skip(args ...any)    { r.last = "skip: " + fmt.Sprint(args...) }

func TestAMissingServerSkipsTestsButNotInCI(t *testing.T) {
	t.Setenv("MYSQLLOCK_MARIADBD", "")
	t.Setenv("MYSQLLOCK_MARIADB118", "")
	mysql, mariadb, newest := Binary{Flavour: MySQL}, Binary{Flavour: MariaDB, Version: "10.11.99"}, Binary{Flavour: MariaDB, Version: "11.8.99"}
	for _, test := range []struct {
		name  string
		found []Binary
		ci    string
		want  string // the beginning of what happens
	}{
		{"both", []Binary{mysql, mariadb}, "", ""},
		{"all in CI", []Binary{mysql, mariadb, newest}, "true", ""},
		{"both in CI, MariaDB is the newest", []Binary{mysql, newest}, "true", ""},
		{"both in CI", []Binary{mysql, mariadb}, "true", "fail: no MariaDB 11.8 on this machine; scripts/install-servers.sh"},
		{"one", []Binary{mysql}, "", "log"},
		{"one in CI", []Binary{mysql}, "true", "fail: no MariaDB server"},
		{"the other in CI", []Binary{mariadb}, "true", "fail: no MySQL server"},
		{"none", nil, "", "skip: no MySQL or MariaDB server on this machine; scripts/install-servers.sh"},
		{"none in CI", nil, "true", "fail: no "},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("CI", test.ci)
			r := &recorder{}
			check(r, test.found)
			if !strings.HasPrefix(r.last, test.want) || (test.want == "") != (r.last == "") {
				t.Errorf("got %q, want %q", r.last, test.want)
			}
		})
	}
}

// TestCIGoesWithoutMariaDB11_8WhenTold, and where another MariaDB is to be the only one.
func TestCIGoesWithoutMariaDB11_8WhenTold(t *testing.T) {
	t.Setenv("CI", "true")
	for _, env := range []struct{ name, value string }{{"MYSQLLOCK_MARIADB118", "0"}, {"MYSQLLOCK_MARIADBD", "/other/mariadbd"}} {
		t.Run(env.name, func(t *testing.T) {
			t.Setenv(env.name, env.value)
			r := &recorder{}
			check(r, []Binary{{Flavour: MySQL}, {Flavour: MariaDB, Version: "10.11.99"}})
			if r.last != "" {
				t.Errorf("got %q", r.last)
			}
		})
	}
}

func TestTheFirstServerOfEachFlavourIsTaken(t *testing.T) {
	mysql, old, newer := Binary{Name: "MySQL", Flavour: MySQL}, Binary{Name: "MariaDB", Flavour: MariaDB}, Binary{Name: "MariaDB 11.8", Flavour: MariaDB}
	for _, test := range []struct{ found, want []Binary }{
		{nil, nil},
		{[]Binary{mysql, old, newer}, []Binary{mysql, old}},
		{[]Binary{old, newer}, []Binary{old}},
		{[]Binary{mysql}, []Binary{mysql}},
	} {
		var got, want []string
		for _, b := range EachFlavour(test.found) {
			got = append(got, b.Name)
		}
		for _, b := range test.want {
			want = append(want, b.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
