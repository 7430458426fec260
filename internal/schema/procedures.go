package schema

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/server"
)

// A Procedure does on MySQL, in one round trip, what is several statements. MariaDB needs
// none: it runs the same as an anonymous block. It has the rights of its caller. A comment behind a
// CALL is for those who look for a COMMIT, or a lock, in what the server is doing.
type Procedure struct {
	table  Table
	number int    // in a Registry
	suffix string // of the name; its digit is the version: a program that needs another version does not find this one, whose answers may mean something else
	text   func(Table) (parameters, body string)
}

// ours is the comment of our procedures. A procedure with the same name and another comment
// belongs to someone else: it is not called, and not removed.
const ours = "mysqllock"

// procedures is how many there are.
const procedures = 10

// Procedures returns all that the driver calls.
func (t Table) Procedures() []Procedure {
	return []Procedure{
		t.LockProcedure(), t.CommitProcedure(), t.WaitProcedure(),
		t.BeginProcedure(), t.VersionsProcedure(), t.TakeProcedure(), t.GiveProcedure(), t.CommitIfProcedure(),
		t.PassProcedure(), t.NamedProcedure(),
	}
}

// String returns the quoted name, for SQL text.
func (p Procedure) String() string { return p.table.quoted(p.table.name + p.suffix) }

// DDL is the statement that makes the procedure.
func (p Procedure) DDL() string {
	parameters, body := p.text(p.table)
	return "CREATE PROCEDURE " + p.String() + "(" + parameters + ")\nSQL SECURITY INVOKER COMMENT '" + ours + "'\nBEGIN\n" + body + "END"
}

// Provide reports whether the procedure is there or, with auto, could be made. What the server
// refuses is no error: there is another way for whatever a procedure does. The connection must
// have no open transaction, since DDL would commit it.
func (p Procedure) Provide(ctx context.Context, conn driver.Conn, auto bool) (there bool, err error) {
	rows, err := server.Query(ctx, conn, p.find())
	switch {
	case server.Number(err) != 0:
		return false, nil
	case err != nil:
		return false, err
	case len(rows) > 0:
		return rows[0][0] == "1", nil
	}
	return p.make(ctx, conn, auto)
}

// Lack is a procedure that the account cannot call.
type Lack struct {
	Procedure
	Why    string
	Denied bool // it needs EXECUTE, if the procedure exists: the server does not say whether it does
}

// Lacks returns the procedures that the account cannot call. With auto it makes those that are
// missing, as Provide does. Each that is there is called without its parameters, which the server
// refuses before it runs anything.
func (t Table) Lacks(ctx context.Context, conn driver.Conn, auto bool) ([]Lack, error) {
	var lacks []Lack
	for _, p := range t.Procedures() {
		l, err := p.lack(ctx, conn, auto)
		if server.Number(err) == 0 && err != nil {
			return nil, err
		}
		if err != nil {
			l.Why = err.Error()
		}
		if l.Why != "" {
			l.Procedure = p
			lacks = append(lacks, l)
		}
	}
	return lacks, nil
}

// lack says why the procedure cannot be called; Why is "" if it can.
func (p Procedure) lack(ctx context.Context, conn driver.Conn, auto bool) (Lack, error) {
	rows, err := server.Query(ctx, conn, p.find())
	if err != nil {
		return Lack{}, err
	}
	if len(rows) > 0 && rows[0][0] != "1" {
		return Lack{Why: "another procedure has this name; drop that, or use another lock table"}, nil
	}
	why := "not there; with lockSchema=auto the driver makes each when it first needs it, if its account may"
	if len(rows) == 0 && auto {
		err := server.Exec(ctx, conn, p.DDL())
		if server.Number(err) == 0 && err != nil {
			return Lack{}, err
		}
		if err != nil {
			why = "could not be made: " + err.Error()
		}
	}
	_, err = server.Query(ctx, conn, "CALL "+p.String()+"()")
	const wrongArguments, noRoutine = 1318, 1305
	switch n := server.Number(err); {
	case n == wrongArguments:
		return Lack{}, nil
	case n == noRoutine:
		return Lack{Why: why}, nil
	case server.Denied(err) && len(rows) > 0:
		return Lack{Why: "no privilege EXECUTE", Denied: true}, nil
	case server.Denied(err):
		return Lack{Why: "no privilege EXECUTE, and the server does not say whether it exists", Denied: true}, nil
	}
	return Lack{}, err
}

