package sqltext

import (
	"cmp"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// These tests ask every server that is found on this machine what Lock's texts
// really lock.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// Twenty rows in each: t has four groups of a, with an index and with another
// that has b as well.
var tables = []string{
	"CREATE TABLE t (id INT PRIMARY KEY, a INT, b INT, c INT, d VARCHAR(20), UNIQUE KEY c (c), KEY a (a), KEY ab (a, b))",
	"CREATE TABLE u (uid INT PRIMARY KEY, tid INT, v INT, KEY tid (tid))",
	"CREATE TABLE p (pid INT PRIMARY KEY, a INT) PARTITION BY RANGE (pid) (PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN MAXVALUE)",
	"CREATE TABLE `for` (`from` INT PRIMARY KEY, `lock` INT)",
	"CREATE TABLE w (wid INT PRIMARY KEY, words VARCHAR(20), FULLTEXT KEY words (words))",
	"INSERT INTO u WITH RECURSIVE n AS (SELECT 1 i UNION ALL SELECT i + 1 FROM n WHERE i < 20) SELECT i, i, i % 2 FROM n",
	"INSERT INTO t SELECT uid, (uid - 1) DIV 5, uid % 5, 21 - uid, CONCAT('it''s\\\\', uid % 3) FROM u",
	"INSERT INTO p SELECT uid, uid FROM u",
	"INSERT INTO w SELECT uid, CONCAT(IF(uid < 4, 'apple ', 'pear '), uid) FROM u",
	"INSERT INTO `for` SELECT uid, uid FROM u",
	"ANALYZE TABLE t", // else by the server, at a time of its own: until then it may read whole indexes
	"CREATE VIEW merged AS SELECT id, a FROM t",
	"CREATE ALGORITHM = TEMPTABLE VIEW copied AS SELECT id, a FROM t",
}

// keys are the tables by their primary keys, which no two share.
var keys = map[string]string{"id": "t", "uid": "u", "pid": "p", "wid": "w", "from": "`for`"}

type scratch struct {
	*dbtest.Database
	reckons bool // MariaDB from 11 on, which chooses the way to read by what it costs
	db      *sql.DB
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	s := &scratch{Database: d, db: d.Open("mysql")}
	major, _, _ := strings.Cut(d.Server.Version(), ".")
	n, err := strconv.Atoi(major)
	dbtest.OK(d.T, err)
	s.reckons = d.MariaDB() && n >= 11
	for _, text := range tables {
		dbtest.Exec(d.T, s.db, text)
	}
	return s
}

// session begins a transaction; end rolls it back.
func (s *scratch) session(isolation sql.IsolationLevel, mode string) (tx *sql.Tx, end func()) {
	s.T.Helper()
	conn, err := s.db.Conn(s.T.Context())
	dbtest.OK(s.T, err)
	dbtest.ExecIn(s.T, s.T.Context(), conn, "SET innodb_lock_wait_timeout = 2, sql_mode = CONCAT(@@GLOBAL.sql_mode, ',"+mode+"')")
	tx, err = conn.BeginTx(s.T.Context(), &sql.TxOptions{Isolation: isolation})
	dbtest.OK(s.T, err)
	return tx, func() {
		_ = tx.Rollback()
		conn.Close()
	}
}

// read returns the rows of a query as text, sorted, and the primary keys in
// them by the names of their columns.
func read(tx *sql.Tx, query string, args ...any) (rows []string, found map[string][]int, err error) {
	r, err := tx.Query(query, args...)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	columns, err := r.Columns()
	if err != nil {
		return nil, nil, err
	}
	found = make(map[string][]int)
	for r.Next() {
		values := make([]sql.NullString, len(columns))
		into := make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := r.Scan(into...); err != nil {
			return nil, nil, err
		}
		rows = append(rows, fmt.Sprint(values))
		for i, column := range columns {
			var id int
			if _, err := fmt.Sscan(values[i].String, &id); err == nil && keys[column] != "" {
				found[column] = append(found[column], id)
			}
		}
	}
	slices.Sort(rows)
	return rows, found, r.Err()
}

// locked tells which rows nobody else can claim now.
func (s *scratch) locked() map[string][]int {
	s.T.Helper()
	tx, err := s.db.Begin()
	dbtest.OK(s.T, err)
	defer tx.Rollback()
	all := make(map[string][]int)
	for key, table := range keys {
		_, free, err := read(tx, "SELECT `"+key+"` FROM "+table+" FORCE INDEX (PRIMARY) FOR UPDATE SKIP LOCKED")
		dbtest.OK(s.T, err)
		for id := 1; id <= 20; id++ {
			if !slices.Contains(free[key], id) {
				all[key] = append(all[key], id)
			}
		}
	}
	return all
}

// claim is a SELECT that Lock accepts.
type claim struct {
	query   string
	args    []any
	mode    string // to add to sql_mode
	flavour tempserver.Flavour
	locks   map[string][]int // rows that the result does not show as such
}

var everyRow = []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}

