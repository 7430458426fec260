package inspect

import (
	"encoding/json"
	"fmt"
)

// Known is a value that the server may not tell. The zero value is "not known".
type Known[T any] struct {
	value T
	ok    bool
}

// Value returns a Known that is v.
func Value[T any](v T) Known[T] { return Known[T]{v, true} }

// Get returns the value. ok is false if it is not known.
func (k Known[T]) Get() (v T, ok bool) { return k.value, k.ok }

// String returns the value as text, or "not known".
func (k Known[T]) String() string {
	if !k.ok {
		return notKnown
	}
	return fmt.Sprint(k.value)
}

// IsZero reports that the value is not known. With it encoding/json leaves out a field that
// has the option omitzero.
func (k Known[T]) IsZero() bool { return !k.ok }

// MarshalJSON returns the value, or null if it is not known.
func (k Known[T]) MarshalJSON() ([]byte, error) {
	if !k.ok {
		return []byte("null"), nil
	}
	return json.Marshal(k.value)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (k *Known[T]) UnmarshalJSON(text []byte) error {
	*k = Known[T]{ok: string(text) != "null"}
	return json.Unmarshal(text, &k.value)
}

const notKnown = "not known"

// Seen are the holders or the waiters of a lock that a Snapshot saw. There may be others:
// then an empty List does not mean that nobody holds the lock, or waits for it.
type Seen[T any] struct {
	List []T
	More bool // there may be others, which the server does not show
}

// Any reports whether there are any. It is not known if none was seen, and there may be some.
func (s Seen[T]) Any() Known[bool] {
	if len(s.List) == 0 && s.More {
		return Known[bool]{}
	}
	return Value(len(s.List) > 0)
}

// Count returns how many there are.
func (s Seen[T]) Count() Count { return Count{len(s.List), s.More} }

// Count is how many of something a Snapshot saw.
type Count struct {
	Seen int
	More bool // there may be more of them
}

// Plus returns the sum of two counts.
func (c Count) Plus(other Count) Count { return Count{c.Seen + other.Seen, c.More || other.More} }

// Known returns how many there are. It is not known if none was seen, and there may be some.
// With More it is how many there are at least.
func (c Count) Known() Known[int] {
	if c.Seen == 0 && c.More {
		return Known[int]{}
	}
	return Value(c.Seen)
}

// String returns the number; with "≥" before it if there may be more, or "not known" if none
// was seen then.
func (c Count) String() string {
	if c.Seen > 0 && c.More {
		return fmt.Sprintf("≥ %d", c.Seen)
	}
	return c.Known().String()
}
