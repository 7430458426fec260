//go:build unix

package tempserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"
)

// testDSN is the environment's name for a server that runs already, for tests to
// use in place of servers of their own.
const testDSN = "MYSQLLOCK_TEST_DSN"

// testServers is the environment's name for how many servers tests run on, of those
// that are here. With 0 tests that need a server, a cluster or a proxy are skipped.
const testServers = "MYSQLLOCK_TEST_SERVERS"

// without reports whether tests are to run without any server, and says so to tb.
func without(tb TB) bool {
	tb.Helper()
	if os.Getenv(testServers) != "0" {
		return false
	}
	tb.Skip(errors.New("tempserver: it takes a server, and " + testServers + " is 0"))
	return true
}

// errNotOurs says why a test cannot use the server of MYSQLLOCK_TEST_DSN.
var errNotOurs = errors.New("tempserver: this takes a server of the test's own, and " + testDSN + " names one that is not")

// ForTests returns what [Require] does, where there is no test to end: the server
// that MYSQLLOCK_TEST_DSN names, or what [Find] finds, and of that only the first
// where MYSQLLOCK_TEST_SERVERS is 1.
func ForTests() ([]Binary, error) {
	dsn := os.Getenv(testDSN)
	if dsn == "" {
		return chosen(Find())
	}
	b, err := running(context.Background(), dsn)
	if err != nil {
		return nil, err
	}
	return []Binary{b}, nil
}

// chosen returns as many of the servers as MYSQLLOCK_TEST_SERVERS says, or all.
func chosen(found []Binary) ([]Binary, error) {
	text := os.Getenv(testServers)
	if text == "" {
		return found, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return nil, fmt.Errorf("tempserver: %s is %q, not the number of servers to test on", testServers, text)
	}
	return found[:min(n, len(found))], nil
}

// running returns the server that MYSQLLOCK_TEST_DSN names. Its root logs in
// without a password, as on the throwaway servers, so the name is an address.
func running(ctx context.Context, dsn string) (Binary, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return Binary{}, fmt.Errorf("tempserver: %s: %w", testDSN, err)
	}
	s := &Server{instance: instance{addr: cfg.Addr}}
	if cfg.Net != "tcp" || strings.TrimSuffix(dsn, "/") != strings.TrimSuffix(s.DSN(""), "/") {
		return Binary{}, fmt.Errorf("tempserver: %s is not of the form root@tcp(host:port)/, a server whose root has no password", testDSN)
	}
	version, err := s.ask(ctx, "SELECT VERSION()")
	if err != nil {
		return Binary{}, fmt.Errorf("tempserver: %s: %w", testDSN, err)
	}
	b := Binary{Flavour: MySQL, Version: version, running: s}
	if strings.Contains(version, "MariaDB") {
		b.Flavour = MariaDB
	}
	b.Name = string(b.Flavour)
	s.binary, s.version, s.stopped = b, version, true
	return b, nil
}

// attach returns the running server if it has what the options ask for.
func (b Binary) attach(ctx context.Context, opts []string) (*Server, error) {
	for _, option := range opts {
		if err := b.running.has(ctx, option); err != nil {
			return nil, fmt.Errorf("tempserver: %s runs without %s: %w", b, option, err)
		}
	}
	return b.running, nil
}

var errOtherwise = errors.New("it is set otherwise")

// has reports an error unless the server is as the option would make it.
func (s *Server) has(ctx context.Context, option string) error {
	name, value, _ := strings.Cut(strings.TrimPrefix(option, "--"), "=")
	name = strings.ReplaceAll(name, "-", "_")
	query := "SELECT @@GLOBAL." + name
	switch {
	case (name == "innodb_flush_log_at_trx_commit" || name == "sync_binlog") && value == "0":
		return nil // only makes it faster
	case name == "plugin_load_add":
		query = "SELECT COUNT(*) > 0 FROM information_schema.PLUGINS WHERE PLUGIN_LIBRARY = '" + value + "'"
		value = "ON"
	}
	var got sql.NullString
	err := s.with(ctx, func(conn *sql.Conn) error { return conn.QueryRowContext(ctx, query).Scan(&got) })
	if err != nil {
		return err
	}
	if onOff := map[string]string{"1": "ON", "0": "OFF"}; got.String != value && onOff[got.String] != value {
		return errOtherwise
	}
	return nil
}

// RequireOwn is [Require] for tests that stop a server, or start one in a way of
// their own: they are skipped where MYSQLLOCK_TEST_DSN names the server to test on.
func RequireOwn(tb TB) []Binary {
	tb.Helper()
	if os.Getenv(testDSN) != "" {
		tb.Skip(errNotOurs)
	}
	return Require(tb)
}
