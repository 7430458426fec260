package chaos

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// event is one line of what a client process wrote down: something that it did or
// believed, at one moment between Call and Return.
type event struct {
	Kind   kind
	Job    string `json:",omitempty"`
	Op     string `json:",omitempty"` // the transfer
	Hold   string `json:",omitempty"`
	Key    string `json:",omitempty"` // of the lock, or of the account that was read or written
	Shared bool   `json:",omitempty"`
	Token  uint64 `json:",omitempty"` // of a grant; 0 for what is not a lease
	Seq    uint64 `json:",omitempty"` // which state of the account
	Call   int64  `json:",omitempty"` // in ns, by the machine's clock
	Return int64  `json:",omitempty"`
	Result result `json:",omitempty"`
	Error  string `json:",omitempty"`
	Over   bool   `json:",omitempty"` // the caller's context had ended by then
	Rest   rest   `json:",omitzero"`

	client string // whose history it is from
}

type kind string

const (
	kindTry     kind = "try"     // a transfer begins
	kindGrant   kind = "grant"   // of a lock
	kindUse     kind = "use"     // the server has confirmed that the lock is held
	kindBelief  kind = "belief"  // the holder had no notice that it is lost
	kindRelease kind = "release" // of the lock
	kindRead    kind = "read"    // of an account, under the lock
	kindCommit  kind = "commit"  // of a new state of an account, about to be attempted
	kindEnd     kind = "end"     // of the transfer
	kindStall   kind = "stall"   // the process did not get to run
	kindLate    kind = "late"    // a transfer took much longer than its context lasted
	kindRest    kind = "rest"    // of all workers of the process
)

// rest is what a process has while its workers rest.
type rest struct {
	InUse      int // connections that were not given back, and callers that wait
	Goroutines int
	Heap       int64
}

// result is what a client knows of a transfer in the end.
type result string

const (
	done     result = "done"     // the commit was acknowledged
	unknown  result = "unknown"  // the connection broke while COMMIT was on its way
	busy     result = "busy"     // refused: someone else has the key
	lost     result = "lost"     // refused: the lock is gone
	conflict result = "conflict" // refused: somebody else has committed, or a deadlock
	gaveUp   result = "gave up"  // refused: the caller's context has ended
	unsafe   result = "unsafe"   // refused: it would not hold here
	failed   result = "failed"   // refused for another reason, such as no connection
)

// results are all of them, as the page lists them.
var results = []result{done, busy, lost, conflict, gaveUp, unsafe, failed, unknown}

func now() int64 { return time.Now().UnixNano() }

// history is what all clients of a round wrote down.
type history struct {
	dir    string
	read   map[string]int64 // how much of each file
	events []event
	steps  []event // when the server's clock was set: until it is renewed nobody hears that a lease has ended by it
}

func newHistory(dir string) *history { return &history{dir: dir, read: make(map[string]int64)} }