// In exact ones, nothing but the rows of the result is locked, whatever the
// isolation level.
var exact = []claim{
	{query: "SELECT id FROM t ORDER BY id LIMIT 3"},
	{query: "SELECT * FROM t ORDER BY id DESC LIMIT 3"},
	{query: "SELECT id FROM t WHERE id > ? ORDER BY id LIMIT ?", args: []any{5, 3}},
	{query: "SELECT id FROM t WHERE a = 1 ORDER BY id LIMIT 2"},
	{query: "SELECT id, d FROM t WHERE a = 1 ORDER BY b LIMIT 2"},
	{query: "SELECT a, id FROM t WHERE a = 1"},
	{query: "SELECT id FROM t WHERE c = 5"},
	{query: "SELECT c, id FROM t WHERE c > 5 ORDER BY c LIMIT 2"},
	{query: "SELECT id FROM t WHERE id IN (?, ?)", args: []any{2, 4}},
	{query: "SELECT id FROM t FORCE INDEX FOR ORDER BY (a) WHERE a = 1 ORDER BY a LIMIT 2"},
	{query: "SELECT id, ROW_NUMBER() OVER (ORDER BY id) AS n FROM t WHERE id = 2"},
	{query: "SELECT pid FROM p PARTITION (p0) ORDER BY pid LIMIT 2"},
	{query: "SELECT x.`from` FROM `for` x WHERE x.lock = 3 AND x.from = 3"},
	{query: "SELECT id FROM t WHERE id = (SELECT MAX(tid) FROM u)"},
	{query: "SELECT id FROM t WHERE id IN (1, 2) AND EXISTS (SELECT 1 FROM u WHERE u.tid = t.id)"},
	{query: "SELECT t.id, uid FROM t JOIN u ON u.uid = t.id WHERE t.id = 7"},
	{query: "SELECT id FROM merged ORDER BY id LIMIT 2"},
	{query: "SELECT id FROM t WHERE id = 0"},
	{query: "SELECT id FROM t LIMIT 0"},
	{query: "SELECT COUNT(*), SUM(c) FROM t WHERE a = 1", locks: map[string][]int{"id": {6, 7, 8, 9, 10}}},
	{query: "SELECT COUNT(*) FROM t", locks: map[string][]int{"id": everyRow}},
	{query: "SELECT AVG(c) + 1 x FROM t HAVING x > 0", locks: map[string][]int{"id": everyRow}},
	{query: "SELECT id FROM t ORDER BY id LIMIT 2 ROWS EXAMINED 1000", flavour: tempserver.MariaDB},
	{query: "SELECT id FROM t ORDER BY id FETCH FIRST 2 ROWS ONLY", flavour: tempserver.MariaDB},
}

