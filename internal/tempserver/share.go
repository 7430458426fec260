//go:build unix

package tempserver

import (
	"context"
	"crypto/rand"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
)

// shared are the servers that Share has started, by their programs and options.
var shared struct {
	mu      sync.Mutex
	servers map[string]*shareOf
}

type shareOf struct {
	once   sync.Once
	server *Server
	err    error
}

// Share returns a server of b with these options that all tests of the program
// have in common: the first call starts it, and [Tests] stops it. It does not wait
// for the disk at each commit, since nobody crashes it. Where it does not start,
// the test ends as failed; where it is MYSQLLOCK_TEST_DSN's and not as the options
// say, as skipped. It may be called by parallel tests, but not once the
// tests have run.
func Share(tb TB, b Binary, opts ...string) *Server {
	tb.Helper()
	key := strings.Join(append([]string{b.Path}, opts...), "\n")
	shared.mu.Lock()
	if shared.servers == nil {
		shared.servers = make(map[string]*shareOf)
	}
	s := shared.servers[key]
	if s == nil {
		s = new(shareOf)
		shared.servers[key] = s
	}
	shared.mu.Unlock()
	s.once.Do(func() {
		lazy := []string{"--innodb-flush-log-at-trx-commit=0", "--sync-binlog=0"}
		s.server, s.err = Start(context.Background(), b, append(lazy, opts...)...)
		if s.err == nil {
			s.err = s.server.Settle(context.Background())
		}
	})
	if s.err != nil && b.running != nil {
		tb.Skip(s.err)
	}
	if s.err != nil {
		tb.Fatal(s.err)
	}
	return s.server
}

// Database makes a database for one test on the server that dsn leads to, of a name
// that no other has, and drops it at the end of the test. What it returns leads to
// the database. Connections by it log nothing: tests break them on purpose.
func Database(tb TB, dsn string) *mysql.Config {
	tb.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	cfg.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	admin := sql.OpenDB(connector)
	tb.Cleanup(func() { admin.Close() })
	exec := func(text string) {
		tb.Helper()
		if _, err := admin.Exec(text); err != nil {
			tb.Fatal(err)
		}
	}
	cfg.DBName = "t_" + strings.ToLower(rand.Text()[:8])
	exec("CREATE DATABASE " + cfg.DBName)
	tb.Cleanup(func() { exec("DROP DATABASE " + cfg.DBName) })
	return cfg
}

// Tests is a package's [testing.M] whose servers are shared, for
// goleak.VerifyTestMain.
type Tests struct{ M interface{ Run() int } }

// Run runs the tests, up to six at a time unless -parallel says how many, since
// they mostly wait, and then stops the servers that [Share] started. A server that
// cannot be stopped is a failure.
func (t Tests) Run() int {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", "6")
	}
	code := t.M.Run()
	for _, s := range shared.servers {
		if s.server == nil {
			continue
		}
		if err := s.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

// Settle waits until the server has run for two seconds: it tells its age by whole seconds, and
// the driver never ends a connection that may be older than its server (server.Up).
func (s *Server) Settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return s.with(ctx, func(conn *sql.Conn) error {
		for {
			var name string
			var age int
			if err := conn.QueryRowContext(ctx, "SHOW GLOBAL STATUS LIKE 'Uptime'").Scan(&name, &age); err != nil || age > 2 {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
}
