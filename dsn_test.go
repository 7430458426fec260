package mysqllock

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/go-sql-driver/mysql"
)

// password is in every DSN of the tables, and must not be in any error.
const password = "p?w/d@s3:cr3t&lockWait=1s"

const (
	dsnHead = "app:" + password + "@tcp(127.0.0.1:3306)/"
	dsnBare = dsnHead + "shop"
)

var goodDSNs = []struct {
	dsn   string
	plain string // what go-sql-driver/mysql gets
	cfg   Config
}{
	{dsnBare, dsnBare, Config{}},
	{dsnBare + "?", dsnBare + "?", Config{}},
	{dsnBare + "?&", dsnBare + "?&", Config{}},
	{dsnBare + "?parseTime=true&&loc=US%2FPacific&flag", dsnBare + "?parseTime=true&&loc=US%2FPacific&flag", Config{}},
	{dsnHead, dsnHead, Config{}},
	{"/", "/", Config{}},
	{"", "", Config{}},
	{"unix(/tmp/mysql.sock)/shop?lockWait=2s", "unix(/tmp/mysql.sock)/shop", Config{Wait: 2 * time.Second}},

	{dsnBare + "?lockStrategy=row", dsnBare, Config{Strategy: "row"}},
	{dsnBare + "?lockStrategy=lease", dsnBare, Config{Strategy: "lease"}},
	{dsnBare + "?lockStrategy=advisory&lockHandOvers=3&lockHandOverTime=5ms", dsnBare, Config{Strategy: "advisory", HandOvers: 3, HandOverTime: 5 * time.Millisecond}},
	{dsnBare + "?lockWait=2s", dsnBare, Config{Wait: 2 * time.Second}},
	{dsnBare + "?lockWait=1h30m", dsnBare, Config{Wait: 90 * time.Minute}},
	{dsnBare + "?lockNoWait=true", dsnBare, Config{NoWait: true}},
	{dsnBare + "?lockNoWait=1", dsnBare, Config{NoWait: true}},
	{dsnBare + "?lockNoWait=false&lockWait=2s", dsnBare, Config{Wait: 2 * time.Second}},
	{dsnBare + "?lockTTL=1s", dsnBare, Config{TTL: time.Second}},
	{dsnBare + "?lockTTL=1m30s", dsnBare, Config{TTL: 90 * time.Second}},
	{dsnBare + "?lockTable=locks", dsnBare, Config{Table: "locks"}},
	{dsnBare + "?lockTable=ops.my-locks$_1", dsnBare, Config{Table: "ops.my-locks$_1"}},
	{dsnBare + "?lockMaxConns=1", dsnBare, Config{LockMaxConns: 1}},
	{dsnBare + "?lockMaxConns=100000", dsnBare, Config{LockMaxConns: 100_000}},
	{dsnBare + "?maxConns=5", dsnBare, Config{MaxConns: 5}},
	{dsnBare + "?maxConns=25&lockMaxConns=5&max_connections=3", dsnBare + "?max_connections=3", Config{
		MaxConns: 25, LockMaxConns: 5,
	}},
	{dsnBare + "?lockNamespace=a%26b%2Fc+d%00", dsnBare, Config{Namespace: "a&b/c d\x00"}},
	{dsnBare + "?lockSchema=auto", dsnBare, Config{Schema: "auto"}},
	{dsnBare + "?lockSchema=manual", dsnBare, Config{Schema: "manual"}},
	{dsnBare + "?lockOwner=web-1%3A7%3Ashopd", dsnBare, Config{Owner: "web-1:7:shopd"}},
	{dsnBare + "?lockOwner=a=b", dsnBare, Config{Owner: "a=b"}},
	{dsnBare + "?lockUnsafe=refuse", dsnBare, Config{Unsafe: "refuse"}},
	{dsnBare + "?lockUnsafe=allow", dsnBare, Config{Unsafe: "allow"}},
	{dsnBare + "?lockRequire=products,order_*,shop.stock", dsnBare, Config{Require: "products,order_*,shop.stock"}},
	{dsnBare + "?lockRequire=log:*", dsnBare, Config{Require: "log:*"}},

	// Among others, in any place.
	{dsnBare + "?lockWait=2s&parseTime=true", dsnBare + "?parseTime=true", Config{Wait: 2 * time.Second}},
	{dsnBare + "?parseTime=true&lockWait=2s", dsnBare + "?parseTime=true", Config{Wait: 2 * time.Second}},
	{dsnBare + "?a=1&lockWait=2s&b=2&lockTTL=3s&a=3", dsnBare + "?a=1&b=2&a=3", Config{Wait: 2 * time.Second, TTL: 3 * time.Second}},

	// System variables that begin with "lock" are the server's.
	{dsnBare + "?lock_wait_timeout=5", dsnBare + "?lock_wait_timeout=5", Config{}},
	{dsnBare + "?locked_in_memory=1&lock=2", dsnBare + "?locked_in_memory=1&lock=2", Config{}},
	{dsnBare + "?lock_wait_timeout=5&lockWait=2s", dsnBare + "?lock_wait_timeout=5", Config{Wait: 2 * time.Second}},
	{dsnBare + "?innodb_lock_wait_timeout=5", dsnBare + "?innodb_lock_wait_timeout=5", Config{}},
}

