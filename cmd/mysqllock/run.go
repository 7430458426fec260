//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/lockctx"
)

// run is what the command of that name was asked for.
type run struct {
	at       *target
	key      string
	ttl      time.Duration
	hasTTL   bool // it was given
	wait     time.Duration
	hasWait  bool // it was given
	noWait   bool
	slots    int
	shared   bool
	minHold  time.Duration
	conflict int
	quiet    bool
}

func newRun(at *target) *cobra.Command {
	r := &run{at: at}
	var command []string
	c := &cobra.Command{
		Use:   "run [flags] KEY [flags] -- COMMAND [ARGUMENT...]",
		Short: "Run a command under a lock",
		Long: `run takes a lease on the key, runs the command, and gives the lease back when
the command has ended. Of all who use the key, on any machine, one runs at a time
(with --slots, so many). The lease is renewed as long as the command runs. It is
not bound to a connection: it outlives a restart of the server, or a cut of the
network, for half of its length.

The command has MYSQLLOCK_KEY in its environment, and in MYSQLLOCK_TOKEN a number
that grows with each grant of the key: a system that refuses numbers lower than
the highest it has seen is safe from a command that was left behind. With --slots
there is MYSQLLOCK_SLOT, too.

When the lease cannot be renewed in time the command is stopped: its process group
gets TERM, and KILL before the server can give the lease to somebody else. In
between is 7.5 % of the lease's length, and at most 3.75 s: with --ttl 30s that
is 2.25 s, less what mysqllock itself was held up for. A command that needs longer
to end in order needs a longer lease. On Linux that is also for what has left the
group, as timeout(1) does, with the variable MYSQLLOCK_RUN in its environment; what
has a session of its own (setsid, daemons) is spared. On other systems all that has
left the group is.

There are two cases in which the command can run beside the next holder. Where
somebody takes the lease away by force, it is stopped in the same way, but only at
the next renewal, up to a third of the lease's length later. Where the machine
pauses for longer than the lease, it goes on until mysqllock, too, has woken up and
killed it. That is what the token is for.

With --shared, any number of those who say so have the key at a time, and nobody
who does not. It is a lock of a connection, not a lease, and has no token: if the
connection is cut, others can have the key at once. The command gets KILL as soon as
mysqllock notices, which can be later.

The DSN's lockTTL and lockWait count where --ttl and --wait are not given. The
key is the first argument, or what --key says; --lease is the same as --ttl.

INT, TERM, HUP and QUIT go to the command's process group, USR1 and USR2 to the
command. One that has become another user cannot be signalled: call sudo mysqllock,
not mysqllock run -- sudo. What the command leaves running in the background goes
on when it has ended, without the lock.

If mysqllock is killed by KILL, so is the command, and the lease ends by itself.
While mysqllock is stopped the lease is not renewed: Ctrl-Z stops the command as
well, and fg continues it if the lease is still there, or else kills it. STOP that
is sent to mysqllock alone lets the command go on without the lock, until CONT comes.

Exit status: that of the command, 128+n if signal n has ended it, and

  123  the lock was lost, and the command was stopped
  124  the lock was not granted; --conflict-exit-code says another
  125  mysqllock has failed, for instance because it cannot reach the server
  126  the command cannot be run
  127  the command was not found
  128+n  signal n came while it waited for the lock`,
		Example: `  # crontab: on all machines, and on one of them it runs
  */5 * * * *  mysqllock run --key report --no-wait -qE 0 --min-hold 1m -- /usr/local/bin/report

  # one deployment at a time; the next waits for up to 10 minutes
  mysqllock run --key deploy --wait 10m -- make deploy

  # at most three imports at a time, on all machines together
  mysqllock run --key import --slots 3 -- ./import 'orders.csv'`,
		Args: func(c *cobra.Command, args []string) (err error) {
			r.key, command, err = keyAndCommand(c, args)
			return err
		},
		RunE: func(c *cobra.Command, _ []string) error {
			r.hasTTL, r.hasWait = c.Flags().Changed("lease") || c.Flags().Changed("ttl"), c.Flags().Changed("wait")
			return r.do(c.Context(), command)
		},
	}
	f := c.Flags()
	f.SetInterspersed(false) // what follows the command is its own
	f.StringVarP(&r.key, "key", "k", "", "`key` of the lock, 1 to 255 bytes, if it is not the first argument")
	f.DurationVar(&r.ttl, "lease", 30*time.Second, "")
	_ = f.MarkHidden("lease") // its name before
	f.DurationVar(&r.minHold, "min-hold", 0, "keep the key for so long after the command has ended, for jobs"+
		"\nthat are faster than clocks differ")
	r.flags(c)
	c.MarkFlagsMutuallyExclusive("ttl", "lease")
	c.MarkFlagsMutuallyExclusive("shared", "min-hold")
	return c
}

