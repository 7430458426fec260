//go:build unix

package tempserver

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Proxy is a throwaway proxy between clients and servers. Its methods are those of
// a [Server].
type Proxy struct {
	instance
	program proxyProgram
	close   func() // ends what it needs from this process; may be nil
}

// Stop ends the proxy and removes its folder.
func (p *Proxy) Stop() error {
	err := p.instance.Stop()
	if p.close != nil {
		p.close()
	}
	return err
}

// proxyProgram is one that there may be on this machine.
type proxyProgram struct {
	name string
	env  string // names the program in place of the search for it
	path string // below root
	root string
}

// proxies returns MySQL Router and HAProxy: below PROXY_ROOT (/opt/mysql-proxies if
// unset).
func proxies() (router, haproxy proxyProgram) {
	root := cmp.Or(os.Getenv("PROXY_ROOT"), "/opt/mysql-proxies")
	return proxyProgram{"MySQL Router", "MYSQLLOCK_MYSQLROUTER", "usr/bin/mysqlrouter", root},
		proxyProgram{"HAProxy", "MYSQLLOCK_HAPROXY", "usr/sbin/haproxy", root}
}

// find returns how to run the program: the one that is named, the one below root,
// with the loader and the libraries there, or the one in PATH. Then root is "/".
func (p *proxyProgram) find() (command []string, err error) {
	path := filepath.Join(p.root, p.path)
	loaders, _ := filepath.Glob(filepath.Join(p.root, "usr/lib/*/ld-linux*.so.*"))
	named := os.Getenv(p.env)
	if _, err := os.Stat(path); err == nil && len(loaders) > 0 && named == "" {
		libraries := filepath.Dir(loaders[0]) + ":" + filepath.Join(p.root, "usr/lib/mysql-router")
		return []string{loaders[0], "--library-path", libraries, path}, nil
	}
	p.root = "/"
	path, err = exec.LookPath(cmp.Or(named, filepath.Base(p.path)))
	if err != nil {
		return nil, fmt.Errorf("tempserver: no %s on this machine; scripts/install-servers.sh installs it: %w", p.name, err)
	}
	return []string{path}, nil
}

// RequireProxies ends the test where MySQL Router or HAProxy is missing: as
// skipped, or with CI=true in the environment as failed.
func RequireProxies(tb TB) {
	tb.Helper()
	if without(tb) {
		return
	}
	router, haproxy := proxies()
	_, routerErr := router.find()
	_, haproxyErr := haproxy.find()
	switch err := errors.Join(routerErr, haproxyErr); {
	case err == nil:
	case os.Getenv("CI") == "true":
		tb.Fatal(err)
	default:
		tb.Skip(err)
	}
}

// start starts the program and waits until a client is led to a server.
func (p *Proxy) start(ctx context.Context, command []string) error {
	config, err := mysql.ParseDSN(p.DSN(""))
	if err != nil {
		return err
	}
	config.Logger = &mysql.NopLogger{} // failures are normal at first
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	return p.run(p.program.name, p.guarded(command), func(process *process) error {
		ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("no answer within %v", startLimit))
		defer cancel()
		for {
			_, err := db.ExecContext(ctx, "DO 1")
			if err == nil {
				return nil
			}
			select {
			case <-process.done:
				return errors.New("it ended")
			case <-ctx.Done():
				return fmt.Errorf("%w; last error: %w", context.Cause(ctx), err)
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
}
