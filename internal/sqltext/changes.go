package sqltext

import (
	"cmp"
	"strings"
)

// Changes says what tells whether running a text has changed data. The zero value is
// MayChange.
type Changes uint8

const (
	// MayChange: nothing tells, so it may have. It is the answer whenever there is
	// doubt, and for whatever may run a procedure, or a function that is none of the
	// server's own.
	MayChange Changes = iota
	// ChangesCounted: the number of rows that the server says are affected. A trigger
	// on rows that were found and left as they were can't be seen from the text.
	ChangesCounted
	// ChangesNothing: the text alone. It reads, or it sets savepoints or variables.
	ChangesNothing
)

// String returns the name of the constant.
func (c Changes) String() string {
	switch c {
	case ChangesCounted:
		return "ChangesCounted"
	case ChangesNothing:
		return "ChangesNothing"
	default:
		return "MayChange"
	}
}

// and is the answer for two statements in one text, of whose rows the server counts
// those of the last.
func (c Changes) and(d Changes) Changes {
	if c == d && c != ChangesCounted {
		return c
	}
	return MayChange
}

// or is the answer for a text that may be read in two ways.
func (c Changes) or(d Changes) Changes { return min(c, d) }

// Verb returns the verb of query in upper case, for texts that people read; of several
// statements, that of the first which may change data. It is "" where there is none.
func Verb(query string) string {
	s := scanner{lexer: lexer{text: query}}
	verb := ""
	for {
		s.statement, s.tok = statement{}, other
		if s.next(); !s.atEnd() {
			s.verb()
			for !s.atEnd() {
				s.next()
			}
			s.finish()
			if s.info.Changes != ChangesNothing {
				return strings.ToUpper(s.name)
			}
			verb = cmp.Or(verb, s.name)
		}
		if s.tok == end {
			return strings.ToUpper(verb)
		}
	}
}

// insertInto goes on to the last part of the name of the table that an INSERT or
// REPLACE is for. The parenthesis behind it is no call.
func (s *scanner) insertInto() {
	s.next()
	for s.at("LOW_PRIORITY") || s.at("DELAYED") || s.at("HIGH_PRIORITY") || s.at("IGNORE") || s.at("INTO") {
		s.next()
	}
	for s.tok == word || s.tok == name {
		s.alias, s.qualified = true, false
		if next := *s; !next.dot() {
			return
		}
		s.next()
		s.next()
	}
}

// dot reports whether the next token is the dot in a qualified name.
func (s *scanner) dot() bool {
	s.next()
	return s.current() == "."
}
