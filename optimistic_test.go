package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wantConflict checks the error of a unit of work that met somebody else's.
func wantConflict(t *testing.T, what string, err error, op string) {
	t.Helper()
	var e *mysqllock.Error
	var by *mysql.MySQLError
	changed := errors.As(err, &by) && by.Number == 1020 // the server may have seen it before the commit
	switch {
	case !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) || !errors.As(err, &e):
		t.Errorf("%s returned %v, want ErrConflict", what, err)
	case e.Op != op && (!changed || e.Op != "exec") || e.Key != "k" || e.Strategy != "optimistic":
		t.Errorf("%s returned op %q, key %q, strategy %q", what, e.Op, e.Key, e.Strategy)
	}
}

func wantVersion(t *testing.T, ctx context.Context, want uint64) {
	t.Helper()
	if version, ok := mysqllock.Version(ctx); version != want || ok != (want != 0) {
		t.Errorf("the version is %d, %v, want %d", version, ok, want)
	}
}

// Texts that the driver sends for the versions of k.
const (
	sqlVersion = "SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(n) */ @@transaction_isolation" + sqlVersionOf
	// on MariaDB
	sqlVersionMaria = "SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(n) */ @@tx_isolation" + sqlVersionOf
	sqlVersionOf    = ", name, token, versioned = 1 AND owner IS NULL," +
		" IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0), owner" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b') LIMIT 1"
	sqlBrief  = "/*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */"
	sqlSettle = "INSERT " + sqlBrief + " INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM `shop`.`mysqllock` r WHERE r.namespace = x'73686f70' AND r.name = x'6b'" +
		" AND (r.versioned = 0 OR r.owner IS NOT NULL) AND NOT (r.owner IS NOT NULL AND r.expires > UTC_TIMESTAMP(6)) FOR UPDATE NOWAIT" +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)"
	sqlStep = "UPDATE `shop`.`mysqllock` SET token = token + 1, expires = UTC_TIMESTAMP(6) WHERE namespace = x'73686f70' AND name = x'6b'"
)

// sqlCompare compares a version of k and sets the next one.
func sqlCompare(version int) string {
	return "INSERT " + sqlBrief + " INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM (SELECT x'6b' AS n, " + fmt.Sprint(version) + " AS v) d" +
		" STRAIGHT_JOIN `shop`.`mysqllock` r ON r.namespace = x'73686f70' AND r.name = d.n" +
		" WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT" +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)"
}

// version expects the question for the version of k.
func (m *mocked) version(a answers, token, settled int) {
	text := sqlVersion
	if a.mariadb() {
		text = sqlVersionMaria
	}
	m.ExpectQuery(text).WillReturnRows(sqlmock.NewRows([]string{"isolation", "name", "token", "settled", "remaining", "owner"}).
		AddRow(a.isolation, "k", token, settled, 0, nil))
}

// compares expects the statement that compares a version of k, with COMMIT where the server
// has a way for that. fits is that version, or 0 if the row of k is locked anyway.
func (m *mocked) compares(a answers, fits int) (together *sqlmock.ExpectedQuery, alone *sqlmock.ExpectedExec) {
	switch {
	case a.mariadb():
		is := ""
		if fits != 0 {
			is = fmt.Sprintf(" AND token = %d AND versioned = 1 AND owner IS NULL", fits)
		}
		return m.ExpectQuery("BEGIN NOT ATOMIC SET @mysqllock_same = 0; " +
			"SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR " +
			strings.Replace(sqlStep, "x'6b'", "UNHEX(CONVERT('6b' USING ascii))", 1) + is + "; SET @mysqllock_same = @mysqllock_same + ROW_COUNT(); " +
			"IF @mysqllock_same = 1 THEN COMMIT; SET @mysqllock_done = 'MARK'; ELSE SELECT 0; END IF; END"), nil
	case !a.apart():
		return m.ExpectQuery(fmt.Sprintf("CALL `shop`.`mysqllock_next2`(x'73686f70', x'6b', %d, NULL, 'MARK') /* versions and COMMIT */", fits)), nil
	case fits == 0:
		return nil, m.ExpectExec(sqlStep)
	}
	return nil, m.ExpectExec(sqlCompare(fits))
}

// compared expects that a version of k is compared, fits, and is committed.
func (m *mocked) compared(a answers, version int) {
	together, alone := m.compares(a, version)
	if together != nil {
		together.WillReturnRows(sqlmock.NewRows(nil)) // no result set
		return
	}
	alone.WillReturnResult(sqlmock.NewResult(0, 2))
	m.expectExec("COMMIT")
}

