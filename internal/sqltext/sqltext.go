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
	"iter"
	"unicode/utf8"
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

// Info is the answer of Look.
type Info struct {
	Kind Kind

	// Changes says how to tell whether running this has changed data.
	Changes Changes

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
var worst = Info{Kind: Commits, Snapshot: true, Taints: true, Recalls: true, Session: AnyLevel, Effect: anything, GoesBack: true}

// Look says what running query means. Several statements separated by ; count
// together: Commits over Write over Read, and each flag that any of them has.
// It looks at the text only, never fails, and does not keep query.
func Look(query string) Info {
	s := scanner{lexer: lexer{text: query}}
	var sum total
	s.scan(&sum)
	switch {
	case s.hopeless:
		return worst
	case s.doubt:
		return lookEachWay(query)
	}
	return sum.sum
}

// total adds up the statements of a text. Without any, the sum is the zero
// Info, a Write.
type total struct {
	sum Info
	any bool
}

func (t *total) add(i Info) {
	if !t.any {
		t.sum, t.any = i, true
		return
	}
	if i.Kind == Commits || t.sum.Kind == Read {
		t.sum.Kind = i.Kind
	}
	t.sum.Changes = t.sum.Changes.and(i.Changes)
	t.sum.Snapshot = t.sum.Snapshot || i.Snapshot
	t.sum.Taints = t.sum.Taints || i.Taints
	t.sum.Tables = t.sum.Tables || i.Tables
	t.sum.Functions = t.sum.Functions || i.Functions
	t.sum.Calls = t.sum.Calls || i.Calls
	t.sum.Recalls = t.sum.Recalls || i.Recalls
	t.sum.Session |= i.Session // one after the other: which is in force where the text ends early is not known
	t.sum.Next |= i.Next
	t.sum.Effect = t.sum.Effect.then(i.Effect)
	t.sum.GoesBack = t.sum.GoesBack || i.GoesBack
}

// reading is one way in which a server may cut a text into tokens. The zero
// value is what a server does that has been left at its defaults, with all
// conditional comments being comments.
type reading struct {
	plainSingle bool // a backslash in '…' is a byte like any other
	plainDouble bool // the same for "…"
	wide        bool // gbk and the like: a character may end in an ASCII byte

	conditions conditions // those in the text, if they are known yet
	holds      uint8      // bit i: conditions.list[i] holds, its comments are code
}

// lookEachWay is Look for a text that has shown a reason for doubt. The cost
// is bounded: at most 3*2*8 passes over the text.
func lookEachWay(query string) Info {
	conds, ok := conditionsIn(query)
	if !ok {
		return worst
	}
	var all total
	var either Effect
	var changes Changes
	readings, sets := 0, 0
	for r := range readingsOf(query, conds) {
		s := scanner{lexer: lexer{text: query, reading: r}}
		var sum total
		s.scan(&sum)
		if s.hopeless {
			return worst
		}
		if sum.any {
			all.add(sum.sum)
		} else if s.broken {
			continue // rejected, does nothing
		}
		if readings++; readings == 1 {
			either, changes = sum.sum.Effect, sum.sum.Changes
		} else {
			either, changes = either.or(sum.sum.Effect), changes.or(sum.sum.Changes)
		}
		if sum.sum.Session != 0 {
			sets++
		}
	}
	all.sum.Effect = either
	if sets > 0 && sets < readings {
		all.sum.Session = AnyLevel
	}
	all.sum.Changes = changes
	return all.sum
}

// readingsOf goes through all ways to read query, whose conditions are conds.
func readingsOf(query string, conds conditions) iter.Seq[reading] {
	return func(yield func(reading) bool) {
		quotings := [...]reading{
			{},
			{plainDouble: true},                    // ANSI_QUOTES: "…" is a name
			{plainSingle: true, plainDouble: true}, // NO_BACKSLASH_ESCAPES
		}
		charsets := 1
		if !utf8.ValidString(query) {
			charsets = 2
		}
		for _, r := range quotings {
			for wide := range charsets {
				for holds := range 1 << conds.n {
					r.wide, r.conditions, r.holds = wide == 1, conds, uint8(holds)
					if !yield(r) {
						return
					}
				}
			}
		}
	}
}
