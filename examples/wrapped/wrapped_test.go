package wrapped

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// hiding are those that hide driver.Validator, with the packages that their errors with maxConns name.
var hiding = map[string]string{
	"instrumentedsql": "github.com/luna-duclos/instrumentedsql",
	"nhat otelsql":    "go.nhat.io/otelsql",
	"sqldb-logger":    "github.com/simukti/sqldb-logger",

	"sqldb-logger, as its README has it": "github.com/simukti/sqldb-logger",
}

// TestEveryLockHoldsBeneathEveryWrapper: 40 callers come through beneath each wrapper, with 5
// connections, if it passes driver.Validator on, and without a limit, in all ways to take a lock.
func TestEveryLockHoldsBeneathEveryWrapper(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, open := range openers {
			for _, bounded := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, with maxConns: %v", name, bounded), func(t *testing.T) {
					s := stock.NewShop(s.Beside(t))
					dsn := s.DSN("lockWait=1m")
					if bounded {
						dsn = s.LimitedDSN(t, 7, "lockWait=1m")
					}
					db, err := open(dsn)
					dbtest.OK(t, err)
					defer db.Close()
					if wrapper := hiding[name]; bounded && wrapper != "" {
						stock.CheckHidden(t, db, wrapper)
						return
					}
					s.CheckWrapped(t, db)
				})
			}
		}
	})
}
