package mysqllock_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"database/sql"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTLS: where the server takes nothing but TLS, all connections use it: those of
// database/sql, sessions, those of leases and of advisory locks, and those that
// make rows and kill waiters.
func TestTLS(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			trusted := certificate(t, dir)
			srv, err := tempserver.Start(limited(t), bin,
				"--ssl-ca="+filepath.Join(dir, "ca.pem"), "--ssl-cert="+filepath.Join(dir, "server.pem"), "--ssl-key="+filepath.Join(dir, "server.key"))
			ok(t, err)
			t.Cleanup(func() { srv.Stop() })
			s := newTestServer("tls", bin, srv).scratch(t)
			exec(t, s.plain, "SELECT 1") // a connection from before
			s.plain.SetMaxOpenConns(1)
			s.plain.SetMaxIdleConns(1)
			exec(t, s.plain, "SET GLOBAL require_secure_transport = ON")
			t.Cleanup(func() { exec(t, s.plain, "SET GLOBAL require_secure_transport = OFF") })

			for _, way := range []string{"NewConnector", "DSN"} {
				t.Run(way, func(t *testing.T) {
					s := *s
					s.t = t
					w := &wire{}
					secure := &tls.Config{RootCAs: trusted, ServerName: "localhost"}
					s.liveOn(func(owner string) *sql.DB { return s.overTLS(way, w, secure, owner) })
					opened, plain := w.seen()
					if opened < 6 {
						t.Errorf("only %d connections were opened", opened)
					}
					if len(plain) > 0 {
						t.Errorf("not encrypted: %q", plain)
					}
				})
				t.Run(way+", another CA", func(t *testing.T) {
					s := *s
					s.t = t
					other := &tls.Config{RootCAs: certificate(t, t.TempDir()), ServerName: "localhost"}
					s.untrusted(s.overTLS(way, &wire{}, other, "me"))
				})
			}
			t.Run("without TLS", func(t *testing.T) {
				_, err := mysqllock.Acquire(limited(t), s.open(), "k")
				if err == nil || !s.mariadb && !strings.Contains(err.Error(), "require_secure_transport") { // MariaDB says that access is denied
					t.Errorf("it is let in, or told nothing: %v", err)
				}
			})
		})
	}
}

// liveOn has locks of all kinds, over handles that open gives.
func (s *scratch) liveOn(open func(owner string) *sql.DB) {
	s.t.Helper()
	t := s.t
	exec(t, s.plain, "UPDATE p SET stock = 10")
	db, other := open("one"), open("two")
	for _, how := range rightsOf {
		ctx := lockctx.With(limited(t), how.name, how.holds)
		n, err := read(ctx, db, 1)
		ok(t, err)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		ok(t, err)
		tx, err := db.BeginTx(lockctx.With(limited(t), how.name, how.holds), nil)
		ok(t, err)
		exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		ok(t, tx.Commit())
		if how.waitsForOther {
			h, err := mysqllock.Acquire(limited(t), db, how.name, how.holds)
			ok(t, err)
			s.cancelled(other, how.name, how.wants)
			ok(t, h.Release())
		}
	}
	s.wantStock(1, 10-2*len(rightsOf))
}

// cancelled waits for a key, gives up, and leaves nobody waiting in the server.
func (s *scratch) cancelled(db *sql.DB, key string, opt lockctx.Option) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(limited(s.t))
	result := make(chan error, 1)
	go func() {
		_, err := mysqllock.Acquire(ctx, db, key, opt, lockctx.Wait(25*time.Second))
		result <- err
	}()
	soon(s.t, "it waits", func() bool { return s.waiting() == 1 })
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) || !errors.Is(err, mysqllock.ErrTimeout) {
		s.t.Errorf("%s: who gives up gets %v", key, err)
	}
	soon(s.t, "nobody waits any more", func() bool { return s.waiting() == 0 })
}