func TestAGoodDSNIsReadAndSplit(t *testing.T) {
	for _, c := range goodDSNs {
		plain, cfg, err := splitDSN(c.dsn)
		if err != nil || plain != c.plain || !reflect.DeepEqual(cfg, c.cfg) {
			t.Errorf("%s\n gives %s\n and %+v, %v\nwant %s\n and %+v", c.dsn, plain, cfg, err, c.plain, c.cfg)
		}
		want, err := mysql.ParseDSN(c.plain)
		if err != nil {
			t.Errorf("%s: the rest is no DSN: %v", c.dsn, err)
			continue
		}
		if strings.Contains(c.dsn, password) && want.Passwd != password {
			t.Errorf("%s: the password is read as %q", c.dsn, want.Passwd)
		}
		if _, err := (&Driver{}).OpenConnector(c.dsn); err != nil {
			t.Errorf("%s: %v", c.dsn, err)
		}
		if base, cfg, err := ParseDSN(c.dsn); err != nil || !reflect.DeepEqual(cfg, c.cfg) || base.FormatDSN() != want.FormatDSN() {
			t.Errorf("%s is read as %v and %+v, %v", c.dsn, base, cfg, err)
		}
	}
}

func TestSystemVariableReachesTheDriver(t *testing.T) {
	plain, _, err := splitDSN(dsnBare + "?lockWait=2s&lock_wait_timeout=5")
	dbtest.OK(t, err)
	cfg, err := mysql.ParseDSN(plain)
	if err != nil || cfg.Params["lock_wait_timeout"] != "5" {
		t.Errorf("the driver gets %v, %v", cfg.Params, err)
	}
}

var long = strings.Repeat("x", 256)

