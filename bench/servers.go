package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/redis/go-redis/v9"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The servers that locks are kept on.
const (
	onMySQL   = string(tempserver.MySQL)
	onMariaDB = string(tempserver.MariaDB)
	onRedis   = "Redis"
	onEtcd    = "etcd"
)

const startLimit = 2 * time.Minute

// addresses are where the servers are reached, or the proxies before them.
type addresses map[string]string

// server is a private server that was started for this run.
type server struct {
	address string
	version string
	// requests counts what clients have asked of it so far.
	requests func(context.Context) (int64, error)
	stop     func() error
}

// servers are those of one run, by name.
type servers map[string]*server

// startServers starts what is installed and says what is not.
func startServers(ctx context.Context) (all servers, missing []string, err error) {
	all = make(servers)
	defer func() {
		if err != nil {
			err = errors.Join(err, all.stop())
		}
	}()
	found := tempserver.Find()
	for _, name := range []string{onMySQL, onMariaDB, onRedis, onEtcd} {
		var s *server
		var err error
		switch name {
		case onRedis:
			s, err = startRedis(ctx)
		case onEtcd:
			s, err = startEtcd(ctx)
		default:
			s, err = startSQL(ctx, found, tempserver.Flavour(name))
		}
		if errors.Is(err, exec.ErrNotFound) {
			missing = append(missing, name)
			continue
		}
		if err != nil {
			return all, nil, fmt.Errorf("%s: %w", name, err)
		}
		all[name] = s
	}
	return all, missing, nil
}

func (all servers) stop() (err error) {
	for _, s := range all {
		err = errors.Join(err, s.stop())
	}
	return err
}

func (all servers) addresses() addresses {
	a := make(addresses)
	for name, s := range all {
		a[name] = s.address
	}
	return a
}

// startSQL starts MySQL or MariaDB with durable commits, as they have them by
// default, and makes the tables that the contenders need.
func startSQL(ctx context.Context, found []tempserver.Binary, flavour tempserver.Flavour) (*server, error) {
	for _, b := range found {
		if b.Flavour != flavour {
			continue
		}
		t, err := tempserver.Start(ctx, b, "--max-connections=4000")
		if err != nil {
			return nil, err
		}
		s := &server{address: t.Addr(), version: t.Version()}
		db, err := sql.Open("mysql", t.DSN(""))
		if err != nil {
			return nil, errors.Join(err, t.Stop())
		}
		s.stop = func() error { return errors.Join(db.Close(), t.Stop()) }
		for _, text := range schema {
			if _, err := db.ExecContext(ctx, text); err != nil {
				return nil, errors.Join(fmt.Errorf("%s: %w", text, err), s.stop())
			}
		}
		s.requests = func(ctx context.Context) (n int64, err error) {
			var name string
			err = db.QueryRowContext(ctx, "SHOW GLOBAL STATUS LIKE 'Questions'").Scan(&name, &n)
			return n, err
		}
		return s, nil
	}
	return nil, exec.ErrNotFound
}

// startRedis starts Redis without any persistence, which is its fastest form.
func startRedis(ctx context.Context) (*server, error) {
	s := &server{}
	err := s.run(ctx, "redis-server", func(dir string, ports []string) []string {
		s.address = "127.0.0.1:" + ports[0]
		return []string{"--bind", "127.0.0.1", "--port", ports[0], "--dir", dir, "--save", "", "--appendonly", "no", "--maxclients", "5000"}
	}, func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return nil, err
	}
	client := redis.NewClient(&redis.Options{Addr: s.address})
	end := s.stop
	s.stop = func() error { return errors.Join(client.Close(), end()) }
	// Calls inside of scripts count as commands, but only requests are read.
	s.requests = func(ctx context.Context) (int64, error) {
		text, err := client.Info(ctx, "stats").Result()
		if err != nil {
			return 0, err
		}
		return sum(strings.NewReader(text), regexp.MustCompile(`^total_reads_processed:(\d+)`))
	}
	return s, nil
}

