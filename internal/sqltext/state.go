package sqltext

// State is what may be the case on a connection, as far as the texts tell that ran on it: a set, with one bit for each case. A
// new connection is Idle, unless it was set up otherwise.
type State uint8

const (
	Idle   State = 1 << iota // autocommit is on, and no transaction is open
	Open                     // autocommit is on, and a transaction is open
	Manual                   // autocommit is off: whatever runs opens a transaction
)

// Unknown is what nothing is known of.
const Unknown = Idle | Open | Manual

// Effect says what a text does to the State of the connection that it runs on. The zero value does nothing.
type Effect struct {
	after   [3]State // what may be the case, for each state before
	several bool     // statements have an effect, so that in between anything may be the case
}

// After is the state once a text has run to its end without an error.
func (s State) After(e Effect) (after State) {
	if e == (Effect{}) {
		return s
	}
	for i := range e.after {
		if s&(1<<i) != 0 {
			after |= e.after[i]
		}
	}
	return after
}

// Within is the state where an error has ended a text, or where nobody has looked how far it got.
func (s State) Within(e Effect) State {
	if e.several {
		return Unknown
	}
	return s | s.After(e)
}

// The effects that statements have.
var (
	begins    = Effect{after: [...]State{Open, Open, Manual}}
	ends      = Effect{after: [...]State{Idle, Idle, Manual}}
	mayEnd    = Effect{after: [...]State{Idle, Idle | Open, Manual}}
	manual    = Effect{after: [...]State{Manual, Manual, Manual}}
	auto      = Effect{after: [...]State{Idle, Open, Idle}} // commits where it changes anything
	mayAuto   = Effect{after: [...]State{Idle | Manual, Open | Manual, Idle | Manual}}
	anyEffect = Effect{after: [...]State{Unknown, Unknown, Unknown}}
)

// then is the effect of one text after another.
func (e Effect) then(next Effect) Effect {
	switch (Effect{}) {
	case e:
		return next
	case next:
		return e
	}
	for i := range e.after {
		e.after[i] = e.after[i].After(next)
	}
	e.several = true
	return e
}

// Levels are isolation levels, with one bit for each: one of them is in force. The zero value stands for the level in
// force before.
type Levels uint8

const (
	ReadUncommitted Levels = 1 << iota
	ReadCommitted
	RepeatableRead
	Serializable
)

// AnyLevel is what nothing is known of.
const AnyLevel = ReadUncommitted | ReadCommitted | RepeatableRead | Serializable