var badDSNs = []struct {
	dsn  string
	says string
}{
	{dsnBare + "?lockTimeout=1s", `unknown DSN parameter "lockTimeout"`},
	{dsnBare + "?lockX", `DSN parameter "lockX"`},
	{dsnBare + "?parseTime=true&lockKey=a&loc=UTC", `unknown DSN parameter "lockKey"`},

	{dsnBare + "?lockStrategy=redis", `lockStrategy is "redis", want row, lease, advisory or optimistic`},
	{dsnBare + "?lockHandOvers=0", "lockHandOvers is 0, want 1 or more"},
	{dsnBare + "?lockHandOvers=-1", "lockHandOvers is -1"},
	{dsnBare + "?lockHandOvers=many", "cannot read"},
	{dsnBare + "?lockHandOverTime=0", "lockHandOverTime is 0s"},
	{dsnBare + "?lockHandOverTime=-1s", "lockHandOverTime -1s"},
	{dsnBare + "?lockStrategy=ROW", `lockStrategy is "ROW"`},
	{dsnBare + "?lockStrategy=", "lockStrategy is empty"},
	{dsnBare + "?lockStrategy", "lockStrategy is empty"},

	{dsnBare + "?lockWait=5", `lockWait: cannot read "5"`},
	{dsnBare + "?lockWait=5", `want 5s`},
	{dsnBare + "?lockTTL=1.5", `want 1.5s`},
	{dsnBare + "?lockHandOverTime=20", `want 20s`},
	{dsnBare + "?lockWait=soon", `lockWait: cannot read "soon"`},
	{dsnBare + "?lockWait=-1s", "lockWait is negative: -1s"},
	{dsnBare + "?lockWait=9999999999h", "lockWait: cannot read"},
	{dsnBare + "?lockWait=", "lockWait is empty"},
	{dsnBare + "?lockWait=0", "lockWait is 0s, want more than 0s, or lockNoWait=true to fail at once"},
	{dsnBare + "?lockNoWait=maybe", `lockNoWait: cannot read "maybe"`},
	{dsnBare + "?lockWait=1s&lockNoWait=true", "lockNoWait and a lockWait of 1s exclude each other"},

	{dsnBare + "?lockTTL=30", `lockTTL: cannot read "30"`},
	{dsnBare + "?lockTTL=0", "lockTTL is 0s, want 1s or more"},
	{dsnBare + "?lockTTL=999ms", "lockTTL is 999ms, want 1s or more"},
	{dsnBare + "?lockTTL=-30s", "lockTTL is -30s, want 1s or more"},
	{dsnBare + "?lockTTL=", "lockTTL is empty"},

	{dsnBare + "?lockTable=", "lockTable is empty"},
	{dsnBare + "?lockTable=a.b.c", `bad lock table "a.b.c"`},
	{dsnBare + "?lockTable=.locks", `bad lock table ".locks"`},
	{dsnBare + "?lockTable=ops.", `bad lock table "ops."`},
	{dsnBare + "?lockTable=my+locks", `bad lock table "my locks"`},
	{dsnBare + "?lockTable=%60locks%60", "bad lock table \"`locks`\""},
	{dsnBare + "?lockTable=locks%60%3B+DROP+TABLE+p%3B+--+", "bad lock table"},
	{dsnBare + "?lockTable=locks%00", `bad lock table "locks\x00"`},
	{dsnBare + "?lockTable=locks%0A", `bad lock table "locks\n"`},
	{dsnBare + "?lockTable=schlösser", "bad lock table"},
	{dsnBare + "?lockTable=" + long[:59], "bad lock table"},
	{dsnBare + "?lockTable=" + long[:65] + ".locks", "bad lock table"},

	{dsnBare + "?lockMaxConns=0", "lockMaxConns is 0, want 1 to 100000"},
	{dsnBare + "?lockMaxConns=-1", "lockMaxConns is -1, want 1 to 100000"},
	{dsnBare + "?lockMaxConns=100001", "lockMaxConns is 100001, want 1 to 100000"},
	{dsnBare + "?lockMaxConns=99999999999999999999", "lockMaxConns: cannot read"},
	{dsnBare + "?lockMaxConns=4294967297", "lockMaxConns is 4294967297"},
	{dsnBare + "?lockMaxConns=many", `lockMaxConns: cannot read "many"`},
	{dsnBare + "?lockMaxConns=1.5", `lockMaxConns: cannot read "1.5"`},

	{dsnBare + "?maxConns=0", "maxConns is 0, want 5 to 100000"},
	{dsnBare + "?maxConns=4", "maxConns is 4, want 5 to 100000"},
	{dsnBare + "?maxConns=-1", "maxConns is -1, want 5 to 100000"},
	{dsnBare + "?maxConns=many", `maxConns: cannot read "many"`},
	{dsnBare + "?connMaxIdleTime=1m", "connMaxIdleTime is no DSN parameter; use db.SetConnMaxIdleTime"},
	{dsnBare + "?maxConns=25&connMaxLifetime=1h", "connMaxLifetime is no DSN parameter; use db.SetConnMaxLifetime"},

	{dsnBare + "?lockNamespace=" + long, "lockNamespace is longer than 255 bytes"},
	{dsnBare + "?lockNamespace=", "lockNamespace is empty"},
	{dsnBare + "?lockSchema=none", `lockSchema is "none", want auto or manual`},
	{dsnBare + "?lockUnsafe=yes", `lockUnsafe is "yes", want refuse or allow`},
	{dsnBare + "?lockRequire=", "lockRequire is empty"},
	{dsnBare + "?lockRequire=a,,b", `lockRequire is "a,,b", want tables or patterns`},
	{dsnBare + "?lockRequire=log:", `lockRequire is "log:"`},
	{dsnBare + "?lockRequire=warn:a", `lockRequire is "warn:a"`},
	{dsnBare + "?lockRequire=a.b.c", `lockRequire is "a.b.c"`},
	{dsnBare + "?lockRequire=[a", `lockRequire is "[a"`},
	{dsnBare + "?lockOwner=", "lockOwner is empty"},

	{dsnBare + "?lockWait=1s&lockWait=2s", "lockWait is given twice"},
	{dsnBare + "?lockWait=1s&parseTime=true&lockWait=1s", "lockWait is given twice"},
	{dsnBare + "?lockOwner=%zz", `lockOwner: "%zz" is not URL-escaped`},
	{dsnBare + "?lockOwner=100%", `lockOwner: "100%" is not URL-escaped`},

	// What go-sql-driver/mysql refuses.
	{dsnBare + "?parseTime=maybe&lockWait=1s", "invalid bool value: maybe"},
	{dsnBare + "?loc=Nowhere%2FLand", "Nowhere/Land"},
	{"app:" + password + "@tcp(127.0.0.1:3306/shop", "invalid DSN"},
	{"app:swordfish@tcp(127.0.0.1:3306)", "invalid DSN"},
	{"app:sword?lockFish@tcp(127.0.0.1:3306)", "invalid DSN"},
	{"app:cr3t/x?lockFish@tcp(127.0.0.1:3306)", "no address that can be read"},
}

