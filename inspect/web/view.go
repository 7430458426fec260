package web

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
)

// message is an event of the stream as it is sent.
type message []byte

func newMessage(event string, data any) message {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // it is of the types below, all of which can be written
	}
	return fmt.Appendf(nil, "event: %s\ndata: %s\n\n", event, text)
}

// hello is the first event: what stays, and the views before.
type hello struct {
	Release bool    `json:"release"` // locks can be released
	Secret  string  `json:"secret,omitempty"`
	Seen    bool    `json:"seen"`   // losses are those that were seen from outside
	Window  int64   `json:"window"` // of the history, in milliseconds
	History []point `json:"history"`
	Minutes []point `json:"minutes"` // with the most that was seen in each
	Ranges  []int64 `json:"ranges"`  // how far one can look back, in milliseconds
	Classes bool    `json:"classes"` // keys are in classes
	Record  bool    `json:"record"`  // each lock has its last hour

	// Of the view that follows at once, if there is one. All others are new when they are sent.
	Age  int64 `json:"age"`  // how old it is
	Next int64 `json:"next"` // when the server is asked again; negative if that is under way
}

// failure is that the server was asked in vain.
type failure struct {
	Error string    `json:"error"`
	Since time.Time `json:"since,omitzero"` // the last answer: the page's clock
}

// view is a snapshot as the page shows it. Times are in milliseconds.
type view struct {
	Time      time.Time  `json:"time"` // the server's
	Namespace string     `json:"namespace"`
	Locks     []lockView `json:"locks"`
	Unshown   int        `json:"unshown"`               // for which there is no room
	Holders   int        `json:"holders"`               // different ones
	HeldMore  bool       `json:"heldMore,omitempty"`    // there may be more than are shown
	WaitMore  bool       `json:"waitingMore,omitempty"` // likewise
	Next      int64      `json:"next"`                  // when the server is asked again

	// What is not known is null.
	Held      inspect.Known[int]    `json:"held"`
	Waiting   inspect.Known[int]    `json:"waiting"`
	Unseen    inspect.Known[int]    `json:"unseen"`  // transactions with row locks that are not shown
	Longest   inspect.Known[int64]  `json:"longest"` // wait, at least
	Deadlocks inspect.Known[uint64] `json:"deadlocks"`
	Circles   int                   `json:"circles"` // of waits, now
	Losses    struct {
		Total  inspect.Known[uint64] `json:"total"`
		Since  int64                 `json:"since"` // when they began to be counted: the page's clock
		Recent []loss                `json:"recent"`
	} `json:"losses"`

	Gaps  []gap `json:"gaps"`
	Point point `json:"point"`

	Minute point    `json:"minute"` // this one, so far
	Hot    [][]heat `json:"hot"`    // for each of the ranges
}

// point is a moment in the plots.
type point struct {
	Time      int64                `json:"t"`
	Longest   inspect.Known[int64] `json:"w"`           // wait, at least; null if it is not known
	Waiting   inspect.Known[int]   `json:"n"`           // null if it is not known
	More      bool                 `json:"m,omitempty"` // more may have waited
	Deadlocks uint64               `json:"d,omitempty"` // since the point before
}

type gap struct {
	What   string `json:"what"`
	Why    string `json:"why"`
	Remedy string `json:"remedy,omitempty"`
}

type lockView struct {
	ID         string   `json:"id"`  // of the lock, whoever has it
	Ref        string   `json:"ref"` // of the lock with those who have it
	Strategy   string   `json:"strategy"`
	Key        string   `json:"key"`
	Nameless   bool     `json:"nameless,omitempty"` // the server tells no key, so Key is the lock's name
	Class      string   `json:"class"`              // of the key, or that itself
	Slot       *int     `json:"slot,omitempty"`     // of a key with slots
	Token      *uint64  `json:"token,omitempty"`
	Remaining  int64    `json:"remaining,omitempty"` // of a lease
	Holders    []client `json:"holders"`
	Waiters    []client `json:"waiters"` // as many as there is room for
	Waiting    int      `json:"waiting"`
	InOrder    bool     `json:"inOrder,omitempty"`
	Overtaken  bool     `json:"overtaken,omitempty"`   // the longest wait is not the first of them
	HoldMore   bool     `json:"holdersMore,omitempty"` // there may be others
	WaitMore   bool     `json:"waitersMore,omitempty"` // likewise
	Releasable bool     `json:"releasable"`
	Why        string   `json:"why,omitempty"`     // its lease is not renewed; others wait: what the holder does, or for whom it waits itself
	Circle     bool     `json:"circle,omitempty"`  // it is in a circle of waits
	HoldsUp    int      `json:"holdsUp,omitempty"` // waiters, of other locks, too, that wait in the end for what the holder does
}

