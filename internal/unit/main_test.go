package unit_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// long has tests try each setting with each strategy, and hunt for longer: "make units".
var long = os.Getenv("UNITS") == "long"

// some reports whether pair i, j of a product is one of every nth, which are all that are tried
// unless tests take long. Each i and each j is in one.
func some(i, j, nth int) bool { return long || (i+j)%nth == 0 }
