package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
)

// Option files are those of the mysql client: groups of "name = value". Of an
// option that is there twice the later one counts, so ~/.my.cnf comes last.

// groups are those that are read: of the clients of MySQL and MariaDB, and ours. What
// is not for us in the clients' is skipped; in ours it is an error.
var groups = []string{"client", "client-server", "client-mariadb", "mysql", "mariadb-client", ownGroup}

const ownGroup = "mysqllock"

// options are what the files say, by names with "-".
type options map[string]string

// readOptionFiles reads the one file, or where that is "" the usual ones.
func readOptionFiles(only string) (*mysql.Config, mysqllock.Config, error) {
	var locks mysqllock.Config
	files := []string{only}
	if only == "" {
		files = []string{"/etc/my.cnf", "/etc/mysql/my.cnf"}
		if home, err := os.UserHomeDir(); err == nil {
			files = append(files, filepath.Join(home, ".my.cnf"))
		}
	}
	found := make(options)
	for _, file := range files {
		// Not of what it includes: without that it could be another server.
		if _, err := os.Stat(file); only == "" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := found.read(file, 0); err != nil {
			return nil, locks, err
		}
	}
	if len(found) == 0 {
		return nil, locks, fmt.Errorf("no server is named: give --dsn or %s, or a user, a password"+
			" and a host in the group [client] of ~/.my.cnf", dsnVariable)
	}
	cfg, err := found.config()
	if err != nil {
		return nil, locks, fmt.Errorf("option files: %w", err)
	}
	return cfg, mysqllock.Config{Table: found["table"], Namespace: found["namespace"]}, nil
}

// deepest is how far files may include each other.
const deepest = 10

func (o options) read(path string, depth int) error {
	if depth > deepest {
		return fmt.Errorf("%s: files include each other more than %d deep", path, deepest)
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil {
		return err
	} else if info.Mode().IsRegular() && info.Mode().Perm()&0o002 != 0 {
		return fmt.Errorf("%s: everybody can write it: chmod o-w", path)
	}
	group := ""
	lines := bufio.NewScanner(file)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "" || line[0] == '#' || line[0] == ';':
		case line[0] == '!':
			err = o.include(line, depth)
		case line[0] == '[':
			name, _, closed := strings.Cut(line[1:], "]")
			if group = strings.TrimSpace(name); !closed {
				err = errors.New("a group is not closed by ]")
			}
		case slices.Contains(groups, group):
			err = o.set(group, line)
		}
		if err != nil {
			return fmt.Errorf("%s: line %d: %w", path, n, err)
		}
	}
	return lines.Err()
}

func (o options) include(line string, depth int) error {
	what := strings.Fields(line)[0]
	path := strings.TrimSpace(line[len(what):])
	switch what {
	case "!include":
		return o.read(path, depth+1)
	case "!includedir":
		files, err := filepath.Glob(filepath.Join(path, "*.cnf")) // sorted
		for i := 0; i < len(files) && err == nil; i++ {
			err = o.read(files[i], depth+1)
			if errors.Is(err, fs.ErrPermission) { // it is another account's; the clients skip it, too
				err = nil
			}
		}
		return err
	}
	return fmt.Errorf("unknown directive %s", what)
}

var known = []string{
	"user", "password", "host", "port", "socket", "database", "connect-timeout",
	"ssl", "ssl-mode", "ssl-ca", "ssl-cert", "ssl-key", "ssl-verify-server-cert", "table", "namespace",
}

func (o options) set(group, line string) error {
	name, value, _ := strings.Cut(withoutComment(line), "=")
	name = strings.ReplaceAll(strings.TrimSpace(name), "_", "-")
	name = strings.TrimPrefix(name, "loose-")
	ours := name == "table" || name == "namespace" // [mysql] has a "table" of its own
	if !slices.Contains(known, name) || ours && group != ownGroup {
		if group == ownGroup {
			return fmt.Errorf("unknown option %q in [%s]", name, ownGroup)
		}
		return nil
	}
	o[name] = unquoted(strings.TrimSpace(value))
	return nil
}

