package intercept_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ngrok/sqlmw"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// scratch is a database of one test.
type scratch struct{ *dbtest.Database }

func newScratch(d *dbtest.Database) *scratch { return &scratch{d} }

// open opens a handle that interceptors see, with a table "shop".
func (s *scratch) open(cfg mysqllock.Config, interceptors ...sqlmw.Interceptor) *sql.DB {
	s.T.Helper()
	cfg.Base = intercept.With(interceptors...)
	db := s.OpenDB(mysqllock.NewConnector(s.Config(), cfg))
	dbtest.Exec(s.T, db, "CREATE TABLE IF NOT EXISTS shop (id INT PRIMARY KEY, stock INT NOT NULL) /* app */")
	dbtest.Exec(s.T, db, "REPLACE INTO shop VALUES (1, 10) /* app */")
	return db
}

// sent is one statement that an interceptor has seen.
type sent struct {
	text string
	lock intercept.Lock
	ours bool
	err  error // of the context
}

func (s sent) String() string {
	if !s.ours {
		return "application: " + s.text
	}
	return fmt.Sprintf("%s %s %q: %s", s.lock.Strategy, s.lock.Step, s.lock.Keys, s.text)
}

// spy notes all statements.
type spy struct {
	sqlmw.NullInterceptor
	mu  sync.Mutex
	all []sent
}

func (s *spy) note(ctx context.Context, text string) {
	lock, ours := intercept.Of(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, sent{text, lock, ours, ctx.Err()})
}

func (s *spy) since() (all []sent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, s.all = s.all, nil
	return all
}

// saw reports whether a lock statement was sent for this step and these keys.
func (s *spy) saw(strategy string, step intercept.Step, keys ...string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.all, func(one sent) bool {
		return one.ours && one.lock.Strategy == strategy && one.lock.Step == step && slices.Equal(one.lock.Keys, keys)
	})
}

func (s *spy) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, one := range s.all {
		fmt.Fprintf(&b, "\n\t%v", one)
	}
	return b.String()
}

func (s *spy) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	s.note(ctx, "BEGIN")
	return s.NullInterceptor.ConnBeginTx(ctx, conn, opts)
}

func (s *spy) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	s.note(ctx, text)
	return s.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (s *spy) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	s.note(ctx, text)
	return s.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (s *spy) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	s.note(ctx, "PREPARE "+text)
	return s.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

func (s *spy) StmtExecContext(ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue) (driver.Result, error) {
	s.note(ctx, text)
	return s.NullInterceptor.StmtExecContext(ctx, stmt, text, args)
}

func (s *spy) StmtQueryContext(ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	s.note(ctx, text)
	return s.NullInterceptor.StmtQueryContext(ctx, stmt, text, args)
}

func (s *spy) StmtClose(ctx context.Context, stmt driver.Stmt) error {
	s.note(ctx, "CLOSE")
	return s.NullInterceptor.StmtClose(ctx, stmt)
}

func (s *spy) TxCommit(ctx context.Context, tx driver.Tx) error {
	s.note(ctx, "COMMIT")
	return s.NullInterceptor.TxCommit(ctx, tx)
}

func (s *spy) TxRollback(ctx context.Context, tx driver.Tx) error {
	s.note(ctx, "ROLLBACK")
	return s.NullInterceptor.TxRollback(ctx, tx)
}
