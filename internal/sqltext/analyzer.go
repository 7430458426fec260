package sqltext

import (
	"iter"
	"strings"
)

// analyzer works out what the statements of a text do. next notes what matters in any
// statement; what follows from its form is in forms.go.
type analyzer struct {
	lexer
	statement
	sum Info // of the statements before
	any bool // there were some

	left  Left
	notes bool // left is told what the statements leave
	adds  bool // they take nothing back for sure: the text has failed, or what follows may be a body
	query bool // only the first statement has run for sure

	asked  func(schema, table string) bool // is asked for the tables that the statements write, unless it is nil
	target string                          // the first one to which it said yes
}

// eachWay reads the text in each way in which a server may run it. If nothing can be said of
// the text, the last analyzer is hopeless.
func (a analyzer) eachWay(text string) iter.Seq[analyzer] {
	return func(yield func(analyzer) bool) {
		first := a.in(text, reading{}, [3]string{})
		var conditions [3]string
		known := 0
		if first.doubt || first.notes { // a Left takes conditions in strings for doubt, too
			conditions, known = conditionsIn(text)
			first.hopeless = first.hopeless || known > len(conditions) // too many to try
		}
		if !first.goesTo(yield) || !first.doubt {
			return
		}
		for n, all := 1, readings(text, known); n < all; n++ {
			if !a.in(text, readingOf(n, known), conditions).goesTo(yield) {
				return
			}
		}
	}
}

// in reads the text in one way.
func (a analyzer) in(text string, r reading, conditions [3]string) analyzer {
	a.lexer = lexer{text: text, reading: r, conditions: conditions, tok: other}
	if a.asked != nil && strings.IndexByte(text, ';') < 0 {
		a.any = a.begin() // this is enough
	} else {
		a.scan()
	}
	return a
}

// goesTo yields what one way of reading has told, unless no server accepts the text in it, and reports
// whether another way may be tried.
func (a analyzer) goesTo(yield func(analyzer) bool) (goOn bool) {
	rejected := a.broken && !a.any && !a.hopeless // it does nothing
	return (rejected || yield(a)) && !a.hopeless
}

// statement is what is known of the statement that is being read.
type statement struct {
	info   Info
	form   *form
	leaves leaves
	name   string // the verb that decided

	schema, object  string // that it names, where its form has one
	dotted          bool   // it has a dot
	taken, released int    // locks of GET_LOCK

	depth     int
	calls     bool   // has a parenthesis: of a function, a subquery
	functions bool   // may call a stored function, or draws from a sequence
	recalling bool   // the parenthesis before is that of LAST_INSERT_ID or the like
	system    bool   // names a schema with tables that DML reads without locks
	variables bool   // names a variable
	recalls   bool   // names a variable that earlier statements set
	plan      bool   // answers with a plan
	qualified bool   // the current name has a qualifier in front of it
	alias     bool   // the current name is one that the statement gives
	open      uint64 // bit d: a query block, from SELECT or TABLE on, is open at depth d
	unlocked  uint64 // bit d: it has tables, and no locking clause yet
	blocks    int    // how many there are
	afterFrom bool   // the token before the current one is the FROM of one
	reads     bool   // one has tables
	rows      bool   // one has tables of the application's
	locked    int    // how many have a locking clause
	some      bool   // one for some of its tables
	lockIn    bool   // the last IN was that of LOCK IN
}

// rule says how Snapshot follows from the statement as a whole, unless its form has it.
type rule uint8

const (
	ifCalls  rule = iota // if it has any parentheses
	ifReads              // unless it plainly reads nothing, or with locks
	ifSystem             // if it names a schema of system tables, or may call a stored function
)

// leaves says what a statement leaves on the connection, or takes away there: a set.
type leaves uint8

const (
	leavesAny       leaves = 1 << iota // nobody knows what
	leavesNoted                        // what the Left has been told
	leavesVariables                    // user variables, assigned in a query
)

// scan adds up all statements of the text. It leaves out a broken one, which no server
// runs.
func (a *analyzer) scan() {
	for a.read() && !a.broken {
		if a.notes {
			a.leave()
		}
		if a.any {
			a.info = a.sum.then(a.info)
		}
		a.sum, a.any = a.info, true
	}
}

// read goes through the next statement that is not empty, and reports whether there is
// one.
func (a *analyzer) read() bool {
	if !a.begin() {
		return false
	}
	for !a.atEnd() {
		a.next()
	}
	a.finish()
	return true
}