// flags are those of how to lock.
func (r *run) flags(c *cobra.Command) {
	f := c.Flags()
	f.DurationVar(&r.ttl, "ttl", 30*time.Second, "how long the lock outlives a holder that fell silent, 1s or more")
	f.DurationVarP(&r.wait, "wait", "w", 10*time.Second, "longest time to wait for the lock")
	f.BoolVarP(&r.noWait, "no-wait", "n", false, "do not wait")
	f.IntVar(&r.slots, "slots", 0, "let up to `n` hold the key at a time")
	f.BoolVar(&r.shared, "shared", false, "let all hold the key at a time that say so, and nobody else")
	f.IntVarP(&r.conflict, "conflict-exit-code", "E", exitNotAcquired, "exit `status` if the lock is not granted")
	f.BoolVarP(&r.quiet, "quiet", "q", false, "say nothing if the lock is not granted")
	c.MarkFlagsMutuallyExclusive("wait", "no-wait")
	c.MarkFlagsMutuallyExclusive("shared", "slots")
}

// check says what is wrong with the flags.
func (r *run) check() error {
	switch {
	case r.conflict < 0 || r.conflict > 255:
		return fmt.Errorf("--conflict-exit-code is %d, want 0 to 255", r.conflict)
	case r.ttl < time.Second:
		return fmt.Errorf("--ttl is %v, want 1s or more", r.ttl)
	case r.minHold < 0:
		return fmt.Errorf("--min-hold is %v, which is negative", r.minHold)
	}
	return nil
}

// keyAndCommand are what --key says, and the arguments; or else the first argument, and
// those behind the --, which then has to be there: a command is not taken for a key. Flags may also
// stand between the key and the --. It reads these, so it is called once.
func keyAndCommand(c *cobra.Command, args []string) (key string, command []string, err error) {
	const usage = "mysqllock run KEY [flags] -- COMMAND"
	dashes := slices.Index(args, "--") // flags end at the key, so this is left there
	switch {
	case c.Flags().Changed("key"):
		key, _ = c.Flags().GetString("key")
		command = args
	case len(args) == 0 || dashes == 0 || c.ArgsLenAtDash() == 0:
		return "", nil, errors.New("no key is given: " + usage)
	case dashes < 0:
		return "", nil, fmt.Errorf("-- is missing between the key %q and the command: %s", args[0], usage)
	default:
		key, command = args[0], args[dashes+1:]
		if err := c.Flags().Parse(args[1:dashes]); err != nil {
			return "", nil, err
		}
		switch left := c.Flags().Args(); {
		case len(left) > 0:
			return "", nil, fmt.Errorf("%q stands between the key %q and the --, before which there are only flags: %s", left[0], key, usage)
		case c.Flags().Changed("key"):
			return "", nil, fmt.Errorf("the key is given twice: as %q, and by --key", key)
		}
	}
	if len(command) == 0 {
		return "", nil, errors.New("no command is given: " + usage)
	}
	return key, command, nil
}

// Signals that go on to the command: those of ending also end the wait for the
// lock; in that time those of pausing do what they do by themselves.
var (
	ending  = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}
	pausing = []os.Signal{syscall.SIGTSTP, syscall.SIGCONT}
)

// listen has the signals go to the channel. Those that were ignored when we were
// started, as nohup does, stay ignored.
func listen(to chan<- os.Signal, signals []os.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(to, s)
		}
	}
}

