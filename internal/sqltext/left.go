package sqltext

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// Left is what statements have left on a connection, as far as their texts tell: another connection does not have it. The body
// of a procedure is not seen. The zero value is a new connection.
type Left struct {
	left  map[string]string // what is there to what has left it
	named int               // locks of GET_LOCK
	vars  bool              // SELECT @x := … has set a user variable
}

// note says that what is left, or taken back, unless by says what has left it.
type note struct{ what, by string }

// Note remembers what a text leaves, and what it takes away if there is no doubt, and it has ended well. What is not
// understood stays for as long as the connection does. A query of several statements takes nothing away: it may have further
// results, and nobody knows yet whether their statements run.
func (l *Left) Note(text string, info Info, query bool, err error) {
	if !info.Taints && (info.Kind != Commits || len(l.left) == 0) {
		return
	}
	a := analyzer{lexer: lexer{text: text}, notes: true}
	for a.another() {
		before := len(a.noted)
		if a.scan(); a.n == 0 { // no server accepts it so
			a.noted = a.noted[:before]
		}
	}
	if a.hopeless {
		a.note("anything", "SQL text")
	}
	takes := err == nil && (a.n == 1 || !query && !a.maybe) && !a.doubt && !a.hopeless
	for _, n := range a.noted {
		switch {
		case n.by != "" && l.left == nil:
			l.left = map[string]string{n.what: n.by}
		case n.by != "":
			l.left[n.what] = n.by
		case takes:
			delete(l.left, n.what)
		}
	}
	if takes {
		l.named = max(0, l.named-a.released)
	}
	l.named += a.taken
	l.vars = l.vars || a.assigns
}

// note notes what the statement leaves, or takes away: then by is "".
func (a *analyzer) note(what, by string) {
	if a.notes {
		a.noted = append(a.noted, note{what, by})
	}
}

// leave notes what a statement that has ended leaves, by its form.
func (a *analyzer) leave() {
	a.maybe = a.maybe || a.form.Defines || a.leaves&leavesAny != 0
	if a.leaves&leavesAny != 0 {
		a.note("anything", cmp.Or(strings.ToUpper(a.verb), "SQL text"))
	}
	if f := a.form; f.kind != "" && (f.by != "" || a.whole) {
		a.note(f.kind+" "+strings.ToLower(a.schema+"."+a.object), f.by)
	}
	a.assigns = a.assigns || a.leaves&leavesVariables != 0
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
