package sqltext

import "strings"

// Savepoint returns the name of the savepoint that text sets, or with back, goes
// back to. ok is false where text is anything else, several statements included, or
// can be read in several ways. Names that differ only by case are the same.
func Savepoint(text string) (savepoint string, back, ok bool) {
	s := scanner{lexer: lexer{text: text}, tok: other}
	s.next()
	switch {
	case s.at("SAVEPOINT"):
	case s.at("ROLLBACK"):
		back = true
		if s.next(); s.at("WORK") {
			s.next()
		}
		if !s.at("TO") {
			return "", false, false
		}
	default:
		return "", false, false
	}
	s.next()
	if back && s.at("SAVEPOINT") {
		s.next()
	}
	switch s.tok {
	case word:
		savepoint = s.current()
	case name:
		savepoint = unquote(s.current())
	default:
		return "", false, false
	}
	s.next()
	for s.tok == ';' {
		s.tok = s.lex()
	}
	if s.tok != end || s.broken || s.doubt || s.hopeless || strings.ContainsFunc(savepoint, func(r rune) bool { return r >= 0x80 }) {
		return "", false, false
	}
	return strings.ToLower(savepoint), back, true
}
