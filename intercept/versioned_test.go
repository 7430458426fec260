package intercept_test

import (
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTheNextVersionIsSeenAsTheStepThatGivesBack: a row lock on a key that others keep optimistically sets it with
// its COMMIT.
func TestTheNextVersionIsSeenAsTheStepThatGivesBack(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		seen := new(spy)
		db := s.open(mysqllock.Config{}, seen)
		dbtest.OK(t, sell(lockctx.With(dbtest.Limited(t), "a key", lockctx.Optimistic()), db))
		for range 2 {
			seen.since()
			dbtest.OK(t, sell(lockctx.With(dbtest.Limited(t), "a key"), db))
			if !seen.saw("row", intercept.End, "a key") {
				t.Errorf("no statement gives the lock back: %v", seen.since())
			}
		}
	})
}
