package inspect

import (
	"encoding/hex"
	"regexp"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
)

const (
	row      = hint.StrategyRow
	lease    = hint.StrategyLease
	advisory = hint.StrategyAdvisory
)

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

// question says which locks a caller asks for.
type question struct {
	namespace string // "" is all
	keys      []string
	try       bool
	forced    bool // also rows whose lease was taken away
	stripes   int  // how many rows the keys of the namespace share; 0 if each key has its own
}

// row is the name of the row that keeps key.
func (q *question) row(key string) string {
	if q.stripes > 0 {
		return keyrow.Stripe(key, q.stripes)
	}
	return keyrow.Name(key)
}

// lock returns the lock with the id. here is false if there is none, or if it is of another
// namespace than the caller's; asked, if the caller does not ask for its key. bases are names of
// rows to which a hashed name may belong.
func (q *question) lock(lock id, bases []string) (l Lock, here, asked bool) {
	l = Lock{Strategy: lock.strategy, Namespace: lock.namespace, Name: lock.name, Stripe: -1}
	if lock.strategy == advisory {
		var named bool
		l.Namespace, l.Key, named = lockname.ReadAdvisory(lock.name)
		for i := 0; i < len(q.keys) && !named; i++ {
			if lockname.OfAdvisory(q.namespace, q.keys[i]) == lock.name {
				l.Namespace, l.Key, named = q.namespace, q.keys[i], true
			}
		}
		// A lock of unknown namespace may be of this one.
		return l, !named || q.covers(l), q.asks(l) || !named && len(q.keys) == 0
	}
	m, ok := keyrow.Read(lock.name)
	if !ok {
		return l, false, false
	}
	l.Key, l.Slot, l.Stripe = m.Key, m.Slot, m.Stripe
	if m.Hashed {
		l.Key = q.hashed(lock.name, m.Slot, bases)
	}
	return l, q.covers(l), q.asks(l)
}

// hashed looks for the key of a row whose name has only a hash of the key.
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

// covers reports whether a lock is of a namespace that the caller looks at.
func (q *question) covers(l Lock) bool { return q.namespace == "" || l.Namespace == q.namespace }

func (q *question) asks(l Lock) bool {
	if !q.covers(l) {
		return false
	}
	if len(q.keys) == 0 {
		return true
	}
	return slices.ContainsFunc(q.keys, func(key string) bool {
		return l.Stripe < 0 && key == l.Key || l.Stripe >= 0 && q.row(key) == keyrow.StripeName(l.Stripe)
	})
}
