package soak

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The short form is for every run of the tests.
var form = struct {
	processes, clients, connections, keys int
	think, lasting                        time.Duration
}{4, 40, 90, 40, 300 * time.Millisecond, 4 * time.Second}

func init() {
	if text := os.Getenv("SOAK_TIME"); text != "" {
		form.processes, form.clients, form.connections, form.keys, form.think = 8, 250, 300, 200, 4*time.Second
		var err error
		if form.lasting, err = time.ParseDuration(text); err != nil {
			panic(err)
		}
	}
}

// onServers runs a test on each server, or on the one that SOAK_SERVER names, with
// few connections; in the long form one after the other.
func onServers(t *testing.T, test func(t *testing.T, s *stand)) {
	for _, bin := range tempserver.RequireOwn(t) {
		if only := os.Getenv("SOAK_SERVER"); only != "" && only != bin.Name {
			continue
		}
		t.Run(bin.Name, func(t *testing.T) {
			if os.Getenv("SOAK_TIME") == "" {
				t.Parallel()
			}
			srv, err := tempserver.Start(t.Context(), bin, fmt.Sprintf("--max-connections=%d", form.connections))
			dbtest.OK(t, err)
			t.Cleanup(func() { dbtest.OK(t, srv.Stop()) })
			test(t, newStand(t, srv))
		})
	}
}

// stand is a server with counters, and a ledger of what has been counted.
type stand struct {
	t   *testing.T
	srv *tempserver.Server
	db  *sql.DB // one connection, from before the others
}

func newStand(t *testing.T, srv *tempserver.Server) *stand {
	s := &stand{t: t, srv: srv}
	admin, err := sql.Open("mysql", srv.DSN(""))
	dbtest.OK(t, err)
	_, err = admin.Exec("CREATE DATABASE soak")
	dbtest.OK(t, err)
	dbtest.OK(t, admin.Close())
	s.db, err = sql.Open("mysql", srv.DSN("soak"))
	dbtest.OK(t, err)
	t.Cleanup(func() { s.db.Close() })
	s.db.SetMaxOpenConns(1)
	s.db.SetMaxIdleConns(1)
	s.exec("CREATE TABLE counter (name VARCHAR(100) PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB")
	s.exec("CREATE TABLE ledger (id VARCHAR(100) NOT NULL, name VARCHAR(100) NOT NULL, PRIMARY KEY (id, name)) ENGINE=InnoDB")
	for _, family := range slices.Compact(slices.Sorted(maps.Values(families))) {
		for i := range form.keys {
			s.exec("INSERT INTO counter VALUES (?, 0)", fmt.Sprintf("%s:%d", family, i))
			for slot := 0; family == "slots" && slot < 3; slot++ {
				s.exec("INSERT INTO counter VALUES (?, 0)", fmt.Sprintf("%s:%d/%d", family, i, slot))
			}
		}
	}
	return s
}

func (s *stand) exec(text string, args ...any) {
	s.t.Helper()
	if _, err := s.db.Exec(text, args...); err != nil {
		s.t.Fatalf("%s: %v", text, err)
	}
}

func (s *stand) number(query string) (n int) {
	s.t.Helper()
	dbtest.OK(s.t, s.db.QueryRow(query).Scan(&n))
	return n
}

// process is one process of clients.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func (s *stand) start(n int, mode mode) *process {
	s.t.Helper()
	text, err := json.Marshal(plan{
		DSN: s.srv.DSN("soak") + "?" + mode.params(), MaxOpen: mode.maxOpen, Process: n, Clients: form.clients, Keys: form.keys, Think: form.think,
	})
	dbtest.OK(s.t, err)
	self, err := os.Executable()
	dbtest.OK(s.t, err)
	p := &process{cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), planEnv+"="+string(text))
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	dbtest.OK(s.t, err)
	out, err := p.cmd.StdoutPipe()
	dbtest.OK(s.t, err)
	p.out = json.NewDecoder(out)
	dbtest.OK(s.t, p.cmd.Start())
	s.t.Cleanup(func() { _ = p.cmd.Process.Kill() }) // where it has not ended by itself
	return p
}

// shift has all processes work for a while.
func (s *stand) shift(all []*process, lasting time.Duration) []report {
	s.t.Helper()
	reports := make([]report, len(all))
	var done sync.WaitGroup
	for i, p := range all {
		done.Go(func() {
			fmt.Fprintln(p.in, lasting)
			if err := p.out.Decode(&reports[i]); err != nil {
				s.t.Errorf("process %d: %v", i, err)
			}
		})
	}
	done.Wait()
	return reports
}

// mode is how the connections of a process are bounded.
type mode struct {
	name    string
	params  func() string
	maxOpen int  // for SetMaxOpenConns; 0 is none
	enough  bool // the server has enough connections for all processes
}

var modes = []mode{
	{"maxConns", func() string { return fmt.Sprintf("maxConns=%d", (form.connections-others)/form.processes) }, 0, true},
	{"SetMaxOpenConns", func() string { return "lockMaxConns=8" }, 16, false},
}

// others is how many of the server's connections are not for the processes.
const others = 10

// TestSoak: while very many clients want few connections, each unit of work ends in
// time, what is counted under a lock is exact, and nothing grows. With maxConns the
// server is never asked for more connections than it has.
func TestSoak(t *testing.T) {
	onServers(t, func(t *testing.T, s *stand) {
		for _, mode := range modes {
			t.Run(mode.name, func(t *testing.T) {
				s := *s
				s.t = t
				s.soak(mode)
			})
		}
	})
}

