package pool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A connection counts until the server has closed its end of it: until then it is one of
// those that the server limits. A server that is still busy with a statement whose caller
// has gone does not look at its end, so such a connection is killed, which takes milliseconds.
// Where it can't be, behind a proxy for instance, its place is needed for other callers more than
// the count is exact. A server that does not even greet would be heaped with connections, so
// there they count for longer.
const (
	endTime     = 5 * time.Millisecond  // how long a server that is not busy may take
	killTime    = 50 * time.Millisecond // and one that is
	ungreeted   = 3 * time.Second
	lingerBytes = 64 << 10 // of rows that are still arriving
)

// DialFunc opens a socket, as [net.Dialer.DialContext] does.
type DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dial is a DialFunc for the base driver, by which pools with a budget see when a
// connection has ended.
func Dial(dial DialFunc) DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		ends, ok := ctx.Value(socketsKey{}).(*sockets)
		if err != nil || !ok {
			return conn, err
		}
		s := &socket{Conn: conn, of: ends}
		ends.Add(1)
		ends.last = s
		if raw, ok := conn.(syscall.Conn); ok {
			return seen{s, raw}, nil
		}
		return s, nil
	}
}

// seen is a socket on which the base driver can look whether the server has closed it. It
// takes one that says it can, and then cannot, for broken.
type seen struct {
	*socket
	syscall.Conn
}

// sockets are those of one connection, which are waited for.
type sockets struct {
	sync.WaitGroup
	last   *socket // nil if there is none
	killer *killer // nil for a connection without a budget
}

type socketsKey struct{}

// socket closes its own end first, and then waits for the server to close its end.
type socket struct {
	net.Conn
	of      *sockets
	reading sync.Mutex    // held while somebody reads
	greeted greeting      // guarded by reading
	id      atomic.Uint32 // the connection's, 0 until known

	mu     sync.Mutex // guards closed, and the deadlines with it
	closed bool
}

func (s *socket) Read(b []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	n, err := s.Conn.Read(b)
	if id := s.greeted.see(b[:n]); id != 0 {
		s.id.Store(id)
	}
	if err != nil && s.isClosed() {
		return n, net.ErrClosed
	}
	return n, err
}

func (s *socket) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *socket) SetDeadline(t time.Time) error     { return s.unlessClosed(s.Conn.SetDeadline, t) }
func (s *socket) SetReadDeadline(t time.Time) error { return s.unlessClosed(s.Conn.SetReadDeadline, t) }

func (s *socket) unlessClosed(set func(time.Time) error, t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	return set(t)
}

// Close returns at once, and so does a Read that is under way.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.closed = true
	half, ok := s.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		s.of.Done()
		return s.Conn.Close()
	}
	busy := !s.reading.TryLock() // somebody waits for an answer
	if !busy {
		s.reading.Unlock()
	}
	if s.Conn.SetDeadline(time.Unix(1, 0)) != nil {
		s.of.Done()
		return s.Conn.Close()
	}
	killing := busy && s.of.killer.end(s)
	go func() {
		defer s.of.Done()
		defer s.Conn.Close()
		s.reading.Lock() // whoever reads has been woken
		defer s.reading.Unlock()
		switch {
		case s.endsWithin(endTime):
		case s.id.Load() == 0:
			s.endsWithin(ungreeted)
		case killing || s.of.killer.end(s):
			s.endsWithin(killTime)
		}
	}()
	return nil
}

// endsWithin reports whether the server has closed its end, or still sends, after a while: it
// notices then that nobody reads any more. The caller reads.
func (s *socket) endsWithin(d time.Duration) bool {
	_ = s.Conn.SetDeadline(time.Now().Add(d))
	_, err := io.CopyN(io.Discard, s.Conn, lingerBytes)
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

// port is this end's, "" if the server is not reached by TCP.
func (s *socket) port() string {
	if addr, ok := s.LocalAddr().(*net.TCPAddr); ok {
		return strconv.Itoa(addr.Port)
	}
	return ""
}

// greeting finds the connection's id in the first packet that the server sends, before any TLS.
type greeting struct {
	seen []byte
	over bool
}

// see is called with all that arrives. It returns the id once, when it is there, and else 0.
func (g *greeting) see(b []byte) (id uint32) {
	const header, most = 4, 256 // the id comes after the protocol's number and the server's version
	if g.over {
		return 0
	}
	g.seen = append(g.seen, b[:min(len(b), most-len(g.seen))]...)
	if len(g.seen) > header && g.seen[header] == 10 {
		_, rest, found := bytes.Cut(g.seen[header+1:], []byte{0})
		if found && len(rest) >= 4 {
			id = binary.LittleEndian.Uint32(rest)
		}
	}
	if id != 0 || len(g.seen) == most {
		g.seen, g.over = nil, true
	}
	return id
}