// refused expects that a version of k does not fit, or that its row is locked.
func (m *mocked) refused(a answers, version int, locked bool) {
	together, alone := m.compares(a, version)
	number := number(3572)
	if a.mariadb() {
		number = &mysql.MySQLError{Number: 1205}
	}
	switch {
	case together != nil && locked:
		together.WillReturnError(number)
	case together != nil:
		together.WillReturnRows(column("0"))
	case locked:
		alone.WillReturnError(number)
	default:
		alone.WillReturnResult(sqlmock.NewResult(0, 0))
	}
	m.expectExec("ROLLBACK")
}

// provided expects the questions for the procedures that compare and commit, and that read
// and begin.
func (m *mocked) provided(a answers) {
	if !a.apart() && !a.mariadb() {
		m.expectQuery("SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f6e65787432'", "1")
		m.expectQuery("SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f7365656e32'", "1")
	}
}

// begun expects that the version of k is read, and a transaction begun, in one statement where
// the server has a way for that.
func (m *mocked) begun(a answers, token int) {
	if m.opens(a, token, true) {
		return
	}
	m.version(a, token, 1)
	m.expectExec("START TRANSACTION")
}

// unsettled is begun where the row is not marked yet.
func (m *mocked) unsettled(a answers, token int) {
	if !m.opens(a, token, false) {
		m.version(a, token, 0)
	}
}

// opens expects the statement that reads the version of k and may begin a transaction. It
// returns false where there is none.
func (m *mocked) opens(a answers, token int, settled bool) bool {
	text := "CALL `shop`.`mysqllock_seen2`(x'73686f70', x'6b')"
	switch {
	case a.apart():
		return false
	case a.mariadb():
		text = "BEGIN NOT ATOMIC SELECT MAX(token) INTO @mysqllock_token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = UNHEX(CONVERT('6b' USING ascii))" +
			" AND versioned = 1 AND owner IS NULL AND @@tx_isolation <> 'READ-UNCOMMITTED' LIMIT 1;" +
			" IF @mysqllock_token IS NOT NULL THEN START TRANSACTION; SELECT @mysqllock_token; END IF; END"
	}
	if settled {
		m.expectQuery(text, fmt.Sprint(token))
	} else {
		m.ExpectQuery(text).WillReturnRows(sqlmock.NewRows(nil)) // no result set
		m.version(a, token, 0)
	}
	return true
}

func TestMockOptimistic(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{Strategy: "optimistic"})
		// A transaction; the row is there, and not marked.
		m.setUp(a)
		m.exist(sqlExists, "k")
		m.provided(a)
		m.unsettled(a, 4)
		m.ExpectExec(sqlSettle).WillReturnResult(sqlmock.NewResult(0, 2))
		m.begun(a, 5)
		m.expectExec(sqlUpdate, 3, 42)
		m.compared(a, 5)
		tx := m.begin()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, nil)
		m.want(tx.Commit(), nil)

		// Reads and a write of one unit of work, then a write alone, in a lock context of
		// its own.
		m.version(a, 6, 1)
		m.expectQuery(sqlRead, "3")
		m.expectQuery(sqlRead, "3")
		for version := range 2 {
			if version > 0 {
				m.begun(a, 7)
			} else {
				m.expectExec("START TRANSACTION")
			}
			m.expectExec(sqlUpdate, 2, 42)
			m.compared(a, 6+version)
		}
		var stock int
		for range 2 {
			m.want(m.db.QueryRowContext(m.ctx, sqlRead).Scan(&stock), nil)
		}
		for _, ctx := range []context.Context{m.ctx, lockctx.With(context.Background(), "k")} {
			_, err = m.db.ExecContext(ctx, sqlUpdate, 2, 42)
			m.want(err, nil)
		}

		// What only reads, in a transaction.
		m.begun(a, 8)
		m.expectQuery(sqlRead, "2")
		m.expectExec("COMMIT")
		tx = m.begin()
		m.want(tx.QueryRowContext(m.ctx, sqlRead).Scan(&stock), nil)
		m.want(tx.Commit(), nil)

		// A conflict, and the same of a row that somebody has locked.
		for _, held := range []bool{false, true} {
			ctx := lockctx.With(context.Background(), "k")
			m.version(a, 8, 1)
			m.expectQuery(sqlRead, "2")
			m.expectExec("START TRANSACTION")
			m.expectExec(sqlUpdate, 1, 42)
			m.refused(a, 8, held)
			m.want(m.db.QueryRowContext(ctx, sqlRead).Scan(&stock), nil)
			for range 3 { // the others send nothing
				_, err = m.db.ExecContext(ctx, sqlUpdate, 1, 42)
				wantConflict(t, "Exec", err, "commit")
				if errors.Is(err, mysqllock.ErrLocked) != held {
					t.Errorf("held %v: %v", held, err)
				}
			}
		}

		// With a version that was given nothing is asked.
		given := lockctx.With(context.Background(), "k", lockctx.IfVersion(9))
		m.expectQuery(sqlRead, "2")
		m.expectExec("START TRANSACTION")
		m.expectExec(sqlUpdate, 1, 42)
		m.compared(a, 9)
		m.want(m.db.QueryRowContext(given, sqlRead).Scan(&stock), nil)
		_, err = m.db.ExecContext(given, sqlUpdate, 1, 42)
		m.want(err, nil)

		// After a statement that has failed the unit of work goes on, with the
		// version that it has set.
		ctx := lockctx.With(context.Background(), "k")
		m.version(a, 10, 1)
		m.expectQuery(sqlRead, "1")
		m.expectExec("START TRANSACTION")
		m.ExpectExec(sqlUpdate).WithArgs(1, 1).WillReturnError(number(1062))
		m.compared(a, 10)
		m.expectExec("START TRANSACTION")
		m.expectExec(sqlUpdate, 1, 42)
		m.compared(a, 11)
		m.want(m.db.QueryRowContext(ctx, sqlRead).Scan(&stock), nil)
		if _, err = m.db.ExecContext(ctx, sqlUpdate, 1, 1); err == nil {
			t.Error("no error")
		}
		_, err = m.db.ExecContext(ctx, sqlUpdate, 1, 42)
		m.want(err, nil)
		wantVersion(t, ctx, 12)
	})
}

