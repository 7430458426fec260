//go:build unix

package tempserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// StartHAProxy starts HAProxy in TCP mode before servers. It leads clients to the one
// of them that takes writes, which it asks ten times a second, by way of this process.
// shutdown has it end the connections to one that does not take writes any more, which
// is what on-marked-down shutdown-sessions means. It waits until a client is led to a
// server. The caller must call Stop.
func StartHAProxy(ctx context.Context, shutdown bool, servers ...*Server) (*Proxy, error) {
	p := &Proxy{}
	_, p.program = proxies()
	command, err := p.program.find()
	if err != nil {
		return nil, err
	}
	if err := p.startHAProxy(ctx, command, shutdown, servers); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func (p *Proxy) startHAProxy(ctx context.Context, command []string, shutdown bool, servers []*Server) error {
	if err := p.settle("haproxy"); err != nil {
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `global
	maxconn 1000
defaults
	mode tcp
	timeout connect 2s
	timeout client 1h
	timeout server 1h
	timeout check 2s
listen mysql
	bind %s
	option httpchk GET /
	default-server inter 100ms fall 1 rise 1
`, p.addr)
	if shutdown {
		b.WriteString("\tdefault-server on-marked-down shutdown-sessions\n")
	}
	checks := &healthChecks{}
	p.close = checks.close
	for i, s := range servers {
		addr, err := checks.listen(s)
		if err != nil {
			return err
		}
		_, port, _ := net.SplitHostPort(addr)
		fmt.Fprintf(&b, "\tserver node%d %s check port %s\n", i, s.addr, port)
	}
	if err := os.WriteFile(p.path("haproxy.cfg"), []byte(b.String()), 0o600); err != nil {
		return err
	}
	return p.start(ctx, append(command, "-db", "-f", p.path("haproxy.cfg")))
}

// healthChecks answer HAProxy whether servers take writes.
type healthChecks struct {
	servers []*http.Server
	running sync.WaitGroup
}

// listen answers for s at the address that it returns.
func (hc *healthChecks) listen(s *Server) (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{
		ErrorLog:          log.New(io.Discard, "", 0),
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), time.Second)
			defer cancel()
			if answer, err := s.ask(ctx, "SELECT @@read_only"); err != nil || answer != "0" {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}),
	}
	hc.servers = append(hc.servers, server)
	hc.running.Go(func() { _ = server.Serve(listener) }) // it ends with close
	return listener.Addr().String(), nil
}

func (hc *healthChecks) close() {
	for _, server := range hc.servers {
		_ = server.Close()
	}
	hc.running.Wait()
}
