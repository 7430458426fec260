package chaos

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// load is very much work on one server: many callers want few keys, with fewer connections
// than they are. Nothing hangs, nothing is left, and the checks are those of chaos.
type load struct {
	name    string
	jobs    []string
	clients []orders
	faults  []*fault // one after the other, for as long as it takes

	// bounded: there are enough connections for all, so that nobody hears of too few.
	bounded bool
	// grows: what the processes need at first and in the end is compared.
	grows bool
}

// lengthOf is the time that a variable in the environment says, if it is set.
func lengthOf(t *testing.T, variable string, short time.Duration) (d time.Duration, long bool) {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return short, false
	}
	d, err := time.ParseDuration(text)
	dbtest.OK(t, err)
	return d, true
}

// shared is an arena on a server that other tests use, too.
func shared(t *testing.T, bin tempserver.Binary, name string) *arena {
	a := &arena{t: t, name: name, topology: bin.String(), nodes: []*tempserver.Server{tempserver.Share(t, bin)}}
	a.open()
	return a
}

// loads is how many there are at a time: on two processors more would only take longer.
var loads = make(chan struct{}, 2)

// torment has the load for a length of time, and checks it.
func (l load) torment(a *arena, length time.Duration) {
	a.t.Helper()
	loads <- struct{}{}
	defer func() { <-loads }()
	a.employ(l.jobs, slices.Clone(l.clients)...)
	a.awaitCommits()
	start := time.Now()
	var before []rest
	if l.grows {
		a.sleep(length/4 - time.Since(start))
		before = a.settle()
		a.turn()
	}
	for n := 0; time.Since(start) < length; n++ {
		if len(l.faults) == 0 {
			a.sleep(length - time.Since(start))
			break
		}
		f := l.faults[n%len(l.faults)]
		w := &window{fault: f, from: now()}
		a.windows = append(a.windows, w)
		a.draw()
		w.times = f.run(a)
		w.to = now()
		w.back = w.to
	}
	for i, after := range a.settle() {
		if l.grows {
			a.t.Logf("process %d: %d goroutines and %d KiB at first, %d and %d in the end", i, before[i].Goroutines, before[i].Heap>>10, after.Goroutines, after.Heap>>10)
			// Each pooled connection has a goroutine, and there may be more of them now.
			if after.Goroutines > before[i].Goroutines+60 || after.Heap > before[i].Heap+8<<20 {
				a.t.Errorf("process %d grows", i)
			}
		}
	}
	a.turn()
	b := a.end()
	wrong, known := a.judge(b)
	a.tally(b)
	for _, v := range append(wrong, known...) {
		a.t.Error(v)
	}
	if len(l.faults) == 0 {
		l.wantUndisturbed(a)
		return
	}
	committed := 0
	for _, e := range a.history.events {
		if e.Kind == kindEnd && e.Result == done {
			committed++
		}
	}
	if committed < 20 || !slices.ContainsFunc(a.windows, func(w *window) bool { return w.times > 0 }) {
		a.t.Errorf("hardly anything happened: %d commits", committed)
	}
}

// awaitCommits waits until something is committed in each job.
func (a *arena) awaitCommits() {
	a.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		for _, p := range a.processes {
			a.must(p.running())
		}
		a.must(a.history.refresh())
		idle := slices.DeleteFunc(slices.Clone(a.jobs), func(job string) bool {
			return slices.ContainsFunc(a.history.events, func(e event) bool { return e.Job == job && e.Result == done })
		})
		if len(idle) == 0 {
			return
		}
		if time.Now().After(end) {
			a.t.Fatalf("nothing is committed of %v", idle)
		}
	}
}

func (a *arena) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-a.t.Context().Done():
	}
}

