package unit_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// long has tests try each setting with each strategy, and search for longer.
var long = dbtest.Long(false, true)

// some reports whether pair i, j of a product is one of every nth, which are all that are tried
// unless tests take long. Each i and each j is in one.
func some(i, j, nth int) bool { return long || (i+j)%nth == 0 }
