// Package lockname knows what the strategies call their named locks of the server
// (GET_LOCK), and reads the names back. What they are called is told apart by how
// it begins.
package lockname

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// How names begin.
const (
	Any      = "mysqllock"
	advisory = Any + ":"
	Bell     = Any + "-lease-"
	Wish     = Any + "-wish-"
)

// The server's names are at most 64 characters on MySQL, which also takes those
// for equal that differ only in case. So ours are lower-case ASCII.
const maxName = 64

// OfAdvisory is the name of the advisory lock on key. Two keys never share one.
// Where a short name of lower-case letters, digits and "_.:-" tells namespace
// and key in full it is they, else the beginning of the key and a hash of both.
func OfAdvisory(namespace, key string) string {
	// No plain part has a "/" or a "#".
	if plain(namespace) && plain(key) && len(advisory)+len(namespace)+1+len(key) <= maxName {
		return advisory + namespace + "/" + key
	}
	sum := sha256.Sum256([]byte(strconv.Itoa(len(namespace)) + ":" + namespace + key))
	hash := "#" + hex.EncodeToString(sum[:16])
	begin := []byte(key[:min(len(key), maxName-len(advisory)-len(hash))])
	for i, c := range begin {
		if 'A' <= c && c <= 'Z' {
			begin[i] = c - 'A' + 'a'
		} else if !safe(c) {
			begin[i] = '_'
		}
	}
	return advisory + string(begin) + hash
}

// IsAdvisory reports whether the name is that of an advisory lock.
func IsAdvisory(name string) bool { return strings.HasPrefix(name, advisory) }

// ReadAdvisory reads namespace and key back from the name of an advisory lock. ok
// is false where it has only a hash of them, or is none.
func ReadAdvisory(name string) (namespace, key string, ok bool) {
	rest, ok := strings.CutPrefix(name, advisory)
	if !ok || strings.Contains(rest, "#") {
		return "", "", false
	}
	return strings.Cut(rest, "/")
}

// OfBell is the name of the lock that wakes those who wait for the lease on the
// row of that name. After Bell it is the first 40 digits of a hash.
func OfBell(namespace, row string) string { return Bell + hashed(namespace, row) }

// OfWish is the name of the lock that shows that somebody asks for the advisory
// lock on key only now and then. After Wish it is the first 40 digits of a hash.
func OfWish(namespace, key string) string { return Wish + hashed(namespace, key) }

func hashed(namespace, name string) string {
	sum := sha256.Sum256([]byte(namespace + "\x00" + name))
	return hex.EncodeToString(sum[:20])
}

func plain(s string) bool {
	for i := range len(s) {
		if !safe(s[i]) {
			return false
		}
	}
	return true
}

func safe(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '.' || c == ':' || c == '-'
}
