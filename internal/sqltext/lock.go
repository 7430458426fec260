package sqltext

import (
	"errors"
	"fmt"
	"strings"
)

// Lock makes a plain SELECT a locking read: it puts clause, such as "FOR UPDATE
// SKIP LOCKED" in the spelling of the server, behind its last token, in front of
// a semicolon and comments that end the text. Where query returns no rows of
// tables (see harmless), it comes back unchanged. All else is an error that says
// why, and what to write instead. The clause has no quotes and no line comments;
// it may have conditional comments, for several servers at a time.
//
// With the clause, the server locks every row that the result shows or counts,
// in every InnoDB table in FROM that it has to read for that: so it was measured
// on MySQL 9.7.4 and MariaDB 10.11.19, under REPEATABLE READ and READ COMMITTED,
// and what could not keep it is refused. It may lock more than that: all rows
// that it reads on its way, such as those which OFFSET or HAVING takes away or
// which are sorted before LIMIT counts them, and the other half of a pair that
// SKIP LOCKED takes away; under REPEATABLE READ also the gaps between them.
//
// Accepted are joins, also in parentheses, and aliases, PARTITION, index hints,
// WINDOW, LIMIT, OFFSET, FETCH, ROWS EXAMINED; subqueries outside of FROM, which
// read their own tables without locks; COUNT, SUM and other aggregates, for which
// the server goes through every row that they count. Refused are:
//
//   - several statements, parentheses around the SELECT, WITH, UNION and its like,
//     INTO, a locking clause that is there already;
//   - a SELECT without a table, a subquery in FROM, JSON_TABLE, the server's own
//     schemas: nothing would be locked, or not all;
//   - GROUP BY, DISTINCT, MIN and MAX: with the right index, the server reads, and
//     locks, one row of each group only;
//   - MATCH … AGAINST: MySQL answers some of it from the fulltext index alone,
//     COUNT(*) for one, and locks no row;
//   - a text that servers cut otherwise in another sql_mode, version or character
//     set.
//
// Not in the text, and so not seen: views, which are read without locks where
// they group or are ALGORITHM=TEMPTABLE; tables of engines without row locks; and
// that a shared lock is on index entries only where an index has all columns
// that the SELECT names: others can't change those columns then, but can lock the
// row and change the rest of it.
func Lock(query, clause string) (locked string, err error) {
	end, err := lockable(query, strings.Contains(clause, "/*"))
	switch {
	case err != nil:
		return "", err
	case end == unchanged:
		return query, nil
	}
	return query[:end] + " " + clause + query[end:], nil
}

// unchanged stands for the end of the SELECT in a text that has none.
const unchanged = -1

// lockable returns the end of the only SELECT in query. All readings have to
// agree, except for those that no server accepts: they stay rejected when words
// are put behind a word, a literal or a parenthesis, but not always with comments,
// which could end one that began in front of them.
func lockable(query string, comments bool) (end int, err error) {
	conds, ok := conditionsIn(query)
	if !ok || conds.odd {
		return 0, errConditions
	}
	accepted, rejected := false, false
	for r := range readingsOf(query, conds) {
		l := locker{scanner: newScanner(query, r)}
		l.read()
		switch {
		case l.hopeless:
			return 0, errHopeless
		case l.broken && !l.several:
			rejected = true
		case !accepted:
			accepted, end, err = true, l.end, l.err
		case (l.err == nil) != (err == nil), err == nil && l.end != end:
			return 0, errReadings
		}
	}
	switch {
	case !accepted:
		return 0, errBroken
	case err != nil || end == unchanged:
		return end, err
	case comments && rejected && strings.Contains(query[:end], "/*"):
		return 0, errReadings
	}
	return end, nil
}