// find asks whether the procedure is ours; the answer is empty if there is none.
func (p Procedure) find() string {
	return "SELECT ROUTINE_COMMENT = '" + ours + "' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND " +
		p.table.where("ROUTINE_SCHEMA", "ROUTINE_NAME", p.table.name+p.suffix)
}

// make makes the procedure with auto, as Provide does.
func (p Procedure) make(ctx context.Context, conn driver.Conn, auto bool) (there bool, err error) {
	if !auto {
		return false, nil
	}
	err = server.Exec(ctx, conn, p.DDL())
	const alreadyExists = 1304 // another process was quicker
	switch n := server.Number(err); {
	case err == nil, n == alreadyExists:
		return true, nil
	case n != 0:
		return false, nil
	}
	return false, err
}

const ofKey = " WHERE namespace = p_namespace AND name = p_name"

// LockProcedure begins a transaction and locks one key in it, unless p_name is NULL. If the row
// has an owner, the procedure rolls back by itself: else a caller that is stopped before it has
// read the answer would keep the lease's holder from renewing. Unless p_seconds is 0, the
// connection has the limit of [LimitSilence] from then on, whatever the answer is.
//
// If the row is [Quiet], the procedure returns no result set, which saves a third of the
// server's work for the call (measured on MySQL 9.7). With a p_quiet of NULL it always
// returns one.
func (t Table) LockProcedure() Procedure { return Procedure{t, 0, "_lock2", lockText} }

func lockText(t Table) (parameters, body string) {
	from := " FROM " + t.String() + ofKey + " "
	look := "SELECT " + Quiet("p_quiet") + " INTO v_quiet\n     " + from
	return "p_namespace VARBINARY(255), p_name VARBINARY(255), p_shared BOOL, p_quiet BIGINT UNSIGNED,\n" +
			"  p_seconds INT UNSIGNED, p_level INT, p_reads BOOL",
		"  DECLARE v_quiet BOOL;\n" +
			"  IF p_seconds > 0 THEN " + LimitSilence("p_seconds") + "; END IF;\n" +
			starts() +
			"  IF p_name IS NULL THEN SET v_quiet = TRUE;\n" +
			"  ELSEIF p_shared THEN\n    " + look + "FOR SHARE NOWAIT;\n" +
			"  ELSE\n    " + look + "FOR UPDATE NOWAIT;\n" +
			"  END IF;\n" +
			"  IF v_quiet IS NOT TRUE THEN BEGIN\n" +
			"    DECLARE v_token BIGINT UNSIGNED;\n" +
			"    DECLARE v_owner VARBINARY(255);\n" +
			"    DECLARE v_versioned BOOL;\n" +
			"    SELECT token, owner, versioned INTO v_token, v_owner, v_versioned\n" +
			"     " + from + "FOR SHARE;\n" +
			"    IF v_owner IS NOT NULL THEN ROLLBACK; END IF;\n" +
			"    SELECT CONNECTION_ID(), v_token, v_owner, v_versioned, " + server.WritableColumns + " FROM DUAL WHERE v_token IS NOT NULL;\n" +
			"  END; END IF;\n"
}

// Levels are the isolation levels with which a procedure or a block begins a transaction, as SET
// TRANSACTION has them.
var Levels = map[driver.IsolationLevel]string{
	driver.IsolationLevel(sql.LevelDefault):         "",
	driver.IsolationLevel(sql.LevelReadUncommitted): "READ UNCOMMITTED",
	driver.IsolationLevel(sql.LevelReadCommitted):   "READ COMMITTED",
	driver.IsolationLevel(sql.LevelRepeatableRead):  "REPEATABLE READ",
	driver.IsolationLevel(sql.LevelSerializable):    "SERIALIZABLE",
}

