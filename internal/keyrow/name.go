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
