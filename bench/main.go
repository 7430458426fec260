// Command bench measures mysqllock against what its users would pick instead:
// redsync and redislock on Redis, etcd's concurrency.Mutex, GET_LOCK on a pinned
// connection, SELECT … FOR UPDATE, and a row that is inserted and deleted.
//
//	make bench
//
// It starts private servers of what is installed, has all contenders take turns
// in one run, and writes docs/performance.md and the figures behind it.
// BENCH_TIME, such as 1h, makes it run for longer than its 25 minutes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// usual is about how long a run takes without BENCH_TIME.
const usual = 25 * time.Minute

func main() {
	if isChild, err := runChild(os.Args[1:]); isChild {
		exit(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(run(ctx, os.Args[1:]))
}

func exit(err error) {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runChild is what this program does as a process of the benchmark.
func runChild(args []string) (isChild bool, err error) {
	switch {
	case len(args) == 1 && args[0] == asProcess:
		return true, serve(os.Stdin, os.Stdout)
	case len(args) > 1 && args[0] == asProxy:
		return true, serveProxy(args[1:], os.Stdin, os.Stdout)
	}
	return false, nil
}

func run(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	out := flags.String("out", "../docs", "the `folder` that performance.md goes to")
	only := flags.String("only", "", "the workloads to run, by a regular `expression`, with their goals on the standard output and no page")
	if err := flags.Parse(args); err != nil {
		return err
	}
	scale := 1.0
	if text := os.Getenv("BENCH_TIME"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("BENCH_TIME: %w", err)
		}
		scale = d.Seconds() / usual.Seconds()
	}
	chosen, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	r, err := measure(ctx, os.Stderr, scale, chosen, false, []time.Duration{500 * time.Microsecond, 2 * time.Millisecond})
	if err != nil {
		return err
	}
	if *only != "" {
		for _, o := range r.goals() {
			fmt.Println(strings.TrimSuffix(fmt.Sprintf("%s, %s: %s (%s); %s", o.What, o.Server, number(o.Got), o.aim(), o.Why), "; "))
		}
		return nil
	}
	return r.write(*out)
}

// measure starts the servers, runs everything, and stops them again.
func measure(ctx context.Context, log io.Writer, scale float64, only *regexp.Regexp, short bool, delays []time.Duration) (r *record, err error) {
	before := load()
	for waits := 0; !short && waits < 24 && busyMachine(before, runtime.NumCPU()); waits++ {
		select {
		case <-time.After(5 * time.Second): // the compiler's work counts for a while
			before = load()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	all, missing, err := startServers(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, all.stop()) }()
	if len(missing) > 0 {
		fmt.Fprintf(log, "not installed, so not compared: %s\n", strings.Join(missing, ", "))
	}
	r = newRecord(all, missing, before)
	for _, delay := range delays {
		x, err := examineProxy(delay)
		if err != nil {
			return nil, err
		}
		r.Proxies = append(r.Proxies, x)
	}
	b := &bench{ctx: ctx, servers: all, at: all.addresses(), scale: scale, only: only, short: short, results: &r.results, log: log}
	if err := b.all(delays); err != nil {
		return nil, err
	}
	r.finish()
	return r, nil
}