// refresh reads what is new. A line that its writer did not live to finish is left.
func (h *history) refresh() error {
	files, err := filepath.Glob(filepath.Join(h.dir, "*.history"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := h.refreshFrom(file); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func (h *history) refreshFrom(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	text, err := io.ReadAll(io.NewSectionReader(file, h.read[path], math.MaxInt64-h.read[path]))
	if err != nil {
		return err
	}
	for {
		line, rest, whole := bytes.Cut(text, []byte("\n"))
		if !whole {
			return nil
		}
		e := event{client: filepath.Base(path)}
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
		h.read[path] += int64(len(line)) + 1
		h.events = append(h.events, e)
		text = rest
	}
}

// violation is something that no lock that keeps its promise lets happen.
type violation struct {
	Job   string
	At    int64 // 0 where that is not known
	Text  string
	Order bool // it is about the order of the commits, which a lost update has upset
}

func (v violation) String() string { return v.Job + ": " + v.Text }

// lockState is one key's: who has it, and the newest token.
type lockState struct {
	holder, sharers string // sharers each with a space behind
	token           uint64
}

var lockModel = porcupine.Model{
	Init: func() any { return lockState{} },
	Step: func(state, input, _ any) (bool, any) {
		s, e := state.(lockState), input.(event)
		holds := s.holder == e.Hold
		if e.Shared {
			holds = strings.Contains(s.sharers, e.Hold+" ")
		}
		switch e.Kind {
		case kindGrant:
			free := s.holder == "" && (e.Shared || s.sharers == "") && (e.Token == 0 || e.Token > s.token)
			s.token = max(s.token, e.Token)
			if e.Shared {
				s.sharers += e.Hold + " "
			} else {
				s.holder = e.Hold
			}
			return free, s
		case kindRelease:
			if e.Shared {
				s.sharers = strings.Replace(s.sharers, e.Hold+" ", "", 1)
			} else {
				s.holder = ""
			}
			return holds, s
		default:
			return holds, s
		}
	},
}

// How late a holder may be told that its lock is lost: that of a lease is told before,
// but on a busy machine it may be some time until it hears it.
const (
	noticeOfLease    = ttl / 10
	noticeOfAdvisory = 3 * time.Second
)

// checkLocks returns the keys whose grants, uses and releases no lock could have
// made that one holder has at a time, or many who share it, and whose tokens grow.
// In a job that is unsure a grant may be outdated, so that a hold counts from its
// first commit on. doubtful is whether what was read then may be outdated.
func (h *history) checkLocks(unsure func(job string) bool, doubtful func(at int64) bool) (wrong []violation) {
	stalls := make(map[string][]event)
	for _, e := range h.events {
		if e.Kind == kindStall {
			stalls[e.client] = append(stalls[e.client], e)
		}
	}
	jobs := make(map[string]string)
	keys := make(map[string][]porcupine.Operation)
	add := func(e event) {
		jobs[e.Key] = e.Job
		keys[e.Key] = append(keys[e.Key], porcupine.Operation{Input: e, Call: e.Call, Return: e.Return})
	}
	notBefore := h.commitsNotBefore(doubtful)
	last := make(map[string]event) // when each hold was surely there at the latest: before that it was, too
	for _, e := range h.events {
		hold := e.Hold + " " + e.Key
		before, granted := last[hold]
		switch {
		case e.Kind == kindGrant && !unsure(e.Job), e.Kind == kindUse && unsure(e.Job) && !granted && !e.Shared:
			last[hold] = e
			e.Kind = kindGrant
			add(e)
		case e.Kind == kindRelease && granted && !unsure(e.Job):
			last[hold] = e
		case (e.Kind == kindUse || e.Kind == kindBelief) && granted:
			if e.Kind == kindBelief && slices.ContainsFunc(slices.Concat(stalls[e.client], h.steps), func(s event) bool { return s.covers(e) }) {
				continue
			}
			switch {
			case e.Kind == kindBelief && e.Job == "advisory":
				e.Call -= int64(noticeOfAdvisory)
			case e.Kind == kindBelief:
				e.Call -= int64(noticeOfLease)
			default:
				e.Call = max(e.Call, notBefore[attempt{e.client, e.Call}])
			}
			if before.Kind != kindRelease && e.Call > before.Call {
				last[hold] = e
			}
		}
	}
	for _, e := range last {
		if e.Kind == kindUse || e.Kind == kindBelief {
			add(e)
		}
		if e.Kind != kindRelease { // it ended unseen, some time later
			e.Kind, e.Return = kindRelease, math.MaxInt64
		}
		add(e)
	}
	for key, ops := range keys {
		if text := inexplicable(lockModel, ops); text != "" {
			wrong = append(wrong, violation{Job: jobs[key], Text: "the locks of " + key + text})
		}
	}
	return wrong
}

// attempt is a COMMIT: of a client, sent then.
type attempt struct {
	client string
	call   int64
}

// commitsNotBefore returns when each COMMIT can have come to pass at the earliest, where
// that is later than it was sent: somebody has read the state before.
func (h *history) commitsNotBefore(doubtful func(at int64) bool) map[attempt]int64 {
	type state struct {
		key string
		seq uint64
	}
	seen := make(map[state]int64) // when each state was read last
	for _, e := range h.events {
		if e.Kind == kindRead && !doubtful(e.Return) {
			seen[state{e.Key, e.Seq}] = max(seen[state{e.Key, e.Seq}], e.Call)
		}
	}
	notBefore := make(map[attempt]int64)
	for _, e := range h.events {
		if e.Kind == kindCommit {
			at := attempt{e.client, e.Call}
			notBefore[at] = max(notBefore[at], seen[state{e.Key, e.Seq - 1}])
		}
	}
	return notBefore
}

// covers reports whether a process that stood still, or heard of the server's clock only
// later, cannot have known better than the belief: its own watch on the lease needs to
// run, too.
func (e event) covers(belief event) bool {
	const wakesUp = 300 * time.Millisecond
	return belief.Return >= e.Call && belief.Call <= e.Return+int64(wakesUp)
}

// checkReaders returns the transfers that have read two states of an account under one
// lock: somebody has written in between.
func (h *history) checkReaders() (wrong []violation) {
	first := make(map[string]event)
	for _, e := range h.events {
		if e.Kind != kindRead {
			continue
		}
		read := e.Op + " " + e.Key
		if before, is := first[read]; !is {
			first[read] = e
		} else if before.Seq != e.Seq {
			wrong = append(wrong, violation{Job: e.Job, At: e.Call, Text: fmt.Sprintf("%s has read state %d of %s, and then state %d", e.Op, before.Seq, e.Key, e.Seq)})
		}
	}
	return wrong
}

// checkLate returns the transfers that did not end in time.
func (h *history) checkLate() (wrong []violation) {
	for _, e := range h.events {
		if e.Kind == kindLate {
			wrong = append(wrong, violation{Job: e.Job, At: e.Call, Text: fmt.Sprint("a transfer took ", time.Duration(e.Return-e.Call))})
		}
	}
	return wrong
}

// accountModel is one account's: reads see the newest state, and a commit makes
// the next one of it.
var accountModel = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, _ any) (bool, any) {
		seq, e := state.(uint64), input.(event)
		if e.Kind == kindRead {
			return seq == e.Seq, seq
		}
		return seq+1 == e.Seq, e.Seq
	},
}

// checkAccounts returns the accounts whose reads and commits, those that are in the
// ledger, no correct order explains. Where it is doubtful whether a read sees what
// lasts, and is not outdated, only those count on which something was committed.
func (h *history) checkAccounts(b *books, doubtful func(at int64) bool) (wrong []violation) {
	returns := make(map[string]int64)
	for _, e := range h.events {
		if e.Kind == kindEnd && e.Result == done {
			returns[e.Op] = e.Return
		}
	}
	jobs := make(map[string]string)
	keys := make(map[string][]porcupine.Operation)
	for _, e := range h.events {
		switch {
		case e.Kind == kindRead && (b.has(e.Op, e.Key) || !doubtful(e.Return)):
		case e.Kind == kindCommit && b.has(e.Op, e.Key):
			e.Seq = b.written[e.Op+"\x00"+e.Key]
			if e.Return = returns[e.Op]; e.Return == 0 {
				e.Return = math.MaxInt64
			}
		default:
			continue
		}
		jobs[e.Key] = e.Job
		keys[e.Key] = append(keys[e.Key], porcupine.Operation{Input: e, Call: e.Call, Return: e.Return})
	}
	for key, ops := range keys {
		if text := inexplicable(accountModel, ops); text != "" {
			wrong = append(wrong, violation{Job: jobs[key], Text: "the account of " + key + text, Order: true})
		}
	}
	return wrong
}

// inexplicable returns "" where the model explains the history.
func inexplicable(model porcupine.Model, ops []porcupine.Operation) string {
	result, info := porcupine.CheckOperationsVerbose(model, ops, time.Minute)
	if result == porcupine.Ok {
		return ""
	}
	if result == porcupine.Unknown {
		return fmt.Sprintf(": %d events were not checked within a minute", len(ops))
	}
	// The longest explanation ends before something that had ended by then.
	var longest []porcupine.Operation
	for _, some := range info.PartialLinearizationsOperations() {
		for _, explained := range some {
			if len(explained) > len(longest) {
				longest = explained
			}
		}
	}
	left := slices.DeleteFunc(slices.Clone(ops), func(op porcupine.Operation) bool { return slices.Contains(longest, op) })
	slices.SortFunc(left, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	var b strings.Builder
	b.WriteString(", after")
	for _, op := range longest[max(0, len(longest)-6):] {
		fmt.Fprintf(&b, "\n\t%+v", op.Input)
	}
	b.WriteString("\n  cannot have gone on with")
	for _, op := range left[:min(len(left), 4)] {
		fmt.Fprintf(&b, "\n\t%+v", op.Input)
	}
	return b.String()
}
