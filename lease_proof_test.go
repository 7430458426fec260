package mysqllock_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Here leases have to hold while their holders are stopped, cut off, killed and
// raced, and their server crashes. What everybody saw is checked as one history,
// and so is what was written: see history_test.go. "make prove" runs the long
// form.

// long picks the figure for the long form of a test.
func long[T any](short, long T) T {
	if os.Getenv("PROVE") != "" {
		return long
	}
	return short
}

// within is a context that ends with the test, or when it hangs.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// proof is a scratch database with the table fenced.
func (s *scratch) proof() *scratch {
	s.t.Helper()
	exec(s.t, s.plain, fencedTable)
	return s
}

// childDSN is for a child process; params are added to it.
func (s *scratch) childDSN(params ...string) string {
	dsn := s.cfg().FormatDSN()
	if len(params) == 0 {
		return dsn
	}
	return dsn + map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + strings.Join(params, "&")
}

// race has several clients of each handle try to take the lease on k at the same
// moment, and returns those that have it.
func (h *history) race(ctx context.Context, dbs []*sql.DB) (won []*holder, err error) {
	const clients = 2
	var mu sync.Mutex
	var all sync.WaitGroup
	start := make(chan struct{})
	for _, db := range dbs {
		for range clients {
			all.Go(func() {
				<-start
				o, failed := h.acquire(ctx, db, "k", lockctx.Lease(time.Minute), lockctx.NoWait())
				mu.Lock()
				defer mu.Unlock()
				if failed == nil {
					won = append(won, o)
				} else if !errors.Is(failed, mysqllock.ErrLocked) {
					err = failed
				}
			})
		}
	}
	close(start)
	all.Wait()
	return won, err
}

// childRivals races when it is told to, and releases when it is told to.
func childRivals(db *sql.DB, in *bufio.Scanner) {
	h := &history{tell: true}
	dbs := []*sql.DB{db}
	for len(dbs) < 4 {
		db, _ := sql.Open("mysqllock", os.Getenv("MYSQLLOCK_TEST_CHILD_DSN"))
		defer db.Close()
		dbs = append(dbs, db)
	}
	for in.Scan() {
		won, err := h.race(context.Background(), dbs)
		fmt.Println(len(won), err)
		in.Scan()
		for _, o := range won {
			err = errors.Join(err, o.release())
		}
		fmt.Println(err)
	}
}

// TestProofRivals: of 32 clients that race for a lease whose holder has vanished
// one gets it, and its token is the next.
func TestProofRivals(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		rounds := long(200, 2000)
		ctx, h := within(t, 10*time.Minute), &history{}
		var dbs []*sql.DB
		for range 12 {
			dbs = append(dbs, s.open())
		}
		first, err := h.acquire(ctx, dbs[0], "k", lockctx.Lease(time.Minute))
		ok(t, err)
		ok(t, first.release())
		c := startChild(t, "rivals", s.childDSN())
		there := 0
		for round := range rounds {
			exec(t, s.plain, "UPDATE mysqllock SET owner = 'vanished#00000000', expires = UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND")
			c.proceed()
			won, err := h.race(ctx, dbs)
			ok(t, err)
			line := h.next(c)
			n, answer, _ := strings.Cut(line, " ")
			if answer != "<nil>" {
				t.Fatal(line)
			}
			others, _ := strconv.Atoi(n)
			there += others
			if len(won)+others != 1 {
				t.Fatalf("round %d has %d winners", round, len(won)+others)
			}
			if token := s.token("k"); token != uint64(round)+2 {
				t.Fatalf("round %d: the token is %d", round, token)
			}
			for _, o := range won {
				ok(t, o.release())
			}
			c.proceed()
			if line := h.next(c); line != "<nil>" {
				t.Fatal(line)
			}
		}
		h.want(t)
		t.Logf("%d rounds, %d won in the other process", rounds, there)
	})
}

// What the holder of a paused process does with a transaction under its lease,
// which has read before the pause.
const (
	wayLate    = "late"    // it writes after the pause, with no context that would tell
	wayEarly   = "early"   // it has written before
	wayChecked = "checked" // it writes after the pause, in the context of the hold
	wayContext = "context" // it began the transaction with a context that ends with the lease
	wayTx      = "tx"      // the lease is the transaction's own
)

var (
	fencedWays = []string{wayLate, wayEarly, wayChecked, wayContext, wayTx}
	fenceWays  = []string{wayLate, wayEarly} // where nothing but the fence is in the way
)

const pausedTTL = 2 * time.Second

func pausedKeys(ways []string) (keys []string) {
	for i := range long(10, 25) {
		for _, way := range ways {
			keys = append(keys, way+"-"+strconv.Itoa(i))
		}
	}
	return keys
}