// typos are parameters that programs mean for this driver, and what the error names instead.
var typos = map[string]string{
	"maxConn=25": "maxConns", "maxconns=25": "maxConns", "MaxConns=25": "maxConns", "MAXCONNS=25": "maxConns", "max_conns=25": "maxConns", "max-conns=25": "maxConns",
	"maxCons=25": "maxConns", "maxConnections=25": "maxConns", "maxOpenConns=25": "maxConns", "maxConns_=25": "maxConns", "maxcnons=25": "maxConns",
	"lockwait=3s": "lockWait", "LockWait=3s": "lockWait", "lock_wait=3s": "lockWait", "lock-wait=3s": "lockWait", "lockWiat=3s": "lockWait", "lokcWait=3s": "lockWait",
	"LOCKWAIT=3s": "lockWait", "lockWaits=3s": "lockWait", "lockWaitTimeout=3s": "lockWait", "locksWait=3s": "lockWait", "lockwait": "lockWait",
	"LockTTL=30s": "lockTTL", "lockTtl=30s": "lockTTL", "lockttl=30s": "lockTTL", "lock_ttl=30s": "lockTTL", "lockTTTL=30s": "lockTTL", "lockTTL%20=30s": "lockStrategy, lockWait",
	"lockNowait": "lockNoWait", "locknowait=true": "lockNoWait", "LockNoWait": "lockNoWait", "noLockWait=true": "lockWait",
	"locktable=locks": "lockTable", "lock_table=locks": "lockTable", "lockTables=locks": "lockTable",
	"lockMaxConn=5": "lockMaxConns", "lockmaxconns=5": "lockMaxConns", "lockMaxOpenConns=5": "lockMaxConns",
	"lockNameSpace=a": "lockNamespace", "lockHandsOver=3": "lockHandOvers", "lockHandsOverTime=3ms": "lockHandOverTime", "lockRequired=p": "lockRequire",
	"lockStrategie=row": "lockStrategy", "strategy=row": "", "lockstripe=8": "lockStripes", "lockscheme=manual": "lockSchema", "lockowner=me": "lockOwner", "lockunsafe=allow": "lockUnsafe",
	"lockTimeout=3s": "lockStrategy, lockWait, lockNoWait", "locktimeout=3s": "lockStrategy, lockWait, lockNoWait", "LOCKKEY=a": "lockStrategy, lockWait, lockNoWait",
	" maxConns=25": "maxConns", "\n\tlockWait=3s": "lockWait", "maxConns =25": "maxConns", "lock wait=3s": "lockWait",
	"lockA_b=3": "lockStrategy, lockWait, lockNoWait",

	// What may be of the server, or is known to go-sql-driver.
	"lock_wait_timeout=5": "", "LOCK_WAIT_TIMEOUT=5": "", "max_connections=5": "", "innodb_lock_wait_timeout=5": "", "max_connect_errors=5": "", "lock=1": "", "LOCK=1": "",
	"autocommit=1": "", "AutoCommit=1": "", "sql_mode=''": "", "@lockWait=1": "", "lock_order=1": "", "x=1": "", "maxx=1": "", "locked_in_memory=1": "",
	"validate_password.length=8": "", "session%20lock_wait_timeout=5": "", "maxAllowedPacket=0": "", "flag": "", "": "",
	"workload=olap": "", "ddl_strategy=direct": "", "columnsWithAlias=true": "", "connectionAttributes=a:b": "", "timeTruncate=1s": "", "timeout=1s": "", "readTimeout=1s": "", "writeTimeout=1s": "", "loc=UTC": "",
}

