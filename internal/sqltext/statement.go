package sqltext

import "slices"

// analyzer works out what the statements of a text do: next notes what matters in any statement, and forms has what follows
// from its first words.
type analyzer struct {
	lexer
	statement
	sum Info // of the statements before
	n   int  // how many those are

	notes           bool   // what the statements leave is asked for
	noted           []note // and is here, of all ways to read the text
	taken, released int    // locks of GET_LOCK
	assigns         bool   // a query has assigned user variables
	maybe           bool   // a statement may be one of a body, as of a procedure, which does not run, or not always

	asked  func(schema, table string) bool // is asked for the tables that the statements write, unless it is nil
	target string                          // the first one to which it said yes
}

// statement is what is known of the statement that is being read.
type statement struct {
	info   Info
	form   *form
	leaves leaves
	verb   string // that decided

	schema, object string // that it names, where its form has one
	whole          bool   // nothing is behind it

	depth     int
	sets      bool   // it is a SET
	calls     bool   // has a parenthesis: of a function, a subquery
	functions bool   // may call a stored function, or draws from a sequence
	recalling bool   // the parenthesis before is that of LAST_INSERT_ID or the like
	system    bool   // names a schema with tables that DML reads without locks
	variables bool   // names a variable
	plan      bool   // answers with a plan
	qualified bool   // the current name has a qualifier in front of it
	alias     bool   // the current name is one that the statement gives
	blocks    int    // how many query blocks there are
	open      uint64 // bit d: one of them, from SELECT on, is open at depth d
	reads     bool   // one has tables
	rows      bool   // one has tables of the application's
	locks     bool   // one has a locking clause
	some      bool   // which is for some of its tables
}

// leaves says what a statement leaves on the connection, or takes away there: a set.
type leaves uint8

const (
	leavesAny       leaves = 1 << iota // nobody knows what
	leavesNoted                        // what noted has
	leavesVariables                    // user variables, assigned in a query
)

// another begins the next way to read the text.
func (a *analyzer) another() bool {
	if !a.lexer.another() {
		return false
	}
	a.sum, a.n = Info{}, 0
	return true
}

// scan adds up all statements of the text. It leaves out a broken one, which no server runs.
func (a *analyzer) scan() {
	for a.read() && !a.broken {
		if a.notes {
			a.leave()
		}
		if a.n > 0 {
			a.info = a.sum.then(a.info)
		}
		a.sum = a.info
		a.n++
	}
}

// read goes through the next statement that is not empty, and reports whether there is one.
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
		if !a.atEnd() {
			a.decide()
			return true
		}
	}
	return false
}

// finish settles what could not be said before the end of the statement.
func (a *analyzer) finish() {
	i := &a.info
	query := i.Kind == Read
	i.Functions = a.functions && query
	i.Tables = a.rows && !a.plan && i.Changes != ChangesCounted
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
	switch a.form.rule {
	case ifReads:
		i.Snapshot = i.Snapshot || a.functions || (a.reads || a.calls) && (a.blocks > 1 || !a.locks || a.some)
	case ifSystem:
		i.Snapshot = i.Snapshot || a.system || a.functions
	case ifCalls:
		i.Snapshot = i.Snapshot || a.calls && a.form.Kind != Commits
	}
	if query && a.functions {
		i.Kind = Write
	}
}

// next goes on to the next token and takes note of what matters in any statement.
func (a *analyzer) next() {
	if a.atEnd() {
		return
	}
	a.advance()
	if a.prior.tok == word && is(a.before(), "FROM") && a.open&a.bit() != 0 { // that of a query block, not of EXTRACT(YEAR FROM x)
		a.reads = true
		a.rows = a.rows || a.tok != '(' && !is(a.value(), "DUAL") && !isOneOf(a.value(), systems...) // else it has a FROM of its own
	}
	switch a.tok {
	case word, name:
		a.qualified = a.prior.to > a.prior.from && a.text[a.prior.from] == '.' // also in db.1f
		// AS d (a), (SELECT …) d (a), MATCH (a) AGAINST (…), '$' COLUMNS (…)
		a.alias = a.prior.tok == ')' || a.prior.tok == literal || a.prior.tok == word && is(a.before(), "AS")
		a.keyword()
	case '(':
		a.openParenthesis()
	case ')':
		if a.recalling && a.prior.tok == '(' { // with an argument it is set
			a.info.Recalls = true
		}
		if a.depth < 63 {
			a.open &^= a.bit()
		}
		a.depth = max(a.depth-1, 0)
	case assign:
		a.leaves |= leavesVariables
	case variable:
		a.variables = true
		set := a.sets && a.depth == 0 && (a.prior.tok == ',' || is(a.before(), "SET")) // to something, and not asked for
		a.info.Recalls = a.info.Recalls || a.current() != "@@" && !set
		if is(a.before(), "INTO") {
			a.leaves |= leavesAny
		}
	}
}

