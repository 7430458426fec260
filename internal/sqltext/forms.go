package sqltext

import "strings"

// form is a form of statements, with what its first words alone tell: Tables, Functions, and the Changes of a read come from
// analyzer.finish.
type form struct {
	Info
	rule   rule
	leaves leaves
	kind   string // of the object that it names, which it leaves on the connection, or takes away
	by     string // says in errors that it leaves it; "" if it takes it away
	then   then   // what tells more behind the words
}

// rule says how Snapshot follows from the statement as a whole, unless its form has it.
type rule uint8

const (
	ifCalls  rule = iota // if it has any parentheses
	ifReads              // unless it plainly reads nothing, or one block with locks
	ifSystem             // if it names a schema of system tables, or may call a stored function
)

// then says what there is to tell of a statement behind the words of its form.
type then uint8

const (
	thenAnother then = iota + 1 // another statement behind FOR, which decides instead
	thenWith                    // the queries of WITH, and another
	thenPlan                    // another behind ANALYZE, which runs
	thenBody                    // statements that may run, or not
	thenSet                     // what SET sets
	thenName                    // a name
	thenTarget                  // that of the table which INSERT writes
	thenTables                  // those of UPDATE and DELETE
	thenLoad                    // what LOAD DATA loads, and into what
)

// forms are all that matter, by their first words, and ; for the end. Words that say nothing
// are skipped between them. The longest one counts. A form that commits says so even if its statement may fail
// before that, or may find nothing to commit.
var forms = tree([]row{
	{"SELECT|TABLE|VALUES", form{Info: Info{Kind: Read}, rule: ifReads}},
	{"SHOW|CHECKSUM|HELP", form{Info: Info{Kind: Read, Snapshot: true}}},
	{"SHOW WARNINGS|ERRORS", form{Info: Info{Kind: Read, Recalls: true}}},
	{"SHOW COUNT", form{Info: Info{Kind: Read, Recalls: true, Snapshot: true}}}, // (*) WARNINGS
	{"SHOW VARIABLES|STATUS", form{Info: Info{Kind: Read}}},
	{"SHOW GLOBAL|SESSION|LOCAL VARIABLES|STATUS", form{Info: Info{Kind: Read}}},
	{"EXPLAIN|DESCRIBE|DESC", form{Info: Info{Kind: Read, Snapshot: true}, then: thenPlan}},
	{"WITH", form{then: thenWith}},

	{"INSERT|REPLACE", form{Info: counted, rule: ifSystem, then: thenTarget}},
	{"UPDATE|DELETE", form{Info: counted, rule: ifSystem, then: thenTables}},
	{"LOAD DATA|XML", form{rule: ifSystem, then: thenLoad}},
	{"CALL", form{Info: Info{Calls: true, Snapshot: true, SetsLevel: true, Effect: anyEffect}, leaves: leavesNoted}},
	{"HANDLER", form{Info: Info{Snapshot: true}, leaves: leavesAny}},
	{"DO|SIGNAL|RESIGNAL|KILL|PURGE", form{}},

	{"SET", form{Info: changesNothing, then: thenSet}},
	{"SET STATEMENT", form{then: thenAnother}}, // MariaDB's
	{"SET PASSWORD|DEFAULT", form{Info: committing, leaves: leavesNoted}},
	{"SET TRANSACTION", form{Info: Info{Changes: ChangesNothing, SetsNextLevel: true}}},
	{"USE", form{Info: changesNothing, leaves: leavesAny}},
	{"GET", form{Info: Info{Changes: ChangesNothing, Recalls: true}, leaves: leavesAny}},
	{"PREPARE", form{Info: changesNothing, leaves: leavesNoted, kind: "prepared", by: "PREPARE", then: thenName}},
	{"DEALLOCATE PREPARE", form{Info: changesNothing, leaves: leavesNoted, kind: "prepared", then: thenName}},
	{"DROP PREPARE", form{leaves: leavesNoted, kind: "prepared", then: thenName}},

	{"BEGIN", form{Info: worst, leaves: leavesAny, then: thenBody}}, // NOT ATOMIC, and in MariaDB's Oracle mode anything
	{"BEGIN ;", form{Info: beginning}},
	{"BEGIN WORK ;", form{Info: beginning}},
	{"START", form{Info: committing}}, // REPLICA
	{"START TRANSACTION", form{Info: Info{Kind: Commits, Effect: begins, Snapshot: true}}},
	{"COMMIT|ROLLBACK", form{Info: ending}},
	{"COMMIT|ROLLBACK AND CHAIN", form{Info: beginning}},
	{"COMMIT|ROLLBACK WORK AND CHAIN", form{Info: beginning}},
	{"ROLLBACK TO", form{Info: goesBack, kind: "savepoint", then: thenName}},
	{"ROLLBACK TO SAVEPOINT", form{Info: goesBack, kind: "savepoint", then: thenName}},
	{"ROLLBACK WORK TO", form{Info: goesBack, kind: "savepoint", then: thenName}},
	{"ROLLBACK WORK TO SAVEPOINT", form{Info: goesBack, kind: "savepoint", then: thenName}},
	{"SAVEPOINT", form{Info: changesNothing, kind: "savepoint", then: thenName}},
	{"RELEASE", form{Info: changesNothing}},
	{"XA", form{Info: Info{Kind: Commits}}},   // END, RECOVER
	{"XA START|BEGIN", form{Info: beginning}}, // until its COMMIT or ROLLBACK
	{"XA COMMIT|ROLLBACK", form{Info: ending}},
	{"XA PREPARE", form{Info: committing}}, // leaves it with the connection, or with nobody

	{"CREATE|DROP|ALTER|RENAME|TRUNCATE|GRANT|REVOKE|OPTIMIZE|REPAIR|CHECK", form{Info: defines}},
	{"ANALYZE", form{Info: defines, then: thenPlan}}, // MariaDB's, of a statement
	{"ANALYZE TABLE|TABLES|LOCAL|NO_WRITE_TO_BINLOG", form{Info: defines}},
	// Only a temporary table commits nothing.
	{"CREATE TEMPORARY", form{Info: committing, leaves: leavesAny}}, // SEQUENCE
	{"CREATE TEMPORARY TABLE", form{
		Info: Info{Snapshot: true}, leaves: leavesNoted, kind: "table", by: "CREATE TEMPORARY TABLE", then: thenName,
	}},
	{"DROP TEMPORARY", form{Info: defines, leaves: leavesAny}},
	{"DROP TEMPORARY TABLE|TABLES", form{leaves: leavesNoted, kind: "table", then: thenName}},
	{"DROP TABLE|TABLES", form{Info: defines, kind: "table", then: thenName}}, // a temporary one, too
	{"LOCK", form{Info: committing, leaves: leavesNoted, kind: "locks", by: "LOCK TABLES"}},
	{"UNLOCK TABLE|TABLES ;", form{Info: committing, leaves: leavesNoted, kind: "locks", then: thenName}},
	{"FLUSH", form{Info: committing, leaves: leavesNoted}},
	{"FLUSH TABLE|TABLES", form{Info: committing, leaves: leavesAny}}, // WITH READ LOCK, FOR EXPORT
	{"FLUSH LOCAL|NO_WRITE_TO_BINLOG", form{Info: committing, leaves: leavesAny}},
	{"FLUSH TABLE|TABLES ;", form{Info: committing, leaves: leavesNoted}},
	{"UNLOCK|BACKUP", form{Info: committing, leaves: leavesAny}},

	// These commit on one of the servers at least, in some of their forms (SHUTDOWN and RESTART were not tried).
	{"LOAD|CACHE|IMPORT|CLONE|INSTALL|UNINSTALL|STOP|CHANGE|RESET|SHUTDOWN|RESTART", form{Info: committing}},
	// MariaDB takes compound statements outside of procedures, too; the parts behind their first ; look
	// like statements of their own here.
	{"EXECUTE|BINLOG|IF|CASE|LOOP|REPEAT|WHILE|FOR|DECLARE", form{Info: worst, leaves: leavesAny, then: thenBody}},
})

