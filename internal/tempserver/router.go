//go:build unix

package tempserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Routing is what MySQL Router does with the connections of its clients.
type Routing string

// The ways of MySQL Router. Primary and Split are for the members of a Group
// Replication group, as in InnoDB Cluster.
const (
	// Passed leads each connection to the first server that there is.
	Passed Routing = "Passed"
	// Shared does so with each statement that does not depend on another, on any
	// connection to the server (connection_sharing).
	Shared Routing = "Shared"
	// Primary leads each connection to the primary, and ends it where that is
	// another server from then on.
	Primary Routing = "Primary"
	// Split leads what reads to secondaries and what writes to the primary
	// (access_mode=auto).
	Split Routing = "Split"
)

// StartRouter starts MySQL Router before servers, and waits until a client is led to
// one. For Primary and Split the first of them must be the primary. The caller must
// call Stop.
func StartRouter(ctx context.Context, r Routing, servers ...*Server) (*Proxy, error) {
	p := &Proxy{}
	p.program, _ = proxies()
	command, err := p.program.find()
	if err != nil {
		return nil, err
	}
	if err := p.startRouter(ctx, command, r, servers); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func (p *Proxy) startRouter(ctx context.Context, command []string, r Routing, servers []*Server) error {
	if err := p.settle("router"); err != nil {
		return err
	}
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.addr)
	}
	if r == Primary || r == Split {
		if err := servers[0].tell(ctx, clusterMetadata...); err != nil {
			return err
		}
		state := fmt.Sprintf(`{"metadata-cache": {"group-replication-id": "%s", "cluster-metadata-servers": ["mysql://%s"]}, "version": "1.0.0"}`,
			groupName, strings.Join(addrs, `", "mysql://`))
		if err := os.WriteFile(p.path("state.json"), []byte(state), 0o600); err != nil {
			return err
		}
		if err := p.makeKeyring(ctx, command); err != nil {
			return err
		}
	}
	if err := os.WriteFile(p.path("router.conf"), []byte(p.routerConfig(r, addrs)), 0o600); err != nil {
		return err
	}
	return p.start(ctx, append(command, "-c", p.path("router.conf")))
}

func (p *Proxy) routerConfig(r Routing, addrs []string) string {
	plugins, _ := filepath.Glob(filepath.Join(p.program.root, "usr/lib*/mysqlrouter/plugin"))
	plugins = append(plugins, filepath.Join(p.program.root, "usr/lib/mysqlrouter"))
	_, port, _ := net.SplitHostPort(p.addr)
	config := []string{
		"[DEFAULT]", "plugin_folder=" + plugins[0], "logging_folder=",
		"runtime_folder=" + p.dir, "data_folder=" + p.dir, "dynamic_state=" + p.path("state.json"),
		"keyring_path=" + p.path("keyring"), "master_key_path=" + p.path("master.key"),
		"[logger]", "level=INFO",
		"[connection_pool]", "max_idle_server_connections=64",
		"[routing:test]", "protocol=classic", "bind_address=127.0.0.1", "bind_port=" + port, "max_connections=1000",
	}
	cache := []string{
		"[metadata_cache:test]", "cluster_type=gr", "metadata_cluster=test", "router_id=1", "user=root", "ttl=0.2", "ssl_mode=DISABLED",
	}
	shared := []string{
		"client_ssl_mode=DISABLED", "server_ssl_mode=DISABLED", "connection_sharing=1", "connection_sharing_delay=0",
	}
	switch r {
	case Primary:
		config = slices.Concat(config, []string{"destinations=metadata-cache://test/?role=PRIMARY", "routing_strategy=first-available"}, cache)
	case Split:
		config = slices.Concat(config, shared, []string{
			"destinations=metadata-cache://test/?role=PRIMARY_AND_SECONDARY", "routing_strategy=round-robin", "access_mode=auto",
		}, cache)
	default:
		config = append(config, "destinations="+strings.Join(addrs, ","), "routing_strategy=first-available")
		if r == Shared {
			config = append(config, shared...)
		}
	}
	return strings.Join(config, "\n") + "\n"
}

// makeKeyring makes what Router gets root's password from, which is empty.
func (p *Proxy) makeKeyring(ctx context.Context, router []string) error {
	last := len(router) - 1
	program := append(slices.Clone(router[:last]), router[last]+"_keyring", "--master-key-file="+p.path("master.key"))
	for _, args := range [][]string{{"init", p.path("keyring")}, {"set", p.path("keyring"), "root", "password", ""}} {
		cmd := exec.CommandContext(ctx, program[0], slices.Concat(program[1:], args)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("tempserver: %s: %w: %s", p.program.name, err, out)
		}
	}
	return nil
}

// clusterMetadata is what Router reads of the schema with which InnoDB Cluster
// describes a group, in the form of its version 2.0.
var clusterMetadata = []string{
	"CREATE DATABASE IF NOT EXISTS mysql_innodb_cluster_metadata",
	"USE mysql_innodb_cluster_metadata",
	"CREATE OR REPLACE VIEW schema_version AS SELECT 2 AS major, 0 AS minor, 0 AS patch",
	"CREATE OR REPLACE VIEW v2_this_instance AS SELECT 'gr' AS cluster_type",
	"CREATE OR REPLACE VIEW v2_gr_clusters AS SELECT '1' AS cluster_id, 'test' AS cluster_name, '" + groupName + "' AS group_name",
	"CREATE OR REPLACE VIEW v2_instances AS SELECT '1' AS cluster_id, MEMBER_ID AS mysql_server_uuid, '{}' AS attributes, NULL AS xendpoint," +
		" CONCAT(MEMBER_HOST, ':', MEMBER_PORT) AS endpoint, CONCAT(MEMBER_HOST, ':', MEMBER_PORT) AS label" +
		" FROM performance_schema.replication_group_members",
	"CREATE TABLE IF NOT EXISTS v2_routers (router_id INT PRIMARY KEY, cluster_id CHAR(36), router_name VARCHAR(255), address VARCHAR(255)," +
		" version VARCHAR(12), last_check_in TIMESTAMP NULL, attributes JSON, options JSON)",
	"REPLACE INTO v2_routers VALUES (1, '1', 'test', '127.0.0.1', '9', NULL, '{}', '{}')",
}
