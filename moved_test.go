package mysqllock_test

import (
	"database/sql"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestBreaksWhileAsked: a connection that breaks while the server is asked what it is
// is replaced, as often as database/sql does.
func TestBreaksWhileAsked(t *testing.T) {
	for _, breaks := range []int{2, 3} {
		fake := newFake().mysqlAnswers()
		var asked atomic.Int32
		answer := fake.answer
		fake.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if strings.HasPrefix(text, "SELECT VERSION()") && int(asked.Add(1)) <= breaks {
				return fakeReply{}, mysql.ErrInvalidConn
			}
			return answer(c, text)
		}
		k, err := mysqllock.Wrap(fakeConnector{fake}, mysqllock.Config{Schema: "manual"})
		dbtest.OK(t, err)
		db := sql.OpenDB(k)
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 1")
		if (err == nil) != (breaks < 3) || asked.Load() != 3 {
			t.Errorf("after %d connections have broken, and %d questions: %v", breaks, asked.Load(), err)
		}
		dbtest.OK(t, db.Close())
	}
}