func (r *run) do(ctx context.Context, args []string) error {
	path, err := exec.LookPath(args[0])
	switch {
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist):
		return &status{exitNotFound, fmt.Errorf("%s: command not found", args[0])}
	case err != nil:
		return &status{exitCannotRun, err}
	}
	if err := r.check(); err != nil {
		return err
	}
	// From here on signals are the command's, and end nothing but the wait.
	ctx = context.WithoutCancel(ctx)
	signals := make(chan os.Signal, 32)
	listen(signals, ending)
	defer signal.Stop(signals)

	db, err := r.open(path)
	if err != nil {
		return err
	}
	defer db.Close()
	hold, err := r.acquire(ctx, db, signals)
	if err != nil {
		return err
	}
	listen(signals, pausing)
	child, err := start(path, args, r.environment(hold))
	if err != nil {
		_ = hold.Rollback()
		return &status{exitCannotRun, fmt.Errorf("%s: %w", args[0], err)}
	}
	end, lost := r.attend(child, hold, signals, func() error { return stillOurs(hold, db) })
	err = hold.Release()
	switch {
	case errors.Is(err, mysqllock.ErrLost) && lost == nil:
		return &status{exitLost, fmt.Errorf("%w; the command had ended by then", ofLock(err))}
	case errors.Is(err, mysqllock.ErrLost): // it says why
		return &status{exitLost, fmt.Errorf("%w; the command was stopped", ofLock(err))}
	case lost != nil:
		return &status{exitLost, fmt.Errorf("%w; the command was stopped", lost)}
	case err != nil:
		complain(err) // the lease ends by itself
	}
	switch {
	case end.Signaled():
		_ = db.Close()
		child.echo(end.Signal())
		return &status{exitSignal + int(end.Signal()), nil}
	case end.ExitStatus() != 0:
		return &status{end.ExitStatus(), nil}
	}
	return nil
}

// ofLock is err as one of the lock, whatever it was that noticed the loss.
func ofLock(err error) error {
	var e *mysqllock.Error
	if !errors.As(err, &e) {
		return err
	}
	own := *e
	own.Op = "lock"
	return &own
}

// open opens a handle whose owner is named after the command, with our process
// id: it is us whom one can ask to stop.
func (r *run) open(path string) (*sql.DB, error) {
	return r.at.open(func(locks *mysqllock.Config) {
		if locks.TTL != 0 && !r.hasTTL {
			r.ttl = locks.TTL
		}
		if r.shared {
			locks.TTL = r.ttl
		}
		if locks.Owner == "" {
			locks.Owner = keyrow.OwnerOf(path)
		}
	})
}

func (r *run) options() []lockctx.Option {
	o := []lockctx.Option{lockctx.Lease(r.ttl)}
	if r.shared {
		o = []lockctx.Option{lockctx.Row(), lockctx.Shared()}
	}
	if r.hasWait {
		o = append(o, lockctx.Wait(r.wait))
	}
	if r.noWait {
		o = append(o, lockctx.NoWait())
	}
	if r.slots != 0 {
		o = append(o, lockctx.Slots(r.slots))
	}
	if r.minHold != 0 {
		o = append(o, lockctx.MinHold(r.minHold))
	}
	return o
}

// acquire takes the lease. A signal that would end the command ends the wait.
func (r *run) acquire(ctx context.Context, db *sql.DB, signals <-chan os.Signal) (*mysqllock.Hold, error) {
	ctx, cancel := context.WithCancel(ctx) // the hold's context comes from it
	acquired, over := make(chan struct{}), make(chan syscall.Signal, 1)
	go func() {
		defer close(over)
		select {
		case s := <-signals:
			over <- s.(syscall.Signal)
			cancel()
		case <-acquired:
		}
	}()
	notice := time.AfterFunc(time.Second, func() { r.sayWhoHasIt(ctx) })
	hold, err := mysqllock.Acquire(ctx, db, r.key, r.options()...)
	notice.Stop()
	close(acquired)
	if s, ended := <-over; ended {
		if err == nil {
			_ = hold.Rollback()
		}
		openTerminal().echo(os.Getpid(), s)
		return nil, &status{exitSignal + int(s), nil}
	}
	switch {
	case errors.Is(err, mysqllock.ErrLocked) && r.quiet:
		return nil, &status{r.conflict, nil}
	case errors.Is(err, mysqllock.ErrLocked):
		return nil, &status{r.conflict, err}
	case err != nil:
		cancel()
		return nil, err
	}
	return hold, nil
}

