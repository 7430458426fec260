//go:build unix

package matrix

import (
	"os"
	"testing"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) {
	server.SetOneByOne(os.Getenv("MATRIX_FORM") == "single")
	_ = mysql.SetLogger(&mysql.NopLogger{}) // lost connections are what it is about
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}
