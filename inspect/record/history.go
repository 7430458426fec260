package record

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Moment is what the record tells of a time.
type Moment struct {
	Time time.Time `json:"time"`

	// Known says that the recorder looked at that time. Else nobody knows who held and waited then, and Holders and
	// Waiters are empty.
	Known   bool    `json:"known"`
	Gaps    string  `json:"gaps,omitempty"` // what the recorder did not see, at any time or then
	Holders []Event `json:"holders"`
	Waiters []Event `json:"waiters"` // the longest wait first
	Around  []Event `json:"around"`  // what happened at the keys around that time, and deadlocks
}

// At reads from the record at path who held keys at a time, and who waited for them, and what happened then, so
// much earlier or later. Without keys it is about all. namespace may be "", for all.
func At(path string, at time.Time, around time.Duration, namespace string, keys ...string) (*Moment, error) {
	m := &Moment{Time: at, Holders: []Event{}, Waiters: []Event{}, Around: []Event{}}
	state := make(map[string]Event)
	in := contents{make(map[string]bool), make(map[string]bool)}
	over := false // the record has come to a later time
	last := time.Time{}
	err := Read(path, func(e Event) {
		asked := (len(keys) == 0 || slices.Contains(keys, e.Key)) && (namespace == "" || e.Namespace == "" || e.Namespace == namespace)
		in.add(e, namespace)
		near := e.Time.Sub(at).Abs() <= around
		if near && (e.What == Deadlocks || e.Key != "" && asked || e.What == Began || e.What == Ended || e.What == Failed) {
			m.Around = append(m.Around, e)
		}
		if e.What == Forced { // whose time is not that of the look
			return
		}
		if e.Time.After(at) {
			// Between an event and the next one nothing has changed, as long as the recorder looked.
			if !over && m.Known {
				m.Known = (e.What != Began || e.Text == inNewFile) && e.Time.Sub(last) < 3*heartbeat
			}
			over = true
			return
		}
		if e.Time.After(last) {
			last = e.Time
		}
		switch e.What {
		case Began:
			m.Known = true
			clear(state)
			if e.Text != inNewFile {
				m.Gaps = e.Text
			}
		case NotSeen:
			m.Known, m.Gaps = true, e.Text
		case Failed, Ended:
			m.Known = false
			clear(state)
		case Holds, Waits:
			if m.Known = true; asked {
				state[e.party()] = e
			}
		case HoldsNot, HoldsUnseen, WaitsNot, WaitsUnseen:
			delete(state, e.party())
		default:
			m.Known = true
		}
	})
	if err != nil {
		return nil, err
	}
	if !over && at.Sub(last) >= 3*heartbeat {
		m.Known = false
	}
	if m.Known {
		for _, e := range state {
			if e.What == Holds {
				m.Holders = append(m.Holders, e)
			} else {
				m.Waiters = append(m.Waiters, e)
			}
		}
	}
	m.Gaps = in.lacking(m.Gaps, namespace, keys)
	order := func(a, b Event) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), a.Since.Compare(*b.Since), cmp.Compare(a.party(), b.party()))
	}
	slices.SortFunc(m.Holders, order)
	slices.SortFunc(m.Waiters, order)
	slices.SortStableFunc(m.Around, func(a, b Event) int { return a.Time.Compare(b.Time) })
	return m, nil
}

// contents is of what the record tells, at whatever time.
type contents struct{ namespaces, keys map[string]bool }

func (c contents) add(e Event, namespace string) {
	if e.Key != "" || len(e.Name) > 0 {
		c.namespaces[e.Namespace] = true
		c.keys[e.Key] = c.keys[e.Key] || namespace == "" || e.Namespace == namespace
	}
}

// lacking adds to gaps the names asked for that are not in the record at all: they may be misspelt.
func (c contents) lacking(gaps, namespace string, keys []string) string {
	note := func(text string) {
		if gaps != "" {
			gaps += "; "
		}
		gaps += text
	}
	if namespace != "" && len(c.namespaces) > 0 && !c.namespaces[namespace] {
		var names []string
		for _, name := range slices.Sorted(maps.Keys(c.namespaces)) {
			names = append(names, strconv.Quote(name))
		}
		note(fmt.Sprintf("the record has no key of the namespace %q, but of %s: see whether it is spelt right",
			namespace, strings.Join(names, ", ")))
		return gaps
	}
	for _, key := range keys {
		if !c.keys[key] {
			note(fmt.Sprintf("the record has nothing of %q at any time: see whether it is spelt right", key))
		}
	}
	return gaps
}