// Why a text is refused, and what to do about it.
var (
	errBroken     = errors.New("no server accepts it: a quote, a comment or a backslash is not closed or out of place")
	errReadings   = errors.New("what it means depends on sql_mode, version or character set; use placeholders in place of quotes with backslashes, and take /*! */ out")
	errConditions = errors.New("too many, or unusual, comments like /*!80000 */; take them out")
	errHopeless   = errors.New("servers differ in how they read it: comments inside /*! */, $$, or bytes that are not UTF-8")
	errOddByte    = errors.New("a NUL byte, a no-break space or a [ outside of quotes")
	errDigitName  = errors.New("a name behind a dot that begins with a digit; put it in backticks")
	errUnbalanced = errors.New("its parentheses do not match")
	errUnfinished = errors.New("it ends in the middle of an expression")
	errHint       = errors.New("an optimizer hint at its end; put it behind SELECT")

	errSeveral      = errors.New("several statements in one text; run the SELECT by itself")
	errParentheses  = errors.New("parentheses around the SELECT, which MariaDB does not lock through; take them off")
	errWith         = errors.New("WITH, whose queries the locking clause does not reach; read from the table itself")
	errTable        = errors.New("TABLE or VALUES; write it as a SELECT")
	errSetStatement = errors.New("SET STATEMENT in front of a query; set the variable before")

	errUnion   = errors.New("UNION, EXCEPT or INTERSECT, of which the locking clause would lock one part; run the parts by themselves")
	errInto    = errors.New("SELECT … INTO; take INTO off")
	errLocks   = errors.New("a locking clause, or another FOR, is in it already; in ON, write SUBSTRING(x, 1, 2)")
	errNoTable = errors.New("it reads no table, so there is nothing to lock")
	errDerived = errors.New("a subquery in FROM or ON; the locking clause does not reach one in FROM; read from the table itself, with the subquery in WHERE")
	errSystem  = errors.New("a table of the server's own, which is read without locks")
	errGroup   = errors.New("GROUP BY or DISTINCT, for which the server may lock one row of each group only; lock the rows, and group what was read")
	errExtreme = errors.New("MIN or MAX, for which the server may lock one row only; use ORDER BY … LIMIT 1")
	errMatch   = errors.New("MATCH, which the server may answer from a fulltext index alone, without locks on the rows; find the keys with it, and read the rows by those")
)

// errWord refuses a SELECT for a keyword.
func errWord(keyword string) error {
	return fmt.Errorf("%.30q, with which not every server takes a locking clause", keyword)
}

// errVerb refuses a statement for how it begins.
func errVerb(begins string) error {
	return fmt.Errorf("a statement that begins with %.30q may read rows, and takes no locking clause", begins)
}

// locker goes through a text, in one reading, for what Lock has to know.
type locker struct {
	scanner
	keyword      bool // the current token is a word, and not a name beside a dot
	priorKeyword bool // the token before it is

	depth    int
	subquery int   // depth of the outermost subquery that is open; 0 is none
	odd      error // a token that no SELECT may have
	hasFrom  bool  // the SELECT has a FROM
	inFrom   bool  // the current token is in it

	end     int // of the SELECT that was found
	err     error
	several bool // a statement has ended with a semicolon, and that is not all
}

func (l *locker) refuse(err error) {
	if l.err == nil {
		l.err = err
	}
}

// read goes through the whole text.
func (l *locker) read() {
	l.end = unchanged
	for statements := 0; ; {
		l.tok, l.depth, l.subquery, l.odd = other, 0, 0, nil
		l.next()
		if statements > 0 && (!l.atEnd() || l.broken) {
			l.several = true
		}
		if !l.atEnd() {
			statements++
			l.statement()
			for !l.atEnd() {
				l.next()
			}
		}
		if l.tok == end {
			break
		}
	}
	if l.several && l.end != unchanged {
		l.refuse(errSeveral)
	}
}

// next goes on to the next token.
func (l *locker) next() {
	prior := l.keyword
	if !l.scanner.next() {
		return
	}
	l.priorKeyword = prior
	glued := l.from == l.prior.to
	l.keyword = l.tok == word &&
		(!glued || l.before() != "." && l.before() != "@@") &&
		(l.peek(0) != '.' || classes[l.peek(1)] > classDigit)

	switch {
	case l.tok == '(':
		l.depth++
	case l.tok == ')':
		if l.depth--; l.depth < 0 {
			l.odd = errUnbalanced
		}
		if l.depth < l.subquery {
			l.subquery = 0
		}
	case l.tok == '[', l.tok == other && l.text[l.from] == 0,
		l.tok == word && strings.Contains(l.current(), "\u00a0"):
		l.odd = errOddByte // [ quotes in MariaDB's MSSQL mode
	case l.tok == literal && l.text[l.from] == '.' && glued && l.prior.tok == name:
		l.odd = errDigitName // servers see no name in `t`.1from, but a number
	}
}

// at reports whether the current token is one of the given keywords.
func (l *locker) at(upper ...string) bool { return l.keyword && isOneOf(l.current(), upper...) }

// behind reports whether the token before is one of the given keywords.
func (l *locker) behind(upper ...string) bool {
	return l.priorKeyword && isOneOf(l.before(), upper...)
}