// In these, more may be locked.
var inexact = []claim{
	{query: "SELECT id FROM t ORDER BY id LIMIT 3 OFFSET 2"},
	{query: "SELECT id FROM t ORDER BY id LIMIT 2, 3"},
	{query: "SELECT id FROM t WHERE id < 4"},
	{query: "SELECT id FROM t WHERE a = 1 ORDER BY c LIMIT 2"},
	{query: "SELECT id FROM t ORDER BY d, id LIMIT 2"},
	{query: "SELECT id FROM t WHERE d LIKE '%1' AND a = 1"},
	{query: "SELECT id FROM t WHERE a = 1 OR c = 20"},
	{query: "SELECT id FROM t WHERE a = 1 HAVING id = 7"},
	{query: "SELECT SQL_CALC_FOUND_ROWS id FROM t ORDER BY id LIMIT 2"},
	{query: "SELECT SQL_BUFFER_RESULT STRAIGHT_JOIN id FROM t ORDER BY id LIMIT 2"},
	{query: "SELECT /*!40001 SQL_NO_CACHE */ id FROM t ORDER BY id LIMIT 2"},
	{query: "SELECT id FROM t USE INDEX () WHERE a = 1"},
	{query: "SELECT id, SUM(b) OVER w AS n FROM t WHERE id < 4 WINDOW w AS (ORDER BY id)"},
	{query: "SELECT id, uid FROM t JOIN u ON tid = id WHERE a = 1 ORDER BY uid LIMIT 2"},
	{query: "SELECT id, uid FROM t, u WHERE tid = id AND a = 1"},
	{query: "SELECT id, uid, v FROM t LEFT JOIN u ON uid = id AND v = 1 WHERE id < 4"},
	{query: "SELECT id, uid, pid FROM (t JOIN u ON uid = id) JOIN (p) ON pid = tid WHERE t.a = 0"},
	{query: "SELECT id, uid FROM {oj t LEFT JOIN u ON uid = id} WHERE id < 3"},
	{query: "SELECT x.id, y.id FROM t x JOIN t y ON y.id = x.id + 1 WHERE x.id < 4"},
	{query: "SELECT id FROM t WHERE id IN (SELECT tid FROM u WHERE v = 1 AND uid < 6)"},
	{query: "SELECT id FROM t WHERE a IN (SELECT x.a FROM t x WHERE x.b = 1) ORDER BY id"},
	{query: "SELECT id, (SELECT v FROM u WHERE tid = id) AS v FROM t WHERE id < 3"},
	{query: "SELECT pid FROM p WHERE a > 8 ORDER BY a LIMIT 3"},
	{query: "SELECT id FROM t WHERE a = @x OR id = 3"},
	{query: "SELECT @x := id AS id FROM t WHERE id < 3"},
	{query: "SELECT id FROM t ORDER BY a FETCH FIRST 2 ROWS WITH TIES", flavour: tempserver.MariaDB},

	// Other spellings, and what the settings of sql_mode say about them.
	{query: "select\tid\nfrom`t`where`id`<3"},
	{query: "SELECT t.id FROM/**/t -- FROM x\nWHERE t.id<3"},
	{query: `SELECT id FROM t WHERE d = 'it\'s\\1'`},
	{query: `SELECT id FROM t WHERE d = "it's\\1"`},
	{query: `SELECT id FROM t WHERE d = 'it''s\1'`, mode: "NO_BACKSLASH_ESCAPES"},
	{query: `SELECT id FROM t WHERE d <> 'x\' AND id < 3`, mode: "NO_BACKSLASH_ESCAPES"},
	{query: `SELECT "id" FROM "t" WHERE "d" = 'it''s\\1'`, mode: "ANSI_QUOTES"},
	{query: "SELECT id, COUNT (*) OVER () n FROM t WHERE id < 3", mode: "IGNORE_SPACE"},
	{query: "SELECT id FROM t `update` WHERE `update`.id < 3"},
	{query: "SELECT id FROM t share WHERE share.id < 3"},
	{query: "SELECT for.from, for.lock FROM `for` WHERE for.lock < 3"},
	{query: "SELECT `from` FROM `for` locked LIMIT 3"},
	{query: "SELECT id FROM t WHERE id = 2.5e0 - .5"},
	{query: "SELECT id FROM t nowait WHERE 'größe' <> '\xff' AND id < 3"},
	{query: "SELECT id FROM t WHERE id < 3 LIMIT 5 /*!80000 */"},
}

