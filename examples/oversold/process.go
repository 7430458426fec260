package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
)

// asBuyers, as the first argument, makes this program one of the processes
// that buyers run in. The other arguments are the way, DSN, the process's name
// and the number of buyers.
const asBuyers = "buyers"

// rush lets buyers loose on the shop in several processes at once.
func rush(ctx context.Context, how way, dsn string, processes, buyers int) (tally, error) {
	self, err := os.Executable()
	if err != nil {
		return tally{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends those that are left where one could not start
	children := make([]*child, processes)
	for i := range children {
		cmd := exec.CommandContext(ctx, self, asBuyers, string(how), dsn, strconv.Itoa(i+1), strconv.Itoa(buyers))
		if children[i], err = start(cmd); err != nil {
			return tally{}, err
		}
	}
	// The first buyer would buy alone: the doors open for all at once.
	for _, c := range children {
		if err := c.ready(); err != nil {
			return tally{}, err
		}
	}
	var (
		total tally
		errs  []error
		mu    sync.Mutex
		wg    sync.WaitGroup
	)
	for _, c := range children {
		wg.Go(func() {
			t, err := c.shop()
			mu.Lock()
			defer mu.Unlock()
			total.add(t)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	return total, errors.Join(errs...)
}

// child is a process of buyers, seen from outside. It says "true" when it is
// ready, is told to go by the end of its standard input, and ends by saying
// what it went through.
type child struct {
	cmd *exec.Cmd
	in  io.Closer
	out *json.Decoder
}

func start(cmd *exec.Cmd) (*child, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &child{cmd, in, json.NewDecoder(out)}, cmd.Start()
}

func (c *child) ready() error {
	var ready bool
	if err := c.out.Decode(&ready); err != nil {
		return fmt.Errorf("a process of buyers did not start: %w", errors.Join(err, c.cmd.Wait()))
	}
	return nil
}

func (c *child) shop() (t tally, err error) {
	if err := c.in.Close(); err != nil {
		return t, err
	}
	if err := c.out.Decode(&t); err != nil {
		return t, fmt.Errorf("a process of buyers went silent: %w", errors.Join(err, c.cmd.Wait()))
	}
	return t, c.cmd.Wait()
}

// runBuyers is what a process of buyers does.
func runBuyers(ctx context.Context, args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("want 4 arguments, got %d", len(args))
	}
	how, dsn, process := way(args[0]), args[1], args[2]
	buyers, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	db, err := openShop(how.driver(), dsn)
	if err != nil {
		return err
	}
	pool, err := db.DB()
	if err != nil {
		return err
	}
	defer pool.Close()
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(true); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return out.Encode(shopping(ctx, db, how, process, buyers))
}