// childPaused takes leases, reads under them, waits for a line, and then goes on
// to write and commit, in rounds. It says of each key how that ended.
func childPaused(db *sql.DB, in *bufio.Scanner, ways []string) {
	h := &history{tell: true}
	for in.Scan() {
		prefix := in.Text()
		goOn := make(chan struct{})
		var ready, over sync.WaitGroup
		for _, key := range pausedKeys(ways) {
			way, _, _ := strings.Cut(key, "-")
			ready.Add(1)
			over.Go(func() {
				o, ctx, err := h.paused(db, prefix+key, way)
				ready.Done()
				<-goOn
				if err != nil {
					fmt.Println(key, "not begun:", err)
					return
				}
				defer o.tx.Rollback()
				if way != wayEarly {
					err = o.insert(ctx)
				}
				if err == nil {
					err = o.commit()
				}
				answer := fmt.Sprint(err)
				if errors.Is(err, mysqllock.ErrLost) {
					answer = "lost"
				}
				if o.hold != nil && !errors.Is(o.release(), mysqllock.ErrLost) {
					answer += ", and its release did not say that it was lost"
				}
				fmt.Println(key, answer)
			})
		}
		ready.Wait()
		fmt.Println("ready")
		in.Scan()
		close(goOn)
		over.Wait()
	}
}

// paused does what comes before the pause, and returns the context for what
// comes after it.
func (h *history) paused(db *sql.DB, key, way string) (o *holder, ctx context.Context, err error) {
	ctx = context.Background()
	if way == wayTx {
		o, err = h.acquireTx(ctx, db, key, lockctx.Lease(pausedTTL))
	} else {
		o, err = h.acquire(ctx, db, key, lockctx.Lease(pausedTTL))
	}
	if err != nil {
		return nil, nil, err
	}
	switch way {
	case wayContext:
		ctx = o.hold.Context()
	case wayChecked:
		ctx = context.WithoutCancel(o.hold.Context())
	}
	if way != wayTx {
		begin := o.hold.Context()
		if way != wayContext {
			begin = context.WithoutCancel(begin)
		}
		if err := o.begin(begin, db); err != nil {
			return nil, nil, err
		}
	}
	err = o.read(ctx)
	if err == nil && way == wayEarly {
		err = o.insert(ctx)
	}
	return o, ctx, err
}

// pause stops the child in its transactions until others have taken all of its
// leases and written, and lets it go on. It returns what the child says of each
// key.
func (s *scratch) pause(c *child, h *history, db *sql.DB, prefix string, ways []string) map[string]string {
	s.t.Helper()
	fmt.Fprintln(c.in, prefix)
	if line := h.next(c); line != "ready" {
		s.t.Fatal(line)
	}
	ok(s.t, c.cmd.Process.Signal(syscall.SIGSTOP))
	ctx := within(s.t, time.Minute)
	took := make([]*holder, len(pausedKeys(ways)))
	failed := make([]error, len(took))
	var all sync.WaitGroup
	for i, key := range pausedKeys(ways) {
		all.Go(func() {
			took[i], failed[i] = h.acquire(ctx, db, prefix+key, lockctx.Lease(20*time.Second), lockctx.Wait(time.Minute))
			if failed[i] == nil {
				failed[i] = took[i].write(db, 0)
			}
		})
	}
	all.Wait()
	ok(s.t, c.cmd.Process.Signal(syscall.SIGCONT))
	ok(s.t, errors.Join(failed...))
	c.proceed()
	answers := make(map[string]string)
	for range took {
		key, answer, _ := strings.Cut(h.next(c), " ")
		answers[key] = answer
	}
	for _, o := range took { // the lease did not go with the other's release
		ok(s.t, o.write(db, 0))
		ok(s.t, o.release())
	}
	return answers
}

// TestProofPause: a process that was stopped in its transactions until others had
// its leases, and had written, commits nothing.
func TestProofPause(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.proof()
		h, db := &history{}, s.open()
		c := startChild(t, "paused", s.childDSN())
		stopped := 0
		for round := range long(1, 4) {
			for key, answer := range s.pause(c, h, db, fmt.Sprint(round, "-"), fencedWays) {
				way, _, _ := strings.Cut(key, "-")
				if stopped++; answer != "lost" && (way != wayContext || answer != sql.ErrTxDone.Error() && answer != context.Canceled.Error()) {
					t.Errorf("%s: a commit after the pause ended with %q", key, answer)
				}
			}
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d transactions were stopped until others had their leases", stopped)
	})
}