// withoutComment cuts off what follows a # outside of quotes.
func withoutComment(line string) string {
	var quote byte
	escaped := false
	for i := range len(line) {
		c := line[i]
		switch {
		case (c == '"' || c == '\'') && !escaped && quote == 0:
			quote = c
		case c == quote && !escaped:
			quote = 0
		case c == '#' && quote == 0:
			return line[:i]
		}
		escaped = quote != 0 && c == '\\' && !escaped
	}
	return line
}

// unquoted takes away one pair of quotes, and escapes, in quotes or not.
func unquoted(value string) string {
	if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
		value = value[1 : n-1]
	}
	return strings.NewReplacer(`\b`, "\b", `\t`, "\t", `\n`, "\n", `\r`, "\r", `\\`, `\`, `\s`, " ", `\"`, `"`, `\'`, `'`).Replace(value)
}

// usualSockets are where servers listen for clients of the same machine.
var usualSockets = []string{"/run/mysqld/mysqld.sock", "/var/run/mysqld/mysqld.sock", "/var/lib/mysql/mysql.sock", "/tmp/mysql.sock"}

// config says how to connect, as the mysql client would: to localhost by a socket.
func (o options) config() (*mysql.Config, error) {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd, cfg.DBName = o["user"], o["password"], o["database"]
	if cfg.User == "" {
		if me, err := user.Current(); err == nil {
			cfg.User = me.Username
		}
	}
	host, port, socket := o["host"], o["port"], o["socket"]
	local := host == "" || host == "localhost"
	if local && socket == "" {
		if i := slices.IndexFunc(usualSockets, func(path string) bool { _, err := os.Stat(path); return err == nil }); i >= 0 && port == "" {
			socket = usualSockets[i]
		}
		host = "127.0.0.1"
	}
	if port == "" {
		port = "3306"
	}
	cfg.Net, cfg.Addr = "tcp", net.JoinHostPort(host, port)
	if local && socket != "" {
		cfg.Net, cfg.Addr = "unix", socket
	}
	if limit := o["connect-timeout"]; limit != "" {
		seconds, err := strconv.Atoi(limit)
		if err != nil || seconds < 0 {
			return nil, fmt.Errorf("connect-timeout is %q, want seconds", limit)
		}
		cfg.Timeout = time.Duration(seconds) * time.Second
	}
	return cfg, o.encrypt(cfg, host)
}

// encrypt sets up TLS. Where nothing asks for it there is none, as with a DSN.
func (o options) encrypt(cfg *mysql.Config, host string) error {
	mode := strings.ToUpper(o["ssl-mode"])
	on := func(name string) bool {
		value, there := o[name]
		return there && !slices.Contains([]string{"0", "off", "false"}, strings.ToLower(value))
	}
	if mode == "" {
		switch {
		case on("ssl-verify-server-cert"):
			mode = "VERIFY_IDENTITY"
		case o["ssl-ca"] != "":
			mode = "VERIFY_CA"
		case on("ssl") || o["ssl-cert"] != "":
			mode = "REQUIRED"
		}
	}
	switch mode {
	case "", "DISABLED":
		return nil
	case "PREFERRED":
		cfg.TLSConfig = "preferred"
		return nil
	case "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY":
	default:
		return fmt.Errorf("ssl-mode is %q, want DISABLED, PREFERRED, REQUIRED, VERIFY_CA or VERIFY_IDENTITY", mode)
	}
	config := &tls.Config{ServerName: host, InsecureSkipVerify: mode != "VERIFY_IDENTITY"}
	if o["ssl-ca"] != "" {
		pem, err := os.ReadFile(o["ssl-ca"])
		if err != nil {
			return err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("ssl-ca: no certificate is in %s", o["ssl-ca"])
		}
	}
	if o["ssl-cert"] != "" {
		pair, err := tls.LoadX509KeyPair(o["ssl-cert"], o["ssl-key"])
		if err != nil {
			return fmt.Errorf("ssl-cert and ssl-key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	if mode == "VERIFY_CA" { // by whom the certificate is, not for which name
		config.VerifyConnection = func(state tls.ConnectionState) error {
			others := x509.NewCertPool()
			for _, c := range state.PeerCertificates[1:] {
				others.AddCert(c)
			}
			_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: config.RootCAs, Intermediates: others})
			return err
		}
	}
	cfg.TLS = config
	return nil
}
