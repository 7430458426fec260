package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// CleanUp says what [Inspector.Clean] removes.
type CleanUp struct {
	Unused   time.Duration // remove a row after its key was unused for so long
	Limit    int           // the most rows to remove; 0 is no limit
	Progress func(Cleaned) // called about once a second; may be nil
}

// Cleaned is what a clean-up has done.
type Cleaned struct {
	Looked  int  // rows that it has looked at
	Removed int  // rows that it has removed
	Left    int  // rows that it would have removed, if they had not been in use
	Done    bool // it has looked at all rows; false at its limit, and after an error
}

const (
	cleanTurn  = callBound / 3           // how long one connection is used
	cleanTries = 10                      // how many connections in a row may be lost
	cleanPause = 300 * time.Millisecond  // before the next try
	cleanTell  = 1000 * time.Millisecond // between two calls of Progress
)

// Clean removes old rows from the lock table, in all namespaces: rows that were made, or
// had a lease, longer than o.Unused ago. Tokens never go back. Clean goes through the
// table once, a few thousand rows at a time. If this program vanishes, the server soon
// ends the connection.
//
// Clean can run at any time, also several times at once. It leaves locked rows. It locks
// rows for moments only; a caller that wants one of them waits meanwhile, even with
// [lockctx.NoWait], which is refused on TiDB. It needs SELECT, UPDATE and DELETE on the table, and
// MySQL, MariaDB 10.6 or TiDB.
//
// The error matches lockerr.ErrLocked if other programs made new rows without a pause, so
// that Clean could not go on. Rows that it reports as removed are removed, also after an
// error.
func (i *Inspector) Clean(ctx context.Context, o CleanUp) (Cleaned, error) {
	c := &cleaning{o: o, told: time.Now()}
	for {
		err := i.on(ctx, c.turn)
		switch {
		case err == nil && c.over():
			return c.done, nil
		case err != nil && !c.tryAgain(ctx, err):
			return c.done, fmt.Errorf("mysqllock: cleaning up: %w", err)
		}
	}
}

// cleaning is one call of Clean. It uses several connections, one after the other.
type cleaning struct {
	o       CleanUp
	cleaner *schema.Cleaner // nil before the first connection
	done    Cleaned
	told    time.Time // when Progress was called last
	lost    int       // connections lost since the last step that succeeded
}

// over reports whether all rows were looked at, or the limit is reached.
func (c *cleaning) over() bool { return c.done.Done || c.left() == 0 }

// left is how many rows may still be removed.
func (c *cleaning) left() int {
	if c.o.Limit == 0 {
		return 1 << 30
	}
	return max(0, c.o.Limit-c.done.Removed)
}

// turn cleans up on one connection, until the connection's time is over.
func (c *cleaning) turn(ctx context.Context, s *session) error {
	if err := s.info.CleansUp(); err != nil {
		return err
	}
	if c.cleaner == nil {
		c.cleaner = s.table.Cleaner(c.o.Unused)
		c.cleaner.Skips = s.info.SkipLocked
	}
	return s.onDriver(func(conn driver.Conn) error {
		if err := server.Exec(ctx, conn, schema.CleanSetup); err != nil {
			return err
		}
		for began := time.Now(); !c.over() && time.Since(began) < cleanTurn; {
			if err := c.cleaner.Step(ctx, conn, c.left()); err != nil {
				return err
			}
			c.lost = 0
			c.report()
		}
		return nil
	})
}

// report notes how far the cleaning is, and now and then tells Progress.
func (c *cleaning) report() {
	c.done = Cleaned{c.cleaner.Looked, c.cleaner.Removed, c.cleaner.Left, c.cleaner.Done}
	if c.o.Progress != nil && time.Since(c.told) > cleanTell {
		c.o.Progress(c.done)
		c.told = time.Now()
	}
}

// tryAgain reports whether another connection may go on after err, which is so if the
// connection was lost. It pauses before.
func (c *cleaning) tryAgain(ctx context.Context, err error) bool {
	connectionLost := c.cleaner != nil && server.Number(err) == 0 && !errors.Is(err, lockerr.ErrLocked)
	if !connectionLost || c.lost == cleanTries || ctx.Err() != nil {
		return false
	}
	c.lost++
	select {
	case <-time.After(cleanPause):
	case <-ctx.Done():
	}
	return true
}
