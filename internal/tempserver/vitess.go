//go:build unix

package tempserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// vitess is vtcombo: vtgate and the tablets of a Vitess in one process.
var vitess = engineProgram{"Vitess", "vtcombo-24.0.4", "MYSQLLOCK_VTCOMBO"}

// VitessBuilt is [Built] for Vitess.
func VitessBuilt() (string, error) { return vitess.find() }

// StartVitess starts Vitess, in one process, over a MySQL server that it starts, too, and waits
// until it answers. The keyspace "shop" has one shard, or two; each database that is made there is a
// further keyspace, of one shard. The options are vtcombo's own, for example
// "--queryserver-config-transaction-timeout=3s". It is an error if nobody has built it here: see
// [VitessBuilt]. The caller must call Stop.
func StartVitess(ctx context.Context, sharded bool, opts ...string) (_ *Proxy, err error) {
	program, err := VitessBuilt()
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(Find(), func(b Binary) bool { return b.Flavour == MySQL })
	if at < 0 {
		return nil, errors.New("tempserver: no MySQL on this machine, over which Vitess would run")
	}
	under, err := Start(ctx, Find()[at], "--gtid-mode=ON", "--enforce-gtid-consistency=ON")
	if err != nil {
		return nil, err
	}
	p := &Proxy{program: proxyProgram{name: vitess.name}, close: func() { _ = under.Stop() }}
	if err = p.settle("vitess"); err == nil {
		err = p.startVitess(ctx, program, under, sharded, opts)
	}
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func (p *Proxy) startVitess(ctx context.Context, program string, under *Server, sharded bool, opts []string) error {
	own, err := p.ownedByNobody(program)
	if err != nil {
		return err
	}
	// By TCP it would take the MySQL behind it for one that is to replicate. Its user may differ.
	if err := os.Chmod(under.dir, 0o711); err != nil { //nolint:gosec // what is in it has rights of its own
		return fmt.Errorf("tempserver: %w", err)
	}
	shards := `{"name": "0"}`
	if sharded {
		shards = `{"name": "-80"}, {"name": "80-"}`
	}
	_, port, _ := net.SplitHostPort(p.addr)
	command := []string{
		own, "--json-topo", `{"cells": ["test"], "keyspaces": [{"name": "shop", "shards": [` + shards + `]}]}`,
		"--mysql-auth-server-impl=none", "--mysql-server-bind-address=127.0.0.1", "--mysql-server-port=" + port, "--port=0",
		"--db-socket=" + under.Socket(), "--db-charset=utf8mb4", "--mycnf-server-id=1",
		"--dbddl-plugin=vttest", "--normalize-queries", "--tablet-refresh-interval=1s", "--gateway-initial-tablet-timeout=10s",
		"--queryserver-config-pool-size=100", "--queryserver-config-transaction-cap=300",
	}
	for _, account := range []string{"app", "dba", "allprivs", "appdebug", "repl", "filtered"} {
		command = append(command, "--db-"+account+"-user=root")
	}
	return p.start(ctx, append(command, opts...))
}

// ownedByNobody has root start p as another user, since Vitess refuses to be root. It returns a copy of
// the program, which that user may not be able to reach where it is.
func (p *Proxy) ownedByNobody(program string) (string, error) {
	if os.Geteuid() != 0 {
		return program, nil
	}
	const nobody = 65534
	text, err := os.ReadFile(program)
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	own := p.path(filepath.Base(program))
	if err := os.WriteFile(own, text, 0o755); err != nil { //nolint:gosec // another user runs it
		return "", fmt.Errorf("tempserver: %w", err)
	}
	for _, path := range []string{p.dir, p.path("tmp"), p.path("alive")} {
		if err := os.Chown(path, nobody, nobody); err != nil {
			return "", fmt.Errorf("tempserver: %w", err)
		}
	}
	p.credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	return own, nil
}