// TestATypoInTheDSNNamesTheParameter: what looks like a parameter of this driver is an error
// when the handle is opened, not the server's at its first statement.
func TestATypoInTheDSNNamesTheParameter(t *testing.T) {
	for typo, want := range typos {
		db, err := sql.Open("mysqllock", dsnBare+"?parseTime=true&"+typo)
		if err == nil {
			dbtest.OK(t, db.Close())
		}
		name, _, _ := strings.Cut(typo, "=")
		switch {
		case want == "" && err != nil:
			t.Errorf("%s is refused: %v", typo, err)
		case want != "" && (err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("mysqllock: unknown DSN parameter %q, want %s", name, want))):
			t.Errorf("%s: %v, want an error that names %s", typo, err, want)
		}
	}
}

// TestNewConnectorFindsItsParametersInParams: a program that reads its DSN with the plain driver's
// ParseDSN is told to use ours.
func TestNewConnectorFindsItsParametersInParams(t *testing.T) {
	for param, says := range map[string]string{
		"maxConns=25": "has maxConns, which this driver must read; use mysqllock.ParseDSN", "lockWait=3s": "has lockWait, which",
		"lockwait=3s": `unknown DSN parameter "lockwait", want lockWait`,
	} {
		cfg, err := mysql.ParseDSN(dsnBare + "?" + param)
		dbtest.OK(t, err)
		_, err = NewConnector(cfg, Config{})
		dbtest.Says(t, err, says)
	}
}

// TestNoSystemVariableIsRefused: a DSN may set each system variable that a server has, however
// its letters are written.
func TestNoSystemVariableIsRefused(t *testing.T) {
	dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
		db := d.Open("mysql")
		names := append(variables(t, db, "SHOW GLOBAL VARIABLES"), variables(t, db, "SHOW SESSION VARIABLES")...)
		if len(names) < 1000 {
			t.Errorf("the server tells of only %d", len(names))
		}
		t.Logf("%d names", len(names))
		for _, name := range names {
			for _, name := range []string{name, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:], "SESSION " + name, "global " + name, "@@" + name} {
				if _, _, err := ParseDSN(dsnBare + "?" + name + "=1"); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

func variables(t *testing.T, db *sql.DB, show string) (names []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), show)
	dbtest.OK(t, err)
	defer rows.Close()
	for rows.Next() {
		var name string
		dbtest.OK(t, rows.Scan(&name, new(sql.RawBytes)))
		names = append(names, name)
	}
	dbtest.OK(t, rows.Err())
	return names
}

func TestABadDSNIsRefusedWithoutItsPassword(t *testing.T) {
	for _, c := range badDSNs {
		_, err := (&Driver{}).OpenConnector(c.dsn)
		if err == nil {
			t.Errorf("%s is accepted", c.dsn)
			continue
		}
		if !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s\nfails with %v\n     want %s", c.dsn, err, c.says)
		}
		for _, secret := range []string{password, "cr3t", "sword", "Fish"} {
			if strings.Contains(strings.Replace(err.Error(), "user:password@", "", 1), secret) {
				t.Errorf("the error tells the password: %v", err)
			}
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("the error has several lines: %v", err)
		}
		if _, err := (&Driver{}).Open(c.dsn); err == nil {
			t.Errorf("Driver.Open accepts %s", c.dsn)
		}
	}
}

