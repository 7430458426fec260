package unit_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }
