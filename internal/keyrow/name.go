package keyrow

import (
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// The name of a row is its key. The names of other rows begin with a zero byte, and so
// does the name of a key that begins with one. A name that would be too long is hashed.
const (
	escape       = "\x00\x00"
	slotPrefix   = "\x00slot "
	stripePrefix = "\x00stripe "
	maxRowName   = 255
)

// Name is the name of the row of key.
func Name(key string) string {
	if strings.HasPrefix(key, "\x00") {
		return prefixed(escape, key)
	}
	return key
}

// Stripe is the name of the row of key if all keys share n rows.
func Stripe(key string, n int) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // never fails
	return StripeName(int(h.Sum64() % uint64(n)))
}

// StripeName is the name of the i-th of the shared rows.
func StripeName(i int) string { return stripePrefix + strconv.Itoa(i) }

// SlotName is the name of the row of the i-th slot of a key whose row has this name. Slot 0
// is the row of the key itself.
func SlotName(name string, i int) string {
	if i == 0 {
		return name
	}
	return prefixed(slotPrefix+strconv.Itoa(i), ":"+name)
}

// prefixed is prefix and text, or prefix and a hash of text if that would be too long. text does
// not begin with "#".
func prefixed(prefix, text string) string {
	if len(prefix)+len(text) <= maxRowName {
		return prefix + text
	}
	return fmt.Sprintf("%s#%x", prefix, sha256.Sum256([]byte(text)))
}

// Meaning is what the name of a row says.
type Meaning struct {
	Key    string // the caller's key; "" for a stripe, and if it is hashed
	Hashed bool   // the name has only a hash of the key
	Stripe int    // the index of a shared row; else -1
	Slot   int    // the index of the slot
}

// Read reads a name back. ok is false if it is the name of no key's row.
func Read(name string) (m Meaning, ok bool) {
	if rest, found := strings.CutPrefix(name, slotPrefix); found {
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
	if rest, found := strings.CutPrefix(name, stripePrefix); found {
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
