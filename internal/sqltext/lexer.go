package sqltext

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// token is what the lexer has found; a punctuation mark stands for itself.
type token byte

const (
	end      token = 0
	word     token = 'w' // keyword or name
	name     token = '`' // `…`, or "…", which is a name under ANSI_QUOTES
	literal  token = '1' // '…' or a number
	variable token = '@' // @x, @'x', or only the @@ of @@x: that x follows as a word
	assign   token = ':' // :=
	other    token = '?'
)

// reading is one way in which a server may cut a text into tokens. The zero value is what a
// server does that has been left at its defaults, with all conditional comments being comments.
type reading struct {
	plainSingle bool // a backslash in '…' is a byte like any other
	plainDouble bool // the same for "…"
	wide        bool // gbk and the like: a character may end in an ASCII byte
	holds       int  // bit i: the conditional comments with conditions[i] are code
}

// quotings are the readings by which sql_mode sets servers apart.
var quotings = [...]reading{
	{},
	{plainDouble: true},                    // ANSI_QUOTES: "…" is a name
	{plainDouble: true, plainSingle: true}, // NO_BACKSLASH_ESCAPES
}

// readings counts the readings of a text that has so many different conditions.
func readings(text string, conditions int) int {
	n := len(quotings) << conditions
	if utf8.ValidString(text) {
		return n
	}
	return 2 * n // each of them wide, too
}

// readingOf returns the n-th reading, beginning with the zero value.
func readingOf(n, conditions int) reading {
	quoting := n >> conditions
	r := quotings[quoting%len(quotings)]
	r.holds, r.wide = n&(1<<conditions-1), quoting >= len(quotings)
	return r
}

// lexer cuts text into tokens, in one reading. Comments, and conditional ones that don't hold,
// are skipped like whitespace.
type lexer struct {
	text      string
	tok       token // the current token, which is text[from:pos]
	from, pos int
	prior     struct {
		tok      token // the one before it, which is text[from:to]
		from, to int
	}

	reading     reading
	conditions  [3]string // of conditional comments, if they are known yet
	conditional bool      // the lexer is in one that holds

	broken   bool // every server rejects this statement; nothing after it runs
	doubt    bool // another reading may cut the text differently
	hopeless bool // nothing can be said about the text
}

type class byte

const (
	classWord  class = iota // may begin a name, and go on in it
	classDigit              // may go on in a name
	classSpace
	classQuote
	classMark // a token of its own
	classOther
)

var classes = func() (c [256]class) {
	for b := range 256 {
		c[b] = classOther
		switch {
		case b >= '0' && b <= '9':
			c[b] = classDigit
		case b|0x20 >= 'a' && b|0x20 <= 'z', b == '_', b == '$', b >= 0x80:
			c[b] = classWord
		case strings.IndexByte(" \t\n\v\f\r", byte(b)) >= 0:
			c[b] = classSpace
		case strings.IndexByte("'\"`", byte(b)) >= 0:
			c[b] = classQuote
		case strings.IndexByte("();,=?<>+%!|&~^[]{}", byte(b)) >= 0:
			c[b] = classMark
		}
	}
	return c
}()

// advance goes on to the next token.
func (l *lexer) advance() {
	l.prior.tok, l.prior.from, l.prior.to = l.tok, l.from, l.pos
	l.tok = l.lex()
}

// before returns the text of the token before the current one.
func (l *lexer) before() string { return l.text[l.prior.from:l.prior.to] }

// current returns the text of the current token.
func (l *lexer) current() string { return l.text[l.from:l.pos] }

// value is the current token, without the quotes of a string or a name.
func (l *lexer) value() string { return unquote(l.current()) }

// atEnd reports whether the statement is over.
func (l *lexer) atEnd() bool { return l.tok == ';' || l.tok == end }

// at reports whether the current token is one of the given keywords.
func (l *lexer) at(upper ...string) bool { return l.tok == word && isOneOf(l.current(), upper...) }

