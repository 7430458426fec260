package sqltext

import "strings"

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
	case l.reading.conditions.hold(c, l.reading.holds):
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

// conditionsPlain reports whether every server finds the conditions in text
// that conditionAt finds: how many digits of six or more make up the version,
// and whether fewer than five do, differs.
func conditionsPlain(text string) bool {
	for {
		i := strings.Index(text, "/*")
		if i < 0 {
			return true
		}
		text = text[i:]
		if c, head, ok := conditionAt(text); ok {
			digits, most := head-len("/*!"), 5
			if c.mariadb {
				digits, most = head-len("/*M!"), 6
			}
			further := head < len(text) && classes[text[head]] == classDigit
			if digits != 0 && (digits < 5 || digits > most || further) {
				return false
			}
		}
		text = text[1:]
	}
}

// conditions are the distinct conditions in a text.
type conditions struct {
	list [3]condition
	n    int
}

// conditionsIn finds all conditions, also those that only look so because
// they are inside a string. It fails where there are too many to try.
func conditionsIn(text string) (found conditions, ok bool) {
	for {
		i := strings.Index(text, "/*")
		if i < 0 {
			return found, true
		}
		text = text[i:]
		if c, _, ok := conditionAt(text); ok && found.index(c) < 0 {
			if found.n == len(found.list) {
				return found, false
			}
			found.list[found.n] = c
			found.n++
		}
		text = text[1:]
	}
}

func (cs *conditions) index(c condition) int {
	for i, known := range cs.list[:cs.n] {
		if known == c {
			return i
		}
	}
	return -1
}

func (cs *conditions) hold(c condition, holds uint8) bool {
	i := cs.index(c)
	return i >= 0 && holds>>i&1 == 1
}
