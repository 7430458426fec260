package main

import (
	"errors"
	"io"
	"net"
	"slices"
	"time"
)

// proxyCheck is what a proxy really adds.
type proxyCheck struct {
	Delay       time.Duration // wanted, each way
	Added       time.Duration // to a round trip: the difference of the medians
	Added95     time.Duration // the difference of the 95th percentiles
	DirectMiBps float64       // throughput of one connection
	MiBps       float64       // the same through the proxy
}

// examineProxy compares a proxy with no proxy, before a server that sends back
// what it gets.
func examineProxy(delay time.Duration) (x proxyCheck, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return x, err
	}
	defer l.Close()
	go echo(l)
	p, err := startProxy(delay, addresses{"echo": l.Addr().String()})
	if err != nil {
		return x, err
	}
	defer func() { err = errors.Join(err, p.end()) }()

	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return x, err
	}
	defer near.Close()
	far, err := net.Dial("tcp", p.at["echo"])
	if err != nil {
		return x, err
	}
	defer far.Close()

	const rounds = 200
	var times [2][]float64
	for range rounds {
		for i, c := range []net.Conn{near, far} {
			took, err := there(c, 100)
			if err != nil {
				return x, err
			}
			times[i] = append(times[i], float64(took))
		}
	}
	x.Delay = delay
	x.Added = time.Duration(quantile(times[1], 0.5) - quantile(times[0], 0.5))
	x.Added95 = time.Duration(quantile(times[1], 0.95) - quantile(times[0], 0.95))
	const mib = 32
	for i, c := range []net.Conn{near, far} {
		took, err := there(c, mib<<20)
		if err != nil {
			return x, err
		}
		*[]*float64{&x.DirectMiBps, &x.MiBps}[i] = mib / took.Seconds()
	}
	return x, nil
}

func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(struct{ io.Writer }{c}, c) // ends with the connection; Copy is not to splice
		}()
	}
}

// there sends so many bytes and reads them back.
func there(c net.Conn, bytes int) (time.Duration, error) {
	start := time.Now()
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, bytes))
		sent <- err
	}()
	_, err := io.CopyN(io.Discard, c, int64(bytes))
	return time.Since(start), errors.Join(err, <-sent)
}

// sortedKeys are the keys of a map, in order.
func sortedKeys[V any](m map[string]V) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