// The answers that several forms have.
var (
	changesNothing = Info{Changes: ChangesNothing}
	counted        = Info{Changes: ChangesCounted}
	goesBack       = Info{Changes: ChangesNothing, GoesBack: true}
	committing     = Info{Kind: Commits, Effect: mayEnd}
	defines        = Info{Kind: Commits, Effect: mayEnd, Defines: true}
	beginning      = Info{Kind: Commits, Effect: begins}
	ending         = Info{Kind: Commits, Effect: ends}
)

// unknown is the form of any other verb, which may begin a part of a body.
var unknown = form{then: thenBody}

// row is a row of forms. WORD|WORD in words stands for one of them.
type row struct {
	words string
	form
}

// node has the form of statements that begin with some words, if there is one, and the nodes of those that go on.
type node struct {
	form *form
	next map[string]*node
}

func tree(rows []row) *node {
	root := new(node)
	for _, row := range rows {
		root.add(strings.Fields(row.words), &row.form)
	}
	return root
}

func (n *node) add(words []string, f *form) {
	if len(words) == 0 {
		n.form = f
		return
	}
	if n.next == nil {
		n.next = make(map[string]*node)
	}
	for w := range strings.SplitSeq(words[0], "|") {
		if n.next[w] == nil {
			n.next[w] = new(node)
		}
		n.next[w].add(words[1:], f)
	}
}

// upper returns w in upper case. No word that matters is as long as buf.
func upper(w string, buf *[32]byte) []byte {
	u := buf[:copy(buf[:], w)]
	for i, c := range u {
		if c >= 'a' && c <= 'z' {
			u[i] = c - 0x20
		}
	}
	return u
}