// Where comments and semicolons can stand around a text.
var around = []string{"%s", "%s;", "%s -- x", "%s # FOR UPDATE", "%s/* ; */; -- x\n", "/* x */ \n%s\n", "-- it's\n%s--"}

// TestLockClaims: what Lock accepts returns what it returned before, and nobody
// else can claim it.
func TestLockClaims(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, isolation := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelReadCommitted} {
			for i, c := range slices.Concat(exact, inexact) {
				if c.flavour == "" || c.flavour == s.Flavour {
					s.checkClaim(t, c, isolation, i < len(exact))
				}
			}
		}
	})
}

func (s *scratch) checkClaim(t *testing.T, c claim, isolation sql.IsolationLevel, exact bool) {
	t.Helper()
	for i, form := range around {
		query := fmt.Sprintf(form, c.query)
		if len(c.args) == 0 {
			query = strings.ReplaceAll(form, "%s", c.query) // a % is its own
		}
		clause := []string{"FOR UPDATE", "FOR UPDATE NOWAIT", "FOR UPDATE SKIP LOCKED"}[i%3]
		text, err := Lock(query, clause)
		if err != nil {
			t.Errorf("%q: %v", query, err)
			continue
		}
		tx, end := s.session(isolation, c.mode)
		want, _, err := read(tx, query, c.args...)
		if err != nil {
			t.Errorf("%q: %v", query, err)
		}
		rows, found, err := read(tx, text, c.args...)
		if err != nil || !slices.Equal(rows, want) {
			t.Errorf("%q\n got %v, %v\nwant %v", text, rows, err, want)
		}
		locked := s.locked()
		end()
		if found == nil {
			continue
		}
		maps.Copy(found, c.locks)
		for key := range keys {
			for _, id := range found[key] {
				if !slices.Contains(locked[key], id) {
					t.Errorf("%v, %q: %s %d is free, %v are locked", isolation, text, key, id, locked[key])
				}
			}
			slices.Sort(found[key])
			if exact && !slices.Equal(locked[key], slices.Compact(found[key])) {
				t.Errorf("%v, %q: the result has %s %v, %v are locked", isolation, text, key, found[key], locked[key])
			}
		}
	}
}

// TestLockRefusesForCause: with a clause at the end, what Lock refuses is
// rejected by a server, or returns rows that others can claim.
func TestLockRefusesForCause(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, c := range []struct {
			query   string
			flavour tempserver.Flavour // the only server on which it is so
			claimed string             // what somebody might think it claims
			index   bool               // if it reads an index: it may read the rows, and then locks all
		}{
			{query: "SELECT id FROM (SELECT id FROM t WHERE id < 4) d"},
			{query: "SELECT uid, id FROM u, LATERAL (SELECT id FROM t WHERE id = tid LIMIT 1) d WHERE uid < 4", flavour: tempserver.MySQL},
			{query: "WITH x AS (SELECT id FROM t WHERE id < 4) SELECT id FROM x"},
			{query: "(SELECT id FROM t LIMIT 3)", flavour: tempserver.MariaDB},
			{query: "SELECT id FROM t WHERE id < 4 UNION SELECT uid FROM u WHERE uid > 18"},
			{query: "SELECT id, x FROM t, JSON_TABLE('[1]', '$[*]' COLUMNS (x INT PATH '$')) j WHERE id < 4", flavour: tempserver.MySQL},
			{query: "SELECT HIGH_PRIORITY id FROM t LIMIT 3", flavour: tempserver.MySQL},
			{query: "SELECT DISTINCT a FROM t", claimed: "SELECT id FROM t", index: true},
			{query: "SELECT COUNT(DISTINCT a) FROM t", claimed: "SELECT id FROM t", index: true},
			{query: "SELECT a, MIN(b) FROM t GROUP BY a", claimed: "SELECT id FROM t", index: true},
			{query: "SELECT MAX(id) FROM t", claimed: "SELECT id FROM t"},
			{query: "SELECT COUNT(*) FROM w WHERE MATCH (words) AGAINST ('apple')", claimed: "SELECT wid FROM w WHERE wid < 4", flavour: tempserver.MySQL},
			{query: "SELECT id FROM copied WHERE id < 4"}, // Lock can't see that
		} {
			if c.flavour != "" && c.flavour != s.Flavour {
				continue
			}
			if _, err := Lock(c.query, "FOR UPDATE"); err == nil && !strings.Contains(c.query, "copied") {
				t.Errorf("%q is accepted", c.query)
			}
			tx, end := s.session(sql.LevelReadCommitted, "")
			_, claimed, err := read(tx, cmp.Or(c.claimed, c.query))
			dbtest.OK(t, err)
			_, _, rejected := read(tx, c.query+" FOR UPDATE")
			locked := s.locked()
			end()
			free := false
			for key, ids := range claimed {
				for _, id := range ids {
					free = free || !slices.Contains(locked[key], id)
				}
			}
			if reckoned := c.index && s.reckons; rejected == nil && !free && !reckoned {
				t.Errorf("%q FOR UPDATE locks %v, all that is in %v", c.query, locked, claimed)
			}
		}
	})
}