// starts begins a transaction with the level p_level, a number of [database/sql]'s, and READ ONLY if
// p_reads is true.
func starts() string {
	var levels strings.Builder
	for _, level := range slices.Sorted(maps.Keys(Levels)) {
		if name := Levels[level]; name != "" {
			fmt.Fprintf(&levels, "    WHEN %d THEN SET TRANSACTION ISOLATION LEVEL %s;\n", level, name)
		}
	}
	return "  CASE p_level\n" + levels.String() +
		"    ELSE BEGIN END;\n" +
		"  END CASE;\n" +
		"  IF p_reads THEN START TRANSACTION READ ONLY; ELSE START TRANSACTION; END IF;\n"
}

// WaitProcedure waits for row locks. It locks the rows of p_keys one after the other, each a
// name in hexadecimal and whether it is shared, and tells of each what LockProcedure tells.
// The first that has an owner is the last: the transaction is rolled back on the server, at
// once, since the row would keep the lease's holder from renewing while the caller does not
// answer. Any error but that of a KILL rolls it back, too.
//
// What waits is a statement that begins with p_mark, for KILL. MySQL bounds no statement
// within a procedure, but the wait for a row, by p_seconds. A KILL leaves the session's
// own limit in @mysqllock_limit, which is NULL otherwise.
func (t Table) WaitProcedure() Procedure { return Procedure{t, 2, "_wait2", waitText} }

func waitText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_keys LONGTEXT CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4, p_seconds INT UNSIGNED",
		"  DECLARE v_key INT DEFAULT 0;\n" +
			"  DECLARE v_keys JSON DEFAULT p_keys;\n" +
			"  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN\n" +
			"    ROLLBACK;\n" +
			"    SET SESSION innodb_lock_wait_timeout = COALESCE(@mysqllock_limit, @@SESSION.innodb_lock_wait_timeout), @mysqllock_limit = NULL;\n" +
			"    RESIGNAL;\n" +
			"  END;\n" +
			"  SET @mysqllock_limit = @@SESSION.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = p_seconds, @mysqllock_owner = NULL;\n" +
			"  WHILE v_key < JSON_LENGTH(v_keys) AND @mysqllock_owner IS NULL DO\n" +
			"    SET @mysqllock_token = NULL, @mysqllock_text = CONCAT(_utf8mb4'/* mysqllock ', p_mark, _utf8mb4' */ SELECT token, owner, versioned INTO @mysqllock_token, @mysqllock_owner, @mysqllock_versioned FROM ', _utf8mb4 " + Literal(t.String()) + ", _utf8mb4' WHERE namespace = x''', LOWER(HEX(p_namespace)),\n" +
			"      _utf8mb4''' AND name = x''', JSON_UNQUOTE(JSON_EXTRACT(v_keys, CONCAT(_utf8mb4'$[', v_key, _utf8mb4'][0]'))),\n" +
			"      IF(JSON_EXTRACT(v_keys, CONCAT(_utf8mb4'$[', v_key, _utf8mb4'][1]')) = 1, _utf8mb4''' FOR SHARE', _utf8mb4''' FOR UPDATE'));\n" +
			"    PREPARE mysqllock_wait FROM @mysqllock_text;\n" +
			"    EXECUTE mysqllock_wait;\n" +
			"    DEALLOCATE PREPARE mysqllock_wait;\n" +
			"    IF @mysqllock_owner IS NOT NULL THEN ROLLBACK; END IF;\n" +
			"    SELECT CONNECTION_ID(), @mysqllock_token, @mysqllock_owner, @mysqllock_versioned, " + server.WritableColumns + " FROM DUAL WHERE @mysqllock_token IS NOT NULL;\n" +
			"    SET v_key = IF(@mysqllock_token IS NULL, JSON_LENGTH(v_keys), v_key + 1);\n" +
			"  END WHILE;\n" +
			"  SET SESSION innodb_lock_wait_timeout = @mysqllock_limit, @mysqllock_limit = NULL;\n"
}

