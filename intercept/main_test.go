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

func (p *spy) note(ctx context.Context, text string) {
	lock, ours := intercept.Of(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, sent{text, lock, ours, ctx.Err()})
}

func (p *spy) since() (all []sent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all, p.all = p.all, nil
	return all
}

// saw reports whether a lock statement was sent for this step and these keys.
func (p *spy) saw(strategy string, step intercept.Step, keys ...string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.all, func(s sent) bool {
		return s.ours && s.lock.Strategy == strategy && s.lock.Step == step && slices.Equal(s.lock.Keys, keys)
	})
}

func (p *spy) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	for _, s := range p.all {
		fmt.Fprintf(&b, "\n\t%v", s)
	}
	return b.String()
}

func (p *spy) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	p.note(ctx, "BEGIN")
	return p.NullInterceptor.ConnBeginTx(ctx, conn, opts)
}

func (p *spy) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	p.note(ctx, text)
	return p.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (p *spy) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	p.note(ctx, text)
	return p.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (p *spy) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	p.note(ctx, "PREPARE "+text)
	return p.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

func (p *spy) StmtExecContext(ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue) (driver.Result, error) {
	p.note(ctx, text)
	return p.NullInterceptor.StmtExecContext(ctx, stmt, text, args)
}

func (p *spy) StmtQueryContext(ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	p.note(ctx, text)
	return p.NullInterceptor.StmtQueryContext(ctx, stmt, text, args)
}

func (p *spy) StmtClose(ctx context.Context, stmt driver.Stmt) error {
	p.note(ctx, "CLOSE")
	return p.NullInterceptor.StmtClose(ctx, stmt)
}

func (p *spy) TxCommit(ctx context.Context, tx driver.Tx) error {
	p.note(ctx, "COMMIT")
	return p.NullInterceptor.TxCommit(ctx, tx)
}

func (p *spy) TxRollback(ctx context.Context, tx driver.Tx) error {
	p.note(ctx, "ROLLBACK")
	return p.NullInterceptor.TxRollback(ctx, tx)
}
