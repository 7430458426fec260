// Package sabotage breaks the driver on purpose, to show that the tests which find
// nothing wrong would see it. Nobody outside of this module can reach it, and
// nothing but tests sets it.
package sabotage

import "sync/atomic"

var (
	// NoFence leaves out the check right before COMMIT.
	NoFence atomic.Bool

	// LateNotice has a holder told a TTL too late that its lease has run out.
	LateNotice atomic.Bool

	// KeepLapsed has a transaction that goes on granted the lock on a row whose lease
	// has run out, and leaves the lease on it.
	KeepLapsed atomic.Bool

	// FreeAny has what frees a grant that may have been made free later ones as well.
	FreeAny atomic.Bool
)
