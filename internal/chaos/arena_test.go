package chaos

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// arena is a server or a cluster, and the client processes that work on it.
type arena struct {
	t        *testing.T
	name     string // of its databases
	topology string
	nodes    []*tempserver.Server
	admins   []*sql.DB           // of the nodes, past the proxies
	cluster  *tempserver.Cluster // nil for a server that is alone
	clock    time.Duration       // how far ahead of the machine's the server's is, where it is alone
	primary  int                 // the node that is asked; where only one takes writes, that one
	rounds   int
	pause    time.Duration // at most, between two transfers of a client of begin; 0 is the usual one
	random   *rand.Rand    // of this fault

	// Of one round, in a database of its own.
	database  string
	dir       string
	jobs      []string
	keys      int      // of each job; 0 is as many as it has
	more      []string // accounts beside those of the jobs
	processes []*process
	history   *history
	windows   []*window
}

// window is the time in which a fault was on.
type window struct {
	fault *fault
	from  int64
	to    int64 // it was over
	back  int64 // everything worked again
	times int   // how often something was broken
}

func newArena(t *testing.T, bin tempserver.Binary, opts ...string) *arena {
	t.Helper()
	bin, err := bin.WithClock()
	dbtest.OK(t, err)
	server, err := tempserver.Start(t.Context(), bin, opts...)
	dbtest.OK(t, err)
	t.Cleanup(func() { server.Stop() })
	a := &arena{t: t, name: "all", topology: bin.String(), nodes: []*tempserver.Server{server}}
	a.open()
	return a
}

// onArenas runs a test in an arena of each of bins, all at the same time.
func onArenas(t *testing.T, bins []tempserver.Binary, test func(t *testing.T, a *arena), opts ...string) {
	t.Helper()
	for _, bin := range bins {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			test(t, newArena(t, bin, opts...))
		})
	}
}

// open opens the nodes.
func (a *arena) open() {
	a.t.Helper()
	a.t.Logf("%s, CHAOS_SEED=%d", a.topology, seed)
	for _, node := range a.nodes {
		db, err := sql.Open("mysql", node.DSN("")+"?timeout=5s&readTimeout=30s&interpolateParams=true")
		a.must(err)
		a.t.Cleanup(func() { db.Close() })
		a.admins = append(a.admins, db)
	}
}

func (a *arena) admin() *sql.DB { return a.admins[a.primary] }

// faults are those that can come over it.
func (a *arena) faults() []*fault {
	switch {
	case a.cluster == nil:
		return faults
	case a.topology == string(tempserver.Galera):
		return append(slices.Clone(clusterFaults), nodeCutOff)
	}
	return clusterFaults
}

// column is for the report on a.
func (a *arena) column() *column {
	return &column{faults: a.faults(), topology: a.topology, injected: make(map[string]int), cells: make(map[string]map[string]cell)}
}

// beside is another arena on the same server.
func (a *arena) beside(t *testing.T, name string) *arena {
	return &arena{t: t, name: name, topology: a.topology, nodes: a.nodes, admins: a.admins}
}

// process is a client process with its proxy.
type process struct {
	orders orders
	proxy  *dbtest.Proxy
	lives  int
	cmd    *exec.Cmd
	leash  io.WriteCloser // its standard input
	ended  chan struct{}
	err    error // how it ended; set before ended is closed
}

// begin begins a round: a new database, and clients that do the jobs in it.
func (a *arena) begin(clients, workers int, names ...string) {
	a.t.Helper()
	all := make([]orders, clients)
	for i := range all {
		all[i].Workers, all[i].Pause = workers, a.pause
		switch i { // some have few connections
		case 0: // in every other round
			all[i].MaxConns = (a.rounds + 1) % 2 * 6
		case 1:
			all[i].Conns = workers
		case 2: // who holds a lock needs one, and nobody may wait with it
			all[i].Conns, all[i].Workers = 1, 1
		}
	}
	a.employ(names, all...)
}

