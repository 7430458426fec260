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
	left  map[string]string // what is there to what has left it; nil without any
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
	conds, ok := conditionsIn(text)
	if !ok {
		l.keep("anything", "", "SQL text")
		return
	}
	var either Left
	readings := 0
	for r := range readingsOf(text, conds) {
		one := Left{left: maps.Clone(l.left), named: l.named, vars: l.vars}
		a := analyzer{scanner: newScanner(text, r), left: &one, adds: err != nil, query: query}
		a.scan()
		switch {
		case a.hopeless:
			l.keep("anything", "", "SQL text")
			return
		case a.broken && !a.any:
			continue // rejected, does nothing
		}
		either.or(one)
		if readings++; !a.doubt {
			break
		}
	}
	if readings > 0 {
		*l = either
	}
}

// or adds what is left in another reading.
func (l *Left) or(other Left) {
	if l.left == nil {
		l.left = other.left
	} else {
		maps.Copy(l.left, other.left)
	}
	l.named, l.vars = max(l.named, other.named), l.vars || other.vars
}

// keep remembers an object of a kind, for which names differ by more than case and
// quotes, and what has left it.
func (l *Left) keep(kind, object, by string) {
	if l.left == nil {
		l.left = make(map[string]string)
	}
	key := leftKey(kind, object)
	if kind == "variable" {
		by += strings.TrimPrefix(key, kind)
	}
	l.left[key] = by
}

func leftKey(kind, object string) string {
	return kind + " " + strings.ToLower(strings.NewReplacer("`", "", `"`, "", " ", "").Replace(object))
}

// noteLeft tells the Left, if there is one, what the statement leaves.
func (a *analyzer) noteLeft(kind, object, by string) {
	if a.left != nil {
		a.left.keep(kind, object, by)
	}
}

// noteGone tells the Left, if there is one, what the statement takes away.
func (a *analyzer) noteGone(kind, object string) {
	if a.left != nil && !a.adds {
		delete(a.left.left, leftKey(kind, object))
	}
}

// userLock counts the locks of GET_LOCK at the parenthesis behind a function. It reports
// whether that is all which is to be known of the function.
func (a *analyzer) userLock() bool {
	function := a.before()
	switch {
	case a.left == nil, a.qualified, a.prior.tok != word:
		return false
	case is(function, "GET_LOCK"):
		a.left.named++
	case !isOneOf(function, "RELEASE_LOCK", "RELEASE_ALL_LOCKS"):
		return false
	case a.adds:
	case is(function, "RELEASE_LOCK"):
		a.left.named = max(0, a.left.named-1)
	default:
		a.left.named = 0
	}
	return true
}

// leave tells the Left of a statement that has ended.
func (a *analyzer) leave() {
	if a.leaves&leavesAny != 0 {
		a.left.keep("anything", "", cmp.Or(strings.ToUpper(a.name), "SQL text"))
	}
	a.left.vars = a.left.vars || a.leaves&leavesVariables != 0
	a.adds = a.adds || a.query
}

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