func TestABadConfigIsRefusedInWords(t *testing.T) {
	for says, cfg := range map[string]Config{
		`lockStrategy is "redis"`:    {Strategy: "redis"},
		"lockWait is negative":       {Wait: -1},
		"lockNoWait and a lockWait":  {NoWait: true, Wait: 1},
		"lockTTL is 1ms":             {TTL: time.Millisecond},
		"lockTTL is -1s":             {TTL: -time.Second},
		"bad lock table":             {Table: "a`b"},
		"lockMaxConns is -1":         {LockMaxConns: -1},
		"lockMaxConns is 2147483648": {LockMaxConns: math.MaxInt32 + 1},
		"lockNamespace is longer":    {Namespace: long},
		`lockSchema is "AUTO"`:       {Schema: "AUTO"},
		`lockUnsafe is "true"`:       {Unsafe: "true"},
	} {
		cfg.Owner = "me"
		if _, err := NewConnector(mysql.NewConfig(), cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("NewConnector with %+v: %v, want %s", cfg, err, says)
		}
		if k, err := Wrap(nil, cfg); err == nil || !strings.Contains(err.Error(), says) || k != nil {
			t.Errorf("Wrap with %+v: %v, want %s", cfg, err, says)
		}
	}
}

// TestTheZeroConfigHasTheDefaults, and what is set takes their place.
func TestTheZeroConfigHasTheDefaults(t *testing.T) {
	s, err := Config{}.settings()
	dbtest.OK(t, err)
	if s.Wait != 10*time.Second || s.TTL != 30*time.Second || s.LockMaxConns != 16 {
		t.Errorf("the defaults are %+v", s)
	}
	if s.Strategy != "row" || s.Table.String() != "`mysqllock`" || s.Namespace != "" || !s.Auto || s.Unsafe {
		t.Errorf("the defaults are %+v", s)
	}
	host, err := os.Hostname()
	if parts := strings.Split(s.Owner, ":"); err != nil || len(parts) != 3 || parts[0] != host || parts[2] == "" {
		t.Errorf("the owner is %q, want host:pid:program", s.Owner)
	}

	s, err = Config{NoWait: true}.settings()
	if err != nil || s.Wait != 0 {
		t.Errorf("NoWait waits %v, %v", s.Wait, err)
	}
	s, err = Config{Schema: "manual", Unsafe: "allow", LockMaxConns: 3, TTL: 90 * time.Second, Wait: time.Minute}.settings()
	if err != nil || s.Auto || !s.Unsafe || s.LockMaxConns != 3 || s.TTL != 90*time.Second || s.Wait != time.Minute {
		t.Errorf("the settings are %+v, %v", s, err)
	}
}

func TestNewConnectorLeavesItsArgument(t *testing.T) {
	cfg, err := mysql.ParseDSN(dsnBare + "?parseTime=true&lock_wait_timeout=5&connectionAttributes=a%3Ab")
	dbtest.OK(t, err)
	before := cfg.Clone()
	dbtest.OK(t, dbtest.Err(NewConnector(cfg, Config{Owner: "me"})))
	if !reflect.DeepEqual(cfg, before) {
		t.Errorf("the config was\n%+v, and is\n%+v", before, cfg)
	}
}

// TestOwnerReachesTheServer reads what a connection says when it signs in.
func TestOwnerReachesTheServer(t *testing.T) {
	attributes := func(given, owner string) string {
		cfg := mysql.NewConfig()
		cfg.ConnectionAttributes = given
		cfg.Logger = &mysql.NopLogger{}
		said := make(chan string, 1)
		cfg.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			go func() {
				defer server.Close()
				greeting := "\x0a8.4.0\x00\x01\x00\x00\x0012345678\x00\x0f\xa2\xff\x02\x00\x1b\x00\x15" +
					strings.Repeat("\x00", 10) + "123456789012\x00mysql_native_password\x00"
				_, _ = io.WriteString(server, string([]byte{byte(len(greeting)), 0, 0, 0})+greeting)
				b := make([]byte, 4096)
				n, _ := server.Read(b)
				said <- string(b[:n])
			}()
			return client, nil
		}
		k, err := NewConnector(cfg, Config{Owner: owner})
		dbtest.OK(t, err)
		if _, err := k.Connect(context.Background()); err == nil {
			t.Fatal("the server hung up, and nobody noticed")
		}
		return <-said
	}
	pair := func(name, value string) string {
		return string([]byte{byte(len(name))}) + name + string([]byte{byte(len(value))}) + value
	}
	for _, c := range []struct {
		given, owner string
		want         []string
	}{
		{"", "web-1:7:shopd", []string{pair("mysqllock_owner", "web-1:7:shopd")}},
		{"a:b", "me", []string{pair("a", "b"), pair("mysqllock_owner", "me")}},
		{"", "a,b:c", []string{pair("mysqllock_owner", "a;b:c")}},
		{"mysqllock_owner:someone", "me", []string{pair("mysqllock_owner", "someone")}},
	} {
		got := attributes(c.given, c.owner)
		for _, want := range c.want {
			if strings.Count(got, want) != 1 {
				t.Errorf("given %q and owner %q, the connection says %q, want %q in it", c.given, c.owner, got, want)
			}
		}
		if strings.Count(got, "mysqllock_owner") != 1 {
			t.Errorf("given %q, the owner is said twice: %q", c.given, got)
		}
	}
}