// CommitProcedure commits under leases. p_leases is a list of names, tokens and owners; names
// and owners are in hexadecimal. If all of the leases are held, the procedure commits and
// returns no result set; else it leaves the transaction open and answers 0. It waits for no
// lock. For a caller that gets no answer, because of a KILL, it sets @mysqllock_done to p_mark,
// unless that is NULL, after COMMIT; see [server.HasCommitted]. The list has an explicit character
// set: without one it would have that of the maker or the caller of the procedure, which may be
// binary.
func (t Table) CommitProcedure() Procedure { return Procedure{t, 1, "_done3", commitText} }

func commitText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_leases LONGTEXT CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4",
		"  DECLARE v_held INT;\n" +
			"  SELECT /*+ SET_VAR(sql_big_selects = 1) */ COUNT(*) INTO v_held FROM JSON_TABLE(p_leases, _utf8mb4'$[*]' COLUMNS (n VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[0]', k BIGINT UNSIGNED PATH _utf8mb4'$[1]', o VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[2]')) d\n" +
			"    STRAIGHT_JOIN " + t.String() + " r ON r.namespace = p_namespace AND r.name = UNHEX(d.n)\n" +
			"    WHERE r.token = d.k AND r.owner = UNHEX(d.o) AND " + Lasts("r.") + " FOR SHARE OF r NOWAIT;\n" +
			"  IF v_held = JSON_LENGTH(p_leases) THEN " + commits + "ELSE SELECT 0; END IF;\n"
}

// TakeProcedure takes a lease and begins a transaction. The lease is committed before the
// caller's transaction begins, since it is independent of that. The procedure answers with the
// new token, or with 0 and with how long the lease that is in the way still lasts. It waits
// for no row.
//
// A lease's life is told by the session's clock. If the application has set that clock, it
// stands still, and the procedure grants nothing. The insert always meets the row that is
// locked: an account that could not renew the lease, which is an insert of that kind, is
// not granted it. The wake-up lock p_wake must be free if p_turn is set; p_poller is the
// name under which a poller announces itself, NULL to ignore it.
func (t Table) TakeProcedure() Procedure { return Procedure{t, 5, "_take1", takeText} }

func takeText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_name VARBINARY(255), p_owner VARBINARY(255), p_ttl BIGINT UNSIGNED,\n" +
			"  p_wake VARCHAR(64) CHARACTER SET utf8mb4, p_turn BOOL, p_poller VARCHAR(64) CHARACTER SET utf8mb4, p_level INT, p_reads BOOL",
		"  DECLARE v_token, v_left, v_granted BIGINT UNSIGNED DEFAULT NULL;\n" +
			"  DECLARE v_began DATETIME(6) DEFAULT NOW(6);\n" +
			"  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;\n" +
			"  START TRANSACTION READ WRITE;\n" +
			"  SELECT token, " + Remaining("") + " INTO v_token, v_left FROM " + t.String() + ofKey + " FOR UPDATE SKIP LOCKED;\n" +
			"  IF v_left = 0 AND NOW(6) <> v_began AND (p_poller IS NULL OR IS_FREE_LOCK(p_poller)) THEN\n" +
			"    IF IF(IS_USED_LOCK(p_wake) <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK(p_wake, 0), 0)) OR NOT p_turn THEN\n" +
			"      INSERT INTO " + t.String() + " (namespace, name) VALUES (p_namespace, p_name)\n" +
			"       ON DUPLICATE KEY UPDATE token = token + 1, owner = p_owner, expires = UTC_TIMESTAMP(6) + INTERVAL p_ttl MICROSECOND;\n" +
			"      SET v_granted = v_token + 1;\n" +
			"    END IF;\n" +
			"  END IF;\n" +
			"  IF v_granted IS NULL THEN ROLLBACK;\n" +
			"  ELSE\n" +
			"    COMMIT;\n" +
			starts() +
			"  END IF;\n" +
			"  SELECT COALESCE(v_granted, 0), COALESCE(v_left, 0);\n"
}

