package strategy

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Resource is what keeps a lock that a hint asks for.
type Resource struct {
	hint.Lock          // completed by the settings of the handle
	Traits    Traits   // of the lock's strategy
	Row       string   // the row that keeps the lock, or its first slot; the key if the lock table does not keep it
	Also      []string // other keys of the hint that the same row keeps

	LockContext *hint.LockContext // the lock context that asks; nil if nobody will ask for its numbers
}

// Tell notes a number of the keys, for which the application can then ask the lock context.
func (r Resource) Tell(what hint.What, n uint64) {
	if r.LockContext != nil {
		r.LockContext.Tell(what, r.Key, n)
		for _, key := range r.Also {
			r.LockContext.Tell(what, key, n)
		}
	}
}

// Forget takes back a number that Tell has noted.
func (r Resource) Forget(what hint.What) {
	if r.LockContext != nil {
		r.LockContext.Forget(what, r.Key)
		for _, key := range r.Also {
			r.LockContext.Forget(what, key)
		}
	}
}

// SlotRows returns the rows of the slots.
func (r Resource) SlotRows() []string {
	rows := make([]string, r.Slots)
	for i := range rows {
		rows[i] = keyrow.SlotName(r.Row, i)
	}
	return rows
}

// Space returns a name that tells apart the locks on one row that do not exclude each other, and those that do
// exclude each other but mean different things.
func (r Resource) Space() string {
	switch {
	case r.Slots > 0:
		return "slots"
	case r.Traits.Table && r.Traits.Excludes:
		return Rows
	}
	return r.Traits.Name
}

// Rows is the space of the strategies that exclude each other on the same row of the lock table.
const Rows = "rows"

// SameAs reports whether other is kept on the same row, in the same space.
func (r Resource) SameAs(other Resource) bool {
	return r.Row == other.Row && r.Space() == other.Space()
}

// Merge returns resources, each once, sorted by their rows. The same resource may come twice: one With says how a
// key is locked, and another leaves that to the handle; and several keys can share a row.
func Merge(resources []Resource) (merged []Resource) {
	if len(resources) == 1 {
		return resources
	}
	for _, resource := range resources {
		if at := slices.IndexFunc(merged, resource.SameAs); at >= 0 {
			merged[at].merge(resource)
		} else {
			merged = append(merged, resource)
		}
	}
	slices.SortFunc(merged, func(a, b Resource) int {
		return cmp.Or(strings.Compare(a.Row, b.Row), strings.Compare(a.Space(), b.Space()))
	})
	return merged
}

// merge adds what other asks for, which is on the same row and in the same space.
func (r *Resource) merge(other Resource) {
	if r.Key != other.Key {
		r.Also = append(r.Also, other.Key)
		if r.Traits.Inside && !other.Traits.Inside { // outside of the transaction a lock has a token
			r.Kind, r.Traits = other.Kind, other.Traits
		}
	}
	r.Shared = r.Shared && other.Shared
	r.Slots = min(r.Slots, other.Slots)
	// The older of two versions is still the version if nothing has changed. 0 is
	// none.
	r.Version = cmp.Or(min(r.Version, other.Version), max(r.Version, other.Version))
}

// Upgrade returns the error of a caller that holds a key shared and asks for the key exclusively.
func (r Resource) Upgrade() error {
	return &lockerr.Error{Op: "lock", Key: r.Key, Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
		"this unit of work holds the key shared and asks for it exclusively; two holders that upgrade would deadlock;"+
			" ask for the exclusive lock from the beginning"))}
}

// Naming puts the caller's keys into an error, in place of the rows that keep these keys.
func Naming(err error, resources []Resource) error {
	var e *lockerr.Error
	if errors.As(err, &e) && e.Key != "" {
		e.Key = Label(resources)
	}
	return err
}

// Label returns the name that errors have for the keys of resources.
func Label(resources []Resource) string {
	if len(resources) == 1 {
		return resources[0].Key
	}
	keys := make([]string, len(resources))
	for i, resource := range resources {
		keys[i] = resource.Key
	}
	slices.Sort(keys)
	return strings.Join(slices.Compact(keys), ", ")
}
