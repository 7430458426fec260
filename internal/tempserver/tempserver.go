//go:build unix

// Package tempserver runs real, private, throwaway MySQL and MariaDB servers
// for tests, benchmarks and demonstrations. Each listens on a loopback port of
// its own and keeps all its files in a temporary folder of its own; root logs
// in without a password. Both are gone after [Server.Stop], and also when the
// process that started the server dies without a chance to clean up.
//
// It needs a Unix with /bin/sh, and servers on this machine: see [Find].
package tempserver

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"
)

// startLimit is how long a server may take to answer. A second is normal; on a
// starved machine it was half a minute.
const startLimit = 2 * time.Minute

var (
	errStopped = errors.New("tempserver: stopped")
	errDown    = errors.New("tempserver: not running")
)

// Server is one throwaway server. Its methods may be called from several
// goroutines; those that change the server's state run one after another.
type Server struct {
	instance
	binary  Binary
	opts    []string
	version string
}

// instance is what servers and proxies have in common: a folder, a port, and one
// process at a time.
type instance struct {
	dir      string    // holds all of its files
	addr     string    // host:port
	port     *os.File  // keeps the port ours while the program is down
	guardian *exec.Cmd // removes dir once leash is closed; see guardianScript
	leash    *os.File  // the guardian's standard input
	// credential is the user that the program runs as; nil for that of this process.
	credential *syscall.Credential

	mu      sync.Mutex // held while the program's state changes
	process *process   // nil before the first launch and while known to be down
	stopped bool       // Stop was called: guardian, dir and port are gone
}

// process is one run of a program.
type process struct {
	*os.Process
	done chan struct{} // closed when the process has ended
}

// Start starts a server of b and waits until it answers queries. The options
// are the program's own, such as "--lock-wait-timeout=5", and override those
// that Start gives: a small buffer pool and redo log, many connections,
// durable commits as the server has them by default.
//
// The first start of a program makes a data folder, which takes seconds; later
// ones copy it. The server outlives ctx, which limits only the start. The
// caller must call Stop.
//
// An error holds the end of the server's log, and nothing is left running.
//
// For the server that MYSQLLOCK_TEST_DSN names it starts nothing, and fails if that
// server is not as the options say; such a Server does not obey the other methods.
func Start(ctx context.Context, b Binary, opts ...string) (*Server, error) {
	if b.err != nil {
		return nil, b.err
	}
	if b.running != nil {
		return b.attach(ctx, opts)
	}
	template, err := b.template(ctx)
	if err != nil {
		return nil, err
	}
	s := &Server{binary: b, opts: slices.Clone(opts)}
	if err := s.prepare(template); err != nil {
		return nil, errors.Join(fmt.Errorf("tempserver: %w", err), s.Stop())
	}
	if err := s.launch(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// Socket is the path of the unix socket. It may be too long to be dialed.
func (s *Server) Socket() string { return s.path("socket") }

// Addr returns the program's address, "127.0.0.1:port". It never changes.
func (i *instance) Addr() string { return i.addr }

// DSN returns the data source name of a database on the server, in the form of
// github.com/go-sql-driver/mysql. The database need not exist; "" is none.
func (i *instance) DSN(db string) string { return "root@tcp(" + i.addr + ")/" + db }

// Version returns what SELECT VERSION() says.
func (s *Server) Version() string { return s.version }

// Kill ends the server as a crash would, with SIGKILL, also when it is paused.
// The data stays: Restart brings the server back. Killing a server that is
// down does nothing.
func (i *instance) Kill() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stopped {
		return errStopped
	}
	i.kill()
	return nil
}

// Restart shuts the server down in an orderly way, unless it is down already,
// and starts it again with the same data, port and options. It returns when
// the server answers queries again. After an error, also one from ctx, the
// server is down.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errStopped
	}
	if err := s.shutdown(ctx); err != nil {
		return err
	}
	return s.launch(ctx)
}

