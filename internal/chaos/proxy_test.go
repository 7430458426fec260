package chaos

import (
	"bytes"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// proxy stands between one client process and a server.
type proxy struct {
	listener net.Listener
	running  sync.WaitGroup

	mu       sync.Mutex
	target   string
	passes   [2]chan struct{} // per direction, closed while bytes come through
	delay    time.Duration    // each way
	word     []byte           // "" is none
	holdsUp  time.Duration    // whoever says it, or the answer
	cuts     bool             // a connection whose client says it is reset, before or after it has come through
	links    map[*link]bool
	accepted int
	closed   bool
}

// The directions.
const (
	requests = iota
	answers
)

// link is a connection of the client and the one behind it.
type link struct {
	near, far net.Conn
	late      atomic.Int64 // by how many ns the request, or its answer, is to be held up
}

func newProxy(target string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, target: target, links: make(map[*link]bool)}
	for i := range p.passes {
		p.passes[i] = make(chan struct{})
		close(p.passes[i])
	}
	p.running.Go(p.serve)
	return p, nil
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) serve() {
	for {
		near, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() {
			p.mu.Lock()
			target := p.target
			p.mu.Unlock()
			far, err := net.Dial("tcp", target)
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
			both.Go(func() { p.pump(l, requests, far, near) })
			both.Go(func() { p.pump(l, answers, near, far) })
			both.Wait()
			p.mu.Lock()
			delete(p.links, l)
			p.mu.Unlock()
		})
	}
}

// pump copies one direction, the end of it included, which a black hole holds up,
// too.
func (p *proxy) pump(l *link, direction int, to, from net.Conn) {
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		p.mu.Lock()
		passes, delay := p.passes[direction], p.delay
		said := direction == requests && p.word != nil && bytes.Contains(buffer[:n], p.word)
		cuts, late := said && p.cuts, said && p.holdsUp > 0
		if late {
			l.late.Store(rand.N(int64(p.holdsUp)))
		}
		p.mu.Unlock()
		<-passes
		if late && rand.N(2) == 0 || direction == answers {
			delay += time.Duration(l.late.Swap(0))
		}
		time.Sleep(delay)
		if cuts && rand.N(2) == 0 {
			l.reset()
			return
		}
		if n > 0 {
			if _, failed := to.Write(buffer[:n]); failed != nil {
				from.Close()
				return
			}
		}
		if cuts {
			time.Sleep(rand.N(2 * time.Millisecond)) // with luck the server has done it, and nobody is told
			l.reset()
		}
		if err != nil {
			return
		}
	}
}

// hole makes what is sent in the directions vanish until mend; then it arrives
// late, as it does where a network is back in time.
func (p *proxy) hole(directions ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range directions {
		p.passes[d] = make(chan struct{})
	}
}

// mend ends what hole, slow, cutAt and holdUp have begun.
func (p *proxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.word, p.holdsUp, p.cuts = 0, nil, 0, false
	for _, passes := range p.passes {
		select {
		case <-passes:
		default:
			close(passes)
		}
	}
}

func (p *proxy) slow(delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = delay
}

func (p *proxy) cutAt(word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word, p.cuts = []byte(word), true
}

// holdUp delays what says word, or the answer to it, by less than most.
func (p *proxy) holdUp(word string, most time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.word, p.holdsUp = []byte(word), most
}

// turnTo has new connections go to another server.
func (p *proxy) turnTo(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// reset ends all connections, and what is under way in them, and returns how many
// there were.
func (p *proxy) reset() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
	return len(p.links)
}

// dials returns how many connections there were so far.
func (p *proxy) dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.mend()
	p.reset()
	p.running.Wait()
}

func (l *link) reset() { abort(l.near); abort(l.far) }

// abort closes with RST.
func abort(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0) // fails where it is closed already
	c.Close()
}