// begin is read for the part of the statement that tells its verb and its form.
func (a *analyzer) begin() bool {
	for a.tok != end {
		a.statement, a.tok = statement{}, other
		for a.next(); a.tok == '('; {
			a.next()
		}
		if a.atEnd() {
			continue
		}
		a.verb()
		return true
	}
	return false
}

// finish settles what could not be said before the end of the statement.
func (a *analyzer) finish() {
	i := &a.info
	query := i.Kind == Read
	i.Functions = a.functions && query
	i.Tables = a.rows && !a.plan && i.Changes != ChangesCounted
	i.Recalls = i.Recalls || a.variables && a.recalls
	if i.Calls && i.Recalls {
		a.leaves |= leavesAny // a procedure may put something into the variable
	}
	i.Taints = i.Taints || a.leaves != 0
	i.Anywhere = i.Anywhere || a.leaves&leavesVariables != 0
	switch {
	case a.functions || i.Kind == Commits || a.plan && !query:
		i.Changes = MayChange
	case query:
		i.Changes = ChangesNothing
	}
	i.Snapshot = i.Snapshot || a.snapshot()
	if query && a.functions {
		i.Kind = Write
	}
}

func (a *analyzer) snapshot() bool {
	switch a.form.rule {
	case ifReads:
		locks := a.reads && a.locked == a.blocks && !a.some // calls are taken for COUNT and the like
		return a.functions || (a.reads || a.calls) && !locks
	case ifSystem:
		return a.system || a.functions
	case ifCalls:
		return a.calls && a.form.Kind != Commits
	}
	return false
}

// next goes on to the next token and takes note of what matters in any statement.
func (a *analyzer) next() {
	if a.atEnd() {
		return
	}
	a.advance()
	if a.afterFrom {
		a.afterFrom = false
		a.rows = a.rows || a.showsRows()
	}
	switch a.tok {
	case word:
		a.place()
		if k := keywordOf(a.current()); k != 0 {
			a.keyword(k)
		}
	case name:
		a.place()
		if k := keywordOf(a.value()); k >= keySystem {
			a.keyword(k)
		}
	case '(':
		a.openParenthesis()
	case ')':
		if a.recalling && a.prior.tok == '(' { // with an argument it is set
			a.info.Recalls = true
		}
		a.open &^= a.bit()
		a.unlocked &^= a.bit()
		a.depth = max(a.depth-1, 0)
	case assign:
		a.leaves |= leavesVariables
	case variable:
		a.variables = true
		a.info.Recalls = a.info.Recalls || a.current() != "@@" // one of the user's
		if is(a.before(), "INTO") {
			a.leaves |= leavesAny
		}
	}
}

// bit is the bit of a query block at the current depth.
func (a *analyzer) bit() uint64 { return 1 << a.depth }

// place notes what is in front of a name, as far as it tells whether the name can
// be that of a function. The token before begins with a dot also in db.1f.
func (a *analyzer) place() {
	a.qualified = a.prior.to > a.prior.from && a.text[a.prior.from] == '.'
	// AS d (a), (SELECT …) d (a), MATCH (a) AGAINST (…), '$' COLUMNS (…)
	a.alias = a.prior.tok == ')' || a.prior.tok == literal || a.prior.tok == word && is(a.before(), "AS")
}

func (a *analyzer) openParenthesis() {
	a.calls, a.recalling = true, false
	a.functions = a.functions || a.mayCall()
	if a.prior.tok == word || a.prior.tok == name {
		switch function := unquote(a.before()); keywordOf(function) {
		case keyUserLock:
			a.userLock(function)
		case keyRecalling:
			a.recalling = true
			a.info.Anywhere = a.info.Anywhere || is(function, "CONNECTION_ID")
		}
	}
	a.depth++
	a.some = a.some || a.depth > 63 // out of bits
}

// mayCall reports whether the current parenthesis may call a stored function. A number
// is a name in db.5().
func (a *analyzer) mayCall() bool {
	switch a.prior.tok {
	case literal:
		return true
	case name:
		return a.qualified || !a.alias
	case word:
		return a.qualified || !a.alias && storedFunc(a.before(), a.from > a.prior.to)
	}
	return false
}

// showsRows reports whether the current token, the first after FROM, may name a table
// of the application's. A query in parentheses has a FROM of its own.
func (a *analyzer) showsRows() bool {
	return a.tok != '(' && !is(a.value(), "DUAL") && !isSystem(a.current())
}

