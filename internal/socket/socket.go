// Package socket tells when the server has let go of a closed connection.
//
// A server that limits its connections counts a connection until it has closed its own end. So a
// client that counts them, too, must not open the next one before. The package wraps the dial of the
// base driver ([Dial]): a socket that is closed waits for the server's end. A server that is still
// busy with a statement whose caller has gone does not look at its end, so a [Killer] ends that
// connection.
package socket

import (
	"context"
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

// A server that is not busy closes its end in endTime. One that is busy does after a KILL, in
// killTime. If it can't be killed, behind a proxy for instance, other callers need the connection's
// place more than the count needs to be exact. A server that does not even greet would be heaped with
// connections, so there they count for longer.
const (
	endTime     = 5 * time.Millisecond
	killTime    = 50 * time.Millisecond
	ungreeted   = 3 * time.Second
	lingerBytes = 64 << 10 // of rows that are still arriving
)

// DialFunc opens a socket, as [net.Dialer.DialContext] does.
type DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dial is dial for the base driver. Sockets that it opens with a context of [Group.With] are of that
// group; others are what dial returns.
func Dial(dial DialFunc) DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		group, ok := ctx.Value(groupKey{}).(*Group)
		if err != nil || !ok {
			return conn, err
		}
		s := &socket{Conn: conn, group: group}
		group.open.Add(1)
		group.last = s
		if raw, ok := conn.(syscall.Conn); ok {
			return checkable{s, raw}, nil
		}
		return s, nil
	}
}

// checkable is a socket on which the base driver can look whether the server has closed it. The base
// driver takes a socket that claims to be a syscall.Conn, and then is none, for broken.
type checkable struct {
	*socket
	syscall.Conn
}

// Group has the sockets of one connection: the base driver may open more than one until it has a
// connection.
type Group struct {
	open   sync.WaitGroup // sockets, until they have ended
	last   *socket        // nil if there is none
	killer *Killer        // nil if nothing is killed
}

type groupKey struct{}

// NewGroup returns a group without sockets. If the server is busy when one of them is closed, killer
// kills its connection; nil kills none.
func NewGroup(killer *Killer) *Group { return &Group{killer: killer} }

// With returns a context with which [Dial] opens sockets of the group.
func (g *Group) With(ctx context.Context) context.Context {
	return context.WithValue(ctx, groupKey{}, g)
}

// Wait waits until the sockets have ended, as far as can be known. They must have been closed.
func (g *Group) Wait() { g.open.Wait() }

// socket closes its own end first, and then waits for the server to close its end.
type socket struct {
	net.Conn
	group    *Group
	reading  sync.Mutex    // held while somebody reads
	greeting greeting      // guarded by reading
	id       atomic.Uint32 // the connection's, 0 until known

	mu     sync.Mutex // guards closed, and the deadlines with it
	closed bool
}

func (s *socket) Read(b []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	n, err := s.Conn.Read(b)
	if id := s.greeting.read(b[:n]); id != 0 {
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
		s.group.open.Done()
		return s.Conn.Close()
	}
	busy := !s.reading.TryLock() // somebody waits for an answer
	if !busy {
		s.reading.Unlock()
	}
	if s.Conn.SetDeadline(time.Unix(1, 0)) != nil {
		s.group.open.Done()
		return s.Conn.Close()
	}
	killing := busy && s.group.killer.add(s)
	go func() {
		defer s.group.open.Done()
		defer s.Conn.Close()
		s.reading.Lock() // the deadline has woken the reader
		defer s.reading.Unlock()
		switch {
		case s.endsWithin(endTime):
		case s.id.Load() == 0:
			s.endsWithin(ungreeted)
		case killing || s.group.killer.add(s):
			s.endsWithin(killTime)
		}
	}()
	return nil
}

// endsWithin reports whether the server has closed its end, or still sends, after a while: it
// notices then that nobody reads any more. The caller holds reading.
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