type client struct {
	Program string `json:"program,omitempty"`
	User    string `json:"user,omitempty"`
	Host    string `json:"host,omitempty"`
	Conn    uint64 `json:"conn,omitempty"`
	PID     int    `json:"pid,omitempty"`
	For     int64  `json:"for,omitempty"`    // has held the lock, or waited
	Least   int64  `json:"least,omitempty"`  // has held it, or waited, for at least so long
	Within  int64  `json:"within,omitempty"` // the age of its transaction
	Shared  bool   `json:"shared,omitempty"`
	Left    bool   `json:"left,omitempty"`
	Silent  int64  `json:"silent,omitempty"`    // its lease was not renewed for so long, when that was due
	TTL     int64  `json:"ttl,omitempty"`       // of its lease
	Overdue int64  `json:"overdue,omitempty"`   // its first renewal: it is so old, if that is its TTL
	Locks   int    `json:"locks,omitempty"`     // that end with the connection
	More    bool   `json:"locksMore,omitempty"` // there may be more of them
}

// How much the page is sent of each at most.
const (
	maxLocks   = 500
	maxClients = 50
)

func newView(snap *inspect.Snapshot, classOf func(inspect.Lock) string) *view {
	v := &view{Time: snap.Time, Namespace: printable(snap.Namespace), Deadlocks: snap.Deadlocks, Locks: []lockView{}, Gaps: []gap{}}
	v.HeldMore, v.WaitMore = snap.Incomplete()
	v.Unseen = snap.Unseen
	holders := make(map[inspect.Client]bool)
	chains := make(map[*inspect.Lock][]inspect.Link) // of those that somebody waits for
	heldUp := make(map[*inspect.Holder]int)
	shown := make([]*inspect.Lock, len(snap.Locks))
	for i := range snap.Locks {
		l := &snap.Locks[i]
		shown[i] = l
		v.WaitMore = v.WaitMore || l.Waiters.More
		for _, h := range l.Holders.List {
			holders[h.Client] = true
		}
		for _, w := range l.Waiters.List {
			if w.Least > 0 {
				v.Longest = most(v.Longest, inspect.Value(milliseconds(w.Least)))
			}
		}
		if len(l.Waiters.List) > 0 && len(l.Holders.List) > 0 {
			chain := snap.Chain(l)
			chains[l] = chain
			heldUp[chain[len(chain)-1].Holder] += len(l.Waiters.List)
		}
	}
	circles := snap.Circles()
	v.Holders, v.Circles = len(holders), len(circles)
	v.Held, v.Waiting = snap.Held().Known(), snap.Waiting().Known()
	if v.Waiting == inspect.Value(0) {
		v.Longest = inspect.Value(int64(0))
	}
	slices.SortStableFunc(shown, func(a, b *inspect.Lock) int { return cmp.Compare(longest(b), longest(a)) })
	v.Unshown = max(0, len(shown)-maxLocks)
	for _, l := range shown[:len(shown)-v.Unshown] {
		one := newLockView(*l)
		one.Class = classOf(*l)
		if chain := chains[l]; len(chain) > 0 {
			one.Why = printable(reason(chain))
			if len(chain) == 1 {
				one.HoldsUp = heldUp[chain[0].Holder]
			}
		}
		if late := unrenewing(l); late != "" {
			one.Why = strings.TrimSuffix(late+"; "+one.Why, "; ")
		}
		for _, c := range circles {
			if c.Has(l) {
				one.Why, one.Circle = printable(c.String()), true
			}
		}
		v.Locks = append(v.Locks, one)
	}
	for _, g := range snap.Gaps {
		v.Gaps = append(v.Gaps, gap{g.What, g.Why, g.Remedy})
	}
	v.Point = point{Time: time.Now().UnixMilli(), Longest: v.Longest, Waiting: v.Waiting, More: v.WaitMore}
	return v
}

// longest is for how long somebody has waited for the lock.
func longest(l *inspect.Lock) (wait time.Duration) {
	for _, w := range l.Waiters.List {
		wait = max(wait, w.Least, 1)
	}
	return wait
}

// unrenewing says what it means that the lease was not renewed; "" if it was.
func unrenewing(l *inspect.Lock) string {
	if len(l.Holders.List) == 0 {
		return ""
	}
	return l.Holders.List[0].Unrenewing(l.Remaining)
}