// TestProofPauseUnfenced is the control: with the fence off the same loses
// updates, and the checks see it.
func TestProofPauseUnfenced(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.proof()
		h, db := &history{}, s.open()
		c := startChild(t, "unfenced", s.childDSN())
		keys := len(pausedKeys(fenceWays))
		for key, answer := range s.pause(c, h, db, "", fenceWays) {
			if !strings.HasPrefix(answer, "<nil>") {
				t.Errorf("%s: a commit without the fence ended with %q", key, answer)
			}
		}
		if n := len(s.stale()); n < keys {
			t.Errorf("the check of what is written finds %d faults in %d stale writes", n, keys)
		}
		if n := len(h.wrong()); n != keys {
			t.Errorf("the check of histories finds %d of %d stale writes", n, keys)
		}
	})
}

// proxy stands between a handle and the server. While it is cut nothing comes
// through it, in either direction, and nobody is told.
type proxy struct {
	network, addr string // of the server
	listener      net.Listener
	running       sync.WaitGroup

	mu     sync.Mutex
	passes chan struct{} // closed while it is not cut
	word   string        // that cuts it when the client says it; "" is none
	torn   bool
	conns  []net.Conn
}

func (s *scratch) proxied(c mysqllock.Config) (*sql.DB, *proxy) {
	s.t.Helper()
	cfg := s.cfg()
	p := &proxy{network: cfg.Net, addr: cfg.Addr, passes: make(chan struct{})}
	close(p.passes)
	var err error
	p.listener, err = net.Listen("tcp", "127.0.0.1:0")
	ok(s.t, err)
	p.running.Go(p.serve)
	cfg.Net, cfg.Addr = "tcp", p.listener.Addr().String()
	connector, err := mysqllock.NewConnector(cfg, c)
	ok(s.t, err)
	db := sql.OpenDB(connector)
	s.t.Cleanup(func() {
		p.tear()
		db.Close()
		p.running.Wait()
	})
	return db, p
}

func (p *proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(p.network, p.addr)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		p.mu.Unlock()
		p.running.Go(func() { p.pipe(client, server, func([]byte) {}) })
		p.running.Go(func() { p.pipe(server, client, p.said) })
	}
}

func (p *proxy) pipe(to, from net.Conn, said func([]byte)) {
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		said(buffer[:n])
		if p.pass(); p.isTorn() {
			return
		}
		if _, failed := to.Write(buffer[:n]); err != nil || failed != nil {
			return
		}
	}
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.passes = make(chan struct{})
}

// cutAt cuts it as soon as a client says word, which does not come through.
func (p *proxy) cutAt(word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word = word
}

func (p *proxy) said(text []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.word != "" && bytes.Contains(text, []byte(p.word)) {
		p.word, p.passes = "", make(chan struct{})
	}
}

func (p *proxy) isCut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.passes:
		return false
	default:
		return true
	}
}

// pass waits until it is not cut.
func (p *proxy) pass() {
	p.mu.Lock()
	passes := p.passes
	p.mu.Unlock()
	<-passes
}

func (p *proxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.passes:
	default:
		close(p.passes)
	}
}

// tear ends all connections, without what is under way, and takes no new ones.
func (p *proxy) tear() {
	p.listener.Close()
	p.mu.Lock()
	p.torn = true
	conns := p.conns
	p.mu.Unlock()
	p.mend()
	for _, c := range conns {
		c.Close()
	}
}

func (p *proxy) isTorn() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.torn
}

