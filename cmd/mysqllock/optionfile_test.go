package main

import (
	"crypto/tls"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

func TestOptionFilesAreReadAsMySQLReadsThem(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		dbtest.OK(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	write("sub.cnf", "[client]\nport = 3307\n")
	usualSockets = nil
	for _, c := range []struct {
		name, text string
		want       mysql.Config
		table      string
	}{
		{name: "all there is", text: `
# a comment
; another
[mysqld]
user=not-this
[client]
user = app   # who
password = "p#a \"q\" \\ \s"
host=db.example.com
port=3308
connect_timeout = 7
unknown-option
[mysql]
database = shop
table
[other]
password=no
[mysqllock]
table = locks.t
`, want: mysql.Config{User: "app", Passwd: `p#a "q" \  `, Net: "tcp", Addr: "db.example.com:3308", DBName: "shop", Timeout: 7 * time.Second}, table: "locks.t"},
		{
			name: "the last counts", text: "[mysqllock]\nuser=a\n[client]\nuser=b\nloose-host=h\npassword=ab#c\n",
			want: mysql.Config{User: "b", Passwd: "ab", Net: "tcp", Addr: "h:3306"},
		},
		{name: "socket", text: "[client]\nuser='u'\nsocket=/run/s\npassword=\n", want: mysql.Config{User: "u", Net: "unix", Addr: "/run/s"}},
		{name: "a host goes before a socket", text: "[client]\nuser=u\nsocket=/run/s\nhost=h\n", want: mysql.Config{User: "u", Net: "tcp", Addr: "h:3306"}},
		{name: "localhost", text: "[client]\nuser=u\nhost=localhost\n", want: mysql.Config{User: "u", Net: "tcp", Addr: "127.0.0.1:3306"}},
		{
			name: "comments as the client has them", text: `
[client]
user = "a # b" # the "first" user
password = it's # it's
host = 'h' # "
[client-mariadb]
port = 3309
[mariadb-client]
database="rev2" # the "lock" db
`, want: mysql.Config{User: "a # b", Passwd: "it's # it's", Net: "tcp", Addr: "h:3309", DBName: "rev2"},
		},
		{name: "include by a tab", text: "[client]\nuser=u\nhost=h\n!include\t" + dir + "/sub.cnf\n", want: mysql.Config{User: "u", Net: "tcp", Addr: "h:3307"}},
		{name: "include", text: "[client]\nuser=u\nhost=h\n!include " + dir + "/sub.cnf\n", want: mysql.Config{User: "u", Net: "tcp", Addr: "h:3307"}},
		{name: "includedir", text: "[client]\nuser=u\nhost=h\n!includedir " + dir + "\n", want: mysql.Config{User: "u", Net: "tcp", Addr: "h:3307"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, locks, err := readOptionFiles(write("file", c.text))
			dbtest.OK(t, err)
			got := mysql.Config{User: cfg.User, Passwd: cfg.Passwd, Net: cfg.Net, Addr: cfg.Addr, DBName: cfg.DBName, Timeout: cfg.Timeout}
			if !equal(got, c.want) || locks.Table != c.table {
				t.Errorf("it reads %+v and table %q", got, locks.Table)
			}
		})
	}
	for text, says := range map[string]string{
		"[client]\nssl-mode=MAYBE\n":         "ssl-mode",
		"[client]\nconnect-timeout=soon\n":   "connect-timeout",
		"[client]\nssl-ca=/does/not/exist\n": "no such file",
		"[mysqllock]\nhots=h\n":              "line 2: unknown option",
		"[client\n":                          "line 1",
		"!includes x\n":                      "directive",
		"!include " + dir + "/file\n":        "deep",
		"# nothing\n":                        "no server is named",
	} {
		if _, _, err := readOptionFiles(write("file", text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("of %q it says %v, want %q", text, err, says)
		}
	}
	t.Setenv("HOME", dir) // where a file may be missing, but not what it includes
	write(".my.cnf", "!include "+dir+"/missing\n[client]\nuser=u\nhost=h\n")
	if _, _, err := readOptionFiles(""); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("of a file that includes a missing one it says %v", err)
	}
	open := write("open", "[client]\nuser=u\n")
	dbtest.OK(t, os.Chmod(open, 0o666))
	if _, _, err := readOptionFiles(open); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("of a file that everybody can write it says %v", err)
	}
}

func equal(a, b mysql.Config) bool {
	return a.User == b.User && a.Passwd == b.Passwd && a.Net == b.Net && a.Addr == b.Addr && a.DBName == b.DBName && a.Timeout == b.Timeout
}

// TestSSLOptionsOfAnOptionFileMeanWhatTheyDoInMySQL, to a server whose certificate is known, or not, and is for its
// name, or not.
func TestSSLOptionsOfAnOptionFileMeanWhatTheyDoInMySQL(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	dbtest.OK(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	for _, c := range []struct {
		options     options
		host        string
		none, trust bool
	}{
		{options: options{}, none: true},
		{options: options{"ssl-mode": "disabled", "ssl-ca": ca}, none: true},
		{options: options{"ssl": "0"}, none: true},
		{options: options{"ssl": ""}, host: "127.0.0.1", trust: true}, // encrypted, and that is all
		{options: options{"ssl-mode": "VERIFY_CA"}, host: "127.0.0.1"},
		{options: options{"ssl-mode": "VERIFY_IDENTITY"}, host: "127.0.0.1"},
		{options: options{"ssl-ca": ca}, host: "other.example.org", trust: true},
		{options: options{"ssl-mode": "VERIFY_IDENTITY", "ssl-ca": ca}, host: "127.0.0.1", trust: true},
		{options: options{"ssl-verify-server-cert": "", "ssl-ca": ca}, host: "other.example.org"},
	} {
		cfg := mysql.NewConfig()
		dbtest.OK(t, c.options.encrypt(cfg, c.host))
		if c.none {
			if cfg.TLS != nil || cfg.TLSConfig != "" {
				t.Errorf("%v sets up TLS", c.options)
			}
			continue
		}
		conn, err := tls.Dial("tcp", server.Listener.Addr().String(), cfg.TLS)
		if err == nil {
			conn.Close()
		}
		if (err == nil) != c.trust {
			t.Errorf("with %v for %s: %v", c.options, c.host, err)
		}
	}
}

// TestAFlagPrecedesTheEnvironmentAndFiles: the environment precedes files.
func TestAFlagPrecedesTheEnvironmentAndFiles(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		dbtest.OK(t, os.WriteFile(s.file(".my.cnf"), []byte("[client]\nuser=root\nhost=127.0.0.1\nport="+port(s.Config().Addr)+"\n[mysql]\ndatabase="+s.Name+"\n"), 0o600))
		nowhere := "nobody:secret@tcp(127.0.0.1:1)/none"
		from := func(dsn string, args ...string) *command {
			c := s.command(append([]string{"schema", "apply"}, args...)...)
			c.Env = append(c.Env, dsnVariable+"="+dsn)
			return c.start()
		}
		from("").must(0)
		from(nowhere).fails(1, "refused")
		from(s.DSN()).must(0)
		from(nowhere, "--dsn", s.DSN()).must(0)
		from(s.DSN(), "--dsn", nowhere).fails(1, "refused")
		from(nowhere, "--defaults-file", s.file(".my.cnf")).must(0)
		from(s.DSN(), "--defaults-file", s.file("nothing")).fails(1, "no such file")
		from("", "--database", "no_such_database").fails(1, "no_such_database")
		dbtest.OK(t, os.Remove(s.file(".my.cnf")))
		from("", "--defaults-file", os.DevNull).fails(1, "no server is named")
	})
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

func TestNoErrorShowsAPassword(t *testing.T) {
	t.Parallel()
	s := offline(t)
	const secret = "hunter2"
	for _, dsn := range []string{
		"root:" + secret + "@tcp(127.0.0.1:1)/db", "root:" + secret, "root:" + secret + "/db", "root:" + secret + "@/db?timeout=" + secret,
		"root:" + secret + "@tcp(127.0.0.1:1/db", "root:" + secret + "@" + secret + "/db", secret, "root:" + secret + "?/x?y=%zz&a=" + secret,
		"root:pass/" + secret + "@tcp(127.0.0.1:1)/db?parseTime=" + secret, "root@tcp(127.0.0.1:1)/db?tls=" + secret,
	} {
		for _, args := range [][]string{{"ls", "--dsn", dsn}, {"run", "-k", "k", "--dsn", dsn, "--", "true"}, {"doctor", "--dsn", dsn}} {
			c := s.command(args...).start()
			if code := c.code(); code == 0 || strings.Contains(c.out.String()+c.errs.String(), secret) || c.errs.Len() == 0 {
				t.Errorf("%s with %q ends with %d and says %s", args[0], dsn, code, c.errs.String())
			}
			if strings.Contains(dsn, "tls=") && !strings.Contains(c.errs.String(), "the value of tls= is not known") {
				t.Errorf("%s with %q says %s", args[0], dsn, c.errs.String())
			}
		}
	}
}
