package sqltext

import "strings"

// set goes through the assignments of a SET. One of autocommit commits, when it goes from 0 to 1.
func (a *analyzer) set() {
	for of := ofSession; !a.atEnd(); a.goToTarget() {
		of = a.assignment(of)
	}
}

// goToTarget goes on to what an assignment of a SET sets: it does not ask for a variable of that name.
func (a *analyzer) goToTarget() {
	recalls := a.info.Recalls
	if a.next(); a.tok == variable {
		a.info.Recalls = recalls
	}
}

// whose says whose variable a SET sets.
type whose uint8

const (
	ofSession whose = iota
	ofGlobal        // of new connections
	ofNext          // of the next transaction, where there is such a thing, else of the session
)

// whoseWord goes on past a keyword that says whose variable follows; without one it is that of otherwise.
func (a *analyzer) whoseWord(otherwise whose) (of whose, ok bool) {
	switch {
	case a.at("GLOBAL", "PERSIST", "PERSIST_ONLY"):
		of = ofGlobal
	case !a.at("SESSION", "LOCAL"):
		return otherwise, false
	}
	a.next()
	return of, true
}

// assignment goes through one assignment of a SET, to the comma behind it. The last
// GLOBAL or SESSION in front holds for those that have none, unless they have @@.
func (a *analyzer) assignment(last whose) whose {
	outer := a.depth
	last, named := a.whoseWord(last)
	of := last
	if named && a.at("TRANSACTION") {
		if l := a.characteristics(); of == ofSession {
			a.info.Session |= l
			a.leaves |= leavesAny
		}
		return last
	}
	if a.tok == variable && a.current() == "@@" {
		a.next()
		if of, named = a.whoseWord(ofNext); named {
			a.next() // .
		}
	}
	known, variable := a.tok == word || a.tok == name, a.value()
	leaves := a.leaves
	if a.next(); a.tok == assign {
		a.leaves = leaves // as of =
	}
	switch {
	case of == ofGlobal:
	case known && (a.tok == '=' || a.tok == assign):
		a.leaves |= leavesNoted
		a.next()
		a.assign(variable, of)
	case known && isOneOf(variable, "NAMES", "CHARSET", "CHARACTER"):
		a.note("names", "", "SET NAMES, for which the DSN has charset=")
		a.leaves |= leavesNoted
	default: // @x, ROLE
		a.leaves |= leavesAny
	}
	for !a.atEnd() && (a.tok != ',' || a.depth != outer) {
		a.next()
	}
	return last
}

// assign takes note of the value at the current token, to which a variable is set.
func (a *analyzer) assign(variable string, of whose) {
	value, deflt := a.value(), a.at("DEFAULT")
	if a.tok != ',' {
		a.next()
	}
	plain := a.tok == ',' || a.atEnd() // it is not an expression
	if plain && (deflt || restores(variable, value)) {
		a.note("variable", variable, "")
	} else {
		a.note("variable", variable, "SET")
	}
	if !plain {
		value = ""
	}
	switch {
	case is(variable, "AUTOCOMMIT"):
		a.info.Kind = Commits
		a.info.Effect = a.info.Effect.then(autocommit(value))
	case !isOneOf(variable, "TRANSACTION_ISOLATION", "TX_ISOLATION"):
	case of == ofNext:
		a.info.Next |= Level(value)
	default:
		a.info.Session |= Level(value)
	}
}

// restores reports whether a variable is set to the servers' default, to which programs
// put it back.
func restores(variable, value string) bool {
	switch {
	case isOneOf(variable, "FOREIGN_KEY_CHECKS", "UNIQUE_CHECKS", "AUTOCOMMIT"):
		return value == "1" || is(value, "ON")
	case is(variable, "COMPLETION_TYPE"):
		return value == "0" || is(value, "NO_CHAIN")
	}
	return is(variable, "TIMESTAMP") && value == "0"
}

func autocommit(value string) Effect {
	switch {
	case value == "1" || isOneOf(value, "ON", "TRUE"):
		return auto
	case value == "0" || isOneOf(value, "OFF", "FALSE"):
		return manual
	}
	return mayAuto
}

// Level returns the isolation level that a server's variable has as its value, or is
// set to.
func Level(value string) Levels {
	for i, name := range [...]string{"READ-UNCOMMITTED", "READ-COMMITTED", "REPEATABLE-READ", "SERIALIZABLE"} {
		if strings.EqualFold(value, name) || value == string(rune('0'+i)) {
			return 1 << i
		}
	}
	return AnyLevel
}

// characteristics goes on to the end of a SET TRANSACTION, and returns the isolation
// level that it names, if any.
func (a *analyzer) characteristics() (l Levels) {
	for ; !a.atEnd(); a.next() {
		for i, w := range [...]string{"UNCOMMITTED", "COMMITTED", "REPEATABLE", "SERIALIZABLE"} {
			if a.at(w) {
				l = 1 << i
			}
		}
	}
	return l
}
