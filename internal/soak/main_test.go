package soak

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(planEnv); text != "" {
		os.Exit(work(text))
	}
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}
