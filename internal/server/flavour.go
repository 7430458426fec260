package server

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Flavour is what an engine that speaks MySQL's protocol can do. Code asks for a capability,
// never for a product.
type Flavour struct {
	Engine     string // its name and version, for errors
	RowLocks   bool   // FOR UPDATE keeps others out until the transaction ends, and what is read after it is no older than the lock
	SkipLocked bool   // SKIP LOCKED is known, and locks the rows that it returns

	why string // why RowLocks is false: what follows the name of the engine in an error
}

// engine is one that calls itself something else than MySQL or MariaDB.
type engine struct {
	name  string
	names *regexp.Regexp // of itself, in its version or its version's comment
	skips bool           // SKIP LOCKED works, or nobody knows
	why   string
}

// words are what an engine calls itself.
func words(any string) *regexp.Regexp {
	return regexp.MustCompile(`(?i)(^|[^a-z])(` + any + `)([^a-z]|$)`)
}

func untested(name, any string) engine {
	return engine{name, words(any), true, "where nobody has tested whether locks exclude"}
}

// engines are recognised by what they call themselves. One that is not here is recognised by
// what it lacks: see [Probe].
var engines = []engine{
	{"TiDB", words("tidb"), false, "where a transaction reads what is older than its lock, and SKIP LOCKED locks nothing, so that updates would be lost silently"},
	{"Vitess", words(`vitess|planetscale|git revision [^ ]* branch`), true, "where a transaction can reach several shards, which commit one after the other, and what follows one that outlasts the tablet's limit commits without it, so that updates would be lost silently"},
	{"Dolt or go-mysql-server", words("dolt|go-mysql-server"), false, "where FOR UPDATE is accepted and locks nothing, so that updates would be lost silently, and a test would prove nothing (package mysqllocktest tests without a server)"},
	untested("OceanBase", "oceanbase"),
	untested("PolarDB-X", "polardb-x|polardbx|tddl"),
	untested("SingleStore", "singlestore|singlestoredb|memsql"),
	untested("MatrixOne", "matrixone"),
	untested("StarRocks", "starrocks"),
	untested("Doris", "doris"),
	untested("ClickHouse", "clickhouse"),
	untested("Readyset", "readyset"),
	untested("ShardingSphere", "shardingsphere"),
	untested("Mycat", "mycat"),
}

// self is what a server says of itself.
type self struct {
	version  string // VERSION()
	variable string // @@version, which differs behind a proxy that has a version of its own
	comment  string // @@version_comment; any text, for builds of MySQL and MariaDB
}

func (s self) mariadb() bool { return strings.Contains(s.version, "MariaDB") }

// flavour recognises the engine by its name. Every other name is that of a build of MySQL or
// MariaDB.
func (s self) flavour() Flavour {
	for _, e := range engines {
		for _, text := range []string{s.variable, s.version, s.comment} {
			if e.names.MatchString(text) {
				return Flavour{Engine: e.name + " " + s.variable, SkipLocked: e.skips, why: e.why}
			}
		}
	}
	major, minor, err := number(s.version)
	switch {
	case err != nil:
		return s.unknown("whose version has another form than those of MySQL and MariaDB")
	case s.mariadb():
		return Flavour{Engine: "MariaDB " + s.version, RowLocks: true, SkipLocked: major > 10 || major == 10 && minor >= 6}
	}
	return Flavour{Engine: "MySQL " + s.version, RowLocks: true, SkipLocked: true}
}

// unknown is an engine with another name or none. Its capabilities are taken to be those of
// MySQL, for lockUnsafe=allow.
func (s self) unknown(why string) Flavour {
	return Flavour{Engine: fmt.Sprintf("an unknown engine, %s (%s)", s.variable, s.comment), SkipLocked: true, why: why}
}

// Reliable returns an error if locks on the server do not exclude, or if nobody knows.
func (f Flavour) Reliable() error {
	if f.RowLocks {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("%s; connect to MySQL or MariaDB, or use lockUnsafe=allow if you know that these locks hold there", f.Why()))
}

// Why says in a sentence why locks on the server are not reliable.
func (f Flavour) Why() string { return "the server is " + f.Engine + ", " + f.why }

// Skips returns an error if SKIP LOCKED does not work, with lockUnsafe=allow or not. what needs
// it ("leases"), and instead is what the caller can do.
func (f Flavour) Skips(what, instead string) error {
	if f.SkipLocked {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("%s need SKIP LOCKED, which does not work on %s (MariaDB has it from 10.6 on); %s", what, f.Engine, instead))
}
