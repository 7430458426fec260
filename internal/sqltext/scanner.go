package sqltext

// scanner goes through the statements of a text. next does the watching that
// is the same everywhere; what a verb means is in verbs.go.
type scanner struct {
	lexer
	tok token // the current token
	statement
}

// statement is what is known of the statement that is being read.
type statement struct {
	info  Info
	rule  rule
	name  string // the verb that decided
	verbs int    // how many verbs have been looked at, inner ones too

	depth, deepest int
	after          after
	values         bool // has a VALUES
	sequence       bool // draws from a sequence
	system         bool // names a schema with tables that DML reads without locks
	variables      bool // names a variable
	recalls        bool // names a variable that earlier statements set
	functions      bool // may call a stored function
	rows           bool // has a query block with tables
	plan           bool // answers with a plan
	qualified      bool // the current name has a qualifier in front of it
	alias          bool // the current name is one that the statement gives

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
	ifBlocks             // if it has a query block that reads without locks
	ifCalls              // if it has any parentheses: a function, a subquery
	ifSystem             // if it names a schema of system tables
)

// after is what the token before the current one has begun.
type after uint8

const (
	afterOther       after = iota
	afterFor               // FOR
	afterLocking           // FOR UPDATE, FOR SHARE
	afterLock              // LOCK
	afterLockIn            // LOCK IN
	afterInto              // INTO
	afterNext              // NEXT
	afterFrom              // FROM of a query
	afterLockingFunc       // GET_LOCK and its like
	afterAs                // AS
	afterRecalling         // LAST_INSERT_ID and its like
	afterRecall            // LAST_INSERT_ID (
)

// scan adds all statements of the text to sum. It leaves out a broken one,
// which no server runs.
func (s *scanner) scan(sum *total) {
	for {
		s.statement, s.tok = statement{}, other
		s.next()
		for s.tok == '(' {
			s.next()
		}
		if !s.atEnd() {
			s.verb()
			for !s.atEnd() {
				s.next()
			}
			if s.broken {
				return
			}
			s.finish()
			sum.add(s.info)
		}
		if s.tok == end {
			return
		}
	}
}

// finish settles what could not be said before the end of the statement.
func (s *scanner) finish() {
	query := s.info.Kind == Read
	s.info.Functions = s.functions && query
	s.info.Tables = s.rows && !s.plan && s.info.Changes != ChangesCounted
	if query && (s.functions || s.sequence) {
		s.info.Kind = Write
	}
	s.info.Recalls = s.info.Recalls || s.variables && s.recalls
	switch {
	case s.functions || s.sequence || s.info.Kind == Commits:
		s.info.Changes = MayChange
	case s.info.Kind == Read:
		s.info.Changes = ChangesNothing
	}
	switch s.rule {
	case ifBlocks:
		for d := 0; s.open != 0 && d < 64; d++ {
			s.endBlock(1 << d)
		}
		// VALUES ROW(1) reads nothing, ROW(f(1)) may.
		s.info.Snapshot = s.unlocked || s.functions || s.values && s.deepest > 1
	case ifCalls:
		s.info.Snapshot = s.deepest > 0
	case ifSystem:
		s.info.Snapshot = s.system || s.functions
	}
}

// next goes on to the next token and takes note of what matters in any
// statement. It stays at the end of the statement once it is there.
func (s *scanner) next() {
	if s.atEnd() {
		return
	}
	before, tok, from, to := s.after, s.tok, s.from, s.pos
	s.after = afterOther
	s.tok = s.lex()
	if before == afterFrom {
		s.rows = s.rows || s.showsRows()
	}
	switch s.tok {
	case word:
		s.place(tok, s.text[from:to], before)
		s.after = s.watch(s.current(), before)
	case name:
		s.place(tok, s.text[from:to], before)
		s.after = s.watchName(unquote(s.current()))
	case '(':
		s.functions = s.functions || s.mayCall(tok, s.text[from:to], s.from > to)
		s.info.Taints = s.info.Taints || before == afterLockingFunc
		if before == afterRecalling {
			s.after = afterRecall
		}
		s.calls |= s.open & s.bit()
		s.depth++
		s.deepest = max(s.deepest, s.depth)
		if s.depth > 63 {
			s.unlocked = true // out of bits
		}
	case ')':
		s.info.Recalls = s.info.Recalls || before == afterRecall // with an argument it is set
		s.endBlock(s.bit())
		s.depth = max(s.depth-1, 0)
	case assign:
		s.info.Taints = true
	case variable:
		s.variables = true
		s.info.Recalls = s.info.Recalls || s.current() != "@@" // one of the user's
		s.info.Taints = s.info.Taints || before == afterInto
	}
}

