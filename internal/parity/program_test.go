//go:build unix

package parity

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/lockctx"
)

// step is one thing that an actor does. What it needs may not be there, when steps before it were left
// out: then it does nothing, on both handles.
type step struct {
	actor int
	do    string // see steps
	text  string
	args  []any
	needs place
	bare  bool // without the actor's lock context
	how   int  // of several ways
}

func (s step) String() string {
	b := fmt.Sprintf("actor %d: %s", s.actor, s.do)
	if s.bare {
		b += " without the lock context"
	}
	if s.text != "" {
		b += fmt.Sprintf(" %q", s.text)
	}
	if len(s.args) > 0 {
		b += fmt.Sprintf(" %#v", s.args)
	}
	if s.how > 0 {
		b += fmt.Sprintf(" (%d)", s.how)
	}
	return b
}

// place is what a statement needs to run on.
type place int

const (
	anyOne place = iota // any connection
	own                 // one that the actor has to itself: a sql.Conn or a sql.Tx
	asks                // the same, after another statement
	whole               // a sql.Conn
)

// lock is how an actor locks.
type lock struct {
	name string
	opts []lockctx.Option
}

// locks are all kinds of it; the first is none.
var locks = []lock{
	{name: "no lock"},
	{"row", []lockctx.Option{lockctx.Row()}},
	{"lease", []lockctx.Option{lockctx.Lease(10 * time.Second)}},
	{"advisory", []lockctx.Option{lockctx.Advisory()}},
	{"optimistic", []lockctx.Option{lockctx.Optimistic()}},
	{"shared", []lockctx.Option{lockctx.Shared()}},
	{"slots", []lockctx.Option{lockctx.Slots(2)}},
}

// dsns are what handles have in their DSN.
var dsns = []func(*mysql.Config){
	func(*mysql.Config) {},
	func(cfg *mysql.Config) { cfg.InterpolateParams, cfg.ParseTime = true, true },
	func(cfg *mysql.Config) { cfg.ClientFoundRows = true },
}

// program is a list of steps. locks has what each actor locks by.
type program struct {
	dsn   int // of dsns
	locks []int
	steps []step
}

// hurries reports whether one of the steps has next to no time.
func (p program) hurries() bool {
	return slices.ContainsFunc(p.steps, func(s step) bool { return strings.HasSuffix(s.do, "out of time") })
}

func (p program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "DSN %d\n", p.dsn)
	for i, l := range p.locks {
		fmt.Fprintf(&b, "actor %d: %s\n", i, locks[l].name)
	}
	for _, s := range p.steps {
		fmt.Fprintln(&b, s)
	}
	return b.String()
}

const actors = 3

// Statements that may run on any connection. $T is the actor's table, and $n a number.
var anywhere = []string{
	"INSERT INTO $T (v) VALUES ('$n')", "INSERT INTO $T (v) VALUES ('$n'), ('$n'), ('x')", "INSERT IGNORE INTO $T (id, v) VALUES (1, '$n')",
	"REPLACE INTO $T (id, v) VALUES ($n, 'r')", "INSERT INTO $T (id, v) VALUES ($n, 'd') ON DUPLICATE KEY UPDATE v = CONCAT(v, '!')",
	"UPDATE $T SET v = CONCAT(v, 'u') WHERE id <= $n", "UPDATE $T SET v = v", "UPDATE $T SET f = f + 0.25, d = NULL WHERE id = $n", "DELETE FROM $T WHERE id = $n",
	"INSERT INTO $T (id, v) VALUES (1, 'twice')", "SELECT * FROM $T ORDER BY id", "SELECT COUNT(*), MAX(id), SUM(f) FROM $T",
	"SELECT id, v FROM $T WHERE id = $n", "SELECT id FROM $T ORDER BY id FOR UPDATE", "SELECT 1 AS one, 'x', NULL, 2.5, NOW(6) > 0", "SELEC", "SELECT * FROM nowhere",
	"CALL shows($n)", "CALL writes_$T('$n')", "CALL raises_$T()", "SELECT SQL_CALC_FOUND_ROWS id FROM $T ORDER BY id LIMIT 1",
	"SELECT SLEEP(0.001)", "DO 1", "SET @unused_$n = 1", "SELECT s.n, REPEAT('y', 200) FROM seq s ORDER BY s.n", "EXPLAIN SELECT 1",
	"/* a comment */ INSERT INTO $T (v) VALUES ('c') -- $n", "WITH c AS (SELECT $n AS n) SELECT n FROM c", "SHOW TABLES LIKE '$T'",
	"INSERT INTO $T (v) SELECT CONCAT('s', n) FROM seq WHERE n < 3",
}

