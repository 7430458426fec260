package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestGoCanInstallTheCommandAtAVersion: a replace in go.mod would prevent it, and so would a
// package of the driver that is not in its module.
func TestGoCanInstallTheCommandAtAVersion(t *testing.T) {
	t.Parallel()
	const version = "v0.1.0"
	proxy, bin := t.TempDir(), t.TempDir()
	publish(t, proxy, "github.com/mysqllock/mysqllock", version, "../..")
	publish(t, proxy, "github.com/mysqllock/mysqllock/cmd/mysqllock", version, ".")

	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	dbtest.OK(t, err)
	install := exec.Command("go", "install", "-modcacherw", "github.com/mysqllock/mysqllock/cmd/mysqllock@"+version)
	install.Dir = bin
	install.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "GOSUMDB=off", "GOBIN="+bin, "GOMODCACHE="+t.TempDir(),
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(strings.TrimSpace(string(cache)), "cache/download"))
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(filepath.Join(bin, "mysqllock"), "--version").Output()
	if err != nil || string(out) != "mysqllock version "+version+"\n" {
		t.Errorf("it says %q, %v", out, err)
	}
}

// publish puts a module into a folder that go takes for a proxy.
func publish(t *testing.T, proxy, path, version, dir string) {
	t.Helper()
	at := filepath.Join(proxy, path, "@v")
	dbtest.OK(t, os.MkdirAll(at, 0o755))
	write := func(name string, content []byte) { dbtest.OK(t, os.WriteFile(filepath.Join(at, name), content, 0o644)) }
	goMod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	dbtest.OK(t, err)
	var archive bytes.Buffer
	dbtest.OK(t, zip.CreateFromDir(&archive, module.Version{Path: path, Version: version}, dir))
	write("list", []byte(version+"\n"))
	write(version+".info", fmt.Appendf(nil, "{\"Version\": %q}", version))
	write(version+".mod", goMod)
	write(version+".zip", archive.Bytes())
}
