package sqltext

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// Left is what statements have left on a connection, as far as their texts tell: another
// connection does not have it. The body of a procedure is not seen. The zero value is a
// new connection.
type Left struct {
	left  map[string]string // what is there to what has left it; never changed, but replaced
	named int               // locks of GET_LOCK
	vars  bool              // SELECT @x := … has set a user variable
}

// Note remembers what a text leaves, and what it takes away if it ends well. What is
// not understood stays for as long as the connection does. A query may have further
// results, of statements of which nobody knows yet whether they run.
func (l *Left) Note(text string, info Info, query bool, err error) {
	if !info.Taints && (info.Kind != Commits || len(l.left) == 0) {
		return
	}
	var either Left
	runs := false
	for a := range (analyzer{left: *l, notes: true, adds: err != nil, query: query}).eachWay(text) {
		if a.hopeless {
			l.keep("anything", "", "SQL text")
			return
		}
		either.or(a.left)
		runs = true
	}
	if runs {
		*l = either
	}
}

// or adds what is left in another reading.
func (l *Left) or(other Left) {
	l.left = merged(l.left, other.left)
	l.named, l.vars = max(l.named, other.named), l.vars || other.vars
}

func merged(m, with map[string]string) map[string]string {
	both := maps.Clone(m)
	if both == nil {
		return with
	}
	maps.Copy(both, with)
	return both
}

// keep remembers an object of a kind, whose name counts in any case, and what has left it.
func (l *Left) keep(kind, object, by string) {
	object = strings.ToLower(object)
	if kind == "variable" {
		by += " " + object
	}
	l.left = merged(l.left, map[string]string{kind + " " + object: by})
}

// note tells the Left, if it is to be told, of an object that the statement leaves, or takes away: then by is "".
func (a *analyzer) note(kind, object, by string) {
	switch {
	case !a.notes:
	case by != "":
		a.left.keep(kind, object, by)
	case !a.adds:
		a.left.left = maps.Clone(a.left.left)
		delete(a.left.left, kind+" "+strings.ToLower(object))
	}
}

// userLock notes a call of a function of keyUserLock, at its parenthesis.
func (a *analyzer) userLock(function string) {
	a.leaves |= leavesNoted
	switch {
	case a.qualified || a.prior.tok != word:
		a.leaves |= leavesAny
	case is(function, "GET_LOCK"):
		a.taken++
	case is(function, "RELEASE_LOCK"):
		a.released++
	case is(function, "RELEASE_ALL_LOCKS"):
		a.released = 1 << 30
	default:
		a.leaves |= leavesAny
	}
}

// leave tells the Left of a statement that has ended.
func (a *analyzer) leave() {
	l := &a.left
	if a.leaves&leavesAny != 0 {
		l.keep("anything", "", cmp.Or(strings.ToUpper(a.name), "SQL text"))
	}
	if a.form.kind != "" {
		a.note(a.form.kind, a.schema+"."+a.object, a.form.by)
	}
	if !a.adds {
		l.named = max(0, l.named-a.released)
	}
	l.named += a.taken
	l.vars = l.vars || a.leaves&leavesVariables != 0
	a.adds = a.adds || a.query
}

// Locks is what has locked tables, so that other connections wait; "" for nothing.
func (l *Left) Locks() string { return l.left["locks ."] } // which have no name

// String says what is on the connection, for errors; "" where nothing is.
func (l *Left) String() string {
	switch {
	case len(l.left) > 0:
		return strings.Join(slices.Compact(slices.Sorted(maps.Values(l.left))), ", ")
	case l.named > 0:
		return "GET_LOCK"
	}
	return ""
}

// Variable reports whether the session variable of that name was set, and not put back.
func (l *Left) Variable(name string) bool {
	_, ok := l.left["variable "+name]
	return ok
}

// UserVariables reports whether a query has set user variables.
func (l *Left) UserVariables() bool { return l.vars }
