package sqltext

import "strings"

// verb says what a statement does that begins with it, in the form without any of the
// words that [analyzer.form] looks for. What commits does so if it gets that far, or where
// there is anything to be committed.
type verb struct {
	name     string // in upper case
	kind     Kind
	snapshot rule
	changes  Changes
	leaves   leaves

	// harmless: returns no rows of tables. It writes, and so locks by itself, or tells of
	// the server, of tables and of plans. EXPLAIN ANALYZE, and MariaDB's ANALYZE, keep the
	// rows to themselves. Not so CALL, HANDLER and EXECUTE, nor what nobody knows yet.
	harmless bool

	defines bool // see [Info.Defines]
}

// verbs are all that matter, by their first letters. A statement that begins with any other
// word is an unknownVerb.
var verbs = func() (byLetter ['Z' + 1][]verb) {
	for _, row := range []struct {
		names string
		verb
	}{
		{"SELECT TABLE VALUES", verb{kind: Read, snapshot: ifBlocks}},
		{"WITH", verb{snapshot: ifCalls}},
		{"SHOW", verb{kind: Read, snapshot: always, harmless: true}},
		{"DESCRIBE DESC EXPLAIN", verb{kind: Read, snapshot: always, harmless: true}},
		{"CHECKSUM HELP", verb{kind: Read, snapshot: always, harmless: true}},

		{"INSERT REPLACE", verb{snapshot: ifSystem, changes: ChangesCounted, harmless: true}},
		{"UPDATE DELETE", verb{snapshot: ifSystem, changes: ChangesCounted, harmless: true}},
		{"LOAD", verb{kind: Commits, harmless: true}},
		{"CALL", verb{snapshot: always, leaves: leavesNoted}},
		{"HANDLER", verb{snapshot: always, leaves: leavesAny}},
		{"DO SIGNAL RESIGNAL KILL PURGE", verb{snapshot: ifCalls, harmless: true}},

		{"SET", verb{snapshot: ifCalls, changes: ChangesNothing}},
		{"USE", verb{changes: ChangesNothing, leaves: leavesAny, harmless: true}},
		{"PREPARE", verb{changes: ChangesNothing, leaves: leavesNoted, harmless: true}},
		{"DEALLOCATE", verb{changes: ChangesNothing, harmless: true}},
		{"GET", verb{snapshot: ifCalls, changes: ChangesNothing, leaves: leavesAny, harmless: true}},

		{"BEGIN", verb{kind: Commits}},
		{"START", verb{kind: Commits, harmless: true}},
		{"COMMIT ROLLBACK", verb{kind: Commits, harmless: true}},
		{"SAVEPOINT", verb{changes: ChangesNothing, harmless: true}},
		{"RELEASE", verb{changes: ChangesNothing, harmless: true}},
		{"XA", verb{kind: Commits, harmless: true}},

		{"CREATE DROP ALTER RENAME TRUNCATE", verb{kind: Commits, harmless: true, defines: true}},
		{"GRANT REVOKE ANALYZE OPTIMIZE REPAIR CHECK", verb{kind: Commits, harmless: true, defines: true}},
		{"LOCK", verb{kind: Commits, leaves: leavesNoted, harmless: true}},
		{"UNLOCK", verb{kind: Commits, leaves: leavesNoted, harmless: true}},
		{"FLUSH", verb{kind: Commits, leaves: leavesNoted, harmless: true}},
		{"BACKUP", verb{kind: Commits, leaves: leavesAny, harmless: true}},
		// These commit on one of the servers at least, in some of their forms (SHUTDOWN and
		// RESTART were not tried).
		{"CACHE IMPORT CLONE INSTALL UNINSTALL STOP CHANGE RESET SHUTDOWN RESTART", verb{kind: Commits, harmless: true}},
		// These may run any statement: see form.
		{"EXECUTE BINLOG IF CASE LOOP REPEAT WHILE FOR DECLARE", verb{}},
	} {
		for name := range strings.FieldsSeq(row.names) {
			v := row.verb
			v.name = name
			byLetter[name[0]] = append(byLetter[name[0]], v)
		}
	}
	return byLetter
}()