// The same with arguments.
var withArgs = []struct {
	text string
	args func(r *rand.Rand) []any
}{
	{"INSERT INTO $T (v, f, d, b, u) VALUES (?, ?, ?, ?, ?)", func(r *rand.Rand) []any {
		return []any{fmt.Sprint(r.IntN(9)), float64(r.IntN(9)) / 4, time.Date(2024, 2, 3+r.IntN(9), 4, 5, 6, 7000, time.UTC), []byte{0, 1, byte(r.IntN(256))}, uint64(1)<<63 + uint64(r.IntN(9))}
	}},
	{"INSERT INTO $T (v, f, d, b, u) VALUES (?, ?, ?, ?, ?)", func(r *rand.Rand) []any { return []any{r.IntN(9), true, nil, "text", nil} }},
	{"SELECT ?, id, v, f, d, b, u FROM $T WHERE id <= ? ORDER BY id", func(r *rand.Rand) []any { return []any{"a", r.IntN(9)} }},
	{"SELECT ? + ?", func(r *rand.Rand) []any { return []any{r.IntN(9), float64(r.IntN(3))} }},
	{"UPDATE $T SET v = ? WHERE id = ?", func(r *rand.Rand) []any { return []any{"w", r.IntN(5)} }},
	{"SELECT ?", func(r *rand.Rand) []any { return []any{1, 2} }}, // too many
	{"SELECT ?", func(r *rand.Rand) []any { return []any{struct{}{}} }},
}

// Statements for a connection that the actor has to itself. $S is a name of its own.
var onOwn = []string{
	"SET @$S = $n", "SELECT @$S", "SET @$S := IFNULL(@$S, 0) + 1", "SELECT @$S := $n", "INSERT INTO $T (v) VALUES (@$S)", "SELECT COUNT(*) INTO @$S FROM $T",
	"CREATE TEMPORARY TABLE $S (id INT)", "INSERT INTO $S VALUES ($n)", "SELECT COUNT(*) FROM $S", "DROP TEMPORARY TABLE IF EXISTS $S",
	"CREATE TEMPORARY TABLE IF NOT EXISTS $S (id INT)", "PREPARE $S FROM 'SELECT $n'", "EXECUTE $S", "DEALLOCATE PREPARE $S",
	"SELECT GET_LOCK('$S', 0)", "SELECT RELEASE_LOCK('$S')", "SELECT IS_USED_LOCK('$S') = CONNECTION_ID()", "SELECT CONNECTION_ID() = CONNECTION_ID()",
}

// What asks for what the statement before has left.
var asking = []string{
	"SELECT LAST_INSERT_ID()", "SELECT ROW_COUNT()", "SHOW WARNINGS", "SHOW COUNT(*) WARNINGS", "SELECT FOUND_ROWS()", "SELECT @@warning_count, @@error_count",
	"SELECT LAST_INSERT_ID(), v FROM $T ORDER BY id LIMIT 1", "INSERT INTO $T (v) VALUES (LAST_INSERT_ID())",
}

