package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock"
)

// asProcess, as the first argument, makes this program one of the processes that
// contend. It obeys orders from its standard input, one after another, until that
// ends.
const asProcess = "process"

// order is what a process is told to do with a contender.
type order struct {
	Do        string // open, load, take, give, touch, hold, free or close
	Contender string
	At        addresses // open
	Size      size      // open

	Key      string // load, take, touch, hold
	Workers  int    // load, touch, hold
	Own      bool   // load: each goroutine has a key of its own
	Begin    time.Time
	Lasting  time.Duration // load
	Patience time.Duration // load
	Times    int           // load: how often each goroutine takes it; 0 is as often as it can
	Beside   time.Duration // load: how often a ping and a read are begun beside it; 0 is never
	Locks    int           // hold
}

// report is what came of an order.
type report struct {
	Err string

	// Of a load: what was granted before its end, then all grants, also those of
	// callers that were waiting at its end.
	Grants, All   int
	Busy          time.Duration // of all, from asking to having given back
	Wait, Longest time.Duration // the sum, and the longest, of all, and of those who gave up
	Waits         int           // how many that is the sum of
	Late          time.Duration // 99 of 100 waited for less
	Starved       int           // goroutines that got nothing before the end
	GaveUp        int           // calls that did not wait until they had it
	Allocations   float64       // for each grant
	Beside        timed

	waits []float64 // of one goroutine that had them all, in ns

	Taken time.Time // take: when the lock was granted; give: before it was given back

	Lasted      time.Duration // load, hold, free
	Memory      int64         // hold: more than before the contender was opened
	Connections int           // hold: the same
}

// process is one of those that contend, seen from outside.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	to  *json.Encoder
	out *json.Decoder
}

func startProcess() (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, asProcess)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{cmd, in, json.NewEncoder(in), json.NewDecoder(out)}, cmd.Start()
}

func (p *process) tell(o order) error { return p.to.Encode(o) }

func (p *process) hear() (r report, err error) {
	if err = p.out.Decode(&r); err == nil && r.Err != "" {
		err = errors.New(r.Err)
	}
	return r, err
}

func (p *process) ask(o order) (report, error) {
	if err := p.tell(o); err != nil {
		return report{}, err
	}
	return p.hear()
}

// end closes what is open in the process, and waits for its end.
func (p *process) end() error {
	p.in.Close()
	return p.cmd.Wait()
}

// serve is what a process does.
func serve(in io.Reader, out io.Writer) error {
	// As the contexts of applications it can end; it does not before we do.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	open := make(map[string]*stand)
	defer func() {
		for _, s := range open {
			s.client.Close()
		}
	}()
	orders, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		r, err := obey(ctx, open, o)
		if err != nil {
			r.Err = fmt.Sprintf("%s: %s: %v", o.Contender, o.Do, err)
		}
		if err := reports.Encode(r); err != nil {
			return err
		}
	}
}

// stand is a contender that is open in this process.
type stand struct {
	client      client
	memory      int64 // before it was opened
	connections int

	release func() error   // after take
	held    []func() error // after hold
}

func obey(ctx context.Context, open map[string]*stand, o order) (r report, err error) {
	if o.Do == "open" {
		c, err := find(o.Contender)
		if err != nil {
			return r, err
		}
		s := &stand{memory: memory(), connections: connections()}
		if s.client, err = c.open(ctx, o.At, o.Size); err == nil {
			open[o.Contender] = s
		}
		return r, err
	}
	s := open[o.Contender]
	switch o.Do {
	case "load":
		return s.load(ctx, o)
	case "take":
		s.release, err = s.client.Lock(ctx, 0, o.Key)
		return report{Taken: time.Now()}, err
	case "give":
		r.Taken = time.Now()
		return r, s.release()
	case "touch":
		return r, s.touch(ctx, o)
	case "hold":
		return s.hold(ctx, o)
	case "free":
		return s.free(o)
	case "close":
		delete(open, o.Contender)
		return r, s.client.Close()
	}
	return r, errors.New("no such order")
}

// load has goroutines take locks and give them back for a while.
func (s *stand) load(ctx context.Context, o order) (r report, err error) {
	var (
		all    sync.WaitGroup
		mu     sync.Mutex
		inside atomic.Int32
		waits  []float64 // in ns
		beside timed
	)
	time.Sleep(time.Until(o.Begin))
	before := allocations()
	end := time.Now().Add(o.Lasting)
	ctx, cancel := context.WithDeadline(ctx, end.Add(o.Patience))
	defer cancel()
	for worker := range o.Workers {
		all.Go(func() {
			lock := func() (func() error, error) { return s.lockAlone(ctx, worker, o.Key, &inside) }
			if o.Own {
				lock = func() (func() error, error) { return s.client.Lock(ctx, worker, fmt.Sprintf("%s-%d", o.Key, worker)) }
			}
			var own report
			err := own.lockUntil(ctx, end, o.Times, lock)
			if own.Grants == 0 {
				own.Starved = 1
			}
			mu.Lock()
			defer mu.Unlock()
			r.add(own)
			waits = append(waits, own.waits...)
			if err != nil && r.Err == "" {
				r.Err = err.Error()
			}
		})
	}
	if w, ok := s.client.(*work); ok && o.Beside > 0 {
		beside, err = w.beside.begin(ctx, o.Beside, end)
	}
	all.Wait()
	r.Beside = beside
	r.Lasted = time.Since(o.Begin)
	r.Late = time.Duration(quantile(waits, 0.99))
	r.Allocations = float64(allocations()-before) / float64(max(1, r.All))
	if r.Err != "" {
		err = errors.New(r.Err)
	}
	return r, err
}

