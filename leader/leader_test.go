package leader_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/leader"
)

const (
	key = "planner"
	ttl = 2 * time.Second

	childDSN = "MYSQLLOCK_TEST_LEADER_DSN"
	// unfenced has the children write without the leader's context, to see that the
	// tests notice.
	unfenced = "MYSQLLOCK_TEST_LEADER_UNFENCED"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(childDSN); dsn != "" {
		os.Exit(child(dsn))
	}
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// child is a candidate. It says on its output when it leads and when it does not any
// more, and ends in an orderly way when its input does.
func child(dsn string) int {
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		fmt.Println("failed", err)
		return 1
	}
	defer db.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		bufio.NewScanner(os.Stdin).Scan()
		cancel()
	}()
	outer := ctx
	err = leader.Run(ctx, db, key, func(ctx context.Context) error {
		token, _ := mysqllock.Token(ctx)
		for ctx.Err() == nil {
			in := ctx
			if os.Getenv(unfenced) != "" {
				in = outer
			}
			_ = write(in, db, token) // while the server is away, or the leadership is lost, it fails
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
		return nil
	}, leader.TTL(ttl), leader.OnChange(func(c leader.Change) {
		fmt.Println("change", c.Leads, c.Token, time.Now().UnixNano(), errors.Is(c.Err, mysqllock.ErrLost))
	}))
	fmt.Println("ended", err)
	return 0
}

// write notes in one transaction that the leadership with that token was at work. The
// rows are numbered in the order of their commits.
func write(ctx context.Context, db *sql.DB, token uint64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var n int
	if err := tx.QueryRowContext(ctx, "SELECT n FROM count FOR UPDATE").Scan(&n); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO done VALUES (?, ?)", n+1, token); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE count SET n = ?", n+1); err != nil {
		return err
	}
	return tx.Commit()
}

// change is what a candidate has said.
type change struct {
	of    *candidate
	leads bool
	token uint64
	at    time.Time
	lost  bool
}

// candidate is a process that campaigns.
type candidate struct {
	cmd   *exec.Cmd
	in    *os.File
	proxy *dbtest.Proxy // between it and the server
	gone  chan struct{} // closed when the process has ended
	said  string        // its last line, once it is gone
	down  bool          // it was killed or stopped
}

// election is a few candidates, and what they have said.
type election struct {
	*dbtest.Database
	plain *sql.DB
	env   []string

	mu         sync.Mutex
	candidates []*candidate
	changes    []change // in the order in which they were heard
}

func newElection(d *dbtest.Database) *election {
	e := &election{Database: d, plain: d.Open("mysql")}
	dbtest.Exec(d.T, e.plain, "CREATE TABLE count (n INT NOT NULL) ENGINE=InnoDB")
	dbtest.Exec(d.T, e.plain, "INSERT INTO count VALUES (0)")
	dbtest.Exec(d.T, e.plain, "CREATE TABLE done (n INT PRIMARY KEY, token BIGINT NOT NULL) ENGINE=InnoDB")
	return e
}

// join starts another candidate.
func (e *election) join() *candidate {
	e.T.Helper()
	cfg := e.Config()
	proxy := dbtest.StartProxy(e.T, cfg.Addr)
	cfg.Addr = proxy.Addr()
	cfg.Timeout, cfg.Params = 5*time.Second, nil
	exe, err := os.Executable()
	dbtest.OK(e.T, err)
	c := &candidate{cmd: exec.Command(exe), proxy: proxy, gone: make(chan struct{})}
	c.cmd.Env = append(append(os.Environ(), childDSN+"="+cfg.FormatDSN()), e.env...)
	out, err := c.cmd.StdoutPipe()
	dbtest.OK(e.T, err)
	r, w, err := os.Pipe()
	dbtest.OK(e.T, err)
	c.cmd.Stdin, c.in = r, w
	dbtest.OK(e.T, c.cmd.Start())
	r.Close()
	go func() {
		defer close(c.gone)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			e.hear(c, lines.Text())
		}
		_ = c.cmd.Wait()
	}()
	e.T.Cleanup(func() {
		_ = c.cmd.Process.Signal(syscall.SIGCONT)
		_ = c.cmd.Process.Kill()
		<-c.gone
		c.in.Close()
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	e.candidates = append(e.candidates, c)
	return c
}

func (e *election) hear(c *candidate, line string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c.said = line
	words := strings.Fields(line)
	if words[0] != "change" {
		return
	}
	token, _ := strconv.ParseUint(words[2], 10, 64)
	at, _ := strconv.ParseInt(words[3], 10, 64)
	e.changes = append(e.changes, change{of: c, leads: words[1] == "true", token: token, at: time.Unix(0, at), lost: words[4] == "true"})
}

// last returns the newest election, by its token.
func (e *election) last() (newest change) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.changes {
		if c.leads && c.token >= newest.token {
			newest = c
		}
	}
	return newest
}

// since waits for the election after that one, and returns it.
func (e *election) since(before change) change {
	e.T.Helper()
	dbtest.Soon(e.T, "there is another leader", func() bool { return e.last().token > before.token })
	return e.last()
}

// written waits until the leadership has written something.
func (e *election) written(by change) {
	e.T.Helper()
	dbtest.Eventually(e.T, "the leader writes", func() error {
		var n int
		err := e.plain.QueryRow("SELECT COUNT(*) FROM done WHERE token >= ?", by.token).Scan(&n)
		if err == nil && n == 0 {
			err = errors.New("nothing yet")
		}
		return err
	})
}

