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

// quotings counts the ways in which servers may read strings. In the first one a backslash escapes what follows it, in the
// second one not within "…", which is a name under ANSI_QUOTES, and in the third one nowhere (NO_BACKSLASH_ESCAPES).
const quotings = 3

// lexer cuts text into tokens, in one of the ways in which a server may. Comments are skipped like whitespace.
type lexer struct {
	text      string
	way       int   // the quoting, from 1 on
	tok       token // the current token, which is text[from:pos]
	from, pos int
	prior     struct {
		tok      token // the one before it, which is text[from:to]
		from, to int
	}

	broken   bool // every server rejects this statement; nothing after it runs
	inside   bool // the lexer is in a conditional comment
	doubt    bool // another way may cut the text differently
	hopeless bool // nothing can be said about the text
}

// another begins the text in the next way, if a server may read it so and anything can be said about it.
func (l *lexer) another() bool {
	l.hopeless = l.hopeless || l.doubt && !utf8.ValidString(l.text) // in gbk and the like a character may end in a backslash
	if l.hopeless || l.way == quotings || l.way > 0 && !l.doubt {
		return false
	}
	*l = lexer{text: l.text, way: l.way + 1, tok: other, doubt: l.doubt}
	return true
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
	l.broken = l.broken || l.inside
	return end
}

// peek returns the byte i places on, 0 past the end.
func (l *lexer) peek(i int) byte {
	if l.pos+i < len(l.text) {
		return l.text[l.pos+i]
	}
	return 0
}

// special handles what begins with any other byte. It returns end where it has skipped a comment.
func (l *lexer) special(c byte) token {
	next := l.peek(1)
	switch {
	case c == '#', c == '-' && next == '-' && (l.peek(2) <= ' ' || l.peek(2) == 0x7f):
		if i := strings.IndexAny(l.text[l.pos:], "\n\x00"); i >= 0 { // a NUL ends it, too
			l.pos += i
		} else {
			l.pos = len(l.text)
		}
		return end
	case c == '/' && next == '*':
		return l.comment()
	case c == '*' && next == '/' && l.inside:
		l.inside = false
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
		return l.stop(false)
	}
	l.pos++
	return other
}

// comment skips the comment at pos, or enters it if it is conditional, as /*!80000 … */ and /*M!100000 … */: some servers run
// what is in it, so that nothing can be said for sure.
func (l *lexer) comment() token {
	inside, _, ends := strings.Cut(l.text[l.pos+2:], "*/")
	if body, conditional := strings.CutPrefix(strings.TrimPrefix(inside, "M"), "!"); conditional {
		l.hopeless, l.inside = true, true
		l.pos += len("/*") + len(inside) - len(body)
		l.digits()
		return end
	}
	if !ends {
		return l.stop(false)
	}
	l.pos += len("/*") + len(inside) + len("*/")
	return end
}

// stop ends a text that no server accepts from here on, or that cannot be judged, as in another character set.
func (l *lexer) stop(hopeless bool) token {
	l.pos = len(l.text)
	l.from, l.broken, l.hopeless = l.pos, true, l.hopeless || hopeless || !utf8.ValidString(l.text)
	return end
}

func (l *lexer) word() token {
	i, all := l.pos, byte(0)
	for i < len(l.text) && classes[l.text[i]] <= classDigit {
		all |= l.text[i]
		i++
	}
	w := l.text[l.pos:i]
	l.pos = i
	switch {
	case w[0] == '$' && strings.IndexByte(w[1:], '$') >= 0: // $tag$…$tag$ quotes on MySQL 9 and is a name elsewhere
		return l.stop(true)
	case all >= 0x80 && !utf8.ValidString(w) && (strings.IndexByte(w, 0xa0) >= 0 || l.peek(0) == '`'):
		return l.stop(true) // a no-break space in latin1, where it does separate words; a half of a character in gbk or sjis
	}
	return word
}

// number cuts as the servers do, which see FROM in 1e3FROM and 1.0FROM but a name in 1FROM and 0x1FROM.
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

// quoted cuts '…', "…" or `…`. A doubled quote inside needs no care: it makes two tokens of one, and nothing here depends
// on their number.
func (l *lexer) quoted(quote byte) token {
	t, escapes := name, quote == '"' && l.way == 1 || quote == '\'' && l.way < 3
	if quote == '\'' {
		t = literal
	}
	rest := l.text[l.pos+1:]
	size := strings.IndexByte(rest, quote)
	for i := 0; escapes && i < size; i++ {
		skip := strings.IndexByte(rest[i:size], '\\')
		if skip < 0 {
			break
		}
		if i += skip + 1; i == size { // the quote is escaped
			l.doubt = true
			if size = strings.IndexByte(rest[i+1:], quote); size >= 0 {
				size += i + 1
			}
		}
	}
	if size < 0 {
		return l.stop(false)
	}
	l.pos += 1 + size + 1
	return t
}

// unquote takes the quotes off a string or a name. It leaves doubled ones in it alone.
func unquote(w string) string {
	if len(w) >= 2 && classes[w[0]] == classQuote {
		return w[1 : len(w)-1]
	}
	return w
}

// is reports whether w is the keyword upper, in whatever case.
func is(w, upper string) bool {
	return len(w) == len(upper) && w[0]&^0x20 == upper[0] && strings.EqualFold(w, upper)
}

func isOneOf(w string, upper ...string) bool {
	for _, u := range upper {
		if is(w, u) {
			return true
		}
	}
	return false
}