// atEnd reports whether the statement is over.
func (s *scanner) atEnd() bool { return s.tok == ';' || s.tok == end }

// at reports whether the current token is the given keyword.
func (s *scanner) at(upper string) bool { return s.tok == word && is(s.current(), upper) }

// bit is the bit of a query block at the current depth.
func (s *scanner) bit() uint64 { return 1 << s.depth }

func (s *scanner) beginBlock() {
	bit := s.bit()
	s.endBlock(bit) // a UNION has no parentheses between its blocks
	s.open |= bit
}

func (s *scanner) endBlock(bit uint64) {
	// Calls in a locking read are taken for COUNT and the like; without a
	// table the locking clause says nothing.
	if s.open&(s.tables|s.calls)&^(s.tables&s.locks)&bit != 0 {
		s.unlocked = true
	}
	s.open &^= bit
	s.tables &^= bit
	s.calls &^= bit
	s.locks &^= bit
}

// place notes what is in front of a name, as far as it tells whether the name can
// be that of a function. The prior token begins with a dot also in db.1f.
func (s *scanner) place(tok token, prior string, before after) {
	s.qualified = prior != "" && prior[0] == '.'
	// AS d (a), (SELECT …) d (a), MATCH (a) AGAINST (…), '$' COLUMNS (…)
	s.alias = before == afterAs || tok == ')' || tok == literal
}

// showsRows reports whether the current token, the first after FROM, may name a table
// of the application's. A query in parentheses has a FROM of its own.
func (s *scanner) showsRows() bool {
	w := s.current()
	switch s.tok {
	case '(':
		return false
	case name:
		w = unquote(w)
	}
	return !is(w, "DUAL") && !is(w, "INFORMATION_SCHEMA") && !is(w, "PERFORMANCE_SCHEMA") && !is(w, "MYSQL") && !is(w, "SYS")
}

// mayCall reports whether a parenthesis behind the prior token, or apart from it,
// may call a stored function. A number is a name in db.5().
func (s *scanner) mayCall(tok token, prior string, apart bool) bool {
	switch tok {
	case literal:
		return true
	case name:
		return s.qualified || !s.alias
	case word:
		return s.qualified || !s.alias && storedFunc(prior, apart)
	}
	return false
}

// watch takes note of a word wherever it stands. Where it is a name and not
// the keyword (t.from), the answer only becomes more careful.
func (s *scanner) watch(w string, before after) after {
	if before != afterOther {
		if next, ok := s.phrase(w, before); ok {
			return next
		}
	}
	switch len(w) {
	case 2:
		if is(w, "AS") {
			return afterAs
		}
	case 3:
		if is(w, "FOR") {
			return afterFor
		}
	case 4:
		if next := s.fourLetters(w); next != afterOther {
			return next
		}
	case 5:
		if is(w, "TABLE") {
			s.beginBlock()
			s.tables |= s.bit()
			s.rows = true
		}
	case 6:
		switch {
		case is(w, "SELECT"):
			s.beginBlock()
		case is(w, "VALUES"):
			s.values = true
		case is(w, "SETVAL"):
			s.sequence = true
		}
	case 7:
		s.sequence = s.sequence || is(w, "NEXTVAL")
	}
	return s.watchName(w)
}

