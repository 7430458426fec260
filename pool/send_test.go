package pool

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// TestTheWayDecidesTheForm: a connection to a server that is near gets two statements one by one, and three as one text. One slow answer among
// quick ones is not taken for a long way, and several are.
func TestTheWayDecidesTheForm(t *testing.T) {
	p := New(Config{Max: 1})
	defer p.Close()
	for i, step := range []struct {
		trip time.Duration
		far  bool
	}{
		{server.Near / 2, false},
		{time.Second, false},
		{server.Near / 4, false},
		{time.Second, false},
		{time.Second, false},
		{time.Second, true},
		{server.Near / 3, false},
	} {
		p.noteTrip(step.trip)
		takes, not := &Conn{pool: p, several: true}, &Conn{pool: p}
		if takes.Packs(1) || takes.Packs(2) != step.far || !takes.Packs(3) || not.Packs(3) {
			t.Errorf("step %d: after %v it is %v", i, step.trip, time.Duration(p.trip.Load()))
		}
	}
}
