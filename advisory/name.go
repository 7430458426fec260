package advisory

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
)

// The server's names are at most 64 characters on MySQL, which also takes those
// for equal that differ only in case. So ours are lower-case ASCII.
const (
	maxName = 64
	prefix  = "mysqllock:"
)

// Name returns the server's name for the lock on key. Two keys never share one.
// Where a short name of lower-case letters, digits and "_.:-" tells namespace
// and key in full it is they, else the beginning of the key and a hash of both.
func Name(namespace, key string) string {
	// No plain part has a "/" or a "#".
	if plain(namespace) && plain(key) && len(prefix)+len(namespace)+1+len(key) <= maxName {
		return prefix + namespace + "/" + key
	}
	sum := sha256.Sum256([]byte(strconv.Itoa(len(namespace)) + ":" + namespace + key))
	hash := "#" + hex.EncodeToString(sum[:16])
	begin := []byte(key[:min(len(key), maxName-len(prefix)-len(hash))])
	for i, c := range begin {
		if 'A' <= c && c <= 'Z' {
			begin[i] = c - 'A' + 'a'
		} else if !safe(c) {
			begin[i] = '_'
		}
	}
	return prefix + string(begin) + hash
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

// newGuard names a lock that only one connection will ever have. It tells the
// connection from a later one to which a restarted server has given the same id.
func newGuard() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return "mysqllock-carrier-" + hex.EncodeToString(b[:])
}