// employ begins a round with a client for each of the orders, which say how each does the jobs.
func (a *arena) employ(names []string, all ...orders) {
	a.t.Helper()
	a.rounds++
	a.database, a.jobs, a.dir = fmt.Sprintf("chaos_%s_%d", a.name, a.rounds), names, a.t.TempDir()
	a.history, a.windows, a.processes, a.keys = newHistory(a.dir), nil, nil, 0
	if len(all) > 0 {
		a.keys = all[0].Keys
	}
	a.must(a.exec("CREATE DATABASE " + a.database))
	a.must(openBank(a.t.Context(), a.admin(), a.database, slices.Concat(a.accounts(), a.more, []string{unlocked})))
	for i, o := range all {
		user := "root"
		if o.User > 0 {
			user = fmt.Sprint(a.database, "_", i)
			a.must(a.exec(fmt.Sprintf("CREATE USER %s WITH MAX_USER_CONNECTIONS %d", user, o.User)))
			a.t.Cleanup(func() { _ = a.exec("DROP USER " + user) })
			a.must(a.exec("GRANT ALL ON " + a.database + ".* TO " + user))
		}
		proxy := dbtest.StartProxy(a.t, a.addr(a.nodeOf(i)))
		o.Name, o.Jobs, o.Seed = fmt.Sprint("client", i), names, seed+uint64(i)
		o.DSN = fmt.Sprintf("%s@tcp(%s)/%s?interpolateParams=%v", user, proxy.Addr(), a.database, i%2 == 0)
		o.OneByOne = i%4 == 3 // with interpolateParams the callers' statements go out with ours
		p := &process{proxy: proxy, orders: o}
		a.processes = append(a.processes, p)
		a.t.Cleanup(p.kill) // before its proxy is closed
		a.must(p.start(a.dir))
	}
}

// accounts are the keys of all accounts that are to have commits.
func (a *arena) accounts() (keys []string) {
	for _, name := range a.jobs {
		keys = append(keys, jobs[name].banked(name, a.keys)...)
	}
	return keys
}

// nodeOf is which node a client works on while nothing is wrong with it.
func (a *arena) nodeOf(client int) int {
	if a.cluster == nil || a.singlePrimary() {
		return a.primary
	}
	return client % len(a.nodes)
}

func (a *arena) addr(node int) string {
	a.t.Helper()
	cfg, err := mysql.ParseDSN(a.nodes[node].DSN(""))
	a.must(err)
	return cfg.Addr
}

func (a *arena) must(err error) {
	a.t.Helper()
	dbtest.OK(a.t, err)
}

func (a *arena) exec(statement string) error {
	_, err := a.admin().ExecContext(a.t.Context(), statement)
	return err
}

// start starts the process, with a history of its own each time.
func (p *process) start(dir string) error {
	p.lives++
	o := p.orders
	o.Name = fmt.Sprint(o.Name, ".", p.lives)
	o.Seed += uint64(p.lives) << 32
	o.File = filepath.Join(dir, o.Name+".history")
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), ordersVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	leash, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	p.cmd, p.leash, p.ended = cmd, leash, ended
	go func() {
		p.err = cmd.Wait()
		close(ended)
	}()
	return nil
}

func (p *process) signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// kill ends it with SIGKILL, and waits for its end.
func (p *process) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.signal(syscall.SIGKILL) // an error means that it has ended
	<-p.ended
}

// running returns why the process has ended, which it should not have.
func (p *process) running() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s ended: %w", p.orders.Name, cmp.Or(p.err, errors.New("it was not told to")))
	default:
		return nil
	}
}

// patience is for what must happen, on however slow a machine.
const patience = 4 * time.Minute

// draw begins the random numbers of the next fault: how many the last one took is
// up to the machine.
func (a *arena) draw() {
	a.random = rand.New(rand.NewPCG(seed, uint64(a.rounds)<<16+uint64(len(a.windows))))
}

