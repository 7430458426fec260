package advisory

import (
	"crypto/rand"
	"encoding/hex"

	"github.com/mysqllock/mysqllock/internal/lockname"
)

// Name returns the server's name for the lock on key. Two keys never share one.
// If namespace and key are short and consist of lower-case letters, digits and "_.:-",
// the name has both in full. Else it has the beginning of the key and a hash of both.
func Name(namespace, key string) string { return lockname.OfAdvisory(namespace, key) }

// newIdentity names a lock that only one connection will ever have. It tells the
// connection from a later one to which a restarted server has given the same id.
func newIdentity() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return lockname.Any + "-carrier-" + hex.EncodeToString(b[:])
}
