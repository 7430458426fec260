package pool

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/socket"
	"github.com/mysqllock/mysqllock/lockerr"
)

// AnswerTime is how long a server has to open a connection, and to answer a statement that waits for nobody.
//
// If the server has no connection left, a pool of a budget asks again for so long, with fullPause between. The server counts a
// connection for a while after the pool has closed it, longer if the server is busy. The pool may open the next connection
// before that while is over.
const AnswerTime, fullPause = 10 * time.Second, 20 * time.Millisecond

// connectWithin is connect for a caller that may have a patience.
func (p *Pool) connectWithin(ctx context.Context, as As) (*Conn, error) {
	if as.Patience == 0 {
		return p.connect(ctx, as)
	}
	own, cancel := server.Within(ctx, max(as.Patience, AnswerTime))
	defer cancel()
	return p.connect(own, as)
}

// connect opens a connection with a permit that the caller has. When ctx ends, the opening goes on for the next caller: otherwise callers
// in a hurry would open connections over and over.
func (p *Pool) connect(ctx context.Context, as As) (*Conn, error) {
	b := p.budget
	b.mu.Lock()
	p.opening++
	if p.cfg.Idle > 0 && !p.sweeps && !p.closed {
		p.sweeps = true
		p.swept.Go(p.sweep)
	}
	b.mu.Unlock()
	start := time.Now()
	type result struct {
		c   *Conn
		err error
	}
	done, gone := make(chan result, 1), false // gone is guarded by b.mu
	go func() {
		own, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(p.ctx, cancel)()
		c, err := p.open(own)
		b.mu.Lock()
		p.opening--
		switch {
		case err != nil:
			if !gone {
				p.uncount(as)
			}
			p.dropPermit()
			b.serve()
		case gone:
			b.mu.Unlock()
			p.put(c)
			return
		default:
			_ = c.AwaitTurn(context.Background()) // it is free
		}
		done <- result{c, err}
		b.mu.Unlock()
	}()
	select {
	case res := <-done:
		b.mu.Lock()
		p.waitTime += time.Since(start)
		b.mu.Unlock()
		if res.err != nil && p.ctx.Err() != nil {
			res.err = lockerr.ErrClosed
		}
		return res.c, res.err
	case <-ctx.Done():
	case <-p.ctx.Done():
	}
	b.mu.Lock()
	select {
	case res := <-done: // the connection was opened at the same moment
		b.mu.Unlock()
		if res.err == nil {
			res.c.blocks.Store(as.rank() == blocking)
			res.c.beside = as.Beside
			res.c.Release()
		}
	default:
		gone = true
		p.uncount(as)
		b.serve()
		b.mu.Unlock()
	}
	if err := p.stopped(ctx); err != nil {
		return nil, err
	}
	return nil, notOpened(context.Cause(ctx))
}

// open opens a connection and sets it up. If that fails, it tries again as often as database/sql does.
func (p *Pool) open(ctx context.Context) (*Conn, error) {
	began := time.Now()
	for tries := 1; ; tries++ {
		sockets := socket.NewGroup(p.budget.killer)
		c, err := p.openInTime(sockets.With(ctx))
		if err == nil {
			c.sockets = sockets
			return c, nil
		}
		sockets.Wait()
		full := p.bounded && server.Full(err) && time.Since(began) < AnswerTime
		// Idle: this program has not run for longer than Setup lets the connection be idle.
		broken := !p.cfg.Bare && (server.Broken(err) || server.Idle(err)) && tries < 3
		if ctx.Err() != nil || !full && !broken {
			return nil, err
		}
		if full {
			select {
			case <-time.After(fullPause):
			case <-ctx.Done():
			}
		}
	}
}

// openInTime opens a connection within AnswerTime. A server that accepts a connection and never answers must not keep the permit for
// ever, and the DSN may set no timeout.
func (p *Pool) openInTime(ctx context.Context) (*Conn, error) {
	own, cancel := server.Within(ctx, AnswerTime)
	defer cancel()
	c, err := p.openOnce(purpose.Unattributed(own))
	switch {
	case err == nil || own.Err() == nil || ctx.Err() != nil:
	case errors.As(err, new(notSetUp)):
		err = lockerr.With(lockerr.ErrNoAnswer, fmt.Errorf("it has opened a connection, and not answered there within %v", AnswerTime))
	default:
		err = notOpened(context.Cause(own))
	}
	return c, err
}

// openOnce opens a connection, and sets it up unless the pool is bare.
func (p *Pool) openOnce(ctx context.Context) (*Conn, error) {
	conn, err := p.dial(ctx)
	switch {
	case err != nil && p.cfg.Bare:
		return nil, err
	case err != nil:
		return nil, ExplainFull(err)
	}
	c := newConn(conn, p)
	if p.cfg.Bare {
		return c, nil
	}
	if err := p.setUp(ctx, c); err != nil {
		basedriver.Close(conn)
		return nil, notSetUp{err}
	}
	return c, nil
}

// notSetUp is the error of a connection that was opened, and not set up.
type notSetUp struct{ error }

func (n notSetUp) Unwrap() error { return n.error }

// dial opens a connection by the base driver.
func (p *Pool) dial(ctx context.Context) (conn driver.Conn, err error) {
	defer basedriver.Catch(nil, &err)
	return p.cfg.Connect(ctx)
}

// setUp makes a new connection one for locks. It fails if the pool's configuration refuses the connection.
func (p *Pool) setUp(ctx context.Context, c *Conn) error {
	cfg := &p.cfg
	if cfg.BeforeSetup != nil {
		if err := cfg.BeforeSetup(ctx, c.Conn); err != nil {
			return err
		}
	}
	setup, ask := cfg.Setup, ""
	if cfg.SetupInstead != nil {
		setup = cmp.Or(cfg.SetupInstead(), setup)
	}
	var found Found
	err := server.Exec(ctx, c.Conn, setup)
	if err == nil {
		if cfg.Ask != nil {
			ask = cfg.Ask()
		}
		found, err = c.identify(ctx, ask)
	}
	if err == nil && cfg.Check != nil {
		err = cfg.Check(found)
	}
	if err == nil && cfg.Several != nil {
		c.several, err = cfg.Several(ctx, c)
	}
	if err != nil {
		return fmt.Errorf("setting up a connection for locks: %w", err)
	}
	return nil
}

// ExplainFull adds what to do to the error of a server that takes no more connections. It returns other errors as they are.
func ExplainFull(err error) error {
	if !server.Full(err) {
		return err
	}
	return fmt.Errorf("%w; locks need connections of their own: allow more on the server (max_connections,"+
		" max_user_connections), or fewer in this program (maxConns, or lockMaxConns and SetMaxOpenConns)", err)
}

// notOpened returns the error of a caller for which no connection was opened in time.
func notOpened(why error) error {
	if silence := (server.Silence{}); errors.As(why, &silence) {
		return lockerr.With(lockerr.ErrNoAnswer, fmt.Errorf("it has not opened a connection within %v", silence.For.Round(time.Millisecond)))
	}
	return lockerr.With(lockerr.ErrNoAnswer, fmt.Errorf("it has not opened a connection: %w", why))
}
