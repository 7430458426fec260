//go:build unix

package tempserver

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The tests of package clusters have the other kinds and faults.
func TestADeadNodeComesBackWithWhatItMissed(t *testing.T) {
	RequireCluster(t, Galera)
	began := time.Now()
	c, err := StartCluster(t.Context(), Galera)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("started in %v", time.Since(began).Round(time.Millisecond))
	defer func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		for _, s := range c.Nodes {
			if exists(s.dir) {
				t.Errorf("left behind: %s", s.dir)
			}
		}
	}()
	write(t, c, "CREATE DATABASE shop", "CREATE TABLE shop.t (n INT PRIMARY KEY) ENGINE=InnoDB", "INSERT INTO shop.t VALUES (1)")
	for i := range c.Nodes {
		wantRows(t, c, i, 1)
	}
	if err := c.Nodes[2].Kill(); err != nil {
		t.Fatal(err)
	}
	write(t, c, "INSERT IGNORE INTO shop.t VALUES (2)")
	t.Logf("the others go on after %v", time.Since(began).Round(time.Millisecond))
	if err := c.Rejoin(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	wantRows(t, c, 2, 2)
}

// write changes something on the first node, which a cluster in a failover takes
// its time for.
func write(t *testing.T, c *Cluster, statements ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	for {
		err := c.Nodes[0].tell(ctx, statements...)
		if err == nil {
			return
		}
		if ctx.Err() != nil || len(statements) > 1 { // only what may be said twice is
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

// TestNoNodeOutlivesWhoHasStartedIt, whenever that dies.
func TestNoNodeOutlivesWhoHasStartedIt(t *testing.T) {
	RequireCluster(t, Galera)
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv(childClusterEnv, "1")
	for _, delay := range []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second} {
		parent, _ := startChild(t, Binary{Name: "Galera", Flavour: MariaDB})
		time.Sleep(delay)
		if err := parent.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = parent.Wait()
	}
	nothingLeft(t)
}

func TestAMissingClusterSkipsTestsButNotInCI(t *testing.T) {
	t.Setenv("MYSQLLOCK_GALERA", "/nowhere/libgalera_smm.so")
	for ci, want := range map[string]string{"": "skip: ", "true": "fail: "} {
		t.Setenv("CI", ci)
		r := &recorder{}
		RequireCluster(r, Galera)
		if !strings.HasPrefix(r.last, want) || !strings.Contains(r.last, "/nowhere") {
			t.Errorf("with CI=%q: %q", ci, r.last)
		}
	}
	if _, err := StartCluster(t.Context(), Galera); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("StartCluster: %v", err)
	}
}
