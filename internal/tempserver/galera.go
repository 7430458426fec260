//go:build unix

package tempserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// galera is a cluster of MariaDB servers. All begin with the same data, and who
// comes back lacks little enough to get it from what the others have
// kept of the last changes. So no transfer of all data is ever needed, and the
// program for it, transferScript, only tells a joiner that this is so.
type galera struct {
	provider string
	group    []string // the addresses at which the nodes talk to each other,
	joiners  []string // and those at which each gets what it lacks
	reserved []*os.File
}

const (
	transferMethod = "mysqllock"
	transferScript = `#!/bin/sh
while [ $# -gt 0 ]; do
	case $1 in
	--role) role=$2 ;;
	--address) file=$2 ;;
	--gtid) position=$2 ;;
	--gtid-domain-id) domain=$2 ;;
	--bypass) bypass=yes ;;
	--parent) server=$2 ;;
	esac
	shift
done
if [ "$role" = donor ]; then
	[ -n "$bypass" ] || exit 71 # EREMOTE: it lacks more than we have kept
	echo "$position $domain" >"$file.new" && mv "$file.new" "$file"
	echo "done $position $domain"
else
	file=$(dirname "$0")/transfer
	rm -f "$file"
	echo "ready $file"
	until [ -e "$file" ]; do kill -0 "$server" || exit; sleep 0.05; done
	cat "$file"
fi
`
)

// galeraProvider finds the library that replicates.
func galeraProvider() (string, error) {
	if path := os.Getenv("MYSQLLOCK_GALERA"); path != "" {
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("tempserver: MYSQLLOCK_GALERA: %w", err)
		}
		return path, nil
	}
	for _, folder := range []string{"/usr/lib/galera", "/usr/lib64/galera-4", "/usr/lib64/galera"} {
		path := filepath.Join(folder, "libgalera_smm.so")
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", errors.New("tempserver: no libgalera_smm.so on this machine; scripts/install-servers.sh installs it")
}

func (g *galera) prepare(nodes []*Server) error {
	for range nodes {
		for _, addrs := range []*[]string{&g.group, &g.joiners} {
			port, addr, err := reservePort()
			if err != nil {
				return err
			}
			g.reserved = append(g.reserved, port)
			*addrs = append(*addrs, addr)
		}
	}
	return nil
}

func (g *galera) stop() {
	for _, port := range g.reserved {
		port.Close()
	}
}

func (g *galera) options(i int) []string {
	_, port, _ := strings.Cut(g.group[i], ":")
	return []string{
		"--wsrep-on=ON",
		"--wsrep-provider=" + g.provider,
		"--wsrep-cluster-name=mysqllock",
		"--wsrep-cluster-address=gcomm://" + strings.Join(g.group, ","),
		fmt.Sprintf("--wsrep-node-name=node%d", i),
		"--wsrep-node-address=" + g.group[i],
		"--wsrep-sst-method=" + transferMethod,
		"--wsrep-provider-options=base_host=127.0.0.1;base_port=" + port + ";gmcast.listen_addr=tcp://" + g.group[i] +
			";ist.recv_addr=" + g.joiners[i] + ";gcache.size=64M",
		"--binlog-format=ROW",
		"--innodb-autoinc-lock-mode=2",
	}
}

// assemble has the first node make a history, which the others get a copy of.
func (g *galera) assemble(ctx context.Context, nodes []*Server) error {
	for _, s := range nodes {
		if err := os.WriteFile(s.path("wsrep_sst_"+transferMethod), []byte(transferScript), 0o700); err != nil {
			return err
		}
	}
	first := nodes[0]
	if err := first.launch(ctx, newCluster); err != nil {
		return err
	}
	if err := first.shutdown(ctx); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(first.path("data"), "galera.cache")); err != nil { // large, and nothing in it
		return err
	}
	for _, s := range nodes[1:] {
		if err := os.RemoveAll(s.path("data")); err != nil {
			return err
		}
		if err := os.CopyFS(s.path("data"), os.DirFS(first.path("data"))); err != nil {
			return err
		}
	}
	if err := first.launch(ctx, newCluster); err != nil {
		return err
	}
	for _, s := range nodes[1:] { // one after the other is quicker
		if err := s.launch(ctx); err != nil {
			return err
		}
		if err := g.synced(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

const newCluster = "--wsrep-new-cluster"

// synced waits until the node has what the others have.
func (g *galera) synced(ctx context.Context, s *Server) error {
	return s.await(ctx, wsrepStatus("local_state_comment"), "Synced")
}

func wsrepStatus(name string) string {
	return "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'WSREP_" + name + "'"
}

var recovered = regexp.MustCompile(`Recovered position: ([0-9a-f-]+:[0-9]+)`)

func (g *galera) rejoin(ctx context.Context, s *Server, running []*Server) error {
	if !s.down() { // it comes back by itself, but may not even know that it was expelled: the others do
		for _, other := range running {
			if err := other.await(ctx, wsrepStatus("cluster_size"), strconv.Itoa(len(running)+1)); err != nil {
				return err
			}
		}
		return g.synced(ctx, s)
	}
	// A server that has crashed does not know what it has, until it is asked.
	out, err := s.command("--wsrep-recover").CombinedOutput()
	position := recovered.FindSubmatch(out)
	if err != nil || position == nil {
		return fmt.Errorf("tempserver: --wsrep-recover: %w\n%s", err, out)
	}
	if err := s.launch(ctx, "--wsrep-start-position="+string(position[1])); err != nil {
		return err
	}
	return g.synced(ctx, s)
}

// isolate has the node neither send to the others nor hear them.
func (g *galera) isolate(ctx context.Context, nodes []*Server, i int) error {
	return nodes[i].tell(ctx, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=1'")
}

func (g *galera) heal(ctx context.Context, nodes []*Server, i int) error {
	return nodes[i].tell(ctx, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=0'")
}