// phrase takes note of a word that goes on with a phrase: FOR UPDATE, FOR SHARE OF,
// LOCK IN SHARE, NEXT VALUE.
func (s *scanner) phrase(w string, before after) (next after, ok bool) {
	switch {
	case before == afterFor && (is(w, "UPDATE") || is(w, "SHARE")):
		s.locks |= s.open & s.bit()
		return afterLocking, true
	case before == afterLocking && is(w, "OF"):
		s.locks &^= s.bit() // the other tables are read without locks
	case before == afterLock && is(w, "IN"):
		return afterLockIn, true
	case before == afterLockIn && is(w, "SHARE"):
		s.locks |= s.open & s.bit()
	case before == afterNext && is(w, "VALUE"):
		s.sequence = true
	default:
		return afterOther, false
	}
	return afterOther, true
}

// fourLetters takes note of a keyword of four letters. Most texts have many words of
// that length, so the first letter decides.
func (s *scanner) fourLetters(w string) after {
	switch w[0] | 0x20 {
	case 'f':
		if is(w, "FROM") && s.open&s.bit() != 0 {
			s.tables |= s.bit()
			return afterFrom
		}
	case 'i':
		if is(w, "INTO") {
			return afterInto
		}
	case 'l':
		if is(w, "LOCK") {
			return afterLock
		}
	case 'n':
		if is(w, "NEXT") {
			return afterNext
		}
	}
	return afterOther
}

// watchName takes note of a name, quoted or not.
func (s *scanner) watchName(w string) after {
	switch len(w) {
	case 3:
		s.system = s.system || is(w, "SYS")
	case 5:
		s.system = s.system || is(w, "MYSQL")
	case 18:
		s.system = s.system || is(w, "INFORMATION_SCHEMA")
	}
	switch {
	case isLockingFunc(w):
		return afterLockingFunc
	case isRecalling(w):
		s.recalls = true
		return afterRecalling
	}
	return afterOther
}

// isRecalling reports whether w is a function, or a variable, that tells what earlier
// statements of the connection have left, or which connection it is.
func isRecalling(w string) bool {
	switch len(w) {
	case 8:
		return is(w, "IDENTITY")
	case 9:
		return is(w, "ROW_COUNT")
	case 10:
		return is(w, "FOUND_ROWS")
	case 11:
		return is(w, "ERROR_COUNT")
	case 13:
		return is(w, "CONNECTION_ID") || is(w, "WARNING_COUNT")
	case 14:
		return is(w, "LAST_INSERT_ID")
	}
	return false
}

// isLockingFunc reports whether w is a function that takes or gives back a
// lock which lives as long as the connection: the built-in ones, and those
// of MySQL's locking service and version tokens.
func isLockingFunc(w string) bool {
	switch len(w) {
	case 8:
		return is(w, "GET_LOCK")
	case 12:
		return is(w, "RELEASE_LOCK")
	case 17:
		return is(w, "RELEASE_ALL_LOCKS")
	case 21:
		return is(w, "VERSION_TOKENS_UNLOCK") || is(w, "SERVICE_RELEASE_LOCKS")
	case 22:
		return is(w, "SERVICE_GET_READ_LOCKS")
	case 23:
		return is(w, "SERVICE_GET_WRITE_LOCKS")
	case 26:
		return is(w, "VERSION_TOKENS_LOCK_SHARED")
	case 29:
		return is(w, "VERSION_TOKENS_LOCK_EXCLUSIVE")
	}
	return false
}

// unquote takes the quotes off a name. It leaves doubled ones in it alone.
func unquote(quoted string) string { return quoted[1 : len(quoted)-1] }

// is reports whether w is the keyword upper, in whatever case. The keyword
// consists of A to Z and _ only.
func is(w, upper string) bool {
	if len(w) != len(upper) {
		return false
	}
	for i := range len(upper) {
		if w[i]&^0x20 != upper[i] {
			return false
		}
	}
	return true
}
