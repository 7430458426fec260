//go:build unix

package tempserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// template returns the data folder that every server of b starts with a copy
// of. Making one takes seconds, so they are kept in the user's cache, one for
// each program and version. They may be removed at any time.
func (b Binary) template(ctx context.Context) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	cache = filepath.Join(cache, "mysqllock")
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	info, err := os.Stat(b.Path)
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	identity := fmt.Sprintln(b.command, b.initOptions(""), info.Size(), info.ModTime())
	name := fmt.Sprintf("%s-%s-%.8x", b.Flavour, b.Version, sha256.Sum256([]byte(identity)))
	dir := filepath.Join(cache, strings.ToLower(name))

	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	lock, err := lockFile(ctx, dir+".lock")
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	defer lock.Close()
	if _, err := os.Stat(dir); err == nil { // another process was first
		return dir, nil
	}
	building := dir + ".building"
	if err := b.initialize(ctx, building, lock); err != nil {
		return "", fmt.Errorf("tempserver: new data folder for %s: %w", b, err)
	}
	if err := os.Rename(filepath.Join(building, "data"), dir); err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	if err := os.RemoveAll(building); err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	return dir, nil
}

// initialize makes a new data folder, "data" in dir. The program keeps
// lock open, too: should this process be killed, the next one that wants the folder waits
// for the program's end, and removes what it left.
func (b Binary) initialize(ctx context.Context, dir string, lock *os.File) error {
	data, tmp := filepath.Join(dir, "data"), filepath.Join(dir, "tmp")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return err
	}
	command := slices.Concat(b.command, b.initOptions(data))
	if b.Flavour == MariaDB {
		script, err := b.installer()
		if err != nil {
			return err
		}
		command = append([]string{script}, b.initOptions(data)...)
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp) // servers that share one break each other
	if b.Flavour == MariaDB && len(b.command) > 1 {
		// The script takes the server to be a single file. Of the programs beside
		// the server, which have no loader here, it can do without.
		server := filepath.Join(dir, "server")
		if err := os.WriteFile(server, []byte("#!/bin/sh\nexec "+quoted(b.command)+" \"$@\"\n"), 0o700); err != nil {
			return err
		}
		cmd.Env = append(cmd.Env, "MYSQLD_BOOTSTRAP="+server)
		cmd.Args = append(cmd.Args, "--force")
	}
	cmd.ExtraFiles = []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // to kill the script's children with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", errors.Join(err, ctx.Err()), out)
	}
	// The server's identity; every copy shall make its own.
	if err := os.Remove(filepath.Join(data, "auto.cnf")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// quoted returns the words as a shell reads them.
func quoted(words []string) string {
	var line strings.Builder
	for _, word := range words {
		line.WriteString(" '" + strings.ReplaceAll(word, "'", `'\''`) + "'")
	}
	return line.String()
}

// initOptions returns the options that make a new data folder at dir.
func (b Binary) initOptions(dir string) []string {
	options := slices.Concat([]string{"--no-defaults", "--datadir=" + dir}, b.options, b.redoLog(), asRoot())
	if b.Flavour == MariaDB {
		return append(options, "--auth-root-authentication-method=normal", "--skip-test-db")
	}
	return append(options, "--initialize-insecure")
}

// redoLog returns the option that keeps the redo log, the greater part of a
// new data folder, small enough to copy quickly.
func (b Binary) redoLog() []string {
	if b.Flavour == MariaDB {
		return []string{"--innodb-log-file-size=32M"}
	}
	return []string{"--loose-innodb-redo-log-capacity=32M"}
}

// asRoot returns the option without which a server does not run as root.
func asRoot() []string {
	if os.Geteuid() == 0 {
		return []string{"--user=root"}
	}
	return nil
}

// installer returns the script that comes with MariaDB to make a data folder.
func (b Binary) installer() (string, error) {
	const name = "mariadb-install-db"
	base := filepath.Dir(filepath.Dir(b.Path))
	for _, folder := range []string{"bin", "scripts"} {
		if path, err := exec.LookPath(filepath.Join(base, folder, name)); err == nil {
			return path, nil
		}
	}
	return exec.LookPath(name)
}

// lockFile opens the file and waits until this process alone has it locked.
// Closing the file unlocks it.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return file, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			file.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