// lex cuts off the next token.
func (l *lexer) lex() token {
	for l.pos < len(l.text) {
		c := l.text[l.pos]
		l.from = l.pos
		switch classes[c] {
		case classSpace:
			l.pos++
		case classWord:
			return l.word()
		case classDigit:
			if l.pos > 0 && l.text[l.pos-1] == '.' { // shop.2fa
				return l.word()
			}
			return l.number()
		case classQuote:
			return l.quoted(c)
		case classMark:
			l.pos++
			return token(c)
		default:
			if t := l.special(c); t != end || l.broken {
				return t
			}
		}
	}
	l.from = l.pos
	if l.conditional {
		l.broken = true
	}
	return end
}

// peek returns the byte i places on, 0 past the end.
func (l *lexer) peek(i int) byte {
	if l.pos+i < len(l.text) {
		return l.text[l.pos+i]
	}
	return 0
}

// special handles what begins with any other byte. It returns end where it
// has skipped a comment.
func (l *lexer) special(c byte) token {
	next := l.peek(1)
	switch {
	case c == '#', c == '-' && next == '-' && (l.peek(2) <= ' ' || l.peek(2) == 0x7f):
		for l.pos < len(l.text) && l.text[l.pos] != '\n' && l.text[l.pos] != 0 { // a NUL ends it, too
			l.pos++
		}
		return end
	case c == '/' && next == '*':
		l.comment()
		return end
	case c == '*' && next == '/' && l.conditional:
		l.conditional = false
		l.pos += 2
		return end
	case c == '@':
		l.pos++
		return l.variable()
	case c == ':' && next == '=':
		l.pos += 2
		return assign
	case c == '.' && classes[next] == classDigit && (l.pos == 0 || classes[l.text[l.pos-1]] > classDigit):
		return l.number()
	case c == '\\' && next != 'N': // \N is NULL, on some servers
		return l.fail()
	}
	l.pos++
	return other
}

// comment skips the comment at pos, or enters it if it is conditional and holds: /*!80000 … */,
// /*M!100000 … */. Optimizer hints are comments: nothing in them is of interest.
func (l *lexer) comment() {
	inside, _, ends := strings.Cut(l.text[l.pos+2:], "*/")
	c := conditionAt(l.text[l.pos:])
	l.doubt = l.doubt || c != ""
	i := slices.Index(l.conditions[:], c)
	switch {
	case l.conditional, c != "" && strings.Contains(inside, "/*"):
		l.giveUp() // the servers differ in what they let nest
	case c != "" && i >= 0 && l.reading.holds>>i&1 == 1:
		l.conditional = true
		l.pos += len(c)
	case !ends:
		l.fail()
	default:
		l.pos += len("/*") + len(inside) + len("*/")
	}
}

// conditionAt returns the condition of the conditional comment with which the text begins, such as /*!80000; "" if there
// is none. A version has five or six digits. With others they are code, but no number changes what a statement means here.
func conditionAt(text string) string {
	size := len("/*!")
	switch {
	case strings.HasPrefix(text, "/*M!"):
		size++
	case !strings.HasPrefix(text, "/*!"):
		return ""
	}
	for n := 0; n < 6 && size < len(text) && classes[text[size]] == classDigit; n++ {
		size++
	}
	return text[:size]
}

// conditionsIn returns the conditions in the text, each once, also those that only look so because they are inside a
// string. n is how many there are, or one more than all has room for.
func conditionsIn(text string) (all [3]string, n int) {
	for i := strings.Index(text, "/*"); i >= 0 && n <= len(all); i = strings.Index(text, "/*") {
		c := conditionAt(text[i:])
		if c != "" && !slices.Contains(all[:n], c) {
			if n < len(all) {
				all[n] = c
			}
			n++
		}
		text = text[i+1:]
	}
	return all, n
}

