package hunt

import (
	"bufio"
	"database/sql"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	dbtest.Jobs{
		"crew":    childCrew,
		"giver":   childGiver,
		"hotkeys": childRush,
		"leases":  childLeases,
		"paused":  func(db *sql.DB, in *bufio.Scanner) { childPaused(db, in, fencedWays) },
		"rivals":  childRivals,
		"turmoil": childTurmoil,
		"unfenced": func(db *sql.DB, in *bufio.Scanner) {
			sabotage.NoFence.Store(true)
			childPaused(db, in, fenceWays)
		},
	}.Run()
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// ttl is that of leases which are not to be lost, also on a machine that stands still for
// some seconds.
const ttl = 15 * time.Second

// scratch is a database of one test.
type scratch struct{ *stock.Shop }

func newScratch(d *dbtest.Database) *scratch { return &scratch{stock.NewShop(d)} }