// wantUndisturbed: where there is no fault nothing is lost, and whoever gets no connection is
// told what to set.
func (l load) wantUndisturbed(a *arena) {
	a.t.Helper()
	bad := 0
	for _, e := range a.history.events {
		if e.Kind != kindEnd || e.Over || e.Result != lost && e.Result != unknown && e.Result != failed {
			continue
		}
		full := strings.Contains(e.Error, "Error 1040")
		switch {
		case l.bounded || e.Result != failed:
		case full && (!strings.HasPrefix(e.Error, "mysqllock: ") || strings.Contains(e.Error, "lockMaxConns")):
			continue
		case strings.Contains(e.Error, mysqllock.ErrExhausted.Error()):
			continue
		}
		if bad++; bad <= 5 {
			a.t.Errorf("%s: %s: %s", e.Job, e.Result, e.Error)
		}
	}
	if bad > 5 {
		a.t.Errorf("and %d more", bad-5)
	}
}

// TestStorm: 32 goroutines for each job on few connections, with keys mixed, contexts cancelled and connections
// killed at random. With maxConns they have 6 connections in all, and the server takes no more.
func TestStorm(t *testing.T) {
	t.Parallel()
	length, _ := lengthOf(t, "STORM_TIME", 2*time.Second)
	few := orders{Workers: 32, TTL: 5 * time.Second, Limit: 3 * time.Second, Pause: time.Millisecond, Thinks: time.Millisecond, GiveUp: 4, Shared: true}
	free, limited := few, few
	free.Conns, free.Params = 4, "&lockMaxConns=4"
	limited.MaxConns, limited.User = 6, 6
	storm := []string{"storm", "storm of leases"}
	onLoad(t, tempserver.EachFlavour(tempserver.Require(t)), length/2,
		load{name: "SetMaxOpenConns", jobs: storm, clients: []orders{free}, faults: []*fault{connectionsKilled}},
		load{name: "maxConns", jobs: storm, clients: []orders{limited}, faults: []*fault{connectionsKilled}})
}

// TestHotKeys: callers of two processes want a few advisory keys, with fewer connections to
// wait on than there are keys, while statements are killed, and connections that have no lock.
func TestHotKeys(t *testing.T) {
	t.Parallel()
	bins := tempserver.Require(t)
	length, long := lengthOf(t, "HOTKEYS_TIME", 2*time.Second)
	if !long {
		bins = tempserver.EachFlavour(bins)
	}
	few := orders{Workers: 30, TTL: 5 * time.Second, Limit: 5 * time.Second, Pause: time.Millisecond, GiveUp: 5, Params: "&lockMaxConns=3"}
	few.Thinks = 10 * time.Millisecond // for others to be granted a lock that is lost
	bounded := few
	bounded.MaxConns = 8
	onLoad(t, bins, length/2,
		load{name: "free", jobs: []string{"hot"}, clients: []orders{few, few}, faults: []*fault{statementsKilled, othersKilled}},
		load{name: "maxConns", jobs: []string{"hot"}, clients: []orders{bounded, bounded}, faults: []*fault{statementsKilled, othersKilled}})
}

// onLoad has each load on each server, which they share.
func onLoad(t *testing.T, bins []tempserver.Binary, length time.Duration, all ...load) {
	t.Helper()
	for _, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			for _, l := range all {
				t.Run(l.name, func(t *testing.T) { l.torment(shared(t, bin, dbtest.Random()), length) })
			}
		})
	}
}

// soakForm is what TestSoak has on each server.
type soakForm struct{ processes, workers, connections, keys int }

