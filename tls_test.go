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
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAllConnectionsUseTLSWhereTheServerTakesNothingElse: those of database/sql, sessions,
// those of leases and of advisory locks, and those that make rows and kill waiters.
func TestAllConnectionsUseTLSWhereTheServerTakesNothingElse(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			trusted := certificate(t, dir)
			srv, err := tempserver.Start(dbtest.Limited(t), bin,
				"--ssl-ca="+filepath.Join(dir, "ca.pem"), "--ssl-cert="+filepath.Join(dir, "server.pem"), "--ssl-key="+filepath.Join(dir, "server.key"))
			dbtest.OK(t, err)
			t.Cleanup(func() { srv.Stop() })
			s := newScratch(dbtest.New(t, bin, srv))
			dbtest.Exec(t, s.plain, "SELECT 1") // a connection from before
			s.plain.SetMaxOpenConns(1)
			s.plain.SetMaxIdleConns(1)
			dbtest.Exec(t, s.plain, "SET GLOBAL require_secure_transport = ON")
			t.Cleanup(func() { dbtest.Exec(t, s.plain, "SET GLOBAL require_secure_transport = OFF") })

			for _, way := range []string{"NewConnector", "DSN"} {
				t.Run(way, func(t *testing.T) {
					s := s.at(s.For(t))
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
					s := s.at(s.For(t))
					other := &tls.Config{RootCAs: certificate(t, t.TempDir()), ServerName: "localhost"}
					s.untrusted(s.overTLS(way, &wire{}, other, "me"))
				})
			}
			t.Run("without TLS", func(t *testing.T) {
				_, err := mysqllock.Acquire(dbtest.Limited(t), s.open(), "k")
				if err == nil || !s.MariaDB() && !strings.Contains(err.Error(), "require_secure_transport") { // MariaDB says that access is denied
					t.Errorf("it is let in, or told nothing: %v", err)
				}
			})
		})
	}
}

// liveOn has locks of all kinds, over handles that open gives.
func (s *scratch) liveOn(open func(owner string) *sql.DB) {
	s.T.Helper()
	t := s.T
	dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
	db, other := open("one"), open("two")
	for _, how := range rightsOf {
		ctx := lockctx.With(dbtest.Limited(t), how.name, how.holds)
		n := stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), how.name, how.holds), db)
		dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		if how.waitsForOther {
			h := stock.Acquire(t, db, how.name, how.holds)
			s.cancelled(other, how.name, how.wants)
			dbtest.OK(t, h.Release())
		}
	}
	s.wantStock(1, 10-2*len(rightsOf))
}

// cancelled waits for a key, gives up, and leaves nobody waiting in the server.
func (s *scratch) cancelled(db *sql.DB, key string, opt lockctx.Option) {
	s.T.Helper()
	for began := time.Now(); ; {
		ctx, cancel := context.WithCancel(dbtest.Limited(s.T))
		result := make(chan error, 1)
		go func() {
			_, err := mysqllock.Acquire(ctx, db, key, opt, lockctx.Wait(2*time.Minute))
			result <- err
		}()
		dbtest.Soon(s.T, "it waits", func() bool {
			stats, err := mysqllock.Stats(db) // what runs in the server may be another statement
			return err == nil && stats.Waiters == 1 && s.waiting() == 1
		})
		cancel()
		err := <-result
		dbtest.Soon(s.T, "nobody waits any more", func() bool { return s.waiting() == 0 })
		if errors.Is(err, context.Canceled) && errors.Is(err, mysqllock.ErrTimeout) {
			return
		}
		if !errors.Is(err, context.Canceled) || time.Since(began) > dbtest.Patience { // a busy server may not have answered at all
			s.T.Errorf("%s: who gives up gets %v", key, err)
			return
		}
	}
}

// untrusted checks that nothing is sent to a server that cannot show who it is.
func (s *scratch) untrusted(db *sql.DB) {
	s.T.Helper()
	for what, err := range map[string]error{
		"Ping":    db.Ping(),
		"Acquire": func() error { _, err := mysqllock.Acquire(dbtest.Limited(s.T), db, "k"); return err }(),
		"Lease": func() error {
			_, err := mysqllock.Acquire(dbtest.Limited(s.T), db, "k", lockctx.Lease(ttl))
			return err
		}(),
		"BeginTx": func() error { _, err := db.BeginTx(lockctx.With(dbtest.Limited(s.T), "k"), nil); return err }(),
	} {
		var unknown x509.UnknownAuthorityError
		if !errors.As(err, &unknown) {
			s.T.Errorf("%s: %v", what, err)
		}
	}
}

// overTLS opens the scratch database by NewConnector or by a DSN.
func (s *scratch) overTLS(way string, w *wire, config *tls.Config, owner string) *sql.DB {
	s.T.Helper()
	cfg := s.Config()
	if way == "NewConnector" {
		cfg.TLS, cfg.DialFunc = config, w.dial
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Owner: owner})
		dbtest.OK(s.T, err)
		db := sql.OpenDB(connector)
		s.T.Cleanup(func() { db.Close() })
		return db
	}
	name := "wire-" + dbtest.Random()
	dbtest.OK(s.T, mysql.RegisterTLSConfig(name, config))
	mysql.RegisterDialContext(name, func(ctx context.Context, addr string) (net.Conn, error) { return w.dial(ctx, "tcp", addr) })
	s.T.Cleanup(func() {
		mysql.DeregisterTLSConfig(name)
		mysql.DeregisterDialContext(name)
	})
	cfg.Net, cfg.TLSConfig = name, name
	db, err := sql.Open("mysqllock", cfg.FormatDSN()+"&lockOwner="+owner)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { db.Close() })
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

func (wc *wireConn) Write(b []byte) (int, error) {
	tlsRecord := len(b) > 3 && b[0] >= 20 && b[0] <= 23 && b[1] == 3
	if wc.sent == 0 && len(b) == sslRequest || tlsRecord {
		wc.sent += len(b)
		return wc.Conn.Write(b)
	}
	wc.wire.mu.Lock()
	wc.wire.plain = append(wc.wire.plain, string(bytes.ToValidUTF8(b, []byte("?"))))
	wc.wire.mu.Unlock()
	return wc.Conn.Write(b)
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
	dbtest.OK(t, err)
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	dbtest.OK(t, err)
	caDER, err := x509.CreateCertificate(rand.Reader, &ca, &ca, &caKey.PublicKey, caKey)
	dbtest.OK(t, err)
	serverDER, err := x509.CreateCertificate(rand.Reader, &server, &ca, &serverKey.PublicKey, caKey)
	dbtest.OK(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(serverKey)
	dbtest.OK(t, err)
	for name, block := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: caDER}, "server.pem": {Type: "CERTIFICATE", Bytes: serverDER}, "server.key": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		dbtest.OK(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	trusted := x509.NewCertPool()
	made, err := x509.ParseCertificate(caDER)
	dbtest.OK(t, err)
	trusted.AddCert(made)
	return trusted
}