// isSystem reports whether a schema, quoted or not, is one of the server's own.
func isSystem(schema string) bool { return keywordOf(unquote(schema)) == keySystem }

// keyword is a word that matters wherever it stands. Where it is a name and not the
// keyword (t.from), the answer only becomes more careful.
type keyword uint8

const (
	keyFrom keyword = iota + 1
	keyIn
	keyNext
	keyOf
	keySelect
	keyShare
	keyTable
	keyUpdate
	keyValue
	keyValues

	// These may be in quotes, too.
	keySystem    // a schema with tables that DML reads without locks
	keyUserLock  // a function that takes or gives back a lock which lives as long as the connection
	keyRecalling // a function, or a variable, that tells what earlier statements have left, or which connection it is
)

type keywordEntry struct {
	word string
	key  keyword
}

// watched has the words by their length.
var watched = [30][]keywordEntry{
	2:  {{"IN", keyIn}, {"OF", keyOf}},
	3:  {{"SYS", keySystem}},
	4:  {{"FROM", keyFrom}},
	5:  {{"TABLE", keyTable}, {"SHARE", keyShare}, {"VALUE", keyValue}, {"MYSQL", keySystem}},
	6:  {{"SELECT", keySelect}, {"UPDATE", keyUpdate}, {"VALUES", keyValues}, {"SETVAL", keyNext}},
	7:  {{"NEXTVAL", keyNext}},
	8:  {{"GET_LOCK", keyUserLock}, {"IDENTITY", keyRecalling}},
	9:  {{"ROW_COUNT", keyRecalling}},
	10: {{"FOUND_ROWS", keyRecalling}},
	11: {{"ERROR_COUNT", keyRecalling}},
	12: {{"RELEASE_LOCK", keyUserLock}},
	13: {{"CONNECTION_ID", keyRecalling}, {"WARNING_COUNT", keyRecalling}},
	14: {{"LAST_INSERT_ID", keyRecalling}},
	17: {{"RELEASE_ALL_LOCKS", keyUserLock}},
	18: {{"INFORMATION_SCHEMA", keySystem}, {"PERFORMANCE_SCHEMA", keySystem}},
	// Those of MySQL's locking service and version tokens.
	21: {{"VERSION_TOKENS_UNLOCK", keyUserLock}, {"SERVICE_RELEASE_LOCKS", keyUserLock}},
	22: {{"SERVICE_GET_READ_LOCKS", keyUserLock}},
	23: {{"SERVICE_GET_WRITE_LOCKS", keyUserLock}},
	26: {{"VERSION_TOKENS_LOCK_SHARED", keyUserLock}},
	29: {{"VERSION_TOKENS_LOCK_EXCLUSIVE", keyUserLock}},
}

// keywordOf returns 0 for a word that does not matter.
func keywordOf(w string) keyword {
	if len(w) < len(watched) {
		for _, k := range watched[len(w)] {
			if is(w, k.word) {
				return k.key
			}
		}
	}
	return 0
}

// keyword takes note of the current token.
func (a *analyzer) keyword(k keyword) {
	switch k {
	case keySelect:
		a.open |= a.bit()
		a.unlocked &^= a.bit()
		a.blocks++
	case keyTable:
		a.open |= a.bit()
		a.unlocked |= a.bit()
		a.blocks++
		a.reads, a.rows = true, true
	case keyValues:
		a.blocks++
	case keyFrom:
		a.afterFrom = a.open&a.bit() != 0
		a.unlocked |= a.open & a.bit()
		a.reads = a.reads || a.afterFrom
	case keyIn:
		a.lockIn = is(a.before(), "LOCK")
	case keyUpdate, keyShare: // FOR UPDATE, FOR SHARE, LOCK IN SHARE MODE, at the end of a block
		if a.unlocked&a.bit() != 0 && (is(a.before(), "FOR") || k == keyShare && a.lockIn && is(a.before(), "IN")) {
			a.locked++
			a.unlocked &^= a.bit()
		}
	case keyOf: // FOR UPDATE OF: the other tables are read without locks
		a.some = a.some || isOneOf(a.before(), "UPDATE", "SHARE")
	case keyNext: // s.NEXTVAL, SETVAL
		a.functions = true
	case keyValue: // NEXT VALUE FOR s
		a.functions = a.functions || is(a.before(), "NEXT")
	case keySystem:
		a.system = true
	case keyRecalling:
		a.recalls = true
	}
}