// reason says what the holder of a lock does, or for which others it waits. The last of them
// decides for all, and what it does stands with its own lock.
func reason(chain []inspect.Link) string {
	h := chain[0].Holder
	if len(chain) == 1 {
		if h.Left {
			return "" // nobody does anything
		}
		text := h.Activity.String()
		if advice := h.Advice(); advice != "" {
			text += "; " + advice
		}
		return text
	}
	text := ""
	for i, link := range chain[1:] {
		if i > 0 {
			text += ", which "
		}
		waits := "waits itself for"
		if link.ByProcess { // another goroutine may
			waits = "has a process that waits, perhaps elsewhere in it, for"
		}
		h := link.Holder
		text += fmt.Sprintf("%s %q, held by %s", waits, newLockView(*link.Lock).Key, cmp.Or(h.Program, h.User+"@"+h.Host))
		if h.ConnectionID != 0 {
			text += fmt.Sprintf(" (connection %d)", h.ConnectionID)
		}
	}
	if last := chain[len(chain)-1].Holder; len(last.WaitsFor) > 0 {
		return text + ", which waits itself"
	}
	return text + ": begin with that one"
}

func newLockView(l inspect.Lock) lockView {
	v := lockView{
		ID: id(l), Ref: ref(l), Strategy: l.Strategy,
		Remaining: milliseconds(l.Remaining), Waiting: len(l.Waiters.List), InOrder: l.InOrder,
		Releasable: l.Strategy == hint.StrategyLease && len(l.Holders.List) > 0,
		Overtaken:  l.Overtaken(), HoldMore: l.Holders.More, WaitMore: l.Waiters.More, Holders: []client{}, Waiters: []client{},
	}
	if l.Slotted {
		v.Slot = &l.Slot
	}
	if token, ok := l.Token.Get(); ok {
		v.Token = &token
	}
	switch {
	case l.Key != "":
		v.Key = printable(l.Key)
	case l.Stripe >= 0:
		v.Key, v.Nameless = fmt.Sprintf("stripe %d", l.Stripe), true
	default:
		v.Key, v.Nameless = printable(l.Name), true
	}
	for _, h := range l.Holders.List[:min(len(l.Holders.List), maxClients)] {
		c := newClient(h.Client, h.Least, h.Shared)
		since, _ := h.Since.Get()
		within, _ := h.Within.Get()
		c.For, c.Within = milliseconds(since), milliseconds(within)
		if h.Silent() {
			renewed, _ := h.Renewed.Get()
			ttl, _ := h.TTL.Get()
			c.Silent, c.TTL = milliseconds(renewed), milliseconds(ttl)
		}
		if h.Overdue() {
			unrenewed, _ := h.Unrenewed.Get()
			ttl, _ := h.ExpectedTTL.Get()
			c.Overdue, c.TTL = milliseconds(unrenewed), milliseconds(ttl)
		}
		c.Left, c.Locks, c.More = h.Left, h.Locks.Seen, h.Locks.More
		v.Holders = append(v.Holders, c)
		v.Releasable = v.Releasable || h.ConnectionID != 0
	}
	for _, w := range l.Waiters.List[:min(len(l.Waiters.List), maxClients)] {
		c := newClient(w.Client, w.Least, w.Shared)
		waited, _ := w.Waited.Get()
		c.For = milliseconds(waited)
		v.Waiters = append(v.Waiters, c)
	}
	return v
}

func newClient(c inspect.Client, least time.Duration, shared bool) client {
	return client{
		Program: printable(c.Program), User: printable(c.User), Host: printable(c.Host), Conn: c.ConnectionID, PID: c.PID,
		Least: milliseconds(least), Shared: shared,
	}
}

// id tells one lock from another.
func id(l inspect.Lock) string { return digest(l.Strategy, l.Namespace, l.Name) }

// ref tells a lock that is held by some from the same lock when it is held by
// others: a lease by its token, else by who they are.
func ref(l inspect.Lock) string {
	parts := []any{l.Strategy, l.Namespace, l.Name}
	if l.Strategy == hint.StrategyLease {
		return digest(append(parts, l.Token)...)
	}
	for _, h := range l.Holders.List {
		parts = append(parts, h.Client)
	}
	return digest(parts...)
}

func digest(parts ...any) string {
	h := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(h, "%q\n", fmt.Sprint(part))
	}
	return fmt.Sprintf("%.12x", h.Sum(nil))
}

// printable is s with what cannot be seen, or turns text around, as Go writes it.
func printable(s string) string {
	if !utf8.ValidString(s) {
		return unquoted(s)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return unquoted(s)
		}
	}
	return s
}

func unquoted(s string) string {
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func milliseconds(d time.Duration) int64 { return d.Milliseconds() }
