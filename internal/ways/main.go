// Command ways counts how much of the driver an operation enters: functions and files of this
// module, by the coverage of one operation on a warm handle; and for each command that it sends, how
// many calls of this module lead to the base driver.
//
//	make ways
package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/coverage"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "ways:", err)
		os.Exit(1)
	}
}

const (
	read  = "SELECT stock FROM p WHERE id = 1"
	write = "UPDATE p SET stock = stock + 1 WHERE id = 1"
)

// An operation is done on a handle, in a context that ends after it.
type operation struct {
	name   string
	params string // of the DSN
	do     func(ctx context.Context, db *sql.DB) error
}

var operations = []operation{
	{"a query without a hint", "", query},
	{"BeginTx, Exec, Commit, row", "", transaction()},
	{"read, decide, write, row", "", func(ctx context.Context, db *sql.DB) error {
		ctx = lockctx.With(ctx, "k")
		if err := query(ctx, db); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, write)
		return err
	}},
	{"Do, row", "", do()},
	{"Do with a lease", "", do(lockctx.Lease(time.Minute))},
	{"Do, advisory", "", do(lockctx.Advisory())},
	{"BeginTx, Exec, Commit, optimistic", "", transaction(lockctx.Optimistic())},
	{"a query without a hint, maxConns", "maxConns=8", query},
	{"BeginTx, Exec, Commit, row, maxConns", "maxConns=8", transaction()},
}

func query(ctx context.Context, db *sql.DB) error {
	var stock int
	return db.QueryRowContext(ctx, read).Scan(&stock)
}

func transaction(opts ...lockctx.Option) func(context.Context, *sql.DB) error {
	return func(ctx context.Context, db *sql.DB) error {
		ctx = lockctx.With(ctx, "k", opts...)
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, write); err != nil {
			return err
		}
		return tx.Commit()
	}
}

func do(opts ...lockctx.Option) func(context.Context, *sql.DB) error {
	return func(ctx context.Context, db *sql.DB) error {
		return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, write)
			return err
		}, opts...)
	}
}

func run(ctx context.Context) error {
	work, err := os.MkdirTemp("", "ways-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "server\toperation\tfunctions\tfiles\tcalls to each command\t")
	for _, bin := range tempserver.EachFlavour(tempserver.Find()) {
		if err := onServer(ctx, out, bin, work); err != nil {
			return fmt.Errorf("%s: %w", bin, err)
		}
	}
	return out.Flush()
}

func onServer(ctx context.Context, out *tabwriter.Writer, bin tempserver.Binary, work string) error {
	server, err := tempserver.Start(ctx, bin)
	if err != nil {
		return err
	}
	defer server.Stop()
	admin, err := sql.Open("mysql", server.DSN(""))
	if err != nil {
		return err
	}
	defer admin.Close()
	for _, text := range []string{
		"CREATE DATABASE ways",
		"CREATE TABLE ways.p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB",
		"INSERT INTO ways.p VALUES (1, 0)",
	} {
		if _, err := admin.ExecContext(ctx, text); err != nil {
			return err
		}
	}
	for i, op := range operations {
		dir := filepath.Join(work, fmt.Sprint(bin.Name, i))
		calls, err := enter(ctx, server, op, dir)
		if err != nil {
			return fmt.Errorf("%s: %w", op.name, err)
		}
		functions, files, err := entered(ctx, dir)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%s\t%s\t%d\t%d\t%v\t\n", bin, op.name, functions, files, calls)
	}
	return nil
}

// enter does the operation often enough that all it looks for once is known, and then once,
// whose coverage it writes to dir. It returns the calls that lead to each command of that.
func enter(ctx context.Context, server *tempserver.Server, op operation, dir string) ([]int, error) {
	const warm = 50
	var sent commands
	db, err := sql.Open("mysqllock", strings.Replace(server.DSN("ways"), "tcp(", sent.network()+"(", 1)+"?"+op.params)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	for i := range warm + 1 {
		if i == warm {
			time.Sleep(100 * time.Millisecond) // what goes on in the background
			if err := coverage.ClearCounters(); err != nil {
				return nil, fmt.Errorf("build with -cover -covermode=atomic: %w", err)
			}
			sent.clear()
		}
		own, cancel := context.WithCancel(ctx)
		err := op.do(own, db)
		cancel()
		if err != nil {
			return nil, err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	return sent.calls, errors.Join(coverage.WriteMetaDir(dir), coverage.WriteCountersDir(dir))
}

// commands counts the calls of this module that lead to each command that is sent.
type commands struct {
	mu    sync.Mutex
	calls []int
}

func (c *commands) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = nil
}

// network returns the name of a network on which commands are counted.
func (c *commands) network() string {
	name := fmt.Sprintf("ways%p", c)
	mysql.RegisterDialContext(name, func(ctx context.Context, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		return counted{conn, c}, err
	})
	return name
}

type counted struct {
	net.Conn
	by *commands
}

func (c counted) Write(packet []byte) (int, error) {
	const module = "github.com/mysqllock/mysqllock"
	calls, at := 0, make([]uintptr, 100)
	for frames, more := runtime.CallersFrames(at[:runtime.Callers(1, at)]), true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if (strings.HasPrefix(f.Function, module+".") || strings.HasPrefix(f.Function, module+"/")) &&
			!strings.Contains(f.File, "/internal/ways/") {
			calls++
		}
	}
	c.by.mu.Lock()
	c.by.calls = append(c.by.calls, calls)
	c.by.mu.Unlock()
	return c.Conn.Write(packet)
}

// entered counts the functions and files of the driver that the coverage in dir shows.
func entered(ctx context.Context, dir string) (functions, files int, err error) {
	profile := filepath.Join(dir, "profile")
	if err := exec.CommandContext(ctx, "go", "tool", "covdata", "textfmt", "-i="+dir, "-o="+profile).Run(); err != nil {
		return 0, 0, fmt.Errorf("go tool covdata: %w", err)
	}
	text, err := exec.CommandContext(ctx, "go", "tool", "cover", "-func="+profile).Output()
	if err != nil {
		return 0, 0, fmt.Errorf("go tool cover: %w", err)
	}
	seen := map[string]bool{}
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line))
		at, _, isFile := strings.Cut(fields[0], ":")
		if !isFile || fields[len(fields)-1] == "0.0%" ||
			strings.Contains(at, "/internal/ways/") || strings.Contains(at, "/internal/tempserver/") {
			continue
		}
		if strings.HasSuffix(at, ".go") {
			functions++
			seen[at] = true
		}
	}
	return functions, len(seen), nil
}
