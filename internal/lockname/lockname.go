// Package lockname makes the names of the server's named locks (GET_LOCK) that the
// strategies use, and reads the names back. The beginning of a name says what the lock is
// for.
package lockname

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// How names begin. The names of a version must be those of the versions before it, since
// programs of several versions share a server. Older ones also have names that begin with
// "mysqllock-wish-", by which callers without a connection to wait on announce themselves.
const (
	Any      = "mysqllock"
	advisory = Any + ":"
	WakeUp   = Any + "-lease-"
	Wait     = Any + "-wait-"
)

// On MySQL a name has at most 64 characters, and the server ignores case. So ours are
// lower-case ASCII.
const maxNamedLock = 64

// OfAdvisory is the name of the advisory lock on key. Two keys never share one.
// If namespace and key are short and consist of lower-case letters, digits and "_.:-",
// the name has both in full. Else it has the beginning of the key and a hash of both.
func OfAdvisory(namespace, key string) string {
	// No plain part has a "/" or a "#".
	if plain(namespace) && plain(key) && len(advisory)+len(namespace)+1+len(key) <= maxNamedLock {
		return advisory + namespace + "/" + key
	}
	sum := sha256.Sum256([]byte(strconv.Itoa(len(namespace)) + ":" + namespace + key))
	hash := "#" + hex.EncodeToString(sum[:16])
	begin := []byte(key[:min(len(key), maxNamedLock-len(advisory)-len(hash))])
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

// ReadAdvisory reads namespace and key back from the name of an advisory lock. ok is
// false if the name has only a hash of them, or is not the name of an advisory lock.
func ReadAdvisory(name string) (namespace, key string, ok bool) {
	rest, ok := strings.CutPrefix(name, advisory)
	if !ok || strings.Contains(rest, "#") {
		return "", "", false
	}
	return strings.Cut(rest, "/")
}

// OfWakeUp is the name of the wake-up lock of the lease on the row with that name. The
// holder of the lease holds it; waiters wait for it, so its release wakes them. After
// WakeUp come the first 40 digits of a hash.
func OfWakeUp(namespace, row string) string { return WakeUp + hashed(namespace, row) }

// Literal is a name as an SQL expression, for connections of any character set: on MariaDB a named
// lock is what the bytes of its name are, which differ in UTF-16.
func Literal(name string) string { return "_utf8mb4'" + name + "'" }

// Value is the value of a question mark that stands for a name, in the same way.
const Value = "CONVERT(? USING utf8mb4)"

// SQLOfWakeUp is [OfWakeUp] as an SQL expression, for the row whose name is the value of the
// SQL expression row. For the column name:
//
//	CONCAT('mysqllock-lease-', LEFT(SHA2(CONCAT('app\0', name), 256), 40))
func SQLOfWakeUp(namespace, row string) string {
	return fmt.Sprintf("CONCAT('%s', LEFT(SHA2(CONCAT(x'%x', %s), 256), 40))", WakeUp, namespace+"\x00", row)
}

// OfWait is the name of the lock by which a holder of one key shows that it waits for
// another key. After Wait come the first 40 digits of a hash.
func OfWait(namespace, held, wanted string) string {
	return Wait + hashed(namespace, strconv.Itoa(len(held))+":"+held+wanted)
}

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