// GiveProcedure checks a lease, releases it and commits. The release is a part of the
// transaction that ends, so that both are on the disk with one COMMIT. If the lease is held,
// the procedure commits, frees the wake-up lock and returns no result set; else it leaves the
// transaction open and answers 0. p_mark is that of CommitProcedure. It waits for no lock.
func (t Table) GiveProcedure() Procedure { return Procedure{t, 6, "_give3", giveText} }

func giveText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_name VARBINARY(255), p_token BIGINT UNSIGNED, p_owner VARBINARY(255),\n" +
			"  p_wake VARCHAR(64) CHARACTER SET utf8mb4, p_mark VARCHAR(64) CHARACTER SET utf8mb4",
		"  DECLARE v_held BOOL DEFAULT FALSE;\n" +
			"  SELECT " + Lasts("") + " INTO v_held FROM " + t.String() + ofKey + " AND token = p_token AND owner = p_owner FOR UPDATE NOWAIT;\n" +
			"  IF v_held THEN\n" +
			"    UPDATE " + t.String() + " SET " + Released + ofKey + ";\n" +
			"    " + commits + "\n" +
			"    DO RELEASE_LOCK(p_wake);\n" +
			"  ELSE SELECT 0;\n" +
			"  END IF;\n"
}

// BeginProcedure reads a version and begins a transaction. It reads the row outside of any
// transaction, so that the transaction's snapshot is not older than the caller's first read.
// If every commit under the key changes the version, as [Prepared] says, and the session
// reads what is committed, the procedure begins the transaction and then answers with the
// token. Else there is no result set, and no transaction.
func (t Table) BeginProcedure() Procedure { return Procedure{t, 3, "_seen2", beginText} }

func beginText(t Table) (parameters, body string) {
	read, begin := t.begins("token", "v_token", ofKey, "@@transaction_isolation", "")
	return "p_namespace VARBINARY(255), p_name VARBINARY(255)",
		"  DECLARE v_token BIGINT UNSIGNED;\n" +
			"  " + read + "\n" +
			"  " + begin + "\n"
}

// BeginBlock is the same for MariaDB, with a question mark for the name. The variable is the
// session's, since sql_mode ORACLE declares others elsewhere; MAX sets it also if there is no row.
func (t Table) BeginBlock(namespace string) string {
	read, begin := t.begins("MAX(token)", "@mysqllock_token", " WHERE "+Row("", namespace, Unhex), "@@tx_isolation", " LIMIT 1")
	return "BEGIN NOT ATOMIC " + read + " " + begin + " END"
}

// begins is the body of both.
func (t Table) begins(version, token, where, isolation, limit string) (read, begin string) {
	return "SELECT " + version + " INTO " + token + " FROM " + t.String() + where + " AND " + Prepared + " AND " + isolation + " <> 'READ-UNCOMMITTED'" + limit + ";",
		"IF " + token + " IS NOT NULL THEN START TRANSACTION; SELECT " + token + "; END IF;"
}

// VersionsProcedure compares versions, sets the next ones, and commits. p_name and p_version
// are for one key; for several, p_rows is a list of names, in hexadecimal, and versions. A
// version of 0 is for a row that the transaction has locked. If all rows have their versions,
// the procedure adds one to each, commits, and returns no result set; else it answers 0 and
// leaves the transaction open, in which it may have changed some of them. It waits for no row,
// and for a second while the table's definition is being changed. p_mark is that of
// CommitProcedure.
//
// UPDATE has no NOWAIT, so one row is locked before. The INSERT for several always hits the
// rows that it has read: it counts two for each, with and without clientFoundRows in the DSN.
func (t Table) VersionsProcedure() Procedure { return Procedure{t, 4, "_next3", versionsText} }