var unknownVerb = verb{snapshot: ifCalls}

// verbOf returns the verb that w is, in whatever case.
func verbOf(w string) *verb {
	if letter := w[0] &^ 0x20; letter <= 'Z' {
		for i := range verbs[letter] {
			if v := &verbs[letter][i]; is(w, v.name) {
				return v
			}
		}
	}
	return &unknownVerb
}

// verb decides by the verb at the current token, or by the last one where one follows
// another: SET STATEMENT … FOR …, WITH … SELECT, EXPLAIN ANALYZE ….
func (a *analyzer) verb() {
	for another := true; another; {
		for a.tok == '(' {
			a.next()
		}
		if a.verbs++; a.verbs > 10 {
			a.anything()
			return
		}
		if a.tok != word {
			a.decide(&unknownVerb)
			return
		}
		w := a.current()
		v := verbOf(w)
		if v == &unknownVerb && strings.ContainsFunc(w, func(r rune) bool { return r >= 0x80 }) {
			// No statement begins so, unless in another character set the byte is
			// whitespace.
			a.tok = a.giveUp()
			return
		}
		a.name = w
		a.decide(v)
		another = a.form(v.name)
	}
}

// form goes on to as many tokens as it takes to tell the forms of a verb apart, and leaves
// the rest of the statement to the caller. It reports whether it has come to another verb,
// which decides instead.
func (a *analyzer) form(of string) (another bool) {
	switch of {
	case "": // such as ELSE
		a.inner()
	case "WITH":
		return a.with()
	case "SHOW":
		a.show()
	case "DESCRIBE", "DESC", "EXPLAIN":
		return a.explain()
	case "INSERT", "REPLACE":
		a.next()
		a.skip("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO")
		a.tableName() // the parenthesis behind it is no call
	case "UPDATE", "DELETE":
		if a.asked != nil {
			a.changed()
		}
	case "LOAD":
		a.load()
	case "CALL":
		a.info.Calls = true
		a.info.Session, a.info.Effect = AnyLevel, anyEffect
	case "SET":
		return a.set()
	case "PREPARE": // x FROM …
		a.next()
		a.noteLeft("prepared", a.objectName(), "PREPARE")
	case "DEALLOCATE": // PREPARE x
		a.next()
		a.next()
		a.leaves |= a.takesBack("prepared")
	case "GET": // DIAGNOSTICS @x = …
		a.info.Recalls = true
	case "BEGIN": // [WORK]
		a.next()
		a.skip("WORK")
		a.info.Effect = begins
		if !a.atEnd() { // MariaDB's BEGIN NOT ATOMIC, and in its Oracle mode any, is a block of statements
			a.anything()
		}
	case "START":
		a.start()
	case "COMMIT", "ROLLBACK":
		a.endTransaction()
	case "SAVEPOINT":
		a.next()
		a.nameSavepoint()
	case "XA":
		a.xa()
	case "CREATE":
		a.create()
	case "DROP":
		a.drop()
	case "ANALYZE":
		return a.analyze()
	case "LOCK": // TABLES, or INSTANCE FOR BACKUP
		a.noteLeft("locks", "", "LOCK TABLES")
	case "UNLOCK": // TABLES, or INSTANCE
		a.next()
		tables := a.at("TABLE", "TABLES")
		if a.next(); tables && a.atEnd() {
			a.noteGone("locks", "")
		} else {
			a.leaves |= leavesAny
		}
	case "FLUSH": // TABLES WITH READ LOCK, or FOR EXPORT
		for a.next(); !a.atEnd(); a.next() {
			if a.at("LOCK", "EXPORT") {
				a.leaves |= leavesAny
			}
		}
	case "EXECUTE", "BINLOG", "IF", "CASE", "LOOP", "REPEAT", "WHILE", "FOR", "DECLARE":
		// These may run any statement. MariaDB takes compound statements outside of procedures
		// too; the parts after their first ; look like statements of their own here.
		a.anything()
	}
	return false
}

