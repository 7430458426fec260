//go:build unix

package tempserver

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed" // the library's source
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// clockSource is a library that is loaded in front of the server's own, and through
// which it is told the time. libfaketime cannot take its place: it has threads of MySQL
// spin that wait by a clock which only runs on.
//
//go:embed clock/clock.c
var clockSource []byte

// WithClock returns b with a clock that [Server.SetClock] sets. It takes Linux with
// glibc, and a C compiler, which CC names where it is not called cc.
func (b Binary) WithClock() (Binary, error) {
	if b.running != nil {
		return b, errNotOurs
	}
	if b.err != nil {
		return b, b.err
	}
	var err error
	b.clock, err = clockLibrary()
	return b, err
}

// clockLibrary returns the path of the library, which it makes once for each user.
func clockLibrary() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	cache = filepath.Join(cache, "mysqllock")
	path := filepath.Join(cache, fmt.Sprintf("clock-%.8x.so", sha256.Sum256(clockSource)))
	if exists(path) {
		return path, nil
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	work, err := os.MkdirTemp(cache, "clock-") // where it is complete when it is called by its name
	if err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, "clock.so")
	cc := exec.Command(cmp.Or(os.Getenv("CC"), "cc"), "-O2", "-shared", "-fPIC", "-o", made, "-x", "c", "-", "-ldl")
	cc.Stdin = bytes.NewReader(clockSource)
	if out, err := cc.CombinedOutput(); err != nil {
		return "", fmt.Errorf("tempserver: making the library by which the clock of a server is set: %w;"+
			" Debian has a C compiler in the packages gcc and libc6-dev\n%s", err, out)
	}
	if err := os.Rename(made, path); err != nil {
		return "", fmt.Errorf("tempserver: %w", err)
	}
	return path, nil
}

// SetClock sets the clock of a server that was started with [Binary.WithClock] so far
// ahead of the machine's, or behind it where ahead is negative. The server goes by it at
// once, and still after a restart. Only the time of day is set, as by somebody who
// corrects it: clocks that only run on, by which a server may time what it waits for, do
// not notice.
func (s *Server) SetClock(ahead time.Duration) error {
	if s.binary.clock == "" {
		return errors.New("tempserver: the clock of this server cannot be set; see Binary.WithClock")
	}
	file, err := os.OpenFile(s.path("clock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}
	_, err = file.Write(binary.NativeEndian.AppendUint64(nil, uint64(ahead))) // the server has it mapped
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}
	return nil
}

// clockEnv has the server go by its own clock.
func (s *Server) clockEnv() []string {
	if s.binary.clock == "" {
		return nil
	}
	return []string{"LD_PRELOAD=" + s.binary.clock, "MYSQLLOCK_CLOCK=" + s.path("clock")}
}
