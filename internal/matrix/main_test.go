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
	form := server.Packet // on all connections that take it, so that a golden file is the same on a near server and on a far one
	if os.Getenv("MATRIX_FORM") == "single" {
		form = server.Single
	}
	server.FixForm(form)
	_ = mysql.SetLogger(&mysql.NopLogger{}) // lost connections are what it is about
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}