// startEtcd starts a single etcd, which syncs each write to disk, as MySQL does.
func startEtcd(ctx context.Context) (*server, error) {
	s := &server{}
	err := s.run(ctx, "etcd", func(dir string, ports []string) []string {
		s.address = "127.0.0.1:" + ports[0]
		client, peer := "http://"+s.address, "http://127.0.0.1:"+ports[1]
		return []string{
			"--name", "bench", "--data-dir", filepath.Join(dir, "data"), "--log-level", "error",
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "bench=" + peer,
		}
	}, func(ctx context.Context) error {
		text, err := get(ctx, "http://"+s.address+"/health")
		if err == nil && !strings.Contains(text, `"true"`) {
			err = fmt.Errorf("health: %s", text)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	s.requests = func(ctx context.Context) (int64, error) {
		text, err := get(ctx, "http://"+s.address+"/metrics")
		if err != nil {
			return 0, err
		}
		return sum(strings.NewReader(text), regexp.MustCompile(`^grpc_server_msg_received_total\{.*\} (\S+)`))
	}
	return s, nil
}

func get(ctx context.Context, url string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return string(text), err
}

// sum adds up the numbers that the pattern finds, one a line.
func sum(r io.Reader, pattern *regexp.Regexp) (total int64, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if m := pattern.FindStringSubmatch(lines.Text()); m != nil {
			n, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				return 0, err
			}
			total += int64(n)
		}
	}
	return total, lines.Err()
}

// leash runs a program, and ends it when its own standard input does: with us,
// however we end.
const leash = `trap '' INT TERM HUP; dir=$1; shift; "$@" >"$dir/log" 2>&1 </dev/null & cat >/dev/null; kill -9 $!; wait; rm -rf "$dir"`

// run starts a program in a folder of its own and waits until it is ready.
func (s *server) run(ctx context.Context, program string, arguments func(dir string, ports []string) []string, ready func(context.Context) error) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return err
	}
	version, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return err
	}
	s.version = regexp.MustCompile(`\d+\.\d+\.\d+`).FindString(string(version))
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mysqllock-bench-")
	if err != nil {
		return err
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", leash, "leash", dir, path}, arguments(dir, ports)...)...)
	cmd.Dir = dir
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	s.stop = func() error {
		in.Close()
		return cmd.Wait()
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			return errors.Join(fmt.Errorf("%s does not answer: %w\n%s", program, err, log), s.stop())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func freePorts(n int) (ports []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all together, so that they differ
		_, port, _ := net.SplitHostPort(l.Addr().String())
		ports = append(ports, port)
	}
	return ports, nil
}

// schema is what contenders other than ours need.
var schema = []string{
	"CREATE DATABASE bench",
	"CREATE TABLE bench.products (id INT PRIMARY KEY, stock BIGINT NOT NULL) ENGINE=InnoDB",
	"INSERT INTO bench.products WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 64) SELECT i, 0 FROM n",
	// For SELECT … FOR UPDATE. All rows are there: one that is inserted while
	// others are locked can have to wait for them, since a page that is split
	// leaves its locks on gaps.
	"CREATE TABLE bench.rows_to_lock (name VARBINARY(255) PRIMARY KEY) ENGINE=InnoDB",
	"INSERT INTO bench.rows_to_lock VALUES ('" + product + "')",
	"INSERT INTO bench.rows_to_lock SELECT CONCAT('" + product + "', id) FROM bench.products",
	"INSERT INTO bench.rows_to_lock WITH RECURSIVE n AS (SELECT 0 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 999) SELECT CONCAT('" + product + "-', i) FROM n",
	// For INSERT and DELETE: a row is a lock.
	"CREATE TABLE bench.rows_of_notes (name VARBINARY(255) PRIMARY KEY, owner BIGINT, token BIGINT NOT NULL) ENGINE=InnoDB",
	"INSERT INTO bench.rows_of_notes VALUES ('" + product + "', NULL, 0)",
	"CREATE TABLE bench.rows_as_locks (name VARBINARY(255) PRIMARY KEY) ENGINE=InnoDB",
	// The least that a lock adds to a transaction, in as many round trips as without it.
	"CREATE PROCEDURE bench.begin_row() BEGIN DECLARE v INT; START TRANSACTION;" +
		" SELECT LENGTH(name) INTO v FROM bench.rows_to_lock WHERE name = '" + product + "' FOR UPDATE; END",
	"CREATE PROCEDURE bench.begin_lease() BEGIN UPDATE bench.rows_of_notes SET owner = 1, token = token + 1 WHERE name = '" + product + "'; START TRANSACTION; END",
	"CREATE PROCEDURE bench.commit_lease() BEGIN UPDATE bench.rows_of_notes SET owner = NULL WHERE name = '" + product + "'; COMMIT; END",
	"CREATE PROCEDURE bench.begin_version() BEGIN DECLARE v BIGINT; SELECT token INTO v FROM bench.rows_of_notes WHERE name = '" + product + "'; START TRANSACTION; END",
	"CREATE PROCEDURE bench.begin_named() BEGIN DO GET_LOCK('bench least', 0); START TRANSACTION; END",
	"CREATE PROCEDURE bench.commit_named() BEGIN COMMIT; DO RELEASE_LOCK('bench least'); END",
	"CREATE PROCEDURE bench.commit_version() BEGIN UPDATE bench.rows_of_notes SET token = token + 1 WHERE name = '" + product + "'; COMMIT; END",
}

// dsn is that of the plain driver as an expert sets it up: statements with
// arguments are one round trip.
func dsn(address string) string {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Net, cfg.Addr, cfg.DBName, cfg.InterpolateParams = "root", "tcp", address, "bench", true
	return cfg.FormatDSN()
}