// TestProofCut: holders whose network is cut in their transactions. Others get
// the leases and write; then the network is back, or the connections turn out to
// be gone.
func TestProofCut(t *testing.T) {
	const (
		late     = iota // commits after the cut
		underWay        // commits in the cut
		racing          // commits before: the first COMMIT is what the cut swallows
		leaving         // releases the lease in the cut
		nobody          // as late, and nobody else takes the lease
		ways
	)
	const ttl = 3 * time.Second
	onServers(t, func(t *testing.T, s *scratch) {
		s.proof()
		h, others := &history{}, s.open()
		var dbs [3]*sql.DB // whose connections are back in the end, turn out to be gone, and whose renewals then come late
		var proxies [3]*proxy
		for i := range dbs {
			dbs[i], proxies[i] = s.proxied(mysqllock.Config{})
		}
		ctx, n := within(t, time.Minute), ways*long(10, 24)
		type victim struct {
			*holder
			err  error
			left time.Duration // of the lease on the server when its holder is told
		}
		victims := make([]*victim, n)
		var ready, told, over sync.WaitGroup
		isReady, isCut, isOver := make(chan struct{}), make(chan struct{}), make(chan struct{})
		for i := range n {
			victims[i] = &victim{}
			ready.Add(1)
			over.Go(func() {
				v, way, db := victims[i], i%ways, dbs[i/ways%2]
				if way == nobody {
					db = dbs[2]
				}
				v.holder, v.err = h.acquire(ctx, db, fmt.Sprint("k", i), lockctx.Lease(ttl))
				if v.err != nil {
					ready.Done()
					return
				}
				stays := context.WithoutCancel(v.hold.Context())
				if v.err = v.begin(stays, db); v.err == nil {
					v.err = v.read(stays)
				}
				if v.err == nil {
					v.err = v.insert(stays)
				}
				ready.Done()
				if v.err != nil {
					return
				}
				switch way {
				case racing:
					<-isReady
				case underWay:
					<-isCut
				case leaving:
					<-isCut
					_ = v.release()
					<-isOver
				default:
					<-isOver
				}
				v.err = v.commit()
			})
		}
		ready.Wait()
		for i, v := range victims {
			if v.err != nil {
				t.Fatal(i, v.err)
			}
			if i%ways == late {
				told.Go(func() {
					<-v.hold.Context().Done()
					var micros int64
					if err := s.plain.QueryRow("SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) FROM mysqllock WHERE name = ?", v.key).Scan(&micros); err != nil {
						t.Error(err)
					}
					v.left = time.Duration(micros) * time.Microsecond
				})
			}
		}
		for _, p := range proxies[:2] {
			p.cutAt("COMMIT")
		}
		proxies[2].cut()
		close(isReady)
		for _, p := range proxies[:2] {
			soon(t, "a COMMIT is under way", p.isCut)
		}
		close(isCut)

		took := make([]*holder, n)
		var sure, may sync.WaitGroup
		for i := range n {
			take := func() {
				o, err := h.acquire(ctx, others, fmt.Sprint("k", i), lockctx.Lease(20*time.Second), lockctx.Wait(time.Minute))
				if err == nil {
					err = o.write(others, 0)
				}
				if err != nil {
					t.Error(err)
				}
				took[i] = o
			}
			switch i % ways {
			case racing: // the fence was before the cut, and keeps the lease until COMMIT comes through
				may.Go(take)
			case nobody:
			default:
				sure.Go(take)
			}
		}
		sure.Wait()
		told.Wait()
		for i, v := range victims { // the last renewal that came through may have been another's
			if i%ways == nobody {
				soon(t, "a lease that nobody renews has run out", func() bool { return !s.leased(v.key) })
			}
		}
		proxies[2].mend()
		time.Sleep(300 * time.Millisecond) // renewals that were under way have come through
		for i, v := range victims {
			if i%ways == nobody {
				s.wantLeased(v.key, false)
			}
		}
		proxies[0].mend()
		proxies[1].tear()
		close(isOver)
		over.Wait()
		may.Wait()

		committed := 0
		var left []time.Duration
		for i, v := range victims {
			v.tx.Rollback()
			rows := s.written(v.key, v.token)
			switch {
			case v.err == nil && i%ways == racing:
				committed++
				if rows != 1 {
					t.Errorf("an acknowledged commit is not there")
				}
			case !errors.Is(v.err, mysqllock.ErrLost):
				t.Errorf("way %d, proxy %d: Commit returned %v", i%ways, i/ways%2, v.err)
			case rows != 0 && i%ways != racing:
				t.Errorf("way %d, proxy %d: a write without the lease", i%ways, i/ways%2)
			}
			if i%ways == late {
				left = append(left, v.left)
			}
			if i%ways != leaving {
				wantLost(t, "Release", v.release())
			}
		}
		if committed == 0 {
			t.Error("the COMMIT that the cut swallowed, and that came through in the end, is lost")
		}
		slices.Sort(left)
		if left[len(left)/2] < ttl/20 {
			t.Errorf("holders were told that their leases were lost when they had %v left on the server, by the median", left[len(left)/2])
		}
		for i, o := range took {
			if i%ways != nobody {
				ok(t, o.write(others, 0))
				ok(t, o.release())
			}
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d cut off in their transactions, %d in time committed; holders were told %v to %v before the end of the lease", n, committed, left[0], left[len(left)-1])
	})
}

// TestProofKill: connections are killed in the middle of transactions under
// leases: the transaction's own, or all that the application has.
func TestProofKill(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.proof()
		h, ctx := &history{}, within(t, 2*time.Minute)
		dbs := []*sql.DB{s.open(), s.open()}
		own, err := s.plain.Conn(ctx)
		ok(t, err)
		defer own.Close()
		all := func() (ids []int) {
			rows, err := own.QueryContext(ctx, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.database)
			ok(t, err)
			defer rows.Close()
			for rows.Next() {
				var id int
				ok(t, rows.Scan(&id))
				ids = append(ids, id)
			}
			return ids
		}
		kill := func(ids ...int) {
			for _, id := range ids {
				var gone *mysql.MySQLError
				if _, err := own.ExecContext(ctx, fmt.Sprint("KILL ", id)); err != nil && (!errors.As(err, &gone) || gone.Number != 1094) {
					t.Error(err)
				}
			}
		}
		const keys = 25
		begin := func(i int) (o *holder, id int, err error) {
			o, err = h.acquire(ctx, dbs[i%2], fmt.Sprint("k", i), lockctx.Lease(10*time.Second))
			if err != nil {
				return nil, 0, err
			}
			inside := context.WithoutCancel(o.hold.Context())
			from := inside
			if i%3 == 0 {
				from = ctx // and only the first statement is inside the hold
			}
			if err = o.begin(from, dbs[i%2]); err == nil {
				err = o.read(inside)
			}
			if err == nil {
				err = o.insert(inside)
			}
			if err == nil {
				err = o.tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id)
			}
			return o, id, err
		}
		committed, failed := 0, 0
		for round := range long(4, 12) {
			everything := round%2 == 1
			holders, ids, errs := make([]*holder, keys), make([]int, keys), make([]error, keys)
			var begun sync.WaitGroup
			for i := range keys {
				begun.Go(func() {
					holders[i], ids[i], errs[i] = begin(i)
				})
			}
			begun.Wait()
			ok(t, errors.Join(errs...))
			var commits sync.WaitGroup
			killed := make(chan struct{})
			for i, o := range holders {
				commits.Go(func() {
					if everything {
						time.Sleep(rand.N(10 * time.Millisecond))
					} else {
						<-killed
					}
					errs[i] = o.commit()
				})
			}
			if everything {
				ids = all()
			}
			kill(ids...)
			soon(t, "the connections are gone", func() bool {
				return !slices.ContainsFunc(all(), func(id int) bool { return slices.Contains(ids, id) })
			})
			close(killed)
			commits.Wait()
			for i, o := range holders {
				rows := s.written(o.key, o.token)
				switch err := errs[i]; {
				case err == nil && everything && rows == 1:
					committed++
				case err == nil:
					t.Errorf("a commit succeeded on a killed connection, or %d rows of it are there", rows)
				case !errors.Is(err, mysqllock.ErrLost):
					t.Errorf("Commit returned %v", err)
				case rows == 1 && !everything:
					t.Errorf("a commit that returned %v is there", err)
				default:
					failed++
				}
			}
			// Leases outlive connections: the holders go on.
			var rest sync.WaitGroup
			for i, o := range holders {
				rest.Go(func() {
					_, err := mysqllock.Acquire(ctx, dbs[1-i%2], o.key, lockctx.Lease(10*time.Second), lockctx.Wait(300*time.Millisecond))
					if !errors.Is(err, mysqllock.ErrTimeout) {
						t.Errorf("%s: Acquire beside the holder whose connections were killed: %v", o.key, err)
					}
					if err := o.write(dbs[i%2], 0); err != nil {
						t.Errorf("%s: a write after the kill: %v", o.key, err)
					}
					if err := o.release(); err != nil {
						t.Errorf("%s: Release after the kill: %v", o.key, err)
					}
				})
			}
			rest.Wait()
		}
		s.wantNoneStale()
		h.want(t)
		t.Logf("%d commits failed, %d were quicker than the kill", failed, committed)
	})
}

