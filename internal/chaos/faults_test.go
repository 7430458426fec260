package chaos

import (
	"context"
	"database/sql"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// fault is something that goes wrong.
type fault struct {
	name string

	// freesAdvisory says whether the connection that carries an advisory lock can end,
	// if only on a slow machine, while COMMIT is under way on another: nothing keeps
	// that from happening between the check and COMMIT.
	freesAdvisory bool

	// run breaks things, mends them, and returns how many it has broken.
	run func(a *arena) (times int)
}

// long is longer than the TTL of what the clients hold.
func (a *arena) long() { a.rest(ttl+ttl/4, 2*ttl) }

func (a *arena) victim() *process { return a.processes[a.random.IntN(len(a.processes))] }

var (
	noFault = &fault{"none", false, func(a *arena) int {
		a.rest(time.Second, 2*time.Second)
		return 0
	}}
	clientKilled = &fault{"client killed (kill -9)", true, func(a *arena) int {
		for range 2 {
			p := a.victim()
			p.kill()
			a.rest(0, 500*time.Millisecond)
			a.must(p.start(a.dir))
			a.rest(200*time.Millisecond, time.Second)
		}
		return 2
	}}
	clientStoppedLong = &fault{"client stopped, longer than the TTL", true, func(a *arena) int {
		a.stop(a.victim(), a.long)
		return 1
	}}
	resetAtCommit = &fault{"connection reset at COMMIT", false, func(a *arena) int {
		p := a.victim()
		before := p.proxy.Dials()
		p.proxy.CutAt("COMMIT")
		a.rest(time.Second, 2*time.Second)
		p.proxy.Mend()
		return p.proxy.Dials() - before
	}}
	blackHole    = &fault{"black hole, both ways", true, func(a *arena) int { return a.hole(dbtest.Requests, dbtest.Answers) }}
	serverKilled = &fault{"server killed (kill -9) and restarted", false, func(a *arena) int {
		a.must(a.nodes[0].Kill())
		a.rest(0, time.Second)
		a.must(a.nodes[0].Restart(a.t.Context()))
		return 1
	}}
	// gone in front of COMMIT: the locks of the transaction, and of the check before it,
	// are there until the server ends the connection, or COMMIT arrives at last.
	goneAtCommit = &fault{"host gone between the check and COMMIT", true, func(a *arena) int {
		p := a.victim()
		p.proxy.BlockAt("COMMIT")
		a.rest(time.Second, 2*time.Second)
		a.long()
		if a.random.IntN(2) == 0 {
			p.proxy.Reset()
		}
		p.proxy.Mend()
		return 1
	}}
	releaseLate = &fault{"statements that give back a lease late, by up to two TTLs", true, func(a *arena) int {
		p := a.victim()
		p.proxy.HoldUp("RELEASE_LOCK(", 2*ttl)
		a.long()
		p.proxy.Mend()
		return 1
	}}
	cleanUp = &fault{"unused rows removed, by a host that is gone before COMMIT", false, func(a *arena) (times int) {
		p := dbtest.StartProxy(a.t, a.nodes[a.primary].Addr())
		defer p.Close()
		for end := now() + int64(2*time.Second); now() < end; times++ {
			a.clean(p, times%4 == 3)
		}
		return times
	}}
	// clockSet leaves the clock ahead of all that it has shown, so that no lease which was
	// granted meanwhile lasts for too long when all is over.
	clockSet = &fault{"server's clock set back, and forward by twice that: two of 5 s, a minute, an hour", false, func(a *arena) (times int) {
		steps := []time.Duration{5 * time.Second, time.Minute, time.Hour}
		a.random.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
		for _, step := range steps[:2] {
			for _, by := range []time.Duration{-step, 2 * step} {
				a.setClock(a.clock + by)
				a.rest(ttl/4, ttl/2)
				times++
			}
		}
		return times
	}}
	connectionsKilled = &fault{"connections killed (KILL)", true, func(a *arena) int { return a.killEach("KILL", "") }}
	statementsKilled  = &fault{"statements killed (KILL QUERY)", true, func(a *arena) int { return a.killEach("KILL QUERY", "") }}
	// An advisory lock that is lost between the check of it and COMMIT is not noticed, so its
	// connection is spared: it has no transaction, and waits for no lock.
	othersKilled = &fault{"connections killed (KILL), but those that have advisory locks", true, func(a *arena) int {
		return a.killEach("KILL", " AND (STATE = 'User lock' OR ID IN (SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX))")
	}}
)

var faults = []*fault{
	noFault,
	clientKilled,
	{"client stopped, shorter than the TTL", true, func(a *arena) int {
		for range 3 {
			a.stop(a.victim(), func() { a.rest(ttl/8, ttl/2) })
			a.rest(0, 200*time.Millisecond)
		}
		return 3
	}},
	clientStoppedLong,
	{"connections reset", true, func(a *arena) (times int) {
		for range 4 {
			times += a.victim().proxy.Reset()
			a.rest(50*time.Millisecond, 400*time.Millisecond)
		}
		return times
	}},
	resetAtCommit,
	blackHole,
	{"black hole for requests", true, func(a *arena) int { return a.hole(dbtest.Requests) }},
	{"black hole for answers", true, func(a *arena) int { return a.hole(dbtest.Answers) }},
	{"network slow, 5 to 50 ms each way", false, func(a *arena) int {
		for _, p := range a.processes {
			p.proxy.Slow(a.between(5*time.Millisecond, 50*time.Millisecond))
		}
		a.rest(time.Second, 2*time.Second)
		for _, p := range a.processes {
			p.proxy.Mend()
		}
		return len(a.processes)
	}},
	connectionsKilled,
	statementsKilled,
	{"COMMIT slow, by up to 500 ms", false, func(a *arena) int {
		for _, p := range a.processes {
			p.proxy.HoldUp("COMMIT", 500*time.Millisecond)
		}
		a.rest(2*time.Second, 3*time.Second)
		for _, p := range a.processes {
			p.proxy.Mend()
		}
		return len(a.processes)
	}},
	{"server lets nothing be written for moments", true, func(a *arena) (times int) {
		for range 2 {
			if a.readLock() {
				times++
			}
			a.rest(0, 300*time.Millisecond)
		}
		return times
	}},
	{"server stopped, longer than the TTL", true, func(a *arena) int {
		a.must(a.nodes[0].Pause())
		a.long()
		a.must(a.nodes[0].Resume())
		return 1
	}},
	goneAtCommit,
	releaseLate,
	cleanUp,
	clockSet,
	serverKilled,
}

// stop stops the process for as long as something takes.
func (a *arena) stop(p *process, something func()) {
	a.must(p.signal(syscall.SIGSTOP))
	something()
	a.must(p.signal(syscall.SIGCONT))
}

// hole cuts a client off for longer than the TTL. Its connections are there again,
// with what was sent, or turn out to be gone.
func (a *arena) hole(directions ...dbtest.Direction) int {
	p := a.victim()
	p.proxy.Block(directions...)
	a.long()
	if a.random.IntN(2) == 0 {
		p.proxy.Reset()
	}
	p.proxy.Mend()
	return 1
}

// setClock sets the server's clock so far ahead of the machine's.
func (a *arena) setClock(ahead time.Duration) {
	a.must(a.nodes[0].SetClock(ahead))
	a.clock = ahead
	a.clockWasSet(now())
}

func (a *arena) clockWasSet(at int64) {
	a.history.steps = append(a.history.steps, event{Kind: kindStall, Call: at, Return: at + int64(ttl)})
}

// killEach kills connections of the clients, or what runs on them, one by one.
func (a *arena) killEach(how, also string) (times int) {
	for range 30 {
		ids, err := a.connections(a.primary, also)
		a.must(err)
		if len(ids) > 0 {
			if a.exec(fmt.Sprint(how, " ", ids[a.random.IntN(len(ids))])) == nil { // else it has just ended
				times++
			}
		}
		a.rest(10*time.Millisecond, 80*time.Millisecond)
	}
	return times
}

// readLock has the server let no commit through for a moment, as one does that has
// to wait for its disk: COMMIT is under way, and its locks are held.
func (a *arena) readLock() bool {
	unlock := a.lockWrites()
	if unlock == nil {
		return false // somebody's statement took too long
	}
	a.rest(200*time.Millisecond, time.Second)
	unlock()
	return true
}

// lockWrites has the server let no commit through until unlock is called, which is nil
// where it did not come to that.
func (a *arena) lockWrites() (unlock func()) {
	conn, err := a.admin().Conn(a.t.Context())
	a.must(err)
	_, err = conn.ExecContext(a.t.Context(), "SET SESSION lock_wait_timeout = 4")
	a.must(err)
	unlock = func() {
		defer conn.Close()
		_, err := conn.ExecContext(a.t.Context(), "UNLOCK TABLES")
		a.must(err)
	}
	if _, err := conn.ExecContext(a.t.Context(), "FLUSH TABLES WITH READ LOCK"); err != nil {
		unlock() // MySQL keeps the lock though its statement has failed, if that waited for a query
		return nil
	}
	return unlock
}

// TestAReadLockThatCameTooLateStaysNowhere: FLUSH TABLES WITH READ LOCK fails, since a query goes on for too long, and writes go
// through afterwards.
func TestAReadLockThatCameTooLateStaysNowhere(t *testing.T) {
	t.Parallel()
	onArenas(t, tempserver.EachFlavour(tempserver.RequireOwn(t)), func(t *testing.T, a *arena) {
		for _, text := range []string{"CREATE DATABASE late", "CREATE TABLE late.t (id INT PRIMARY KEY)", "INSERT INTO late.t VALUES (1)"} {
			a.must(a.exec(text))
		}
		reads := dbtest.Go(func() error { return a.exec("SELECT SLEEP(6) FROM late.t") })
		dbtest.Soon(t, "a query goes on", func() bool {
			n := 0
			a.must(a.admin().QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT SLEEP(6)%' AND STATE = 'User sleep'").Scan(&n))
			return n == 1
		})
		unlock := a.lockWrites()
		dbtest.OK(t, <-reads)
		if unlock != nil { // MariaDB does not wait for queries
			unlock()
		}
		dbtest.ExecIn(t, dbtest.Limited(t), a.admin(), "INSERT INTO late.t VALUES (2)")
	})
}

// clean removes rows that are not used just now, through p. Where it is to be gone,
// its transaction is left open.
func (a *arena) clean(p *dbtest.Proxy, gone bool) {
	cfg, err := mysql.ParseDSN(a.nodes[a.primary].DSN(a.database))
	a.must(err)
	cfg.Addr, cfg.Net = p.Addr(), "tcp"
	connector, err := mysql.NewConnector(cfg)
	a.must(err)
	db := sql.OpenDB(connector)
	defer db.Close()
	look, err := inspect.New(db, inspect.Options{})
	a.must(err)
	ctx, cancel := context.WithTimeout(a.t.Context(), time.Second)
	defer cancel()
	if gone {
		p.BlockAt("COMMIT")
		defer p.Mend()
	}
	_, _ = look.Clean(ctx, inspect.CleanUp{}) // it may be busy
}