// TestLockShares: a shared lock is on the row where the server has to read the
// row, and on the index alone where that has all columns.
func TestLockShares(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		clauses := []string{"LOCK IN SHARE MODE", bothShare}
		if s.Flavour == tempserver.MariaDB {
			clauses = append(clauses, "LOCK IN SHARE MODE NOWAIT", "LOCK IN SHARE MODE SKIP LOCKED")
		} else {
			clauses = append(clauses, "FOR SHARE", "FOR SHARE NOWAIT", "FOR SHARE SKIP LOCKED")
		}
		for _, clause := range clauses {
			for query, want := range map[string][]int{
				"SELECT * FROM t WHERE a = 1 ORDER BY b LIMIT 2": {6, 10},
				"SELECT * FROM t ORDER BY id LIMIT 2":            {1, 2},
				"SELECT a, b FROM t WHERE a = 1":                 nil, // an index has both
			} {
				text, err := Lock(query, clause)
				dbtest.OK(t, err)
				tx, end := s.session(sql.LevelRepeatableRead, "")
				rows, _, err := read(tx, text)
				dbtest.OK(t, err)
				other, otherEnd := s.session(sql.LevelRepeatableRead, "")
				if again, _, err := read(other, text); err != nil || !slices.Equal(again, rows) {
					t.Errorf("%q returns %v, %v to another", text, again, err)
				}
				otherEnd()
				if got := s.locked()["id"]; !slices.Equal(got, want) {
					t.Errorf("%q locks %v, want %v", text, got, want)
				}
				end()
			}
		}
	})
}

// TestLockWorkers: workers that claim with SKIP LOCKED get all rows, each once.
func TestLockWorkers(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, isolation := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelReadCommitted} {
			s.checkWorkers(t, isolation, "SELECT id FROM t ORDER BY id LIMIT 3")
			s.checkWorkers(t, isolation, "SELECT id FROM t FORCE INDEX (c) ORDER BY c LIMIT 3")
			s.checkWorkers(t, isolation, "SELECT id FROM t FORCE INDEX (PRIMARY) WHERE a < 9 ORDER BY id LIMIT ? -- some", 3)
		}
	})
}

func (s *scratch) checkWorkers(t *testing.T, isolation sql.IsolationLevel, query string, args ...any) {
	t.Helper()
	text, err := Lock(query, "FOR UPDATE SKIP LOCKED")
	dbtest.OK(t, err)
	var mu sync.Mutex
	var all []int
	var workers sync.WaitGroup
	for range 8 { // of three rows each
		tx, end := s.session(isolation, "")
		defer end()
		workers.Go(func() {
			_, found, err := read(tx, text, args...)
			if err != nil {
				t.Errorf("%q: %v", text, err)
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, found["id"]...)
		})
	}
	workers.Wait()
	slices.Sort(all)
	if !slices.Equal(all, everyRow) {
		t.Errorf("%v, %q claims %v", isolation, text, all)
	}
}
