package sqltext

import "strings"

// State is what may be the case on a connection, as far as the texts tell that ran
// on it: a set, with one bit for each case. A new connection is Idle, unless it was
// set up otherwise.
type State uint8

const (
	Idle   State = 1 << iota // autocommit is on, and no transaction is open
	Open                     // autocommit is on, and a transaction is open
	Manual                   // autocommit is off: whatever runs opens a transaction
)

// Unknown is what nothing is known of.
const Unknown = Idle | Open | Manual

const states = 3

// After is the state once a text has run to its end without an error.
func (s State) After(e Effect) State { return e.whole.of(s) }

// Within is the state where an error has ended a text, or where nobody has looked
// how far it got.
func (s State) Within(e Effect) State { return e.part.of(s) }

// Effect says what a text does to the State of the connection that it runs on. The
// zero value does nothing.
type Effect struct {
	whole step // all of it has run
	part  step // some of it has run, or nothing
}

// step has for each state before what may come after it. The zero State stands for
// the state before.
type step [states]State

func (p step) of(before State) (after State) {
	for i := range states {
		if at := State(1 << i); before&at != 0 {
			after |= p.at(i)
		}
	}
	return after
}

func (p step) at(i int) State {
	if p[i] == 0 {
		return 1 << i
	}
	return p[i]
}

// effect is that of one statement, by the state before it.
func effect(idle, open, manual State) (e Effect) {
	e.whole = step{idle, open, manual}
	for i, after := range e.whole {
		e.part[i] = after | 1<<i
	}
	return e
}

// The effects that statements have.
var (
	begins    = effect(Open, Open, Manual)
	ends      = effect(Idle, Idle, Manual)
	mayEnd    = effect(Idle, Idle|Open, Manual)
	manual    = effect(Manual, Manual, Manual)
	auto      = effect(Idle, Open, Idle) // commits where it changes anything
	mayAuto   = effect(Idle|Manual, Open|Manual, Idle|Manual)
	anyEffect = effect(Unknown, Unknown, Unknown)
)

// then is the effect of one text after another.
func (e Effect) then(next Effect) (both Effect) {
	if next == (Effect{}) {
		return e
	}
	for i := range states {
		middle := e.whole.at(i)
		both.whole[i] = next.whole.of(middle)
		both.part[i] = e.part.at(i) | next.part.of(middle)
	}
	return both
}

// or is the effect of a text that is read as one or the other.
func (e Effect) or(other Effect) (either Effect) {
	if e == other {
		return e
	}
	for i := range states {
		either.whole[i] = e.whole.at(i) | other.whole.at(i)
		either.part[i] = e.part.at(i) | other.part.at(i)
	}
	return either
}

// Levels are isolation levels of which one is in force, with one bit for each. The
// zero value stands for what was in force before.
type Levels uint8

const (
	ReadUncommitted Levels = 1 << iota
	ReadCommitted
	RepeatableRead
	Serializable
)

// AnyLevel is what nothing is known of.
const AnyLevel = ReadUncommitted | ReadCommitted | RepeatableRead | Serializable

// Quiet knows most statements at a glance, without reading them: a single one that
// reads or changes data, has no Effect, and leaves nothing behind on the connection
// (Taints). It calls fewer so than there are.
func Quiet(query string) bool {
	for _, verb := range [...]string{"SELECT ", "INSERT ", "UPDATE ", "DELETE ", "REPLACE "} {
		if len(query) > len(verb) && strings.EqualFold(query[:len(verb)], verb) {
			return strings.IndexByte(query, ';') < 0 && strings.IndexByte(query, '@') < 0 && !namesLock(query)
		}
	}
	return false
}

// namesLock reports whether a name in the text may be that of a function which takes
// or gives back a lock: see isLockingFunc.
func namesLock(query string) bool {
	for {
		at := strings.IndexByte(query, '_')
		if at < 0 {
			return false
		}
		query = query[at+1:]
		if len(query) >= 4 && (query[0]|0x20 == 'l' || query[0]|0x20 == 'u') &&
			(strings.EqualFold(query[:4], "LOCK") || strings.EqualFold(query[:4], "UNLO")) {
			return true
		}
	}
}
