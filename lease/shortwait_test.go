package lease

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/lockerr"
)

// lockRow has the row of key locked until the transaction ends.
func (s *scratch) lockRow(key string) *sql.Tx {
	s.T.Helper()
	tx, err := s.db.Begin()
	dbtest.OK(s.T, err)
	_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = " + schema.Literal(key) + " FOR UPDATE")
	dbtest.OK(s.T, err)
	return tx
}

// TestShortWaitBehindRowLock: it ends when it is over, and what was given up is not
// granted when the row is free.
func TestShortWaitBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		const wait = 300 * time.Millisecond
		fastest := time.Minute
		for try := 0; try < 3 || try < 10 && fastest > wait+giveUpCalmly/2; try++ {
			before := s.row("k").token
			tx := s.lockRow("k")
			began := time.Now()
			_, err := l.Acquire(dbtest.Limited(t), waiting("k", wait))
			took := time.Since(began)
			dbtest.OK(t, tx.Rollback())
			if !errors.Is(err, lockerr.ErrTimeout) {
				t.Errorf("it ended with %v", err)
			}
			fastest = min(fastest, took)
			next := l.acquire(waiting("k", 20*time.Second))           // behind what may be left of it
			if next.Token() != before+1 && took < wait+giveUpCalmly { // after that the server may not have heard of it
				t.Errorf("it was granted after all: the next token is %d after %d", next.Token(), before)
			}
			dbtest.OK(t, next.Release())
		}
		if fastest > wait+giveUpCalmly/2 {
			t.Errorf("it took %v at least", fastest)
		}
	})
}

// TestGivenUpBehindRowLock: the statement of a caller whose context has ended is ended on
// the server.
func TestGivenUpBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		dbtest.OK(t, l.acquire(request("k")).Release())
		const soonEnough = 600 * time.Millisecond // the server's own limit is a second
		fastest := time.Minute
		for try := 0; try < 2 || try < 10 && fastest > soonEnough; try++ {
			before := s.row("k").token
			tx := s.lockRow("k")
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			failed := make(chan error, 1)
			go func() {
				_, err := l.Acquire(ctx, waiting("k", 20*time.Second))
				failed <- err
			}()
			waits := func() bool { return len(s.threads("INFO LIKE 'INSERT % FOR UPDATE ON %'")) > 0 }
			dbtest.Soon(t, "it waits behind the row lock", waits)
			cancel()
			ended := time.Now()
			if err := <-failed; !errors.Is(err, context.Canceled) {
				t.Errorf("it ended with %v", err)
			}
			dbtest.Soon(t, "nothing of it is on the server", func() bool { return !waits() })
			fastest = min(fastest, time.Since(ended))
			dbtest.OK(t, tx.Rollback())
			next := l.acquire(waiting("k", 20*time.Second))
			if next.Token() != before+1 {
				t.Errorf("it was granted after all: the next token is %d after %d", next.Token(), before)
			}
			dbtest.OK(t, next.Release())
		}
		if fastest > soonEnough {
			t.Errorf("it was on the server for %v at least", fastest)
		}
	})
}
