package unittest

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// This file has what these examples' own tests need, which a service does not: servers.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

func TestOnEachServer(t *testing.T) {
	testshop.Run(t, func(t *testing.T, given *testshop.Shop) {
		if os.Getenv("SHOP_TEST_DSN") == "" {
			t.Setenv("SHOP_TEST_DSN", given.DSN)
		}
		testOnAServer(t)
	})
}
