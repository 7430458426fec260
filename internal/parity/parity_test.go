//go:build unix

package parity

import (
	"database/sql"
	"database/sql/driver"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

var (
	seed     = flag.Uint64("parity.seed", 1, "of the first random program")
	programs = flag.Int("parity.programs", 20, "how many programs run on each kind of handle, with locks and without")
)

// kinds are those of handles.
var kinds = []struct {
	name    string
	max     int
	wrapped bool
}{{"database/sql's connections", 0, false}, {"maxConns", 12, false}, {"wrapped", 0, true}, {"wrapped with maxConns", 12, true}}

// pair runs programs on both handles.
type pair struct {
	*testing.T
	d           *dbtest.Database
	admin       *sql.DB
	open        func(dsn int) (plain, ours *machine)
	dsn         int // which of dsns the handles have
	plain, ours *machine
	dirty       bool // tables or connections may differ
	short       time.Duration
	programs    int
	refused     map[string]int
}

// newPair makes two databases that are the same.
func newPair(t *testing.T, d *dbtest.Database, max int, wrapped bool) *pair {
	t.Helper()
	p := &pair{T: t, d: d, admin: d.Open("mysql"), dirty: true, short: short, refused: make(map[string]int)}
	machineAt := func(open func(cfg *mysql.Config) (driver.Connector, error), ours bool) func(dsn int) *machine {
		main, other := d.Beside(t), d.Beside(t)
		for _, text := range schema() {
			dbtest.Exec(t, main.Open("mysql"), text)
		}
		return func(dsn int) *machine {
			cfg := main.Config()
			dsns[dsn](cfg)
			cfg.Params = map[string]string{"innodb_lock_wait_timeout": "1", "lock_wait_timeout": "1"}
			c, err := open(cfg)
			dbtest.OK(t, err)
			if wrapped {
				c = dbtest.Wrapper{Connector: c, Tells: max > 0}
			}
			isolation := "transaction_isolation"
			if d.MariaDB() {
				isolation = "tx_isolation"
			}
			return &machine{
				db: sql.OpenDB(c), name: main.Name, locks: ours, hidden: wrapped && max == 0, caches: d.MariaDB(),
				names: strings.NewReplacer("$DB", main.Name, "$other", other.Name, "$tag", "_"+main.Name, "$isolation", isolation),
				hides: strings.NewReplacer(main.Name, "DB", other.Name, "other"),
			}
		}
	}
	plain := machineAt(func(cfg *mysql.Config) (driver.Connector, error) { return mysql.NewConnector(cfg) }, false)
	ours := machineAt(func(cfg *mysql.Config) (driver.Connector, error) {
		return mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: max, Wait: dbtest.Patience})
	}, true)
	p.open = func(dsn int) (*machine, *machine) { return plain(dsn), ours(dsn) }
	t.Cleanup(func() { p.close() })
	return p
}

func schema() (texts []string) {
	texts = []string{
		"CREATE TABLE seq (n INT PRIMARY KEY)", "INSERT INTO seq WITH RECURSIVE s AS (SELECT 0 AS n UNION ALL SELECT n + 1 FROM s WHERE n < 799) SELECT n FROM s",
		"CREATE PROCEDURE shows(n INT) BEGIN SELECT n; SELECT n + 1, 'two'; END",
		"CREATE PROCEDURE sets(n INT) SET @by_procedure = n",
	}
	for i := range actors {
		table := fmt.Sprintf("t%d", i)
		texts = append(texts, "CREATE TABLE "+table+" (id INT AUTO_INCREMENT PRIMARY KEY, v VARCHAR(40), f DOUBLE, d DATETIME(6), b VARBINARY(20), u BIGINT UNSIGNED) ENGINE=InnoDB",
			"CREATE PROCEDURE writes_"+table+"(x VARCHAR(9)) BEGIN INSERT INTO "+table+" (v) VALUES (x); UPDATE "+table+" SET f = 1 WHERE id = 1; END",
			"CREATE PROCEDURE raises_"+table+"() BEGIN INSERT INTO "+table+" (v) VALUES ('raised'); SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END")
	}
	return texts
}

func (p *pair) close() {
	for _, m := range []*machine{p.plain, p.ours} {
		if m != nil {
			_ = m.db.Close() // some connections are gone
		}
	}
	p.plain, p.ours = nil, nil
}

