package sqltext

import (
	"database/sql"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// Twenty rows in each.
var tables = []string{
	"CREATE TABLE t (id INT PRIMARY KEY, a INT, b INT, c INT, d VARCHAR(20), UNIQUE KEY c (c), KEY a (a), KEY ab (a, b))",
	"CREATE TABLE u (uid INT PRIMARY KEY, tid INT, v INT, KEY tid (tid))",
	"CREATE TABLE p (pid INT PRIMARY KEY, a INT) PARTITION BY RANGE (pid) (PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN MAXVALUE)",
	"CREATE TABLE `for` (`from` INT PRIMARY KEY, `lock` INT)",
	"INSERT INTO u WITH RECURSIVE n AS (SELECT 1 i UNION ALL SELECT i + 1 FROM n WHERE i < 20) SELECT i, i, i % 2 FROM n",
	"INSERT INTO t SELECT uid, (uid - 1) DIV 5, uid % 5, 21 - uid, CONCAT('it''s\\\\', uid % 3) FROM u",
	"INSERT INTO p SELECT uid, uid FROM u",
	"INSERT INTO `for` SELECT uid, uid FROM u",
	"CREATE VIEW merged AS SELECT id, a FROM t",
}

type scratch struct {
	*dbtest.Database
	db *sql.DB
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	s := &scratch{Database: d, db: d.Open("mysql")}
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

// read returns how many rows a query has.
func read(tx *sql.Tx, query string) (rows int, err error) {
	r, err := tx.Query(query)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	for r.Next() {
		rows++
	}
	return rows, r.Err()
}