// shuffled is all faults in the order of this round.
func (a *arena) shuffled() []*fault {
	order := slices.Clone(a.faults())
	a.draw()
	a.random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// inflict has a fault, and waits until everything works again.
func (a *arena) inflict(f *fault) *window {
	a.t.Helper()
	w := &window{fault: f, from: now()}
	a.windows = append(a.windows, w)
	a.draw()
	w.times = f.run(a)
	w.to = now()
	a.recover(w.to)
	w.back = now()
	return w
}

// recover waits until there are commits in every account that began after since.
func (a *arena) recover(since int64) {
	a.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		for _, p := range a.processes {
			a.must(p.running())
		}
		a.must(a.history.refresh())
		waiting := a.stillWithout(since)
		if len(waiting) == 0 {
			return
		}
		if time.Now().After(end) {
			a.t.Fatalf("%s: %v after the fault nobody has got through to %s", a.topology, patience, strings.Join(waiting, ", "))
		}
	}
}

// stillWithout returns the accounts in which nothing was committed since.
func (a *arena) stillWithout(since int64) (keys []string) {
	ended := make(map[string]bool)
	keys = a.accounts()
	for _, e := range slices.Backward(a.history.events) {
		switch {
		case e.Kind == kindEnd && e.Result == done:
			ended[e.Op] = true
		case e.Kind == kindCommit && e.Call > since && ended[e.Op]:
			keys = slices.DeleteFunc(keys, func(key string) bool { return key == e.Key })
		}
	}
	return keys
}

// turn has the workers of all clients rest, or go on.
func (a *arena) turn() {
	a.t.Helper()
	for _, p := range a.processes {
		_, err := io.WriteString(p.leash, "\n")
		a.must(err)
	}
}

// settle has all workers rest. Nothing may be left then: no connection in use, no
// transaction, and no lock. It returns what each process has.
func (a *arena) settle() (rests []rest) {
	a.t.Helper()
	a.must(a.history.refresh())
	known := len(a.history.events)
	a.turn()
	for end := time.Now().Add(patience); len(rests) < len(a.processes); time.Sleep(10 * time.Millisecond) {
		for _, p := range a.processes {
			a.must(p.running())
			if time.Now().After(end) {
				a.hangs(p)
			}
		}
		a.must(a.history.refresh())
		rests = nil
		for _, e := range a.history.events[known:] {
			if e.Kind == kindRest {
				rests = append(rests, e.Rest)
			}
		}
	}
	for i, r := range rests {
		if r.InUse > 0 {
			a.t.Errorf("process %d: %d connections are still in use, or waited for", i, r.InUse)
		}
	}
	for node := range a.nodes {
		dbtest.Eventually(a.t, "no transaction is left", func() error {
			if left := dbtest.Transactions(a.t, a.admins[node], "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ?", a.database); len(left) > 0 {
				return fmt.Errorf("%s: %s", a.topology, left)
			}
			return nil
		})
	}
	for _, name := range a.jobs {
		for _, key := range jobs[name].keysOf(name, a.keys) {
			for _, lock := range []string{lockname.OfAdvisory(a.database, key), lockname.OfWakeUp(a.database, key)} {
				a.none(a.primary, "SELECT IS_USED_LOCK(?) IS NOT NULL", "advisory or wake-up locks are left", lock)
			}
		}
	}
	if len(a.windows) > 0 && (slices.Contains(a.jobs, "lease") || slices.Contains(a.jobs, "storm of leases")) { // else end does not wait
		a.none(a.primary, "SELECT COUNT(*) FROM "+a.database+".mysqllock WHERE owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)", "leases are left")
	}
	return rests
}

// none waits until a node counts none of what is not to be left.
func (a *arena) none(node int, query, what string, args ...any) {
	a.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		var n int
		a.must(a.admins[node].QueryRowContext(a.t.Context(), query, args...).Scan(&n))
		if n == 0 {
			return
		}
		if time.Now().After(end) {
			a.t.Fatalf("%s: %d %s", a.topology, n, what)
		}
	}
}

// hangs has a process tell where it hangs.
func (a *arena) hangs(p *process) {
	a.t.Helper()
	_ = p.signal(syscall.SIGQUIT)
	<-p.ended
	a.t.Fatalf("%s: %s hangs", a.topology, p.orders.Name)
}

