// Package sqltext takes a conservative look at SQL text: what does running it
// mean for a transaction that holds a lock? It knows MySQL 8 and 9 and
// MariaDB 10.11 and later. It does not parse SQL; it cuts the text into tokens
// and goes by the verb of each statement and a handful of words after it. With
// the same eyes it makes a plain SELECT a locking read; see Lock, which refuses
// where Look is only careful.
//
// Where a text can mean two things, the answer is the more dangerous one:
//
//   - sql_mode is not known here. NO_BACKSLASH_ESCAPES and ANSI_QUOTES change
//     where a string ends, so a text with an escaped quote (it\'s) is read in
//     each way, and the answers are combined.
//   - /*!80000 … */ and /*M!100000 … */ may be code or comment. Every distinct
//     condition is tried both ways, up to three of them; a text with more, or
//     with comments nested in them, counts as the worst there is.
//   - A statement that no server accepts (unterminated string or comment, stray
//     backslash) does nothing, nor does what follows it. Only the readings in
//     which it can run count; if there is none, it is a Write.
//
// What can't be seen in the text is not judged: the body of a stored function,
// trigger or view, and variables such as completion_type, which makes COMMIT
// open the next transaction. Text is taken to be in a character set in which
// every ASCII byte is that ASCII character (UTF-8, latin1); for gbk, big5 and
// sjis it makes an effort.
//
// What the servers do was measured, not only read up: MySQL 9.7.4 and
// MariaDB 10.11.19, REPEATABLE READ.
package sqltext

import (
	"cmp"
	"strings"
)

// Kind says what running a query text means for a transaction that holds a
// lock. The zero value is Write.
type Kind uint8

const (
	// Write may change data. It is the answer whenever there is doubt, for an
	// empty text too, and for CALL, whatever the procedure does.
	Write Kind = iota
	// Read only reads, as far as the text tells.
	Read
	// Commits ends the open transaction, explicitly or implicitly, or may do
	// so: ROLLBACK counts too, what commits in some cases only (SET
	// autocommit = 1 where it was 0), and what runs any statement (EXECUTE).
	Commits
)

// String returns the name of the constant.
func (k Kind) String() string {
	switch k {
	case Read:
		return "Read"
	case Commits:
		return "Commits"
	default:
		return "Write"
	}
}

// Changes says what tells whether running a text has changed data. The zero value is
// MayChange.
type Changes uint8

const (
	// MayChange: nothing tells, so it may have. It is the answer whenever there is
	// doubt, and for whatever may run a procedure, or a function that is none of the
	// server's own.
	MayChange Changes = iota
	// ChangesCounted: the number of rows that the server says are affected. A trigger
	// on rows that were found and left as they were can't be seen from the text.
	ChangesCounted
	// ChangesNothing: the text alone. It reads, or it sets savepoints or variables.
	ChangesNothing
)

// String returns the name of the constant.
func (c Changes) String() string {
	switch c {
	case ChangesCounted:
		return "ChangesCounted"
	case ChangesNothing:
		return "ChangesNothing"
	default:
		return "MayChange"
	}
}

// Info is the answer of Look.
type Info struct {
	Kind Kind

	// Changes says how to tell whether running this has changed data.
	Changes Changes

	// Defines: Commits only because it defines something, such as a table, an index or a
	// privilege, or looks after a table (DDL, GRANT, ANALYZE TABLE). Outside of a
	// transaction it leaves none open, and no lock. False in doubt, and for a text of
	// several statements of which one does something else.
	Defines bool

	// Snapshot: a REPEATABLE READ transaction may get its snapshot from this,
	// so that what it reads later can be older than a lock it takes later.
	// True for non-locking reads, in doubt too. One subquery without a locking
	// clause of its own is enough, and so is FOR UPDATE OF some of the tables.
	//
	// False for INSERT, REPLACE, UPDATE and DELETE, their subqueries included: for
	// them InnoDB reads with locks. But not where they name a system schema, or may
	// call a stored function, whose own SELECTs read without. Triggers and views
	// are not seen.
	Snapshot bool

	// Taints: leaves something on the connection that outlives the
	// transaction, or removes such a thing: variables, default database,
	// prepared statements, temporary tables, table and user-level locks.
	Taints bool

	// Tables: names a table of the application's whose rows it reads, in a query, or
	// into variables or another table. SHOW, EXPLAIN and what only computes don't, nor
	// do INSERT, REPLACE, UPDATE and DELETE count.
	Tables bool

	// Functions: a query that is a Write since it runs a stored or loadable function,
	// which may write, or may do so: it calls something by a name that is none of a
	// built-in function. It reads, too. False is no proof that no query writes: a view
	// can call functions that the text does not name. (Generated columns, defaults and
	// checks can't.)
	Functions bool

	// Calls: runs a stored procedure, which may end the transaction unseen. Not
	// set where the text alone is enough for Commits.
	Calls bool

	// Recalls: what it answers or writes may depend on what earlier statements have
	// left on the connection: variables, LAST_INSERT_ID() and the like, warnings, the
	// connection's id. Unqualified names, which depend on the default database, and
	// temporary tables can't be told from others.
	Recalls bool

	// Anywhere: another connection may answer what it Recalls. It sets the variables that
	// it reads, as in SELECT @n := @n + 1, or asks for the id of the connection.
	Anywhere bool

	// FromClient: LOAD DATA LOCAL. If the client fails to send what is to be loaded, the
	// statement ends well for the server, with a part of it.
	FromClient bool

	// Session are the isolation levels that transactions of the connection may have
	// from now on, if this sets them; Next are those of the next transaction alone.
	Session, Next Levels

	// Effect is what it does to the connection's State.
	Effect Effect

	// GoesBack: rolls back to a savepoint, which can free the row locks that the
	// transaction has taken since.
	GoesBack bool
}

