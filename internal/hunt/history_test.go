package hunt

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// A history is what all holders of some keys, in several processes of this
// machine, saw of their locks. It is right where it could have come from locks
// that one holder has at a time, with tokens that only grow.
type history struct {
	tell bool // in a child process, which says it to its parent

	mu  sync.Mutex
	ops []op
}

// op is something that a holder did, at one moment between call and return.
type op struct {
	Kind         string // "grant", "use" or "release"
	Key, Hold    string
	Token        uint64 // of a grant; 0 for a row lock
	Call, Return int64  // in ns, by the machine's clock
}

func now() int64 { return time.Now().UnixNano() }

func (h *history) add(o op) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops = append(h.ops, o)
	if h.tell {
		line, _ := json.Marshal(o)
		fmt.Printf("%s\n", line)
	}
}

// heard adds what a child process has said, unless it is something else.
func (h *history) heard(line string) bool {
	var o op
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &o) != nil {
		return false
	}
	h.add(o)
	return true
}

// next returns the next line of a child that is not part of the history.
func (h *history) next(c *dbtest.Child) string {
	for {
		if line := c.Line(); !h.heard(line) {
			return line
		}
	}
}

// lockState is one key's.
type lockState struct {
	hold  string // who has it; "" when nobody
	token uint64 // of the newest lease
}

var lockModel = porcupine.Model{
	Init: func() any { return lockState{} },
	Step: func(state, input, _ any) (bool, any) {
		s, o := state.(lockState), input.(op)
		switch o.Kind {
		case "grant":
			return s.hold == "" && (o.Token == 0 || o.Token > s.token), lockState{o.Hold, max(s.token, o.Token)}
		case "use":
			return s.hold == o.Hold, s
		default:
			return s.hold == o.Hold, lockState{"", s.token}
		}
	},
}

// wrong returns the keys whose history no such lock could have made, with that
// history.
func (h *history) wrong() map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make(map[string][]porcupine.Operation)
	for _, o := range append(slices.Clone(h.ops), h.losses()...) {
		keys[o.Key] = append(keys[o.Key], porcupine.Operation{Input: o, Call: o.Call, Return: o.Return})
	}
	wrong := make(map[string]string)
	for key, ops := range keys {
		result := porcupine.CheckOperationsTimeout(lockModel, ops, time.Minute)
		if result == porcupine.Ok {
			continue
		}
		slices.SortFunc(ops, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
		text := fmt.Sprint(result)
		for _, o := range ops {
			text += fmt.Sprintf("\n%+v", o.Input)
		}
		wrong[key] = text
	}
	return wrong
}

// losses are the ends of the holds that nobody saw released: at some time after
// they were last seen to be valid.
func (h *history) losses() (losses []op) {
	open := make(map[string]op)
	for _, o := range h.ops {
		if o.Kind != "release" {
			call := max(o.Call, open[o.Hold].Call)
			open[o.Hold] = op{Kind: "loss", Key: o.Key, Hold: o.Hold, Call: call, Return: math.MaxInt64}
		}
	}
	for _, o := range h.ops {
		if o.Kind == "release" {
			delete(open, o.Hold)
		}
	}
	for _, o := range open {
		losses = append(losses, o)
	}
	return losses
}

func (h *history) want(t *testing.T) {
	t.Helper()
	for key, text := range h.wrong() {
		t.Errorf("the history of %s: %s", key, text)
	}
}

// count returns how often something was done.
func (h *history) count(kind string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.ops {
		if o.Kind == kind {
			n++
		}
	}
	return n
}

// lost returns how many holds nobody saw released.
func (h *history) lost() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.losses())
}

// holder is one grant of a lock, with what is done under it: a write puts a row
// into the table fenced, which says how many rows of its key the holder had read
// before.
type holder struct {
	*history
	key, id string
	token   uint64
	hold    *mysqllock.Hold // nil where the lock is that of a transaction
	tx      *sql.Tx
	n       int
}

const fencedTable = "CREATE TABLE fenced (id INT AUTO_INCREMENT PRIMARY KEY, k VARCHAR(40) NOT NULL, token BIGINT UNSIGNED NOT NULL, n INT NOT NULL, KEY (k)) ENGINE=InnoDB"

// acquire takes the lock as a hold.
func (h *history) acquire(ctx context.Context, db *sql.DB, key string, opts ...lockctx.Option) (*holder, error) {
	call := now()
	hold, err := mysqllock.Acquire(ctx, db, key, opts...)
	if err != nil {
		return nil, err
	}
	o := &holder{history: h, key: key, id: dbtest.Random(), token: hold.Token(), hold: hold}
	h.add(op{"grant", key, o.id, o.token, call, now()})
	return o, nil
}

// acquireTx takes it for a transaction.
func (h *history) acquireTx(ctx context.Context, db *sql.DB, key string, opts ...lockctx.Option) (*holder, error) {
	call := now()
	ctx = lockctx.With(ctx, key, opts...)
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	o := &holder{history: h, key: key, id: dbtest.Random(), tx: tx}
	o.token, _ = mysqllock.Token(ctx)
	h.add(op{"grant", key, o.id, o.token, call, now()})
	return o, nil
}

// begin begins a transaction under the hold.
func (o *holder) begin(ctx context.Context, db *sql.DB) (err error) {
	o.tx, err = db.BeginTx(ctx, nil)
	return err
}

