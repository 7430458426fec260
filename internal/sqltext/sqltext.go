// Package sqltext takes a conservative look at SQL text: what does running it mean for a transaction that holds a lock? It
// knows MySQL 8 and 9 and MariaDB 10.11 and later. It does not parse SQL: it cuts the text into tokens (lexer.go), looks the
// first words of each statement up in a table (forms.go), and takes note of a handful of words behind them (statement.go).
//
// Where a text can mean two things, the answer is the more dangerous one:
//
//   - sql_mode is not known here. NO_BACKSLASH_ESCAPES and ANSI_QUOTES change where a string ends, so a text with an escaped
//     quote (it\'s) is read in each way, and the answers are combined.
//   - /*!80000 … */ and /*M!100000 … */ may be code or comment. A SELECT, INSERT, REPLACE, UPDATE or DELETE with such a comment
//     is a Write, if it plainly is one statement; other texts count as the worst there is. So does a text in which an escaped
//     quote may be the half of a character, as in gbk.
//   - A statement that no server accepts (unterminated string or comment, stray backslash) does nothing, nor does what follows
//     it. Only the readings in which it can run count; if there is none, it is a Write.
//
// What can't be seen in the text is not judged: the body of a stored function, trigger or view, and variables such as
// completion_type, which makes COMMIT open the next transaction. Text is taken to be in a character set in which every ASCII
// byte is that ASCII character (UTF-8, latin1).
//
// What the servers do was measured, not only read up: MySQL 9.7.4 and MariaDB 10.11.19, REPEATABLE READ. The tests have the
// answers that earlier versions gave, and the difference to today's, in testdata/answers.txt.
package sqltext

import (
	"cmp"
	"strings"
)

// Kind says what running a query text means for a transaction that holds a lock. The zero value is Write.
type Kind uint8

const (
	// Write may change data. It is the answer whenever there is doubt, for an empty text too, and for CALL, whatever the
	// procedure does.
	Write Kind = iota
	// Read only reads, as far as the text tells.
	Read
	// Commits ends the open transaction, explicitly or implicitly, or may do so: ROLLBACK counts too, what commits in some
	// cases only (SET autocommit = 1 where it was 0), and what runs any statement (EXECUTE).
	Commits
)

// Changes says what tells whether running a text has changed data. The zero value is MayChange.
type Changes uint8

const (
	// MayChange: nothing tells, so it may have. It is the answer whenever there is doubt, and for whatever may run a
	// procedure, or a function that is none of the server's own.
	MayChange Changes = iota
	// ChangesCounted: the number of rows that the server says are affected. A trigger on rows that were found and left as
	// they were can't be seen from the text.
	ChangesCounted
	// ChangesNothing: the text alone. It reads, or it sets savepoints or variables.
	ChangesNothing
)

// Info is the answer of Look. Of a text of several statements each flag but Defines says that one of them does so.
type Info struct {
	Kind Kind

	// Changes says how to tell whether running this has changed data.
	Changes Changes

	// Defines: Commits only because it defines something, such as a table, an index or a privilege, or looks after a table
	// (DDL, GRANT, ANALYZE TABLE). Outside of a transaction it leaves none open, and no lock. False in doubt, and for a text
	// of several statements if one does something else.
	Defines bool

	// Snapshot: a REPEATABLE READ transaction may get its snapshot from this, so that what it reads later can be older than a
	// lock it takes later. True for reads, in doubt too, unless there is one SELECT alone, with a locking clause for all its
	// tables, or nothing is read and called.
	//
	// False for INSERT, REPLACE, UPDATE and DELETE, their subqueries included: for them InnoDB reads with locks. But not where
	// they name a system schema, or may call a stored function, whose own SELECTs read without. Triggers and views are not seen.
	Snapshot bool

	// Taints: leaves something on the connection that outlives the transaction, or removes such a thing: variables, default
	// database, prepared statements, temporary tables, table and user-level locks.
	Taints bool

	// Tables: names a table of the application's whose rows it reads, in a query, or into variables or another table. SHOW,
	// EXPLAIN and what only computes don't, nor do INSERT, REPLACE, UPDATE and DELETE count.
	Tables bool

	// Functions: a query that is a Write since it runs a stored or loadable function, which may write, or may do so: it calls
	// something by a name that is none of a built-in function, or draws from a sequence. It reads, too. False is no proof that
	// no query writes: a view can call functions that the text does not name. (Generated columns, defaults and checks can't.)
	Functions bool

	// Calls: runs a stored procedure, which may end the transaction unseen. Not set where the text alone is enough for Commits.
	Calls bool

	// Recalls: what it answers or writes may depend on what earlier statements have left on the connection: variables,
	// LAST_INSERT_ID() and the like, warnings, the connection's id. Unqualified names, which depend on the default database,
	// and temporary tables can't be told from others.
	Recalls bool

	// Anywhere: another connection may answer what it Recalls. It sets the variables that it reads, as in SELECT @n := @n + 1,
	// or asks for the id of the connection.
	Anywhere bool

	// FromClient: LOAD DATA LOCAL. If the client fails to send what is to be loaded, the statement ends well for the server,
	// with a part of it.
	FromClient bool

	// GoesBack: rolls back to a savepoint, which can free the row locks that the transaction has taken since.
	GoesBack bool

	// SetsLevel: may set the isolation level that transactions of the connection have from now on. SetsNextLevel: may set that of
	// the next transaction alone, or that it only reads.
	SetsLevel, SetsNextLevel bool

	// Effect is what it does to the connection's State.
	Effect Effect
}

