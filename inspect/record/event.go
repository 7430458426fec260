// Package record keeps who held which lock, and who waited for it, in a file of bounded size, and answers
// from it who did at an earlier time.
//
// The file has an [Event] a line, as JSON: what changed between two looks at the server. When it has half
// of the size that it may have, it is renamed to have ".1" at its end, in place of the one before. A new file
// begins with what is so then.
//
// What began and ended between two looks is not in it. What a look does not see is not, either: who waits
// in the queue of a process, on MariaDB row locks that nobody waits for, and others, as [inspect.Gap] tells.
// Of a holder or a waiter that may be there unseen it is not said that it has ended.
//
// It costs the server what the looks cost: see package inspect. Where a deadlock was broken there is one
// statement more, SHOW ENGINE INNODB STATUS, which takes the privilege PROCESS.
package record

import (
	"fmt"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
)

// What an Event tells.
const (
	Began       = "began"                        // the recorder begins to look; Text is what it does not see
	Ended       = "ended"                        // it looks no more
	Failed      = "failed"                       // a look failed; Text says why. What follows is not known until the next event
	Looked      = "looked"                       // a look saw no change; once a minute
	Holds       = "holds"                        // of a key: the client has the lock
	HoldsNot    = "holds no more"                //
	Waits       = "waits"                        // likewise
	WaitsNot    = "waits no more"                // it has the lock, or has given up
	WaitsUnseen = "is not seen to wait any more" // it may wait, and ask again, perhaps on another connection
	HoldsUnseen = "is not seen to hold any more" // of a key: it may hold, but no look would show it now
	NotSeen     = "not seen"                     // what is not seen has changed: Text is that now
	Lost        = "lost"                         // the lease has run out, neither renewed nor given back
	Forced      = "forced"                       // the lease was taken away, by Account and Process
	Deadlocks   = "deadlock"                     // the server has broken so many as Count
)

// Event is a line of the record. Fields that do not belong to What are zero.
type Event struct {
	Time time.Time `json:"t"` // the server's, UTC
	What string    `json:"what"`

	Namespace string  `json:"namespace,omitempty"`
	Key       string  `json:"key,omitempty"`
	Strategy  string  `json:"strategy,omitempty"`
	Name      []byte  `json:"name,omitempty"` // of the lock, as inspect.Lock has it
	Slot      *int    `json:"slot,omitempty"` // of a key that has several
	Token     *uint64 `json:"token,omitempty"`

	Program    string     `json:"program,omitempty"`
	Connection uint64     `json:"connection_id,omitempty"`
	User       string     `json:"user,omitempty"`
	Host       string     `json:"host,omitempty"`
	PID        int        `json:"pid,omitempty"`
	Since      *time.Time `json:"since,omitempty"`    // it holds, or waits; with Earlier perhaps for longer
	Earlier    bool       `json:"earlier,omitempty"`  // Since is a bound
	Activity   string     `json:"activity,omitempty"` // what the holder did, when others began to wait

	Account string         `json:"account,omitempty"`
	Process string         `json:"process,omitempty"`
	Reason  string         `json:"reason,omitempty"`
	Text    string         `json:"text,omitempty"`
	Count   uint64         `json:"count,omitempty"`
	Sides   []inspect.Side `json:"sides,omitempty"` // of the last deadlock
}

// Who is the client of the event.
func (e Event) Who() string {
	switch {
	case e.Program != "":
		return e.Program
	case e.User != "":
		return e.User + "@" + e.Host
	case e.Connection != 0:
		return fmt.Sprintf("connection %d", e.Connection)
	}
	return "not known"
}

// String says what happened, without the time and the key.
func (e Event) String() string {
	who := e.Who()
	if e.Connection != 0 && e.Program != "" {
		who += fmt.Sprintf(" (connection %d)", e.Connection)
	}
	switch e.What {
	case Holds, HoldsNot, HoldsUnseen, Waits, WaitsNot, WaitsUnseen:
		text := who + " " + e.What
		if e.Strategy != "" {
			text += ": " + e.Strategy
		}
		switch {
		case e.Slot == nil:
		case e.waits():
			text += ", any slot"
		default:
			text += fmt.Sprintf(", slot %d", *e.Slot)
		}
		if e.Token != nil && e.What == Holds {
			text += fmt.Sprintf(", token %d", *e.Token)
		}
		if e.What == HoldsUnseen || e.What == WaitsUnseen {
			text += "; perhaps it does"
		}
		return text
	case Lost:
		return fmt.Sprintf("the lease of %s ran out, neither renewed nor given back", who)
	case Forced:
		text := fmt.Sprintf("the lease with token %d was taken away by %s in process %s", *e.Token, e.Account, e.Process)
		if e.Reason != "" {
			text += ": " + e.Reason
		}
		return text
	case Deadlocks:
		text := fmt.Sprintf("the server broke deadlocks: %d", e.Count)
		for _, side := range e.Sides {
			text += "; " + side.String()
		}
		return text
	case Began:
		return strings.TrimSuffix("the recorder began: "+e.Text, ": ")
	case Ended:
		return "the recorder ended"
	case Failed:
		return "the recorder saw nothing: " + e.Text
	}
	return e.What
}

// lock tells one lock from another.
func (e Event) lock() string {
	slot := -1
	if e.Slot != nil {
		slot = *e.Slot
	}
	return fmt.Sprintf("%q %q %q %d", e.Strategy, e.Namespace, e.Name, slot)
}

// waits reports an event of a waiter.
func (e Event) waits() bool { return e.What == Waits || e.What == WaitsNot || e.What == WaitsUnseen }

// party is the lock with its holder, or its waiter.
func (e Event) party() string {
	waits := e.waits()
	if e.Strategy == lease && !waits {
		return fmt.Sprintf("%v %s %d", waits, e.lock(), *e.Token)
	}
	return fmt.Sprintf("%v %s %d", waits, e.wanted(), e.Connection)
}

// wanted is the lock with the program that waits for it. Who waits for a slot waits for any, of one at a time.
func (e Event) wanted() string {
	if e.waits() && e.Slot != nil && e.Key != "" {
		return fmt.Sprintf("%q %q %q %q", e.Strategy, e.Namespace, e.Key, e.Program)
	}
	return fmt.Sprintf("%s %q", e.lock(), e.Program)
}
