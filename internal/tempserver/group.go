//go:build unix

package tempserver

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"
)

// group is a cluster of MySQL servers under Group Replication. They talk to each
// other through relays, which can cut one off, over the protocol of their clients:
// the other one that there is listens at the address that it tells the others.
type group struct {
	multi  bool
	relays *relays // through which the members reach each other
}

const groupName = "5eed0000-0000-11f0-8000-000000000002"

func (g *group) prepare(nodes []*Server) (err error) {
	g.relays, err = newRelays(nodes)
	return err
}

func (g *group) stop() {
	if g.relays != nil {
		g.relays.close()
	}
}

func (g *group) options(i int) []string {
	single, everywhere := "ON", "OFF"
	if g.multi {
		single, everywhere = everywhere, single
	}
	var seeds []string
	for node := range clusterSize {
		seeds = append(seeds, g.relays.addr(node))
	}
	return []string{
		"--server-id=" + strconv.Itoa(i+1),
		"--gtid-mode=ON",
		"--enforce-gtid-consistency=ON",
		"--sync-binlog=0",
		"--report-host=127.0.0.1",
		"--plugin-load-add=group_replication.so",
		"--loose-group-replication-start-on-boot=OFF",
		"--loose-group-replication-group-name=" + groupName,
		"--loose-group-replication-communication-stack=MYSQL",
		"--loose-group-replication-local-address=" + g.relays.addr(i),
		"--loose-group-replication-group-seeds=" + strings.Join(seeds, ","),
		"--loose-group-replication-single-primary-mode=" + single,
		"--loose-group-replication-enforce-update-everywhere-checks=" + everywhere,
		// A member that does not answer is expelled after 5 s, not 10: tests wait for it.
		"--loose-group-replication-member-expel-timeout=0",
	}
}

func (g *group) assemble(ctx context.Context, nodes []*Server) error {
	if err := each(nodes, func(s *Server) error { return g.launch(ctx, s) }); err != nil {
		return err
	}
	if err := nodes[0].tell(ctx, "SET GLOBAL group_replication_bootstrap_group = ON"); err != nil {
		return err
	}
	if err := g.begin(ctx, nodes[0]); err != nil {
		return err
	}
	if err := nodes[0].tell(ctx, "SET GLOBAL group_replication_bootstrap_group = OFF"); err != nil {
		return err
	}
	if err := g.online(ctx, nodes[0]); err != nil {
		return err
	}
	return each(nodes[1:], func(s *Server) error { return g.join(ctx, s) })
}

func (g *group) launch(ctx context.Context, s *Server) error {
	if err := s.launch(ctx); err != nil {
		return err
	}
	return s.tell(ctx, "CHANGE REPLICATION SOURCE TO SOURCE_USER = 'root', SOURCE_PASSWORD = '' FOR CHANNEL 'group_replication_recovery'")
}

func (g *group) join(ctx context.Context, s *Server) error {
	if err := g.begin(ctx, s); err != nil {
		return err
	}
	return g.online(ctx, s)
}

// begin starts a member. On a machine that is too busy the others may take it to be
// gone before it is there (3092), and then it tries again.
func (g *group) begin(ctx context.Context, s *Server) error {
	const notJoined = 3092 // ER_GROUP_REPLICATION_CONFIGURATION
	for try := 1; ; try++ {
		err := s.tell(ctx, "START GROUP_REPLICATION")
		var e *mysql.MySQLError
		if !errors.As(err, &e) || e.Number != notJoined || try == 3 {
			return err
		}
		if err := s.tell(ctx, "STOP GROUP_REPLICATION", "SET GLOBAL offline_mode = OFF"); err != nil {
			return err
		}
	}
}

// online waits until the node is a member, and takes writes if it is to.
func (g *group) online(ctx context.Context, s *Server) error {
	const state = "SELECT MEMBER_STATE FROM performance_schema.replication_group_members WHERE MEMBER_ID = @@server_uuid"
	if err := s.await(ctx, state, "ONLINE"); err != nil || !g.multi {
		return err
	}
	return s.await(ctx, "SELECT @@super_read_only", "0")
}

// rejoin has a member that runs leave before it joins: it may not even know that
// it was expelled. Who joins before the others have let it go waits for long.
func (g *group) rejoin(ctx context.Context, s *Server, running []*Server) error {
	if s.down() {
		if err := g.launch(ctx, s); err != nil {
			return err
		}
	}
	if err := s.tell(ctx, "STOP GROUP_REPLICATION"); err != nil {
		return err
	}
	for _, other := range running {
		if err := other.await(ctx, "SELECT COUNT(*) FROM performance_schema.replication_group_members", strconv.Itoa(len(running))); err != nil {
			return err
		}
	}
	return g.join(ctx, s)
}

func (g *group) isolate(_ context.Context, _ []*Server, i int) error {
	g.relays.isolate(i)
	return nil
}

func (g *group) heal(_ context.Context, _ []*Server, i int) error {
	g.relays.heal(i)
	return nil
}