// lockAlone locks the key, and fails if another one is inside.
func (s *stand) lockAlone(ctx context.Context, worker int, key string, inside *atomic.Int32) (func() error, error) {
	release, err := s.client.Lock(ctx, worker, key)
	if _, over := s.client.(*work); err != nil || over { // it has given the lock back already
		return release, err
	}
	if inside.Add(1) != 1 {
		return nil, errors.Join(errors.New("two have the lock"), release())
	}
	return func() error { inside.Add(-1); return release() }, nil
}

func (r *report) lockUntil(ctx context.Context, end time.Time, times int, lock func() (func() error, error)) error {
	for start := time.Now(); start.Before(end) && (times == 0 || r.All < times); {
		release, err := lock()
		if errors.Is(err, mysqllock.ErrTimeout) { // lockWait is longer than a round: its turn would not come before the end of this one
			<-ctx.Done()
		}
		if ctx.Err() != nil {
			r.Wait += time.Since(start)
			r.Waits++
			r.Longest = max(r.Longest, time.Since(start))
			if err == nil {
				_ = release() // a transaction is rolled back already
			}
			return nil
		}
		if errors.Is(err, errGaveUp) {
			r.GaveUp++
			start = time.Now()
			continue
		}
		if err != nil {
			return err
		}
		granted := time.Now()
		if err := release(); err != nil && ctx.Err() == nil {
			return err
		}
		over := time.Now()
		if granted.Before(end) {
			r.Grants++
		}
		r.All++
		r.Busy += over.Sub(start)
		r.Wait += granted.Sub(start)
		r.Waits++
		r.Longest = max(r.Longest, granted.Sub(start))
		r.waits = append(r.waits, float64(granted.Sub(start)))
		start = over
	}
	return nil
}

// add adds up what several goroutines, or processes, have done.
func (r *report) add(o report) {
	r.Grants += o.Grants
	r.All += o.All
	r.Busy += o.Busy
	r.Wait += o.Wait
	r.Waits += o.Waits
	r.Longest = max(r.Longest, o.Longest)
	r.Starved += o.Starved
	r.GaveUp += o.GaveUp
	r.Beside.Pings = append(r.Beside.Pings, o.Beside.Pings...)
	r.Beside.Reads = append(r.Beside.Reads, o.Beside.Reads...)
}

// touch takes many locks and gives each back at once.
func (s *stand) touch(ctx context.Context, o order) error {
	return share(o.Workers, o.Locks, func(worker, i int) error {
		release, err := s.client.Lock(ctx, worker, fmt.Sprintf("%s-%d", o.Key, i))
		if err != nil {
			return err
		}
		return release()
	})
}

// hold takes many locks and keeps them.
func (s *stand) hold(ctx context.Context, o order) (r report, err error) {
	s.held = make([]func() error, o.Locks)
	start := time.Now()
	err = share(o.Workers, o.Locks, func(worker, i int) (err error) {
		s.held[i], err = s.client.Lock(ctx, worker, fmt.Sprintf("%s-%d", o.Key, i))
		return err
	})
	r.Lasted = time.Since(start)
	r.Memory, r.Connections = memory()-s.memory, connections()-s.connections
	return r, err
}

func (s *stand) free(o order) (r report, err error) {
	start := time.Now()
	err = share(o.Workers, len(s.held), func(_, i int) error { return s.held[i]() })
	s.held = nil
	return report{Lasted: time.Since(start)}, err
}

// share has goroutines do n pieces of work.
func share(workers, n int, do func(worker, i int) error) error {
	var (
		all  sync.WaitGroup
		next atomic.Int64
		errs = make([]error, workers)
	)
	for worker := range workers {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && errs[worker] == nil; i = next.Add(1) - 1 {
				errs[worker] = do(worker, int(i))
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func allocations() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}

// memory is what is in use of heap and stacks.
func memory() int64 {
	runtime.GC()
	runtime.GC() // what finalizers and pools had kept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// connections counts this process's sockets; 0 where the system does not tell.
func connections() (n int) {
	files, _ := os.ReadDir("/proc/self/fd")
	for _, f := range files {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}
