package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// TestClusters torments clusters, whose clients work on several nodes where these
// take writes. It takes minutes.
func TestClusters(t *testing.T) {
	if os.Getenv("CHAOS_TIME") == "" {
		t.Skip("only with CHAOS_TIME, as in make chaos")
	}
	for _, topology := range []tempserver.Topology{tempserver.Galera, tempserver.GroupSinglePrimary, tempserver.GroupMultiPrimary} {
		t.Run(string(topology), func(t *testing.T) {
			tempserver.RequireCluster(t, topology)
			cluster, err := tempserver.StartCluster(t.Context(), topology)
			dbtest.OK(t, err)
			t.Cleanup(func() { cluster.Stop() })
			a := &arena{t: t, name: "all", topology: string(topology), nodes: cluster.Nodes, cluster: cluster}
			a.open()
			a.torment(length(t), true, 0, 1)
		})
	}
}

func (a *arena) singlePrimary() bool {
	return a.topology == string(tempserver.GroupSinglePrimary)
}

// clusterFaults are what comes over a cluster.
var clusterFaults = []*fault{
	noFault,
	clientKilled,
	clientStoppedLong,
	blackHole,
	resetAtCommit,
	{"node killed (kill -9)", true, func(a *arena) int {
		return a.without(func(i int) error { return a.nodes[i].Kill() }, func(int) error { return nil })
	}},
	{"node stopped, and back", true, func(a *arena) int {
		return a.without(func(i int) error { return a.nodes[i].Pause() }, func(i int) error { return a.nodes[i].Resume() })
	}},
}

// nodeCutOff is for Galera: cutting off a member of Group Replication takes more
// rights than a test has.
var nodeCutOff = &fault{"node cut off from the others, and back", true, func(a *arena) int {
	ctx := a.t.Context()
	return a.without(func(i int) error { return a.cluster.Isolate(ctx, i) }, func(i int) error { return a.cluster.Heal(ctx, i) })
}}

// without takes a node away, the one that takes writes where there is only one, and
// brings it back. Its clients find the others after a while, as behind a router;
// every other one keeps the connections that it has until the node is back.
func (a *arena) without(leave, comeBack func(i int) error) int {
	gone := a.primary
	if !a.singlePrimary() {
		gone = a.random.IntN(len(a.nodes))
	}
	a.must(leave(gone))
	a.must(a.awaitWrites(gone))
	for i, p := range a.processes {
		if a.nodeOf(i) != gone && !a.singlePrimary() {
			continue
		}
		p.proxy.TurnTo(a.addr(a.primary))
		if i%2 == 1 {
			p.proxy.Reset()
		}
	}
	a.rest(ttl, 3*ttl)
	a.must(comeBack(gone))
	ctx, cancel := context.WithTimeout(a.t.Context(), patience)
	defer cancel()
	a.must(a.cluster.Rejoin(ctx, gone))
	for i, p := range a.processes {
		p.proxy.TurnTo(a.addr(a.nodeOf(i)))
		if a.nodeOf(i) == gone || a.random.IntN(2) == 0 {
			p.proxy.Reset() // they go back
		}
	}
	return 1
}

// awaitWrites waits until another node takes writes, and makes it the one that is
// asked.
func (a *arena) awaitWrites(gone int) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for i := range a.nodes {
			if i == gone {
				continue
			}
			ctx, cancel := context.WithTimeout(a.t.Context(), time.Second)
			_, err := a.admins[i].ExecContext(ctx, fmt.Sprintf("REPLACE INTO %s.alive VALUES (1, UUID())", a.database))
			cancel()
			if err == nil {
				a.primary = i
				return nil
			}
		}
	}
	return errors.New("none of the nodes that are left takes writes")
}
