//go:build unix

package tempserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// engineProgram is one that "make engines" builds.
type engineProgram struct {
	name string
	file string // what scripts/build-engines.sh calls it, in the user's cache
	env  string // names it in place of that
}

// find returns the path of the program.
func (e engineProgram) find() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	path := cmp.Or(os.Getenv(e.env), filepath.Join(cache, "mysqllock", e.file))
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("tempserver: no %s on this machine; \"make engines\" builds it: %w", e.name, err)
	}
	return path, nil
}

var tidb = engineProgram{"TiDB", "tidb-server-8.5.0", "MYSQLLOCK_TIDB"}

// StartTiDB starts TiDB in one process, with a store of its own, and waits until it answers. It
// is an error if nobody has built it here: see [Built]. The caller must call Stop.
func StartTiDB(ctx context.Context) (*Proxy, error) {
	path, err := Built()
	if err != nil {
		return nil, err
	}
	// Its servers ask each other there, and also themselves, for what the tables CLUSTER_… show.
	reserved, asked, err := reservePort()
	if err != nil {
		return nil, fmt.Errorf("tempserver: %w", err)
	}
	p := &Proxy{program: proxyProgram{name: "TiDB"}, close: func() { reserved.Close() }}
	if err = p.settle("tidb"); err == nil {
		_, port, _ := net.SplitHostPort(p.addr)
		_, status, _ := net.SplitHostPort(asked)
		err = p.start(ctx, []string{
			path, "--store=unistore", "--path=" + p.path("data"), "--host=127.0.0.1", "--advertise-address=127.0.0.1", "-P", port,
			"--status-host=127.0.0.1", "--status=" + status, "--socket=" + p.path("socket"), "--temp-dir=" + p.path("tmp"),
			"--log-file=" + p.path("tidb.log"),
		})
	}
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

// Built returns the path of the TiDB that "make engines" has built, or that MYSQLLOCK_TIDB
// names.
func Built() (string, error) { return tidb.find() }
