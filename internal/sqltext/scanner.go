package sqltext

// scanner goes through the tokens of a text.
type scanner struct {
	lexer
	tok   token // the current token
	prior struct {
		tok      token // the one before it, which is text[from:to]
		from, to int
	}
}

func newScanner(text string, r reading) scanner {
	return scanner{lexer: lexer{text: text, reading: r}, tok: other}
}

// next goes on to the next token, and reports whether it could: it stays at the end of
// the statement once it is there.
func (s *scanner) next() bool {
	if s.atEnd() {
		return false
	}
	s.prior.tok, s.prior.from, s.prior.to = s.tok, s.from, s.pos
	s.tok = s.lex()
	return true
}

// before returns the text of the token before the current one.
func (s *scanner) before() string { return s.text[s.prior.from:s.prior.to] }

// atEnd reports whether the statement is over.
func (s *scanner) atEnd() bool { return s.tok == ';' || s.tok == end }

// at reports whether the current token is one of the given keywords.
func (s *scanner) at(upper ...string) bool { return s.tok == word && isOneOf(s.current(), upper...) }

// value is the current token, without the quotes of a string or a name.
func (s *scanner) value() string { return unquote(s.current()) }

// unquote takes the quotes off a string or a name. It leaves doubled ones in it alone.
func unquote(w string) string {
	if len(w) >= 2 && classes[w[0]] == classQuote {
		return w[1 : len(w)-1]
	}
	return w
}

// is reports whether w is the keyword upper, in whatever case. The keyword
// consists of A to Z and _ only.
func is(w, upper string) bool {
	if len(w) != len(upper) {
		return false
	}
	for i := range len(upper) {
		if w[i]&^0x20 != upper[i] {
			return false
		}
	}
	return true
}

func isOneOf(w string, upper ...string) bool {
	for _, u := range upper {
		if is(w, u) {
			return true
		}
	}
	return false
}

// isSystem reports whether a schema, quoted or not, is one of the server's own.
func isSystem(schema string) bool {
	return isOneOf(unquote(schema), "MYSQL", "SYS", "INFORMATION_SCHEMA", "PERFORMANCE_SCHEMA")
}
