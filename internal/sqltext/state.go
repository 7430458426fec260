package sqltext

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

// step has for each state before what may come after it. The zero value does nothing.
type step [states]State

func (p step) of(before State) (after State) {
	if p == (step{}) {
		return before
	}
	for i := range states {
		if before&(1<<i) != 0 {
			after |= p[i]
		}
	}
	return after
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
		middle := e.whole.of(1 << i)
		both.whole[i] = next.whole.of(middle)
		both.part[i] = e.part.of(1<<i) | next.part.of(middle)
	}
	return both
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