func versionsText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_name VARBINARY(255), p_version BIGINT UNSIGNED, p_rows LONGTEXT CHARACTER SET utf8mb4,\n" +
			"  p_mark VARCHAR(64) CHARACTER SET utf8mb4",
		"  DECLARE v_same BOOL;\n" +
			"  IF p_rows IS NULL THEN\n" +
			"    SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ p_version = 0 OR token = p_version AND " + Prepared + " INTO v_same\n" +
			"      FROM " + t.String() + ofKey + " FOR UPDATE NOWAIT;\n" +
			"    IF v_same THEN UPDATE " + t.String() + " SET " + Next + ofKey + "; END IF;\n" +
			"  ELSE\n" +
			"    INSERT /*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */ INTO " + t.String() + " (namespace, name, token, expires)\n" +
			"      SELECT r.namespace, r.name, r.token, r.expires FROM JSON_TABLE(p_rows, _utf8mb4'$[*]' COLUMNS (n VARCHAR(510) CHARACTER SET utf8mb4 PATH _utf8mb4'$[0]', v BIGINT UNSIGNED PATH _utf8mb4'$[1]')) d\n" +
			"      STRAIGHT_JOIN " + t.String() + " r ON r.namespace = p_namespace AND r.name = UNHEX(d.n)\n" +
			"      WHERE d.v = 0 OR r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE OF r NOWAIT\n" +
			"      ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6);\n" +
			"    SET v_same = ROW_COUNT() = 2 * JSON_LENGTH(p_rows);\n" +
			"  END IF;\n" +
			"  IF v_same THEN " + commits + "ELSE SELECT 0; END IF;\n"
}

// NamedProcedure acquires a named lock and begins a transaction if nobody has the lock. It
// answers 1 then, else 0; or NULL if p_may, which the caller's statement evaluates, is not true,
// or if the server does not say who has it. p_identity
// is a named lock that only this connection ever has. The connection has the limit of
// [LimitSilence] from then on. The procedure needs no privilege but that
// to execute it.
func (t Table) NamedProcedure() Procedure { return Procedure{t, 9, "_named1", namedText} }

func namedText(Table) (parameters, body string) {
	return "p_may BOOL, p_lock VARCHAR(64) CHARACTER SET utf8mb4, p_identity VARCHAR(64) CHARACTER SET utf8mb4, p_seconds INT UNSIGNED",
		"  DECLARE v_got BOOL DEFAULT IF(p_may, GET_LOCK(p_lock, 0), NULL);\n" +
			"  IF v_got THEN\n" +
			"    DO GET_LOCK(p_identity, 0);\n" +
			"    " + LimitSilence("p_seconds") + ";\n" +
			"    START TRANSACTION;\n" +
			"  END IF;\n" +
			"  SELECT v_got;\n"
}

// LimitSilence is the statement that has the server end the connection when it has been silent
// for so many seconds, at the latest, until Unlimited is set. Meanwhile [server.LimitSilence] may
// set another limit, for which it has another variable, and take that back.
func LimitSilence(seconds string) string {
	return "SET @mysqllock_waits = @@SESSION.wait_timeout, SESSION wait_timeout = LEAST(@@SESSION.wait_timeout, " + seconds + ")"
}

// Unlimited is the assignment of what was set before [LimitSilence], if that has set anything.
// A variable that was never set is a text, which a server refuses here.
const Unlimited = "SESSION wait_timeout = COALESCE(CAST(@mysqllock_waits AS UNSIGNED), @@SESSION.wait_timeout), @mysqllock_waits = NULL"

// unlimits sets Unlimited in a procedure. Where there is no limit it sets no variable: a MySQL
// Router shares no connection that has user variables.
const unlimits = "IF @mysqllock_waits IS NOT NULL THEN SET " + Unlimited + "; END IF; "

