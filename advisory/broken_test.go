package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
)

// breaking breaks connections under a request for a lock, after it was carried out, as long
// as some are left.
type breaking struct {
	sqlmw.NullInterceptor
	left atomic.Int64
}

func (b *breaking) broken(text string) bool {
	return strings.Contains(text, "GET_LOCK") && b.left.Add(-1) >= 0
}

func (b *breaking) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	if err == nil && b.broken(text) {
		_ = rows.Close()
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return ctx, rows, err
}

func (b *breaking) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	if b.broken(text) {
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return b.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

// TestConnectionBreaksAtAcquire: a request whose connection breaks is sent again, and
// where that does not help either it ends with a sentinel.
func TestConnectionBreaksAtAcquire(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		b := new(breaking)
		k, err := intercept.With(b)(s.Connector(dbtest.NoDatabase))
		dbtest.OK(t, err)
		p := s.process(settings{connect: k.Connect})
		b.left.Store(1)
		dbtest.OK(t, p.acquire("k", 0).Release())
		b.left.Store(1 << 20)
		var e *lockerr.Error
		if _, err := p.Acquire(t.Context(), request("k", 0)); !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Key != "k" {
			t.Errorf("it ended with %v", err)
		}
		b.left.Store(0)
		dbtest.OK(t, p.acquire("k", 0).Release())
	})
}