// inOrder wants what was written to be of one leadership after the other.
func (e *election) inOrder() (wrong []string) {
	e.T.Helper()
	rows, err := e.plain.Query("SELECT n, token FROM done ORDER BY n")
	dbtest.OK(e.T, err)
	defer rows.Close()
	var newest uint64
	for rows.Next() {
		var n int
		var token uint64
		dbtest.OK(e.T, rows.Scan(&n, &token))
		if token < newest {
			wrong = append(wrong, fmt.Sprintf("write %d is of leadership %d, after one of %d", n, token, newest))
		}
		newest = max(newest, token)
	}
	dbtest.OK(e.T, rows.Err())
	return wrong
}

// A fault ends the leadership of now, or may end it. It returns what undoes it, once
// there is another leader.
type fault struct {
	name string
	do   func(e *election, now change) (begin time.Time, undo func())
}

var (
	stopped = fault{"stopped", func(e *election, now change) (time.Time, func()) {
		begin := time.Now()
		now.of.in.Close()
		<-now.of.gone
		now.of.down = true
		if now.of.said != "ended <nil>" {
			e.T.Errorf("the leader that was stopped said %q", now.of.said)
		}
		return begin, func() { e.join() }
	}}
	killed = fault{"killed", func(e *election, now change) (time.Time, func()) {
		begin := time.Now()
		dbtest.OK(e.T, now.of.cmd.Process.Kill())
		<-now.of.gone
		now.of.down = true
		return begin, func() { e.join() }
	}}
	frozen = fault{"frozen", func(e *election, now change) (time.Time, func()) {
		begin := time.Now()
		dbtest.OK(e.T, now.of.cmd.Process.Signal(syscall.SIGSTOP))
		return begin, func() { dbtest.OK(e.T, now.of.cmd.Process.Signal(syscall.SIGCONT)) }
	}}
	cutOff = fault{"cut off", func(e *election, now change) (time.Time, func()) {
		begin := time.Now()
		now.of.proxy.Block()
		return begin, now.of.proxy.Mend
	}}
)

// faults are what befalls the leaders, one after the other.
var faults = []fault{stopped, killed, stopped, frozen, stopped, cutOff}

// hold has the leadership change by one fault after the other, and returns for how long
// nobody led, by the fault, and the one before.
func (e *election) hold(from, changes int) map[string][]time.Duration {
	e.T.Helper()
	gaps := make(map[string][]time.Duration)
	now, before := e.since(change{}), "the start"
	for i := range changes {
		e.written(now)
		f := faults[(from+i)%len(faults)]
		begin, undo := f.do(e, now)
		next := e.since(now)
		if f.name == "stopped" { // until then it led
			e.mu.Lock()
			for _, c := range e.changes {
				if c.of == now.of && !c.leads && c.token == now.token {
					begin = c.at
				}
			}
			e.mu.Unlock()
		}
		what := f.name + ", after " + before
		gaps[what] = append(gaps[what], next.at.Sub(begin))
		before = f.name
		undo()
		now = next
	}
	e.written(now)
	return gaps
}

// size is how many candidates there are, and how many changes of leader on each server: as many
// as "make leaders" says, or so few that each fault comes on one of the servers, and a freeze on both.
func size(t *testing.T) (candidates, changes int) {
	if n, _ := strconv.Atoi(os.Getenv("LEADERS")); n > 0 {
		return 5, n
	}
	return 3, len(faults)/len(tempserver.EachFlavour(tempserver.RequireOwn(t))) + 1
}

// TestElection: of several processes one leads, while leaders are stopped, killed, frozen
// and cut off, and their server restarts. What they have written is of one after the
// other.
func TestElection(t *testing.T) {
	dbtest.OnOwnServers(t, newElection, func(t *testing.T, e *election) {
		candidates, changes := size(t)
		from := 0
		if e.MariaDB() {
			from = len(faults) / 2
		}
		for range candidates {
			e.join()
		}
		half := changes / 2
		gaps := e.hold(from, half)
		// A leadership outlives a restart of the server, or passes on; it is written again.
		before := e.last()
		dbtest.OK(t, e.Server.Restart(dbtest.Within(t, 2*time.Minute)))
		dbtest.Eventually(t, "the server is back", func() error { return e.plain.Ping() })
		var n int
		dbtest.OK(t, e.plain.QueryRow("SELECT n FROM count").Scan(&n))
		dbtest.Eventually(t, "a leader writes again", func() error {
			var now int
			err := e.plain.QueryRow("SELECT n FROM count").Scan(&now)
			if err == nil && now <= n {
				err = fmt.Errorf("still %d", n)
			}
			return err
		})
		t.Logf("leadership %d before the restart, %d after it", before.token, e.last().token)
		for name, more := range e.hold(from+half, changes-half) {
			gaps[name] = append(gaps[name], more...)
		}
		for _, wrong := range e.inOrder() {
			t.Error(wrong)
		}
		for name, all := range gaps {
			slices.Sort(all)
			t.Logf("nobody led after one was %s: median %v, longest %v, of %d", name, all[len(all)/2], all[len(all)-1], len(all))
		}
	})
}
