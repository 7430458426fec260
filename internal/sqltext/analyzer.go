package sqltext

// analyzer works out what the statements of a text do. next notes what matters in any
// statement; what follows from the verb is in verbs.go.
type analyzer struct {
	scanner
	statement
	sum Info // of the statements before
	any bool // there were some

	left  *Left // is told what the statements leave, unless it is nil
	adds  bool  // they take nothing back for sure: the text has failed, or what follows may be a body
	query bool  // the first statement alone has run

	asked  func(schema, table string) bool // is asked for the tables that the statements write, unless it is nil
	target string                          // the first one to which it said yes
}

// statement is what is known of the statement that is being read.
type statement struct {
	info   Info
	rule   rule
	leaves leaves
	verbs  int    // how many verbs have been looked at, inner ones too
	name   string // the one that decided

	savepoint string // that it sets, or goes back to

	depth, deepest int
	after          keyword // what the token before the current one has begun
	values         bool    // has a VALUES
	sequence       bool    // draws from a sequence
	system         bool    // names a schema with tables that DML reads without locks
	variables      bool    // names a variable
	recalls        bool    // names a variable that earlier statements set
	functions      bool    // may call a stored function
	rows           bool    // has a query block with tables
	plan           bool    // answers with a plan
	explains       bool    // with EXPLAIN, not with MariaDB's ANALYZE
	qualified      bool    // the current name has a qualifier in front of it
	alias          bool    // the current name is one that the statement gives

	// Query blocks, the parts from SELECT or TABLE to the end of the block: at
	// most one is open at each depth of parentheses, bit d stands for depth d.
	open     uint64
	tables   uint64 // it has tables
	calls    uint64 // it has parentheses: a function or a subquery
	locks    uint64 // it has a locking clause, for all its tables
	unlocked bool   // a block that may read without locks has ended
}

// rule says how Snapshot follows from the statement as a whole.
type rule uint8

const (
	asIs     rule = iota // info.Snapshot is right already
	always               // it takes a snapshot
	ifBlocks             // if it has a query block that reads without locks
	ifCalls              // if it has any parentheses: a function, a subquery
	ifSystem             // if it names a schema of system tables
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
		if a.left != nil {
			a.leave()
		}
		a.add()
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
	case a.functions || a.sequence || i.Kind == Commits || a.plan && !query:
		i.Changes = MayChange
	case query:
		i.Changes = ChangesNothing
	}
	switch a.rule {
	case always:
		i.Snapshot = true
	case ifBlocks:
		for d := 0; a.open != 0 && d < 64; d++ {
			a.endBlock(1 << d)
		}
		// VALUES ROW(1) reads nothing, ROW(f(1)) may.
		i.Snapshot = a.unlocked || a.functions || a.values && a.deepest > 1
	case ifCalls:
		i.Snapshot = a.deepest > 0
	case ifSystem:
		i.Snapshot = a.system || a.functions
	}
	i.Snapshot = i.Snapshot || a.explains && query
	if query && (a.functions || a.sequence) {
		i.Kind = Write
	}
}

// next goes on to the next token and takes note of what matters in any statement.
func (a *analyzer) next() {
	if !a.scanner.next() {
		return
	}
	before := a.after
	a.after = 0
	if before == keyFrom {
		a.rows = a.rows || a.showsRows()
	}
	switch a.tok {
	case word:
		a.place(before)
		if k := keywordOf(a.current()); k != 0 {
			a.after = a.keyword(k, before)
		}
	case name:
		a.place(before)
		if k := keywordOf(a.text[a.from+1 : a.pos-1]); k >= keySystem {
			a.after = a.keyword(k, before)
		}
	case '(':
		a.openParenthesis(before)
	case ')':
		a.info.Recalls = a.info.Recalls || before == keyRecallingCall // with an argument it is set
		a.endBlock(a.bit())
		a.depth = max(a.depth-1, 0)
	case assign:
		a.leaves |= leavesVariables
	case variable:
		a.variables = true
		a.info.Recalls = a.info.Recalls || a.current() != "@@" // one of the user's
		if before == keyInto {
			a.leaves |= leavesAny
		}
	}
}

// bit is the bit of a query block at the current depth.
func (a *analyzer) bit() uint64 { return 1 << a.depth }

func (a *analyzer) beginBlock() {
	bit := a.bit()
	a.endBlock(bit) // a UNION has no parentheses between its blocks
	a.open |= bit
}

func (a *analyzer) endBlock(bit uint64) {
	// Calls in a locking read are taken for COUNT and the like; without a
	// table the locking clause says nothing.
	if a.open&(a.tables|a.calls)&^(a.tables&a.locks)&bit != 0 {
		a.unlocked = true
	}
	a.open &^= bit
	a.tables &^= bit
	a.calls &^= bit
	a.locks &^= bit
}