// end has the clients stop, and returns the books when nobody can change them any
// more.
func (a *arena) end() *books {
	a.t.Helper()
	a.settle()
	for _, p := range a.processes {
		p.leash.Close()
	}
	for _, p := range a.processes {
		select {
		case <-p.ended:
			a.must(p.err)
		case <-time.After(patience):
			a.hangs(p)
		}
		p.proxy.Close()
	}
	for node := range a.nodes {
		a.none(node, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ?", "connections of clients that have ended are left", a.database)
	}
	b, err := readBooks(a.t.Context(), a.admin(), a.database)
	a.must(err)
	a.must(a.history.refresh())
	if len(a.processes) > 0 && a.processes[0].orders.TTL > ttl && len(a.windows) == 0 { // else they end too soon, or what was killed leaves some
		var tables, leases int
		a.must(a.admin().QueryRowContext(a.t.Context(), "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = ? AND TABLE_NAME = 'mysqllock'", a.database).Scan(&tables))
		if tables > 0 {
			a.must(a.admin().QueryRowContext(a.t.Context(), "SELECT COUNT(*) FROM "+a.database+".mysqllock WHERE owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)").Scan(&leases))
		}
		if leases > 0 {
			a.t.Errorf("%d leases are left", leases)
		}
	}
	a.must(a.exec("DROP DATABASE " + a.database))
	return b
}

// judge returns all that is wrong with a round, and apart what advisory locks do not
// promise to prevent.
func (a *arena) judge(b *books) (wrong, known []violation) {
	for _, v := range b.overwritten(a.history) {
		if v.Job == "advisory" && a.freesAdvisory(v.At) {
			known = append(known, v)
		} else {
			wrong = append(wrong, v)
		}
	}
	for _, v := range slices.Concat(a.history.checkLocks(a.unsure, a.doubtful), a.history.checkReaders(), a.history.checkLate(), a.history.checkAccounts(b, a.doubtful), b.check(a.history)) {
		if !v.Order || !slices.ContainsFunc(known, func(other violation) bool { return other.Job == v.Job }) {
			wrong = append(wrong, v)
		}
	}
	return wrong, known
}

// freesAdvisory reports whether the server may have ended connections that carried
// advisory locks at the time or shortly before it: by a fault, or since their process
// did not get to run.
func (a *arena) freesAdvisory(at int64) bool {
	return slices.ContainsFunc(a.windows, func(w *window) bool {
		return w.fault.freesAdvisory && w.from <= at && at <= w.back+int64(ttl)
	}) || slices.ContainsFunc(a.history.events, func(e event) bool {
		return e.Kind == kindStall && e.Return-e.Call > int64(ttl/4) && e.Call <= at && at <= e.Return+int64(ttl)
	})
}

// unsure reports whether a grant may be outdated in a job. An advisory lock goes from
// one goroutine to the next without asking the server. In a cluster whose primary was
// replaced, the old one grants row locks until it knows.
func (a *arena) unsure(job string) bool {
	return job == "advisory" || a.cluster != nil && job != "lease"
}

// doubtful reports whether what was read then may be outdated, as on a node of a
// cluster, or not last: a server shows commits to others before they are on its
// disk, and then, or soon after, it crashed.
func (a *arena) doubtful(at int64) bool {
	return a.cluster != nil || slices.ContainsFunc(a.windows, func(w *window) bool {
		return w.fault == serverKilled && w.from-int64(untilOnDisk) <= at && at <= w.back
	})
}

// untilOnDisk is how long a disk may take to write a commit that others see already.
const untilOnDisk = 2 * time.Second

// between draws a length of time.
func (a *arena) between(least, most time.Duration) time.Duration {
	return least + time.Duration(a.random.Int64N(int64(most-least)))
}

// rest waits for a length of time that it draws.
func (a *arena) rest(least, most time.Duration) {
	select {
	case <-time.After(a.between(least, most)):
	case <-a.t.Context().Done():
	}
}

// connections returns the ids of the clients' connections to a node, of which also is true.
func (a *arena) connections(node int, also string) (ids []int64, err error) {
	rows, err := a.admins[node].QueryContext(a.t.Context(), "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ?"+also+" ORDER BY ID", a.database)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
