//go:build unix

package tempserver

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// Topology is how the servers of a [Cluster] replicate to each other.
type Topology string

// The topologies that [StartCluster] knows. Galera needs MariaDB and its
// provider, the library galera-4; the others need MySQL.
const (
	Galera             Topology = "Galera"
	GroupSinglePrimary Topology = "Group Replication with a single primary"
	GroupMultiPrimary  Topology = "Group Replication with several primaries"
)

// clusterSize is the least that has a majority without one of its nodes.
const clusterSize = 3

// Cluster is a group of throwaway servers that replicate to each other. Its
// methods may be called from several goroutines, but not two at the same time
// for the same node.
type Cluster struct {
	// Nodes are its servers. Kill, Pause and Resume of a Server do here what they
	// do to one that is alone. Restart does not: see [Cluster.Rejoin].
	Nodes []*Server

	kind peers
}

// peers is what differs between the kinds of clusters.
type peers interface {
	// prepare sees to what the nodes need to talk to each other, until stop.
	prepare(nodes []*Server) error
	stop()
	// options returns those of the i-th node.
	options(i int) []string
	// assemble launches the nodes and makes them a cluster.
	assemble(ctx context.Context, nodes []*Server) error
	// rejoin brings a node back to those that run.
	rejoin(ctx context.Context, s *Server, running []*Server) error
	isolate(ctx context.Context, nodes []*Server, i int) error
	heal(ctx context.Context, nodes []*Server, i int) error
}

// RequireCluster ends the test where the programs for a topology are missing: as
// skipped, or with CI=true in the environment as failed.
func RequireCluster(tb TB, t Topology) {
	tb.Helper()
	if without(tb) {
		return
	}
	if os.Getenv(testDSN) != "" {
		tb.Skip(errNotOurs)
	}
	_, _, err := t.find()
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		tb.Fatal(err)
	default:
		tb.Skip(err)
	}
}

// find returns what a topology is made of.
func (t Topology) find() (Binary, peers, error) {
	flavour := MySQL
	if t == Galera {
		flavour = MariaDB
	}
	found := Find()
	at := slices.IndexFunc(found, func(b Binary) bool { return b.Flavour == flavour })
	if at < 0 {
		return Binary{}, nil, fmt.Errorf("tempserver: no %s server on this machine for %s; scripts/install-servers.sh installs one", flavour, t)
	}
	if t != Galera {
		return found[at], &group{multi: t == GroupMultiPrimary}, found[at].err
	}
	provider, err := galeraProvider()
	return found[at], &galera{provider: provider}, cmp.Or(found[at].err, err)
}

// StartCluster starts three servers and waits until they are one cluster and
// answer queries, which takes some seconds. The options are as in [Start], and
// for all nodes; by default nodes do not wait for the disk at each commit. The
// cluster outlives ctx, which limits only the start. The caller must call Stop.
func StartCluster(ctx context.Context, t Topology, opts ...string) (*Cluster, error) {
	b, kind, err := t.find()
	if err != nil {
		return nil, err
	}
	template, err := b.template(ctx)
	if err != nil {
		return nil, err
	}
	c := &Cluster{kind: kind}
	for range clusterSize {
		c.Nodes = append(c.Nodes, &Server{binary: b})
	}
	if err := c.start(ctx, template, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("tempserver: %s: %w", t, err), c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, template string, opts []string) error {
	for _, s := range c.Nodes {
		if err := s.prepare(template); err != nil {
			return err
		}
	}
	if err := c.kind.prepare(c.Nodes); err != nil {
		return err
	}
	for i, s := range c.Nodes {
		s.opts = slices.Concat([]string{"--innodb-flush-log-at-trx-commit=2"}, c.kind.options(i), opts)
	}
	return c.kind.assemble(ctx, c.Nodes)
}

// each does the same for several nodes at the same time.
func each(nodes []*Server, do func(*Server) error) error {
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, s := range nodes {
		wg.Go(func() { errs[i] = do(s) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// DSN returns the data source name of a database on the i-th node; see
// [Server.DSN].
func (c *Cluster) DSN(i int, db string) string { return c.Nodes[i].DSN(db) }

// Isolate cuts the i-th node off from the others: clients still reach it. It may
// not be killed while it is. In Group Replication it needs Linux.
func (c *Cluster) Isolate(ctx context.Context, i int) error {
	return c.kind.isolate(ctx, c.Nodes, i)
}

// Heal undoes Isolate. Whether the node comes back by itself is the cluster's
// affair: Rejoin sees to it.
func (c *Cluster) Heal(ctx context.Context, i int) error {
	return c.kind.heal(ctx, c.Nodes, i)
}

// Rejoin makes the i-th node, which was killed or has been expelled, a member
// again, and returns when it answers queries and has what the others have. A
// paused one must be resumed before, an isolated one healed, and so must others.
func (c *Cluster) Rejoin(ctx context.Context, i int) error {
	s := c.Nodes[i]
	var running []*Server
	for _, other := range c.Nodes {
		other.mu.Lock()
		if other != s && !other.down() {
			running = append(running, other)
		}
		other.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errStopped
	}
	return c.kind.rejoin(ctx, s, running)
}

// Stop ends all nodes and removes their folders.
func (c *Cluster) Stop() error {
	err := each(c.Nodes, (*Server).Stop)
	c.kind.stop()
	return err
}

// down reports whether the node's process has ended. s.mu is the caller's.
func (s *Server) down() bool {
	if s.process == nil {
		return true
	}
	select {
	case <-s.process.done:
		return true
	default:
		return false
	}
}

// ask asks the node for one value.
func (s *Server) ask(ctx context.Context, query string) (value string, err error) {
	err = s.with(ctx, func(conn *sql.Conn) error {
		return conn.QueryRowContext(ctx, query).Scan(&value)
	})
	return value, err
}

// tell runs statements on one connection to the node.
func (s *Server) tell(ctx context.Context, statements ...string) error {
	return s.with(ctx, func(conn *sql.Conn) error {
		for _, statement := range statements {
			if _, err := conn.ExecContext(ctx, statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
		return nil
	})
}

func (s *Server) with(ctx context.Context, do func(*sql.Conn) error) error {
	db, err := sql.Open("mysql", s.DSN("")+"?timeout=5s")
	if err != nil {
		return err
	}
	defer db.Close()
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(conn)
}

// await asks until the answer is the one that is wanted.
func (s *Server) await(ctx context.Context, query, want string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("not within %v", startLimit))
	defer cancel()
	for {
		got, err := s.ask(ctx, query)
		if err == nil && got == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is %q, want %q: %w; last error: %w", query, got, want, context.Cause(ctx), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
