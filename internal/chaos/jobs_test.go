package chaos

import (
	"cmp"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/lockctx"
)

// job is a kind of work, on keys of its own.
type job struct {
	keys   int
	slots  int // of each key, which has an account for each of them; 0 is a key that has none
	ways   []way
	thinks time.Duration // at most, as a rule

	// For jobs that are done wrong.
	plain  bool         // without the driver
	breaks *atomic.Bool // which part of the driver
}

var (
	row        = lockctx.Row()
	lease      = lockctx.Lease(ttl)
	advisory   = lockctx.Advisory()
	optimistic = lockctx.Optimistic()
)

// slots is how many may hold a key of the job "slots".
const slots = 2

// jobs are all of them, with leases that last for ttl.
var jobs = jobsOf(ttl)

// jobsOf are all jobs, whose leases last for ttl.
func jobsOf(ttl time.Duration) map[string]job {
	lease := lockctx.Lease(ttl)
	return map[string]job{
		"row":        {keys: 2, ways: []way{inTx(true, row), inTxOfTwo(true, row), inSession(true, row), inDo(true, row), inHold(row), sharing}},
		"lease":      {keys: 2, ways: []way{inTx(true, lease), inTxOfTwo(true, lease), inSession(true, lease), underDo(lease), underHold(lease), underHold(lease), sharing}},
		"advisory":   {keys: 2, ways: []way{inTx(true, advisory), inSession(true, advisory), underDo(advisory), underHold(advisory), underHold(advisory)}},
		"optimistic": {keys: 2, ways: []way{inTx(false, optimistic), inSession(false, optimistic), inDo(false, optimistic, lockctx.Retry(3))}},
		// Row locks, leases and versions of the same keys.
		"mixed": {keys: 2, ways: []way{inTx(true, row), inDo(true, row), inTx(true, lease), underHold(lease), inTx(false, optimistic), inSession(false, optimistic), sharing}},
		"slots": {keys: 1, slots: slots, ways: []way{inTx(true, lockctx.Slots(slots)), inSession(true, lease, lockctx.Slots(slots)), inHold(lockctx.Slots(slots)), underHold(lease, lockctx.Slots(slots))}},
		// Without those who share: the check of many who do at a time takes too long.
		"storm":           {keys: 4, ways: []way{inTx(true, row), inTxOfTwo(true, row), inSession(true, row), inDo(true, row), inHold(row)}},
		"storm of leases": {keys: 4, ways: []way{inTx(true, lease), inTxOfTwo(true, lease), inSession(true, lease), underDo(lease), underHold(lease)}},
		// With statements that write without a lock, on connections that others use with one.
		"hot": {keys: 8, ways: []way{inTx(true, advisory), inStatement(advisory), inSession(true, advisory), underDo(advisory), inTx(true, advisory), inStatement()}},

		"no fence":               {keys: 6, ways: []way{underHold(lease)}, thinks: 100 * time.Millisecond, breaks: &sabotage.NoFence},
		"late notice":            {keys: 2, ways: []way{underHold(lease)}, thinks: 100 * time.Millisecond, breaks: &sabotage.LateNotice},
		"retry without the lock": {keys: 2, ways: []way{retrying}, plain: true},
		"release before COMMIT":  {keys: 2, ways: []way{releasingEarly}, plain: true},
	}
}

// strategies are the jobs that are to be done right, as the page lists them.
var strategies = []string{"row", "lease", "advisory", "optimistic", "mixed", "slots"}

// keysOf are the keys of the job of that name, n of them unless that is 0.
func (j job) keysOf(name string, n int) (keys []string) {
	for i := range cmp.Or(n, j.keys) {
		keys = append(keys, fmt.Sprint(name, " ", i+1))
	}
	return keys
}

// banked are the keys of the accounts.
func (j job) banked(name string, n int) (keys []string) {
	for _, key := range j.keysOf(name, n) {
		if j.slots == 0 {
			keys = append(keys, key)
		}
		for slot := range j.slots {
			keys = append(keys, slotKey(key, slot))
		}
	}
	return keys
}

// unlocked is the account under whose key nobody takes a lock.
const unlocked = "unlocked"
