package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"
)

// asProxy, as the first argument, makes this program a proxy that delays what
// passes it, each way. The other arguments are the delay and what to call. It
// says where it listens, and ends with its standard input. It is a process of its
// own, so that what it does is not on the account of those who are measured.
const asProxy = "proxy"

// proxy is one of those processes, seen from outside.
type proxy struct {
	cmd *exec.Cmd
	in  io.Closer
	at  addresses
}

// startProxy starts a proxy that is as far from all of these servers.
func startProxy(delay time.Duration, to addresses) (*proxy, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	target, err := json.Marshal(to)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, asProxy, delay.String(), string(target))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &proxy{cmd: cmd, in: in}
	if err := json.NewDecoder(out).Decode(&p.at); err != nil {
		return nil, errors.Join(fmt.Errorf("the proxy did not start: %w", err), p.end())
	}
	return p, nil
}

func (p *proxy) end() error {
	p.in.Close()
	return p.cmd.Wait()
}

// serveProxy is what a proxy does.
func serveProxy(args []string, in io.Reader, out io.Writer) error {
	if len(args) != 2 {
		return errors.New("want a delay and addresses")
	}
	delay, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	var to addresses
	if err := json.Unmarshal([]byte(args[1]), &to); err != nil {
		return err
	}
	at := make(addresses)
	for name, target := range to {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		at[name] = l.Addr().String()
		go forward(l, target, delay)
	}
	if err := json.NewEncoder(out).Encode(at); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, in)
	return err
}

// forward ends with the process, as all of the proxy does.
func forward(l net.Listener, target string, delay time.Duration) {
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			far, err := net.Dial("tcp", target)
			if err != nil {
				near.Close()
				return
			}
			var both sync.WaitGroup
			both.Go(func() { late(far, near, delay) })
			both.Go(func() { late(near, far, delay) })
			both.Wait()
		}()
	}
}

// chunk is something that was read, and when it is to be written.
type chunk struct {
	data []byte
	due  time.Time
}

// late copies all that is read, each piece so much later, the end included. What
// is on its way is bounded by its number of pieces only, far beyond what a
// connection carries within the delay, so that throughput is what it is without.
func late(to, from net.Conn, delay time.Duration) {
	defer to.Close()
	wait, stop, err := newAlarm()
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		from.Close()
		return
	}
	defer stop()
	way := make(chan chunk, 4096)
	go func() {
		defer close(way)
		buffer := make([]byte, 64<<10)
		for {
			n, err := from.Read(buffer)
			due := time.Now().Add(delay)
			if n > 0 {
				way <- chunk{append([]byte(nil), buffer[:n]...), due}
			}
			if err != nil {
				way <- chunk{due: due}
				return
			}
		}
	}()
	var broken error
	for c := range way {
		if broken == nil {
			wait(time.Until(c.due))
			if _, broken = to.Write(c.data); broken != nil {
				from.Close()
			}
		}
	}
}
