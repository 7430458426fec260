package sqltext

import (
	"cmp"
	"slices"
	"strings"
)

// form is a form of statements, with what it does. Each begins with its verb.
type form struct {
	pattern []element // behind the verb
	Info
	rule   rule
	leaves leaves
	kind   string // of the object that it names, which it leaves on the connection, or takes away
	by     string // says in errors that it leaves it; "" if it takes it away
	writes bool   // it writes the table that it names
	saves  bool   // it sets the savepoint that it names, or goes back there
	body   bool   // what follows may be a body of statements, of which nobody knows whether they run
	any    bool   // it runs any statement

	more more
}

// more says what there is to tell of a statement behind its pattern.
type more uint8

const (
	thenAnother   more = iota + 1 // another statement, which decides instead
	thenWith                      // the queries of WITH, and another
	thenExplained                 // another, which EXPLAIN ANALYZE runs
	thenAnalyzed                  // another, which MariaDB's ANALYZE runs
	thenVariables                 // what SET sets
	thenLevel                     // what SET TRANSACTION sets
	thenLoaded                    // what LOAD DATA loads, and into what
	thenCreated                   // columns, and the query of CREATE TEMPORARY TABLE
	thenTables                    // of UPDATE and DELETE
)

// forms are all that matter, by verbs. Of those of a verb the first one counts whose pattern fits.
// What commits does so if it gets that far, or where there is anything to be committed.
var forms = byVerbs([]row{
	{"SELECT|TABLE|VALUES", form{Info: Info{Kind: Read}, rule: ifReads}},
	{"SHOW [GLOBAL|SESSION|LOCAL] WARNINGS|ERRORS", form{Info: Info{Kind: Read, Recalls: true}}},
	{"SHOW [GLOBAL|SESSION|LOCAL] COUNT", form{Info: Info{Kind: Read, Recalls: true, Snapshot: true}}}, // (*) WARNINGS
	{"SHOW [GLOBAL|SESSION|LOCAL] VARIABLES|STATUS", form{Info: Info{Kind: Read}}},
	{"SHOW|CHECKSUM|HELP", form{Info: Info{Kind: Read, Snapshot: true}}},
	{"EXPLAIN|DESCRIBE|DESC", form{Info: Info{Kind: Read, Snapshot: true}, more: thenExplained}},
	{"WITH", form{more: thenWith}},

	{"INSERT|REPLACE [LOW_PRIORITY|DELAYED|HIGH_PRIORITY|IGNORE|INTO] %", form{Info: counted, rule: ifSystem, writes: true}},
	{"INSERT|REPLACE", form{rule: ifSystem}},
	{"UPDATE|DELETE", form{Info: counted, rule: ifSystem, more: thenTables}},
	{"LOAD DATA|XML", form{rule: ifSystem, more: thenLoaded}},
	{"CALL", form{Info: Info{Calls: true, Snapshot: true, Session: AnyLevel, Effect: anyEffect}, leaves: leavesNoted}},
	{"HANDLER", form{Info: Info{Snapshot: true}, leaves: leavesAny}},
	{"DO|SIGNAL|RESIGNAL|KILL|PURGE", form{}},

	{"SET STATEMENT … FOR", form{more: thenAnother}}, // MariaDB's
	{"SET STATEMENT", form{}},
	{"SET PASSWORD|DEFAULT", form{Info: committing, leaves: leavesNoted}},
	{"SET TRANSACTION", form{Info: changesNothing, more: thenLevel}},
	{"SET", form{Info: changesNothing, more: thenVariables}},
	{"USE", form{Info: changesNothing, leaves: leavesAny}},
	{"GET", form{Info: Info{Changes: ChangesNothing, Recalls: true}, leaves: leavesAny}},
	{"PREPARE %", form{Info: changesNothing, leaves: leavesNoted, kind: "prepared", by: "PREPARE"}},
	{"DEALLOCATE PREPARE % $", form{Info: changesNothing, leaves: leavesNoted, kind: "prepared"}},
	{"PREPARE|DEALLOCATE", form{Info: changesNothing, leaves: leavesAny}},

	{"BEGIN [WORK] $", form{Info: beginning}},
	{"BEGIN", form{Info: worst, any: true}}, // NOT ATOMIC, and in MariaDB's Oracle mode anything
	{"START TRANSACTION … SNAPSHOT", form{Info: Info{Kind: Commits, Effect: begins, Snapshot: true}}},
	{"START TRANSACTION", form{Info: beginning}},
	{"START", form{Info: committing}}, // REPLICA
	{"COMMIT|ROLLBACK $", form{Info: ending}},
	{"ROLLBACK [WORK] TO [SAVEPOINT] % $", form{Info: goesBack, saves: true}},
	{"ROLLBACK [WORK] TO", form{Info: goesBack}},
	{"COMMIT|ROLLBACK [WORK] AND CHAIN", form{Info: beginning}},
	{"COMMIT|ROLLBACK", form{Info: ending}},
	{"SAVEPOINT % $", form{Info: changesNothing, saves: true}},
	{"SAVEPOINT|RELEASE", form{Info: changesNothing}},
	{"XA START|BEGIN", form{Info: beginning}}, // until its COMMIT or ROLLBACK
	{"XA COMMIT|ROLLBACK", form{Info: ending}},
	{"XA PREPARE", form{Info: committing}},  // leaves it with the connection, or with nobody
	{"XA", form{Info: Info{Kind: Commits}}}, // END, RECOVER

	// Only a temporary table commits nothing; its SELECT locks what it reads, like that of INSERT.
	{"CREATE [OR|REPLACE] TEMPORARY TABLE [IF|NOT|EXISTS] %", form{
		rule: ifSystem, leaves: leavesNoted, kind: "table", by: "CREATE TEMPORARY TABLE", more: thenCreated,
	}},
	{"CREATE [OR|REPLACE] TEMPORARY", form{Info: committing, leaves: leavesAny}}, // SEQUENCE
	{"CREATE … PROCEDURE|FUNCTION|TRIGGER|EVENT|PACKAGE", form{Info: defines, body: true}},
	{"DROP TEMPORARY TABLE|TABLES [IF|EXISTS] % $", form{leaves: leavesNoted, kind: "table"}},
	{"DROP TEMPORARY TABLE|TABLES", form{leaves: leavesAny}},
	{"DROP TEMPORARY", form{Info: defines, leaves: leavesAny}},
	{"DROP TABLE|TABLES [IF|EXISTS] % $", form{Info: defines, kind: "table"}}, // a temporary one, too
	{"DROP PREPARE % $", form{leaves: leavesNoted, kind: "prepared"}},
	{"DROP PREPARE", form{leaves: leavesAny}},
	{"ANALYZE", form{Info: defines, more: thenAnalyzed}}, // TABLE, or MariaDB's, of a statement
	{"CREATE|DROP|ALTER|RENAME|TRUNCATE|GRANT|REVOKE|OPTIMIZE|REPAIR|CHECK", form{Info: defines}},
	{"LOCK", form{Info: committing, leaves: leavesNoted, kind: "locks", by: "LOCK TABLES"}},
	{"UNLOCK TABLE|TABLES $", form{Info: committing, leaves: leavesNoted, kind: "locks"}},
	{"FLUSH … LOCK|EXPORT", form{Info: committing, leaves: leavesAny}},
	{"FLUSH", form{Info: committing, leaves: leavesNoted}},
	{"UNLOCK|BACKUP", form{Info: committing, leaves: leavesAny}},

	// These commit on one of the servers at least, in some of their forms (SHUTDOWN and
	// RESTART were not tried).
	{"LOAD|CACHE|IMPORT|CLONE|INSTALL|UNINSTALL|STOP|CHANGE|RESET|SHUTDOWN|RESTART", form{Info: committing}},
	// MariaDB takes compound statements outside of procedures, too; the parts behind their first ; look
	// like statements of their own here.
	{"EXECUTE|BINLOG|IF|CASE|LOOP|REPEAT|WHILE|FOR|DECLARE", form{Info: worst, any: true}},
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

// The forms of any other verb, and of a text that may do anything.
var (
	unknown  = form{}
	anything = form{Info: worst, any: true}
)

// row is a row of forms: VERB|VERB, and a pattern of elements.
type row struct {
	pattern string
	form
}

// element is a part of a pattern.
type element struct {
	words    []string // WORD|WORD: one of them
	optional bool     // [WORD|WORD]: any number of them
	later    bool     // … WORD: after any other tokens
	name     bool     // %: a name, with its schema
	end      bool     // $: the end of the statement
}

// verb has a verb's forms, and matches it in upper case.
type verb struct {
	name  string
	forms []form
}

// byVerbs returns the forms by the first letter of their verbs.
func byVerbs(rows []row) (verbs ['Z' + 1][]verb) {
	for _, row := range rows {
		names, pattern, _ := strings.Cut(row.pattern, " ")
		later := false
		for part := range strings.FieldsSeq(pattern) {
			e := element{name: part == "%", end: part == "$", optional: part[0] == '[', later: later}
			if later = part == "…"; later {
				continue
			}
			if !e.name && !e.end {
				e.words = strings.Split(strings.Trim(part, "[]"), "|")
			}
			row.form.pattern = append(row.form.pattern, e)
		}
		for name := range strings.SplitSeq(names, "|") {
			letter := &verbs[name[0]]
			i := slices.IndexFunc(*letter, func(v verb) bool { return v.name == name })
			if i < 0 {
				i = len(*letter)
				*letter = append(*letter, verb{name: name})
			}
			(*letter)[i].forms = append((*letter)[i].forms, row.form)
		}
	}
	return verbs
}

// formsOf returns the forms of a verb, in whatever case; nil for what is none.
func formsOf(w string) []form {
	if letter := w[0] &^ 0x20; letter <= 'Z' {
		for i := range forms[letter] {
			if v := &forms[letter][i]; is(w, v.name) {
				return v.forms
			}
		}
	}
	return nil
}

// verb decides by the verb at the current token, or by the last one where one follows
// another: SET STATEMENT … FOR …, WITH … SELECT, EXPLAIN ANALYZE ….
func (a *analyzer) verb() {
	for n := 0; ; n++ {
		for a.tok == '(' {
			a.next()
		}
		f := &unknown
		switch {
		case n == 10:
			f = &anything
		case a.tok == word:
			a.name = a.current()
			f = a.match()
		}
		a.decide(f)
		switch {
		case f.any || f == &unknown: // such as ELSE
			a.inner()
			return
		case !a.goOn(f.more):
			return
		}
	}
}

// match returns the form of the statement whose verb is the current token, and goes past its pattern.
func (a *analyzer) match() *form {
	w := a.current()
	all := formsOf(w)
	if is(w, "SET") {
		a.goToTarget()
	} else {
		a.next()
	}
	for i := range all {
		f := &all[i]
		switch {
		case len(f.pattern) == 0, f.pattern[0].end && a.atEnd():
			return f
		case !f.pattern[0].may(&a.lexer):
			continue
		}
		saved := *a
		if a.fits(f.pattern) {
			if f.writes {
				a.ask()
			}
			return f
		}
		saved.doubt, saved.hopeless = a.doubt, a.hopeless
		*a = saved
	}
	if strings.ContainsFunc(w, func(r rune) bool { return r >= 0x80 }) {
		// No statement begins so, unless in another character set the byte is
		// whitespace.
		a.tok = a.giveUp()
	}
	return &unknown
}

// may reports whether the pattern that begins with e may fit at the current token.
func (e *element) may(l *lexer) bool {
	return e.name || e.optional || e.later || l.at(e.words...)
}

// fits goes past the tokens that have the pattern, and reports whether they do.
func (a *analyzer) fits(pattern []element) bool {
	for i := range pattern {
		e := &pattern[i]
		for e.later && !a.atEnd() && !a.at(e.words...) {
			a.next()
		}
		switch {
		case e.name:
			if a.objectName(); a.object == "" {
				return false
			}
		case e.optional:
			for a.at(e.words...) {
				a.next()
			}
		case e.end:
			return a.atEnd()
		case !a.at(e.words...):
			return false
		default:
			a.next()
		}
	}
	return true
}

// objectName goes on past the name, with its schema, of a table, a savepoint or a prepared statement.
// A parenthesis behind it is no call.
func (a *analyzer) objectName() {
	a.schema, a.object, a.dotted = "", "", a.current() == "."
	if a.dotted { // MariaDB takes .t for t
		a.next()
	}
	for a.tok == word || a.tok == name {
		a.schema, a.object = a.object, a.value()
		a.alias, a.qualified = true, false
		if a.next(); a.current() != "." {
			break
		}
		a.dotted = true
		a.next()
	}
}

// decide takes the answers of f. Those of a verb in front of it that concern the connection stay.
func (a *analyzer) decide(f *form) {
	before := a.info
	a.form, a.info = f, f.Info
	a.info.Recalls = f.Recalls || before.Recalls
	a.info.Anywhere = before.Anywhere
	a.info.Snapshot = f.Snapshot || before.Snapshot // EXPLAIN takes one also of a locking read
	a.leaves |= f.leaves
	a.adds = a.adds || f.body || f.any
	if f.any {
		a.leaves |= leavesAny
	}
}

// goOn goes on to as many tokens as it takes to tell more, and reports whether it has come to
// another verb, which decides instead.
func (a *analyzer) goOn(to more) (another bool) {
	switch to {
	case thenAnother:
		return true
	case thenWith:
		return a.with()
	case thenExplained:
		return a.explain()
	case thenAnalyzed:
		if a.at("FORMAT") { // =JSON
			a.next()
			a.next()
			a.next()
		}
		a.plan = a.tok == '(' || a.at("SELECT", "WITH", "VALUES", "INSERT", "REPLACE", "UPDATE", "DELETE")
		return a.plan
	case thenVariables:
		a.set()
	case thenLevel:
		a.info.Next = cmp.Or(a.characteristics(), AnyLevel) // READ ONLY, or READ WRITE
	case thenLoaded:
		a.load()
	case thenCreated:
		a.created()
	case thenTables:
		if a.asked != nil {
			a.changed()
		}
	}
	return false
}

// load goes through a LOAD DATA or LOAD XML.
func (a *analyzer) load() {
	set := false
	for ; !a.atEnd(); a.next() {
		switch {
		case a.at("LOCAL"):
			a.info.FromClient = true
		case a.at("SET") && !is(a.before(), "CHARACTER"):
			set, a.functions = true, false // what was before it are columns
		case a.asked != nil && is(a.before(), "TABLE"): // INTO TABLE x
			a.objectName()
			a.ask()
		}
	}
	a.functions = a.functions && set
	if a.variables { // (a, @x): read into @x
		a.leaves |= leavesAny
	}
}

// created goes through what a CREATE TEMPORARY TABLE has behind the name.
func (a *analyzer) created() {
	query := false
	for ; !a.atEnd(); a.next() {
		if a.at("SELECT", "TABLE", "VALUES") && !query {
			query, a.functions = true, false // what was before it are columns
		}
	}
	a.functions = a.functions && query
}

// with goes on to the main verb: the first word after a query in parentheses that does not belong to the list of
// x [(a)] AS (…) [CYCLE a RESTRICT], …
func (a *analyzer) with() (another bool) {
	outer := a.depth
	if a.tok == '(' {
		outer--
	}
	for ; !a.atEnd(); a.next() {
		closed := a.prior.tok == ')' || is(a.before(), "RESTRICT")
		switch {
		case a.tok == '(' && closed && a.depth == outer+1:
			return true
		case a.depth > outer, a.at("RESTRICT"):
		case a.tok == word && closed && !a.at("AS", "CYCLE"):
			return true
		default:
			a.alias = true // x (a)
		}
	}
	return false
}

// explain goes on to the statement that is explained, and reports whether it runs: behind EXPLAIN
// ANALYZE. Others may read all the same: the optimizer looks up constants, MySQL its data
// dictionary. MySQL explains a locking read without locks.
func (a *analyzer) explain() (runs bool) {
	a.plan = true
	for ; ; a.next() {
		switch {
		case a.at("ANALYZE"):
			runs = true
		case a.at("FORMAT"): // =JSON
			a.next()
			a.next()
		case a.at("INTO"): // @x
			a.next()
		case a.at("FOR") && runs: // SCHEMA x
			a.next()
			a.next()
		default:
			return runs
		}
	}
}
