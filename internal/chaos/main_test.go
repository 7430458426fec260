package chaos

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// seed is of all that is drawn.
var seed = uint64(now())

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // broken connections are what we are here for
	if text := os.Getenv(ordersVariable); text != "" {
		if err := runClient(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	dbtest.Jobs{"crew": childCrew, "ends": childEnds}.Run()
	if text := os.Getenv("CHAOS_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			fmt.Fprintln(os.Stderr, "CHAOS_SEED:", err)
			os.Exit(1)
		}
	}
	code := tempserver.Tests{M: m}.Run()
	if path := os.Getenv("CHAOS_PAGE"); path != "" && code == 0 {
		if err := page.write(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// longTTL is that of leases which are not to be lost, also on a machine that stands still for
// some seconds.
const longTTL = 15 * time.Second

// scratch is a database of one test.
type scratch struct{ *stock.Shop }

func newScratch(d *dbtest.Database) *scratch { return &scratch{stock.NewShop(d)} }