// statement decides by the verb at the current token.
func (l *locker) statement() {
	begins := l.current()
	switch {
	case l.at("SELECT"):
		l.query()
	case l.tok == '(':
		l.refuse(errParentheses)
	case l.at("TABLE", "VALUES"):
		l.refuse(errTable)
	case l.at("WITH"):
		// The first of these outside of parentheses tells what it is for.
		for !l.atEnd() && (l.depth > 0 || !l.at("UPDATE", "DELETE", "SELECT", "FOR")) {
			l.next()
		}
		if !l.at("UPDATE", "DELETE") {
			l.refuse(errWith)
		}
	case l.at("SET"):
		l.set()
	case l.at("BEGIN"): // [WORK]; all else is a block of statements
		if l.next(); l.at("WORK") {
			l.next()
		}
		if !l.atEnd() {
			l.refuse(errVerb(begins))
		}
	default:
		if !l.keyword || !verbOf(begins).harmless {
			l.refuse(errVerb(begins))
		}
	}
}

// set goes through a SET. MariaDB's SET STATEMENT x=y FOR … has another statement
// behind it.
func (l *locker) set() {
	if l.next(); !l.at("STATEMENT") {
		return
	}
	for !l.atEnd() && !l.at("FOR") {
		l.next()
	}
	switch l.next(); {
	case l.at("SELECT"):
		l.refuse(errSetStatement)
	case !l.atEnd():
		l.statement()
	}
}

// query goes through a SELECT.
func (l *locker) query() {
	l.hasFrom, l.inFrom = false, false
	finished := false // the current token may be the last
	for l.end = l.pos; ; l.end = l.pos {
		finished = l.finishes()
		if l.next(); l.atEnd() {
			break
		}
		switch {
		case l.odd != nil:
			l.refuse(l.odd)
		case l.subquery == 0:
			l.element()
		}
	}

	if l.depth != 0 {
		l.refuse(errUnbalanced)
	}
	if !l.hasFrom {
		l.refuse(errNoTable)
	}
	if !finished {
		l.refuse(errUnfinished)
	}
	// Behind the UPDATE of a locking clause, MySQL reads hints.
	if strings.Contains(l.text[l.end:], "/*+") {
		l.refuse(errHint)
	}
}

// element looks at a token of the SELECT that is not part of a subquery.
func (l *locker) element() {
	top := l.depth == 0
	switch {
	case l.at("SELECT", "TABLE", "VALUES"):
		l.innerQuery()
	case l.at("DISTINCT", "DISTINCTROW"):
		l.refuse(errGroup)
	case l.tok == '(' && l.behind("MIN", "MAX"):
		l.refuse(errExtreme)
	case l.at("MATCH"):
		l.refuse(errMatch)
	case l.at("FOR") && l.inFrom && l.behind("INDEX", "KEY"):
		if l.next(); !l.at("JOIN", "ORDER", "GROUP") {
			l.refuse(errLocks)
		}
	case l.at("FOR") && (top || l.inFrom):
		l.refuse(errLocks)
	case l.inFrom && l.at("JSON_TABLE"):
		l.refuse(errWord(l.current()))
	case l.inFrom && l.at("DUAL"):
		l.refuse(errNoTable)
	case l.inFrom && l.tok == other && l.current() == "." && isSystem(l.before()):
		l.refuse(errSystem)
	case top:
		l.clause()
	}
}

// innerQuery decides by where another query begins.
func (l *locker) innerQuery() {
	switch {
	case l.depth == 0:
		l.refuse(errUnion)
	case l.inFrom:
		l.refuse(errDerived)
	default:
		l.subquery = l.depth
	}
}

// clause looks at a token that may begin a clause of the SELECT.
func (l *locker) clause() {
	switch {
	case l.at("FROM"):
		if l.hasFrom {
			l.refuse(errWord(l.current()))
		}
		l.hasFrom, l.inFrom = true, true
	case l.at("WHERE", "HAVING", "ORDER", "LIMIT"):
		l.inFrom = false
	case l.at("GROUP"):
		l.refuse(errGroup)
	case l.at("UNION", "EXCEPT", "INTERSECT", "MINUS"):
		l.refuse(errUnion)
	case l.at("INTO"):
		l.refuse(errInto)
	case l.at("LOCK"):
		l.refuse(errLocks)
	case l.at("HIGH_PRIORITY", "PROCEDURE"):
		l.refuse(errWord(l.current()))
	}
}

// finishes reports whether the current token can be the last of a SELECT. Then
// it can't make a new token with what comes behind it, in any reading.
func (l *locker) finishes() bool {
	switch l.tok {
	case word, name, literal, variable, ')', '}':
		return true
	}
	return l.current() == "?"
}