// TestProofCrash: the server is killed again and again while leases are taken,
// written under, and given back.
func TestProofCrash(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			ctx := within(t, 10*time.Minute)
			srv, err := tempserver.Start(ctx, bin)
			ok(t, err)
			t.Cleanup(func() { srv.Stop() })
			s := newTestServer("crash", bin, srv).scratch(t).proof()
			h := &history{}
			var stop atomic.Bool
			var all sync.WaitGroup
			for range 3 {
				db := s.open()
				for i := range 4 {
					all.Go(func() {
						for !stop.Load() {
							o, err := h.acquire(ctx, db, fmt.Sprint("k", i%2), lockctx.Lease(time.Second), lockctx.Wait(3*time.Second))
							if err != nil {
								time.Sleep(20 * time.Millisecond)
								continue
							}
							for range 1 + rand.N(3) {
								_ = o.write(db, rand.N(10*time.Millisecond))
							}
							_ = o.release()
						}
					})
				}
			}
			patient := s.open()
			o, err := h.acquire(ctx, patient, "patient", lockctx.Lease(5*time.Minute))
			ok(t, err)
			crashes := long(3, 10)
			for crash := range crashes {
				time.Sleep(500*time.Millisecond + rand.N(500*time.Millisecond))
				ok(t, srv.Kill())
				time.Sleep(rand.N(time.Second))
				ok(t, srv.Restart(ctx))
				before := h.count("grant")
				soon(t, "leases are granted again", func() bool { return h.count("grant") > before+5 })
				soon(t, fmt.Sprint("the holder of a long lease goes on after crash ", crash), func() bool { return o.write(patient, 0) == nil })
			}
			stop.Store(true)
			finished := make(chan struct{})
			go func() { all.Wait(); close(finished) }()
			select {
			case <-finished:
			case <-time.After(30 * time.Second):
				t.Fatal("it hangs")
			}
			ok(t, o.release())
			s.wantNoneStale()
			h.want(t)
			t.Logf("%d crashes: %d grants, %d commits, %d of the holds lost", crashes, h.count("grant"), h.count("use"), h.lost())
		})
	}
}