// skip goes on past words that say nothing. All are reserved, so that none is a name.
func (a *analyzer) skip() {
	for a.at("IF", "NOT", "EXISTS", "OR", "REPLACE", "IGNORE", "INTO", "LOW_PRIORITY", "HIGH_PRIORITY", "DELAYED") {
		a.next()
	}
}

// decide finds the form of the statement whose verb is the current token, or the last one where one follows another: SET
// STATEMENT … FOR …, WITH … SELECT, EXPLAIN ANALYZE …. Of the answers of verbs in front of it those stay that concern the
// connection.
func (a *analyzer) decide() {
	for another := true; another; {
		for a.tok == '(' {
			a.next()
		}
		f := &unknown
		if a.tok == word {
			a.verb = a.current()
			f = a.match()
		}
		before := a.info
		a.form, a.info = f, f.Info
		a.info.Recalls = f.Recalls || before.Recalls
		a.info.Anywhere = before.Anywhere
		a.info.Snapshot = f.Snapshot || before.Snapshot // EXPLAIN takes one also of a locking read
		a.leaves |= f.leaves
		another = a.goOn(f)
	}
}

// match goes past the words of a form, and returns that.
func (a *analyzer) match() *form {
	var buf [32]byte
	a.sets = a.at("SET")
	f := &unknown
	for n := forms; ; {
		w := ""
		switch a.tok {
		case word:
			w = a.current()
		case ';', end:
			w = ";"
		}
		next, ok := n.next[string(upper(w, &buf))]
		switch {
		case ok:
		case n == forms && strings.ContainsFunc(w, func(r rune) bool { return r >= 0x80 }):
			a.tok = a.stop(true) // no statement begins so, unless in another character set the byte is whitespace
			return f
		default:
			return f
		}
		if n = next; n.form != nil {
			f = n.form
		}
		if a.next(); n.next != nil {
			a.skip()
		}
	}
}

// objectName goes on past the name, with its schema, of a table, a savepoint or a prepared statement. A parenthesis behind it
// is no call.
func (a *analyzer) objectName() {
	if a.schema, a.object = "", ""; a.current() == "." { // MariaDB takes .t for t
		a.next()
	}
	for a.tok == word || a.tok == name {
		a.schema, a.object = a.object, a.value()
		a.alias, a.qualified = true, false
		if a.next(); a.current() != "." {
			break
		}
		a.next()
	}
}

// goOn goes on to as many tokens as it takes to tell more of the form, and reports whether it has come to another verb, which
// decides instead.
func (a *analyzer) goOn(f *form) (another bool) {
	switch f.then {
	case thenAnother:
		for !a.atEnd() && !a.at("FOR") {
			a.next()
		}
		a.next()
		return !a.atEnd()
	case thenWith:
		return a.with()
	case thenPlan:
		return a.explain()
	case thenBody:
		a.inner()
	case thenSet:
		a.set()
	case thenName:
		a.skip()
		a.objectName()
		a.whole = a.atEnd() && (a.object != "" || f.kind == "locks")
		if f.leaves != 0 && f.by == "" && !a.whole {
			a.leaves |= leavesAny
		}
	case thenTarget:
		a.skip()
		if a.objectName(); a.object == "" {
			a.info.Changes = MayChange
		}
		a.ask()
	case thenTables:
		if a.asked != nil {
			a.changed()
		}
	case thenLoad:
		a.load()
	}
	return false
}

// with goes on to the main verb, outside of the parentheses of its queries: x [(a)] AS (…) [CYCLE a RESTRICT], ….
func (a *analyzer) with() (another bool) {
	outer := a.depth
	for ; !a.atEnd(); a.next() {
		switch {
		case a.tok == '(' && a.prior.tok == ')' && a.depth == outer+1,
			a.depth == outer && a.at("SELECT", "TABLE", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE"):
			return true
		case a.depth == outer:
			a.alias = true // x (a)
		}
	}
	return false
}

// explain goes on to the statement that is explained, if it runs: behind ANALYZE. Others may read all the same: the optimizer
// looks up constants, MySQL its data dictionary. MySQL explains a locking read without locks.
func (a *analyzer) explain() (runs bool) {
	runs = is(a.verb, "ANALYZE")
	a.plan = !runs
	for ; !a.atEnd(); a.next() {
		if runs = runs || a.at("ANALYZE"); runs && a.at("SELECT", "WITH", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE") {
			a.plan = true
			return true
		}
	}
	if runs && a.plan { // something else
		a.info.Kind = Write
	}
	return false
}

// load goes through a LOAD DATA or LOAD XML.
func (a *analyzer) load() {
	for ; !a.atEnd(); a.next() {
		a.info.FromClient = a.info.FromClient || a.at("LOCAL")
		if is(a.before(), "TABLE") { // INTO TABLE x
			a.objectName()
			a.ask()
		}
	}
	if a.variables { // (a, @x): read into @x
		a.leaves |= leavesAny
	}
}
