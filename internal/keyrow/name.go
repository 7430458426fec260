package keyrow

import (
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// Rows are named by their keys. Names of another meaning begin with a zero byte,
// and so does that of a key which itself begins with one. What would be longer
// than a name can be is hashed.
const (
	escape     = "\x00\x00"
	slotMark   = "\x00slot "
	stripeMark = "\x00stripe "
	maxName    = 255
)

// Name is the name of the row that keeps key.
func Name(key string) string {
	if strings.HasPrefix(key, "\x00") {
		return marked(escape, key)
	}
	return key
}

// Stripe is the name of the row that keeps key where all keys share n rows.
func Stripe(key string, n int) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // never fails
	return StripeName(int(h.Sum64() % uint64(n)))
}

// StripeName is the name of the i-th of the rows that keys share.
func StripeName(i int) string { return stripeMark + strconv.Itoa(i) }

// SlotName is the name of the row that keeps the i-th slot of what the row name
// keeps. The first slot is that row itself.
func SlotName(name string, i int) string {
	if i == 0 {
		return name
	}
	return marked(slotMark+strconv.Itoa(i), ":"+name)
}

// marked is mark and text, which does not begin with "#", or mark and a hash
// where that is too long.
func marked(mark, text string) string {
	if len(mark)+len(text) <= maxName {
		return mark + text
	}
	return fmt.Sprintf("%s#%x", mark, sha256.Sum256([]byte(text)))
}

// Meaning is what the name of a row says.
type Meaning struct {
	Key    string // as the caller calls it; "" for a stripe, and where it is hashed
	Hashed bool   // the key is too long to be told
	Stripe int    // the row is the i-th of those that keys share; -1 where it is none of them
	Slot   int    // the row keeps the i-th slot
}

// Read reads a name back. ok is false where no key has such a name.
func Read(name string) (m Meaning, ok bool) {
	if rest, found := strings.CutPrefix(name, slotMark); found {
		sep := strings.IndexAny(rest, ":#")
		if sep < 0 {
			return m, false
		}
		slot, ok := number(rest[:sep])
		if !ok || slot == 0 {
			return m, false
		}
		if m = (Meaning{Stripe: -1, Hashed: true}); rest[sep] == ':' {
			if m, ok = Read(rest[sep+1:]); !ok || m.Slot > 0 {
				return Meaning{}, false
			}
		}
		m.Slot = slot
		return m, true
	}
	if rest, found := strings.CutPrefix(name, stripeMark); found {
		m.Stripe, ok = number(rest)
		return m, ok
	}
	m.Stripe = -1
	switch rest, escaped := strings.CutPrefix(name, escape); {
	case escaped && strings.HasPrefix(rest, "\x00"):
		m.Key = rest
	case escaped && strings.HasPrefix(rest, "#"):
		m.Hashed = true
	case name == "" || name[0] == 0:
		return Meaning{}, false
	default:
		m.Key = name
	}
	return m, true
}

// number reads what strconv.Itoa writes.
func number(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && strconv.Itoa(n) == s
}