// sayWhoHasIt tells a person at the terminal for whom they wait.
func (r *run) sayWhoHasIt(ctx context.Context) {
	if r.quiet || !term.IsTerminal(int(os.Stderr.Fd())) {
		return
	}
	line := fmt.Sprintf("waiting for %q", r.key)
	_ = r.at.inspecting(ctx, func(ctx context.Context, i *inspect.Inspector) error {
		snap, err := i.Snapshot(ctx, inspect.Filter{Keys: []string{r.key}})
		if err != nil {
			return err
		}
		line += heldBy(snap)
		return nil
	})
	complain(errors.New(line))
}

// heldBy says who has the locks of a snapshot, or that it is not known.
func heldBy(snap *inspect.Snapshot) string {
	var holders, kept []string
	unknown := snap.Held().Known().IsZero()
	for _, lock := range snap.Locks {
		for _, h := range lock.Holders.List {
			switch {
			case h.Left:
				kept = append(kept, keptUntil(snap, lock))
			case h.Client != inspect.Client{}:
				holders = append(holders, party(h.Client))
			default:
				unknown = true
			}
		}
	}
	switch {
	case len(holders) > 0:
		return ", held by " + strings.Join(holders, ", ")
	case len(kept) > 0:
		return ", " + strings.Join(kept, ", ")
	case unknown:
		return "; who holds it is not known"
	}
	return ""
}

const slotVariable, tokenVariable = "MYSQLLOCK_SLOT", "MYSQLLOCK_TOKEN"

func (r *run) environment(hold *mysqllock.Hold) []string {
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { // of a run around this one
		return strings.HasPrefix(s, slotVariable+"=") || strings.HasPrefix(s, tokenVariable+"=")
	})
	env = append(env, "MYSQLLOCK_KEY="+r.key)
	if !r.shared {
		env = append(env, tokenVariable+"="+strconv.FormatUint(hold.Token(), 10))
	}
	if slot, ok := mysqllock.Slot(hold.Context()); ok {
		env = append(env, slotVariable+"="+strconv.Itoa(slot))
	}
	return env
}

// stillOurs asks the server whether the lease is ours: a commit under it does.
func stillOurs(hold *mysqllock.Hold, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(hold.Context(), 5*time.Second)
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	return tx.Commit()
}

// grace is how long the command has between TERM and KILL, where the lease can be
// somebody else's at the time expiry. The holder's context ends a tenth of the TTL,
// and at most 5 s, before that; a quarter of it is kept for KILL to take effect.
// Where the end was noticed late, less is left for the command, or nothing: nor is there for a
// lock without an expiry, the zero time, which others can have at once.
func grace(ttl time.Duration, expiry time.Time) time.Duration {
	margin := min(ttl/10, 5*time.Second)
	return max(0, min(margin*3/4, time.Until(expiry.Add(-margin/4))))
}

// attend passes signals on to the command until it has ended, and stops it when
// the lease is lost, which is the error. confirm asks whether it is not.
func (r *run) attend(c *child, hold *mysqllock.Hold, signals <-chan os.Signal, confirm func() error) (end syscall.WaitStatus, lost error) {
	gone := hold.Context().Done()
	for {
		select {
		case <-gone:
			gone, lost = nil, context.Cause(hold.Context())
			c.stop(grace(r.ttl, hold.Expiry()))
		case s := <-signals:
			c.pass(s.(syscall.Signal))
		case s := <-c.stopped:
			if !c.suspend(s, signals) {
				continue
			}
			if lost == nil {
				lost = confirm()
			}
			if lost == nil {
				c.resume()
				continue
			}
			gone = nil
			c.kill() // without a word: by now somebody else can have the lock
		case end = <-c.ended:
			c.bury()
			return end, lost
		}
	}
}
