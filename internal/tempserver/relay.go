//go:build unix

package tempserver

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// relays pass on what the members of a group send to each other, but for those
// that are cut off: what is sent to them or by them is swallowed, and the
// connection is closed once they are to be reached again.
type relays struct {
	nodes     []*Server
	listeners []net.Listener // of each node
	running   sync.WaitGroup

	mu     sync.Mutex
	cut    map[int]bool
	links  map[*link]bool
	closed bool
}

// link is a connection that one member has made to another.
type link struct {
	from, to int // members; from is -1 where it is none
	ends     [2]net.Conn
	silent   bool
}

// newRelays returns relays to the nodes.
func newRelays(nodes []*Server) (*relays, error) {
	r := &relays{nodes: nodes, cut: make(map[int]bool), links: make(map[*link]bool)}
	for node := range nodes {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			r.close()
			return nil, err
		}
		r.listeners = append(r.listeners, listener)
		r.running.Go(func() { r.accept(listener, node) })
	}
	return r, nil
}

// addr is where the member is reached through its relay.
func (r *relays) addr(node int) string { return r.listeners[node].Addr().String() }

func (r *relays) accept(listener net.Listener, node int) {
	for {
		in, err := listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", r.nodes[node].addr)
		if err != nil { // it is down
			in.Close()
			continue
		}
		l := &link{from: r.caller(in), to: node, ends: [2]net.Conn{in, out}}
		r.mu.Lock()
		r.links[l] = true
		if r.closed {
			r.end(l)
		}
		r.mu.Unlock()
		r.running.Go(func() { r.relay(l, in, out) })
		r.running.Go(func() { r.relay(l, out, in) })
	}
}

func (r *relays) relay(l *link, from, to net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 && r.passes(l) {
			_, err = to.Write(buffer[:n])
		}
		if err != nil {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !l.silent { // who is cut off does not hear of the end either
		r.end(l)
	}
}

// passes reports whether what is sent over the link is to be passed on.
func (r *relays) passes(l *link) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.silent = l.silent || l.from != l.to && (r.cut[l.from] || r.cut[l.to])
	return !l.silent
}

// caller returns which of the nodes is at the other end of a connection, -1 for
// none: the one whose process has the socket.
func (r *relays) caller(conn net.Conn) int {
	table, _ := os.ReadFile("/proc/net/tcp")
	theirs := fmt.Sprintf("%04X", conn.RemoteAddr().(*net.TCPAddr).Port)
	ours := fmt.Sprintf("%04X", conn.LocalAddr().(*net.TCPAddr).Port)
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 10 || !strings.HasSuffix(fields[1], ":"+theirs) || !strings.HasSuffix(fields[2], ":"+ours) {
			continue
		}
		for i, s := range r.nodes {
			pid, _ := os.ReadFile(s.path("pid"))
			files, _ := filepath.Glob("/proc/" + strings.TrimSpace(string(pid)) + "/fd/*")
			for _, file := range files {
				if target, _ := os.Readlink(file); target == "socket:["+fields[9]+"]" {
					return i
				}
			}
		}
	}
	return -1
}

// isolate cuts a member off.
func (r *relays) isolate(node int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut[node] = true
}

// heal undoes isolate.
func (r *relays) heal(node int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.cut, node)
	for l := range r.links {
		if l.silent {
			r.end(l)
		}
	}
}

// end closes a link. r.mu is the caller's.
func (r *relays) end(l *link) {
	for _, conn := range l.ends {
		conn.Close()
	}
	delete(r.links, l)
}

func (r *relays) close() {
	r.mu.Lock()
	r.closed = true
	for l := range r.links {
		r.end(l)
	}
	r.mu.Unlock()
	for _, listener := range r.listeners {
		listener.Close()
	}
	r.running.Wait()
}
