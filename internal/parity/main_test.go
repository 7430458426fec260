//go:build unix

package parity

import (
	"testing"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // lost connections are what it is about
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}