// commits ends a procedure's transaction, and with it the limit of its connection. The mark is the
// last: whoever finds it knows that all of this is done.
const commits = "COMMIT; " + unlimits + "IF p_mark IS NOT NULL THEN SET @mysqllock_done = p_mark; END IF; "

// CommitIfProcedure commits if p_held is true, which the caller's statement evaluates, and
// returns no result set; else it leaves the transaction open and answers 0. After the COMMIT it
// gives back the named locks of NamedProcedure, unless p_lock is NULL. p_mark is that of
// CommitProcedure; with NULL the procedure rolls back. After the transaction it takes back the
// limit of [LimitSilence]. It needs no privilege but that to execute it.
func (t Table) CommitIfProcedure() Procedure { return Procedure{t, 7, "_held3", commitIfText} }

func commitIfText(Table) (parameters, body string) {
	return "p_held BOOL, p_mark VARCHAR(64) CHARACTER SET utf8mb4, p_lock VARCHAR(64) CHARACTER SET utf8mb4, p_identity VARCHAR(64) CHARACTER SET utf8mb4",
		"  IF p_mark IS NULL THEN ROLLBACK; " + unlimits + "\n" +
			"  ELSEIF p_held THEN\n" +
			"    " + commits + "\n" +
			"    IF p_lock IS NOT NULL THEN DO RELEASE_LOCK(p_lock), RELEASE_LOCK(p_identity); END IF;\n" +
			"  ELSE SELECT 0;\n" +
			"  END IF;\n"
}

// PassProcedure commits, and then locks one key in a new transaction for whoever comes next.
// If the row is locked and [Quiet], there is no result set; otherwise the procedure answers
// 0, and has locked nothing. What the server refuses after the COMMIT is no error, except for
// a KILL: the caller waits for the outcome of its COMMIT, so the procedure waits for no row,
// and for a second while the table's definition is being changed. p_mark is
// that of CommitProcedure.
func (t Table) PassProcedure() Procedure { return Procedure{t, 8, "_pass1", passText} }

func passText(t Table) (parameters, body string) {
	return "p_namespace VARBINARY(255), p_name VARBINARY(255), p_quiet BIGINT UNSIGNED, p_mark VARCHAR(64) CHARACTER SET utf8mb4",
		"  DECLARE v_quiet BOOL;\n" + t.passes("p_mark", "", ofKey, "p_quiet", " NOWAIT")
}

// PassBlock is the same for MariaDB, to be prepared, with question marks for the name, p_quiet and
// p_mark.
func (t Table) PassBlock(namespace string) string {
	return BlockOfKey + t.passes("?", AtOnce, " WHERE "+Row("", namespace, "v_name")+" LIMIT 1", "v_most", "") + "END"
}

// passes is the body of both.
func (t Table) passes(mark, before, where, most, noWait string) string {
	return "  COMMIT;\n" +
		"  SET @mysqllock_done = " + mark + ";\n" +
		"  BEGIN\n" +
		"    DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;\n" +
		"    START TRANSACTION;\n" +
		"    " + before + "SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ " + Quiet(most) + " INTO v_quiet\n" +
		"      FROM " + t.String() + where + " FOR UPDATE" + noWait + ";\n" +
		"  END;\n" +
		"  IF v_quiet IS NOT TRUE THEN ROLLBACK; SELECT 0; END IF;\n"
}

// BlockOfKey begins a block of MariaDB, to be prepared, with the name of a key, and the highest token
// that tells nothing new. They are variables: if the table is altered, the server parses the
// statements in the block again without the values of question marks.
const BlockOfKey = "BEGIN NOT ATOMIC DECLARE v_name VARBINARY(255) DEFAULT " + Unhex + "; DECLARE v_most BIGINT UNSIGNED DEFAULT ?; DECLARE v_quiet BOOL; "

// AtOnce precedes a statement that waits for nothing, in a block of MariaDB: NOWAIT is not allowed
// there (error 1314), and UPDATE has none anywhere.
const AtOnce = "SET STATEMENT innodb_lock_wait_timeout = 0, lock_wait_timeout = 0 FOR "
