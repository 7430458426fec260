package sqltext

import (
	"iter"
	"strings"
	"unicode/utf8"
)

// reading is one way in which a server may cut a text into tokens. The zero
// value is what a server does that has been left at its defaults, with all
// conditional comments being comments.
type reading struct {
	plainSingle bool // a backslash in '…' is a byte like any other
	plainDouble bool // the same for "…"
	wide        bool // gbk and the like: a character may end in an ASCII byte

	conditions conditions // those in the text, if they are known yet
	holds      uint8      // bit i: conditions.list[i] holds, its comments are code
}

// readingsOf goes through all ways to read query, whose conditions are conds.
func readingsOf(query string, conds conditions) iter.Seq[reading] {
	return func(yield func(reading) bool) {
		quotings := [...]reading{
			{},
			{plainDouble: true},                    // ANSI_QUOTES: "…" is a name
			{plainSingle: true, plainDouble: true}, // NO_BACKSLASH_ESCAPES
		}
		charsets := 1
		if !utf8.ValidString(query) {
			charsets = 2
		}
		for _, r := range quotings {
			for wide := range charsets {
				for holds := range 1 << conds.n {
					r.wide, r.conditions, r.holds = wide == 1, conds, uint8(holds)
					if !yield(r) {
						return
					}
				}
			}
		}
	}
}

// comment skips the comment at pos, or enters it if it is conditional and
// holds. Optimizer hints are comments: nothing in them is of interest.
func (l *lexer) comment() {
	if l.conditional {
		l.giveUp() // the servers differ in what they let nest
		return
	}
	size := strings.Index(l.text[l.pos+2:], "*/")
	c, head, ok := conditionAt(l.text[l.pos:])
	if !ok {
		if size < 0 {
			l.fail()
			return
		}
		l.pos += 2 + size + 2
		return
	}

	if size < 0 {
		size = len(l.text) - l.pos - 2
	}
	if strings.Contains(l.text[l.pos+2:l.pos+2+size], "/*") {
		l.giveUp()
		return
	}
	l.doubt = true
	switch {
	case l.reading.holdsFor(c):
		l.conditional = true
		l.pos += head
	case l.pos+2+size == len(l.text):
		l.fail()
	default:
		l.pos += 2 + size + 2
	}
}

// condition is what has to hold for a conditional comment to be code.
type condition struct {
	mariadb bool // /*M!…, which MySQL never runs
	version int  // 0: any
}

// conditionAt reads the head of a conditional comment and its length.
func conditionAt(text string) (c condition, head int, ok bool) {
	switch {
	case strings.HasPrefix(text, "/*!"):
		head = len("/*!")
	case strings.HasPrefix(text, "/*M!"):
		head, c.mariadb = len("/*M!"), true
	default:
		return condition{}, 0, false
	}
	// A version has five or six digits. With others they are code, but no
	// number changes what a statement means here.
	for n := 0; n < 6 && head < len(text) && classes[text[head]] == classDigit; n++ {
		c.version = c.version*10 + int(text[head]-'0')
		head++
	}
	return c, head, true
}

// conditions are the distinct conditions in a text.
type conditions struct {
	list [3]condition
	n    int
	odd  bool // servers differ in how many digits of some make up the version
}

// conditionsIn finds all conditions, also those that only look so because
// they are inside a string. It fails where there are too many to try.
func conditionsIn(text string) (found conditions, ok bool) {
	for i := strings.Index(text, "/*"); i >= 0; i = strings.Index(text, "/*") {
		c, head, ok := conditionAt(text[i:])
		text = text[i+1:]
		if !ok {
			continue
		}
		digits, most := head-len("/*!"), 5
		if c.mariadb {
			digits, most = head-len("/*M!"), 6
		}
		further := head <= len(text) && classes[text[head-1]] == classDigit // text begins behind the slash
		found.odd = found.odd || digits != 0 && (digits < 5 || digits > most || further)
		if found.index(c) >= 0 {
			continue
		}
		if found.n == len(found.list) {
			return found, false
		}
		found.list[found.n] = c
		found.n++
	}
	return found, true
}

func (cs *conditions) index(c condition) int {
	for i, known := range cs.list[:cs.n] {
		if known == c {
			return i
		}
	}
	return -1
}

// holdsFor reports whether the reading takes what is under c for code.
func (r *reading) holdsFor(c condition) bool {
	i := r.conditions.index(c)
	return i >= 0 && r.holds>>i&1 == 1
}