func (o *holder) read(ctx context.Context) error {
	return o.tx.QueryRowContext(ctx, "SELECT COUNT(*) FROM fenced WHERE k = ?", o.key).Scan(&o.n)
}

func (o *holder) insert(ctx context.Context) error {
	_, err := o.tx.ExecContext(ctx, "INSERT INTO fenced (k, token, n) VALUES (?, ?, ?)", o.key, o.token, o.n)
	return err
}

func (o *holder) commit() error {
	call, kind := now(), "use"
	if o.hold == nil {
		kind = "release"
	}
	err := o.tx.Commit()
	if err == nil {
		o.add(op{kind, o.key, o.id, 0, call, now()})
	}
	return err
}

// write begins a transaction, reads, thinks for a while, writes, and commits.
func (o *holder) write(db *sql.DB, think time.Duration) error {
	ctx := o.hold.Context()
	if err := o.begin(ctx, db); err != nil {
		return err
	}
	return o.finish(ctx, think)
}

func (o *holder) finish(ctx context.Context, think time.Duration) error {
	defer o.tx.Rollback()
	if err := o.read(ctx); err != nil {
		return err
	}
	time.Sleep(think)
	call := now()
	if err := o.insert(ctx); err != nil { // it also asks whether the lock is held
		return err
	}
	o.add(op{"use", o.key, o.id, 0, call, now()})
	return o.commit()
}

func (o *holder) release() error {
	call := now()
	err := o.hold.Release()
	if err == nil {
		o.add(op{"release", o.key, o.id, 0, call, now()})
	}
	return err
}

// written returns how many writes with the token are committed.
func (s *scratch) written(key string, token uint64) (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM fenced WHERE k = ? AND token = ?", key, token).Scan(&n))
	return n
}

// stale returns what is wrong with the rows of fenced: writers that did not see
// all writes before theirs, and tokens that go back.
func (s *scratch) stale() (wrong []string) {
	s.T.Helper()
	rows, err := s.Plain.Query("SELECT k, token, n FROM fenced ORDER BY k, id")
	dbtest.OK(s.T, err)
	defer rows.Close()
	var last string
	var newest uint64
	for seen := 0; rows.Next(); seen++ {
		var key string
		var token uint64
		var n int
		dbtest.OK(s.T, rows.Scan(&key, &token, &n))
		if key != last {
			last, newest, seen = key, 0, 0
		}
		if n != seen {
			wrong = append(wrong, fmt.Sprintf("%s: the write after %d others, with token %d, had seen %d", key, seen, token, n))
		}
		if token != 0 && token < newest {
			wrong = append(wrong, fmt.Sprintf("%s: a write with token %d came after one with %d", key, token, newest))
		}
		newest = max(newest, token)
	}
	dbtest.OK(s.T, rows.Err())
	return wrong
}

func (s *scratch) wantNoneStale() {
	s.T.Helper()
	for _, text := range s.stale() {
		s.T.Error(text)
	}
}

// TestOracle shows that the check of histories finds what it is for.
func TestOracle(t *testing.T) {
	grant := func(hold string, token uint64, call, ret int64) op { return op{"grant", "k", hold, token, call, ret} }
	use := func(hold string, call, ret int64) op { return op{"use", "k", hold, 0, call, ret} }
	release := func(hold string, call, ret int64) op { return op{"release", "k", hold, 0, call, ret} }
	for _, test := range []struct {
		name  string
		right bool
		ops   []op
	}{
		{"one after the other", true, []op{grant("a", 1, 1, 2), use("a", 3, 4), release("a", 5, 6), grant("b", 2, 4, 8), release("b", 9, 10)}},
		{"two at a time", false, []op{grant("a", 1, 1, 2), grant("b", 2, 3, 4), release("a", 5, 6), release("b", 7, 8)}},
		{"two row locks at a time", false, []op{grant("a", 0, 1, 2), grant("b", 0, 3, 4), release("a", 5, 6), release("b", 7, 8)}},
		{"a token goes back", false, []op{grant("a", 2, 1, 2), release("a", 3, 4), grant("b", 1, 5, 6), release("b", 7, 8)}},
		{"a token twice", false, []op{grant("a", 1, 1, 2), release("a", 3, 4), grant("b", 1, 5, 6), release("b", 7, 8)}},
		{"a row lock between two leases", true, []op{grant("a", 1, 1, 2), release("a", 3, 4), grant("b", 0, 5, 6), release("b", 7, 8), grant("c", 2, 9, 10)}},
		{"a loss that nobody saw", true, []op{grant("a", 1, 1, 2), use("a", 3, 4), grant("b", 2, 5, 6), release("b", 7, 8)}},
		{"a write after the loss", false, []op{grant("a", 1, 1, 2), grant("b", 2, 3, 4), use("a", 5, 6), release("b", 7, 8)}},
		{"a write that overlaps the next grant", true, []op{grant("a", 1, 1, 2), use("a", 3, 6), grant("b", 2, 4, 7)}},
		{"another's release", false, []op{grant("a", 1, 1, 2), grant("b", 2, 3, 4), release("a", 5, 6)}},
	} {
		h := &history{ops: test.ops}
		if right := len(h.wrong()) == 0; right != test.right {
			t.Errorf("%s: found right: %v", test.name, right)
		}
	}
}
