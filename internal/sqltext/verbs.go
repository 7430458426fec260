package sqltext

// verb decides by the verb at the current token, and by as many tokens after
// it as it takes. It leaves the rest of the statement to the caller.
func (s *scanner) verb() {
	for s.tok == '(' {
		s.next()
	}
	if s.verbs++; s.verbs > 10 {
		s.info = worst // SET STATEMENT … FOR SET STATEMENT … FOR …
		return
	}
	if s.tok != word {
		// No statement begins so.
		s.decide(Write, ifCalls)
		return
	}
	var buf [20]byte
	upper := buf[:copy(buf[:], s.current())] // no verb is as long as buf
	for i, c := range upper {
		if c >= 0x80 {
			// No statement begins so either, unless in another character set
			// the byte is whitespace.
			s.tok = s.giveUp()
			return
		}
		if c >= 'a' && c <= 'z' {
			upper[i] = c - 0x20
		}
	}

	s.name = s.current()
	switch string(upper) {
	case "SELECT", "TABLE", "VALUES":
		s.decide(Read, ifBlocks)
	case "WITH":
		s.with()
	case "SHOW":
		s.show()
	case "DESCRIBE", "DESC", "EXPLAIN":
		s.explain()
	case "CHECKSUM", "HELP":
		s.decideSnapshot(Read)

	case "INSERT", "REPLACE":
		s.decide(Write, ifSystem)
		s.info.Changes = ChangesCounted
		s.insertInto()
	case "UPDATE", "DELETE":
		s.decide(Write, ifSystem)
		s.info.Changes = ChangesCounted
	case "LOAD":
		s.load()
	case "SAVEPOINT", "RELEASE":
		s.decide(Write, asIs)
		s.info.Changes = ChangesNothing
	case "USE", "PREPARE", "DEALLOCATE":
		s.decide(Write, asIs)
		s.info.Taints = true
		s.info.Changes = ChangesNothing
	case "GET": // DIAGNOSTICS @x = …
		s.decide(Write, ifCalls)
		s.info.Taints, s.info.Recalls = true, true
		s.info.Changes = ChangesNothing
	case "CALL":
		s.decideSnapshot(Write)
		s.info.Taints, s.info.Calls = true, true
		s.info.Session, s.info.Effect = AnyLevel, anything
	case "HANDLER":
		s.decideSnapshot(Write)
		s.info.Taints = true
	case "SET":
		s.set()

	case "BEGIN":
		s.begin()
	case "START":
		s.start()
	case "COMMIT", "ROLLBACK":
		s.endTransaction()
	case "XA":
		s.xa()
	case "CREATE":
		s.create()
	case "DROP":
		s.drop()
	case "ANALYZE":
		s.analyze()
	// All of these commit on one of the servers at least, in some of their
	// forms (SHUTDOWN and RESTART were not tried). PURGE, KILL, SIGNAL, DO don't.
	case "ALTER", "RENAME", "TRUNCATE", "GRANT", "REVOKE",
		"OPTIMIZE", "REPAIR", "CHECK", "CACHE", "IMPORT", "CLONE", "INSTALL", "UNINSTALL",
		"STOP", "CHANGE", "RESET", "SHUTDOWN", "RESTART":
		s.decide(Commits, asIs)
	case "LOCK", "UNLOCK", "FLUSH", "BACKUP": // FLUSH TABLES WITH READ LOCK
		s.decide(Commits, asIs)
		s.info.Taints = true
	// May run any statement. MariaDB takes compound statements outside of
	// procedures too; the parts after their first ; look like statements of
	// their own here.
	case "EXECUTE", "BINLOG", "IF", "CASE", "LOOP", "REPEAT", "WHILE", "FOR", "DECLARE":
		s.info = worst

	default:
		s.decide(Write, ifCalls)
	}
}

// decide sets the kind and the rule; flags that were found before stay. What commits
// does so if it gets that far, or where there is anything to be committed.
func (s *scanner) decide(k Kind, r rule) {
	s.info.Kind, s.rule, s.info.Effect = k, r, Effect{}
	if k == Commits {
		s.info.Effect = mayEnd
	}
}

func (s *scanner) decideSnapshot(k Kind) {
	s.decide(k, asIs)
	s.info.Snapshot = true
}