// fail ends a text that no server accepts from here on.
func (l *lexer) fail() token {
	l.pos = len(l.text)
	l.from, l.broken = l.pos, true
	l.doubt = l.doubt || !l.reading.wide && !utf8.ValidString(l.text) // in another character set it may be sound
	return end
}

// giveUp ends a text of which nothing can be said.
func (l *lexer) giveUp() token {
	l.pos = len(l.text)
	l.from, l.hopeless, l.broken = l.pos, true, true
	return end
}

func (l *lexer) word() token {
	i, all := l.pos, byte(0)
	for i < len(l.text) && classes[l.text[i]] <= classDigit {
		all |= l.text[i]
		i++
		if l.half(l.text, i) {
			i++
		}
	}
	w := l.text[l.pos:i]
	l.pos = i
	if w[0] == '$' && strings.IndexByte(w[1:], '$') >= 0 {
		return l.giveUp() // $tag$…$tag$ quotes on MySQL 9 and is a name elsewhere
	}
	if all >= 0x80 && !utf8.ValidString(w) {
		if strings.IndexByte(w, 0xa0) >= 0 {
			return l.giveUp() // a no-break space in latin1, where it does separate words
		}
		l.doubt = l.doubt || l.peek(0) == '`' && !l.reading.wide // the second half of a character in gbk or sjis
	}
	return word
}

// number cuts as the servers do, which see FROM in 1e3FROM and 1.0FROM but a
// name in 1FROM and 0x1FROM.
func (l *lexer) number() token {
	l.digits()
	point := l.peek(0) == '.'
	if point {
		l.pos++
		l.digits()
	}
	sign := 0
	if l.peek(1) == '+' || l.peek(1) == '-' {
		sign = 1
	}
	switch {
	case l.peek(0)|0x20 == 'e' && classes[l.peek(1+sign)] == classDigit:
		l.pos += 1 + sign
		l.digits()
	case !point && classes[l.peek(0)] == classWord:
		return l.word()
	}
	return literal
}

func (l *lexer) digits() {
	for classes[l.peek(0)] == classDigit {
		l.pos++
	}
}

// variable cuts what follows an @.
func (l *lexer) variable() token {
	c := l.peek(0)
	switch {
	case c == '@':
		l.pos++
	case classes[c] == classQuote:
		if l.quoted(c) == end {
			return end
		}
	default:
		for classes[l.peek(0)] <= classDigit || l.peek(0) == '.' {
			l.pos++
		}
	}
	return variable
}

// quoted cuts '…', "…" or `…`. A doubled quote inside needs no care: it
// makes two tokens of one, and nothing here depends on their number.
func (l *lexer) quoted(quote byte) token {
	t, escapes := name, false
	switch quote {
	case '\'':
		t, escapes = literal, !l.reading.plainSingle
	case '"':
		escapes = !l.reading.plainDouble
	}
	rest := l.text[l.pos+1:]
	size := strings.IndexByte(rest, quote)
	if size > 0 && (l.reading.wide || escapes && strings.IndexByte(rest[:size], '\\') >= 0) {
		size = l.closing(rest, quote, escapes)
	}
	if size < 0 {
		return l.fail()
	}
	l.pos += 1 + size + 1
	return t
}

// closing finds the closing quote, -1 if there is none, where some bytes don't stand for themselves.
func (l *lexer) closing(rest string, quote byte, escapes bool) int {
	for i := 0; i < len(rest); i++ {
		switch c := rest[i]; {
		case c == quote:
			return i
		case l.half(rest, i+1):
			i++
		case c == '\\' && escapes:
			i++
			l.doubt = l.doubt || i < len(rest) && rest[i] == quote
		}
	}
	return -1
}

// half reports whether the byte at i is the second half of a character.
func (l *lexer) half(text string, i int) bool {
	return l.reading.wide && text[i-1] > 0x80 && i < len(text) && text[i] >= 0x40
}

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