// decide takes the answers from v. What a verb in front of it, or a token, leaves stays.
func (a *analyzer) decide(v *verb) {
	a.info.Kind, a.rule, a.info.Changes, a.info.Effect = v.kind, v.snapshot, v.changes, Effect{}
	a.info.Defines = v.defines
	a.leaves |= v.leaves
	if v.kind == Commits {
		a.info.Effect = mayEnd
	}
}

// anything is for a statement that may do anything.
func (a *analyzer) anything() {
	a.info, a.rule, a.adds = worst, asIs, true
	a.leaves |= leavesAny
	a.inner()
}

// with finds the main verb: the first word after a query in parentheses that
// doesn't belong to the list of x [(a)] AS (…) [CYCLE a RESTRICT], …
func (a *analyzer) with() (another bool) {
	outer := a.depth
	closed := false // the last thing in the list was in parentheses
	for {
		a.next()
		switch {
		case a.atEnd():
			return false
		case a.tok == '(' && closed && a.depth == outer+1:
			return true
		case a.depth > outer:
		case a.tok == ')' || a.at("RESTRICT"):
			closed = true
		case a.tok == word && closed && !a.at("AS", "CYCLE"):
			return true
		default:
			closed = false
			a.alias = true // x (a)
		}
	}
}

// show: MySQL reads its data dictionary for most of them, which makes the
// snapshot; not for these.
func (a *analyzer) show() {
	a.next()
	a.skip("GLOBAL", "SESSION", "LOCAL")
	a.info.Recalls = a.at("WARNINGS", "ERRORS", "COUNT")
	if a.at("WARNINGS", "ERRORS", "VARIABLES", "STATUS") {
		a.rule = ifCalls
	}
}

// explain: only EXPLAIN ANALYZE runs the statement. Others may read all the
// same: the optimizer looks up constants, MySQL its data dictionary. MySQL
// explains a locking read without locks.
func (a *analyzer) explain() (another bool) {
	a.plan, a.explains = true, true
	for a.next(); ; a.next() {
		switch {
		case a.at("ANALYZE"):
			another = true
		case a.at("FORMAT"):
			a.next() // =
			a.next()
		case a.at("INTO"):
			a.next() // @x
		case a.at("FOR") && another: // SCHEMA x
			a.next()
			a.next()
		default:
			return another
		}
	}
}