// Pause freezes the server with SIGSTOP: it answers nothing, but its
// connections stay open and the system still accepts new ones. It returns when
// the server stands still.
func (i *instance) Pause() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for !allStopped(i.process.Pid) {
		select {
		case <-i.process.done:
			return errDown
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// Resume lets a paused server run on. It does nothing to one that runs.
func (i *instance) Resume() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.signal(syscall.SIGCONT)
}

// Stop ends the server and removes its folder. Only the first call does
// something; all other methods that change the server fail from then on.
func (i *instance) Stop() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stopped {
		return nil
	}
	i.stopped = true
	i.kill()
	if i.port != nil {
		i.port.Close()
	}
	if i.guardian != nil {
		i.leash.Close()
		_ = i.guardian.Wait() // RemoveAll below tells what matters
	}
	if err := os.RemoveAll(i.dir); err != nil { // in case the guardian could not
		return fmt.Errorf("tempserver: %w", err)
	}
	return nil
}

// prepare does what is needed once, before the first launch.
func (s *Server) prepare(template string) error {
	if err := s.settle(string(s.binary.Flavour)); err != nil {
		return err
	}
	if err := os.CopyFS(s.path("data"), os.DirFS(template)); err != nil || s.binary.clock == "" {
		return err
	}
	return s.SetClock(0)
}

// settle makes the folder and reserves the port.
func (i *instance) settle(name string) error {
	tmp, err := filepath.Abs(os.TempDir())
	if err != nil {
		return err
	}
	i.dir = filepath.Join(tmp, "mysqllock-"+strings.ToLower(name)+"-"+rand.Text())
	// The guardian comes before the folder, lest we die between the two.
	if err := i.startGuardian(); err != nil {
		return err
	}
	for _, dir := range []string{i.dir, i.path("tmp")} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	if err := os.WriteFile(i.path("alive"), nil, 0o600); err != nil {
		return err
	}
	i.port, i.addr, err = reservePort()
	return err
}

// launch starts the server program, with more options for this time, and waits
// until it answers. After an error the program is not running.
func (s *Server) launch(ctx context.Context, more ...string) error {
	if err := s.binary.checkPlugins(slices.Concat(s.options(), more)); err != nil {
		return err
	}
	cmd := s.command(more...)
	return s.run(s.binary.String(), cmd, func(p *process) error { return s.awaitReady(ctx, p) })
}

// run starts the program and waits until it is ready. After an error it is not
// running.
func (i *instance) run(name string, cmd *exec.Cmd, ready func(*process) error) error {
	log, err := os.OpenFile(i.path("log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}
	defer log.Close()
	logStart, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}

	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}
	p := &process{Process: cmd.Process, done: make(chan struct{})}
	go func() { // ends with the process; until then i, and with it the leash, is in use
		_ = cmd.Wait()
		os.Remove(i.path("pid")) // the number may soon be someone else's
		close(p.done)
	}()
	i.process = p

	if err := ready(p); err != nil {
		i.kill()
		return fmt.Errorf("tempserver: start %s: %w\n%s", name, err, tail(log, logStart))
	}
	return nil
}

// command returns the server program with more options.
func (s *Server) command(more ...string) *exec.Cmd {
	cmd := s.guarded(slices.Concat(s.binary.command, s.options(), more))
	cmd.Env = append(os.Environ(), "PATH="+s.dir+":"+os.Getenv("PATH")) // programs that the server runs
	cmd.Env = append(cmd.Env, s.clockEnv()...)
	return cmd
}

// guarded returns a command that the guardian kills if need be.
func (i *instance) guarded(command []string) *exec.Cmd {
	cmd := exec.Command("/bin/sh", slices.Concat([]string{"-c", launchScript, "tempserver", i.dir}, command)...)
	cmd.Dir = i.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: i.credential} // Ctrl-C is not for the program
	return cmd
}

// shutdown ends the process, if there is one, in an orderly way. After an error
// it is killed.
func (i *instance) shutdown(ctx context.Context) error {
	p := i.process
	if p == nil {
		return nil
	}
	// Errors mean that it has ended, and then done is closed.
	_ = p.Signal(syscall.SIGTERM)
	_ = p.Signal(syscall.SIGCONT)
	select {
	case <-p.done:
		i.process = nil
		return nil
	case <-ctx.Done():
		i.kill()
		return fmt.Errorf("tempserver: shutdown: %w", ctx.Err())
	}
}

// smallMySQL returns options that make a start of MySQL cheap. They leave out memory that MySQL fills at its start, and
// that no test reads, and change no statement's way. The X plugin would want a port as well.
func smallMySQL() []string {
	options := []string{"--loose-mysqlx=OFF", "--innodb-log-buffer-size=1M", "--loose-performance-schema-digests-size=100"}
	for _, kind := range []string{"statements", "waits", "stages", "transactions"} {
		options = append(options, "--loose-performance-schema-events-"+kind+"-history-long-size=10")
	}
	return options
}