// renew has both handles begin anew with the same tables.
func (p *pair) renew(dsn int) {
	p.Helper()
	p.close()
	p.dsn = dsn
	p.plain, p.ours = p.open(dsn)
	for _, m := range []*machine{p.plain, p.ours} {
		for i := range actors {
			dbtest.Exec(p, p.admin, fmt.Sprintf("TRUNCATE %s.t%d", m.name, i)) // waits for statements out of time, which may still run
		}
	}
	p.dirty = false
}

// run runs a program on both handles, and returns where they differ.
func (p *pair) run(program program) (differs string) {
	p.Helper()
	if p.dirty || p.dsn != program.dsn {
		p.renew(program.dsn)
	}
	p.dirty = true
	p.programs++
	p.plain.begin(program, p.programs)
	p.ours.begin(program, p.programs)
	p.plain.short, p.ours.short = p.short, p.short
	locked := slices.ContainsFunc(program.locks, func(l int) bool { return l > 0 })
	// both has both handles do something; over: the program ends with that.
	both := func(what string, do func(*machine) error) (differs string, over bool) {
		before := len(p.plain.seen)
		_ = do(p.plain)
		err := do(p.ours)
		a, b := p.plain.seen[before:], p.ours.seen[before:]
		shown := fmt.Sprintf("%s\n\tplain: %q\n\tours:  %q", what, a, b)
		switch {
		case err != nil:
			why := b[len(b)-1]
			held := func(never error) bool { return strings.Contains(why, never.Error()) }
			if !locked || slices.ContainsFunc([]error{mysqllock.ErrTimeout, mysqllock.ErrLocked, mysqllock.ErrExhausted, mysqllock.ErrNoAnswer}, held) {
				return shown, true
			}
			p.refused[why]++
			return "", true
		case !slices.Equal(a, b):
			return shown, true
		}
		return "", false
	}
	defer p.plain.drop()
	defer p.ours.drop()
	for _, s := range program.steps {
		if differs, over := both(s.String(), func(m *machine) error { return m.step(s) }); over {
			return differs
		}
	}
	if differs, over := both("end", (*machine).end); over {
		return differs
	}
	for i := range actors {
		differs, over := both("table", func(m *machine) error {
			rows, err := m.db.Query(fmt.Sprintf("SELECT * FROM t%d ORDER BY id", i))
			return m.rows(rows, err, -1)
		})
		if over {
			return differs
		}
	}
	p.dirty = len(p.plain.seen) > 300 // else tables become long
	return ""
}

// shrink leaves out steps as long as the program differs.
func (p *pair) shrink(program program, differs string) (program, string) {
	for size := len(program.steps) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(program.steps); {
			shorter := program
			shorter.steps = slices.Delete(slices.Clone(program.steps), at, at+size)
			if d := p.run(shorter); d != "" {
				program, differs = shorter, d
				continue
			}
			at += size
		}
	}
	return program, differs
}

func TestRandomProgramsSeeWhatTheySeeOnThePlainDriver(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			dbtest.OnServers(t, func(d *dbtest.Database) *dbtest.Database { return d }, func(t *testing.T, d *dbtest.Database) {
				p := newPair(t, d, kind.max, kind.wrapped)
				failed := 0
				for i := range *programs {
					program := random(rand.New(rand.NewPCG(*seed+uint64(i), 0)), 40, i%2 == 1)
					differs := p.run(program)
					// A slow machine may not have sent it by then, or not have woken up before its answer.
					for hurry := 200 * time.Millisecond; differs != "" && program.hurries() && hurry <= 5*time.Second; hurry *= 5 {
						t.Logf("seed %d, differs with %v:\n%v%s", *seed+uint64(i), p.short, program, differs)
						p.short = hurry
						differs = p.run(program)
					}
					if differs == "" {
						p.short = short
						continue
					}
					program, differs = p.shrink(program, differs)
					p.short = short
					t.Errorf("%s, seed %d, differs:\n%v%s", t.Name(), *seed+uint64(i), program, differs)
					if failed++; failed == 5 {
						break
					}
				}
				if testing.Verbose() {
					for why, n := range p.refused {
						t.Log(n, why)
					}
				}
			})
		})
	}
}
