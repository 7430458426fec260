package sqltext

// begin: BEGIN [WORK] opens a transaction; MariaDB's BEGIN NOT ATOMIC, and in
// its Oracle mode any BEGIN with a statement after it, is a block of
// statements.
func (s *scanner) begin() {
	s.next()
	if s.at("WORK") {
		s.next()
	}
	if !s.atEnd() {
		s.info = worst
		return
	}
	s.decide(Commits, asIs)
	s.info.Effect = begins
}

// start: START TRANSACTION, or START REPLICA and the like.
func (s *scanner) start() {
	s.decide(Commits, asIs)
	if s.next(); !s.at("TRANSACTION") {
		return
	}
	s.info.Effect = begins
	for ; !s.atEnd(); s.next() {
		if s.at("SNAPSHOT") {
			s.info.Snapshot = true
		}
	}
}

// endTransaction: COMMIT and ROLLBACK, but not ROLLBACK [WORK] TO.
func (s *scanner) endTransaction() {
	rollback := s.at("ROLLBACK")
	s.decide(Commits, asIs)
	s.next()
	if s.at("WORK") {
		s.next()
	}
	if rollback && s.at("TO") {
		s.decide(Write, asIs)
		s.info.GoesBack = true
		s.info.Changes = ChangesNothing
		return
	}
	s.info.Effect = ends
	if s.at("AND") { // [NO] CHAIN
		if s.next(); s.at("CHAIN") {
			s.info.Effect = begins
		}
	}
}

// xa: an XA transaction is open until its COMMIT or ROLLBACK. PREPARE leaves it with
// the connection, or with nobody.
func (s *scanner) xa() {
	s.decide(Commits, asIs)
	s.next()
	switch {
	case s.at("START"), s.at("BEGIN"):
		s.info.Effect = begins
	case s.at("COMMIT"), s.at("ROLLBACK"):
		s.info.Effect = ends
	case s.at("PREPARE"):
		s.info.Effect = mayEnd
	default: // END, RECOVER
		s.info.Effect = Effect{}
	}
}

// set tells the kinds of SET apart. Only some commit: autocommit (when it
// goes from 0 to 1), passwords and default roles.
func (s *scanner) set() {
	s.next()
	switch {
	case s.at("STATEMENT"): // MariaDB's SET STATEMENT x=y FOR …
		for !s.at("FOR") && !s.atEnd() {
			s.next()
		}
		s.next()
		s.verb()
		return
	case s.at("PASSWORD"), s.at("DEFAULT"):
		s.decide(Commits, asIs)
		s.info.Taints = true
		return
	case s.at("TRANSACTION"): // for the next transaction only
		s.decide(Write, asIs)
		s.info.Next = s.characteristics()
		s.info.Changes = ChangesNothing
		return
	}
	s.decide(Write, ifCalls)
	s.info.Changes = ChangesNothing
	for of := ofSession; !s.atEnd(); s.next() {
		of = s.assignment(of)
	}
}

// whose says whose variable a SET sets.
type whose uint8

const (
	ofSession whose = iota
	ofGlobal        // of new connections
	ofNext          // of the next transaction, where there is such a thing, else of the session
)

// whoseWord returns what the keyword at the current token says.
func (s *scanner) whoseWord() (of whose, ok bool) {
	switch {
	case s.at("GLOBAL"), s.at("PERSIST"), s.at("PERSIST_ONLY"):
		return ofGlobal, true
	case s.at("SESSION"), s.at("LOCAL"):
		return ofSession, true
	}
	return 0, false
}

// assignment goes through one assignment of a SET, to the comma behind it. The last
// GLOBAL or SESSION in front holds for those that have none, unless they have @@.
func (s *scanner) assignment(last whose) whose {
	outer := s.depth
	if of, ok := s.whoseWord(); ok {
		last = of
		if s.next(); s.at("TRANSACTION") {
			s.setTransaction(of)
			return last
		}
	}
	of := s.whoseVariable(last)
	s.info.Taints = s.info.Taints || of != ofGlobal
	variable := s.current()
	if s.tok == name {
		variable = unquote(variable)
	}
	s.next()
	if of != ofGlobal && (s.tok == '=' || s.tok == assign) {
		s.assign(variable, of)
	}
	for !s.atEnd() && (s.tok != ',' || s.depth != outer) {
		s.next()
	}
	return last
}

// setTransaction goes through SET SESSION TRANSACTION, or GLOBAL.
func (s *scanner) setTransaction(of whose) {
	if l := s.characteristics(); of == ofSession {
		s.info.Session |= l
		s.info.Taints = true
	}
}

// whoseVariable goes on to the name of the variable, past an @@ in front of it, and
// says whose variable it is.
func (s *scanner) whoseVariable(last whose) whose {
	if s.tok != variable || s.current() != "@@" {
		return last
	}
	s.next()
	of, ok := s.whoseWord()
	if !ok {
		return ofNext
	}
	s.next()
	s.next() // .
	return of
}

// assign takes note of the value that a variable is set to, where it matters.
func (s *scanner) assign(variable string, of whose) {
	switch {
	case is(variable, "AUTOCOMMIT"):
		s.autocommit()
	case !is(variable, "TRANSACTION_ISOLATION") && !is(variable, "TX_ISOLATION"):
	case of == ofNext:
		s.info.Next |= s.level()
	default:
		s.info.Session |= s.level()
	}
}

// autocommit goes on to the value that autocommit is set to.
func (s *scanner) autocommit() {
	s.next()
	e := mayAuto
	switch value := s.value(); {
	case is(value, "ON"), is(value, "TRUE"), value == "1":
		e = auto
	case is(value, "OFF"), is(value, "FALSE"), value == "0":
		e = manual
	}
	if s.next(); s.tok != ',' && !s.atEnd() {
		e = mayAuto // an expression
	}
	s.info.Kind = Commits
	s.info.Effect = s.info.Effect.then(e)
}

// Level returns the isolation level that a server's variable has as its value, or is
// set to.
func Level(value string) Levels {
	switch {
	case isLevel(value, "READ", "UNCOMMITTED"), value == "0":
		return ReadUncommitted
	case isLevel(value, "READ", "COMMITTED"), value == "1":
		return ReadCommitted
	case isLevel(value, "REPEATABLE", "READ"), value == "2":
		return RepeatableRead
	case is(value, "SERIALIZABLE"), value == "3":
		return Serializable
	}
	return AnyLevel
}

// level goes on to the isolation level that a variable is set to.
func (s *scanner) level() Levels {
	s.next()
	l := Level(s.value())
	if s.next(); s.tok != ',' && !s.atEnd() {
		return AnyLevel
	}
	return l
}

// value is the current token, without the quotes of a string or a name.
func (s *scanner) value() string {
	v := s.current()
	if len(v) >= 2 && (v[0] == '\'' || v[0] == '"' || v[0] == '`') {
		return unquote(v)
	}
	return v
}

// isLevel reports whether w is the name of an isolation level of two words.
func isLevel(w, first, second string) bool {
	at := len(first)
	return len(w) > at && w[at] == '-' && is(w[:at], first) && is(w[at+1:], second)
}

// characteristics goes on to the end of a SET TRANSACTION, and returns the isolation
// level that it names, if any.
func (s *scanner) characteristics() (l Levels) {
	for s.next(); !s.atEnd(); s.next() {
		switch {
		case s.at("UNCOMMITTED"):
			l = ReadUncommitted
		case s.at("COMMITTED"):
			l = ReadCommitted
		case s.at("REPEATABLE"):
			l = RepeatableRead
		case s.at("SERIALIZABLE"):
			l = Serializable
		}
	}
	return l
}