// worst is the answer where a text can mean anything.
var worst = Info{
	Kind: Commits, Snapshot: true, Taints: true, Recalls: true, FromClient: true,
	Session: AnyLevel, Effect: anyEffect, GoesBack: true,
}

// Look says what running query means. Several statements separated by ; count
// together: Commits over Write over Read, and each flag that any of them has.
// It looks at the text only, never fails, and does not keep query.
func Look(query string) Info {
	var a analyzer
	a.text, a.tok = query, other
	a.scan()
	switch {
	case a.hopeless:
		return worst
	case a.doubt:
		return lookEachWay(query)
	}
	return a.sum
}

// lookEachWay is Look for a text that has shown a reason for doubt. The cost
// is bounded: at most 3*2*8 passes over the text.
func lookEachWay(query string) Info {
	conds, ok := conditionsIn(query)
	if !ok {
		return worst
	}
	var all analyzer // adds up the readings as if they were statements
	var either Info  // for what must not be added up
	readings, sets := 0, 0
	for r := range readingsOf(query, conds) {
		a := analyzer{scanner: newScanner(query, r)}
		a.scan()
		switch {
		case a.hopeless:
			return worst
		case a.any:
			all.info = a.sum
			all.add()
		case a.broken:
			continue // rejected, does nothing
		}
		if readings++; readings == 1 {
			either = a.sum
		}
		either.Effect = either.Effect.or(a.sum.Effect)
		either.Changes = min(either.Changes, a.sum.Changes)
		if a.sum.Session != 0 {
			sets++
		}
	}
	all.sum.Effect, all.sum.Changes = either.Effect, either.Changes
	if sets > 0 && sets < readings {
		all.sum.Session = AnyLevel
	}
	return all.sum
}

// add adds the statement to those before. Without any, the sum is the zero Info, a
// Write.
func (a *analyzer) add() {
	i, sum := &a.info, &a.sum
	if !a.any {
		*sum, a.any = *i, true
		return
	}
	if i.Kind == Commits || sum.Kind == Read {
		sum.Kind = i.Kind
	}
	if i.Changes != sum.Changes || i.Changes == ChangesCounted {
		sum.Changes = MayChange // of whose rows the server counts those of the last
	}
	sum.Defines = sum.Defines && i.Defines
	sum.Snapshot = sum.Snapshot || i.Snapshot
	sum.Taints = sum.Taints || i.Taints
	sum.Tables = sum.Tables || i.Tables
	sum.Functions = sum.Functions || i.Functions
	sum.Calls = sum.Calls || i.Calls
	sum.Recalls = sum.Recalls || i.Recalls
	sum.Anywhere = sum.Anywhere || i.Anywhere
	sum.FromClient = sum.FromClient || i.FromClient
	sum.GoesBack = sum.GoesBack || i.GoesBack
	sum.Session |= i.Session // one after the other: which is in force where the text ends early is not known
	sum.Next |= i.Next
	sum.Effect = sum.Effect.then(i.Effect)
}

// Verb returns the verb of query in upper case, for texts that people read; of several
// statements, that of the first which may change data. It is "" where there is none.
func Verb(query string) string {
	a := analyzer{scanner: newScanner(query, reading{})}
	verb := ""
	for a.read() {
		if a.info.Changes != ChangesNothing {
			verb = a.name
			break
		}
		verb = cmp.Or(verb, a.name)
	}
	return strings.ToUpper(verb)
}

// Savepoint returns the name of the savepoint that text sets, or with back, goes
// back to. ok is false where text is anything else, several statements included, or
// can be read in several ways. Names that differ only by case are the same.
func Savepoint(text string) (savepoint string, back, ok bool) {
	a := analyzer{scanner: newScanner(text, reading{})}
	a.read()
	savepoint, back = strings.ToLower(a.savepoint), a.info.GoesBack
	if savepoint == "" || a.read() || a.broken || a.doubt || a.hopeless || strings.ContainsFunc(savepoint, func(r rune) bool { return r >= 0x80 }) {
		return "", false, false
	}
	return savepoint, back, true
}
