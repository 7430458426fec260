package sqltext

import (
	"slices"
	"strings"
)

// simple reports whether the query begins with one of verbs, all of the same length, and has nothing behind it but words,
// numbers, the usual bytes between them, and the bytes in more. None of its words draws from a sequence, and no name lacks
// its backquote.
func simple(query, more string, verbs ...string) bool {
	verb := len(verbs[0])
	if len(query) < verb || !slices.ContainsFunc(verbs, func(v string) bool { return strings.EqualFold(query[:verb], v) }) {
		return false
	}
	for i := verb; i < len(query); i++ {
		switch c := query[i]; {
		case c == '-' && query[i-1] != '-' && i+1 < len(query) && query[i+1] != '-': // else it may begin a comment
		case (classes[c] > classDigit || c == '$' || c >= 0x80) && strings.IndexByte(" \n\t,=?`<>+*", c) < 0 && strings.IndexByte(more, c) < 0:
			return false
		case c|0x20 == 'x' && strings.EqualFold(query[i-2:min(i+2, len(query))], "NEXT"):
			return false
		}
	}
	return strings.Count(query, "`")%2 == 0
}

// PlainRead knows most SELECTs, and PlainWrite most UPDATEs and DELETEs, that can have other statements in front of them and
// behind them in one text: no byte of them begins what could reach into these, and a name in backquotes ends in the text. A
// SELECT of a whole table is none.
func PlainRead(query string) bool {
	return simple(query, ".", "SELECT ") && strings.Contains(strings.ToUpper(query), " WHERE ")
}

// PlainWrite is PlainRead for most UPDATEs and DELETEs: the server counts the rows that they change, and the text says nothing
// else. Its bytes begin no string, comment, call, variable or qualified name, and no word draws from a sequence.
func PlainWrite(query string) bool { return simple(query, "", "UPDATE ", "DELETE ") }

// Quiet knows most statements at a glance, without reading them: a single one that reads or changes data, has no Effect, and
// leaves nothing behind on the connection (Taints). It calls fewer so than there are.
func Quiet(query string) bool {
	for _, verb := range [...]string{"SELECT ", "INSERT ", "UPDATE ", "DELETE ", "REPLACE "} {
		if len(query) > len(verb) && strings.EqualFold(query[:len(verb)], verb) {
			return strings.IndexByte(query, ';') < 0 && strings.IndexByte(query, '@') < 0 && !namesLock(query)
		}
	}
	return false
}

// namesLock reports whether a name in the text may be that of a function which takes or gives back a lock: see userLock.
func namesLock(query string) bool {
	for at := strings.IndexByte(query, '_'); at >= 0; at = strings.IndexByte(query, '_') {
		query = query[at+1:]
		if len(query) >= 4 && isOneOf(query[:4], "LOCK", "UNLO") {
			return true
		}
	}
	return false
}
