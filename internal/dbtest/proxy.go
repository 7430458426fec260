package dbtest

import (
	"bytes"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Proxy stands between clients and a server, and has their network fail. It knows
// nothing of what passes but words that are said in it.
type Proxy struct {
	listener net.Listener
	running  sync.WaitGroup

	mu       sync.Mutex
	target   string
	passes   [2]chan struct{} // per direction, closed while bytes come through
	delay    time.Duration    // each way
	word     []byte           // nil is none
	lateWord []byte           // a statement with it is held up, or the answer
	least    time.Duration    // by how much; where it is not 0, never the answer
	most     time.Duration
	cuts     bool // a connection whose client says it is reset, before or after it has come through
	vanishes bool // the client vanishes that says it, before it has come through
	silent   bool // who says it is answered nothing, and reset only after it has come through
	held     int  // how often something was held up
	links    map[*link]bool
	accepted int
	closed   bool
}

// Direction is a way through a Proxy.
type Direction int

// The directions.
const (
	Requests Direction = iota
	Answers
)

// link is a connection of the client and the one behind it.
type link struct {
	near, far net.Conn
	late      atomic.Int64 // by how many ns the request, or its answer, is to be held up
}

// StartProxy starts a proxy to a server, by its address. It is closed at the end of
// the test.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	OK(t, err)
	p := &Proxy{listener: l, target: target, links: make(map[*link]bool)}
	for i := range p.passes {
		p.passes[i] = make(chan struct{})
		close(p.passes[i])
	}
	p.running.Go(p.serve)
	t.Cleanup(p.Close)
	return p
}

// Addr is where clients reach it.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

func (p *Proxy) serve() {
	for {
		near, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() {
			p.mu.Lock()
			target := p.target
			p.mu.Unlock()
			network := "tcp"
			if strings.HasPrefix(target, "/") {
				network = "unix"
			}
			far, err := net.Dial(network, target)
			if err != nil {
				abort(near) // as from a machine on which nobody listens
				return
			}
			l := &link{near: near, far: far}
			p.mu.Lock()
			p.accepted++
			p.links[l] = true
			if p.closed {
				l.reset()
			}
			p.mu.Unlock()
			var both sync.WaitGroup
			both.Go(func() { p.pump(l, Requests, far, near) })
			both.Go(func() { p.pump(l, Answers, near, far) })
			both.Wait()
			p.mu.Lock()
			delete(p.links, l)
			p.mu.Unlock()
		})
	}
}

// pump copies one direction, the end of it included, which a black hole holds up,
// too.
func (p *Proxy) pump(l *link, direction Direction, to, from net.Conn) {
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		f := p.decide(l, direction, buffer[:n])
		<-f.passes
		if f.late {
			f.delay += time.Duration(l.late.Swap(0))
		}
		time.Sleep(f.delay)
		if f.cutsBefore || p.isClosed() {
			l.reset()
			return
		}
		if n > 0 {
			if _, failed := to.Write(buffer[:n]); failed != nil {
				from.Close()
				return
			}
		}
		if f.cutsAfter {
			time.Sleep(f.resetAfter)
			l.reset()
		}
		if err != nil {
			return
		}
	}
}

// fate is what becomes of one piece of what is sent.
type fate struct {
	passes     <-chan struct{} // closed once it may go on
	delay      time.Duration
	late       bool // it, too, by what its link says
	cutsBefore bool // its link is reset instead of it
	cutsAfter  bool // its link is reset so long after it:
	resetAfter time.Duration
}

// decide returns what becomes of a piece.
func (p *Proxy) decide(l *link, direction Direction, piece []byte) fate {
	p.mu.Lock()
	defer p.mu.Unlock()
	says := func(word []byte) bool { return direction == Requests && word != nil && bytes.Contains(piece, word) }
	said := says(p.word)
	if said && p.vanishes {
		p.vanishes = false
		p.block(Requests, Answers)
	}
	f := fate{passes: p.passes[direction], delay: p.delay, late: direction == Answers}
	if said && p.cuts {
		f.cutsAfter = true
		if p.silent {
			f.resetAfter = 100 * time.Millisecond
			l.late.Store(int64(2 * f.resetAfter))
		} else {
			f.cutsBefore = rand.N(2) == 0
			f.resetAfter = rand.N(2 * time.Millisecond) // with luck the server has done it, and nobody is told
		}
	}
	if says(p.lateWord) {
		p.held++
		l.late.Store(int64(p.least + rand.N(p.most-p.least)))
		f.late = p.least > 0 || rand.N(2) == 0
	}
	return f
}

// Block lets nothing through in the directions, both unless they are named, and tells
// nobody. After Mend it arrives late, as it does where a network is back in time.
func (p *Proxy) Block(directions ...Direction) {
	if len(directions) == 0 {
		directions = []Direction{Requests, Answers}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.block(directions...)
}

// block is Block. p.mu is held.
func (p *Proxy) block(directions ...Direction) {
	for _, d := range directions {
		select {
		case <-p.passes[d]:
			p.passes[d] = make(chan struct{})
		default: // it is one
		}
	}
}

// BlockAt is Block from when a client says word, which does not come through either:
// so it is when a host is gone before its statement is sent.
func (p *Proxy) BlockAt(word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word, p.vanishes = []byte(word), true
}

// Mend ends what the other methods have begun.
func (p *Proxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.word, p.lateWord, p.cuts, p.vanishes = 0, nil, nil, false, false
	for _, passes := range p.passes {
		select {
		case <-passes:
		default:
			close(passes)
		}
	}
}

// Slow delays what is sent, each way.
func (p *Proxy) Slow(delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = delay
}

// Blocked reports whether Block or BlockAt is at work.
func (p *Proxy) Blocked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, passes := range p.passes {
		select {
		case <-passes:
		default:
			return true
		}
	}
	return false
}

// CutAt resets a connection whose client says word, before or after that has come
// through.
func (p *Proxy) CutAt(word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word, p.cuts, p.silent = []byte(word), true, false
}

// LoseAnswer has what says word come through, and resets the connection in place of an
// answer.
func (p *Proxy) LoseAnswer(word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word, p.cuts, p.silent = []byte(word), true, true
}

// HoldUp delays what says word, or the answer to it, by less than most.
func (p *Proxy) HoldUp(word string, most time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lateWord, p.least, p.most = []byte(word), 0, most
}

// ArriveLate delays what says word, by at least so much and less than most. Its client
// may have gone by then.
func (p *Proxy) ArriveLate(word string, least, most time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lateWord, p.least, p.most = []byte(word), least, most
}

// HeldUp returns how often something was held up so far.
func (p *Proxy) HeldUp() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}

// TurnTo has new connections go to another server.
func (p *Proxy) TurnTo(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Reset ends all connections, and what is under way in them, and returns how many
// there were.
func (p *Proxy) Reset() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
	return len(p.links)
}

// Dials returns how many connections there were so far.
func (p *Proxy) Dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Close ends all connections, without what is under way in them, and takes no new
// ones.
func (p *Proxy) Close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Mend()
	p.Reset()
	p.running.Wait()
}

func (p *Proxy) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

func (l *link) reset() { abort(l.near); abort(l.far) }

// abort closes with RST.
func abort(c net.Conn) {
	if c, ok := c.(*net.TCPConn); ok {
		_ = c.SetLinger(0) // fails where it is closed already
	}
	c.Close()
}
