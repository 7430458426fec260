package sqltext

import (
	"cmp"
	"maps"
	"regexp"
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

const (
	identifier = "[`\"]?[\\w$]+[`\"]?"
	tableName  = "(" + identifier + `(?:\s*\.\s*` + identifier + ")?)"
)

var (
	leadingWord   = regexp.MustCompile(`^\w*`)
	blocks        = regexp.MustCompile(`(?i)\b(BEGIN|CREATE\s+(OR|DEFINER|PROCEDURE|FUNCTION|TRIGGER|EVENT|AGGREGATE)|DELIMITER)\b`)
	setNames      = regexp.MustCompile(`(?i)^(NAMES|CHARACTER\s+SET|CHARSET)\s[^,]*$`)
	setText       = regexp.MustCompile(`(?is)^SET\s+(.*)$`)
	setGlobal     = regexp.MustCompile(`(?i)^(GLOBAL\s|PERSIST\s|PERSIST_ONLY\s|@@GLOBAL\.|@@PERSIST\.|@@PERSIST_ONLY\.|PASSWORD\b|DEFAULT\s+ROLE\b)[^,]*$`)
	assignment    = regexp.MustCompile(`(?i)^(?:SESSION\s+|LOCAL\s+|@@SESSION\.|@@LOCAL\.|@@)?(\w+)\s*:?=\s*([\w+-]+|'[^',]*'|"[^",]*")$`)
	makesTable    = regexp.MustCompile(`(?i)^CREATE\s+(?:OR\s+REPLACE\s+)?TEMPORARY\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?` + tableName)
	dropsTable    = regexp.MustCompile(`(?i)^DROP\s+(?:TEMPORARY\s+)?TABLE\s+(?:IF\s+EXISTS\s+)?` + tableName + `$`)
	preparesText  = regexp.MustCompile(`(?i)^PREPARE\s+(` + identifier + `)`)
	unpreparesSQL = regexp.MustCompile(`(?i)^(?:DEALLOCATE|DROP)\s+PREPARE\s+(` + identifier + `)$`)
	unlocksTables = regexp.MustCompile(`(?i)^UNLOCK\s+TABLES?$`)
	flushesOnly   = regexp.MustCompile(`(?is)^FLUSH\s+(?:LOCAL\s+|NO_WRITE_TO_BINLOG\s+)?(?:TABLES?\s*$|PRIVILEGES|.*\bLOGS?\b|STATUS|HOSTS|USER_RESOURCES)`)
	getsLock      = regexp.MustCompile(`(?i)\bGET_LOCK\s*\(`)
	releasesLock  = regexp.MustCompile(`(?i)\bRELEASE_LOCK\s*\(`)
	releasesAll   = regexp.MustCompile(`(?i)\bRELEASE_ALL_LOCKS\s*\(`)
)

// A rule says what a statement leaves, or takes away, that matches a pattern whole. name
// is the last group of the pattern.
var rules = []struct {
	pattern *regexp.Regexp
	note    func(l *Left, name string)
}{
	{makesTable, func(l *Left, name string) { l.keep("table "+bareName(name), "CREATE TEMPORARY TABLE") }},
	{preparesText, func(l *Left, name string) { l.keep("prepared "+bareName(name), "PREPARE") }},
	{unpreparesSQL, func(l *Left, name string) { delete(l.left, "prepared "+bareName(name)) }},
	{unlocksTables, func(l *Left, _ string) { delete(l.left, "locked tables") }},
	{flushesOnly, func(*Left, string) {}},
	{setText, (*Left).set},
}

// Note remembers what a statement leaves, and what it takes away if it ends well. What
// is not understood stays for as long as the connection does. A query may have further
// results, of statements of which nobody knows yet whether they run.
func (l *Left) Note(text string, info Info, query bool, err error) {
	if !info.Taints && (info.Kind != Commits || len(l.left) == 0) {
		return
	}
	if err == nil {
		if parts := statements(text); info.Taints && !query && len(parts) > 1 {
			for _, part := range parts { // all of them have ended well
				l.note(part, Look(part))
			}
			return
		}
		l.note(text, info)
		return
	}
	before, named := maps.Clone(l.left), l.named
	l.note(text, info)
	for what, by := range before {
		l.keep(what, by)
	}
	l.named = max(l.named, named)
}

// note notes a statement as if it had ended well.
func (l *Left) note(text string, info Info) {
	text = strings.TrimRight(strings.TrimSpace(text), "; \t\r\n")
	plain := !strings.ContainsAny(text, ";#") && !strings.Contains(text, "/*") && !strings.Contains(text, "--")
	if m := dropsTable.FindStringSubmatch(text); plain && m != nil {
		delete(l.left, "table "+bareName(m[len(m)-1]))
		return
	}
	if !info.Taints {
		return
	}
	for _, rule := range rules {
		if m := rule.pattern.FindStringSubmatch(text); plain && m != nil {
			rule.note(l, m[len(m)-1])
			return
		}
	}
	l.noteOther(text, info)
}

// noteOther notes a statement that is none of those for which there is a rule.
func (l *Left) noteOther(text string, info Info) {
	verb := strings.ToUpper(leadingWord.FindString(text))
	switch {
	case getsLock.MatchString(text) || releasesLock.MatchString(text) || releasesAll.MatchString(text):
		l.named = max(0, l.named+len(getsLock.FindAllString(text, -1))-len(releasesLock.FindAllString(text, -1)))
		if releasesAll.MatchString(text) {
			l.named = 0
		}
	case info.Calls && !info.Recalls: // of most nothing stays
	case info.Kind != Commits && strings.Contains(text, ":="):
		l.vars = true
	case verb == "LOCK":
		l.keep("locked tables", "LOCK TABLES")
	default:
		l.keep("anything", cmp.Or(verb, "SQL text"))
	}
}

// statements are those of a text with several. One that has anything in it in which a
// semicolon may mean something else stays whole.
func statements(text string) []string {
	if !strings.Contains(text, ";") || strings.ContainsAny(text, "'\"`#") || strings.Contains(text, "/*") || strings.Contains(text, "--") ||
		blocks.MatchString(text) {
		return []string{text}
	}
	return slices.DeleteFunc(strings.Split(text, ";"), func(part string) bool { return strings.TrimSpace(part) == "" })
}

func bareName(name string) string { return strings.ToLower(strings.Trim(name, "`\"")) }

func (l *Left) keep(what, by string) {
	if l.left == nil {
		l.left = make(map[string]string)
	}
	l.left[what] = by
}

// set notes the assignments of a SET.
func (l *Left) set(assignments string) {
	if setGlobal.MatchString(assignments) {
		return
	}
	if setNames.MatchString(assignments) {
		l.keep("names", "SET NAMES, for which the DSN has charset=")
		return
	}
	for _, a := range strings.Split(assignments, ",") {
		m := assignment.FindStringSubmatch(strings.TrimSpace(a))
		if m == nil {
			l.keep("anything", "SET")
			continue
		}
		name, value := strings.ToLower(m[1]), strings.ToLower(strings.Trim(m[2], `'"`))
		if value == "default" || restores[name+"="+value] {
			delete(l.left, "variable "+name)
			continue
		}
		l.keep("variable "+name, "SET "+name)
	}
}

// restores are the assignments by which programs put back what they have set: these
// are the servers' defaults.
var restores = map[string]bool{
	"foreign_key_checks=1": true, "foreign_key_checks=on": true,
	"unique_checks=1": true, "unique_checks=on": true,
	"autocommit=1": true, "autocommit=on": true,
	"completion_type=0": true, "completion_type=no_chain": true,
	"timestamp=0": true,
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
