package inspect

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/lockctx"
)

const (
	row      = lockctx.StrategyRow
	lease    = lockctx.StrategyLease
	advisory = lockctx.StrategyAdvisory
)

// What the strategies call their named locks. They are told apart by their
// beginnings.
const (
	anyPrefix      = "mysqllock"
	advisoryPrefix = "mysqllock:"
	bellPrefix     = "mysqllock-lease-"
)

// bellName is the lease strategy's name for what wakes those who wait for a
// lease.
func bellName(namespace, name string) string {
	sum := sha256.Sum256([]byte(namespace + "\x00" + name))
	return fmt.Sprintf(bellPrefix+"%.20x", sum)
}

// advisoryName is the advisory strategy's name for the lock on a key.
func advisoryName(namespace, key string) string {
	const maxName = 64
	if plain(namespace) && plain(key) && len(advisoryPrefix)+len(namespace)+1+len(key) <= maxName {
		return advisoryPrefix + namespace + "/" + key
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(namespace), namespace, key))
	hash := fmt.Sprintf("#%.16x", sum)
	begin := []byte(key[:min(len(key), maxName-len(advisoryPrefix)-len(hash))])
	for i, c := range begin {
		if 'A' <= c && c <= 'Z' {
			begin[i] = c - 'A' + 'a'
		} else if !plain(string(rune(c))) {
			begin[i] = '_'
		}
	}
	return advisoryPrefix + string(begin) + hash
}

var plainPart = regexp.MustCompile(`^[a-z0-9_.:-]*$`)

func plain(s string) bool { return plainPart.MatchString(s) }

// readAdvisory reads namespace and key back from a name that is not hashed.
func readAdvisory(name string) (namespace, key string, ok bool) {
	rest, ok := strings.CutPrefix(name, advisoryPrefix)
	if !ok || strings.Contains(rest, "#") {
		return "", "", false
	}
	return strings.Cut(rest, "/")
}

var ourName = regexp.MustCompile(`^mysqllock[a-z0-9_.:/#-]{0,55}$`)

// readPrimaryKey reads the namespace and the name of a row from what the server
// shows of a locked record: "0x6E73, 0x6B".
func readPrimaryKey(data string) (namespace, name string, ok bool) {
	a, b, ok := strings.Cut(data, ", ")
	if !ok {
		return "", "", false
	}
	if namespace, ok = unhex(a); ok {
		name, ok = unhex(b)
	}
	return namespace, name, ok
}

func unhex(s string) (string, bool) {
	if s == "''" {
		return "", true
	}
	digits, found := strings.CutPrefix(s, "0x")
	b, err := hex.DecodeString(digits)
	return string(b), found && err == nil
}

// question is which locks somebody asks for.
type question struct {
	namespace string // "" is all
	keys      []string
	stripes   int // how many rows the keys of the namespace share; 0 where each has its own
}

// row is the name of the row that keeps key.
func (q *question) row(key string) string {
	if q.stripes > 0 {
		return keyrow.Stripe(key, q.stripes)
	}
	return keyrow.Name(key)
}

// lock says which lock has the id. ok is false where it is none, or not one that
// is asked for. bases are names of rows that a hashed one may be about.
func (q *question) lock(lock id, bases []string) (l Lock, ok bool) {
	l = Lock{Strategy: lock.strategy, Namespace: lock.namespace, Name: lock.name, Stripe: -1}
	if lock.strategy == advisory {
		l.Namespace, l.Key, ok = readAdvisory(lock.name)
		for i := 0; i < len(q.keys) && !ok; i++ {
			if advisoryName(q.namespace, q.keys[i]) == lock.name {
				l.Namespace, l.Key, ok = q.namespace, q.keys[i], true
			}
		}
		// One whose namespace is not told may be of this one.
		return l, q.asks(l) || !ok && len(q.keys) == 0
	}
	m, ok := keyrow.Read(lock.name)
	if !ok {
		return l, false
	}
	l.Key, l.Slot, l.Stripe = m.Key, m.Slot, m.Stripe
	if m.Hashed {
		l.Key = q.hashed(lock.name, m.Slot, bases)
	}
	return l, q.asks(l)
}

// hashed looks for the key of a row whose name tells only a hash of it.
func (q *question) hashed(name string, slot int, bases []string) string {
	for _, key := range q.keys {
		if keyrow.SlotName(keyrow.Name(key), slot) == name {
			return key
		}
	}
	for _, base := range bases {
		if slot > 0 && keyrow.SlotName(base, slot) == name {
			m, _ := keyrow.Read(base)
			return m.Key
		}
	}
	return ""
}

func (q *question) asks(l Lock) bool {
	if q.namespace != "" && l.Namespace != q.namespace {
		return false
	}
	if len(q.keys) == 0 {
		return true
	}
	return slices.ContainsFunc(q.keys, func(key string) bool {
		return l.Stripe < 0 && key == l.Key || l.Stripe >= 0 && q.row(key) == keyrow.StripeName(l.Stripe)
	})
}
