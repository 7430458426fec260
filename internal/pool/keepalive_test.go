package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"
	"time"
)

// pinging is a connection whose pings say what ping does.
type pinging struct {
	driver.Conn
	ping func(context.Context) error
}

func (p pinging) Ping(ctx context.Context) error { return p.ping(ctx) }

func (p pinging) Close() error { return nil }

// TestAPingThatIsNotAnsweredDelaysNoOther: who keeps another connection is told of its loss all the same.
func TestAPingThatIsNotAnsweredDelaysNoOther(t *testing.T) {
	k := NewKeepAlive(time.Minute, 300*time.Millisecond)
	defer k.Close()
	asked, lost := make(chan struct{}), make(chan error, 1)
	silent := Adopt(pinging{ping: func(ctx context.Context) error {
		close(asked)
		<-ctx.Done()
		return ctx.Err()
	}})
	k.Keep(silent, func(error) {})
	<-asked
	k.Keep(Adopt(pinging{ping: func(context.Context) error { return errors.New("gone") }}), func(err error) { lost <- err })
	select {
	case <-lost:
	case <-time.After(10 * time.Second): // a ping may take 20
		t.Fatal("the loss was told late")
	}
}
