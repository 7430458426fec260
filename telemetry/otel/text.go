package lockotel

import (
	"strings"
	"unicode/utf8"
)

// longest is the most of a statement's text that a span has, in bytes.
const longest = 4096

// cut stands for a rest of a text that is not shown.
const cut = "…"

// sanitized is a statement's text without values: literals are replaced by ?, and comments
// are left out. Where it is not certain how the server reads the rest, because of a
// backslash, for example, the rest is left out.
func sanitized(text string) string {
	if !utf8.ValidString(text) { // in gbk, for example, a quote may be half of a character
		return cut
	}
	var out strings.Builder
	for i := 0; i < len(text); {
		token, size, ok := next(text[i:])
		if !ok || out.Len()+len(token) > longest {
			return strings.TrimSpace(strings.TrimSpace(out.String()) + " " + cut)
		}
		if token != " " || out.Len() > 0 && !strings.HasSuffix(out.String(), " ") {
			out.WriteString(token)
		}
		i += size
	}
	return strings.TrimSpace(out.String())
}

// next returns what is shown of the first token of text, and the size of that. ok is false
// if text is not to be shown from there on.
func next(text string) (shown string, size int, ok bool) {
	switch c := text[0]; {
	case c == '\'' || c == '"':
		size, ok = quoted(text)
		return "?", size, ok
	case c == '`':
		size, ok = quoted(text)
		if !ok {
			return "", 0, false
		}
		return text[:size], size, true
	case strings.HasPrefix(text, "/*"):
		return comment(text)
	case strings.HasPrefix(text, "*/"): // the end of a comment that a server may execute
		return " ", 2, true
	case c == '#' || strings.HasPrefix(text, "--") && (len(text) == 2 || text[2] <= ' '):
		size = strings.IndexAny(text, "\n\x00")
		if size < 0 {
			size = len(text)
		}
		return " ", size, true
	case c == '\\' || c == '$' || c == 0: // $tag$…$tag$ is a literal on MySQL 9
		return "", 0, false
	case strings.IndexByte(" \t\n\v\f\r", c) >= 0:
		return " ", 1, true
	case inWord(c) || c == '.' && len(text) > 1 && text[1] >= '0' && text[1] <= '9':
		return word(text)
	}
	return text[:1], 1, true
}

// word is [next] for a name or a number.
func word(text string) (shown string, size int, ok bool) {
	number := text[0] >= '0' && text[0] <= '9' || text[0] == '.'
	for size < len(text) && (inWord(text[size]) || number && text[size] == '.' || text[size] == '$') {
		size++
	}
	if number {
		return "?", size, true
	}
	return text[:size], size, true
}

func inWord(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '_' || c >= utf8.RuneSelf
}

// quoted returns the size of '…', "…" or `…` at the beginning of text. ok is false if not
// every server ends it there.
func quoted(text string) (size int, ok bool) {
	end := strings.IndexByte(text[1:], text[0])
	if end < 0 || strings.Contains(text[1:1+end], "*/") || text[0] != '`' && strings.Contains(text[1:1+end], `\`) {
		return 0, false
	}
	return 1 + end + 1, true
}

// comment is [next] for a comment. One that a server may execute is shown like other text.
func comment(text string) (shown string, size int, ok bool) {
	for _, head := range []string{"/*!", "/*M!", "/*m!"} {
		if strings.HasPrefix(text, head) {
			size = len(head)
			for size < len(text) && text[size] >= '0' && text[size] <= '9' {
				size++
			}
			return " ", size, true
		}
	}
	end := strings.Index(text[2:], "*/")
	if end < 0 {
		return "", 0, false
	}
	return " ", 2 + end + 2, true
}