// analyze: MariaDB's ANALYZE [FORMAT=JSON] runs a statement, ANALYZE TABLE
// commits.
func (a *analyzer) analyze() (another bool) {
	a.next()
	if a.at("FORMAT") {
		a.next() // =
		a.next()
		a.next()
	}
	a.plan = a.tok == '(' || a.at("SELECT", "WITH", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE")
	return a.plan
}

// objectName goes on past the name, with its qualifiers, of a table or a prepared
// statement. A parenthesis behind it is no call. The name is "" where there is none.
func (a *analyzer) objectName() string {
	from, to := a.from, a.from
	for a.tok == word || a.tok == name {
		to = a.pos
		a.alias, a.qualified = true, false
		if a.next(); a.current() != "." {
			break
		}
		a.next()
	}
	return a.text[from:to]
}

// load: LOAD DATA and LOAD XML write, LOAD INDEX INTO CACHE commits.
func (a *analyzer) load() {
	a.next()
	if !a.at("DATA", "XML") {
		return
	}
	a.decide(&verb{snapshot: ifSystem})
	set := false
	for ; !a.atEnd(); a.next() {
		switch {
		case a.at("LOCAL"):
			a.info.FromClient = true
		case a.at("SET") && !is(a.before(), "CHARACTER"):
			set, a.functions = true, false // what was before it are columns
		case a.asked != nil && is(a.before(), "TABLE"): // INTO TABLE x
			a.tableName()
		}
	}
	a.functions = a.functions && set
	if a.variables { // (a, @x): read into @x
		a.leaves |= leavesAny
	}
}

// takesBack says what is left where a statement takes back what has the name at the
// current token.
func (a *analyzer) takesBack(kind string) leaves {
	if object := a.objectName(); a.atEnd() {
		a.noteGone(kind, object)
		return leavesNoted
	}
	return leavesAny
}

// skip goes on past any of the given keywords.
func (a *analyzer) skip(upper ...string) {
	for a.at(upper...) {
		a.next()
	}
}

// create: only CREATE TEMPORARY TABLE doesn't commit; the SELECT of one locks
// what it reads, like INSERT … SELECT. CREATE TEMPORARY SEQUENCE does commit.
func (a *analyzer) create() {
	a.next()
	if a.at("OR") { // REPLACE
		a.next()
		a.next()
	}
	if !a.at("TEMPORARY") {
		for ; !a.atEnd(); a.next() {
			a.adds = a.adds || a.at("PROCEDURE", "FUNCTION", "TRIGGER", "EVENT", "PACKAGE")
		}
		return
	}
	a.next()
	if !a.at("TABLE") {
		a.leaves |= leavesAny
		return
	}
	a.decide(&verb{snapshot: ifSystem})
	a.next()
	a.skip("IF", "NOT", "EXISTS")
	a.noteLeft("table", a.objectName(), "CREATE TEMPORARY TABLE")
	a.leaves |= leavesNoted
	selects := false
	for ; !a.atEnd(); a.next() {
		if a.at("SELECT") && !selects {
			selects, a.functions = true, false // what was before it are columns
		}
	}
	a.functions = a.functions && selects
}

// drop: DROP TABLE commits even where the table is a temporary one.
func (a *analyzer) drop() {
	a.next()
	if a.at("PREPARE") {
		a.next()
		a.decide(&verb{leaves: a.takesBack("prepared")})
		return
	}
	temporary := a.at("TEMPORARY")
	if temporary {
		a.next()
	}
	if !a.at("TABLE", "TABLES") {
		if temporary {
			a.leaves |= leavesAny
		}
		return
	}
	a.next()
	a.skip("IF", "NOT", "EXISTS")
	if left := a.takesBack("table"); temporary {
		a.decide(&verb{leaves: left})
	}
}

// start: START TRANSACTION, or START REPLICA and the like.
func (a *analyzer) start() {
	if a.next(); !a.at("TRANSACTION") {
		return
	}
	a.info.Effect = begins
	for ; !a.atEnd(); a.next() {
		if a.at("SNAPSHOT") {
			a.rule = always
		}
	}
}

// endTransaction: COMMIT and ROLLBACK, but not ROLLBACK [WORK] TO.
func (a *analyzer) endTransaction() {
	rollback := a.at("ROLLBACK")
	a.next()
	a.skip("WORK")
	if rollback && a.at("TO") {
		a.decide(&verb{changes: ChangesNothing})
		a.info.GoesBack = true
		if a.next(); a.at("SAVEPOINT") {
			a.next()
		}
		a.nameSavepoint()
		return
	}
	a.info.Effect = ends
	if a.at("AND") { // [NO] CHAIN
		if a.next(); a.at("CHAIN") {
			a.info.Effect = begins
		}
	}
}

// nameSavepoint goes on past the name of a savepoint.
func (a *analyzer) nameSavepoint() {
	if a.tok == word || a.tok == name {
		a.savepoint = a.value()
		if a.next(); !a.atEnd() {
			a.savepoint = ""
		}
	}
}

// xa: an XA transaction is open until its COMMIT or ROLLBACK. PREPARE leaves it with
// the connection, or with nobody.
func (a *analyzer) xa() {
	a.next()
	switch {
	case a.at("START", "BEGIN"):
		a.info.Effect = begins
	case a.at("COMMIT", "ROLLBACK"):
		a.info.Effect = ends
	case !a.at("PREPARE"): // END, RECOVER
		a.info.Effect = Effect{}
	}
}
