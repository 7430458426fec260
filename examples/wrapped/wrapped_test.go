package wrapped

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// TestEveryLockHoldsBeneathEveryWrapper: 40 callers come through beneath each wrapper, with 5
// connections and without a limit, in all ways to take a lock.
func TestEveryLockHoldsBeneathEveryWrapper(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, open := range openers {
			for _, params := range []string{"maxConns=5", "lockMaxConns=5"} {
				t.Run(name+", "+params, func(t *testing.T) {
					s := stock.NewShop(s.Beside(t))
					db, err := open(s.DSN(params, "lockWait=1m"))
					dbtest.OK(t, err)
					defer db.Close()
					s.CheckWrapped(t, db)
				})
			}
		}
	})
}
