package sqltext

import "strings"

// set goes through the assignments of a SET. The last GLOBAL or SESSION in front holds for those that have none, unless they
// have @@.
func (a *analyzer) set() {
	for last := false; !a.atEnd(); a.next() {
		outer := a.depth
		last = a.ofGlobal(last)
		global := last
		switch {
		case a.at("TRANSACTION"):
			if !global {
				a.info.SetsLevel = true
				a.leaves |= leavesAny
			}
		case a.tok == variable && a.current() == "@@":
			a.next()
			if global = a.ofGlobal(false); a.current() == "." {
				a.next()
			}
			a.assignment(global)
		default:
			a.assignment(global)
		}
		for !a.atEnd() && (a.tok != ',' || a.depth != outer) {
			a.next()
		}
	}
}

// ofGlobal goes on past a keyword that says whose variable a SET sets, and reports whether that is one of new connections alone;
// without such a word it returns otherwise.
func (a *analyzer) ofGlobal(otherwise bool) (global bool) {
	global = a.at("GLOBAL", "PERSIST", "PERSIST_ONLY")
	if !global && !a.at("SESSION", "LOCAL") {
		return otherwise
	}
	a.next()
	return global
}

// assignment takes note of one assignment, whose target is the current token. One of autocommit commits, when it goes from 0
// to 1.
func (a *analyzer) assignment(global bool) {
	known, target, leaves := a.tok == word || a.tok == name, a.value(), a.leaves
	if a.next(); a.tok == assign {
		a.leaves = leaves // as of =
	}
	switch {
	case global:
		return
	case known && isOneOf(target, "NAMES", "CHARSET", "CHARACTER"):
		a.note("names", "SET NAMES, for which the DSN has charset=")
		a.leaves |= leavesNoted
		return
	case !known, a.tok != '=' && a.tok != assign: // @x, ROLE
		a.leaves |= leavesAny
		return
	}
	a.next()
	value, original := a.value(), a.at("DEFAULT")
	if a.tok != ',' {
		a.next()
	}
	if a.tok != ',' && !a.atEnd() { // it is an expression
		value, original = "", false
	}
	switch {
	case is(target, "AUTOCOMMIT"):
		a.info.Kind = Commits
		a.info.Effect = a.info.Effect.then(autocommit(value))
	case isOneOf(target, "TRANSACTION_ISOLATION", "TX_ISOLATION"):
		a.info.SetsLevel, a.info.SetsNextLevel = true, true
	}
	if a.leaves |= leavesNoted; a.notes {
		target = strings.ToLower(target)
		by := "SET " + target
		if original || defaults[target+"="+strings.ToLower(value)] {
			by = ""
		}
		a.note("variable "+target, by)
	}
}

// defaults are the servers' own, to which programs put variables back.
var defaults = map[string]bool{
	"foreign_key_checks=1": true, "foreign_key_checks=on": true, "unique_checks=1": true, "unique_checks=on": true,
	"autocommit=1": true, "autocommit=on": true, "completion_type=0": true, "completion_type=no_chain": true, "timestamp=0": true,
}

func autocommit(value string) Effect {
	switch {
	case value == "1", isOneOf(value, "ON", "TRUE"):
		return auto
	case value == "0", isOneOf(value, "OFF", "FALSE"):
		return manual
	}
	return mayAuto
}

// Level returns the isolation level that a server's variable has as its value, or is set to.
func Level(value string) Levels {
	for i, name := range [...]string{"READ-UNCOMMITTED", "READ-COMMITTED", "REPEATABLE-READ", "SERIALIZABLE"} {
		if strings.EqualFold(value, name) || value == string(rune('0'+i)) {
			return 1 << i
		}
	}
	return AnyLevel
}