func (s *stand) soak(mode mode) {
	t := s.t
	dbtest.Soon(t, "the connections of others have ended", func() bool {
		return s.number("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = 'soak'") == 1
	})
	s.exec("UPDATE counter SET n = 0")
	s.exec("DELETE FROM ledger")
	var all []*process
	for i := range form.processes {
		all = append(all, s.start(i, mode))
	}
	warm := s.shift(all, form.lasting/4)
	worked := s.shift(all, form.lasting-form.lasting/4)

	ended, committed := make(map[string]int), make(map[string]int)
	slowest := time.Duration(-1 << 62)
	for i, r := range append(warm, worked...) {
		for how, n := range r.Ended {
			ended[how] += n
		}
		for kind, n := range r.Committed {
			committed[kind] += n
		}
		slowest = max(slowest, r.Slowest)
		for _, failure := range r.Failures {
			t.Errorf("process %d: %s", i%len(all), failure)
		}
	}
	t.Logf("%d processes of %d clients on %d connections for %v: %v; committed %v; the slowest unit of work ended %v after the limit of its context",
		form.processes, form.clients, form.connections, form.lasting, ended, committed, slowest)
	for i, w := range warm {
		t.Logf("process %d: %d goroutines and %d KiB at first, %d and %d in the end", i, w.Goroutines, w.Heap>>10, worked[i].Goroutines, worked[i].Heap>>10)
		// Each pooled connection has a goroutine, and there may be more of them now.
		if worked[i].Goroutines > w.Goroutines+60 || worked[i].Heap > w.Heap+8<<20 {
			t.Errorf("process %d grows", i)
		}
	}
	for _, k := range kinds {
		if committed[k.name] == 0 {
			t.Errorf("nobody has counted under %s", k.name)
		}
	}

	if mode.enough && ended["no connection left"] > 0 {
		t.Error("the server has refused a connection")
	}
	if n := ended["no connection while its context lasts"]; mode.enough && n > 0 {
		t.Errorf("%d units were refused that had time to wait", n)
	}
	for _, p := range all {
		dbtest.OK(t, p.in.Close())
		dbtest.OK(t, p.cmd.Wait())
	}
	if wrong := s.number("SELECT COUNT(*) FROM counter c LEFT JOIN (SELECT name, COUNT(*) AS n FROM ledger GROUP BY name) l ON l.name = c.name WHERE c.n <> COALESCE(l.n, 0)"); wrong > 0 {
		t.Errorf("%d counters are not what the ledger says", wrong)
	}
	units := s.number("SELECT COUNT(DISTINCT id) FROM ledger")
	if sum := sum(committed); units < sum || units > sum+ended["gave up"]+ended["not granted"] {
		t.Errorf("%d units of work are in the ledger, and %d said that they were", units, sum)
	}
	if left := dbtest.Column[string](t, s.db, "SELECT CONCAT(name, ' of ', owner, ', token ', token, ', until ', TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) DIV 1000, ' ms from now')"+
		" FROM mysqllock WHERE owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)"); len(left) > 0 {
		t.Errorf("leases are left: %q", left)
	}
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// TestFullServer: where the server has no connection left, who wants a lock is told
// what to set, and soon; and is not when there is one again.
func TestFullServer(t *testing.T) {
	onServers(t, func(t *testing.T, s *stand) {
		db, err := sql.Open("mysqllock", s.srv.DSN("soak"))
		dbtest.OK(t, err)
		defer db.Close()
		conn, err := db.Conn(t.Context())
		dbtest.OK(t, err)
		defer conn.Close()
		var taken []*sql.DB
		for {
			one, err := sql.Open("mysql", s.srv.DSN("soak"))
			dbtest.OK(t, err)
			taken = append(taken, one)
			if err := one.Ping(); full(err) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if len(taken) > form.connections+5 {
				t.Fatal("the server is never full")
			}
		}
		for _, k := range kinds {
			began := time.Now()
			_, err := mysqllock.Acquire(t.Context(), db, "key:1", append(slices.Clone(k.opts), lockctx.Wait(20*time.Second))...)
			var locked *mysqllock.Error
			var refusal *mysql.MySQLError
			if !errors.As(err, &locked) || !errors.As(err, &refusal) || refusal.Number != 1040 || time.Since(began) > 15*time.Second {
				t.Errorf("%s: after %v: %v", k.name, time.Since(began), err)
			} else if text := err.Error(); !contains(text, "max_connections", "lockMaxConns", "SetMaxOpenConns") {
				t.Errorf("%s: it is not said what to set: %v", k.name, err)
			}
		}
		for _, one := range taken {
			dbtest.OK(t, one.Close())
		}
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) { // the server takes its time
			if err = db.Ping(); err == nil || time.Now().After(deadline) {
				break
			}
		}
		for _, k := range kinds {
			dbtest.Eventually(t, k.name+", with connections left", func() error { // it needs more than one
				h, err := mysqllock.Acquire(t.Context(), db, "key:1", k.opts...)
				if err == nil {
					err = h.Release()
				}
				return err
			})
		}
	})
}

func contains(text string, all ...string) bool {
	return !slices.ContainsFunc(all, func(one string) bool { return !strings.Contains(text, one) })
}
