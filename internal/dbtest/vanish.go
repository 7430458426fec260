package dbtest

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// Vanishing are the connections of a host that vanishes once it has sent the statement
// that checks its lease before a COMMIT, or another one: the server hears nothing more of
// it, and is not told that it has gone.
type Vanishing struct {
	at    []string      // what is in the statement; nil is what is in such a check
	Armed chan struct{} // to be closed when it is to vanish
	Over  chan struct{} // to be closed at the end of the test
	gone  chan struct{} // closed when it has vanished
	once  sync.Once
}

// NewVanishing returns those of a host that vanishes at a statement with one of these texts
// in it, or at such a check.
func NewVanishing(at ...string) *Vanishing {
	return &Vanishing{at: at, Armed: make(chan struct{}), Over: make(chan struct{}), gone: make(chan struct{})}
}

// Dial opens a connection of the host.
func (v *Vanishing) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	return &vanishedConn{c, v}, err
}

// Await waits until it has vanished.
func (v *Vanishing) Await(t testing.TB) {
	t.Helper()
	select {
	case <-v.gone:
	case <-time.After(Patience):
		t.Fatal("it does not send the statement")
	}
}

type vanishedConn struct {
	net.Conn
	v *Vanishing
}

func (vc *vanishedConn) vanished() bool {
	select {
	case <-vc.v.gone:
		<-vc.v.Over
		return true
	default:
		return false
	}
}

func (vc *vanishedConn) Write(b []byte) (int, error) {
	if vc.vanished() {
		return 0, net.ErrClosed
	}
	n, err := vc.Conn.Write(b)
	select {
	case <-vc.v.Armed:
		at := vc.v.at
		if at == nil {
			at = []string{"MAX(r.token = "}
		}
		for _, text := range at {
			if strings.Contains(string(b), text) {
				vc.v.once.Do(func() { close(vc.v.gone) })
			}
		}
	default:
	}
	return n, err
}

func (vc *vanishedConn) Read(b []byte) (int, error) {
	n, err := vc.Conn.Read(b)
	if vc.vanished() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (vc *vanishedConn) Close() error {
	select {
	case <-vc.v.gone:
		<-vc.v.Over
	default:
	}
	return vc.Conn.Close()
}