// with finds the main verb: the first word after a query in parentheses that
// doesn't belong to the list of x [(a)] AS (…) [CYCLE a RESTRICT], …
func (s *scanner) with() {
	outer := s.depth
	closed := false // the last thing in the list was in parentheses
	for {
		s.next()
		switch {
		case s.atEnd():
			s.decide(Write, ifCalls)
			return
		case s.tok == '(' && closed && s.depth == outer+1:
			s.verb()
			return
		case s.depth > outer:
		case s.tok == ')' || s.at("RESTRICT"):
			closed = true
		case s.tok == word && closed && !s.at("AS") && !s.at("CYCLE"):
			s.verb()
			return
		default:
			closed = false
			s.alias = true // x (a)
		}
	}
}

// show: MySQL reads its data dictionary for most of them, which makes the
// snapshot; not for these.
func (s *scanner) show() {
	s.next()
	if s.at("GLOBAL") || s.at("SESSION") || s.at("LOCAL") {
		s.next()
	}
	s.info.Recalls = s.at("WARNINGS") || s.at("ERRORS") || s.at("COUNT")
	if s.at("WARNINGS") || s.at("ERRORS") || s.at("VARIABLES") || s.at("STATUS") {
		s.decide(Read, ifCalls)
		return
	}
	s.decideSnapshot(Read)
}

// explain: only EXPLAIN ANALYZE runs the statement. Others may read all the
// same: the optimizer looks up constants, MySQL its data dictionary. MySQL
// explains a locking read without locks.
func (s *scanner) explain() {
	s.plan = true
	runs := false
	for s.next(); ; s.next() {
		switch {
		case s.at("ANALYZE"):
			runs = true
		case s.at("FORMAT"):
			s.next() // =
			s.next()
		case s.at("INTO"):
			s.next() // @x
		case s.at("FOR") && runs: // SCHEMA x
			s.next()
			s.next()
		case runs:
			s.verb()
			s.info.Changes = MayChange // it answers with a plan, not with a number of rows
			if s.info.Kind == Read {
				s.decideSnapshot(Read)
			}
			return
		default:
			s.decideSnapshot(Read)
			return
		}
	}
}

// analyze: MariaDB's ANALYZE [FORMAT=JSON] runs a statement, ANALYZE TABLE
// commits.
func (s *scanner) analyze() {
	s.next()
	if s.at("FORMAT") {
		s.next() // =
		s.next()
		s.next()
	}
	switch {
	case s.tok == '(', s.at("SELECT"), s.at("WITH"), s.at("VALUES"),
		s.at("INSERT"), s.at("REPLACE"), s.at("UPDATE"), s.at("DELETE"):
		s.verb()
		s.info.Changes, s.plan = MayChange, true // as above
	default:
		s.decide(Commits, asIs)
	}
}

func (s *scanner) load() {
	s.next()
	if !s.at("DATA") && !s.at("XML") { // INDEX INTO CACHE
		s.decide(Commits, asIs)
		return
	}
	s.decide(Write, ifSystem)
	set := false
	for before := ""; !s.atEnd(); s.next() {
		if s.at("SET") && !is(before, "CHARACTER") {
			set, s.functions = true, false // what was before it are columns
		}
		before = s.current()
	}
	s.functions = s.functions && set
	s.info.Taints = s.info.Taints || s.variables // (a, @x): read into @x
}

// create: only CREATE TEMPORARY TABLE doesn't commit; the SELECT of one locks
// what it reads, like INSERT … SELECT. CREATE TEMPORARY SEQUENCE does commit.
func (s *scanner) create() {
	s.next()
	if s.at("OR") { // REPLACE
		s.next()
		s.next()
	}
	if !s.at("TEMPORARY") {
		s.decide(Commits, asIs)
		return
	}
	s.info.Taints = true
	s.next()
	if !s.at("TABLE") {
		s.decide(Commits, asIs)
		return
	}
	s.decide(Write, ifSystem)
	selects := false
	for ; !s.atEnd(); s.next() {
		if s.at("SELECT") && !selects {
			selects, s.functions = true, false // what was before it are columns
		}
	}
	s.functions = s.functions && selects
}

// drop: DROP TABLE commits even where the table is a temporary one.
func (s *scanner) drop() {
	s.next()
	if s.at("PREPARE") {
		s.decide(Write, asIs)
		s.info.Taints = true
		return
	}
	if !s.at("TEMPORARY") {
		s.decide(Commits, asIs)
		return
	}
	s.info.Taints = true
	s.next()
	if s.at("TABLE") || s.at("TABLES") {
		s.decide(Write, asIs)
		return
	}
	s.decide(Commits, asIs)
}
