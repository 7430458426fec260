package chaos

import (
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/lockctx"
)

// job is a kind of work, on keys of its own.
type job struct {
	keys     []string
	accounts []string // where they are not the keys
	ways     []way
	thinks   time.Duration // at most, as a rule

	// For jobs that are done wrong.
	plain  bool         // without the driver
	breaks *atomic.Bool // which part of the driver
}

var (
	lease      = lockctx.Lease(ttl)
	advisory   = lockctx.Advisory()
	optimistic = lockctx.Optimistic()
)

// slots is how many may hold a key of the job "slots".
const slots = 2

var jobs = map[string]job{
	"row": {
		keys: []string{"row 1", "row 2"},
		ways: []way{inTx(true), inTxOfTwo(true), inSession(true), inDo(true), inHold(), sharing},
	},
	"lease": {
		keys: []string{"lease 1", "lease 2"},
		ways: []way{inTx(true, lease), inTxOfTwo(true, lease), inSession(true, lease), underDo(lease), underHold(lease), underHold(lease), sharing},
	},
	"advisory": {
		keys: []string{"advisory 1", "advisory 2"},
		ways: []way{inTx(true, advisory), inSession(true, advisory), underDo(advisory), underHold(advisory), underHold(advisory)},
	},
	"optimistic": {
		keys: []string{"optimistic 1", "optimistic 2"},
		ways: []way{inTx(false, optimistic), inSession(false, optimistic), inDo(false, optimistic, lockctx.Retry(3))},
	},
	"mixed": { // row locks, leases and versions of the same keys
		keys: []string{"mixed 1", "mixed 2"},
		ways: []way{inTx(true), inDo(true), inTx(true, lease), underHold(lease), inTx(false, optimistic), inSession(false, optimistic), sharing},
	},
	"slots": {
		keys:     []string{"slots 1"},
		accounts: []string{slotKey("slots 1", 0), slotKey("slots 1", 1)},
		ways:     []way{inHold(lockctx.Slots(slots)), underHold(lease, lockctx.Slots(slots))},
	},

	"no fence": {
		keys:   []string{"no fence 1", "no fence 2", "no fence 3", "no fence 4", "no fence 5", "no fence 6"},
		ways:   []way{underHold(lease)},
		thinks: 100 * time.Millisecond,
		breaks: &sabotage.NoFence,
	},
	"late notice": {
		keys:   []string{"late notice 1", "late notice 2"},
		ways:   []way{underHold(lease)},
		thinks: 100 * time.Millisecond,
		breaks: &sabotage.LateNotice,
	},
	"scenario": {keys: []string{"k", "l"}},
	"retry without the lock": {
		keys:  []string{"retry 1", "retry 2"},
		ways:  []way{retrying},
		plain: true,
	},
	"release before COMMIT": {
		keys:  []string{"early 1", "early 2"},
		ways:  []way{releasingEarly},
		plain: true,
	},
}

// strategies are the jobs that are to be done right, as the page lists them.
var strategies = []string{"row", "lease", "advisory", "optimistic", "mixed", "slots"}

func (j job) banked() []string {
	if j.accounts != nil {
		return j.accounts
	}
	return j.keys
}