// TestProofClock: sessions whose clocks show other times agree on leases, and no
// statement of a lease's life carries the client's time.
func TestProofClock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ctx := within(t, time.Minute)
		const ttl = 3 * time.Second
		zones := []string{"+13:00", "-11:00", "+00:00"}
		dbs := make(map[string]*sql.DB)
		for _, zone := range zones {
			dbs[zone] = s.open("time_zone=%27" + strings.ReplaceAll(zone, "+", "%2B") + "%27")
			var got string
			ok(t, dbs[zone].QueryRow("SELECT @@time_zone").Scan(&got))
			if got != zone {
				t.Fatalf("the session's time zone is %s, want %s", got, zone)
			}
			ok(t, mysqllock.Do(ctx, dbs[zone], zone, func(context.Context) error { return nil }, lockctx.Lease(ttl))) // opens connections
		}
		var all sync.WaitGroup
		for _, first := range zones {
			for _, second := range zones {
				if first == second {
					continue
				}
				all.Go(func() {
					key := first + second
					holding, vanish := context.WithCancel(ctx)
					defer vanish()
					start := time.Now()
					h, err := mysqllock.Acquire(holding, dbs[first], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					defer h.Release()
					vanish() // so that it is not renewed any more
					if _, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl), lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
						t.Errorf("%s beside %s: %v", second, first, err)
					}
					if !s.leased(key) {
						t.Errorf("the lease of %s does not look live", first)
					}
					next, err := mysqllock.Acquire(ctx, dbs[second], key, lockctx.Lease(ttl))
					if err != nil {
						t.Error(err)
						return
					}
					if took := time.Since(start); took < ttl || took > ttl+20*time.Second {
						t.Errorf("%s took over from %s after %v, want %v", second, first, took, ttl)
					}
					if err := next.Release(); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()

		db, tap := s.tapped(mysqllock.Config{})
		ok(t, mysqllock.Do(ctx, db, "warm", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // makes the table
		seen := tap.since()
		ok(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
			time.Sleep(ttl * 3 / 2)
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
			return err
		}, lockctx.Lease(ttl)))
		commands := seen()
		for _, what := range []string{"INTERVAL 3000000 MICROSECOND", "d.ttl", "LOCK IN SHARE MODE", "RELEASE_LOCK", "COMMIT"} {
			if !slices.ContainsFunc(commands, func(c command) bool { return strings.Contains(c.text, what) }) {
				t.Errorf("the tap has not seen %s", what)
			}
		}
		for _, c := range commands {
			if what := clientTime(c.text, time.Now()); what != "" {
				t.Errorf("a statement carries the client's time, %s: %s", what, c.text)
			}
		}
		for _, bad := range []string{time.Now().UTC().Format(time.DateTime), fmt.Sprint(time.Now().Unix()), fmt.Sprint(time.Now().UnixMicro())} {
			if clientTime("SELECT '"+bad+"'", time.Now()) == "" {
				t.Errorf("the check does not see %s", bad)
			}
		}
	})
}

var (
	datePattern   = regexp.MustCompile(`\d{4}-\d\d-\d\d`)
	numberPattern = regexp.MustCompile(`\b\d{10,}\b`)
)

// clientTime returns what in a statement looks like the current time.
func clientTime(text string, now time.Time) string {
	if date := datePattern.FindString(text); date != "" {
		return date
	}
	for _, number := range numberPattern.FindAllString(text, -1) {
		n, _ := strconv.ParseFloat(number, 64)
		for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
			if off := n - float64(now.UnixNano())/float64(unit); max(off, -off)*unit.Seconds() < 1e6 {
				return number
			}
		}
	}
	return ""
}

const leases = 1000

// leasesTTL is that of many leases at a time.
func leasesTTL() time.Duration { return 9 * time.Second }

// childLeases holds many leases, and says, when it is asked, how many statements
// were sent, over how many connections, and how many goroutines there are.
func childLeases(in *bufio.Scanner) {
	tap := &tap{}
	cfg, err := mysql.ParseDSN(os.Getenv("MYSQLLOCK_TEST_CHILD_DSN"))
	if err == nil {
		cfg.DialFunc = tap.dial
		var c mysqllock.Config
		connector, failed := mysqllock.NewConnector(cfg, c)
		if failed == nil {
			db := sql.OpenDB(connector)
			defer db.Close()
			failed = takeMany(db)
		}
		err = failed
	}
	fmt.Println(err)
	for in.Scan() {
		goroutines := runtime.NumGoroutine()
		for range 50 { // without those that come and go
			time.Sleep(2 * time.Millisecond)
			goroutines = min(goroutines, runtime.NumGoroutine())
		}
		tap.mu.Lock()
		fmt.Println(len(tap.log), tap.conns, goroutines)
		tap.mu.Unlock()
	}
}