// worst is the answer where a text can mean anything.
var worst = Info{
	Kind: Commits, Snapshot: true, Taints: true, Recalls: true, FromClient: true,
	SetsLevel: true, Effect: anyEffect, GoesBack: true,
}

// Look says what running query means. Several statements separated by ; count together: Commits over Write over Read. It looks
// at the text only, never fails, and does not keep query.
func Look(query string) Info {
	if PlainWrite(query) {
		return Info{Changes: ChangesCounted}
	}
	return analyze(query)
}

// analyze is Look for a text that has to be read.
func analyze(query string) (all Info) {
	runs := false
	a := analyzer{lexer: lexer{text: query}}
	for a.another() {
		switch a.scan(); {
		case a.broken && a.n == 0: // no server accepts it so
		case runs:
			all = all.or(a.sum)
		default:
			all, runs = a.sum, true
		}
	}
	switch {
	case !a.hopeless:
		return all
	case Quiet(query): // it is that, however the rest is read
		reads := query[0]|0x20 == 's'
		return Info{Snapshot: true, Tables: reads, Functions: reads, Recalls: strings.Contains(query, "(")}
	}
	return worst
}

// then is the answer for two statements, one after the other.
func (i Info) then(next Info) Info {
	both := i.either(next)
	if i.Changes != next.Changes || i.Changes == ChangesCounted {
		both.Changes = MayChange // of whose rows the server counts those of the last
	}
	both.Effect = i.Effect.then(next.Effect)
	return both
}

// or is the answer for a text that is read as one or the other.
func (i Info) or(other Info) Info {
	one := i.either(other)
	one.Changes = min(i.Changes, other.Changes)
	if i.Effect != other.Effect {
		one.Effect = anyEffect
	}
	return one
}

// either has the worse Kind, and each flag of both.
func (i Info) either(other Info) Info {
	if other.Kind == Commits || i.Kind == Read {
		i.Kind = other.Kind
	}
	i.Defines = i.Defines && other.Defines
	i.Snapshot = i.Snapshot || other.Snapshot
	i.Taints = i.Taints || other.Taints
	i.Tables = i.Tables || other.Tables
	i.Functions = i.Functions || other.Functions
	i.Calls = i.Calls || other.Calls
	i.Recalls = i.Recalls || other.Recalls
	i.Anywhere = i.Anywhere || other.Anywhere
	i.FromClient = i.FromClient || other.FromClient
	i.GoesBack = i.GoesBack || other.GoesBack
	i.SetsLevel = i.SetsLevel || other.SetsLevel
	i.SetsNextLevel = i.SetsNextLevel || other.SetsNextLevel
	return i
}

// Verb returns the verb of query in upper case, for texts that people read; of several statements, that of the first which may
// change data. It is "" where there is none.
func Verb(query string) string {
	verb := ""
	a := analyzer{lexer: lexer{text: query}}
	for a.another(); a.read(); {
		if a.info.Changes != ChangesNothing {
			verb = a.verb
			break
		}
		verb = cmp.Or(verb, a.verb)
	}
	return strings.ToUpper(verb)
}

// Savepoint returns the name of the savepoint that text sets, or with back, goes back to. ok is false where text is anything
// else, several statements included, or can be read in several ways. Names that differ only by case are the same.
func Savepoint(text string) (savepoint string, back, ok bool) {
	a := analyzer{lexer: lexer{text: text}}
	a.another()
	if !a.read() || a.form.kind != "savepoint" || !a.whole || a.schema != "" {
		return "", false, false
	}
	savepoint, back = strings.ToLower(a.object), a.info.GoesBack
	if a.read() || a.broken || a.doubt || a.hopeless || strings.ContainsFunc(savepoint, func(r rune) bool { return r >= 0x80 }) {
		return "", false, false
	}
	return savepoint, back, true
}
