package sqltext

import "strings"

// set tells the kinds of SET apart. Only some commit: autocommit (when it
// goes from 0 to 1), passwords and default roles.
func (a *analyzer) set() (another bool) {
	a.goToTarget()
	switch {
	case a.at("STATEMENT"): // MariaDB's SET STATEMENT x=y FOR …
		for !a.at("FOR") && !a.atEnd() {
			a.next()
		}
		a.next()
		return true
	case a.at("PASSWORD", "DEFAULT"):
		a.decide(&verb{kind: Commits, leaves: leavesNoted})
		return false
	case a.at("TRANSACTION"): // for the next transaction only
		a.rule = asIs
		a.info.Next = a.characteristics()
		return false
	}
	for of := ofSession; !a.atEnd(); a.goToTarget() {
		of = a.assignment(of)
	}
	return false
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

// whoseWord returns what the keyword at the current token says.
func (a *analyzer) whoseWord() (of whose, ok bool) {
	switch {
	case a.at("GLOBAL", "PERSIST", "PERSIST_ONLY"):
		return ofGlobal, true
	case a.at("SESSION", "LOCAL"):
		return ofSession, true
	}
	return 0, false
}

// assignment goes through one assignment of a SET, to the comma behind it. The last
// GLOBAL or SESSION in front holds for those that have none, unless they have @@.
func (a *analyzer) assignment(last whose) whose {
	outer := a.depth
	if of, ok := a.whoseWord(); ok {
		last = of
		if a.next(); a.at("TRANSACTION") {
			if l := a.characteristics(); of == ofSession {
				a.info.Session |= l
				a.leaves |= leavesAny
			}
			return last
		}
	}
	of := a.whoseVariable(last)
	known := a.tok == word || a.tok == name
	variable := a.value()
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
	case known && (is(variable, "NAMES") || is(variable, "CHARSET") || is(variable, "CHARACTER")):
		a.noteLeft("names", "", "SET NAMES, for which the DSN has charset=")
		a.leaves |= leavesNoted
	default: // @x, ROLE
		a.leaves |= leavesAny
	}
	for !a.atEnd() && (a.tok != ',' || a.depth != outer) {
		a.next()
	}
	return last
}

// whoseVariable goes on to the name of the variable, past an @@ in front of it, and
// says whose variable it is.
func (a *analyzer) whoseVariable(last whose) whose {
	if a.tok != variable || a.current() != "@@" {
		return last
	}
	a.next()
	of, ok := a.whoseWord()
	if !ok {
		return ofNext
	}
	a.next()
	a.next() // .
	return of
}

// assign takes note of the value at the current token, to which a variable is set.
func (a *analyzer) assign(variable string, of whose) {
	value, deflt := a.value(), a.at("DEFAULT")
	if a.tok != ',' {
		a.next()
	}
	plain := a.tok == ',' || a.atEnd() // it is not an expression
	if plain && (deflt || restores(variable, value)) {
		a.noteGone("variable", variable)
	} else {
		a.noteLeft("variable", variable, "SET")
	}
	switch {
	case is(variable, "AUTOCOMMIT"):
		a.info.Kind = Commits
		a.info.Effect = a.info.Effect.then(autocommit(value, plain))
	case !is(variable, "TRANSACTION_ISOLATION") && !is(variable, "TX_ISOLATION"):
	case of == ofNext:
		a.info.Next |= level(value, plain)
	default:
		a.info.Session |= level(value, plain)
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

func autocommit(value string, plain bool) Effect {
	switch {
	case !plain:
	case value == "1" || isOneOf(value, "ON", "TRUE"):
		return auto
	case value == "0" || isOneOf(value, "OFF", "FALSE"):
		return manual
	}
	return mayAuto
}

func level(value string, plain bool) Levels {
	if !plain {
		return AnyLevel
	}
	return Level(value)
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
	for a.next(); !a.atEnd(); a.next() {
		for i, w := range [...]string{"UNCOMMITTED", "COMMITTED", "REPEATABLE", "SERIALIZABLE"} {
			if a.at(w) {
				l = 1 << i
			}
		}
	}
	return l
}