// untrusted checks that nothing is sent to a server that cannot show who it is.
func (s *scratch) untrusted(db *sql.DB) {
	s.t.Helper()
	for what, err := range map[string]error{
		"Ping":    db.Ping(),
		"Acquire": func() error { _, err := mysqllock.Acquire(limited(s.t), db, "k"); return err }(),
		"Lease":   func() error { _, err := mysqllock.Acquire(limited(s.t), db, "k", lockctx.Lease(ttl)); return err }(),
		"BeginTx": func() error { _, err := db.BeginTx(lockctx.With(limited(s.t), "k"), nil); return err }(),
	} {
		var unknown x509.UnknownAuthorityError
		if !errors.As(err, &unknown) {
			s.t.Errorf("%s: %v", what, err)
		}
	}
}

// overTLS opens the scratch database by NewConnector or by a DSN.
func (s *scratch) overTLS(way string, w *wire, config *tls.Config, owner string) *sql.DB {
	s.t.Helper()
	cfg := s.cfg()
	if way == "NewConnector" {
		cfg.TLS, cfg.DialFunc = config, w.dial
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Owner: owner})
		ok(s.t, err)
		db := sql.OpenDB(connector)
		s.t.Cleanup(func() { db.Close() })
		return db
	}
	name := "wire-" + random()
	ok(s.t, mysql.RegisterTLSConfig(name, config))
	mysql.RegisterDialContext(name, func(ctx context.Context, addr string) (net.Conn, error) { return w.dial(ctx, "tcp", addr) })
	s.t.Cleanup(func() {
		mysql.DeregisterTLSConfig(name)
		mysql.DeregisterDialContext(name)
	})
	cfg.Net, cfg.TLSConfig = name, name
	db, err := sql.Open("mysqllock", cfg.FormatDSN()+"&lockOwner="+owner)
	ok(s.t, err)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// wire sees what clients send as it goes over the network.
type wire struct {
	mu     sync.Mutex
	opened int
	plain  []string // writes that are neither TLS nor the request for it
}

func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.opened++
	return &wireConn{Conn: c, wire: w}, nil
}

func (w *wire) seen() (opened int, plain []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.opened, w.plain
}

type wireConn struct {
	net.Conn
	wire *wire
	sent int // bytes
}

const sslRequest = 4 + 32 // bytes, that come before the first of TLS

func (c *wireConn) Write(b []byte) (int, error) {
	tlsRecord := len(b) > 3 && b[0] >= 20 && b[0] <= 23 && b[1] == 3
	if c.sent == 0 && len(b) == sslRequest || tlsRecord {
		c.sent += len(b)
		return c.Conn.Write(b)
	}
	c.wire.mu.Lock()
	c.wire.plain = append(c.wire.plain, string(bytes.ToValidUTF8(b, []byte("?"))))
	c.wire.mu.Unlock()
	return c.Conn.Write(b)
}

// certificate makes a CA, and with it the certificate of a server, in dir.
func certificate(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	valid := x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		BasicConstraintsValid: true,
	}
	ca, server := valid, valid
	ca.Subject, ca.IsCA, ca.KeyUsage = pkix.Name{CommonName: "CA of the tests"}, true, x509.KeyUsageCertSign
	server.Subject, server.DNSNames, server.SerialNumber = pkix.Name{CommonName: "server"}, []string{"localhost"}, big.NewInt(2)
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ok(t, err)
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ok(t, err)
	caDER, err := x509.CreateCertificate(rand.Reader, &ca, &ca, &caKey.PublicKey, caKey)
	ok(t, err)
	serverDER, err := x509.CreateCertificate(rand.Reader, &server, &ca, &serverKey.PublicKey, caKey)
	ok(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(serverKey)
	ok(t, err)
	for name, block := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: caDER}, "server.pem": {Type: "CERTIFICATE", Bytes: serverDER}, "server.key": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		ok(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	trusted := x509.NewCertPool()
	made, err := x509.ParseCertificate(caDER)
	ok(t, err)
	trusted.AddCert(made)
	return trusted
}