func takeMany(db *sql.DB) error {
	errs := make([]error, leases)
	var all sync.WaitGroup
	turns := make(chan struct{}, 32)
	for i := range leases {
		turns <- struct{}{}
		all.Go(func() {
			_, errs[i] = mysqllock.Acquire(context.Background(), db, fmt.Sprint("k", i), lockctx.Lease(leasesTTL()))
			<-turns
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// TestProofRenewal: a process keeps a thousand leases with few statements, few
// connections and few goroutines, however long.
func TestProofRenewal(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		c := startChild(t, "leases", s.childDSN())
		if line := c.line(); line != "<nil>" {
			t.Fatal(line)
		}
		var figures [2]struct{ statements, conns, goroutines int }
		look := func(i int) {
			t.Helper()
			c.proceed()
			f := &figures[i]
			_, err := fmt.Sscan(c.line(), &f.statements, &f.conns, &f.goroutines)
			ok(t, err)
		}
		time.Sleep(leasesTTL() / 2) // they have been renewed once
		start := time.Now()
		look(0)
		time.Sleep(long(6*time.Second, time.Minute))
		look(1)
		lasted := time.Since(start)
		var live int
		ok(t, s.plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND owner IS NOT NULL AND expires > UTC_TIMESTAMP(6) AND token = 1", s.database).Scan(&live))
		if live != leases {
			t.Errorf("%d of %d leases are still the first holder's", live, leases)
		}
		if figures[1].conns > figures[0].conns+1 || figures[1].goroutines > figures[0].goroutines+5 { // one may have been lost, or a renewal be under way
			t.Errorf("it grows: from %+v to %+v", figures[0], figures[1])
		}
		rate := float64(figures[1].statements-figures[0].statements) / lasted.Seconds()
		renewals := lasted.Seconds() / (leasesTTL().Seconds() / 3)
		t.Logf("%d leases with a TTL of %v, for %v: %.1f statements a second, %.1f a renewal of all; %d connections opened, %d goroutines",
			leases, leasesTTL(), lasted.Round(time.Second), rate, rate*lasted.Seconds()/renewals, figures[1].conns, figures[1].goroutines)
		if rate > 20 {
			t.Errorf("%.1f statements a second for %d leases", rate, leases)
		}
		c.in.Close()
		ok(t, c.cmd.Wait())
		ok(t, s.plain.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND owner IS NOT NULL", s.database).Scan(&live))
		if live != 0 {
			t.Errorf("%d leases are left by a handle that was closed", live)
		}
	})
}

// TestProofFirstLeases: the first leases of a handle, more at once than it may
// have connections.
func TestProofFirstLeases(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for range 5 {
			db, ctx := s.open("lockMaxConns=4"), within(t, 25*time.Second)
			holds := make([]*mysqllock.Hold, 64)
			errs := make([]error, len(holds))
			var all sync.WaitGroup
			for i := range holds {
				all.Go(func() {
					holds[i], errs[i] = mysqllock.Acquire(ctx, db, fmt.Sprint("k", i), lockctx.Lease(time.Minute))
				})
			}
			all.Wait()
			ok(t, errors.Join(errs...))
			ok(t, db.Close())
		}
	})
}

// childGiver takes the lease, and gives it back, each time when it is told to, again
// and again. It says when it did.
func childGiver(db *sql.DB, in *bufio.Scanner) {
	for {
		h, err := mysqllock.Acquire(context.Background(), db, "k", lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
		fmt.Println(err)
		if err != nil || !in.Scan() {
			return
		}
		time.Sleep(20 * time.Millisecond)
		released := now()
		_ = h.Release()
		fmt.Println(released)
		if !in.Scan() {
			return
		}
	}
}

// TestProofWakeUp: a waiter in another process is woken, and does not find out by
// looking now and then.
func TestProofWakeUp(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ctx, db := within(t, 5*time.Minute), s.open()
		c := startChild(t, "giver", s.childDSN())
		var took []time.Duration
		for range 50 {
			if line := c.line(); line != "<nil>" {
				t.Fatal(line)
			}
			granted := make(chan int64, 1)
			var h *mysqllock.Hold
			var err error
			go func() {
				h, err = mysqllock.Acquire(ctx, db, "k", lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
				granted <- now()
			}()
			soon(t, "it waits", func() (waits bool) {
				ok(t, s.plain.QueryRow("SELECT COUNT(*) = 1 FROM information_schema.PROCESSLIST WHERE DB = ? AND STATE = 'User lock'",
					s.database).Scan(&waits))
				return waits
			})
			c.proceed()
			at := <-granted
			ok(t, err)
			released, err := strconv.ParseInt(c.line(), 10, 64)
			ok(t, err)
			took = append(took, time.Duration(at-released))
			ok(t, h.Release())
			c.proceed()
		}
		slices.Sort(took)
		t.Logf("from Release to the grant in another process: median %v, 90 %% within %v, at most %v", took[len(took)/2], took[len(took)*9/10], took[len(took)-1])
		if took[0] > 100*time.Millisecond { // a busy machine may delay the others, and who only looks does so after a quarter of a second
			t.Errorf("a hand-over takes %v at the least", took[0])
		}
	})
}

func turmoilTime() time.Duration { return long(8*time.Second, time.Minute) }

// turmoil takes leases and row locks on few keys, at random, and holds, loses,
// abandons and gives them back.
func (h *history) turmoil(db *sql.DB, until time.Time) {
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for time.Now().Before(until) {
				h.anything(db)
			}
		})
	}
	all.Wait()
}

