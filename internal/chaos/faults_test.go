package chaos

import (
	"fmt"
	"syscall"
	"time"
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
		before := p.proxy.dials()
		p.proxy.cutAt("COMMIT")
		a.rest(time.Second, 2*time.Second)
		p.proxy.mend()
		return p.proxy.dials() - before
	}}
	blackHole    = &fault{"black hole, both ways", true, func(a *arena) int { return a.hole(requests, answers) }}
	serverKilled = &fault{"server killed (kill -9) and restarted", false, func(a *arena) int {
		a.must(a.nodes[0].Kill())
		a.rest(0, time.Second)
		a.must(a.nodes[0].Restart(a.t.Context()))
		return 1
	}}
	connectionsKilled = &fault{"connections killed (KILL)", true, func(a *arena) int { return a.killEach("KILL") }}
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
			times += a.victim().proxy.reset()
			a.rest(50*time.Millisecond, 400*time.Millisecond)
		}
		return times
	}},
	resetAtCommit,
	blackHole,
	{"black hole for requests", true, func(a *arena) int { return a.hole(requests) }},
	{"black hole for answers", true, func(a *arena) int { return a.hole(answers) }},
	{"network slow, 5 to 50 ms each way", false, func(a *arena) int {
		for _, p := range a.processes {
			p.proxy.slow(a.between(5*time.Millisecond, 50*time.Millisecond))
		}
		a.rest(time.Second, 2*time.Second)
		for _, p := range a.processes {
			p.proxy.mend()
		}
		return len(a.processes)
	}},
	connectionsKilled,
	{"statements killed (KILL QUERY)", true, func(a *arena) int { return a.killEach("KILL QUERY") }},
	{"COMMIT slow, by up to 500 ms", false, func(a *arena) int {
		for _, p := range a.processes {
			p.proxy.holdUp("COMMIT", 500*time.Millisecond)
		}
		a.rest(2*time.Second, 3*time.Second)
		for _, p := range a.processes {
			p.proxy.mend()
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
func (a *arena) hole(directions ...int) int {
	p := a.victim()
	p.proxy.hole(directions...)
	a.long()
	if a.random.IntN(2) == 0 {
		p.proxy.reset()
	}
	p.proxy.mend()
	return 1
}

// killEach kills connections of the clients, or what runs on them, one by one.
func (a *arena) killEach(how string) (times int) {
	for range 30 {
		ids, err := a.connections(a.primary)
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
	conn, err := a.admin().Conn(a.t.Context())
	a.must(err)
	defer conn.Close()
	_, err = conn.ExecContext(a.t.Context(), "SET SESSION lock_wait_timeout = 4")
	a.must(err)
	if _, err := conn.ExecContext(a.t.Context(), "FLUSH TABLES WITH READ LOCK"); err != nil {
		return false // somebody's statement took too long
	}
	a.rest(200*time.Millisecond, time.Second)
	_, err = conn.ExecContext(a.t.Context(), "UNLOCK TABLES")
	a.must(err)
	return true
}
