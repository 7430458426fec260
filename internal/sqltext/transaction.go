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
	s.info.Opens = true
}

// start: START TRANSACTION, or START REPLICA and the like.
func (s *scanner) start() {
	s.decide(Commits, asIs)
	if s.next(); !s.at("TRANSACTION") {
		return
	}
	s.info.Opens = true
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
		return
	}
	if s.at("AND") { // [NO] CHAIN
		s.next()
		s.info.Opens = s.at("CHAIN")
	}
}

// xa: an XA transaction is open until its COMMIT or ROLLBACK.
func (s *scanner) xa() {
	s.decide(Commits, asIs)
	s.next()
	s.info.Opens = !s.at("COMMIT") && !s.at("ROLLBACK") && !s.at("RECOVER")
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
	case s.at("TRANSACTION"): // for the next transaction only
		s.decide(Write, asIs)
		return
	case s.at("PASSWORD"), s.at("DEFAULT"):
		s.decide(Commits, asIs)
		s.info.Taints = true
		return
	}
	s.decide(Write, ifCalls)
	s.info.Taints = true
	for !s.atEnd() {
		s.assignment()
	}
}

// assignment goes on in a SET by at least one token, and through the whole of
// an assignment to autocommit. GLOBAL and PERSIST don't commit; it isn't
// worth telling them apart.
func (s *scanner) assignment() {
	target := s.at("AUTOCOMMIT") ||
		s.tok == name && is(unquote(s.current()), "AUTOCOMMIT")
	s.next()
	if !target || s.tok != '=' && s.tok != assign {
		return
	}
	s.info.Kind = Commits
	s.next()
	on := s.at("ON") || s.at("TRUE") || s.tok == literal && s.current() == "1"
	if s.next(); !on || s.tok != ',' && !s.atEnd() {
		s.info.Opens = true // off, or an expression
	}
}