func (h *history) anything(db *sql.DB) {
	once := func(n int) bool { return rand.N(n) == 0 }
	key := fmt.Sprint("k", rand.N(3))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if once(4) {
		time.AfterFunc(rand.N(50*time.Millisecond), cancel)
	}
	opts := []lockctx.Option{lockctx.Wait(rand.N(time.Second))}
	if once(3) {
		opts = append(opts, lockctx.Row())
	} else {
		opts = append(opts, lockctx.Lease(time.Second+rand.N(time.Second)))
	}
	think := rand.N(5 * time.Millisecond)
	if once(50) {
		think = rand.N(1500 * time.Millisecond)
	}
	if once(2) {
		o, err := h.acquireTx(ctx, db, key, opts...)
		if err == nil {
			_ = o.finish(ctx, think)
		}
		return
	}
	o, err := h.acquire(ctx, db, key, opts...)
	if err != nil {
		return
	}
	for range 1 + rand.N(2) {
		_ = o.write(db, think)
	}
	if once(10) {
		cancel() // it is not renewed any more
		time.Sleep(think)
	}
	_ = o.release()
}

func childTurmoil(db *sql.DB) {
	h := &history{tell: true}
	h.turmoil(db, time.Now().Add(turmoilTime()))
	fmt.Println("over")
}

// TestProofTurmoil: three processes take leases and row locks on the same keys
// while their calls are cancelled, their connections killed, and two of them
// stopped now and then.
func TestProofTurmoil(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.proof()
		h := &history{}
		db := s.open("lockTTL=2s")
		until := time.Now().Add(turmoilTime())
		var all sync.WaitGroup
		for range 2 {
			c := startChild(t, "turmoil", s.childDSN("lockTTL=2s"))
			all.Go(func() {
				for c.lines.Scan() {
					if line := c.lines.Text(); !h.heard(line) {
						if line != "over" {
							t.Error(line)
						}
						return
					}
				}
				t.Error("a child process ended")
			})
			all.Go(func() {
				for {
					time.Sleep(rand.N(1500 * time.Millisecond))
					if time.Now().After(until) {
						return
					}
					c.cmd.Process.Signal(syscall.SIGSTOP)
					time.Sleep(rand.N(2500 * time.Millisecond))
					c.cmd.Process.Signal(syscall.SIGCONT)
				}
			})
		}
		all.Go(func() { h.turmoil(db, until) })
		all.Go(func() {
			for time.Now().Before(until) {
				time.Sleep(50*time.Millisecond + rand.N(100*time.Millisecond))
				var id int
				if s.plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() ORDER BY RAND() LIMIT 1", s.database).Scan(&id) == nil {
					s.plain.Exec(fmt.Sprint("KILL ", id))
				}
			}
		})
		finished := make(chan struct{})
		go func() { all.Wait(); close(finished) }()
		select {
		case <-finished:
		case <-time.After(turmoilTime() + time.Minute):
			t.Fatal("it hangs")
		}
		for i := range 3 { // nothing is left that would not end
			o, err := h.acquire(within(t, time.Minute), s.open(), fmt.Sprint("k", i), lockctx.Lease(time.Second), lockctx.Wait(time.Minute))
			ok(t, err)
			ok(t, o.release())
		}
		s.wantNoneStale()
		h.want(t)
		if h.count("use") < 20 || h.lost() == 0 {
			t.Error("hardly anything happened")
		}
		t.Logf("%d grants, %d commits within holds, %d holds and transactions that were lost, cancelled or failed", h.count("grant"), h.count("use"), h.lost())
	})
}
