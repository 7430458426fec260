//go:build unix

package tempserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"
)

// topologies runs the test on each kind of cluster, side by side.
func topologies(t *testing.T, test func(*testing.T, Topology)) {
	for _, topology := range []Topology{Galera, GroupSinglePrimary, GroupMultiPrimary} {
		t.Run(string(topology), func(t *testing.T) {
			RequireCluster(t, topology)
			test(t, topology)
		})
	}
}

func TestCluster(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	topologies(t, func(t *testing.T, topology Topology) {
		began := time.Now()
		c, err := StartCluster(t.Context(), topology)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := c.Stop(); err != nil {
				t.Error(err)
			}
			wantEmpty(t, os.TempDir())
		}()
		t.Logf("%s started in %v", topology, time.Since(began).Round(time.Millisecond))

		for i := range c.Nodes {
			write(t, c, 0, i)
		}
		for i := range c.Nodes {
			wantRows(t, c, i, len(c.Nodes))
		}
		steps := []struct {
			name         string
			cut, restore func() error
			others       bool // whether a survivor takes writes meanwhile, by itself
		}{
			{"kill", c.Nodes[2].Kill, func() error { return nil }, true},
			{"pause", c.Nodes[2].Pause, c.Nodes[2].Resume, true},
		}
		rows := len(c.Nodes)
		for _, step := range steps {
			if err := step.cut(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			write(t, c, 0, rows)
			rows++
			t.Logf("%s: written", step.name)
			if err := step.restore(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			if err := c.Rejoin(t.Context(), 2); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			wantRows(t, c, 2, rows)
			t.Logf("%s: back", step.name)
		}
	})
}

// write adds a row, which a cluster in a failover takes its time for.
func write(t *testing.T, c *Cluster, node, row int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	for {
		err := c.Nodes[node].tell(ctx, "CREATE DATABASE IF NOT EXISTS shop", "CREATE TABLE IF NOT EXISTS shop.t (n INT PRIMARY KEY) ENGINE=InnoDB",
			fmt.Sprintf("INSERT IGNORE INTO shop.t VALUES (%d)", row))
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // there is nothing to wait on
	}
}

// wantRows waits until the node has so many.
func wantRows(t *testing.T, c *Cluster, node, rows int) {
	t.Helper()
	if err := c.Nodes[node].await(t.Context(), "SELECT COUNT(*) FROM shop.t", strconv.Itoa(rows)); err != nil {
		t.Errorf("node %d: %v", node, err)
	}
}

var _ = errors.Is
var _ sql.DB