// Statements for a sql.Conn. The actor takes back what they have set before it closes that.
var onConn = []string{
	"BEGIN", "START TRANSACTION READ ONLY", "COMMIT", "ROLLBACK", "SAVEPOINT $S", "ROLLBACK TO $S", "RELEASE SAVEPOINT $S", "SET autocommit = 0", "SET autocommit = 1",
	"USE $other", "SELECT DATABASE()", "USE $DB", "LOCK TABLES $T WRITE", "UNLOCK TABLES",
	"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", "SELECT @@$isolation",
	"SET time_zone = '+03:00'", "SELECT @@time_zone", "SET SESSION sql_mode = ''", "SELECT @@sql_mode", "SET NAMES latin1", "SELECT @@character_set_client",
	"SET @@session.sql_select_limit = 1", "SET SESSION sql_select_limit = DEFAULT", "COMMIT AND CHAIN", "SET autocommit = 1, time_zone = '+01:00'", "BEGIN WORK", "CALL sets($n)", "SELECT @by_procedure",
}

var undoConn = []string{
	"ROLLBACK", "SET autocommit = 1", "UNLOCK TABLES", "USE $DB", "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SET time_zone = DEFAULT",
	"SET SESSION sql_mode = DEFAULT", "SET NAMES utf8mb4", "SET SESSION sql_select_limit = DEFAULT", "DROP TEMPORARY TABLE IF EXISTS $S", "DO RELEASE_LOCK('$S')", "SET @by_procedure = NULL", "SELECT 1 FROM seq LIMIT 1",
}

// steps are what an actor can do, by how often it does.
var steps = []struct {
	do    string
	often int
}{
	{"exec", 14},
	{"query", 14},
	{"exec with arguments", 4},
	{"query with arguments", 4},
	{"open a sql.Conn", 5},
	{"close the sql.Conn", 2},
	{"begin", 6},
	{"commit", 4},
	{"roll back", 2},
	{"prepare", 3},
	{"exec prepared", 4},
	{"query prepared", 4},
	{"close the statement", 2},
	{"ping", 1},
	{"read one row", 2},
	{"exec out of time", 1},
	{"query out of time", 1},
	{"kill", 1},
	{"cancel the transaction", 1},
	{"new lock context", 3},
	{"acquire", 3},
	{"release", 3},
	{"raw", 1},
}

// random makes a program of n steps; locked: some actors lock.
func random(r *rand.Rand, n int, locked bool) (p program) {
	p.dsn = r.IntN(len(dsns))
	for range actors {
		l := 0
		if locked {
			l = r.IntN(len(locks))
		}
		p.locks = append(p.locks, l)
	}
	weight := 0
	for _, s := range steps {
		weight += s.often
	}
	pick := func(texts []string) string { return texts[r.IntN(len(texts))] }
	for range n {
		s := step{actor: r.IntN(actors), bare: r.IntN(6) == 0, how: r.IntN(8)}
		at := r.IntN(weight)
		for _, kind := range steps {
			if s.do = kind.do; at < kind.often {
				break
			}
			at -= kind.often
		}
		switch s.do {
		case "exec with arguments", "query with arguments":
			w := withArgs[r.IntN(len(withArgs))]
			s.text, s.args = w.text, w.args(r)
		case "exec", "query", "prepare", "read one row":
			if s.do == "prepare" && r.IntN(3) == 0 {
				w := withArgs[r.IntN(len(withArgs))]
				s.text, s.args = w.text, w.args(r)
				break
			}
			switch k := r.IntN(10); {
			case k < 4:
				s.text = pick(anywhere)
			case k < 6:
				s.text, s.needs = pick(onOwn), own
			case k < 8:
				s.text, s.needs = pick(asking), asks
			default:
				s.text, s.needs = pick(onConn), whole
			}
			s.text = strings.ReplaceAll(s.text, "$n", fmt.Sprint(r.IntN(6)))
		}
		p.steps = append(p.steps, s)
	}
	return p
}