var lockParameter = regexp.MustCompile(`lock[A-Z]|maxConns|connMax`)

// FuzzDSN makes DSNs of any password and any tail.
func FuzzDSN(f *testing.F) {
	for _, c := range goodDSNs {
		f.Add(password, strings.TrimPrefix(c.dsn, dsnHead))
	}
	for _, c := range badDSNs {
		f.Add("swordfish", strings.TrimPrefix(c.dsn, dsnHead))
	}
	f.Add("sword?lockFish", "shop")
	f.Fuzz(func(t *testing.T, secret, tail string) {
		dsn := "app:" + secret + "@tcp(127.0.0.1:3306)/" + tail
		tellsPassword(t, dsn, secret)
		if !strings.Contains(secret, "/") { // else the password's slash is taken for the one that is missing
			tellsPassword(t, strings.Replace(dsn, ")/", ")", 1), secret)
		}

		plain, cfg, err := splitDSN(dsn) // must not panic
		if lockParameter.MatchString(tail) || err != nil && strings.Contains(err.Error(), "unknown DSN parameter") {
			return
		}
		if err != nil || plain != dsn || !reflect.DeepEqual(cfg, Config{}) {
			t.Errorf("%q has no lock parameters and comes out as %q, %+v, %v", dsn, plain, cfg, err)
		}
		// Lock parameters that are added are taken out again, and no more.
		sep := "?"
		if strings.Contains(dsn[strings.LastIndexByte(dsn, '/'):], "?") {
			sep = "&"
		}
		plain, cfg, err = splitDSN(dsn + sep + "lockOwner=me&lockMaxConns=2")
		if err != nil || plain != dsn || !reflect.DeepEqual(cfg, Config{Owner: "me", LockMaxConns: 2}) {
			t.Errorf("%q with lock parameters comes out as %q, %+v, %v", dsn, plain, cfg, err)
		}
	})
}

// tellsPassword looks for the words of the password in the error.
func tellsPassword(t *testing.T, dsn, secret string) {
	t.Helper()
	_, err := (&Driver{}).OpenConnector(dsn)
	if err == nil {
		return
	}
	// What go-sql-driver/mysql says is not ours to judge: where the DSN is
	// broken, it may take the password for something else.
	if _, plainly := mysql.ParseDSN(dsn); plainly != nil && plainly.Error() == err.Error() && !strings.Contains(err.Error(), "network") {
		return
	}
	rest := strings.Replace(dsn, secret, "", 1)
	ours := "mysqllock: unknown DSN parameter"
	for _, p := range parameters {
		ours += " " + p.name
	}
	for _, word := range strings.FieldsFunc(secret, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
		if len(word) > 5 && strings.Contains(err.Error(), word) && !strings.Contains(rest, word) && !strings.Contains(ours, word) {
			t.Errorf("the error of %q tells the password: %v", dsn, err)
		}
	}
}

// TestADSNWithoutAnAddressDoesNotShowItsPassword, which stands where go-sql-driver/mysql looks for the network.
func TestADSNWithoutAnAddressDoesNotShowItsPassword(t *testing.T) {
	for _, dsn := range []string{"root:secretword/db", "root:secretword@/db", "secretword/db?lockWait=1s"} {
		if _, err := (&Driver{}).OpenConnector(dsn); err != nil && strings.Contains(err.Error(), "secretword") {
			t.Errorf("%q: %v", dsn, err)
		}
	}
	if _, err := (&Driver{}).OpenConnector("root:secretword/db"); err == nil || !strings.Contains(err.Error(), "@tcp(") {
		t.Errorf("the error does not say what to do: %v", err)
	}
}
