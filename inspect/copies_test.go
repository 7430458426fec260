package inspect_test

import (
	"context"
	"database/sql/driver"
	"strings"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestMariaDBMakesACopyInBetween: on a slow machine MariaDB makes a new copy of its transactions and locks while an
// Inspector reads them. A transaction that had begun before, and waits in the new copy, is not taken for a holder.
func TestMariaDBMakesACopyInBetween(t *testing.T) {
	onKinds(t, func(t *testing.T, s *scratch) {
		slow, err := intercept.With(slowLists{})(s.Connector(dbtest.As("root")))
		dbtest.OK(t, err)
		i := s.inspector(s.OpenDB(slow, nil))
		hold := s.acquire(s.process("root", "holder"), "k")
		next := s.process("root", "next")
		ctx, cancel := context.WithCancel(t.Context())
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			for n := time.Duration(0); ctx.Err() == nil; n++ {
				_ = mysqllock.Do(ctx, next, "another", func(ctx context.Context) error {
					time.Sleep((20 + n%10*5) * 10 * time.Millisecond)
					return mysqllock.Do(ctx, next, "k", func(context.Context) error { return nil }, lockctx.Wait((30+n%5*5)*10*time.Millisecond))
				})
			}
		}()
		seen := 0
		for range 12 {
			l := find(look(t, i), "row", "k")
			if l == nil {
				continue
			}
			seen += len(l.Holders.List)
			if len(l.Holders.List) > 1 || len(l.Holders.List) == 1 && l.Holders.List[0].Program == "next" {
				t.Fatalf("shown are %+v", l)
			}
		}
		if seen == 0 {
			t.Error("the holder was never seen")
		}
		cancel()
		<-waits
		dbtest.OK(t, hold.Release())
	}, plainMariaDB)
}

// slowLists makes the server pause between its transactions and its locks, for longer than it keeps a copy.
type slowLists struct{ sqlmw.NullInterceptor }

func (slowLists) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	text = strings.ReplaceAll(text, " UNION ALL SELECT 'locks'", " UNION ALL SELECT 'pause', SLEEP(0.15), 1, 1, 1, 1 UNION ALL SELECT 'locks'")
	rows, err := conn.QueryContext(ctx, text, args)
	return ctx, rows, err
}