// TestSoak: very many clients, in several processes, take locks of all kinds on one server
// that has fewer connections than they want: each transfer ends in time, and nothing grows.
// With maxConns the server is never asked for more connections than it has.
func TestSoak(t *testing.T) {
	t.Parallel()
	form, pause := soakForm{3, 6, 70, 20}, 400*time.Millisecond
	length, long := lengthOf(t, "SOAK_TIME", 2*time.Second)
	if long {
		form, pause = soakForm{8, 42, 300, 100}, 4*time.Second
	}
	const others = 10 // connections of the server that are not for the processes
	one := orders{
		Workers: form.workers, Keys: form.keys, TTL: 30 * time.Second, Wait: 10 * time.Second, Limit: 6 * time.Second, Pause: pause, Thinks: time.Millisecond, GiveUp: 10,
		Shared: true, Grows: true,
	}
	bounded, free := one, one
	bounded.MaxConns = (form.connections - others) / form.processes
	free.Conns, free.Params = 16, "&lockMaxConns=8"
	bins := tempserver.RequireOwn(t)
	if !long {
		bins = bins[:1]
	}
	all := []load{
		{name: "maxConns", clients: slices.Repeat([]orders{bounded}, form.processes), bounded: true},
		{name: "SetMaxOpenConns", clients: slices.Repeat([]orders{free}, form.processes)},
	}
	if !long {
		all = all[:1]
	}
	onSmallServers(t, bins, form.connections, long, func(t *testing.T, a *arena) {
		for _, l := range all {
			l.jobs, l.grows = strategies, true
			t.Run(l.name, func(t *testing.T) { l.torment(a.beside(t, l.name), length) })
		}
	})
}

// onSmallServers runs a test on servers that take few connections; in the long form, or on the
// one that SOAK_SERVER names, one after the other.
func onSmallServers(t *testing.T, bins []tempserver.Binary, connections int, long bool, test func(t *testing.T, a *arena)) {
	t.Helper()
	for _, bin := range bins {
		if only := os.Getenv("SOAK_SERVER"); only != "" && only != bin.Name {
			continue
		}
		t.Run(bin.Name, func(t *testing.T) {
			if !long {
				t.Parallel()
			}
			a := newArena(t, bin, fmt.Sprintf("--max-connections=%d", connections))
			a.admin().SetMaxOpenConns(1) // from before the others
			dbtest.OK(t, a.admin().Ping())
			test(t, a)
		})
	}
}

// TestAFullServerSaysWhatToSet: where the server has no connection left, who wants a lock is
// told what to set, and soon; and is not when there is one again.
func TestAFullServerSaysWhatToSet(t *testing.T) {
	t.Parallel()
	const connections = 30
	locks := map[string][]lockctx.Option{
		"row": {row}, "lease": {lease}, "advisory": {advisory}, "optimistic": {optimistic},
		"slots": {row, lockctx.Slots(slots)}, "leased slots": {lease, lockctx.Slots(slots)},
	}
	onSmallServers(t, tempserver.EachFlavour(tempserver.RequireOwn(t)), connections, false, func(t *testing.T, a *arena) {
		dbtest.OK(t, a.exec("CREATE DATABASE full"))
		dsn := a.nodes[0].DSN("full")
		db := dbtest.Open(t, "mysqllock", dsn)
		conn, err := db.Conn(t.Context())
		dbtest.OK(t, err)
		defer conn.Close()
		var taken []*sql.DB
		var refusal *mysql.MySQLError
		full := func(err error) bool { return errors.As(err, &refusal) && refusal.Number == 1040 }
		for {
			one, err := sql.Open("mysql", dsn)
			dbtest.OK(t, err)
			taken = append(taken, one)
			if err := one.Ping(); full(err) {
				break
			} else if err != nil || len(taken) > connections+5 {
				t.Fatal("the server is never full: ", err)
			}
		}
		for name, opts := range locks {
			began := time.Now()
			_, err := mysqllock.Acquire(t.Context(), db, "key", append(slices.Clone(opts), lockctx.Wait(20*time.Second))...)
			var locked *mysqllock.Error
			if !errors.As(err, &locked) || !full(err) || time.Since(began) > 15*time.Second {
				t.Errorf("%s: after %v: %v", name, time.Since(began), err)
			} else {
				dbtest.Says(t, err, "max_connections", "lockMaxConns", "SetMaxOpenConns")
			}
		}
		for _, one := range taken {
			dbtest.OK(t, one.Close())
		}
		for name, opts := range locks { // the server takes its time, and a lock needs more than one
			dbtest.Eventually(t, name+", with connections left", func() error {
				h, err := mysqllock.Acquire(t.Context(), db, "key", opts...)
				if err == nil {
					err = h.Release()
				}
				return err
			})
		}
	})
}