// options returns the server's command line. Of an option that is there twice
// the later one counts.
func (s *Server) options() []string {
	_, port, _ := net.SplitHostPort(s.addr)
	options := slices.Concat([]string{"--no-defaults"}, s.binary.options, s.binary.redoLog(), asRoot(), []string{
		"--datadir=" + s.path("data"),
		"--tmpdir=" + s.path("tmp"), // servers that share one break each other
		"--pid-file=" + s.path("server.pid"),
		"--socket=../socket", // from the data folder; the full path may be too long for a socket
		"--bind-address=127.0.0.1",
		"--port=" + port,
		"--max-connections=2000",
		"--innodb-buffer-pool-size=32M",
	})
	if s.binary.Flavour == MariaDB {
		options = append(options, "--skip-name-resolve")
	} else {
		options = append(options, smallMySQL()...)
	}
	return append(options, s.opts...)
}

// awaitReady returns nil when the server at s.addr is p and answers queries.
func (s *Server) awaitReady(ctx context.Context, p *process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("no answer within %v", startLimit))
	defer cancel()
	config := mysql.NewConfig()
	config.Net, config.Addr, config.User = "tcp", s.addr, "root"
	config.Logger = &mysql.NopLogger{} // failures are normal at first
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()

	for {
		var version, dataDir string
		err := db.QueryRowContext(ctx, "SELECT VERSION(), @@datadir").Scan(&version, &dataDir)
		if err == nil && !sameFile(dataDir, s.path("data")) {
			return fmt.Errorf("another server, with its data in %s, answers on %s", dataDir, s.addr)
		}
		if err == nil {
			if s.version == "" { // the first launch; later nobody may write it
				s.version = version
			}
			return nil
		}
		select {
		case <-p.done:
			return errors.New("the server ended")
		case <-ctx.Done():
			return fmt.Errorf("%w; last error: %w", context.Cause(ctx), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// kill ends the process, if there is one, and waits for its end.
func (i *instance) kill() {
	if i.process == nil {
		return
	}
	_ = i.process.Kill() // an error means that it has ended
	<-i.process.done
	i.process = nil
}

// signal sends a signal to the running server.
func (i *instance) signal(signal os.Signal) error {
	if i.stopped {
		return errStopped
	}
	if i.process == nil {
		return errDown
	}
	if err := i.process.Signal(signal); errors.Is(err, os.ErrProcessDone) {
		return errDown
	} else if err != nil {
		return fmt.Errorf("tempserver: %w", err)
	}
	return nil
}

// path returns the path of a file of the server.
func (i *instance) path(name string) string { return filepath.Join(i.dir, name) }

// reservePort finds a free loopback port and keeps it from everyone who does
// not ask for it by number, as the server does. Otherwise someone could get it
// before the server listens, or while it is down; even a client that connects
// to the server, from the same port.
func reservePort() (*os.File, string, error) {
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, "", err
	}
	// The server sets it too; then both can be bound, and one can listen.
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	var name syscall.Sockaddr
	if err == nil {
		name, err = syscall.Getsockname(fd)
	}
	if err != nil {
		syscall.Close(fd)
		return nil, "", err
	}
	number := name.(*syscall.SockaddrInet4).Port // an AF_INET socket has no other kind of name
	return os.NewFile(uintptr(fd), "port"), net.JoinHostPort("127.0.0.1", strconv.Itoa(number)), nil
}

// allStopped reports whether every thread of a process stands still. Where the
// system does not tell, it says yes.
func allStopped(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, path := range stats {
		stat, err := os.ReadFile(path) // "pid (name) state …"; the name may hold anything
		_, state, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || !strings.HasPrefix(state, "T") {
			return false
		}
	}
	return true
}

// sameFile reports whether both paths lead to the same file.
func sameFile(a, b string) bool {
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// tail returns the end of the file, at most 4 KiB and nothing before start.
func tail(file *os.File, start int64) string {
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	start = max(start, info.Size()-4096)
	text, err := io.ReadAll(io.NewSectionReader(file, start, info.Size()-start))
	if err != nil {
		return err.Error()
	}
	return string(text)
}