// place notes what is in front of a name, as far as it tells whether the name can
// be that of a function. The token before begins with a dot also in db.1f.
func (a *analyzer) place(before keyword) {
	a.qualified = a.prior.to > a.prior.from && a.text[a.prior.from] == '.'
	// AS d (a), (SELECT …) d (a), MATCH (a) AGAINST (…), '$' COLUMNS (…)
	a.alias = before == keyAs || a.prior.tok == ')' || a.prior.tok == literal
}

func (a *analyzer) openParenthesis(before keyword) {
	a.functions = a.functions || a.mayCall()
	switch {
	case before == keyUserLock && a.userLock():
		a.leaves |= leavesNoted
	case before == keyUserLock:
		a.leaves |= leavesAny
	case before == keyRecalling:
		a.info.Anywhere = a.info.Anywhere || is(a.before(), "CONNECTION_ID")
		a.after = keyRecallingCall
	}
	a.calls |= a.open & a.bit()
	a.depth++
	a.deepest = max(a.deepest, a.depth)
	if a.depth > 63 {
		a.unlocked = true // out of bits
	}
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

// keyword is a word that matters wherever it stands. Where it is a name and not the
// keyword (t.from), the answer only becomes more careful.
type keyword uint8

const (
	keyAs keyword = iota + 1
	keyFor
	keyFrom
	keyIn
	keyInto
	keyLock
	keyNext
	keyOf
	keySelect
	keyShare
	keyTable
	keyUpdate
	keyValue
	keyValues
	keySequence // a function that draws from a sequence

	keyLocking       // FOR UPDATE, FOR SHARE
	keyLockIn        // LOCK IN
	keyRecallingCall // LAST_INSERT_ID (

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
	2:  {{"AS", keyAs}, {"IN", keyIn}, {"OF", keyOf}},
	3:  {{"FOR", keyFor}, {"SYS", keySystem}},
	4:  {{"FROM", keyFrom}, {"INTO", keyInto}, {"LOCK", keyLock}, {"NEXT", keyNext}},
	5:  {{"TABLE", keyTable}, {"SHARE", keyShare}, {"VALUE", keyValue}, {"MYSQL", keySystem}},
	6:  {{"SELECT", keySelect}, {"UPDATE", keyUpdate}, {"VALUES", keyValues}, {"SETVAL", keySequence}},
	7:  {{"NEXTVAL", keySequence}},
	8:  {{"GET_LOCK", keyUserLock}, {"IDENTITY", keyRecalling}},
	9:  {{"ROW_COUNT", keyRecalling}},
	10: {{"FOUND_ROWS", keyRecalling}},
	11: {{"ERROR_COUNT", keyRecalling}},
	12: {{"RELEASE_LOCK", keyUserLock}},
	13: {{"CONNECTION_ID", keyRecalling}, {"WARNING_COUNT", keyRecalling}},
	14: {{"LAST_INSERT_ID", keyRecalling}},
	17: {{"RELEASE_ALL_LOCKS", keyUserLock}},
	18: {{"INFORMATION_SCHEMA", keySystem}},
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

// keyword takes note of k, which is behind before, and returns what the two begin.
func (a *analyzer) keyword(k, before keyword) (after keyword) {
	switch k {
	case keyFor, keyLock, keyNext, keyInto, keyAs, keyUserLock:
		return k
	case keyRecalling:
		a.recalls = true
		return k
	case keySystem:
		a.system = true
	case keySequence:
		a.sequence = true
	case keyValues:
		a.values = true
	case keySelect:
		a.beginBlock()
	case keyTable:
		a.beginBlock()
		a.tables |= a.bit()
		a.rows = true
	case keyFrom:
		if a.open&a.bit() != 0 {
			a.tables |= a.bit()
			return keyFrom
		}
	default:
		return a.phrase(before, k)
	}
	return 0
}

// phrase takes note of two words: FOR UPDATE, FOR SHARE OF, LOCK IN SHARE, NEXT VALUE.
func (a *analyzer) phrase(first, second keyword) (after keyword) {
	switch [2]keyword{first, second} {
	case [2]keyword{keyFor, keyUpdate}, [2]keyword{keyFor, keyShare}:
		a.locks |= a.open & a.bit()
		return keyLocking
	case [2]keyword{keyLocking, keyOf}:
		a.locks &^= a.bit() // the other tables are read without locks
	case [2]keyword{keyLock, keyIn}:
		return keyLockIn
	case [2]keyword{keyLockIn, keyShare}:
		a.locks |= a.open & a.bit()
	case [2]keyword{keyNext, keyValue}:
		a.sequence = true
	}
	return 0
}