// TestMockStep has a row lock on a key that others keep optimistically.
func TestMockStep(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.setUp(a)
		m.exist(sqlExists, "k")
		for i, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback, (*sql.Tx).Commit} {
			m.tells(a, 7, 5, nil, 1, "0", "0")
			if i < 2 {
				m.expectExec(sqlUpdate, 3, 42)
			}
			switch i {
			case 0:
				if m.provided(a); a.apart() {
					m.expectExec(sqlStep)
					m.ExpectCommit()
					break
				}
				m.compared(a, 0)
			case 1:
				m.rollback(a)
			default:
				m.commit(a)
			}
			tx := m.begin()
			if i < 2 {
				_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
				m.want(err, nil)
			}
			m.want(end(tx), nil)
		}
	})
}

// TestRecordOptimisticDo has Do compare, and run again what met somebody else.
func TestRecordOptimisticDo(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		version := func(n int) {
			r.replying(sqlVersion, "REPEATABLE-READ", "k", int64(n), int64(1), int64(0), nil)
		}
		version(5)
		work := func(ctx context.Context) error {
			if err := r.read(ctx, r.db); err != nil {
				return err
			}
			return r.write(ctx, r.db)
		}
		r.is(mysqllock.Do(ctx, r.db, "k", work, lockctx.Optimistic()), nil)
		unit := func(version int, end string) []string {
			return []string{
				"control1: " + sqlVersion,
				"session1: SELECT stock FROM p",
				"session1: UPDATE p SET stock = 1",
				"session1: " + sqlCompare(version),
				"session1: " + end,
			}
		}
		r.want(append([]string{"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes}, unit(5, "COMMIT")...)...)

		// Somebody is in the way twice.
		tries := 0
		for v := range 2 {
			r.failing(sqlCompare(6+v), number(3572))
		}
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
			tries++
			if now, _ := mysqllock.Version(ctx); now != uint64(4+tries) {
				t.Errorf("the version of try %d is %d", tries, now)
			}
			version(5 + tries)
			return work(ctx)
		}, lockctx.Optimistic(), lockctx.Retry(5)), nil)
		r.want(slices.Concat(unit(5, "COMMIT"))...)
		tries = 1
		again := func() error {
			return mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
				tries++
				version(5 + tries)
				return work(ctx)
			}, lockctx.Optimistic(), lockctx.Retry(2))
		}
		r.is(again(), nil)
		r.want(slices.Concat(unit(6, "ROLLBACK"), unit(7, "ROLLBACK"), unit(8, "COMMIT"))...)

		// As often as it may, and not at all with a version that was given.
		for v := range 3 {
			r.failing(sqlCompare(9+v), number(3572))
		}
		tries = 4
		r.is(again(), mysqllock.ErrConflict)
		r.want(slices.Concat(unit(9, "ROLLBACK"), unit(10, "ROLLBACK"), unit(11, "ROLLBACK"))...)
		r.is(mysqllock.Do(ctx, r.db, "k", work, lockctx.IfVersion(9), lockctx.Retry(5)), mysqllock.ErrConflict)
		r.want(unit(9, "ROLLBACK")[1:]...)
		// A function that fails is not compared, one that only reads neither.
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error { _ = work(ctx); return errFake }, lockctx.Optimistic(), lockctx.Retry(5)), errFake)
		r.want("control1: "+sqlVersion, "session1: SELECT stock FROM p", "session1: UPDATE p SET stock = 1", "session1: ROLLBACK")
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error { return r.read(ctx, r.db) }, lockctx.Optimistic()), nil)
		r.want("control1: "+sqlVersion, "session1: SELECT stock FROM p", "session1: COMMIT")
	})
}
