package sqltext

import (
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

// lexer cuts text into tokens, in one reading. Comments, and conditional ones
// that don't hold, are skipped like whitespace.
type lexer struct {
	text        string
	from, pos   int // the current token is text[from:pos]
	reading     reading
	conditional bool // in a conditional comment that holds

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
		}
	}
	for _, b := range []byte(" \t\n\v\f\r") {
		c[b] = classSpace
	}
	for _, b := range []byte("'\"`") {
		c[b] = classQuote
	}
	for _, b := range []byte("();,=?<>+%!|&~^[]{}") {
		c[b] = classMark
	}
	return c
}()

// lex returns the next token.
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

// current returns the text of the current token.
func (l *lexer) current() string { return l.text[l.from:l.pos] }

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
	case c == '#':
		l.skipLine()
		return end
	case c == '-' && next == '-' && (l.peek(2) <= ' ' || l.peek(2) == 0x7f):
		l.skipLine()
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

// fail ends a text that no server accepts from here on.
func (l *lexer) fail() token {
	l.pos = len(l.text)
	l.from = l.pos
	l.broken = true
	// In a character set with ASCII bytes inside of characters it may be sound.
	l.doubt = l.doubt || !l.reading.wide && !utf8.ValidString(l.text)
	return end
}

// giveUp ends a text of which nothing can be said.
func (l *lexer) giveUp() token {
	l.pos = len(l.text)
	l.from = l.pos
	l.hopeless, l.broken = true, true
	return end
}

// skipLine skips to the end of the line. A NUL ends a line comment too.
func (l *lexer) skipLine() {
	for l.pos < len(l.text) && l.text[l.pos] != '\n' && l.text[l.pos] != 0 {
		l.pos++
	}
}

func (l *lexer) word() token {
	i, all := l.pos, byte(0)
	for i < len(l.text) && classes[l.text[i]] <= classDigit {
		all |= l.text[i]
		i++
		if l.reading.wide && l.text[i-1] > 0x80 && i < len(l.text) && l.text[i] >= 0x40 {
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
		if l.peek(0) == '`' && !l.reading.wide {
			l.doubt = true // the second half of a character in gbk or sjis
		}
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
	if l.peek(0)|0x20 == 'e' {
		sign := 0
		if l.peek(1) == '+' || l.peek(1) == '-' {
			sign = 1
		}
		if classes[l.peek(1+sign)] == classDigit {
			l.pos += 1 + sign
			l.digits()
			return literal
		}
	}
	if !point && classes[l.peek(0)] == classWord {
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

// closing finds the closing quote, -1 if there is none, where some bytes
// don't stand for themselves.
func (l *lexer) closing(rest string, quote byte, escapes bool) int {
	for i := 0; i < len(rest); i++ {
		c := rest[i]
		switch {
		case c == quote:
			return i
		case l.reading.wide && c > 0x80 && i+1 < len(rest) && rest[i+1] >= 0x40:
			i++
		case c == '\\' && escapes:
			i++
			if i < len(rest) && rest[i] == quote {
				l.doubt = true
			}
		}
	}
	return -1
}
