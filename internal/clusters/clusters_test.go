//go:build unix

package clusters

import (
	"testing"

	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestGaleraKeepsRowLocksLeasesAndVersions: row locks are agreed to by all nodes, leases and
// versions are kept by writes, and the rest is refused.
func TestGaleraKeepsRowLocksLeasesAndVersions(t *testing.T) {
	t.Parallel()
	c := start(t, tempserver.Galera)
	t.Run("cells", func(t *testing.T) {
		exclusive(t, c, "row", lockctx.Row())
		balanced(t, c, "row", "", lockctx.Row())
		exclusive(t, c, "slots", lockctx.Slots(1))
		exclusive(t, c, "lease", lockctx.Lease(leaseTTL))
		balanced(t, c, "lease", "wsrep_sync_wait=1", lockctx.Lease(leaseTTL))
		fence(t, c)
		conflicts(t, c)
		refused(t, c, "row, shared", lockctx.Shared())
		refused(t, c, "advisory", lockctx.Advisory())
		mixed(t, c)
		rowLocks(t, c)
		movedToCluster(t, c)
		doctor(t, c, 0, "row lease optimistic")
	})
	behind(t, c)
	failovers(t, c, "pause", lockctx.Row(), lockctx.Lease(leaseTTL))
}

// TestGroupMultiPrimary: leases and versions are kept by writes, and the rest is
// refused.
func TestGroupMultiPrimary(t *testing.T) {
	t.Parallel()
	c := start(t, tempserver.GroupMultiPrimary)
	t.Run("cells", func(t *testing.T) {
		exclusive(t, c, "lease", lockctx.Lease(leaseTTL))
		balanced(t, c, "lease", "group_replication_consistency=%27BEFORE%27", lockctx.Lease(leaseTTL))
		fence(t, c)
		conflicts(t, c)
		refused(t, c, "row", lockctx.Row())
		refused(t, c, "row, shared", lockctx.Shared())
		refused(t, c, "slots", lockctx.Slots(2))
		refused(t, c, "advisory", lockctx.Advisory())
		doctor(t, c, 0, "lease optimistic")
	})
	behind(t, c)
	failovers(t, c, "pause", lockctx.Lease(leaseTTL))
}

// TestGroupSinglePrimary: on the primary it is as on one server, but for what does
// not survive a failover; on the secondaries everything is refused.
func TestGroupSinglePrimary(t *testing.T) {
	t.Parallel()
	c := start(t, tempserver.GroupSinglePrimary)
	t.Run("cells", func(t *testing.T) {
		exclusive(t, c, "row", lockctx.Row())
		exclusive(t, c, "lease", lockctx.Lease(leaseTTL))
		conflicts(t, c)
		refused(t, c, "advisory", lockctx.Advisory())
		secondary(t, c)
		movedToSecondary(t, c)
		doctor(t, c, 0, "row lease optimistic")
		doctor(t, c, 1, "")
	})
	failovers(t, c, "kill", lockctx.Row(), lockctx.Lease(leaseTTL))
}