// bit is the bit of a query block at the current depth.
func (a *analyzer) bit() uint64 { return 1 << min(a.depth, 63) }

func (a *analyzer) openParenthesis() {
	a.calls, a.recalling = true, false
	called := a.mayCall()
	a.functions = a.functions || called
	if a.prior.tok == word || a.prior.tok == name {
		function := unquote(a.before())
		if namesLock(function) {
			a.userLock(function, called)
		}
		a.recalling = isOneOf(function, recalling...)
		a.info.Anywhere = a.info.Anywhere || is(function, "CONNECTION_ID")
	}
	a.depth++
	a.some = a.some || a.depth > 63 // out of bits
}

// mayCall reports whether the current parenthesis may call a stored function. A number is a name in db.5().
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

// userLock notes a name in front of a parenthesis, that of a stored or loadable function if called, which may be that of a
// function with which a lock is taken, or given back, that lives as long as the connection.
func (a *analyzer) userLock(function string, called bool) {
	switch {
	case called && (a.form == nil || !a.form.Defines):
		a.leaves |= leavesAny
	case called, a.prior.tok == name:
		return
	case is(function, "GET_LOCK"):
		a.taken++
	case is(function, "RELEASE_LOCK"):
		a.released++
	case is(function, "RELEASE_ALL_LOCKS"):
		a.released = 1 << 30
	default:
		return
	}
	a.leaves |= leavesNoted
}

// systems are the schemas with tables that DML reads without locks, and recalling the functions and variables that tell what
// earlier statements have left, or which connection it is. Both matter in quotes, too.
var (
	systems   = []string{"INFORMATION_SCHEMA", "MYSQL", "PERFORMANCE_SCHEMA", "SYS"}
	recalling = []string{
		"CONNECTION_ID", "ERROR_COUNT", "FOUND_ROWS", "IDENTITY", "LAST_INSERT_ID", "ROW_COUNT", "WARNING_COUNT",
	}
)

// watched are these and the keywords that matter wherever they stand, by their length.
var watched = func() (byLength [20][]string) {
	keywords := []string{"NEXTVAL", "OF", "SELECT", "SETVAL", "SHARE", "TABLE", "UPDATE", "VALUE", "VALUES"}
	for _, w := range slices.Concat(systems, recalling, keywords) {
		byLength[len(w)] = append(byLength[len(w)], w)
	}
	return byLength
}()

// keyword takes note of the current token, if it is watched. Where it is a name and not the keyword (t.table), the answer only
// becomes more careful.
func (a *analyzer) keyword() {
	w := a.value()
	if len(w) >= len(watched) || !isOneOf(w, watched[len(w)]...) {
		return
	}
	switch {
	case isOneOf(w, systems...):
		a.system = true
	case isOneOf(w, recalling...):
		a.info.Recalls = a.info.Recalls || a.variables // @@identity
	case a.tok == name:
	case is(w, "SELECT"):
		a.open |= a.bit()
		a.blocks++
	case is(w, "TABLE"):
		a.reads, a.rows = true, true
		a.blocks++
	case is(w, "VALUES"):
		a.blocks++
	case is(w, "OF"): // FOR UPDATE OF: the other tables are read without locks
		a.some = a.some || isOneOf(a.before(), "UPDATE", "SHARE")
	case isOneOf(w, "UPDATE", "SHARE"): // FOR UPDATE, FOR SHARE, LOCK IN SHARE MODE
		a.locks = a.locks || a.reads && isOneOf(a.before(), "FOR", "IN")
	default: // NEXT VALUE FOR s, s.NEXTVAL, SETVAL
		a.functions = a.functions || !is(w, "VALUE") || is(a.before(), "NEXT")
	}
}
