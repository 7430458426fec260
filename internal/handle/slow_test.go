package handle

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestACallerIsNotBlamedForItsOwnWait: whoever is asked for the holder may answer when the
// caller has just been granted the lock, and name the caller itself.
func TestACallerIsNotBlamedForItsOwnWait(t *testing.T) {
	conn := pool.Adopt(nil)
	dbtest.OK(t, conn.SetID("7"))
	mine, others := new(queue.Ticket), new(queue.Ticket)
	here := lockerr.Holder{ConnectionID: 7, ThisProcess: true, Held: time.Second}
	for what, c := range map[string]struct {
		holder lockerr.Holder
		keeper *queue.Ticket
		itself bool
	}{
		"another process":          {lockerr.Holder{ConnectionID: 8}, nil, false},
		"a lease of another":       {lockerr.Holder{Program: "them"}, nil, false},
		"our connection":           {lockerr.Holder{ConnectionID: 7}, nil, true},
		"another in our queue":     {lockerr.Holder{ThisProcess: true, Held: time.Second}, others, false},
		"who left us its session":  {here, others, false},
		"ourselves in our queue":   {lockerr.Holder{ThisProcess: true}, mine, true},
		"ourselves, by the server": {here, mine, true},
	} {
		o := &Observation{slow: time.NewTimer(time.Hour)}
		o.blame(&c.holder, c.keeper, time.Hour)
		o.takenBy(conn, mine)
		if h := o.blamed(nil); (h == nil) != c.itself {
			t.Errorf("%s: %v is told", what, h)
		}
	}
}
